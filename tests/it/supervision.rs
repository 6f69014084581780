//! Tests of failures of a control daemon, and of the service itself, while GPUs are served.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use common::host::socket::listener;

use crate::support::host::{
    Host, alive, assert_has, binaries, control_daemon, control_pid, daemon, process_state, signal_pid,
    start_time, text,
};
use crate::support::skip::{root_or_skip, skip};
use crate::support::topology::{Topology, in_both_topologies};
use crate::support::wait::{DEADLINE, wait_for};

in_both_topologies! {
    a_zombie_is_not_taken_over,
    a_foreign_control_daemon_with_a_client_is_left_alone,
    an_idle_foreign_control_daemon_is_replaced,
    a_stop_spares_a_foreign_control_daemon,
    a_control_daemon_whose_place_was_taken_is_left_to_its_clients,
    an_idle_control_daemon_without_its_directory_is_replaced_with_a_word,
    another_control_daemon_in_the_pipe_directory_takes_no_clients,
    a_second_daemon_by_hand_ends_nobody_s_work;
    soak:
    without_inotify_the_service_looks_once_a_second,
    a_gpu_that_hangs_keeps_nobody_from_the_end_of_a_control_daemon,
    a_control_daemon_that_does_not_quit_is_terminated,
    a_stopped_control_daemon_is_continued_to_quit,
    a_control_daemon_that_is_not_understood_is_not_restarted,
    one_nvml_error_at_a_restart_ends_nothing,
    an_nvml_error_that_lasts_opens_no_gpu,
    a_status_is_of_one_moment,
}

/// The service replaces a control daemon that has died. Meanwhile it lists the slices as unhealthy: an empty list would make
/// Cloudpods delete them.
#[test]
fn a_killed_control_daemon_comes_back() {
    let mut host = Host::serving("tesla-p40");
    let before = host.wait_for_state("ready");
    // With this fault no control daemon can start. So the test surely sees the time without a control daemon.
    host.plant("mps/fault/start-exits", "");
    signal_pid(control_pid(&before), Signal::KILL);
    wait_for("devices that are not healthy", || {
        let devices = host.list();
        assert_eq!(devices.len(), 4);
        devices.iter().all(|device| device["healthy"] == false).then_some(())
    });
    let status = host.wait_for_state("failed");
    let reason = control_daemon(&status)["reason"].as_str().unwrap();
    assert!(reason.contains("the control daemon ended"), "{reason}");
    // Without a control daemon, the service does not restore the compute mode. Otherwise a program without MPS could open the
    // GPU and keep the next server out.
    assert_eq!(host.compute_mode(0), "Exclusive_Process");

    host.clear("mps/fault/start-exits");
    let after = wait_for("a new control daemon", || {
        assert_eq!(host.list().len(), 4);
        host.json(&["status"]).filter(|status| status["service"]["state"] == "ready")
    });
    assert_ne!(control_pid(&after), control_pid(&before));
    assert!(alive(control_pid(&after)));
    assert!(control_daemon(&after)["starts"].as_u64() > control_daemon(&before)["starts"].as_u64());
    assert!(host.list().iter().all(|device| device["healthy"] == true));
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
    assert_eq!(host.compute_mode(0), "Default");
}

