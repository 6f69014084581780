//! `make bench`: it measures every row of its table, and docs/performance.md explains each of them. The
//! figures themselves do not matter here.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::support::host::{binaries, text};

const GROUPS: [&str; 7] = ["start", "death", "stop", "reload", "calls", "commands", "idle"];

/// Measures a group of rows once.
fn measured(group: &str) -> Value {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = tempfile::tempdir().unwrap();
    let output = Command::new(source.join("benches/service/run.py"))
        .env("QUICK", "1")
        .env("ONLY", group)
        .env("OUT", out.path())
        .env("BINARIES", binaries())
        .env_remove("BASE")
        .env_remove("PEER")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let table = fs::read_to_string(out.path().join("service.md")).unwrap();
    assert_eq!(table, String::from_utf8(output.stdout).unwrap());
    let result: Value = serde_json::from_slice(&fs::read(out.path().join("service.json")).unwrap()).unwrap();
    let page = fs::read_to_string(source.join("docs/performance.md")).unwrap();
    for row in result["rows"].as_array().unwrap() {
        assert_eq!(row["group"], group);
        let what = row["what"].as_str().unwrap();
        assert!(table.contains(&format!("| {what} |")), "the table lacks {what}");
        assert!(page.contains(&format!("| {what} |")), "docs/performance.md lacks {what}");
        let [min, median, p90, max] =
            ["min", "median", "p90", "max"].map(|key| row["this"][key].as_f64().expect(what));
        assert!(min <= median && median <= p90 && p90 <= max, "{row}");
        assert!(row["this"]["n"].as_u64() >= Some(1), "{row}");
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
