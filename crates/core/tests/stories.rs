//! A few histories of the core as readable stories: the events that the core gets, the acts that the core answers, and the
//! questions that other parts of the service ask the core meanwhile.

// clippy.toml allows calls such as `unwrap` only in functions with `#[test]`. Other functions of this file make such calls too.
#![allow(clippy::unwrap_used, clippy::panic, clippy::unnecessary_wraps)]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mps_core::view::DaemonView;
use mps_core::{
    Act, ActOutcome, Configured, Core, CoreEvent, DaemonAct, DaemonId, Demand, Goal, HEALTHY_AGAIN,
    MpsSwitch, Order, RunUse, WhyFailed,
};

const NOW: Duration = Duration::from_secs(1000);

fn order(id: &str, gpus: &[&str]) -> Order<()> {
    let gpus = gpus.iter().map(|gpu| (*gpu).to_owned()).collect();
    Order { id: id.into(), gpus, sets_modes: true, payload: () }
}

fn demand(orders: &[Order<()>]) -> CoreEvent<()> {
    let certainly = orders.iter().flat_map(|order| order.gpus.clone()).collect();
    let kept = Configured { certainly, others: None };
    CoreEvent::Pursue(Demand {
        orders: orders.to_vec(),
        left: Vec::new(),
        mps: MpsSwitch::On,
        kept,
        closed: Vec::new(),
    })
}

fn runs(gpus: &[&str]) -> Option<Vec<String>> {
    Some(gpus.iter().map(|gpu| (*gpu).to_owned()).collect())
}

fn done(id: &str, written: Option<Vec<String>>, outcome: ActOutcome) -> CoreEvent<()> {
    let watched = written.is_some();
    CoreEvent::Done { id: id.into(), written, watched, outcome }
}

fn told(acts: &[Act<()>]) -> Vec<String> {
    let words = acts.iter().map(|act| match act {
        Act::Daemon { id, act: DaemonAct::End(permit), .. } => format!("{id}: End({:?})", permit.cause()),
        Act::Daemon { id, goal: Goal::Retire, act, .. } => format!("{id}: {act:?}, retiring"),
        Act::Daemon { id, act, .. } => format!("{id}: {act:?}"),
        Act::Interrupt { id } => format!("{id}: interrupt"),
        Act::Release { id } => format!("{id}: release"),
        Act::TakeMode(gpu) => format!("take the mode of {gpu}"),
        Act::PutModeBack(gpu) => format!("put the mode of {gpu} back"),
    });
    words.collect()
}

fn core() -> Core<()> {
    Core::new(BTreeMap::new(), BTreeSet::new())
}

fn serving(id: &str, gpus: &[&str]) -> Core<()> {
    let mut core = core();
    assert_eq!(told(&core.on(demand(&[order(id, gpus)]), NOW)), [format!("{id}: Start")]);
    assert_eq!(told(&core.on(done(id, runs(gpus), ActOutcome::Done), NOW)), [format!("{id}: Serve")]);
    core
}

#[test]
fn a_gpu_is_waited_for_until_its_last_client_has_ended() {
    let mut core = serving("A", &["A"]);
    let both = [order("shared", &["A", "B"])];
    assert_eq!(told(&core.on(demand(&both), NOW)), ["A: interrupt"]);
    assert_eq!(told(&core.on(done("A", runs(&["A"]), ActOutcome::Interrupted), NOW)), ["A: Serve, retiring"]);
    assert_eq!(core.pending().map(|order| order.id.to_string()).collect::<Vec<_>>(), ["shared"]);
    assert_eq!(core.held(&DaemonId::Shared), BTreeMap::from([("A".to_owned(), "A".into())]));
    assert_eq!(core.kept(), core.held(&DaemonId::Shared));
    assert_eq!(
        (core.goal(&"A".into()), core.goal(&DaemonId::Shared), core.goal(&"B".into())),
        (Some(Goal::Retire), Some(Goal::Serve), None)
    );
    assert_eq!((core.order(&"A".into()).unwrap().gpus.len(), core.order(&"B".into())), (1, None));
    let (ends, waits) = (DaemonView::default(), DaemonView { put_off: true, ..DaemonView::default() });
    assert!(core.is_starting(|_| Some(&ends)));
    assert!(!core.is_starting(|id| Some(if *id == "A".into() { &waits } else { &ends })));
    assert!(!core.is_at_rest());
    assert_eq!(told(&core.on(done("A", None, ActOutcome::Ended), NOW)), ["A: release", "shared: Start"]);
    assert_eq!(core.pending().count(), 0);
    assert!(core.kept().is_empty() && !core.is_starting(|_| Some(&ends)));
}

