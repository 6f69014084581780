//! `io.yunion.Mps1.Control`, documented in `config/io.yunion.Mps1.Control.xml`. The bus policy lets root alone call it, and
//! so does this, should the policy be another.

use std::sync::Arc;

use tokio::sync::mpsc;
use zbus::interface;
use zbus::message::Header;

use super::callers::is_privileged;
use super::gate::Gate;
use super::request::{NAME_MAX, Reply, Request, RequestError, ask, bounded_name, bounded_names};

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
    async fn ask<T>(
        &self,
        header: &Header<'_>,
        request: impl FnOnce(Reply<T>) -> Request,
    ) -> Result<T, RequestError> {
        let uid = self.gate.request(header)?.uid;
        if !is_privileged(uid) {
            return Err(RequestError::AccessDenied(format!("only root may do this, not user {uid}")));
        }
        ask(&self.requests, request).await
    }
}

#[interface(name = "io.yunion.Mps1.Control", introspection_docs = false)]
impl ControlInterface {
    #[zbus(out_args("generation"))]
    async fn reload(&self, #[zbus(header)] header: Header<'_>) -> Result<u64, RequestError> {
        self.ask(&header, Request::Reload).await
    }

    async fn apply(&self, force: bool, #[zbus(header)] header: Header<'_>) -> Result<(), RequestError> {
        self.ask(&header, |reply| Request::Apply(force, reply)).await
    }

    async fn restart_server(
        &self,
        gpu: String,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(), RequestError> {
        bounded_name(&gpu)?;
        self.ask(&header, |reply| Request::RestartServer(gpu, reply)).await
    }

    async fn release_devices(
        &self,
        devices: Vec<String>,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(), RequestError> {
        bounded_names(&devices)?;
        self.ask(&header, |reply| Request::ReleaseDevices(devices, reply)).await
    }

    async fn drain(
        &self,
        names: Vec<String>,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(), RequestError> {
        bounded_names(&names)?;
        self.ask(&header, |reply| Request::Drain(names, reply)).await
    }

    async fn undrain(
        &self,
        names: Vec<String>,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(), RequestError> {
        bounded_names(&names)?;
        self.ask(&header, |reply| Request::Undrain(names, reply)).await
    }

    async fn release_container(
        &self,
        id: String,
        #[zbus(header)] header: Header<'_>,
    ) -> Result<(), RequestError> {
        if id.len() > NAME_MAX {
            let length = id.len();
            return Err(RequestError::Failed(format!(
                "a container id has at most {NAME_MAX} digits, and this has {length}"
            )));
        }
        self.ask(&header, |reply| Request::ReleaseContainer(id, reply)).await
    }
}
