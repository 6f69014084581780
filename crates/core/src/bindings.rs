//! Bindings: the slices to which control groups are bound, before or while their programs run.
//!
//! A process has the slices of the binding of its own control group. If this control group is not bound, the nearest bound
//! ancestor decides. Without sharing, all bindings of a slice belong to one tenant. Control groups inside one another, and
//! control groups of one pod, belong to one tenant, so their bindings do not exclude each other.
//!
//! A binding ends when its control group is removed. In Kubernetes, a binding ends only with the pod, since the kubelet gives
//! slices to pods and restarts a container with the same slice. A control group without processes may still get its first
//! process, so its binding ends only [`FIRST_PROCESS`] seconds after the control group was bound. If all processes of a control
//! group have ended, the next control group that asks for its slice gets the slice at once. The reason is that a restarted
//! container can start before the control group of its predecessor is removed.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cmp::Ordering;
use core::fmt;

use crate::terms::SliceId;

/// The seconds that a binding waits for the first process of its control group.
pub const FIRST_PROCESS: u64 = 60;

/// The most bindings of a host. Without a bound, the state file could become too large. A host with 16 GPUs, each with 60
/// clients in control groups of their own, needs only 960 bindings.
const MOST: usize = 4096;

/// The most bytes of one binding in the state file. Without a bound, the state file could become too large for the service to
/// read it again. 6 KiB are enough for the longest path of a control group, the longest label and a hundred slices.
pub const LARGEST: usize = 6 * 1024;

pub const MOST_BYTES: usize = MOST * LARGEST;

const ROOT: u32 = 0;

/// A control group of the host. The inode distinguishes it from a later control group with the same path.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ControlGroup {
    /// The path below the mount point of the control group hierarchy. The path begins with a slash and does not end with a
    /// slash.
    pub path: String,
    pub inode: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupUse {
    Gone,
    /// The control group was removed, but its pod still runs. The kubelet may start the container again.
    PodGoesOn,
    /// The control group and its descendants have no process.
    Empty,
    /// The control group has processes, or the kernel does not report if it has any.
    Used,
}

/// The authority that has made a binding. Each variant has more authority than the variants above it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BoundBy {
    /// The records of the platform's host agent name the slice, or name a GPU on which the service has chosen a free slice.
    Platform,
    Root,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    pub group: ControlGroup,
    /// Never empty.
    pub slices: BTreeSet<SliceId>,
    pub by: BoundBy,
    /// The name of the owner, for messages: a guest, a container or a job. May be empty.
    pub label: String,
    /// The time at which the control group was bound, in seconds since the host's boot.
    pub since: u64,
    /// True if the control group has had a process since it was bound.
    pub was_used: bool,
}

/// The bindings of the host. A clone is cheap, since clones share the bindings. The service clones the bindings for every
/// change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bindings(Vec<Arc<Binding>>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotBound {
    Taken {
        slice: SliceId,
        by: String,
    },
    TooMany,
    /// The binding needs more bytes in the state file than [`LARGEST`].
    TooLarge,
}

impl fmt::Display for NotBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken { slice, by } => write!(f, "{slice} is taken by {by}"),
            Self::TooMany => {
                write!(f, "this host has {MOST} bindings already; end a binding with yunion-mpsctl unbind")
            }
            Self::TooLarge => {
                write!(
                    f,
                    "the binding would need more than {LARGEST} bytes of the state file; give fewer slices or \
                     a shorter label"
                )
            }
        }
    }
}

/// Returns true if the name of a control group can be trusted, since root owns the control group and all its ancestors. A user
/// who owns a control group (for example a unit with `Delegate=`) can make control groups in it, and can name them like another
/// tenant's container. `owners` has the user ids of the owners of the control group and of its ancestors. None stands for a
/// control group that does not exist.
pub fn is_named_by_root(owners: impl IntoIterator<Item = Option<u32>>) -> bool {
    owners.into_iter().all(|owner| owner == Some(ROOT))
}

/// The path of the pod's control group, for the control group at `path`. None if `path` is outside of the kubelet's control
/// groups.
///
/// The kubelet has one control group for all pods, `kubepods` or `kubepods.slice`. Its name may begin with the name of the
/// kubelet's configured root control group. The control group for all pods contains the control groups of pods. It also
/// contains one control group for each of the lower quality-of-service classes (`burstable`, `besteffort`), which contains the
/// pods of the class.
pub fn pod_of(path: &str) -> Option<&str> {
    let is_for_all =
        |name: &str| matches!(name, "kubepods" | "kubepods.slice") || name.ends_with("-kubepods.slice");
    let is_class = |name: &str| {
        let class = name.strip_suffix(".slice").unwrap_or(name);
        class.ends_with("burstable") || class.ends_with("besteffort")
    };
    let mut end = 0;
    let mut names = path.split('/').map(|name| {
        end += name.len() + 1;
        (name, end - 1)
    });
    names.find(|(name, _)| is_for_all(name))?;
    let (_, end) = names.find(|(name, _)| !is_class(name))?;
    path.get(..end)
}

