//! The dictionaries on the bus, each as a struct. The service makes the struct from the `Snapshot`, which has all published
//! values, and yunion-mpsctl reads the struct from an answer. A call of a macro in this file defines each dictionary. The call
//! has a line for each key, with the key's type and the expression for its value. The XML files in `config` describe the
//! meaning of each key. Objects on the bus have the same values as properties, under the same names in `CamelCase`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use mps_core::register::{GuestContainer, KnownBy, MayCommand, Membership};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};
use zbus::object_server::Interface;
use zbus::{Signature, Type, Variant, as_variant, interface};

use super::ROOT;
use super::error::RequestError;
use super::word::Word;
use crate::config::Isolation;
use crate::host::gpu::PcieLink;
use crate::host::variant::json;
use crate::published::client::ClientView;
use crate::published::control_daemon::{ControlDaemonState, ControlDaemonView};
use crate::published::events;
use crate::published::snapshot::{GpuView, Snapshot, State};
use crate::text::clean;

/// A D-Bus dictionary (`a{sv}`). A key without a known value is absent.
pub type Dict = BTreeMap<&'static str, Variant<'static>>;

/// A struct that is a dictionary on the bus. Serde writes the struct to the D-Bus message directly, without building a
/// dictionary first.
pub trait Row: Serialize + Type {
    /// The keys that have an annotation `EmitsChangedSignal`, with the annotation's value: "const" or "false".
    const EMITS: &[(&str, &str)];

    /// True if the value of this key changes so often that the service sends no signal about its changes.
    fn is_silent(key: &str) -> bool {
        Self::EMITS.contains(&(key, "false"))
    }

    fn dict(&self) -> Dict;

    /// Writes the known values of the row. The function `named` turns a key of the row into the name that is written.
    fn write<M: SerializeMap>(
        &self,
        map: &mut M,
        named: fn(&'static str) -> Cow<'static, str>,
    ) -> Result<(), M::Error>;
}

#[derive(Debug)]
pub struct Properties<R>(pub Option<R>);

impl<R: Row> Serialize for Properties<R> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if let Some(row) = &self.0 {
            row.write(&mut map, |key| property_name(key).into())?;
        }
        map.end()
    }
}

/// A D-Bus object with the values of a row as its properties. The object stores no row. When a caller asks for a property, the
/// object computes only that property's value.
pub trait Object: Interface + Clone {
    type Row: Row + PartialEq;

    fn row(&self) -> Self::Row;

    fn path(&self) -> String;
}

trait OnBus {
    type Wire: Into<Variant<'static>> + Serialize + Type;

    /// The value for the bus, without characters that the bus does not accept. None if the value is not known.
    fn wire(&self) -> Option<Self::Wire>;
}

macro_rules! values {
    ($($plain:ty),*) => { $(
        impl OnBus for $plain {
            type Wire = Self;

            fn wire(&self) -> Option<Self> {
                Some(Clone::clone(self))
            }
        }
    )* };
}

values!(bool, i32, i64, u32, u64, Vec<u32>);

impl OnBus for String {
    type Wire = Self;

    fn wire(&self) -> Option<Self> {
        Some(clean(self))
    }
}

impl OnBus for Vec<String> {
    type Wire = Self;

    fn wire(&self) -> Option<Self> {
        Some(self.iter().map(|text| clean(text)).collect())
    }
}

impl<T: OnBus> OnBus for Option<T> {
    type Wire = T::Wire;

    fn wire(&self) -> Option<T::Wire> {
        self.as_ref()?.wire()
    }
}

impl<E: fmt::Display> OnBus for Word<E> {
    type Wire = String;

    fn wire(&self) -> Option<String> {
        self.to_string().wire()
    }
}

impl OnBus for PcieInfo {
    type Wire = Dict;

    fn wire(&self) -> Option<Dict> {
        Some(self.dict())
    }
}

