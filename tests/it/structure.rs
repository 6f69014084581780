//! The rules of `src/lib.rs`, held against the sources: which folder may use which, and who may name what.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

/// The floors of the house, the lowest first. A module uses its own floor's folder and the floors below it.
const FLOORS: [&[&str]; 11] = [
    &["counted", "cuda", "message", "reason"],
    &["host"],
    &["config"],
    &["plan"],
    &["mps", "membership", "arguments", "check"],
    &["supervisor"],
    &["tenants"],
    &["publish"],
    &["dbus"],
    &["ctl"],
    &["daemon"],
];

/// Words that stand in the code of few files only, with the beginnings of these files' paths.
const HOMES: [(&str, &[&str]); 17] = [
    ("nvml_wrapper", &["host/nvml.rs"]),
    ("serde_yaml", &["config/"]),
    ("zbus", &["dbus/", "host/systemd.rs", "host/variant.rs"]),
    ("sd_notify", &["daemon/service_manager.rs", "host/systemd.rs"]),
    ("cudarc", &["cuda/"]),
    ("clap_complete", &["ctl/complete.rs"]),
    ("comfy_table", &["ctl/show/table.rs"]),
    ("ratatui", &["ctl/watch/top/"]),
    ("crossterm", &["ctl/watch/top/"]),
    ("tracing_journald", &["daemon/logging.rs"]),
    ("message_id", &["message.rs", "daemon/logging.rs"]),
    ("/proc/", &["host/proc.rs"]),
    ("(7, 0)", &["host/driver.rs"]),
    ("multiuser-server", &["host/driver.rs"]),
    ("\"-f\"", &["host/driver.rs"]),
    ("Unknown command", &["host/driver.rs"]),
    ("Cannot find MPS", &["host/driver.rs"]),
];

struct Source {
    /// Below src.
    path: String,
    text: String,
}

impl Source {
    /// Its lines of product code with their numbers, comments and tests left out.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self.text.lines().enumerate().take_while(|(_, line)| !line.starts_with("#[cfg(test)]"));
        lines.filter(|(_, line)| !line.trim_start().starts_with("//")).map(|(index, line)| (index + 1, line))
    }

    /// The module of the crate that it belongs to; None for the programs, which may use all of them.
    fn module(&self) -> Option<&str> {
        let first = self.path.split('/').next().unwrap_or_default();
        let module = first.strip_suffix(".rs").unwrap_or(first);
        (!["lib", "main", "bin"].contains(&module)).then_some(module)
    }
}

fn collect(directory: &Path, root: &Path, sources: &mut Vec<Source>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, root, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let path = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            sources.push(Source { path, text });
        }
    }
}

fn sources() -> Vec<Source> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut sources = Vec::new();
    collect(&root, &root, &mut sources);
    assert!(sources.len() > 50, "{} sources", sources.len());
    sources
}

fn floor(module: &str) -> Option<usize> {
    FLOORS.iter().position(|modules| modules.contains(&module))
}

/// The modules of the crate that a line names.
fn used(line: &str) -> impl Iterator<Item = &str> {
    line.split("crate::").skip(1).map(|rest| {
        let end = rest.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        &rest[..end.unwrap_or(rest.len())]
    })
}

fn breaches_of_floors(sources: &[Source]) -> String {
    let mut breaches = String::new();
    for source in sources {
        let Some(module) = source.module() else { continue };
        let Some(own) = floor(module) else {
            writeln!(breaches, "src/{}: module {module} has no floor in this test", source.path).unwrap();
            continue;
        };
        for (number, line) in source.code() {
            for other in used(line).filter(|other| *other != module) {
                if floor(other).is_some_and(|floor| floor >= own) {
                    writeln!(
                        breaches,
                        "src/{}:{number}: {module} uses {other}, which is not below it",
                        source.path
                    )
                    .unwrap();
                }
            }
        }
    }
    breaches
}

fn breaches_of_homes(sources: &[Source]) -> String {
    let mut breaches = String::new();
    for source in sources {
        for (number, line) in source.code() {
            for (word, homes) in HOMES.iter().filter(|(word, _)| line.contains(word)) {
                if !homes.iter().any(|home| source.path.starts_with(home)) {
                    writeln!(
                        breaches,
                        "src/{}:{number}: {word} is for {} alone",
                        source.path,
                        homes.join(", ")
                    )
                    .unwrap();
                }
            }
        }
    }
    breaches
}

#[test]
fn no_module_uses_one_above_it() {
    let breaches = breaches_of_floors(&sources());
    assert!(breaches.is_empty(), "\n{breaches}");
}

#[test]
fn what_has_a_home_is_named_nowhere_else() {
    let breaches = breaches_of_homes(&sources());
    assert!(breaches.is_empty(), "\n{breaches}");
}

/// The rules see what they are for.
#[test]
fn a_breach_is_named_with_file_and_line() {
    let source = |path: &str, text: &str| Source { path: path.to_owned(), text: text.to_owned() };
    let wrong = [
        source(
            "host/systemd.rs",
            "//! crate::dbus\nuse crate::dbus::proxy::json;\n#[cfg(test)]\nuse crate::daemon;\n",
        ),
        source("dbus/mod.rs", "use crate::{\n    ctl,\n};\nlet it = crate::supervisor::ClientFault;\n"),
        source("garage.rs", ""),
        source("mps/log.rs", "let path = \"/proc/1/comm\"; // sd_notify\n"),
    ];
    let floors = breaches_of_floors(&wrong);
    assert_eq!(
        floors,
        "src/host/systemd.rs:2: host uses dbus, which is not below it\n\
         src/garage.rs: module garage has no floor in this test\n"
    );
    let homes = breaches_of_homes(&wrong);
    assert!(homes.contains("src/mps/log.rs:1: /proc/ is for host/proc.rs alone\n"), "{homes}");
}
