//! Fatal GPU errors: which clients the service reports, when an error is over, and which clients the service may end because of
//! the error.

use mps_core::mps::{Meaning, ServerStatus};
use mps_core::serve::Failure;

use super::{SERVER, Story};

/// Returns a story with these clients, each on its GPU. At 10 s the server meets a fatal GPU error on the first GPU, and the
/// log names the clients in `named` as hit.
fn faulted(clients: &'static [(u32, &'static str)], named: &'static [u32]) -> Story {
    let mut story = Story::with_gpus(&["A", "B"]);
    story.served(1000);
    story.forget();
    story.host().at(10_000, move |host| {
        for (pid, gpu) in clients {
            host.client(*pid, SERVER, gpu);
        }
        host.is_status(SERVER, ServerStatus::Fault);
        host.says(Meaning::FaultHandling { server: SERVER });
        for client in named {
            host.says(Meaning::TornDown { server: SERVER, client: *client, ordinal: 0 });
        }
    });
    story
}

/// At this time, in milliseconds, the server has recovered, and only the clients in `left` still run.
fn recovers(story: &Story, at: u64, left: &'static [u32]) {
    story.host().at(at, |host| {
        host.only_stay(left);
        host.is_status(SERVER, ServerStatus::Active);
    });
}

#[test]
fn whoever_was_hit_is_told_once_and_the_rest_later() {
    let mut story = faulted(&[(1, "A"), (2, "A")], &[1, 2]);
    story.served(10_000);
    assert!(
        story
            .shown()
            .starts_with("Faulted, not serving: server 200 met a fatal GPU error and takes no new client")
    );
    assert_eq!(story.host().reader.words, ["fault of 200: server 200 met a fatal GPU error"]);
    assert!(story.has_done("remember {1}"));
    story.served(10_300);
    assert_eq!(story.host().reader.hit, [(SERVER, 0, vec![1, 2])]);
    story.host().at(10_400, |host| host.says(Meaning::TornDown { server: SERVER, client: 3, ordinal: 1 }));
    recovers(&story, 12_000, &[]);
    story.served(15_000);
    assert_eq!(story.host().reader.hit, [(SERVER, 0, vec![1, 2]), (SERVER, 1, vec![3])]);
    assert_eq!(story.host().reader.words[1..], ["server 200 has recovered"]);
    assert_eq!((story.shown().as_str(), story.calls("shut down")), ("Ready, serving", 0));
}

#[test]
fn limits_that_have_changed_meanwhile_are_given_to_the_server_that_is_well() {
    let mut story = faulted(&[(1, "A")], &[1]);
    story.served(10_500);
    story.break_off(|wanted| wanted.thread_percentage = 10);
    story.forget();
    story.served(11_000);
    assert_eq!(story.calls("set limits of 200"), 0);
    recovers(&story, 12_000, &[]);
    story.served(15_000);
    assert_eq!(story.calls("set limits of 200"), 1);
    assert_eq!(story.shown(), "Ready, serving");
    assert_eq!(story.host().servers[&SERVER].setting.percentage, 10);
}

#[test]
fn a_server_that_is_well_gets_no_limits_of_an_order_for_which_its_control_daemon_retires() {
    let mut story = faulted(&[(1, "A"), (2, "B")], &[1]);
    story.served(10_500);
    story.break_off(|wanted| (wanted.retiring, wanted.thread_percentage) = (true, 10));
    recovers(&story, 12_000, &[2]);
    story.host().stage.nvml.insert("B".to_owned(), Ok([2].into()));
    story.forget();
    story.served(15_000);
    assert!(story.has_told("server 200 has recovered"));
    assert_eq!(story.calls("set limits"), 0);
}

#[test]
fn the_last_lines_of_a_server_that_ends_with_a_fault_are_read_first() {
    let mut story = faulted(&[(1, "A")], &[]);
    story.served(10_500);
    story.host().at(11_000, |host| {
        host.log_is_lost = true;
        host.server_ends(SERVER, 139);
        host.log_is_lost = false;
        host.during("read on", |host| host.says(Meaning::TornDown { server: SERVER, client: 1, ordinal: 0 }));
    });
    story.served(15_000);
    assert_eq!(story.host().reader.hit, [(SERVER, 0, vec![1])]);
    assert_eq!(story.shown(), "Ready, serving");
}

