//! Computes the limits of one slice, and rounds them.

use std::num::{NonZeroU32, NonZeroU64};
use std::ops::RangeInclusive;

use crate::config::{Isolation, MpsEntry, Settings, SliceKeys, ThreadPolicy};
use crate::host::gpu::Gpu;
use crate::host::inventory::Inventory;
use crate::host::nvml::facts::NvmlFacts;
use crate::problem::Problem;

/// On a GPU that shares the memory of the host, 1/`HOST_PART` of the memory is reserved for the host, and slices can have the
/// rest.
const HOST_PART: u64 = 8;

/// The memory that all slices of a GPU can have together, in MiB. NVML does not report the memory of a GPU that shares the
/// memory of the host. Its slices can have the host's memory, except for the part that is reserved for the host. None if
/// neither the memory of the GPU nor the memory of the host is known.
pub fn memory_for_slices(facts: &NvmlFacts, inventory: &Inventory) -> Option<u64> {
    let of_host = || inventory.memory_mib.map(|host| host - host / HOST_PART);
    facts.memory_total_mib.or_else(of_host)
}

pub(super) fn describe_memory(facts: &NvmlFacts, total: u64) -> String {
    match facts.memory_total_mib {
        Some(_) => format!("has {total} MiB"),
        None => format!(
            "shares the host's memory, of which its slices can have {total} MiB: an eighth stays with the host"
        ),
    }
}

pub(super) fn memory_mib(total_mib: u64, slices: NonZeroU32) -> u64 {
    total_mib / u64::from(slices.get())
}

pub(super) fn thread_percentage(policy: ThreadPolicy, slices: NonZeroU32) -> u8 {
    let percent = match policy {
        ThreadPolicy::Equal => 100 / slices.get(),
        ThreadPolicy::Balanced => 200 / slices.get(),
        ThreadPolicy::Unlimited => 100,
        ThreadPolicy::Fixed(percent) => u32::from(percent),
    };
    u8::try_from(percent.clamp(1, 100)).unwrap_or(100)
}

pub(super) fn max_clients(places: u32, slices: NonZeroU32) -> u32 {
    (places / slices.get()).max(1)
}

/// The number of slices that share a control daemon on the GPU. These slices divide the clients that the control daemon can
/// have, and the GPU's threads.
pub(super) fn sharing(isolation: Isolation, slices: NonZeroU32) -> NonZeroU32 {
    match isolation {
        Isolation::Gpu => slices,
        Isolation::Slice => NonZeroU32::MIN,
    }
}

/// The least and the most memory, in MiB, that the CUDA context of a process needs with this percentage of the threads. A
/// context needs a fixed amount and an amount for each multiprocessor. Measured with driver 580: 147 MiB with 25 % on an H100,
/// 514 MiB with 100 % on an H200. The least is the need on a small GPU, with 27 multiprocessors. The most includes some
/// reserve.
pub fn context_mib(thread_percentage: u8) -> RangeInclusive<u64> {
    const FIXED: u64 = 32;
    let percent = u64::from(thread_percentage);
    FIXED + percent..=FIXED + 7 * percent
}

/// The problem of an entry that asks for more memory than the GPU has, or for too little memory for a client of a slice. The
/// result also has the key that the administrator must change. None if the sizes are possible.
pub(super) fn wrong_size(
    gpu: &Gpu,
    keys: &MpsEntry,
    settings: &Settings,
    inventory: &Inventory,
) -> Option<(&'static str, Problem)> {
    let facts = gpu.facts()?;
    // The service does not divide the host's memory among slices by itself. So a GPU that shares the host's memory is not
    // served if the entry has no size for some slice. The function `obstacles` reports that problem.
    if facts.memory_total_mib.is_none() && keys.sizes().any(|size| size.memory_mib.is_none()) {
        return None;
    }
    let total = memory_for_slices(facts, inventory)?;
    too_little(gpu, total, keys, settings)
        .or_else(|| too_much(gpu, total, keys, &describe_memory(facts, total)))
}