#[test]
fn one_that_runs_goes_without_a_gpu_until_it_is_free() {
    let mut core = serving("A", &["A"]);
    core.on(demand(&[order("A", &["A"]), order("shared", &["B"])]), NOW);
    core.on(done("shared", runs(&["B"]), ActOutcome::Done), NOW);
    let both = [order("shared", &["A", "B"])];
    assert_eq!(told(&core.on(demand(&both), NOW)), ["A: interrupt", "shared: interrupt"]);
    core.on(done("A", runs(&["A"]), ActOutcome::Interrupted), NOW);
    let acts = core.on(done("shared", runs(&["B"]), ActOutcome::Interrupted), NOW);
    let [Act::Daemon { held, .. }] = acts.as_slice() else { panic!("{acts:?}") };
    assert_eq!(held.keys().collect::<Vec<_>>(), ["A"]);
    let (ends, waits) = (DaemonView::default(), DaemonView { put_off: true, ..DaemonView::default() });
    assert!(core.is_starting(|_| Some(&ends)), "A joins as soon as it is free");
    assert!(!core.is_starting(|_| Some(&waits)));
    assert_eq!(told(&core.on(done("A", None, ActOutcome::Ended), NOW)), ["A: release", "shared: interrupt"]);
}

#[test]
fn pauses_grow_and_begin_again_after_a_minute_of_health() {
    let mut core = serving("A", &["A"]);
    let gone = || done("A", None, ActOutcome::Failed(WhyFailed::Gone));
    assert_eq!(told(&core.on(gone(), NOW)), ["A: Rest(0ns)", "A: Start"]);
    let mut now = NOW;
    for pause in [100, 200, 400, 800, 1600, 3200, 6400, 12_800, 20_000, 20_000] {
        let pause = Duration::from_millis(pause);
        assert_eq!(told(&core.on(gone(), now)), [format!("A: Rest({pause:?})")]);
        assert_eq!(core.due(), Some(now + pause));
        assert_eq!(
            told(&core.on(CoreEvent::Due, (now + pause).saturating_sub(Duration::from_nanos(1)))),
            [""; 0]
        );
        now += pause;
        assert_eq!(told(&core.on(CoreEvent::Due, now)), ["A: Start"]);
        assert_eq!(core.due(), None);
    }
    core.on(done("A", runs(&["A"]), ActOutcome::Done), now);
    let almost = (now + HEALTHY_AGAIN).saturating_sub(Duration::from_nanos(1));
    assert_eq!(told(&core.clone().on(gone(), almost)), ["A: Rest(20s)"]);
    assert_eq!(told(&core.on(gone(), now + HEALTHY_AGAIN)), ["A: Rest(0ns)", "A: Start"]);
}

#[test]
fn one_that_fails_is_ended_only_without_clients() {
    let ill = || done("A", runs(&["A"]), ActOutcome::Failed(WhyFailed::Ill));
    let used = |used| done("A", runs(&["A"]), ActOutcome::Used(used));
    for (found, expected) in [
        (RunUse::Idle, &["A: End(Unused)"][..]),
        (RunUse::Clients, &["A: Rest(0ns)", "A: Serve"]),
        (RunUse::KeptOut, &["A: Rest(0ns)", "A: Serve"]),
    ] {
        let mut core = serving("A", &["A"]);
        assert_eq!(told(&core.on(ill(), NOW)), ["A: Judge"]);
        assert_eq!(told(&core.on(used(found), NOW)), expected, "{found:?}");
    }
    let mut core = serving("A", &["A"]);
    let not_understood = done("A", runs(&["A"]), ActOutcome::Failed(WhyFailed::NotUnderstood));
    assert_eq!(
        told(&core.on(not_understood, NOW)),
        ["A: Rest(0ns)", "A: Serve"],
        "another would answer the same"
    );
}

#[test]
fn while_programs_keep_the_server_out_it_is_tried_each_second() {
    let mut core = serving("A", &["A"]);
    let mut now = NOW;
    for pause in [0, 100, 200, 400, 800, 1000, 1000] {
        core.on(done("A", runs(&["A"]), ActOutcome::Failed(WhyFailed::Ill)), now);
        let acts = core.on(done("A", runs(&["A"]), ActOutcome::Used(RunUse::KeptOut)), now);
        let pause = Duration::from_millis(pause);
        assert_eq!(told(&acts).first(), Some(&format!("A: Rest({pause:?})")));
        now += pause;
        core.on(CoreEvent::Due, now);
    }
}

