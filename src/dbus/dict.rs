//! What is published of each thing: a dictionary whose keys are the platform's JSON names, and our additions. The
//! objects' properties are the same values under the same names in CamelCase. The XML files say what each one means.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use zbus::Variant;

use super::RequestError;
use crate::host::gpu::PcieLink;
use crate::publish::snapshot::{GpuView, Snapshot};
use crate::supervisor::view::{ControlDaemonView, Event};
use crate::tenants::clients::ClientView;

/// An `a{sv}`. A key whose value is not known is left out.
pub(super) type Dict = BTreeMap<&'static str, Variant<'static>>;

/// One value of a dictionary, as a property.
///
/// # Errors
/// `Failed` where it is not known: `GetAll` then leaves it out, as the dictionary does.
pub(super) fn value<T>(dict: &Dict, key: &str) -> Result<T, RequestError>
where
    T: TryFrom<Variant<'static>, Error = zbus::Error>,
{
    let known = dict.get(key).ok_or_else(|| RequestError::Failed(format!("{key} is not known")))?;
    known.try_clone().and_then(T::try_from).map_err(|e| RequestError::Failed(format!("{key}: {e}")))
}

/// `mps_memory_limit` as a property's name: `MpsMemoryLimit`.
pub(super) fn property_name(key: &str) -> String {
    let mut name = String::with_capacity(key.len());
    for word in key.split('_') {
        let mut letters = word.chars();
        name.extend(letters.next().map(|first| first.to_ascii_uppercase()));
        name.push_str(letters.as_str());
    }
    name
}

/// Text that D-Bus can carry: a NUL would make the bus close the connection.
pub(super) fn clean(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

fn text(text: &str) -> Variant<'static> {
    Variant::from(clean(text))
}

fn path(path: &Path) -> Variant<'static> {
    text(&path.to_string_lossy())
}

fn mib(mib: u64) -> Variant<'static> {
    Variant::from(i32::try_from(mib).unwrap_or(i32::MAX))
}

fn seconds(at: SystemTime) -> i64 {
    at.duration_since(UNIX_EPOCH).ok().and_then(|since| i64::try_from(since.as_secs()).ok()).unwrap_or(0)
}

fn microseconds(at: SystemTime) -> i64 {
    at.duration_since(UNIX_EPOCH).ok().and_then(|since| i64::try_from(since.as_micros()).ok()).unwrap_or(0)
}

/// The properties of the Manager.
pub(super) fn manager(snapshot: &Snapshot) -> Dict {
    Dict::from([
        ("version", text(env!("CARGO_PKG_VERSION"))),
        ("state", text(snapshot.state.as_str())),
        ("state_reason", text(&snapshot.reason)),
        ("generation", Variant::from(snapshot.generation)),
        ("enabled", Variant::from(snapshot.enabled)),
        ("pipe_directory", path(&snapshot.pipe_directory)),
        ("log_directory", path(&snapshot.log_directory)),
        ("driver_version", text(&snapshot.driver_version)),
    ])
}

/// One slice.
pub(super) fn device(gpu: &GpuView, ordinal: u32) -> Dict {
    let name = gpu.slice_name(ordinal);
    let mut dict = common(gpu);
    dict.extend([
        ("addr", text(&name)),
        ("name", text(&name)),
        ("dev_type", text("NVIDIA_MPS")),
        ("ordinal", Variant::from(ordinal)),
        // The platform's own defaults: another number would mark its rows as changed.
        ("index", Variant::from(-1i32)),
        ("device_minor", Variant::from(-1i32)),
    ]);
    dict
}

/// One GPU.
pub(super) fn gpu(gpu: &GpuView) -> Dict {
    let name = gpu.plan.gpu.pci.address.short();
    let mut dict = common(gpu);
    dict.extend([
        ("addr", text(&name)),
        ("name", text(&name)),
        ("dev_type", text("GPU")),
        ("sharing_mode", text("MPS")),
        ("virtual_num", Variant::from(i32::try_from(gpu.plan.slices).unwrap_or(i32::MAX))),
        ("control_daemon", text(&gpu.control_daemon)),
    ]);
    if let Some(percentage) = gpu.confirmed_thread_percentage {
        dict.insert("confirmed_thread_percentage", Variant::from(i32::from(percentage)));
    }
    if let Some(limit) = gpu.confirmed_memory_limit_mib {
        dict.insert("confirmed_memory_limit", mib(limit));
    }
    dict
}

