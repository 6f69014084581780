//! `io.yunion.Mps1.Control`, documented in `config/io.yunion.Mps1.Control.xml`. The bus policy lets root alone call it, and
//! so does this, should the policy be another.

use std::sync::Arc;

use tokio::sync::mpsc;
use zbus::interface;
use zbus::message::Header;

use super::callers::is_privileged;
use super::gate::Gate;
use super::request::{NAME_MAX, Reply, Request, RequestError, Result, ask, bounded_name, bounded_names};

/// The methods that change something.
pub(super) struct ControlInterface {
    requests: mpsc::Sender<Request>,
    gate: Arc<Gate>,
}

impl ControlInterface {
    pub(super) fn new(requests: mpsc::Sender<Request>, gate: Arc<Gate>) -> Self {
        Self { requests, gate }
    }

    /// Hands a request of root's to the daemon's loop and waits for the answer.
    async fn ask<T>(&self, call: &Header<'_>, request: impl FnOnce(Reply<T>) -> Request) -> Result<T> {
        let uid = self.gate.request(call)?;
        if !is_privileged(uid) {
            return Err(RequestError::AccessDenied(format!("only root may do this, not user {uid}")));
        }
        ask(&self.requests, request).await
    }
}

#[interface(name = "io.yunion.Mps1.Control", introspection_docs = false)]
impl ControlInterface {
    #[zbus(out_args("generation"))]
    async fn reload(&self, #[zbus(header)] call: Header<'_>) -> Result<u64> {
        self.ask(&call, Request::Reload).await
    }

    async fn apply(&self, force: bool, #[zbus(header)] call: Header<'_>) -> Result<()> {
        self.ask(&call, |reply| Request::Apply(force, reply)).await
    }

    async fn restart_server(&self, gpu: String, #[zbus(header)] call: Header<'_>) -> Result<()> {
        bounded_name(&gpu)?;
        self.ask(&call, |reply| Request::RestartServer(gpu, reply)).await
    }

    async fn release_devices(&self, devices: Vec<String>, #[zbus(header)] call: Header<'_>) -> Result<()> {
        bounded_names(&devices)?;
        self.ask(&call, |reply| Request::ReleaseDevices(devices, reply)).await
    }

    async fn drain(&self, names: Vec<String>, #[zbus(header)] call: Header<'_>) -> Result<()> {
        bounded_names(&names)?;
        self.ask(&call, |reply| Request::Drain(names, reply)).await
    }

    async fn undrain(&self, names: Vec<String>, #[zbus(header)] call: Header<'_>) -> Result<()> {
        bounded_names(&names)?;
        self.ask(&call, |reply| Request::Undrain(names, reply)).await
    }

    async fn release_container(&self, id: String, #[zbus(header)] call: Header<'_>) -> Result<()> {
        if id.len() > NAME_MAX {
            let length = id.len();
            return Err(RequestError::Failed(format!(
                "a container id has at most {NAME_MAX} digits, and this has {length}"
            )));
        }
        self.ask(&call, |reply| Request::ReleaseContainer(id, reply)).await
    }
}
