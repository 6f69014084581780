//! Control groups that are bound to slices, by the real registry, in a state file that outlives the service.

use std::collections::BTreeSet;

use mps_core::bindings::{Binding, Bindings, BoundBy, ControlGroup, FIRST_PROCESS, GroupUse, NotBound};

use mps_core::tenants::KnownSlices;

use super::budgets::Program;
use super::clients::SimClient;
use super::tenants::{SimSlice, SliceKnownBy};
use super::ways::SLICES;
use super::{Dice, GPUS, World};

/// The control groups of tenants. The last one is inside the first.
const GROUPS: [&str; 3] = ["/a", "/b", "/a/c"];

/// The container for which the host agent's records name every GPU, and no slice.
const RECORDED: &str = "/b";

/// The slice of a GPU.
type BoundSlice = (String, u32);

pub(crate) type BoundGroups = Bindings<BoundSlice>;

/// The registry, and the inode of each control group.
#[derive(Debug, Default)]
pub(crate) struct SimBindings {
    registry: Bindings<BoundSlice>,
    inodes: [u64; GROUPS.len()],
    /// The slices that somebody has shared on purpose.
    shared: BTreeSet<BoundSlice>,
}

/// The control group of a process.
pub(crate) fn group_of(dice: &mut Dice) -> &'static str {
    dice.pick(&GROUPS).copied().unwrap_or_default()
}

fn number(group: &str) -> usize {
    GROUPS.iter().position(|one| *one == group).unwrap()
}

pub(crate) fn is_in(path: &str, above: &str) -> bool {
    path == above || path.starts_with(&format!("{above}/"))
}

/// A program as the service sees it on a GPU: the slice of its control group, or else its own, unless it claims one that
/// somebody has.
pub(crate) fn seen(bindings: &Bindings<BoundSlice>, gpu: &str, program: &Program) -> Program {
    let bound = bindings.nearest(program.group).map(|one| one.slices.iter().find(|(its, _)| its == gpu));
    let has = |slice: &u32| bindings.with(&(gpu.to_owned(), *slice)).next().is_some();
    let (slice, only_claims) = match bound {
        Some(slice) => (slice.map(|(_, slice)| *slice), false),
        None if program.only_claims => (program.slice.filter(|slice| !has(slice)), true),
        None => (program.slice, false),
    };
    Program { slice, only_claims, ..program.clone() }
}

fn bound_slice(slice: &SimSlice) -> BoundSlice {
    (slice.gpu.clone(), u32::try_from(slice.ordinal).unwrap())
}

/// The slices of a client as the service knows them for a request: the slices of its control group, or else its own, unless it
/// claims a slice that somebody has.
pub(crate) fn known_slices(bindings: &BoundGroups, client: &SimClient) -> Option<KnownSlices<SimSlice>> {
    if let Some(its) = bindings.nearest(client.program.group) {
        let slice = |(gpu, slice): &BoundSlice| SimSlice { gpu: gpu.clone(), ordinal: *slice as usize };
        return Some(KnownSlices { slices: its.slices.iter().map(slice).collect(), is_certain: true });
    }
    let slice = &client.tenant.slice;
    let is_certain = match client.tenant.slice_known_by {
        SliceKnownBy::Nothing => return None,
        SliceKnownBy::Mount => true,
        SliceKnownBy::Environment => false,
    };
    let counts = is_certain || bindings.with(&bound_slice(slice)).next().is_none();
    counts.then(|| KnownSlices { slices: vec![slice.clone()], is_certain })
}

/// The binding of the nearest control group, as the promise says it.
fn nearest_in_truth<'b>(bindings: &'b BoundGroups, path: &str) -> Option<&'b Binding<BoundSlice>> {
    let above = bindings.iter().filter(|one| is_in(path, &one.group.path));
    above.max_by_key(|one| one.group.path.len())
}

/// Whether a client has one of these slices, in truth.
pub(crate) fn has_one_of(bindings: &BoundGroups, client: &SimClient, wanted: &[SimSlice]) -> bool {
    let slice = &client.tenant.slice;
    let is_anothers = || bindings.iter().any(|one| one.slices.contains(&bound_slice(slice)));
    match nearest_in_truth(bindings, client.program.group) {
        Some(its) => wanted.iter().any(|slice| its.slices.contains(&bound_slice(slice))),
        None if client.tenant.slice_known_by == SliceKnownBy::Mount => wanted.contains(slice),
        None => wanted.contains(slice) && !is_anothers(),
    }
}

impl SimBindings {
    /// The bindings of the control groups that there are.
    pub(crate) fn living(&self) -> Bindings<BoundSlice> {
        self.registry.iter().filter(|one| self.group(&one.group.path) == one.group).cloned().collect()
    }