/// A part of the host that starts at the same time as the service, such as the fabric manager, will soon be ready. So the core
/// tries the start again every few seconds, and does not end the control daemon.
#[test]
fn what_is_not_ready_yet_is_waited_for_in_short_pauses() {
    let mut core = serving("A", &["A"]);
    let mut now = NOW;
    for pause in [0, 100, 200, 400, 800, 1600, 3000, 3000] {
        let acts = core.on(done("A", runs(&["A"]), ActOutcome::Failed(WhyFailed::NotYet)), now);
        let pause = Duration::from_millis(pause);
        assert_eq!(told(&acts).first(), Some(&format!("A: Rest({pause:?})")));
        now += pause;
        core.on(CoreEvent::Due, now);
    }
}

#[test]
fn a_stop_ends_all_and_puts_the_modes_back() {
    let mut core = serving("A", &["A"]);
    assert_eq!(told(&core.on(CoreEvent::Stop { left: Vec::new() }, NOW)), ["A: interrupt"]);
    let acts = core.on(done("A", runs(&["A"]), ActOutcome::Interrupted), NOW);
    assert_eq!(told(&acts), ["A: End(Stop)"]);
    let acts = core.on(done("A", None, ActOutcome::Ended), NOW);
    assert_eq!(told(&acts), ["A: release", "put the mode of A back"]);
    assert!(!core.is_at_rest(), "the mode is not back yet");
    core.on(CoreEvent::ModeDone { gpu: "A".to_owned(), outcome: mps_core::ModeOutcome::PutBack }, NOW);
    assert!(core.is_at_rest());
}

#[test]
fn a_restart_leaves_all_as_it_is() {
    let mut core = serving("A", &["A"]);
    assert_eq!(told(&core.on(CoreEvent::Leave, NOW)), ["A: interrupt"]);
    assert_eq!(told(&core.on(done("A", runs(&["A"]), ActOutcome::Interrupted), NOW)), ["A: Leave"]);
    assert_eq!(told(&core.on(done("A", runs(&["A"]), ActOutcome::Done), NOW)), ["A: release"]);
    assert!(core.is_at_rest());
}

#[test]
fn a_gpu_that_programs_without_mps_hold_is_closed_to_more_of_them() {
    let mut core = core();
    let kept = Configured { certainly: BTreeSet::from(["A".to_owned()]), others: None };
    let closed = vec!["A".to_owned()];
    let demand = |kept, closed| {
        CoreEvent::Pursue(Demand {
            orders: Vec::<Order<()>>::new(),
            left: Vec::new(),
            mps: MpsSwitch::On,
            kept,
            closed,
        })
    };
    assert_eq!(told(&core.on(demand(kept, closed), NOW)), ["take the mode of A"]);
    assert!(!core.is_at_rest());
    let taken = CoreEvent::ModeDone { gpu: "A".to_owned(), outcome: mps_core::ModeOutcome::Taken };
    assert_eq!(told(&core.on(taken, NOW)), [""; 0]);
    assert_eq!(told(&core.on(demand(Configured::default(), Vec::new()), NOW)), ["put the mode of A back"]);
    // If the compute mode of a GPU can't be restored, the core tries again only with the next plan.
    let stays = || CoreEvent::ModeDone { gpu: "A".to_owned(), outcome: mps_core::ModeOutcome::Stays };
    assert_eq!(told(&core.on(stays(), NOW)), [""; 0]);
    assert_eq!(told(&core.on(demand(Configured::default(), Vec::new()), NOW)), ["put the mode of A back"]);
}

#[test]
fn an_order_that_is_the_same_changes_nothing() {
    let mut core = serving("A", &["A"]);
    assert_eq!(told(&core.on(demand(&[order("A", &["A"])]), NOW)), [""; 0]);
    let other = Order { sets_modes: false, ..order("A", &["A"]) };
    assert_eq!(told(&core.on(demand(std::slice::from_ref(&other)), NOW)), ["A: interrupt"]);
    assert_eq!(told(&core.on(demand(&[other]), NOW)), [""; 0], "once is enough");
}

#[test]
fn a_mode_that_nobody_has_set_is_not_put_back() {
    let mut core = core();
    let order = Order { sets_modes: false, ..order("A", &["A"]) };
    core.on(demand(std::slice::from_ref(&order)), NOW);
    core.on(done("A", runs(&["A"]), ActOutcome::Done), NOW);
    core.on(demand(&[]), NOW);
    core.on(done("A", runs(&["A"]), ActOutcome::Interrupted), NOW);
    assert_eq!(told(&core.on(done("A", None, ActOutcome::Ended), NOW)), ["A: release"]);
    // The state file names a control daemon of an earlier run of the service. The takeover finds that this control daemon has
    // ended by itself.
    let left = runs(&["A"]).map(|one| ("A".into(), one));
    let mut core = Core::new(left.into_iter().collect(), BTreeSet::new());
    assert_eq!(
        told(&core.on(CoreEvent::Stop { left: vec![self::order("A", &["A"])] }, NOW)),
        ["A: TakeOver"]
    );
    assert_eq!(told(&core.on(done("A", None, ActOutcome::Done), NOW)), ["A: release"]);
}

