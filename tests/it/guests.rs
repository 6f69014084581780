//! Tests of clients in the guests of the platform Cloudpods. The platform's present host agent mounts the whole pipe directory
//! into each container, and names no slice in the container's environment. The host agent's records say which container has
//! which device.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::client::Client;
use crate::support::container::{ContainerGroup, NO_CONTAINER_GROUP};
use crate::support::exposition::samples_of;
use crate::support::host::{Host, alive, succeeded, text};
use crate::support::listener::Listener;
use crate::support::skip::{root_or_skip, skip};
use crate::support::wait::wait_for;

/// Slices of the board `h200`: 35942 MiB and 12 clients each.
const OWN: &str = "00:06.0-1";
const NEIGHBOURS: &str = "00:06.0-2";

const NAMES: [&str; 3] = ["train-1", "main", "vision"];

struct Platform {
    host: Host,
}

impl Platform {
    /// Returns None without root, or if this machine does not let the test make control groups.
    fn with(test: &str, lines: &str) -> Option<(Self, ContainerGroup)> {
        Self::on("h200", test, lines)
    }

    fn on(board: &str, test: &str, lines: &str) -> Option<(Self, ContainerGroup)> {
        if !root_or_skip(test) {
            return None;
        }
        let Some(group) = ContainerGroup::of_a_guest() else {
            skip(test, NO_CONTAINER_GROUP);
            return None;
        };
        let mut host = Host::new(board);
        host.configure(&format!("servers_path: {}\n{lines}", host.path("servers").display()));
        host.start();
        host.wait_for_state("ready");
        Some((Self { host }, group))
    }

    /// Writes the host agent's record that the container of a guest has `device`. Several devices are separated by commas.
    fn record(&self, guest: &str, container: &ContainerGroup, device: &str) {
        let containers = json!({"c-1": {"id": "c-1", "index": 0, "cri_id": container.id}});
        self.write(guest, "containers", &containers.to_string());
        self.write(guest, "desc", &description(guest, device).to_string());
    }

    fn write(&self, guest: &str, file: &str, text: &str) {
        let directory = self.host.path("servers").join(guest);
        fs::create_dir_all(&directory).unwrap();
        for directory in [&directory, directory.parent().unwrap()] {
            fs::set_permissions(directory, Permissions::from_mode(0o755)).unwrap();
        }
        fs::write(directory.join(file), text).unwrap();
        fs::set_permissions(directory.join(file), Permissions::from_mode(0o644)).unwrap();
    }

    /// Starts a client in a container that has the whole pipe directory, and waits until the client is served.
    fn client(&self, container: &ContainerGroup, work: &[&str], claim: Option<&str>) -> Client {
        self.host.served(&mut self.program_in(&self.host.path("mps/pipe"), container, work, claim))
    }

    fn program_in(
        &self,
        pipe: &Path,
        container: &ContainerGroup,
        work: &[&str],
        claim: Option<&str>,
    ) -> Command {
        let enter = "echo $$ > \"$0/cgroup.procs\" && exec cuda-client \"$@\"";
        let mut command = self.host.command("sh");
        command.args(["-c", enter]).arg(&container.directory).args(work).stdout(Stdio::null());
        command.env("CUDA_MPS_PIPE_DIRECTORY", pipe);
        if let Some(claim) = claim {
            command.env("YUNION_MPS_DEVICE", claim);
        }
        command
    }

    fn listed(&self, client: &Client) -> Value {
        self.host.listed(client.id()).unwrap()
    }

    fn clients_of(&self, slice: &str) -> Value {
        self.host.list().into_iter().find(|device| device["addr"] == slice).unwrap()["clients"].clone()
    }
}

