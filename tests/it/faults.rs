//! Tests of faults on a host while clients compute. The service reports each fault, and repairs the host without help.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::support::bystander::Bystander;
use crate::support::client::{Client, own_user};
use crate::support::host::{
    Host, alive, control_daemon, control_pid, process_state, signal_pid, start_time, text,
};
use crate::support::listener::Listener;
use crate::support::mount::Mount;
use crate::support::processes::{control_daemons, launchers};
use crate::support::random::Random;
use crate::support::skip::root_or_skip;
use crate::support::topology::{Topology, in_both_topologies};
use crate::support::wait::{DEADLINE, wait_for};

const ENTRY: &str = "path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number:";

in_both_topologies! {
    no_room_for_the_state_file,
    a_state_file_lost_while_down_costs_no_client,
    a_removed_pipe_directory_is_made_again,
    users_that_were_kept_out_are_let_in_again,
    a_socket_of_another_user_is_not_healthy;
    soak:
    stopped_processes_are_continued,
    a_stopped_server_is_continued_when_its_control_daemon_has_ended,
    a_server_that_keeps_dying_is_not_started_in_a_loop,
    a_fault_is_told_and_heals_when_clients_leave,
    a_fault_names_the_owners_of_those_hit,
    a_fault_after_a_restart_names_the_owners_of_those_hit,
    a_fault_that_ends_the_control_daemon_is_told,
    no_room_for_the_log,
    the_bus_restarts_while_clients_run,
    what_others_break_is_repaired,
    the_log_is_rotated_under_load,
    a_gpu_that_is_lost_and_back,
    critical_errors_are_told_after_a_failed_wait,
    a_critical_error_is_told_and_looked_into,
    a_critical_error_of_a_lost_gpu_is_told,
    a_clock_that_jumps_disturbs_nobody,
    a_burst_in_the_log_keeps_nobody_waiting,
    lines_without_end_keep_no_request_waiting,
    a_burst_of_warnings_does_not_flood_the_journal,
    the_end_of_a_control_daemon_tells_how_many_lines_were_left_out,
    only_a_file_of_ours_is_the_log,
    a_rotated_log_empties_no_other_file,
    the_name_of_a_process_makes_no_line_of_the_log,
}

fn a_client_is_served(host: &Host) {
    Bystander::start(host, &host.pipe(), Duration::from_millis(200)).wait();
}

fn server(status: &Value) -> u32 {
    let servers = control_daemon(status)["servers"].as_array().unwrap();
    assert_eq!(servers.len(), 1, "{status:#}");
    u32::try_from(servers[0].as_u64().unwrap()).unwrap()
}

fn some_server(status: &Value) -> Option<u32> {
    u32::try_from(control_daemon(status)["servers"].as_array()?.first()?.as_u64()?).ok()
}

fn stopped(pid: u32) -> bool {
    process_state(pid) == Some('T')
}

/// Waits until the service is ready. Until then, every `yunion-mpsctl list` must show `devices` slices, healthy or not.
fn recovered(host: &Host, devices: usize) -> Value {
    wait_for("the service's recovery", || {
        let listed = host.json(&["list"])?;
        assert_eq!(listed.as_array().unwrap().len(), devices);
        host.json(&["status"]).filter(|status| status["service"]["state"] == "ready")
    })
}

/// Waits for words in the service's log. If only a health check writes these words, the caller must first reload the service,
/// since a reload makes a health check at once.
fn waits_for_log(host: &Host, words: &str) {
    wait_for(words, || host.log().contains(words).then_some(()));
}

/// Waits until the service has read the control daemon's log beyond the offset `place`, and has written its new offset to the
/// state file.
fn read_up_to(host: &Host, place: usize) {
    wait_for("the state file to follow", || {
        let state_file = fs::read(host.path("run/state.json")).unwrap_or_default();
        let state_file: Value = serde_json::from_slice(&state_file).unwrap_or_default();
        let offset = state_file["control_daemons"][host.control_daemon_id()]["log_offset"].as_u64()?;
        (offset > place as u64).then_some(())
    });
}

fn is_unhealthy(slice: &Value) -> bool {
    slice["healthy"] == false
}

fn restart(host: &mut Host) {
    host.signal(Signal::KILL);
    host.ended();
    host.start();
}

/// A control daemon or a server that SIGSTOP has stopped serves no client. The service continues the process with SIGCONT and
/// applies the changes that were made meanwhile. Clients of the process notice nothing, and other clients are not disturbed.
fn stopped_processes_are_continued(topology: Topology) {
    let mut host = Host::with_topology(topology, "h200");
    host.start();
    let before = host.wait_for_state("ready");
    let bystander = Bystander::start(&host, &host.pipe(), Duration::from_secs(600));
    let paused = host.client();
    signal_pid(paused.id(), Signal::STOP);
    let (control, server_pid) = (control_pid(&before), server(&before));
    let mut slices = 4;
    for (victims, is_restarted) in
        [(vec![control], true), (vec![server_pid], false), (vec![server_pid, control], false)]
    {
        for victim in &victims {
            // On a busy machine the service may continue the process before the test has seen it stopped. So the test also
            // accepts the service's message that it has continued a process.
            let continued =
                || host.log().matches("was stopped by a signal; the service has continued").count();
            let so_far = continued();
            signal_pid(*victim, Signal::STOP);
            wait_for("a stopped process", || (stopped(*victim) || continued() > so_far).then_some(()));
        }
        if is_restarted {
            restart(&mut host);
        } else {
            slices += 1;
            host.devices(&[&format!("{ENTRY} {slices}")]);
            host.signal(Signal::HUP);
        }
        for victim in &victims {
            wait_for("a continued process", || (!stopped(*victim)).then_some(()));
        }
        let status = host.wait_for_status("ready with these slices", |status| {
            status["service"]["state"] == "ready" && host.list().len() == slices
        });
        assert_eq!(control_pid(&status), control_pid(&before));
        assert_eq!(server(&status), server(&before));
        a_client_is_served(&host);
    }
    assert!(host.log().contains("was stopped by a signal; the service has continued"));
    assert!(stopped(paused.id()));
    bystander.check();
    paused.end();
}

/// SIGSTOP has stopped a server, and its control daemon is killed. A stopped server does not end with its control daemon, and
/// no other server can open the GPU. The service continues the stopped server, which then ends.
fn a_stopped_server_is_continued_when_its_control_daemon_has_ended(topology: Topology) {
    let host = Host::serving_as(topology, "h200");
    let before = host.wait_for_state("ready");
    let (control, server) = (control_pid(&before), server(&before));
    signal_pid(server, Signal::STOP);
    wait_for("a stopped server", || stopped(server).then_some(()));
    signal_pid(control, Signal::KILL);
    wait_for("the end of the server", || (!alive(server)).then_some(()));
    host.wait_for_status("served by another control daemon", |status| {
        status["service"]["state"] == "ready" && control_pid(status) != control
    });
    a_client_is_served(&host);
}