#[test]
fn a_start_is_broken_off_for_another_order() {
    let mut core = core();
    core.on(demand(&[order("A", &["A"])]), NOW);
    assert_eq!(told(&core.on(demand(&[]), NOW)), ["A: interrupt"]);
    // The core has interrupted the start before the control daemon got into the state file.
    let acts = core.on(done("A", None, ActOutcome::Interrupted), NOW);
    assert_eq!(told(&acts), ["A: release", "put the mode of A back"]);
}

#[test]
fn one_that_has_run_is_started_again_without_a_gpu_that_another_has() {
    let mut core = serving("A", &["A"]);
    core.on(demand(&[order("A", &["A"]), order("shared", &["B"])]), NOW);
    core.on(done("shared", runs(&["B"]), ActOutcome::Done), NOW);
    core.on(demand(&[order("shared", &["A", "B"])]), NOW);
    core.on(done("A", runs(&["A"]), ActOutcome::Interrupted), NOW);
    core.on(done("shared", runs(&["B"]), ActOutcome::Interrupted), NOW);
    let acts = core.on(done("shared", None, ActOutcome::Failed(WhyFailed::Gone)), NOW);
    assert_eq!(
        told(&acts),
        ["shared: Rest(0ns)", "shared: Start"],
        "its clients do not wait for clients of A"
    );
}

/// Returns the acts after the service has failed to take over a control daemon of an earlier run of the service. `event` is the
/// reason for the takeover, such as a stop of the service. `is_watched` is true if a supervisor watches the control daemon's
/// process.
fn not_taken_over(event: CoreEvent<()>, is_watched: bool) -> Vec<String> {
    let left = runs(&["A"]).map(|one| ("A".into(), one));
    let mut core = Core::new(left.into_iter().collect(), BTreeSet::new());
    assert_eq!(told(&core.on(event, NOW)), ["A: TakeOver"]);
    let outcome = ActOutcome::Failed(WhyFailed::Ill);
    told(
        &core
            .on(CoreEvent::Done { id: "A".into(), written: runs(&["A"]), watched: is_watched, outcome }, NOW),
    )
}

#[test]
fn one_that_cannot_be_taken_over_is_ended_if_its_process_is_held() {
    let left = || vec![order("A", &["A"])];
    let disabled = || {
        let (orders, kept, closed) = (Vec::new(), Configured::default(), Vec::new());
        CoreEvent::Pursue(Demand { orders, left: left(), mps: MpsSwitch::TurnedOff, kept, closed })
    };
    let stop = || CoreEvent::Stop { left: left() };
    assert_eq!(not_taken_over(stop(), true), ["A: End(Stop)"]);
    assert_eq!(not_taken_over(stop(), false), ["A: release"], "the next service finds it");
    assert_eq!(not_taken_over(disabled(), true), ["A: End(Disabled)"]);
    assert_eq!(not_taken_over(disabled(), false), ["A: Rest(0ns)", "A: TakeOver"], "it is tried again");
}

#[test]
fn whatever_a_start_finds_while_mps_is_off_waits_for_its_clients() {
    let left = BTreeMap::from([("A".into(), runs(&["A"]).unwrap())]);
    let mut core = Core::new(left, BTreeSet::new());
    let (orders, left, kept, closed) =
        (Vec::new(), vec![order("A", &["A"])], Configured::default(), Vec::new());
    let off = CoreEvent::Pursue(Demand { orders, left, mps: MpsSwitch::OffAtStart, kept, closed });
    assert_eq!(told(&core.on(off, NOW)), ["A: TakeOver, retiring"]);
}

#[test]
fn one_that_is_called_back_serves_on() {
    let mut core = serving("A", &["A"]);
    for _ in 0..2 {
        assert_eq!(told(&core.on(demand(&[]), NOW)), ["A: interrupt"]);
        let acts = core.on(done("A", runs(&["A"]), ActOutcome::Interrupted), NOW);
        assert_eq!(told(&acts), ["A: Serve, retiring"]);
        assert_eq!(told(&core.on(demand(&[order("A", &["A"])]), NOW)), ["A: interrupt"]);
        let acts = core.on(done("A", runs(&["A"]), ActOutcome::Interrupted), NOW);
        assert_eq!(told(&acts), ["A: Serve"], "the same one, and not the next");
    }
}

