//! Finds settings that are correct for this service, but with which the host agent of the platform (Cloudpods) or the host
//! agent's containers fail. The host agent reads the same configuration files as this service. Unless the host agent uses
//! D-Bus, it accepts only a render node as the name of a GPU, and gives every container the configured pipe directory.

use std::path::Path;

use super::{DevicePath, Isolation, Settings, Topology, below};
use crate::problem::{LocatedProblem, Origin, Problem};

const PROGRAMS: &str = "/opt/yunion";

const TYPES: [&str; 13] = [
    "NVIDIA_MPS",
    "NVIDIA_GPU_SHARE",
    "NVIDIA_GPU",
    "NVIDIA_HAMI",
    "CPH_AMD_GPU",
    "CPH_AOSP_BINDER",
    "VASTAITECH_GPU",
    "NETINT_CA_ASIC",
    "NETINT_CA_QUADRA",
    "ASCEND_NPU",
    "ASCEND_NPU_HAMI",
    "HYGON_DCU",
    "HYGON_DCU_HAMI",
];

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// The stable name of this kind of trouble, by which `yunion-mpsctl doctor` reports it.
    pub name: &'static str,
    pub problem: LocatedProblem,
    /// The path in the device file that the host agent does not accept. None if the trouble is not about a path.
    pub path: Option<DevicePath>,
}

/// True if the host belongs to Cloudpods, and so has a host agent. The signs are Cloudpods's installed programs, and keys in
/// the configuration files that this service does not know, since most of these keys are the host agent's.
pub(super) fn is_here(sysroot: &Path, unknown_keys: &[(Origin, String)]) -> bool {
    !unknown_keys.is_empty() || below(sysroot, Path::new(PROGRAMS)).exists()
}

/// Finds the settings with which the host agent or its containers fail. If MPS is off, the host agent ignores entries of the
/// type `NVIDIA_MPS`, so only keys without a value can make the host agent fail.
pub(super) fn troubles(
    settings: &Settings,
    topology: Option<&Origin>,
    empty: &[(&'static str, Origin, &'static str)],
) -> Vec<Trouble> {
    let mut troubles: Vec<Trouble> =
        empty.iter().map(|(key, origin, read_as)| without_value(key, origin, read_as)).collect();
    if !settings.enabled {
        return troubles;
    }
    let many = match settings.topology {
        Topology::Shared => None,
        Topology::PerGpu => Some("per_gpu"),
        Topology::PerSlice => Some("per_slice"),
    };
    if let (Some(many), Some(origin)) = (many, topology) {
        let found = format!(
            "with the topology {many} every container fails, unless the platform's host agent reads D-Bus: \
             an older agent gives containers the directory {pipe_directory}, where no control daemon listens",
            pipe_directory = settings.pipe_directory.display()
        );
        let remedy = "write cuda_mps_topology: shared";
        let problem = LocatedProblem::new(origin.clone(), super::TOPOLOGY_KEY, found, remedy);
        troubles.push(Trouble { name: "agent-needs-shared", problem, path: None });
    }
    for entry in &settings.devices {
        if !TYPES.contains(&entry.device_type.as_str()) {
            let found = format!(
                "the platform's host agent rejects the type {:?} and does not start",
                entry.device_type
            );
            let problem = entry
                .problem("type", Problem::new(found, "correct the spelling of the type or remove the entry"));
            troubles.push(Trouble { name: "agent-unknown-type", problem, path: None });
        }
        if entry.mps.as_ref().is_some_and(|keys| keys.isolation == Some(Isolation::Slice)) {
            let found = "the platform's host agent does not list the GPU, unless the agent reads D-Bus: an \
                         older agent lists only GPUs in compute mode EXCLUSIVE_PROCESS, but isolation: slice \
                         needs DEFAULT";
            let remedy = "write isolation: gpu";
            let problem = entry.problem("isolation", Problem::new(found, remedy));
            troubles.push(Trouble { name: "agent-needs-exclusive", problem, path: None });
        }
        if entry.mps.as_ref().is_some_and(|keys| keys.each.memory_mib.is_some() || !keys.own.is_empty()) {
            let found = "the platform's host agent gives each slice the GPU's memory divided by virtual_number, unless the \
                         agent reads D-Bus";
            let is_list = entry.mps.as_ref().is_some_and(|keys| !keys.own.is_empty());
            let (key, remedy) = if is_list {
                ("slices", "remove the key slices, and write virtual_number instead")
            } else {
                ("memory", "remove the key memory")
            };
            let remedy = format!("{remedy}, unless the GPU shares the host's memory");
            let problem = entry.problem(key, Problem::new(found, remedy));
            troubles.push(Trouble { name: "agent-divides-memory", problem, path: None });
        }
        let Some(path) = entry.path.as_ref().filter(|_| entry.mps.is_some()) else { continue };
        if !matches!(path, DevicePath::RenderNode(_) | DevicePath::Other(_)) {
            let found = format!(
                "the platform's host agent rejects the path {path} and does not start, unless the agent \
                 reads D-Bus"
            );
            let remedy =
                "name the GPU by its render node, /dev/dri/renderDN, as `ls -l /dev/dri/by-path` shows it";
            let problem = entry.problem("path", Problem::new(found, remedy));
            troubles.push(Trouble { name: "agent-needs-render-node", problem, path: Some(path.clone()) });
        }
    }
    troubles
}

fn without_value(key: &str, origin: &Origin, read_as: &str) -> Trouble {
    let found = format!("the key has no value, so this service takes the key as not set, and {read_as}");
    let problem = LocatedProblem::new(origin.clone(), key, found, "write a value or remove the line");
    Trouble { name: "agent-empty-value", problem, path: None }
}
