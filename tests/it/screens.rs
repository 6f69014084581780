//! Compares the tables of yunion-mpsctl for 80 and 120 columns with the files in tests/golden (`support/golden.rs`). The
//! answers that `golden.rs` has recorded are played on a private bus, so PIDs and times have the same widths in each run.
//!
//!     UPDATE_GOLDEN=1 cargo test --test it screens::

use crate::support::host::mpsctl;
use std::collections::HashMap;
use std::fs;
use std::iter;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use regex::Regex;
use serde_json::{Map, Value, json};
use zbus::connection::Builder;
use zbus::{OwnedVariant, Variant, interface};

use crate::support::bus::{PrivateBus, output};
use crate::support::golden::{Golden, directory};
use crate::support::screen::Screen;

/// The arguments of yunion-mpsctl for each recorded file, by the file's name without its extension.
const SCREENS: &[(&str, &[&str])] = &[
    ("list", &["list"]),
    ("list-wide", &["list", "-o", "wide"]),
    ("list-gpus", &["list", "--gpus"]),
    ("list-gpus-wide", &["list", "--gpus", "-o", "wide"]),
    ("list-platform", &["list", "--platform"]),
    ("list-gpus-platform", &["list", "--gpus", "--platform"]),
    ("list-names", &["list", "--names"]),
    ("list-no-headings", &["list", "--no-headings"]),
    ("status", &["status"]),
    ("status-wide", &["status", "-o", "wide"]),
    ("clients", &["clients"]),
    ("clients-wide", &["clients", "-o", "wide"]),
];

/// The time of the recorded answers in seconds since 1970, and their age in seconds on the screens.
const RECORDED: i64 = 1_795_264_496;
const AGO: i64 = 200;

const FAULT: &str = "server 4712 met a fatal GPU error on device 0";

/// The recorded answers of a service, to be played on a bus.
struct Played {
    devices: Vec<Map<String, Value>>,
    gpus: Vec<Map<String, Value>>,
    clients: Vec<Map<String, Value>>,
    status: Value,
}

type Dict = HashMap<String, OwnedVariant>;

impl Played {
    fn read(directory: &Path) -> Self {
        let now = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()).unwrap();
        let file = |name: &str| -> Value {
            let text = fs::read_to_string(directory.join(name)).unwrap();
            // The answers have times in microseconds and in seconds. Both become times of the last minutes.
            let text = text.replace(&format!("{RECORDED}000000"), &format!("{}000000", now - AGO));
            serde_json::from_str(&text.replace(&RECORDED.to_string(), &(now - AGO).to_string())).unwrap()
        };
        let rows = |name: &str| rows(&file(name));
        Self {
            devices: rows("list.json"),
            gpus: rows("list-gpus.json"),
            clients: rows("clients.json"),
            status: file("status.json"),
        }
    }

    /// Adds a fault event, and after it more events than `status` has lines for.
    fn after_a_fault(mut self) -> Self {
        let events = self.status["events"].as_array_mut().unwrap();
        let at = events[0]["at"].clone();
        let event = |fault, text| json!({"at": at, "fault": fault, "text": text});
        let later = (0..6).map(|number| event(false, format!("00:06.0-{number} is drained")));
        let all = iter::once(event(true, format!("{FAULT} of user alice"))).chain(later);
        *events = all.chain(events.drain(..)).collect();
        self
    }

    async fn serve(self, bus: &PrivateBus) -> zbus::Connection {
        let address: zbus::Address = bus.address().as_str().try_into().unwrap();
        let builder =
            Builder::address(address).serve_at("/io/yunion/Mps1/Manager", self).name("io.yunion.Mps1");
        builder.build().await.unwrap()
    }

    fn text(&self, key: &str) -> String {
        self.status["service"][key].as_str().unwrap().to_owned()
    }
}

fn rows(list: &Value) -> Vec<Map<String, Value>> {
    list.as_array().unwrap().iter().map(|row| row.as_object().unwrap().clone()).collect()
}

