//! The health check of a control daemon: which process answers, which programs can reach it, the questions about GPUs, and the
//! consequences of missing answers.

use mps_core::mps::{Meaning, ServerStatus};
use mps_core::serve::{Ended, Failure};

use super::{PID, SERVER, Story};

fn silent() -> Option<Failure> {
    Some(Failure::Silent("no answer".to_owned()))
}

fn served(gpus: &[&str]) -> Story {
    let mut story = Story::with_gpus(gpus);
    story.served(1000);
    story.forget();
    story
}

#[test]
fn it_is_checked_every_30_s_and_every_10_s_with_clients() {
    let mut story = served(&["A"]);
    story.host().at(70_000, |host| host.says(Meaning::ClientAdmitted(1)));
    story.host().at(71_000, |host| host.client(1, SERVER, "A"));
    story.host().at(95_000, |host| host.only_stay(&[]));
    story.served(160_000);
    assert_eq!(story.times("keep links"), [30_150, 60_150, 80_000, 90_000, 100_000, 130_000, 160_000]);
    assert_eq!(
        story.times("checked in use"),
        [80_000, 90_000, 100_000],
        "the last one had clients until then"
    );
    assert!(story.has_done("client 1 came"));
}

#[test]
fn a_check_keeps_the_links_the_state_file_and_the_log() {
    let mut story = served(&["A"]);
    story.served(31_000);
    for call in
        ["continue 200", "keep links", "keep the state file, stays: true", "rotate the log", "read GPUs"]
    {
        assert!(story.has_done(call), "{call}: {:?}", story.host().stage.calls);
    }
    assert!(story.host().reader.words.is_empty());
}

#[test]
fn misses_are_counted_each_second_until_it_counts_as_hung() {
    let mut story = served(&["A"]);
    story.host().at(20_000, |host| {
        host.client(1, SERVER, "A");
        host.stage.answers = silent();
    });
    story.host().stage.nvml.insert("A".to_owned(), Ok([1].into()));
    story.served(30_500);
    let asked = "Waiting, not serving: no answer; the service asks the control daemon again, and the control \
                 daemon is restarted if it still does not answer and has no clients";
    assert_eq!(story.shown(), asked);
    assert_eq!(story.host().reader.words, ["warning: no answer"]);
    story.served(34_500);
    let hung = "Waiting, not serving: 5 times in a row: no answer; the control daemon is \
                restarted when its clients have ended";
    assert_eq!(story.shown(), hung);
    assert_eq!(story.times("read GPUs"), [30_150, 31_150, 32_150, 33_150, 34_150]);
    assert_eq!(story.host().reader.words, ["warning: no answer"], "once is enough");
    assert!(!story.has_done("keep links"), "nothing is changed for one that does not answer");
    story.host().at(36_000, |host| host.stage.answers = None);
    assert_eq!(story.serve(40_000), Some(Ok(Ended::Again)), "it may have missed a command");
    assert!(story.has_told("control daemon shared answers again"));
}

#[test]
fn one_that_hangs_without_clients_is_ended() {
    let mut story = served(&["A"]);
    story.host().stage.answers = silent();
    story.host().stage.stays = true;
    story.host().servers.clear();
    assert_eq!(story.serve(40_000), Some(Ok(Ended::Stopped)));
    assert_eq!(story.times("signal (Unused)"), [34_400]);
}

#[test]
fn one_that_another_has_taken_the_place_of_is_told_nothing() {
    let mut story = served(&["A"]);
    story.host().client(1, SERVER, "A");
    story.host().stage.nvml.insert("A".to_owned(), Ok([1].into()));
    story.host().at(20_000, |host| host.taken_by = Some(7));
    story.served(45_000);
    let shown = "Waiting, not serving: another control daemon (PID 7) listens in the directory of this \
                 control daemon; the control daemon is restarted when its clients have ended";
    assert_eq!(story.shown(), shown);
    assert!(!story.has_done("keep links") && story.calls("set limits") == 0);
    assert!(story.calls("client PIDs") == 0, "it would list its own");
    story.host().at(50_000, |host| host.taken_by = None);
    assert_eq!(story.serve(70_000), Some(Ok(Ended::Again)));
}

#[test]
fn one_without_a_directory_is_not_told_to_have_missed() {
    let mut story = served(&["A"]);
    story.host().stage.nvml.insert("A".to_owned(), Ok([1].into()));
    story.host().stage.answers = Some(Failure::Unreachable("nobody listens".to_owned()));
    story.served(31_000);
    let shown = "Waiting, not serving: the directory of the control daemon was removed or replaced (nobody \
                 listens); the control daemon is restarted when its clients have ended";
    assert_eq!(story.shown(), shown);
    assert!(story.host().reader.words.is_empty());
    assert!(story.host().reader.shown.view.ends_when_idle);
    story.host().stage.answers = silent();
    story.served(61_000);
    assert_eq!(story.shown(), shown);
}

