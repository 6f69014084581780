//! GPUs that a control daemon can't use, compute modes, and programs that use a GPU without MPS.

use std::time::Duration;

use mps_core::serve::{CONFIRM_AFTER, Failure};
use mps_core::terms::GpuProcess;

use super::{SERVER, Story};

fn left_out(story: &Story, gpu: &str) -> String {
    story.host().reader.shown.view.gpus[gpu].left_out.clone()
}

fn served(gpus: &[&str]) -> Story {
    let mut story = Story::with_gpus(gpus);
    story.served(1000);
    story.forget();
    story
}

/// At this time, in milliseconds, a program without MPS starts on this GPU.
fn program(story: &Story, at: u64, gpu: &'static str, pid: u32) {
    story.host().at(at, move |host| {
        host.process(gpu, GpuProcess { pid, memory_mib: None, via_mps: false });
    });
}

fn bypasses(story: &Story, gpu: &str) -> (Vec<u32>, bool) {
    let host = story.host();
    let found = host.stage.bypasses.get(gpu).cloned().unwrap_or_default();
    let is_kept_out = host.reader.shown.view.gpus.get(gpu).is_some_and(|gpu| gpu.server_kept_out);
    (found.into_iter().map(|process| process.pid).collect(), is_kept_out)
}

#[test]
fn a_gpu_that_is_lost_is_told_once_and_asked_by_itself() {
    let mut story = served(&["A", "B"]);
    story.host().stage.lost.insert("B".to_owned(), "it is lost".to_owned());
    story.served(65_000);
    assert_eq!(story.host().reader.words, ["unreachable: GPU 0b:00.0: it is lost"]);
    assert_eq!((left_out(&story, "A").as_str(), left_out(&story, "B").as_str()), ("", "it is lost"));
    assert_eq!(story.times("read GPUs, each by itself"), [60_150], "another one must not wait for it");
    story.host().stage.lost.clear();
    story.served(95_000);
    assert_eq!(story.host().reader.words[1..], ["GPU 0b:00.0 can be reached again"]);
    assert_eq!(left_out(&story, "B"), "");
}

#[test]
fn a_gpu_in_other_hands_is_left_out_until_it_is_free() {
    let mut story = served(&["A", "B"]);
    story.break_off(|wanted| wanted.held = [("B".to_owned(), "C".into())].into());
    story.served(2000);
    assert_eq!(left_out(&story, "B"), "control daemon C still has the GPU");
    story.break_off(|wanted| wanted.held.clear());
    story.served(3000);
    let told = [
        "GPU 0b:00.0: control daemon C still has the GPU",
        "GPU 0b:00.0 is free: control daemon C has released the GPU",
    ];
    let of_gpu: Vec<String> =
        story.host().reader.words.iter().filter(|text| text.starts_with("GPU 0b:00.0")).cloned().collect();
    assert_eq!(of_gpu, told);
}

#[test]
fn a_mode_that_others_have_changed_is_set_again() {
    let mut story = served(&["A", "B"]);
    story.host().with_our_mode.remove("B");
    story.served(31_000);
    assert_eq!(story.times("take the mode of"), [30_150]);
    let told = "warning: another program changed the compute mode of GPU 0b:00.0; the service has set \
                EXCLUSIVE_PROCESS again";
    assert_eq!(story.host().reader.words, [told]);
    {
        let mut host = story.host();
        host.with_our_mode.remove("A");
        host.stage.refuses.insert("A".to_owned(), "NVML says no".to_owned());
    }
    story.served(61_000);
    assert_eq!(
        story.host().reader.words[1..],
        ["warning: the service can't correct the compute mode of GPU 0a:00.0: NVML says no"]
    );
    assert_eq!(left_out(&story, "A"), "", "it serves");
}

#[test]
fn modes_that_are_not_ours_to_set_are_left_as_they_are() {
    let mut story = Story::with_gpus(&["A"]);
    story.wanted.sets_modes = false;
    story.host().with_our_mode.remove("A");
    story.served(65_000);
    assert_eq!(story.calls("take the mode"), 0);
    // The service does not set the compute mode of a lost GPU before the GPU is back.
    let mut story = served(&["A", "B"]);
    {
        let mut host = story.host();
        host.with_our_mode.remove("A");
        host.stage.lost.insert("A".to_owned(), "it is lost".to_owned());
    }
    story.served(65_000);
    assert_eq!(story.calls("take the mode"), 0);
}

