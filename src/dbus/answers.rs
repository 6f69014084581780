//! The large answers, made once for each Snapshot as the bytes that are sent, and shared by all who ask for them.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Serialize, Serializer};
use tokio::sync::watch;
use zbus::message::Header;
use zbus::names::InterfaceName;
use zbus::object_server::{Interface, SignalEmitter};
use zbus::wire::serialized::Context;
use zbus::wire::{Endian, Type};
use zbus::{ObjectPath, Variant, interface};

use super::MANAGER;
use super::control::ControlInterface;
use super::gate::Gate;
use super::manager::Manager;
use super::request::{RequestError, Result};
use super::rows::{Device, Dict, Gpu, Object, Row, Service, Slice, WholeGpu, property_name};
use crate::publish::snapshot::Snapshot;

/// The properties of an object, by interface, under the names that they have on D-Bus.
type Interfaces = BTreeMap<InterfaceName<'static>, BTreeMap<String, Variant<'static>>>;

/// The answer of `GetManagedObjects`.
type ManagedObjects = BTreeMap<ObjectPath<'static>, Interfaces>;

/// A question with a large answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Question {
    Devices,
    Gpus,
    Objects,
}

/// The answer to a question about a Snapshot. On its way to bytes, no more than one of its dictionaries exists at a time.
struct Answer<'a>(Question, &'a Snapshot);

impl Answer<'_> {
    fn bytes(&self, endian: Endian) -> zbus::Result<Arc<[u8]>> {
        let signature = match self.0 {
            Question::Devices | Question::Gpus => Vec::<Dict>::SIGNATURE,
            Question::Objects => ManagedObjects::SIGNATURE,
        };
        let bytes = zbus::wire::to_bytes_for_signature(Context::new(endian, 0), signature, self)?;
        Ok(Arc::from(&*bytes))
    }
}

impl Serialize for Answer<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let Self(question, snapshot) = *self;
        let gpus = snapshot.gpus.as_deref().unwrap_or_default();
        match question {
            Question::Devices => {
                serializer.collect_seq(snapshot.slices().map(|(gpu, slice)| Device::of(gpu, slice).dict()))
            }
            Question::Gpus => serializer.collect_seq(gpus.iter().map(|gpu| Gpu::of(gpu).dict())),
            Question::Objects => {
                let manager = Interfaces::from([
                    (Manager::name(), properties(&Service::of(snapshot))),
                    (ControlInterface::name(), BTreeMap::new()),
                ]);
                let gpus = gpus.iter().map(|gpu| shown(&WholeGpu(Arc::clone(gpu))));
                let slices = snapshot.slices().map(|(gpu, slice)| shown(&Slice(Arc::clone(gpu), slice)));
                serializer.collect_map([(MANAGER.to_owned(), manager)].into_iter().chain(gpus).chain(slices))
            }
        }
    }
}

/// The path of an object, and what it shows there.
fn shown<O: Object>(object: &O) -> (String, Interfaces) {
    (object.path(), Interfaces::from([(O::name(), properties(&object.row()))]))
}

fn properties(row: &impl Row) -> BTreeMap<String, Variant<'static>> {
    row.dict().into_iter().map(|(key, value)| (property_name(key), value)).collect()
}

/// An answer that was made from a Snapshot, for callers with this order of bytes.
#[derive(Debug)]
struct Made {
    of: Arc<Snapshot>,
    question: Question,
    endian: Endian,
    bytes: Arc<[u8]>,
}

/// The present Snapshot, and the answers that it gives.
#[derive(Debug, Clone)]
pub(super) struct Present {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    made: Arc<Mutex<Vec<Made>>>,
}

impl Present {
    pub(super) fn new(snapshot: watch::Receiver<Arc<Snapshot>>) -> Self {
        Self { snapshot, made: Arc::default() }
    }

    pub(super) fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.snapshot.borrow())
    }

    /// The answer of this Snapshot to a call, made by the first who asks.
    pub(super) fn answer(
        &self,
        question: Question,
        snapshot: &Arc<Snapshot>,
        call: &Header<'_>,
    ) -> Result<Arc<[u8]>> {
        let endian = call.primary().endian_sig().into();
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        made.retain(|one| Arc::ptr_eq(&one.of, snapshot));
        if let Some(known) = made.iter().find(|one| one.question == question && one.endian == endian) {
            return Ok(Arc::clone(&known.bytes));
        }
        let failed = |error: zbus::Error| RequestError::Failed(error.to_string());
        let bytes = Answer(question, snapshot).bytes(endian).map_err(failed)?;
        made.push(Made { of: Arc::clone(snapshot), question, endian, bytes: Arc::clone(&bytes) });
        Ok(bytes)
    }

    /// Drops the answers: there is a new Snapshot.
    pub(super) fn forget(&self) {
        self.made.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// `org.freedesktop.DBus.ObjectManager`. zbus has one that asks every object for every property at every call; with this
/// in its place, zbus announces objects all the same, since it goes by the name.
pub(super) struct Objects {
    present: Present,
    gate: Arc<Gate>,
}

impl Objects {
    pub(super) fn new(present: Present, gate: Arc<Gate>) -> Self {
        Self { present, gate }
    }
}

#[interface(name = "org.freedesktop.DBus.ObjectManager", introspection_docs = false)]
impl Objects {
    #[zbus(out_args("objpath_interfaces_and_properties"))]
    #[expect(clippy::needless_pass_by_value, reason = "zbus gives it away")]
    fn get_managed_objects(&self, #[zbus(header)] call: Header<'_>) -> Result<ManagedObjects> {
        let snapshot = self.present.snapshot();
        self.gate.answer_with(&call, self.present.answer(Question::Objects, &snapshot, &call)?)?;
        Ok(ManagedObjects::new())
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
