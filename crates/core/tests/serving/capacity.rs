//! Full GPUs: when the service counts clients, and what it shows and reports.

use mps_core::mps::Meaning;
use mps_core::serve::{Ended, Failure};

use super::{SERVER, Story};

const REFUSED: Meaning = Meaning::ClientRefused { server: SERVER, capacity: 48 };

/// At this time, in milliseconds, clients come to a GPU, and the log reports them.
fn come(story: &Story, at: u64, gpu: &'static str, pids: &'static [u32]) {
    story.host().at(at, move |host| {
        for pid in pids {
            host.client(*pid, SERVER, gpu);
            host.says(Meaning::ClientAdmitted(*pid));
        }
    });
}

/// At this time, in milliseconds, a client ends, and the log reports its end.
fn leaves(story: &Story, at: u64, pid: u32) {
    story.host().at(at, move |host| host.client_leaves(pid));
}

fn full(story: &Story, gpu: &str) -> String {
    story.host().reader.shown.view.gpus[gpu].full.clone()
}

#[test]
fn a_gpu_is_full_when_the_check_finds_as_many_clients_as_it_can_hold() {
    let mut story = Story::with_gpus(&["A", "B"]);
    come(&story, 1000, "A", &[1, 2]);
    come(&story, 1000, "B", &[3]);
    story.served(9000);
    assert_eq!((story.calls("clients 200"), full(&story, "A").as_str()), (0, ""));
    // If a control daemon has clients, its health check counts the clients.
    story.served(12_000);
    assert_eq!(
        full(&story, "A"),
        "full: all 2 places for clients are taken; the next client gets CUDA error 46"
    );
    assert_eq!(full(&story, "B"), "");
    assert!(story.has_told("GPU 0a:00.0 is full: all 2 places for clients are taken"));
}

#[test]
fn a_full_gpu_is_counted_again_until_it_has_a_place() {
    let mut story = Story::with_gpus(&["A"]);
    come(&story, 1000, "A", &[1, 2]);
    // A client ends without a line in the log.
    story.host().at(17_000, |host| host.only_stay(&[1]));
    story.served(40_000);
    let counts = story.times("clients 200");
    assert_eq!(counts[..3].iter().map(|at| at - counts[0]).collect::<Vec<_>>(), [0, 5000, 10_000]);
    assert!(story.has_told("GPU 0a:00.0 is no longer full: new clients can connect"));
    assert_eq!(full(&story, "A"), "");
}

#[test]
fn a_full_gpu_is_counted_again_after_a_question_without_an_answer() {
    let mut story = Story::with_gpus(&["A"]);
    come(&story, 1000, "A", &[1, 2]);
    story.served(13_000);
    let counted = u64::try_from(story.times("clients 200")[0]).unwrap();
    story.host().at(counted + 4000, |host| {
        host.only_stay(&[1]);
        host.stage.answers_to.insert("clients", Failure::Silent("no answer".to_owned()));
    });
    story.host().at(counted + 6000, |host| host.stage.answers_to.clear());
    assert_eq!(story.serve(counted + 8000), Some(Ok(Ended::Again)), "the next check has an answer");
    let checked = story.host().now.as_millis();
    assert_eq!(checked, u128::from(counted + 6000), "a second after the question without an answer");
    story.served(counted + 10_500);
    assert_eq!(full(&story, "A"), "");
}

#[test]
fn the_end_of_a_client_has_the_others_counted_where_that_matters() {
    let mut story = Story::with_gpus(&["A"]);
    come(&story, 1000, "A", &[1]);
    leaves(&story, 2000, 1);
    story.served(5000);
    assert_eq!(story.calls("clients "), 0, "the GPU was not full");
    let mut story = Story::with_gpus(&["A"]);
    come(&story, 1000, "A", &[1, 2]);
    leaves(&story, 12_000, 1);
    story.served(12_300);
    assert_eq!(story.times("clients 200").last(), Some(&12_200));
    assert!(story.has_told("is no longer full: new clients can connect"));
}

#[test]
fn the_end_of_a_server_has_the_clients_counted_too() {
    let mut story = Story::with_gpus(&["A"]);
    come(&story, 1000, "A", &[1, 2]);
    story.host().at(12_000, |host| {
        host.log_is_lost = true;
        host.server_ends(SERVER, 1);
        host.log_is_lost = false;
    });
    story.served(12_500);
    assert!(story.has_told("GPU 0a:00.0 is no longer full: new clients can connect"));
}

#[test]
fn a_refusal_is_told_once_and_believed_until_somebody_leaves() {
    let mut story = Story::with_gpus(&["A"]);
    come(&story, 1000, "A", &[1]);
    story.host().at(2000, |host| {
        host.says(REFUSED);
        host.says(REFUSED);
    });
    story.served(3000);
    let told = "warning: server 200 refused a client: its limit is 48 clients";
    assert_eq!(story.host().reader.words.iter().filter(|text| *text == told).count(), 1);
    assert!(full(&story, "A").starts_with("full: all 48 places"), "at once");
    story.served(13_500);
    assert!(story.calls("clients 200") >= 3, "it is counted meanwhile, and nobody has left");
    assert!(full(&story, "A").starts_with("full: all 48 places"));
    story.host().at(14_000, |host| host.says(Meaning::ClientLeft(9)));
    story.served(14_300);
    assert_eq!(full(&story, "A"), "");
}

