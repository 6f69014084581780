//! `io.yunion.Mps1.Manager`, documented in `config/io.yunion.Mps1.Manager.xml`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use zbus::fdo::DBusProxy;
use zbus::message::Header;
use zbus::object_server::SignalEmitter;
use zbus::{Connection, interface};

use super::dict::{self, Dict, value};
use super::{Request, RequestError};
use crate::container::{ContainerError, container_config};
use crate::state::{GpuView, Named, Snapshot};

/// What a request may take. Longer than any caller's own patience, so that it only ends what nobody waits for.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);

/// The entry point of everything that may be read.
pub(super) struct Manager {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    requests: mpsc::Sender<Request>,
}

impl Manager {
    pub(super) fn new(snapshot: watch::Receiver<Arc<Snapshot>>, requests: mpsc::Sender<Request>) -> Self {
        Self { snapshot, requests }
    }

    fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.snapshot.borrow())
    }

    fn property<T>(&self, key: &str) -> Result<T, RequestError>
    where
        T: TryFrom<zbus::Variant<'static>, Error = zbus::Error>,
    {
        value(&dict::manager(&self.snapshot()), key)
    }
}

/// The GPUs, once they are known. Before that an empty list would be a lie that makes the platform delete devices.
fn known(snapshot: &Snapshot) -> Result<&[GpuView], RequestError> {
    let not_yet = || RequestError::NotReady(ContainerError::NotReady.to_string());
    snapshot.gpus.as_deref().ok_or_else(not_yet)
}

/// Hands a request to the daemon's loop and waits for the answer.
pub(super) async fn ask<T>(
    requests: &mpsc::Sender<Request>,
    request: impl FnOnce(oneshot::Sender<Result<T, RequestError>>) -> Request,
) -> Result<T, RequestError> {
    let (reply, answer) = oneshot::channel();
    let exchange = async {
        requests.send(request(reply)).await.ok()?;
        answer.await.ok()
    };
    match tokio::time::timeout(ANSWER_DEADLINE, exchange).await {
        Ok(Some(answer)) => answer.map_err(RequestError::cleaned),
        Ok(None) => Err(RequestError::Failed("the daemon is stopping".to_owned())),
        Err(_) => {
            let seconds = ANSWER_DEADLINE.as_secs();
            Err(RequestError::Failed(format!("the daemon gave no answer within {seconds} s")))
        }
    }
}

/// The user who sent a message. The bus knows it from the kernel; nothing that the caller says counts.
async fn caller(header: &Header<'_>, connection: &Connection) -> Result<u32, RequestError> {
    let credentials = async {
        let sender = header.sender().ok_or(zbus::Error::MissingField)?.to_owned();
        let bus = DBusProxy::new(connection).await?;
        bus.get_connection_credentials(sender.into()).await.map_err(zbus::Error::from)
    };
    let uid = match credentials.await {
        Ok(credentials) => credentials.unix_user_id(),
        Err(error) => {
            tracing::debug!("the bus doesn't say who a caller is: {error}");
            None
        }
    };
    uid.ok_or_else(|| RequestError::AccessDenied("the bus doesn't say who you are".to_owned()))
}

impl From<ContainerError> for RequestError {
    fn from(error: ContainerError) -> Self {
        let text = dict::clean(&error.to_string());
        match error {
            ContainerError::NotReady => Self::NotReady(text),
            ContainerError::NoSuchDevice(_) => Self::NoSuchDevice(text),
            ContainerError::NoneNamed
            | ContainerError::NoUuid { .. }
            | ContainerError::SeveralControlDaemons { .. } => Self::Failed(text),
        }
    }
}

#[interface(name = "io.yunion.Mps1.Manager", introspection_docs = false)]
impl Manager {
    #[zbus(out_args("devices"))]
    fn list_devices(&self) -> Result<Vec<Dict>, RequestError> {
        let snapshot = self.snapshot();
        known(&snapshot)?;
        Ok(snapshot.slices().map(|(gpu, ordinal)| dict::device(gpu, ordinal)).collect())
    }

