//! The takeover and the end of a control daemon, the count of its clients, and requests of administrators.

use mps_core::mps::ServerStatus;
use mps_core::serve::{Ended, Failure, Judged, Requested};
use mps_core::{Cause, Permit};

use super::{SERVER, Story};

fn with_clients(clients: &[u32]) -> Story {
    let mut story = Story::with_gpus(&["A"]);
    story.served(1000);
    story.forget();
    for pid in clients {
        story.host().client(*pid, SERVER, "A");
    }
    story
}

fn judged(story: &mut Story) -> Judged {
    story.once(async |serving| serving.judge().await)
}

fn ended(story: &mut Story, permit: Permit) -> bool {
    story.once(async move |serving| serving.end(permit).await.is_ok())
}

fn unused() -> Permit {
    Permit::unused(Some(0)).unwrap()
}

/// An administrator makes a request. Returns how serving has ended, or `None` if it goes on, and the answers to the
/// administrator.
fn asked(story: &mut Story, request: Requested) -> (Option<Ended>, Vec<Result<(), String>>) {
    story.host().asks(request);
    let ended = story.serve(20_000).map(Result::unwrap);
    (ended, std::mem::take(&mut story.host().stage.answered))
}

#[test]
fn clients_are_counted_by_the_control_daemon_first() {
    assert_eq!(judged(&mut with_clients(&[])), Judged::Idle);
    assert_eq!(
        judged(&mut with_clients(&[1])),
        Judged::Clients("the control daemon keeps running for its 1 client".to_owned())
    );
    assert_eq!(
        judged(&mut with_clients(&[1, 2])),
        Judged::Clients("the control daemon keeps running for its 2 clients".to_owned())
    );
}

#[test]
fn whoever_has_ended_is_judged_by_its_words() {
    let mut story = with_clients(&[1]);
    story.host().end(None);
    assert!(matches!(judged(&mut story), Judged::Ended(Failure::Ended { .. })));
    assert_eq!(story.calls("client PIDs"), 0);
}

#[test]
fn programs_that_keep_the_server_out_are_named() {
    let mut story = with_clients(&[]);
    story.host().stage.holders = "process 7 (python)".to_owned();
    assert_eq!(judged(&mut story), Judged::KeptOut("process 7 (python)".to_owned()));
    assert!(story.has_done("holders besides 200"));
    story.wanted.id = "0a:00.0-0".into();
    assert_eq!(judged(&mut story), Judged::Idle, "the servers take turns with them");
}

#[test]
fn a_client_that_comes_during_the_last_question_counts() {
    let mut story = with_clients(&[]);
    story.host().during("inspect", |host| host.client(1, SERVER, "A"));
    assert_eq!(
        judged(&mut story),
        Judged::Clients("the control daemon keeps running for its 1 client".to_owned())
    );
}

#[test]
fn the_list_of_another_control_daemon_is_not_taken_for_ours() {
    let mut story = with_clients(&[]);
    story.host().taken_by = Some(7);
    story.host().stage.nvml.insert("A".to_owned(), Ok([1].into()));
    assert_eq!(
        judged(&mut story),
        Judged::Clients("the control daemon keeps running for its 1 client".to_owned())
    );
    assert_eq!(story.calls("client PIDs"), 0);
    let mut story = with_clients(&[]);
    story.host().during("client PIDs", |host| host.taken_by = Some(7));
    story.host().stage.nvml.insert("A".to_owned(), Ok([1].into()));
    assert_eq!(
        judged(&mut story),
        Judged::Clients("the control daemon keeps running for its 1 client".to_owned())
    );
}

#[test]
fn whoever_has_no_servers_has_no_clients() {
    for (children, expected) in [
        (Some(false), Judged::Idle),
        (Some(true), Judged::Clients("the control daemon keeps running for its 2 clients".to_owned())),
        (None, Judged::Clients("the control daemon keeps running for its 2 clients".to_owned())),
    ] {
        let mut story = with_clients(&[]);
        story.host().stage.answers = Some(Failure::Silent("no answer".to_owned()));
        story.host().stage.children_are_unknown = children.is_none();
        if children == Some(false) {
            story.host().servers.clear();
        }
        story.host().stage.nvml.insert("A".to_owned(), Ok([1, 2].into()));
        story.host().stage.nvml.insert("B".to_owned(), Ok([2].into()));
        assert_eq!(judged(&mut story), expected, "{children:?}");
    }
}

