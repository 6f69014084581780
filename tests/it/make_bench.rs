//! Tests that `make bench` measures every row of its table, and that docs/benchmarks.md explains each row. The measured figures
//! do not matter.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::host::{binaries, programs_with, text};

const GROUPS: [&str; 7] = ["start", "death", "stop", "reload", "calls", "commands", "idle"];

fn benchmark(groups: &str, out: &Path) -> Command {
    let mut benchmark = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/service/run.py"));
    benchmark.env("QUICK", "1").env("ONLY", groups).env("OUT", out).env("BINARIES", binaries());
    benchmark.env_remove("BASE").env_remove("PEER").env_remove("PEER_READY");
    benchmark
}

fn measured(group: &str) -> Value {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = tempfile::tempdir().unwrap();
    let output = benchmark(group, out.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let table = fs::read_to_string(out.path().join("service.md")).unwrap();
    assert_eq!(table, String::from_utf8(output.stdout).unwrap());
    let result: Value = serde_json::from_slice(&fs::read(out.path().join("service.json")).unwrap()).unwrap();
    let page = fs::read_to_string(source.join("docs/benchmarks.md")).unwrap();
    for row in result["rows"].as_array().unwrap() {
        assert_eq!(row["group"], group);
        let what = row["what"].as_str().unwrap();
        assert!(table.contains(&format!("| {what} |")), "the table lacks {what}");
        assert!(page.contains(&format!("| {what} |")), "docs/benchmarks.md lacks {what}");
        let [min, median, p90, max] =
            ["min", "median", "p90", "max"].map(|key| row["this"][key].as_f64().expect(what));
        assert!(min <= median && median <= p90 && p90 <= max, "{row}");
        assert!(row["this"]["n"].as_u64() >= Some(1), "{row}");
        assert_eq!(row["failed"]["this"], 0, "{row}");
    }
    result
}

fn every_row_of(group: &str) {
    let result = measured(group);
    assert!(!result["rows"].as_array().unwrap().is_empty());
    let groups: Vec<&str> =
        result["groups"].as_array().unwrap().iter().map(|group| group.as_str().unwrap()).collect();
    assert_eq!(groups, GROUPS, "each group has a test below");
}

#[test]
fn the_start_is_measured() {
    every_row_of("start");
}

#[test]
fn deaths_are_measured() {
    every_row_of("death");
}

#[test]
fn the_end_is_measured() {
    every_row_of("stop");
}

#[test]
fn reloads_are_measured() {
    every_row_of("reload");
}

#[test]
fn calls_on_the_bus_are_measured() {
    every_row_of("calls");
}

#[test]
fn commands_are_measured() {
    every_row_of("commands");
}

#[test]
fn idling_is_measured() {
    every_row_of("idle");
}

fn failed(groups: &str, programs: &Path, out: &Path) -> (Value, String) {
    let output = benchmark(groups, out).env("BINARIES", programs).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let result = fs::read_to_string(out.join("service.json")).unwrap();
    let table = fs::read_to_string(out.join("service.md")).unwrap();
    assert!(table.starts_with("|  | unit | n | failed |"), "{table}");
    (serde_json::from_str(&result).unwrap(), text(&output))
}

#[test]
fn a_service_without_a_control_daemon_has_no_figures() {
    let out = tempfile::tempdir().unwrap();
    let programs = programs_with(out.path(), "nvidia-cuda-mps-control", "#!/bin/sh\nexit 1\n");
    let (result, said) = failed("start,stop,calls,idle", &programs, out.path());
    assert!(said.contains("0 control daemons ran, not 1"), "{said}");
    for row in result["rows"].as_array().unwrap() {
        assert!(row["failed"]["this"].as_u64() >= Some(1) && row["this"].is_null(), "{row}");
    }
}

#[test]
fn a_service_that_is_not_ready_in_the_end_has_no_figures() {
    let out = tempfile::tempdir().unwrap();
    let ctl = binaries().join("yunion-mpsctl");
    let script = format!(
        "#!/bin/sh\n[ \"$1\" != is-ready ] || {{ echo degraded; exit 1; }}\nexec '{}' \"$@\"\n",
        ctl.display()
    );
    let programs = programs_with(out.path(), "yunion-mpsctl", &script);
    let (result, said) = failed("calls", &programs, out.path());
    assert!(said.contains("yunion-mpsctl is-ready: degraded"), "{said}");
    for row in result["rows"].as_array().unwrap() {
        assert_eq!(row["failed"]["this"], 1, "{row}");
        assert!(row["this"].is_null(), "{row}");
    }
}

#[test]
fn a_daemon_that_is_ready_with_a_line_in_its_log_is_measured_where_no_bus_is_needed() {
    let out = tempfile::tempdir().unwrap();
    let peer = out.path().join("peer.sh");
    let daemon = binaries().join("yunion-mps-daemon");
    fs::write(&peer, format!("#!/bin/sh\nunset NOTIFY_SOCKET\nexec '{}' \"$@\"\n", daemon.display()))
        .unwrap();
    fs::set_permissions(&peer, fs::Permissions::from_mode(0o755)).unwrap();
    let output = benchmark("stop,reload", out.path())
        .env("PEER", &peer)
        .env("PEER_READY", "INFO ready: ")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("peer: reload, 2 GPUs, 16 slices: it has no D-Bus interface"));
    let result = fs::read_to_string(out.path().join("service.json")).unwrap();
    let result: Value = serde_json::from_str(&result).unwrap();
    for row in result["rows"].as_array().unwrap() {
        assert!(row["this"]["median"].is_number(), "{row}");
        assert_eq!(row["peer"]["median"].is_number(), row["group"] == "stop", "{row}");
        assert_eq!(row["failed"], serde_json::json!({"this": 0, "peer": 0}), "{row}");
    }
}