/// Returns the host agent's description of a guest. It has the keys that the service reads, and a secret that no output may
/// show.
fn description(guest: &str, device: &str) -> Value {
    let of =
        |device| json!({"isolated_device": {"addr": device, "path": "GPU-1", "device_type": "NVIDIA_MPS"}});
    let devices: Vec<Value> = device.split(',').map(of).collect();
    json!({
        "name": NAMES[0], "uuid": guest, "tenant": NAMES[2], "tenant_id": "t",
        "containers": [{
            "id": "c-1", "name": NAMES[1], "spec": {"image_credential_token": "hunter2", "devices": devices},
        }],
    })
}

fn names(listed: &Value) -> [&str; 3] {
    ["guest", "container", "project"].map(|key| listed[key].as_str().unwrap_or_default())
}

fn known(listed: &Value) -> [&str; 2] {
    ["device", "known_by"].map(|key| listed[key].as_str().unwrap_or_default())
}

/// All outputs show the client with the slice and the names in the host agent's records, whatever the client's environment
/// claims.
#[test]
fn a_client_of_a_guest_is_known_by_the_records_of_the_host_agent() {
    let test = "a_client_of_a_guest_is_known_by_the_records_of_the_host_agent";
    let Some((platform, group)) = Platform::with(test, "") else { return };
    let host = &platform.host;
    platform.record("u-1", &group, OWN);
    let client = platform.client(&group, &["hold", "600"], None);
    let liar = platform.client(&group, &["hold", "600"], Some(NEIGHBOURS));
    for client in [&client, &liar] {
        let listed = platform.listed(client);
        assert_eq!((known(&listed), names(&listed)), ([OWN, "platform"], NAMES), "{listed:#}");
    }
    wait_for("two clients of the slice", || (platform.clients_of(OWN) == 2).then_some(()));
    assert_eq!(platform.clients_of(NEIGHBOURS), json!(0));
    let devices = succeeded(&host.mpsctl(&["list", "-o", "wide"]));
    assert!(devices.contains("  train-1/main  "), "{devices}");
    let table = succeeded(&host.mpsctl(&["clients", "-o", "wide"]));
    assert!(
        table.contains("GUEST") && table.contains("  train-1/main  ") && table.contains(NAMES[2]),
        "{table}"
    );
    let labels = format!("container=main,container_id={},device={OWN},gpu=00:06.0,guest=train-1,", group.id);
    wait_for("the metric", || {
        let samples = samples_of(&succeeded(&host.mpsctl(&["metrics", "--clients"])));
        samples.keys().find(|key| key.contains(&labels) && key.contains("project=vision")).cloned()
    });

    let released = host.mpsctl(&["terminate", "--device", OWN]);
    let said = text(&released);
    assert!(released.status.success() && said.contains("of guest train-1, slice 00:06.0-1"), "{said}");
    for mut client in [client, liar] {
        let status = wait_for("the end of the client", || client.try_wait().unwrap());
        assert_eq!(status.code(), Some(4), "CUDA error 810");
    }
    let log = host.log();
    assert!(!log.contains("hunter2"), "{log}");
}

#[test]
fn people_read_of_guests_when_their_work_ends() {
    let test = "people_read_of_guests_when_their_work_ends";
    let lines = "cuda_mps_quit_timeout: 1\nlog_level: debug";
    let Some((mut platform, group)) = Platform::with(test, lines) else { return };
    platform.record("u-1", &group, OWN);
    let listener = Listener::start(&platform.host);
    let pipe = platform.host.path("mps/pipe");
    let hit = platform.host.known(&mut platform.program_in(&pipe, &group, &["hold", "600"], None));
    let pid = hit.id();
    platform.host.fault();
    let words = format!("PID {pid} of guest train-1, slice {OWN}, container main");
    let told = listener.wait_for_fault(&[pid]);
    assert!(told.contains(&words), "{words}\n{told}");
    hit.end();
    platform.host.wait_for_state("ready");
    let client = platform.client(&group, &["hold", "600"], None);
    let words = format!("PID {} of guest train-1, slice {OWN}, container main", client.id());
    drop(listener);
    assert_eq!(platform.host.stop().code(), Some(0));
    let log = platform.host.log();
    assert!(log.contains(&format!("the stop ends the work of 1 client: {words}")), "{log}");
}

