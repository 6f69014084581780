//! Tests of slices with a control daemon each, where a GPU fault hits the clients of one slice only.

use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::Value;

use crate::support::client::{Client, own_user};
use crate::support::host::{Host, alive, signal_pid, succeeded, text};
use crate::support::wait::wait_for;

const SLICES: [&str; 4] = ["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"];

/// The exit status of a simulated client that has lost its GPU work.
const LOST: i32 = 4;

fn serving() -> Host {
    let mut host = Host::new("h200");
    host.configure("cuda_mps_topology: per_slice");
    host.start();
    host.wait_for_state("ready");
    host
}

fn client(host: &Host, slice: &str) -> Client {
    let client = Client::start(host.program_of(slice, &["hold", "600"]).stdout(Stdio::null()));
    host.wait_until_listed(client.id());
    client
}

fn clients(host: &Host) -> Vec<(&'static str, Client)> {
    SLICES.iter().flat_map(|slice| [(); 2].map(|()| (*slice, client(host, slice)))).collect()
}

fn daemon<'s>(status: &'s Value, id: &str) -> &'s Value {
    let daemons = status["control_daemons"].as_array().unwrap();
    daemons.iter().find(|one| one["id"] == id).unwrap_or_else(|| panic!("no {id} in {status:#}"))
}

fn pid_of(host: &Host, id: &str) -> u32 {
    u32::try_from(daemon(&host.json(&["status"]).unwrap(), id)["pid"].as_u64().unwrap()).unwrap()
}

fn unserved(host: &Host) -> Vec<String> {
    let sick = host.list().into_iter().filter(|device| device["healthy"] == false);
    sick.map(|device| device["addr"].as_str().unwrap().to_owned()).collect()
}

