//! Random histories of bindings. Control groups are made, removed and made again with the same path, with and without
//! processes. A service that starts again knows only the state file.

// clippy.toml allows `unwrap` and the like only in functions marked as tests. The helper functions of this file are not
// marked as tests, and call `unwrap` too.
#![allow(clippy::unwrap_used)]

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use mps_core::bindings::{
    Binding, Bindings, BoundBy, ControlGroup, FIRST_PROCESS, GroupUse, LARGEST, MOST_BYTES, NotBound,
    is_named_by_root, pod_of,
};
use mps_core::terms::SliceId;
use proptest::prelude::*;

/// The control groups of two tenants (`/a` and `/ab`), a control group inside `/a`, and a pod with two containers. `/ab` is not
/// inside `/a`, although the path begins with the same letters.
const PATHS: [&str; 6] =
    ["/a", "/a/b", "/ab", "/kubepods/burstable/p1", "/kubepods/burstable/p1/x", "/kubepods/burstable/p1/y"];

fn slice(ordinal: u32) -> SliceId {
    SliceId { gpu: "00:06.0".parse().unwrap(), ordinal }
}

#[derive(Debug, Clone)]
enum Event {
    Make(&'static str),
    /// A control group is removed together with all control groups below it.
    Remove(&'static str),
    /// A process enters the control group.
    Enter(&'static str),
    Leave(&'static str),
    Bind {
        path: &'static str,
        by: BoundBy,
        slices: BTreeSet<SliceId>,
        shares: bool,
    },
    Unbind(&'static str),
    /// The service checks the control groups, and removes the bindings that have ended.
    Look,
    Restart,
    Wait(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let path = || prop::sample::select(PATHS.to_vec());
    let slices = prop::collection::btree_set((0_u32..3).prop_map(slice), 1..3);
    let by = prop::sample::select(vec![BoundBy::Platform, BoundBy::Root]);
    prop_oneof![
        3 => path().prop_map(Event::Make),
        1 => path().prop_map(Event::Remove),
        2 => path().prop_map(Event::Enter),
        1 => path().prop_map(Event::Leave),
        4 => (path(), by, slices, prop::bool::weighted(0.2))
            .prop_map(|(path, by, slices, shares)| Event::Bind { path, by, slices, shares }),
        1 => path().prop_map(Event::Unbind),
        2 => Just(Event::Look),
        1 => Just(Event::Restart),
        1 => (0..100_u64).prop_map(Event::Wait),
    ]
}

#[derive(Default)]
struct Host {
    /// The existing control groups by path, each with its inode and its number of processes.
    groups: BTreeMap<&'static str, (u64, u32)>,
    inodes: u64,
    now: u64,
    bindings: Bindings,
    /// The slices that a binding has shared on purpose, so that several control groups may have them.
    shared: BTreeSet<SliceId>,
}

fn is_below(path: &str, above: &str) -> bool {
    path == above || path.starts_with(&format!("{above}/"))
}

fn pod_around(path: &str) -> Option<&'static str> {
    PATHS.into_iter().find(|above| above.starts_with("/kubepods/") && is_below(path, above))
}

fn are_one_tenants(one: &str, other: &str) -> bool {
    let pod = pod_around(one);
    is_below(one, other) || is_below(other, one) || (pod.is_some() && pod == pod_around(other))
}

impl Host {
    fn has_process(&self, above: &str) -> bool {
        self.groups.iter().any(|(path, (_, processes))| is_below(path, above) && *processes > 0)
    }

    fn use_of(&self, group: &ControlGroup) -> GroupUse {
        let is_there = self.groups.get(group.path.as_str()).is_some_and(|(inode, _)| *inode == group.inode);
        if is_there {
            return if self.has_process(&group.path) { GroupUse::Used } else { GroupUse::Empty };
        }
        match pod_around(&group.path) {
            Some(pod) if self.has_process(pod) => GroupUse::PodGoesOn,
            _ => GroupUse::Gone,
        }
    }

    fn drop_ended(&mut self) {
        let mut bindings = self.bindings.clone();
        let ended = bindings.end(self.now, |group| self.use_of(group));
        for one in &ended {
            let (is, age) = (self.use_of(&one.group), self.now - one.since);
            assert!(
                is == GroupUse::Gone || (is == GroupUse::Empty && age >= FIRST_PROCESS),
                "{one:?} is {is:?}"
            );
        }
        for one in bindings.iter() {
            assert_ne!(self.use_of(&one.group), GroupUse::Gone, "{one:?} is left");
        }
        self.bindings = bindings;
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Make(path) => {
                let above = PATHS.iter().filter(|above| is_below(path, above) && **above != path);
                if above.clone().all(|above| self.groups.contains_key(above)) {
                    self.inodes += 1;
                    self.groups.entry(path).or_insert((self.inodes, 0));
                }
            }
            Event::Remove(path) => self.groups.retain(|its, _| !is_below(its, path)),
            Event::Enter(path) => {
                if let Some((_, processes)) = self.groups.get_mut(path) {
                    *processes += 1;
                }
            }
            Event::Leave(path) => {
                if let Some((_, processes)) = self.groups.get_mut(path) {
                    *processes = processes.saturating_sub(1);
                }
            }
            Event::Bind { path, by, slices, shares } => self.bind(path, by, &slices, shares),
            Event::Unbind(path) => {
                let had = self.bindings.iter().any(|one| one.group.path == path);
                assert_eq!(self.bindings.unbind(path).is_some(), had);
                assert!(self.bindings.iter().all(|one| one.group.path != path));
            }
            Event::Look => self.drop_ended(),
            Event::Restart => self.bindings = self.bindings.iter().cloned().collect(),
            Event::Wait(seconds) => self.now += seconds,
        }
    }

    fn bind(&mut self, path: &'static str, by: BoundBy, slices: &BTreeSet<SliceId>, shares: bool) {
        let Some((inode, _)) = self.groups.get(path).copied() else { return };
        self.drop_ended();
        let group = ControlGroup { path: path.to_owned(), inode };
        let label = format!("job {path}");
        let (since, was_used) = (self.now, self.use_of(&group) == GroupUse::Used);
        let wanted = Binding { group: group.clone(), slices: slices.clone(), by, label, since, was_used };
        let mut bindings = self.bindings.clone();
        for one in
            bindings.make_way(path, |slice| slices.contains(slice), self.now, |group| self.use_of(group))
        {
            let is_its_time = match self.use_of(&one.group) {
                GroupUse::Used => false,
                GroupUse::Empty => one.was_used,
                GroupUse::PodGoesOn => pod_around(path) == pod_around(&one.group.path),
                GroupUse::Gone => true,
            };
            assert!(is_its_time && !one.slices.is_disjoint(slices), "{one:?} has made way for {path}");
        }
        self.bindings = bindings;
        let before = self.bindings.clone();
        let taken = before.iter().any(|one| {
            !are_one_tenants(&one.group.path, path) && one.by >= by && !one.slices.is_disjoint(slices)
        });
        match self.bindings.bind(wanted, shares, |_| 1) {
            Ok(()) => {
                assert!(shares || !taken, "{slices:?} are taken, and were given");
                let is_left = |one: &&Binding| {
                    let is_before =
                        pod_around(path).is_some() && pod_around(path) == pod_around(&one.group.path);
                    let is_around = is_below(&one.group.path, path) || is_below(path, &one.group.path);
                    is_before && !is_around && self.use_of(&one.group) == GroupUse::PodGoesOn
                };
                let mut left = self.bindings.iter().filter(is_left);
                assert!(
                    left.all(|one| one.slices.is_disjoint(slices)),
                    "a container has a slice of the next one"
                );
                let bound = self.bindings.nearest(path, |_| true).unwrap();
                let before = before.iter().find(|one| one.group == group);
                assert!(bound.group == group && bound.by == before.map_or(by, |one| one.by.max(by)));
                match before.map(|one| (one.by.cmp(&by), one)) {
                    None | Some((Ordering::Less, _)) => assert_eq!(bound.slices, *slices),
                    Some((Ordering::Equal, one)) => assert_eq!(bound.slices, &one.slices | slices),
                    Some((Ordering::Greater, one)) => assert_eq!(bound, one),
                }
                if shares {
                    self.shared.extend(slices);
                }
            }
            Err(NotBound::Taken { slice, by }) => {
                assert!(taken && !shares && slices.contains(&slice));
                assert!(before.with(&slice).any(|one| one.name() == by));
                assert_eq!(self.bindings, before, "a refusal changes nothing");
            }
            Err(NotBound::TooMany | NotBound::TooLarge) => unreachable!("there are few control groups"),
        }
    }

    fn check(&self) {
        for (index, one) in self.bindings.iter().enumerate() {
            assert!(!one.slices.is_empty());
            for other in self.bindings.iter().skip(index + 1) {
                assert_ne!(one.group.path, other.group.path, "a control group is bound twice");
                let one_tenants = are_one_tenants(&one.group.path, &other.group.path);
                let both = one.slices.intersection(&other.slices);
                let both: Vec<_> = both.filter(|slice| !self.shared.contains(slice)).collect();
                assert!(one_tenants || both.is_empty(), "{one:?} and {other:?} have {both:?}");
            }
        }
        for path in PATHS {
            let above = self.bindings.iter().filter(|one| is_below(path, &one.group.path));
            let nearest = above.max_by_key(|one| one.group.path.len());
            assert_eq!(self.bindings.nearest(path, |_| true), nearest, "of a process in {path}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5000))]

    #[test]
    fn whatever_happens_a_slice_is_one_bindings_and_a_process_has_the_nearest(
        events in prop::collection::vec(event(), 1..60),
    ) {
        let mut host = Host::default();
        for event in events {
            host.happens(event);
            host.check();
        }
        host.groups.clear();
        host.drop_ended();
        assert_eq!(host.bindings, Bindings::default(), "a binding is left");
    }
}

#[test]
fn bindings_are_bounded() {
    let binding = |number: u32| Binding {
        group: ControlGroup { path: format!("/{number}"), inode: number.into() },
        slices: BTreeSet::from([slice(number)]),
        by: BoundBy::Root,
        label: String::new(),
        since: 0,
        was_used: false,
    };
    let mut bindings = Bindings::default();
    let bound =
        (0..10_000).take_while(|number| bindings.bind(binding(*number), false, |_| 1).is_ok()).count();
    assert_eq!(bound, 4096);
    let refused = bindings.bind(binding(5000), false, |_| 1).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "this host has 4096 bindings already; end a binding with yunion-mpsctl unbind"
    );
    bindings.bind(binding(17), false, |_| 1).unwrap();
    let refused = bindings
        .bind(Binding { slices: BTreeSet::from([slice(17)]), ..binding(5000) }, false, |_| 1)
        .unwrap_err();
    assert_eq!(refused.to_string(), "00:06.0-17 is taken by /17");
    assert!(bindings.unbind("/17").is_some());
    bindings.bind(binding(5000), false, |_| 1).unwrap();
}

/// The documentation of the D-Bus method Bind promises this limit for all bindings together.
#[test]
fn all_bindings_together_have_24_mib() {
    assert_eq!(MOST_BYTES, 24 * 1024 * 1024);
}

#[test]
fn a_name_is_believed_where_root_has_made_it_and_all_above_it() {
    let is_believed = |owners: &[Option<u32>]| is_named_by_root(owners.iter().copied());
    assert!(is_believed(&[Some(0)]) && is_believed(&[Some(0), Some(0)]));
    for owners in [&[Some(1000)][..], &[Some(0), Some(1000)], &[Some(1000), Some(0)], &[Some(0), None]] {
        assert!(!is_believed(owners), "{owners:?}");
    }
}

/// The service refuses a binding that does not fit into the state file, and changes nothing.
#[test]
fn bindings_fit_into_the_state_file() {
    let binding = |number: u32| Binding {
        group: ControlGroup { path: format!("/{number}"), inode: number.into() },
        slices: BTreeSet::from([slice(number)]),
        by: BoundBy::Root,
        label: String::new(),
        since: 0,
        was_used: false,
    };
    let mut bindings = Bindings::default();
    let bytes_of = |one: &Binding| one.slices.len() * LARGEST / 2;
    let more = |ordinal| Binding { slices: BTreeSet::from([slice(ordinal)]), ..binding(0) };
    bindings.bind(binding(0), false, bytes_of).unwrap();
    bindings.bind(more(1), false, bytes_of).unwrap();
    let before = bindings.clone();
    assert_eq!(bindings.bind(more(2), false, bytes_of), Err(NotBound::TooLarge));
    assert_eq!(bindings, before);
    bindings.bind(binding(2), false, bytes_of).unwrap();
}

/// A new binding is reported as the only change if all other bindings are the same. If another binding has changed, too, no
/// binding is reported as new.
#[test]
fn new_bindings_are_told_from_changes() {
    let binding = |path: &str, ordinal| Binding {
        group: ControlGroup { path: path.to_owned(), inode: 1 },
        slices: BTreeSet::from([slice(ordinal)]),
        by: BoundBy::Root,
        label: String::new(),
        since: 0,
        was_used: false,
    };
    let before: Bindings = [binding("/a", 1), binding("/b", 2)].into_iter().collect();
    let added = |change: &dyn Fn(&mut Bindings)| {
        let mut after = before.clone();
        change(&mut after);
        let added = after.added_to(&before)?.map(|one| one.group.path.clone()).collect::<Vec<_>>();
        Some(added)
    };
    assert_eq!(added(&|_| ()), Some(vec![]));
    assert_eq!(added(&|all| all.bind(binding("/c", 3), false, |_| 1).unwrap()), Some(vec!["/c".to_owned()]));
    assert_eq!(added(&|all| all.bind(binding("/a", 3), false, |_| 1).unwrap()), None);
    assert_eq!(added(&|all| _ = all.unbind("/a")), None);
    assert_eq!(added(&|all| _ = all.end(0, |_| GroupUse::Used)), None);
}

/// A control group that has never had a process keeps its binding for a minute. If the processes of a control group have ended,
/// it loses its binding as soon as another control group asks for the slice, and not before.
#[test]
fn a_control_group_that_has_ended_gives_way() {
    let group = |path: &str| ControlGroup { path: path.to_owned(), inode: 1 };
    for (was_used, waits, gives_way) in
        [(true, 0, true), (false, FIRST_PROCESS - 1, false), (false, FIRST_PROCESS, true)]
    {
        let mut bindings = Bindings::default();
        let slices = BTreeSet::from([slice(1)]);
        let binding = Binding {
            group: group("/a"),
            slices,
            by: BoundBy::Root,
            label: String::new(),
            since: 0,
            was_used: false,
        };
        bindings.bind(binding, false, |_| 1).unwrap();
        if was_used {
            assert_eq!(bindings.end(0, |_| GroupUse::Used), []);
        }
        for (path, ordinal) in [("/b", 2), ("/a/below", 1)] {
            assert_eq!(bindings.make_way(path, |one| one.ordinal == ordinal, waits, |_| GroupUse::Empty), []);
        }
        assert_eq!(bindings.make_way("/b", |_| true, waits, |_| GroupUse::Used), []);
        let ended = bindings.make_way("/b", |one| one.ordinal == 1, waits, |_| GroupUse::Empty);
        assert_eq!(!ended.is_empty(), gives_way, "{was_used} {waits}");
    }
}

#[test]
fn the_last_label_is_the_name() {
    let with_label = |label: &str| Binding {
        group: ControlGroup { path: "/a".to_owned(), inode: 1 },
        slices: BTreeSet::from([slice(1)]),
        by: BoundBy::Root,
        label: label.to_owned(),
        since: 0,
        was_used: false,
    };
    let mut bindings = Bindings::default();
    for (label, expected) in [("", "/a"), ("job 1", "job 1"), ("", "job 1"), ("job 2", "job 2")] {
        bindings.bind(with_label(label), false, |_| 1).unwrap();
        assert_eq!(bindings.nearest("/a/b", |_| true).map(Binding::name), Some(expected));
    }
}

/// A pod keeps the slice of an ended container until the pod's next container gets the slice, or the pod ends.
#[test]
fn a_pod_keeps_its_slice_while_its_container_is_started_again() {
    let binding = |path: &str| Binding {
        group: ControlGroup { path: path.to_owned(), inode: 1 },
        slices: BTreeSet::from([slice(1)]),
        by: BoundBy::Root,
        label: "ml/train-0/main".to_owned(),
        since: 0,
        was_used: true,
    };
    let (pod, other) = ("/kubepods/burstable/p1", "/kubepods/p2/x");
    let (first, second) = (format!("{pod}/x"), format!("{pod}/y"));
    let mut bindings = Bindings::default();
    bindings.bind(binding(&first), false, |_| 1).unwrap();
    let goes_on = |_: &ControlGroup| GroupUse::PodGoesOn;
    assert_eq!(bindings.end(1000, goes_on), []);
    assert_eq!(bindings.make_way(other, |_| true, 1000, goes_on), []);
    bindings.bind(binding(other), false, |_| 1).unwrap_err();
    assert_eq!(bindings.make_way(&second, |_| false, 1000, goes_on), []);
    assert_eq!(bindings.make_way(&second, |_| true, 1000, goes_on).len(), 1);
    bindings.bind(binding(&second), false, |_| 1).unwrap();
    assert_eq!(bindings.end(1000, |_| GroupUse::Gone).len(), 1);
}

/// The kubelet's control groups with each of its two cgroup drivers, and with a configured root control group.
#[test]
fn a_pod_is_the_control_group_below_those_of_the_kubelet() {
    for (path, pod) in [
        ("/kubepods/pod1/4f1c", Some("/kubepods/pod1")),
        ("/kubepods/burstable/pod1/4f1c/below", Some("/kubepods/burstable/pod1")),
        (
            "/docker/77aa/kubelet/kubepods/besteffort/pod1",
            Some("/docker/77aa/kubelet/kubepods/besteffort/pod1"),
        ),
        (
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-4f1c.scope",
            Some("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice"),
        ),
        (
            "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod1.slice/crio-4f1c.scope/container",
            Some("/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod1.slice"),
        ),
        ("/kubepods", None),
        ("/kubepods/burstable", None),
        ("/docker/4f1c", None),
        ("/my-kubepods/pod1/4f1c", None),
        ("/user.slice/kubepods.scope/pod1", None),
        ("", None),
    ] {
        assert_eq!(pod_of(path), pod, "{path}");
    }
}
