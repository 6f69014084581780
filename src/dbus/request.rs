//! Requests that only the main loop can carry out, their answers, and the limits for the names in them.

use common::bus::error::RequestError;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mps_core::terms::SliceId;
use tokio::sync::{mpsc, oneshot};
use zbus::Connection;
use zbus::fdo::DBusProxy;
use zbus::message::Header;

use common::bus::proxy::{ContainerStop, GroupOf};
use common::host::control_groups;
use common::published::client::ClientView;

/// The longest wait for the main loop's answer to a request. Callers stop waiting earlier, so this deadline ends only requests
/// for which no caller waits any more.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);

pub(super) type Result<T> = std::result::Result<T, RequestError>;

pub type Reply<T> = oneshot::Sender<std::result::Result<T, RequestError>>;

#[derive(Debug)]
pub enum Request {
    /// Read the configuration again and put it in force. The answer is the generation of the Snapshot after the reload.
    Reload(Reply<u64>),
    Clients(Reply<Vec<ClientView>>),
    /// Find the present clients of all GPUs. The answer comes when the Snapshot has these clients.
    LookAtClients(Reply<()>),
    /// End the GPU work of the process with this PID. With a user id, the request is refused if the process belongs to another
    /// user. The answer comes when the process is no client any more.
    Terminate(u32, Option<u32>, Reply<()>),
    /// End the GPU work of all clients of the named slices. The answer comes when their work has ended.
    ReleaseDevices(Vec<String>, Reply<()>),
    /// End the GPU work of all clients in a container, which is named by its id or by the beginning of its id. The answer comes
    /// when their work has ended.
    ReleaseContainer(String, Reply<()>),
    /// End the GPU work of the clients that a signal to a container may end.
    ReleaseGroup(ContainerStop, Reply<()>),
    /// Change the control daemons that do not follow the configuration yet, since they have clients. With false, only control
    /// daemons without clients are changed. With true, all are changed at once, which ends the clients.
    Apply(bool, Reply<()>),
    /// Drain the named slices and GPUs. Without names, drain all slices.
    Drain(Vec<String>, Reply<()>),
    /// End the drain of the named slices and GPUs. Without names, end the drain of all slices.
    Undrain(Vec<String>, Reply<()>),
    /// Bind a control group to slices. The answer names the slices.
    Bind(WantedBinding, Reply<Vec<String>>),
    Unbind(GroupOf, Reply<()>),
    RestartServer(String, Reply<()>),
}

#[derive(Debug, PartialEq, Eq)]
pub enum WantedSlices {
    /// All named slices. The name of a GPU stands for one of its free slices.
    All(Vec<String>),
    /// The first free slice of these candidates. If a candidate is full, the number beside it is its limit of clients, which
    /// the error for the caller names. None: the candidate has room for a client.
    OneOf(Vec<(SliceId, Option<u32>)>),
}

#[derive(Debug, PartialEq, Eq)]
pub struct WantedBinding {
    pub slices: WantedSlices,
    pub group: GroupOf,
    /// The name of the binding that people see. It may be empty.
    pub label: String,
    pub shares: bool,
}

pub(super) async fn ask<T>(
    requests: &mpsc::Sender<Request>,
    request: impl FnOnce(Reply<T>) -> Request,
) -> Result<T> {
    let (reply, answer) = oneshot::channel();
    let exchange = async {
        requests.send(request(reply)).await.ok()?;
        answer.await.ok()
    };
    match tokio::time::timeout(ANSWER_DEADLINE, exchange).await {
        Ok(Some(answer)) => answer,
        Ok(None) => Err(RequestError::Failed("the service is stopping".to_owned())),
        Err(_) => {
            let seconds = ANSWER_DEADLINE.as_secs();
            Err(RequestError::Failed(format!("the service gave no answer within {seconds} s")))
        }
    }
}

pub(super) const NAME_MAX: usize = 64;

/// The most devices that a caller may name at once. A host has some hundreds.
const NAMES_MAX: usize = 1024;

pub(super) fn bounded_name(name: &str) -> Result<()> {
    if name.len() <= NAME_MAX {
        return Ok(());
    }
    let length = name.len();
    Err(RequestError::NoSuchDevice(format!(
        "a name has at most {NAME_MAX} bytes, and this name has {length}"
    )))
}

pub(super) fn bounded_names(names: &[String]) -> Result<()> {
    if names.len() > NAMES_MAX {
        let count = names.len();
        return Err(RequestError::Failed(format!(
            "the request names {count} slices, but at most {NAMES_MAX} are allowed"
        )));
    }
    names.iter().try_for_each(|name| bounded_name(name))
}

/// The service remembers the users of at most this many connections. The bus allows each user 256 connections.
const CALLERS: usize = 1024;

/// The users of the connections that have called the service, by the names of the connections. The user of a connection never
/// changes, and the bus never uses a name again. So the bus is asked once for each connection.
#[derive(Debug, Clone, Default)]
pub(super) struct Callers(Arc<Mutex<BTreeMap<String, u32>>>);

impl Callers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The path of the control group of the calling process. None if the process has ended, or if its control group is not
    /// known.
    pub(super) async fn control_group_of(
        &self,
        connection: &Connection,
        call: &Header<'_>,
    ) -> Option<String> {
        let sender = call.sender()?.to_owned();
        let bus = DBusProxy::new(connection).await.ok()?;
        let pid = bus.get_connection_unix_process_id(sender.into()).await.ok()?;
        control_groups::path_of(pid).ok()
    }

    /// The user id of the caller. None for root. If the service does not run as root, its own user counts as root. The error
    /// says that the bus does not know the caller, which has usually disconnected.
    pub(super) async fn user_behind(
        &self,
        connection: &Connection,
        call: &Header<'_>,
    ) -> Result<Option<u32>> {
        let unknown =
            || RequestError::AccessDenied("D-Bus does not report the user of the caller".to_owned());
        let sender = call.sender().ok_or_else(unknown)?.to_owned();
        let known = self.lock().get(sender.as_str()).copied();
        let uid = if let Some(known) = known {
            known
        } else {
            let name = sender.to_string();
            let asked =
                async { DBusProxy::new(connection).await?.get_connection_unix_user(sender.into()).await };
            let uid = asked.await.map_err(|_| unknown())?;
            let mut all = self.lock();
            if all.len() >= CALLERS {
                all.clear();
            }
            all.insert(name, uid);
            uid
        };
        let is_root = uid == 0 || uid == rustix::process::geteuid().as_raw();
        Ok((!is_root).then_some(uid))
    }
}
