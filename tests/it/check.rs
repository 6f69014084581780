//! Tests of `yunion-mpsctl check`, which shows the plan that follows from the configuration, and the changes that a reload
//! would make.

use std::fs;
use std::process::Stdio;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::host::{Host, daemon, signal_pid, text};
use crate::support::wait::wait_for;

const ENTRY: &str = "path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number:";

fn check(host: &Host, arguments: &[&str]) -> (Option<i32>, String) {
    let root = host.path("sysroot").display().to_string();
    let output = host.mpsctl(&[&["check", "--sysroot", &root], arguments].concat());
    (output.status.code(), text(&output))
}

fn document(host: &Host) -> Value {
    let (status, said) = check(host, &["--json"]);
    assert_eq!(status, Some(0), "{said}");
    serde_json::from_str(&said).unwrap()
}

/// Returns the kind, subject, from, to and when of each difference that `yunion-mpsctl check` reports.
fn differences(host: &Host) -> Vec<[String; 5]> {
    let document = document(host);
    assert_eq!(document["not_compared"], Value::Null, "{document:#}");
    let word = |value: &Value| value.as_str().unwrap().to_owned();
    let of = |one: &Value| {
        let effect = match &one["effect"]["clients"] {
            Value::Null => word(&one["effect"]["when"]),
            clients => format!("{} {clients}", word(&one["effect"]["when"])),
        };
        [word(&one["kind"]), word(&one["subject"]), word(&one["from"]), word(&one["to"]), effect]
    };
    document["differences"].as_array().unwrap().iter().map(of).collect()
}

/// The first reload changes the topology, and the control daemon waits for its clients' end. The second reload takes the change
/// back, so the control daemon serves on. `check` must compare the next change with the configuration of the second reload.
#[test]
fn a_change_that_was_taken_back_is_in_force() {
    let mut host = Host::serving("h200");
    let mut client = host.client();
    for topology in ["per_gpu", "shared"] {
        host.configure(&format!("cuda_mps_topology: {topology}"));
        assert!(host.call("Control.Reload").status.success());
    }
    assert_eq!(differences(&host), [[""; 5]; 0]);
    host.devices(&[&format!("{ENTRY} 2")]);
    let found = differences(&host);
    assert!(!found.is_empty() && found.iter().all(|difference| difference[4] == "live"), "{found:?}");
    assert!(host.call("Control.Reload").status.success());
    wait_for("no difference", || differences(&host).is_empty().then_some(()));
    host.wait_for_state("ready");
    assert_eq!(client.try_wait().unwrap(), None);
    client.end();
    assert_eq!(host.stop().code(), Some(0));
}

/// NVML may hang if a GPU has fallen off the bus. In this test, the simulated NVML hangs.
#[test]
fn a_driver_that_hangs_is_told() {
    let host = Host::new("h200");
    host.clear("driver");
    assert!(host.command("mkfifo").arg(host.path("driver")).status().unwrap().success());
    let (status, said) = check(&host, &[]);
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("driver: none: NVML did not answer within 15 s; "), "{said}");
}

#[test]
fn without_a_daemon_it_says_what_would_be() {
    let host = Host::new("h200");
    let (status, said) = check(&host, &[]);
    assert_eq!(status, Some(0), "{said}");
    // `yunion-mps-daemon --check` prints the same text as `yunion-mpsctl check`.
    assert_eq!(said, text(&host.check()));
    assert!(
        said.ends_with("\nWhat a reload would change is unknown: yunion-mps-daemon is not running\n"),
        "{said}"
    );
    let document = document(&host);
    assert_eq!(document["right"], true);
    assert_eq!(document["plan"]["gpus"][0]["mps_memory_limit"], 35942);
    assert_eq!(document["plan"]["control_daemons"][0]["id"], "shared");
    assert_eq!((&document["differences"], &document["problems"]), (&Value::Null, &json!([])));

    fs::write(host.file("/etc/other.conf"), "enable_cuda_mps: perhaps\n").unwrap();
    let (status, said) = check(&host, &["--config", "/etc/other.conf"]);
    assert_eq!(
        (status, said.contains("error: /etc/other.conf:1: enable_cuda_mps: ")),
        (Some(78), true),
        "{said}"
    );
    let (status, said) = check(&host, &["--config", "/etc/other.conf", "--json"]);
    let wrong: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(
        (status, &wrong["right"], &wrong["problems"][0]["line"]),
        (Some(78), &json!(false), &json!(1))
    );

    // Without a driver there is no plan. The configuration files still have no mistake, so `check` succeeds.
    host.clear("driver");
    let (status, said) = check(&host, &[]);
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("no GPU could be served now: "), "{said}");
}