#[test]
fn other_words_are_not_understood() {
    let mut story = served(&["A"]);
    let failure = Failure::NotUnderstood("other words".to_owned());
    story.host().stage.answers = Some(failure.clone());
    assert_eq!(story.serve(40_000), Some(Err(failure)));
}

#[test]
fn a_log_that_cannot_be_read_is_a_failure() {
    let mut story = served(&["A"]);
    story.host().at(2000, |host| host.stage.log_is_unreadable = true);
    let Some(Err(Failure::Failed(text))) = story.serve(40_000) else { panic!("it goes on") };
    assert_eq!(text, "the log can't be read");
}

#[test]
fn a_socket_that_users_cannot_get_to_is_shown_until_they_can() {
    let mut story = served(&["A"]);
    story.host().client(1, SERVER, "A");
    story.host().stage.bad_directories = vec!["mode 0700".to_owned()];
    story.served(31_000);
    let shown =
        "Waiting, not serving: mode 0700; the control daemon is restarted when its clients have ended";
    assert_eq!(story.shown(), shown);
    story.host().is_changed_by_others(None, 99, 0);
    story.served(61_000);
    assert!(!story.has_told("another program changed the limits"), "limits can wait");
    story.host().stage.bad_directories.clear();
    story.served(91_000);
    assert_eq!(story.shown(), "Ready, serving");
    assert!(story.has_told("another program changed the limits"));
}

#[test]
fn a_directory_of_its_own_that_is_bad_is_shown() {
    let mut story = served(&["A"]);
    story.host().client(1, SERVER, "A");
    story.host().stage.bad_links = Some("its directory belongs to somebody".to_owned());
    story.served(31_000);
    let shown = "Waiting, not serving: its directory belongs to somebody; the control daemon is restarted \
                 when its clients have ended";
    assert_eq!(story.shown(), shown);
}

#[test]
fn a_bad_directory_at_the_start_is_no_reason_to_say_that_it_is_ready() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().client(1, SERVER, "A");
    story.host().stage.bad_directories = vec!["mode 0700".to_owned()];
    story.served(1000);
    assert!(!story.has_told("control daemon shared is ready"));
    assert!(story.shown().starts_with("Waiting, not serving: mode 0700"));
}

#[test]
fn one_in_another_pipe_directory_serves_nobody_of_this_order() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().stage.is_elsewhere = true;
    story.served(1000);
    assert_eq!(story.shown(), "Ready, not serving");
}

#[test]
fn a_misfit_is_found_by_the_check_and_ends_with_the_last_client() {
    let mut story = served(&["A"]);
    story.host().client(1, SERVER, "A");
    story.host().at(20_000, |host| host.stage.misfit = Some("it has other GPUs".to_owned()));
    story.served(45_000);
    let shown = "Waiting, serving: it has other GPUs, for which the control daemon has to restart when its \
                 clients have ended; `yunion-mpsctl apply --force` ends the clients";
    assert_eq!(story.shown(), shown);
    assert!(story.host().reader.shown.view.ends_when_idle && story.host().reader.shown.view.put_off);
    assert!(story.has_done("keep the state file, stays: false"));
    // The last client ends without a line in the log, so only a count of the clients finds the end.
    story.host().at(46_000, |host| host.only_stay(&[]));
    assert_eq!(story.serve(60_000), Some(Ok(Ended::Stopped)));
    let counts = story.times("client PIDs");
    assert_eq!(story.times("quit if idle (Unused)").len(), 1);
    assert!(counts.windows(2).all(|two| two[1] - two[0] <= 10_000), "{counts:?}");
}

#[test]
fn a_misfit_that_is_over_ends_nobody() {
    let mut story = served(&["A"]);
    story.host().client(1, SERVER, "A");
    story.host().stage.misfit = Some("it has other GPUs".to_owned());
    story.served(31_000);
    story.host().stage.misfit = None;
    story.host().at(61_000, |host| host.only_stay(&[]));
    story.served(95_000);
    assert_eq!((story.shown().as_str(), story.calls("quit")), ("Ready, serving", 0));
    assert!(!story.host().reader.shown.view.ends_when_idle);
}

