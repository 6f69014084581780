//! `yunion-mpsctl bench`: real processes on the simulated GPU, where kernels take time and compute nothing.

use crate::support::host::mpsctl;
use std::io::Read;
use std::process::{Child, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::host::{Host, alive, signal_pid, text};
use crate::support::schema::strict;
use crate::support::wait::wait_for;

fn bench(host: &Host, arguments: &[&str]) -> Child {
    let mut bench = host.command(mpsctl());
    bench.arg("bench").args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn client_pids(host: &Host) -> Vec<u32> {
    let clients = host.busctl("ListClients");
    let pids = clients.as_array().unwrap().iter().map(|client| client["pid"].as_u64().unwrap());
    pids.map(|pid| u32::try_from(pid).unwrap()).collect()
}

fn wait_for_clients(host: &Host, enough: impl Fn(usize) -> bool) -> Vec<u32> {
    wait_for("clients", || Some(client_pids(host)).filter(|pids| enough(pids.len())))
}

#[test]
fn with_mps_side_by_side_and_without_by_turns() {
    let mut host = Host::new("h200");
    host.configure("cuda_mps_set_compute_mode: false");
    host.start();
    host.wait_for_state("ready");
    let result = host.json(&["bench", "-n", "3", "--device", "00:06.0"]).unwrap();
    let keys = strict("bench", std::slice::from_ref(&result));
    assert_eq!(keys.present, keys.documented);
    assert_eq!(result["devices"], json!(["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"]));
    assert_eq!((&result["sms"], &result["why_not_without_mps"]), (&json!(132), &Value::Null));
    for kernel in ["narrow", "wide"] {
        let measured = &result["kernels"][kernel];
        let number = |key: &str| measured[key].as_f64().unwrap();
        // 40 ns is what the simulated GPU takes for a round.
        let alone = number("rounds") * number("launches") * 40e-9;
        let rows = measured["rows"].as_array().unwrap();
        assert_eq!(rows.iter().map(|row| &row["processes"]).collect::<Vec<_>>(), [1, 2, 3]);
        for (row, processes) in rows.iter().zip([1.0, 2.0, 3.0]) {
            for side in ["with_mps", "without_mps"] {
                let seconds: Vec<f64> = serde_json::from_value(row[side]["seconds"].clone()).unwrap();
                assert_eq!(json!(seconds.len()), row["processes"]);
                let last = seconds.into_iter().fold(0.0, f64::max);
                let in_turn = kernel == "wide" || side == "without_mps";
                // A busy machine can only make it longer; but the processes don't start in the very same moment.
                let least = if in_turn { alone * (processes - 0.9) } else { alone };
                assert!(last > least, "{kernel} {side} {row:#}");
                assert!(row[side]["speedup"].as_f64().unwrap() > 0.0);
            }
        }
        assert_eq!(rows[0]["without_mps"]["speedup"], 1.0);
    }
    assert_eq!(client_pids(&host), [0; 0]);
}

#[test]
fn an_exclusive_gpu_is_measured_with_mps_alone() {
    let host = Host::serving("h200");
    let mut bench = bench(&host, &["-n", "1"]);
    let mut said = String::new();
    bench.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(bench.wait().unwrap().success(), "{said}");
    assert!(said.contains("Not measured without MPS: the compute mode is Exclusive_Process"), "{said}");
    assert!(said.contains("PROCESSES  WITH MPS  KERNELS/S  SPEED-UP\n"), "{said}");
    assert!(said.contains("It fills the GPU by itself, and MPS adds little"), "{said}");
    // Bars and progress are for a terminal.
    assert!(!said.contains('\u{2588}') && !said.contains('\r'), "{said}");
}

#[test]
fn tenants_come_first() {
    let host = Host::serving("h200");
    let mut tenant = host.command(host.path("bin/cuda-client"));
    tenant.args(["hold", "600"]).env("CUDA_MPS_PIPE_DIRECTORY", host.path("mps/pipe"));
    let mut tenant = tenant.env("YUNION_MPS_DEVICE", "00:06.0-3").spawn().unwrap();
    wait_for_clients(&host, |count| count == 1);
    let output = host.mpsctl(&["bench"]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("in use by {} (", tenant.id())), "{said}");
    assert!(said.contains("00:06.0-3)") && said.contains("--beside-clients"), "{said}");
    // It runs on request, and what ends it doesn't hurt the tenant.
    let mut bench = bench(&host, &["-n", "4", "--beside-clients"]);
    wait_for_clients(&host, |count| count > 1);
    signal_pid(bench.id(), Signal::TERM);
    assert_eq!(bench.wait().unwrap().code(), Some(143));
    assert_eq!(client_pids(&host), [tenant.id()]);
    assert_eq!(tenant.try_wait().unwrap(), None);
    tenant.kill().unwrap();
    tenant.wait().unwrap();
}

#[test]
fn its_processes_leave_when_it_is_killed() {
    let host = Host::serving("h200");
    let mut bench = bench(&host, &["-n", "2"]);
    let clients = wait_for_clients(&host, |count| count > 0);
    signal_pid(bench.id(), Signal::KILL);
    bench.wait().unwrap();
    wait_for("their end", || (!clients.iter().any(|pid| alive(*pid))).then_some(()));
    wait_for_clients(&host, |count| count == 0);
}

#[test]
fn a_process_that_can_not_go_on_is_the_end_of_all() {
    let host = Host::serving("h200");
    // It may be done with its last kernel already: then it is tried once more.
    let once = || {
        let bench = bench(&host, &["-n", "2"]);
        let clients = wait_for_clients(&host, |count| count > 0);
        // On a busy machine it would be done before the command is there, which lets it go on.
        signal_pid(clients[0], Signal::STOP);
        let terminated = host.mpsctl(&["terminate", &clients[0].to_string()]).status.success();
        let output = bench.wait_with_output().unwrap();
        (terminated && output.status.code() == Some(1)).then(|| text(&output))
    };
    let said = (0..10).find_map(|_| once()).expect("a process at work that is terminated");
    assert!(
        said.contains("running a kernel: the MPS client has been terminated by the server (810)"),
        "{said}"
    );
    assert_eq!(client_pids(&host), [0; 0]);
}

#[test]
fn devices_are_of_one_gpu() {
    let host = Host::serving("h200x8");
    let addr = |device: &Value| device["addr"].as_str().unwrap().to_owned();
    let devices = host.list();
    let (first, last) = (addr(&devices[0]), addr(devices.last().unwrap()));
    for (arguments, expected) in [
        (&["--device", &first, "--device", &last][..], "these devices are of several GPUs"),
        (&["--device", "00:99.0-0"], "there is no device 00:99.0-0"),
    ] {
        let output = host.mpsctl(&[&["bench"], arguments].concat());
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output).contains(expected), "{}", text(&output));
    }
}