#[test]
fn a_server_is_ended_after_the_grace_for_clients_that_stay() {
    let mut story = faulted(&[(1, "A")], &[1]);
    story.served(39_900);
    assert_eq!(story.calls("shut down"), 0);
    story.served(45_000);
    assert!(story.has_done("shut down server 200 (Fault)"));
    assert!(story.has_told(
        "warning: server 200 was ended, since these clients still ran long after its fatal GPU error: 1"
    ));
    assert_eq!(
        (story.shown().as_str(), story.host().reader.shown.view.servers.clone()),
        ("Ready, serving", vec![201])
    );
}

#[test]
fn a_server_is_ended_behind_the_closed_door() {
    let mut story = faulted(&[(1, "A")], &[1]);
    story.served(45_000);
    let first = |call| story.times(call).first().copied().unwrap();
    assert!(
        first("keep waiting") < first("shut down server") && first("shut down server") < first("lead again")
    );
    assert!(
        first("lead again") < first("let go"),
        "programs that have waited begin once a server has the GPU"
    );
}

#[test]
fn a_server_is_not_ended_while_a_link_leads_to_it() {
    let mut story = faulted(&[(1, "A")], &[1]);
    let unreachable = Failure::Unreachable("the pipe directory is gone".to_owned());
    story.host().at(30_000, |host| host.stage.answers = Some(unreachable));
    // Programs can't reach the control daemon at this time. So it does no harm that the link can't be removed.
    story.host().stage.bad_links = Some("the link can't be changed".to_owned());
    // The control daemon answers again before the end of the grace period. No health check has noticed the answers yet when the
    // service decides about the server.
    story.host().at(42_000, |host| host.stage.answers = None);
    story.served(45_000);
    assert_eq!((story.calls("keep waiting"), story.calls("shut down")), (2, 0));
}

#[test]
fn a_server_that_is_well_when_the_door_is_closed_is_not_ended() {
    let mut story = faulted(&[(1, "A")], &[1]);
    story.served(39_900);
    // While the service asks for the clients, all clients that the error has hit end. Another client has just connected, and
    // works.
    story.host().during("clients", |host| {
        host.during("read on", |host| {
            host.stage.gone.insert(1);
            host.only_stay(&[]);
            host.is_status(SERVER, ServerStatus::Active);
            host.client(2, SERVER, "A");
        });
    });
    story.served(52_000);
    assert_eq!(story.calls("shut down"), 0);
    assert!(story.has_done("lead again") && story.has_done("let go"));
    assert_eq!(story.shown(), "Ready, serving");
}

#[test]
fn a_server_that_has_met_the_next_error_meanwhile_is_not_ended() {
    let mut story = faulted(&[(1, "A")], &[1]);
    story.served(39_900);
    // All clients that the error has hit end. Another client comes and meets a second error, which the log does not report.
    story.host().during("clients", |host| {
        host.during("inspect", |host| {
            host.stage.gone.insert(1);
            host.only_stay(&[]);
            host.client(2, SERVER, "A");
        });
    });
    story.served(44_000);
    assert_eq!(story.calls("shut down"), 0);
    assert!(story.shown().starts_with("Faulted"), "{}", story.shown());
}

#[test]
fn a_server_without_clients_that_stays_faulted_is_ended_after_the_grace() {
    let mut story = faulted(&[(1, "A")], &[1]);
    story.host().at(20_000, |host| {
        host.stage.gone.insert(1);
        host.only_stay(&[]);
    });
    story.served(39_900);
    assert_eq!(story.calls("shut down"), 0);
    story.served(45_000);
    assert!(story.has_told(
        "warning: server 200 was ended, since it had no client and did not recover from its fatal GPU error"
    ));
    assert!(story.has_done("shut down idle server 200 (Fault)"));
}

