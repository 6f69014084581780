//! Tests the device plugin with a kubelet that admits pods, restarts, hangs, and deletes pods by force. The plugin must not
//! give out a slice that a container still has, and no pod may fail because of its slice.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::bindings::bind;
use crate::support::bus::AS_STRANGER;
use crate::support::client::Client;
use crate::support::container::{ContainerGroup, NO_CONTAINER_GROUP};
use crate::support::host::{Host, signal_pid, succeeded, text};
use crate::support::node::{
    FakeKubelet, Plugin, QUARTER, ids, init_container, main_with, node, serving, unhealthy,
};
use crate::support::service_manager::ServiceManager;
use crate::support::skip::{root_or_skip, skip};
use crate::support::wait::wait_for;

struct Container {
    first: Client,
    group: ContainerGroup,
}

impl Container {
    /// Starts a container and binds it to the slice, as the OCI hook in the slice's settings does.
    fn start(host: &Host, group: ContainerGroup, slice: &str, label: &str) -> Self {
        let first = Client::start(host.command("sleep").arg("600"));
        group.take(first.id(), "");
        succeeded(&bind(host, slice, &group, &["--label", label]));
        Self { first, group }
    }

    /// Ends the container but not its pod. Returns the control group.
    fn end(self) -> ContainerGroup {
        self.first.end();
        self.group.remove();
        self.group
    }
}

/// Returns None without root, or if this machine does not let the test make control groups.
fn group(test: &str, of: fn() -> Option<ContainerGroup>) -> Option<ContainerGroup> {
    if !root_or_skip(test) {
        return None;
    }
    let group = of();
    if group.is_none() {
        skip(test, NO_CONTAINER_GROUP);
    }
    group
}

/// Drains a slice, and waits for the plugin's list of devices in which the slice is unhealthy. The plugin sends its lists in
/// order, so all earlier lists have arrived by then.
fn a_new_list(host: &Host, kubelet: &mut FakeKubelet, drained: &str) {
    succeeded(&host.mpsctl(&["drain", drained]));
    kubelet.wait_for_devices(QUARTER, 4, &[drained]);
}

#[test]
fn a_pod_hands_the_slice_of_its_ended_init_container_on() {
    let (_host, mut kubelet, _plugin) = node("h200", &[]);
    kubelet.wait_for_devices(QUARTER, 4, &[]);
    let admitted = kubelet.admit("train-0", &json!([init_container(), main_with(1)])).unwrap();
    let (first, main) = (&admitted["download"], &admitted["main"]);
    assert_eq!((&first["devices"], &first["settings"]), (&main["devices"], &main["settings"]), "{admitted}");
    let device = first["devices"][0].as_str().unwrap();
    assert_eq!(kubelet.given()[device], ["train-0/download", "train-0/main"]);
    for pod in ["train-1", "train-2", "train-3"] {
        assert_ne!(kubelet.admitted(pod, 1).0, [device]);
    }
    let (code, why) = kubelet.admit("train-4", &json!([main_with(1)])).unwrap_err();
    assert_eq!(code, "UnexpectedAdmissionError");
    assert!(why.contains("requested number of devices unavailable for yunion.io/mps-35gib"), "{why}");
    kubelet.ended("train-0");
    assert_eq!(kubelet.admitted("train-5", 1).0, [device]);
}

/// The kubelet rejects the pod with the reason for which the plugin has refused the devices.
#[test]
fn a_pod_that_asks_for_two_slices_of_one_gpu_is_not_admitted() {
    let (_host, mut kubelet, _plugin) = node("h200", &[]);
    kubelet.wait_for_devices(QUARTER, 4, &[]);
    let (code, why) = kubelet.admit("train-0", &json!([main_with(2)])).unwrap_err();
    assert_eq!(code, "UnexpectedAdmissionError");
    let words = "Allocate failed due to rpc error: code = InvalidArgument desc = 00:06.0-0 and 00:06.0-1 are \
                 slices of one GPU";
    assert!(why.starts_with(words), "{why}");
    assert!(kubelet.given().is_empty(), "{:?}", kubelet.given());
}