/// Without inotify, the service can't wait for changes of the control daemon's log. It reads the log once a second, and still
/// serves the GPUs.
fn without_inotify_the_service_looks_once_a_second(topology: Topology) {
    if !root_or_skip("without_inotify_the_service_looks_once_a_second") {
        return;
    }
    let mut host = Host::with_topology(topology, "h200");
    if !host.without_inotify(&Command::new("true")).status().unwrap().success() {
        return skip("without_inotify_the_service_looks_once_a_second", "no user namespace can be made");
    }
    host.start_without_inotify();
    let before = host.wait_for_state("ready");
    let raise = "sysctl fs.inotify.max_user_instances=8192";
    signal_pid(control_pid(&before), Signal::KILL);
    let after = host.wait_for_status("another control daemon that serves", |status| {
        status["service"]["state"] == "ready" && control_pid(status) != control_pid(&before)
    });
    let server = &control_daemon(&after)["servers"][0];
    wait_for("the log's words", || host.log().contains(&format!("server {server} is ready")).then_some(()));
    assert_eq!(host.log().matches(raise).count(), 1, "{}", host.log());

    let mut doctor = Command::new(binaries().join("yunion-mpsctl"));
    doctor.args(["doctor", "--json"]);
    let found = host.without_inotify(&doctor).output().unwrap();
    let found: Value = serde_json::from_slice(&found.stdout).unwrap();
    let findings = found["findings"].as_array().unwrap();
    let finding = findings.iter().find(|one| one["name"] == "inotify-exhausted").unwrap();
    assert!(finding["remedy"].as_str().unwrap().contains(raise), "{finding:#}");

    let pid = host.pid().to_string();
    let raised = Command::new("nsenter")
        .args(["--user", "--preserve-credentials", "--target", &pid, "sh", "-c"])
        .arg("echo 100 >/proc/sys/user/max_inotify_instances")
        .status();
    assert!(raised.unwrap().success());
    wait_for("inotify", || {
        host.log().contains("the service watches the logs of control daemons by inotify again").then_some(())
    });
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

/// Without a process that collects orphans, as in some containers, a killed control daemon stays a zombie.
fn a_zombie_is_not_taken_over(topology: Topology) {
    let mut host = Host::serving_as(topology, "h200");
    let before = host.wait_for_state("ready");
    host.signal(Signal::KILL);
    host.ended();
    signal_pid(control_pid(&before), Signal::KILL);
    wait_for("its end", || (!alive(control_pid(&before))).then_some(()));
    let mut zombie = Command::new("true").spawn().unwrap();
    wait_for("a zombie", || (process_state(zombie.id()) == Some('Z')).then_some(()));
    let file = host.path("run/state.json");
    let mut state: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let start_time: u64 = start_time(zombie.id()).parse().unwrap();
    state["control_daemons"][host.control_daemon_id()]["process"] =
        json!({ "pid": zombie.id(), "start_time": start_time });
    fs::write(&file, state.to_string()).unwrap();
    host.start();
    let after = host.wait_for_state("ready");
    assert!(control_pid(&after) != zombie.id() && alive(control_pid(&after)));
    assert!(!host.log().contains(&format!("(PID {}) taken over", zombie.id())));
    zombie.wait().unwrap();
    assert_eq!(host.stop().code(), Some(0));
}

/// A GPU hangs during the health check, which then takes long. The service must notice the end of a control daemon meanwhile.
fn a_gpu_that_hangs_keeps_nobody_from_the_end_of_a_control_daemon(topology: Topology) {
    let mut host = Host::serving_as(topology, "h200x8");
    let before = host.wait_for_state("ready");
    host.plant("gpus/7/hangs", "");
    // After a critical error, the service checks the GPUs at once. The next health check would come half a minute later.
    host.meets_xid(0, 31);
    wait_for("a look that hangs", || host.path("gpus/7/hung").exists().then_some(()));
    signal_pid(control_pid(&before), Signal::KILL);
    wait_for("the end", || host.log().contains("the control daemon ended").then_some(()));
    assert!(!host.log().contains("NVML did not answer"), "{}", host.log());
    host.clear("gpus/7/hangs");
    host.wait_for_status("another control daemon that serves", |status| {
        status["service"]["state"] == "ready" && control_pid(status) != control_pid(&before)
    });
    assert_eq!(host.stop().code(), Some(0));
}

fn foreign_control_daemon(host: &Host) -> Child {
    foreign_control_daemon_in(host, &host.pipe(), "-f")
}

fn foreign_control_daemon_in(host: &Host, pipe: &Path, mode: &str) -> Child {
    fs::create_dir_all(pipe).unwrap();
    let control_daemon = host
        .command("nvidia-cuda-mps-control")
        .arg(mode)
        .env("CUDA_MPS_PIPE_DIRECTORY", pipe)
        .env("CUDA_MPS_LOG_DIRECTORY", host.path("mps"))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_for("the foreign control daemon's answer", || {
        (host.front_end(pipe, "get_default_active_thread_percentage") == "100.0\n").then_some(())
    });
    control_daemon
}

/// A foreign control daemon with a client runs in the pipe directory. The service does not end it, and the status names its
/// process and a remedy. After the client's end, the service replaces the foreign control daemon without help.
fn a_foreign_control_daemon_with_a_client_is_left_alone(topology: Topology) {
    let mut host = Host::with_topology(topology, topology.oldest_board());
    let mut foreign = foreign_control_daemon(&host);
    let mut client = host.client();
    let pipe = host.pipe();
    let socket = fs::metadata(pipe.join("control")).unwrap().ino();
    host.start();
    let status = host.wait_until_it_fails(&format!("PID {}", foreign.id()));
    assert_has(control_daemon(&status), &json!({"starts": 0}));
    let reason = status["service"]["state_reason"].as_str().unwrap();
    let command = format!("echo quit | CUDA_MPS_PIPE_DIRECTORY={} nvidia-cuda-mps-control", pipe.display());
    assert!(reason.contains(&command) && reason.contains("1 client"), "{reason}");
    host.wait_for_status("waiting", |status| control_daemon(status)["state"] == "waiting");

    assert!(foreign.try_wait().unwrap().is_none());
    assert!(client.try_wait().unwrap().is_none());
    assert_eq!(fs::metadata(pipe.join("control")).unwrap().ino(), socket);
    assert_eq!(host.front_end(&pipe, "get_default_active_thread_percentage"), "100.0\n");
    assert_eq!(host.compute_mode(0), "Default");

    client.kill().unwrap();
    client.wait().unwrap();
    foreign.wait().unwrap();
    let status = host.wait_for_state("ready");
    assert_ne!(control_pid(&status), foreign.id());
    assert_eq!(host.stop().code(), Some(0));
    assert_eq!(host.compute_mode(0), "Default");
}

fn an_idle_foreign_control_daemon_is_replaced(topology: Topology) {
    for mode in ["-f", "-d"] {
        let mut host = Host::with_topology(topology, topology.oldest_board());
        let pipe = host.pipe();
        let mut foreign = foreign_control_daemon_in(&host, &pipe, mode);
        host.start();
        let status = host.wait_for_state("ready");
        foreign.wait().unwrap();
        let pid = control_pid(&status);
        assert_ne!(pid, foreign.id());
        assert!(
            host.log().contains("was not started by this service and has no client: the service replaces it")
        );
        let percentage = format!("{}.0\n", host.list()[0]["mps_thread_percentage"]);
        assert_eq!(host.front_end(&pipe, "get_default_active_thread_percentage"), percentage);
        assert_eq!(host.stop().code(), Some(0));
        host.nothing_runs();
    }
}

fn a_stop_spares_a_foreign_control_daemon(topology: Topology) {
    let mut host = Host::with_topology(topology, topology.oldest_board());
    let mut foreign = foreign_control_daemon(&host);
    let mut client = host.client();
    host.start();
    host.wait_until_it_fails(&format!("PID {}", foreign.id()));
    assert_eq!(host.stop().code(), Some(0));
    assert!(client.try_wait().unwrap().is_none());
    assert!(foreign.try_wait().unwrap().is_none());
    for child in [&mut client, &mut foreign] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

/// A service starts while GPUs already have the compute mode for MPS. It knows the former modes from the state file of the
/// killed service.
#[test]
fn the_compute_mode_of_before_outlives_a_killed_daemon() {
    let mut host = Host::new("h200x8");
    // An administrator sets the compute mode before the service starts.
    let set = |gpu: &str, mode: &str| {
        let set = Command::new(host.path("bin/nvidia-smi"))
            .args(["-i", gpu, "-c", mode])
            .env("YUNION_MPS_SIM", host.path(""))
            .output();
        assert!(set.as_ref().unwrap().status.success(), "{}", text(&set.unwrap()));
    };
    set("3", "EXCLUSIVE_PROCESS");
    host.start();
    let status = host.wait_for_state("ready");
    signal_pid(host.pid(), Signal::KILL);
    host.ended();
    // The control daemon outlives the service. The test kills the control daemon too, since only the compute modes matter here.
    assert!(alive(control_pid(&status)));
    signal_pid(control_pid(&status), Signal::KILL);
    wait_for("the end of the processes", || host.processes().is_empty().then_some(()));
    for gpu in 0..8 {
        assert_eq!(host.compute_mode(gpu), "Exclusive_Process", "GPU {gpu}");
    }

    host.start();
    host.wait_for_state("ready");
    assert_eq!(host.stop().code(), Some(0));
    for gpu in 0..8 {
        let before = if gpu == 3 { "Exclusive_Process" } else { "Default" };
        assert_eq!(host.compute_mode(gpu), before, "GPU {gpu}");
    }
}

#[test]
fn a_compute_mode_changed_by_others_is_left_to_them() {
    let mut host = Host::serving("tesla-p40");
    host.plant("gpus/0/compute_mode", "Prohibited\n");
    assert_eq!(host.stop().code(), Some(0));
    assert_eq!(host.compute_mode(0), "Prohibited");
}

fn a_control_daemon_that_does_not_quit_is_terminated(topology: Topology) {
    let mut host = Host::with_topology(topology, topology.oldest_board());
    host.configure("cuda_mps_quit_timeout: 1");
    host.plant("mps/fault/quit-hangs", "");
    host.start();
    let pid = control_pid(&host.wait_for_state("ready"));
    assert_eq!(host.stop().code(), Some(0));
    assert!(host.log().contains(&format!("(PID {pid}) ended by SIGTERM")));
    host.nothing_runs();
    assert_eq!(host.compute_mode(0), "Default");
}

/// The service continues a stopped control daemon before it sends `quit`. Otherwise the control daemon could not end in order.
fn a_stopped_control_daemon_is_continued_to_quit(topology: Topology) {
    for both in [false, true] {
        let mut host = Host::serving_as(topology, "h200");
        let status = host.wait_for_state("ready");
        let server = control_daemon(&status)["servers"][0].as_u64().unwrap();
        let mut victims = vec![control_pid(&status)];
        if both {
            victims.push(u32::try_from(server).unwrap());
        }
        for victim in &victims {
            signal_pid(*victim, Signal::STOP);
            let stopped = || {
                let stat = fs::read_to_string(format!("/proc/{victim}/stat")).unwrap();
                stat.rsplit_once(')').is_some_and(|(_, fields)| fields.trim_start().starts_with('T'))
            };
            wait_for("a stopped process", || stopped().then_some(()));
        }
        assert_eq!(host.stop().code(), Some(0));
        let quit = format!("control daemon {} (PID {}) ended by quit", host.control_daemon_id(), victims[0]);
        assert!(host.log().contains(&quit), "{}", host.log());
        host.nothing_runs();
        assert_eq!(host.compute_mode(0), "Default");
    }
}

/// Another control daemon listens in the directory of the service's control daemon. The service does not use the answers of the
/// other control daemon, does not end it while a client runs, and names its PID in the status. The client of the service's own
/// control daemon runs on.
fn a_control_daemon_whose_place_was_taken_is_left_to_its_clients(topology: Topology) {
    let mut host = Host::serving_as(topology, "h200");
    let before = host.wait_for_state("ready");
    let mut client = host.client();
    let pipe = host.private();
    fs::rename(&pipe, host.path("mps/taken")).unwrap();
    let mut foreign = foreign_control_daemon_in(&host, &pipe, "-f");
    assert!(host.call("Control.Reload").status.success());
    let status = host.wait_for_status("waiting", |status| control_daemon(status)["state"] == "waiting");
    assert_eq!(control_pid(&status), control_pid(&before));
    let reason = control_daemon(&status)["reason"].as_str().unwrap();
    assert!(reason.contains(&format!("PID {}", foreign.id())), "{reason}");
    assert!(host.its_slices().iter().all(|slice| slice["healthy"] == false));
    assert!(client.try_wait().unwrap().is_none());
    assert!(foreign.try_wait().unwrap().is_none());
    // The service must not send its commands to the other control daemon, which listens in the directory now.
    host.devices(&["path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 2"]);
    assert!(host.call("Control.Reload").status.success());
    host.wait_for_status("waiting", |status| control_daemon(status)["state"] == "waiting");
    assert_eq!(host.front_end(&pipe, "get_default_active_thread_percentage"), "100.0\n");

    // After the client's end, the service ends both control daemons and starts a new one.
    client.kill().unwrap();
    client.wait().unwrap();
    assert!(host.call("Control.Reload").status.success());
    let status = host.wait_for_state("ready");
    assert_ne!(control_pid(&status), control_pid(&before));
    foreign.wait().unwrap();
    assert!(!alive(control_pid(&before)));
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

/// On a GPU from before Volta, a control daemon ends while its supervisor waits for an answer. The service starts another
/// control daemon.
#[test]
fn before_volta_a_control_daemon_that_ends_during_a_reload_has_a_successor() {
    let mut host = Host::serving("tesla-p40");
    let before = control_pid(&host.wait_for_state("ready"));
    host.plant("mps/fault/front-end-hangs", "");
    host.devices(&["path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 2"]);
    host.signal(Signal::HUP);
    let is_front_end = |pid: u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        pid != before && status.lines().any(|line| line == format!("PPid:\t{}", host.pid()))
    };
    wait_for("the front end", || {
        let all = fs::read_dir("/proc").unwrap().flatten();
        let mut pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.any(is_front_end).then_some(())
    });
    signal_pid(before, Signal::KILL);
    wait_for("its end", || (!alive(before)).then_some(()));
    host.clear("mps/fault/front-end-hangs");
    host.wait_for_status("its successor", |status| {
        let pid = control_daemon(status)["pid"].as_u64();
        status["service"]["state"] == "ready" && pid.is_some_and(|pid| pid != u64::from(before))
    });
    assert_eq!(host.list().len(), 2);
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

/// On GPUs from before Volta, NVML lists no clients. So an empty list is no reason to end a control daemon that does not
/// answer.
fn wait_until_its_clients_are_not_known(host: &Host, control_daemon: u32) {
    let expected = "NVML does not list the clients of GPU";
    let status = host.wait_for_status("clients that are not known", |status| {
        let reason = control_daemon_reason(status);
        reason.contains("the clients of the control daemon are not known") && reason.contains(expected)
    });
    assert_eq!(control_pid(&status), control_daemon);
    let told = "yet, since its clients are not known";
    assert_eq!(host.log().matches(told).count(), 1, "{}", host.log());
}

fn control_daemon_reason(status: &Value) -> String {
    status["control_daemons"][0]["reason"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn before_volta_a_control_daemon_without_its_directory_is_left_to_its_clients() {
    let mut host = Host::serving("tesla-p40");
    let before = control_pid(&host.wait_for_state("ready"));
    let mut client = host.served(&mut host.program(&["hold", "600"]));
    for entry in fs::read_dir(host.path("mps/pipe")).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
    assert!(host.call("Control.Reload").status.success());
    wait_until_its_clients_are_not_known(&host, before);
    assert!(alive(before));
    assert_eq!(client.try_wait().unwrap(), None, "{}", host.log());

    // An administrator ends the control daemon by `apply --force`. Before the signal, the service's log names the clients that
    // lose their work.
    client.end();
    let applied = host.mpsctl(&["apply", "--force"]);
    assert!(applied.status.success(), "{}", text(&applied));
    assert_ne!(control_pid(&host.wait_for_state("ready")), before);
    assert_warned_of_signal(&host, before, "any client that is still connected loses its work");
    assert_eq!(host.stop().code(), Some(0));
}

/// On GPUs from Volta on, NVML lists the clients. So the service can replace a control daemon that it can't reach and that has
/// no clients. Before its signal to the control daemon, the service writes to its log that no work is lost.
fn an_idle_control_daemon_without_its_directory_is_replaced_with_a_word(topology: Topology) {
    let mut host = Host::serving_as(topology, "h200");
    let before = control_pid(&host.wait_for_state("ready"));
    fs::rename(host.private(), host.path("mps/taken")).unwrap();
    assert!(host.call("Control.Reload").status.success());
    host.wait_for_status("another control daemon", |status| {
        status["service"]["state"] == "ready" && control_pid(status) != before
    });
    assert_warned_of_signal(&host, before, "no client is connected, so no work is lost");
    assert_eq!(host.stop().code(), Some(0));
}

/// A control daemon of a newer driver may give answers that the service does not understand. After a restart the answers would
/// be the same, so the service does not restart the control daemon.
fn a_control_daemon_that_is_not_understood_is_not_restarted(topology: Topology) {
    let mut host = Host::serving_as(topology, "h200");
    let before = control_pid(&host.wait_for_state("ready"));
    host.plant("mps/fault/front-end-garbage", "");
    assert!(host.call("Control.Reload").status.success());
    let status = host.wait_for_status("an answer that is not understood", |status| {
        control_daemon_reason(status).contains("was answered with")
    });
    assert_eq!(control_pid(&status), before);
    wait_for("the second attempt", || (host.log().matches("was answered with").count() > 1).then_some(()));
    host.clear("mps/fault/front-end-garbage");
    assert_eq!(control_pid(&host.wait_for_state("ready")), before);
    assert_has(control_daemon(&host.wait_for_state("ready")), &json!({"starts": 1}));
    assert_eq!(host.stop().code(), Some(0));
}

/// Fails unless the log has exactly one warning about a signal to the control daemon, before the line about its end.
fn assert_warned_of_signal(host: &Host, control_daemon: u32, whom: &str) {
    let log = host.log();
    let told = format!("(PID {control_daemon}) does not quit and is sent SIGTERM: {whom}");
    let place = |words: &str| log.lines().position(|line| line.contains(words));
    let warned = place(&told).unwrap_or_else(|| panic!("{told}\n{log}"));
    assert!(log.lines().nth(warned).unwrap().contains("WARN"), "{log}");
    assert_eq!(log.matches("is sent SIGTERM").count(), 1, "{log}");
    assert!(Some(warned) < place(&format!("(PID {control_daemon}) ended by SIGTERM")), "{log}");
}

/// The sockets of the service's control daemon are in a private directory. A foreign control daemon in the pipe directory
/// therefore takes no clients from the service's control daemon. The service makes its link in the pipe directory again, and
/// its log names the foreign process.
fn another_control_daemon_in_the_pipe_directory_takes_no_clients(topology: Topology) {
    let mut host = Host::with_topology(topology, "h200");
    // The immutable flag would keep the foreign control daemon from making its sockets. So this service may not set the flag.
    host.start_without_the_flag();
    let before = host.wait_for_state("ready");
    let pipe = host.pipe();
    let mut foreign = host
        .command("nvidia-cuda-mps-control")
        .arg("-f")
        .env("CUDA_MPS_PIPE_DIRECTORY", &pipe)
        .env("CUDA_MPS_LOG_DIRECTORY", host.path("mps"))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let told = format!("{} had no link to the control daemon's socket", pipe.display());
    wait_for("its socket", || listener(&pipe).filter(|pid| *pid == foreign.id()));
    assert!(host.call("Control.Reload").status.success());
    let named = format!("{told}: process {} listened in {}", foreign.id(), pipe.display());
    wait_for("the warning", || host.log().contains(&named).then_some(()));
    let client = host.client();
    let clients = host.front_end(&host.private(), "ps");
    assert!(clients.contains(&client.id().to_string()), "{clients}");
    assert_eq!(control_pid(&host.wait_for_state("ready")), control_pid(&before));
    client.end();
    foreign.kill().unwrap();
    foreign.wait().unwrap();
    assert_eq!(host.stop().code(), Some(0));
}

/// Starts the service a second time, like an administrator who has forgotten `--check`. Returns its exit status and its output.
fn second_daemon(host: &Host) -> (Option<i32>, String) {
    let mut second = host
        .command(daemon())
        .arg("--sysroot")
        .arg(host.path("sysroot"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + DEADLINE;
    while second.try_wait().unwrap().is_none() && Instant::now() < deadline {
        sleep(Duration::from_millis(20));
    }
    // If the second service still runs, SIGINT ends it like Ctrl-C, so that this function returns.
    signal_pid(second.id(), Signal::INT);
    let output = second.wait_with_output().unwrap();
    (output.status.code(), text(&output))
}

/// A second service with the same runtime directory prints the PID of the first service and ends. The first service and its
/// clients are not disturbed.
fn a_second_daemon_by_hand_ends_nobody_s_work(topology: Topology) {
    let mut host = Host::serving_as(topology, "h200");
    let before = host.wait_for_state("ready");
    let mut client = host.client();
    let (status, said) = second_daemon(&host);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains(&format!("another yunion-mps-daemon (PID {})", host.pid())), "{said}");
    assert!(said.contains(host.path("run").to_str().unwrap()) && said.contains("--check"), "{said}");
    assert_eq!(client.try_wait().unwrap(), None);
    assert_eq!(control_pid(&host.wait_for_state("ready")), control_pid(&before));
    assert_eq!(host.compute_mode(0), host.compute_mode_while_served());
    // `--check` works while a service has the lock of the runtime directory.
    let checked = host.check();
    assert_eq!(checked.status.code(), Some(0), "{}", text(&checked));

    // A control daemon does not inherit the lock of the runtime directory. So the next service gets the lock although the
    // control daemon still runs.
    host.signal(Signal::KILL);
    host.ended();
    assert!(alive(control_pid(&before)));
    host.start();
    assert_eq!(control_pid(&host.wait_for_state("ready")), control_pid(&before));
    assert_eq!(client.try_wait().unwrap(), None);
    client.kill().unwrap();
    client.wait().unwrap();
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

/// The kernel releases the lock of a killed service a moment after the kill. So a service that starts waits for the lock.
#[test]
fn a_start_waits_a_moment_for_the_lock_of_a_service_that_is_on_its_way_out() {
    let mut host = Host::new("h200");
    fs::create_dir_all(host.path("run")).unwrap();
    let script = "import fcntl, sys, time\nlock = open(sys.argv[1], 'w')\nfcntl.lockf(lock, fcntl.LOCK_EX)\n\
                  print('locked', flush=True)\nsys.stdin.read()\ntime.sleep(0.5)\n";
    let mut other = host.command("/usr/bin/python3");
    other.args(["-c", script]).arg(host.path("run/lock")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut other = other.spawn().unwrap();
    BufReader::new(other.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    host.start();
    drop(other.stdin.take());
    other.wait().unwrap();
    host.wait_for_state("ready");
    assert_eq!(host.stop().code(), Some(0));
}

/// Wraps the front end in a script. The script adds a line to one file for each run, and to another file if two front ends run
/// at once. Returns the paths of both files.
fn watched_front_ends(host: &mut Host) -> (PathBuf, PathBuf) {
    let (real, wrapper) = (host.path("bin"), host.path("wrapper"));
    let (runs, overlaps) = (host.path("runs"), host.path("overlaps"));
    fs::create_dir(&wrapper).unwrap();
    let program = wrapper.join("nvidia-cuda-mps-control");
    // Descriptor 9 has the lock until the front end ends.
    let script = format!(
        "#!/bin/bash\nreal={}/nvidia-cuda-mps-control\n\
         [ $# -eq 0 ] && grep -q ^yunion-mps-daem /proc/$PPID/comm || exec $real \"$@\"\n\
         exec 9>>{}\n\
         echo >&9\nflock --nonblock 9 || echo >>{}\nsleep 0.02 9>&-\nexec $real\n",
        real.display(),
        runs.display(),
        overlaps.display(),
    );
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    host.prefer(&wrapper);
    (runs, overlaps)
}

/// Runs all commands at the same time: two threads for each command, each of which runs the command three times.
fn ask_at_once(host: &Host, ways: &[&[&str]]) {
    std::thread::scope(|scope| {
        for way in ways.iter().cycle().take(2 * ways.len()) {
            scope.spawn(move || {
                for _ in 0..3 {
                    // The service may refuse a request. So the exit status does not matter.
                    let (program, arguments) = way.split_first().unwrap();
                    host.command(binaries().join(program)).args(arguments).output().unwrap();
                }
            });
        }
    });
}

/// Many callers send requests while the control daemon serves, restarts and ends. The service sends the control daemon only one
/// command at a time.
#[test]
fn a_control_daemon_is_asked_one_thing_at_a_time() {
    let mut host = Host::new("h200");
    let (runs, overlaps) = watched_front_ends(&mut host);
    host.start();
    let before = host.wait_for_state("ready");
    let mut client = host.client();
    let (list, release) =
        (["yunion-mpsctl", "clients"], ["yunion-mpsctl", "terminate", "--device", "00:06.0-0"]);
    let restart = "/usr/bin/busctl --system call io.yunion.Mps1 /io/yunion/Mps1/Manager io.yunion.Mps1.Control \
                   RestartServer s 00:06.0";
    let restart: Vec<&str> = restart.split_ascii_whitespace().collect();
    let runs = || fs::read_to_string(&runs).unwrap_or_default().len();
    let begun = runs();
    // While the server has a client, the service refuses to restart it.
    ask_at_once(&host, &[&list, &release, &restart, &["yunion-mpsctl", "reload"]]);
    assert!(runs() > begun + 12, "{begun} and then {}", runs());
    assert_eq!(client.try_wait().unwrap(), None);
    client.kill().unwrap();
    client.wait().unwrap();
    ask_at_once(&host, &[&list, &restart]);
    signal_pid(control_pid(&before), Signal::KILL);
    ask_at_once(&host, &[&list, &release]);
    wait_for("another control daemon", || {
        let status = host.json(&["status"]).filter(|status| status["service"]["state"] == "ready")?;
        (control_pid(&status) != control_pid(&before)).then_some(())
    });
    host.signal(Signal::TERM);
    ask_at_once(&host, &[&list]);
    assert_eq!(host.ended().code(), Some(0));
    host.nothing_runs();
    assert_eq!(fs::read_to_string(&overlaps).unwrap_or_default().len(), 0, "asked two things at a time");
}

fn program_without_mps(host: &Host) -> Child {
    let program = start_without_mps(host).spawn().unwrap();
    let entry = host.path(&format!("gpus/0/processes/{}", program.id()));
    wait_for("the program on the GPU", || entry.exists().then_some(()));
    program
}

fn start_without_mps(host: &Host) -> Command {
    let mut command = host.program(&["hold", "600"]);
    command.env("CUDA_MPS_PIPE_DIRECTORY", host.path("nowhere")).stderr(Stdio::null());
    command
}

/// Reads the compute mode of a GPU every millisecond until `go_on` is false, in a thread that returns all modes that it has
/// seen.
fn watch_mode(host: &Host, go_on: &Arc<AtomicBool>) -> JoinHandle<BTreeSet<String>> {
    let (file, go_on) = (host.path("gpus/0/compute_mode"), Arc::clone(go_on));
    spawn(move || {
        let mut seen = BTreeSet::new();
        while go_on.load(Ordering::Relaxed) {
            seen.insert(fs::read_to_string(&file).unwrap_or_default().trim().to_owned());
            sleep(Duration::from_millis(1));
        }
        seen
    })
}

/// The service and its control daemon are killed, and a program without MPS opens the GPU. During restarts and reloads, no
/// second program without MPS may open the GPU. When the program has ended, the service serves the GPU.
#[test]
fn a_program_that_slips_in_opens_the_gpu_to_nobody() {
    for board in ["h200", "tesla-p40"] {
        let mut host = Host::serving(board);
        let before = host.wait_for_state("ready");
        let go_on = Arc::new(AtomicBool::new(true));
        let modes = watch_mode(&host, &go_on);
        host.signal(Signal::KILL);
        signal_pid(control_pid(&before), Signal::KILL);
        host.ended();
        wait_for("the end of the processes", || host.processes().is_empty().then_some(()));
        let mut slipped_in = program_without_mps(&host);

        let held = format!("processes that do not use MPS have the GPU open: {} (", slipped_in.id());
        host.start();
        host.wait_for_failure(&held);
        assert!(host.call("Control.Reload").status.success());
        host.wait_for_failure(&held);
        host.signal(Signal::KILL);
        host.ended();
        host.start();
        host.wait_for_failure(&held);
        // The service does not end the program. The compute mode keeps other programs without MPS out.
        assert!(!start_without_mps(&host).status().unwrap().success());
        assert_eq!(slipped_in.try_wait().unwrap(), None);

        let begun = Instant::now();
        slipped_in.kill().unwrap();
        slipped_in.wait().unwrap();
        host.wait_for_state("ready");
        println!("{board}: served {:?} after the program that had slipped in ended", begun.elapsed());
        assert!(host.list().iter().all(|device| device["healthy"] == true));
        go_on.store(false, Ordering::Relaxed);
        assert_eq!(modes.join().unwrap(), BTreeSet::from(["Exclusive_Process".to_owned()]));
        assert_eq!(host.stop().code(), Some(0));
        assert_eq!(host.compute_mode(0), "Default");
        host.nothing_runs();
    }
}

/// A program without MPS uses the GPU at the first start of the service. The service sets a compute mode that keeps further
/// programs out, unless the configuration forbids it to set compute modes.
#[test]
fn a_gpu_that_is_held_is_closed_to_others() {
    for ours in [true, false] {
        let mut host = Host::new("h200");
        host.configure(&format!("cuda_mps_set_compute_mode: {ours}"));
        let mut program = program_without_mps(&host);
        host.start();
        if ours {
            host.wait_for_failure("processes that do not use MPS have the GPU open");
            wait_for("the exclusive mode", || (host.compute_mode(0) == "Exclusive_Process").then_some(()));
        } else {
            host.wait_for_status("served beside it", |status| status["control_daemons"][0]["pid"].is_u64());
        }
        assert_eq!(program.try_wait().unwrap(), None);
        // After MPS is disabled, the service restores the compute mode at once, even while the program uses the GPU.
        host.configure("enable_cuda_mps: false");
        assert!(host.call("Control.Reload").status.success());
        wait_for("the mode of before", || (host.compute_mode(0) == "Default").then_some(()));
        host.configure("enable_cuda_mps: true");
        assert!(host.call("Control.Reload").status.success());
        program.kill().unwrap();
        program.wait().unwrap();
        host.wait_for_state("ready");
        assert_eq!(host.compute_mode(0), if ours { "Exclusive_Process" } else { "Default" });
        assert_eq!(host.stop().code(), Some(0));
        assert_eq!(host.compute_mode(0), "Default");
    }
}

fn one_nvml_error_at_a_restart_ends_nothing(topology: Topology) {
    for board in ["h200", "h200x8"] {
        let mut host = Host::serving_as(topology, board);
        let before = host.wait_for_state("ready");
        host.signal(Signal::KILL);
        host.ended();
        host.plant("gpus/0/error/nvmlDeviceGetUUID", "999");
        host.start();
        wait_for("a second look", || host.log().contains("is served; asking NVML again").then_some(()));
        host.clear("gpus/0/error/nvmlDeviceGetUUID");
        let after = host.wait_for_state("ready");
        assert_eq!(control_pid(&after), control_pid(&before));
        assert_eq!(control_daemon(&after)["starts"], 0);
        assert_eq!(host.stop().code(), Some(0));
        host.nothing_runs();
    }
}

/// NVML fails again and again. The service reports this, ends no client, and does not change a compute mode that keeps programs
/// without MPS out.
fn an_nvml_error_that_lasts_opens_no_gpu(topology: Topology) {
    let mut host = Host::serving_as(topology, "h200");
    let before = host.wait_for_state("ready");
    let mut client = host.client();
    let go_on = Arc::new(AtomicBool::new(true));
    let modes = watch_mode(&host, &go_on);
    host.signal(Signal::KILL);
    host.ended();
    host.plant("gpus/0/error/nvmlDeviceGetUUID", "999");
    host.start();
    host.wait_until_it_fails("the UUID of the GPU can't be read");
    assert_eq!(client.try_wait().unwrap(), None);
    host.clear("gpus/0/error/nvmlDeviceGetUUID");
    let after = host.wait_for_state("ready");
    assert_eq!(control_pid(&after), control_pid(&before));
    assert_eq!(client.try_wait().unwrap(), None);
    go_on.store(false, Ordering::Relaxed);
    assert_eq!(modes.join().unwrap(), BTreeSet::from([host.compute_mode_while_served().to_owned()]));
    client.kill().unwrap();
    client.wait().unwrap();
    assert_eq!(host.stop().code(), Some(0));
    assert_eq!(host.compute_mode(0), "Default");
}

/// `yunion-mpsctl status` combines several answers of the service. The state may change between them, but the output must be of
/// one moment: no ready service with a control daemon that has ended.
fn a_status_is_of_one_moment(topology: Topology) {
    for _ in 0..10 {
        let mut host = Host::serving_as(topology, "h200");
        let before = control_pid(&host.wait_for_state("ready"));
        signal_pid(before, Signal::KILL);
        host.wait_for_status("another control daemon that serves", |status| {
            let ready = status["service"]["state"] == "ready";
            let pid = &control_daemon(status)["pid"];
            assert!(!ready || pid.is_u64(), "{status:#}");
            ready && *pid != before
        });
        host.stop();
    }
}