#[test]
fn a_server_is_left_to_clients_that_are_well() {
    let mut story = faulted(&[(1, "A"), (2, "B")], &[1]);
    story.served(60_000);
    let why = "end these clients, which have lost their work by the error: 1; the service does not end \
               the server, since \
               it has 1 client on healthy GPUs";
    assert!(story.shown().ends_with(why), "{}", story.shown());
    assert_eq!(story.calls("shut down"), 0);
    // The last client on the healthy GPU ends. The service ends the server, since the remaining client has lost its work.
    story.host().at(61_000, |host| host.only_stay(&[1]));
    story.served(70_000);
    assert!(story.has_done("shut down server 200 (Fault)"));
}

#[test]
fn a_client_that_came_between_two_errors_is_well() {
    let mut story = faulted(&[(1, "A"), (2, "A")], &[1]);
    story.served(60_000);
    assert!(story.shown().contains("since it has 1 client on healthy GPUs"), "{}", story.shown());
    assert_eq!(story.calls("shut down"), 0);
}

#[test]
fn a_server_is_left_to_its_clients_while_nobody_knows_which_gpu_it_was() {
    // Even if all clients are on one GPU, the error may have happened on the other GPU.
    for mut story in [faulted(&[(1, "A"), (2, "B")], &[]), faulted(&[(1, "A"), (2, "A")], &[])] {
        story.served(60_000);
        assert!(
            story.shown().contains("the service does not know which GPU had the error"),
            "{}",
            story.shown()
        );
        assert_eq!(story.calls("shut down"), 0);
    }
}

#[test]
fn a_client_of_two_gpus_that_was_hit_on_one_is_well_on_none() {
    let mut story = faulted(&[(1, "A"), (1, "B")], &[1]);
    story.served(60_000);
    assert!(story.has_done("shut down server 200 (Fault)"));
}

#[test]
fn clients_that_nvml_knows_keep_the_server_as_well() {
    let mut story = faulted(&[(1, "A")], &[1]);
    story.host().stage.nvml.insert("A".to_owned(), Ok([1].into()));
    story.host().stage.nvml.insert("B".to_owned(), Ok([2].into()));
    story.served(60_000);
    assert!(story.shown().contains("since it has 1 client on healthy GPUs"), "{}", story.shown());
    assert_eq!(story.calls("shut down"), 0);
    // NVML can't list the clients on GPU B, which the error has not hit.
    let mut story = faulted(&[(1, "A")], &[1]);
    story.host().stage.nvml.insert("B".to_owned(), Err("NVML hangs".to_owned()));
    story.served(60_000);
    let why = "the service does not end the server, since not all its clients are known: NVML hangs";
    assert!(story.shown().ends_with(why), "{}", story.shown());
    assert_eq!(story.calls("shut down"), 0);
    // The service needs no list of the clients on the GPU with the error, since all of them have lost their work.
    let mut story = faulted(&[(1, "A")], &[1]);
    story.host().stage.nvml.insert("A".to_owned(), Err("NVML hangs".to_owned()));
    story.served(60_000);
    assert!(story.has_done("shut down server 200 (Fault)"));
}

#[test]
fn a_faulted_server_that_ends_takes_the_fault_with_it() {
    let mut story = faulted(&[(1, "A")], &[1]);
    story.host().at(10_100, |host| host.server_ends(SERVER, 1));
    story.served(12_000);
    assert_eq!(story.host().reader.hit, [(SERVER, 0, vec![1])], "it is told all the same");
    assert_eq!(
        (story.shown().as_str(), story.host().reader.shown.view.servers.clone()),
        ("Ready, serving", vec![201])
    );
    assert!(!story.has_told("has recovered"));
}

#[test]
fn a_fault_of_another_server_takes_the_place_of_the_one_before() {
    let mut story = faulted(&[(1, "A")], &[1]);
    story.host().at(10_100, |host| {
        host.server_comes(300);
        host.says(Meaning::TornDown { server: 300, client: 7, ordinal: 1 });
    });
    story.served(11_000);
    assert_eq!(story.host().reader.hit, [(SERVER, 0, vec![1]), (300, 1, vec![7])]);
    assert!(story.has_told("fault of 300: server 300 met a fatal GPU error"));
}