#[test]
fn a_program_without_mps_is_shown_when_it_was_seen_twice() {
    let mut story = served(&["A"]);
    story.host().stage.servers_are_kept_out = true;
    program(&story, 20_000, "A", 7);
    story.served(31_000);
    assert_eq!(bypasses(&story, "A"), (vec![], false));
    story.served(31_200);
    assert_eq!(bypasses(&story, "A"), (vec![7], true), "the server is not on the GPU");
    let looks = story.times("client PIDs");
    assert_eq!(looks[looks.len() - 1] - looks[looks.len() - 2], CONFIRM_AFTER.as_millis());
    story.host().stage.processes.clear();
    story.served(61_000);
    assert_eq!(bypasses(&story, "A"), (vec![], false));
}

#[test]
fn a_server_on_the_gpu_is_not_kept_out() {
    let mut story = served(&["A"]);
    program(&story, 20_000, "A", SERVER);
    program(&story, 20_000, "A", 7);
    story.served(32_000);
    assert_eq!(bypasses(&story, "A"), (vec![7], false));
    // In compute mode DEFAULT every program may open the GPU, so a program without MPS does not prevent the start of a server.
    let mut story = served(&["A"]);
    story.break_off(|wanted| wanted.sets_modes = false);
    story.host().with_our_mode.remove("A");
    program(&story, 20_000, "A", 7);
    story.served(35_000);
    assert_eq!(bypasses(&story, "A"), (vec![7], false));
}

/// After a reload that lets the service set compute modes, the service sets the modes without a restart of the control daemon.
/// The service must not report that another program has changed a mode that the service had never set.
#[test]
fn a_mode_that_a_reload_wants_was_changed_by_nobody() {
    let mut story = Story::with_gpus(&["A"]);
    story.wanted.sets_modes = false;
    story.host().with_our_mode.remove("A");
    story.served(40_000);
    story.forget();
    story.break_off(|wanted| wanted.sets_modes = true);
    story.served(80_000);
    assert_eq!(story.times("take the mode of").len(), 1);
    let told = "warning: another program changed the compute mode of GPU 0a:00.0; the service has set \
                EXCLUSIVE_PROCESS again";
    let has_told = |story: &Story| story.host().reader.words.contains(&told.to_owned());
    assert!(!has_told(&story), "{:?}", story.host().reader.words);
    story.host().with_our_mode.remove("A");
    story.served(120_000);
    assert!(has_told(&story), "{:?}", story.host().reader.words);
}

/// If control daemons take turns on the GPU, a program without MPS takes turns with their servers. So the service reports the
/// program, but the program does not prevent the start of a server.
#[test]
fn no_server_is_kept_out_where_control_daemons_take_turns() {
    let mut story = served(&["A"]);
    story.break_off(|wanted| {
        (wanted.id, wanted.guard_period) = ("0a:00.0-0".into(), Some(Duration::from_secs(2)));
    });
    program(&story, 20_000, "A", 7);
    story.served(24_000);
    assert_eq!(bypasses(&story, "A"), (vec![7], false), "it is looked for every two seconds");
    story.break_off(|wanted| wanted.id = "0a:00.0-0".into());
    story.host().with_our_mode.remove("A");
    story.served(65_000);
    let told =
        "warning: another program changed the compute mode of GPU 0a:00.0; the service has set DEFAULT again";
    assert!(story.host().reader.words.contains(&told.to_owned()), "{:?}", story.host().reader.words);
}