#[test]
fn nobody_knows_where_nvml_says_nothing() {
    let unknown = "the control daemon keeps running, since its clients are not known: no answer; NVML hangs";
    for (there, expected) in
        [(vec![], unknown), (vec![1], "the control daemon keeps running for its 1 client")]
    {
        let mut story = with_clients(&[]);
        story.host().stage.answers = Some(Failure::Silent("no answer".to_owned()));
        story.host().stage.nvml.insert("A".to_owned(), Ok(there.into_iter().collect()));
        story.host().stage.nvml.insert("B".to_owned(), Err("NVML hangs".to_owned()));
        assert_eq!(judged(&mut story), Judged::Clients(expected.to_owned()));
    }
}

#[test]
fn an_empty_list_is_not_relied_on_after_a_fatal_error() {
    // Case 0: the log has reported the fatal GPU error. Case 1: the control daemon reports the error for a server that the
    // service knows. Case 2: the control daemon reports the error for another server. Case 3: the control daemon does not
    // answer the question about errors.
    for case in 0..4 {
        let mut story = with_clients(&[]);
        story.host().stage.nvml.insert("A".to_owned(), Ok([1].into()));
        match case {
            0 => story.host().says(mps_core::mps::Meaning::FaultHandling { server: SERVER }),
            1 => story.host().is_status(SERVER, ServerStatus::Fault),
            2 => story.host().unseen_server_faults(300),
            _ => {
                let failure = Failure::Silent("no answer".to_owned());
                story.host().stage.answers_to.insert("inspect", failure);
            }
        }
        assert_eq!(
            judged(&mut story),
            Judged::Clients("the control daemon keeps running for its 1 client".to_owned()),
            "{case}"
        );
    }
    let mut story = with_clients(&[]);
    story.host().says(mps_core::mps::Meaning::FaultHandling { server: SERVER });
    story.host().stage.nvml.insert("A".to_owned(), Err("NVML hangs".to_owned()));
    let why = "the control daemon keeps running, since its clients are not known: the control daemon lists \
               no client, but its list is not reliable after a fatal GPU error; NVML hangs";
    assert_eq!(judged(&mut story), Judged::Clients(why.to_owned()));
}

#[test]
fn a_faulted_server_that_nobody_has_seen_come_is_asked_about_too() {
    let mut story = Story::with_one_user(&["A"]);
    story.served(1000);
    story.host().unseen_server_faults(300);
    story.host().stage.nvml.insert("A".to_owned(), Ok([1].into()));
    assert_eq!(
        judged(&mut story),
        Judged::Clients("the control daemon keeps running for its 1 client".to_owned())
    );
}

#[test]
fn an_unused_one_is_asked_to_end_before_it_gets_a_signal() {
    let mut story = with_clients(&[]);
    assert!(ended(&mut story, unused()));
    assert_eq!((story.calls("quit if idle (Unused)"), story.calls("signal")), (1, 0));
    assert!(story.has_done("continue 200"), "a stopped one answers nothing");
    let mut story = with_clients(&[]);
    story.host().stage.stays = true;
    assert!(ended(&mut story, unused()));
    assert_eq!(story.calls("signal (Unused)"), 1);
    let mut story = with_clients(&[]);
    (story.host().stage.stays, story.host().stage.survives) = (true, true);
    assert!(!ended(&mut story, unused()));
}

#[test]
fn an_unused_one_lives_on_if_a_client_comes_in_between() {
    let mut story = with_clients(&[]);
    story.host().during("quit if idle", |host| host.client(1, SERVER, "A"));
    assert!(!ended(&mut story, unused()));
    assert_eq!(story.calls("signal"), 0);
}

