//! The memory limits that follow from bindings.

// clippy.toml allows calls such as `unwrap` only in functions with `#[test]`. Other functions of this file make such calls too.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use mps_core::bindings::{Binding, Bindings, BoundBy, ControlGroup};
use mps_core::kernel_limits::{
    CHECK, KernelLimits, LimitGoal, LimitOutcome, LimitedGroup, SOON, limited_to, limits, limits_around,
};
use mps_core::terms::SliceId;
use mps_core::{CoreTime, GpuUuid};

/// The name of a GPU, and the ordinal of the slice.
type Slice = (&'static str, u32);

/// Returns the core's id of a slice. GPU A has the PCI address 0a:00.0.
fn slice((gpu, ordinal): Slice) -> SliceId {
    let address = format!("0{}:00.0", gpu.to_lowercase());
    SliceId { gpu: address.parse().unwrap(), ordinal }
}

fn group(path: &str) -> ControlGroup {
    ControlGroup { path: path.to_owned(), inode: 1 }
}

fn bindings(of_groups: &[(&str, &[Slice])]) -> Bindings {
    let binding = |(path, slices): &(&str, &[Slice])| Binding {
        group: group(path),
        slices: slices.iter().copied().map(slice).collect(),
        by: BoundBy::Root,
        label: String::new(),
        since: 0,
        was_used: false,
    };
    of_groups.iter().map(binding).collect()
}

/// Returns the GPU of a slice, and the memory of the slice in MiB. A slice of GPU A has 10 MiB plus its ordinal, and a slice of
/// GPU B has 1000 MiB. The service serves no other GPU.
fn memory_of(slice: &SliceId) -> Option<(GpuUuid, u64)> {
    match slice.gpu.to_string().as_str() {
        "0a:00.0" => Some(("A".to_owned(), 10 + u64::from(slice.ordinal))),
        "0b:00.0" => Some(("B".to_owned(), 1000)),
        _ => None,
    }
}

/// Returns the limits in MiB that follow from these bindings. The key names the control group and the GPU.
fn mib(of_groups: &[(&str, &[Slice])]) -> BTreeMap<String, u64> {
    let limits = limits(&bindings(of_groups), memory_of);
    limits.iter().map(|(place, limit)| (format!("{} {}", place.group.path, place.gpu), limit.mib)).collect()
}

#[test]
fn a_control_group_may_have_the_memory_of_its_slices_and_of_the_slices_inside_it() {
    let expected = |limits: &[(&str, u64)]| -> BTreeMap<String, u64> {
        limits.iter().map(|(place, mib)| ((*place).to_owned(), *mib)).collect()
    };
    for (of_groups, wanted) in [
        (&[("/a", &[("A", 1)][..])][..], &[("/a A", 11)][..]),
        (&[("/a", &[("A", 1), ("A", 2), ("B", 0), ("C", 0)])], &[("/a A", 23), ("/a B", 1000)]),
        // The limit of `/a` includes the slices of the control groups below `/a`, and no slice counts twice. `/ab` is not below
        // `/a`, although the path begins with the same letters.
        (
            &[
                ("/a", &[("A", 0)]),
                ("/a/b", &[("A", 1)]),
                ("/a/b/c", &[("A", 1)]),
                ("/a-b", &[("A", 5)]),
                ("/ab", &[("A", 6)]),
            ],
            &[("/a A", 21), ("/a/b A", 11), ("/a/b/c A", 11), ("/a-b A", 15), ("/ab A", 16)],
        ),
        // `/a` has no limit on GPU B, since only `/a/b` has a slice of GPU B.
        (&[("/a", &[("A", 0)]), ("/a/b", &[("B", 0)])], &[("/a A", 10), ("/a/b B", 1000)]),
        (&[("/a", &[("C", 0)])], &[]),
    ] {
        assert_eq!(mib(of_groups), expected(wanted), "{of_groups:?}");
        // After a new binding the service computes only the limits of the bound control group and of the control groups above
        // it. The result must be the same as if the service computed all limits, no matter which control group is bound last.
        for last in 0..of_groups.len() {
            let mut ordered = of_groups.to_vec();
            ordered.rotate_left(last);
            let Some(((path, _), others)) = ordered.split_last() else { continue };
            let mut limited = limits(&bindings(others), memory_of);
            limited.extend(limits_around(&[path], &bindings(&ordered), memory_of));
            assert_eq!(
                limited,
                limits(&bindings(of_groups), memory_of),
                "{path} is the last of {of_groups:?}"
            );
        }
    }
}

fn due(limits: &KernelLimits) -> Option<CoreTime> {
    limits.next(&BTreeSet::new()).map(|(due, ..)| due)
}

/// NVML may take long to answer for a GPU, or never answer. The limits on other GPUs must not wait for this GPU.
#[test]
fn a_gpu_that_does_not_answer_holds_up_no_other_gpu() {
    let place = |gpu: &str, path: &str| LimitedGroup { gpu: gpu.to_owned(), group: group(path) };
    let goal = |place| (place, LimitGoal::Hold(1));
    let mut limits = KernelLimits::default();
    let old: BTreeMap<_, _> = [place("A", "/a"), place("A", "/b")].map(goal).into();
    limits.pursue(&old, CoreTime::ZERO);
    let more: BTreeMap<_, _> = old.into_iter().chain([goal(place("B", "/c"))]).collect();
    limits.pursue(&more, CoreTime::from_secs(1));
    let next = |busy: &[&str]| {
        let busy = busy.iter().map(|gpu| (*gpu).to_owned()).collect();
        limits.next(&busy).map(|(_, place, _)| (place.gpu, place.group.path))
    };
    let named = |gpu: &str, path: &str| Some((gpu.to_owned(), path.to_owned()));
    assert_eq!(next(&[]), named("A", "/a"));
    assert_eq!(next(&["A"]), named("B", "/c"));
    assert_eq!(next(&["A", "B"]), None);
}

/// A host may have thousands of refused limits. The service must not try them all again with each new binding.
#[test]
fn a_refused_limit_is_not_tried_again_for_a_new_one_beside_it() {
    let place = |path: &str| LimitedGroup { gpu: "A".to_owned(), group: group(path) };
    let goals = |mib: &[(&str, u64)]| -> BTreeMap<_, _> {
        mib.iter().map(|(path, mib)| (place(path), LimitGoal::Hold(*mib))).collect()
    };
    let now = CoreTime::ZERO;
    for (then, next) in [
        (&[("/a", 1), ("/b", 2)][..], "/b"),
        (&[("/a", 1)], "/a"),
        (&[("/a", 3)], "/a"),
        (&[("/a", 3), ("/b", 2)], "/a"),
    ] {
        let mut limits = KernelLimits::default();
        limits.pursue(&goals(&[("/a", 1)]), now);
        let refused = LimitOutcome::Refused("it has more".to_owned());
        assert!(limits.has_acted(&place("/a"), &LimitGoal::Hold(1), refused, now));
        assert!(due(&limits) > Some(now));
        limits.pursue(&goals(then), now);
        let (at, place, _) = limits.next(&BTreeSet::new()).unwrap();
        assert_eq!((at, place.group.path.as_str()), (now, next), "{then:?}");
    }
}

#[test]
fn a_slice_is_limited_where_one_control_group_has_it_and_no_other_slice() {
    let limited = |of_groups: &[(&str, &[Slice])], wanted: Slice| {
        let bindings = bindings(of_groups);
        limited_to(&slice(wanted), &wanted.0.to_owned(), &bindings.by_slice(), &limits(&bindings, memory_of))
    };
    let own = LimitedGroup { gpu: "A".to_owned(), group: group("/a") };
    assert_eq!(limited(&[("/a", &[("A", 1), ("B", 0)])], ("A", 1)), Some(own.clone()));
    assert_eq!(limited(&[("/a", &[("A", 1)])], ("A", 2)), None, "nobody has it");
    assert_eq!(limited(&[("/a", &[("A", 1), ("A", 2)])], ("A", 1)), None, "the limit is that of both");
    assert_eq!(limited(&[("/a", &[("A", 1)]), ("/b", &[("A", 1)])], ("A", 1)), None, "two have it");
    let nested: [(&str, &[Slice]); 2] = [("/a", &[("A", 1)]), ("/a/b", &[("A", 2)])];
    assert_eq!(limited(&nested, ("A", 1)), None, "the control group inside it counts");
    let inner = LimitedGroup { group: group("/a/b"), ..own };
    assert_eq!(limited(&nested, ("A", 2)), Some(inner));
}

#[test]
fn the_next_act_comes_with_the_next_goal_to_look_at() {
    let place = |path| LimitedGroup { gpu: "A".to_owned(), group: group(path) };
    let goals =
        |paths: &[&'static str]| paths.iter().map(|path| (place(path), LimitGoal::Hold(10))).collect();
    let mut limits = KernelLimits::default();
    let at = CoreTime::from_secs;
    assert_eq!(due(&limits), None);
    limits.pursue(&goals(&["/a"]), at(1));
    assert_eq!(due(&limits), Some(at(1)));
    limits.has_acted(&place("/a"), &LimitGoal::Hold(10), LimitOutcome::Reached, at(2));
    assert_eq!(due(&limits), Some(at(2) + SOON), "a new limit");
    limits.has_acted(&place("/a"), &LimitGoal::Hold(10), LimitOutcome::Reached, at(7));
    assert_eq!(due(&limits), Some(at(7) + CHECK));
    limits.pursue(&goals(&["/a", "/b"]), at(8));
    assert_eq!(due(&limits), Some(at(8)), "another control group");
}
