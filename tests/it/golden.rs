//! The output of every command on every simulated board, held byte for byte against the files in tests/golden.
//!
//!     UPDATE_GOLDEN=1 cargo test --test it golden::
//!
//! writes the files again. Another subcommand is one more line in `CASES`.
//!
//! A value that differs from run to run is replaced by one that reads well, since the manual shows these files; all of it
//! is in `Normal`:
//!
//! * The host's directory: its sysroot is `/`, its pipe and log directories are those of the defaults in /tmp.
//! * PIDs: 4711, 4712, ... in the order in which an output has them.
//! * Times: 2026-11-21 12:34:56, three minutes ago.
//! * The generation, 2, and this program's version, 1.0.0.
//! * What a benchmark measures: how long, how many a second, how many times the first.
//!
//! A table gets the widths that belong to the replaced values. JSON must be printed one value a line, keys sorted.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use regex::{Captures, Regex};
use rustix::process::Signal;
use serde_json::Value;

use crate::support::host::{Host, binaries, signal_pid};
use crate::support::wait::wait_for;

/// The name of a file without its extension, and the command with this output. Names of JSON output end in `json`.
/// DEVICE is the second slice, CLIENT the PID of one of its clients. One host sees all of them, in this order.
const CASES: &[(&str, &[&str])] = &[
    ("yunion-mps-daemon-check", &["yunion-mps-daemon", "--check"]),
    ("list", &["yunion-mpsctl", "list"]),
    ("list", &["yunion-mpsctl", "list", "--json"]),
    ("list-gpus", &["yunion-mpsctl", "list", "--gpus"]),
    ("list-gpus", &["yunion-mpsctl", "list", "--gpus", "--json"]),
    ("status", &["yunion-mpsctl", "status"]),
    ("status", &["yunion-mpsctl", "status", "--json"]),
    ("clients", &["yunion-mpsctl", "clients"]),
    ("clients", &["yunion-mpsctl", "clients", "--json"]),
    ("metrics", &["yunion-mpsctl", "metrics"]),
    ("check", &["yunion-mpsctl", "check"]),
    ("check", &["yunion-mpsctl", "check", "--json"]),
    ("doctor", &["yunion-mpsctl", "doctor"]),
    ("doctor", &["yunion-mpsctl", "doctor", "--json"]),
    ("env", &["yunion-mpsctl", "env", "DEVICE"]),
    ("env", &["yunion-mpsctl", "env", "DEVICE", "--format", "json"]),
    ("env-docker", &["yunion-mpsctl", "env", "DEVICE", "--format", "docker"]),
    ("run", &["yunion-mpsctl", "run", "DEVICE", "--", "sh", "-c", RUN]),
    ("terminate", &["yunion-mpsctl", "terminate", "CLIENT"]),
    ("terminate", &["yunion-mpsctl", "terminate", "CLIENT", "--json"]),
    ("terminate-device", &["yunion-mpsctl", "terminate", "--device", "DEVICE"]),
    ("terminate-device", &["yunion-mpsctl", "terminate", "--device", "DEVICE", "--json"]),
    ("probe", &["yunion-mpsctl", "probe", "DEVICE", "--beside-clients"]),
    ("probe", &["yunion-mpsctl", "probe", "DEVICE", "--beside-clients", "--json"]),
    ("bench", &["yunion-mpsctl", "bench", "-n", "2", "--device", "DEVICE", "--beside-clients"]),
    ("bench", &["yunion-mpsctl", "bench", "-n", "2", "--device", "DEVICE", "--beside-clients", "--json"]),
    ("drain", &["yunion-mpsctl", "drain", "DEVICE"]),
    ("undrain", &["yunion-mpsctl", "undrain", "DEVICE"]),
    ("apply", &["yunion-mpsctl", "apply"]),
    ("apply", &["yunion-mpsctl", "apply", "--json"]),
    ("reload", &["yunion-mpsctl", "reload"]),
    ("reload", &["yunion-mpsctl", "reload", "--json"]),
];