/// An error of NVML does not mean that no process uses the GPU.
#[test]
fn programs_without_mps_stay_known_while_nvml_lists_nobody() {
    let mut story = served(&["A"]);
    program(&story, 1000, "A", 7);
    story.served(40_000);
    assert_eq!(bypasses(&story, "A").0, [7]);
    story.host().stage.unlisted.insert("A".to_owned(), "an internal driver error".to_owned());
    story.host().stage.processes.clear();
    program(&story, 40_000, "A", 8);
    story.served(80_000);
    assert_eq!(bypasses(&story, "A").0, [7]);
    assert_eq!(left_out(&story, "A"), "");
    story.host().stage.unlisted.clear();
    story.served(120_000);
    assert_eq!(bypasses(&story, "A").0, [8]);
}

#[test]
fn a_server_that_is_ready_has_the_bypasses_looked_at() {
    let mut story = served(&["A"]);
    story.host().stage.servers_are_kept_out = true;
    program(&story, 1500, "A", 7);
    story.host().at(2000, |host| host.server_ends(SERVER, 1));
    story.served(4000);
    assert_eq!(bypasses(&story, "A"), (vec![7], true));
}

#[test]
fn clients_that_the_control_daemon_lists_are_no_bypasses() {
    let mut story = served(&["A"]);
    story.host().at(20_000, |host| {
        host.client(7, SERVER, "A");
    });
    story.served(45_000);
    assert_eq!(bypasses(&story, "A"), (vec![], false));
    assert!(story.has_done("remember {7}"), "it is known by its name when it has to be told of");
    // NVML lists a process as an MPS client, but the control daemon does not know it. So the process is a client of another
    // control daemon.
    story.host().only_stay(&[]);
    story.host().process("A", GpuProcess { pid: 7, memory_mib: None, via_mps: true });
    story.served(60_000);
    assert_eq!(bypasses(&story, "A"), (vec![7], false));
}

#[test]
fn nobody_is_asked_for_clients_where_servers_are_alone() {
    let mut story = served(&["A"]);
    program(&story, 20_000, "A", SERVER);
    story.served(65_000);
    assert_eq!(story.calls("client PIDs"), 0);
}

#[test]
fn the_last_result_stays_where_clients_are_not_listed() {
    let mut story = served(&["A"]);
    story.host().stage.servers_are_kept_out = true;
    program(&story, 20_000, "A", 7);
    story.served(32_000);
    story.host().stage.answers_to.insert("client PIDs", Failure::NotUnderstood("other words".to_owned()));
    program(&story, 40_000, "A", 8);
    story.served(65_000);
    assert_eq!(bypasses(&story, "A"), (vec![7], true));
}

#[test]
fn a_faulted_server_does_not_list_its_clients_so_nobody_is_a_bypass() {
    use mps_core::mps::ServerStatus;
    let mut story = served(&["A"]);
    story.host().at(20_000, |host| {
        host.process("A", GpuProcess { pid: 7, memory_mib: None, via_mps: true });
    });
    // The server meets a fatal error between the service's question for the server's status and its question for the clients.
    story.host().during("client PIDs", |host| {
        host.is_status(SERVER, ServerStatus::Fault);
    });
    story.served(33_000);
    assert_eq!(bypasses(&story, "A"), (vec![], false));
}

#[test]
fn nobody_is_called_a_bypass_while_the_control_daemon_does_not_say_how_it_is() {
    let mut story = served(&["A"]);
    story.host().stage.nvml.insert("A".to_owned(), Ok([1].into()));
    program(&story, 20_000, "A", 7);
    story.host().at(20_000, |host| {
        host.stage.answers_to.insert("inspect", Failure::Silent("no answer".to_owned()));
    });
    story.served(36_000);
    assert!(story.calls("read GPUs") > 4, "it was checked");
    assert_eq!(bypasses(&story, "A"), (vec![], false));
}

#[test]
fn a_gpu_of_another_control_daemon_has_no_bypasses_of_ours() {
    let mut story = Story::with_gpus(&["A"]);
    story.break_off(|wanted| wanted.gpus.push(super::wanted_gpu("B")));
    program(&story, 100, "B", 7);
    story.served(65_000);
    assert_eq!(bypasses(&story, "B"), (vec![], false));
    let reason = "the control daemon serves this GPU only after its next restart";
    assert_eq!(story.host().reader.shown.view.gpus["B"].reason, reason);
}