/// A kubelet that starts admits each pod again, even if an init container has ended or a container is in back-off. The kubelet
/// must not reject these pods.
#[test]
fn a_restart_of_the_kubelet_rejects_no_pod_whose_slice_is_served() {
    let test = "a_restart_of_the_kubelet_rejects_no_pod_whose_slice_is_served";
    let Some(of_pod) = group(test, ContainerGroup::of_a_pod) else { return };
    let Some(of_other) = ContainerGroup::of_a_pod() else { return skip(test, NO_CONTAINER_GROUP) };
    let (host, mut kubelet, plugin) = node("h200", &[]);
    kubelet.wait_for_devices(QUARTER, 4, &[]);
    let admitted = kubelet.admit("train-0", &json!([init_container(), main_with(1)])).unwrap();
    let slice = admitted["main"]["devices"][0].as_str().unwrap().to_owned();
    let _main = Container::start(&host, of_pod, &slice, "ml/train-0/main");
    let in_back_off = kubelet.admitted("crashes", 1).0.remove(0);
    let crashes = Container::start(&host, of_other, &in_back_off, "ml/crashes/main");
    // Each pod has a sandbox process, which runs even if no container of the pod does.
    let sandbox = Client::start(host.command("sleep").arg("600"));
    crashes.group.let_go(sandbox.id());
    let (_pod, _sandbox) = (crashes.end(), sandbox);
    // The kubelet gives a drained slice to no new pod. It must still accept the pods that already have the slice.
    succeeded(&host.mpsctl(&["drain", &slice, &in_back_off]));
    let running = json!({"train-0": ["main"]});
    for _ in 0..3 {
        drop(kubelet);
        kubelet = FakeKubelet::start(&host);
        kubelet.wait("the devices", |event| event["event"] == "devices");
        assert_eq!(kubelet.admit_again(&running), json!({}));
        assert_eq!(kubelet.given()[&slice], ["train-0/download", "train-0/main"]);
        assert_eq!(kubelet.given()[&in_back_off], ["crashes/main"]);
    }
    kubelet.wait_for_devices(QUARTER, 4, &[]);

    // Without a registered device plugin, a kubelet that starts rejects each pod with a container that does not run.
    signal_pid(plugin.process.id(), Signal::TERM);
    kubelet.wait("the end of the list", |event| event["event"] == "gone");
    drop(kubelet);
    kubelet = FakeKubelet::start(&host);
    let why = "Pod was rejected: Allocate failed due to no healthy devices present; cannot allocate unhealthy devices \
               yunion.io/mps-35gib, which is unexpected";
    assert_eq!(kubelet.admit_again(&running), json!({"train-0": why, "crashes": why}));
    assert!(kubelet.given().is_empty());
}

/// A kubelet that starts removes the sockets of plugins, also of a plugin that is just registering. The kubelet needs this
/// socket before it answers the registration.
#[test]
fn a_removed_socket_is_made_again_while_the_kubelet_does_not_answer() {
    let host = Host::serving("h200");
    let mut hangs = FakeKubelet::start_with(&host, &["--hang"]);
    let plugin = Plugin::start(&host, &[]);
    hangs.wait("a registration", |event| event["event"] == "hangs");
    plugin.wait_until_it_says("the socket was removed");
    let said = plugin.said();
    let (complaint, gone) = (said.find("is not registered"), said.find("the socket was removed").unwrap());
    assert!(complaint.is_none_or(|complaint| complaint > gone), "{said}");
    let socket = host.path("kubelet/device-plugins/yunion-mps-35gib.sock");
    wait_for("the socket", || socket.exists().then_some(()));
    drop(hangs);
    FakeKubelet::start(&host).wait_for_devices(QUARTER, 4, &[]);
}

/// When a pod is deleted by force, the kubelet frees the pod's device at once, although the pod's container may still run.
#[test]
fn after_a_forced_deletion_the_next_pod_gets_another_slice() {
    let test = "after_a_forced_deletion_the_next_pod_gets_another_slice";
    let Some(of_pod) = group(test, ContainerGroup::of_a_pod) else { return };
    let (host, mut kubelet, _plugin) = node("h200", &[]);
    kubelet.wait_for_devices(QUARTER, 4, &[]);
    let (former, _) = kubelet.admitted("train-0", 1);
    let container = Container::start(&host, of_pod, &former[0], "ml/train-0/main");
    a_new_list(&host, &mut kubelet, "00:06.0-3");
    kubelet.ended("train-0");
    let (next, _) = kubelet.admitted("train-1", 1);
    assert_ne!(next, former);
    // The plugin recommends free slices first. So the kubelet gives out the slice with the running container last.
    assert_ne!(kubelet.admitted("train-2", 1).0, former);
    assert_eq!(kubelet.admitted("train-3", 1).0, former);
    drop(container);
}

