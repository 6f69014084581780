//! Tests the Go package in docs/host-agent, built with Debian's Go and godbus. On every board the package must read what the
//! service publishes and notice changes. It must reach the host's bus from a pod.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::client::Client;
use crate::support::container::{ContainerGroup, NO_CONTAINER_GROUP};
use crate::support::host::{Host, assert_has, binaries, signal_pid, text};
use crate::support::neighbours::{Neighbours, assert_terminated};
use crate::support::skip::{root_or_skip, skip};
use crate::support::wait::wait_for;

const PACKAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/host-agent");
const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/host-agent.md");

/// The directory of Debian's package golang-dbus-dev.
const GODBUS: &str = "/usr/share/gocode/src/github.com/godbus/dbus";

fn built(name: &str) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("host-agent");
    fs::create_dir_all(&directory).unwrap();
    directory.join(name)
}

fn succeeded(command: &mut Command) -> String {
    let output =
        command.output().unwrap_or_else(|error| panic!("{command:?}: {error}; scripts/deps.sh installs it"));
    assert!(output.status.success(), "{command:?}: {}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// Makes a `go` command in the package's directory. It uses Debian's godbus and no network.
fn go(arguments: &[&str]) -> Command {
    static MODULE: OnceLock<PathBuf> = OnceLock::new();
    let module = MODULE.get_or_init(|| {
        assert!(
            Path::new(GODBUS).exists(),
            "no {GODBUS}; scripts/deps.sh installs the Debian package golang-dbus-dev"
        );
        let module = built("go.mod");
        let required = fs::read_to_string(Path::new(PACKAGE).join("go.mod")).unwrap();
        fs::write(&module, format!("{required}\nreplace github.com/godbus/dbus/v5 => {GODBUS}\n")).unwrap();
        module
    });
    let mut command = Command::new("go");
    let (verb, rest) = arguments.split_first().unwrap();
    command.arg(verb).arg(format!("-modfile={}", module.display())).args(rest);
    without_network(command)
}

/// Makes a command run in the package's directory, without network and without files of the user who runs the tests.
fn without_network(mut command: Command) -> Command {
    command.current_dir(PACKAGE).env("GOCACHE", built("cache")).env("GOPATH", built("path"));
    command
        .envs([("GOFLAGS", "-mod=mod"), ("GOPROXY", "off")])
        .env_remove("GOWORK")
        .env_remove("GO111MODULE");
    command
}

/// Returns the path of `mps-agent`, which is built as docs/host-agent.md says for a machine without network.
fn agent() -> &'static Path {
    static AGENT: OnceLock<PathBuf> = OnceLock::new();
    AGENT.get_or_init(|| {
        let page = fs::read_to_string(PAGE).unwrap();
        let words = page.split("Without a network").nth(1).unwrap().split("\n## ").next().unwrap();
        let words: Vec<&str> = words.lines().filter_map(|line| line.strip_prefix("    ")).collect();
        assert_eq!(words.len(), 3, "{words:?}");
        let agent = built("mps-agent");
        let script = words.join("\n").replace("-o mps-agent", &format!("-o '{}'", agent.display()));
        let script = script.replace("/tmp/host-agent.mod", built("page.mod").to_str().unwrap());
        let mut shell = without_network(Command::new("sh"));
        // Without cgo, `mps-agent` also runs in the simulated pod. The root directory of this pod has no C library.
        succeeded(shell.args(["-euc", &script]).env("CGO_ENABLED", "0"));
        agent
    })
}

fn run(host: &Host, arguments: &[&str]) -> Output {
    host.command(agent()).args(arguments).output().unwrap()
}

fn printed(host: &Host, arguments: &[&str]) -> Value {
    serde_json::from_str(&succeeded(host.command(agent()).args(arguments))).unwrap()
}

#[test]
fn it_is_formatted_vetted_and_its_own_tests_pass() {
    assert_eq!(succeeded(Command::new("gofmt").args(["-l", PACKAGE])), "");
    succeeded(&mut go(&["vet", "./..."]));
    succeeded(&mut go(&["test", "./..."]));
}

/// `go test` compiles `example_test.go`. So this file must contain the Go code of the page.
#[test]
fn the_examples_of_the_page_are_compiled() {
    let page = fs::read_to_string(PAGE).unwrap();
    let example = fs::read_to_string(Path::new(PACKAGE).join("example_test.go")).unwrap();
    let shown: Vec<&str> =
        page.split("```go\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert_eq!(shown.len(), 3);
    for block in shown {
        assert!(example.contains(block), "{block}");
    }
}

#[test]
fn the_page_has_every_command_of_the_program() {
    let page = fs::read_to_string(PAGE).unwrap();
    let usage = text(&Command::new(agent()).output().unwrap());
    let commands: Vec<&str> = usage
        .lines()
        .map(|line| line.split("mps-agent ").nth(1).unwrap().split(' ').next().unwrap())
        .collect();
    assert_eq!(commands, ["probe", "watch", "config", "bind", "release"]);
    for command in commands {
        assert!(page.contains(&format!("    ./mps-agent {command} ")), "{command}");
    }
}

/// Checks that `mps-agent probe` prints exactly the published rows. Repeats the check if these change meanwhile.
#[track_caller]
fn assert_sees_what_is_published(host: &Host) -> Value {
    wait_for("nothing changes for a moment", || {
        let published = || json!({"slices": host.busctl("ListDevices"), "gpus": host.busctl("ListGpus")});
        let before = published();
        let seen = printed(host, &["probe"]);
        // A host agent without this package can run `yunion-mpsctl list --json`, which must print the same rows.
        let listed = json!({"slices": host.list(), "gpus": host.json(&["list", "--gpus"]).unwrap()});
        (before == published()).then(|| {
            assert_eq!(seen, before);
            assert_eq!(listed, before);
            seen
        })
    })
}

/// Removes the fields that differ from run to run or from host to host.
fn lasting(rows: &Value) -> Value {
    let mut rows = rows.clone();
    for row in rows.as_array_mut().unwrap() {
        let row = row.as_object_mut().unwrap();
        for key in ["clients", "memory_used", "overuse", "pipe_directory", "reason", "confirmed_memory_limit"]
        {
            row.remove(key);
        }
    }
    rows
}

fn every_value(board: &str) {
    let mut host = Host::new(board);
    host.start();
    host.wait_for_status("as ready as it gets", |status| {
        let served = |gpu: &Value| gpu["healthy"] == true || gpu["servable"] == false;
        ["ready", "degraded"].contains(&status["service"]["state"].as_str().unwrap())
            && status["gpus"].as_array().unwrap().iter().all(served)
    });
    let seen = assert_sees_what_is_published(&host);
    for (rows, file) in [("slices", "list.json"), ("gpus", "list-gpus.json")] {
        let golden = format!("{}/tests/golden/{board}/{file}", env!("CARGO_MANIFEST_DIR"));
        let golden: Value = serde_json::from_str(&fs::read_to_string(golden).unwrap()).unwrap();
        assert_eq!(lasting(&seen[rows]), lasting(&golden), "{board}: {rows}");
    }
    // If NVML can't read a GPU, the rows of the GPU's slices have fewer keys.
    let keys = |seen: &Value| seen["slices"][0].as_object().unwrap().len();
    host.plant("gpus/0/lost", "");
    assert!(host.call("Control.Reload").status.success());
    host.wait_for_status("a GPU without a UUID", |status| status["gpus"][0]["device_path"].is_null());
    assert!(keys(&assert_sees_what_is_published(&host)) < keys(&seen));
    host.clear("gpus/0/lost");
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn it_sees_every_value_of_the_p40() {
    every_value("tesla-p40");
}

#[test]
fn it_sees_every_value_of_the_h200() {
    every_value("h200");
}

#[test]
fn it_sees_every_value_of_eight_h200() {
    every_value("h200x8");
}

#[test]
fn it_sees_every_value_of_the_mixed_host() {
    every_value("mixed");
}

/// `mps-agent probe` prints the values in the guide of the platform Cloudpods. The rows of slices have the form that Cloudpods'
/// own host agent used before July 2026, and the rows of GPUs have the form that it uses now.
#[test]
fn both_shapes_are_the_platforms() {
    let mut host = Host::serving("tesla-p40");
    let seen = printed(&host, &["probe"]);
    let common = json!({
        "model": "Tesla P40", "vendor_device_id": "10de:1b38", "numa_node": -1, "detected_on_host": true,
        "device_path": "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400",
        "pcie_info": {
            "lane_width": 16, "throughput": "15.76 GB/s", "transfer_rate_per_lane": "8GT/s", "version": "3.0",
        },
        "mps_memory_total": 23040, "mps_memory_limit": 5760, "mps_thread_percentage": 25,
    });
    for (ordinal, slice) in seen["slices"].as_array().unwrap().iter().enumerate() {
        let addr = format!("00:06.0-{ordinal}");
        assert_has(slice, &json!({"addr": addr, "dev_type": "NVIDIA_MPS", "index": -1, "device_minor": -1}));
        assert_has(slice, &common);
    }
    let [gpu] = &seen["gpus"].as_array().unwrap()[..] else { panic!("{seen:#}") };
    let own = json!({
        "addr": "00:06.0", "dev_type": "GPU", "sharing_mode": "MPS", "virtual_num": 4, "hot_pluggable": false,
        "memory_size": 5760,
    });
    assert_has(gpu, &own);
    assert_has(gpu, &common);
    assert_eq!(host.stop().code(), Some(0));
}

struct Watch {
    process: Client,
    shown: PathBuf,
}

impl Watch {
    fn start(host: &Host) -> Self {
        let shown = host.path("shown");
        let mut command = host.command(agent());
        command.arg("watch").stdout(File::create(&shown).unwrap()).stderr(Stdio::inherit());
        Self { process: Client::start(&mut command), shown }
    }

    #[track_caller]
    fn wait(&self, what: &str, holds: impl Fn(&Value) -> bool) {
        wait_for(what, || {
            let shown = fs::read_to_string(&self.shown).unwrap();
            // `mps-agent` may not have completed the text after the last line feed.
            let last = shown.rsplit('\n').nth(1)?;
            holds(&serde_json::from_str(last).unwrap()).then_some(())
        });
    }

    fn end(mut self) {
        signal_pid(self.process.id(), Signal::TERM);
        assert_eq!(self.process.wait().unwrap().code(), Some(0));
    }
}

fn healthy(seen: &Value, number: usize) -> bool {
    let slices = seen["slices"].as_array().map_or(&[][..], Vec::as_slice);
    slices.len() == number && slices.iter().all(|slice| slice["healthy"] == true)
}

#[test]
fn it_follows_every_change_and_every_restart() {
    let mut host = Host::new("h200");
    let watch = Watch::start(&host);
    let not_running = "org.freedesktop.DBus.Error.ServiceUnknown";
    watch.wait("nobody is there yet", |seen| seen["error"] == not_running);
    host.start();
    watch.wait("the service has come", |seen| healthy(seen, 4));

    assert!(host.mpsctl(&["drain", "00:06.0-1"]).status.success());
    watch.wait("a drained slice", |seen| {
        let slice = &seen["slices"][1];
        slice["drained"] == true && slice["healthy"] == false && seen["slices"][0]["healthy"] == true
    });
    assert!(host.mpsctl(&["undrain", "00:06.0-1"]).status.success());
    watch.wait("no drained slice", |seen| healthy(seen, 4));

    host.devices(&["path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 2"]);
    assert!(host.call("Control.Reload").status.success());
    watch.wait("the new configuration", |seen| healthy(seen, 2) && seen["gpus"][0]["virtual_num"] == 2);

    assert_eq!(host.stop().code(), Some(0));
    watch.wait("the service has gone", |seen| seen["error"] == not_running);
    host.start();
    watch.wait("the service is back", |seen| healthy(seen, 2));

    // A drain causes only one D-Bus signal. If `mps-agent watch` missed this signal, it would show no drained slice.
    let drained = |seen: &Value| seen["slices"][0]["drained"] == true && seen["slices"][1]["healthy"] == true;
    assert!(host.mpsctl(&["drain", "00:06.0-0"]).status.success());
    watch.wait("a drained slice", drained);
    host.signal(Signal::KILL);
    host.ended();
    watch.wait("the service was killed", |seen| seen["error"] == not_running);
    host.start();
    watch.wait("the service is back once more", drained);

    host.stop_bus();
    watch.wait("no bus", |seen| seen["text"].as_str().is_some_and(|text| text.contains("no system bus")));
    host.restart_bus();
    watch.wait("the bus is back", drained);
    assert!(host.mpsctl(&["undrain", "00:06.0-0"]).status.success());
    watch.wait("a change after that", |seen| healthy(seen, 2));
    watch.end();
    assert_eq!(host.stop().code(), Some(0));
}

/// Returns the output of `mps-agent config` in the form of `yunion-mpsctl env --format json`, in which the variables have no
/// order.
fn config(host: &Host, names: &[&str]) -> Value {
    let arguments = [&["config"], names].concat();
    let mut config = printed(host, &arguments);
    let variables = config["environment"].as_array().unwrap().iter();
    let variables: serde_json::Map<String, Value> =
        variables.map(|pair| (pair["name"].as_str().unwrap().to_owned(), pair["value"].clone())).collect();
    config["environment"] = variables.into();
    config
}

#[test]
fn a_container_gets_what_the_service_says() {
    for (board, requests) in [
        ("tesla-p40", &[&["00:06.0-1"][..], &["00:06.0"]][..]),
        (
            "h200x8",
            &[&["1b:00.0-3"], &["1b:00.0-0", "2d:00.0-1"], &["GPU-d3816fa4-07be-4c2d-95a7-8e42c0d6b096"]],
        ),
    ] {
        let mut host = Host::serving(board);
        for names in requests {
            let said = host.mpsctl(&[&["env", "--format", "json"], *names].concat());
            assert!(said.status.success(), "{}", text(&said));
            let said: Value = serde_json::from_slice(&said.stdout).unwrap();
            assert_eq!(config(&host, names), said, "{names:?}");
        }
        for (names, complaint) in
            [("00:99.0-0", "there is no slice or GPU \"00:99.0-0\""), ("", "there is no slice or GPU \"\"")]
        {
            let refused = run(&host, &["config", names]);
            assert!(
                refused.status.code() == Some(1) && text(&refused).contains(complaint),
                "{}",
                text(&refused)
            );
        }
        assert_eq!(host.stop().code(), Some(0));
    }
}

#[test]
fn a_container_is_bound_to_a_slice() {
    let test = "a_container_is_bound_to_a_slice";
    if !root_or_skip(test) {
        return;
    }
    let Some(container) = ContainerGroup::new() else { return skip(test, NO_CONTAINER_GROUP) };
    let host = Host::serving("h200");
    let mut first = host.command("sleep").arg("600").spawn().unwrap();
    container.take(first.id(), "");
    let bind = |name: &str| run(&host, &["bind", &first.id().to_string(), name]);
    let bound = bind("00:06.0-1");
    assert_eq!(text(&bound).trim(), "[\"00:06.0-1\"]");
    let listed = host.list();
    assert_eq!(listed[1]["bound_to"], "mps-agent");
    let refused = text(&bind("00:06.0-9"));
    assert!(refused.contains("there is no slice or GPU"), "{refused}");
    first.kill().unwrap();
    first.wait().unwrap();
}

#[test]
fn releasing_a_container_spares_its_neighbours() {
    let mut scene = Neighbours::new();
    let Some(container) = ContainerGroup::new() else {
        skip("releasing_a_container_spares_its_neighbours", NO_CONTAINER_GROUP);
        return;
    };
    let victim = scene.victim();
    container.take(victim.id(), "init");
    let released = run(&scene.host, &["release", &container.id]);
    assert!(released.status.success(), "{}", text(&released));
    assert_terminated(victim);
    // The container has no client any more. A second release is no error.
    assert!(run(&scene.host, &["release", &container.id]).status.success());
    assert!(scene.bystander_survives());
    let refused = run(&scene.host, &["release", "4711"]);
    assert!(
        refused.status.code() == Some(1) && text(&refused).contains("is no container id"),
        "{}",
        text(&refused)
    );
}

/// Runs a script as PID 1 of a simulated host. The script has its own PID and mount namespaces, in which the D-Bus socket is at
/// its usual path.
fn as_pid_1_of_a_host(host: &Host, script: &str) -> Output {
    let bus = host.bus_address();
    let socket = bus.strip_prefix("unix:path=").unwrap();
    let place = "mount -t tmpfs tmpfs /run; mkdir -p /run/dbus; touch /run/dbus/system_bus_socket
        mount --bind \"$SOCKET\" /run/dbus/system_bus_socket
        mkdir -p /run/pod/proc /run/pod/run /run/pod/opt; cp \"$AGENT\" /run/pod/opt/mps-agent";
    let mut command = host.command("unshare");
    command.args(["--mount", "--propagation", "private", "--pid", "--fork", "--mount-proc", "sh", "-euc"]);
    command.arg(format!("{place}\n{script}"));
    command.env("SOCKET", socket).env("AGENT", agent()).env_remove("DBUS_SYSTEM_BUS_ADDRESS");
    command.output().unwrap()
}

#[test]
fn a_pod_with_the_hosts_pids_finds_the_bus_behind_pid_1() {
    if !root_or_skip("a_pod_with_the_hosts_pids_finds_the_bus_behind_pid_1") {
        return;
    }
    let mut host = Host::serving("h200");
    // The simulated pod has its own mount namespace, and a root directory that contains only `mps-agent`.
    let pod = |enter: &str| {
        as_pid_1_of_a_host(
            &host,
            &format!(
                "unshare --mount sh -euc 'mount --rbind /proc /run/pod/proc; exec {enter} /run/pod /opt/mps-agent probe'
                true"
            ),
        )
    };
    let seen = pod("chroot");
    assert!(seen.status.success(), "{}", text(&seen));
    assert!(healthy(&serde_json::from_slice(&seen.stdout).unwrap(), 4), "{}", text(&seen));
    // The kernel does not let an unprivileged pod use /proc/1/root.
    let refused = pod("setpriv --bounding-set=-all,+sys_chroot chroot");
    let complaint = "/proc/1/root/run/dbus/system_bus_socket: connect: permission denied";
    assert!(!refused.status.success() && text(&refused).contains(complaint), "{}", text(&refused));
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn a_pod_without_the_hosts_pids_finds_the_bus_in_a_mount() {
    if !root_or_skip("a_pod_without_the_hosts_pids_finds_the_bus_in_a_mount") {
        return;
    }
    let mut host = Host::serving("h200");
    let pod = |mount: &str| {
        as_pid_1_of_a_host(
            &host,
            &format!(
                "unshare --mount --pid --fork sh -euc 'mount -t proc proc /run/pod/proc; {mount}
                    exec chroot /run/pod /opt/mps-agent probe'; true"
            ),
        )
    };
    let alone = pod("");
    let complaint = text(&alone);
    for way in
        ["unix:path=/run/dbus/system_bus_socket: ", "unix:path=/proc/1/root/run/dbus/system_bus_socket: "]
    {
        assert!(!alone.status.success() && complaint.contains(way), "{complaint}");
    }
    let mounted = pod("mkdir /run/pod/run/dbus; mount --rbind /run/dbus /run/pod/run/dbus");
    assert!(mounted.status.success(), "{}", text(&mounted));
    assert!(healthy(&serde_json::from_slice(&mounted.stdout).unwrap(), 4));
    assert_eq!(host.stop().code(), Some(0));
}

/// The host agent of the platform Cloudpods runs in a pod. Cloudpods' executor runs commands on the host for the host agent,
/// and sets only two environment variables for a command. yunion-mpsctl needs no other variable to find the D-Bus socket.
#[test]
fn a_command_of_the_executor_needs_no_variable() {
    if !root_or_skip("a_command_of_the_executor_needs_no_variable") {
        return;
    }
    let mut host = Host::serving("h200");
    let program = binaries().join("yunion-mpsctl");
    let script = format!(
        "mount -t tmpfs tmpfs /opt; mkdir -p /opt/yunion/bin
        touch /opt/yunion/bin/yunion-mpsctl; mount --bind '{}' /opt/yunion/bin/yunion-mpsctl
        cd /; exec env -i PATH=/usr/bin:/usr/sbin:/usr/local/sbin:/usr/local/bin:/sbin:/bin:/opt/yunion/bin \
            LANG=en_US.UTF8 yunion-mpsctl list --json",
        program.display()
    );
    let listed = as_pid_1_of_a_host(&host, &script);
    assert!(listed.status.success(), "{}", text(&listed));
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!(lasting(&listed), lasting(&printed(&host, &["probe"])["slices"]));
    assert_eq!(host.stop().code(), Some(0));
}

/// Returns the code blocks of one language in guide.md, from its Chinese part and from its English part, without comments.
fn guide(language: &str) -> [String; 2] {
    let guide = fs::read_to_string(Path::new(PACKAGE).join("guide.md")).unwrap();
    let (chinese, english) = guide.split_once("## English").unwrap();
    let fence = format!("```{language}\n");
    [chinese, english].map(|text| {
        let blocks: Vec<&str> =
            text.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
        let lines = blocks.iter().flat_map(|block| block.lines()).filter(|line| !line.starts_with('#'));
        lines.map(|line| format!("{line}\n")).collect()
    })
}

#[test]
fn the_guide_for_the_platform_makes_a_host_serve() {
    let [chinese, english] = guide("bash");
    assert_eq!(chinese, english);
    let [files, same] = guide("yaml");
    assert_eq!(files, same);
    let (host_conf, devices) = files.split_once("devices:\n").unwrap();
    let mut host = Host::new("tesla-p40");
    host.configure(host_conf);
    host.plant("sysroot/etc/yunion/host_container_device.yml", &format!("devices:\n{devices}"));
    let checked = host.check();
    assert!(checked.status.success(), "{}", text(&checked));
    host.start();
    for command in english.lines().filter_map(|line| line.strip_prefix("yunion-mpsctl ")) {
        let words: Vec<&str> = command.split(' ').collect();
        // When the test runs the guide's first command, the service may not be on the bus yet. So the test repeats the command.
        wait_for(command, || host.mpsctl(&words).status.success().then_some(()));
    }
    assert_eq!(host.list().len(), 4);
    assert_eq!(host.stop().code(), Some(0));
}