const RUN: &str = "env | grep -E '^(CUDA|NVIDIA|YUNION)_' | LC_ALL=C sort | grep -v YUNION_MPS_SIM";

#[test]
fn tesla_p40() {
    board("tesla-p40");
}

#[test]
fn h200() {
    board("h200");
}

#[test]
fn h200x8() {
    board("h200x8");
}

#[test]
fn mixed() {
    board("mixed");
}

fn board(name: &str) {
    let mut host = Host::new(name);
    host.set("TZ", "UTC");
    host.install();
    // Variables of a user must not be in the environment that `run` shows.
    host.set("LC_ALL", "C");
    host.start();
    // The last word of a start: the GPU in MIG mode of one board is never served.
    host.wait_for_status("as ready as it gets", |status| {
        let ready = |daemon: &Value| daemon["state"] == "ready";
        let started = ["ready", "degraded"].contains(&status["service"]["state"].as_str().unwrap());
        started && status["control_daemons"].as_array().unwrap().iter().all(ready)
    });
    let mut client = None;
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    let update = std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| !value.is_empty());
    let mut complaints = String::new();
    let mut files = BTreeSet::new();
    for (file, command) in CASES {
        let output = printed(&host, command, &mut client);
        let json = command.contains(&"--json") || command.contains(&"json");
        let normal = Normal::new(&host);
        let output = if json { normal.json(&output) } else { normal.text(&output) };
        let file = directory.join(format!("{file}.{}", if json { "json" } else { "txt" }));
        assert!(files.insert(file.clone()), "two cases for {}", file.display());
        if update {
            fs::create_dir_all(&directory).unwrap();
            fs::write(&file, output).unwrap();
        } else if fs::read_to_string(&file).unwrap_or_default() != output {
            writeln!(complaints, "{} prints something else:\n{}", command.join(" "), diff(&file, &output))
                .unwrap();
        }
    }
    for entry in fs::read_dir(&directory).unwrap() {
        let file = entry.unwrap().path();
        if files.contains(&file) {
            continue;
        }
        if update {
            fs::remove_file(&file).unwrap();
        } else {
            writeln!(complaints, "{}: no case prints this", file.display()).unwrap();
        }
    }
    end(&mut client);
    assert_eq!(host.stop().code(), Some(0));
    assert!(
        complaints.is_empty(),
        "{complaints}If this is as it should be: UPDATE_GOLDEN=1 cargo test --test it golden::"
    );
}

/// Runs a command, which has to succeed without a complaint.
fn printed(host: &Host, command: &[&str], client: &mut Option<Child>) -> String {
    let devices = host.list();
    let device = devices[1]["addr"].as_str().unwrap();
    ensure_client(host, device, client);
    let pid = host.busctl("ListClients")[0]["pid"].to_string();
    let words = command;
    let (program, arguments) = words.split_first().unwrap();
    let mut command = host.command(binaries().join(program));
    let arguments = arguments.iter().map(|argument| match *argument {
        "DEVICE" => device,
        "CLIENT" => &pid,
        argument => argument,
    });
    command.args(arguments);
    let looks_at_the_host = ["--check", "check", "doctor"].iter().any(|word| words.contains(word));
    if looks_at_the_host {
        command.arg("--sysroot").arg(host.path("sysroot"));
    }
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (said, complained) = (text(output.stdout), text(output.stderr));
    // Where there are findings, the worst of them is the status.
    let allowed: &[i32] = if words.contains(&"doctor") { &[0, 4, 5] } else { &[0] };
    let status = output.status.code().filter(|status| allowed.contains(status));
    assert!(status.is_some() && complained.is_empty(), "{command:?}: {}: {said}{complained}", output.status);
    // Its GPU work is over, and so is it in a moment.
    if words.contains(&"terminate")
        && let Some(mut gone) = client.take()
    {
        gone.wait().unwrap();
    }
    said
}

