//! Finds the GPUs that should be served, by the entries of the device file. Without an entry of the type `NVIDIA_MPS`, these
//! are all GPUs without an entry of another type.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::limits::wrong_size;
use super::paths::{Miss, claim, claimed_by, find};
use super::{Missing, PlanError};
use crate::config::{DeviceEntry, DevicePath, MpsEntry, Settings};
use crate::host::gpu::Gpu;
use crate::host::inventory::Inventory;
use crate::problem::{LocatedProblem, Origin, Problem};

pub(super) struct ConfiguredGpu<'a> {
    pub gpu: &'a Gpu,
    /// The keys of the GPU's own entry, or the keys that all GPUs without an entry get.
    pub keys: MpsEntry,
    /// The reason why the host does not have the GPU at present. None if the host has the GPU.
    pub gone: Option<Problem>,
}

/// The configured GPUs in the order of the configuration, and the entries that match no GPU of this host. `before` has the GPUs
/// of the former plan.
pub(super) fn wanted<'a>(
    settings: &Settings,
    inventory: &'a Inventory,
    before: &'a Inventory,
) -> Result<(Vec<ConfiguredGpu<'a>>, Vec<Missing>), PlanError> {
    let mut problems = Vec::new();
    let mut not_yet = inventory.driver.as_ref().err().cloned();
    let mut wanted = Vec::new();
    let mut missing = Vec::new();
    // The GPUs that an entry has named, each with its first entry. Without a driver, the service can't find out that two
    // different paths name one GPU. Then only a second entry with the same path is a problem.
    let mut named: HashMap<DevicePath, (&Origin, &DevicePath)> = HashMap::new();
    for entry in &settings.devices {
        let (Some(mps), Some(path)) = (&entry.mps, &entry.path) else { continue };
        let mut gone = None;
        let sought = as_before(path, before);
        let gpu = match find(&sought, inventory) {
            Ok(gpu) => Some(gpu),
            Err(Miss::Wrong(problem) | Miss::Ambiguous(problem)) => {
                problems.push(entry.problem("path", problem));
                continue;
            }
            Err(Miss::Absent { problem, certain }) => {
                let problem = entry.problem("path", problem);
                let known = known_before(&sought, inventory, before);
                match known {
                    Some((_, true)) => gone = Some(problem.into()),
                    Some((_, false)) => {}
                    None => missing.push(Missing { problem, path: path.clone(), certain }),
                }
                known.map(|(gpu, _)| gpu)
            }
            Err(Miss::NotYet(problem)) => {
                not_yet.get_or_insert(problem);
                None
            }
        };
        let address = gpu.map(|gpu| gpu.pci.address);
        match named.entry(address.map_or_else(|| path.clone(), DevicePath::Pci)) {
            Entry::Vacant(first) => first.insert((&entry.origin, path)),
            Entry::Occupied(earlier) => {
                let (origin, first) = earlier.get();
                let which = address.map(|address| format!(" ({address})")).unwrap_or_default();
                let found = format!("{path}{which} already has an entry");
                let remedy = format!("keep only one of the two entries: {origin} names this GPU as {first}");
                problems.push(entry.problem("path", Problem::new(found, remedy)));
                continue;
            }
        };
        if let Some(gpu) = gpu {
            problems.extend(
                wrong_size(gpu, mps, settings, inventory).map(|(key, problem)| entry.problem(key, problem)),
            );
            wanted.push(ConfiguredGpu { gpu, keys: mps.clone(), gone });
        }
    }
    if settings.devices.iter().all(|entry| entry.mps.is_none()) {
        wanted = unclaimed(settings, inventory, &mut problems, &mut not_yet);
    }
    match not_yet {
        _ if !problems.is_empty() => {
            // Entries that certainly match no GPU are reported with the other problems, so that the administrator can correct
            // all of them at once.
            let certain = missing.into_iter().filter(|missing| missing.certain);
            problems.extend(certain.map(|missing| missing.problem));
            Err(PlanError::Problems(problems))
        }
        Some(problem) => Err(PlanError::NotYet(problem)),
        None if wanted.is_empty() && !missing.is_empty() => Err(PlanError::Missing(missing)),
        None => Ok((wanted, missing)),
    }
}

