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
}
