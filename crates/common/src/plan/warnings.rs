//! Warnings about a GPU that is served nevertheless.

use std::fmt::Display;

use super::limits::{describe_memory, memory_for_slices, memory_mib, overcommitted};
use crate::config::{DeviceEntry, MpsEntry};
use crate::host::driver::{self, LIMITS, NVML_LISTS_CLIENTS};
use crate::host::inventory::Inventory;
use crate::host::nvml::facts::NvmlFacts;
use crate::problem::NamedProblem;

pub(super) fn of_gpu(facts: &NvmlFacts, keys: &MpsEntry, inventory: &Inventory) -> Vec<NamedProblem> {
    let MpsEntry { slices, .. } = keys;
    let max_clients = keys.sizes().filter_map(|size| size.max_clients).max();
    let Some(capability) = facts.compute_capability else {
        return vec![NamedProblem::new(
            NO_COMPUTE_CAPABILITY,
            "NVML does not report the compute capability of the GPU, so the service takes the GPU for \
             a GPU that enforces no limits",
            "look for NVRM lines in dmesg",
        )];
    };
    let mut warnings = Vec::new();
    let clients = driver::most_clients(inventory.series(), facts.compute_capability);
    if slices.get() > clients {
        warnings.push(NamedProblem::new(
            "more-slices-than-clients",
            format!("the GPU has {slices} slices, but can hold only {clients} clients at once"),
            format!(
                "write virtual_number: {clients} or less in host_container_device.yml; for a GPU without \
                 an entry, write cuda_mps_replicas: {clients} or less in host.conf"
            ),
        ));
    }
    let counted = NVML_LISTS_CLIENTS.holds(inventory.series(), facts.compute_capability);
    match max_clients {
        Some(_) if !counted => warnings.push(NamedProblem::new(
            CLIENTS_NOT_COUNTED,
            "max_clients has no effect, since clients can't be counted on a GPU before Volta",
            "remove max_clients from the GPU's entry in host_container_device.yml",
        )),
        Some(most) if most.get() > clients => warnings.push(NamedProblem::new(
            "more-clients-than-places",
            format!("max_clients is {most}, but the GPU can hold only {clients} clients at once"),
            format!("write max_clients: {clients} or less in host_container_device.yml"),
        )),
        _ => {}
    }
    if let Some((total, sum)) =
        memory_for_slices(facts, inventory).and_then(|total| Some((total, overcommitted(total, keys)?)))
    {
        warnings.push(NamedProblem::new(
            OVERCOMMITTED,
            format!(
                "the GPU's {slices} slices have {sum} MiB together, but the GPU {described}: a client may \
                 find no memory although its slice has some left",
                described = describe_memory(facts, total)
            ),
            format!(
                "write {share} MiB or less for each slice in host_container_device.yml, so that each slice \
                 can use all its memory",
                share = memory_mib(total, *slices)
            ),
        ));
    }
    if !LIMITS.holds(inventory.series(), facts.compute_capability) {
        warnings.push(not_enforced(capability));
    }
    warnings
}

pub(super) fn not_enforced((major, minor): (u32, u32)) -> NamedProblem {
    NamedProblem::new(
        NOT_ENFORCED,
        format!(
            "compute capability {major}.{minor} enforces neither the memory limit nor the active thread \
             percentage"
        ),
        "give the slices of this GPU to tenants who trust each other, or use a GPU from Volta on",
    )
}

/// The warning that an entry of another type than `NVIDIA_MPS` names a GPU that is served. In the compute mode
/// `EXCLUSIVE_PROCESS` only the MPS server can open the GPU, so a program that gets the GPU through that entry fails.
pub(super) fn given_out_twice(ours: &DeviceEntry, other: &DeviceEntry) -> NamedProblem {
    let (ours, origin, device_type) = (&ours.origin, &other.origin, &other.device_type);
    NamedProblem::new(
        "given-out-twice",
        format!("{ours} lists the GPU as NVIDIA_MPS, but {origin} lists the same GPU as {device_type}"),
        format!("remove one of the entries: {ours} or {origin}"),
    )
}

/// The warning that a default limit of the control daemon is larger than `own`, the limit of a slice. The default is the limit
/// of a larger slice, on the same GPU or on another GPU. A client without a limit of its own gets the default.
pub(super) fn loose(
    holder: &str,
    default: impl Display,
    own: &str,
    unit: &str,
    variable: &str,
) -> NamedProblem {
    NamedProblem::new(
        "default-limits-loose",
        format!(
            "{holder} gives clients {default} {unit} by default, so only clients that set {variable} have \
             the smaller limit of their slice: {own}"
        ),
        "cut the GPUs into slices of the same memory and thread_percentage, give clients the environment \
         that yunion-mpsctl env NAME prints, or write isolation: slice for the GPU, with which each slice \
         has its own limits and the slices take turns",
    )
}

/// The names of the warnings that call for no action of an administrator.
pub const WORTH_KNOWING: [&str; 4] =
    [NO_COMPUTE_CAPABILITY, CLIENTS_NOT_COUNTED, NOT_ENFORCED, OVERCOMMITTED];
const NO_COMPUTE_CAPABILITY: &str = "compute-capability-unknown";
const CLIENTS_NOT_COUNTED: &str = "clients-not-counted";
const OVERCOMMITTED: &str = "memory-overcommitted";
const NOT_ENFORCED: &str = "limits-not-enforced";

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::plan::tests::{and_other, facts, h200s, node, pci, plan, with};

    #[test]
    fn more_slices_than_clients_is_a_warning() {
        let warned = |slices, capability, driver: &str| {
            let mut inventory = h200s();
            inventory.driver = Ok(driver.to_owned());
            facts(&mut inventory, 0).compute_capability = Some(capability);
            let plan = plan(&with(vec![(node(128), slices)]), &inventory).unwrap();
            plan.gpus[0].warnings.iter().any(|warning| warning.problem.found.contains("clients at once"))
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
            settings.devices[0].mps.as_mut().unwrap().each.max_clients = NonZeroU32::new(max_clients);
            let gpu = plan(&settings, &inventory).unwrap().gpus.remove(0);
            let warned = |warning: &NamedProblem| warning.problem.found.contains("max_clients");
            (gpu.max_clients(0), gpu.warnings.iter().filter(|warning| warned(warning)).count())
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
        assert_eq!(plan.gpus[0].warnings[0].name, NO_COMPUTE_CAPABILITY);
        assert!(!plan.control_daemons[0].multiuser);
    }

    #[test]
    fn an_entry_of_another_type_for_the_same_gpu_is_a_warning() {
        let settings = and_other(with(vec![(node(128), 4), (node(129), 4)]), Some(pci("1b:00.0")));
        let plan = plan(&settings, &h200s()).unwrap();
        assert_eq!(plan.gpus[0].warnings, []);
        let [twice] = plan.gpus[1].warnings.as_slice() else { panic!("{:?}", plan.gpus[1].warnings) };
        assert_eq!(
            twice.problem.found,
            "devices.yml:3 lists the GPU as NVIDIA_MPS, but devices.yml:90 lists the same GPU as \
             NVIDIA_GPU_SHARE"
        );
    }
}
