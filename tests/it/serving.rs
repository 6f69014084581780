//! Tests of the service's main purpose on every simulated board: it makes slices of GPUs from two configuration files.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::client::Client;
use crate::support::host::{
    Host, alive, assert_has, binaries, control_daemon, control_pid, signal_pid, text,
};
use crate::support::wait::wait_for;

fn variable(pid: u32, name: &str) -> String {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
    let environment = String::from_utf8(environment).unwrap();
    let found = environment.split('\0').find_map(|variable| variable.strip_prefix(name)?.strip_prefix('='));
    found.unwrap_or_else(|| panic!("{pid} has no {name}")).to_owned()
}

fn names(devices: &[Value]) -> Vec<&str> {
    devices.iter().map(|device| device["addr"].as_str().unwrap()).collect()
}

/// Serves the host of Cloudpods' manual, from start to stop. Users of the platform see the rows that the service
/// lists. After the stop, nothing of the service is on the host.
#[test]
fn the_p40_is_served_the_whole_way() {
    let mut host = Host::new("tesla-p40");
    assert_eq!(host.compute_mode(0), "Default");
    host.start();
    let status = host.wait_for_state("ready");
    assert_eq!(host.compute_mode(0), "Exclusive_Process");
    // The driver of this board has no multi-user mode.
    assert_has(
        control_daemon(&status),
        &json!({"id": "shared", "state": "ready", "reason": "", "starts": 1, "multiuser": false}),
    );

    // The service connects to the socket without a command, to learn which process listens there. The control daemon complains
    // about this in its log. The service must not pass this complaint on.
    let log = fs::read_to_string(host.path("mps/log/control.log")).unwrap();
    assert!(log.contains("Unable to accept connection"), "{log}");
    assert!(!host.log().contains("WARN mps: "), "{}", host.log());

    let golden = |ordinal: usize| {
        json!({
            "addr": format!("00:06.0-{ordinal}"),
            "dev_type": "NVIDIA_MPS",
            "model": "Tesla P40",
            "vendor_device_id": "10de:1b38",
            "numa_node": -1,
            "device_path": "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400",
            "pcie_info": {
                "lane_width": 16, "throughput": "15.76 GB/s", "transfer_rate_per_lane": "8GT/s", "version": "3.0",
            },
            "index": -1,
            "device_minor": -1,
            "mps_memory_total": 23040,
            "mps_memory_limit": 5760,
            "mps_thread_percentage": 25,
            "memory_size": 5760,
            "compute_mode": "Exclusive_Process",
            "healthy": true,
            "pipe_directory": host.path("mps/pipe"),
        })
    };
    let from_the_bus = host.busctl("ListDevices");
    for devices in [host.list(), from_the_bus.as_array().unwrap().clone()] {
        assert_eq!(devices.len(), 4);
        for (ordinal, device) in devices.iter().enumerate() {
            assert_has(device, &golden(ordinal));
        }
    }

    assert_eq!(host.stop().code(), Some(0));
    assert_eq!(host.compute_mode(0), "Default");
    host.nothing_runs();
    assert!(host.json(&["list"]).is_none(), "devices are published though nobody serves them");
}

/// The GPU enforces limits. The service is ready only after a server has written the planned limits to its log, and a client of
/// a slice has these limits.
#[test]
fn the_h200_is_ready_when_its_server_has_its_limits() {
    let mut host = Host::new("h200");
    host.start();
    let status = host.wait_for_state("ready");
    assert_has(control_daemon(&status), &json!({"state": "ready", "multiuser": true, "starts": 1}));
    assert_has(
        &status["gpus"][0],
        &json!({"confirmed_thread_percentage": 25, "confirmed_memory_limit": 35942}),
    );
    let servers = control_daemon(&status)["servers"].as_array().unwrap();
    assert_eq!(servers.len(), 1);
    let server_status = format!("get_server_status {}", servers[0]);
    assert_eq!(host.front_end(&host.path("mps/pipe"), &server_status), "ACTIVE\n");
    let events: Vec<&str> =
        status["events"].as_array().unwrap().iter().map(|event| event["text"].as_str().unwrap()).collect();
    let place =
        |event: &str| events.iter().position(|text| *text == event).unwrap_or_else(|| panic!("{events:?}"));
    assert!(place(&format!("server {} is ready", servers[0])) < place("control daemon shared is ready"));

    let props = host.mpsctl(&["run", "00:06.0-1", "--", "cuda-client", "props"]);
    let said = text(&props);
    assert!(props.status.success() && said.contains(" sms 32 ") && said.contains(" free 35797 "), "{said}");
    let too_much = host.mpsctl(&["run", "00:06.0-1", "--", "cuda-client", "alloc", "40000"]);
    assert!(text(&too_much).contains("out of memory"), "{}", text(&too_much));

    assert_eq!(host.stop().code(), Some(0));
    assert_eq!(host.compute_mode(0), "Default");
    host.nothing_runs();
}