#[test]
fn the_newest_client_of_a_guest_over_its_budget_is_ended() {
    let test = "the_newest_client_of_a_guest_over_its_budget_is_ended";
    let Some((platform, group)) = Platform::with(test, "cuda_mps_overuse: terminate") else { return };
    let Some(neighbours) = ContainerGroup::of_a_guest() else { unreachable!() };
    platform.record("u-1", &group, OWN);
    platform.record("u-2", &neighbours, NEIGHBOURS);
    let hold =
        |group: &ContainerGroup, mib: &str| platform.client(group, &["hold", "600", "--mib", mib], None);
    let (old, neighbour) = (hold(&group, "20000"), hold(&neighbours, "20000"));
    let mut new = hold(&group, "20000");
    let status = wait_for("the end of the newest", || new.try_wait().unwrap());
    assert_eq!(status.code(), Some(4), "CUDA error 810");
    assert!(alive(old.id()) && alive(neighbour.id()));
    let words = format!("the service has ended the GPU work of 1 client: PID {} of guest train-1", new.id());
    wait_for(&words, || platform.host.log().contains(&words).then_some(()));
}

/// A user who owns a control group (a unit with `Delegate=`) names a control group in it like another tenant's container. The
/// user's program does not count for that tenant's guest, and does not disturb the guest's GPU work or its binding.
#[test]
fn a_control_group_of_a_users_is_no_guest_whatever_its_name_is() {
    let test = "a_control_group_of_a_users_is_no_guest_whatever_its_name_is";
    let Some((platform, group)) = Platform::with(test, "cuda_mps_overuse: terminate") else { return };
    let host = &platform.host;
    platform.record("u-1", &group, OWN);
    let delegated = group.directory.with_file_name(format!("job-{}", &group.id[..12]));
    let forged = ContainerGroup { id: group.id.clone(), directory: delegated.join(&group.id) };
    fs::create_dir_all(&forged.directory).unwrap();
    for directory in [&delegated, &forged.directory] {
        chown(directory, Some(65534), Some(65534)).unwrap();
    }
    let hold =
        |group: &ContainerGroup, claim| platform.client(group, &["hold", "600", "--mib", "20000"], claim);
    let liar = hold(&forged, None);
    let guest = hold(&group, None);
    let of_guest = platform.listed(&guest);
    assert_eq!((known(&of_guest), names(&of_guest)), ([OWN, "platform"], NAMES), "{of_guest:#}");
    let of_liar = platform.listed(&liar);
    assert_eq!((known(&of_liar), names(&of_liar)), (["", ""], ["", "", ""]), "{of_liar:#}");
    wait_for("the guest in its slice", || (platform.clients_of(OWN) == 1).then_some(()));
    succeeded(&host.mpsctl(&["bind", OWN, "--pid", &guest.id().to_string(), "--label", "train-1"]));
    let said = host.mpsctl(&["terminate", "--container", &group.id]);
    assert!(said.status.success() && alive(liar.id()), "{}", text(&said));
    drop((liar, guest, forged));
    wait_for("no process in the control group", || fs::remove_dir(&delegated).ok());
}

#[test]
fn root_takes_a_slice_from_a_container_that_the_records_name() {
    let test = "root_takes_a_slice_from_a_container_that_the_records_name";
    let Some((platform, group)) = Platform::with(test, "") else { return };
    let Some(other) = ContainerGroup::of_a_guest() else { unreachable!() };
    let host = &platform.host;
    platform.record("u-1", &group, OWN);
    let client = platform.client(&group, &["hold", "600"], None);
    let bound = || host.list().into_iter().find(|one| one["addr"] == OWN).unwrap()["bound_to"].clone();
    wait_for("the container in its slice", || (bound() == "train-1/main").then_some(()));
    let own = platform.client(&other, &["hold", "600"], None);
    succeeded(&host.mpsctl(&["bind", OWN, "--pid", &own.id().to_string(), "--label", "own"]));
    assert_eq!(bound(), "own");
    assert_eq!(known(&platform.listed(&own)), [OWN, "bound"]);
    assert!(alive(client.id()));
}