macro_rules! row {
    (
        $(#[$doc:meta])*
        $row:ident($($from:ident: $view:ty),*) { $($($emits:literal)? $key:ident: $ty:ty = $source:expr;)* }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Default, PartialEq, Deserialize)]
        #[serde(default)]
        pub struct $row {
            $(pub $key: $ty,)*
        }

        impl $row {
            pub fn from_view($($from: $view),*) -> Self {
                Self { $($key: $source,)* }
            }
        }

        impl Row for $row {
            const EMITS: &[(&str, &str)] = &[$($((stringify!($key), $emits),)?)*];

            fn dict(&self) -> Dict {
                let mut dict = Dict::new();
                $(if let Some(value) = self.$key.wire() {
                    dict.insert(stringify!($key), value.into());
                })*
                dict
            }

            fn write<M: SerializeMap>(
                &self,
                map: &mut M,
                named: fn(&'static str) -> Cow<'static, str>,
            ) -> Result<(), M::Error> {
                $(if let Some(value) = self.$key.wire() {
                    map.serialize_entry(&named(stringify!($key)), &as_variant::Serialize(&value))?;
                })*
                Ok(())
            }
        }

        impl Serialize for $row {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let mut map = serializer.serialize_map(None)?;
                self.write(&mut map, Cow::Borrowed)?;
                map.end()
            }
        }

        impl Type for $row {
            const SIGNATURE: &'static Signature = Dict::SIGNATURE;
        }
    };
}