fn dicts(rows: &[Map<String, Value>]) -> Vec<Dict> {
    rows.iter().map(dict).collect()
}

fn dict(row: &Map<String, Value>) -> Dict {
    row.iter().map(|(key, value)| (key.clone(), OwnedVariant::try_from(variant(value)).unwrap())).collect()
}

fn variant(value: &Value) -> Variant<'static> {
    match value {
        Value::Bool(plain) => Variant::from(*plain),
        Value::Number(number) => Variant::from(number.as_i64().unwrap()),
        Value::String(text) => Variant::from(text.clone()),
        Value::Array(list) if list.iter().all(Value::is_i64) => {
            Variant::from(list.iter().map(|number| number.as_i64().unwrap()).collect::<Vec<_>>())
        }
        Value::Array(list) => {
            Variant::from(list.iter().map(|text| text.as_str().unwrap().to_owned()).collect::<Vec<_>>())
        }
        Value::Object(fields) => Variant::from(dict(fields)),
        Value::Null => panic!("no null is published"),
    }
}

#[interface(name = "io.yunion.Mps1.Manager")]
impl Played {
    fn list_devices(&self) -> Vec<Dict> {
        dicts(&self.devices)
    }

    fn list_gpus(&self) -> Vec<Dict> {
        dicts(&self.gpus)
    }

    fn list_clients(&self) -> Vec<Dict> {
        dicts(&self.clients)
    }

    fn list_control_daemons(&self) -> Vec<Dict> {
        dicts(&rows(&self.status["control_daemons"]))
    }

    fn list_events(&self) -> Vec<Dict> {
        dicts(&rows(&self.status["events"]))
    }

    #[zbus(property)]
    fn driver_version(&self) -> String {
        self.text("driver_version")
    }

    #[zbus(property)]
    fn enabled(&self) -> bool {
        self.status["service"]["enabled"].as_bool().unwrap()
    }

    #[zbus(property)]
    fn generation(&self) -> u64 {
        self.status["service"]["generation"].as_u64().unwrap()
    }

    #[zbus(property)]
    fn log_directory(&self) -> String {
        self.text("log_directory")
    }

    #[zbus(property)]
    fn pipe_directory(&self) -> String {
        self.text("pipe_directory")
    }

    #[zbus(property)]
    fn state(&self) -> String {
        self.text("state")
    }

    #[zbus(property)]
    fn state_reason(&self) -> String {
        self.text("state_reason")
    }

    #[zbus(property)]
    fn version(&self) -> String {
        self.text("version")
    }
}

#[tokio::test]
async fn tesla_p40() {
    board("tesla-p40", &[""]).await;
}

#[tokio::test]
async fn h200() {
    board("h200", &["", "/broken"]).await;
}

#[tokio::test]
async fn h200x8() {
    board("h200x8", &["", "/broken"]).await;
}

#[tokio::test]
async fn mixed() {
    board("mixed", &["", "/broken"]).await;
}

#[tokio::test]
async fn gh200x4() {
    board("gh200x4", &[""]).await;
}

#[tokio::test]
async fn gb10() {
    board("gb10", &[""]).await;
}

/// With 8 GPUs or with long reasons, `status` has more lines than the terminal. It shortens its output so that the state and
/// the last fault stay on the screen.
#[tokio::test]
async fn the_state_and_the_last_fault_stay_on_the_terminal() {
    for host in ["tesla-p40", "h200", "h200/broken", "h200x8", "h200x8/broken", "mixed", "mixed/broken"] {
        let bus = PrivateBus::start();
        let _service = Played::read(&directory(host)).after_a_fault().serve(&bus).await;
        for rows in [24, 40] {
            let mut shell = bus.command("sh");
            shell.args(["-c", "\"$0\" status && printf 'the prompt'", mpsctl()]);
            let shown = move || Screen::start(shell.as_std(), rows, 80).wait_for("the prompt");
            let shown = tokio::task::spawn_blocking(shown).await.unwrap();
            assert!(shown.starts_with("State:  ") && shown.contains(FAULT), "{host}, {rows} rows:\n{shown}");
            let is_cut = shown.contains("yunion-mpsctl status -o wide shows all)");
            assert!(!is_cut || rows == 24, "{host}, {rows} rows:\n{shown}");
        }
    }
}

