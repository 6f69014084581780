//! Tests of the device plugin's resources: the devices that it reports to the kubelet, and the settings that a container gets.
//! The tests in `kubelet` also admit pods.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::client::Client;
use crate::support::host::{Host, binaries, control_pid, signal_pid, succeeded, text};
use crate::support::node::{FakeKubelet, Plugin, QUARTER, SOURCES, ids, messages, node, unhealthy};
use crate::support::wait::wait_for;

#[test]
fn a_size_is_registered_with_all_slices_and_their_numa_node() {
    let (host, mut kubelet, plugin) = node("h200x8", &[]);
    let registered = kubelet.wait_for_registration(QUARTER);
    assert_eq!(registered["endpoint"], "yunion-mps-35gib.sock");
    let wanted = json!({"preferred": true, "pre_start": false});
    assert_eq!((&registered["told"], &registered["options"]), (&wanted, &wanted));
    let devices = kubelet.wait_for_devices(QUARTER, 32, &[]);
    for (listed, device) in host.list().iter().zip(&devices) {
        assert_eq!(device["id"], listed["addr"]);
        assert_eq!(device["numa"], json!([listed["numa_node"]]));
    }
    let none =
        kubelet.call(&json!({"call": "path", "resource": QUARTER, "path": "/v1beta1.DevicePlugin/Sing"}));
    assert_eq!(none["error"]["code"], "UNIMPLEMENTED", "{none}");
    assert!(plugin.said().contains("yunion.io/mps-35gib: registered with the kubelet"), "{}", plugin.said());
}

#[test]
fn drains_and_faults_reach_the_kubelet_and_nobody_is_given_such_a_slice() {
    let (host, mut kubelet, _plugin) = node("h200", &[]);
    kubelet.wait_for_devices(QUARTER, 4, &[]);
    succeeded(&host.mpsctl(&["drain", "00:06.0-1"]));
    kubelet.wait_for_devices(QUARTER, 4, &["00:06.0-1"]);
    let (code, why) = kubelet.refused(QUARTER, &["00:06.0-1"]);
    assert_eq!(code, "FAILED_PRECONDITION");
    assert!(why.contains("00:06.0-1: drained for new clients; yunion-mpsctl undrain 00:06.0-1"), "{why}");
    succeeded(&host.mpsctl(&["undrain", "00:06.0-1"]));
    kubelet.wait_for_devices(QUARTER, 4, &[]);
    kubelet.allocated(QUARTER, &["00:06.0-1"]);

    // With this fault no control daemon can start. So the slices become unhealthy when the present control daemon ends.
    host.plant("mps/fault/start-exits", "");
    signal_pid(control_pid(&host.wait_for_state("ready")), Signal::KILL);
    let all = ["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"];
    kubelet.wait_for_devices(QUARTER, 4, &all);
}

#[test]
fn containers_get_cdi_devices_or_refusals_with_a_reason() {
    let (host, mut kubelet, plugin) = node("h200x8", &[]);
    let devices = kubelet.wait_for_devices(QUARTER, 32, &[]);
    let own = ids(&devices)[5];
    let settings = kubelet.allocated(QUARTER, &[own]);
    let names = succeeded(&host.mpsctl(&["env", own, "--format", "cdi"]));
    let names: Vec<&str> = names.lines().collect();
    assert_eq!(settings, json!({"environment": {}, "mounts": [], "nodes": [], "cdi": names}));
    plugin.wait_until_it_says(&format!("gave {own} to a container"));

    // A container with slices of two GPUs gets one environment, NVIDIA's CDI devices for both GPUs, and the hook of each slice.
    let (first, second) = (ids(&devices)[0], ids(&devices)[4]);
    let settings = kubelet.allocated(QUARTER, &[first, second]);
    assert_eq!(settings["environment"]["YUNION_MPS_DEVICE"], format!("{first},{second}"));
    assert!(settings["environment"].get("NVIDIA_VISIBLE_DEVICES").is_none(), "{settings}");
    let cdi: Vec<&str> =
        settings["cdi"].as_array().unwrap().iter().map(|one| one.as_str().unwrap()).collect();
    let (gpus, hooks) = cdi.split_at(2);
    assert!(gpus.iter().all(|name| name.starts_with("nvidia.com/gpu=GPU-")), "{settings}");
    assert_eq!(hooks, [first, second].map(|name| format!("yunion.io/mps=bind-{name}")));
    assert_ne!(settings["mounts"], json!([]));

    let (code, why) = kubelet.refused(QUARTER, &[first, ids(&devices)[1]]);
    assert!(code == "INVALID_ARGUMENT" && why.contains("are slices of one GPU"), "{code}: {why}");
    let (code, why) = kubelet.refused(QUARTER, &["00:99.0-0"]);
    assert!(
        code == "NOT_FOUND" && why.contains("00:99.0-0 is no device of yunion.io/mps-35gib"),
        "{code}: {why}"
    );
}

