//! What is right for this service, and stops the platform's host agent or its containers.
//!
//! The agent reads the same files by itself and knows less, unless it reads D-Bus: it takes no name of a GPU but its render
//! node, and gives every container the configured pipe directory.

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

/// Something with which the agent or its containers fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// Its name, which never changes.
    pub name: &'static str,
    /// Where it stands, what happens, and what to write instead.
    pub problem: Problem,
    /// The path that the agent does not know, where it is one.
    pub path: Option<DevicePath>,
}

impl Trouble {
    /// Names the render node to write, once it is known.
    pub fn name_render_node(&mut self, node: &Path) {
        self.problem.remedy = format!("name the GPU by its render node, {}", node.display());
    }
}

/// All of it in these settings. Where MPS is off, the agent leaves entries of its type alone.
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
        let (key, remedy) = (super::TOPOLOGY_KEY.to_owned(), "write cuda_mps_topology: shared".to_owned());
        let problem = Problem { origin: origin.clone(), key, found, remedy };
        troubles.push(Trouble { name: "agent-needs-shared", problem, path: None });
    }
    for (index, entry) in settings.devices.iter().enumerate() {
        let problem = |key, found: String, remedy: &str| Problem {
            origin: entry.origin.clone(),
            key: format!("devices[{index}].{key}"),
            found,
            remedy: remedy.to_owned(),
        };
        if !TYPES.contains(&entry.device_type.as_str()) {
            let found = format!("with {:?} the platform's host agent does not start", entry.device_type);
            let problem = problem("type", found, "correct its spelling or remove the entry");
            troubles.push(Trouble { name: "agent-unknown-type", problem, path: None });
        }
        let Some(path) = entry.path.as_ref().filter(|_| entry.mps.is_some()) else { continue };
        if !matches!(path, DevicePath::RenderNode(_) | DevicePath::Other(_)) {
            let found =
                format!("with {path} the platform's host agent does not start, unless it reads D-Bus");
            let remedy =
                "name the GPU by its render node, /dev/dri/renderDN, as `ls -l /dev/dri/by-path` shows it";
            let problem = problem("path", found, remedy);
            troubles.push(Trouble { name: "agent-needs-render-node", problem, path: Some(path.clone()) });
        }
    }
    troubles
}
