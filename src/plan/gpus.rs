//! The plan for one GPU: its slices, and the reasons why it can't be served.

use std::num::NonZeroU32;
use std::path::PathBuf;

use super::entries::Wanted;
use super::limits;
use super::warnings::{self, Warning};
use crate::config::{CpuAffinity, Settings, Topology};
use crate::host::cpus::Cpus;
use crate::host::driver::{self, LIMITS, NVML_LISTS_CLIENTS};
use crate::host::gpu::{ComputeMode, Gpu, NvmlFacts, PciAddress};
use crate::host::inventory::Inventory;

/// One configured GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuPlan {
    /// The facts about it.
    pub gpu: Gpu,
    /// The number of its slices.
    pub slices: u32,
    /// The memory of one slice: the GPU's memory divided by the number of slices, in whole MiB. 0 if the memory is not
    /// known.
    pub memory_limit_mib: u64,
    /// The active thread percentage of one slice, 1 to 100.
    pub thread_percentage: u8,
    /// The most clients of one slice. None if the GPU's clients can't be counted.
    pub max_clients: Option<u32>,
    /// Whether the GPU enforces the two limits.
    pub limits_enforced: bool,
    /// The reason why it can't be served now, if there is one.
    pub unusable: Option<String>,
    /// Facts that an administrator should know, although the GPU is served.
    pub warnings: Vec<Warning>,
    /// The pipe directory of its control daemon.
    pub pipe_directory: PathBuf,
    /// The directory of the directories of its slices, if each slice has one.
    pub slice_directories: Option<PathBuf>,
    /// The CPUs near it, if its control daemon and its clients are to run there. None if these are all CPUs.
    pub cpus: Option<Cpus>,
}

impl GpuPlan {
    /// Whether the GPU can be served, even if not now. If not, an administrator has to change the GPU first.
    pub fn servable(&self) -> bool {
        match &self.gpu.nvml {
            Ok(facts) => obstacles(&self.gpu, facts).is_empty(),
            Err(_) => self.gpu.pci.foreign_driver().is_none(),
        }
    }

    /// The name of the slice with this ordinal: `00:06.0-1`.
    pub fn slice_name(&self, ordinal: u32) -> String {
        slice_name(self.gpu.pci.address, ordinal)
    }

    /// The directory of the slice with this ordinal.
    pub fn slice_directory(&self, ordinal: u32) -> Option<PathBuf> {
        let name = slice_file_name(self.gpu.pci.address, ordinal);
        Some(self.slice_directories.as_ref()?.join(name))
    }

    /// The processes without MPS, if they alone keep the GPU from being served.
    pub fn holders(&self) -> &[(u32, String)] {
        match &self.gpu.nvml {
            Ok(facts) if self.unusable.is_some() && ailments(&self.gpu).is_empty() => {
                &facts.foreign_processes
            }
            _ => &[],
        }
    }
}

pub(super) fn slice_name(gpu: PciAddress, ordinal: u32) -> String {
    format!("{}-{ordinal}", gpu.short())
}

/// The name of the directory of a slice: its own, without the colons at which `docker --volume` splits.
pub(super) fn slice_file_name(gpu: PciAddress, ordinal: u32) -> String {
    slice_name(gpu, ordinal).replace(':', "_")
}

pub(super) fn gpu_plan(wanted: &Wanted<'_>, settings: &Settings, inventory: &Inventory) -> GpuPlan {
    let Wanted { gpu, slices, thread_percentage, max_clients, gone } = wanted;
    let facts = gpu.facts();
    let total = facts.and_then(|facts| facts.memory_total_mib);
    let capability = facts.and_then(|facts| facts.compute_capability);
    let limits_enforced = LIMITS.holds(inventory.series(), capability);
    let places = driver::most_clients(inventory.series(), capability);
    let max_clients = max_clients.map_or_else(|| limits::max_clients(places, *slices), NonZeroU32::get);
    let pipe_directory = match (settings.topology, facts) {
        (Topology::PerGpu, Some(facts)) => settings.pipe_directory.join(&facts.uuid),
        _ => settings.pipe_directory.clone(),
    };
    let mut gpu = (*gpu).clone();
    let unusable = match gone {
        Some(reason) => {
            // The processes that used the GPU must not be ended any more.
            gpu.nvml.as_mut().into_iter().for_each(|facts| facts.foreign_processes.clear());
            Some(reason.clone())
        }
        None => why_unusable(&gpu, settings),
    };
    GpuPlan {
        slices: slices.get(),
        memory_limit_mib: total.map_or(0, |total| limits::memory_mib(total, *slices)),
        thread_percentage: thread_percentage
            .unwrap_or_else(|| limits::thread_percentage(settings.thread_policy, *slices)),
        max_clients: NVML_LISTS_CLIENTS.holds(inventory.series(), capability).then_some(max_clients),
        limits_enforced,
        unusable,
        warnings: facts
            .map(|facts| warnings::of(facts, *slices, wanted.max_clients, inventory))
            .unwrap_or_default(),
        pipe_directory,
        slice_directories: None,
        cpus: gpu
            .pci
            .local_cpus
            .filter(|_| settings.cpu_affinity == CpuAffinity::Auto)
            .and_then(|cpus| inventory.if_not_all(cpus)),
        gpu,
    }
}

/// The reasons why the GPU can't be served, except for processes that hold it. It gives all of them at once, so that
/// nobody corrects one only to meet the next.
fn ailments(gpu: &Gpu) -> Vec<String> {
    match &gpu.nvml {
        Ok(facts) => obstacles(gpu, facts),
        Err(reason) => vec![reason.to_string()],
    }
}

