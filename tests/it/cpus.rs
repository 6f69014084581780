//! Tests that control daemons and their servers run on the CPUs near their GPUs. A simulated /sys can name any CPUs as near.

use std::fs;

use rustix::process::Signal;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::{Value, json};

use crate::support::host::{Host, assert_has, control_daemon, control_pid, text};
use crate::support::schema::strict;
use crate::support::skip::skip;
use crate::support::wait::wait_for;

const AUTO: &str = "cuda_mps_cpu_affinity: auto";

/// The number of a CPU that no test machine has.
const STRANGER: &str = "1023";

fn allowed(pid: impl std::fmt::Display) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    line.trim().to_owned()
}

/// Writes CPU numbers as the kernel does, such as `0-3,8`.
fn spelt(cpus: &[usize]) -> String {
    let groups = cpus.chunk_by(|one, next| one + 1 == *next);
    let words = groups.map(|group| match group {
        [one] => one.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => unreachable!(),
    });
    words.collect::<Vec<_>>().join(",")
}

/// Divides the CPUs of this machine into two lists. Returns None if the machine has only one CPU, or if the test may not use
/// all CPUs.
fn two_parts(what: &str) -> Option<[String; 2]> {
    let set = sched_getaffinity(None).unwrap();
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect();
    if cpus.len() < 2 || allowed(1) != allowed("self") {
        skip(what, "the tests may use one CPU only, or not all CPUs of this machine");
        return None;
    }
    let (first, rest) = cpus.split_at(1);
    Some([spelt(first), spelt(rest)])
}

impl Host {
    fn near(&self, address: &str, cpus: &str) {
        fs::write(self.file(&format!("/sys/bus/pci/devices/{address}/local_cpulist")), cpus).unwrap();
    }

    fn told(&self, device: &str) -> Value {
        self.container_of(device)["environment"]["YUNION_MPS_CPUS"].clone()
    }
}

fn one_gpu(cpus: &str) -> Host {
    let host = Host::new("h200");
    host.near("0000:00:06.0", cpus);
    host
}

fn two_gpus(parts: &[String; 2]) -> Host {
    let host = Host::new("h200x8");
    let entry = |number| format!("path: /dev/dri/renderD{number}, type: NVIDIA_MPS, virtual_number: 2");
    host.devices(&[&entry(128), &entry(129)]);
    host.near("0000:1b:00.0", &parts[0]);
    host.near("0000:2d:00.0", &parts[1]);
    host
}

fn assert_on(daemon: &Value, cpus: &str) {
    let servers = daemon["servers"].as_array().unwrap();
    assert_eq!(servers.len(), 1, "{daemon:#}");
    for pid in [&daemon["pid"], &servers[0]] {
        assert_eq!(allowed(pid), cpus, "{daemon:#}");
    }
}

fn shown(host: &Host) -> String {
    text(&host.mpsctl(&["status"]))
}

#[test]
fn each_control_daemon_and_its_server_run_near_their_gpu() {
    let Some(parts) = two_parts("binding to CPUs") else { return };
    let mut host = two_gpus(&parts);
    host.configure(&format!("{AUTO}\ncuda_mps_topology: per_gpu"));
    host.start();
    let status = host.wait_for_state("ready");
    let daemons = status["control_daemons"].as_array().unwrap();
    assert_eq!(daemons.len(), 2);
    let gpus = ["GPU-b8f3c1a0-5d27-4e19-8c46-0f2a91d7e530", "GPU-0c94e7d2-31ab-4f68-b57d-6e83a2c9f141"];
    for (gpu, cpus) in gpus.iter().zip(&parts) {
        let daemon = daemons.iter().find(|daemon| daemon["id"] == *gpu).unwrap();
        assert_on(daemon, cpus);
        assert_has(daemon, &json!({"cpus": cpus, "wanted_cpus": cpus}));
    }
    assert_eq!([host.told("1b:00.0-0"), host.told("2d:00.0-1")], parts.clone().map(Value::from));
    let shown = shown(&host);
    assert!(shown.contains("CPUS") && !shown.contains("wanted"), "{shown}");
    assert_eq!(host.stop().code(), Some(0));
}

