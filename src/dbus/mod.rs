//! The service on D-Bus: a mirror of the Snapshot, and requests handed to the daemon. It decides nothing.
//!
//! ```text
//! /io/yunion/Mps1                        org.freedesktop.DBus.ObjectManager
//! /io/yunion/Mps1/Manager                io.yunion.Mps1.Manager, io.yunion.Mps1.Control
//! /io/yunion/Mps1/gpus/GPU_76aef7ff_...  io.yunion.Mps1.Gpu
//! /io/yunion/Mps1/devices/_00_06_0_1     io.yunion.Mps1.Device
//! ```
//!
//! Who may call what is the bus policy's business (`config/io.yunion.Mps1.conf`); what the members mean is written in
//! `config/io.yunion.Mps1.*.xml`, one file per interface.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};
use zbus::connection::Builder;
use zbus::fdo::{DBusProxy, Properties, RequestNameFlags};
use zbus::message::{Header, Message};
use zbus::names::{ErrorName, InterfaceName};
use zbus::object_server::{Interface, SignalEmitter};
use zbus::{Address, Connection, DBusError};

use crate::publish::snapshot::Snapshot;
use crate::tenants::clients::ClientView;

mod answers;
mod callers;
mod control;
mod gate;
mod manager;
pub(crate) mod presence;
pub(crate) mod proxy;
pub(crate) mod rows;
mod wire;

use answers::{Objects, Present};
use control::Control;
use gate::Gate;
use manager::Manager;
use rows::{Device, Gpu, Object, Row, Service, clean};

/// The name on the system bus.
pub(crate) const NAME: &str = "io.yunion.Mps1";
const ROOT: &str = "/io/yunion/Mps1";
const MANAGER: &str = "/io/yunion/Mps1/Manager";

/// The error that a caller gets instead of an answer: a name, which is `io.yunion.Mps1.Error.<variant>` unless the
/// variant says otherwise, and a text for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestError {
    /// No plan exists yet; ask again.
    NotReady(String),
    /// No such slice or GPU.
    NoSuchDevice(String),
    /// No such client of a slice.
    NoSuchClient(String),
    /// The configuration was refused, and the one before stays in force.
    InvalidConfig(String),
    /// Something else has to end first.
    Busy(String),
    /// The caller may not do this: `org.freedesktop.DBus.Error.AccessDenied`, as the bus itself says it.
    AccessDenied(String),
    /// Anything else.
    Failed(String),
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

// By hand, since one of the names has another prefix.
impl DBusError for RequestError {
    fn create_reply(&self, call: &Header<'_>) -> zbus::Result<Message> {
        Message::error(call, self.name()).build(&self.text())
    }

    fn name(&self) -> ErrorName<'_> {
        ErrorName::from_static_str_unchecked(match self {
            Self::NotReady(_) => "io.yunion.Mps1.Error.NotReady",
            Self::NoSuchDevice(_) => "io.yunion.Mps1.Error.NoSuchDevice",
            Self::NoSuchClient(_) => "io.yunion.Mps1.Error.NoSuchClient",
            Self::InvalidConfig(_) => "io.yunion.Mps1.Error.InvalidConfig",
            Self::Busy(_) => "io.yunion.Mps1.Error.Busy",
            Self::AccessDenied(_) => "org.freedesktop.DBus.Error.AccessDenied",
            Self::Failed(_) => "io.yunion.Mps1.Error.Failed",
        })
    }

    fn description(&self) -> Option<&str> {
        Some(self.text())
    }
}

impl RequestError {
    fn text(&self) -> &str {
        match self {
            Self::NotReady(text)
            | Self::NoSuchDevice(text)
            | Self::NoSuchClient(text)
            | Self::InvalidConfig(text)
            | Self::Busy(text)
            | Self::AccessDenied(text)
            | Self::Failed(text) => text,
        }
    }

    /// The same with text that the bus can carry.
    fn cleaned(self) -> Self {
        match self {
            Self::NotReady(text) => Self::NotReady(clean(&text)),
            Self::NoSuchDevice(text) => Self::NoSuchDevice(clean(&text)),
            Self::NoSuchClient(text) => Self::NoSuchClient(clean(&text)),
            Self::InvalidConfig(text) => Self::InvalidConfig(clean(&text)),
            Self::Busy(text) => Self::Busy(clean(&text)),
            Self::AccessDenied(text) => Self::AccessDenied(clean(&text)),
            Self::Failed(text) => Self::Failed(clean(&text)),
        }
    }
}