/// The settings and properties of a GPU that keep it from being served until somebody changes them.
fn obstacles(gpu: &Gpu, facts: &NvmlFacts) -> Vec<String> {
    let mut reasons = Vec::new();
    let address = gpu.pci.address;
    if facts.mig_enabled {
        reasons.push(format!("MIG is on; turn it off with nvidia-smi -i {address} -mig 0"));
    }
    if facts.compute_mode == Some(ComputeMode::Prohibited) {
        reasons.push(format!(
            "compute mode Prohibited lets no process in; change it with nvidia-smi -i {address} -c DEFAULT"
        ));
    }
    if facts.memory_total_mib.is_none() {
        reasons.push("NVML does not say how much memory it has, so it can't be divided".to_owned());
    }
    reasons
}

/// All reasons why the GPU can't be served, in one text.
fn why_unusable(gpu: &Gpu, settings: &Settings) -> Option<String> {
    let mut reasons = ailments(gpu);
    reasons.extend(gpu.facts().and_then(|facts| held(facts, settings)));
    if reasons.is_empty() { None } else { Some(reasons.join("; ")) }
}

/// The reason if processes would keep an MPS server from starting.
fn held(facts: &NvmlFacts, settings: &Settings) -> Option<String> {
    let exclusive =
        matches!(facts.compute_mode, Some(ComputeMode::ExclusiveProcess | ComputeMode::ExclusiveThread));
    if facts.foreign_processes.is_empty() || !(settings.set_compute_mode || exclusive) {
        return None;
    }
    let holders: Vec<_> =
        facts.foreign_processes.iter().map(|(pid, command)| format!("{pid} ({command})")).collect();
    Some(format!("held by processes that do not go through MPS: {}; end them", holders.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::{facts, h200s, limits, node, p40, plan, with};

    #[test]
    fn an_entrys_own_percentage_overrides_the_policy() {
        let mut settings = with(vec![(node(128), 4), (node(129), 4)]);
        settings.devices[0].mps.as_mut().unwrap().thread_percentage = Some(80);
        let plan = plan(&settings, &h200s()).unwrap();
        assert_eq!(limits(&plan), [(30720, 80), (30720, 25)]);
        assert_eq!(plan.control_daemons[0].thread_percentage, 80);
    }

    type Ailment = fn(&mut Inventory);

    #[test]
    fn an_unusable_gpu_does_not_stop_the_others() {
        let entries = || with(vec![(node(128), 4), (node(129), 2)]);
        let ailments: [(Ailment, &str); 5] = [
            (|all| all.gpus[1].nvml = Err("GPU is lost".into()), "GPU is lost"),
            (
                |all| facts(all, 1).mig_enabled = true,
                "MIG is on; turn it off with nvidia-smi -i 0000:1b:00.0 -mig 0",
            ),
            (
                |all| facts(all, 1).compute_mode = Some(ComputeMode::Prohibited),
                "compute mode Prohibited lets no process in; change it with nvidia-smi -i 0000:1b:00.0 -c DEFAULT",
            ),
            (
                |all| {
                    facts(all, 1).foreign_processes =
                        vec![(4711, "python3".to_owned()), (12, "x".to_owned())];
                },
                "held by processes that do not go through MPS: 4711 (python3), 12 (x); end them",
            ),
            (
                |all| facts(all, 1).memory_total_mib = None,
                "NVML does not say how much memory it has, so it can't be divided",
            ),
        ];
        for (ail, reason) in ailments {
            let mut inventory = h200s();
            ail(&mut inventory);
            let plan = plan(&entries(), &inventory).unwrap();
            assert_eq!(plan.gpus[0].unusable, None);
            assert_eq!(plan.gpus[1].unusable.as_deref(), Some(reason));
            assert_eq!(plan.gpus[1].slices, 2);
            let [daemon] = plan.control_daemons.as_slice() else { panic!("{plan:?}") };
            assert_eq!(daemon.gpus.len(), 1);
            // The percentage of a GPU that is left out does not count.
            assert_eq!(daemon.thread_percentage, 25);
            assert_eq!(plan.gpus[0].warnings, []);
        }
        let mut dead = h200s();
        for gpu in &mut dead.gpus {
            gpu.nvml = Err("GPU is lost".into());
        }
        for topology in [Topology::Shared, Topology::PerGpu] {
            let mut settings = entries();
            settings.topology = topology;
            let plan = plan(&settings, &dead).unwrap();
            assert_eq!(plan.control_daemons, []);
            assert_eq!(limits(&plan), [(0, 25), (0, 50)]);
        }
    }

    #[test]
    fn all_reasons_of_an_unusable_gpu_are_given_at_once() {
        let mut inventory = p40();
        facts(&mut inventory, 0).mig_enabled = true;
        facts(&mut inventory, 0).memory_total_mib = None;
        let plan = plan(&with(vec![(node(128), 4)]), &inventory).unwrap();
        let reason = plan.gpus[0].unusable.clone().unwrap();
        assert!(reason.contains("MIG is on") && reason.contains("how much memory"), "{reason}");
    }

    #[test]
    fn foreign_processes_matter_if_the_mode_is_or_becomes_exclusive() {
        let mut settings = with(vec![(node(128), 4)]);
        let mut inventory = p40();
        facts(&mut inventory, 0).foreign_processes = vec![(4711, "python3".to_owned())];
        let mut unusable = |set, mode| {
            settings.set_compute_mode = set;
            facts(&mut inventory, 0).compute_mode = mode;
            plan(&settings, &inventory).unwrap().gpus[0].unusable.is_some()
        };
        assert!(unusable(true, Some(ComputeMode::Default)));
        assert!(unusable(false, Some(ComputeMode::ExclusiveProcess)));
        assert!(!unusable(false, Some(ComputeMode::Default)));
        assert!(!unusable(false, None));
    }
}
