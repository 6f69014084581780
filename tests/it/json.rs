//! Compares the JSON of the commands with docs/schemas and docs/json.md. Each key has a description, and each description has a
//! key.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use common::published::client::ClientView;
use mps_core::register::{GuestContainer, KnownClient};
use mps_core::terms::ProcessId;
use serde_json::Value;
use yunion_mps::Request;

use crate::support::bus::{ctl, printed};
use crate::support::host::{Host, binaries, daemon, text};
use crate::support::schema::{directory, strict};
use crate::support::service::Service;
use crate::support::snapshot::{P40, p40_board};

/// The keys that no recorded JSON in tests/golden has. Other tests check JSON with these keys.
const ELSEWHERE: [(&str, &[&str]); 6] = [
    ("check", CHECK),
    ("clients", &["[].container", "[].container_id", "[].guest", "[].label", "[].project"]),
    // In the test `release::terminate_by_pid_and_by_device`.
    ("events", &["[].ended_clients", "[].ended_for"]),
    // In the test `kernel_limits::a_refused_limit_leaves_the_watch_and_says_why`.
    ("list", &["[].kernel_limit_refused"]),
    // In the test `cpus::a_take_over_shows_the_cpus_in_force`.
    ("status", &[".control_daemons[].wanted_cpus"]),
    ("terminate", &[".container"]),
];

const CHECK: &[&str] = &[
    ".differences[].effect",
    ".differences[].effect.clients",
    ".differences[].effect.out_meanwhile",
    ".differences[].effect.reason",
    ".differences[].effect.when",
    ".differences[].from",
    ".differences[].kind",
    ".differences[].subject",
    ".differences[].to",
    ".problems[].file",
    ".problems[].found",
    ".problems[].key",
    ".problems[].line",
    ".problems[].remedy",
    ".warnings[].file",
    ".warnings[].found",
    ".warnings[].key",
    ".warnings[].line",
    ".warnings[].remedy",
];

fn schemas() -> BTreeSet<String> {
    let files = fs::read_dir(directory()).unwrap().map(|entry| entry.unwrap().path());
    files.map(|file| file.file_stem().unwrap().to_str().unwrap().to_owned()).collect()
}

fn recorded(directory: &Path, found: &mut BTreeMap<String, Vec<Value>>) {
    for entry in fs::read_dir(directory).unwrap() {
        let file = entry.unwrap().path();
        if file.is_dir() {
            recorded(&file, found);
        } else if file.extension().is_some_and(|extension| extension == "json") {
            let name = file.file_stem().unwrap().to_str().unwrap();
            // `terminate-device` is recorded from the command `terminate` too.
            let schema = if name == "terminate-device" { "terminate" } else { name };
            let document = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
            found.entry(schema.to_owned()).or_default().push(document);
        }
    }
}