fn too_little(
    gpu: &Gpu,
    total: u64,
    keys: &MpsEntry,
    settings: &Settings,
) -> Option<(&'static str, Problem)> {
    let (slices, address) = (keys.slices, gpu.pci.address);
    let share = memory_mib(total, slices);
    let sharing = sharing(settings.isolation(keys), slices);
    let default = thread_percentage(settings.thread_policy, sharing);
    let (size, percentage, context) = keys.sizes().find_map(|size| {
        let percentage = size.thread_percentage.unwrap_or(default);
        let context = *context_mib(percentage).start();
        let memory = size.memory_mib.map_or(share, NonZeroU64::get);
        (memory < context).then_some((size, percentage, context))
    })?;
    let takes = format!(
        "the CUDA context of a client with {percentage} % of the GPU's threads takes {context} MiB or more"
    );
    let Some(written) = size.memory_mib else {
        let found = format!(
            "{slices} slices of GPU {address}, which has {total} MiB, have {share} MiB each, but {takes}"
        );
        return Some(("virtual_number", Problem::new(found, "write fewer slices")));
    };
    let key = if keys.own.is_empty() { "memory" } else { "slices" };
    let found = format!("found {written} MiB for a slice of GPU {address}, but {takes}");
    Some((key, Problem::new(found, "write a larger number of MiB, or a size with its unit, such as 20GiB")))
}

fn too_much(gpu: &Gpu, total: u64, keys: &MpsEntry, described: &str) -> Option<(&'static str, Problem)> {
    let (slices, address) = (keys.slices, gpu.pci.address);
    let share = memory_mib(total, slices);
    let key = if keys.own.is_empty() { "memory" } else { "slices" };
    let own = keys.own.iter().filter_map(|size| size.memory_mib);
    let largest = own.chain(keys.each.memory_mib).max()?.get();
    if largest > total {
        let found = format!("found {largest} MiB for a slice of GPU {address}, which {described}");
        return Some((key, Problem::new(found, format!("write {total} or less"))));
    }
    let sum = overcommitted(total, keys).filter(|_| !keys.overcommit)?;
    let found = format!("{slices} slices have {sum} MiB together, but GPU {address} {described}");
    let remedy = format!(
        "write {share} MiB or less for each slice; or write overcommit: true in the GPU's entry, but then a \
         client may find no memory although its slice has some left"
    );
    Some((key, Problem::new(found, remedy)))
}

/// The memory of all slices of a GPU together, in MiB. None if the GPU has at least that much memory.
pub(super) fn overcommitted(total: u64, keys: &MpsEntry) -> Option<u64> {
    let share = memory_mib(total, keys.slices);
    let memory = |size: SliceKeys| size.memory_mib.map_or(share, NonZeroU64::get);
    let sum = if keys.own.is_empty() {
        memory(keys.each).saturating_mul(keys.slices.get().into())
    } else {
        keys.sizes().map(memory).fold(0, u64::saturating_add)
    };
    (sum > total).then_some(sum)
}

/// The limit of a slice, and the control daemon's default for that limit.
pub(super) type Limit = (u64, u64);