#[test]
fn a_stop_ends_it_with_its_clients() {
    let forced = Permit::for_a_change(true, Some(1)).unwrap();
    let mut story = with_clients(&[1]);
    assert!(ended(&mut story, forced));
    assert_eq!((story.calls("quit (Forced)"), story.calls("signal")), (1, 0));
    let mut story = with_clients(&[1]);
    story.host().stage.stays = true;
    assert!(ended(&mut story, forced));
    assert_eq!((story.calls("quit (Forced)"), story.calls("signal (Forced)")), (1, 1));
    assert_eq!(forced.cause(), Cause::Forced);
}

#[test]
fn a_request_without_a_change_is_done_at_once() {
    let mut story = with_clients(&[1]);
    assert_eq!(asked(&mut story, Requested::Apply { force: true }), (None, vec![Ok(())]));
    assert_eq!(story.calls("quit"), 0);
}

#[test]
fn a_change_waits_for_clients_unless_it_is_forced() {
    let misfit = |clients: &[u32]| {
        let mut story = with_clients(clients);
        story.break_off(|_| {});
        story.host().stage.misfit = Some("it has other GPUs".to_owned());
        story
    };
    let mut story = misfit(&[1, 2]);
    let refused = "it has other GPUs; the service ends the control daemon only after its clients \
                   have ended (2 clients); \
                   `yunion-mpsctl apply --force` ends the clients"
        .to_owned();
    assert_eq!(asked(&mut story, Requested::Apply { force: false }), (None, vec![Err(refused)]));
    assert_eq!(story.calls("quit"), 0);
    let mut story = misfit(&[1, 2]);
    assert_eq!(asked(&mut story, Requested::Apply { force: true }), (Some(Ended::Stopped), vec![Ok(())]));
    assert_eq!(story.calls("quit (Forced)"), 1);
    // The service can't find out if the control daemon has clients, so it refuses a change without `--force`.
    let mut story = misfit(&[]);
    story.host().stage.answers_to.insert("client PIDs", Failure::NotUnderstood("other words".to_owned()));
    story.host().stage.nvml.insert("A".to_owned(), Err("NVML hangs".to_owned()));
    let refused = "it has other GPUs; the service ends the control daemon only after its clients \
                   have ended (not known: other words; NVML \
                   hangs); `yunion-mpsctl apply --force` ends the clients"
        .to_owned();
    assert_eq!(asked(&mut story, Requested::Apply { force: false }), (None, vec![Err(refused)]));
}

#[test]
fn a_change_that_a_client_has_come_in_between_of_is_refused() {
    let mut story = with_clients(&[]);
    story.served(1500);
    story.break_off(|_| {});
    story.host().stage.misfit = Some("it has other GPUs".to_owned());
    story.host().at(1600, |host| host.client(1, SERVER, "A"));
    story.host().asks(Requested::Apply { force: false });
    story.served(1800);
    assert_eq!(
        story.host().stage.answered,
        [Err("a client connected while the service counted the clients".to_owned())]
    );
}

#[test]
fn a_check_that_is_asked_for_comes_at_once() {
    let mut story = with_clients(&[]);
    story.host().at(5000, |host| host.asks(Requested::Check));
    story.served(20_000);
    assert_eq!(story.times("keep links"), [5000]);
}

#[test]
fn the_server_is_restarted_if_it_has_no_clients() {
    let mut story = with_clients(&[]);
    assert_eq!(asked(&mut story, Requested::RestartServer), (None, vec![Ok(())]));
    assert!(story.has_done("shut down idle server 200 (Unused)"));
    assert_eq!(
        (story.shown().as_str(), story.host().reader.shown.view.servers.clone()),
        ("Ready, serving", vec![201])
    );
    let mut story = with_clients(&[1]);
    let refused = vec![Err("the server can't be replaced while the control daemon has 1 client; \
                            yunion-mpsctl clients lists the clients"
        .to_owned())];
    assert_eq!(asked(&mut story, Requested::RestartServer), (None, refused.clone()));
    assert_eq!(story.calls("shut down"), 0);
    // The client ends after the first count. Links still lead new programs to the control daemon then, so its server must not
    // end.
    let mut story = with_clients(&[1]);
    story.host().during("client PIDs", |_| ());
    story.host().during("client PIDs", |host| host.only_stay(&[]));
    assert_eq!(asked(&mut story, Requested::RestartServer), (None, refused));
    assert_eq!(story.calls("shut down"), 0);
}