/// The service ignores a record that a user other than root can write, and a record that it can't read. The client then has the
/// slice that its environment claims.
#[test]
fn bad_records_are_not_believed() {
    let test = "bad_records_are_not_believed";
    let Some((platform, group)) = Platform::with(test, "") else { return };
    let client = platform.client(&group, &["hold", "600"], Some(NEIGHBOURS));
    // The service identifies a client once, and must do so before the first record exists. Otherwise a valid record below would
    // bind the container to its slice.
    wait_for("a look", || (platform.clients_of(NEIGHBOURS) == 1).then_some(()));
    let servers = platform.host.path("servers");
    let is_claimed = |what: &str| {
        let listed = platform.listed(&client);
        assert_eq!((known(&listed), names(&listed)), ([NEIGHBOURS, "environment"], [""; 3]), "{what}");
    };
    is_claimed("no records");
    for file in ["containers", "desc", ""] {
        platform.record("u-1", &group, OWN);
        assert_eq!(known(&platform.listed(&client)), [OWN, "platform"]);
        let path = servers.join("u-1").join(file);
        chown(&path, Some(1000), None).unwrap();
        is_claimed("another owner");
        chown(&path, Some(0), None).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
        is_claimed("written by everybody");
    }
    for (file, text) in [
        ("containers", "{"),
        ("containers", "[]"),
        ("desc", "{\"name\": \"x\", \"containers\": ["),
        ("desc", "null"),
        ("desc", &" ".repeat(5 << 20)),
    ] {
        platform.record("u-1", &group, OWN);
        platform.write("u-1", file, text);
        is_claimed(text.trim());
    }
    platform.record("u-1", &group, OWN);
    platform.record("u-2", &group, NEIGHBOURS);
    is_claimed("a container of two guests");
    fs::remove_dir_all(servers.join("u-2")).unwrap();
    // The newest version of the host agent records only a GPU and no slice. The test writes a record of this form after the
    // service has identified the client, so the client gets no slice.
    platform.record("u-1", &group, "00:06.0");
    let listed = platform.listed(&client);
    assert_eq!((known(&listed), names(&listed)), (["00:06.0", "platform"], NAMES), "{listed:#}");
    // The client may have any slice of the GPU. So the service refuses to end the clients of a slice of this GPU.
    for slice in [OWN, NEIGHBOURS] {
        let refused = platform.host.mpsctl(&["terminate", "--device", slice]);
        let said = text(&refused);
        assert!(!refused.status.success() && said.contains(&format!("PID {}", client.id())), "{said}");
    }
    assert!(alive(client.id()));
}

