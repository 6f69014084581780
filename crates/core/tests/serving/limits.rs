//! The limits of a control daemon: the service puts them in force, the log reports them late or never, and other programs
//! change them.

use std::time::Duration;

use mps_core::mps::{Meaning, ServerStatus};
use mps_core::serve::{Ended, Failure};

use super::{SERVER, Setting, Story};

/// The control daemon has a server from an earlier run of the service.
fn with_server(story: &Story) {
    let mut host = story.host();
    host.defaults = Setting { percentage: 50, mib: [1024, 0, 0] };
    host.server_comes(9);
}

fn percentage(story: &Story, server: u32) -> u8 {
    story.host().servers[&server].setting.percentage
}

/// Returns the thread percentage of servers that start later, and of the server that the service has started.
fn percentages(story: &Story) -> (u8, u8) {
    let host = story.host();
    (host.defaults.percentage, host.servers[&SERVER].setting.percentage)
}

#[test]
fn a_server_starts_ahead_of_the_first_client_with_the_limits_of_the_order() {
    let mut story = Story::with_gpus(&["A", "B"]);
    story.wanted.gpus[1].memory_limit_mib = 2048;
    story.served(1000);
    assert_eq!(story.host().stage.steps, ["defaults", "linked", "prewarm", "limits", "ready"]);
    assert_eq!(story.shown(), "Ready, serving");
    assert_eq!(story.host().reader.shown.view.gpus["A"].thread_percentage, Some(50));
    let limits = |gpu: &str| story.host().reader.shown.view.gpus[gpu].memory_limit_mib;
    assert_eq!((limits("A"), limits("B")), (Some(1024), Some(2048)));
    assert_eq!(story.host().reader.shown.view.servers, [SERVER]);
    let told = ["server 200 is ready", "control daemon shared is ready"];
    assert_eq!(story.host().reader.words, told);
    assert!(story.has_done("watch 200"));
}

#[test]
fn clients_are_led_here_after_the_defaults_and_before_the_server() {
    let mut story = Story::with_gpus(&["A"]);
    let failure = Failure::Waiting("its directory is another one's".to_owned());
    story.host().stage.does_not_lead = Some(failure.clone());
    assert_eq!(story.serve(1000), Some(Err(failure)));
    assert_eq!(story.host().stage.steps, ["defaults"]);
    assert_eq!(story.calls("set limits and start"), 1);
    assert_eq!(story.shown(), "Starting, not serving");
}

#[test]
fn without_multi_user_mode_the_server_comes_with_the_first_client() {
    for prewarm in [true, false] {
        let mut story = if prewarm { Story::with_one_user(&["A"]) } else { Story::with_gpus(&["A"]) };
        story.wanted.prewarm = prewarm;
        story.served(1000);
        assert_eq!((story.shown().as_str(), story.calls("start server")), ("Ready, serving", 0));
        assert!(story.host().servers.is_empty());
        assert_eq!(story.host().reader.shown.view.gpus["A"].thread_percentage, Some(50));
    }
}

#[test]
fn a_server_that_runs_gets_other_limits_and_confirms_them() {
    let mut story = Story::with_gpus(&["A"]);
    with_server(&story);
    story.once(async |serving| serving.read_on().await);
    story.wanted.thread_percentage = 25;
    story.served(1000);
    assert_eq!((percentage(&story, 9), story.shown().as_str()), (25, "Ready, serving"));
    assert!(story.host().stage.steps.contains(&"live"));
    assert_eq!(story.calls("start server"), 0);
    assert!(story.has_done("watch 9"));
}

#[test]
fn a_server_with_the_right_limits_is_left_alone() {
    let mut story = Story::with_gpus(&["A"]);
    with_server(&story);
    // An earlier run of the service may have read the server's part of the log. The present run reads this part again.
    story.once(async |serving| serving.read_on().await);
    story.served(1000);
    assert_eq!((story.calls("set limits of 9"), story.shown().as_str()), (0, "Ready, serving"));
    assert_eq!(story.calls("set limits"), 1);
}