#[test]
fn what_takes_effect_at_once_is_told_from_what_waits() {
    let mut host = Host::serving("h200");
    assert!(check(&host, &[]).1.ends_with("\nNothing would change.\n"));
    host.devices(&[&format!("{ENTRY} 6")]);
    let live = |kind: &str, from: &str, to: &str| [kind, "00:06.0", from, to, "live"].map(str::to_owned);
    assert_eq!(
        differences(&host),
        [
            live("devices", "", "00:06.0-4 to 00:06.0-5"),
            live("memory-limit", "35942", "23961"),
            live("thread-percentage", "25", "16"),
            live("max-clients", "12", "8"),
        ]
    );
    let (status, said) = check(&host, &[]);
    assert_eq!(status, Some(0));
    assert!(said.contains("  00:06.0: threads 25 % -> 16 %: at once, for new clients\n"), "{said}");
    assert!(host.call("Control.Reload").status.success());
    host.wait_for_state("ready");
    assert_eq!(differences(&host), [[""; 5]; 0]);

    let client = host.client();
    host.configure("cuda_mps_multiuser: false");
    let waits = |kind: &str, from: &str, to: &str| [kind, "shared", from, to, "waits 1"].map(str::to_owned);
    assert_eq!(differences(&host), [waits("control-daemon", "present", "new")]);
    let said = check(&host, &[]).1;
    assert!(said.contains("control daemon shared is replaced: after 1 client has ended: "), "{said}");
    let pipe = host.path("mps/other").display().to_string();
    host.configure(&format!("cuda_mps_multiuser: auto\ncuda_mps_pipe_directory: {pipe}"));
    let now = host.path("mps/pipe").display().to_string();
    assert_eq!(differences(&host), [waits("pipe-directory", &now, &pipe)]);
    host.configure(&format!("cuda_mps_pipe_directory: {now}\nenable_cuda_mps: false"));
    assert_eq!(
        differences(&host),
        [["enabled", "enable_cuda_mps", "true", "false", "ends 1"].map(str::to_owned)]
    );
    assert!(check(&host, &[]).1.contains("ENDS the GPU work of 1 client (CUDA error 806)"));
    client.end();
    assert_eq!(host.stop().code(), Some(0));
}

/// The new configuration has one GPU less, and wants a control daemon for each GPU instead of a shared control daemon.
#[test]
fn a_gpu_that_goes_takes_the_control_daemon_with_it() {
    let mut host = Host::serving("h200x8");
    let client = host.client();
    let entries: Vec<String> = (128..135)
        .map(|node| format!("path: /dev/dri/renderD{node}, type: NVIDIA_MPS, virtual_number: 4"))
        .collect();
    host.devices(&entries.iter().map(String::as_str).collect::<Vec<_>>());
    let found = differences(&host);
    let [daemon, devices] = found.as_slice() else { panic!("{found:#?}") };
    assert_eq!([&daemon[0], &daemon[1], &daemon[4]], ["control-daemon", "shared", "waits 1"]);
    assert_eq!([&devices[0], devices[3].as_str(), &devices[4]], ["devices", "", "waits 1"]);
    assert!(devices[2].contains("-0 to "), "{devices:?}");

    host.configure("cuda_mps_topology: per_gpu");
    let found = differences(&host);
    let count = |kind: &str| found.iter().filter(|one| one[0] == kind && one[4] == "waits 1").count();
    assert_eq!((count("control-daemon"), count("devices"), found.len()), (8, 1, 9), "{found:#?}");
    // A change that the service has loaded is no difference any more, even while it waits for clients.
    assert!(host.call("Control.Reload").status.success());
    assert_eq!(differences(&host), [[""; 5]; 0]);
    client.end();
    assert_eq!(host.stop().code(), Some(0));
}

/// The host agent of the platform Cloudpods reads the same configuration files as the service. Some settings in these files end
/// the host agent or break its containers.
#[test]
fn what_stops_the_host_agent_is_told_everywhere() {
    let mut host = Host::new("h200");
    host.devices(&["path: 0000:00:06.0, type: NVIDIA_MPS, virtual_number: 4"]);
    host.configure("cuda_mps_topology: per_gpu");
    let warnings = [
        "cuda_mps_topology: with the topology per_gpu every container fails, unless the platform's host \
         agent reads D-Bus: ",
        "devices[0].path: the platform's host agent rejects the path 0000:00:06.0 and does not start, unless \
         the agent reads D-Bus; name the GPU by its render node, /dev/dri/renderD128\n",
    ];
    let told = [text(&host.check()), check(&host, &[]).1];
    for (told, warning) in told.iter().flat_map(|told| warnings.map(|warning| (told, warning))) {
        assert!(told.starts_with("warning: ") && told.contains(warning), "{told}");
    }
    let document = document(&host);
    let lines = |at: usize| document["warnings"][at]["key"].as_str().unwrap();
    assert_eq!((lines(0), lines(1)), ("cuda_mps_topology", "devices[0].path"), "{document:#}");

    host.start();
    host.wait_for_state("ready");
    let said = |warning: &str| host.log().matches(warning).count();
    assert_eq!(
        [
            said("with the topology per_gpu every container fails"),
            said("the platform's host agent rejects the path")
        ],
        [1, 1]
    );
    assert!(host.call("Control.Reload").status.success());
    assert_eq!(
        [
            said("with the topology per_gpu every container fails"),
            said("the platform's host agent rejects the path")
        ],
        [2, 2]
    );
    assert_eq!(host.stop().code(), Some(0));
}

