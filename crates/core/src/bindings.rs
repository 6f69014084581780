//! The slices to which control groups are bound, before their programs run or while they do.
//!
//! A process has the slices of the nearest binding: that of its own control group, or else of the first one above. Without
//! sharing, a slice is one binding's at a time. Bindings of control groups that are inside one another are one tenant's, and
//! take nothing from each other.
//!
//! Nobody has to end a binding: it ends when its control group is gone. An empty control group may get its first process yet,
//! so its binding ends only after [`FIRST_PROCESS`].

use alloc::collections::BTreeSet;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

/// The seconds in which the first process comes into a control group that is bound before.
pub const FIRST_PROCESS: u64 = 60;

/// The most bindings of a host. A GPU has at most 60 clients, and a host has 16 GPUs.
const MOST: usize = 4096;

/// A control group of the host. One that is made again under the same path is another one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ControlGroup {
    /// Below the mount of its hierarchy. It begins with a slash and ends with none.
    pub path: String,
    /// Its inode.
    pub inode: u64,
}

/// Whether a control group has processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupUse {
    /// There is no such control group any more.
    Gone,
    /// Neither it nor any control group below it has a process.
    Empty,
    /// It has processes, or nobody can tell.
    Used,
}

/// Who says that a control group has its slices. A later one is stronger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum BoundBy {
    /// The host agent's records, which name the slice, or a GPU: then the slice was a free one.
    Platform,
    /// Root.
    Root,
}

/// The slices of one control group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding<S> {
    /// The control group.
    pub group: ControlGroup,
    /// Its slices, at least one.
    pub slices: BTreeSet<S>,
    /// Who says so.
    pub by: BoundBy,
    /// Its name for people: a guest, a container, a job. It may be empty.
    pub label: String,
    /// When it was made, in seconds since the host was started.
    pub since: u64,
}

/// All bindings of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bindings<S>(Vec<Binding<S>>);

/// Why a control group is not bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotBound<S> {
    /// A slice is another binding's.
    Taken {
        /// The slice.
        slice: S,
        /// The name of the binding that has it.
        by: String,
    },
    /// There are as many bindings as there may be.
    TooMany,
}

impl<S: fmt::Display> fmt::Display for NotBound<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken { slice, by } => write!(f, "{slice} is taken by {by}"),
            Self::TooMany => write!(f, "there are {MOST} bindings already"),
        }
    }
}

fn is_in(path: &str, above: &str) -> bool {
    path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

impl ControlGroup {
    /// Whether a path is that of this control group, or of one below it.
    pub fn has(&self, path: &str) -> bool {
        is_in(path, &self.path)
    }

    /// Whether this control group and the one at a path are inside one another.
    fn is_one_tenants(&self, path: &str) -> bool {
        self.has(path) || is_in(&self.path, path)
    }
}

impl<S> Binding<S> {
    /// Its label, or else its control group.
    pub fn name(&self) -> &str {
        if self.label.is_empty() { &self.group.path } else { &self.label }
    }
}

impl<S> Default for Bindings<S> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<S: Ord> FromIterator<Binding<S>> for Bindings<S> {
    fn from_iter<I: IntoIterator<Item = Binding<S>>>(bindings: I) -> Self {
        Self(bindings.into_iter().filter(|one| !one.slices.is_empty()).take(MOST).collect())
    }
}

impl<S: Ord + Clone> Bindings<S> {
    /// Binds a control group. If it is bound already by the same, it has these slices too, and a label that is not empty is its
    /// new one. A stronger binding takes the place of a weaker one, and a weaker one changes nothing.
    ///
    /// # Errors
    /// Nothing is changed.
    pub fn bind(&mut self, wanted: Binding<S>, shares: bool) -> Result<(), NotBound<S>> {
        for slice in wanted.slices.iter().filter(|_| !shares) {
            if let Some(other) = self.taken_from(slice, &wanted.group.path) {
                return Err(NotBound::Taken { slice: slice.clone(), by: other.name().into() });
            }
        }
        let is_bound = self.0.iter().any(|one| one.group == wanted.group);
        if !is_bound && self.0.len() >= MOST {
            return Err(NotBound::TooMany);
        }
        // Another control group of the same path is gone.
        self.0.retain(|one| one.group.path != wanted.group.path || one.group == wanted.group);
        match self.0.iter_mut().find(|one| one.group == wanted.group) {
            Some(bound) if bound.by > wanted.by => {}
            Some(bound) if bound.by < wanted.by => *bound = wanted,
            Some(bound) => {
                bound.slices.extend(wanted.slices);
                if !wanted.label.is_empty() {
                    bound.label = wanted.label;
                }
            }
            None => self.0.push(wanted),
        }
        Ok(())
    }

    /// Ends the binding of the control group at this path. None if it has none of its own.
    pub fn unbind(&mut self, path: &str) -> Option<Binding<S>> {
        let at = self.0.iter().position(|one| one.group.path == path)?;
        Some(self.0.remove(at))
    }

    /// Ends the bindings that nobody has any more, and returns them. `now` is in seconds since the host was started.
    pub fn end(&mut self, now: u64, use_of: impl Fn(&ControlGroup) -> GroupUse) -> Vec<Binding<S>> {
        let has_ended = |one: &mut Binding<S>| match use_of(&one.group) {
            GroupUse::Gone => true,
            GroupUse::Empty => now.saturating_sub(one.since) >= FIRST_PROCESS,
            GroupUse::Used => false,
        };
        self.0.extract_if(.., has_ended).collect()
    }

    /// The binding that keeps a slice from the control group at a path.
    pub fn taken_from(&self, slice: &S, path: &str) -> Option<&Binding<S>> {
        self.with(slice).find(|one| !one.group.is_one_tenants(path))
    }

    /// The binding of a process in the control group at this path.
    pub fn nearest(&self, path: &str) -> Option<&Binding<S>> {
        self.0.iter().filter(|one| one.group.has(path)).max_by_key(|one| one.group.path.len())
    }

    /// The bindings that have a slice: several where it is shared.
    pub fn with(&self, slice: &S) -> impl Iterator<Item = &Binding<S>> {
        self.0.iter().filter(move |one| one.slices.contains(slice))
    }

    /// All bindings, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Binding<S>> {
        self.0.iter()
    }
}