#[test]
fn memory_that_differs_is_set_again_though_the_percentage_is_right() {
    let mut story = Story::with_gpus(&["A"]);
    with_server(&story);
    story.once(async |serving| serving.read_on().await);
    story.wanted.gpus[0].memory_limit_mib = 512;
    story.served(1000);
    assert_eq!(story.calls("set limits of 9"), 1);
    assert_eq!(story.host().reader.shown.view.gpus["A"].memory_limit_mib, Some(512));
}

#[test]
fn a_server_that_writes_nothing_is_set_once_more_and_that_is_told() {
    let mut story = Story::with_gpus(&["A"]);
    with_server(&story);
    {
        let mut host = story.host();
        host.log_is_skipped();
        host.log_is_lost = true;
    }
    story.served(1990);
    assert_eq!((story.calls("set limits of 9"), story.shown().as_str()), (1, "Starting, not serving"));
    story.served(2100);
    assert_eq!((story.calls("set limits of 9"), story.shown().as_str()), (2, "Ready, serving"));
    assert!(story.has_told(
        "warning: server 9 wrote no limits to the log, so the service can check the server's memory limits \
         only in whole GiB; see if the file system of the log is full"
    ));
}

#[test]
fn a_server_that_keeps_other_limits_is_a_failure() {
    let mut story = Story::with_gpus(&["A"]);
    with_server(&story);
    story.once(async |serving| serving.read_on().await);
    story.wanted.gpus[0].memory_limit_mib = 512;
    // Another program changes the limits as soon as the service has set them.
    story.host().at(1, |host| host.says(Meaning::MemoryLimit { server: 9, ordinal: 0, bytes: 7 << 20 }));
    story.host().log_is_lost = true;
    let Some(Err(Failure::Failed(text))) = story.serve(5000) else { panic!("it does not serve") };
    assert_eq!(text, "server 9: device pinned memory limit 7 MiB is in force on device 0 instead of 512 MiB");
}

#[test]
fn a_server_that_is_about_to_come_is_waited_for() {
    let mut story = Story::with_gpus(&["A"]);
    with_server(&story);
    story.host().log_is_skipped();
    story.host().is_status(9, ServerStatus::Initializing);
    story.host().at(700, |host| host.is_status(9, ServerStatus::Active));
    story.served(690);
    assert_eq!(story.calls("set limits of 9"), 0);
    assert!(story.calls("inspect 9") > 5, "it is asked again and again");
    story.served(800);
    assert_eq!((story.calls("set limits of 9"), story.shown().as_str()), (1, "Ready, serving"));
}

#[test]
fn a_server_that_never_comes_is_a_failure() {
    let mut story = Story::with_gpus(&["A"]);
    with_server(&story);
    story.host().log_is_skipped();
    story.host().is_status(9, ServerStatus::Initializing);
    story.served(59_900);
    let Some(Err(Failure::Failed(text))) = story.serve(61_000) else { panic!("it does not serve") };
    assert_eq!(text, "no MPS server became ready within 60 s; its log ends here");
}

#[test]
fn a_server_with_a_fault_gets_its_limits_when_it_is_well() {
    let mut story = Story::with_gpus(&["A"]);
    with_server(&story);
    story.host().log_is_skipped();
    story.host().is_status(9, ServerStatus::Fault);
    story.served(1000);
    assert_eq!(story.calls("set limits of 9"), 0);
    assert!(story.shown().starts_with("Faulted, not serving: server 9 met a fatal GPU error"));
    story.host().at(2000, |host| host.is_status(9, ServerStatus::Active));
    story.served(4000);
    assert_eq!((story.calls("set limits of 9"), story.shown().as_str()), (1, "Ready, serving"));
}