/// What a slice and its GPU have in common.
fn common(gpu: &GpuView) -> Dict {
    let plan = &gpu.plan;
    let pci = &plan.gpu.pci;
    let mut dict = Dict::from([
        ("base_addr", text(&pci.address.short())),
        ("pci_bdf", text(&pci.address.to_string())),
        ("vendor_device_id", text(&plan.gpu.vendor_device_id())),
        ("numa_node", Variant::from(pci.numa_node)),
        ("mps_thread_percentage", Variant::from(i32::from(plan.thread_percentage))),
        ("limits_enforced", Variant::from(plan.limits_enforced)),
        ("pipe_directory", path(&plan.pipe_directory)),
        ("servable", Variant::from(plan.servable())),
        ("healthy", Variant::from(gpu.healthy)),
        ("reason", text(&gpu.reason)),
        ("detected_on_host", Variant::from(true)),
        ("hot_pluggable", Variant::from(false)),
    ]);
    let model = plan.gpu.model();
    if !model.is_empty() {
        dict.insert("model", text(&model));
    }
    if let Some(node) = &pci.render_node {
        dict.insert("render_node", path(node));
    }
    if let Some(link) = &pci.link {
        dict.insert("pcie_info", Variant::from(pcie_info(link)));
    }
    if plan.memory_limit_mib > 0 {
        dict.insert("memory_size", mib(plan.memory_limit_mib));
        dict.insert("mps_memory_limit", mib(plan.memory_limit_mib));
    }
    if let Some(mode) = gpu.compute_mode {
        dict.insert("compute_mode", text(&mode.to_string()));
    }
    if let Ok(nvml) = &plan.gpu.nvml {
        dict.insert("device_path", text(&nvml.uuid));
        dict.insert("nvidia_name", text(&nvml.name));
        dict.insert("nvidia_index", Variant::from(nvml.index));
        if let Some(minor) = nvml.minor {
            dict.insert("nvidia_minor", Variant::from(minor));
        }
        if let Some(total) = nvml.memory_total_mib.filter(|total| *total > 0) {
            dict.insert("mps_memory_total", mib(total));
        }
    }
    dict
}

fn pcie_info(link: &PcieLink) -> Dict {
    let mut dict = Dict::from([
        ("transfer_rate_per_lane", text(&link.rate)),
        ("version", text(link.version())),
        ("throughput", text(&link.throughput())),
    ]);
    if link.width > 0 {
        dict.insert("lane_width", Variant::from(i32::try_from(link.width).unwrap_or(i32::MAX)));
    }
    dict
}

/// One control daemon, with the GPUs that it serves.
pub(super) fn control_daemon(daemon: &ControlDaemonView, snapshot: &Snapshot) -> Dict {
    let served = snapshot.gpus.iter().flatten().filter(|gpu| gpu.control_daemon == daemon.id);
    let gpus: Vec<String> = served.map(|gpu| clean(gpu.uuid())).collect();
    let mut dict = Dict::from([
        ("id", text(&daemon.id)),
        ("state", text(daemon.state.as_str())),
        ("reason", text(&daemon.reason)),
        ("servers", Variant::from(daemon.servers.clone())),
        ("pipe_directory", path(&daemon.pipe_directory)),
        ("log_directory", path(&daemon.log_directory)),
        ("starts", Variant::from(daemon.starts)),
        ("restarts", Variant::from(daemon.restarts)),
        ("server_restarts", Variant::from(daemon.server_restarts)),
        ("faults", Variant::from(daemon.faults)),
        ("since", Variant::from(seconds(daemon.since))),
        ("gpus", Variant::from(gpus)),
    ]);
    if let Some(pid) = daemon.pid {
        dict.insert("pid", Variant::from(pid));
    }
    if let Some(multiuser) = daemon.multiuser {
        dict.insert("multiuser", Variant::from(multiuser));
    }
    dict
}

/// Something that happened.
pub(super) fn event(event: &Event) -> Dict {
    Dict::from([("at", Variant::from(microseconds(event.at))), ("text", text(&event.text))])
}

/// A process that uses a GPU.
pub(super) fn client(client: &ClientView) -> Dict {
    let mut dict = Dict::from([
        ("pid", Variant::from(client.pid)),
        ("command", text(&client.command)),
        ("gpu", text(&client.gpu_uuid)),
        ("bypass", Variant::from(client.bypass)),
        ("waiting", Variant::from(client.waiting)),
    ]);
    if let Some(uid) = client.uid {
        dict.insert("uid", Variant::from(uid));
    }
    if let Some(user) = &client.user {
        dict.insert("user", text(user));
    }
    if let Some(device) = &client.device {
        dict.insert("device", text(device));
    }
    if let Some(id) = &client.container_id {
        dict.insert("container_id", text(id));
    }
    if let Some(memory) = client.memory_mib {
        dict.insert("memory_mib", mib(memory));
    }
    if let Some(since) = client.since {
        dict.insert("since", Variant::from(seconds(since)));
    }
    dict
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
    fn memory_that_no_int32_holds_is_the_largest_there_is() {
        assert_eq!(mib(u64::MAX), Variant::from(i32::MAX));
        assert_eq!(mib(5760), Variant::from(5760i32));
    }

    #[test]
    fn a_lane_width_of_nothing_is_left_out() {
        let link = PcieLink { rate: "8GT/s".to_owned(), width: 0 };
        assert!(!pcie_info(&link).contains_key("lane_width"));
    }

    #[test]
    fn a_nul_never_reaches_the_bus() {
        assert_eq!(text("a\0b"), Variant::from("a\u{fffd}b"));
    }
}
