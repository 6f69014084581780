//! Bindings of control groups to slices in the simulated world, in the service's real registry of bindings. The state file
//! records the bindings, so they survive the end of the service.

use std::collections::BTreeSet;
use std::sync::Arc;

use mps_core::access::{Asker, Obstacle};
use mps_core::bindings::{
    Binding, Bindings, BoundBy, ControlGroup, FIRST_PROCESS, GroupUse, LARGEST, NotBound, is_named_by_root,
};
use mps_core::register::{KnownBy, Membership};
use mps_core::terms::{DeviceName, SliceId};

use super::budgets::Program;
use super::clients::SimClient;
use super::tenants::{SliceKnownBy, gpu_of, slice_of};
use super::ways::{SLICES, SimDrained};
use super::{Dice, GPUS, World};

/// The control groups in which tenants start programs. The tenant of the container `/a` has made `/a/c`. [`FORGED`] has the
/// name of the container `b`, but is below `/u`, the control group of an ordinary user, who may have chosen this name.
const GROUPS: [&str; 4] = ["/a", "/b", "/a/c", FORGED];
const FORGED: &str = "/u/b";

/// The name of the container for which the records of Cloudpods' host agent name every GPU, but no slice.
const RECORDED: &str = "b";

#[derive(Debug, Default)]
pub(crate) struct SimBindings {
    registry: Bindings,
    inodes: [u64; GROUPS.len()],
    /// The slices to which root has bound a second control group on purpose.
    shared: BTreeSet<SliceId>,
    /// The control groups in which the service has seen programs since it bound them.
    were_used: BTreeSet<ControlGroup>,
}

/// Makes up the size of a binding in the state file, in bytes. The size is at most [`LARGEST`] with one or two slices. It is
/// larger with three slices, so the service must refuse the binding.
fn bytes_of(binding: &Binding) -> usize {
    binding.slices.len().pow(4) * (LARGEST / 16)
}

/// The size of a control daemon's entry in the state file, and the largest state file that the service reads, in bytes.
const DAEMON_BYTES: usize = LARGEST / 100;
const FILE_BYTES: usize = GROUPS.len() * LARGEST + LARGEST / 10;

pub(crate) fn group_of(dice: &mut Dice) -> &'static str {
    dice.pick(&GROUPS).copied().unwrap_or_default()
}

fn number(group: &str) -> usize {
    GROUPS.iter().position(|one| *one == group).unwrap()
}

pub(crate) fn is_in(path: &str, above: &str) -> bool {
    path == above || path.starts_with(&format!("{above}/"))
}

/// Returns the control group with the name [`RECORDED`]: `group` itself, or a control group above it.
fn recorded_container(group: &'static str) -> Option<&'static str> {
    GROUPS.into_iter().find(|above| is_in(group, above) && above.rsplit('/').next() == Some(RECORDED))
}

/// Returns the owners of a control group and of the control groups above it, from the top, as user ids. Root owns [`FORGED`],
/// but an ordinary user owns the control group above [`FORGED`].
fn owners(group: &str) -> impl Iterator<Item = Option<u32>> {
    let all = [("/a", 0), ("/b", 0), ("/a/c", 0), ("/u", 1), (FORGED, 0)];
    all.into_iter().filter(move |(above, _)| is_in(group, above)).map(|(_, owner)| Some(owner))
}

/// Returns the program with the slice that the service finds for it: the slice to which its control group is bound, or else the
/// slice that the program claims. A claim does not count if a control group is bound to the claimed slice.
pub(crate) fn seen(bindings: &Bindings, gpu: &str, program: &Program) -> Program {
    let bound = bindings
        .nearest(program.group, |_| true)
        .map(|one| one.slices.iter().find(|its| gpu_of(**its) == gpu));
    let has = |slice: &u32| bindings.with(&slice_of(gpu, *slice)).next().is_some();
    let (slice, only_claims) = match bound {
        Some(slice) => (slice.map(|slice| slice.ordinal), false),
        None if program.only_claims => (program.slice.filter(|slice| !has(slice)), true),
        None => (program.slice, false),
    };
    Program { slice, only_claims, ..program.clone() }
}

/// Returns the slices that the service finds for a client: the slices to which its control group is bound, or else the slice
/// that the client claims. A claim does not count if a control group is bound to the claimed slice.
pub(crate) fn known_slices(bindings: &Bindings, client: &SimClient) -> Option<Membership> {
    if let Some(its) = bindings.nearest(client.program.group, |_| true) {
        let slices = its.slices.iter().copied().map(DeviceName::Slice).collect();
        return Some(Membership { slices, known_by: KnownBy::Bound });
    }
    let slice = &client.tenant.slice;
    let known_by = match client.tenant.slice_known_by {
        SliceKnownBy::Nothing => return None,
        SliceKnownBy::Mount => KnownBy::Mount,
        SliceKnownBy::Environment => KnownBy::Environment,
    };
    let counts = known_by.is_certain() || bindings.with(slice).next().is_none();
    counts.then(|| Membership { slices: vec![DeviceName::Slice(*slice)], known_by })
}

/// Returns the binding of the control group `path` or of the nearest control group above it. The checks compare the result with
/// the core's answer, so this function uses no code of the core.
fn nearest_in_truth<'b>(bindings: &'b Bindings, path: &str) -> Option<&'b Binding> {
    let above = bindings.iter().filter(|one| is_in(path, &one.group.path));
    above.max_by_key(|one| one.group.path.len())
}

