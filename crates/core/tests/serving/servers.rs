//! Servers that start and end, even before the service watches them, and the pauses before the next server starts.

use std::time::Duration;

use mps_core::mps::{Meaning, ServerStatus};
use mps_core::serve::{Ended, Failure, tried_again};

use super::{SERVER, Story};

#[test]
fn a_server_that_ends_is_told_and_the_next_one_is_started() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().at(10_000, |host| host.server_ends(SERVER, 1));
    story.served(10_000);
    let told = ["failure of 200: server 200 exited with status 1; its log ends here", "server 200 has ended"];
    assert_eq!(story.host().reader.words[2..], told);
    assert_eq!(story.shown(), "Backoff, not serving: server 200 exited with status 1; its log ends here");
    story.served(10_500);
    assert_eq!((story.shown().as_str(), story.calls("start server")), ("Ready, serving", 1));
    assert_eq!(story.host().reader.shown.view.servers, [201]);
}

#[test]
fn a_server_that_exits_as_it_should_is_no_failure() {
    let mut story = Story::with_one_user(&["A"]);
    story.host().at(10_000, |host| host.server_comes(9));
    story.host().at(20_000, |host| host.server_ends(9, 0));
    story.served(25_000);
    let told = story.host().reader.words.clone();
    assert_eq!(told[1..], ["server 9 is ready", "server 9 exited with status 0", "server 9 has ended"]);
    assert_eq!(story.calls("start server"), 0, "the next one comes with a client");
}

#[test]
fn a_server_that_ends_before_it_is_watched_is_missed_by_its_status() {
    let mut story = Story::with_gpus(&["A"]);
    story.served(9000);
    story.host().at(10_000, |host| host.server_ends(SERVER, 0));
    // The next server ends so soon that no list of servers ever contains it.
    story.host().starts_fail = true;
    story.served(10_100);
    assert_eq!(
        story.shown(),
        "Backoff, not serving: server 201 exited with status 1 before it was ready; its log ends here"
    );
}

#[test]
fn a_server_that_the_check_does_not_find_any_more_is_missed() {
    let mut story = Story::with_gpus(&["A"]);
    story.served(9000);
    {
        // The server has ended, and no line of the log reports the end.
        let mut host = story.host();
        host.servers.clear();
        host.server_comes_in = Duration::MAX;
    }
    story.served(30_500);
    assert_eq!(story.shown(), "Backoff, not serving: the server has ended; its log ends here");
}

/// The process of a killed server ends before its control daemon notices the end and lets the next server start.
#[test]
fn a_killed_server_has_a_successor_as_soon_as_its_end_is_noted() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().at(10_000, |host| {
        host.is_status(SERVER, ServerStatus::Fault);
        host.server_is_seen_to_end(SERVER);
    });
    story.host().at(10_400, |host| host.server_ends(SERVER, 9));
    story.served(11_000);
    assert!(story.has_told("server 200 exited with status 9"));
    assert!(!story.has_told("before it was ready"), "server 200 has served");
    assert_eq!(
        (story.shown().as_str(), story.host().reader.shown.view.servers.as_slice()),
        ("Ready, serving", &[201][..])
    );
}

/// The log reports the end of a server before the service sees that the process has ended.
#[test]
fn the_end_of_a_server_is_told_with_its_own_pid() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().at(10_000, |host| {
        host.server_ends(SERVER, 1);
        host.server_comes(300);
    });
    story.served(20_000);
    assert_eq!(
        (story.shown().as_str(), story.host().reader.shown.view.servers.as_slice()),
        ("Ready, serving", &[300][..])
    );
    story.host().at(20_000, |host| {
        host.servers.clear();
        host.nobody_watches();
        host.server_comes_in = Duration::MAX;
    });
    story.served(60_000);
    assert_eq!(story.shown(), "Backoff, not serving: the server has ended; its log ends here");
}

#[test]
fn a_server_of_another_user_counts_as_one() {
    let mut story = Story::with_gpus(&["A"]);
    story.served(9000);
    story.host().at(10_000, |host| {
        host.says(Meaning::ServerStarting { server: 300, uid: 1000 });
        host.server_comes(300);
        host.server_ends(SERVER, 0);
    });
    story.served(20_000);
    assert_eq!((story.shown().as_str(), story.calls("start server")), ("Ready, serving", 0));
    assert!(story.has_done("watch 300"));
}

