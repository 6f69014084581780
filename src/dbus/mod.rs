//! The service on D-Bus: it shows the Snapshot, and passes requests to the daemon. This module decides nothing.
//!
//! ```text
//! /io/yunion/Mps1                        org.freedesktop.DBus.ObjectManager
//! /io/yunion/Mps1/Manager                io.yunion.Mps1.Manager, io.yunion.Mps1.Control
//! /io/yunion/Mps1/gpus/GPU_76aef7ff_...  io.yunion.Mps1.Gpu
//! /io/yunion/Mps1/devices/_00_06_0_1     io.yunion.Mps1.Device
//! ```
//!
//! The bus policy (`config/io.yunion.Mps1.conf`) decides who may call what. `config/io.yunion.Mps1.*.xml` describe the members,
//! one file per interface.

use common::bus::{MANAGER, NAME, ROOT};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use zbus::connection::Builder;
use zbus::fdo::{DBusProxy, Properties, RequestNameFlags};
use zbus::names::InterfaceName;
use zbus::object_server::{Interface, SignalEmitter};
use zbus::{Address, Connection, ObjectPath};

use common::published::snapshot::{GpuView, Snapshot, slices_of};

mod binding;
mod control;
mod manager;
mod objects;
pub(crate) mod presence;
mod request;
mod slices;

use common::bus::rows::{Object, Row, Service, Slice, WholeGpu};
use common::text::clean;
use control::ControlInterface;
use manager::Manager;
use objects::ObjectManager;
use request::Callers;
pub(crate) use request::WantedSlices;
pub use request::{Reply, Request, WantedBinding};
use slices::SliceDesk;

#[derive(Debug)]
pub struct BusConnection {
    connection: Connection,
    /// The Snapshot that was published last. Signals are sent only for differences from this Snapshot.
    told: Arc<Snapshot>,
}

impl BusConnection {
    /// Connects to the system bus (`DBUS_SYSTEM_BUS_ADDRESS`, if set) and serves the values of `snapshot` there. Every object
    /// exists before the name is requested, so that no program that sees the name misses an object.
    ///
    /// # Errors
    ///
    /// The bus can't be reached, or its policy does not allow this user to own the name. `NameTaken` means that another process
    /// owns the name. The log names that process.
    pub async fn connect(
        snapshot: watch::Receiver<Arc<Snapshot>>,
        requests: mpsc::Sender<Request>,
    ) -> Result<Self, zbus::Error> {
        Self::connect_to(Address::system()?, snapshot, requests).await
    }

    /// [`BusConnection::connect`] on the bus at `address`.
    ///
    /// # Errors
    ///
    /// As for [`BusConnection::connect`].
    pub async fn connect_to(
        address: Address,
        snapshot: watch::Receiver<Arc<Snapshot>>,
        requests: mpsc::Sender<Request>,
    ) -> Result<Self, zbus::Error> {
        let first = Arc::clone(&snapshot.borrow());
        let callers = Callers::default();
        let desk = SliceDesk::new(snapshot.clone(), requests.clone(), callers.clone());
        let connection = Builder::address(address)
            .serve_at(ROOT, ObjectManager(snapshot.clone()))
            .serve_at(MANAGER, Manager::new(snapshot, requests.clone(), callers.clone(), desk.clone()))
            .serve_at(MANAGER, ControlInterface::new(requests, callers, desk))
            .build()
            .await?;
        let told = Arc::new(Snapshot { gpus: None, ..Snapshot::clone(&first) });
        let mut bus = Self { connection, told };
        bus.mirror(first).await?;
        match bus.connection.request_name_with_flags(NAME, RequestNameFlags::DO_NOT_QUEUE).await {
            Ok(_) => Ok(bus),
            Err(zbus::Error::NameTaken) => {
                let owner = bus.owner().await;
                tracing::error!(
                    "the service can't be reached on D-Bus, since the bus name {NAME} belongs to {owner}; \
                     stop that process"
                );
                Err(zbus::Error::NameTaken)
            }
            Err(e) => Err(e),
        }
    }

    /// Sends signals about the differences between the last Snapshot and `new`: objects that were added or removed, changed
    /// properties, and `DevicesChanged` if the generation has grown. The caller must first send `new` to the watch that it has
    /// given to [`BusConnection::connect`].
    ///
    /// If the bus does not accept a signal, the connection has ended, which [`BusConnection::closed`] reports.
    pub async fn publish(&mut self, new: Arc<Snapshot>) {
        let generation = new.generation;
        if let Err(e) = self.mirror(new).await {
            tracing::debug!(
                "the D-Bus signals about changes of the service's state (generation {generation}) were \
                 not sent: {e}"
            );
        }
    }

