//! Tests of `yunion-mpsctl probe`, which starts clients on a simulated GPU and measures their limits. The simulator can give
//! clients other limits than the service has set.

use std::process::Stdio;

use serde_json::{Value, json};

use crate::support::host::{Host, text};
use crate::support::skip::root_or_skip;
use crate::support::wait::wait_for;

fn probe(host: &Host, arguments: &[&str]) -> (Option<i32>, Value) {
    let output = host.mpsctl(&[&["probe", "--json"], arguments].concat());
    let reports = serde_json::from_slice(&output.stdout);
    (output.status.code(), reports.unwrap_or_else(|error| panic!("{error}: {}", text(&output))))
}

/// Makes the simulated server give clients these limits, whatever the control daemon answers.
fn clients_get(host: &Host, percentage: u32, mib: u32) {
    host.plant("mps/fault/clients-get", &format!("{percentage} {mib}"));
}

#[test]
fn what_is_promised_is_what_is_found() {
    let host = Host::serving("h200");
    let (status, reports) = probe(&host, &[]);
    assert_eq!(reports.as_array().unwrap().len(), 1, "{reports:#}");
    let report = &reports[0];
    assert_eq!((status, &report["matches"]), (Some(0), &json!(true)), "{report:#}");
    assert_eq!(report["addr"], "00:06.0-0");
    assert_eq!(report["sms"], 132);
    let promised = json!({"thread_percentage": 25, "sms": 32, "memory_limit": 35942});
    let found = json!({"sms": 32, "memory_free": 35797, "memory_total": 143_155, "memory_allocated": 35797});
    for client in ["slice", "control_daemon"] {
        assert_eq!(report[client], json!({"promised": promised, "found": found}), "{client}");
    }

    let output = host.mpsctl(&["probe", "00:06.0-2"]);
    let table = text(&output);
    assert_eq!(output.status.code(), Some(0), "{table}");
    assert!(table.starts_with("00:06.0-2 on H200"), "{table}");
    assert!(
        table.contains("A client gets the memory and the threads that the service publishes."),
        "{table}"
    );
    // With the name of a GPU, `probe` measures one slice of the GPU.
    for name in ["00:06.0", "0000:00:06.0", report["device_path"].as_str().unwrap()] {
        let (status, reports) = probe(&host, &[name]);
        assert_eq!((status, &reports[0]["addr"]), (Some(0), &json!("00:06.0-0")), "{name}: {reports:#}");
    }
    let clients = host.busctl("ListClients");
    assert_eq!(clients, json!([]));
}

#[test]
fn each_gpu_is_probed_once() {
    let mut host = Host::new("mixed");
    host.start();
    // One GPU of this board is in MIG mode. So the service is degraded.
    host.wait_for_state("degraded");
    let (status, reports) = probe(&host, &[]);
    assert_eq!(status, Some(1), "{reports:#}");
    let devices = host.list();
    let first_slices: Vec<&Value> = devices.iter().filter(|device| device["ordinal"] == 0).collect();
    assert_eq!(first_slices.len(), 3);
    for (report, device) in reports.as_array().unwrap().iter().zip(first_slices) {
        assert_eq!(
            (&report["addr"], &report["matches"]),
            (&device["addr"], &device["healthy"]),
            "{report:#}"
        );
        let error = report["error"].as_str().unwrap_or_default();
        assert_eq!(error.contains("MIG is on"), device["healthy"] == false, "{error}");
    }
    // The first GPU has smaller slices than the second. The control daemon has the limits of the larger slices, so the
    // environment of a smaller slice sets lower limits.
    let report = &reports[0];
    assert_eq!(report["slice"]["promised"]["thread_percentage"], 12, "{report:#}");
    assert_eq!(report["control_daemon"]["promised"]["thread_percentage"], 25, "{report:#}");
}

#[test]
fn looser_limits_show_without_the_environment() {
    let host = Host::serving("h200");
    clients_get(&host, 50, 35942);
    let (status, reports) = probe(&host, &["00:06.0-1"]);
    assert_eq!(status, Some(1));
    assert_eq!(
        reports[0]["mismatches"],
        json!(["a client that brings no limits of its own has 66 SMs instead of 32 (25 % of 132)"])
    );
    host.clear("mps/fault/clients-get");
    assert_eq!(probe(&host, &["00:06.0-1"]).0, Some(0));

    clients_get(&host, 25, 71885);
    let (status, reports) = probe(&host, &["00:06.0-1"]);
    assert_eq!(status, Some(1));
    assert_eq!(
        reports[0]["mismatches"],
        json!([
            "a client that brings no limits of its own has 71740 MiB of memory free: the limit of 35942 MiB \
             is not in force, or a larger limit is"
        ])
    );
    // `probe` allocates no more than the slice's memory, although the control daemon would allow more.
    assert_eq!(reports[0]["control_daemon"]["found"]["memory_allocated"], 35942);
}

