//! Attacks of a local user on the service by way of the bus: each is bounded in number and time, on a bus of the
//! test's own, and its figures are printed.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::support::host::{Host, control_pid, signal_pid, text};
use crate::support::skip::root_or_skip;
use crate::support::wait::wait_for;

/// The length of an attack, in seconds.
const ATTACK: &str = "15";

/// The most memory that an attack may cost the daemon, in KiB.
const MEMORY_KIB: u64 = 32 << 10;

/// The longest that root's `list` may take meanwhile. Half a second is the aim of a release build on a machine that does nothing
/// else; here other tests run beside it, and without the gate it takes until it fails.
const LIST: Duration = Duration::from_secs(30);

/// The slices of the attacked host.
const SLICES: usize = 384;

fn host() -> Host {
    let mut host = Host::new("h200x8");
    host.configure("cuda_mps_replicas: 48");
    host.devices(&[]);
    host.start();
    host.wait_for_state("ready");
    assert_eq!(host.list().len(), SLICES);
    host
}

/// One line of /proc/PID/status, in KiB.
fn memory(pid: u32, line: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|found| found.strip_prefix(line)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// The attacker, as the user nobody.
fn attacker(host: &Host, kind: &str, connections: usize) -> Child {
    let address = host.bus_address();
    let socket = address.strip_prefix("unix:path=").unwrap();
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/attack.py");
    let mut command = host.command("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-"]);
    command.args([socket, kind, &connections.to_string(), ATTACK]);
    // Nobody need not be able to read the file.
    command.stdin(fs::File::open(program).unwrap()).stdout(Stdio::piped()).spawn().unwrap()
}

/// One attack from its beginning to its end: what it costs, and what root and the clients notice of it. Gives what the
/// attacker has had of it; nothing without root's rights.
fn attack(kind: &str, connections: usize) -> Option<Value> {
    if !root_or_skip(kind) {
        return None;
    }
    let host = host();
    let before = memory(host.pid(), "VmRSS:");
    let first = control_pid(&host.wait_for_state("ready"));
    let mut attacker = attacker(&host, kind, connections);
    let mut lists = Vec::new();
    let mut list = || {
        let begun = Instant::now();
        let listed = host.mpsctl(&["list", "--json"]);
        lists.push(begun.elapsed());
        assert!(listed.status.success(), "{kind}: after {:?} {}", begun.elapsed(), text(&listed));
    };
    for _ in 0..5 {
        list();
    }
    // A control daemon that dies now is replaced as fast as ever.
    signal_pid(first, Signal::KILL);
    let killed = Instant::now();
    host.wait_for_status("served again", |status| {
        status["service"]["state"] == "ready" && control_pid(status) != first
    });
    let served_again = killed.elapsed();
    wait_for("the attack's end", || {
        list();
        attacker.try_wait().unwrap()
    });
    let said = attacker.wait_with_output().unwrap();
    let did: Value = serde_json::from_slice(&said.stdout).unwrap();
    let cost = memory(host.pid(), "VmHWM:").saturating_sub(before);
    let left = memory(host.pid(), "VmRSS:").saturating_sub(before);
    lists.sort();
    let (worst, median) = (*lists.last().unwrap(), lists[lists.len() / 2]);
    let _ = writeln!(
        std::io::stderr(),
        "ATTACK {kind}, {connections} connections: {did}; memory +{cost} KiB at most, +{left} KiB after; root's list \
         {median:?}, at worst {worst:?}, of {}; served again after {served_again:?}",
        lists.len()
    );
    assert!(did["calls"].as_u64().unwrap() > 20, "{did}");
    assert!(cost < MEMORY_KIB, "{kind}: {cost} KiB");
    assert!(worst < LIST, "{kind}: {worst:?}");
    assert!(!host.log().contains("the bus is gone"), "{kind}");
    Some(did)
}

/// The answers that the attacker was sent, in MiB.
fn answers(did: &Value) -> u64 {
    did["MiB"].as_u64().unwrap()
}

#[test]
fn reading_everything_without_end_costs_little() {
    // Nobody can see that it reads, since it does not answer.
    let Some(did) = attack("read", 20) else { return };
    assert!(answers(&did) < 20, "{did}");
}

#[test]
fn whoever_is_seen_to_read_gets_more() {
    // Beyond what may be unread.
    let Some(did) = attack("polite", 4) else { return };
    assert!(answers(&did) > 18, "{did}");
}

#[test]
fn introspection_without_end_costs_little() {
    attack("introspect", 20);
}

#[test]
fn answers_that_nobody_reads_cost_little() {
    attack("no-read", 200);
}

#[test]
fn calls_without_an_answer_cost_little() {
    attack("no-reply", 4);
}

#[test]
fn names_of_megabytes_do_not_take_the_service_off_the_bus() {
    attack("long-name", 4);
}