/// There is one client, which computes nothing; one that was ended has a successor.
fn ensure_client(host: &Host, device: &str, client: &mut Option<Child>) {
    if client.as_mut().is_some_and(|running| running.try_wait().unwrap().is_none()) {
        return;
    }
    let started = host
        .command(binaries().join("yunion-mpsctl"))
        .args(["run", device, "--", "cuda-client", "hold", "600"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    *client = Some(started);
    host.wait_for_only_client();
    // The service counts it a moment later, and all the others are counted too.
    wait_for("the client in its slice", || {
        let expected = |name: &Value| u64::from(name == device);
        let counted =
            |found: &Value| found["max_clients"].is_null() || found["clients"] == expected(&found["addr"]);
        host.list().iter().all(counted).then_some(())
    });
    // A server that is started for a client is in the status a moment later.
    host.wait_for_status("a server", |status| {
        let daemons = status["control_daemons"].as_array().unwrap();
        daemons.iter().all(|daemon| !daemon["servers"].as_array().unwrap().is_empty())
    });
}

/// As Ctrl-C does: a client that is there at the stop would hold it up.
fn end(client: &mut Option<Child>) {
    if let Some(mut client) = client.take() {
        signal_pid(client.id(), Signal::TERM);
        client.wait().unwrap();
    }
}

fn diff(file: &Path, output: &str) -> String {
    let new = tempfile::NamedTempFile::new().unwrap();
    fs::write(new.path(), output).unwrap();
    let old = if file.exists() { file.to_owned() } else { PathBuf::from("/dev/null") };
    let label = file.file_name().unwrap().to_string_lossy().into_owned();
    let output = Command::new("diff")
        .args(["-u", "--label", &format!("golden {label}"), "--label", "printed now"])
        .args([&old, new.path()])
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Replaces what differs from run to run in one output.
struct Normal {
    root: String,
    pids: std::cell::RefCell<Vec<String>>,
}

const MOMENT: &str = "2026-11-21 12:34:56";
const SECONDS: u64 = 1_795_264_496;
const AGE: &str = "3 min";
const GENERATION: u64 = 2;
const VERSION: &str = "1.0.0";

impl Normal {
    fn new(host: &Host) -> Self {
        let root = host.path("").display().to_string().trim_end_matches('/').to_owned();
        Self { root, pids: std::cell::RefCell::default() }
    }

    /// 4711 for the first PID, 4712 for the second.
    fn pid(&self, pid: &str) -> String {
        let mut pids = self.pids.borrow_mut();
        let known = pids.iter().position(|known| known == pid);
        let index = known.unwrap_or_else(|| {
            pids.push(pid.to_owned());
            pids.len() - 1
        });
        (4711 + index).to_string()
    }

    /// Any text outside of a table's special columns.
    fn prose(&self, text: &str) -> String {
        let text = text.replace(&format!("{}/sysroot", self.root), "");
        let text = text.replace(&format!("{}/mps", self.root), "/tmp/nvidia-mps");
        let text = text.replace(&self.root, "");
        let text = text.replace(&format!("{}/", binaries().canonicalize().unwrap().display()), "");
        let text =
            replace(&text, r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}", |_| MOMENT.into());
        // The text behind it in a column begins where it would behind this one.
        let text = replace(&text, r"\([0-9]+ (?:s|min|h|days?) ago\)( *)", |found| {
            format!("({AGE} ago){}", if found[1].is_empty() { "" } else { "  " })
        });
        let text = replace(&text, r"(?i)\b(PID|process|server) ([0-9]+)\b", |found| {
            format!("{} {}", &found[1], self.pid(&found[2]))
        });
        let text =
            replace(&text, r"(?i)\b(generation:? +)[0-9]+", |found| format!("{}{GENERATION}", &found[1]));
        let text =
            replace(&text, "^(yunion_mps_generation) [0-9]+$", |found| format!("{} {GENERATION}", &found[1]));
        let text = replace(&text, "^(yunion_mps_last_event_timestamp_seconds) [0-9.]+$", |found| {
            format!("{} {SECONDS}.0", &found[1])
        });
        let text = replace(&text, r#"\b(version=)"[0-9]+\.[0-9]+\.[0-9]+""#, |found| {
            format!("{}\"{VERSION}\"", &found[1])
        });
        replace(&text, r"\b(Version: +)[0-9]+\.[0-9]+\.[0-9]+", |found| format!("{}{VERSION}", &found[1]))
    }

    fn text(&self, output: &str) -> String {
        let mut normal = String::new();
        let mut lines = output.lines().peekable();
        while let Some(line) = lines.next() {
            if !line.starts_with("+-") {
                writeln!(normal, "{}", self.prose(line)).unwrap();
                continue;
            }
            let mut rows = Vec::new();
            while let Some(row) = lines.next_if(|line| line.starts_with(['|', '+'])) {
                if let Some(row) = row.strip_prefix("| ").and_then(|row| row.strip_suffix(" |")) {
                    rows.push(row.split(" | ").map(|cell| cell.trim_end().to_owned()).collect());
                }
            }
            normal.push_str(&self.table(rows));
        }
        normal
    }

    fn table(&self, mut rows: Vec<Vec<String>>) -> String {
        let heads = rows[0].clone();
        for row in &mut rows[1..] {
            assert_eq!(row.len(), heads.len(), "{row:?}");
            for (cell, head) in row.iter_mut().zip(&heads) {
                *cell = match head.as_str() {
                    _ if cell == "-" => continue,
                    "PID" | "Servers" => replace(cell, "[0-9]+", |found| self.pid(&found[0])),
                    "For" | "Age" => AGE.to_owned(),
                    "Time with MPS" | "Time without MPS" => "1003 ms".to_owned(),
                    "Kernels/s" => "49.9".to_owned(),
                    "Speed-up" => "1.00".to_owned(),
                    _ => self.prose(cell),
                };
            }
        }
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap();
        let widths: Vec<usize> = (0..heads.len()).map(width).collect();
        let rule: String = widths.iter().map(|width| format!("+{}", "-".repeat(width + 2))).collect();
        let mut text = format!("{rule}+\n");
        for (index, row) in rows.iter().enumerate() {
            for (cell, width) in row.iter().zip(&widths) {
                write!(text, "| {cell:width$} ").unwrap();
            }
            text.push_str("|\n");
            if index == 0 {
                writeln!(text, "{rule}+").unwrap();
            }
        }
        writeln!(text, "{rule}+").unwrap();
        text
    }

    fn json(&self, output: &str) -> String {
        let mut value: Value = serde_json::from_str(output).unwrap();
        let pretty = |value: &Value| serde_json::to_string_pretty(value).unwrap() + "\n";
        assert_eq!(output, pretty(&value), "not one value a line with sorted keys");
        self.value("", &mut value);
        pretty(&value)
    }

    fn value(&self, key: &str, value: &mut Value) {
        match value {
            Value::Object(fields) => fields.iter_mut().for_each(|(key, value)| self.value(key, value)),
            Value::Array(items) => items.iter_mut().for_each(|item| self.value(key, item)),
            Value::Number(number) => match key {
                "pid" | "servers" => *value = self.pid(&number.to_string()).parse::<u32>().unwrap().into(),
                "at" => *value = (SECONDS * 1_000_000).into(),
                "since" => *value = SECONDS.into(),
                "generation" => *value = GENERATION.into(),
                "seconds" => *value = 1.003.into(),
                "kernels_per_second" => *value = 49.9.into(),
                "speedup" => *value = 1.0.into(),
                "rounds" => *value = 500_000.into(),
                _ => {}
            },
            Value::String(text) if key == "version" && text == env!("CARGO_PKG_VERSION") => {
                *text = VERSION.to_owned();
            }
            Value::String(text) => *text = self.prose(text),
            Value::Null | Value::Bool(_) => {}
        }
    }
}

fn replace(text: &str, pattern: &str, new: impl Fn(&Captures<'_>) -> String) -> String {
    let pattern = pattern.replace(r"\b", r"(?-u:\b)").replace("(?i)", "(?i-u)");
    Regex::new(&pattern).unwrap().replace_all(text, |found: &Captures<'_>| new(found)).into_owned()
}
