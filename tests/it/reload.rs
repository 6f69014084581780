//! Tests of reloads of the configuration while the service runs.

use std::thread::sleep;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::client::Client;
use crate::support::host::{
    Host, alive, assert_has, control_daemon, control_pid, signal_pid, start_time, text,
};
use crate::support::listener::Listener;
use crate::support::topology::{Topology, in_both_topologies};
use crate::support::wait::wait_for;

const ENTRY: &str = "path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number:";

fn reloads(status: &Value) -> usize {
    let events = status["events"].as_array().unwrap();
    events.iter().filter(|event| event["text"] == "the service has reloaded its configuration").count()
}

fn generation(status: &Value) -> u64 {
    status["service"]["generation"].as_u64().unwrap()
}

#[test]
fn more_slices() {
    let mut host = Host::serving("tesla-p40");
    let before = host.wait_for_state("ready");
    let listener = Listener::start(&host);

    host.devices(&[&format!("{ENTRY} 6")]);
    host.signal(Signal::HUP);
    let after = wait_for("six slices that are healthy", || {
        let devices = host.list();
        assert!(devices.len() == 4 || devices.len() == 6, "{} devices", devices.len());
        // The service lists the new slices before the control daemon has the new limits. So the test waits for both.
        let in_force =
            host.front_end(&host.path("mps/pipe"), "get_default_active_thread_percentage") == "16.0\n";
        let done = in_force && devices.len() == 6 && devices.iter().all(|device| device["healthy"] == true);
        let status = host.json(&["status"]).filter(|status| status["service"]["state"] == "ready");
        status.filter(|_| done)
    });
    let names: Vec<Value> = host.list().into_iter().map(|device| device["addr"].clone()).collect();
    assert_eq!(names, [0, 1, 2, 3, 4, 5].map(|ordinal| format!("00:06.0-{ordinal}")));
    let device = &host.list()[5];
    assert_has(device, &serde_json::json!({"mps_memory_limit": 3840, "mps_thread_percentage": 16}));
    let pipe = host.path("mps/pipe");
    assert_eq!(host.front_end(&pipe, "get_default_active_thread_percentage"), "16.0\n");
    assert_eq!(host.front_end(&pipe, "get_default_device_pinned_mem_limit 0"), "3G\n");
    assert!(generation(&after) > generation(&before));
    assert_eq!(after["service"]["state"], "ready");
    listener.wait_for(&format!("DevicesChanged (uint64 {},)", generation(&after)));
    assert_eq!(host.stop().code(), Some(0));
}

/// Returns the memory in MiB that a CUDA context takes in this slice. It depends on the slice's thread percentage.
fn context_mib(slice: &Value) -> u64 {
    32 + 7 * slice["mps_thread_percentage"].as_u64().unwrap()
}