/// True if the slice's clients get the new limit only after the control daemon has got its new default. The first pair is the
/// new limit and default, the second pair the former limit and default. If the slice's own limit is unchanged, its clients need
/// not wait for the new default.
pub(super) fn waits_for_default((own, default): Limit, (own_before, default_before): Limit) -> bool {
    // Clients wait for the new default in two cases. First, the present default is below the slice's new limit, so clients
    // would get too little. Second, the new limit equals the new default. Then clients set no limit of their own, and would get
    // the present default.
    own != own_before && default != default_before && (own > default_before || own == default)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::tests::{facts, limits, no_entries, node, p40, plan, problems, with};

    #[test]
    fn shares_are_whole_and_at_least_one_percent() {
        let one = |policy, slices| thread_percentage(policy, NonZeroU32::new(slices).unwrap());
        let golden = [
            (ThreadPolicy::Equal, [(1, 100), (3, 33), (4, 25), (100, 1), (101, 1), (u32::MAX, 1)]),
            (ThreadPolicy::Balanced, [(1, 100), (3, 66), (4, 50), (100, 2), (201, 1), (u32::MAX, 1)]),
            (
                ThreadPolicy::Unlimited,
                [(1, 100), (3, 100), (4, 100), (100, 100), (101, 100), (u32::MAX, 100)],
            ),
            (ThreadPolicy::Fixed(7), [(1, 7), (3, 7), (4, 7), (100, 7), (101, 7), (u32::MAX, 7)]),
        ];
        for (policy, cases) in golden {
            for (slices, percent) in cases {
                assert_eq!(one(policy, slices), percent, "{policy:?} {slices}");
            }
        }
    }

    #[test]
    fn clients_are_shared_out_in_whole_numbers() {
        for (places, slices, most) in
            [(48, 1, 48), (48, 4, 12), (48, 10, 4), (60, 7, 8), (48, 49, 1), (16, 999, 1)]
        {
            assert_eq!(max_clients(places, NonZeroU32::new(slices).unwrap()), most, "{places} {slices}");
        }
    }

    #[test]
    fn a_slice_has_room_for_a_client() {
        // A context needs 33 MiB with 1 % of the threads, which is all the memory of one of these 698 slices.
        assert_eq!(limits(&plan(&with(vec![(node(128), 698)]), &p40()).unwrap()), [(33, 1)]);
        assert_eq!(
            problems(&with(vec![(node(128), 699)]), &p40()),
            ["devices.yml:2: devices[0].virtual_number: 699 slices of GPU 0000:00:06.0, which has 23040 \
              MiB, have 32 MiB each, but the CUDA context of a client with 1 % of the GPU's threads takes \
              33 MiB or more; write fewer slices"]
        );
        let mut settings = no_entries();
        settings.replicas = NonZeroU32::new(u32::MAX).unwrap();
        let none = problems(&settings, &p40());
        assert!(
            none[0].starts_with("/etc/yunion/host.conf: cuda_mps_replicas: 4294967295 slices"),
            "{none:?}"
        );
        // The administrator means 20 GiB, but a number without a unit counts in MiB.
        let mut settings = with(vec![(node(128), 4)]);
        settings.devices[0].mps.as_mut().unwrap().each.memory_mib = NonZeroU64::new(20);
        assert_eq!(
            problems(&settings, &p40()),
            ["devices.yml:2: devices[0].memory: found 20 MiB for a slice of GPU 0000:00:06.0, but the CUDA \
              context of a client with 25 % of the GPU's threads takes 57 MiB or more; write a larger \
              number of MiB, or a size with its unit, such as 20GiB"]
        );
        let keys = settings.devices[0].mps.as_mut().unwrap();
        let size = |memory, thread_percentage| SliceKeys {
            memory_mib: NonZeroU64::new(memory),
            thread_percentage,
            max_clients: None,
        };
        keys.each = size(80, Some(50));
        assert!(problems(&settings, &p40())[0].contains("takes 82 MiB or more"));
        let keys = settings.devices[0].mps.as_mut().unwrap();
        (keys.slices, keys.each) = (NonZeroU32::new(2).unwrap(), SliceKeys::default());
        keys.own = vec![size(8192, None), size(20, None)];
        let told = problems(&settings, &p40());
        assert!(told[0].starts_with("devices.yml:2: devices[0].slices: found 20 MiB"), "{told:?}");
        // A slice with its own control daemon has all threads of the GPU.
        let mut settings = with(vec![(node(128), 4)]);
        let keys = settings.devices[0].mps.as_mut().unwrap();
        (keys.each.memory_mib, keys.isolation) = (NonZeroU64::new(100), Some(Isolation::Slice));
        assert!(problems(&settings, &p40())[0].contains("100 % of the GPU's threads takes 132 MiB"));
    }

    #[test]
    fn an_entry_says_how_much_memory_its_slices_have() {
        let planned = |slices, memory: u64, overcommit| {
            let mut settings = with(vec![(node(128), slices)]);
            let keys = settings.devices[0].mps.as_mut().unwrap();
            (keys.each.memory_mib, keys.overcommit) = (NonZeroU64::new(memory), overcommit);
            settings
        };
        let limit = |slices, memory, overcommit| {
            let plan = plan(&planned(slices, memory, overcommit), &p40()).unwrap();
            let told = plan.gpus[0].warnings.iter().filter(|one| one.name == "memory-overcommitted").count();
            (limits(&plan)[0].0, told)
        };
        assert_eq!(limit(4, 0, true), (5760, 0));
        assert_eq!(limit(4, 5760, false), (5760, 0));
        assert_eq!(limit(3, 100, false), (100, 0));
        assert_eq!(limit(4, 5761, true), (5761, 1));
        assert_eq!(limit(999, 23040, true), (23040, 1));
        let problem = |slices, memory, overcommit| problems(&planned(slices, memory, overcommit), &p40());
        assert_eq!(
            problem(4, 5761, false),
            ["devices.yml:2: devices[0].memory: 4 slices have 23044 MiB together, but GPU 0000:00:06.0 has \
              23040 MiB; write 5760 MiB or less for each slice; or write overcommit: true in the GPU's \
              entry, but then a client may find no memory although its slice has some left"]
        );
        for overcommit in [false, true] {
            assert_eq!(
                problem(2, 23041, overcommit),
                ["devices.yml:2: devices[0].memory: found 23041 MiB for a slice of GPU 0000:00:06.0, which \
                  has 23040 MiB; write 23040 or less"]
            );
        }
    }

    #[test]
    fn slices_of_a_gpu_that_shares_the_hosts_memory_have_the_sizes_in_its_entry() {
        let planned = |memory: &[u64], each: u64, overcommit| {
            let mut settings = with(vec![(node(128), 4)]);
            let keys = settings.devices[0].mps.as_mut().unwrap();
            let own =
                |memory: &u64| SliceKeys { memory_mib: NonZeroU64::new(*memory), ..SliceKeys::default() };
            (keys.own, keys.overcommit) = (memory.iter().map(own).collect(), overcommit);
            keys.each.memory_mib = NonZeroU64::new(each);
            settings
        };
        let mut inventory = p40();
        facts(&mut inventory, 0).memory_total_mib = None;
        for written in [planned(&[], 28_672, false), planned(&[8192, 4096, 2048, 1024], 0, false)] {
            let plan = plan(&written, &inventory).unwrap();
            assert_eq!(plan.gpus[0].unusable(), None);
            assert!(plan.gpus[0].servable());
            assert_eq!(
                plan.gpus[0].warnings.iter().filter(|one| one.name == "memory-overcommitted").count(),
                0
            );
        }
        assert_eq!(limits(&plan(&planned(&[], 28_672, false), &inventory).unwrap()), [(28_672, 25)]);
        // The GPU is not served if a single slice has no size: the service does not compute that size from the sizes of the
        // other slices.
        for part in [planned(&[], 0, false), planned(&[8192, 4096, 2048, 0], 0, true)] {
            let plan = plan(&part, &inventory).unwrap();
            assert!(plan.gpus[0].unusable().unwrap().contains("write the memory of every slice"));
            assert!(!plan.gpus[0].servable());
        }
        assert_eq!(
            problems(&planned(&[], 28_673, false), &inventory),
            ["devices.yml:2: devices[0].memory: 4 slices have 114692 MiB together, but GPU 0000:00:06.0 \
              shares the host's memory, of which its slices can have 114688 MiB: an eighth stays with the \
              host; write 28672 MiB or less for each slice; or write overcommit: true in the GPU's \
              entry, but then a client may find no memory although its slice has some left"]
        );
        let over = plan(&planned(&[], 28_673, true), &inventory).unwrap();
        assert!(over.gpus[0].warnings.iter().any(|one| one.name == "memory-overcommitted"));
        // The memory of the host may be unknown. Then the sizes are not checked.
        inventory.memory_mib = None;
        assert_eq!(plan(&planned(&[], 28_673, false), &inventory).unwrap().gpus[0].unusable(), None);
    }

    proptest! {
        #[test]
        fn slices_never_add_up_to_more_than_the_memory(total in 1u64..1 << 40, slices: u32) {
            let slices = NonZeroU32::new(slices).unwrap_or(NonZeroU32::MIN);
            let slice = memory_mib(total, slices);
            prop_assert!(slice * u64::from(slices.get()) <= total);
            prop_assert!((slice + 1) * u64::from(slices.get()) > total);
        }
    }
}