#[test]
fn a_refusal_is_not_believed_where_fewer_clients_are_left() {
    let mut story = Story::with_gpus(&["A"]);
    come(&story, 1000, "A", &[1]);
    story.host().at(2000, |host| {
        host.client(2, SERVER, "A");
        host.client(3, SERVER, "A");
        host.says(REFUSED);
    });
    story.host().at(3000, |host| host.only_stay(&[1]));
    story.served(6000);
    assert!(full(&story, "A").contains("48"));
    story.served(8000);
    assert_eq!(full(&story, "A"), "");
    // Later the log reports another refusal, again with 48 places. Now both places of the GPU are taken, so the service shows 2
    // places, and not the 48 places of the log.
    come(&story, 8100, "A", &[2]);
    story.host().at(8100, |host| host.says(REFUSED));
    story.served(25_000);
    assert!(!full(&story, "A").contains("48"), "{}", full(&story, "A"));
    assert_eq!(
        full(&story, "A"),
        "full: all 2 places for clients are taken; the next client gets CUDA error 46"
    );
}

#[test]
fn a_refusal_without_any_client_is_somebody_elses_line() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().at(2000, |host| host.says(REFUSED));
    story.served(3000);
    assert_eq!((story.calls("clients 200"), full(&story, "A").as_str()), (1, ""));
}

#[test]
fn nobody_knows_on_which_of_several_gpus_a_client_was_refused() {
    let mut story = Story::with_gpus(&["A", "B"]);
    come(&story, 1000, "A", &[1]);
    story.host().at(2000, |host| host.says(REFUSED));
    story.served(3000);
    assert_eq!(story.calls("clients 200"), 1);
    assert_eq!((full(&story, "A").as_str(), full(&story, "B").as_str()), ("", ""));
}

#[test]
fn before_volta_the_clients_are_counted_as_they_come_and_go() {
    let mut story = Story::with_gpus(&["A", "B"]);
    story.wanted.gpus[0].clients_listed = false;
    let unlisted = |story: &Story, gpu: &str| story.host().reader.shown.view.gpus[gpu].unlisted_clients;
    story.served(500);
    assert_eq!(unlisted(&story, "A"), None, "nobody has counted yet");
    story.host().at(1000, |host| {
        // A process with two connections counts as one client, and takes two places.
        host.client(1, SERVER, "A");
        host.client(1, SERVER, "A");
        host.says(Meaning::ClientAdmitted(1));
    });
    story.served(1100);
    assert_eq!(story.calls("clients"), 0, "it is listed a moment later");
    story.served(1300);
    assert_eq!(story.calls("clients 200"), 1);
    assert_eq!((unlisted(&story, "A"), unlisted(&story, "B")), (Some(1), None));
    assert!(full(&story, "A").starts_with("full: all 2"), "connections have places, and not processes");
    leaves(&story, 2000, 1);
    story.served(2300);
    assert_eq!(unlisted(&story, "A"), Some(0));
    // NVML does not list clients on this GPU, so each health check asks the control daemon for their number.
    story.forget();
    story.served(62_400);
    assert!(story.calls("clients") > 0);
}

#[test]
fn before_volta_whoever_leaves_is_counted_though_no_gpu_was_full() {
    let mut story = Story::with_gpus(&["A"]);
    story.wanted.gpus[0].clients_listed = false;
    story.host().at(1000, |host| {
        host.client(1, SERVER, "A");
        host.says(Meaning::ClientAdmitted(1));
    });
    story.served(1300);
    let unlisted = |story: &Story| story.host().reader.shown.view.gpus["A"].unlisted_clients;
    assert_eq!((unlisted(&story), full(&story, "A").as_str()), (Some(1), ""));
    leaves(&story, 2000, 1);
    story.served(2300);
    assert_eq!(unlisted(&story), Some(0));
}

#[test]
fn whoever_cannot_say_its_clients_is_the_health_checks_business() {
    let mut story = Story::with_gpus(&["A"]);
    come(&story, 1000, "A", &[1, 2]);
    let failure = Failure::NotUnderstood("other words".to_owned());
    story.host().stage.answers_to.insert("clients", failure);
    story.served(12_000);
    assert_eq!((full(&story, "A").as_str(), story.shown().as_str()), ("", "Ready, serving"));
    story.host().stage.answers_to.insert("clients", Failure::Silent("no answer".to_owned()));
    assert_eq!(
        story.serve(40_000),
        Some(Ok(Ended::Again)),
        "silence is a miss, and the next check has an answer"
    );
    assert!(story.has_told("warning: no answer"));
}
