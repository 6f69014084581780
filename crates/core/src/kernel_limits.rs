//! The memory limits that the kernel holds for control groups that are bound to slices.
//!
//! The limit of a control group on a GPU is the memory of its slices there, with the slices of the control groups inside it:
//! their memory counts as its own, and no client is to be refused memory that a slice has. Everything is looked at again after
//! [`CHECK`], since others can change a limit, and a refusal may pass. A limit that is new is looked at after [`SOON`] too:
//! hooks of the same container may run after the hook that binds it.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

use crate::CoreTime;
use crate::bindings::{Binding, Bindings, ControlGroup};

/// The time from one look at a limit to the next.
pub const CHECK: CoreTime = CoreTime::from_secs(60);

/// The time from a limit that is new, or that others have just changed, to the next look at it.
pub const SOON: CoreTime = CoreTime::from_secs(5);

/// A control group on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LimitedGroup<G> {
    /// The GPU.
    pub gpu: G,
    /// The control group.
    pub group: ControlGroup,
}

/// The memory that a control group may have on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupLimit<S> {
    /// In MiB.
    pub mib: u64,
    /// The slices that it is the memory of.
    pub slices: BTreeSet<S>,
}

/// The limits of all control groups.
pub type GroupLimits<S, G> = BTreeMap<LimitedGroup<G>, GroupLimit<S>>;

/// The limits that follow from the bindings. `memory_of` gives the GPU of a slice that is served, and its memory in MiB.
pub fn limits<S: Ord + Clone, G: Ord + Clone>(
    bindings: &Bindings<S>,
    memory_of: impl Fn(&S) -> Option<(G, u64)>,
) -> GroupLimits<S, G> {
    let by_path: BTreeMap<&str, _> = bindings.iter().map(|one| (one.group.path.as_str(), one)).collect();
    let mut limits = GroupLimits::new();
    for one in bindings.iter() {
        // In the order of text a 0 follows the slash.
        let (first, end) = (alloc::format!("{}/", one.group.path), alloc::format!("{}0", one.group.path));
        let inside = by_path.range(first.as_str()..end.as_str()).map(|(_, inside)| *inside);
        limits.extend(limits_of(one, inside.chain([one]), &memory_of));
    }
    limits
}

/// The same limits of the control groups at these paths, and of those around them: the limits that are others once these
/// control groups are bound, too.
pub fn limits_around<S: Ord + Clone, G: Ord + Clone>(
    paths: &[&str],
    bindings: &Bindings<S>,
    memory_of: impl Fn(&S) -> Option<(G, u64)>,
) -> GroupLimits<S, G> {
    let around = bindings.iter().filter(|one| paths.iter().any(|path| one.group.has(path)));
    let with_inside = |one: &Binding<S>| {
        let inside = bindings.iter().filter(|other| one.group.has(&other.group.path));
        limits_of(one, inside, &memory_of)
    };
    around.flat_map(with_inside).collect()
}

/// The limits of a control group, for its own slices and the slices of the control groups inside it.
fn limits_of<'b, S: Ord + Clone + 'b, G: Ord + Clone>(
    one: &Binding<S>,
    inside: impl Iterator<Item = &'b Binding<S>>,
    memory_of: impl Fn(&S) -> Option<(G, u64)>,
) -> GroupLimits<S, G> {
    let own: BTreeSet<G> = one.slices.iter().filter_map(|slice| Some(memory_of(slice)?.0)).collect();
    let slices: BTreeSet<&S> = inside.flat_map(|one| &one.slices).collect();
    let mut limits = GroupLimits::new();
    for slice in slices {
        let Some((gpu, mib)) = memory_of(slice).filter(|(gpu, _)| own.contains(gpu)) else { continue };
        let place = LimitedGroup { gpu, group: one.group.clone() };
        let limit = limits.entry(place).or_insert_with(|| GroupLimit { mib: 0, slices: BTreeSet::new() });
        limit.mib = limit.mib.saturating_add(mib);
        limit.slices.insert(slice.clone());
    }
    limits
}

