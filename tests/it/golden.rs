//! Compares the output of every command on every simulated board with the files in tests/golden (`support/golden.rs`).
//!
//!     UPDATE_GOLDEN=1 cargo test --test it golden:: && UPDATE_GOLDEN=1 cargo test --test it screens::
//!
//! writes the files again. For another subcommand, add a line to `CASES`. `tests/golden/BOARD/broken` has the outputs on the
//! same host after its first GPU has fallen off the bus. The tests of `screens.rs` make tables from the recorded JSON instead
//! of recording them here, since the widths of columns depend on PIDs.
//!
//! The manual shows the recorded files, so values that differ from run to run are replaced. `Normal` replaces these values:
//!
//! * The host's directories, by `/` for its sysroot and by the default pipe and log directories in /tmp.
//! * PIDs, by 4711, 4712, ... in their order in the output.
//! * Times, by 2026-11-21 12:34:56 and by three minutes ago.
//! * The generation, by 2, and the program's version, by 1.0.0.
//!
//! Events that depend on timing are removed. JSON must have one value a line, and sorted keys.

use std::fs;
use std::process::{Child, Command, Stdio};

use regex::{Captures, Regex};
use rustix::process::Signal;
use serde_json::Value;

use crate::support::golden::{Golden, is_update, unknown_directories};
use crate::support::host::{Host, binaries, signal_pid, text};
use crate::support::wait::wait_for;

/// Each command, with the name of the file that has its output. A JSON output has the extension `json`. DEVICE stands for the
/// second slice, and CLIENT for the PID of a client of this slice. The commands run on one host in this order.
const CASES: &[(&str, &[&str])] = &[
    ("yunion-mps-daemon-check", &["yunion-mps-daemon", "--check"]),
    ("list", &["yunion-mpsctl", "list", "--json"]),
    ("list-gpus", &["yunion-mpsctl", "list", "--gpus", "--json"]),
    ("status", &["yunion-mpsctl", "status", "--json"]),
    ("clients", &["yunion-mpsctl", "clients", "--json"]),
    ("events", &["yunion-mpsctl", "events"]),
    ("events", &["yunion-mpsctl", "events", "--json"]),
    ("is-ready", &["yunion-mpsctl", "is-ready"]),
    ("metrics", &["yunion-mpsctl", "metrics"]),
    ("metrics-prometheus", &["yunion-mpsctl", "metrics", "--format", "prometheus", "--clients"]),
    ("check", &["yunion-mpsctl", "check"]),
    ("check", &["yunion-mpsctl", "check", "--json"]),
    ("doctor", &["yunion-mpsctl", "doctor"]),
    ("doctor", &["yunion-mpsctl", "doctor", "--json"]),
    ("env", &["yunion-mpsctl", "env", "DEVICE"]),
    ("env", &["yunion-mpsctl", "env", "DEVICE", "--format", "json"]),
    ("env-docker", &["yunion-mpsctl", "env", "DEVICE", "--format", "docker"]),
    ("env-podman", &["yunion-mpsctl", "env", "DEVICE", "--format", "podman"]),
    ("env-compose", &["yunion-mpsctl", "env", "DEVICE", "--format", "compose"]),
    ("env-cdi", &["yunion-mpsctl", "env", "DEVICE", "--format", "cdi"]),
    ("run", &["yunion-mpsctl", "run", "DEVICE", "--", "sh", "-c", RUN]),
    ("slurm", &["yunion-mpsctl", "slurm"]),
    ("terminate", &["yunion-mpsctl", "terminate", "CLIENT"]),
    ("terminate", &["yunion-mpsctl", "terminate", "CLIENT", "--json"]),
    ("terminate-device", &["yunion-mpsctl", "terminate", "--device", "DEVICE"]),
    ("terminate-device", &["yunion-mpsctl", "terminate", "--device", "DEVICE", "--json"]),
    ("probe", &["yunion-mpsctl", "probe", "DEVICE", "--beside-clients"]),
    ("probe", &["yunion-mpsctl", "probe", "DEVICE", "--beside-clients", "--json"]),
    ("drain", &["yunion-mpsctl", "drain", "DEVICE"]),
    ("undrain", &["yunion-mpsctl", "undrain", "DEVICE"]),
    ("apply", &["yunion-mpsctl", "apply"]),
    ("apply", &["yunion-mpsctl", "apply", "--json"]),
    ("reload", &["yunion-mpsctl", "reload"]),
    ("reload", &["yunion-mpsctl", "reload", "--json"]),
];