/// The plugin recognizes a pod by the control group that has the slice. Neither the kubelet's record nor the binding's label
/// counts.
#[test]
fn a_slice_of_a_pod_stays_healthy_and_one_of_a_stranger_never_is() {
    let test = "a_slice_of_a_pod_stays_healthy_and_one_of_a_stranger_never_is";
    let Some(job) = group(test, ContainerGroup::new) else { return };
    let others = [ContainerGroup::of_a_pod, ContainerGroup::new];
    let [Some(of_pod), Some(race)] = others.map(|of| of()) else { return skip(test, NO_CONTAINER_GROUP) };
    let host = serving("h200");
    let _job = Container::start(&host, job, "00:06.0-1", "kubepods/ml/job/main");
    // A container outside Kubernetes has a slice. The plugin sees this before a kubelet runs.
    let plugin = Plugin::start(&host, &[]);
    plugin.wait_until_it_says("waiting for the kubelet");
    let mut kubelet = FakeKubelet::start(&host);
    kubelet.wait_for_devices(QUARTER, 4, &["00:06.0-1"]);
    let mut heard = std::mem::take(&mut kubelet.heard);
    drop(kubelet);
    kubelet = FakeKubelet::start(&host);
    kubelet.wait_for_devices(QUARTER, 4, &["00:06.0-1"]);
    let (code, why) = kubelet.refused(QUARTER, &["00:06.0-1"]);
    assert!(code == "FAILED_PRECONDITION" && why.contains("outside Kubernetes"), "{code}: {why}");

    // A container outside Kubernetes takes the slice after the kubelet has admitted a pod with it, and before the pod's
    // container starts.
    let (given, _) = kubelet.admitted("train-0", 1);
    let race = Container::start(&host, race, &given[0], "docker-job");
    let mut taken = ["00:06.0-1", &given[0]];
    taken.sort_unstable();
    kubelet.wait_for_devices(QUARTER, 4, &taken);
    let refused = bind(&host, &given[0], &of_pod, &[]);
    assert!(text(&refused).contains("is taken by docker-job"), "{}", text(&refused));
    kubelet.ended("train-0");
    let (next, _) = kubelet.admitted("train-1", 1);
    // An init container is bound to its pod's slice too.
    let download = Container::start(&host, of_pod, &next[0], "ml/train-1/download");
    drop(race);
    let last = kubelet.wait_for_devices(QUARTER, 4, &["00:06.0-1"]);
    assert!(ids(&last).contains(&next[0].as_str()));
    assert!(!plugin.said().contains("train-1"), "{}", plugin.said());
    drop(download);
    heard.append(&mut kubelet.heard);
    for list in heard.iter().filter(|event| event["event"] == "devices") {
        let sick = unhealthy(list["devices"].as_array().unwrap());
        assert!(sick.contains(&"00:06.0-1") && !sick.contains(&next[0].as_str()), "{list}");
    }
}