#[test]
fn every_recorded_document_is_as_documented() {
    let mut documents = BTreeMap::new();
    recorded(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden"), &mut documents);
    assert_eq!(documents.keys().cloned().collect::<BTreeSet<_>>(), schemas());
    for (schema, documents) in documents {
        let keys = strict(&schema, &documents);
        let missing: Vec<&String> = keys.documented.difference(&keys.present).collect();
        let elsewhere = ELSEWHERE.iter().find(|(name, _)| *name == schema).map_or(&[][..], |(_, keys)| *keys);
        assert_eq!(missing, elsewhere, "{schema} documents keys that nothing prints");
    }
}

#[test]
#[should_panic(expected = "Additional properties are not allowed ('extra' was unexpected)")]
fn a_key_without_documentation_is_found() {
    strict("apply", &[serde_json::json!({"applied": true, "forced": false, "extra": 1})]);
}

fn check(host: &Host) -> Value {
    let root = host.path("sysroot").display().to_string();
    serde_json::from_slice(&host.mpsctl(&["check", "--json", "--sysroot", &root]).stdout).unwrap()
}

#[test]
fn differences_and_mistakes_of_a_configuration_are_as_documented() {
    let mut host = Host::serving("h200");
    let mut documents = Vec::new();
    for lines in [
        "cuda_mps_thread_percentage: balanced\ncuda_mps_topology: per_gpu",
        "enable_cuda_mps: false",
        "enable_cuda_mps: true\ncuda_mps_replicas: many",
    ] {
        host.configure(lines);
        documents.push(check(&host));
    }
    // `yunion-mps-daemon --check --json` prints the same JSON as `yunion-mpsctl check --json`.
    let output = host
        .command(daemon())
        .args(["--check", "--json", "--sysroot"])
        .arg(host.path("sysroot"))
        .output()
        .unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap(), documents[2]);
    let keys = strict("check", &documents);
    let missing: Vec<&&str> = CHECK.iter().filter(|key| !keys.present.contains(**key)).collect();
    assert!(missing.is_empty(), "{missing:?} in {documents:#?}");
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn a_container_that_was_released_is_as_documented() {
    let mut host = Host::serving("h200");
    let output = host.mpsctl(&["terminate", "--container", "4f1c2d3e5a6b", "--json"]);
    assert!(output.status.success(), "{}", text(&output));
    let keys = strict("terminate", &[serde_json::from_slice(&output.stdout).unwrap()]);
    assert_eq!(keys.present, BTreeSet::from([".container".to_owned()]));
    assert_eq!(host.stop().code(), Some(0));
}

/// The first client has only the required keys. The second client also has the keys about its container.
#[tokio::test]
async fn clients_in_containers_and_unknown_clients_are_as_documented() {
    let mut service = Service::start(p40_board()).await;
    let gone = ClientView {
        client: KnownClient::only(ProcessId { pid: 7, start_time: 1 }),
        bypass: false,
        waiting: false,
        command: "python3".to_owned(),
        gpu_uuid: P40.to_owned(),
        memory_mib: None,
        since: None,
    };
    let [guest, container, project] = ["train-1", "main", "vision"].map(str::to_owned);
    let guest = Some(GuestContainer { guest, container, project });
    let label = Some("job 17".to_owned());
    let container = Some("4f1c2d3e5a6b".to_owned());
    let contained = KnownClient { container, guest, label, ..gone.client.clone() };
    let contained = ClientView { client: contained, ..gone.clone() };
    let requests = &mut service.requests;
    let daemon = async {
        match requests.recv().await {
            Some(Request::Clients(reply)) => reply.send(Ok(vec![gone, contained])).unwrap(),
            other => panic!("{other:?}"),
        }
    };
    let mut command = ctl(&service.bus, &["clients", "--json"]);
    let (text, ()) = tokio::join!(printed(&mut command), daemon);
    let keys = strict("clients", &[serde_json::from_str(&text).unwrap()]);
    assert!(keys.present.contains("[].container_id") && !keys.present.contains("[].uid"), "{keys:?}");
}

#[test]
fn the_page_names_every_command_with_its_schema() {
    let page = fs::read_to_string(directory().with_file_name("json.md")).unwrap();
    let mut linked: Vec<&str> =
        page.split("](schemas/").skip(1).map(|rest| rest.split_once(".json)").unwrap().0).collect();
    linked.sort_unstable();
    linked.dedup();
    assert_eq!(linked, schemas().iter().map(String::as_str).collect::<Vec<_>>());
    for command in mpsctl::command().get_subcommands() {
        let options: Vec<&str> = command.get_arguments().filter_map(|argument| argument.get_long()).collect();
        if options.contains(&"json") {
            let line = format!("`yunion-mpsctl {}", command.get_name());
            assert!(page.contains(&line), "docs/json.md lacks {line}");
        }
    }
}

#[test]
fn the_commands_of_the_page_run() {
    let mut host = Host::serving("h200");
    host.prefer(&binaries());
    let page = fs::read_to_string(directory().with_file_name("json.md")).unwrap();
    let commands: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("    ")).collect();
    assert!(commands.len() > 2, "{commands:?}");
    let installed = "/usr/share/doc/yunion-mps-daemon/docs/schemas";
    let script = commands.join("\n").replace(installed, directory().to_str().unwrap());
    let output = host.command("sh").args(["-ec", &script]).current_dir(host.path("")).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).starts_with("00:06.0-0\n00:06.0-1\n"), "{}", text(&output));
    assert_eq!(host.stop().code(), Some(0));
}