#[test]
fn tighter_limits_show_in_any_environment() {
    let host = Host::serving("h200");
    clients_get(&host, 10, 20000);
    let output = host.mpsctl(&["probe", "00:06.0-0"]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for who in ["a client of this slice", "a client that brings no limits of its own"] {
        assert!(said.contains(&format!("MISMATCH: {who} has 12 SMs instead of 32 (25 % of 132)")), "{said}");
        assert!(
            said.contains(&format!("MISMATCH: {who} gets 19928 MiB of memory under a limit of 35942")),
            "{said}"
        );
    }
}

#[test]
fn a_gpu_before_volta_promises_nothing() {
    let host = Host::serving("tesla-p40");
    let (status, reports) = probe(&host, &[]);
    let report = &reports[0];
    assert_eq!((status, &report["limits_enforced"]), (Some(0), &json!(false)), "{report:#}");
    assert_eq!(report["slice"]["found"]["sms"], report["sms"]);
    assert_eq!(report["slice"]["found"]["memory_allocated"], Value::Null);
    let said = text(&host.mpsctl(&["probe"]));
    assert!(said.contains("takes this GPU for a GPU that enforces no limits"), "{said}");
}

/// While MPS serves another user's clients, `probe` ends with a message instead of waiting.
#[test]
fn another_users_turn_is_not_waited_for() {
    if !root_or_skip("another_users_turn_is_not_waited_for") {
        return;
    }
    let host = Host::serving("tesla-p40");
    let pipe = host.path("mps/pipe");
    let mut client = host.command("setpriv");
    client.args(["--reuid=65534", "--regid=65534", "--clear-groups", "cuda-client", "hold", "600"]);
    let client = client.env("CUDA_MPS_PIPE_DIRECTORY", &pipe).stdout(Stdio::null()).spawn();
    let mut client = client.unwrap();
    wait_for("the client", || (!host.busctl("ListClients").as_array()?.is_empty()).then_some(()));
    let (status, reports) = probe(&host, &[]);
    let error = reports[0]["error"].as_str().unwrap_or_default();
    assert!(error.contains("serves user ") && error.contains(&client.id().to_string()), "{reports:#}");
    assert_eq!(status, Some(1));
    client.kill().unwrap();
    client.wait().unwrap();
}

#[test]
fn nothing_is_allocated_beside_a_tenant() {
    let host = Host::serving("h200");
    let mut tenant = host.command(host.path("bin/cuda-client"));
    let pipe = host.path("mps/pipe");
    let mut tenant = tenant.args(["hold", "600"]).env("CUDA_MPS_PIPE_DIRECTORY", pipe).spawn().unwrap();
    wait_for("the tenant is a client", || (host.busctl("ListClients") != json!([])).then_some(()));
    let (status, reports) = probe(&host, &["00:06.0-1"]);
    assert_eq!((status, &reports[0]["clients"]), (Some(0), &json!(1)), "{reports:#}");
    assert_eq!(reports[0]["slice"]["found"]["memory_allocated"], Value::Null);
    assert_eq!(reports[0]["slice"]["found"]["memory_free"], 35797);
    let said = text(&host.mpsctl(&["probe", "00:06.0-1"]));
    assert!(said.contains("Nothing was allocated: the GPU has 1 other client (see "), "{said}");
    let (status, reports) = probe(&host, &["00:06.0-1", "--beside-clients"]);
    assert_eq!(status, Some(0));
    assert_eq!(reports[0]["slice"]["found"]["memory_allocated"], 35797);
    tenant.kill().unwrap();
    tenant.wait().unwrap();
}

#[test]
fn without_a_driver_there_is_a_message() {
    let host = Host::serving("h200");
    host.clear("lib/libcuda.so.1");
    let output = host.mpsctl(&["probe"]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("NOT PROBED: the CUDA process of the probe: libcuda.so.1 can't be loaded"),
        "{said}"
    );
    // This file has the name of CUDA's library but is no library.
    host.plant("lib/libcuda.so.1", "no library");
    assert!(text(&host.mpsctl(&["probe"])).contains("libcuda.so.1 can't be loaded"));
}

#[test]
fn what_is_not_there_is_an_error() {
    let host = Host::serving("h200");
    let output = host.mpsctl(&["probe", "00:07.0-1"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("there is no slice or GPU \"00:07.0-1\""), "{}", text(&output));
}
