//! Decides if a program may have a slice now. Every part of the service that gives slices to programs uses this file, so that
//! all parts decide alike.

use alloc::string::String;

use crate::bindings::{Binding, Bindings, BoundBy, ControlGroup, GroupUse};
use crate::terms::SliceId;

#[derive(Debug, Clone, Copy)]
pub struct Asker<'a> {
    /// The path of the program's control group. None while the path is not known.
    pub control_group: Option<&'a str>,
    /// The authority that gives the program its slices. A binding with less authority does not exclude the program from a slice
    /// that the program names.
    pub by: BoundBy,
    /// True if the program accepts that other programs have the slice too. No binding then excludes the program.
    pub shares: bool,
}

impl Asker<'_> {
    /// The binding of another control group that excludes the program from the slice. None if the program is not excluded.
    /// `now` is in seconds since the host's boot.
    pub fn kept_out_by<'b>(
        &self,
        slice: &SliceId,
        bindings: &'b Bindings,
        now: u64,
        use_of: impl Fn(&ControlGroup) -> GroupUse,
    ) -> Option<&'b Binding> {
        if self.shares {
            return None;
        }
        let holds = |one: &Binding| !one.gives_way(use_of(&one.group), now);
        bindings.taken_from(slice, self.control_group, self.by, holds)
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Standing {
    /// The reason why no program can use the GPU before an administrator acts. None if the GPU can be used.
    pub unusable: Option<String>,
    pub drained: bool,
    /// The name of the binding of another control group that excludes the program. None if no binding excludes the program.
    pub taken_by: Option<String>,
    /// The reason why a program that starts now would not get the limits of the slice. None if the program would get the
    /// limits.
    pub unserved: Option<String>,
}

/// The reason why a program may not have a slice. The first variant is the easiest to remove.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    /// No control daemon serves the slice now. The service removes this obstacle by itself, so the caller can wait.
    Unserved(String),
    /// Another control group is bound to the slice. The text is the name of its binding.
    Taken(String),
    Drained,
    /// No program can have the slice before an administrator acts.
    Unusable(String),
}

impl Obstacle {
    pub fn passes(&self) -> bool {
        matches!(self, Self::Unserved(_))
    }
}

/// Decides if a program may have a slice now.
///
/// # Errors
/// The obstacle that excludes the program. If there are several obstacles, the error is the obstacle that is the hardest to
/// remove.
pub fn may_have(standing: Standing) -> Result<(), Obstacle> {
    let Standing { unusable, drained, taken_by, unserved } = standing;
    let obstacles = [
        unusable.map(Obstacle::Unusable),
        drained.then_some(Obstacle::Drained),
        taken_by.map(Obstacle::Taken),
        unserved.map(Obstacle::Unserved),
    ];
    obstacles.into_iter().flatten().next().map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use alloc::borrow::ToOwned;

    use alloc::collections::BTreeSet;
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn a_binding_keeps_others_out_while_it_is_somebodys() {
        let slice = |ordinal| SliceId { gpu: "00:06.0".parse().unwrap(), ordinal };
        let group = |path: &str| ControlGroup { path: path.to_string(), inode: 1 };
        let binding = Binding {
            group: group("/a"),
            slices: BTreeSet::from([slice(1)]),
            by: BoundBy::Platform,
            label: String::new(),
            since: 0,
            was_used: false,
        };
        let bindings: Bindings = [binding].into_iter().collect();
        let platform = Asker { control_group: None, by: BoundBy::Platform, shares: false };
        for (asker, group_use, is_kept_out) in [
            (platform, GroupUse::Used, true),
            (platform, GroupUse::Empty, true),
            (platform, GroupUse::Gone, false),
            (Asker { control_group: Some("/b"), ..platform }, GroupUse::Used, true),
            (Asker { control_group: Some("/a/b"), ..platform }, GroupUse::Used, false),
            (Asker { by: BoundBy::Root, ..platform }, GroupUse::Used, false),
            (Asker { shares: true, ..platform }, GroupUse::Used, false),
        ] {
            let kept_out = asker.kept_out_by(&slice(1), &bindings, 0, |_| group_use).is_some();
            assert_eq!(kept_out, is_kept_out, "{asker:?} {group_use:?}");
            assert!(asker.kept_out_by(&slice(2), &bindings, 0, |_| group_use).is_none());
        }
    }

    #[test]
    fn only_a_slice_that_is_not_served_at_this_moment_is_waited_for() {
        let some = || Some("why".to_owned());
        for number in 0..16_u32 {
            let has = |bit: u32| number & (1 << bit) != 0;
            let standing = Standing {
                unusable: some().filter(|_| has(0)),
                drained: has(1),
                taken_by: some().filter(|_| has(2)),
                unserved: some().filter(|_| has(3)),
            };
            let answer = may_have(standing.clone());
            assert_eq!(answer.is_ok(), number == 0, "{standing:?}");
            let waits = answer.is_err_and(|obstacle| obstacle.passes());
            assert_eq!(waits, number == 8, "{standing:?}");
        }
    }
}