/// Adds the domain to an address without a domain, if the address matched a GPU in the former plan. So if that GPU is removed,
/// a GPU with the same address in another domain does not take its place.
fn as_before(path: &DevicePath, before: &Inventory) -> DevicePath {
    match (path, find(path, before)) {
        (DevicePath::ShortPci(_), Ok(gpu)) => DevicePath::Pci(gpu.pci.address),
        _ => path.clone(),
    }
}

/// The GPU that the path named in the former plan. The flag is true if the host does not have the GPU now. The result then has
/// the facts of the former plan. None if the path named no GPU, or if another GPU has the GPU's address now.
fn known_before<'a>(
    path: &DevicePath,
    inventory: &'a Inventory,
    before: &'a Inventory,
) -> Option<(&'a Gpu, bool)> {
    let known = find(path, before).ok()?;
    match inventory.gpus.iter().find(|gpu| gpu.pci.address == known.pci.address) {
        None => Some((known, true)),
        Some(gpu) if gpu.nvml.is_err() || gpu.uuid() == known.uuid() => Some((gpu, false)),
        Some(_) => None,
    }
}

/// Every NVIDIA GPU that no entry of the device file names, in PCI order, without the GPUs that another kernel driver uses.
fn unclaimed<'a>(
    settings: &Settings,
    inventory: &'a Inventory,
    problems: &mut Vec<LocatedProblem>,
    not_yet: &mut Option<Problem>,
) -> Vec<ConfiguredGpu<'a>> {
    let mut claimed = Vec::new();
    for path in settings.devices.iter().filter_map(|entry| entry.path.as_ref()) {
        match claim(path, inventory) {
            Ok(address) => claimed.extend(address),
            // The GPU of this entry of another type is unknown, and is used for something else. Any GPU of the host could be
            // that GPU, so the service serves none.
            Err(problem) => {
                not_yet.get_or_insert(problem);
            }
        }
    }
    let keys = MpsEntry::with_slices(settings.replicas);
    let mut wanted: Vec<_> = inventory
        .gpus
        .iter()
        .filter(|gpu| !claimed.contains(&gpu.pci.address) && gpu.pci.foreign_driver().is_none())
        .map(|gpu| ConfiguredGpu { gpu, keys: keys.clone(), gone: None })
        .collect();
    wanted.sort_by_key(|wanted| wanted.gpu.pci.address);
    let file = settings.sources.last().cloned().unwrap_or_default();
    let wrong = wanted.iter().filter_map(|wanted| wrong_size(wanted.gpu, &wanted.keys, settings, inventory));
    problems.extend(wrong.map(|(_, problem)| problem.at(Origin::whole(&file), "cuda_mps_replicas")));
    wanted
}

