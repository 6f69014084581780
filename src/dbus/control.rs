//! `io.yunion.Mps1.Control`, documented in `config/io.yunion.Mps1.Control.xml`. The bus policy lets root alone call it.

use tokio::sync::mpsc;
use zbus::interface;

use super::manager::ask;
use super::{Request, RequestError};

/// What changes something.
pub(super) struct Control {
    requests: mpsc::Sender<Request>,
}

impl Control {
    pub(super) fn new(requests: mpsc::Sender<Request>) -> Self {
        Self { requests }
    }
}

#[interface(name = "io.yunion.Mps1.Control", introspection_docs = false)]
impl Control {
    #[zbus(out_args("generation"))]
    async fn reload(&self) -> Result<u64, RequestError> {
        ask(&self.requests, |reply| Request::Reload { reply }).await
    }
    async fn apply(&self, force: bool) -> Result<(), RequestError> {
        ask(&self.requests, |reply| Request::Apply { force, reply }).await
    }

    async fn restart_server(&self, gpu: String) -> Result<(), RequestError> {
        ask(&self.requests, |reply| Request::RestartServer { gpu, reply }).await
    }

    async fn release_devices(&self, devices: Vec<String>) -> Result<(), RequestError> {
        ask(&self.requests, |reply| Request::ReleaseDevices { devices, reply }).await
    }

    async fn release_container(&self, id: String) -> Result<(), RequestError> {
        ask(&self.requests, |reply| Request::ReleaseContainer { id, reply }).await
    }
}
