//! The large answers, made once for each Snapshot and shared by all who ask for them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;
use zbus::names::InterfaceName;
use zbus::object_server::{Interface, SignalEmitter};
use zbus::{ObjectPath, Variant, interface};

use super::control::ControlInterface;
use super::manager::Manager;
use super::manager_path;
use super::rows::{Device, Dict, Gpu, Object, Row, Service, property_name};
use crate::publish::snapshot::Snapshot;

/// The properties of an object, by interface, under the names that they have on D-Bus.
type Interfaces = BTreeMap<InterfaceName<'static>, BTreeMap<String, Variant<'static>>>;

/// The answer of `GetManagedObjects`.
type ManagedObjects = BTreeMap<ObjectPath<'static>, Interfaces>;

/// The answers that a Snapshot gives.
#[derive(Debug)]
pub(super) struct Answers {
    of: Arc<Snapshot>,
    /// Every slice; None before the first plan exists.
    pub(super) devices: Option<Arc<Vec<Dict>>>,
    /// Every GPU; None before the first plan exists.
    pub(super) gpus: Option<Arc<Vec<Dict>>>,
    objects: Arc<ManagedObjects>,
}

impl Answers {
    fn new(snapshot: &Arc<Snapshot>) -> zbus::Result<Self> {
        let devices: Vec<Device> = snapshot.slices().map(|(gpu, slice)| Device::of(gpu, slice)).collect();
        let gpus: Vec<Gpu> = snapshot.gpus.iter().flatten().map(Gpu::of).collect();
        let mut objects = ManagedObjects::new();
        let manager = properties(&Service::of(snapshot));
        objects.insert(
            manager_path(),
            Interfaces::from([(Manager::name(), manager), (ControlInterface::name(), BTreeMap::new())]),
        );
        add_objects(&mut objects, &gpus)?;
        add_objects(&mut objects, &devices)?;
        let known = snapshot.gpus.is_some();
        Ok(Self {
            of: Arc::clone(snapshot),
            devices: known.then(|| dicts(&devices)),
            gpus: known.then(|| dicts(&gpus)),
            objects: Arc::new(objects),
        })
    }
}

fn dicts(rows: &[impl Row]) -> Arc<Vec<Dict>> {
    Arc::new(rows.iter().map(Row::dict).collect())
}

fn add_objects<R: Object>(objects: &mut ManagedObjects, rows: &[R]) -> zbus::Result<()> {
    for row in rows {
        let path = ObjectPath::try_from(row.path())?;
        objects.insert(path, Interfaces::from([(R::name(), properties(row))]));
    }
    Ok(())
}

fn properties(row: &impl Row) -> BTreeMap<String, Variant<'static>> {
    row.dict().into_iter().map(|(key, value)| (property_name(key), value)).collect()
}

/// The answers that the present Snapshot gives.
#[derive(Debug, Clone)]
pub(super) struct Present {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    made: Arc<Mutex<Option<Arc<Answers>>>>,
}

impl Present {
    pub(super) fn new(snapshot: watch::Receiver<Arc<Snapshot>>) -> Self {
        Self { snapshot, made: Arc::default() }
    }

    pub(super) fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.snapshot.borrow())
    }

    /// Made by the first who asks.
    pub(super) fn answers(&self) -> zbus::Result<Arc<Answers>> {
        let snapshot = self.snapshot();
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(answers) = made.as_ref().filter(|answers| Arc::ptr_eq(&answers.of, &snapshot)) {
            return Ok(Arc::clone(answers));
        }
        let answers = Arc::new(Answers::new(&snapshot)?);
        *made = Some(Arc::clone(&answers));
        Ok(answers)
    }
}

/// `org.freedesktop.DBus.ObjectManager`. zbus has one that asks every object for every property at every call; with this
/// in its place, zbus announces objects all the same, since it goes by the name.
pub(super) struct Objects(Present);

impl Objects {
    pub(super) fn new(present: Present) -> Self {
        Self(present)
    }
}

#[interface(name = "org.freedesktop.DBus.ObjectManager", introspection_docs = false)]
impl Objects {
    #[zbus(out_args("objpath_interfaces_and_properties"))]
    fn get_managed_objects(&self) -> zbus::fdo::Result<Arc<ManagedObjects>> {
        Ok(Arc::clone(&self.0.answers()?.objects))
    }

    #[zbus(signal)]
    async fn interfaces_added(
        emitter: &SignalEmitter<'_>,
        object_path: ObjectPath<'_>,
        interfaces_and_properties: std::collections::HashMap<
            InterfaceName<'_>,
            std::collections::HashMap<&str, Variant<'_>>,
        >,
    ) -> zbus::Result<()>;

    #[zbus(signal)]
    async fn interfaces_removed(
        emitter: &SignalEmitter<'_>,
        object_path: ObjectPath<'_>,
        interfaces: std::borrow::Cow<'_, [InterfaceName<'_>]>,
    ) -> zbus::Result<()>;
}