/// A server dies soon after each start. The service starts a server again after longer and longer pauses, and the status shows
/// the reason. When a server stays alive, the service is ready.
fn a_server_that_keeps_dying_is_not_started_in_a_loop(topology: Topology) {
    let mut host = Host::with_topology(topology, "h200");
    host.plant("mps/start-ms", "0");
    host.start();
    let status = host.wait_for_state("ready");
    host.plant("mps/fault/server-dies-after-ms", "20");
    let begun = Instant::now();
    signal_pid(server(&status), Signal::KILL);
    let starts = |host: &Host| {
        let log = fs::read_to_string(host.control_log()).unwrap_or_default();
        log.matches("Starting new server").count()
    };
    let count = wait_for("five more servers", || Some(starts(&host)).filter(|count| *count >= 6));
    // The pauses between the starts are none, 0.1, 0.2, 0.4 and 0.8 s. Together, the starts must take longer than these pauses.
    let pauses: f64 = (0..count - 2).map(|n| 0.1 * f64::from(1 << n.min(8))).sum();
    assert!(begun.elapsed().as_secs_f64() > pauses, "{count} starts in {:?}", begun.elapsed());
    let status = host.wait_for_status("backoff", |status| control_daemon(status)["state"] == "backoff");
    let reason = control_daemon(&status)["reason"].as_str().unwrap();
    assert!(reason.contains("has ended") || reason.contains("exited with status 1"), "{reason}");
    assert_eq!(control_daemon(&status)["starts"], 1, "it is not the control daemon's fault");
    host.wait_for_status("the state in words", |status| {
        status["service"]["state_reason"].as_str().unwrap().contains(" is in backoff: ")
    });
    host.clear("mps/fault/server-dies-after-ms");
    // The status may still show a server that was started before the fault was removed, and that dies.
    wait_for("a server that lives", || {
        let status = host.json(&["status"])?;
        (status["service"]["state"] == "ready" && alive(some_server(&status)?)).then_some(())
    });
    assert_eq!(host.stop().code(), Some(0));
}

fn exit_code(mut client: Client) -> Option<i32> {
    wait_for("the client's end", || client.try_wait().unwrap()).code()
}

/// Causes a fatal GPU error that hits two clients. Both clients end, and the D-Bus signal `ClientFault` names them and the GPU.
fn a_fault_of_two_clients_is_told(host: &Host, listener: &Listener) {
    let hit = [host.client(), host.client()];
    let pids = [hit[0].id(), hit[1].id()];
    host.fault();
    for client in hit {
        assert_eq!(exit_code(client), Some(4));
    }
    let told = listener.wait_for_fault(&pids);
    assert!(told.contains("GPU-168acfc9-c926-5401-354d-2910ddcd391b"), "{told}");
}

/// When all clients that a fatal GPU error has hit have ended, the service serves again without help. It reports the error with
/// all of these clients.
fn a_fault_is_told_and_heals_when_clients_leave(topology: Topology) {
    let host = Host::serving_as(topology, "h200");
    let before = host.wait_for_state("ready");
    let listener = Listener::start(&host);
    for _ in 0..3 {
        a_fault_of_two_clients_is_told(&host, &listener);
        let status = recovered(&host, 4);
        assert_eq!(server(&status), server(&before), "the server gets over it by itself");
        a_client_is_served(&host);
    }
    // The server writes a line about the fault to its log for each client. The service must log one error for the fault, and
    // must not pass these lines on as errors.
    let log = host.log();
    let errors: Vec<&str> = log.lines().filter(|line| line.contains(" ERROR ")).collect();
    assert!(errors.iter().any(|line| line.contains("clients that were hit")), "{errors:#?}");
    assert!(!errors.iter().any(|line| line.contains(" mps: ")), "{errors:#?}");
}

/// The clients may have ended before the service reads about the fault in the log. The messages still name the owners of the
/// clients, since the service has identified each client when the client came.
fn a_fault_names_the_owners_of_those_hit(topology: Topology) {
    let mut host = Host::with_topology(topology, "h200");
    host.configure("log_level: debug");
    host.start();
    host.wait_for_state("ready");
    let listener = Listener::start(&host);
    let hit = host.known(&mut host.program_of("00:06.0-0", &["hold", "600"]));
    let pid = hit.id();
    host.fault();
    assert_eq!(exit_code(hit), Some(4));
    let owner = format!("PID {pid} of user {}, slice 00:06.0-0", own_user());
    let told = listener.wait_for_fault(&[pid]);
    assert!(told.contains(&owner), "{owner}\n{told}");
    let log = host.log();
    let line = |level: &str, words: &str| {
        log.lines().any(|line| line.contains(level) && line.contains(words) && line.contains(&owner))
    };
    assert!(line(" ERROR ", "not a client that caused the error"), "{log}");
    assert!(line(" INFO ", &format!("mps_client_pid={pid}")), "{log}");
    assert!(log.contains(&format!("{owner}, command \"cuda-client\"")), "{log}");
}

fn a_fault_after_a_restart_names_the_owners_of_those_hit(topology: Topology) {
    let mut host = Host::with_topology(topology, "h200");
    host.configure("cuda_mps_fault_grace: 600\nlog_level: debug");
    host.start();
    host.wait_for_state("ready");
    let hit = host.known(&mut host.program_of("00:06.0-0", &["hold", "600", "--stay"]));
    let known = format!(" client PID {} of ", hit.id());
    let before = host.log().len();
    restart(&mut host);
    wait_for("the next service to know the client", || host.log()[before..].contains(&known).then_some(()));
    let listener = Listener::start(&host);
    host.fault();
    let owner = format!("PID {} of user {}, slice 00:06.0-0", hit.id(), own_user());
    let told = listener.wait_for_fault(&[hit.id()]);
    assert!(told.contains(&owner), "{owner}\n{told}");
    hit.end();
    assert_eq!(host.stop().code(), Some(0));
}

/// A fault ends the control daemon before the service can ask it for the state of its server. The service still reports the
/// fault with all clients that were hit.
fn a_fault_that_ends_the_control_daemon_is_told(topology: Topology) {
    let host = Host::serving_as(topology, "h200");
    let before = host.wait_for_state("ready");
    host.plant("mps/fault/fault-ends-control", "");
    let listener = Listener::start(&host);
    a_fault_of_two_clients_is_told(&host, &listener);
    host.clear("mps/fault/fault-ends-control");
    let after = wait_for("another control daemon", || {
        let status = host.json(&["status"]).filter(|status| status["service"]["state"] == "ready")?;
        (control_pid(&status) != control_pid(&before)).then_some(status)
    });
    assert_eq!(control_daemon(&after)["faults"], 1);
    a_client_is_served(&host);
}

/// Waits until the service has read about the fault in the control daemon's log, and has written to the state file how far it
/// has read the log. Then kills the service, and starts the next service with the line `next_grace` in host.conf, which sets
/// another grace period for faults.
fn dies_having_read_of_the_fault(host: &mut Host, next_grace: &str) {
    host.wait_for_status("faulted", |status| control_daemon(status)["state"] == "faulted");
    let log = fs::read_to_string(host.control_log()).unwrap();
    host.reload();
    read_up_to(host, log.rfind("to be torn down").unwrap());
    host.configure(next_grace);
    restart(host);
}

/// The next service does not read the lines about the fault again, since the killed service has read them. The next service
/// still ends the server with the fault when the grace period is over.
#[test]
fn a_fault_that_a_former_service_has_read_is_healed_after_the_grace() {
    is_healed_after_the_grace(Topology::Shared, |host| {
        dies_having_read_of_the_fault(host, "cuda_mps_fault_grace: 1");
    });
}