fn only_its_clients_are_lost(slice: &str, clients: &mut Vec<(&'static str, Client)>) {
    for (_, lost) in clients.iter_mut().filter(|(its, _)| *its == slice) {
        let status = wait_for("the end of its clients", || lost.try_wait().unwrap());
        assert_eq!(status.code(), Some(LOST));
    }
    clients.retain(|(its, _)| *its != slice);
    assert!(clients.iter().all(|(_, other)| alive(other.id())));
}

fn all_slices_take_clients(host: &Host) {
    host.wait_for_state("ready");
    for slice in SLICES {
        let done = host.program_of(slice, &["hold", "0.1"]).output().unwrap();
        assert!(done.status.success(), "{slice}: {}", text(&done));
    }
}

#[test]
fn each_slice_has_a_control_daemon_of_its_own() {
    let mut host = serving();
    assert_eq!(host.compute_mode(0), "Default");
    let status = host.json(&["status"]).unwrap();
    for slice in SLICES {
        let daemon = daemon(&status, slice);
        assert_eq!((&daemon["state"], &daemon["gpus"].as_array().unwrap().len()), (&"ready".into(), &1));
    }
    for device in host.list() {
        let pipe = device["pipe_directory"].as_str().unwrap();
        let name = device["addr"].as_str().unwrap().replace(':', "_");
        assert!(pipe.ends_with(&format!("mps/pipe/{name}")), "{pipe}");
        assert_eq!((&device["isolation"], &device["mps_thread_percentage"]), (&"slice".into(), &100.into()));
        assert_eq!(device["max_clients"], 48);
        assert_eq!(device["mps_memory_limit"], 35942);
    }
    let mut held = clients(&host);
    for (slice, one) in &held {
        assert_eq!(host.listed(one.id()).unwrap()["device"], *slice);
    }
    assert!(host.clients().iter().all(|one| one["bypass"] == false), "{:#?}", host.clients());
    wait_for("all clients counted", || host.list().iter().all(|device| device["clients"] == 2).then_some(()));
    // The servers of the other slices' control daemons are no bypasses.
    assert!(!host.log().contains("without an MPS server of this service"), "{}", host.log());
    held.clear();
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
    assert_eq!(host.compute_mode(0), "Default");
}

#[test]
fn a_fault_stays_in_its_slice() {
    let mut host = serving();
    let mut held = clients(&host);
    let culprit = host.program_of(SLICES[1], &["fault"]).output().unwrap();
    assert_eq!(culprit.status.code(), Some(LOST), "{}", text(&culprit));
    only_its_clients_are_lost(SLICES[1], &mut held);
    wait_for("the fault", || host.log().contains("fatal").then_some(()));
    assert!(unserved(&host).iter().all(|slice| slice == SLICES[1]), "{:?}", unserved(&host));
    all_slices_take_clients(&host);
    assert!(held.iter().all(|(_, other)| alive(other.id())));
    drop(held);
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

#[test]
fn a_killed_control_daemon_takes_its_slice_alone() {
    let mut host = serving();
    let mut held = clients(&host);
    signal_pid(pid_of(&host, SLICES[2]), Signal::KILL);
    only_its_clients_are_lost(SLICES[2], &mut held);
    all_slices_take_clients(&host);
    assert_eq!(daemon(&host.json(&["status"]).unwrap(), SLICES[2])["restarts"], 1);
    for slice in [SLICES[0], SLICES[1], SLICES[3]] {
        assert_eq!(daemon(&host.json(&["status"]).unwrap(), slice)["restarts"], 0);
    }
    drop(held);
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn a_killed_service_finds_every_slice_at_work() {
    let mut host = serving();
    let held = clients(&host);
    let before: Vec<u32> = SLICES.map(|slice| pid_of(&host, slice)).into();
    host.signal(Signal::KILL);
    host.ended();
    host.start();
    host.wait_for_state("ready");
    assert_eq!(Vec::from(SLICES.map(|slice| pid_of(&host, slice))), before);
    assert!(held.iter().all(|(_, one)| alive(one.id())));
    assert_eq!(host.compute_mode(0), "Default");
    all_slices_take_clients(&host);
    drop(held);
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

/// A host with a GPU that has one control daemon for all slices, and a GPU that has a control daemon for each slice.
#[test]
fn a_host_has_gpus_of_both_kinds() {
    let mut host = Host::new("h200x8");
    let entry = |node: u32, isolation: &str| {
        format!("path: /dev/dri/renderD{node}, type: NVIDIA_MPS, virtual_number: 4, isolation: {isolation}")
    };
    host.devices(&[&entry(128, "gpu"), &entry(129, "slice")]);
    host.start();
    let status = host.wait_for_state("ready");
    let ids: Vec<&str> = (status["control_daemons"].as_array().unwrap().iter())
        .map(|one| one["id"].as_str().unwrap())
        .collect();
    assert_eq!(ids, ["2d:00.0-0", "2d:00.0-1", "2d:00.0-2", "2d:00.0-3", "shared"]);
    assert_eq!(["Exclusive_Process", "Default"], [host.compute_mode(0), host.compute_mode(1)]);
    let held: Vec<Client> = ["1b:00.0-1", "2d:00.0-1", "2d:00.0-2"].map(|slice| client(&host, slice)).into();
    assert!(host.clients().iter().all(|one| one["bypass"] == false), "{:#?}", host.clients());
    // The new configuration wants one control daemon for both GPUs. This control daemon starts when the clients of all slices
    // have ended.
    host.devices(&[&entry(128, "gpu"), &entry(129, "gpu")]);
    let changes = text(&host.mpsctl(&["check", "--sysroot", &host.path("sysroot").display().to_string()]));
    assert!(changes.contains("control daemon 2d:00.0-"), "{changes}");
    host.reload();
    host.wait_for_status("a GPU that waits", |status| {
        status["gpus"][1]["reason"].as_str().unwrap().contains("still has the GPU")
    });
    assert!(held.iter().all(|one| alive(one.id())));
    held.into_iter().for_each(Client::end);
    let status = host.wait_for_state("ready");
    assert_eq!(status["control_daemons"].as_array().unwrap().len(), 1, "{status:#}");
    assert_eq!(host.compute_mode(1), "Exclusive_Process");
    let held = client(&host, "2d:00.0-1");
    host.devices(&[&entry(128, "gpu"), &entry(129, "slice")]);
    host.reload();
    host.wait_for_status("a GPU that waits", |status| {
        status["gpus"][1]["reason"].as_str().unwrap().contains("still has the GPU")
    });
    held.end();
    let status = host.wait_for_state("ready");
    assert_eq!(status["control_daemons"].as_array().unwrap().len(), 5, "{status:#}");
    assert_eq!(host.compute_mode(1), "Default");
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
    assert_eq!(["Default", "Default"], [host.compute_mode(0), host.compute_mode(1)]);
}

/// Slices are added and removed while other slices of the GPU have clients. Each control daemon waits only for the clients of
/// its own slice.
#[test]
fn slices_come_and_go_beside_the_others() {
    let mut host = Host::new("h200");
    let entry = |slices: u32| {
        format!("path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: {slices}, isolation: slice")
    };
    host.devices(&[&entry(2)]);
    host.start();
    host.wait_for_state("ready");
    let held = [SLICES[0], SLICES[1]].map(|slice| client(&host, slice));
    let before = [SLICES[0], SLICES[1]].map(|slice| pid_of(&host, slice));
    host.devices(&[&entry(4)]);
    host.reload();
    host.wait_for_status("four slices", |status| {
        status["control_daemons"].as_array().unwrap().len() == 4 && status["service"]["state"] == "ready"
    });
    assert_eq!([SLICES[0], SLICES[1]].map(|slice| pid_of(&host, slice)), before);
    all_slices_take_clients(&host);
    host.devices(&[&entry(1)]);
    host.reload();
    host.wait_for_status("one that retires", |status| {
        let ids = status["control_daemons"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap());
        ids.eq([SLICES[0], SLICES[1]])
    });
    assert_eq!(unserved(&host), [""; 0]);
    let [stays, goes] = held;
    assert!(alive(stays.id()) && alive(goes.id()));
    goes.end();
    host.wait_for_status("one control daemon", |status| {
        status["control_daemons"].as_array().unwrap().len() == 1 && status["service"]["state"] == "ready"
    });
    assert!(alive(stays.id()));
    stays.end();
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

/// A stop restores the compute mode from before the service's start, even if it was not DEFAULT.
#[test]
fn an_exclusive_gpu_is_exclusive_again_afterwards() {
    let mut host = Host::new("h200");
    host.plant("gpus/0/compute_mode", "Exclusive_Process");
    assert_eq!(host.compute_mode(0), "Exclusive_Process");
    host.configure("cuda_mps_topology: per_slice");
    host.start();
    host.wait_for_state("ready");
    assert_eq!(host.compute_mode(0), "Default");
    host.signal(Signal::KILL);
    host.ended();
    host.start();
    host.wait_for_state("ready");
    assert_eq!(host.stop().code(), Some(0));
    assert_eq!(host.compute_mode(0), "Exclusive_Process");
    // In `EXCLUSIVE_PROCESS`, only one server can use the GPU. The configuration forbids the service to change the compute
    // mode.
    host.configure("cuda_mps_topology: per_slice\ncuda_mps_set_compute_mode: false");
    host.start();
    host.wait_for_failure(
        "lets the server of only one slice use the GPU; change the compute mode with nvidia-smi -i \
         0000:00:06.0 -c DEFAULT",
    );
    assert_eq!(host.stop().code(), Some(0));
}

/// The service has reported a bypass, and NVML then fails to list the processes. The service must not conclude that the bypass
/// has ended, since it would later report the bypass a second time.
#[test]
fn a_program_without_mps_stays_known_while_nvml_lists_nobody() {
    let mut host = serving();
    let mut stranger = host.program(&["hold", "600"]);
    let stranger =
        Client::start(stranger.env("CUDA_MPS_PIPE_DIRECTORY", host.path("nowhere")).stdout(Stdio::null()));
    host.wait_for_state("degraded");
    // The test sets a wrong compute mode and makes the service check the GPU. When the service has restored the compute mode,
    // this check is complete.
    let looks_at_the_gpu = |host: &Host| {
        host.plant("gpus/0/compute_mode", "Prohibited");
        host.meets_xid(0, 31);
        wait_for("a look at the GPU", || (host.compute_mode(0) == "Default").then_some(()));
    };
    host.plant("gpus/0/error/nvmlDeviceGetComputeRunningProcesses", "999");
    looks_at_the_gpu(&host);
    looks_at_the_gpu(&host);
    assert_eq!(host.listed(stranger.id()).unwrap()["bypass"], true);
    host.clear("gpus/0/error/nvmlDeviceGetComputeRunningProcesses");
    looks_at_the_gpu(&host);
    host.wait_for_state("degraded");
    assert!(!host.log().contains("of this service has ended: PID"), "{}", host.log());
    assert_eq!(host.log().matches("WARN GPU 00:06.0 is used without").count(), 1, "{}", host.log());
    drop(stranger);
    wait_for("its end", || host.log().contains("of this service has ended: PID").then_some(()));
    host.wait_for_state("ready");
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn a_program_without_mps_is_told_once() {
    let mut host = serving();
    let held = clients(&host);
    let mut program = host.program(&["hold", "600"]);
    program.env("CUDA_MPS_PIPE_DIRECTORY", host.path("nowhere")).stdout(Stdio::null());
    let stranger = Client::start(&mut program);
    let status = host.wait_for_state("degraded");
    let words = format!(
        "used without an MPS server of this service by PID {} (cuda-client) of user {}",
        stranger.id(),
        own_user()
    );
    assert_eq!(status["service"]["state_reason"], format!("GPU 00:06.0 is {words}"));
    assert_eq!(unserved(&host), [""; 0]);
    let bypasses: Vec<Value> = host.clients().into_iter().filter(|one| one["bypass"] == true).collect();
    assert_eq!(bypasses.len(), 1, "{bypasses:#?}");
    stranger.end();
    host.wait_for_state("ready");
    assert_eq!(host.log().matches("WARN GPU 00:06.0 is used without").count(), 1, "{}", host.log());
    assert_eq!(host.log().matches("of this service has ended: PID").count(), 1, "{}", host.log());
    assert!(held.iter().all(|(_, one)| alive(one.id())));
    drop(held);
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn a_drained_slice_takes_nobody() {
    let mut host = serving();
    let held = client(&host, SLICES[1]);
    assert!(host.mpsctl(&["drain", SLICES[1]]).status.success());
    let refused = host.mpsctl(&["run", SLICES[1], "--", "true"]);
    assert!(text(&refused).contains("drained for new clients"), "{}", text(&refused));
    assert_eq!(unserved(&host), [SLICES[1]]);
    assert!(alive(held.id()));
    assert!(host.mpsctl(&["undrain", SLICES[1]]).status.success());
    all_slices_take_clients(&host);
    assert!(host.mpsctl(&["terminate", "--device", SLICES[1]]).status.success());
    drop(held);
    assert_eq!(host.stop().code(), Some(0));
}

/// A client does not end after a fault. Its slice takes no new client until the grace period is over, even if the service
/// restarts. Other slices are not affected.
#[test]
fn a_fault_outlives_the_service_in_its_slice_alone() {
    let mut host = Host::new("h200");
    host.configure("cuda_mps_topology: per_slice\ncuda_mps_fault_grace: 600");
    host.start();
    host.wait_for_state("ready");
    let held = clients(&host);
    let stays = Client::start(host.program_of(SLICES[1], &["hold", "600", "--stay"]).stdout(Stdio::null()));
    host.wait_until_listed(stays.id());
    let before = pid_of(&host, SLICES[1]);
    assert_eq!(host.program_of(SLICES[1], &["fault"]).output().unwrap().status.code(), Some(LOST));
    let is_faulted = |status: &Value| daemon(status, SLICES[1])["state"] == "faulted";
    let status = host.wait_for_status("a fault in one slice", is_faulted);
    assert_eq!(status["service"]["state"], "degraded");
    assert_eq!(unserved(&host), [SLICES[1]]);
    host.signal(Signal::KILL);
    host.ended();
    host.configure("cuda_mps_topology: per_slice\ncuda_mps_fault_grace: 1");
    host.start();
    host.wait_for_state("ready");
    assert_eq!(pid_of(&host, SLICES[1]), before, "its server alone was ended");
    all_slices_take_clients(&host);
    let others = held.iter().filter(|(slice, _)| *slice != SLICES[1]);
    assert!(others.into_iter().all(|(_, other)| alive(other.id())));
    drop((held, stays));
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

/// A control daemon that waits for a stopped client serves no new client. The control daemons of other slices still do.
#[test]
fn a_control_daemon_that_hangs_keeps_its_slice_alone_from_clients() {
    let mut host = serving();
    let held = clients(&host);
    let victim = held.iter().find(|(slice, _)| *slice == SLICES[0]).unwrap().1.id();
    signal_pid(victim, Signal::STOP);
    let server = daemon(&host.json(&["status"]).unwrap(), SLICES[0])["servers"][0].clone();
    let mut terminate = host
        .command("nvidia-cuda-mps-control")
        .env("CUDA_MPS_PIPE_DIRECTORY", host.path("mps/pipe.private/00_06.0-0"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    writeln!(terminate.stdin.take().unwrap(), "terminate_client {server} {victim}").unwrap();
    host.wait_for_status("one that does not answer", |status| {
        daemon(status, SLICES[0])["reason"].as_str().unwrap().contains("did not answer")
    });
    assert_eq!(unserved(&host), [SLICES[0]]);
    for slice in &SLICES[1..] {
        let done = host.program_of(slice, &["hold", "0.1"]).output().unwrap();
        assert!(done.status.success(), "{slice}: {}", text(&done));
    }
    // One control daemon hangs. The service can still list all clients, and can end the GPU work of clients of other slices.
    let listed = host.json(&["clients"]).unwrap();
    let pids: BTreeSet<u64> =
        listed.as_array().unwrap().iter().filter_map(|one| one["pid"].as_u64()).collect();
    assert_eq!(pids, held.iter().map(|(_, one)| u64::from(one.id())).collect(), "{listed:#}");
    succeeded(&host.mpsctl(&["terminate", "--device", SLICES[3]]));
    let mut released = held.iter().filter(|(slice, _)| *slice == SLICES[3]).map(|(_, one)| one.id());
    wait_for("the end of the released", || released.clone().all(|pid| !alive(pid)).then_some(()));
    assert!(released.next().is_some());
    signal_pid(victim, Signal::CONT);
    terminate.wait().unwrap();
    all_slices_take_clients(&host);
    let lost = held.iter().filter(|(slice, one)| *slice != SLICES[3] && !alive(one.id()));
    assert_eq!(lost.count(), 1, "the victim");
    drop(held);
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn a_full_slice_takes_no_place_of_another() {
    let mut host = serving();
    let mut starting: Vec<Command> = (0..48).map(|_| host.program_of(SLICES[0], &["hold", "600"])).collect();
    let held: Vec<Client> =
        starting.iter_mut().map(|program| Client::start(program.stdout(Stdio::null()))).collect();
    wait_for("48 clients", || (host.list()[0]["clients"] == 48).then_some(()));
    let refused = host.program_of(SLICES[0], &["hold", "0.1"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(3), "it is busy: {}", text(&refused));
    let full =
        "slice 00:06.0-0: full: all 48 places for clients are taken; the next client gets CUDA error 46";
    let status = host.wait_for_status("a full slice", |status| status["gpus"][0]["reason"] == full);
    assert_eq!(status["service"]["state"], "ready");
    assert_eq!(unserved(&host), [""; 0]);
    let reasons: Vec<Value> = host.list().iter().map(|device| device["reason"].clone()).collect();
    assert!(
        reasons[0].as_str().unwrap().starts_with("full: all 48 places for clients are taken"),
        "{reasons:?}"
    );
    assert!(reasons[1..].iter().all(|reason| reason == ""), "{reasons:?}");
    let other = host.program_of(SLICES[1], &["hold", "0.1"]).output().unwrap();
    assert!(other.status.success(), "{}", text(&other));
    drop(held);
    host.wait_for_status("places", |status| status["gpus"][0]["reason"] == "");
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn limits_changed_by_others_are_set_back_in_their_slice() {
    let mut host = serving();
    let own = host.path("mps/pipe.private/00_06.0-2");
    host.front_end(&own, "set_default_active_thread_percentage 7");
    host.front_end(&own, "set_default_device_pinned_mem_limit 0 1G");
    host.reload();
    wait_for("the limits", || {
        let percentage = host.front_end(&own, "get_default_active_thread_percentage");
        let memory = host.front_end(&own, "get_default_device_pinned_mem_limit 0");
        (percentage == "100.0\n" && memory == "35G\n").then_some(())
    });
    let told = |line: &&str| line.contains("another program changed");
    let of_slice = |line: &str| line.contains("mps_control=00:06.0-2");
    wait_for("words about it", || host.log().lines().any(|line| told(&line)).then_some(()));
    assert!(host.log().lines().filter(told).all(of_slice), "{}", host.log());
    host.wait_for_state("ready");
    assert_eq!(host.stop().code(), Some(0));
}