    pub(crate) fn registry(&self) -> &BoundGroups {
        &self.registry
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
    /// The control groups with a program in them or below.
    fn used_groups(&self) -> BTreeSet<&'static str> {
        let mut used = BTreeSet::new();
        for one in self.daemons.values() {
            for client in one.lock().clients.values() {
                used.extend(GROUPS.iter().filter(|above| is_in(client.program.group, above)));
            }
        }
        used
    }

    /// Drops what has ended, as the service does before it binds.
    fn end_bindings(&mut self) {
        let (used, inodes) = (self.used_groups(), self.bindings.inodes);
        let use_of = |group: &ControlGroup| {
            if inodes[number(&group.path)] != group.inode {
                GroupUse::Gone
            } else if used.contains(group.path.as_str()) {
                GroupUse::Used
            } else {
                GroupUse::Empty
            }
        };
        let now = self.now.as_secs();
        let ended = self.bindings.registry.end(now, use_of);
        let is_there = |one: &Binding<BoundSlice>| self.bindings.group(&one.group.path) == one.group;
        for one in ended.iter().filter(|one| is_there(one)) {
            let is_used = used.contains(one.group.path.as_str());
            assert!(!is_used, "a-binding-lasts: {one:?} has programs, and has ended");
            assert!(
                now - one.since >= FIRST_PROCESS,
                "a-binding-lasts: {one:?} had no time for its first process"
            );
        }
        assert!(
            self.bindings.registry.iter().all(is_there),
            "slices-follow-bindings: a control group is gone, and bound"
        );
    }

    /// The answer of the service to whoever binds. A refusal changes nothing.
    fn bind(&mut self, group: &'static str, slices: BTreeSet<BoundSlice>, by: BoundBy, shares: bool) {
        self.end_bindings();
        let before = self.bindings.registry.clone();
        let label = format!("{by:?} {group}");
        let binding =
            Binding { group: self.bindings.group(group), slices, by, label, since: self.now.as_secs() };
        let done = self.bindings.registry.bind(binding.clone(), shares);
        match &done {
            Ok(()) => {
                self.bindings.shared.extend(binding.slices.iter().filter(|_| shares).cloned());
                self.check_bound(&binding);
            }
            Err(NotBound::Taken { slice, .. }) => {
                assert!(!shares && before.with(slice).any(|one| one.group.path != group));
                assert_eq!(self.bindings.registry, before, "a refusal changes nothing");
            }
            Err(NotBound::TooMany) => unreachable!("there are three control groups"),
        }
        self.add_to_story(|| format!("{binding:?} {done:?}"));
        self.keep_budgets();
    }

    /// Slices follow bindings: from the answer on, each program of the control group has these slices and no other, whatever it claims.
    fn check_bound(&self, binding: &Binding<BoundSlice>) {
        let living = self.bindings.living();
        let nearest = |path: &str| nearest_in_truth(&living, path);
        let bound = nearest(&binding.group.path).unwrap();
        assert!(bound.group == binding.group && bound.by >= binding.by);
        assert!(bound.by > binding.by || bound.slices.is_superset(&binding.slices));
        for gpu in GPUS {
            let of_gpu = |slice: u32| (gpu.to_owned(), slice);
            for program in self.programs_on(gpu) {
                let its = nearest(program.group);
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

    /// Root, or the hook of a runtime, binds or unbinds a control group, or an empty one is made again.
    pub(crate) fn bindings_change(&mut self, dice: &mut Dice) {
        let group = group_of(dice);
        match dice.below(6) {
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
                let gpu = (*dice.pick(&GPUS).unwrap()).to_owned();
                let slice = u32::try_from(dice.below(SLICES)).unwrap();
                let shares = dice.one_in(4);
                self.bind(group, BTreeSet::from([(gpu, slice)]), BoundBy::Root, shares);
            }
            _ => {}
        }
    }

    /// The records name this GPU for a container and no slice: its first client gets the container the lowest that is free.
    pub(crate) fn bind_recorded(&mut self, gpu: &str) {
        let is_there = self.programs_on(gpu).iter().any(|program| is_in(program.group, RECORDED));
        let has_slice = |its: &Binding<BoundSlice>| its.slices.iter().any(|(of, _)| of == gpu);
        let living = self.bindings.living();
        if !is_there || living.nearest(RECORDED).is_some_and(|its| its.by == BoundBy::Root || has_slice(its))
        {
            return;
        }
        self.end_bindings();
        let slices = (0..u32::try_from(SLICES).unwrap()).map(|slice| (gpu.to_owned(), slice));
        let free =
            slices.into_iter().find(|slice| self.bindings.registry.taken_from(slice, RECORDED).is_none());
        if let Some(free) = free {
            self.bind(RECORDED, BTreeSet::from([free]), BoundBy::Platform, false);
        }
    }
}
