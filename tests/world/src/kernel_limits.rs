//! The memory limits that the simulated kernel enforces for control groups. The service's real registry of limits sets and
//! removes limits, the simulated kernel refuses some of them, and other programs set limits, too.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mps_core::bindings::ControlGroup;
use mps_core::kernel_limits::{
    CHECK, GroupLimits, KernelLimits, LimitGoal, LimitOutcome, LimitedGroup, limited_to, limits,
};
use mps_core::terms::SliceId;

use super::bindings::is_in;
use super::budgets::budgets_of;
use super::tenants::{gpu_of, slice_of};
use super::ways::SLICES;
use super::{Dice, Ending, GPUS, World};

/// The memory limit in MiB that another program sets in its hook for containers.
const OF_HOOK: u64 = 9;

/// The service must replace the limit of another program's hook within this time.
const HOOK_LASTS: Duration = Duration::from_secs(5);

/// The memory limits in the simulated kernel, in MiB.
#[derive(Debug, Default)]
pub(crate) struct SimKernel {
    limits: BTreeMap<LimitedGroup, u64>,
    /// The limits that another program has changed since the service last checked them, each with the deadline for the
    /// service's next check.
    changed: BTreeMap<LimitedGroup, Duration>,
    /// The limits in the kernel that another program or an earlier service has set.
    of_others: BTreeSet<LimitedGroup>,
    /// The GPUs on which the kernel enforces no limits, as in MIG mode.
    refuses: BTreeSet<String>,
}

/// The service's limits in the kernel, and the limits that it wants. `limits` is `None` until the service computes for the
/// first time which limits it wants.
#[derive(Debug, Default)]
pub(crate) struct SimKernelLimits {
    limits: Option<KernelLimits>,
    wanted: GroupLimits,
}

/// Decides from the payload of an order, a number that stands for the configured limits, if the configuration wants limits in
/// the kernel. A reload can change the answer while programs run.
fn are_wanted(payload: u32) -> bool {
    payload % 5 != 4
}

/// Returns how much memory in MiB a program may have on a GPU by the kernel's limits of its control group and of the control
/// groups above. `has` is the memory that the program already has.
pub(crate) fn room_in_groups(world: &World, gpu: &str, group: &str, has: u64) -> u64 {
    let around = world.kernel.limits.iter().filter(|(place, _)| {
        place.gpu == gpu && is_in(group, &place.group.path) && world.bindings.is_there(&place.group)
    });
    let room =
        |(place, mib): (&LimitedGroup, &u64)| mib.saturating_sub(world.used_by(place).saturating_sub(has));
    around.map(room).min().unwrap_or(u64::MAX)
}

impl World {
    pub(crate) fn payload_on(&self, gpu: &str) -> Option<u32> {
        let order = self.demand.orders.iter().find(|order| order.gpus.iter().any(|one| one == gpu))?;
        Some(order.payload)
    }

    fn memory_of(&self, slice: &SliceId) -> Option<(String, u64)> {
        let gpu = gpu_of(*slice);
        let budgets = budgets_of(self.payload_on(&gpu)?, false).budgets;
        Some((gpu, budgets.get(usize::try_from(slice.ordinal).ok()?)?.memory_mib))
    }

    /// The service computes which memory limits follow from the bindings and the configuration, and takes them as its goals for
    /// the kernel.
    pub(crate) fn keep_kernel_limits(&mut self) {
        let Some(service) = &self.service else { return };
        let is_first = service.kernel_limits.limits.is_none();
        let wanted = match service.ending {
            Some(Ending::ForGood) => GroupLimits::new(),
            _ => limits(self.bindings.registry(), |slice| self.memory_of(slice)),
        };
        let goal = |(place, mib): (&LimitedGroup, u64)| {
            let is_wanted = self.payload_on(&place.gpu).is_some_and(are_wanted);
            match (is_wanted, is_first) {
                (true, _) => Some((place.clone(), LimitGoal::Hold(mib))),
                (false, true) => Some((place.clone(), LimitGoal::Lift([mib].into()))),
                (false, false) => None,
            }
        };
        let goals = wanted.iter().filter_map(|(place, limit)| goal((place, limit.mib))).collect();
        let now = self.now;
        let Some(service) = &mut self.service else { return };
        service.kernel_limits.limits.get_or_insert_default().pursue(&goals, now);
        service.kernel_limits.wanted = wanted;
    }