/// Something that only the daemon can do or find out. A request without an answer for a minute fails.
#[derive(Debug)]
pub enum Request {
    /// Read the configuration again and apply it; the answer is the generation then in force.
    Reload {
        /// Takes the answer.
        reply: oneshot::Sender<Result<u64, RequestError>>,
    },
    /// List the processes that use the GPUs at this moment.
    Clients {
        /// The user who asks, as the bus says.
        uid: u32,
        /// Takes the answer.
        reply: oneshot::Sender<Result<Vec<ClientView>, RequestError>>,
    },
    /// End the GPU work of a process; the answer comes when it is no client any more.
    Terminate {
        /// The process.
        pid: u32,
        /// Takes the answer.
        reply: oneshot::Sender<Result<(), RequestError>>,
    },
    /// End the GPU work of the clients of slices; the answer comes when none is left.
    ReleaseDevices {
        /// The slices, as the caller names them.
        devices: Vec<String>,
        /// Takes the answer.
        reply: oneshot::Sender<Result<(), RequestError>>,
    },
    /// End the GPU work of the clients in a container; the answer comes when none is left.
    ReleaseContainer {
        /// The container's id or the beginning of it, as the caller gives it.
        id: String,
        /// Takes the answer.
        reply: oneshot::Sender<Result<(), RequestError>>,
    },
    /// Carry out the changes of the configuration that wait for clients to leave.
    Apply {
        /// Don't wait for them.
        force: bool,
        /// Takes the answer.
        reply: oneshot::Sender<Result<(), RequestError>>,
    },
    /// Replace the server of a GPU.
    RestartServer {
        /// The GPU, as the caller names it.
        gpu: String,
        /// Takes the answer.
        reply: oneshot::Sender<Result<(), RequestError>>,
    },
}

/// The service's connection to the bus, with everything that it serves there.
#[derive(Debug)]
pub struct Bus {
    connection: Connection,
    told: Told,
}

/// Everything that clients have been told, so that they are told of differences only.
#[derive(Debug, Default)]
struct Told {
    service: Service,
    gpus: BTreeMap<String, Gpu>,
    devices: BTreeMap<String, Device>,
}

impl Bus {
    /// Joins the system bus (`DBUS_SYSTEM_BUS_ADDRESS`, where that is set) and serves there what `snapshot` holds.
    /// Every object is in place before the name is asked for, so that nobody who sees the name misses one.
    ///
    /// # Errors
    /// The bus can't be reached, its policy doesn't let this user own the name, or (`NameTaken`) another process owns
    /// it already; the log then says which.
    pub async fn connect(
        snapshot: watch::Receiver<Arc<Snapshot>>,
        requests: mpsc::Sender<Request>,
    ) -> Result<Self, zbus::Error> {
        Self::connect_to(Address::system()?, snapshot, requests).await
    }

    /// [`Bus::connect`] on the bus at `address`.
    ///
    /// # Errors
    /// As for [`Bus::connect`].
    pub async fn connect_to(
        address: Address,
        snapshot: watch::Receiver<Arc<Snapshot>>,
        requests: mpsc::Sender<Request>,
    ) -> Result<Self, zbus::Error> {
        let first = Arc::clone(&snapshot.borrow());
        let present = Present::new(snapshot);
        let (gate, socket) = Gate::open(&address).await?;
        let connection = Builder::socket(socket)
            .serve_at(ROOT, Objects::new(present.clone()))
            .serve_at(MANAGER, Manager::new(present, requests.clone(), Arc::clone(&gate)))
            .serve_at(MANAGER, Control::new(requests, gate))
            .build()
            .await?;
        let told = Told { service: Service::of(&first), ..Told::default() };
        let mut bus = Self { connection, told };
        bus.mirror(&first).await?;
        match bus.connection.request_name_with_flags(NAME, RequestNameFlags::DO_NOT_QUEUE).await {
            Ok(_) => Ok(bus),
            Err(zbus::Error::NameTaken) => {
                let owner = bus.owner().await;
                tracing::error!("{NAME} is taken on the bus by {owner}; is another daemon running?");
                Err(zbus::Error::NameTaken)
            }
            Err(e) => Err(e),
        }
    }

    /// Tells the bus what is different in `new`: objects that came or went, properties that changed, and
    /// `DevicesChanged` if the generation grew. To be called after `new` was put into the watch that
    /// [`Bus::connect`] was given.
    ///
    /// A bus that can't be told is one that has gone, which [`Bus::closed`] reports.
    pub async fn publish(&mut self, new: Arc<Snapshot>) {
        if let Err(e) = self.mirror(&new).await {
            tracing::debug!("the bus was not told of generation {}: {e}", new.generation);
        }
    }