/// A reload changes the slices of another GPU. The resource of the running pods' slices keeps its name, since the kubelet would
/// treat all devices of a new resource as free.
#[test]
fn a_gpu_that_is_cut_anew_changes_nothing_for_pods_on_other_gpus() {
    let test = "a_gpu_that_is_cut_anew_changes_nothing_for_pods_on_other_gpus";
    let Some(of_pod) = group(test, ContainerGroup::of_a_pod) else { return };
    let (host, mut kubelet, _plugin) = node("h200x8", &[]);
    let before = kubelet.wait_for_devices(QUARTER, 32, &[]);
    let slice = kubelet.admitted("train-0", 1).0.remove(0);
    let _container = Container::start(&host, of_pod, &slice, "ml/train-0/main");
    // Slices of 36000 MiB are also rounded to 35 GiB, so their resource keeps its name.
    let file = host.file("/etc/yunion/host_container_device.yml");
    let cut = "import sys, yaml
devices = yaml.safe_load(open(sys.argv[1]))
entry = devices['devices'][1]
del entry['virtual_number']
entry['slices'] = [{'memory': '36000MiB'}] * 3
open(sys.argv[1], 'w').write(yaml.safe_dump(devices))";
    let mut python = Command::new("/usr/bin/python3");
    succeeded(&python.args(["-c", cut]).arg(&file).output().unwrap());
    host.reload();
    let after = kubelet.wait_for_devices(QUARTER, 31, &[]);
    let others = |devices: &[Value]| -> Vec<Value> {
        let others = devices.iter().filter(|device| !device["id"].as_str().unwrap().starts_with("2d:00.0-"));
        others.cloned().collect()
    };
    assert_eq!(others(&after), others(&before));
    let registered = kubelet.heard.iter().filter(|event| event["event"] == "registered");
    assert!(registered.map(|event| &event["resource"]).all(|resource| resource == QUARTER));
    assert_eq!(kubelet.given()[&slice], ["train-0/main"]);
    assert_ne!(kubelet.admitted("train-1", 1).0, [slice]);
}

/// The scheduler knows only the number of devices, which the kubelet publishes for its node from time to time.
#[test]
fn the_scheduler_sees_a_drain_of_a_free_slice_and_not_one_under_a_pod() {
    let test = "the_scheduler_sees_a_drain_of_a_free_slice_and_not_one_under_a_pod";
    let Some(of_pod) = group(test, ContainerGroup::of_a_pod) else { return };
    let host = serving("h200");
    let mut kubelet = FakeKubelet::start_with(&host, &["--period", "0.1"]);
    let _plugin = Plugin::start(&host, &[]);
    let wait_for_numbers = |kubelet: &mut FakeKubelet, allocatable: u32| {
        kubelet.wait("the numbers of the node", |event| {
            event["event"] == "node"
                && event["capacity"][QUARTER] == 4
                && event["allocatable"][QUARTER] == allocatable
        });
        kubelet.events.clear();
    };
    wait_for_numbers(&mut kubelet, 4);
    let slice = kubelet.admitted("train-0", 1).0.remove(0);
    let _container = Container::start(&host, of_pod, &slice, "ml/train-0/main");
    succeeded(&host.mpsctl(&["drain", &slice]));
    succeeded(&host.mpsctl(&["drain", "00:06.0-3"]));
    wait_for_numbers(&mut kubelet, 3);
    succeeded(&host.mpsctl(&["undrain", "00:06.0-3"]));
    wait_for_numbers(&mut kubelet, 4);
}

#[test]
fn a_plugin_that_does_not_reach_the_service_says_why() {
    let mut host = Host::new("h200");
    let mut systemd = ServiceManager::of(&mut host);
    let mut says = |plugin: Plugin, reason: &str| {
        plugin.wait_until_it_says(reason);
        systemd.until(|line| line.starts_with("STATUS=") && line.contains(reason));
    };
    says(Plugin::start(&host, &[]), "yunion-mps-daemon is not running");
    let mut no_bus = Plugin::command(&host, &[]);
    no_bus.env("DBUS_SYSTEM_BUS_ADDRESS", format!("unix:path={}", host.path("nowhere").display()));
    says(Plugin::started_by(&host, no_bus, "no-bus.log"), "the system bus");
    if !root_or_skip("a_plugin_that_does_not_reach_the_service_says_why: a bus that refuses") {
        return;
    }
    host.start();
    host.wait_for_state("ready");
    fs::set_permissions(host.path("notify"), fs::Permissions::from_mode(0o777)).unwrap();
    let command = Plugin::command(&host, &[]);
    let mut refused = host.command("setpriv");
    refused.args(AS_STRANGER).arg(command.get_program()).args(command.get_args());
    says(
        Plugin::started_by(&host, refused, "refused.log"),
        "only root and the group yunion-mps may ask the service",
    );
}

