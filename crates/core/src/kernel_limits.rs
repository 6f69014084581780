//! The memory limits that the kernel enforces for control groups that are bound to slices.
//!
//! The limit of a control group on a GPU is the memory of its own slices there and of the slices of its descendants. The kernel
//! counts the memory of descendants too, and a client must get all memory that its slice has. Every limit is checked after
//! [`CHECK`], since other programs can change a limit, and the reason for a refusal may end. A new limit is checked after
//! [`SOON`] too: other hooks of the container may run after the hook that binds it, and change the limit.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

use crate::bindings::{Binding, Bindings, ControlGroup};
use crate::terms::SliceId;
use crate::{CoreTime, GpuUuid};

/// The time between two checks of a limit that the kernel enforces.
pub const CHECK: CoreTime = CoreTime::from_secs(60);

/// The time until the next check of a limit that is new, or that another program has just changed.
pub const SOON: CoreTime = CoreTime::from_secs(5);

/// A control group, and a GPU on which it has a limit.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LimitedGroup {
    /// The GPU on which the control group has the limit.
    pub gpu: GpuUuid,
    /// The control group that has the limit.
    pub group: ControlGroup,
}

/// The limit of a control group on a GPU: the memory that the control group may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupLimit {
    /// The limit in MiB.
    pub mib: u64,
    /// The slices whose memory makes up the limit.
    pub slices: BTreeSet<SliceId>,
}

/// The limit of each control group on each GPU.
pub type GroupLimits = BTreeMap<LimitedGroup, GroupLimit>;

/// The limits that follow from the bindings. `memory_of` gives the GPU of a slice that is served, and the slice's memory in
/// MiB.
pub fn limits(bindings: &Bindings, memory_of: impl Fn(&SliceId) -> Option<(GpuUuid, u64)>) -> GroupLimits {
    let by_path: BTreeMap<&str, _> = bindings.iter().map(|one| (one.group.path.as_str(), one)).collect();
    let mut limits = GroupLimits::new();
    for one in bindings.iter() {
        // `0` is the byte after `/`, so this range has all paths that begin with the group's path and a slash.
        let (first, end) = (alloc::format!("{}/", one.group.path), alloc::format!("{}0", one.group.path));
        let inside = by_path.range(first.as_str()..end.as_str()).map(|(_, inside)| *inside);
        limits.extend(limits_of(one, inside.chain([one]), &memory_of));
    }
    limits
}

/// The limits that a binding of the control groups at these paths can change: the limits of these control groups and of their
/// ancestors.
pub fn limits_around(
    paths: &[&str],
    bindings: &Bindings,
    memory_of: impl Fn(&SliceId) -> Option<(GpuUuid, u64)>,
) -> GroupLimits {
    let around = bindings.iter().filter(|one| paths.iter().any(|path| one.group.has(path)));
    let with_inside = |one: &Binding| {
        let inside = bindings.iter().filter(|other| one.group.has(&other.group.path));
        limits_of(one, inside, &memory_of)
    };
    around.flat_map(with_inside).collect()
}

/// The limits of a bound control group on its GPUs, for its own slices and the slices of its descendants.
fn limits_of<'b>(
    one: &Binding,
    inside: impl Iterator<Item = &'b Binding>,
    memory_of: impl Fn(&SliceId) -> Option<(GpuUuid, u64)>,
) -> GroupLimits {
    let own: BTreeSet<GpuUuid> = one.slices.iter().filter_map(|slice| Some(memory_of(slice)?.0)).collect();
    let slices: BTreeSet<&SliceId> = inside.flat_map(|one| &one.slices).collect();
    let mut limits = GroupLimits::new();
    for slice in slices {
        let Some((gpu, mib)) = memory_of(slice).filter(|(gpu, _)| own.contains(gpu)) else { continue };
        let place = LimitedGroup { gpu, group: one.group.clone() };
        let limit = limits.entry(place).or_insert_with(|| GroupLimit { mib: 0, slices: BTreeSet::new() });
        limit.mib = limit.mib.saturating_add(mib);
        limit.slices.insert(*slice);
    }
    limits
}

/// The control group with exactly the memory of this slice as its limit on this GPU, so that the limit applies to all programs
/// with this slice. None if two bindings have the slice, or if the limit covers several slices.
pub fn limited_to(
    slice: &SliceId,
    gpu: &GpuUuid,
    by_slice: &BTreeMap<&SliceId, Vec<&Binding>>,
    limits: &GroupLimits,
) -> Option<LimitedGroup> {
    let [one] = by_slice.get(slice)?.as_slice() else { return None };
    let place = LimitedGroup { gpu: gpu.clone(), group: one.group.clone() };
    limits.get(&place).filter(|limit| limit.slices.len() == 1).map(|_| place)
}

/// The aim for one limit: the kernel should enforce it, or should not enforce it any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LimitGoal {
    /// Set this limit, in MiB.
    Hold(u64),
    /// Remove the limit if its value is one of these values in MiB, which the service may have set. Another program has set a
    /// limit with any other value.
    Lift(BTreeSet<u64>),
}