/// The control group with a limit on this GPU that is the memory of this slice, for all who have the slice. None if two
/// bindings have it, or the limit is that of several slices.
pub fn limited_to<S: Ord, G: Ord + Clone>(
    slice: &S,
    gpu: &G,
    by_slice: &BTreeMap<&S, Vec<&Binding<S>>>,
    limits: &GroupLimits<S, G>,
) -> Option<LimitedGroup<G>> {
    let [one] = by_slice.get(slice)?.as_slice() else { return None };
    let place = LimitedGroup { gpu: gpu.clone(), group: one.group.clone() };
    limits.get(&place).filter(|limit| limit.slices.len() == 1).map(|_| place)
}

/// A limit that the kernel is to hold, or to hold no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LimitGoal {
    /// Hold this limit, in MiB.
    Hold(u64),
    /// Remove the limit if it is one of these, in MiB. Any other limit was set by others.
    Lift(BTreeSet<u64>),
}

/// The end of an act about a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LimitOutcome {
    /// The goal is reached, as the driver says.
    Reached,
    /// The goal is reached. The kernel held another limit before, which these words describe.
    Replaced(String),
    /// The driver knows no such limits.
    NotOffered,
    /// The goal is not reached, for this reason.
    Refused(String),
}

/// All limits that the kernel is to hold, and the limits that it is to hold no more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelLimits<G>(BTreeMap<LimitedGroup<G>, Pursued>);

/// A goal and the way to it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Pursued {
    goal: LimitGoal,
    /// The limits that the kernel may hold for the service, in MiB: an answer can get lost behind the act.
    ours: BTreeSet<u64>,
    outcome: Option<LimitOutcome>,
    due: CoreTime,
}

impl<G> Default for KernelLimits<G> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<G: Ord + Clone> KernelLimits<G> {
    /// Sets the goals. A limit that is no goal any more is lifted. A refused limit is tried again, since a change of the goals
    /// often comes with the end of the reason, but not when a goal is new beside the others: a host may have thousands. Returns
    /// whether any but such new ones has changed.
    pub fn pursue(&mut self, goals: &BTreeMap<LimitedGroup<G>, LimitGoal>, now: CoreTime) -> bool {
        let mut known = self.0.iter().peekable();
        let mut is_new = |goal: &(&LimitedGroup<G>, &LimitGoal)| {
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
        has_changed
    }

    /// The next act, if one is due.
    pub fn next(&self, now: CoreTime) -> Option<(LimitedGroup<G>, LimitGoal)> {
        let (place, pursued) = self.0.iter().find(|(_, pursued)| pursued.due <= now)?;
        Some((place.clone(), pursued.goal.clone()))
    }

    /// The moment of the next act.
    pub fn due(&self) -> Option<CoreTime> {
        self.0.values().map(|pursued| pursued.due).min()
    }

    /// Records the end of an act. Returns true if the outcome is worth a message: a refusal other than the last one for this
    /// goal, or another limit in the place of a limit that the kernel held.
    pub fn has_acted(
        &mut self,
        place: &LimitedGroup<G>,
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

    /// The outcome of the last act for each limit that the kernel is to hold.
    pub fn outcomes(&self) -> impl Iterator<Item = (&LimitedGroup<G>, &LimitOutcome)> {
        self.0.iter().filter_map(|(place, pursued)| Some((place, pursued.shown()?)))
    }

    /// The same for one limit.
    pub fn outcome(&self, place: &LimitedGroup<G>) -> Option<&LimitOutcome> {
        self.0.get(place)?.shown()
    }
}

impl Pursued {
    /// The outcome, if the goal is to hold a limit.
    fn shown(&self) -> Option<&LimitOutcome> {
        self.outcome.as_ref().filter(|_| matches!(self.goal, LimitGoal::Hold(_)))
    }
}

impl LimitGoal {
    /// The limits that the kernel may hold for the service, where this is the goal.
    fn mib(&self) -> BTreeSet<u64> {
        match self {
            Self::Hold(mib) => [*mib].into(),
            Self::Lift(ours) => ours.clone(),
        }
    }
}
