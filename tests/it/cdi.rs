//! Tests of the CDI spec that the service writes.

use crate::support::host::binaries;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::Value;

use crate::support::host::{Host, text};
use crate::support::wait::wait_for;

fn host(board: &str) -> Host {
    let host = Host::new(board);
    host.configure(&format!("cuda_mps_cdi_directory: {}", host.path("run/cdi").display()));
    host
}

fn file(host: &Host) -> PathBuf {
    host.path("run/cdi/yunion.io-mps.json")
}

fn spec(host: &Host) -> Option<Value> {
    Some(serde_json::from_str(&fs::read_to_string(file(host)).ok()?).unwrap())
}

fn devices(spec: &Value) -> Vec<&str> {
    spec["devices"].as_array().unwrap().iter().map(|device| device["name"].as_str().unwrap()).collect()
}

/// Returns the names of the CDI devices for these slices. Each slice has a device with all of its settings, and a device
/// `bind-...` with the hook alone.
fn devices_of(slices: &[String]) -> Vec<String> {
    slices.iter().flat_map(|slice| [slice.clone(), format!("bind-{slice}")]).collect()
}

fn wait_for_devices(host: &Host, slices: &[String]) {
    wait_for("the devices in the spec", || (devices(&spec(host)?) == devices_of(slices)).then_some(()));
}

fn slices(gpu: &str, number: u32) -> Vec<String> {
    (0..number).map(|ordinal| format!("{gpu}-{ordinal}")).collect()
}

fn complaints(spec: &Value) -> String {
    let schema = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cdi/schema.json");
    let program = "import json, jsonschema, sys\n\
                   schema = json.load(open(sys.argv[1]))\n\
                   jsonschema.Draft7Validator.check_schema(schema)\n\
                   jsonschema.Draft7Validator(schema).validate(json.load(sys.stdin))";
    let mut validator = Command::new("/usr/bin/python3")
        .args(["-c", program, schema])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    validator.stdin.take().unwrap().write_all(spec.to_string().as_bytes()).unwrap();
    let output = validator.wait_with_output().unwrap();
    if output.status.success() { String::new() } else { text(&output) }
}

/// Fails if the CDI spec breaks a rule that its JSON schema can't express.
fn assert_makes_sense(host: &Host, spec: &Value) {
    let names = devices(spec);
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len(), "{names:?}");
    let healthy = healthy(host);
    let is_healthy = |device: &&Value| healthy.iter().any(|name| device["name"] == name.as_str());
    for device in spec["devices"].as_array().unwrap().iter().filter(is_healthy) {
        let edits = &device["containerEdits"];
        let environment = edits["env"].as_array().unwrap().iter().map(|one| one.as_str().unwrap());
        let environment: BTreeMap<&str, &str> = environment.map(|one| one.split_once('=').unwrap()).collect();
        // The CDI device has the environment of `yunion-mpsctl env`, except for the variables of NVIDIA's container runtime.
        let name = device["name"].as_str().unwrap();
        let asked = host.mpsctl(&["env", name, "--format", "json"]);
        let asked: Value = serde_json::from_slice(&asked.stdout).unwrap();
        // Each CDI device mounts its slice's directory at its own path. Otherwise a container with several devices would have
        // several mounts at one path.
        let own = format!("/run/yunion-mps-{}", name.replace(':', "_"));
        let placed = |place: &'_ Value| match place.as_str().unwrap() {
            "/run/yunion-mps" => own.clone(),
            other => other.to_owned(),
        };
        let said: Vec<(&String, String)> = asked["environment"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(name, value)| (name, placed(value)))
            .collect();
        let said = said.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let gives_gpus =
            |name: &str| ["NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"].contains(&name);
        let said: BTreeMap<&str, &str> = said.filter(|(name, _)| !gives_gpus(name)).collect();
        assert_eq!(environment, said);
        let mounts = edits["mounts"].as_array().unwrap();
        let places = |mounts: &[Value], host: &str, container: &str| -> Vec<(Value, String)> {
            mounts.iter().map(|mount| (mount[host].clone(), placed(&mount[container]))).collect()
        };
        assert_eq!(
            places(mounts, "hostPath", "containerPath"),
            places(asked["mounts"].as_array().unwrap(), "host", "container")
        );
        for (mount, asked) in mounts.iter().zip(asked["mounts"].as_array().unwrap()) {
            let mode = if asked["read_only"] == true { "ro" } else { "rw" };
            assert_eq!(mount["options"], serde_json::json!([mode, "nosuid", "nodev", "bind"]));
        }
    }
}