    fn next_limit(&self) -> Option<(Duration, LimitedGroup, LimitGoal)> {
        self.service.as_ref()?.kernel_limits.limits.as_ref()?.next(&BTreeSet::new())
    }

    pub(crate) fn kernel_limits_come_on(&self) -> bool {
        self.kernel_limits_wait_until().is_some_and(|due| due <= self.now)
    }

    pub(crate) fn kernel_limits_wait_until(&self) -> Option<Duration> {
        self.next_limit().map(|(due, ..)| due)
    }

    fn used_by(&self, place: &LimitedGroup) -> u64 {
        let programs = self.programs_on(&place.gpu);
        programs.iter().filter(|one| is_in(one.group, &place.group.path)).map(|one| one.mib).sum()
    }

    pub(crate) fn carry_on_kernel_limits(&mut self, dice: &mut Dice) {
        let next = self.next_limit().filter(|(due, ..)| *due <= self.now);
        let Some((_, place, goal)) = next else { return };
        let is_lost = self.goes_wrong(dice);
        let is_new = matches!(goal, LimitGoal::Hold(_)) && !self.kernel.limits.contains_key(&place);
        // A container may have a second hook, of another program. The second hook may replace the limit just after the service
        // has set it.
        let hook_comes = is_new && !self.is_calm && dice.one_in(3);
        let now = self.now;
        let (is_there, used) = (self.bindings.is_there(&place.group), self.used_by(&place));
        let kernel = &mut self.kernel;
        kernel.changed.remove(&place);
        let refused = |why: &str| LimitOutcome::Refused(why.to_owned());
        let outcome = match &goal {
            _ if !is_there => match goal {
                LimitGoal::Lift(_) => LimitOutcome::Reached,
                LimitGoal::Hold(_) => refused("there is no such control group"),
            },
            _ if kernel.refuses.contains(&place.gpu) => refused("not on this GPU"),
            LimitGoal::Hold(mib) if kernel.limits.get(&place) != Some(mib) && used > *mib => {
                refused("more is in use")
            }
            LimitGoal::Hold(mib) => {
                let before = kernel.limits.insert(place.clone(), *mib);
                kernel.of_others.remove(&place);
                if hook_comes {
                    kernel.limits.insert(place.clone(), OF_HOOK);
                    kernel.of_others.insert(place.clone());
                    kernel.changed.insert(place.clone(), now + HOOK_LASTS);
                }
                if before == Some(*mib) {
                    LimitOutcome::Reached
                } else {
                    LimitOutcome::Replaced(format!("{before:?}"))
                }
            }
            LimitGoal::Lift(ours) => {
                if kernel.limits.get(&place).is_some_and(|mib| ours.contains(mib)) {
                    kernel.limits.remove(&place);
                    kernel.of_others.remove(&place);
                }
                LimitOutcome::Reached
            }
        };
        // The service may get no answer although the kernel has set the limit.
        let outcome = if is_lost { refused("no answer") } else { outcome };
        self.add_to_story(|| format!("limit of {place:?}: {goal:?} {outcome:?}"));
        let Some(service) = &mut self.service else { return };
        service.kernel_limits.limits.get_or_insert_default().has_acted(&place, &goal, outcome, now);
    }

    /// The service ends, and its memory limits stay in the kernel. The next service knows only the state file and the
    /// configuration, so it can't tell these limits from limits of other programs.
    pub(crate) fn limits_are_left(&mut self) {
        self.kernel.of_others.extend(self.kernel.limits.keys().cloned());
    }

    pub(crate) fn kernel_limits_calm_down(&mut self) {
        self.kernel.refuses.clear();
    }