#[test]
fn without_a_server_it_is_not_ready() {
    let mut host = Host::new("h200");
    host.plant("mps/fault/server-start-fails", "");
    host.start();
    let status = host.wait_for_failure("exited with status 1 before it was ready");
    assert_eq!(status["gpus"][0]["healthy"], false);
    host.clear("mps/fault/server-start-fails");
    host.wait_for_state("ready");
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn why_a_server_does_not_start_is_said() {
    const WORDS: [&str; 2] =
        ["Failed to start : invalid argument", "Server encountered a fatal exception. Shutting down"];
    let ends = format!("; its log ends: {}", WORDS.join(" | "));
    let mut host = Host::new("h200");
    host.plant("mps/fault/server-start-fails", WORDS[0]);
    host.start();
    let status = host.wait_for_failure("exited with status 1 before it was ready");
    let reason = control_daemon(&status)["reason"].as_str().unwrap();
    assert!(reason.ends_with(&ends), "{reason}");
    for words in WORDS {
        assert!(host.log().contains(&format!("WARN mps: {words}")), "{}", host.log());
    }
    host.clear("mps/fault/server-start-fails");
    host.wait_for_state("ready");
    assert_eq!(host.stop().code(), Some(0));

    // On this board, the service starts no server in advance. A server starts with the first client.
    let mut host = Host::serving("tesla-p40");
    host.plant("mps/fault/server-start-fails", WORDS[0]);
    let client = host.program(&["props"]).output().unwrap();
    assert!(!client.status.success(), "{}", text(&client));
    host.wait_for_status("why there is no server", |status| {
        let mut events =
            status["events"].as_array().unwrap().iter().map(|event| event["text"].as_str().unwrap());
        events.any(|event| event.contains("exited with status 1") && event.ends_with(&ends))
    });
    assert_eq!(host.stop().code(), Some(0));
}

/// A host with `NVSwitch` needs the fabric manager, which may start late at a boot. Until then no server can start. The status
/// says so, the pauses between attempts stay short, and the service logs no error.
#[test]
fn a_fabric_manager_that_comes_late_is_waited_for() {
    let mut host = Host::new("h200");
    host.plant("mps/fault/server-start-fails", "Failed to start : system not yet initialized");
    host.start();
    let status = host.wait_for_failure("error 802: the fabric manager, which connects");
    assert_eq!(
        (&control_daemon(&status)["state"], &status["service"]["state"]),
        (&json!("waiting"), &json!("degraded"))
    );
    let before = control_daemon(&status)["pid"].as_u64();
    let starts = |host: &Host| {
        let logs = fs::read_to_string(host.path("mps/log/control.log")).unwrap_or_default();
        logs.matches("Starting new server").count()
    };
    // If the pauses doubled, the eighth attempt would come after more than a minute.
    wait_for("the eighth attempt", || (starts(&host) >= 8).then_some(()));
    host.clear("mps/fault/server-start-fails");
    let status = host.wait_for_state("ready");
    assert_eq!(control_daemon(&status)["pid"].as_u64(), before);
    assert!(!host.log().contains("ERROR"), "{}", host.log());
    assert_eq!(host.stop().code(), Some(0));
}

/// After an incomplete upgrade of the driver, a front end fails or can't be executed. The running control daemon may still
/// work. So the service does not end it, with or without a client, and shows the reason.
#[test]
fn a_front_end_that_fails_says_nothing_of_the_control_daemon() {
    for with_client in [true, false] {
        let mut host = Host::serving("h200");
        let before = control_pid(&host.wait_for_state("ready"));
        let client = with_client.then(|| host.client());
        let [program, whole, new, runs] =
            ["nvidia-cuda-mps-control", "whole", "new", "runs"].map(|name| host.path("bin").join(name));
        fs::rename(&program, &whole).unwrap();
        // A link to itself takes the place of the front end. The kernel can't execute such a link.
        symlink("nvidia-cuda-mps-control", &program).unwrap();
        host.reload();
        let is_told = |words: &str| {
            let words = format!("nvidia-cuda-mps-control{words}");
            let status = host.wait_for_failure(&words);
            assert_eq!(control_daemon(&status)["state"], "waiting");
            assert!(host.log().contains(&words), "{words}: {}", host.log());
        };
        is_told(": Too many levels of symbolic links");
        fs::write(&new, format!("#!/bin/sh\necho >>{}\nexit 1\n", runs.display())).unwrap();
        fs::set_permissions(&new, Permissions::from_mode(0o755)).unwrap();
        fs::rename(&new, &program).unwrap();
        is_told(" ended with exit status: 1");
        // The service would end a silent control daemon after fewer than eight checks. So eight runs of the failing front end
        // prove that the service does not take this failure for silence of the control daemon.
        let has_run = || fs::read_to_string(&runs).is_ok_and(|runs| runs.lines().count() >= 8);
        wait_for("the eighth look", || has_run().then_some(()));
        assert!(alive(before) && !host.log().contains("was removed"), "{}", host.log());
        fs::rename(&whole, &program).unwrap();
        assert_eq!(control_pid(&host.wait_for_state("ready")), before);
        assert!(client.is_none_or(|mut client| client.try_wait().unwrap().is_none()));
        let served = host.program(&["props"]).output().unwrap();
        assert!(served.status.success(), "{}", text(&served));
        assert_eq!(host.stop().code(), Some(0));
        host.nothing_runs();
    }
}

/// NVML of the drivers 535.43 to 535.86 writes longer records of processes. The service must still list the clients and must
/// not crash.
#[test]
fn a_driver_with_longer_records_of_processes_is_understood() {
    let mut host = Host::new("h200");
    host.plant("driver", "535.86.10\n");
    host.start();
    host.wait_for_state("ready");
    let clients: Vec<Client> = (0..7).map(|_| host.client()).collect();
    for _ in 0..2 {
        for client in &clients {
            host.wait_until_listed(client.id());
            let listed = host.listed(client.id()).unwrap();
            assert!(listed["memory_mib"].as_u64().is_some_and(|mib| mib > 0), "{listed:#}");
            assert_eq!(listed["bypass"], false);
        }
        // The next service reads the GPU's processes while clients run.
        host.signal(Signal::KILL);
        host.ended();
        host.start();
        host.wait_for_state("ready");
    }
    assert!(!host.log().contains("without an MPS server of this service"), "{}", host.log());
    drop(clients);
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn clients_are_listed_with_their_slices() {
    let mut host = Host::serving("h200");
    assert_eq!(host.busctl("ListClients"), json!([]));
    let mut run = host
        .command(binaries().join("yunion-mpsctl"))
        .args(["run", "00:06.0-1", "--", "cuda-client", "hold", "600"])
        .spawn()
        .unwrap();
    let client = host.wait_for_only_client();
    assert_has(&client, &json!({"device": "00:06.0-1", "gpu": "GPU-168acfc9-c926-5401-354d-2910ddcd391b"}));
    assert!(client["command"].as_str().unwrap().contains("cuda-client"), "{client}");
    let pid = u32::try_from(client["pid"].as_u64().unwrap()).unwrap();
    let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    assert!(command.ends_with("cuda-client\0hold\x00600\0"), "{command:?}");
    // The simulated driver has a file for each client, with the text `client MIB START`.
    let entry = fs::read_to_string(host.path(&format!("gpus/0/processes/{pid}"))).unwrap();
    let memory: u64 = entry.split(' ').nth(1).unwrap().parse().unwrap();
    assert_eq!(client["memory_mib"], memory);

    signal_pid(run.id(), Signal::TERM);
    // `run` ends the GPU work before it passes the signal on. The program exits after CUDA error 810, or by the signal if the
    // signal arrives before the program has noticed the error.
    let status = run.wait().unwrap().code();
    assert!([Some(4), Some(128 + Signal::TERM.as_raw())].contains(&status), "{status:?}");
    assert!(!alive(pid));
    wait_for("no client", || (host.busctl("ListClients") == json!([])).then_some(()));
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn one_control_daemon_for_each_of_eight_gpus() {
    let mut host = Host::new("h200x8");
    host.configure("cuda_mps_topology: per_gpu");
    host.start();
    let status = host.wait_for_state("ready");
    let control_daemons = status["control_daemons"].as_array().unwrap();
    let uuids: BTreeSet<&str> =
        status["gpus"].as_array().unwrap().iter().map(|gpu| gpu["device_path"].as_str().unwrap()).collect();
    let ids: BTreeSet<&str> =
        control_daemons.iter().map(|control_daemon| control_daemon["id"].as_str().unwrap()).collect();
    assert_eq!((ids.len(), &ids), (8, &uuids));
    let mut pids = BTreeSet::new();
    for control_daemon in control_daemons {
        let uuid = control_daemon["id"].as_str().unwrap();
        let (pipe, log) = (host.path("mps/pipe").join(uuid), host.path("mps/log").join(uuid));
        assert_has(
            control_daemon,
            &json!({"state": "ready", "gpus": [uuid], "pipe_directory": pipe, "log_directory": log}),
        );
        assert!(log.join("control.log").is_file());
        assert_eq!(host.front_end(&pipe, "get_default_active_thread_percentage"), "25.0\n");
        assert_eq!(host.front_end(&pipe, "get_default_device_pinned_mem_limit 0"), "35G\n");
        let pid = u32::try_from(control_daemon["pid"].as_u64().unwrap()).unwrap();
        assert_eq!(variable(pid, "CUDA_VISIBLE_DEVICES"), uuid);
        pids.insert(pid);
    }
    assert_eq!(pids.len(), 8);
    for device in host.list() {
        let own = host.path("mps/pipe").join(device["device_path"].as_str().unwrap());
        assert_eq!(Path::new(device["pipe_directory"].as_str().unwrap()), own);
    }
    for gpu in status["gpus"].as_array().unwrap() {
        assert_has(gpu, &json!({"confirmed_thread_percentage": 25, "confirmed_memory_limit": 35942}));
    }

    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
    for gpu in 0..8 {
        assert_eq!(host.compute_mode(gpu), "Default", "GPU {gpu}");
    }
}

/// Cloudpods names a GPU by its PCI address without the domain. Such an entry means the only GPU with this address in
/// any domain.
#[test]
fn a_gpu_in_another_domain_is_found_without_it() {
    let mut host = Host::new("mixed");
    host.devices(&["path: 1a:00.0, type: NVIDIA_MPS, virtual_number: 4"]);
    host.start();
    host.wait_for_state("ready");
    assert_eq!(names(&host.list()), [0, 1, 2, 3].map(|ordinal| format!("0001:1a:00.0-{ordinal}")));
    let environment = |name: &str| host.mpsctl(&["env", name]);
    let said = text(&environment("1a:00.0-2"));
    assert!(said.contains("YUNION_MPS_DEVICE=0001:1a:00.0-2"), "{said}");
    assert_eq!(environment("1a:00.0-2"), environment("0001:1a:00.0-2"));
    assert_eq!(environment("0000:1a:00.0-2").status.code(), Some(1));
    assert_eq!(host.stop().code(), Some(0));
}

/// On a host with all kinds of GPUs, the status has a reason for each GPU that can't be served. The service serves the other
/// GPUs, and ignores graphics cards of other vendors.
#[test]
fn a_mixed_host_serves_what_it_can() {
    let mut host = Host::new("mixed");
    host.start();
    let status = host.wait_for_state("degraded");
    let reason = status["service"]["state_reason"].as_str().unwrap();
    assert!(reason.contains("1 of 3 GPUs not served; 5e:00.0: MIG is on"), "{reason}");

    let devices = host.list();
    let slices = |gpu: &str, count: usize| (0..count).map(|n| format!("{gpu}-{n}")).collect::<Vec<_>>();
    let expected = [slices("3b:00.0", 8), slices("5e:00.0", 8), slices("0001:1a:00.0", 4)].concat();
    assert_eq!(names(&devices), expected);
    for device in &devices {
        let golden = match device["base_addr"].as_str().unwrap() {
            "3b:00.0" => json!({"healthy": true, "mps_memory_limit": 10240, "mps_thread_percentage": 12}),
            "5e:00.0" => json!({"healthy": false, "servable": false, "compute_mode": "Default"}),
            _ => {
                json!({"healthy": true, "servable": true, "mps_memory_limit": 35942, "mps_thread_percentage": 25})
            }
        };
        assert_has(device, &golden);
    }
    // A container with a slice of a GPU in MIG mode would find no GPU. So `env` refuses the slice.
    let refused = host.mpsctl(&["env", "3b:00.0-0", "5e:00.0-0"]);
    let said = text(&refused);
    assert!(
        !refused.status.success() && said.contains("5e:00.0-0 can't be served: MIG is on; turn MIG off"),
        "{said}"
    );
    let modes: Vec<String> = (0..3).map(|gpu| host.compute_mode(gpu)).collect();
    assert_eq!(modes, ["Exclusive_Process", "Default", "Exclusive_Process"]);
    // A server that can't open one of its GPUs does not start. So the control daemon starts without the GPU in MIG mode.
    assert_eq!(
        variable(control_pid(&status), "CUDA_VISIBLE_DEVICES"),
        "GPU-5b1c9d3e-7a42-4f80-9e16-c3d8a7b20f41,GPU-84d6e0b7-c15f-4a29-bd38-2f7193ca5e60"
    );
    let pipe: PathBuf = host.path("mps/pipe");
    // For a client that sees one GPU only, any GPU may have the ordinal 0. So the default limit of every ordinal is that of the
    // largest slice.
    assert_eq!(host.front_end(&pipe, "get_default_device_pinned_mem_limit 0"), "35G\n");
    assert_eq!(host.front_end(&pipe, "get_default_device_pinned_mem_limit 1"), "35G\n");

    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

/// Several slices of one GPU in a request count as one slice. The service writes this to the journal once, and not for each
/// request.
#[test]
fn slices_of_one_gpu_given_together_are_in_the_journal_once() {
    let mut host = Host::serving("h200");
    for _ in 0..3 {
        for devices in
            ["['00:06.0-1', '00:06.0-2']", "['00:06.0', '00:06.0-3']", "['00:06.0-1', '00:06.0-1']"]
        {
            let output = host
                .command("gdbus")
                .args(["call", "--system", "--dest", "io.yunion.Mps1", "--object-path"])
                .args(["/io/yunion/Mps1/Manager", "--method", "io.yunion.Mps1.Manager.GetContainerConfig"])
                .arg(devices)
                .output()
                .unwrap();
            assert!(output.status.success(), "{}", text(&output));
        }
    }
    let log = host.log();
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains("can't join slices")).collect();
    assert_eq!(warnings.len(), 1, "{log}");
    assert!(warnings[0].contains("WARN") && warnings[0].contains("00:06.0-1 and 00:06.0-2 are"), "{log}");
    assert_eq!(host.stop().code(), Some(0));
}

/// Newer control daemons have several protocols with different commands. The service uses commands of protocol 2, whatever its
/// environment says. An MPS partition in its environment must not affect the control daemon.
#[test]
fn the_protocol_is_the_protocol_of_the_commands() {
    let mut host = Host::new("h200");
    host.plant("mps/version", "615");
    host.plant("driver", "615.71.09\n");
    host.set("CUDA_MPS_PROTOCOL_VERSION", "3");
    host.set("CUDA_MPS_SM_PARTITION", "GPU-168acfc9-c926-5401-354d-2910ddcd391b/Dx4AAAA");
    host.set("CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING", "1");
    host.start();
    let control_daemon = control_pid(&host.wait_for_state("ready"));
    let environment = fs::read(format!("/proc/{control_daemon}/environ")).unwrap();
    let environment = String::from_utf8(environment).unwrap();
    let of_mps: Vec<&str> = environment.split('\0').filter(|one| one.starts_with("CUDA_MPS_")).collect();
    let names: Vec<&str> = of_mps.iter().filter_map(|one| Some(one.split_once('=')?.0)).collect();
    assert_eq!(names.len(), 3, "{of_mps:?}");
    assert!(of_mps.contains(&"CUDA_MPS_PROTOCOL_VERSION=2"), "{of_mps:?}");
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}