fn is_healed_after_the_grace(topology: Topology, shorten_the_grace: impl FnOnce(&mut Host)) {
    let mut host = Host::with_topology(topology, "h200");
    host.configure("cuda_mps_fault_grace: 600");
    host.start();
    let before = host.wait_for_state("ready");
    let stays = host.served(&mut host.program(&["hold", "600", "--stay"]));
    host.fault();
    host.wait_for_status("faulted", |status| control_daemon(status)["state"] == "faulted");
    assert!(host.its_slices().iter().all(is_unhealthy));
    shorten_the_grace(&mut host);
    let after = recovered(&host, 4);
    assert_ne!(server(&after), server(&before), "ready was said of a server with a fault");
    assert_eq!(control_pid(&after), control_pid(&before));
    let log = host.log();
    let ended =
        format!("was ended, since these clients still ran long after its fatal GPU error: {} (", stays.id());
    assert!(log.contains(&ended), "{log}");
    a_client_is_served(&host);
    stays.end();
}

/// With driver 535 the control daemon can't tell the state of its server. So the service treats the fault as over when all
/// clients that were hit have ended. The service does not end the server, since other clients of the server may still compute.
#[test]
fn a_fault_lasts_where_nobody_tells_of_its_end() {
    let mut host = Host::new("h200");
    host.plant("mps/version", "535");
    host.plant("driver", "535.261.03");
    host.configure("cuda_mps_fault_grace: 0");
    host.start();
    host.wait_for_state("ready");
    for round in 1..=2 {
        let stays = host.served(&mut host.program(&["hold", "600", "--stay"]));
        let before = host.wait_for_status("a server", |status| some_server(status).is_some());
        host.fault();
        let named = format!("these clients have not ended: {} (", stays.id());
        host.wait_for_status("who is in the way", |status| {
            let daemon = control_daemon(status);
            daemon["state"] == "faulted" && daemon["reason"].as_str().unwrap().contains(&named)
        });
        assert_eq!(host.log().matches("has recovered").count(), round - 1, "{}", host.log());
        stays.end();
        let after = host.wait_for_state("ready");
        assert_eq!(host.log().matches("has recovered").count(), round, "{}", host.log());
        assert_eq!(server(&after), server(&before));
        a_client_is_served(&host);
    }
    assert_eq!(host.stop().code(), Some(0));
}

/// A fault hits a server on one of its GPUs. The server's clients on other GPUs run to their end before the service ends the
/// server.
#[test]
fn a_fault_spares_clients_on_other_gpus() {
    let (host, elsewhere, stays) = faulted_beside_a_client_that_is_well();
    let before = server(&host.json(&["status"]).unwrap());
    let status = host.wait_for_status("left running for its clients", |status| {
        control_daemon(status)["reason"].as_str().unwrap().contains("since it has 1 client on healthy GPUs")
    });
    assert_eq!(server(&status), before);
    assert!(alive(elsewhere.id()));
    assert_eq!(host.list().len(), 32);
    elsewhere.end();
    assert_ne!(server(&recovered(&host, 32)), before);
    stays.end();
}

/// Returns a host and two clients of one server. A fault has hit the server on one GPU. The first client works on another GPU.
/// The second client is on the faulted GPU and does not end.
fn faulted_beside_a_client_that_is_well() -> (Host, Client, Client) {
    let mut host = Host::new("h200x8");
    host.configure("cuda_mps_fault_grace: 1");
    host.start();
    host.wait_for_state("ready");
    let uuid =
        |gpu: usize| fs::read_to_string(host.path(&format!("gpus/{gpu}/uuid"))).unwrap().trim().to_owned();
    let (two, five) = (uuid(2), uuid(5));
    let elsewhere = host.served(host.program(&["hold", "600"]).env("CUDA_VISIBLE_DEVICES", &five));
    let stays = host.served(host.program(&["hold", "600", "--stay"]).env("CUDA_VISIBLE_DEVICES", &two));
    host.program(&["fault"]).env("CUDA_VISIBLE_DEVICES", &two).output().unwrap();
    (host, elsewhere, stays)
}