/// The outcome of an attempt to set or remove a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LimitOutcome {
    /// The driver confirms that the goal is reached.
    Reached,
    /// The driver confirms that the goal is reached. Before the attempt, the kernel had another limit, which the text describes.
    Replaced(String),
    /// The driver can't set memory limits that the kernel enforces.
    NotOffered,
    /// The goal is not reached, for this reason.
    Refused(String),
}

/// The goals for the limits that should be enforced or removed, and the outcomes so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelLimits(BTreeMap<LimitedGroup, Pursued>);

/// The goal for one limit, and the outcome of the attempts so far.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Pursued {
    goal: LimitGoal,
    /// The limits, in MiB, that the service may have set in the kernel. The kernel may set a limit even if its answer to the
    /// service gets lost.
    ours: BTreeSet<u64>,
    outcome: Option<LimitOutcome>,
    due: CoreTime,
}

impl KernelLimits {
    /// Sets the goals. A limit without a goal is removed. A refused limit is tried again, since a change of the goals often
    /// ends the reason for the refusal. If goals were only added, refused limits are not tried again: a host may have thousands
    /// of limits.
    pub fn pursue(&mut self, goals: &BTreeMap<LimitedGroup, LimitGoal>, now: CoreTime) {
        let mut known = self.0.iter().peekable();
        let mut is_new = |goal: &(&LimitedGroup, &LimitGoal)| {
            known.next_if(|(place, pursued)| pursued.goal == *goal.1 && *place == goal.0).is_none()
        };
        let new: Vec<_> = goals.iter().filter(|goal| is_new(goal)).collect();
        let has_changed = new.is_empty() || known.next().is_some();
        for (place, pursued) in self.0.iter_mut().filter(|_| has_changed) {
            let goal = goals.get(place).cloned().unwrap_or_else(|| LimitGoal::Lift(pursued.ours.clone()));
            if pursued.goal != goal {
                (pursued.goal, pursued.outcome, pursued.due) = (goal, None, now);
                pursued.ours.extend(pursued.goal.mib());
            } else if matches!(pursued.outcome, Some(LimitOutcome::Refused(_))) {
                pursued.due = now;
            }
        }
        for (place, goal) in new {
            let new = || Pursued { goal: goal.clone(), ours: goal.mib(), outcome: None, due: now };
            self.0.entry(place.clone()).or_insert_with(new);
        }
    }

    /// The next limit to set or remove, with its goal. None if no attempt is due.
    pub fn next(&self, now: CoreTime) -> Option<(LimitedGroup, LimitGoal)> {
        let (place, pursued) = self.0.iter().find(|(_, pursued)| pursued.due <= now)?;
        Some((place.clone(), pursued.goal.clone()))
    }

    /// The moment of the next attempt. None if there is no goal.
    pub fn due(&self) -> Option<CoreTime> {
        self.0.values().map(|pursued| pursued.due).min()
    }

    /// Records the outcome of an attempt. Returns true if the outcome is worth a message: the kernel refused for another reason
    /// than the last time, or it had another limit than the service's.
    pub fn has_acted(
        &mut self,
        place: &LimitedGroup,
        goal: &LimitGoal,
        outcome: LimitOutcome,
        now: CoreTime,
    ) -> bool {
        let Some(pursued) = self.0.get_mut(place).filter(|pursued| pursued.goal == *goal) else {
            return false;
        };
        if matches!(outcome, LimitOutcome::Refused(_)) {
            let is_new = pursued.outcome.as_ref() != Some(&outcome);
            (pursued.outcome, pursued.due) = (Some(outcome), now.saturating_add(CHECK));
            return is_new;
        }
        if matches!(goal, LimitGoal::Lift(_)) {
            self.0.remove(place);
            return false;
        }
        let (outcome, was_another) = match outcome {
            LimitOutcome::Replaced(_) => (LimitOutcome::Reached, true),
            other => (other, false),
        };
        let was_held = pursued.outcome == Some(LimitOutcome::Reached);
        let is_held = outcome == LimitOutcome::Reached;
        if is_held {
            pursued.ours = goal.mib();
        }
        let is_new = is_held && (was_another || !was_held);
        pursued.due = now.saturating_add(if is_new { SOON } else { CHECK });
        pursued.outcome = Some(outcome);
        was_held && was_another
    }

    /// The outcome of the last attempt for each limit that should be enforced.
    pub fn outcomes(&self) -> impl Iterator<Item = (&LimitedGroup, &LimitOutcome)> {
        self.0.iter().filter_map(|(place, pursued)| Some((place, pursued.shown()?)))
    }

    /// The outcome of the last attempt for one limit. None if there was no attempt, or if the limit should not be enforced.
    pub fn outcome(&self, place: &LimitedGroup) -> Option<&LimitOutcome> {
        self.0.get(place)?.shown()
    }
}

impl Pursued {
    /// The outcome of the last attempt. None if the goal is to remove the limit.
    fn shown(&self) -> Option<&LimitOutcome> {
        self.outcome.as_ref().filter(|_| matches!(self.goal, LimitGoal::Hold(_)))
    }
}

impl LimitGoal {
    /// The limits, in MiB, that the kernel may get from the service by this goal.
    fn mib(&self) -> BTreeSet<u64> {
        match self {
            Self::Hold(mib) => [*mib].into(),
            Self::Lift(ours) => ours.clone(),
        }
    }
}