    pub(crate) fn kernel_limits_change(&mut self, dice: &mut Dice) {
        let gpu = (*dice.pick(&GPUS).unwrap()).to_owned();
        if dice.one_in(3) {
            if !self.kernel.refuses.remove(&gpu) {
                self.kernel.refuses.insert(gpu.clone());
            }
            self.add_to_story(|| format!("the kernel changes its mind about limits on {gpu}"));
            return;
        }
        let place = LimitedGroup { gpu, group: self.bindings.any_group(dice) };
        match dice.below(3) {
            0 => _ = self.kernel.limits.remove(&place),
            // A limit of 7 MiB is lower than the limit of any slice.
            _ => _ = self.kernel.limits.insert(place.clone(), 7),
        }
        self.add_to_story(|| format!("somebody else changes the limit of {place:?}"));
        self.kernel.of_others.insert(place.clone());
        self.kernel.changed.insert(place, self.now + CHECK);
    }

    /// The kernel drops the memory limits of a control group when the control group is removed.
    pub(crate) fn limits_of_gone_groups_end(&mut self) {
        let is_there = |group: &ControlGroup| self.bindings.is_there(group);
        self.kernel.limits.retain(|place, _| is_there(&place.group));
        self.kernel.changed.retain(|place, _| is_there(&place.group));
        self.kernel.of_others.retain(|place| is_there(&place.group));
    }

    /// Checks the promise `a-shown-limit-is-held`: if the service shows a slice as limited by the kernel, the only control
    /// group with the slice can have exactly the memory of the slice.
    pub(crate) fn check_limits_are_held(&self) {
        let Some(service) = &self.service else { return };
        let Some(known) = &service.kernel_limits.limits else { return };
        let by_slice = self.bindings.registry().by_slice();
        let held: BTreeSet<&LimitedGroup> = known
            .outcomes()
            .filter(|(_, outcome)| **outcome == LimitOutcome::Reached)
            .map(|(place, _)| place)
            .collect();
        for gpu in GPUS {
            for slice in (0..u32::try_from(SLICES).unwrap()).map(|slice| slice_of(gpu, slice)) {
                let place = limited_to(&slice, &gpu.to_owned(), &by_slice, &service.kernel_limits.wanted);
                let Some(place) = place.filter(|place| held.contains(place)) else { continue };
                let may_differ = |until: &Duration| self.now <= *until || self.kernel_limits_come_on();
                if self.kernel.changed.get(&place).is_some_and(may_differ)
                    || !self.bindings.is_there(&place.group)
                {
                    continue;
                }
                let mib = self.memory_of(&slice).map(|(_, mib)| mib);
                let has = self.kernel.limits.get(&place).copied();
                assert!(
                    has == mib,
                    "a-shown-limit-is-held: {slice:?} has {mib:?} MiB, and {place:?} may have {has:?}"
                );
            }
        }
    }

    /// Checks the promise `limits-go-with-bindings`: at the end of a history the kernel has each limit that follows from the
    /// bindings and the configuration, except for limits that the kernel refuses. The kernel has no other limit of the service.
    pub(crate) fn check_limits_go_with_bindings(&self) {
        let wanted = limits(self.bindings.registry(), |slice| self.memory_of(slice));
        for (place, limit) in &wanted {
            let refuses = self.kernel.refuses.contains(&place.gpu)
                || self.used_by(place) > limit.mib
                || !self.bindings.is_there(&place.group)
                || !self.payload_on(&place.gpu).is_some_and(are_wanted);
            let has = self.kernel.limits.get(place);
            assert!(
                refuses || has == Some(&limit.mib),
                "limits-go-with-bindings: {place:?} may have {has:?}, and its slices have {limit:?}"
            );
        }
        for (place, has) in &self.kernel.limits {
            let is_wanted = wanted.contains_key(place) && self.payload_on(&place.gpu).is_some_and(are_wanted);
            let is_ours = !self.kernel.of_others.contains(place) && !self.kernel.refuses.contains(&place.gpu);
            assert!(
                is_wanted || !is_ours,
                "limits-go-with-bindings: {place:?} has no slice, and may have {has} MiB"
            );
        }
    }
}