#[test]
fn the_readme_shows_recorded_screens() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let recorded = [("list", "h200"), ("status", "mixed"), ("clients", "h200")].map(|(command, board)| {
        let screen = root.join("tests/golden").join(board).join(format!("screens/{command}.txt"));
        let version = concat!("Version:         ", env!("CARGO_PKG_VERSION"));
        let screen = fs::read_to_string(screen).unwrap().replace("Version:         1.0.0", version);
        format!("text\n$ yunion-mpsctl {command}\n{screen}")
    });
    for readme in ["README.md", "README.zh-CN.md"] {
        let readme = fs::read_to_string(root.join(readme)).unwrap();
        let screens: Vec<&str> = readme.split("```").skip(1).step_by(2).collect();
        assert_eq!(screens, recorded);
    }
}

#[test]
fn each_subcommand_stands_in_one_group_of_the_help() {
    let command = mpsctl::command();
    let grouped: Vec<&str> = mpsctl::GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
    assert_eq!(grouped, command.get_subcommands().map(clap::Command::get_name).collect::<Vec<_>>());
}

#[tokio::test]
async fn help() {
    let bus = PrivateBus::start();
    let mut golden = Golden::new("help");
    let top = mpsctl::command();
    let subcommands = top.get_subcommands().map(clap::Command::get_name).filter(|name| *name != "help");
    for name in iter::once("yunion-mpsctl").chain(subcommands) {
        let command = if name == "yunion-mpsctl" { &["--help"][..] } else { &[name, "--help"] };
        golden.hold(&format!("{name}.txt"), command, &screen(&bus, command, 80).await);
        screen(&bus, command, 120).await;
    }
    finish(golden);
}

async fn board(name: &str, hosts: &[&str]) {
    for host in hosts {
        let answers = format!("{name}{host}");
        let mut golden = Golden::new(&format!("{answers}/screens"));
        let bus = PrivateBus::start();
        let service = Played::read(&directory(&answers)).serve(&bus).await;
        for (file, command) in SCREENS {
            let (narrow, wide) = (screen(&bus, command, 80).await, screen(&bus, command, 120).await);
            golden.hold_both(file, command, &narrow, &wide);
        }
        drop(service);
        finish(golden);
    }
}

/// Runs yunion-mpsctl for this width. Fails if a line of the output is wider.
async fn screen(bus: &PrivateBus, arguments: &[&str], columns: usize) -> String {
    let times = Regex::new(r"(?-u:\b)2[0-9]{3}-[0-9]{2}-[0-9]{2}(\s+)[0-9]{2}:[0-9]{2}:[0-9]{2}").unwrap();
    let mut command = bus.command(mpsctl());
    command.args(arguments).env("COLUMNS", columns.to_string()).env("TZ", "UTC");
    let output = output(&mut command).await;
    assert!(output.status.success() && output.stderr.is_empty(), "{arguments:?}: {output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let platforms = arguments.contains(&"--platform");
    for line in text.lines().filter(|_| !platforms) {
        assert!(line.chars().count() <= columns, "{arguments:?} at {columns} columns:\n{line}");
    }
    times.replace_all(&text, "2026-11-21${1}12:34:56").into_owned()
}

fn finish(golden: Golden) {
    let complaints = golden.finish();
    assert!(
        complaints.is_empty(),
        "{complaints}If this is as it should be: UPDATE_GOLDEN=1 cargo test --test it screens::"
    );
}