/// The file system of the log directory is full. Clients are still served with their limits, and a new service and a new
/// control daemon still start. The service reports the full file system, and later that the log can be written again.
fn no_room_for_the_log(topology: Topology) {
    if !root_or_skip("no_room_for_the_log") {
        return;
    }
    let mut host = Host::with_topology(topology, "h200");
    let mount = Mount::at(host.path("mps/log"), "size=64k");
    host.start();
    let before = host.wait_for_state("ready");
    let bystander = Bystander::start(&host, &host.pipe(), Duration::from_secs(600));
    mount.fill();
    host.devices(&[&format!("{ENTRY} 2")]);
    host.reload();
    recovered(&host, 2);
    assert_eq!(host.front_end(&host.pipe(), "get_default_device_pinned_mem_limit 0"), "70G\n");
    waits_for_log(&host, "the file system of the log is full");
    restart(&mut host);
    let status = recovered(&host, 2);
    assert_eq!(control_pid(&status), control_pid(&before));
    a_client_is_served(&host);
    bystander.check();
    drop(bystander);
    signal_pid(control_pid(&before), Signal::KILL);
    wait_for("another control daemon", || {
        let status = host.json(&["status"])?;
        let pid = control_daemon(&status)["pid"].as_u64()?;
        (status["service"]["state"] == "ready" && pid != u64::from(control_pid(&before))).then_some(())
    });
    a_client_is_served(&host);
    mount.make_room();
    host.reload();
    waits_for_log(&host, "can be written again");
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

/// The file system of the state file is full. A control daemon that is recorded in the state file runs on, and the next service
/// takes it over. The service starts no control daemon that it can't record, since the next service would not know it. Until
/// there is space, the status says why no control daemon starts.
fn no_room_for_the_state_file(topology: Topology) {
    if !root_or_skip("no_room_for_the_state_file") {
        return;
    }
    let mut host = Host::with_topology(topology, "h200");
    let mount = Mount::at(host.path("run"), "size=16k");
    host.start();
    let before = host.wait_for_state("ready");
    let bystander = Bystander::start(&host, &host.pipe(), Duration::from_secs(600));
    mount.fill();
    restart(&mut host);
    let status = recovered(&host, 4);
    assert_eq!(control_pid(&status), control_pid(&before));
    bystander.check();
    drop(bystander);
    for control_daemon in control_daemons(&host) {
        signal_pid(control_daemon, Signal::KILL);
    }
    host.wait_until_it_fails("is not started, since its PID can't be saved in the state file");
    assert_eq!(host.list().len(), 4);
    assert_eq!(control_daemons(&host), [0; 0]);
    wait_for("no process that waits", || launchers(&host).is_empty().then_some(()));
    restart(&mut host);
    host.wait_until_it_fails("is not started, since its PID can't be saved in the state file");
    assert_eq!(control_daemons(&host), [0; 0]);
    mount.make_room();
    recovered(&host, 4);
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
    assert_eq!(host.compute_mode(0), "Default");
}

/// The bus restarts while clients compute. The clients and their control daemon run on, and the service publishes the same
/// slices on the new bus.
fn the_bus_restarts_while_clients_run(topology: Topology) {
    let (mut random, _seed) = Random::seeded("the_bus_restarts_while_clients_run");
    let mut host = Host::serving_as(topology, "h200");
    let before = host.wait_for_state("ready");
    let bystander = Bystander::start(&host, &host.pipe(), Duration::from_secs(600));
    for round in 0..4 {
        host.stop_bus();
        std::thread::sleep(random.millis(300));
        if round == 2 {
            restart(&mut host);
        }
        host.restart_bus();
        let status = host.wait_for_state("ready");
        assert_eq!(control_pid(&status), control_pid(&before));
        assert_eq!(host.list().len(), 4);
        bystander.check();
    }
    wait_for("daemon, control daemon, server and client alone", || {
        let control_daemons = host.json(&["status"])?["control_daemons"].as_array()?.len();
        let clients = host.clients().len();
        (host.processes().len() == 1 + 2 * control_daemons + clients).then_some(())
    });
}

/// Other programs change or remove the service's files, limits and compute modes. The service restores these, or reports the
/// change if it can't be undone. No client ends.
fn what_others_break_is_repaired(topology: Topology) {
    let (mut random, _seed) = Random::seeded("what_others_break_is_repaired");
    let mut host = Host::serving_as(topology, "h200");
    let before = host.wait_for_state("ready");
    let bystander = Bystander::start(&host, &host.pipe(), Duration::from_secs(600));
    let (state_file, id) = (host.path("run/state.json"), host.control_daemon_id());
    // A state file that is only partly written may already contain the PID. So the test parses the whole JSON.
    let whole = || {
        let bytes = fs::read(&state_file).unwrap_or_default();
        let state_file: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        state_file["control_daemons"][&id]["process"]["pid"] == control_pid(&before)
    };
    for _ in 0..12 {
        match random.below(6) {
            0 => {
                let set = host.command("nvidia-smi").args(["-i", "0", "-c", "DEFAULT"]).output().unwrap();
                assert!(set.status.success(), "{}", text(&set));
            }
            1 => fs::remove_file(&state_file).unwrap(),
            2 => {
                let length = fs::metadata(&state_file).unwrap().len();
                let file = File::options().write(true).open(&state_file).unwrap();
                file.set_len(random.below(length)).unwrap();
            }
            3 => fs::write(&state_file, "{\"version\": 99}").unwrap(),
            // The service may write to its runtime directory meanwhile, which would make the removal fail. So the test renames
            // the directory first.
            4 => {
                fs::rename(host.path("run"), host.path("gone")).unwrap();
                fs::remove_dir_all(host.path("gone")).unwrap();
            }
            _ => _ = fs::remove_file(host.control_log()),
        }
        host.reload();
        wait_for("a whole state file", || whole().then_some(()));
        wait_for("the compute mode", || {
            (host.compute_mode(0) == host.compute_mode_while_served()).then_some(())
        });
        if random.below(2) == 0 {
            restart(&mut host);
        }
        let status = recovered(&host, 4);
        assert_eq!(control_pid(&status), control_pid(&before));
        bystander.check();
    }
    // The service can't make the control daemon write to a new log file. It reports the removal once.
    let _ = fs::remove_file(host.control_log());
    host.reload();
    waits_for_log(
        &host,
        "another program removed this log, so the control daemon writes to the removed file",
    );
    drop(bystander);
    assert_eq!(host.stop().code(), Some(0));
    assert_eq!(host.compute_mode(0), "Default");
    host.nothing_runs();
}

/// The state file is lost while the service does not run. The next service takes the running control daemon for a foreign one,
/// waits for its clients' end, and then replaces it.
fn a_state_file_lost_while_down_costs_no_client(topology: Topology) {
    for loss in ["removed", "cut", "garbage"] {
        let mut host = Host::serving_as(topology, "h200");
        let before = host.wait_for_state("ready");
        let mut client = host.client();
        host.signal(Signal::KILL);
        host.ended();
        let state_file = host.path("run/state.json");
        match loss {
            "removed" => fs::remove_file(&state_file).unwrap(),
            "cut" => File::options().write(true).open(&state_file).unwrap().set_len(40).unwrap(),
            _ => fs::write(&state_file, [0xff; 700]).unwrap(),
        }
        host.start();
        host.wait_until_it_fails(&format!("PID {}", control_pid(&before)));
        assert_eq!(host.list().len(), 4);
        assert!(client.try_wait().unwrap().is_none());
        assert!(alive(control_pid(&before)));
        client.end();
        let after = recovered(&host, 4);
        assert_ne!(control_pid(&after), control_pid(&before));
        assert_eq!(host.stop().code(), Some(0));
        host.nothing_runs();
    }
}

/// The removal of a control daemon's directory ends no client. The service can no longer command the control daemon, and the
/// status says so. The service replaces this control daemon at once if it has no clients, otherwise after their end.
fn a_removed_pipe_directory_is_made_again(topology: Topology) {
    for with_client in [false, true] {
        let mut host = Host::serving_as(topology, "h200");
        let before = host.wait_for_state("ready");
        let client = with_client.then(|| host.client());
        fs::remove_dir_all(host.private()).unwrap();
        host.reload();
        if let Some(mut client) = client {
            host.wait_until_it_fails("the directory of the control daemon was removed or replaced");
            assert_eq!(host.list().len(), 4);
            restart(&mut host);
            host.wait_until_it_fails("the directory of the control daemon was removed or replaced");
            assert!(client.try_wait().unwrap().is_none());
            assert!(alive(control_pid(&before)));
            client.end();
        }
        let after = wait_for("another control daemon", || {
            let status = host.json(&["status"])?;
            let pid = control_daemon(&status)["pid"].as_u64()?;
            (status["service"]["state"] == "ready" && pid != u64::from(control_pid(&before)))
                .then_some(status)
        });
        let all = after["control_daemons"].as_array().unwrap().len();
        assert_eq!(control_daemons(&host).len(), all);
        a_client_is_served(&host);
        assert_eq!(host.stop().code(), Some(0));
        assert_eq!(host.compute_mode(0), "Default");
    }
}

/// Sends `commands` commands to the control daemon, each of which adds about 140 bytes to the control daemon's log.
fn flood(host: &Host, pipe: &Path, commands: usize) {
    let mut front_end = host
        .command("nvidia-cuda-mps-control")
        .env("CUDA_MPS_PIPE_DIRECTORY", pipe)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let commands = "get_default_active_thread_percentage\n".repeat(commands);
    front_end.stdin.take().unwrap().write_all(commands.as_bytes()).unwrap();
    front_end.wait().unwrap();
}

/// The service rotates a log that is too large while processes write to it. It understands the lines after the rotation and
/// misses no fault. The next service also misses no fault. The rotation has removed the lines with the server's limits, so the
/// next service sets the limits again.
fn the_log_is_rotated_under_load(topology: Topology) {
    let mut host = Host::with_topology(topology, "h200");
    host.configure("cuda_mps_log_max_size: 1");
    host.start();
    let before = host.wait_for_state("ready");
    let bystander = Bystander::start(&host, &host.pipe(), Duration::from_secs(600));
    for killed in [true, false, true] {
        // The test waits until the service has read most of the log, and has written to the state file how far it has read.
        // Then the test makes the log large enough for a rotation.
        let length = |name: &str| Some(fs::metadata(host.control_log().with_file_name(name)).ok()?.len());
        while length("control.log").unwrap() < 700_000 {
            flood(&host, &host.pipe(), 500);
        }
        host.reload();
        read_up_to(&host, 690_000);
        flood(&host, &host.pipe(), 4000);
        wait_for("a rotated log", || {
            let done = length("control.log.1")? > 1 << 20 && length("control.log")? <= 1 << 20;
            done.then_some(())
        });
        if killed {
            restart(&mut host);
        }
        let status = recovered(&host, 4);
        assert_eq!(control_pid(&status), control_pid(&before));
        assert_eq!(server(&status), server(&before));
        bystander.check();
        let limit =
            host.front_end(&host.pipe(), &format!("get_device_pinned_mem_limit {} 0", server(&status)));
        assert_eq!(limit, "35G\n");
        fs::remove_file(host.control_log().with_file_name("control.log.1")).unwrap();
    }
    assert!(!host.log().contains("wrote no limits"), "{}", host.log());
    drop(bystander);
    let listener = Listener::start(&host);
    let hit = host.client();
    let pid = hit.id();
    host.fault();
    listener.wait_for_fault(&[pid]);
    assert_eq!(exit_code(hit), Some(4));
}

/// A GPU falls off the bus and comes back. Meanwhile its slices stay listed as unhealthy, and a client on another GPU computes
/// on.
fn a_gpu_that_is_lost_and_back(topology: Topology) {
    let mut host = Host::serving_as(topology, "h200x8");
    let before = host.wait_for_state("ready");
    let bystander = Bystander::start(&host, &host.pipe(), Duration::from_secs(600));
    for _ in 0..2 {
        host.plant("gpus/3/lost", "");
        host.reload();
        host.wait_for_state("degraded");
        let devices = host.list();
        let sick = devices.iter().filter(|device| device["healthy"] == false).count();
        assert_eq!((devices.len(), sick), (32, 4));
        bystander.check();
        host.clear("gpus/3/lost");
        host.reload();
        let status = recovered(&host, 32);
        assert_eq!(control_pid(&status), control_pid(&before));
        bystander.check();
    }
    drop(bystander);
    assert_eq!(host.stop().code(), Some(0));
    assert_eq!(host.compute_mode(3), "Default");
}

fn critical_errors_are_told_after_a_failed_wait(topology: Topology) {
    let mut host = Host::serving_as(topology, "h200x8");
    host.plant("error/nvmlEventSetWait", "15");
    host.meets_xid(5, 79);
    waits_for_log(&host, "NVML does not report critical errors");
    host.clear("error/nvmlEventSetWait");
    wait_for("an error of another GPU", || {
        let mut file = File::options().create(true).append(true).open(host.path("gpus/2/xids")).unwrap();
        writeln!(file, "31").unwrap();
        host.log().contains("met a critical error, Xid 31").then_some(())
    });
    assert_eq!(host.stop().code(), Some(0));
}

fn xid_is_told(host: &Host, gpu: usize, number: u32) {
    let name = host.json(&["status"]).unwrap()["gpus"][gpu]["addr"].as_str().unwrap().to_owned();
    let words = format!("GPU {name} met a critical error, Xid {number}");
    waits_for_log(host, &words);
    wait_for("the event", || {
        let events = host.busctl("ListEvents");
        events
            .as_array()
            .unwrap()
            .iter()
            .any(|event| event["text"].as_str().unwrap().starts_with(&words))
            .then_some(())
    });
}

/// A change within this time comes from an early health check, since the regular health checks of an unused GPU are 30 s apart.
const BEFORE_THE_NEXT_LOOK: Duration = Duration::from_secs(10);

/// Waits for a change that an early health check causes. `longest` must be shorter than the time to the next regular health
/// check, which would cause the change too.
fn wait_within<T>(longest: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + longest;
    wait_for(what, || {
        let found = look();
        assert!(found.is_some() || Instant::now() < deadline, "not within {longest:?}: {what}");
        found
    })
}

/// The service reports a critical error of a GPU, and checks the GPU at once. So it restores a changed compute mode of the GPU
/// before the next regular health check.
fn a_critical_error_is_told_and_looked_into(topology: Topology) {
    let mut host = Host::serving_as(topology, "h200");
    host.plant("gpus/0/compute_mode", "Default");
    host.meets_xid(0, 31);
    wait_within(BEFORE_THE_NEXT_LOOK, "the compute mode is back", || {
        (host.compute_mode(0) == host.compute_mode_while_served()).then_some(())
    });
    xid_is_told(&host, 0, 31);
    assert_eq!(host.stop().code(), Some(0));
}

/// After a critical error that asks for a reset, the GPU takes no new client, even if the service restarts. Its present clients
/// run on. An administrator's reload makes the GPU take clients again.
#[test]
fn a_gpu_that_needs_a_reset_takes_no_new_client() {
    let mut host = Host::serving("h200x8");
    host.wait_for_state("ready");
    let bystander = Bystander::start(&host, &host.pipe(), Duration::from_secs(600));
    let healthy = |host: &Host| host.list().iter().filter(|device| device["healthy"] == true).count();
    let sick = host.list()[4 * 3]["addr"].as_str().unwrap().to_owned();
    let before = host.environment_of(&sick);
    // These GPUs still take clients after their errors: a program can cause the Xids 13 and 94, and for the Xid 154 the driver
    // recommends no action.
    host.plant("gpus/2/recovery_action", "0");
    for (gpu, number) in [(1, 13), (1, 94), (2, 154)] {
        host.meets_xid(gpu, number);
        xid_is_told(&host, usize::try_from(gpu).unwrap(), number);
    }
    assert_eq!(healthy(&host), 32);
    // GPU 5 takes no new client, since the driver recommends a reboot. The service does not know the GPU's Xid 999.
    host.plant("gpus/5/recovery_action", "2");
    host.meets_xid(3, 48);
    host.meets_xid(5, 999);
    wait_for("two GPUs that take no client", || (healthy(&host) == 24).then_some(()));
    let status = host.wait_for_state("degraded");
    let reason = status["gpus"][3]["reason"].as_str().unwrap();
    assert!(
        reason.starts_with("the GPU takes no new client before a reset: Xid 48 (a double-bit ECC error); "),
        "{reason}"
    );
    assert!(reason.contains("--gpu-reset") && reason.contains("yunion-mpsctl reload"), "{reason}");
    let refused = host.mpsctl(&["run", &sick, "--", "true"]);
    assert!(!refused.status.success() && text(&refused).contains("Xid 48"), "{}", text(&refused));
    // A container from before the error still has the environment of its slice. A program in it finds no control daemon.
    let late = host.program(&["props"]).envs(before).stdout(Stdio::piped()).output().unwrap();
    assert!(text(&late).contains("(46)"), "{}", text(&late));
    host.signal(Signal::KILL);
    host.ended();
    host.start();
    host.wait_for_state("degraded");
    assert_eq!(healthy(&host), 24);
    bystander.check();
    host.reload();
    host.wait_for_state("ready");
    assert_eq!(healthy(&host), 32);
    bystander.check();
    drop(bystander);
    // An administrator can reset a GPU only while the service is stopped. So after a stop, the next service no longer asks for
    // a reset.
    host.meets_xid(3, 48);
    wait_for("a GPU that takes no client", || (healthy(&host) == 28).then_some(()));
    assert_eq!(host.stop().code(), Some(0));
    host.start();
    host.wait_for_state("ready");
    assert_eq!(host.stop().code(), Some(0));
}

/// A GPU falls off the bus and loses its UUID, with a critical error at the same moment. The service reports this error. It
/// also reports later errors of other GPUs.
fn a_critical_error_of_a_lost_gpu_is_told(topology: Topology) {
    let mut host = Host::serving_as(topology, "h200x8");
    host.plant("gpus/3/lost", "");
    host.meets_xid(3, 79);
    wait_within(BEFORE_THE_NEXT_LOOK, "its slices are not healthy", || {
        let healthy = |device: &Value| device["healthy"] == true;
        (host.list().iter().filter(|device| healthy(device)).count() == 28).then_some(())
    });
    xid_is_told(&host, 3, 79);
    host.meets_xid(5, 31);
    xid_is_told(&host, 5, 31);
    assert_eq!(host.log().matches("met a critical error").count(), 2, "{}", host.log());
    assert_eq!(host.stop().code(), Some(0));
}

fn fake_clock() -> PathBuf {
    let libraries = fs::read_dir("/usr/lib").unwrap().flatten();
    let mut places = libraries.map(|entry| entry.path().join("faketime/libfaketime.so.1"));
    places.find(|library| library.exists()).expect("libfaketime is not there; install faketime")
}

/// The system time jumps by days while a client runs. Nothing that the service does depends on the system time, not even the
/// take-over of control daemons from before the jump.
fn a_clock_that_jumps_disturbs_nobody(topology: Topology) {
    let mut host = Host::with_topology(topology, "h200");
    let clock = host.path("clock");
    let set = |offset: &str| fs::write(&clock, offset).unwrap();
    set("+0d");
    host.set("LD_PRELOAD", fake_clock().to_str().unwrap());
    host.set("FAKETIME_TIMESTAMP_FILE", clock.to_str().unwrap());
    host.set("FAKETIME_NO_CACHE", "1");
    host.set("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    host.start();
    let before = host.wait_for_state("ready");
    let running = host.client();
    let newest = |host: &Host| {
        let status = host.json(&["status"]).unwrap();
        let events = status["events"].as_array().unwrap().clone();
        let last = events.last().unwrap();
        (last["at"].as_i64().unwrap(), last["text"].as_str().unwrap().to_owned())
    };
    let (began, _) = newest(&host);
    for (offset, days) in [("-3d", -3), ("+5d", 5), ("-1d", -1)] {
        set(offset);
        host.reload();
        // The service lists its events in the order in which they happened. So the newest event is the last one, even if its
        // system time is earlier.
        let (at, text) = wait_for("an event of that day", || {
            let (at, text) = newest(&host);
            const DAY: i64 = 86_400_000_000;
            ((at - began + DAY / 2).div_euclid(DAY) == days).then_some((at, text))
        });
        assert!(text.contains("reload") || text.contains("ready"), "{text} at {at}");
        recovered(&host, 4);
        restart(&mut host);
        let after = recovered(&host, 4);
        assert_eq!(control_pid(&after), control_pid(&before));
        assert_eq!(server(&after), server(&before));
        a_client_is_served(&host);
    }
    running.end();
    assert_eq!(host.stop().code(), Some(0));
    assert_eq!(host.compute_mode(0), "Default");
}

/// Runs `yunion-mpsctl status` until `done` returns true. Returns the median and the longest time of a run.
fn latency_of_status(host: &Host, mut done: impl FnMut() -> bool) -> (Duration, Duration) {
    let mut taken = Vec::new();
    let deadline = Instant::now() + DEADLINE * 4;
    while !done() {
        assert!(Instant::now() < deadline, "not done after {:?}", DEADLINE * 4);
        let asked = Instant::now();
        assert!(host.json(&["status"]).is_some(), "no answer");
        taken.push(asked.elapsed());
    }
    taken.sort_unstable();
    (taken.get(taken.len() / 2).copied().unwrap_or_default(), taken.last().copied().unwrap_or_default())
}

/// A tenant can add 64 MiB of lines to a control daemon's log at once. While the service reads them, it still answers callers
/// and replaces a control daemon that ends. It rotates the log, and understands the message about a fault that comes after
/// these lines.
fn a_burst_in_the_log_keeps_nobody_waiting(topology: Topology) {
    let mut host = Host::with_topology(topology, "h200");
    host.configure("cuda_mps_log_max_size: 1");
    host.start();
    let before = control_pid(&host.wait_for_state("ready"));
    let line = format!(
        "[2026-11-21 02:13:53.814 Server   879] Received new client request for {{PID: 1, Context ID: 0}}{}\n",
        " ".repeat(400)
    );
    let burst = line.repeat((64 << 20) / line.len());
    let write = || {
        let mut log = File::options().append(true).open(host.control_log()).unwrap();
        log.write_all(burst.as_bytes()).unwrap();
    };
    let length =
        |name: &str| fs::metadata(host.control_log().with_file_name(name)).map_or(0, |file| file.len());

    write();
    let begun = Instant::now();
    let (median, longest) = latency_of_status(&host, || {
        length("control.log.1") >= burst.len() as u64 && length("control.log") < 1 << 20
    });
    let _ = writeln!(
        std::io::stderr(),
        "64 MiB in the log: status took {median:?} (median), {longest:?} (longest); kept and rotated after {:?}",
        begun.elapsed()
    );
    assert!(longest < Duration::from_secs(15), "{longest:?}");
    let hit = host.client();
    host.fault();
    assert_eq!(exit_code(hit), Some(4));
    waits_for_log(&host, "met a fatal GPU error on device 0; clients that were hit");
    recovered(&host, 4);

    write();
    signal_pid(before, Signal::KILL);
    let killed = Instant::now();
    let (median, longest) = latency_of_status(&host, || {
        let status = host.json(&["status"]).unwrap();
        status["service"]["state"] == "ready" && control_daemon(&status)["pid"] != before
    });
    let _ = writeln!(
        std::io::stderr(),
        "the same and a kill: status took {median:?} (median), {longest:?} (longest); served again after {:?}",
        killed.elapsed()
    );
    assert!(longest < Duration::from_secs(15), "{longest:?}");
    a_client_is_served(&host);
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

fn lines_without_end_keep_no_request_waiting(topology: Topology) {
    let mut host = Host::serving_as(topology, "h200");
    let mut log = File::options().append(true).open(host.control_log()).unwrap();
    log.write_all("x\n".repeat(32 << 20).as_bytes()).unwrap();
    let asked = Instant::now();
    assert!(host.mpsctl(&["apply", "--force"]).status.success());
    assert!(asked.elapsed() < DEADLINE, "{:?}", asked.elapsed());
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

/// A tenant can't flood the host's journal through the control daemon's log. The service passes on a limited number of lines
/// and counts the rest.
fn a_burst_of_warnings_does_not_flood_the_journal(topology: Topology) {
    let mut host = Host::serving_as(topology, "h200");
    let line = "[2026-11-21 02:13:53.814 Server   879] Failed to accept new client. Maximum number of clients (48) reached.\n";
    let mut log = File::options().append(true).open(host.control_log()).unwrap();
    log.write_all(line.repeat(20_000).as_bytes()).unwrap();
    waits_for_log_with_reloads(&host, "lines left out of the journal; see this file");
    let passed_on = host.log().matches("Failed to accept new client").count();
    assert!((1..2000).contains(&passed_on), "{passed_on}");
    assert_eq!(host.log().matches("refused a client").count(), 1);
    assert_eq!(host.stop().code(), Some(0));
}

fn the_end_of_a_control_daemon_tells_how_many_lines_were_left_out(topology: Topology) {
    let mut host = Host::serving_as(topology, "h200");
    let status = host.wait_for_state("ready");
    let (before, all) = (control_pid(&status), status["control_daemons"].as_array().unwrap().len());
    let line = "[2026-11-21 02:13:53.814 Server   879] Failed to accept new client\n";
    let mut log = File::options().append(true).open(host.control_log()).unwrap();
    log.write_all(line.repeat(20_000).as_bytes()).unwrap();
    waits_for_log(&host, "Failed to accept new client");
    signal_pid(before, Signal::KILL);
    let second_start = |log: &str| log.match_indices("started as PID").nth(all).map(|(at, _)| at);
    wait_for("the next control daemon", || second_start(&host.log()));
    let log = host.log();
    let told = log.find("lines left out of the journal; see this file");
    assert!(told.is_some_and(|told| Some(told) < second_start(&log)), "{told:?}");
    assert_eq!(host.stop().code(), Some(0));
}

/// Reloads the service until its log has words that only a health check writes. Each reload makes a health check.
fn waits_for_log_with_reloads(host: &Host, words: &str) {
    wait_for(words, || {
        host.reload();
        host.log().contains(words).then_some(())
    });
}

/// A file of another owner, a link or a FIFO is at the path of the control daemon's log. The service does not write to this
/// file, and the open of the FIFO does not block the service.
fn only_a_file_of_ours_is_the_log(topology: Topology) {
    for kind in ["link", "fifo", "hard link", "theirs"] {
        if kind == "theirs" && !root_or_skip("only_a_file_of_ours_is_the_log (theirs)") {
            continue;
        }
        let mut host = Host::with_topology(topology, "h200");
        let (log, elsewhere) = (host.control_log(), host.path("elsewhere"));
        fs::create_dir_all(log.parent().unwrap()).unwrap();
        fs::write(&elsewhere, "not a log\n").unwrap();
        match kind {
            "link" => std::os::unix::fs::symlink(&elsewhere, &log).unwrap(),
            "hard link" => fs::hard_link(&elsewhere, &log).unwrap(),
            "fifo" => assert!(Command::new("mkfifo").arg(&log).status().unwrap().success()),
            _ => {
                fs::write(&log, "theirs\n").unwrap();
                std::os::unix::fs::chown(&log, Some(65534), None).unwrap();
            }
        }
        host.start();
        host.wait_for_state("ready");
        let refused = host.control_log().with_file_name("control.log.refused-1");
        assert!(fs::symlink_metadata(&refused).is_ok(), "{kind}: {}", host.log());
        assert!(host.log().contains("was renamed to control.log.refused-1"), "{kind}: {}", host.log());
        assert_eq!(fs::read_to_string(&elsewhere).unwrap(), "not a log\n", "{kind}");
        let own = fs::symlink_metadata(&log).unwrap();
        assert!(own.is_file() && own.len() > 0, "{kind}");
        assert_eq!(host.stop().code(), Some(0));
        host.nothing_runs();
    }
}

/// The test replaces the log by a link to another file while the service copies the log for its rotation. The service must not
/// change the other file.
fn a_rotated_log_empties_no_other_file(topology: Topology) {
    for _ in 0..2 {
        let mut host = Host::with_topology(topology, "h200");
        host.configure("cuda_mps_log_max_size: 1");
        host.start();
        host.wait_for_state("ready");
        let (log, elsewhere) = (host.control_log(), host.path("elsewhere"));
        fs::write(&elsewhere, "not a log\n").unwrap();
        let line = format!("{}\n", "x".repeat(4000));
        let burst = line.repeat((16 << 20) / line.len());
        File::options().append(true).open(&log).unwrap().write_all(burst.as_bytes()).unwrap();
        let kept = host.control_log().with_file_name("control.log.1");
        let deadline = Instant::now() + DEADLINE;
        // The service copies the log within milliseconds. So the test looks for the copy every 100 us.
        while !kept.exists() {
            assert!(Instant::now() < deadline, "the log is never rotated");
            std::thread::sleep(Duration::from_micros(100));
        }
        fs::remove_file(&log).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &log).unwrap();
        wait_for("the whole copy", || (kept.metadata().unwrap().len() >= burst.len() as u64).then_some(()));
        waits_for_log_with_reloads(
            &host,
            "another program removed this log, so the control daemon writes to the removed file",
        );
        assert_eq!(fs::read_to_string(&elsewhere).unwrap(), "not a log\n");
        assert_eq!(host.stop().code(), Some(0));
    }
}

fn event_texts(status: &Value) -> Vec<&str> {
    status["events"].as_array().unwrap().iter().map(|event| event["text"].as_str().unwrap()).collect()
}

/// With wrong modes on the pipe directory or the socket, users can't connect. A health check and a take-over restore the modes,
/// and the service reports the change.
fn users_that_were_kept_out_are_let_in_again(topology: Topology) {
    let mut host = Host::serving_as(topology, "h200");
    let before = control_pid(&host.wait_for_state("ready"));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    // The socket in the pipe directory is a hard link to the socket in the private directory, so both have the same mode.
    let socket = host.private().join("control");
    for taken_over in [false, true] {
        for (path, bad, good) in [(host.pipe(), 0o700, 0o755), (socket.clone(), 0o600, 0o666)] {
            host.let_change("mps/pipe");
            fs::set_permissions(&path, PermissionsExt::from_mode(bad)).unwrap();
            if taken_over {
                restart(&mut host);
            } else {
                host.reload();
            }
            wait_for("a mode that lets users in", || (mode(&path) == good).then_some(()));
            waits_for_log(
                &host,
                &format!("mode of {} was {bad:04o}; the service has set {good:04o} again", path.display()),
            );
        }
        assert_eq!(control_pid(&host.wait_for_state("ready")), before);
    }
    assert_eq!(host.stop().code(), Some(0));
}

/// The owner of a control daemon's socket can decide which users connect. If that owner is not root, the GPUs are unhealthy,
/// and the service replaces the control daemon when it has no clients.
fn a_socket_of_another_user_is_not_healthy(topology: Topology) {
    if !root_or_skip("a_socket_of_another_user_is_not_healthy") {
        return;
    }
    let mut host = Host::serving_as(topology, "h200");
    let before = control_pid(&host.wait_for_state("ready"));
    let client = host.client();
    std::os::unix::fs::chown(host.pipe().join("control"), Some(65534), None).unwrap();
    host.reload();
    host.wait_until_it_fails("control: belongs to user 65534");
    assert!(host.its_slices().iter().all(is_unhealthy));
    client.end();
    let after = recovered_after(&host, before);
    assert_eq!(fs::metadata(host.pipe().join("control")).unwrap().uid(), 0);
    assert_ne!(after, before);
    assert_eq!(host.stop().code(), Some(0));
}

fn recovered_after(host: &Host, before: u32) -> u32 {
    let status = host.wait_for_status("another control daemon", |status| {
        let pid = control_daemon(status)["pid"].as_u64();
        status["service"]["state"] == "ready" && pid.is_some() && pid != Some(before.into())
    });
    control_pid(&status)
}

/// A GPU with 12 of 12 clients in each of its four slices is healthy, and all clients compute. The 49th client is refused, and
/// the service reports the refusal. When a client ends, another client can come.
#[test]
fn a_full_gpu_stays_healthy_and_says_so() {
    let mut host = Host::serving("h200");
    let findings = |host: &Host| -> BTreeMap<String, String> {
        let root = host.path("sysroot").display().to_string();
        let output = host.mpsctl(&["doctor", "--json", "--sysroot", &root]);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let findings = report["findings"].as_array().unwrap().iter();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        findings.map(|finding| (text(&finding["name"]), text(&finding["severity"]))).collect()
    };
    let before = findings(&host);
    let slices: Vec<Command> =
        (0..48).map(|n| host.program_of(&format!("00:06.0-{}", n % 4), &["hold", "600"])).collect();
    let mut clients: Vec<Client> =
        slices.into_iter().map(|mut command| Client::start(&mut command)).collect();
    wait_for("48 clients", || (host.front_end(&host.pipe(), "ps").lines().count() == 49).then_some(()));
    let is_full = |status: &Value| {
        let gpu = &status["gpus"][0];
        status["service"]["state"] == "ready"
            && gpu["healthy"] == true
            && gpu["reason"].as_str().unwrap().starts_with("full: all 48 places for clients are taken")
    };
    // The control daemon has refused no client yet, so its log does not say that the GPU is full. A health check counts the
    // clients and finds the GPU full.
    host.reload();
    host.wait_for_status("a full GPU", is_full);
    let full_slices = || {
        let all = host.list();
        let full = all.iter().all(|slice| slice["clients"] == 12 && slice["max_clients"] == 12);
        full.then_some(all)
    };
    for slice in wait_for("full slices", full_slices) {
        assert_eq!(slice["healthy"], true, "{slice}");
    }
    let mut after = findings(&host);
    assert_eq!(after.remove("slices-full").as_deref(), Some("info"));
    assert_eq!(after, before, "nothing else is wrong with it");

    let mut one_too_many = Client::start(&mut host.program(&["hold", "600"]));
    let status = wait_for("one that is turned away", || one_too_many.try_wait().unwrap());
    assert_eq!(status.code(), Some(3), "it is busy");
    let status = host.wait_for_status("the one that was turned away", |status| {
        status["events"].to_string().contains("refused a client: its limit is 48 clients")
    });
    assert!(is_full(&status), "{status:#}");
    assert!(!host.log().contains("ERROR"), "{}", host.log());

    clients.pop().unwrap().end();
    host.wait_for_status("a place", |status| {
        let told =
            status["events"].to_string().contains("GPU 00:06.0 is no longer full: new clients can connect");
        told && status["gpus"][0]["reason"] == ""
    });
    clients.push(host.client());
    clients.into_iter().for_each(Client::end);
    assert_eq!(host.stop().code(), Some(0));
}

/// Without multi-user mode, a client of another user waits until all clients of the first user have ended. The service reports
/// the waiting client in an event, and `clients` lists it as waiting.
#[test]
fn a_client_that_waits_for_another_user_is_told() {
    if !root_or_skip("a_client_that_waits_for_another_user_is_told") {
        return;
    }
    let mut host = Host::serving("tesla-p40");
    let first = host.client();
    let mut second = host
        .command("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "cuda-client", "hold", "600"])
        .env("CUDA_MPS_PIPE_DIRECTORY", host.pipe())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let came = Instant::now();
    let waiting = || {
        let clients = host.json(&["clients"])?;
        clients.as_array().unwrap().iter().find(|client| client["waiting"] == true).cloned()
    };
    let listed = wait_for("a client that waits", waiting);
    let _ = writeln!(std::io::stderr(), "a client that waits is listed after {:?}", came.elapsed());
    assert_eq!(
        (&listed["pid"], &listed["uid"], &listed["gpu"]),
        (&second.id().into(), &65534.into(), &"".into())
    );
    let told = format!(
        "client {} (cuda-client) of user 65534 waits until the clients of user 0 have ended: this control daemon serves one \
         user at a time",
        second.id()
    );
    let status = host.wait_for_status("the event", |status| event_texts(status).contains(&told.as_str()));
    assert_eq!(event_texts(&status).iter().filter(|text| text.contains(" waits ")).count(), 1);
    let table = text(&host.mpsctl(&["clients"]));
    assert!(table.contains("WAITS: 1 of these"), "{table}");
    first.end();
    wait_for("a client that waits no more", || {
        let listed = host.json(&["clients"])?;
        let clients = listed.as_array().unwrap();
        (clients.len() == 1 && clients[0]["waiting"] == false && clients[0]["pid"] == second.id())
            .then_some(())
    });
    second.kill().unwrap();
    second.wait().unwrap();
    assert_eq!(host.stop().code(), Some(0));
}

/// The service can open no more files when the driver comes back. The message says so, and does not advise to reinstall the
/// driver, which is in order.
#[test]
fn too_few_descriptors_are_called_so() {
    let mut host = Host::new("h200");
    host.clear("driver");
    host.start();
    host.wait_for_failure("the NVIDIA driver is not loaded");
    let pid = host.pid();
    let limit = |soft: &str| {
        let set =
            Command::new("prlimit").args(["--pid", &pid.to_string(), &format!("--nofile={soft}:")]).output();
        assert!(set.as_ref().unwrap().status.success(), "{}", text(&set.unwrap()));
    };
    let before = text(
        &Command::new("prlimit")
            .args(["--pid", &pid.to_string(), "-n", "-o", "SOFT", "--noheadings"])
            .output()
            .unwrap(),
    );
    // The limit of open files is set to the lowest free descriptor number. So the service can open no further file.
    let numbers = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let numbers: Vec<u32> =
        numbers.map(|entry| entry.file_name().to_str().unwrap().parse().unwrap()).collect();
    let first_free = (0..u32::MAX).find(|number| !numbers.contains(number)).unwrap();
    limit(&first_free.to_string());
    let status = host.wait_for_status("a reason that names files", |status| {
        let reason = status["service"]["state_reason"].as_str().unwrap();
        assert!(!reason.contains("reinstall"), "{reason}");
        reason.contains("LimitNOFILE=")
    });
    assert_eq!(status["service"]["state"], "failed");
    limit(before.trim());
    host.plant("driver", "580.159.04\n");
    host.wait_for_state("ready");
    assert_eq!(host.stop().code(), Some(0));
}

/// The name of a process can contain line breaks. A part of the name must not become a line of the service's log.
fn the_name_of_a_process_makes_no_line_of_the_log(topology: Topology) {
    let host = Host::serving_as(topology, "h200");
    let program = host.path("a\nFORGED line");
    // `cp` writes the program. If the test process itself wrote it, a child that another thread forks meanwhile would have the
    // file open for writing. The kernel would then refuse to execute the file.
    assert!(Command::new("cp").arg("/bin/sleep").arg(&program).status().unwrap().success());
    let mut child = Command::new(&program).arg("600").spawn().unwrap();
    let pid = child.id();
    wait_for("its name", || {
        let name = fs::read(format!("/proc/{pid}/comm")).unwrap();
        name.starts_with(b"a\nFORGED").then_some(())
    });
    host.plant(&format!("gpus/0/processes/{pid}"), &format!("compute 519 {}", start_time(pid)));
    host.reload();
    waits_for_log(&host, "is used without an MPS server of this service by");
    child.kill().unwrap();
    child.wait().unwrap();
    let log = host.log();
    assert!(log.contains("a\\nFORGED line"), "{log}");
    assert!(!log.lines().any(|line| line.starts_with("FORGED")), "{log}");
}
