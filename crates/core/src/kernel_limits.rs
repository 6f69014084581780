//! The memory limits that the kernel enforces for control groups that are bound to slices.
//!
//! The kernel counts the memory of a control group together with the memory of its descendants. The limit of a control group on
//! a GPU is therefore the memory of its own slices there plus the memory of its descendants' slices. Each limit is checked
//! again after [`CHECK`], since other programs can change it, and since a limit that was refused may be accepted later. A new
//! limit is first checked after [`SOON`]: a container is bound by a hook of the container runtime, and other hooks that run
//! later may change the limit.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

use crate::bindings::{Binding, Bindings, ControlGroup};
use crate::terms::SliceId;
use crate::{CoreTime, GpuUuid};

/// The time between two checks of a limit.
pub const CHECK: CoreTime = CoreTime::from_secs(60);

/// The time until the next check of a limit that is new, or that another program has just changed.
pub const SOON: CoreTime = CoreTime::from_secs(5);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LimitedGroup {
    pub gpu: GpuUuid,
    pub group: ControlGroup,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupLimit {
    pub mib: u64,
    /// The memory of these slices adds up to the limit.
    pub slices: BTreeSet<SliceId>,
}

pub type GroupLimits = BTreeMap<LimitedGroup, GroupLimit>;

/// The limits that follow from the bindings. `memory_of` returns the GPU and the memory in MiB of a slice, or None if the slice
/// is not served.
pub fn limits(bindings: &Bindings, memory_of: impl Fn(&SliceId) -> Option<(GpuUuid, u64)>) -> GroupLimits {
    let by_path: BTreeMap<&str, _> = bindings.iter().map(|one| (one.group.path.as_str(), one)).collect();
    let mut limits = GroupLimits::new();
    for one in bindings.iter() {
        // `0` is the byte after `/`, so the range has exactly the paths that begin with the group's path and a slash.
        let (first, end) = (alloc::format!("{}/", one.group.path), alloc::format!("{}0", one.group.path));
        let inside = by_path.range(first.as_str()..end.as_str()).map(|(_, inside)| *inside);
        limits.extend(limits_of(one, inside.chain([one]), &memory_of));
    }
    limits
}

/// The limits that can change when the control groups at these paths are bound: the limits of these control groups and of their
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

/// The limits of one bound control group on its GPUs. `inside` has the binding of this control group and the bindings of its
/// descendants.
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

/// The control group with the limit of this slice alone on this GPU: all programs with the slice are in this control group, and
/// its limit equals the memory of the slice. None if several bindings have the slice, or if the control group's limit is the
/// sum of several slices.
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

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LimitGoal {
    /// Set this limit, in MiB.
    Hold(u64),
    /// Remove the limit if its value is one of these values, in MiB, which the service may have set. Any other value is from
    /// another program and stays.
    Lift(BTreeSet<u64>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LimitOutcome {
    Reached,
    /// Like [`Self::Reached`], but the kernel had another limit before, which the text describes.
    Replaced(String),
    /// The driver does not support memory limits that the kernel enforces.
    NotOffered,
    Refused(String),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelLimits(BTreeMap<LimitedGroup, Pursued>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Pursued {
    goal: LimitGoal,
    /// The values, in MiB, that the service may have set in the kernel. The kernel may have set a value even if its answer was
    /// lost.
    ours: BTreeSet<u64>,
    outcome: Option<LimitOutcome>,
    due: CoreTime,
}

impl KernelLimits {
    /// Sets the goals. For a limit that no longer has a goal, the new goal is to remove the limit from the kernel. A refused
    /// limit is tried again, since a change of the goals often removes the reason for the refusal. If goals were only added, no
    /// refused limit is tried again, since a host may have thousands of limits.
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

    /// The limit that is due first, with the time at which it is due. Limits of the GPUs in `busy` wait until the present
    /// attempt for their GPU has ended, since NVML may not answer for a GPU for long.
    pub fn next(&self, busy: &BTreeSet<GpuUuid>) -> Option<(CoreTime, LimitedGroup, LimitGoal)> {
        let free = self.0.iter().filter(|(place, _)| !busy.contains(&place.gpu));
        let (place, pursued) = free.min_by_key(|(_, pursued)| pursued.due)?;
        Some((pursued.due, place.clone(), pursued.goal.clone()))
    }

    /// Records the outcome of an attempt. Returns true if the outcome deserves a message: the kernel has refused for a new
    /// reason, or another program has changed the limit that the service had set.
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

    /// The outcome of the last attempt for each limit that should be in force.
    pub fn outcomes(&self) -> impl Iterator<Item = (&LimitedGroup, &LimitOutcome)> {
        self.0.iter().filter_map(|(place, pursued)| Some((place, pursued.shown()?)))
    }

    /// None if there was no attempt yet, or if the limit should be removed.
    pub fn outcome(&self, place: &LimitedGroup) -> Option<&LimitOutcome> {
        self.0.get(place)?.shown()
    }
}

impl Pursued {
    fn shown(&self) -> Option<&LimitOutcome> {
        self.outcome.as_ref().filter(|_| matches!(self.goal, LimitGoal::Hold(_)))
    }
}

impl LimitGoal {
    /// The limits, in MiB, that the kernel may have got from the service under this goal.
    fn mib(&self) -> BTreeSet<u64> {
        match self {
            Self::Hold(mib) => [*mib].into(),
            Self::Lift(ours) => ours.clone(),
        }
    }
}
