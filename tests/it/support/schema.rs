//! The schemas in docs/schemas, held against the JSON that the commands print.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::Value;

use super::host::text;

/// Keys as paths: `[].pcie_info.version`. The keys of a map are `*`.
#[derive(Debug, Deserialize)]
pub(crate) struct Keys {
    /// The keys that the schema has.
    pub(crate) documented: BTreeSet<String>,
    /// The keys that the documents have.
    pub(crate) present: BTreeSet<String>,
}

/// Where the schemas are.
pub(crate) fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/schemas")
}

/// Holds documents against the schema with this name. A key that the schema lacks is an error, as it is for no consumer.
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
