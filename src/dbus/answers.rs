//! The large answers, made once for each Snapshot and shared by all who ask for them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;
use zbus::names::InterfaceName;
use zbus::object_server::{Interface, SignalEmitter};
use zbus::{ObjectPath, Variant, interface};

use super::control::Control;
use super::device::{self, Device};
use super::dict::{self, Dict};
use super::gpu::{self, Gpu};
use super::manager::Manager;
use super::manager_path;
use crate::publish::snapshot::Snapshot;

/// The properties of an object, by interface, under the names that they have on D-Bus.
type Interfaces = BTreeMap<InterfaceName<'static>, BTreeMap<String, Variant<'static>>>;

/// What `GetManagedObjects` returns.
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
        let devices: Vec<Dict> = snapshot.slices().map(|(gpu, ordinal)| dict::device(gpu, ordinal)).collect();
        let gpus: Vec<Dict> = snapshot.gpus.iter().flatten().map(dict::gpu).collect();
        let mut objects = ManagedObjects::new();
        let manager = properties(&dict::manager(snapshot))?;
        objects.insert(
            manager_path(),
            Interfaces::from([(Manager::name(), manager), (Control::name(), BTreeMap::new())]),
        );
        for (view, dict) in snapshot.gpus.iter().flatten().zip(&gpus) {
            let path = ObjectPath::try_from(gpu::path(view))?;
            objects.insert(path, Interfaces::from([(Gpu::name(), properties(dict)?)]));
        }
        for ((view, ordinal), dict) in snapshot.slices().zip(&devices) {
            let path = ObjectPath::try_from(device::path(&view.slice_name(ordinal)))?;
            objects.insert(path, Interfaces::from([(Device::name(), properties(dict)?)]));
        }
        let known = snapshot.gpus.is_some();
        Ok(Self {
            of: Arc::clone(snapshot),
            devices: known.then(|| Arc::new(devices)),
            gpus: known.then(|| Arc::new(gpus)),
            objects: Arc::new(objects),
        })
    }
}

fn properties(dict: &Dict) -> zbus::Result<BTreeMap<String, Variant<'static>>> {
    dict.iter().map(|(key, value)| Ok((dict::property_name(key), value.try_clone()?))).collect()
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
