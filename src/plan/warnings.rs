//! Facts about a GPU that an administrator should know, although the GPU is served.

use std::num::NonZeroU32;

use super::control_daemons::ControlDaemonPlan;
use super::gpus::GpuPlan;
use super::paths;
use crate::config::{Origin, Settings};
use crate::host::driver::{self, LIMITS, NVML_LISTS_CLIENTS};
use crate::host::gpu::NvmlFacts;
use crate::host::inventory::Inventory;

/// A fact about a GPU that is served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Warning {
    /// Nobody knows whether the GPU enforces limits.
    #[error("NVML does not report its compute capability, so it counts as a GPU that enforces no limits")]
    NoComputeCapability,
    /// The GPU can't hold a client for each slice.
    #[error("{slices} slices, but the GPU can hold {clients} clients at once")]
    MoreSlicesThanClients { slices: u32, clients: u32 },
    /// One slice may have more clients than the GPU can hold.
    #[error("max_clients is {max_clients}, but the GPU can hold {clients} clients at once")]
    MoreClientsThanPlaces { max_clients: u32, clients: u32 },
    /// The GPU's clients can't be counted.
    #[error("max_clients has no effect, since clients can't be counted on a GPU before Volta")]
    ClientsNotCounted,
    /// The GPU is older than Volta.
    #[error(
        "compute capability {}.{} enforces neither the memory limit nor the thread percentage",
        capability.0, capability.1
    )]
    NotEnforced { capability: (u32, u32) },
    /// An entry of another type names the same GPU. That entry's user can't work with the compute mode for MPS.
    #[error("{origin} lists it as {device_type} too")]
    GivenOutTwice { origin: Origin, device_type: String },
    /// The control daemon's default percentage belongs to another GPU, which has larger slices.
    #[error(
        "the shared control daemon's default is {default} %, so only clients that set \
         CUDA_MPS_ACTIVE_THREAD_PERCENTAGE keep to {own} %"
    )]
    LooseThreads { default: u8, own: u8 },
    /// The control daemon's default memory limit belongs to another GPU, which has larger slices.
    #[error(
        "the shared control daemon's default is {default_mib} MiB, so only clients that set \
         CUDA_MPS_PINNED_DEVICE_MEM_LIMIT keep to {own_mib} MiB"
    )]
    LooseMemory { default_mib: u64, own_mib: u64 },
}

/// The warnings that follow from the GPU itself.
pub(super) fn of(
    facts: &NvmlFacts,
    slices: NonZeroU32,
    max_clients: Option<NonZeroU32>,
    inventory: &Inventory,
) -> Vec<Warning> {
    let Some(capability) = facts.compute_capability else { return vec![Warning::NoComputeCapability] };
    let mut warnings = Vec::new();
    let clients = driver::most_clients(inventory.series(), facts.compute_capability);
    let slices = slices.get();
    if slices > clients {
        warnings.push(Warning::MoreSlicesThanClients { slices, clients });
    }
    let counted = NVML_LISTS_CLIENTS.holds(inventory.series(), facts.compute_capability);
    match max_clients.map(NonZeroU32::get) {
        Some(_) if !counted => warnings.push(Warning::ClientsNotCounted),
        Some(max_clients) if max_clients > clients => {
            warnings.push(Warning::MoreClientsThanPlaces { max_clients, clients });
        }
        _ => {}
    }
    if !LIMITS.holds(inventory.series(), facts.compute_capability) {
        warnings.push(Warning::NotEnforced { capability });
    }
    warnings
}

/// Warns of entries of another type for a GPU that is served. Their users can't work with its compute mode.
pub(super) fn of_other_claims(gpus: &mut [GpuPlan], settings: &Settings, inventory: &Inventory) {
    for entry in settings.devices.iter().filter(|entry| entry.mps.is_none()) {
        let claimed = paths::claimed_by(entry, inventory);
        for gpu in gpus.iter_mut().filter(|gpu| Some(gpu.gpu.pci.address) == claimed) {
            let (origin, device_type) = (entry.origin.clone(), entry.device_type.clone());
            gpu.warnings.push(Warning::GivenOutTwice { origin, device_type });
        }
    }
}