#[test]
fn without_cdi_containers_get_all_that_the_service_says() {
    let (host, mut kubelet, _plugin) = node("tesla-p40", &["--without-cdi"]);
    kubelet.wait_for_devices("yunion.io/mps-5gib", 4, &[]);
    let settings = kubelet.allocated("yunion.io/mps-5gib", &["00:06.0-2"]);
    let said = host.container_of("00:06.0-2");
    assert_eq!(settings["environment"], said["environment"]);
    assert_eq!(settings["mounts"], said["mounts"]);
    let nodes = settings["nodes"].as_array().unwrap().iter().map(|node| node["host"].as_str().unwrap());
    assert_eq!(nodes.collect::<Vec<_>>(), ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"]);
    assert_eq!(settings["cdi"], json!([]));
}

#[test]
fn the_kubelet_is_told_which_slice_to_prefer() {
    for (placement, chosen) in [("pack", "1b:00.0-3"), ("spread", "2d:00.0-0")] {
        let (_host, mut kubelet, _plugin) = node("h200x8", &["--preferred", placement]);
        kubelet.wait_for_devices(QUARTER, 32, &[]);
        let free = ["1b:00.0-3", "2d:00.0-0", "2d:00.0-1"];
        let mut preferred = |must: &[&str], size: u32| {
            let wish = json!({
                "call": "preferred", "resource": QUARTER, "available": free, "must": must, "size": size,
            });
            kubelet.call(&wish)["answer"].clone()
        };
        assert_eq!(preferred(&[], 1), json!([chosen]), "{placement}");
        assert_eq!(preferred(&["2d:00.0-1"], 2), json!(["2d:00.0-1", "1b:00.0-3"]), "{placement}");
    }
}

#[test]
fn a_kubelet_that_restarts_is_registered_with_again() {
    let (host, mut first, _plugin) = node("h200", &[]);
    first.wait_for_devices(QUARTER, 4, &[]);
    // A kubelet that ends does not remove its own socket. The next kubelet removes all sockets in the directory. With
    // `--leave`, the next kubelet removes only the former kubelet's socket.
    for words in [&[][..], &["--leave"], &[], &["--leave"]] {
        drop(first);
        first = FakeKubelet::start_with(&host, words);
        first.wait_for_registration(QUARTER);
        first.wait_for_devices(QUARTER, 4, &[]);
        first.allocated(QUARTER, &["00:06.0-0"]);
    }
}

#[test]
fn the_plugin_waits_for_a_kubelet_that_comes_later() {
    let mut host = Host::new("h200");
    let plugin = Plugin::start(&host, &[]);
    host.start();
    host.wait_for_state("ready");
    plugin.wait_until_it_says("waiting for the kubelet");
    let mut kubelet = FakeKubelet::start(&host);
    kubelet.wait_for_devices(QUARTER, 4, &[]);
    // A plugin that stops removes its socket, and the next plugin registers the resource again.
    signal_pid(plugin.process.id(), Signal::TERM);
    kubelet.wait("the end of the list", |event| event["event"] == "gone");
    let socket = host.path("kubelet/device-plugins/yunion-mps-35gib.sock");
    wait_for("no socket", || (!socket.exists()).then_some(()));
    kubelet.events.clear();
    let killed = Plugin::start(&host, &[]);
    kubelet.wait_for_registration(QUARTER);
    signal_pid(killed.process.id(), Signal::KILL);
    drop(killed);
    assert!(socket.exists());
    let _plugin = Plugin::start(&host, &[]);
    kubelet.wait_for_registration(QUARTER);
}

#[test]
fn devices_outlast_a_restart_of_the_service() {
    let (mut host, mut kubelet, plugin) = node("h200", &["--grace", "600"]);
    kubelet.wait_for_devices(QUARTER, 4, &[]);
    host.signal(Signal::KILL);
    host.ended();
    plugin.wait_until_it_says(
        "the device plugin still offers the slices of the service's last answer: yunion-mps-daemon is not \
         running",
    );
    // If a container is created while the service does not run, the plugin answers after the service has started.
    let wish = json!({"call": "allocate", "resource": QUARTER, "containers": [["00:06.0-3"]]});
    writeln!(kubelet.process.stdin.as_mut().unwrap(), "{wish}").unwrap();
    host.start();
    let answer = kubelet.wait("the answer", |event| event.get("answer").is_some());
    assert_eq!(answer["answer"][0]["cdi"].as_array().unwrap().len(), 2, "{answer}");
    wait_for("the service", || {
        (plugin.said().matches("yunion-mps-daemon answers: 4 slices").count() == 2).then_some(())
    });
    // The drain causes the last list of devices. The lists before it show what the service's restart has changed.
    succeeded(&host.mpsctl(&["drain", "00:06.0-1"]));
    kubelet.wait_for_devices(QUARTER, 4, &["00:06.0-1"]);
    let lists = kubelet.heard.iter().filter(|event| event["event"] == "devices");
    let mut lists: Vec<Vec<&str>> =
        lists.map(|list| unhealthy(list["devices"].as_array().unwrap())).collect();
    lists.dedup();
    assert_eq!(lists, [vec![], vec!["00:06.0-1"]]);
}

#[test]
fn devices_of_a_service_that_stays_away_are_unhealthy() {
    let (mut host, mut kubelet, _plugin) = node("h200", &["--grace", "1"]);
    kubelet.wait_for_devices(QUARTER, 4, &[]);
    assert_eq!(host.stop().code(), Some(0));
    let all = ["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"];
    kubelet.wait_for_devices(QUARTER, 4, &all);
    let (code, why) = kubelet.refused(QUARTER, &["00:06.0-3"]);
    assert!(
        code == "UNAVAILABLE" && why.contains("00:06.0-3: yunion-mps-daemon is not running"),
        "{code}: {why}"
    );
    host.start();
    kubelet.wait_for_devices(QUARTER, 4, &[]);
    kubelet.allocated(QUARTER, &["00:06.0-3"]);
}

#[test]
fn resources_come_and_go_with_the_configuration() {
    let metrics = tempfile::tempdir().unwrap();
    let metrics = metrics.path().join("plugin.prom");
    let (host, mut kubelet, _plugin) = node(
        "h200",
        &["--metrics", metrics.to_str().unwrap(), "--domain", "gpu.example.com", "--resource", "large=60GiB"],
    );
    kubelet.wait_for_devices("gpu.example.com/mps-35gib", 4, &[]);
    host.devices(&[
        "path: /dev/dri/renderD128, type: NVIDIA_MPS, slices: [{memory: 20GiB}, {memory: 20GiB}, {memory: 60GiB}]",
    ]);
    host.reload();
    kubelet.wait_for_devices("gpu.example.com/mps-20gib", 2, &[]);
    let large = kubelet.wait_for_devices("gpu.example.com/large", 1, &[]);
    assert_eq!(ids(&large), ["00:06.0-2"]);
    // The plugin sends an empty list for the former resource, and then ends the stream of its lists.
    kubelet.wait_for_devices("gpu.example.com/mps-35gib", 0, &[]);
    let gone = |event: &Value| event["event"] == "gone" && event["resource"] == "gpu.example.com/mps-35gib";
    assert_eq!(kubelet.wait("the end of the list", gone)["code"], "OK");
    assert!(!host.path("kubelet/device-plugins/yunion-mps-35gib.sock").exists());
    let series =
        "yunion_mps_device_plugin_devices{resource=\"gpu.example.com/mps-20gib\",health=\"healthy\"} 2";
    wait_for("the metrics", || fs::read_to_string(&metrics).ok()?.contains(series).then_some(()));
    let read = "import sys; from prometheus_client.parser import text_string_to_metric_families as read
print(sorted(family.name for family in read(open(sys.argv[1]).read())))";
    let families = Command::new("/usr/bin/python3").args(["-c", read]).arg(&metrics).output().unwrap();
    let families = succeeded(&families);
    assert!(families.contains("yunion_mps_device_plugin_registrations"), "{families}");
}

fn manifest(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/kubernetes").join(name)
}

/// The test reads the manifests with Kubernetes' own types, which refuse an unknown key.
#[test]
fn the_manifests_are_objects_of_kubernetes() {
    let read = |files: &[PathBuf]| {
        let mut python = Command::new("/usr/bin/python3");
        python.arg(Path::new(SOURCES).join("manifests.py")).arg(messages()).args(files).output().unwrap()
    };
    let files =
        ["daemonset.yaml", "pod.yaml", "vllm.yaml", "runtime-class.yaml", "policy.yaml"].map(manifest);
    let kinds = "DaemonSet\nPod\nDeployment\nRuntimeClass\n\
                 ValidatingAdmissionPolicy\nValidatingAdmissionPolicyBinding\n";
    assert_eq!(succeeded(&read(&files)), kinds);
    let directory = tempfile::tempdir().unwrap();
    let wrong = directory.path().join("wrong.yaml");
    for (file, word, instead, complaint) in [
        (&files[1], "resources:", "resource:", "V1Container has no resource"),
        (&files[0], "appArmorProfile:", "apparmor:", "V1SecurityContext has no apparmor"),
        (
            &files[4],
            "validationActions: [Deny]",
            "validationActions: Deny",
            "validationActions: 'Deny' is no list",
        ),
        (&files[4], "message:", "messages:", "V1Validation has no messages"),
    ] {
        fs::write(&wrong, fs::read_to_string(file).unwrap().replace(word, instead)).unwrap();
        let said = read(std::slice::from_ref(&wrong));
        assert!(!said.status.success() && text(&said).contains(complaint), "{complaint}: {}", text(&said));
    }
}

/// Returns the answers of the admission policy in policy.yaml, a line for each pair of an object and its state before the
/// change.
fn policy_on(objects: &[(Value, Value)]) -> Vec<String> {
    let cel = Path::new(env!("CARGO_MANIFEST_DIR")).join(".cache/cel");
    assert!(cel.is_dir(), "{} is missing; make it with scripts/fetch-cel.sh", cel.display());
    let mut python = Command::new("/usr/bin/python3");
    python.arg(Path::new(SOURCES).join("policy.py")).arg(cel).arg(manifest("policy.yaml"));
    let mut python = Client::start(python.stdin(Stdio::piped()).stdout(Stdio::piped()));
    serde_json::to_writer(python.stdin.take().unwrap(), objects).unwrap();
    BufReader::new(python.stdout.take().unwrap()).lines().map(Result::unwrap).collect()
}

/// Returns a pod with containers and init containers that have these resource limits. Null stands for a container without
/// limits.
fn pod_with(containers: &[Value], init_containers: &[Value]) -> Value {
    let container = |limits: &Value| match limits {
        Value::Null => json!({"name": "c"}),
        limits => json!({"name": "c", "resources": {"limits": limits}}),
    };
    let all = |containers: &[Value]| containers.iter().map(container).collect::<Vec<_>>();
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod", "spec": {"containers": all(containers)}});
    if !init_containers.is_empty() {
        pod["spec"]["initContainers"] = Value::from(all(init_containers));
    }
    pod
}

/// Returns an object, such as a Deployment, that makes pods like `pod`.
fn maker(version: &str, kind: &str, pod: &Value) -> Value {
    json!({"apiVersion": version, "kind": kind, "spec": {"template": {"spec": pod["spec"]}}})
}

#[test]
fn the_policy_refuses_what_can_never_run_or_may_be_ended() {
    const TWO: &str = "a container asks for two or more slices, which MPS can't join";
    const SIZES: &str = "a container asks for slices of two sizes";
    const INIT: &str = "an init container asks for a slice";
    let one = || json!({QUARTER: "1"});
    let two = || json!({QUARTER: "2"});
    let large = "yunion.io/mps-70gib";
    let mut sidecar = pod_with(&[Value::Null], &[one()]);
    sidecar["spec"]["initContainers"][0]["restartPolicy"] = json!("Always");
    let mut greedy_sidecar = pod_with(&[Value::Null], &[two()]);
    greedy_sidecar["spec"]["initContainers"][0]["restartPolicy"] = json!("Always");
    let wrong = pod_with(&[two()], &[]);
    let deployment = maker("apps/v1", "Deployment", &wrong);
    let mut labelled = deployment.clone();
    labelled["metadata"] = json!({"labels": {"tier": "gpu"}});
    let mut grown = labelled.clone();
    grown["spec"]["replicas"] = json!(3);
    let of_job = json!({"template": {"spec": wrong["spec"]}});
    let cron_job =
        json!({"apiVersion": "batch/v1", "kind": "CronJob", "spec": {"jobTemplate": {"spec": of_job}}});
    let new = |object: Value| (object, Value::Null);
    let (cases, expected): (Vec<_>, Vec<_>) = [
        (new(pod_with(&[Value::Null], &[])), "allowed"),
        (new(pod_with(&[json!({})], &[Value::Null])), "allowed"),
        (
            new(pod_with(&[json!({"nvidia.com/gpu": "2", "cpu": "4"}), one()], &[json!({"cpu": "1"})])),
            "allowed",
        ),
        (new(pod_with(&[one(), json!({large: "1"})], &[])), "allowed"),
        (new(pod_with(&[json!({QUARTER: "1", large: "0"})], &[json!({QUARTER: "0"})])), "allowed"),
        (new(sidecar), "allowed"),
        (new(wrong.clone()), TWO),
        (new(pod_with(&[one(), two()], &[])), TWO),
        (new(pod_with(&[json!({"yunion.io/small": "3"})], &[])), TWO),
        (new(greedy_sidecar), TWO),
        (new(pod_with(&[json!({QUARTER: "1", large: "1"})], &[])), SIZES),
        (new(pod_with(&[Value::Null], &[one()])), INIT),
        (new(deployment.clone()), TWO),
        (new(maker("apps/v1", "StatefulSet", &wrong)), TWO),
        (new(maker("apps/v1", "DaemonSet", &wrong)), TWO),
        (new(maker("apps/v1", "ReplicaSet", &wrong)), TWO),
        (new(maker("batch/v1", "Job", &wrong)), TWO),
        (new(cron_job), TWO),
        // An object that is older than the policy can still be labelled, and can be deleted with its dependents.
        ((labelled, deployment.clone()), "not asked"),
        ((grown, deployment), TWO),
    ]
    .into_iter()
    .unzip();
    let answers = policy_on(&cases);
    assert_eq!(answers.len(), expected.len(), "{answers:#?}");
    for ((answer, expected), (object, _)) in answers.iter().zip(expected).zip(&cases) {
        assert!(answer.starts_with(expected), "{answer}, not {expected}: {object}");
    }
}

/// systemd has no complaint about the plugin's unit. The manifests ask for the resource that the plugin makes on the board
/// `h200`.
#[test]
fn the_unit_and_the_manifests_are_well_formed() {
    let source = |path: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let unit = fs::read_to_string(source("systemd/yunion-mps-device-plugin.service")).unwrap();
    let program = binaries().join("yunion-mps-device-plugin");
    let unit = unit.replace("=/usr/bin/yunion-mps-device-plugin\n", &format!("=\"{}\"\n", program.display()));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("yunion-mps-device-plugin.service");
    fs::write(&path, unit).unwrap();
    let verified = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output().unwrap();
    let complaints = text(&verified);
    let complaints: Vec<&str> =
        complaints.lines().filter(|line| line.contains("yunion-mps-device-plugin")).collect();
    assert_eq!(complaints, Vec::<&str>::new());

    let read =
        "import json, sys, yaml; print(json.dumps([yaml.safe_load(open(one)) for one in sys.argv[1:]]))";
    let mut python = Command::new("/usr/bin/python3");
    python.args(["-c", read]);
    python.args(["daemonset.yaml", "pod.yaml", "vllm.yaml"].map(manifest));
    let read: Value = serde_json::from_str(&succeeded(&python.output().unwrap())).unwrap();
    let [daemon_set, pod, vllm] = &read.as_array().unwrap()[..] else { panic!("{read}") };
    for container in [&pod["spec"]["containers"][0], &vllm["spec"]["template"]["spec"]["containers"][0]] {
        assert_eq!(container["resources"]["limits"], json!({QUARTER: 1}));
    }
    let container = &daemon_set["spec"]["template"]["spec"]["containers"][0];
    let places =
        container["volumeMounts"].as_array().unwrap().iter().map(|one| one["mountPath"].as_str().unwrap());
    let places: Vec<&str> = places.collect();
    assert_eq!(places, ["/run/dbus", "/var/lib/kubelet/device-plugins"]);
    // The default profiles of AppArmor and SELinux forbid the pod the use of both mounted directories.
    assert_eq!(container["securityContext"]["appArmorProfile"], json!({"type": "Unconfined"}));
    assert_eq!(container["securityContext"]["seLinuxOptions"], json!({"type": "spc_t"}));
}

#[test]
fn a_wrong_command_line_says_what_to_write() {
    for (words, complaint) in [
        (["--domain", "kubernetes.io"], "no domain for resources"),
        (["--resource", "small=20"], "write 20GiB, 20480MiB, or 20GiB:25"),
        (["--grace", "4000"], "0..=3600"),
    ] {
        let refused = Command::new(binaries().join("yunion-mps-device-plugin")).args(words).output().unwrap();
        assert!(refused.status.code() == Some(2) && text(&refused).contains(complaint), "{}", text(&refused));
    }
}