pub(crate) fn has_one_of(bindings: &Bindings, client: &SimClient, wanted: &[SliceId]) -> bool {
    let slice = &client.tenant.slice;
    let is_anothers = || bindings.iter().any(|one| one.slices.contains(slice));
    match nearest_in_truth(bindings, client.program.group) {
        Some(its) => wanted.iter().any(|slice| its.slices.contains(slice)),
        None if client.tenant.slice_known_by == SliceKnownBy::Mount => wanted.contains(slice),
        None => wanted.contains(slice) && !is_anothers(),
    }
}

impl SimBindings {
    pub(crate) fn living(&self) -> Bindings {
        self.registry.iter().filter(|one| self.group(&one.group.path) == one.group).cloned().collect()
    }

    pub(crate) fn registry(&self) -> &Bindings {
        &self.registry
    }

    fn is_bound(&self, group: &ControlGroup) -> bool {
        self.registry.iter().any(|one| one.group == *group)
    }

    /// Records if the control group has had programs since the service bound it, according to the registry.
    fn note_use_of(&mut self, group: &ControlGroup) {
        if self.registry.iter().any(|one| one.group == *group && one.was_used) {
            self.were_used.insert(group.clone());
        } else {
            self.were_used.remove(group);
        }
    }

    pub(crate) fn is_there(&self, group: &ControlGroup) -> bool {
        self.group(&group.path) == *group
    }

    pub(crate) fn any_group(&self, dice: &mut Dice) -> ControlGroup {
        self.group(group_of(dice))
    }

    fn group(&self, group: &str) -> ControlGroup {
        ControlGroup { path: group.to_owned(), inode: self.inodes[number(group)] }
    }
}