/// The commands on a host with a lost GPU. Some of them print an error, which is recorded too.
const BROKEN: &[(&str, &[&str])] = &[
    ("list", &["yunion-mpsctl", "list", "--json"]),
    ("list-gpus", &["yunion-mpsctl", "list", "--gpus", "--json"]),
    ("status", &["yunion-mpsctl", "status", "--json"]),
    ("clients", &["yunion-mpsctl", "clients", "--json"]),
    ("metrics", &["yunion-mpsctl", "metrics"]),
    ("metrics-prometheus", &["yunion-mpsctl", "metrics", "--format", "prometheus", "--clients"]),
    ("check", &["yunion-mpsctl", "check"]),
    ("doctor", &["yunion-mpsctl", "doctor"]),
    ("doctor", &["yunion-mpsctl", "doctor", "--json"]),
    ("env", &["yunion-mpsctl", "env", "DEVICE"]),
    ("env-unknown", &["yunion-mpsctl", "env", "00:66.0-1"]),
    ("run", &["yunion-mpsctl", "run", "DEVICE", "--", "true"]),
    ("probe", &["yunion-mpsctl", "probe"]),
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

#[test]
fn gh200x4() {
    board("gh200x4");
}

#[test]
fn gb10() {
    board("gb10");
}

#[test]
fn no_directory_is_left_over() {
    let unknown = unknown_directories();
    if is_update() {
        unknown.iter().for_each(|directory| fs::remove_dir_all(directory).unwrap());
    } else {
        assert!(unknown.is_empty(), "no test reads {unknown:?}");
    }
}

fn board(name: &str) {
    let mut host = Host::new(name);
    host.set("TZ", "UTC");
    host.install();
    // The recorded environment of `run` must not depend on the locale of the user who runs the tests.
    host.set("LC_ALL", "C");
    host.start();
    // One board has a GPU in MIG mode, which is not served. So the service may be degraded, but all control daemons must be
    // ready.
    host.wait_for_status("as ready as it gets", |status| {
        let ready = |daemon: &Value| daemon["state"] == "ready";
        let started = ["ready", "degraded"].contains(&status["service"]["state"].as_str().unwrap());
        started && status["control_daemons"].as_array().unwrap().iter().all(ready)
    });
    own_client(&host);
    let mut client = None;
    let mut golden = Golden::new(name);
    for (file, command) in CASES {
        hold(&mut golden, &host, (file, command), |columns| printed(&host, command, columns, &mut client));
    }
    let mut broken = Golden::new(&format!("{name}/broken"));
    let lost = host.list()[1]["pci_bdf"].clone();
    host.plant("gpus/0/lost", "");
    assert!(host.call("Control.Reload").status.success());
    host.wait_for_status("a GPU that nobody can ask", |status| {
        let gpus = status["gpus"].as_array().unwrap();
        let lost = gpus.iter().find(|gpu| gpu["pci_bdf"] == lost).unwrap();
        lost["healthy"] == false
            && lost["device_path"].is_null()
            && status["service"]["state"] != "starting"
            && status["control_daemons"][0]["state"] == "waiting"
    });
    for (file, command) in BROKEN {
        hold(&mut broken, &host, (file, command), |columns| said(&host, command, columns));
    }
    end(&mut client);
    host.clear("gpus/0/lost");
    assert_eq!(host.stop().code(), Some(0));
    let complaints = [golden.finish(), broken.finish()].concat();
    assert!(
        complaints.is_empty(),
        "{complaints}If this is as it should be: UPDATE_GOLDEN=1 cargo test --test it golden::"
    );
}

/// Compares a command's output for 80 columns with its recorded file. When all outputs of the board are recorded, compares the
/// output for 120 columns too.
fn hold(
    golden: &mut Golden,
    host: &Host,
    (file, command): (&str, &[&str]),
    mut print: impl FnMut(&str) -> String,
) {
    let normal = || Normal::new(host);
    let narrow = print("80");
    if command.contains(&"--json") || command.contains(&"json") {
        return golden.hold(&format!("{file}.json"), command, &normal().json(&narrow));
    }
    let narrow = normal().text(&narrow);
    let wide = if golden.is_whole() { normal().text(&print("120")) } else { narrow.clone() };
    golden.hold_both(file, command, &narrow, &wide);
}

/// Runs a command and returns its stdout. The command must succeed, except that the status of `doctor` and `is-ready` depends
/// on the host.
fn printed(host: &Host, words: &[&str], columns: &str, client: &mut Option<Child>) -> String {
    let devices = host.list();
    let device = devices[1]["addr"].as_str().unwrap();
    ensure_client(host, device, client);
    let pid = host.busctl("ListClients")[0]["pid"].to_string();
    let mut command = command(host, words, columns, device, &pid);
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (said, complained) = (text(output.stdout), text(output.stderr));
    // The exit status of `doctor` depends on its gravest finding.
    let allowed: &[i32] = match words {
        [_, "doctor", ..] => &[0, 4, 5],
        // On the board with a GPU in MIG mode, the service is not ready.
        [_, "is-ready", ..] => &[0, 1],
        _ => &[0],
    };
    let status = output.status.code().filter(|status| allowed.contains(status));
    // `slurm` warns on stderr about a GPU that is not served.
    let may_warn = words.contains(&"slurm");
    assert!(
        status.is_some() && (complained.is_empty() || may_warn),
        "{command:?}: {}: {said}{complained}",
        output.status
    );
    // `terminate` has ended the client's GPU work, so the client ends in a moment.
    if words.contains(&"terminate")
        && let Some(mut gone) = client.take()
    {
        gone.wait().unwrap();
    }
    said
}

fn said(host: &Host, words: &[&str], columns: &str) -> String {
    let devices = host.list();
    let device = devices[1]["addr"].as_str().unwrap();
    let output = command(host, words, columns, device, "").output().unwrap();
    text(&output)
}

fn command(host: &Host, words: &[&str], columns: &str, device: &str, pid: &str) -> Command {
    let (program, arguments) = words.split_first().unwrap();
    let mut command = host.command(binaries().join(program));
    let arguments = arguments.iter().map(|argument| match *argument {
        "DEVICE" => device,
        "CLIENT" => pid,
        argument => argument,
    });
    command.args(arguments).env("COLUMNS", columns);
    let looks_at_the_host = ["--check", "check", "doctor"].iter().any(|word| words.contains(word));
    if looks_at_the_host {
        command.arg("--sysroot").arg(host.path("sysroot"));
    }
    command
}

/// Copies the client's program to a path with the same length on every machine. Messages contain the path, and would otherwise
/// be wrapped at different words.
fn own_client(host: &Host) {
    let program = host.path("bin/cuda-client");
    fs::remove_file(&program).unwrap();
    fs::copy(binaries().join("cuda-client"), &program).unwrap();
}

/// Starts a client that computes nothing if the host has no client. Commands such as `terminate` may have ended the last
/// client.
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
    // The service lists a client a moment before it counts the client for its slice.
    wait_for("the client in its slice", || {
        let expected = |name: &Value| u64::from(name == device);
        let counted =
            |found: &Value| found["max_clients"].is_null() || found["clients"] == expected(&found["addr"]);
        host.list().iter().all(counted).then_some(())
    });
    // Before Volta, the service counts clients for the GPU and not for the slices.
    wait_for("the client on its GPU", || {
        let gpus = host.json(&["list", "--gpus"]).unwrap();
        let clients = gpus.as_array().unwrap().iter().filter_map(|gpu| gpu["clients"].as_u64());
        (clients.sum::<u64>() == 1).then_some(())
    });
    // A server that has started for the client appears in the status a moment later.
    host.wait_for_status("a server", |status| {
        let daemons = status["control_daemons"].as_array().unwrap();
        daemons.iter().all(|daemon| !daemon["servers"].as_array().unwrap().is_empty())
    });
}