#[test]
fn an_error_that_the_log_tells_of_during_the_look_is_another_one() {
    let mut story = faulted(&[(1, "A")], &[1]);
    story.served(10_300);
    recovers(&story, 11_000, &[]);
    // The log reports another error right after the server has recovered from the first error.
    story.host().at(11_000, |host| {
        host.during("read on", |host| {
            host.is_status(SERVER, ServerStatus::Fault);
            host.says(Meaning::FaultHandling { server: SERVER });
        });
    });
    story.served(15_000);
    assert!(story.shown().starts_with("Faulted"), "{}", story.shown());
    recovers(&story, 16_000, &[]);
    story.served(20_000);
    assert_eq!(story.shown(), "Ready, serving");
}

#[test]
fn another_control_daemon_does_not_say_that_a_server_has_ended() {
    let mut story = faulted(&[(1, "A")], &[1]);
    story.host().stage.nvml.insert("A".to_owned(), Ok([1].into()));
    story.served(10_300);
    story.host().at(11_100, |host| {
        host.taken_by = Some(7);
        host.servers.remove(&SERVER);
        host.stage.children_are_unknown = true;
    });
    story.served(11_300);
    assert!(!story.has_told("server 200 has ended"));
    assert!(!story.shown().starts_with("Ready"), "{}", story.shown());
}

/// Like `faulted`, with the control daemon of driver 535, which can't report the status of its server.
fn faulted_with_535(clients: &'static [(u32, &'static str)], named: &'static [u32]) -> Story {
    let story = faulted(clients, named);
    story.host().is_old = true;
    story
}

#[test]
fn with_driver_535_a_fault_lasts_as_long_as_somebody_who_was_hit() {
    let mut story = faulted_with_535(&[(1, "A"), (2, "B")], &[1]);
    story.served(60_000);
    let why = "these clients have not ended: 1; end these clients: this driver does not report the status of \
               a server, so the service takes the server for recovered only after these clients have ended";
    assert!(story.shown().ends_with(why), "{}", story.shown());
    assert_eq!(story.calls("shut down"), 0, "others may be at work there");
    story.host().at(61_000, |host| host.only_stay(&[2]));
    story.served(67_000);
    assert_eq!(story.shown(), "Ready, serving");
    assert!(story.has_done("pause"), "it is well a moment after its last client that was hit has gone");
    assert_eq!(story.host().reader.words.last().unwrap(), "server 200 has recovered");
}

#[test]
fn with_driver_535_another_control_daemon_does_not_say_who_is_left() {
    let mut story = faulted_with_535(&[(1, "A")], &[1]);
    story.host().stage.nvml.insert("A".to_owned(), Ok([1].into()));
    story.served(10_300);
    // Another control daemon, without clients, listens in the directory only while the service asks for the clients.
    story.host().during("clients", |host| {
        host.taken_by = Some(7);
        host.only_stay(&[]);
    });
    story.host().at(10_700, |host| host.taken_by = None);
    story.served(10_900);
    assert!(!story.has_told("has recovered"));
}

#[test]
fn with_driver_535_the_log_gets_time_to_name_those_hit() {
    let mut story = faulted_with_535(&[(1, "A")], &[]);
    story.served(14_900);
    assert!(story.shown().starts_with("Faulted"));
    story.served(16_000);
    assert_eq!(story.shown(), "Ready, serving");
}

#[test]
fn with_driver_535_a_server_that_has_gone_is_not_listed() {
    let mut story = faulted_with_535(&[(1, "A")], &[1]);
    story.host().at(10_100, |host| {
        host.log_is_lost = true;
        host.nobody_watches();
        host.server_ends(SERVER, 1);
        host.log_is_lost = false;
    });
    story.served(13_000);
    assert_eq!(
        (story.shown().as_str(), story.host().reader.shown.view.servers.clone()),
        ("Ready, serving", vec![201])
    );
}

#[test]
fn whoever_can_say_nothing_of_a_faulted_server_has_missed_once() {
    let mut story = faulted(&[(1, "A")], &[1]);
    story.host().at(10_100, |host| host.stage.answers = Some(Failure::Silent("no answer".to_owned())));
    story.served(10_500);
    assert_eq!(story.host().reader.words[1..], ["warning: no answer"]);
    assert!(story.shown().starts_with("Faulted"));
}