    /// Tells whoever listens that a GPU's server met a fatal error, and which clients it hit. None of them need be the
    /// culprit.
    pub async fn client_fault(&self, gpu_uuid: &str, pids: &[u32], reason: &str) {
        let emitter = SignalEmitter::from_parts(self.connection.clone(), manager_path());
        let (gpu_uuid, reason) = (clean(gpu_uuid), clean(reason));
        if let Err(e) = Manager::client_fault(&emitter, &gpu_uuid, pids, &reason).await {
            tracing::debug!("the bus was not told of a fault on {gpu_uuid}: {e}");
        }
    }

    /// Resolves when the connection is gone: the bus was restarted, or has thrown us out. Nothing is served after that;
    /// [`Bus::connect`] again.
    pub async fn closed(&self) {
        self.connection.closed().await;
    }

    async fn mirror(&mut self, new: &Snapshot) -> Result<(), zbus::Error> {
        let gpus = new.gpus.iter().flatten().map(Gpu::of);
        mirror_objects(&self.connection, &mut self.told.gpus, gpus).await?;
        let devices = new.slices().map(|(gpu, slice)| Device::of(gpu, slice));
        mirror_objects(&self.connection, &mut self.told.devices, devices).await?;

        let emitter = SignalEmitter::from_parts(self.connection.clone(), manager_path());
        let service = Service::of(new);
        tell_changes(&emitter, Manager::name(), &self.told.service, &service).await?;
        let grown = service.generation > self.told.service.generation;
        self.told.service = service;
        if grown {
            Manager::devices_changed(&emitter, new.generation).await?;
        }
        Ok(())
    }

    /// The owner of the name, in words.
    async fn owner(&self) -> String {
        let pid = async {
            DBusProxy::new(&self.connection).await?.get_connection_unix_process_id(NAME.try_into()?).await
        };
        match pid.await {
            Ok(pid) => format!("process {pid}"),
            Err(_) => "another process".to_owned(),
        }
    }
}

fn manager_path() -> zbus::ObjectPath<'static> {
    zbus::ObjectPath::from_static_str_unchecked(MANAGER)
}

/// Makes the objects of one kind show these rows. The object server announces objects that come and go.
async fn mirror_objects<R: Object>(
    connection: &Connection,
    told: &mut BTreeMap<String, R>,
    rows: impl Iterator<Item = R>,
) -> Result<(), zbus::Error> {
    let server = connection.object_server();
    let wanted: BTreeMap<String, R> = rows.map(|row| (row.path(), row)).collect();
    let gone: Vec<String> = told.keys().filter(|path| !wanted.contains_key(*path)).cloned().collect();
    for path in gone {
        server.remove::<R, _>(path.as_str()).await?;
        told.remove(&path);
    }
    for (path, new) in wanted {
        match told.get(&path) {
            None => {
                server.at(path.as_str(), new.clone()).await?;
            }
            Some(old) => {
                let object = server.interface::<_, R>(path.as_str()).await?;
                *object.get_mut().await = new.clone();
                tell_changes(object.signal_emitter(), R::name(), old, &new).await?;
            }
        }
        told.insert(path, new);
    }
    Ok(())
}

/// Emits `PropertiesChanged` once, with all that differs; a value that is no longer known is invalidated.
async fn tell_changes(
    emitter: &SignalEmitter<'_>,
    interface: InterfaceName<'_>,
    old: &impl Row,
    new: &impl Row,
) -> Result<(), zbus::Error> {
    let (old, new) = (old.dict(), new.dict());
    let lost = old.keys().filter(|key| !new.contains_key(*key));
    let lost: Vec<String> = lost.map(|key| rows::property_name(key)).collect();
    let differs = new.into_iter().filter(|(key, value)| old.get(key) != Some(value));
    let changed: Vec<_> = differs.map(|(key, value)| (rows::property_name(key), value)).collect();
    if changed.is_empty() && lost.is_empty() {
        return Ok(());
    }
    let mut values = HashMap::with_capacity(changed.len());
    for (name, value) in &changed {
        values.insert(name.as_str(), value.try_clone()?);
    }
    let lost: Vec<&str> = lost.iter().map(String::as_str).collect();
    Properties::properties_changed(emitter, interface, values, Cow::Owned(lost)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_their_names_and_no_nul() {
        let error = RequestError::InvalidConfig("line 3: \0".to_owned()).cleaned();
        assert_eq!(error.name().as_str(), "io.yunion.Mps1.Error.InvalidConfig");
        assert_eq!(error.description(), Some("line 3: \u{fffd}"));
        let denied = RequestError::AccessDenied("no".to_owned()).cleaned();
        assert_eq!(denied.name().as_str(), "org.freedesktop.DBus.Error.AccessDenied");
    }
}