#[test]
fn a_server_that_says_fault_for_a_moment_had_none() {
    let mut story = Story::with_gpus(&["A"]);
    with_server(&story);
    story.host().log_is_skipped();
    story.host().is_status(9, ServerStatus::Fault);
    story.host().at(100, |host| host.is_status(9, ServerStatus::Active));
    story.served(1000);
    assert_eq!((story.calls("set limits of 9"), story.shown().as_str()), (1, "Ready, serving"));
    assert!(!story.has_told("fatal GPU error"));
}

#[test]
fn a_server_that_has_gone_needs_no_limits() {
    let mut story = Story::with_one_user(&["A"]);
    with_server(&story);
    story.host().log_is_skipped();
    // The server ends just before the control daemon answers the question `inspect`. The log does not report the end.
    story.host().during("inspect", |host| _ = host.servers.remove(&9));
    story.served(1000);
    assert_eq!((story.calls("set limits of 9"), story.shown().as_str()), (0, "Ready, serving"));
}

#[test]
fn a_new_server_with_limits_of_somebody_else_is_corrected() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().at(100, |host| {
        host.is_changed_by_others(None, 99, 0);
        host.servers.get_mut(&SERVER).unwrap().setting.percentage = 99;
    });
    story.served(3000);
    assert!(story.has_told(
        "warning: server 200 started with wrong limits: active thread percentage 99.0 is in force instead \
         of 50; the service has corrected the limits"
    ));
    assert_eq!(percentages(&story), (50, 50));
    assert_eq!(story.shown(), "Ready, serving");
}

#[test]
fn the_first_server_gets_a_minute() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().server_comes_in = Duration::from_secs(59);
    story.served(59_500);
    assert_eq!(story.shown(), "Ready, serving");
    let mut story = Story::with_gpus(&["A"]);
    story.host().server_comes_in = Duration::MAX;
    let Some(Err(Failure::Failed(text))) = story.serve(61_000) else { panic!("it does not serve") };
    assert_eq!(text, "no MPS server became ready within 60 s; its log ends here");
}

#[test]
fn a_first_server_that_ends_at_once_says_why() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().starts_fail = true;
    let Some(Err(Failure::Failed(text))) = story.serve(1000) else { panic!("it does not serve") };
    assert_eq!(text, "server 200 exited with status 1 before it was ready; its log ends here");
}

/// The server ends when it is ready and has not yet written its limits to the log.
#[test]
fn a_first_server_that_ends_before_its_limits_are_confirmed_says_why() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().server_comes_in = Duration::MAX;
    story.host().at(50, |host| host.is_status(SERVER, ServerStatus::Active));
    story.host().at(200, |host| host.server_ends(SERVER, 1));
    let Some(Err(Failure::Failed(text))) = story.serve(300) else { panic!("it does not serve") };
    assert_eq!(text, "server 200 exited with status 1; its log ends here");
    assert_eq!(story.calls("set limits of 200"), 0);
}

/// A running server ends just before the control daemon gets the command with the server's limits.
#[test]
fn a_server_that_ends_before_it_gets_its_limits_is_replaced_at_once() {
    let mut story = Story::with_gpus(&["A"]);
    with_server(&story);
    story.host().log_is_skipped();
    // The first command sets the limits of servers that start later.
    story.host().during("set limits", |_| ());
    story.host().during("set limits", |host| host.server_ends(9, 1));
    story.served(1000);
    assert_eq!((story.shown().as_str(), story.calls("set limits of 9")), ("Ready, serving", 1));
    assert_ne!(story.host().reader.shown.view.servers, [9]);
    assert!(!story.has_told("wrote no limits"));
}

#[test]
fn a_server_is_found_though_its_log_can_not_be_written() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().log_is_lost = true;
    story.served(5000);
    assert_eq!(story.shown(), "Ready, serving");
    assert!(story.has_told("warning: server 200 wrote no limits to the log"));
    assert!(story.has_done("watch 200"));
}