fn healthy(host: &Host) -> Vec<String> {
    let healthy = host.list().into_iter().filter(|device| device["healthy"] == true);
    healthy.map(|device| device["addr"].as_str().unwrap().to_owned()).collect()
}

/// Each board gets a valid CDI spec of its planned slices. A stop does not remove the spec: a container engine may start
/// containers at the next boot before the service starts.
#[test]
fn every_board_has_a_valid_spec_of_what_is_planned() {
    for (board, number) in [("tesla-p40", 4), ("h200x8", 32), ("mixed", 12)] {
        let mut host = host(board);
        host.start();
        let spec = wait_for("the spec", || spec(&host));
        wait_for("all devices", || (healthy(&host).len() == number).then_some(()));
        let planned: Vec<String> =
            host.list().iter().map(|device| device["addr"].as_str().unwrap().to_owned()).collect();
        assert_eq!(devices(&spec), devices_of(&planned));
        assert_eq!(complaints(&spec), "", "{board}");
        assert_makes_sense(&host, &spec);
        let (directory, file) = (host.path("run/cdi").metadata().unwrap(), file(&host).metadata().unwrap());
        assert_eq!((directory.mode() & 0o777, file.mode() & 0o777), (0o755, 0o644));
        assert_eq!(host.stop().code(), Some(0));
        assert_eq!(self::spec(&host).unwrap(), spec);
    }
}

#[test]
fn the_validator_can_complain() {
    let mut host = host("tesla-p40");
    host.start();
    host.wait_for_state("ready");
    let good = spec(&host).unwrap();
    assert_eq!(complaints(&good), "");
    for (pointer, bad) in [
        ("/kind", Value::from("yunion.io")),
        ("/cdiVersion", Value::from("0.4.0")),
        ("/devices", serde_json::json!([])),
        ("/devices/0/name", Value::from("00:06.0-")),
        ("/devices/0/containerEdits/env/0", Value::from("A")),
        ("/devices/0/containerEdits/mounts/0/hostPath", Value::from("dev/shm")),
        ("/devices/0/containerEdits/mounts/0/options", Value::from("rw")),
    ] {
        let mut spec = good.clone();
        *spec.pointer_mut(pointer).unwrap() = bad;
        assert_ne!(complaints(&spec), "", "{pointer}");
    }
}

/// A reload changes, moves or removes the CDI spec as the configuration says. Without a change, the reload does not write the
/// file again.
#[test]
fn the_spec_follows_the_configuration() {
    let mut host = host("tesla-p40");
    host.start();
    host.wait_for_state("ready");
    wait_for_devices(&host, &slices("00:06.0", 4));
    let before = file(&host).metadata().unwrap().ino();
    assert!(host.call("Control.Reload").status.success());
    host.wait_for_state("ready");
    assert_eq!(file(&host).metadata().unwrap().ino(), before);

    host.devices(&["path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 6"]);
    assert!(host.call("Control.Reload").status.success());
    wait_for_devices(&host, &slices("00:06.0", 6));

    let elsewhere = host.path("run/elsewhere");
    host.configure(&format!("cuda_mps_cdi_directory: {}", elsewhere.display()));
    assert!(host.call("Control.Reload").status.success());
    let moved = elsewhere.join("yunion.io-mps.json");
    wait_for("the file in its new place", || moved.exists().then_some(()));
    assert!(!file(&host).exists());

    host.configure("cuda_mps_cdi_directory:");
    assert!(host.call("Control.Reload").status.success());
    wait_for("no file", || (!moved.exists()).then_some(()));

    host.configure(&format!("cuda_mps_cdi_directory: {}", elsewhere.display()));
    assert!(host.call("Control.Reload").status.success());
    wait_for("the file again", || moved.exists().then_some(()));
    host.configure("enable_cuda_mps: false");
    assert!(host.call("Control.Reload").status.success());
    wait_for("no file", || (!moved.exists()).then_some(()));
    assert_eq!(host.stop().code(), Some(0));
}