#[test]
fn one_that_ends_since_mps_was_disabled_comes_again_when_it_is_enabled() {
    let mut core = serving("A", &["A"]);
    let (orders, left, kept, closed) = (Vec::new(), Vec::new(), Configured::default(), Vec::new());
    let disabled = CoreEvent::Pursue(Demand { orders, left, mps: MpsSwitch::TurnedOff, kept, closed });
    assert_eq!(told(&core.on(disabled, NOW)), ["A: interrupt"]);
    let acts = core.on(done("A", runs(&["A"]), ActOutcome::Interrupted), NOW);
    assert_eq!(told(&acts), ["A: End(Disabled)"]);
    // The control daemon is already ending, and the service can't withdraw its request to end.
    assert_eq!(told(&core.on(demand(&[order("A", &["A"])]), NOW)), [""; 0]);
    assert_eq!(told(&core.on(done("A", None, ActOutcome::Ended), NOW)), ["A: Start"]);
}

#[test]
fn a_gpu_that_left_and_comes_back_waits_for_the_clients_of_before() {
    let mut core = serving("shared", &["A", "B"]);
    core.on(demand(&[order("shared", &["A"])]), NOW);
    let acts = core.on(done("shared", runs(&["A", "B"]), ActOutcome::Interrupted), NOW);
    assert_eq!(told(&acts), ["shared: Serve"]);
    let both = [order("A", &["A"]), order("B", &["B"])];
    assert_eq!(told(&core.on(demand(&both), NOW)), ["shared: interrupt"]);
    let acts = core.on(done("shared", runs(&["A", "B"]), ActOutcome::Interrupted), NOW);
    assert_eq!(told(&acts), ["shared: Serve, retiring"]);
    assert_eq!(core.pending().count(), 2);
    assert_eq!(core.kept().len(), 2, "B too, which the order had no more");
    let acts = core.on(done("shared", None, ActOutcome::Ended), NOW);
    assert_eq!(told(&acts), ["A: Start", "B: Start", "shared: release"]);
}

#[test]
fn a_start_waits_until_the_mode_of_its_gpu_is_put_back() {
    let mut core = serving("A", &["A"]);
    core.on(demand(&[]), NOW);
    core.on(done("A", runs(&["A"]), ActOutcome::Interrupted), NOW);
    let acts = core.on(done("A", None, ActOutcome::Ended), NOW);
    assert_eq!(told(&acts), ["A: release", "put the mode of A back"]);
    assert_eq!(told(&core.on(demand(&[order("A", &["A"])]), NOW)), [""; 0]);
    let back = CoreEvent::ModeDone { gpu: "A".to_owned(), outcome: mps_core::ModeOutcome::PutBack };
    assert_eq!(told(&core.on(back, NOW)), ["A: Start"]);
}

/// Returns the acts about a control daemon that still lives, although it should have ended after `event`.
fn lives_on(event: CoreEvent<()>) -> Vec<String> {
    let mut core = serving("A", &["A"]);
    core.on(event, NOW);
    let acts = core.on(done("A", runs(&["A"]), ActOutcome::Interrupted), NOW);
    assert!(told(&acts).concat().starts_with("A: End("));
    told(&core.on(done("A", runs(&["A"]), ActOutcome::Lives), NOW))
}

#[test]
fn one_that_cannot_be_ended_is_left_by_a_stop_and_tried_again_otherwise() {
    let (orders, left, kept, closed) = (Vec::new(), Vec::new(), Configured::default(), Vec::new());
    let off = CoreEvent::Pursue(Demand { orders, left, mps: MpsSwitch::TurnedOff, kept, closed });
    assert_eq!(lives_on(CoreEvent::Stop { left: Vec::new() }), ["A: release"]);
    assert_eq!(lives_on(off), ["A: Rest(0ns)", "A: End(Disabled)"]);
}

#[test]
fn the_next_one_comes_after_a_pause_where_one_without_clients_was_ended() {
    let mut core = serving("A", &["A"]);
    let mut ended = || {
        core.on(done("A", runs(&["A"]), ActOutcome::Failed(WhyFailed::Ill)), NOW);
        core.on(done("A", runs(&["A"]), ActOutcome::Used(RunUse::Idle)), NOW);
        told(&core.on(done("A", None, ActOutcome::Ended), NOW))
    };
    assert_eq!(ended(), ["A: Rest(0ns)", "A: Start"]);
    assert_eq!(ended(), ["A: Rest(100ms)"]);
}
