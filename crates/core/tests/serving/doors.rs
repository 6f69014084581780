//! The service makes new programs wait while a decision depends on the number of clients.

use mps_core::mps::Meaning;
use mps_core::serve::{Ended, Requested};

use super::{SERVER, Story};

/// Returns a story in which the order needs another control daemon than the running one.
fn misfit() -> Story {
    let mut story = Story::with_gpus(&["A"]);
    story.served(1000);
    story.forget();
    story.host().stage.misfit = Some("it has other GPUs".to_owned());
    story.break_off(|_| {});
    story
}

/// Returns the time of the first call with each of these names, in milliseconds.
fn order(story: &Story, calls: &[&str]) -> Vec<u128> {
    calls.iter().map(|call| *story.times(call).first().unwrap()).collect()
}

#[test]
fn the_clients_are_counted_behind_the_closed_door() {
    let mut story = misfit();
    story.host().asks(Requested::Apply { force: false });
    assert_eq!(story.serve(9000), Some(Ok(Ended::Stopped)));
    let closed = story.times("keep waiting");
    let quit = story.times("quit if idle (Unused)");
    assert_eq!((closed.len(), quit.len()), (1, 1));
    let between = story.times("client PIDs").into_iter().filter(|at| *at > closed[0] && *at <= quit[0]);
    assert!(between.count() > 0, "a client may have come before the door was closed");
    assert!(!story.has_done("lead again") && !story.has_done("let go"), "the next one lets them go");
}

/// Before the service ends a control daemon by force, it must stop showing the control daemon as serving. Otherwise a program
/// could get a slice of the control daemon, wait at the slice's link, and then start without MPS.
#[test]
fn one_that_is_ended_by_force_is_shown_as_not_serving_before_it_is_asked() {
    let mut story = misfit();
    story.host().asks(Requested::Apply { force: true });
    story.host().during("quit", |host| {
        let shown = host.reader.shown.view.serving;
        host.note(format_args!("shown as serving: {shown}"));
    });
    assert_eq!(story.serve(9000), Some(Ok(Ended::Stopped)));
    assert!(story.has_done("quit (Forced)") && story.has_done("shown as serving: false"));
}

#[test]
fn programs_that_follow_one_another_put_a_change_off() {
    let mut story = misfit();
    for number in 0..40 {
        let pid = 1000 + number;
        story.host().at(1600 + 250 * u64::from(number), move |host| {
            host.says(Meaning::ClientAdmitted(pid));
            host.says(Meaning::ClientLeft(pid));
        });
    }
    let last = 1600 + 250 * 39;
    story.served(last);
    let last = u128::from(last);
    assert!(!story.has_done("keep waiting"), "nobody has to wait for it");
    assert_eq!(story.serve(20_000), Some(Ok(Ended::Stopped)));
    let quit = story.times("quit if idle (Unused)");
    assert!(quit.len() == 1 && quit[0] >= last + 2000 && quit[0] < last + 4000, "{quit:?}");
}

#[test]
fn a_client_that_came_through_the_door_opens_it_again() {
    let mut story = misfit();
    story.host().asks(Requested::Apply { force: false });
    // A client comes after the service has counted the clients twice. The service then finds the client in the log.
    story.host().during("client PIDs", |host| {
        host.during("client PIDs", |host| {
            host.during("read on", |host| host.says(Meaning::ClientAdmitted(7)));
        });
    });
    story.served(2500);
    assert_eq!(
        story.host().stage.answered,
        [Err("a client connected or ended while the service counted the clients".to_owned())]
    );
    assert_eq!(story.calls("quit"), 0);
    let [closed, opened, gone] = order(&story, &["keep waiting", "lead again", "let go"])[..] else {
        panic!()
    };
    assert!(closed < opened && opened <= gone, "{closed} {opened} {gone}");
    let shown = story.shown();
    assert!(shown.starts_with("Waiting, serving: it has other GPUs"), "{shown}");
}

#[test]
fn one_that_was_asked_to_end_with_a_client_takes_no_other() {
    let mut story = misfit();
    story.host().asks(Requested::Apply { force: false });
    story.host().during("quit if idle", |host| host.client(1, SERVER, "A"));
    story.host().stage.nvml.insert("A".to_owned(), Ok([1].into()));
    story.served(60_000);
    let lives = "the control daemon was asked to end, and has not ended yet";
    assert_eq!(story.host().stage.answered, [Err(lives.to_owned())]);
    assert!(!story.has_done("lead again") && story.calls("signal") == 0);
    let shown = story.shown();
    assert!(shown.starts_with("Waiting, not serving: "), "{shown}");
}