/// A container engine tries only once to start a container. So an unserved slice stays in the CDI spec, and the hook waits
/// until the slice is served.
#[test]
fn a_slice_that_is_not_served_stays_in_the_spec() {
    let mut host = host("tesla-p40");
    host.start();
    host.wait_for_state("ready");
    let before = file(&host).metadata().unwrap().ino();
    host.plant("mps/fault/start-exits", "");
    let status = host.json(&["status"]).unwrap();
    crate::support::host::signal_pid(crate::support::host::control_pid(&status), Signal::KILL);
    wait_for("slices that are not served", || healthy(&host).is_empty().then_some(()));
    assert_eq!(file(&host).metadata().unwrap().ino(), before);
    host.clear("mps/fault/start-exits");
    host.wait_for_state("ready");
    assert_eq!(file(&host).metadata().unwrap().ino(), before, "it is not written again");
    assert_eq!(host.stop().code(), Some(0));
}

/// A killed service can't remove its CDI spec. The next service finds the old spec, even if the configuration names another
/// directory now.
#[test]
fn a_crash_leaves_no_stale_spec_behind() {
    let mut host = host("tesla-p40");
    host.start();
    host.wait_for_state("ready");
    wait_for_devices(&host, &slices("00:06.0", 4));
    let before = file(&host).metadata().unwrap().ino();
    host.signal(Signal::KILL);
    host.ended();
    assert_eq!(file(&host).metadata().unwrap().ino(), before);
    host.start();
    host.wait_for_state("ready");
    assert_eq!(file(&host).metadata().unwrap().ino(), before, "taken over, and not written again");

    host.signal(Signal::KILL);
    host.ended();
    host.configure(&format!("cuda_mps_cdi_directory: {}", host.path("run/elsewhere").display()));
    host.start();
    host.wait_for_state("ready");
    wait_for("the file in its new place", || {
        host.path("run/elsewhere/yunion.io-mps.json").exists().then_some(())
    });
    assert!(!file(&host).exists());
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn a_start_offers_the_slices_that_are_planned() {
    let mut host = host("h200");
    host.start();
    host.wait_for_state("ready");
    wait_for_devices(&host, &slices("00:06.0", 4));
    host.signal(Signal::KILL);
    host.ended();
    // The control daemon still has the limits for four slices. Its front end hangs, so the service can't set the limits for two
    // slices.
    host.devices(&["path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 2"]);
    host.plant("mps/fault/front-end-hangs", "");
    host.start();
    wait_for_devices(&host, &slices("00:06.0", 2));
    assert_eq!(healthy(&host), [""; 0]);
    host.clear("mps/fault/front-end-hangs");
    host.wait_for_state("ready");
}

/// If the service can't write the CDI spec, it serves the GPUs, reports the failure in its state, and tries again.
#[test]
fn a_spec_that_cannot_be_written_degrades() {
    let mut host = host("h200");
    fs::create_dir_all(host.path("run")).unwrap();
    host.plant("run/cdi", "a file where the directory should be");
    host.start();
    let status = host.wait_for_state("degraded");
    let reason = status["service"]["state_reason"].as_str().unwrap();
    assert!(
        reason.starts_with("the CDI spec can't be updated: ")
            && reason.contains("run/cdi: is not a directory"),
        "{reason}"
    );
    let said = |status: &Value, text: &str| {
        let events = status["events"].as_array().unwrap();
        events.iter().filter(|event| event["text"].as_str().unwrap().contains(text)).count()
    };
    assert_eq!(said(&status, "is not a directory"), 1);
    assert!(host.list().iter().all(|device| device["healthy"] == true));
    host.clear("run/cdi");
    assert!(host.call("Control.Reload").status.success());
    let status = host.wait_for_state("ready");
    assert_eq!(said(&status, "the CDI spec is correct again"), 1);
    wait_for_devices(&host, &slices("00:06.0", 4));
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn the_documented_command_finds_the_gpu_of_a_slice() {
    let documentation = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/cdi.md")).unwrap();
    let line = documentation.lines().map(str::trim).find(|line| line.starts_with("names=")).unwrap();
    let mut host = Host::serving("tesla-p40");
    let programs = binaries();
    let programs = programs.display();
    let script = format!("PATH={programs}:$PATH; podman() {{ echo \"$@\"; }}; {line}");
    let said = |slice: &str| {
        let script = script.replace("00:06.0-1", slice);
        host.command("sh").args(["-euc", &script]).output().unwrap()
    };
    let gpu = "nvidia.com/gpu=GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400";
    let expected = format!("run --rm --device={gpu} --device=yunion.io/mps=00:06.0-1 IMAGE\n");
    assert_eq!(text(&said("00:06.0-1")), expected);
    let none = said("00:06.0-9");
    assert!(!none.status.success() && !text(&none).contains("run --rm"), "{}", text(&none));
    assert_eq!(host.stop().code(), Some(0));
}