    /// Sends the signal that a server met a fatal GPU error. `pids` are the clients that were hit. The client that caused the
    /// error need not be among them.
    pub async fn client_fault(&self, gpu_uuid: &str, pids: &[u32], reason: &str) {
        let (gpu_uuid, reason) = (clean(gpu_uuid), clean(reason));
        if let Err(e) = Manager::client_fault(&self.manager(), &gpu_uuid, pids, &reason).await {
            tracing::debug!("the D-Bus signal about the fatal error of GPU {gpu_uuid} was not sent: {e}");
        }
    }

    pub async fn over_use(&self, device: &str, reasons: &[&str], pids: &[u32]) {
        if let Err(e) = Manager::over_use(&self.manager(), &clean(device), reasons, pids).await {
            tracing::debug!("the D-Bus signal about the overuse of {device} was not sent: {e}");
        }
    }

    /// Returns when the connection has ended. The service is then not on the bus until the caller calls
    /// [`BusConnection::connect`] again.
    pub async fn closed(&self) {
        self.connection.closed().await;
    }

    async fn mirror(&mut self, new: Arc<Snapshot>) -> Result<(), zbus::Error> {
        let old = std::mem::replace(&mut self.told, Arc::clone(&new));
        let (gone, come) = (not_in(&new, &old), not_in(&old, &new));
        let [whole_gone, whole_come] = [&gone, &come].map(|gpus| gpus.iter().cloned().map(WholeGpu));
        mirror_objects(&self.connection, whole_gone, whole_come).await?;
        let slice = |(gpu, slice): (&Arc<GpuView>, u32)| Slice(Arc::clone(gpu), slice);
        mirror_objects(&self.connection, slices_of(&gone).map(slice), slices_of(&come).map(slice)).await?;

        let emitter = self.manager();
        tell_changes(&emitter, Manager::name(), &Service::from_view(&old), &Service::from_view(&new)).await?;
        if new.generation > old.generation {
            Manager::devices_changed(&emitter, new.generation).await?;
        }
        Ok(())
    }

    fn manager(&self) -> SignalEmitter<'static> {
        let path = ObjectPath::from_static_str_unchecked(MANAGER);
        SignalEmitter::from_parts(self.connection.clone(), path)
    }

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

fn not_in(other: &Snapshot, one: &Snapshot) -> Vec<Arc<GpuView>> {
    let has = |gpu: &Arc<GpuView>| other.gpus.iter().flatten().any(|known| Arc::ptr_eq(known, gpu));
    one.gpus.iter().flatten().filter(|gpu| !has(gpu)).cloned().collect()
}

/// Adds, changes and removes objects of one kind on the bus, so that the bus has the `new` objects instead of the `old` ones.
/// The object server of zbus announces the added and removed objects.
async fn mirror_objects<O: Object>(
    connection: &Connection,
    old: impl Iterator<Item = O>,
    new: impl Iterator<Item = O>,
) -> Result<(), zbus::Error> {
    let server = connection.object_server();
    let old: BTreeMap<String, O> = old.map(|object| (object.path(), object)).collect();
    let new: BTreeMap<String, O> = new.map(|object| (object.path(), object)).collect();
    for path in old.keys().filter(|path| !new.contains_key(*path)) {
        server.remove::<O, _>(path.as_str()).await?;
    }
    for (path, new) in new {
        match old.get(&path) {
            None => {
                server.at(path.as_str(), new).await?;
            }
            Some(old) => {
                let object = server.interface::<_, O>(path.as_str()).await?;
                *object.get_mut().await = new.clone();
                tell_changes(object.signal_emitter(), O::name(), &old.row(), &new.row()).await?;
            }
        }
    }
    Ok(())
}

/// Sends one `PropertiesChanged` with all properties that differ. A property that has no value any more is invalidated.
async fn tell_changes<R: Row + PartialEq>(
    emitter: &SignalEmitter<'_>,
    interface: InterfaceName<'_>,
    old: &R,
    new: &R,
) -> Result<(), zbus::Error> {
    if old == new {
        return Ok(());
    }
    let [old, new] = [old, new].map(|row| {
        let mut dict = row.dict();
        dict.retain(|key, _| !R::is_silent(key));
        dict
    });
    let lost = old.keys().filter(|key| !new.contains_key(*key));
    let lost: Vec<String> = lost.map(|key| common::bus::rows::property_name(key)).collect();
    let differs = new.into_iter().filter(|(key, value)| old.get(key) != Some(value));
    let changed: Vec<_> =
        differs.map(|(key, value)| (common::bus::rows::property_name(key), value)).collect();
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
