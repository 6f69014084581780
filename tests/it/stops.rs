//! Tests of yunion-mps-runc, which wraps a container runtime: it ends the GPU work of a container before the runtime signals
//! the container. In these tests the runtime is a script that only sends signals. The tests in e2e and in `pods` use real
//! runtimes.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::support::client::Client;
use crate::support::container::{ContainerGroup, NO_CONTAINER_GROUP};
use crate::support::host::{Host, binaries, signal_pid, succeeded, text};
use crate::support::neighbours::{Neighbours, assert_terminated, ended};
use crate::support::skip::{root_or_skip, skip};
use crate::support::wait::wait_for;

/// Plays runc: reads the PID of a container's first process from a file, and signals this process.
const RUNC: &str = r#"#!/bin/sh
here=$(dirname "$0")
printf '%s\n' "$*" >>"$here/calls"
while [ "${1#-}" != "$1" ]; do shift; done
command=$1; shift
while [ "${1#-}" != "$1" ]; do shift; done
pid=$(cat "$here/$1.pid" 2>/dev/null)
case $command in
# As the real ones, which find no process to signal.
kill) [ -d /proc/$pid ] && [ "$(cut -d ' ' -f 3 /proc/$pid/stat)" != Z ] || { echo "container not running" >&2; exit 1; } ;;
esac
case $command in
state) [ -n "$pid" ] && printf '{"id": "%s", "pid": %s}' "$1" "$pid" ;;
kill) kill -"${2#SIG}" "$pid" ;;
delete) kill -9 "$pid" ;;
*) printf '%s' "$LIMIT"; cat <&3; exit 7 ;;
esac
"#;

const ROUNDS: usize = 4;

/// The longest time for a command of yunion-mps-runc: 6 s to wait for the service, and as much for a busy machine.
const LONGEST: Duration = Duration::from_secs(12);

struct Scene {
    neighbours: Neighbours,
    folder: PathBuf,
}

impl Scene {
    /// Returns None without root, or if this machine does not let the test make containers.
    fn new(test: &str) -> Option<Self> {
        if !root_or_skip(test) {
            return None;
        }
        if ContainerGroup::new().is_none() {
            skip(test, NO_CONTAINER_GROUP);
            return None;
        }
        let neighbours = Neighbours::new();
        let folder = neighbours.host.path("runtime");
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("runc"), RUNC).unwrap();
        fs::set_permissions(folder.join("runc"), Permissions::from_mode(0o755)).unwrap();
        symlink(binaries().join("yunion-mpsctl"), folder.join("yunion-mps-runc")).unwrap();
        Some(Self { neighbours, folder })
    }

    fn host(&self) -> &Host {
        &self.neighbours.host
    }

    fn runtime(&self, name: &str, arguments: &[&str]) -> Command {
        let mut command = self.host().command(self.folder.join(name));
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", self.folder.display())).args(arguments);
        command
    }

    fn wrapped(&self, arguments: &[&str]) -> Output {
        self.runtime("yunion-mps-runc", arguments).output().unwrap()
    }

    fn container(&self, program: &Child) -> ContainerGroup {
        let container = ContainerGroup::new().unwrap();
        container.take(program.id(), "init");
        fs::write(self.folder.join(format!("{}.pid", container.id)), program.id().to_string()).unwrap();
        container
    }

    fn calls(&self) -> Vec<String> {
        let calls = fs::read_to_string(self.folder.join("calls")).unwrap_or_default();
        calls.lines().map(str::to_owned).collect()
    }
}

#[test]
fn a_container_that_is_stopped_leaves_its_neighbour_alive() {
    let Some(mut scene) = Scene::new("a_container_that_is_stopped_leaves_its_neighbour_alive") else {
        return;
    };
    let ways: [fn(&str) -> Vec<&str>; 4] = [
        |id| vec!["--root=/run/r", "--log=/dev/null", "kill", id, "15"],
        |id| vec!["kill", id, "SIGKILL"],
        |id| vec!["kill", "--all", id, "9"],
        |id| vec!["delete", "--force", id],
    ];
    for way in ways {
        for _ in 0..ROUNDS {
            let victim = scene.neighbours.victim();
            let container = scene.container(&victim);
            succeeded(&scene.wrapped(&way(&container.id)));
            // The signal may end the program before it prints its last line.
            let (status, said) = ended(victim);
            assert!(matches!(status, None | Some(3)), "{status:?} {said}");
            assert!(scene.neighbours.bystander_survives(), "{:?}", scene.calls());
        }
    }
    // Without yunion-mps-runc, the kill of a container harms the other client of the GPU.
    let victim = scene.neighbours.victim();
    let container = scene.container(&victim);
    succeeded(&scene.runtime("runc", &["kill", &container.id, "9"]).output().unwrap());
    ended(victim);
    assert!(!scene.neighbours.bystander_survives());
}