pub(super) fn why_nothing(settings: &Settings, inventory: &Inventory) -> String {
    let mut others = Vec::new();
    let mut remedy = "";
    for gpu in &inventory.gpus {
        let address = gpu.pci.address;
        let claims = |entry: &&DeviceEntry| claimed_by(entry, inventory) == Some(address);
        if let Some(entry) = settings.devices.iter().find(claims) {
            others.push(format!(
                "{address} has the type {device_type} in {origin}",
                device_type = entry.device_type,
                origin = entry.origin
            ));
            remedy = "; write type: NVIDIA_MPS in the entry of a GPU that is to be served";
        } else if let Some(driver) = gpu.pci.foreign_driver() {
            others.push(format!("{address} belongs to the kernel driver {driver}"));
        }
    }
    if others.is_empty() {
        return "this host has no NVIDIA GPU to serve".to_owned();
    }
    format!(
        "every NVIDIA GPU of this host has a use other than MPS: {others}{remedy}",
        others = others.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::time::{ClockId, clock_gettime};

    use super::*;
    use crate::plan::Plan;
    use crate::plan::plan as plan_after;
    use crate::plan::tests::{
        and_other, gpu, h200s, host, missing, no_entries, node, not_yet, other, pci, plan, problems, with,
        without_driver,
    };

    #[test]
    fn without_an_entry_every_unclaimed_gpu_is_served() {
        let mut inventory = h200s();
        inventory.gpus[3].pci.driver = Some("vfio-pci".to_owned());
        let served = |settings: &Settings| -> Vec<_> {
            let plan = plan(settings, &inventory).unwrap();
            plan.gpus
                .iter()
                .map(|gpu| (gpu.gpu.pci.address.bus, gpu.slices(), gpu.size(0).memory_mib))
                .collect()
        };
        assert_eq!(served(&no_entries()), [(0x1a, 10, 12288), (0x1b, 10, 12288), (0x1c, 10, 12288)]);
        let claims = [
            node(129),
            pci("1b:00.0"),
            other("/dev/dri/card1"),
            other("/dev/dri/by-path/pci-0000:1b:00.0-render"),
        ];
        for claim in claims {
            let settings = and_other(no_entries(), Some(claim));
            assert_eq!(served(&settings), [(0x1a, 10, 12288), (0x1c, 10, 12288)]);
        }
        let nothing_of_ours = [None, Some(other("/dev/null")), Some(node(200))];
        for claim in nothing_of_ours {
            assert_eq!(served(&and_other(no_entries(), claim)).len(), 3);
        }
        let none = plan(&no_entries(), &host(Vec::new())).unwrap();
        assert_eq!(
            none,
            Plan { nothing: "this host has no NVIDIA GPU to serve".to_owned(), ..Plan::default() }
        );
    }

    /// The error names the entries of other types, so that an administrator notices a mistyped type.
    #[test]
    fn if_all_gpus_have_another_use_each_use_is_named() {
        let settings = and_other(no_entries(), Some(pci("1a:00.0")));
        let mut all = h200s();
        for gpu in &mut all.gpus[1..] {
            gpu.pci.driver = Some("vfio-pci".to_owned());
        }
        all.gpus.truncate(2);
        let plan = plan(&settings, &all).unwrap();
        assert_eq!(plan.gpus, []);
        assert_eq!(
            plan.nothing,
            "every NVIDIA GPU of this host has a use other than MPS: 0000:1a:00.0 has the type \
             NVIDIA_GPU_SHARE in devices.yml:90, 0000:1b:00.0 belongs to the kernel driver vfio-pci; write \
             type: NVIDIA_MPS in the entry of a GPU that is to be served"
        );
    }

    #[test]
    fn a_claim_that_can_not_be_resolved_yet_waits() {
        let mut inventory = h200s();
        inventory.gpus[0].pci.render_node = None;
        let reason = not_yet(&and_other(no_entries(), Some(node(140))), &inventory);
        assert!(reason.contains("modprobe nvidia-drm"), "{reason}");
    }

    #[test]
    fn a_missing_gpu_is_a_state_of_its_entry() {
        let all = "the NVIDIA GPUs of this host are /dev/dri/renderD128 (0000:1a:00.0), \
                   /dev/dri/renderD129 (0000:1b:00.0)";
        let mut inventory = h200s();
        inventory.gpus.truncate(2);
        let golden = [
            (node(140), "/dev/dri/renderD140 does not exist"),
            (pci("00:06.1"), "the PCI bus has no display device at 0000:00:06.1"),
            (DevicePath::Uuid("GPU-x".to_owned()), "this host has no GPU GPU-x"),
            (DevicePath::NvidiaMinor(9), "this host has no GPU /dev/nvidia9"),
        ];
        for (path, found) in golden {
            let expected = format!("devices.yml:2: devices[0].path: {found}; {all}");
            assert_eq!(missing(&with(vec![(path.clone(), 4)]), &inventory), [(true, expected)]);
            let plan = plan(&with(vec![(node(128), 4), (path.clone(), 4)]), &inventory).unwrap();
            assert_eq!((plan.gpus.len(), plan.gpus[0].unusable()), (1, None));
            let [missing] = plan.missing.as_slice() else { panic!("{:?}", plan.missing) };
            assert_eq!(missing.path, path);
            assert_eq!(
                missing.problem.to_string(),
                format!("devices.yml:3: devices[1].path: {found}; {all}")
            );
            assert_eq!(plan.control_daemons[0].gpus.len(), 1);
            // The UUID of the missing GPU may be unknown, so the missing GPU may have any UUID that is not known to belong to
            // another GPU.
            assert!(plan.configured.may_have("GPU-0") && plan.configured.may_have("GPU-x"));
            assert!(!plan.configured.may_have("GPU-1"));
        }
        let bare = host(Vec::new());
        let expected =
            "devices.yml:2: devices[0].path: /dev/dri/renderD128 does not exist; this host has no NVIDIA GPU";
        assert_eq!(missing(&with(vec![(node(128), 4)]), &bare), [(true, expected.to_owned())]);
    }

    #[test]
    fn a_gpu_that_has_gone_keeps_its_devices() {
        let settings = with(vec![(node(128), 4), (node(129), 2)]);
        let whole = h200s();
        let before = plan(&settings, &whole).unwrap();
        let mut without = h200s();
        without.gpus.remove(1);
        let after = plan_after(&settings, &without, &before.gpus).unwrap();
        assert_eq!((after.gpus.len(), after.missing.len()), (2, 0));
        let reason = after.gpus[1].unusable().unwrap();
        assert!(
            reason.starts_with("devices.yml:3: devices[1].path: /dev/dri/renderD129 does not exist"),
            "{reason}"
        );
        assert_eq!((after.gpus[1].slices(), after.gpus[1].size(0).memory_mib), (2, 61440));
        assert_eq!(after.control_daemons[0].gpus.len(), 1);
        assert!(after.configured.may_have("GPU-1") && !after.configured.may_have("GPU-2"));
        // While the GPU is missing, a further plan is the same as `after`. Once the host has the GPU again, the plan is the
        // same as `before`.
        assert_eq!(plan_after(&settings, &without, &after.gpus).unwrap(), after);
        assert_eq!(plan_after(&settings, &whole, &after.gpus).unwrap(), before);
        // A GPU with another UUID at the address of the missing GPU does not replace the missing GPU.
        let mut other = without;
        other.gpus.push(gpu("1b:00.0", 140, "GPU-9", 122_880, (9, 0)));
        let after = plan_after(&settings, &other, &before.gpus).unwrap();
        assert_eq!((after.gpus.len(), after.missing.len()), (1, 1));
        // A GPU stays in the plan after its render node has disappeared, since the former plan has the GPU's address.
        let mut renamed = h200s();
        renamed.gpus[1].pci.render_node = None;
        let after = plan_after(&settings, &renamed, &before.gpus).unwrap();
        assert_eq!((after.gpus.len(), after.missing.len(), after.gpus[1].unusable()), (2, 0, None));
    }

    #[test]
    fn a_gpu_named_twice_is_a_problem_in_every_spelling() {
        for second in
            [node(128), pci("1a:00.0"), DevicePath::Uuid("GPU-0".to_owned()), DevicePath::NvidiaMinor(0)]
        {
            let settings = with(vec![(node(128), 4), (node(129), 4), (second.clone(), 4)]);
            let problems = problems(&settings, &h200s());
            let expected = format!(
                "devices.yml:4: devices[2].path: {second} (0000:1a:00.0) already has an entry; keep only \
                 one of the two entries: devices.yml:2 names this GPU as /dev/dri/renderD128"
            );
            assert_eq!(problems, [expected]);
        }
    }

    #[test]
    fn the_time_grows_with_the_number_of_entries_and_not_with_its_square() {
        let inventory = without_driver(h200s());
        let used = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
        let settings = |entries: u32| with((0..entries).map(|number| (node(128 + number), 1)).collect());
        let fastest = |entries| {
            let settings = settings(entries);
            let once = |_| {
                let begun = used();
                plan(&settings, &inventory).unwrap_err();
                used().saturating_sub(begun)
            };
            (0..5).map(once).min().unwrap()
        };
        let (few, many) = (fastest(1_000), fastest(16_000));
        println!("1,000 entries: {few:?}; 16,000 entries: {many:?}");
        assert!(many < few * 100, "{few:?}, {many:?}");
    }

    #[test]
    fn all_problems_come_at_once() {
        let mut settings =
            with(vec![(node(140), 4), (node(128), 4), (node(128), 4), (node(129), 122_881), (node(141), 4)]);
        settings.devices[0].path = Some(other("/dev/null"));
        let lines = problems(&settings, &h200s());
        assert_eq!(lines.len(), 4, "{lines:?}");
        assert!(lines[0].starts_with("devices.yml:2: devices[0].path: \"/dev/null\" is not the path"));
        assert!(lines[1].starts_with("devices.yml:4: devices[2].path: "));
        assert_eq!(
            lines[2],
            "devices.yml:5: devices[3].virtual_number: 122881 slices of GPU 0000:1b:00.0, which has 122880 \
             MiB, have 0 MiB each, but the CUDA context of a client with 1 % of the GPU's threads takes 33 \
             MiB or more; write fewer slices"
        );
        assert!(lines[3].starts_with("devices.yml:6: devices[4].path: /dev/dri/renderD141 does not exist"));
    }
}