/// The sandbox of a systemd unit has the directory that existed at the start of the unit. A new directory at the same path is
/// read-only in the sandbox.
#[test]
fn a_plugin_whose_directory_was_made_anew_ends_so_that_it_gets_another_sandbox() {
    let test = "a_plugin_whose_directory_was_made_anew_ends_so_that_it_gets_another_sandbox";
    if !root_or_skip(test) {
        return;
    }
    let host = Host::serving("h200");
    let sockets = host.path("kubelet/device-plugins");
    fs::create_dir_all(&sockets).unwrap();
    let in_sandbox = Plugin::command(&host, &[]);
    let mut command = host.command("unshare");
    command.args(["--mount", "--propagation", "slave", "sh", "-c", SANDBOX, "sh"]);
    command.arg(host.path("kubelet")).arg(&sockets);
    command.arg(in_sandbox.get_program()).args(in_sandbox.get_args());
    let mut plugin = Plugin::started_by(&host, command, "plugin.log");
    let mut kubelet = FakeKubelet::start(&host);
    kubelet.wait_for_devices(QUARTER, 4, &[]);
    // kubeadm removes this directory when a node joins a cluster again.
    drop(kubelet);
    fs::remove_dir_all(&sockets).unwrap();
    let _kubelet = FakeKubelet::start(&host);
    let status = wait_for("the end of the plugin", || plugin.process.try_wait().unwrap());
    assert_eq!(status.code(), Some(1), "{}", plugin.said());
    assert!(plugin.said().contains("Read-only file system"), "{}", plugin.said());
}

/// Mounts directories as systemd does for `ProtectSystem=strict` and `StateDirectory=`: `$1` is read-only, except for the
/// directory `$2` in it.
const SANDBOX: &str = "mount --bind \"$1\" \"$1\" && mount --bind \"$2\" \"$2\" && mount -o remount,bind,ro \"$1\" && \
                       shift 2 && exec \"$@\"";

#[test]
fn a_second_plugin_leaves_the_sockets_of_the_first_alone() {
    let (host, mut kubelet, first) = node("h200", &[]);
    kubelet.wait_for_devices(QUARTER, 4, &[]);
    kubelet.wait_for_registration(QUARTER);
    let second = Plugin::started_by(&host, Plugin::command(&host, &[]), "second.log");
    second.wait_until_it_says("another device plugin serves this socket");
    kubelet.events.clear();
    // A drain changes the devices of both plugins. So the second plugin checks the socket of the first plugin again, and must
    // not remove this socket.
    a_new_list(&host, &mut kubelet, "00:06.0-3");
    assert!(!first.said().contains("the socket was removed"), "{}", first.said());
    let registrations = kubelet.heard.iter().filter(|event| event["event"] == "registered");
    assert_eq!(registrations.count(), 1);
    signal_pid(first.process.id(), Signal::TERM);
    kubelet.wait_for_registration(QUARTER);
}

#[test]
fn without_an_inotify_instance_the_plugin_names_the_setting_and_goes_on() {
    let test = "without_an_inotify_instance_the_plugin_names_the_setting_and_goes_on";
    if !root_or_skip(test) {
        return;
    }
    let host = Host::serving("h200");
    if !host.without_inotify(&Command::new("true")).status().unwrap().success() {
        return skip(test, "no user namespace can be made");
    }
    let command = host.without_inotify(&Plugin::command(&host, &[]));
    let plugin = Plugin::started_by(&host, command, "plugin.log");
    plugin.wait_until_it_says("fs.inotify.max_user_instances");
    FakeKubelet::start(&host).wait_for_devices(QUARTER, 4, &[]);
    assert!(!plugin.said().contains("which makes this directory"), "{}", plugin.said());
}

/// A kubelet before version 1.26 accepts the registration, but never asks the plugin for its devices.
#[test]
fn a_kubelet_that_never_asks_for_devices_is_named() {
    let host = Host::serving("h200");
    let mut kubelet = FakeKubelet::start_with(&host, &["--deaf"]);
    let plugin = Plugin::start(&host, &[]);
    kubelet.wait_for_registration(QUARTER);
    plugin.wait_until_it_says("1.26");
    drop(kubelet);
    FakeKubelet::start(&host).wait_for_devices(QUARTER, 4, &[]);
}
