//! Settings that are right for this service, but stop the platform's host agent or its containers.
//!
//! The agent reads the same files itself. Unless it reads D-Bus, it accepts only a render node as the name of a GPU,
//! and gives every container the configured pipe directory.

use std::path::Path;

use super::{DevicePath, Origin, Problem, Settings, Topology};

/// The types of entries that the agent knows.
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

/// A setting with which the agent or its containers fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trouble {
    /// The stable name of this kind of trouble.
    pub name: &'static str,
    pub problem: Problem,
    /// The path that the agent does not know, if the trouble is a path.
    pub path: Option<DevicePath>,
}

impl Trouble {
    /// Puts the render node into the remedy, once it is known.
    pub(crate) fn name_render_node(&mut self, node: &Path) {
        self.problem.remedy = format!("name the GPU by its render node, {}", node.display());
    }
}

/// All troubles of these settings. If MPS is off, there are none: the agent then ignores entries of its type.
pub(super) fn troubles(settings: &Settings, topology: Option<&Origin>) -> Vec<Trouble> {
    let mut troubles = Vec::new();
    if !settings.enabled {
        return troubles;
    }
    if let (Topology::PerGpu, Some(origin)) = (settings.topology, topology) {
        let found = format!(
            "with per_gpu every container fails, unless the platform's host agent reads D-Bus: an agent that does not gives \
             containers {}, where no control daemon listens",
            settings.pipe_directory.display()
        );
        let problem =
            Problem::new(origin.clone(), super::TOPOLOGY_KEY, found, "write cuda_mps_topology: shared");
        troubles.push(Trouble { name: "agent-needs-shared", problem, path: None });
    }
    for entry in &settings.devices {
        if !TYPES.contains(&entry.device_type.as_str()) {
            let found = format!("with {:?} the platform's host agent does not start", entry.device_type);
            let problem = entry.problem("type", found, "correct its spelling or remove the entry");
            troubles.push(Trouble { name: "agent-unknown-type", problem, path: None });
        }
        let Some(path) = entry.path.as_ref().filter(|_| entry.mps.is_some()) else { continue };
        if !matches!(path, DevicePath::RenderNode(_) | DevicePath::Other(_)) {
            let found =
                format!("with {path} the platform's host agent does not start, unless it reads D-Bus");
            let remedy =
                "name the GPU by its render node, /dev/dri/renderDN, as `ls -l /dev/dri/by-path` shows it";
            let problem = entry.problem("path", found, remedy);
            troubles.push(Trouble { name: "agent-needs-render-node", problem, path: Some(path.clone()) });
        }
    }
    troubles
}