impl World {
    fn used_groups(&self) -> BTreeSet<&'static str> {
        let mut used = BTreeSet::new();
        for one in self.daemons.values() {
            for client in one.lock().clients.values() {
                used.extend(GROUPS.iter().filter(|above| is_in(client.program.group, above)));
            }
        }
        used
    }

    pub(crate) fn use_of(&self) -> impl Fn(&ControlGroup) -> GroupUse + use<> {
        let (used, inodes) = (self.used_groups(), self.bindings.inodes);
        move |group| match inodes[number(&group.path)] {
            inode if inode != group.inode => GroupUse::Gone,
            _ if used.contains(group.path.as_str()) => GroupUse::Used,
            _ => GroupUse::Empty,
        }
    }

    /// Checks the promise `a-binding-lasts`. A binding ends only if its control group was removed, or if the control group is
    /// empty and its time for a first program is over. `somebody_waits` allows a third reason: the programs have ended, and
    /// another control group wants the slice.
    fn check_ended(&self, ended: &[Arc<Binding>], somebody_waits: bool) {
        let (use_of, now) = (self.use_of(), self.now.as_secs());
        for one in ended {
            let is_its_time = match use_of(&one.group) {
                GroupUse::Gone => true,
                GroupUse::Used | GroupUse::PodGoesOn => false,
                GroupUse::Empty => {
                    let was_used = self.bindings.were_used.contains(&one.group);
                    now - one.since >= FIRST_PROCESS || (somebody_waits && was_used)
                }
            };
            assert!(is_its_time, "a-binding-lasts: {one:?} has ended");
        }
    }

    fn end_bindings(&mut self) {
        let used = self.used_groups().into_iter().map(|path| self.bindings.group(path));
        let used: Vec<ControlGroup> = used.filter(|group| self.bindings.is_bound(group)).collect();
        self.bindings.were_used.extend(used);
        let ended = self.bindings.registry.end(self.now.as_secs(), self.use_of());
        self.check_ended(&ended, false);
        let is_there = |one: &Binding| self.bindings.group(&one.group.path) == one.group;
        assert!(
            self.bindings.registry.iter().all(is_there),
            "slices-follow-bindings: a control group is gone, and bound"
        );
        self.add_to_story(|| format!("not bound any more: {ended:?}"));
        self.keep_budgets();
    }

    /// The service ends the bindings of other control groups to the slices that `group` is to get. It ends only bindings of
    /// control groups without programs.
    fn make_way(&mut self, group: &str, is_wanted: impl Fn(&SliceId) -> bool) {
        let ended = self.bindings.registry.make_way(group, is_wanted, self.now.as_secs(), self.use_of());
        self.check_ended(&ended, true);
    }

    /// The service binds a control group to a slice, and returns true on success. A refusal must leave the bindings unchanged.
    /// Checks the promise `one-answer`: all parts of the service that give out slices give the same answer.
    pub(crate) fn bind(&mut self, group: &'static str, slice: &SliceId, by: BoundBy, shares: bool) -> bool {
        let asker = Asker { control_group: Some(group), by, shares };
        let (of_others, before) = (self.may_have(slice, asker), self.bindings.registry.clone());
        self.make_way(group, |one| !shares && one == slice);
        let answer = self.may_have(slice, asker);
        let (label, since) = (format!("{by:?} {group}"), self.now.as_secs());
        let group = self.bindings.group(group);
        let was_used = self.use_of()(&group) == GroupUse::Used;
        assert!(by == BoundBy::Root || group.path != FORGED, "names-are-roots: {group:?} gets {slice:?}");
        let slices = BTreeSet::from([*slice]);
        let binding = Binding { group, slices, by, label, since, was_used };
        let done = self.bindings.registry.bind(binding.clone(), shares, bytes_of);
        let is_taken = matches!(done, Err(NotBound::Taken { .. }));
        let is_told_taken = matches!(answer, Err(Obstacle::Taken(_)));
        assert!(
            of_others == answer && (is_taken == is_told_taken || matches!(answer, Err(Obstacle::Drained))),
            "one-answer: {binding:?} is answered {answer:?} and {done:?}, and other doors answer {of_others:?}"
        );
        if is_taken {
            self.check_taken(slice, &binding, shares);
        }
        let is_bound = answer.is_ok() && done.is_ok();
        if is_bound {
            self.bindings.shared.extend(binding.slices.iter().filter(|_| shares).copied());
            self.bindings.note_use_of(&binding.group);
            self.check_bound(&binding);
            self.check_is_served(slice);
        } else {
            self.bindings.registry = before;
        }
        self.add_to_story(|| format!("{binding:?} {answer:?} {done:?}"));
        self.keep_budgets();
        is_bound
    }

    /// Checks that the service had a reason to refuse the slice to `wanted`: another control group with the slice has programs,
    /// or still has time to start its first program.
    fn check_taken(&self, slice: &SliceId, wanted: &Binding, shares: bool) {
        let (use_of, now) = (self.use_of(), self.now.as_secs());
        let keeps = |one: &Binding| {
            let has_programs = match use_of(&one.group) {
                GroupUse::Gone => false,
                GroupUse::Used | GroupUse::PodGoesOn => true,
                GroupUse::Empty => {
                    !self.bindings.were_used.contains(&one.group) && now - one.since < FIRST_PROCESS
                }
            };
            one.group.path != wanted.group.path && one.by >= wanted.by && has_programs
        };
        assert!(
            !shares && self.bindings.registry.with(slice).any(keeps),
            "slices-follow-bindings: {slice:?} is nobody's, and is refused to {wanted:?}"
        );
    }

    /// A new service reads the state file. The service ignores a state file that is too large, so all bindings in the file are
    /// lost.
    pub(crate) fn read_state_file(&mut self) {
        let bindings: usize = self.bindings.registry.iter().map(bytes_of).sum();
        if bindings + self.state_file.daemons.len() * DAEMON_BYTES > FILE_BYTES {
            self.add_to_story(|| "the state file is too large, and is not read".to_owned());
            self.state_file = super::StateFile::default();
            *self.drained.lock().unwrap() = SimDrained::default();
            self.bindings.registry = Bindings::default();
        }
    }

    /// Checks the promise `slices-follow-bindings`: after the answer to Bind, each program of the control group has exactly the
    /// slices of the binding, no matter which slices the program claims.
    fn check_bound(&self, binding: &Binding) {
        let living = self.bindings.living();
        let bound = nearest_in_truth(&living, &binding.group.path).unwrap();
        assert!(bound.group == binding.group && bound.by >= binding.by);
        assert!(bound.by > binding.by || bound.slices.is_superset(&binding.slices));
        self.check_slices_follow_bindings();
    }

    pub(crate) fn check_slices_follow_bindings(&self) {
        let living = self.bindings.living();
        for gpu in GPUS {
            let of_gpu = |slice: u32| slice_of(gpu, slice);
            for program in self.programs_on(gpu) {
                let its = nearest_in_truth(&living, program.group);
                let is_its = |slice| its.is_none_or(|one| one.slices.contains(&of_gpu(slice)));
                assert!(
                    program.slice.is_none_or(is_its),
                    "slices-follow-bindings: {program:?} on {gpu}, bound to {its:?}"
                );
                let claims = program.slice.filter(|_| program.only_claims);
                let has = |slice| living.iter().any(|one| one.slices.contains(&of_gpu(slice)));
                assert!(
                    !claims.is_some_and(has),
                    "slices-follow-bindings: {program:?} claims a slice of {gpu} that is bound"
                );
            }
        }
        for (number, one) in living.iter().enumerate() {
            for other in living.iter().skip(number + 1) {
                let (one_path, other_path) = (one.group.path.as_str(), other.group.path.as_str());
                let are_one_tenants = is_in(one_path, other_path) || is_in(other_path, one_path);
                let mut both = one.slices.intersection(&other.slices);
                let is_shared = both.all(|slice| self.bindings.shared.contains(slice));
                assert!(
                    are_one_tenants || is_shared,
                    "slices-follow-bindings: {one:?} and {other:?} have one slice"
                );
            }
        }
    }

    /// Root or the hook of a container runtime binds or unbinds a control group, or an empty control group is removed and made
    /// again.
    pub(crate) fn bindings_change(&mut self, dice: &mut Dice) {
        let group = group_of(dice);
        match dice.below(8) {
            7 if self.service.is_some() => self.end_bindings(),
            0 if !self.used_groups().contains(group) => {
                self.add_to_story(|| format!("control group {group} is made again"));
                for one in GROUPS.iter().filter(|one| is_in(one, group)) {
                    self.bindings.inodes[number(one)] += 1;
                }
                self.limits_of_gone_groups_end();
            }
            0 | 1 if self.service.is_some() => {
                let ended = self.bindings.registry.unbind(group);
                self.add_to_story(|| format!("unbind {group}: {ended:?}"));
                self.keep_budgets();
            }
            2.. if self.service.is_some() => {
                let slice = self.any_slice(dice);
                _ = self.bind(group, &slice, BoundBy::Root, dice.one_in(4));
            }
            _ => {}
        }
    }

    /// The host agent's records name this GPU for a container, but no slice. When the first client of the container comes, the
    /// service binds the container to the lowest free slice.
    pub(crate) fn bind_recorded(&mut self, gpu: &str) {
        let programs = self.programs_on(gpu);
        let groups: BTreeSet<&str> =
            programs.iter().filter_map(|one| recorded_container(one.group)).collect();
        let has_slice = |its: &Binding| its.slices.iter().any(|slice| gpu_of(*slice) == gpu);
        for group in groups.into_iter().filter(|group| is_named_by_root(owners(group))) {
            let living = self.bindings.living();
            if living.nearest(group, |_| true).is_some_and(|its| its.by == BoundBy::Root || has_slice(its)) {
                continue;
            }
            let mut slices = (0..u32::try_from(SLICES).unwrap()).map(|slice| slice_of(gpu, slice));
            let asker = Asker { control_group: Some(group), by: BoundBy::Platform, shares: false };
            if let Some(free) = slices.find(|slice| self.may_have(slice, asker).is_ok()) {
                _ = self.bind(group, &free, BoundBy::Platform, false);
            }
        }
    }
}