#[test]
fn a_ready_line_of_a_tenant_is_no_server() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().server_comes_in = Duration::from_secs(2);
    story.host().at(100, |host| host.says(Meaning::ServerReady(666)));
    story.served(1000);
    assert_eq!(story.shown(), "Starting, not serving");
    story.served(8000);
    assert_eq!(story.shown(), "Ready, serving");
    assert!(!story.has_done("watch 666"));
}

#[test]
fn limits_that_others_have_changed_are_set_again_by_the_check() {
    let mut story = Story::with_gpus(&["A"]);
    story.served(1000);
    {
        let mut host = story.host();
        host.is_changed_by_others(None, 99, 0);
        host.is_changed_by_others(Some(SERVER), 98, 0);
    }
    story.forget();
    story.served(32_000);
    assert!(story.has_told(
        "warning: another program changed the limits for new servers of control daemon shared: \
         99 instead of 50; the service has \
         restored the limits"
    ));
    assert!(story.has_told(
        "warning: another program changed the limits of server 200: 98 instead of 50; the service has \
         restored the limits"
    ));
    assert_eq!(percentages(&story), (50, 50));
    assert_eq!(story.shown(), "Ready, serving");
}

#[test]
fn a_line_with_other_limits_brings_the_check_at_once() {
    let mut story = Story::with_gpus(&["A"]);
    story
        .host()
        .at(1000, |host| host.says(Meaning::MemoryLimit { server: SERVER, ordinal: 0, bytes: 1 << 20 }));
    story.served(1090);
    let reason = "server 200: device pinned memory limit 1 MiB is in force on device 0 instead of 1024 MiB";
    assert_eq!(story.host().reader.shown.view.gpus["A"].reason, reason);
    story.served(1200);
    assert!(
        story.has_told("another program changed the limits of server 200: device pinned memory limit 1 MiB")
    );
    assert_eq!(story.host().reader.shown.view.gpus["A"].reason, "");
}

#[test]
fn a_percentage_with_tenths_is_not_the_one_of_the_order() {
    let mut story = Story::with_gpus(&["A"]);
    story.host().at(1000, |host| host.says(Meaning::ThreadPercentage { server: SERVER, tenths: 505 }));
    story.served(1050);
    let reason = "server 200: active thread percentage 50.5 is in force instead of 50";
    assert_eq!(story.host().reader.shown.view.gpus["A"].reason, reason);
}

#[test]
fn a_gpu_that_enforces_no_limits_is_not_waited_for() {
    let mut story = Story::with_gpus(&["A", "0c:00.0"]);
    story.wanted.gpus[1].limits_enforced = false;
    story.served(1000);
    assert_eq!(story.shown(), "Ready, serving");
    let limit = |gpu: &str| story.host().reader.shown.view.gpus[gpu].memory_limit_mib;
    assert_eq!((limit("A"), limit("0c:00.0")), (Some(1024), None));
}

#[test]
fn one_that_retires_gets_no_limits() {
    let mut story = Story::with_gpus(&["A"]);
    story.served(1000);
    story.break_off(|wanted| {
        wanted.retiring = true;
        wanted.thread_percentage = 10;
    });
    story.host().client(1, SERVER, "A");
    story.forget();
    story.served(40_000);
    assert_eq!((story.calls("set limits"), percentage(&story, SERVER)), (0, 50));
    let shown = "Waiting, serving: this control daemon is no longer needed and ends when its clients have \
                 ended; `yunion-mpsctl apply --force` ends the clients";
    assert_eq!(story.shown(), shown);
    story.host().at(42_000, |host| {
        host.only_stay(&[]);
        host.says(Meaning::ClientLeft(1));
    });
    assert_eq!(story.serve(50_000), Some(Ok(Ended::Stopped)));
    assert_eq!(story.times("quit if idle (Unused)"), [42_450]);
}