/// On a Grace host, each superchip has a GPU and the CPUs near it. The test machine may lack these CPUs, and then the service
/// binds no control daemon to CPUs.
#[test]
fn a_container_with_a_slice_of_a_superchip_gets_the_cpus_of_that_superchip() {
    let mut host = Host::new("gh200x4");
    host.configure(&format!("{AUTO}\ncuda_mps_topology: per_gpu"));
    host.start();
    host.wait_for_state("ready");
    let told = ["0019:01:00.0-0", "0029:01:00.0-3", "0039:01:00.0-1"].map(|slice| host.told(slice));
    assert_eq!(told, ["72-143", "144-215", "216-287"]);
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn by_default_nothing_is_bound() {
    let Some(parts) = two_parts("binding to CPUs") else { return };
    let mut host = one_gpu(&parts[0]);
    host.start();
    let status = host.wait_for_state("ready");
    assert_on(control_daemon(&status), &allowed("self"));
    assert_has(control_daemon(&status), &json!({"cpus": "all", "wanted_cpus": null}));
    assert_eq!(host.told("00:06.0-0"), Value::Null);
    assert!(!shown(&host).contains("CPUS"), "{}", shown(&host));
    assert_eq!(host.stop().code(), Some(0));
}

/// A control daemon of several GPUs may run on the CPUs near any of these GPUs. If these are all CPUs, the service does not
/// bind the control daemon.
#[test]
fn a_shared_control_daemon_runs_near_all_its_gpus() {
    let Some(parts) = two_parts("binding to CPUs") else { return };
    let mut host = two_gpus(&[parts[1].clone(), parts[1].clone()]);
    host.configure(AUTO);
    host.start();
    let before = host.wait_for_state("ready");
    assert_on(control_daemon(&before), &parts[1]);
    assert_eq!(host.told("1b:00.0-0"), parts[1].as_str());

    host.near("0000:1b:00.0", &parts[0]);
    host.reload();
    let after = host.wait_for_status("another control daemon", |status| {
        status["service"]["state"] == "ready"
            && control_daemon(status)["pid"] != control_daemon(&before)["pid"]
    });
    assert_on(control_daemon(&after), &allowed("self"));
    assert_has(control_daemon(&after), &json!({"cpus": "all", "wanted_cpus": null}));
    assert_eq!(host.told("1b:00.0-0"), parts[0].as_str());
    let both = text(&host.mpsctl(&["env", "1b:00.0-0", "2d:00.0-0"]));
    let all = allowed("self");
    assert!(both.contains(&format!("export YUNION_MPS_CPUS={all}\n")), "{both}");
    assert_eq!(host.stop().code(), Some(0));
}

/// If the list of near CPUs is of no use, the control daemon runs on all CPUs that the service may use. If the service may use
/// only a part of the list, the control daemon runs on this part.
#[test]
fn a_list_that_is_of_no_use_binds_nothing() {
    let Some(parts) = two_parts("binding to CPUs") else { return };
    let all = allowed("self");
    for (near, bound, wanted) in [
        ("", &all, None),
        ("many", &all, None),
        ("0-4294967295", &all, None),
        (all.as_str(), &all, None),
        // In the first of these two rows, the list has no CPU that the service may use. In the second row, the service may use
        // a part of the list.
        (STRANGER, &all, Some(STRANGER.to_owned())),
        (&format!("{},{STRANGER}", parts[0]), &parts[0], Some(format!("{},{STRANGER}", parts[0]))),
    ] {
        let mut host = one_gpu(near);
        host.configure(AUTO);
        host.start();
        let status = host.wait_for_state("ready");
        let daemon = control_daemon(&status);
        assert_on(daemon, bound);
        let in_force = if *bound == all { "all" } else { bound };
        assert_has(daemon, &json!({"cpus": in_force, "wanted_cpus": wanted}));
        if let Some(wanted) = wanted {
            let both = format!("{in_force} (wanted: {wanted})");
            assert!(shown(&host).contains(&both), "{}", shown(&host));
        }
        assert_eq!(host.stop().code(), Some(0));
    }
}

/// A changed `cuda_mps_cpu_affinity` needs a new control daemon, which starts when the present one has no clients.
#[test]
fn a_changed_key_waits_for_clients() {
    let Some(parts) = two_parts("binding to CPUs") else { return };
    let mut host = one_gpu(&parts[0]);
    host.start();
    let before = host.wait_for_state("ready");
    let client = host.client();
    host.configure(AUTO);
    let sysroot = host.path("sysroot");
    let check = text(&host.mpsctl(&["check", "--sysroot", sysroot.to_str().unwrap()]));
    assert!(check.contains(&format!("the control daemon's CPUs change to {}", parts[0])), "{check}");
    host.reload();
    let waiting = host.wait_for_status("waiting", |status| control_daemon(status)["state"] == "waiting");
    assert_eq!(control_pid(&waiting), control_pid(&before));
    assert_has(control_daemon(&waiting), &json!({"cpus": "all", "wanted_cpus": parts[0]}));
    let reason = control_daemon(&waiting)["reason"].as_str().unwrap();
    assert!(reason.contains(&format!("the control daemon's CPUs change to {}", parts[0])), "{reason}");

    client.end();
    let bound = host.wait_for_state("ready");
    assert_ne!(control_pid(&bound), control_pid(&before));
    assert_on(control_daemon(&bound), &parts[0]);
    // A reload without a change starts no new control daemon. A reload that sets the key to its old value starts a new control
    // daemon.
    host.reload();
    assert_eq!(control_pid(&host.wait_for_state("ready")), control_pid(&bound));
    host.configure("cuda_mps_cpu_affinity: none");
    host.reload();
    let free = host.wait_for_state("ready");
    assert_ne!(control_pid(&free), control_pid(&bound));
    assert_on(control_daemon(&free), &allowed("self"));
    assert_eq!(host.stop().code(), Some(0));
}

/// The service takes over a control daemon that another program has bound to other CPUs. The status shows the CPUs that are in
/// force.
#[test]
fn a_take_over_shows_the_cpus_in_force() {
    let Some(parts) = two_parts("binding to CPUs") else { return };
    let mut host = one_gpu(&parts[0]);
    host.configure(AUTO);
    host.start();
    let before = control_pid(&host.wait_for_state("ready"));
    host.signal(Signal::KILL);
    host.ended();

    let mut other = CpuSet::new();
    let all = sched_getaffinity(None).unwrap();
    (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).skip(1).for_each(|cpu| other.set(cpu));
    let pid = rustix::process::Pid::from_raw(i32::try_from(before).unwrap());
    sched_setaffinity(pid, &other).unwrap();
    host.start();
    let status = host.wait_for_state("ready");
    assert_eq!(control_pid(&status), before);
    assert_has(control_daemon(&status), &json!({"cpus": parts[1], "wanted_cpus": parts[0]}));
    assert!(strict("status", &[status]).present.contains(".control_daemons[].wanted_cpus"));
    let both = format!("{} (wanted: {})", parts[1], parts[0]);
    assert!(shown(&host).contains(&both), "{}", shown(&host));

    // Another program binds the control daemon to all CPUs while the service runs. The next health check notices this change.
    sched_setaffinity(pid, &all).unwrap();
    host.reload();
    wait_for("all CPUs", || {
        let status = host.json(&["status"])?;
        (control_daemon(&status)["cpus"] == "all").then_some(())
    });
    assert_eq!(host.stop().code(), Some(0));
}