#[test]
fn clients_that_are_not_known_keep_it_and_that_is_told_once() {
    let mut story = served(&["A"]);
    story.host().stage.misfit = Some("it has other GPUs".to_owned());
    story.host().stage.answers_to.insert("client PIDs", Failure::NotUnderstood("other words".to_owned()));
    story.host().stage.nvml.insert("A".to_owned(), Err("NVML hangs".to_owned()));
    story.served(65_000);
    let told = "warning: the service can't end control daemon shared yet, since its clients are not known: \
                other words; \
                NVML hangs";
    assert_eq!(story.host().reader.words, [told]);
    let shown = story.shown();
    let why = "the clients of the control daemon are not known (other words; NVML hangs), and \
               `yunion-mpsctl apply --force` ends the control daemon with its clients";
    assert!(shown.ends_with(why), "{shown}");
    story.host().stage.misfit = None;
    story.served(95_000);
    assert_eq!(story.shown(), "Ready, serving");
    story.host().stage.misfit = Some("it has other GPUs".to_owned());
    story.served(125_000);
    assert_eq!(story.host().reader.words.len(), 2, "it is told again another time");
}

#[test]
fn a_fault_that_the_log_does_not_tell_is_seen_by_the_check() {
    let mut story = served(&["A"]);
    story.host().at(20_000, |host| host.is_status(SERVER, ServerStatus::Fault));
    story.served(31_000);
    assert!(story.has_told("fault of 200: server 200 met a fatal GPU error"));
    assert!(story.shown().starts_with("Faulted"));
    assert_eq!(story.calls("set limits"), 0);
}

#[test]
fn a_server_that_was_killed_says_fault_for_a_moment() {
    let mut story = served(&["A"]);
    story.host().at(30_100, |host| host.is_status(SERVER, ServerStatus::Fault));
    story.host().at(30_300, |host| host.server_ends(SERVER, 9));
    story.served(40_000);
    assert!(!story.has_told("fatal GPU error"));
    assert_eq!(story.shown(), "Ready, serving");
}

#[test]
fn the_end_of_the_control_daemon_is_a_failure_with_its_words() {
    let mut story = served(&["A"]);
    story.host().at(5000, |host| host.end(None));
    let text = "the control daemon ended".to_owned();
    assert_eq!(story.serve(6000), Some(Err(Failure::Ended { text, refuses_multiuser: false })));
    let mut story = served(&["A"]);
    story.host().during("read GPUs", |host| host.end(None));
    assert!(matches!(story.serve(40_000), Some(Err(Failure::Ended { .. }))));
}

#[test]
fn the_next_act_reads_the_gpus_before_anything_else() {
    let mut story = served(&["A"]);
    story.break_off(|_| {});
    story.served(2000);
    let calls: Vec<String> = story.host().stage.calls.iter().map(|(_, call)| call.clone()).collect();
    assert_eq!(calls[0], "read GPUs");
    let mut story = Story::with_gpus(&["A"]);
    story.served(100);
    assert_eq!(story.calls("read GPUs"), 0, "its start has just read them");
}

#[test]
fn a_place_that_is_taken_while_limits_are_told_is_not_ready() {
    for during in ["set limits", "inspect"] {
        let mut story = Story::with_one_user(&["A"]);
        story.host().server_comes(9);
        story.host().client(1, 9, "A");
        story.host().during(during, |host| host.taken_by = Some(7));
        story.served(3000);
        assert!(
            story.shown().starts_with("Waiting, not serving: another control daemon (PID 7)"),
            "{during}"
        );
        assert!(
            !story.has_told("is ready") || story.host().reader.words == ["server 9 is ready"],
            "{during}"
        );
    }
    let mut story = Story::with_gpus(&["A"]);
    story.host().stage.nvml.insert("A".to_owned(), Ok([1].into()));
    story.host().stage.children_are_unknown = true;
    story.host().taken_by = Some(7);
    story.served(3000);
    assert_eq!(story.calls("set limits"), 0, "they would be told to somebody else");
    assert_ne!(PID, 7);
}

#[test]
fn one_that_could_not_be_reached_is_checked_at_once() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().stage.answers = Some(Failure::Unreachable("nobody listens".to_owned()));
    story.host().stage.nvml.insert("A".to_owned(), Ok([1].into()));
    story.host().stage.children_are_unknown = true;
    story.served(100);
    assert!(story.shown().starts_with(
        "Waiting, not serving: the directory of the control daemon was removed or replaced (nobody listens)"
    ));
    assert_eq!(story.times("inspect with limits"), [0]);
    // The story interrupts the act that serves the control daemon. The next act checks the control daemon at once. The act
    // sends no limits to a control daemon that can't be reached.
    story.break_off(|_| {});
    story.forget();
    story.served(200);
    assert_eq!((story.calls("set limits"), story.times("inspect with limits").len()), (0, 1));
}