/// Warns of slices for which the control daemon's defaults, which fit its largest slice, are too large.
pub(super) fn of_loose_defaults(gpus: &mut [GpuPlan], control_daemons: &[ControlDaemonPlan]) {
    for control_daemon in control_daemons {
        let default = control_daemon.thread_percentage;
        for served in control_daemon.gpus.iter().filter(|served| served.limits_enforced) {
            let Some(gpu) = gpus.iter_mut().find(|gpu| gpu.gpu.pci.address == served.pci) else { continue };
            let (own, own_mib) = (gpu.thread_percentage, gpu.memory_limit_mib);
            let default_mib = served.memory_limit_mib;
            if own < default {
                gpu.warnings.push(Warning::LooseThreads { default, own });
            }
            if own_mib < default_mib {
                gpu.warnings.push(Warning::LooseMemory { default_mib, own_mib });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::{and_other, facts, h200s, node, pci, plan, with};

    #[test]
    fn more_slices_than_clients_is_a_warning() {
        let warned = |slices, capability, driver: &str| {
            let mut inventory = h200s();
            inventory.driver = Ok(driver.to_owned());
            facts(&mut inventory, 0).compute_capability = Some(capability);
            let plan = plan(&with(vec![(node(128), slices)]), &inventory).unwrap();
            plan.gpus[0].warnings.iter().any(|warning| warning.to_string().contains("clients at once"))
        };
        let golden = [
            (16, (6, 1), "580.1"),
            (48, (7, 0), "580.159.04"),
            (60, (9, 0), "590.44.01"),
            (48, (9, 0), "unknown"),
        ];
        for (most, capability, driver) in golden {
            assert!(!warned(most, capability, driver), "{most} {driver}");
            assert!(warned(most + 1, capability, driver), "{most} {driver}");
        }
    }

    #[test]
    fn a_slice_with_more_clients_than_the_gpu_has_places_is_a_warning() {
        let planned = |max_clients, capability| {
            let mut inventory = h200s();
            facts(&mut inventory, 0).compute_capability = Some(capability);
            let mut settings = with(vec![(node(128), 4)]);
            settings.devices[0].mps.as_mut().unwrap().max_clients = NonZeroU32::new(max_clients);
            let gpu = plan(&settings, &inventory).unwrap().gpus.remove(0);
            let warned = |warning: &Warning| warning.to_string().contains("max_clients");
            (gpu.max_clients, gpu.warnings.iter().filter(|warning| warned(warning)).count())
        };
        assert_eq!(planned(0, (9, 0)), (Some(12), 0));
        assert_eq!(planned(48, (9, 0)), (Some(48), 0));
        assert_eq!(planned(49, (9, 0)), (Some(49), 1));
        assert_eq!(planned(0, (6, 1)), (None, 0));
        assert_eq!(planned(1, (6, 1)), (None, 1));
    }

    #[test]
    fn an_unknown_compute_capability_counts_as_an_old_one() {
        let mut inventory = h200s();
        facts(&mut inventory, 0).compute_capability = None;
        let plan = plan(&with(vec![(node(128), 4)]), &inventory).unwrap();
        assert!(!plan.gpus[0].limits_enforced);
        assert_eq!(plan.gpus[0].warnings, [Warning::NoComputeCapability]);
        assert!(!plan.control_daemons[0].multiuser);
    }

    #[test]
    fn an_entry_of_another_type_for_the_same_gpu_is_a_warning() {
        let settings = and_other(with(vec![(node(128), 4), (node(129), 4)]), Some(pci("1b:00.0")));
        let plan = plan(&settings, &h200s()).unwrap();
        assert_eq!(plan.gpus[0].warnings, []);
        let [twice] = plan.gpus[1].warnings.as_slice() else { panic!("{:?}", plan.gpus[1].warnings) };
        assert_eq!(twice.to_string(), "devices.yml:90 lists it as NVIDIA_GPU_SHARE too");
    }
}