/// `check` prints the warning about a mistyped key before the error, since the mistyped key is often the cause of the error.
#[test]
fn warnings_stand_beside_errors() {
    let mut host = Host::serving("h200");
    host.configure("cuda_mps_replicsa: 3\ncuda_mps_replicas: none");
    let (warning, error) = (
        "cuda_mps_replicsa: the service knows no such key and ignores it",
        "cuda_mps_replicas: found \"none\"",
    );
    for said in [text(&host.check()), check(&host, &[]).1] {
        let said: Vec<&str> = said.lines().collect();
        let [first, second] = said[..] else { panic!("{said:?}") };
        assert!(first.starts_with("warning: ") && first.contains(warning), "{said:?}");
        assert!(second.starts_with("error: ") && second.contains(error), "{said:?}");
    }
    let document: Value = serde_json::from_str(&check(&host, &["--json"]).1).unwrap();
    assert_eq!(document["warnings"][0]["key"], "cuda_mps_replicsa");

    assert!(!host.call("Control.Reload").status.success());
    assert!(host.log().contains(warning), "{}", host.log());
    assert_eq!(host.stop().code(), Some(0));
    let before = host.log().len();
    host.start();
    assert_eq!(host.ended().code(), Some(78));
    let log = host.log().split_off(before);
    assert!(log.contains(warning) && log.contains(error), "{log}");
}

/// The service was started with `--config` and the path of another file. `check` names this file, and doctor does not warn that
/// the usual file is missing.
#[test]
fn the_file_that_the_service_reads_is_looked_at() {
    let host = Host::new("h200");
    fs::rename(host.file("/etc/yunion/host.conf"), host.file("/etc/own.conf")).unwrap();
    let root = host.path("sysroot").display().to_string();
    let mut command = host.command(daemon());
    let daemon = command.args(["--config=/etc/own.conf", "--sysroot", &root]).stderr(Stdio::null());
    let mut daemon = daemon.spawn().unwrap();
    host.wait_for_state("ready");
    let files = document(&host)["files"].clone();
    assert_eq!(files, json!(["/etc/own.conf", "/etc/yunion/host_container_device.yml"]));
    assert_eq!(differences(&host), [[""; 5]; 0]);
    let doctor = || -> Value {
        let said = host.mpsctl(&["doctor", "--json", "--sysroot", &root]).stdout;
        let findings = serde_json::from_slice::<Value>(&said).unwrap()["findings"].clone();
        let of = |finding: &&Value| finding["name"] == "configuration-not-loaded";
        findings.as_array().unwrap().iter().find(of).cloned().unwrap_or_default()
    };
    assert_eq!(doctor(), Value::Null);
    host.devices(&[&format!("{ENTRY} 6")]);
    assert_eq!(doctor()["subject"], "/etc/own.conf, /etc/yunion/host_container_device.yml");
    signal_pid(daemon.id(), Signal::TERM);
    assert!(daemon.wait().unwrap().success());
}

/// The configuration file is removed while the service runs. Doctor's warning names the removed file.
#[test]
fn a_configuration_that_is_gone_has_a_name() {
    let mut host = Host::serving("h200");
    fs::remove_file(host.file("/etc/yunion/host.conf")).unwrap();
    let root = host.path("sysroot").display().to_string();
    let said = text(&host.mpsctl(&["doctor", "--sysroot", &root]));
    assert!(said.contains("warning: configuration-not-loaded: /etc/yunion/host.conf\n"), "{said}");
    assert_eq!(host.stop().code(), Some(0));
}

/// A mistyped `NVIDIA_MPS` leaves the GPU to another use. The message names this GPU and its type, instead of saying that the
/// host has no GPU.
#[test]
fn a_gpu_that_another_entry_claims_is_told_with_it() {
    let mut host = Host::new("h200");
    host.devices(&["path: /dev/dri/renderD128, type: NVIDIA_GPU_SHAER, virtual_number: 4"]);
    let reason = "every NVIDIA GPU of this host has a use other than MPS: 0000:00:06.0 has the type \
                  NVIDIA_GPU_SHAER in /etc/yunion/host_container_device.yml:2; write type: NVIDIA_MPS";
    for said in [text(&host.check()), check(&host, &[]).1] {
        assert!(said.contains(&format!("\nno GPU would be served: {reason}")), "{said}");
        assert!(
            said.contains(
                "the platform's host agent rejects the type \"NVIDIA_GPU_SHAER\" and does not start"
            ),
            "{said}"
        );
    }
    host.start();
    let status = host.wait_for_failure(reason);
    assert_eq!(status["service"]["state"], "failed");
    assert_eq!(host.stop().code(), Some(0));
}

/// With MPS disabled, the service has not looked for a driver. So no command says that the driver is missing.
#[test]
fn a_service_that_is_switched_off_denies_no_driver() {
    let mut host = Host::new("h200");
    host.configure("enable_cuda_mps: false");
    host.start();
    host.wait_for_state("disabled");
    let said = text(&host.mpsctl(&["status"]));
    assert!(said.contains(", driver not checked, "), "{said}");
    assert_eq!(host.stop().code(), Some(0));
}
