//! Tests of docs/dbus.md: its reference fits the XML files, it explains the errors of the service, and its examples run.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::Signal;

use crate::support::host::{Host, signal_pid, text};
use crate::support::wait::wait_for;

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn page() -> String {
    fs::read_to_string(source("docs/dbus.md")).unwrap()
}

fn blocks(page: &str, language: &str) -> Vec<String> {
    let fence = format!("```{language}\n");
    page.split(&fence).skip(1).map(|rest| rest.split_once("```").unwrap().0.to_owned()).collect()
}

#[test]
fn page_and_schemas_are_what_the_interfaces_make_of_them() {
    let directory = tempfile::tempdir().unwrap();
    let docs = directory.path();
    // The test gives `interface-docs.py` a page with a wrong reference. So the test notices if the script does not write the
    // page.
    let (written, _) = page().split_once("## Reference").map(|(a, b)| (a.to_owned(), b.len())).unwrap();
    fs::write(docs.join("dbus.md"), written + "old\n").unwrap();
    let made = Command::new(source("scripts/interface-docs.py")).arg(docs).output().unwrap();
    assert!(made.status.success(), "{}", text(&made));
    let mut files = vec![PathBuf::from("dbus.md")];
    let schemas = fs::read_dir(docs.join("schemas")).unwrap();
    files.extend(schemas.map(|entry| Path::new("schemas").join(entry.unwrap().file_name())));
    assert_eq!(files.len(), 6);
    for file in files {
        let here = fs::read_to_string(source("docs").join(&file)).unwrap();
        let now = fs::read_to_string(docs.join(&file)).unwrap();
        assert!(here == now, "docs/{} is old: run scripts/interface-docs.py", file.display());
    }
}

#[test]
fn every_error_is_explained() {
    const PREFIX: &str = "io.yunion.Mps1.Error.";
    let names = |text: &str| -> Vec<String> {
        let rest = text.split(PREFIX).skip(1);
        let mut names: Vec<String> = rest
            .map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap().to_owned())
            .collect();
        names.sort();
        names.dedup();
        names
    };
    let page = page();
    let (_, table) = page.split_once("\n## Errors\n").unwrap();
    let (table, _) = table.split_once("\n## ").unwrap();
    let source = fs::read_to_string(source("crates/common/src/bus/error.rs")).unwrap();
    let (_, map) = source.split_once("fn name_and_text(&self)").unwrap();
    let (map, _) = map.split_once("\n    }\n").unwrap();
    assert_eq!(names(table), names(map));
}

#[test]
fn who_may_call_is_what_the_policy_says() {
    let policy = fs::read_to_string(source("config/io.yunion.Mps1.conf")).unwrap();
    let (group, root) = policy.split_once("<policy user=\"root\">").unwrap();
    let page = page();
    let row = |beginning: &str| page.lines().find(|line| line.starts_with(beginning)).unwrap();
    let readable = row("| `Manager` without TerminateClient");
    for line in group.lines().filter(|line| line.contains("<allow send_destination")) {
        let interface = line.split("send_interface=\"").nth(1).unwrap().split('"').next().unwrap();
        assert!(readable.contains(interface.rsplit('.').next().unwrap()), "{interface}");
    }
    assert!(root.contains("<allow send_destination=\"io.yunion.Mps1\"/>"), "{root}");
    assert!(!group.contains("io.yunion.Mps1.Control") && row("| `Control`").contains("| yes | no"));
    assert!(row("| `Manager.TerminateClient`").contains("`cuda_mps_may_terminate: owner`"));
}

#[test]
fn the_shell_examples_run() {
    let mut host = Host::serving("h200");
    let page = page();
    let blocks = blocks(&page, "sh");
    assert!(blocks.len() > 4, "{blocks:?}");
    let (endless, others): (Vec<&String>, Vec<&String>) =
        blocks.iter().partition(|block| block.contains(" monitor "));
    let mut said = String::new();
    for block in others {
        let output = host.command("sh").args(["-ec", block]).output().unwrap();
        assert!(output.status.success(), "{block}: {}", text(&output));
        said += &text(&output);
    }
    for words in [
        "\"mps_memory_limit\"",
        "s \"ready\"",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
        "/io/yunion/Mps1/devices/_00_06_0_1",
        ".MpsMemoryLimit",
        "GetContainerConfig(",
    ] {
        assert!(said.contains(words), "no {words} in {said}");
    }
    // An example of the page drains a slice, and its last command takes this back.
    assert!(host.list().iter().all(|slice| slice["drained"] == false));

    let [endless] = endless.as_slice() else { panic!("{endless:?}") };
    let heard = host.path("heard");
    let mut monitor = host
        .command("sh")
        .args(["-ec", &format!("exec {endless}")])
        .stdout(File::create(&heard).unwrap())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let has_heard = |words: &'static str| {
        wait_for(words, || fs::read_to_string(&heard).unwrap().contains(words).then_some(()));
    };
    has_heard("is owned by");
    host.devices(&["path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 2"]);
    assert!(host.call("Control.Reload").status.success());
    has_heard("io.yunion.Mps1.Manager.DevicesChanged (uint64 ");
    signal_pid(monitor.id(), Signal::INT);
    monitor.wait().unwrap();
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn the_example_in_go_runs() {
    let mut host = Host::serving("tesla-p40");
    let page = page();
    let [program] = <[String; 1]>::try_from(blocks(&page, "go")).unwrap();
    fs::write(host.path("main.go"), program).unwrap();
    // Debian installs version 5 of godbus in a directory without `v5` in its name.
    let godbus = host.path("go/src/github.com/godbus/dbus");
    fs::create_dir_all(&godbus).unwrap();
    std::os::unix::fs::symlink("/usr/share/gocode/src/github.com/godbus/dbus", godbus.join("v5")).unwrap();
    let output = host
        .command("go")
        .args(["run", "main.go"])
        .current_dir(host.path(""))
        .env("GO111MODULE", "off")
        .env("GOPATH", host.path("go"))
        .env("GOCACHE", source("target/go"))
        .output()
        .unwrap_or_else(|error| {
            panic!("go: {error}; install the Debian packages golang-go and golang-dbus-dev")
        });
    let rows: String = (0..4).map(|ordinal| format!("00:06.0-{ordinal} true 5760 true\n")).collect();
    assert_eq!(text(&output), rows);
    assert_eq!(host.stop().code(), Some(0));
}