/// A container has no binding while its record is invalid, and gets one as soon as the record is valid.
#[test]
fn bad_records_bind_nobody() {
    let test = "bad_records_bind_nobody";
    let Some((platform, _)) = Platform::with(test, "") else { return };
    let bound = || -> Vec<Value> {
        let slices = platform.host.list();
        slices.into_iter().map(|slice| slice["bound_to"].clone()).filter(|to| to != "").collect()
    };
    let desc = |device: &str| description("u-1", device).to_string();
    let write =
        |file: &'static str, text: String| move |platform: &Platform| platform.write("u-1", file, &text);
    type Damage = Box<dyn Fn(&Platform)>;
    let half = desc(OWN).split_at(90).0.to_owned();
    let cases: Vec<(&str, Damage)> = vec![
        ("no record", Box::new(|of| fs::remove_dir_all(of.host.path("servers/u-1")).unwrap())),
        ("half of a description", Box::new(write("desc", half))),
        ("half of the containers", Box::new(write("containers", "{\"c-1\": {\"id\"".to_owned()))),
        ("a huge description", Box::new(write("desc", desc(OWN) + &" ".repeat(5 << 20)))),
        ("a slice that is not there", Box::new(write("desc", desc("00:06.0-9")))),
        ("a GPU that is not there", Box::new(write("desc", desc("00:09.0")))),
        ("no name of a device", Box::new(write("desc", desc("../../etc\u{0}")))),
        ("another type", Box::new(write("desc", desc(OWN).replace("NVIDIA_MPS", "NVIDIA_GPU")))),
        (
            "the agent is another user",
            Box::new(|of| {
                chown(of.host.path("servers/u-1/desc"), Some(1000), None).unwrap();
            }),
        ),
        (
            "a pipe in its place",
            Box::new(|of| {
                let file = of.host.path("servers/u-1/desc");
                fs::remove_file(&file).unwrap();
                succeeded(&Command::new("mkfifo").args(["-m", "644"]).arg(file).output().unwrap());
            }),
        ),
    ];
    for (what, damage) in cases {
        let Some(group) = ContainerGroup::of_a_guest() else { unreachable!() };
        platform.record("u-1", &group, OWN);
        damage(&platform);
        let client = platform.client(&group, &["hold", "600"], None);
        assert_eq!((bound(), platform.clients_of(OWN)), (vec![], json!(0)), "{what}");
        assert_ne!(known(&platform.listed(&client))[0], OWN, "{what}");
        let _ = fs::remove_dir_all(platform.host.path("servers/u-1"));
        platform.record("u-1", &group, OWN);
        let second = platform.client(&group, &["hold", "600"], None);
        wait_for(what, || (bound() == ["train-1/main"]).then_some(()));
        assert_eq!(known(&platform.listed(&client)), [OWN, "platform"], "{what}");
        client.end();
        second.end();
        drop(group);
        let free = || bound().is_empty() && platform.clients_of(OWN) == 0;
        wait_for("a free slice", || free().then_some(()));
    }
    // A tenant chooses the guest's names. Their control characters must not reach an administrator's terminal.
    let Some(group) = ContainerGroup::of_a_guest() else { unreachable!() };
    platform.record("u-1", &group, OWN);
    let names = format!("\\u001b[2J\\n{}", "x".repeat(300));
    platform.write("u-1", "desc", &desc(OWN).replace("train-1", &names));
    let _client = platform.client(&group, &["hold", "600"], None);
    let label = format!("\u{fffd}[2J\u{fffd}{}/main", "x".repeat(128 - 5));
    wait_for("a binding", || (!bound().is_empty()).then_some(()));
    assert_eq!(bound(), [label.as_str()]);
    assert!(!platform.host.log().contains('\u{1b}'), "{}", platform.host.log());
}

