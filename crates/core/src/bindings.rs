//! Bindings: the slices to which control groups are bound, before their programs run or while they do.
//!
//! A process has the slices of the nearest binding: of its own control group, or else of the nearest ancestor that is bound.
//! Without sharing, a slice belongs to one binding at a time. Control groups inside one another, or in one pod, belong to one
//! tenant, so their bindings do not exclude each other.
//!
//! A binding ends by itself when its control group is removed. The binding of a container of Kubernetes ends with the pod: the
//! kubelet gives slices to pods, and restarts a container with the slice that it had. A control group without processes may still
//! get its first process, so its binding ends only after [`FIRST_PROCESS`]. A control group whose processes have all ended loses
//! its slice as soon as another control group asks for it: a restarted container can come before the control group of its
//! predecessor is removed.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cmp::Ordering;
use core::fmt;

use crate::terms::SliceId;

/// The seconds that a new binding waits for the first process of its control group.
pub const FIRST_PROCESS: u64 = 60;

/// The most bindings of a host. A GPU has at most 60 clients, and a host has at most 16 GPUs.
const MOST: usize = 4096;

/// The most bytes of one binding in the state file: a state file that is too large is not read again. A size of 6 KiB is enough
/// for the longest path of a control group with the longest label and a hundred slices.
pub const LARGEST: usize = 6 * 1024;

/// The most bytes of all bindings in the state file.
pub const MOST_BYTES: usize = MOST * LARGEST;

/// The user id of root: no other user can choose the names of root's control groups.
const ROOT: u32 = 0;

/// A control group of the host. A control group that was removed and made again with the same path is another control group.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ControlGroup {
    /// The path below the mount point of the control group hierarchy. The path begins with a slash and ends with none.
    pub path: String,
    pub inode: u64,
}

/// The use of a control group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupUse {
    /// The control group was removed.
    Gone,
    /// The control group was removed, but its pod still runs, and the kubelet may start the container again.
    PodGoesOn,
    /// Neither the control group nor a descendant of it has a process.
    Empty,
    /// The control group has processes, or the kernel does not say if it has processes.
    Used,
}

/// The source of a binding. A later variant has more authority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BoundBy {
    /// The host agent's records have named the slice, or a GPU on which the service has chosen a free slice.
    Platform,
    Root,
}

/// The slices of one control group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    pub group: ControlGroup,
    /// The slices of the control group. The binding has at least one slice.
    pub slices: BTreeSet<SliceId>,
    pub by: BoundBy,
    /// The name of the owner, for people: a guest, a container, a job. It may be empty.
    pub label: String,
    /// The time of the binding in seconds since the host was started.
    pub since: u64,
    /// True if the control group has had a process since the binding.
    pub was_used: bool,
}

/// The bindings of the host. A copy is cheap, since it shares the bindings: each change begins with a copy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bindings(Vec<Arc<Binding>>);

/// The reason why a control group is not bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotBound {
    /// A slice belongs to the binding of another control group.
    Taken {
        /// The slice that the control group can't get.
        slice: SliceId,
        /// The name of the binding that has the slice.
        by: String,
    },
    /// The host has as many bindings as are allowed.
    TooMany,
    /// The state file has no room for the binding.
    TooLarge,
}

impl fmt::Display for NotBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken { slice, by } => write!(f, "{slice} is taken by {by}"),
            Self::TooMany => {
                write!(f, "this host has {MOST} bindings already; yunion-mpsctl unbind ends a binding")
            }
            Self::TooLarge => {
                write!(
                    f,
                    "the binding would have more than {LARGEST} bytes; give fewer slices or a shorter label"
                )
            }
        }
    }
}

/// Returns true if the name of a control group can be trusted: root has made this control group and all its ancestors. A user
/// who owns a control group (a unit with `Delegate=`) can make control groups in it, and name them after another tenant's
/// container. `owners` are the users who own the control group and its ancestors; None for a control group that does not exist.
pub fn is_named_by_root(owners: impl IntoIterator<Item = Option<u32>>) -> bool {
    owners.into_iter().all(|owner| owner == Some(ROOT))
}