/// Before SIGTERM, yunion-mps-runc ends the GPU work of the container. It spares the first process if this process handles
/// SIGTERM.
#[test]
fn a_program_that_handles_the_signal_writes_its_checkpoint() {
    let Some(mut scene) = Scene::new("a_program_that_handles_the_signal_writes_its_checkpoint") else {
        return;
    };
    let checkpoint = scene.host().path("checkpoint");
    let mut train = scene.host().program_of("00:06.0-1", &["train", checkpoint.to_str().unwrap()]);
    let train = train.stdout(Stdio::piped()).spawn().unwrap();
    scene.neighbours.computes(train.id());
    let container = scene.container(&train);
    let worker = scene.neighbours.victim();
    container.take(worker.id(), "init/deeper");
    // SIGCONT ends no program. So yunion-mps-runc does not ask the service for anything.
    succeeded(&scene.wrapped(&["kill", &container.id, "CONT"]));
    assert_eq!(scene.calls(), [format!("kill {} CONT", container.id)]);
    succeeded(&scene.wrapped(&["kill", &container.id, "15"]));
    assert_terminated(worker);
    let (status, said) = ended(train);
    assert_eq!(status, Some(0), "{said}");
    assert!(fs::read_to_string(&checkpoint).unwrap().ends_with(" steps\n"));
    assert!(scene.neighbours.bystander_survives());
}

#[test]
fn everything_else_is_the_runtimes_own() {
    let Some(scene) = Scene::new("everything_else_is_the_runtimes_own") else { return };
    let descriptor = "exec 3<<E\nfrom descriptor 3\nE\nexec \"$0\" \"$@\"";
    let wrapper = scene.folder.join("yunion-mps-runc");
    let line = ["--root", "-kill", "create", "--bundle", "/kill", "kill"];
    let mut shell = scene.runtime("runc", &[]);
    let path = shell.get_envs().find(|(name, _)| *name == "PATH").unwrap().1.unwrap().to_owned();
    shell = Command::new("sh");
    shell.args(["-c", descriptor]).arg(&wrapper).args(line).env("PATH", path).env("LIMIT", "12 GiB ");
    let output = shell.output().unwrap();
    assert_eq!((output.status.code(), text(&output).as_str()), (Some(7), "12 GiB from descriptor 3\n"));
    assert_eq!(scene.calls(), [line.join(" ")]);
    // No container has the id x, so the runtime reports an error.
    let output = scene.wrapped(&["kill", "x", "9"]);
    assert!(!output.status.success());
    assert_eq!(scene.calls()[1..], ["state x", "kill x 9"]);
    // The runtime `none`, which the name of this link selects, does not exist.
    symlink(binaries().join("yunion-mpsctl"), scene.folder.join("yunion-mps-none")).unwrap();
    let output = scene.runtime("yunion-mps-none", &["kill", "x", "9"]).output().unwrap();
    assert!(text(&output).contains("none can't be executed: No such file"), "{}", text(&output));
    assert_eq!(output.status.code(), Some(1));
}

/// If the service does not run or does not answer, yunion-mps-runc still executes the runtime.
#[test]
fn no_stop_waits_for_a_service_that_is_away_or_hangs() {
    let Some(mut scene) = Scene::new("no_stop_waits_for_a_service_that_is_away_or_hangs") else { return };
    let environment = scene.host().environment_of("00:06.0-1");
    let stops = |scene: &Scene| {
        let mut victim = scene.host().program(&["hold", "600"]);
        let victim = victim.envs(environment.clone()).stdout(Stdio::piped()).spawn().unwrap();
        let container = scene.container(&victim);
        let began = Instant::now();
        succeeded(&scene.wrapped(&["kill", &container.id, "9"]));
        assert!(began.elapsed() < LONGEST, "{:?}", began.elapsed());
        let (status, said) = ended(victim);
        assert!(status.is_none() || said.contains("810"), "{status:?} {said}");
    };
    scene.host().signal(Signal::STOP);
    stops(&scene);
    scene.host().signal(Signal::CONT);
    stops(&scene);
    scene.host().signal(Signal::KILL);
    scene.neighbours.host.ended();
    stops(&scene);
    scene.neighbours.host.stop_bus();
    stops(&scene);
}

/// With a control daemon for each slice, a control daemon that hangs does not delay the stop of a container with another slice.
#[test]
fn a_control_daemon_that_hangs_holds_up_no_stop() {
    if !root_or_skip("a_control_daemon_that_hangs_holds_up_no_stop") {
        return;
    }
    let Some(container) = ContainerGroup::new() else {
        return skip("a_control_daemon_that_hangs_holds_up_no_stop", NO_CONTAINER_GROUP);
    };
    let mut host = Host::new("h200");
    host.configure("cuda_mps_topology: per_slice\n");
    host.start();
    let status = host.wait_for_state("ready");
    let of = |slice: &str| {
        let all = status["control_daemons"].as_array().unwrap();
        let one = all.iter().find(|one| one["pipe_directory"].as_str().unwrap().ends_with(slice)).unwrap();
        u32::try_from(one["pid"].as_u64().unwrap()).unwrap()
    };
    let hung = of("00_06.0-0");
    let mut command = host.program_of("00:06.0-1", &["long", "600"]);
    let victim = Client::start(command.stdout(Stdio::piped()));
    wait_for("the client", || host.listed(victim.id()));
    container.take(victim.id(), "");
    signal_pid(hung, Signal::STOP);
    let call = [
        "call",
        "io.yunion.Mps1",
        "/io/yunion/Mps1/Manager",
        "io.yunion.Mps1.Control",
        "ReleaseGroup",
        "ua{sv}",
        &victim.id().to_string(),
        "0",
    ]
    .map(str::to_owned);
    let answer = host.command("busctl").arg("--system").args(call).output().unwrap();
    signal_pid(hung, Signal::CONT);
    assert!(
        !answer.status.success() && text(&answer).contains("has not listed its clients"),
        "{}",
        text(&answer)
    );
    wait_for("the end of the client", || {
        let clients: Value = host.json(&["clients"])?;
        clients.as_array()?.iter().all(|one| one["pid"] != victim.id()).then_some(())
    });
}
