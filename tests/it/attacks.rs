//! Floods of D-Bus calls by a member of the group yunion-mps. Each flood has a limited length and a private bus, and its
//! figures are printed.
//!
//! The tests in tests/e2e show that the unit's `MemoryMax=` ends a service that a flood has made too large.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Instant;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::bus::AS_MEMBER;
use crate::support::client::Client;
use crate::support::host::{Host, signal_pid};
use crate::support::skip::root_or_skip;
use crate::support::wait::wait_for;

/// The length of an attack, in seconds.
const ATTACK: &str = "5";

const SLICES: usize = 384;

fn host() -> Host {
    let mut host = Host::new("h200x8");
    host.configure("cuda_mps_replicas: 48\ncuda_mps_topology: per_gpu");
    host.devices(&[]);
    host.start();
    host.wait_for_state("ready");
    assert_eq!(host.list().len(), SLICES);
    host
}

/// Returns the value of a line of /proc/PID/status, in KiB.
fn memory(pid: u32, line: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|found| found.strip_prefix(line)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

fn attacker(host: &Host, kind: &str, connections: usize) -> Child {
    let address = host.bus_address();
    let socket = address.strip_prefix("unix:path=").unwrap();
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/attack.py");
    let mut command = host.command("setpriv");
    command.args(AS_MEMBER).args(["/usr/bin/python3", "-"]);
    command.args([socket, kind, &connections.to_string(), ATTACK]);
    // The member of the group may not be able to read the file of the program. So Python reads the program from its stdin.
    command.stdin(fs::File::open(program).unwrap()).stdout(Stdio::piped()).spawn().unwrap()
}

/// Attacks a service. During the attack, the service must replace a killed control daemon, and clients of other control daemons
/// must stay alive. After the attack, the service must answer root, and the test prints how long the answer takes.
fn attack(kind: &str, connections: usize) {
    if !root_or_skip(kind) {
        return;
    }
    let host = host();
    let before = memory(host.pid(), "VmRSS:");
    let status = host.wait_for_state("ready");
    let control_daemons = status["control_daemons"].as_array().unwrap();
    let slice = &host.list()[0];
    let another = control_daemons.iter().find(|one| one["id"] != slice["device_path"]).unwrap();
    let mut client = Client::start(&mut host.program_of(slice["addr"].as_str().unwrap(), &["hold", "600"]));
    host.wait_for_only_client();
    let mut attacker = attacker(&host, kind, connections);
    signal_pid(u32::try_from(another["pid"].as_u64().unwrap()).unwrap(), Signal::KILL);
    let killed = Instant::now();
    let is_ready = format!("control daemon {} is ready", another["id"].as_str().unwrap());
    wait_for("its successor", || host.log().matches(&is_ready).nth(1).map(drop));
    let served_again = killed.elapsed();
    wait_for("the attack's end", || attacker.try_wait().unwrap());
    let said = attacker.wait_with_output().unwrap();
    let did: Value = serde_json::from_slice(&said.stdout).unwrap();
    let over = Instant::now();
    host.wait_for_state("ready");
    let answered = over.elapsed();
    let cost = memory(host.pid(), "VmHWM:").saturating_sub(before);
    let _ = writeln!(
        std::io::stderr(),
        "ATTACK {kind}, {connections} connections: {did}; memory +{cost} KiB at most; served again after \
         {served_again:?}; root answered after {answered:?}"
    );
    assert!(did["calls"].as_u64().unwrap() > 20, "{did}");
    assert_eq!(client.try_wait().unwrap(), None);
    assert_eq!(host.list().len(), SLICES);
}

#[test]
fn reading_everything_without_end_loses_nobody() {
    attack("read", 4);
}

#[test]
fn introspection_without_end_loses_nobody() {
    attack("introspect", 4);
}

/// The bus stores messages that their receiver does not read, up to some hundred MiB for each connection.
#[test]
fn answers_that_nobody_reads_lose_nobody() {
    attack("no-read", 2);
}

#[test]
fn calls_without_an_answer_lose_nobody() {
    attack("no-reply", 4);
}

#[test]
fn names_of_megabytes_lose_nobody() {
    attack("long-name", 4);
}