/// The path of the control group of a pod, from the path of a control group in it. None if `path` is outside the kubelet's
/// control groups.
///
/// The kubelet's control group for all pods is called `kubepods` or `kubepods.slice`, where the name may begin with the name of a
/// configured root. The control group for all pods contains the control groups of pods, and two control groups for the lower
/// classes of service, which contain the pods of these classes.
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
    /// Returns whether `path` is the path of this control group or of a descendant.
    pub fn has(&self, path: &str) -> bool {
        is_in(path, &self.path)
    }

    /// Returns whether this control group is an ancestor or a descendant of the control group at `path`, or that control group
    /// itself.
    fn is_around_or_inside(&self, path: &str) -> bool {
        self.has(path) || is_in(&self.path, path)
    }

    /// Returns true if both control groups belong to one tenant: one of them contains the other, or both are in one pod.
    fn is_one_tenants(&self, path: &str) -> bool {
        let pod = pod_of(path);
        self.is_around_or_inside(path) || (pod.is_some() && pod == pod_of(&self.path))
    }
}

impl Binding {
    /// The label of the binding, or the path of its control group if the label is empty.
    pub fn name(&self) -> &str {
        if self.label.is_empty() { &self.group.path } else { &self.label }
    }

    /// This binding with the added slices of `before`, the present binding of the same control group.
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

    /// Returns true if the binding ends because of `group_use`, the use of its control group: the binding has no owner any more.
    /// `now` is in seconds since the host was started.
    fn has_ended(&self, group_use: GroupUse, now: u64) -> bool {
        match group_use {
            GroupUse::Gone => true,
            GroupUse::Empty => now.saturating_sub(self.since) >= FIRST_PROCESS,
            GroupUse::Used | GroupUse::PodGoesOn => false,
        }
    }

    /// Returns true if the binding ends when another control group asks for its slices, because of `group_use`, the use of the
    /// binding's control group.
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
    /// Binds a control group. If the control group is already bound with the same authority, the slices are added to its binding,
    /// and a label that is not empty replaces the old label. A binding with more authority replaces the binding of a control
    /// group; a binding with less authority changes nothing. Without sharing, the new binding takes its slices away from bindings
    /// of other control groups with less authority: the host agent's records name a container, and root may know better than the
    /// records. `bytes_of` is the size of a binding in the state file.
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
        // A binding of another control group with the same path is removed: that control group no longer exists.
        self.0.retain(|one| !one.slices.is_empty() && (one.group.path != path || one.group == binding.group));
        match self.0.iter_mut().find(|one| one.group == binding.group) {
            Some(bound) => *bound = Arc::new(binding),
            None => self.0.push(Arc::new(binding)),
        }
        Ok(())
    }

    /// Ends the bindings that have no owner any more and exclude the control group at `path` from a slice for which `is_wanted`
    /// is true. Returns the ended bindings. The next container of a pod therefore gets the slice of the pod's container that has
    /// ended.
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

    /// Ends the binding of the control group at this path, and returns it. None if this control group itself is not bound.
    pub fn unbind(&mut self, path: &str) -> Option<Arc<Binding>> {
        let at = self.0.iter().position(|one| one.group.path == path)?;
        Some(self.0.remove(at))
    }

    /// Ends the bindings that have no owner any more, and returns the ended bindings. `now` is in seconds since the host was
    /// started.
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

    /// The binding that excludes a program from a slice. `by` is the authority with which the program asks for the slice.
    /// `path` is the program's control group, if it is known. `holds` returns whether a binding still has an owner.
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

    /// The binding that counts for a process in the control group at this path. `is_there` returns whether a control group
    /// still exists: a control group that was made again with the same path does not have the binding.
    pub fn nearest(&self, path: &str, is_there: impl Fn(&ControlGroup) -> bool) -> Option<&Binding> {
        let around = self.iter().filter(|one| one.group.has(path) && is_there(&one.group));
        around.max_by_key(|one| one.group.path.len())
    }

    /// The bindings of each slice. A shared slice has several bindings.
    pub fn by_slice(&self) -> BTreeMap<&SliceId, Vec<&Binding>> {
        let mut all: BTreeMap<&SliceId, Vec<&Binding>> = BTreeMap::new();
        for one in self.iter() {
            for slice in &one.slices {
                all.entry(slice).or_default().push(one);
            }
        }
        all
    }

    /// The bindings that have this slice. A shared slice has several bindings.
    pub fn with(&self, slice: &SliceId) -> impl Iterator<Item = &Binding> {
        self.iter().filter(move |one| one.slices.contains(slice))
    }

    /// The bindings that are not in `before`. None if a binding in `before` was changed or has ended.
    pub fn added_to(&self, before: &Self) -> Option<impl Iterator<Item = &Binding>> {
        let (old, new) = self.0.split_at_checked(before.0.len())?;
        let is_same = old.iter().zip(&before.0).all(|(one, other)| Arc::ptr_eq(one, other));
        is_same.then(|| new.iter().map(Arc::as_ref))
    }

    /// The bindings, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Binding> {
        self.0.iter().map(Arc::as_ref)
    }
}