/// The newest host agent records only a container's GPU. The container gets the lowest free slice of the GPU when its first
/// client comes, and keeps the slice until the container ends.
#[test]
fn a_container_with_a_gpu_in_the_records_gets_a_free_slice() {
    let test = "a_container_with_a_gpu_in_the_records_gets_a_free_slice";
    let Some((mut platform, group)) = Platform::with(test, "cuda_mps_overuse: terminate") else { return };
    let Some(neighbours) = ContainerGroup::of_a_guest() else { unreachable!() };
    for (guest, container) in [("u-1", &group), ("u-2", &neighbours)] {
        platform.record(guest, container, "00:06.0");
    }
    let hold = |platform: &Platform, container, mib| {
        platform.client(container, &["hold", "600", "--mib", mib], Some(NEIGHBOURS))
    };
    let has = |platform: &Platform, client: &Client, slice: &str| {
        wait_for("the slice", || (known(&platform.listed(client)) == [slice, "platform"]).then_some(()));
        assert_eq!(names(&platform.listed(client)), NAMES);
    };
    let old = hold(&platform, &group, "20000");
    has(&platform, &old, "00:06.0-0");
    let neighbour = hold(&platform, &neighbours, "20000");
    has(&platform, &neighbour, OWN);
    platform.host.signal(Signal::KILL);
    platform.host.ended();
    platform.host.start();
    platform.host.wait_for_state("ready");
    has(&platform, &old, "00:06.0-0");
    has(&platform, &neighbour, OWN);
    let bound = |platform: &Platform| -> Vec<Value> {
        platform.host.list().into_iter().map(|device| device["bound_to"].clone()).collect()
    };
    assert_eq!(bound(&platform), ["train-1/main", "train-1/main", "", ""]);
    // All clients of the container count for its slice. The slice is over its budget, so the service ends the newest client.
    let mut new = hold(&platform, &group, "20000");
    let status = wait_for("the end of the newest", || new.try_wait().unwrap());
    assert_eq!(status.code(), Some(4), "CUDA error 810");
    assert!(alive(old.id()) && alive(neighbour.id()));
    old.end();
    drop(group);
    wait_for("a free slice", || (bound(&platform) == ["", "train-1/main", "", ""]).then_some(()));
    // Root, or a host agent that calls Bind, can replace a binding from the host agent's records.
    let pid = neighbour.id().to_string();
    succeeded(&platform.host.mpsctl(&["bind", "00:06.0-3", "--pid", &pid, "--label", "main of train-1"]));
    assert_eq!(bound(&platform), ["", "", "", "main of train-1"]);
    assert_eq!(known(&platform.listed(&neighbour)), ["00:06.0-3", "bound"]);
}

#[test]
fn a_container_has_its_recorded_slice_of_each_gpu() {
    let test = "a_container_has_its_recorded_slice_of_each_gpu";
    let Some((platform, group)) = Platform::on("h200x8", test, "cuda_mps_topology: per_gpu") else { return };
    let devices = platform.host.list();
    let [first, second] = ["-1", "-2"].map(|slice| {
        let gpu = if slice == "-1" { &devices[0] } else { &devices[devices.len() - 1] };
        (
            format!("{}{slice}", gpu["base_addr"].as_str().unwrap()),
            gpu["pipe_directory"].as_str().unwrap().to_owned(),
        )
    });
    platform.record("u-1", &group, &format!("{},{}", first.0, second.0));
    for (slice, pipe) in [first, second] {
        let mut program = platform.program_in(Path::new(&pipe), &group, &["hold", "600"], None);
        let client = Client::start(&mut program);
        platform.host.wait_until_listed(client.id());
        assert_eq!(known(&platform.listed(&client)), [slice.as_str(), "platform"]);
        let bound_to = || {
            let listed = platform.host.list().into_iter().find(|device| device["addr"] == slice.as_str());
            (listed.unwrap()["bound_to"] == "train-1/main").then_some(())
        };
        wait_for("the binding", bound_to);
        assert_eq!(known(&platform.listed(&client)), [slice.as_str(), "platform"]);
    }
}

/// In its own container, a tenant makes control groups and chooses environments. This does not change the slices of another
/// tenant.
#[test]
fn a_tenant_is_in_no_container_of_another_guest() {
    let test = "a_tenant_is_in_no_container_of_another_guest";
    let Some((platform, group)) = Platform::with(test, "") else { return };
    let Some(neighbours) = ContainerGroup::of_a_guest() else { unreachable!() };
    platform.record("u-1", &group, OWN);
    platform.record("u-2", &neighbours, NEIGHBOURS);
    let nested =
        ContainerGroup { id: neighbours.id.clone(), directory: group.directory.join(&neighbours.id) };
    fs::create_dir(&nested.directory).unwrap();
    let client = platform.client(&nested, &["hold", "600"], Some(NEIGHBOURS));
    assert_eq!(known(&platform.listed(&client)), [OWN, "platform"]);
}