/// The key `memory` sets the memory of the slices of an entry in the device file. The service publishes this limit and sets it
/// in the control daemon. It refuses a sum beyond the GPU's memory, names the key, and changes nothing.
fn the_memory_of_slices_is_as_written(topology: Topology) {
    let mut host = Host::serving_as(topology, "h200");
    let client = host.client();
    host.devices(&[&format!("{ENTRY} 4, memory: 20GiB")]);
    host.reload();
    let default = || host.front_end(&host.private(), "get_default_device_pinned_mem_limit 0");
    wait_for("the limit", || (default() == "20G\n").then_some(()));
    host.wait_for_state("ready");
    for slice in host.list() {
        assert_has(
            &slice,
            &serde_json::json!({"mps_memory_limit": 20480, "memory_size": 20480, "healthy": true}),
        );
    }
    let environment = host.environment_of("00:06.0-1");
    let value = |name: &str| environment.iter().find(|(known, _)| known == name).unwrap().1.clone();
    assert_eq!(value("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), "0=20480M");
    let context = context_mib(&host.list()[1]);
    assert_eq!(value("YUNION_MPS_MEMORY_MIB"), (20480 - context).to_string());
    assert_eq!(value("YUNION_MPS_MEMORY_FRACTION"), format!("0.{}", (20480 - context) * 1000 / 143_771));
    assert!(alive(client.id()));

    host.devices(&[&format!("{ENTRY} 4, memory: 40GiB")]);
    let refused = host.call("Control.Reload");
    let said = text(&refused);
    assert!(
        !refused.status.success() && said.contains("devices[0].memory: 4 slices have 163840 MiB together"),
        "{said}"
    );
    assert!(said.contains("host_container_device.yml:2:") && said.contains("overcommit: true"), "{said}");
    assert_eq!((default().as_str(), host.list()[0]["mps_memory_limit"].as_u64()), ("20G\n", Some(20480)));

    host.devices(&[&format!("{ENTRY} 4, memory: 40GiB, overcommit: true")]);
    host.reload();
    wait_for("the larger limit", || (default() == "40G\n").then_some(()));
    host.wait_for_state("ready");
    assert_eq!(host.list()[3]["mps_memory_limit"], 40960);
    assert!(text(&host.check()).contains("have 163840 MiB together, but the GPU has 143771 MiB"));
    client.end();
    assert_eq!(host.stop().code(), Some(0));
}

/// The slices of a GPU have different sizes. The service publishes each size, writes it into the slice's environment, and
/// compares the memory of the slice's clients with it. With a control daemon for each slice, the control daemon enforces the
/// size too.
fn slices_have_sizes_of_their_own(topology: Topology) {
    let mut host = Host::with_topology(topology, "h200");
    let sizes =
        "slices: [{memory: 20GiB}, {memory: 40GiB, max_clients: 3}, {memory: 60GiB, thread_percentage: 50}]";
    host.devices(&[&format!("path: /dev/dri/renderD128, type: NVIDIA_MPS, {sizes}")]);
    host.start();
    let status = host.wait_for_state("ready");
    assert_eq!(status["gpus"][0]["equal_slices"], false);
    assert_eq!(
        (&status["gpus"][0]["mps_memory_limit"], &status["gpus"][0]["virtual_num"]),
        (&61440.into(), &3.into())
    );
    let limits = [20480, 40960, 61440];
    for (slice, limit) in host.list().iter().zip(limits) {
        assert_has(
            slice,
            &serde_json::json!({"mps_memory_limit": limit, "memory_size": limit, "healthy": true}),
        );
        let environment = host.environment_of(slice["addr"].as_str().unwrap());
        let value = |name: &str| environment.iter().find(|(known, _)| known == name).unwrap().1.clone();
        assert_eq!(value("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), format!("0={limit}M"));
        assert_eq!(value("YUNION_MPS_MEMORY_MIB"), (limit - context_mib(slice)).to_string());
    }
    let of_slices: Vec<u64> =
        host.list().iter().map(|slice| slice["max_clients"].as_u64().unwrap()).collect();
    let loose = "have the smaller limit of their slice: 20480 MiB (00:06.0-0), 40960 MiB (00:06.0-1)";
    let is_loose = text(&host.check()).contains(loose);
    let (default, most, loose) = match topology {
        Topology::Shared => ("60G\n", [16, 3, 16], true),
        Topology::PerSlice => ("20G\n", [48, 3, 48], false),
    };
    assert_eq!((of_slices.as_slice(), is_loose), (&most[..], loose));
    assert_eq!(host.front_end(&host.private(), "get_default_device_pinned_mem_limit 0"), default);

    // The second slice may have three clients, and the third may have more than four.
    let clients: Vec<Client> = (0..4).map(|_| host.client_of("00:06.0-1")).collect();
    let others: Vec<Client> = (0..4).map(|_| host.client_of("00:06.0-2")).collect();
    wait_for("overuse of the second slice alone", || {
        let overuse: Vec<bool> = host.list().iter().map(|slice| slice["overuse"] != "").collect();
        (overuse == [false, true, false]).then_some(())
    });
    drop((clients, others));

    host.devices(&[&format!(
        "path: /dev/dri/renderD128, type: NVIDIA_MPS, {}",
        sizes.replace("20GiB", "10GiB")
    )]);
    let changes = text(&host.mpsctl(&["check", "--sysroot", host.path("sysroot").to_str().unwrap()]));
    assert!(
        changes.contains("00:06.0-0") && changes.contains("20480") && changes.contains("10240"),
        "{changes}"
    );
    host.reload();
    wait_for("the smaller slice", || (host.list()[0]["mps_memory_limit"] == 10240).then_some(()));
    host.wait_for_state("ready");
    assert_eq!(host.stop().code(), Some(0));
}

in_both_topologies! { the_memory_of_slices_is_as_written, slices_have_sizes_of_their_own }

/// A reload changes the slices of one GPU of eight. The other GPUs' slices stay healthy, and the service stays ready. Reload
/// returns when the new limits are in force.
#[test]
fn only_the_gpu_that_changes_is_said_to_change() {
    let entries = |last: u32| -> Vec<String> {
        let entry = |(gpu, slices)| {
            format!("path: /dev/dri/renderD{gpu}, type: NVIDIA_MPS, virtual_number: {slices}")
        };
        (128..136).zip([8; 7].into_iter().chain([last])).map(entry).collect()
    };
    let configure = |host: &Host, last: u32| {
        host.devices(&entries(last).iter().map(String::as_str).collect::<Vec<_>>());
    };
    let mut host = Host::new("h200x8");
    configure(&host, 8);
    host.start();
    host.wait_for_state("ready");
    let gpu = host.list().last().unwrap()["base_addr"].as_str().unwrap().to_owned();
    let others = host.list().into_iter().filter(|device| device["base_addr"] != *gpu);
    let others: Vec<String> = others.map(|device| device["addr"].as_str().unwrap().to_owned()).collect();
    assert_eq!(others.len(), 56);
    let listener = Listener::start(&host);

    // The change to 7 slices raises the control daemon's default limits, which are those of the largest slice. The change to 8
    // lowers them again, and the change to 9 does not affect them.
    for slices in [7, 8, 9] {
        configure(&host, slices);
        let reloaded = host.call("Control.Reload");
        assert!(reloaded.status.success(), "{}", text(&reloaded));
        let devices = host.list();
        assert_eq!(devices.len(), 56 + slices as usize);
        for device in devices {
            assert_eq!(device["healthy"], true, "{device}");
        }
        listener.wait_for(&format!("DevicesChanged {}", text(&reloaded).trim()));
    }
    let heard = listener.heard();
    // While the control daemon's default limits are above the limits of the other GPUs' slices, these slices show a warning,
    // which causes D-Bus signals. The slices stay healthy.
    let of_others = |line: &&str| {
        let is_in = |other: &String| {
            line.starts_with(&format!("/io/yunion/Mps1/devices/_{}:", other.replace([':', '.', '-'], "_")))
        };
        others.iter().any(is_in)
    };
    assert!(heard.lines().filter(of_others).count() > 0, "{heard}");
    for line in heard.lines().filter(of_others) {
        assert!(!line.contains("'Healthy'"), "{line}");
    }
    assert!(!heard.contains("'State'"), "{heard}");
    assert_eq!(host.stop().code(), Some(0));
}

/// With a control daemon for each GPU, a change of one GPU causes no D-Bus signal for the other GPUs. For a slice of the
/// changed GPU, the service sends a D-Bus signal for the new limits, and perhaps a second signal when the limits are in force.
#[test]
fn a_control_daemon_of_its_own_keeps_a_change_to_its_gpu() {
    let entry = |gpu: u32, slices: u32| {
        format!("path: /dev/dri/renderD{gpu}, type: NVIDIA_MPS, virtual_number: {slices}")
    };
    let configure = |host: &Host, last: u32| {
        let entries: Vec<String> = (128..135).map(|gpu| entry(gpu, 8)).chain([entry(135, last)]).collect();
        host.devices(&entries.iter().map(String::as_str).collect::<Vec<_>>());
    };
    let mut host = Host::new("h200x8");
    host.configure("cuda_mps_topology: per_gpu");
    configure(&host, 8);
    host.start();
    host.wait_for_state("ready");
    let last = host.list().pop().unwrap();
    let last = |key: &str| last[key].as_str().unwrap().replace([':', '.', '-'], "_");
    let (device, gpu) = (last("base_addr"), last("device_path"));
    let listener = Listener::start(&host);
    configure(&host, 7);
    let reloaded = host.call("Control.Reload");
    listener.wait_for(&format!("DevicesChanged {}", text(&reloaded).trim()));
    let heard = listener.heard();
    let objects = || heard.lines().filter(|line| line.contains("/devices/") || line.contains("/gpus/"));
    let others: Vec<&str> =
        objects().filter(|line| !line.contains(&device) && !line.contains(&gpu)).collect();
    assert_eq!(others, [""; 0], "{heard}");
    for slice in 0..7 {
        let told = objects().filter(|line| line.contains(&format!("{device}_{slice}:"))).count();
        assert!((1..=2).contains(&told), "{told} of slice {slice}: {heard}");
    }
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn new_slices_are_listed_while_the_control_daemon_restarts() {
    let host = Host::serving("tesla-p40");
    host.plant("mps/fault/start-exits", "");
    host.devices(&[&format!("{ENTRY} 2")]);
    // A change of the pipe directory needs a new control daemon.
    host.configure(&format!("cuda_mps_pipe_directory: {}", host.path("mps/other").display()));
    host.signal(Signal::HUP);
    wait_for("two slices that are not healthy", || {
        let devices = host.list();
        assert!(!devices.is_empty());
        (devices.len() == 2 && devices.iter().all(|device| device["healthy"] == false)).then_some(())
    });
    host.clear("mps/fault/start-exits");
    host.wait_for_state("ready");
    assert_eq!(host.list().len(), 2);
}

/// A reload without a change, or with a change that concerns no control daemon, restarts no control daemon.
#[test]
fn nothing_new_disturbs_nobody() {
    let mut host = Host::serving("tesla-p40");
    let before = host.wait_for_state("ready");
    host.signal(Signal::HUP);
    host.wait_for_status("a reload", |status| reloads(status) == 1);
    host.configure("log_level: debug");
    host.signal(Signal::HUP);
    host.wait_for_status("a second reload", |status| reloads(status) == 2);
    assert!(host.call("Control.Reload").status.success());
    let after = host.wait_for_state("ready");
    assert_eq!(reloads(&after), 3);
    assert_eq!(control_pid(&after), control_pid(&before));
    assert_eq!(control_daemon(&after)["starts"], 1);
    assert_eq!(generation(&after), generation(&before));
    assert_eq!(host.stop().code(), Some(0));
}

/// A reload of a wrong configuration changes nothing. The caller gets the error, and the status shows it until the
/// configuration is correct.
#[test]
fn a_bad_configuration_changes_nothing() {
    let mut host = Host::serving("tesla-p40");
    let before = host.wait_for_state("ready");
    for (wrong, place) in [
        ("cuda_mps_thread_percentage: 0", "/etc/yunion/host.conf:"),
        ("container_device_config_file: /etc/yunion/none.yml", "/etc/yunion/host.conf:"),
    ] {
        host.configure(wrong);
        host.signal(Signal::HUP);
        let status = host.wait_for_state("degraded");
        let reason = status["service"]["state_reason"].as_str().unwrap();
        assert!(reason.contains("the new configuration was refused") && reason.contains(place), "{reason}");
        let refused = host.call("Control.Reload");
        let said = text(&refused);
        assert!(!refused.status.success());
        assert!(said.contains("io.yunion.Mps1.Error.InvalidConfig") && said.contains(place), "{said}");
        assert_eq!(control_pid(&status), control_pid(&before));
        assert_eq!(host.list().len(), 4);
        assert!(host.list().iter().all(|device| device["healthy"] == true));

        host.configure("cuda_mps_thread_percentage: equal\ncontainer_device_config_file: /etc/yunion/host_container_device.yml");
        assert!(host.call("Control.Reload").status.success());
        let status = host.wait_for_state("ready");
        assert_eq!(control_pid(&status), control_pid(&before));
    }
    // The syntax of the device file is correct, but the host does not have this GPU.
    host.devices(&["path: /dev/dri/renderD200, type: NVIDIA_MPS, virtual_number: 4"]);
    let said = text(&host.call("Control.Reload"));
    assert!(said.contains("InvalidConfig") && said.contains("host_container_device.yml:2"), "{said}");
    host.wait_for_state("degraded");
    assert_eq!(host.list().len(), 4);
    assert_eq!(host.stop().code(), Some(0));
}

/// A mistyped `type` makes the only entry of the device file invalid. Without a valid entry the service would serve all GPUs,
/// so it must refuse this file.
#[test]
fn a_typing_error_in_a_type_takes_no_gpu() {
    let mut host = Host::new("h200x8");
    let file = host.file("/etc/yunion/host_container_device.yml");
    let entry = "devices:\n- path: /dev/dri/renderD131\n  type: NVIDIA_MPS\n  virtual_number: 4\n";
    std::fs::write(&file, entry).unwrap();
    host.start();
    let before = host.wait_for_state("ready");
    let mut client = host.only_client();
    let only_the_one = || {
        assert_eq!(host.list().len(), 4);
        for gpu in 0..8 {
            let mode = if gpu == 3 { "Exclusive_Process" } else { "Default" };
            assert_eq!(host.compute_mode(gpu), mode, "GPU {gpu}");
        }
    };
    only_the_one();
    for (right, wrong, place) in [
        ("NVIDIA_MPS", "NVIDIA-MPS", ":3: devices[0].type: found \"NVIDIA-MPS\"; write NVIDIA_MPS"),
        ("NVIDIA_MPS", "nvidia_mps", ":3: devices[0].type: "),
        ("NVIDIA_MPS", "NVIDIA_MSP", ":3: devices[0].type: "),
        ("NVIDIA_MPS", "NVIDA_MPS", ":3: devices[0].type: "),
        ("NVIDIA_MPS", "MPS", ":3: devices[0].type: "),
        ("NVIDIA_MPS", "", ":3: devices[0].type: found nothing"),
        ("type:", "tpye:", ":2: devices[0].type: missing"),
        ("  type: NVIDIA_MPS\n", "", ":2: devices[0].type: missing"),
        (
            "  type: NVIDIA_MPS\n  virtual_number: 4\n",
            "type: NVIDIA_MPS\nvirtual_number: 4\n",
            ":3: type: the key stands outside of the list `devices`; indent this key as far as the key \
             `path` of the entry",
        ),
        ("devices:", "device:", ": devices: no such list"),
        (&entry["devices:\n".len()..], "-\n", ":1: devices[0]: an empty entry"),
    ] {
        std::fs::write(&file, entry.replace(right, wrong)).unwrap();
        let refusal = text(&host.call("Control.Reload"));
        assert!(refusal.contains("Error.InvalidConfig"), "{wrong}: {refusal}");
        assert!(refusal.replace("\\\"", "\"").contains(place), "{wrong}: {refusal}");
        let status = host.wait_for_state("degraded");
        assert_eq!(control_pid(&status), control_pid(&before));
        only_the_one();
        let checked = host.check();
        assert_eq!(checked.status.code(), Some(78), "{wrong}: {}", text(&checked));
    }
    // The host agent of the platform Cloudpods accepts keys in capitals and YAML merge keys. So the service does too.
    for same in [
        entry.replace("type", "TYPE").replace("path", "PATH").replace("devices", "DEVICES"),
        "ours: &ours\n  type: NVIDIA_MPS\n  virtual_number: 4\ndevices:\n- path: /dev/dri/renderD131\n  <<: *ours\n"
            .to_owned(),
    ] {
        std::fs::write(&file, &same).unwrap();
        let answer = host.call("Control.Reload");
        assert!(answer.status.success(), "{same}: {}", text(&answer));
        let status = host.wait_for_state("ready");
        assert_eq!(control_pid(&status), control_pid(&before));
        only_the_one();
    }
    assert_eq!(client.try_wait().unwrap(), None);
    client.kill().unwrap();
    client.wait().unwrap();
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn switched_off_and_on_again() {
    let mut host = Host::serving("h200");
    host.configure("enable_cuda_mps: false");
    host.signal(Signal::HUP);
    let status = host.wait_for_state("disabled");
    assert_eq!(status["service"]["enabled"], false);
    wait_for("nothing but the daemon", || (host.processes() == [host.pid()]).then_some(()));
    wait_for("the compute mode of before", || (host.compute_mode(0) == "Default").then_some(()));
    assert_eq!(host.list().len(), 0);

    host.configure("enable_cuda_mps: true");
    host.signal(Signal::HUP);
    host.wait_for_state("ready");
    assert_eq!(host.compute_mode(0), "Exclusive_Process");
    assert_eq!(host.list().len(), 4);
    assert_eq!(host.stop().code(), Some(0));
    assert_eq!(host.compute_mode(0), "Default");
}

#[test]
fn switched_off_from_the_start() {
    let mut host = Host::new("tesla-p40");
    host.configure("enable_cuda_mps: false");
    host.start();
    host.wait_for_state("disabled");
    assert_eq!((host.list().len(), host.compute_mode(0).as_str()), (0, "Default"));
    host.configure("enable_cuda_mps: true");
    assert!(host.call("Control.Reload").status.success());
    host.wait_for_state("ready");
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn a_gpu_that_came_back_is_served_after_a_reload() {
    let mut host = Host::new("h200x8");
    host.plant("gpus/3/lost", "");
    host.start();
    host.wait_for_state("degraded");
    host.clear("gpus/3/lost");
    assert!(host.call("Control.Reload").status.success());
    host.wait_for_state("ready");
    assert_eq!(host.compute_mode(3), "Exclusive_Process");
    assert_eq!(host.stop().code(), Some(0));
}

/// A call of NVML fails during a reload. The service refuses the reload and still uses the driver: it serves the GPUs as
/// before, and can replace a control daemon that ends.
#[test]
fn a_reload_that_nvml_fails_takes_the_driver_from_nobody() {
    let mut host = Host::serving("h200x8");
    let before = host.wait_for_state("ready");
    let devices = host.list();
    host.plant("error/nvmlDeviceGetCount", "999");
    let said = text(&host.call("Control.Reload"));
    assert!(said.contains("the driver can't list its GPUs"), "{said}");
    let status = host.wait_for_state("degraded");
    assert_eq!(status["service"]["driver_version"], before["service"]["driver_version"]);
    // To start a control daemon, the service needs the driver, by which it sets the compute modes and checks each GPU.
    signal_pid(control_pid(&before), Signal::KILL);
    host.wait_for_status("another control daemon that serves", |status| {
        let control_daemon = control_daemon(status);
        control_daemon["state"] == "ready" && control_daemon["pid"] != control_pid(&before)
    });
    assert_eq!(host.list(), devices);
    host.clear("error/nvmlDeviceGetCount");
    host.reload();
    host.wait_for_state("ready");
    assert_eq!(host.stop().code(), Some(0));
    assert_eq!(host.compute_mode(0), "Default");
}

#[test]
fn a_reload_while_a_gpu_hangs_serves_the_others() {
    let mut host = Host::serving("h200x8");
    host.wait_for_state("ready");
    host.plant("gpus/3/hangs", "");
    host.reload();
    let served = |host: &Host| host.list().iter().filter(|device| device["healthy"] == true).count();
    host.wait_for_state("degraded");
    wait_for("the others", || (served(&host) == 28).then_some(()));
    host.clear("gpus/3/hangs");
    wait_for("all of them", || (served(&host) == 32).then_some(()));
    host.wait_for_state("ready");
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn another_topology() {
    let mut host = Host::new("mixed");
    host.plant("gpus/1/mig", "Disabled\n");
    host.start();
    host.wait_for_state("ready");
    host.configure("cuda_mps_topology: per_gpu");
    host.signal(Signal::HUP);
    host.wait_for_status("a control daemon each", |status| {
        status["service"]["state"] == "ready" && status["control_daemons"].as_array().unwrap().len() == 3
    });
    host.configure("cuda_mps_topology: shared");
    host.signal(Signal::HUP);
    host.wait_for_status("one for all", |status| {
        status["service"]["state"] == "ready" && status["control_daemons"].as_array().unwrap().len() == 1
    });
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

/// The topology changes while a client runs. The present control daemon serves the client to its end, and the new control
/// daemons wait for the GPUs.
#[test]
fn another_topology_waits_for_clients() {
    let mut host = Host::serving("h200");
    let before = host.wait_for_state("ready");
    let mut client = host.only_client();
    host.configure("cuda_mps_topology: per_gpu");
    assert!(host.call("Control.Reload").status.success());
    for _ in 0..3 {
        let status = host.wait_for_status("waiting", |status| control_daemon(status)["state"] == "waiting");
        assert_eq!(control_pid(&status), control_pid(&before));
        let reason = control_daemon(&status)["reason"].as_str().unwrap();
        assert!(reason.contains("no longer needed"), "{reason}");
        assert!(host.list().iter().all(|device| device["healthy"] == false));
        // Each reload causes a health check, which must not end the control daemon.
        assert!(host.call("Control.Reload").status.success());
    }
    assert!(client.try_wait().unwrap().is_none());
    client.kill().unwrap();
    client.wait().unwrap();
    let after = host.wait_for_state("ready");
    assert_ne!(control_pid(&after), control_pid(&before));
    assert_eq!(control_daemon(&after)["id"], "GPU-168acfc9-c926-5401-354d-2910ddcd391b");
    assert_eq!(host.stop().code(), Some(0));
    assert_eq!(host.compute_mode(0), "Default");
}

/// A host.conf that was removed, or that an editor has not finished writing, has no `enable_cuda_mps`. The service must not
/// take this for disabled MPS, which would end all GPU work.
#[test]
fn nobody_s_work_ends_for_want_of_a_word() {
    let mut host = Host::new("h200");
    host.configure("cuda_mps_quit_timeout: 1");
    host.start();
    host.wait_for_state("ready");
    let mut client = host.only_client();
    let conf = host.file("/etc/yunion/host.conf");
    let whole = std::fs::read_to_string(&conf).unwrap();
    for text in [Some(""), Some("cuda_mps_replicas: 4\n"), Some("enable_cuda_mps:\n"), None] {
        match text {
            Some(text) => std::fs::write(&conf, text).unwrap(),
            None => std::fs::remove_file(&conf).unwrap(),
        }
        let refusal = crate::support::host::text(&host.call("Control.Reload"));
        assert!(refusal.contains("Error.InvalidConfig"), "{text:?}: {refusal}");
        assert!(
            refusal.contains("enable_cuda_mps: the key is no longer set, although GPUs are served; write"),
            "{text:?}: {refusal}"
        );
        let said = crate::support::host::text(&host.mpsctl(&[
            "check",
            "--sysroot",
            host.path("sysroot").to_str().unwrap(),
        ]));
        assert!(said.contains("MPS is switched off: refused: "), "{text:?}: {said}");
        host.wait_for_state("degraded");
        assert!(host.list().iter().all(|device| device["healthy"] == true));
    }
    assert!(client.try_wait().unwrap().is_none());
    std::fs::write(&conf, whole).unwrap();
    assert!(host.call("Control.Reload").status.success());
    host.wait_for_state("ready");
    host.configure("enable_cuda_mps: false");
    assert!(host.call("Control.Reload").status.success());
    assert!(!client.wait().unwrap().success());
    assert_eq!(host.stop().code(), Some(0));
}

/// MPS is disabled while no service runs. The next service lets the control daemons serve their clients to the end, and then
/// ends them.
#[test]
fn switched_off_between_two_services() {
    for forgotten in [false, true] {
        let mut host = Host::serving("h200");
        host.wait_for_state("ready");
        let mut client = host.only_client();
        host.signal(Signal::KILL);
        host.ended();
        if forgotten {
            std::fs::write(host.file("/etc/yunion/host.conf"), "").unwrap();
        } else {
            host.configure("enable_cuda_mps: false");
        }
        // With MPS disabled, the service has no plan. It knows the control daemons and the former compute modes only from its
        // state file.
        host.start();
        host.wait_for_status("a control daemon that waits for its client", |status| {
            let reason = status["control_daemons"][0]["reason"].as_str().unwrap_or_default();
            status["service"]["state"] == "disabled"
                && reason.contains("this control daemon is no longer needed")
        });
        assert!(client.try_wait().unwrap().is_none());
        assert_eq!(host.compute_mode(0), "Exclusive_Process");
        client.kill().unwrap();
        client.wait().unwrap();
        wait_for("the compute mode of before", || (host.compute_mode(0) == "Default").then_some(()));
        host.wait_for_status("nobody on the way out", |status| {
            status["service"]["state"] == "disabled" && status["control_daemons"] == Value::Array(Vec::new())
        });
        assert_eq!(host.stop().code(), Some(0));
        host.nothing_runs();
    }
}

/// Limits change a second time before the first change is complete. The service must not take log lines of the first change as
/// a confirmation of the second.
#[test]
fn changes_that_follow_each_other_restart_nothing() {
    let mut host = Host::new("h200x8");
    host.devices(&[]);
    host.start();
    let before = control_pid(&host.wait_for_state("ready"));
    for round in 0..20 {
        for (slices, pause) in [(6, 7 * round), (3, 0)] {
            host.configure(&format!("cuda_mps_replicas: {slices}"));
            host.signal(Signal::HUP);
            sleep(Duration::from_millis(pause));
        }
        let status = host.wait_for_status("3 slices each", |status| {
            status["service"]["state"] == "ready" && host.list().len() == 8 * 3
        });
        assert_eq!(control_pid(&status), before, "round {round}: {}", host.log());
    }
    assert_eq!(host.stop().code(), Some(0));
}

/// Without a driver, the service has no plan. Its stop still ends the control daemons that an earlier service has started.
#[test]
fn a_stop_without_a_plan_ends_what_runs() {
    let mut host = Host::serving("h200");
    let before = host.wait_for_state("ready");
    host.signal(Signal::KILL);
    host.ended();
    host.plant("error/nvmlInit_v2", "18");
    host.start();
    host.wait_for_state("failed");
    assert!(host.processes().contains(&control_pid(&before)));
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

/// The first two GPUs of the board `h200x8`: the address of each, and its entry in the device file.
const A: (&str, &str) = ("1b:00.0", "path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 4");
const B: (&str, &str) = ("2d:00.0", "path: /dev/dri/renderD129, type: NVIDIA_MPS, virtual_number: 4");

fn reload(host: &Host, topology: &str, gpus: &[(&str, &str)]) {
    host.devices(&gpus.iter().map(|(_, entry)| *entry).collect::<Vec<_>>());
    host.configure(&format!("cuda_mps_topology: {topology}"));
    let answer = host.call("Control.Reload");
    assert!(answer.status.success(), "{}", text(&answer));
}

fn serving(topology: &str, gpus: &[(&str, &str)]) -> Host {
    let mut host = Host::new("h200x8");
    host.devices(&gpus.iter().map(|(_, entry)| *entry).collect::<Vec<_>>());
    host.configure(&format!("cuda_mps_topology: {topology}"));
    host.start();
    host.wait_for_state("ready");
    host
}

fn client_of(host: &Host, gpu: (&str, &str)) -> Client {
    let client = Client::start(&mut host.program_of(&format!("{}-0", gpu.0), &["hold", "600"]));
    host.wait_for_only_client();
    client
}

/// Fails unless the client runs, the service lists no other client, and the client counts as no bypass.
fn nobody_bypasses(host: &Host, client: &mut Client) {
    assert!(client.try_wait().unwrap().is_none());
    let listed = host.busctl("ListClients");
    let [only] = listed.as_array().unwrap().as_slice() else { panic!("{listed:#}") };
    assert_has(only, &serde_json::json!({"pid": client.id(), "bypass": false}));
    let doctor = text(&host.mpsctl(&["doctor"]));
    assert!(!doctor.contains("bypassing-program") && !doctor.contains("(kill "), "{doctor}");
    assert!(!host.log().contains("is used without an MPS server of this service"), "{}", host.log());
}

fn gpu_of<'s>(status: &'s Value, gpu: (&str, &str)) -> &'s Value {
    let gpus = status["gpus"].as_array().unwrap();
    gpus.iter().find(|one| one["addr"] == gpu.0).unwrap_or_else(|| panic!("no {} in {status:#}", gpu.0))
}

/// A new control daemon for both GPUs waits for the client of one GPU, and then starts with both. A start without this GPU
/// would need a restart later, and clients of the other GPU could delay this restart forever.
#[test]
fn a_control_daemon_starts_once_with_all_its_gpus() {
    let mut host = serving("per_gpu", &[A, B]);
    let mut client = client_of(&host, B);
    reload(&host, "shared", &[A, B]);
    let status = host.wait_for_status("the reason at both GPUs", |status| {
        let waits = |gpu, why: &str| gpu_of(status, gpu)["reason"].as_str().unwrap_or_default().contains(why);
        waits(A, "the control daemon of the GPU also needs GPU ")
            && waits(B, "still has the GPU: this control daemon is no longer needed")
    });
    assert!(status["gpus"].as_array().unwrap().iter().all(|gpu| gpu["healthy"] == false), "{status:#}");
    nobody_bypasses(&host, &mut client);
    client.end();
    let after = host.wait_for_state("ready");
    assert_eq!(control_daemon(&after)["starts"], 1, "{after:#}");
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

/// A GPU refuses its compute mode, so the control daemon starts without this GPU. The GPU joins when it accepts the mode and
/// the control daemon has no clients.
#[test]
fn a_gpu_that_takes_its_compute_mode_later_joins() {
    let mut host = Host::new("h200x8");
    host.devices(&[A.1, B.1]);
    host.plant("gpus/0/error/nvmlDeviceSetComputeMode", "999");
    host.start();
    host.wait_for_state("degraded");
    let mut client = client_of(&host, B);
    host.clear("gpus/0/error/nvmlDeviceSetComputeMode");
    assert!(host.call("Control.Reload").status.success());
    let status = host.wait_for_status("a restart that waits", |status| {
        control_daemon(status)["reason"].as_str().unwrap().contains(" joins the control daemon's GPUs, ")
    });
    assert_eq!(host.compute_mode(0), "Exclusive_Process");
    assert_eq!(gpu_of(&status, B)["healthy"], true, "{status:#}");
    assert!(client.try_wait().unwrap().is_none());
    client.end();
    let after = host.wait_for_state("ready");
    assert_ne!(control_pid(&after), control_pid(&status));
    assert_eq!(host.stop().code(), Some(0));
}

/// The driver's call that sets a compute mode hangs, and meanwhile the GPU leaves the configuration. When the call has set the
/// mode after all, the service must restore the former mode.
#[test]
fn a_mode_that_is_set_late_is_put_back() {
    let mut host = Host::new("h200x8");
    host.devices(&[A.1, B.1]);
    host.configure("cuda_mps_topology: per_gpu");
    host.plant("gpus/0/hangs", "nvmlDeviceSetComputeMode");
    host.start();
    wait_for("the driver at work", || host.path("gpus/0/hung").exists().then_some(()));
    host.devices(&[B.1]);
    host.signal(Signal::HUP);
    host.wait_for_status("the new configuration", |status| reloads(status) == 1);
    host.clear("gpus/0/hangs");
    wait_for("the compute mode of before", || {
        let state: Value =
            serde_json::from_slice(&std::fs::read(host.path("run/state.json")).unwrap()).unwrap();
        let is_back =
            host.compute_mode(0) == "Default" && host.log().contains("restored from Exclusive_Process");
        let forgotten = state["previous_compute_modes"].as_object().unwrap().len() == 1;
        (is_back && forgotten).then_some(())
    });
    assert_eq!(host.stop().code(), Some(0));
    assert_eq!(host.compute_mode(1), "Default");
}

/// MPS is disabled while a control daemon waits for its last clients. The answer to the reload says that the control daemon
/// still waits for these clients.
#[test]
fn disabling_spares_the_clients_that_are_waited_for_and_says_so() {
    let mut host = serving("shared", &[A]);
    let mut client = client_of(&host, A);
    reload(&host, "per_gpu", &[A]);
    host.wait_for_status("a control daemon that waits", |status| {
        control_daemon(status)["state"] == "waiting"
    });
    host.configure("enable_cuda_mps: false");
    let told = text(&host.mpsctl(&["reload"]));
    for words in [
        "state disabled",
        "control daemon shared is waiting: this control daemon is no longer needed and ends when",
    ] {
        assert!(told.contains(words), "{told}");
    }
    assert!(!host.log().contains("ends the work of"), "{}", host.log());
    assert!(client.try_wait().unwrap().is_none());
    client.end();
    host.wait_for_status("nobody who waits", |status| {
        status["service"]["state_reason"] == "enable_cuda_mps is false"
    });
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

/// A service that stops can't end a recorded control daemon that it can't take over. So it does not restore the compute mode of
/// the GPU: in the former mode, programs without MPS could use the GPU beside that control daemon's clients.
#[test]
fn a_control_daemon_that_stays_keeps_its_compute_mode() {
    let mut host = Host::serving("h200");
    let former = control_pid(&host.wait_for_state("ready"));
    host.signal(Signal::KILL);
    host.ended();
    signal_pid(former, Signal::KILL);
    // The service finds the log of a control daemon through the standard output of its process. This process has none, so the
    // service can't take it over.
    let mut shell = host.command("sh");
    shell.args(["-c", "exec sleep 600 >&-"]);
    let other = Client::start(&mut shell);
    wait_for("the sleep", || {
        let name = std::fs::read_to_string(format!("/proc/{}/comm", other.id())).unwrap();
        (name == "sleep\n").then_some(())
    });
    let file = host.path("run/state.json");
    let mut state: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let start_time: u64 = start_time(other.id()).parse().unwrap();
    state["control_daemons"]["shared"]["process"] =
        serde_json::json!({"pid": other.id(), "start_time": start_time});
    std::fs::write(&file, state.to_string()).unwrap();
    host.configure("enable_cuda_mps: false");
    host.start();
    host.wait_for_status("a control daemon that can't be taken over", |status| {
        status["control_daemons"][0]["reason"]
            .as_str()
            .unwrap_or_default()
            .starts_with("the log of control daemon PID")
    });
    assert_eq!(host.stop().code(), Some(0));
    assert!(alive(other.id()));
    assert_eq!(host.compute_mode(0), "Exclusive_Process");
    let state: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(state["control_daemons"]["shared"]["process"]["pid"], other.id(), "{state:#}");
    other.end();
    host.start();
    wait_for("the compute mode of before", || (host.compute_mode(0) == "Default").then_some(()));
    assert_eq!(host.stop().code(), Some(0));
}