/// Returns the pauses in milliseconds between the starts of servers. Each server ends `lives_for` milliseconds after its start.
fn pauses(lives_for: u64, starts: usize) -> Vec<u128> {
    let mut story = Story::with_gpus(&["A"]);
    for server in 0..100 {
        let server = SERVER + server;
        story.host().during("watch", move |host| {
            let ends = u64::try_from(host.now.as_millis()).unwrap() + lives_for;
            host.at(ends, move |host| host.server_ends(server, 1));
        });
    }
    story.served(600_000);
    let times = story.times("start server");
    times.windows(2).take(starts).map(|two| two[1] - two[0] - u128::from(lives_for)).collect()
}

#[test]
fn the_pauses_before_the_next_server_grow_until_one_stays() {
    // In these stories the start of a server takes 150 ms.
    let expected = [0, 100, 200, 400, 800, 1600, 3200, 6400, 12_800, 20_000, 20_000, 20_000, 20_000];
    let grown: Vec<u128> = expected.iter().map(|pause| pause + 150).collect();
    assert_eq!(pauses(10, 12), grown[1..].to_vec());
    assert_eq!(pauses(60_000, 3), [150, 150, 150], "after a minute in health it is started at once");
    assert_eq!(pauses(59_000, 3), grown[1..4].to_vec());
}

#[test]
fn a_server_that_does_not_come_is_tried_again_and_told_once() {
    let mut story = Story::with_gpus(&["A"]);
    story.served(9000);
    story.forget();
    story.host().at(10_000, |host| {
        host.server_ends(SERVER, 0);
        host.stage.answers_to.insert("start server", Failure::Failed("it says no".to_owned()));
    });
    story.served(11_000);
    let told = &story.host().reader.words.clone()[2..];
    assert_eq!(told, ["warning: it says no; retrying in 0.1 s"]);
    assert_eq!(story.shown(), "Backoff, not serving: it says no");
    assert_eq!(story.times("start server"), [10_000, 10_100, 10_300, 10_700]);
    story.host().stage.answers_to.clear();
    story.served(13_000);
    assert_eq!(story.shown(), "Ready, serving");
}

#[test]
fn the_next_server_gets_the_limits_of_the_order() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().at(10_000, |host| {
        host.is_changed_by_others(None, 99, 0);
        host.server_ends(SERVER, 0);
    });
    story.served(12_000);
    assert!(story.has_told(
        "warning: another program changed the limits for new servers of control daemon shared: \
         99 instead of 50; the service has \
         restored the limits"
    ));
    assert_eq!(story.host().servers[&201].setting.percentage, 50);
    assert!(!story.has_told("started with wrong limits"));
}

#[test]
fn the_end_of_the_control_daemon_ends_a_start_of_a_server() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().at(10_000, |host| host.server_ends(SERVER, 0));
    story.host().at(10_100, |host| host.end(None));
    let ended = story.serve(20_000);
    assert!(matches!(ended, Some(Err(Failure::Ended { .. }))), "{ended:?}");
    assert!(story.calls("continue") > 0, "a stopped server would keep the GPU");
    assert_eq!(story.calls("skip"), 1, "its last words are read, and not all of its log");
}

#[test]
fn no_server_is_started_for_one_that_does_not_want_one() {
    for change in [0, 1, 2] {
        let mut story = Story::with_gpus(&["A"]);
        story.served(9000);
        story.break_off(|wanted| match change {
            0 => wanted.prewarm = false,
            1 => wanted.retiring = true,
            _ => {}
        });
        story.host().client(1, SERVER, "A");
        story.forget();
        story.host().at(10_000, |host| {
            host.server_ends(SERVER, 0);
            // The control daemon has a client. Without clients the service would end a retiring control daemon.
            host.client(1, 300, "A");
        });
        story.host().stage.answers_to.insert("client PIDs", Failure::NotUnderstood("other words".to_owned()));
        story.host().stage.children_are_unknown = true;
        story.host().stage.nvml.insert("A".to_owned(), Ok([1].into()));
        story.served(15_000);
        assert_eq!(story.calls("start server"), usize::from(change == 2), "{change}");
    }
}

