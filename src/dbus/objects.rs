//! `org.freedesktop.DBus.ObjectManager`. This implementation replaces that of zbus, which asks each object for each property.
//! zbus recognizes an `ObjectManager` by the name of the interface, and sends the interface's signals.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use tokio::sync::watch;
use zbus::fdo::ManagedObjects;
use zbus::names::InterfaceName;
use zbus::object_server::{Interface, SignalEmitter};
use zbus::{ObjectPath, Signature, Type, Variant, interface};

use super::control::ControlInterface;
use super::manager::Manager;
use common::bus::MANAGER;
use common::bus::rows::{Object, Properties, Service, Slice, WholeGpu};
use common::published::snapshot::Snapshot;

/// The answer of `GetManagedObjects`, written directly from a Snapshot, so that only one row at a time is in memory.
struct Objects(Arc<Snapshot>);

impl Serialize for Objects {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut objects = serializer.serialize_map(None)?;
        let of_manager =
            [(Manager::name(), Some(Service::from_view(&self.0))), (ControlInterface::name(), None)];
        let of_manager: BTreeMap<_, _> = of_manager.map(|(name, row)| (name, Properties(row))).into();
        objects.serialize_entry(MANAGER, &of_manager)?;
        for gpu in self.0.gpus.iter().flatten() {
            write(&WholeGpu(Arc::clone(gpu)), &mut objects)?;
        }
        for (gpu, slice) in self.0.slices() {
            write(&Slice(Arc::clone(gpu), slice), &mut objects)?;
        }
        objects.end()
    }
}

fn write<O: Object, M: SerializeMap>(object: &O, objects: &mut M) -> Result<(), M::Error> {
    objects.serialize_entry(&object.path(), &BTreeMap::from([(O::name(), Properties(Some(object.row())))]))
}

impl Type for Objects {
    const SIGNATURE: &'static Signature = ManagedObjects::SIGNATURE;
}

pub(super) struct ObjectManager(pub(super) watch::Receiver<Arc<Snapshot>>);

#[interface(name = "org.freedesktop.DBus.ObjectManager", introspection_docs = false)]
impl ObjectManager {
    #[zbus(out_args("objects"))]
    fn get_managed_objects(&self) -> Objects {
        Objects(Arc::clone(&self.0.borrow()))
    }

    #[zbus(signal)]
    async fn interfaces_added(
        emitter: &SignalEmitter<'_>,
        object_path: ObjectPath<'_>,
        interfaces_and_properties: HashMap<InterfaceName<'_>, HashMap<&str, Variant<'_>>>,
    ) -> zbus::Result<()>;

    #[zbus(signal)]
    async fn interfaces_removed(
        emitter: &SignalEmitter<'_>,
        object_path: ObjectPath<'_>,
        interfaces: Cow<'_, [InterfaceName<'_>]>,
    ) -> zbus::Result<()>;
}