    #[zbus(out_args("gpus"))]
    fn list_gpus(&self) -> Result<Vec<Dict>, RequestError> {
        Ok(known(&self.snapshot())?.iter().map(dict::gpu).collect())
    }

    #[zbus(out_args("device"))]
    fn get_device(&self, name: &str) -> Result<Dict, RequestError> {
        let snapshot = self.snapshot();
        known(&snapshot)?;
        match snapshot.find(name) {
            Some(Named::Gpu(gpu)) => Ok(dict::gpu(gpu)),
            Some(Named::Slice(gpu, ordinal)) => Ok(dict::device(gpu, ordinal)),
            None => Err(ContainerError::NoSuchDevice(name.to_owned()).into()),
        }
    }

    #[zbus(out_args("environment", "mounts", "gpus"))]
    #[expect(
        clippy::type_complexity,
        reason = "under another name zbus would not see that it is three answers"
    )]
    fn get_container_config(
        &self,
        devices: Vec<String>,
    ) -> Result<(Vec<(String, String)>, Vec<(String, String, bool)>, Vec<String>), RequestError> {
        let config = container_config(&self.snapshot(), devices)?;
        let environment =
            config.environment.into_iter().map(|(name, value)| (name.to_owned(), dict::clean(&value)));
        let mounts = config.mounts.into_iter().map(|mount| {
            let text = |path: std::path::PathBuf| dict::clean(&path.to_string_lossy());
            (text(mount.host), text(mount.container), mount.read_only)
        });
        Ok((environment.collect(), mounts.collect(), config.gpus))
    }

    #[zbus(out_args("clients"))]
    async fn list_clients(&self) -> Result<Vec<Dict>, RequestError> {
        known(&self.snapshot())?;
        let clients = ask(&self.requests, |reply| Request::Clients { reply }).await?;
        Ok(clients.iter().map(dict::client).collect())
    }

    async fn terminate_client(
        &self,
        pid: u32,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<(), RequestError> {
        let uid = caller(&header, connection).await?;
        ask(&self.requests, |reply| Request::Terminate { pid, uid, reply }).await
    }

    #[zbus(out_args("control_daemons"))]
    fn list_control_daemons(&self) -> Vec<Dict> {
        let snapshot = self.snapshot();
        snapshot.control_daemons.iter().map(|daemon| dict::control_daemon(daemon, &snapshot)).collect()
    }

    #[zbus(out_args("events"))]
    fn list_events(&self) -> Vec<Dict> {
        self.snapshot().events.iter().map(dict::event).collect()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn version(&self) -> Result<String, RequestError> {
        self.property("version")
    }

    #[zbus(property)]
    fn state(&self) -> Result<String, RequestError> {
        self.property("state")
    }

    #[zbus(property)]
    fn state_reason(&self) -> Result<String, RequestError> {
        self.property("state_reason")
    }

    #[zbus(property)]
    fn generation(&self) -> Result<u64, RequestError> {
        self.property("generation")
    }

    #[zbus(property)]
    fn enabled(&self) -> Result<bool, RequestError> {
        self.property("enabled")
    }

    #[zbus(property)]
    fn pipe_directory(&self) -> Result<String, RequestError> {
        self.property("pipe_directory")
    }

    #[zbus(property)]
    fn log_directory(&self) -> Result<String, RequestError> {
        self.property("log_directory")
    }

    #[zbus(property)]
    fn driver_version(&self) -> Result<String, RequestError> {
        self.property("driver_version")
    }

    #[zbus(signal)]
    pub(super) async fn devices_changed(emitter: &SignalEmitter<'_>, generation: u64) -> zbus::Result<()>;

    #[zbus(signal)]
    pub(super) async fn client_fault(
        emitter: &SignalEmitter<'_>,
        gpu_uuid: &str,
        pids: &[u32],
        reason: &str,
    ) -> zbus::Result<()>;
}
