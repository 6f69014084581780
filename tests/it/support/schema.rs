//! Compares the JSON of the commands with the schemas in docs/schemas.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::Value;

use super::host::text;

/// The keys of JSON objects as paths, such as `[].pcie_info.version`. `*` stands for the keys of a map.
#[derive(Debug, Deserialize)]
pub(crate) struct Keys {
    pub(crate) documented: BTreeSet<String>,
    pub(crate) present: BTreeSet<String>,
}

pub(crate) fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/schemas")
}

/// Checks documents against a schema, and fails at a key without a description. Programs of users should ignore unknown keys
/// instead.
#[track_caller]
pub(crate) fn strict(schema: &str, documents: &[Value]) -> Keys {
    let mut checker = Command::new("/usr/bin/python3")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/schema.py"))
        .arg(directory().join(format!("{schema}.json")))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines: String = documents.iter().map(|document| format!("{document}\n")).collect();
    checker.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = checker.wait_with_output().unwrap();
    assert!(output.status.success(), "{schema}: {}", text(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}
