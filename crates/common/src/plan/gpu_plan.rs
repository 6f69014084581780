//! The plan for one GPU as plain data: its slices with their limits and names, and the problems of the GPU itself.

use std::path::PathBuf;

use mps_core::terms::{SliceId, SliceSize};

use crate::config::Isolation;
use crate::host::compute_mode::ComputeMode;
use crate::host::cpus::Cpus;
use crate::host::gpu::Gpu;
use crate::host::nvml::facts::NvmlFacts;
use crate::problem::NamedProblem;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuPlan {
    pub gpu: Gpu,
    pub sizes: Vec<SliceSize>,
    pub isolation: Isolation,
    /// The most clients that a control daemon can have on the GPU at the same time.
    pub places: u32,
    /// True if the service can count the clients on the GPU, as from Volta on.
    pub clients_counted: bool,
    pub limits_enforced: bool,
    pub obstacles: Vec<NamedProblem>,
    pub warnings: Vec<NamedProblem>,
    /// The pipe directory of the GPU's control daemon. If each slice has a control daemon, the pipe directories of these
    /// control daemons are inside this directory.
    pub pipe_directory: PathBuf,
    /// The directory that contains the directories of the GPU's slices. None if slices have no directories.
    pub slice_directories: Option<PathBuf>,
    /// The CPUs near the GPU, to which its control daemon is bound. None if the control daemon is not bound, or if all CPUs of
    /// the host are near the GPU.
    pub cpus: Option<Cpus>,
}

pub const HELD: &str = "gpu-held";

pub(super) const INSEPARABLE: &str = "isolation-impossible";

impl GpuPlan {
    /// The reasons why the GPU can't be served now, in words. None if the GPU can be served.
    pub fn unusable(&self) -> Option<String> {
        let obstacles: Vec<String> = self.obstacles.iter().map(|one| one.problem.to_string()).collect();
        (!obstacles.is_empty()).then(|| obstacles.join("; "))
    }

    /// True if the GPU can be served, now or later, without a change of the GPU's settings by an administrator.
    pub fn servable(&self) -> bool {
        match &self.gpu.nvml {
            Ok(facts) => {
                settings(&self.gpu, facts, &self.sizes).is_empty()
                    && !self.obstacles.iter().any(|one| one.name == INSEPARABLE)
            }
            Err(_) => self.gpu.pci.foreign_driver().is_none(),
        }
    }

    pub fn slices(&self) -> u32 {
        u32::try_from(self.sizes.len()).unwrap_or(u32::MAX)
    }

    pub fn size(&self, ordinal: u32) -> SliceSize {
        usize::try_from(ordinal).ok().and_then(|ordinal| self.sizes.get(ordinal)).copied().unwrap_or_default()
    }

    /// The largest value of each limit among the GPU's slices. The values can come from different slices.
    pub fn largest(&self) -> SliceSize {
        SliceSize::largest(&self.sizes)
    }

    pub fn equal_slices(&self) -> bool {
        self.sizes.iter().all(|size| Some(size) == self.sizes.first())
    }

    pub fn max_clients(&self, ordinal: u32) -> Option<u32> {
        self.clients_counted.then(|| self.size(ordinal).max_clients)
    }

    /// The most clients of all slices together, if the slices share a control daemon. None if each slice has its own control
    /// daemon, or if NVML can't read the GPU.
    pub fn shared_places(&self) -> Option<u32> {
        (self.isolation == Isolation::Gpu && self.gpu.facts().is_some()).then_some(self.places)
    }

    pub fn slice(&self, ordinal: u32) -> SliceId {
        self.gpu.id().slice(ordinal)
    }

    pub fn slice_pipe_directory(&self, ordinal: u32) -> PathBuf {
        match self.isolation {
            Isolation::Gpu => self.pipe_directory.clone(),
            Isolation::Slice => self.pipe_directory.join(self.slice(ordinal).directory_name()),
        }
    }

    pub fn slice_directory(&self, ordinal: u32) -> Option<PathBuf> {
        Some(self.slice_directories.as_ref()?.join(self.slice(ordinal).directory_name()))
    }

    /// The processes without MPS that use the GPU. Empty unless these processes are the only reason why the GPU is not served.
    pub fn holders(&self) -> &[(u32, String)] {
        match (&self.gpu.nvml, self.obstacles.as_slice()) {
            (Ok(facts), [NamedProblem { name: HELD, .. }]) => &facts.state.foreign_processes,
            _ => &[],
        }
    }
}

/// The reasons why a GPU can't be served, except for processes that use it. All reasons are returned at once, so that an
/// administrator can fix all of them before the next attempt.
pub(super) fn obstacles(gpu: &Gpu, sizes: &[SliceSize]) -> Vec<NamedProblem> {
    match &gpu.nvml {
        Ok(facts) => settings(gpu, facts, sizes),
        Err(problem) => vec![NamedProblem { name: "gpu-unreachable", problem: problem.clone() }],
    }
}

/// The settings and properties of a GPU because of which it can't be served until an administrator changes them.
fn settings(gpu: &Gpu, facts: &NvmlFacts, sizes: &[SliceSize]) -> Vec<NamedProblem> {
    let mut obstacles = Vec::new();
    let address = gpu.pci.address;
    if facts.state.mig_enabled {
        let remedy = format!(
            "turn MIG off (nvidia-smi -i {address} -mig 0) once nothing runs on the GPU; a GPU before \
             Hopper then needs a reset (nvidia-smi -i {address} --gpu-reset), with this service and \
             nvidia-persistenced stopped"
        );
        obstacles.push(NamedProblem::new("mig-enabled", "MIG is on", remedy));
    }
    if facts.state.compute_mode == Some(ComputeMode::Prohibited) {
        let remedy = format!("change the compute mode with nvidia-smi -i {address} -c DEFAULT");
        let found = "compute mode Prohibited lets no process use the GPU";
        obstacles.push(NamedProblem::new("compute-mode-prohibited", found, remedy));
    }
    if facts.memory_total_mib.is_none() && sizes.iter().any(|size| size.memory_mib == 0) {
        let found = "NVML does not report the memory of the GPU, which may share the memory of the host: \
                     the service can't divide this memory by itself";
        let remedy =
            "write the memory of every slice in the file host_container_device.yml, such as memory: 20GiB";
        obstacles.push(NamedProblem::new("memory-unknown", found, remedy));
    }
    obstacles
}