/// Defines a row, and the properties of the D-Bus object that has the row's values. The value of a key with "const" in front
/// never changes while the object exists. When the value of a key with "false" in front changes, the service sends no signal.
macro_rules! object {
    (
        $(#[$doc:meta])*
        $row:ident $from:tt by $object:ident on $interface:literal as $parts:pat => {
            $($($emits:literal)? $key:ident: $ty:ty = $source:expr;)*
        }
    ) => {
        row! { $(#[$doc])* $row $from { $($($emits)? $key: $ty = $source;)* } }

        #[interface(name = $interface, introspection_docs = false)]
        impl $object {
            $(
                #[zbus(property $((emits_changed_signal = $emits))?)]
                fn $key(&self) -> Result<<$ty as OnBus>::Wire, RequestError> {
                    let unknown = || RequestError::Failed(concat!(stringify!($key), " is not known").to_owned());
                    #[allow(unused_variables, reason = "the values of some keys need none of these variables")]
                    let $parts = self;
                    let value: $ty = $source;
                    value.wire().ok_or_else(unknown)
                }
            )*
        }
    };
}

/// Defines the row of a GPU or of a slice: the keys in `$own`, and the keys that GPUs and slices both have.
macro_rules! gpu_object {
    (
        $(#[$doc:meta])*
        $row:ident($gpu:ident: $of:ty $(, $slice:ident: $ordinal:ty)?)
        by $object:ident on $interface:literal as $parts:pat => {
            $($own:tt)*
        }
    ) => {
        object! {
            $(#[$doc])*
            $row($gpu: $of $(, $slice: $ordinal)?) by $object on $interface as $parts => {
                $($own)*
                compute_mode: Option<String> = $gpu.compute_mode.map(|mode| mode.to_string());
                "const" detected_on_host: bool = true;
                device_path: Option<String> = $gpu.plan.gpu.facts().map(|nvml| nvml.uuid.clone());
                "const" hot_pluggable: bool = false;
                isolation: Word<Isolation> = $gpu.plan.isolation.into();
                limits_enforced: bool = $gpu.plan.limits_enforced;
                model: Option<String> = Some($gpu.plan.gpu.model()).filter(|model| !model.is_empty());
                mps_memory_total: Option<i32> = $gpu.plan.gpu.facts().and_then(|nvml| known_mib(nvml.memory_total_mib?));
                numa_node: i32 = $gpu.plan.gpu.pci.numa_node.unwrap_or(-1);
                nvidia_index: Option<u32> = $gpu.plan.gpu.facts().map(|nvml| nvml.index);
                nvidia_minor: Option<u32> = $gpu.plan.gpu.facts().and_then(|nvml| nvml.minor);
                nvidia_name: Option<String> = $gpu.plan.gpu.facts().map(|nvml| nvml.name.clone());
                pcie_info: Option<PcieInfo> = $gpu.plan.gpu.pci.link.as_ref().map(PcieInfo::from_view);
                render_node: Option<String> = $gpu.plan.gpu.pci.render_node.as_deref().map(path);
                servable: bool = $gpu.plan.servable();
                vendor_device_id: String = $gpu.plan.gpu.vendor_device_id();
            }
        }
    };
}

gpu_object! {
    Device(gpu: &GpuView, slice: u32) by Slice on "io.yunion.Mps1.Device" as &Slice(ref gpu, slice) => {
        "const" addr: String = gpu.slice_name(slice);
        "const" base_addr: String = gpu.plan.gpu.id().to_string();
        bound_groups: Vec<String> = gpu.bound.get(&slice).map(|bound| bound.groups.clone()).unwrap_or_default();
        bound_to: String = gpu.bound.get(&slice).map(|bound| bound.by.clone()).unwrap_or_default();
        "false" clients: Option<u32> = gpu.slice_use(slice).map(|one| one.clients);
        "const" dev_type: String = "NVIDIA_MPS".to_owned();
        // Cloudpods's host agent has -1 for `device_minor` and for `index` by default. If the service published another number,
        // the host agent would conclude that the device has changed.
        "const" device_minor: i32 = -1;
        drained: bool = gpu.drained.contains(&slice);
        healthy: bool = gpu.slice_healthy(slice);
        "const" index: i32 = -1;
        kernel_limit_refused: Option<String> = gpu.kernel_limits.get(&slice).and_then(|held| held.clone().err());
        max_clients: Option<u32> = gpu.plan.max_clients(slice);
        memory_enforced_by: Option<String> = gpu.memory_enforced_by(slice).map(str::to_owned);
        memory_size: Option<i32> = known_mib(gpu.plan.size(slice).memory_mib);
        "false" memory_used: Option<i32> = gpu.slice_use(slice).and_then(|one| one.memory_mib).map(mib);
        mps_memory_limit: Option<i32> = known_mib(gpu.plan.size(slice).memory_mib);
        mps_thread_percentage: i32 = gpu.plan.size(slice).thread_percentage.into();
        "const" name: String = gpu.slice_name(slice);
        "const" ordinal: u32 = slice;
        overuse: Option<String> = gpu.slice_use(slice).map(|one| one.overuse.clone());
        "const" pci_bdf: String = gpu.plan.gpu.pci.address.to_string();
        pipe_directory: String = path(&gpu.plan.slice_pipe_directory(slice));
        reason: String = gpu.slice_reason(slice);
        served: bool = gpu.slice_served(slice);
    }
}

gpu_object! {
    Gpu(gpu: &GpuView) by WholeGpu on "io.yunion.Mps1.Gpu" as WholeGpu(gpu) => {
        addr: String = gpu.plan.gpu.id().to_string();
        base_addr: String = gpu.plan.gpu.id().to_string();
        "false" clients: Option<u32> = gpu.in_use.map(|all| all.clients);
        confirmed_memory_limit: Option<i32> = gpu.confirmed_memory_limit_mib.map(mib);
        confirmed_thread_percentage: Option<i32> = gpu.confirmed_thread_percentage.map(i32::from);
        control_daemon: String = gpu.control_daemons.join(",");
        "const" dev_type: String = "GPU".to_owned();
        equal_slices: bool = gpu.plan.equal_slices();
        healthy: bool = gpu.healthy;
        max_clients: Option<u32> = gpu.plan.shared_places();
        memory_size: Option<i32> = known_mib(gpu.plan.largest().memory_mib);
        "false" memory_used: Option<i32> = gpu.in_use.and_then(|all| all.memory_mib).map(mib);
        mps_memory_limit: Option<i32> = known_mib(gpu.plan.largest().memory_mib);
        mps_thread_percentage: i32 = gpu.plan.largest().thread_percentage.into();
        name: String = gpu.plan.gpu.id().to_string();
        pci_bdf: String = gpu.plan.gpu.pci.address.to_string();
        pipe_directory: String = path(&gpu.plan.pipe_directory);
        reason: String = gpu.gpu_reason();
        "const" sharing_mode: String = "MPS".to_owned();
        virtual_num: i32 = i32::try_from(gpu.plan.slices()).unwrap_or(i32::MAX);
    }
}

#[derive(Debug, Clone)]
pub struct Slice(pub Arc<GpuView>, pub u32);

#[derive(Debug, Clone)]
pub struct WholeGpu(pub Arc<GpuView>);

impl Object for Slice {
    type Row = Device;

    fn row(&self) -> Device {
        Device::from_view(&self.0, self.1)
    }

    fn path(&self) -> String {
        format!("{ROOT}/devices/{}", path_element(&self.0.slice_name(self.1)))
    }
}

impl Object for WholeGpu {
    type Row = Gpu;

    fn row(&self) -> Gpu {
        Gpu::from_view(&self.0)
    }

    /// The path has the GPU's UUID, which stays the same when the board moves to another PCI slot. While the driver does not
    /// report the UUID, the path has the PCI address.
    fn path(&self) -> String {
        let name = match self.0.uuid() {
            "" => self.0.plan.gpu.id().to_string(),
            uuid => uuid.to_owned(),
        };
        format!("{ROOT}/gpus/{}", path_element(&name))
    }
}

row! {
    PcieInfo(link: &PcieLink) {
        lane_width: Option<i32> = i32::try_from(link.width).ok().filter(|width| *width > 0);
        throughput: String = link.throughput();
        transfer_rate_per_lane: String = link.rate.clone();
        version: String = link.version().to_owned();
    }
}

row! {
    Service(snapshot: &Snapshot) {
        driver_version: String = snapshot.driver_version.clone();
        enabled: bool = snapshot.enabled;
        generation: u64 = snapshot.generation;
        log_directory: String = path(&snapshot.log_directory);
        pipe_directory: String = path(&snapshot.pipe_directory);
        state: Word<State> = snapshot.state.into();
        state_reason: String = snapshot.reason.clone();
        version: String = env!("CARGO_PKG_VERSION").to_owned();
    }
}

row! {
    ControlDaemon(daemon: &ControlDaemonView, snapshot: &Snapshot) {
        control_directory: String = path(&daemon.control_directory);
        cpus: Option<String> = daemon.cpus.clone();
        faults: u32 = daemon.faults;
        gpus: Vec<String> = uuids_served_by(&daemon.id.to_string(), snapshot);
        id: String = daemon.id.to_string();
        log_directory: String = path(&daemon.log_directory);
        multiuser: Option<bool> = daemon.multiuser;
        pid: Option<u32> = daemon.pid;
        pipe_directory: String = path(&daemon.pipe_directory);
        reason: String = daemon.reason.clone();
        restarts: u32 = daemon.restarts;
        server_restarts: u32 = daemon.server_restarts;
        servers: Vec<u32> = daemon.servers.clone();
        since: i64 = seconds(daemon.since);
        starts: u32 = daemon.starts;
        state: Word<ControlDaemonState> = daemon.state.into();
        wanted_cpus: Option<String> = daemon.wanted_cpus.map(|cpus| cpus.to_string());
    }
}

row! {
    /// An event, as `ListEvents` returns it. The key `at` is in microseconds since 1970.
    Event(event: &events::Event) {
        at: i64 = microseconds(event.at);
        ended_clients: Option<String> = Some(event.ended_clients.clone()).filter(|clients| !clients.is_empty());
        ended_for: Option<Vec<String>> = Some(event.ended_for.clone()).filter(|names| !names.is_empty());
        fault: bool = event.fault;
        text: String = event.text.clone();
    }
}

row! {
    Client(client: &ClientView) {
        bypass: bool = client.bypass;
        command: String = client.command.clone();
        container: Option<String> = guest_name(client, |guest| &guest.container);
        container_id: Option<String> = client.client.container.clone();
        device: Option<String> = client.client.slices.as_ref().map(Membership::names);
        gpu: String = client.gpu_uuid.clone();
        guest: Option<String> = guest_name(client, |guest| &guest.guest);
        known_by: Option<Word<KnownBy>> = client.client.slices.as_ref().map(|known| known.known_by.into());
        label: Option<String> = client.client.label.clone();
        may_command: Option<Word<MayCommand>> = client.client.may_command.map(Word::Known);
        memory_mib: Option<i32> = client.memory_mib.map(mib);
        pid: u32 = client.client.process.pid;
        project: Option<String> = guest_name(client, |guest| &guest.project);
        since: Option<i64> = client.since.map(seconds);
        uid: Option<u32> = client.client.tenant.as_ref().map(|tenant| tenant.uid);
        user: Option<String> = client.client.user.clone();
        waiting: bool = client.waiting;
    }
}

/// One of the names that the host agent's records have for the client's container. The function `name` selects which name. None
/// if the records lack that name.
fn guest_name(client: &ClientView, name: fn(&GuestContainer) -> &String) -> Option<String> {
    client.client.guest.as_ref().map(name).filter(|name| !name.is_empty()).cloned()
}

impl fmt::Display for PcieInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        json(&Variant::from(self.dict())).fmt(f)
    }
}

/// Turns the key of a dictionary, such as `mps_memory_limit`, into a D-Bus property's name, such as `MpsMemoryLimit`.
pub fn property_name(key: &str) -> String {
    let mut name = String::with_capacity(key.len());
    for word in key.split('_') {
        let mut letters = word.chars();
        name.extend(letters.next().map(|first| first.to_ascii_uppercase()));
        name.push_str(letters.as_str());
    }
    name
}

/// Turns a name, such as `00:06.0-1`, into an element of a D-Bus object path, such as `_00_06_0_1`. The element does not begin
/// with a digit, since the D-Bus libraries of some programming languages use the element as an identifier.
fn path_element(name: &str) -> String {
    let mut element: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    if !element.starts_with(|c: char| c.is_ascii_alphabetic()) {
        element.insert(0, '_');
    }
    element
}

fn path(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn mib(mib: u64) -> i32 {
    i32::try_from(mib).unwrap_or(i32::MAX)
}

/// An amount of memory in MiB as the value of a key. None for 0, which means that the amount is not known.
fn known_mib(known: u64) -> Option<i32> {
    (known > 0).then(|| mib(known))
}

fn seconds(at: SystemTime) -> i64 {
    at.duration_since(UNIX_EPOCH).ok().and_then(|since| i64::try_from(since.as_secs()).ok()).unwrap_or(0)
}

fn microseconds(at: SystemTime) -> i64 {
    at.duration_since(UNIX_EPOCH).ok().and_then(|since| i64::try_from(since.as_micros()).ok()).unwrap_or(0)
}

fn uuids_served_by(id: &str, snapshot: &Snapshot) -> Vec<String> {
    let served = snapshot.gpus.iter().flatten().filter(|gpu| gpu.control_daemons.iter().any(|one| one == id));
    served.map(|gpu| gpu.uuid().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn property_names_are_the_keys_in_camel_case() {
        assert_eq!(property_name("mps_memory_limit"), "MpsMemoryLimit");
        assert_eq!(property_name("addr"), "Addr");
        assert_eq!(property_name("pci_bdf"), "PciBdf");
    }

    #[test]
    fn names_become_path_elements() {
        assert_eq!(path_element("00:06.0-1"), "_00_06_0_1");
        assert_eq!(path_element("0001:1a:00.0-12"), "_0001_1a_00_0_12");
        assert_eq!(
            path_element("GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400"),
            "GPU_76aef7ff_372d_2432_b4b4_beca4d8d3400"
        );
    }

    #[test]
    fn memory_that_no_int32_holds_is_the_largest_there_is() {
        assert_eq!(mib(u64::MAX), i32::MAX);
        assert_eq!((known_mib(5760), known_mib(0)), (Some(5760), None));
    }

    #[test]
    fn a_lane_width_of_nothing_is_left_out() {
        let link = |width| PcieInfo::from_view(&PcieLink { rate: "8GT/s".to_owned(), width }).dict();
        assert!(!link(0).contains_key("lane_width") && link(16).contains_key("lane_width"));
    }

    #[test]
    fn a_dictionary_is_shown_as_json_with_sorted_keys() {
        let info = PcieInfo::from_view(&PcieLink { rate: "8GT/s".to_owned(), width: 16 });
        assert!(info.to_string().starts_with(r#"{"lane_width":16,"throughput":"#), "{info}");
    }

    #[test]
    fn a_nul_never_reaches_the_bus() {
        let event = events::Event::now("a\0b".to_owned());
        assert_eq!(Event::from_view(&event).dict()["text"], Variant::from("a\u{fffd}b"));
        assert_eq!(vec!["\0\u{1b}[2J\u{9b}".to_owned()].wire().unwrap(), ["\u{fffd}\u{fffd}[2J\u{fffd}"]);
    }
}