/// Ends the client by SIGTERM. Otherwise the client would delay the stop of the service.
fn end(client: &mut Option<Child>) {
    if let Some(mut client) = client.take() {
        signal_pid(client.id(), Signal::TERM);
        client.wait().unwrap();
    }
}

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

    fn pid(&self, pid: &str) -> String {
        let mut pids = self.pids.borrow_mut();
        let known = pids.iter().position(|known| known == pid);
        let index = known.unwrap_or_else(|| {
            pids.push(pid.to_owned());
            pids.len() - 1
        });
        (4711 + index).to_string()
    }

    fn prose(&self, text: &str) -> String {
        let text = text.replace(&format!("{}/sysroot", self.root), "");
        let text = text.replace(&format!("{}/mps", self.root), "/tmp/nvidia-mps");
        let text = text.replace(&format!("{}/bin/", self.root), "");
        let text = text.replace(&self.root, "");
        let text =
            replace(&text, r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}", |_| MOMENT.into());
        // The new age may have another width than the old one. So the spaces after the age are replaced too, to align the
        // table's columns.
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
        let text = replace(&text, r#"\b(pid=)"([0-9]+)""#, |found| {
            format!("{}\"{}\"", &found[1], self.pid(&found[2]))
        });
        let text = replace(&text, r#"\b(version=)"[0-9]+\.[0-9]+\.[0-9]+""#, |found| {
            format!("{}\"{VERSION}\"", &found[1])
        });
        replace(&text, r"\b(Version: +)[0-9]+\.[0-9]+\.[0-9]+", |found| format!("{}{VERSION}", &found[1]))
    }

    fn text(&self, output: &str) -> String {
        output.lines().map(|line| self.prose(line) + "\n").collect()
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
            // The events about a lost GPU and about the budget of a slice depend on timing, so they are removed. A lost GPU is
            // reported by the next check of its control daemon, which may come before or after the recorded command. A slice is
            // over its budget if the service happens to count the memory of the slice's clients while one of the clients is
            // `probe`, which uses the memory of a whole slice.
            Value::Array(events) if key == "events" => {
                let by_chance =
                    |text: &str| ["GPU is lost", " its budget"].iter().any(|words| text.contains(words));
                events.retain(|event| !by_chance(event["text"].as_str().unwrap()));
                events.iter_mut().for_each(|event| self.value(key, event));
            }
            Value::Array(items) => items.iter_mut().for_each(|item| self.value(key, item)),
            Value::Number(number) => match key {
                "pid" | "servers" => *value = self.pid(&number.to_string()).parse::<u32>().unwrap().into(),
                "at" => *value = (SECONDS * 1_000_000).into(),
                "since" => *value = SECONDS.into(),
                "generation" => *value = GENERATION.into(),
                _ => {}
            },
            Value::String(text) if key == "version" && text == env!("CARGO_PKG_VERSION") => {
                *text = VERSION.to_owned();
            }
            Value::String(text) if key == "ended_for" && text.parse::<u32>().is_ok() => {
                *text = self.pid(text);
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
