//! Plans each GPU: its slices, and the reasons why it can't be served.

use std::num::{NonZeroU32, NonZeroU64};

use mps_core::terms::SliceSize;

use super::entries::ConfiguredGpu;
use super::gpu_plan::{GpuPlan, HELD, INSEPARABLE, obstacles};
use super::limits;
use super::paths;
use super::warnings;
use crate::config::{
    CpuAffinity, DeviceEntry, Isolation, MpsEntry, MultiUser, Settings, SliceKeys, Topology,
};
use crate::host::compute_mode::ComputeMode;
use crate::host::driver::{self, LIMITS, LINKED_SOCKET, NVML_LISTS_CLIENTS};
use crate::host::gpu::Gpu;
use crate::host::inventory::Inventory;
use crate::host::nvml::facts::NvmlFacts;
use crate::problem::NamedProblem;

pub(super) fn gpu_plan(wanted: &ConfiguredGpu<'_>, settings: &Settings, inventory: &Inventory) -> GpuPlan {
    let ConfiguredGpu { gpu, keys, gone } = wanted;
    let MpsEntry { slices, .. } = keys;
    let isolation = settings.isolation(keys);
    let facts = gpu.facts();
    let capability = facts.and_then(|facts| facts.compute_capability);
    let limits_enforced = LIMITS.holds(inventory.series(), capability);
    let places = driver::most_clients(inventory.series(), capability);
    let sharing = limits::sharing(isolation, *slices);
    let size = |own: SliceKeys| SliceSize {
        memory_mib: facts.map_or(0, |facts| {
            let share = || facts.memory_total_mib.map_or(0, |total| limits::memory_mib(total, *slices));
            own.memory_mib.map_or_else(share, NonZeroU64::get)
        }),
        thread_percentage: own
            .thread_percentage
            .unwrap_or_else(|| limits::thread_percentage(settings.thread_policy, sharing)),
        max_clients: own.max_clients.map_or_else(|| limits::max_clients(places, sharing), NonZeroU32::get),
    };
    let pipe_directory = match (isolation, settings.topology, facts) {
        (Isolation::Gpu, Topology::PerGpu | Topology::PerSlice, Some(facts)) => {
            settings.pipe_directory.join(&facts.uuid)
        }
        _ => settings.pipe_directory.clone(),
    };
    let sizes: Vec<SliceSize> = keys.sizes().map(size).collect();
    let mut gpu = (*gpu).clone();
    let obstacles = match gone {
        Some(problem) => {
            // The processes that the former plan lists may have ended. The service can't check them while the GPU is missing.
            gpu.nvml.as_mut().into_iter().for_each(|facts| facts.state.foreign_processes.clear());
            vec![NamedProblem { name: "gpu-gone", problem: problem.clone() }]
        }
        None => {
            let facts = gpu.facts();
            let more = match isolation {
                Isolation::Gpu => facts.and_then(|facts| held(facts, settings)),
                Isolation::Slice => facts.and_then(|facts| inseparable(&gpu, facts, settings, inventory)),
            };
            obstacles(&gpu, &sizes).into_iter().chain(more).collect()
        }
    };
    GpuPlan {
        sizes,
        isolation,
        places,
        clients_counted: NVML_LISTS_CLIENTS.holds(inventory.series(), capability),
        limits_enforced,
        obstacles,
        warnings: facts.map(|facts| warnings::of_gpu(facts, keys, inventory)).unwrap_or_default(),
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

/// The obstacle that processes without MPS prevent the start of a server on the GPU. None if there is no process without MPS,
/// or if the GPU's compute mode admits these processes beside a server and the service does not change the mode.
fn held(facts: &NvmlFacts, settings: &Settings) -> Option<NamedProblem> {
    let exclusive = facts.state.compute_mode.is_some_and(ComputeMode::is_exclusive);
    if facts.state.foreign_processes.is_empty() || !(settings.supervision.set_compute_mode || exclusive) {
        return None;
    }
    let (holders, pids): (Vec<_>, Vec<_>) = facts
        .state
        .foreign_processes
        .iter()
        .map(|(pid, command)| (format!("{pid} ({command})"), pid.to_string()))
        .unzip();
    let found =
        format!("processes that do not use MPS have the GPU open: {holders}", holders = holders.join(", "));
    Some(NamedProblem::new(HELD, found, format!("end these processes: kill {pids}", pids = pids.join(" "))))
}

/// The obstacle that each slice of the GPU should have a control daemon of its own, but can't have it. None if each slice can
/// have one.
fn inseparable(
    gpu: &Gpu,
    facts: &NvmlFacts,
    settings: &Settings,
    inventory: &Inventory,
) -> Option<NamedProblem> {
    let take_back = "remove the key that asks for a control daemon for each slice: isolation in \
                     host_container_device.yml, or cuda_mps_topology in host.conf";
    let mode = facts.state.compute_mode.filter(|mode| mode.is_exclusive());
    let (found, remedy) = if settings.multiuser == MultiUser::Off {
        let found = "a control daemon for each slice needs multi-user mode, but cuda_mps_multiuser is off";
        (found.to_owned(), "remove cuda_mps_multiuser".to_owned())
    } else if !LINKED_SOCKET.holds(inventory.series(), facts.compute_capability) {
        let found = "a control daemon for each slice needs driver 580 or newer, and a GPU from Volta on";
        (found.to_owned(), take_back.to_owned())
    } else if let Some(mode) = mode.filter(|_| !settings.supervision.set_compute_mode) {
        let found = format!("compute mode {mode} lets the server of only one slice use the GPU");
        let address = gpu.pci.address;
        (found, format!("change the compute mode with nvidia-smi -i {address} -c DEFAULT, or {take_back}"))
    } else {
        return None;
    };
    Some(NamedProblem::new(INSEPARABLE, found, remedy))
}

/// Adds a warning for each entry of another type that names a GPU which is served. In the compute mode `EXCLUSIVE_PROCESS` only
/// the MPS server can open the GPU, so a program that gets the GPU through that entry fails.
pub(super) fn warn_of_other_claims(gpus: &mut [GpuPlan], settings: &Settings, inventory: &Inventory) {
    let claims = |entry: &&DeviceEntry, address| paths::claimed_by(entry, inventory) == Some(address);
    let (ours, others): (Vec<_>, Vec<_>) = settings.devices.iter().partition(|entry| entry.mps.is_some());
    for gpu in gpus {
        let address = gpu.gpu.pci.address;
        let Some(entry) = ours.iter().find(|entry| claims(entry, address)) else { continue };
        let others = others.iter().filter(|other| claims(other, address));
        gpu.warnings.extend(others.map(|other| warnings::given_out_twice(entry, other)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::{facts, h200s, limits, node, p40, plan, with};

    #[test]
    fn an_entrys_own_percentage_overrides_the_policy() {
        let mut settings = with(vec![(node(128), 4), (node(129), 4)]);
        settings.devices[0].mps.as_mut().unwrap().each.thread_percentage = Some(80);
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
                |all| facts(all, 1).state.mig_enabled = true,
                "MIG is on; turn MIG off (nvidia-smi -i 0000:1b:00.0 -mig 0) once nothing runs on the GPU; \
                 a GPU before Hopper then needs a reset (nvidia-smi -i 0000:1b:00.0 --gpu-reset), with this \
                 service and nvidia-persistenced stopped",
            ),
            (
                |all| facts(all, 1).state.compute_mode = Some(ComputeMode::Prohibited),
                "compute mode Prohibited lets no process use the GPU; change the compute mode with \
                 nvidia-smi -i 0000:1b:00.0 -c DEFAULT",
            ),
            (
                |all| {
                    facts(all, 1).state.foreign_processes =
                        vec![(4711, "python3".to_owned()), (12, "x".to_owned())];
                },
                "processes that do not use MPS have the GPU open: 4711 (python3), 12 (x); end these \
                 processes: kill 4711 12",
            ),
            (
                |all| facts(all, 1).memory_total_mib = None,
                "NVML does not report the memory of the GPU, which may share the memory of the host: \
                 the service can't divide this memory by itself; write the memory of every slice in the \
                 file host_container_device.yml, such as memory: 20GiB",
            ),
        ];
        for (ail, reason) in ailments {
            let mut inventory = h200s();
            ail(&mut inventory);
            let plan = plan(&entries(), &inventory).unwrap();
            assert_eq!(plan.gpus[0].unusable(), None);
            assert_eq!(plan.gpus[1].unusable().as_deref(), Some(reason));
            assert_eq!(plan.gpus[1].slices(), 2);
            let [daemon] = plan.control_daemons.as_slice() else { panic!("{plan:?}") };
            assert_eq!(daemon.gpus.len(), 1);
            // The thread percentage of a GPU that can't be served does not count for the control daemon's default.
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
        facts(&mut inventory, 0).state.mig_enabled = true;
        facts(&mut inventory, 0).memory_total_mib = None;
        let plan = plan(&with(vec![(node(128), 4)]), &inventory).unwrap();
        let reason = plan.gpus[0].unusable().unwrap();
        assert!(reason.contains("MIG is on") && reason.contains("the memory of every slice"), "{reason}");
    }

    #[test]
    fn foreign_processes_matter_if_the_mode_is_or_becomes_exclusive() {
        let mut settings = with(vec![(node(128), 4)]);
        let mut inventory = p40();
        facts(&mut inventory, 0).state.foreign_processes = vec![(4711, "python3".to_owned())];
        let mut unusable = |set, mode| {
            settings.supervision.set_compute_mode = set;
            facts(&mut inventory, 0).state.compute_mode = mode;
            plan(&settings, &inventory).unwrap().gpus[0].unusable().is_some()
        };
        assert!(unusable(true, Some(ComputeMode::Default)));
        assert!(unusable(false, Some(ComputeMode::ExclusiveProcess)));
        assert!(!unusable(false, Some(ComputeMode::Default)));
        assert!(!unusable(false, None));
    }
}
