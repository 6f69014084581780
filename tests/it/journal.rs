//! Tests that the source, the message catalogs and docs/journal.md have the same message ids.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use regex::Regex;

use crate::support::host::text;

const CATALOGS: [&str; 2] = ["yunion-mps-daemon.catalog", "yunion-mps-daemon.zh_CN.catalog"];

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn read(path: &str) -> String {
    fs::read_to_string(source(path)).unwrap()
}

/// Returns the message ids that `pattern` finds in a text. ID in the pattern stands for an id.
fn ids(pattern: &str, text: &str) -> Vec<String> {
    let pattern = Regex::new(&pattern.replace("ID", "([0-9a-f]{32})")).unwrap();
    let mut ids: Vec<String> = pattern.captures_iter(text).map(|found| found[1].to_owned()).collect();
    ids.sort();
    ids
}

#[test]
fn source_catalogs_and_page_have_the_same_ids() {
    let known = ids("=> \"ID\"", &read("src/message.rs"));
    assert_eq!(known.iter().collect::<BTreeSet<_>>().len(), known.len(), "an id twice: {known:?}");
    assert!(known.len() > 10, "{known:?}");
    for catalog in CATALOGS {
        assert_eq!(ids("(?m)^-- ID$", &read(&format!("packaging/journal/{catalog}"))), known, "{catalog}");
    }
    assert_eq!(ids("(?m)^\\| `ID` \\|", &read("docs/journal.md")), known);
}

/// The catalogs use only journal fields that docs/journal.md describes. A field that the service does not write to the journal
/// would leave a gap in the catalog's text.
#[test]
fn catalogs_name_fields_that_the_page_explains() {
    let page = read("docs/journal.md");
    let field = Regex::new("@([A-Z_]+)@").unwrap();
    let mut named = Vec::new();
    for catalog in CATALOGS {
        let text = read(&format!("packaging/journal/{catalog}"));
        let fields: Vec<String> = field.captures_iter(&text).map(|found| found[1].to_owned()).collect();
        for name in &fields {
            assert!(page.contains(&format!("| `{name}` |")), "{catalog}: {name}");
        }
        named.push(fields);
    }
    assert_eq!(named[0], named[1], "the languages name other fields");
}

#[test]
fn journalctl_takes_the_catalogs() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("usr/lib/systemd/catalog");
    fs::create_dir_all(&directory).unwrap();
    for catalog in CATALOGS {
        fs::copy(source("packaging/journal").join(catalog), directory.join(catalog)).unwrap();
    }
    let journalctl = |argument: &str| {
        let mut command = Command::new("journalctl");
        command.arg(format!("--root={}", root.path().display())).arg(argument).env("LC_ALL", "C");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{argument}: {}", text(&output));
        // journalctl reports a wrong catalog entry only on stderr, and exits with 0.
        assert!(output.stderr.is_empty(), "{argument}: {}", text(&output));
        text(&output)
    };
    journalctl("--update-catalog");
    let listed = journalctl("--list-catalog");
    assert_eq!(ids("(?m)^ID yunion-mps-daemon: ", &listed), ids("=> \"ID\"", &read("src/message.rs")));
    // journalctl shows the Chinese texts only in a Chinese locale, which the machine may lack. So the test reads them from the
    // catalog's database.
    let database = fs::read(root.path().join("var/lib/systemd/catalog/database")).unwrap();
    let database = String::from_utf8_lossy(&database);
    for subject in read("packaging/journal/yunion-mps-daemon.zh_CN.catalog").lines() {
        assert!(!subject.starts_with("Subject: ") || database.contains(subject), "{subject}");
    }
}
