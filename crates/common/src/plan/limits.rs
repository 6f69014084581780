//! The arithmetic of limits: the limits of one slice with their rounding.

use std::num::{NonZeroU32, NonZeroU64};

use crate::config::{MpsEntry, SliceKeys, ThreadPolicy};
use crate::host::gpu::Gpu;
use crate::problem::Problem;

/// The memory of one of N slices, in whole MiB.
pub(super) fn memory_mib(total_mib: u64, slices: NonZeroU32) -> u64 {
    total_mib / u64::from(slices.get())
}

/// The active thread percentage of one of N slices, 1 to 100.
pub(super) fn thread_percentage(policy: ThreadPolicy, slices: NonZeroU32) -> u8 {
    let percent = match policy {
        ThreadPolicy::Equal => 100 / slices.get(),
        ThreadPolicy::Balanced => 200 / slices.get(),
        ThreadPolicy::Unlimited => 100,
        ThreadPolicy::Fixed(percent) => u32::from(percent),
    };
    u8::try_from(percent.clamp(1, 100)).unwrap_or(100)
}

/// The most clients of one of N slices of a GPU that can hold this many.
pub(super) fn max_clients(places: u32, slices: NonZeroU32) -> u32 {
    (places / slices.get()).max(1)
}

/// The key that asks for more memory than the GPU has, or leaves a slice without any.
pub(super) fn too_much(gpu: &Gpu, keys: &MpsEntry) -> Option<(&'static str, Problem)> {
    let total = gpu.facts()?.memory_total_mib?;
    let (slices, address) = (keys.slices, gpu.pci.address);
    let share = memory_mib(total, slices);
    let key = if keys.own.is_empty() { "memory" } else { "slices" };
    let own = keys.own.iter().filter_map(|size| size.memory_mib);
    let written = own.chain(keys.each.memory_mib).max();
    let Some(largest) = written.map(NonZeroU64::get) else {
        let found = || format!("{slices} slices of {address}, which has {total} MiB");
        let problem = || Problem::new(found(), "give each slice 1 MiB or more");
        return (share == 0).then(|| ("virtual_number", problem()));
    };
    if largest > total {
        let found = format!("{largest} MiB for a slice of {address}, which has {total} MiB");
        return Some((key, Problem::new(found, format!("write {total} or less"))));
    }
    let sum = overcommitted(total, keys).filter(|_| !keys.overcommit)?;
    let found = format!("{slices} slices have {sum} MiB together, and {address} has {total} MiB");
    let less = if share == 0 { "fewer slices".to_owned() } else { format!("{share} MiB or less for each") };
    let remedy = format!(
        "write {less}; or write overcommit: true if a client may find no memory although its slice has some left"
    );
    Some((key, Problem::new(found, remedy)))
}

/// The memory that the slices have together, in MiB, if that is more than the GPU has.
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

/// A limit of a slice, and the control daemon's default for it.
pub(super) type Limit = (u64, u64);

/// Whether the slice's clients get this limit only after the control daemon has another default than `before`. A slice
/// that keeps its own limit waits for nothing, even if the default changes.
pub(super) fn waits_for_default((own, default): Limit, (own_before, default_before): Limit) -> bool {
    // A default below the slice's new limit gives its clients too little. If the slice's new limit is also the new
    // default, the old default does not limit its clients to it.
    own != own_before && default != default_before && (own > default_before || own == default)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::tests::{limits, no_entries, node, p40, plan, problems, with};

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
    fn a_slice_has_some_memory() {
        let plan = plan(&with(vec![(node(128), 23040)]), &p40()).unwrap();
        assert_eq!(limits(&plan), [(1, 1)]);
        let mut settings = no_entries();
        settings.replicas = NonZeroU32::new(u32::MAX).unwrap();
        let problems = problems(&settings, &p40());
        assert!(problems[0].starts_with("/etc/yunion/host.conf: cuda_mps_replicas: 4294967295 slices"));
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
            [
                "devices.yml:2: devices[0].memory: 4 slices have 23044 MiB together, and 0000:00:06.0 has 23040 MiB; write 5760 \
                 MiB or less for each; or write overcommit: true if a client may find no memory although its slice has some \
                 left"
            ]
        );
        for overcommit in [false, true] {
            assert_eq!(
                problem(2, 23041, overcommit),
                [
                    "devices.yml:2: devices[0].memory: 23041 MiB for a slice of 0000:00:06.0, which has 23040 MiB; write 23040 \
                  or less"
                ]
            );
        }
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