#[test]
fn no_server_is_started_while_the_control_daemon_does_not_answer() {
    let mut story = Story::with_gpus(&["A"]);
    story.served(29_000);
    story.host().at(30_000, |host| host.stage.answers = Some(Failure::Silent("no answer".to_owned())));
    story.host().at(31_000, |host| host.server_ends(SERVER, 0));
    story.served(33_000);
    assert_eq!(story.calls("start server"), 0);
    assert!(story.shown().starts_with("Waiting, not serving: no answer"), "{}", story.shown());
}

#[test]
fn a_server_that_ended_meanwhile_is_started_once_when_the_control_daemon_answers_again() {
    let mut story = Story::with_gpus(&["A"]);
    story.served(29_000);
    story.host().at(30_000, |host| host.stage.answers = Some(Failure::Silent("no answer".to_owned())));
    story.host().at(31_000, |host| host.server_ends(SERVER, 0));
    story.host().at(33_000, |host| host.stage.answers = None);
    assert_eq!(story.serve(40_000), Some(Ok(Ended::Again)));
    story.forget();
    story.served(45_000);
    assert_eq!((story.calls("set limits and start"), story.calls("start server")), (1, 0));
    assert_eq!(story.shown(), "Ready, serving");
}

#[test]
fn no_server_is_started_while_the_faulted_one_may_live() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().at(10_000, |host| {
        host.is_status(SERVER, ServerStatus::Fault);
        host.says(Meaning::FaultHandling { server: SERVER });
        // A tenant can write this line about the exit of a server into the log, so the line alone must not count as the end of
        // the server.
        host.says(Meaning::ServerExited { server: SERVER, status: 1 });
    });
    story.served(20_000);
    assert_eq!(story.calls("start server"), 0);
    assert!(story.shown().starts_with("Faulted, not serving"), "{}", story.shown());
}

#[test]
fn servers_that_the_service_has_found_are_watched_once() {
    let mut story = Story::with_gpus(&["A"]);
    story.served(130_000);
    assert_eq!(story.calls("watch"), 1);
    assert_eq!(story.times("inspect 200 with limits"), [30_150, 60_150, 90_150, 120_150]);
}

#[test]
fn the_end_of_a_server_that_nobody_watches_is_no_news() {
    let mut story = Story::with_gpus(&["A"]);
    story.served(1000);
    story.forget();
    story.host().server_is_seen_to_end(999);
    story.served(2000);
    assert!(story.host().reader.words.is_empty());
    assert_eq!(story.shown(), "Ready, serving");
}

#[test]
fn clients_that_wait_are_told_once_with_the_reason() {
    for (multiuser, why) in [
        (false, "until the clients of user 1000 have ended: this control daemon serves one user at a time"),
        (true, "for an MPS server, but no server accepts the client"),
    ] {
        let mut story = if multiuser { Story::with_gpus(&["A"]) } else { Story::with_one_user(&["A"]) };
        story.host().at(1000, |host| {
            host.server_comes(300);
            host.says(Meaning::ServerStarting { server: 300, uid: 1000 });
            host.says(Meaning::ClientPending { client: 7, uid: 1001 });
        });
        story.served(5900);
        assert!(story.host().reader.shown.view.waiting.is_empty());
        story.served(25_000);
        assert_eq!(story.host().reader.shown.view.waiting.iter().map(|one| one.pid).collect::<Vec<_>>(), [7]);
        let told = format!("warning: client 7 (command of 7) of user 1001 waits {why}");
        assert_eq!(story.host().reader.words.iter().filter(|text| **text == told).count(), 1);
        story.host().at(26_000, |host| host.says(Meaning::ClientAdmitted(7)));
        story.served(26_000);
        assert!(story.host().reader.shown.view.waiting.is_empty(), "at once");
    }
}

#[test]
fn a_server_can_be_well_though_it_was_starting_when_it_was_asked() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().log_is_lost = true;
    story.host().at(151, |host| {
        host.is_status(SERVER, ServerStatus::Initializing);
    });
    story.host().at(1000, |host| host.is_status(SERVER, ServerStatus::Active));
    story.served(900);
    assert_eq!(story.calls("set limits of 200"), 0);
    story.served(6000);
    assert_eq!(story.shown(), "Ready, serving");
}

#[test]
fn a_pause_has_words() {
    assert_eq!(tried_again(Duration::ZERO), "retrying at once");
    assert_eq!(tried_again(Duration::from_millis(1600)), "retrying in 1.6 s");
}