#[test]
fn a_server_that_stays_has_a_client_that_came_in_between() {
    let mut story = with_clients(&[]);
    story.host().stage.stays = true;
    let refused = vec![Err(
        "the server can't be replaced, since a client connected meanwhile; try again when no client is \
         connected"
            .to_owned(),
    )];
    story.host().asks(Requested::RestartServer);
    story.served(5150);
    assert!(story.host().stage.answered.is_empty());
    story.served(5450);
    assert_eq!(story.host().stage.answered, refused);
    let looks = story.times("inspect");
    assert!(looks.len() > 50, "it is looked at again and again: {looks:?}");
}

#[test]
fn a_restart_that_cannot_be_told_is_refused_with_the_words() {
    let mut story = with_clients(&[]);
    story.host().stage.answers_to.insert("shut down idle server", Failure::Failed("it says no".to_owned()));
    let refused = vec![Err("it says no".to_owned())];
    assert_eq!(asked(&mut story, Requested::RestartServer), (None, refused));
}

#[test]
fn one_that_answers_is_taken_over_with_what_its_log_says() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().defaults.percentage = 50;
    story.host().server_comes(9);
    assert_eq!(story.once(async |serving| serving.take_over().await), Ok(true));
    let told = [
        "server 9 is ready",
        "control daemon shared (PID 100) taken over from the previous run of the service",
    ];
    assert_eq!(story.host().reader.words, told);
    assert_eq!(story.host().stage.steps, ["taken-over"]);
    assert!(story.has_done("continue"), "somebody may have stopped it");
    story.once(async |serving| serving.leave());
    assert!(story.has_done("keep the state file, stays: true"));
}

#[test]
fn one_in_a_place_of_another_is_not_taken_over() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().taken_by = Some(7);
    let taken_over = story.once(async |serving| serving.take_over().await);
    let text =
        "another control daemon listens in the directory of the control daemon with PID 100".to_owned();
    assert_eq!(taken_over, Err(Failure::Waiting(text)));
    let mut story = Story::with_gpus(&["A"]);
    story.host().end(None);
    assert_eq!(story.once(async |serving| serving.take_over().await), Ok(false));
}

#[test]
fn one_that_does_not_answer_is_taken_over_for_its_clients() {
    for failure in [Failure::Silent("no answer".to_owned()), Failure::Unreachable("no answer".to_owned())] {
        let mut story = Story::with_gpus(&["A"]);
        story.host().stage.answers = Some(failure);
        story.host().stage.nvml.insert("A".to_owned(), Ok([1].into()));
        story.host().stage.children_are_unknown = true;
        assert_eq!(story.once(async |serving| serving.take_over().await), Ok(true));
        story.served(10);
        assert!(story.shown().starts_with("Waiting, not serving: "), "{}", story.shown());
        assert_eq!(story.calls("set limits"), 0);
    }
}

#[test]
fn one_that_does_not_listen_yet_is_waited_for() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().has_no_directory = true;
    story.host().at(9000, |host| host.has_no_directory = false);
    assert_eq!(story.once(async |serving| serving.listens().await), Ok(()));
    assert_eq!(story.host().now.as_millis(), 9000);
    let mut story = Story::with_gpus(&["A"]);
    story.host().has_no_directory = true;
    let text = "the control daemon does not listen 10 s after its start; its log ends here".to_owned();
    assert_eq!(story.once(async |serving| serving.listens().await), Err(Failure::Failed(text)));
    assert_eq!(story.host().now.as_millis(), 10_000);
    let mut story = Story::with_gpus(&["A"]);
    (story.host().has_no_directory, story.host().refuses_multiuser) = (true, true);
    story.host().at(20, |host| host.end(None));
    let ended = story.once(async |serving| serving.listens().await);
    assert!(matches!(ended, Err(Failure::Ended { refuses_multiuser: true, .. })), "{ended:?}");
}