fn is_in(path: &str, above: &str) -> bool {
    path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

impl ControlGroup {
    pub fn has(&self, path: &str) -> bool {
        is_in(path, &self.path)
    }

    fn is_around_or_inside(&self, path: &str) -> bool {
        self.has(path) || is_in(&self.path, path)
    }

    /// Returns whether both control groups belong to one tenant: one contains the other, or both are in one pod.
    fn is_one_tenants(&self, path: &str) -> bool {
        let pod = pod_of(path);
        self.is_around_or_inside(path) || (pod.is_some() && pod == pod_of(&self.path))
    }
}

impl Binding {
    pub fn name(&self) -> &str {
        if self.label.is_empty() { &self.group.path } else { &self.label }
    }

    /// Combines this new binding with `before`, the present binding of the same control group. The binding with more authority
    /// wins. With equal authority, the control group has the slices of both.
    fn added_to(self, before: Option<&Self>) -> Self {
        match before.map(|before| (before.by.cmp(&self.by), before)) {
            None | Some((Ordering::Less, _)) => self,
            Some((Ordering::Greater, stronger)) => stronger.clone(),
            Some((Ordering::Equal, before)) => Self {
                slices: before.slices.union(&self.slices).copied().collect(),
                label: if self.label.is_empty() { before.label.clone() } else { self.label },
                was_used: before.was_used || self.was_used,
                ..before.clone()
            },
        }
    }

    /// Returns whether the binding ends now: its control group is gone, or has no process and was bound at least
    /// [`FIRST_PROCESS`] seconds ago. `now` is in seconds since the host's boot.
    fn has_ended(&self, group_use: GroupUse, now: u64) -> bool {
        match group_use {
            GroupUse::Gone => true,
            GroupUse::Empty => now.saturating_sub(self.since) >= FIRST_PROCESS,
            GroupUse::Used | GroupUse::PodGoesOn => false,
        }
    }

    /// Returns whether the binding ends if another control group asks for its slices. `group_use` describes the control group
    /// of this binding.
    pub fn gives_way(&self, group_use: GroupUse, now: u64) -> bool {
        (group_use == GroupUse::Empty && self.was_used) || self.has_ended(group_use, now)
    }
}

impl FromIterator<Binding> for Bindings {
    fn from_iter<I: IntoIterator<Item = Binding>>(bindings: I) -> Self {
        Self(bindings.into_iter().filter(|one| !one.slices.is_empty()).take(MOST).map(Arc::new).collect())
    }
}

impl Bindings {
    /// Binds a control group. If the control group is bound with the same authority, it keeps its slices and gets the new
    /// slices too; a new label replaces the old label unless the new label is empty. A binding with more authority replaces the
    /// control group's binding. A binding with less authority changes nothing.
    ///
    /// Without sharing (`shares`), other tenants' bindings with less authority lose these slices, since root may know better
    /// than the host agent's records. `bytes_of` returns the size of a binding in the state file.
    ///
    /// # Errors
    /// The control group is not bound, and no binding is changed.
    pub fn bind(
        &mut self,
        wanted: Binding,
        shares: bool,
        bytes_of: impl Fn(&Binding) -> usize,
    ) -> Result<(), NotBound> {
        for slice in wanted.slices.iter().filter(|_| !shares) {
            let other = self.taken_from(slice, Some(&wanted.group.path), wanted.by, |_| true);
            if let Some(other) = other {
                return Err(NotBound::Taken { slice: *slice, by: other.name().into() });
            }
        }
        let before = self.iter().find(|one| one.group == wanted.group);
        if before.is_none() && self.0.len() >= MOST {
            return Err(NotBound::TooMany);
        }
        let path = wanted.group.path.clone();
        let taken: BTreeSet<SliceId> = if shares { BTreeSet::new() } else { wanted.slices.clone() };
        let by = wanted.by;
        let binding = wanted.added_to(before);
        if bytes_of(&binding) > LARGEST {
            return Err(NotBound::TooLarge);
        }
        let loses = |one: &Binding| {
            one.by < by && !one.group.is_one_tenants(&path) && !one.slices.is_disjoint(&taken)
        };
        for one in self.0.iter_mut().filter(|one| loses(one)) {
            Arc::make_mut(one).slices.retain(|slice| !taken.contains(slice));
        }
        // A binding of an earlier control group with the same path ends here, since that control group no longer exists.
        self.0.retain(|one| !one.slices.is_empty() && (one.group.path != path || one.group == binding.group));
        match self.0.iter_mut().find(|one| one.group == binding.group) {
            Some(bound) => *bound = Arc::new(binding),
            None => self.0.push(Arc::new(binding)),
        }
        Ok(())
    }

    /// Ends each binding that has a wanted slice and makes way for the control group at `path`, and returns these bindings. A
    /// binding makes way if [`Binding::gives_way`] returns true. A binding of the same pod makes way if its container has
    /// ended, so that the pod's next container gets the slice.
    pub fn make_way(
        &mut self,
        path: &str,
        is_wanted: impl Fn(&SliceId) -> bool,
        now: u64,
        use_of: impl Fn(&ControlGroup) -> GroupUse,
    ) -> Vec<Arc<Binding>> {
        let gives_way = |one: &mut Arc<Binding>| {
            if one.group.is_around_or_inside(path) || !one.slices.iter().any(&is_wanted) {
                return false;
            }
            let group_use = use_of(&one.group);
            let is_before = group_use == GroupUse::PodGoesOn && one.group.is_one_tenants(path);
            is_before || one.gives_way(group_use, now)
        };
        self.0.extract_if(.., gives_way).collect()
    }

    /// Ends the binding of the control group at this path, and returns the binding. None if this control group itself is not
    /// bound; the binding of an ancestor stays.
    pub fn unbind(&mut self, path: &str) -> Option<Arc<Binding>> {
        let at = self.0.iter().position(|one| one.group.path == path)?;
        Some(self.0.remove(at))
    }

    /// Ends a binding if its control group does not exist any more, or has got no process in time. Returns the ended bindings.
    /// `now` is in seconds since the host's boot.
    pub fn end(&mut self, now: u64, use_of: impl Fn(&ControlGroup) -> GroupUse) -> Vec<Arc<Binding>> {
        let has_ended = |one: &mut Arc<Binding>| {
            let group_use = use_of(&one.group);
            if group_use == GroupUse::Used && !one.was_used {
                Arc::make_mut(one).was_used = true;
            }
            one.has_ended(group_use, now)
        };
        self.0.extract_if(.., has_ended).collect()
    }

    /// The binding that excludes a program from a slice. None if no binding excludes the program. `path` is the program's
    /// control group, or None if it is not known. `by` is the authority of the program's request. `holds` returns false for a
    /// binding that excludes no program any more, for example since it makes way ([`Binding::gives_way`]).
    pub fn taken_from(
        &self,
        slice: &SliceId,
        path: Option<&str>,
        by: BoundBy,
        holds: impl Fn(&Binding) -> bool,
    ) -> Option<&Binding> {
        let is_anothers = |one: &&Binding| path.is_none_or(|path| !one.group.is_one_tenants(path));
        self.with(slice).filter(is_anothers).find(|one| one.by >= by && holds(one))
    }

    /// The binding that decides the slices of a process in the control group at this path. `is_there` returns whether a control
    /// group still exists. A new control group with the path of a removed control group does not get its binding.
    pub fn nearest(&self, path: &str, is_there: impl Fn(&ControlGroup) -> bool) -> Option<&Binding> {
        let around = self.iter().filter(|one| one.group.has(path) && is_there(&one.group));
        around.max_by_key(|one| one.group.path.len())
    }

    /// The bindings of each slice. A slice can have several bindings: of one tenant, or of tenants that share the slice.
    pub fn by_slice(&self) -> BTreeMap<&SliceId, Vec<&Binding>> {
        let mut all: BTreeMap<&SliceId, Vec<&Binding>> = BTreeMap::new();
        for one in self.iter() {
            for slice in &one.slices {
                all.entry(slice).or_default().push(one);
            }
        }
        all
    }

    pub fn with(&self, slice: &SliceId) -> impl Iterator<Item = &Binding> {
        self.iter().filter(move |one| one.slices.contains(slice))
    }

    /// The bindings that were added after `before`. None if a binding in `before` has changed or ended.
    pub fn added_to(&self, before: &Self) -> Option<impl Iterator<Item = &Binding>> {
        let (old, new) = self.0.split_at_checked(before.0.len())?;
        let is_same = old.iter().zip(&before.0).all(|(one, other)| Arc::ptr_eq(one, other));
        is_same.then(|| new.iter().map(Arc::as_ref))
    }

    /// Oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Binding> {
        self.0.iter().map(Arc::as_ref)
    }
}
