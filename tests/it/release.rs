//! Tests that the service ends the GPU work of one client without harm to other clients. The ended client is in a long CUDA
//! kernel. The bystander is another client on the same GPU and must survive.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::client::{describe, own_user};
use crate::support::container::{ContainerGroup, NO_CONTAINER_GROUP};
use crate::support::host::{
    Host, binaries, control_daemon, control_pid, process_state, signal_pid, succeeded, text,
};
use crate::support::neighbours::{Neighbours, TERMINATED, assert_terminated, bystander, ended};
use crate::support::skip::{root_or_skip, skip};
use crate::support::wait::wait_for;

const ROUNDS: usize = 4;

/// The part of a message that names the slice of each client except the bystander.
const SLICE: &str = ", slice 00:06.0-1";

/// Checks that the service had ended the GPU work of the command before `yunion-mpsctl run` passed the signal on to the
/// command. The command ends with CUDA's error, or by the signal if the signal arrives before the command has noticed the
/// error.
fn assert_released((status, said): (Option<i32>, String), signal: Signal) {
    assert!(!said.contains("which can cause a fault in other clients of the GPU"), "{signal:?}: {said}");
    match status {
        Some(3) => assert!(said.contains(TERMINATED), "{signal:?}: {said}"),
        _ => assert_eq!(status, Some(128 + signal.as_raw()), "{signal:?}: {said}"),
    }
}

fn failed(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{}", text(output));
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn a_signal_alone_takes_the_bystander_along() {
    for signal in [Signal::KILL, Signal::TERM, Signal::INT] {
        let mut scene = Neighbours::new();
        let mut victim = scene.victim();
        signal_pid(victim.id(), signal);
        victim.wait().unwrap();
        assert!(!scene.bystander_survives(), "{signal:?}: then the other tests here prove nothing");
        let mut said = String::new();
        scene.bystander.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(said.contains("an illegal memory access was encountered (700)"), "{said}");
    }
}

#[test]
fn terminate_by_pid_and_by_device() {
    let mut scene = Neighbours::new();
    let user = own_user();
    for _ in 0..ROUNDS {
        let victim = scene.victim();
        let pid = victim.id().to_string();
        let said = succeeded(&scene.host.mpsctl(&["terminate", &pid]));
        let ended = describe(&[(victim.id(), &user, SLICE)]);
        assert_eq!(said, format!("Process {pid} uses no GPU any more.\nEnded the GPU work of {ended}.\n"));
        let events = scene.host.json(&["events"]).unwrap();
        let event = events.as_array().unwrap().last().unwrap();
        assert_eq!((&event["ended_for"], &event["ended_clients"]), (&json!([pid]), &json!(ended)));
        let own = format!("GPU work ended on request: {}", ended.trim_start_matches("1 client: "));
        assert!(scene.host.log().contains(&own), "{own}\n{}", scene.host.log());
        assert_terminated(victim);
        assert!(scene.bystander_survives());

        // Only the named slices lose their GPU work. Slice 2 has no client.
        let (one, two) = (scene.victim(), scene.victim());
        let said =
            succeeded(&scene.host.mpsctl(&["terminate", "--device", "00:06.0-2", "--device", "00:06.0-1"]));
        let both = describe(&[(one.id(), &user, SLICE), (two.id(), &user, SLICE)]);
        let expected =
            format!("No process uses 00:06.0-2, 00:06.0-1 any more.\nEnded the GPU work of {both}.\n");
        assert_eq!(said, expected);
        assert_terminated(one);
        assert_terminated(two);
        assert!(scene.bystander_survives());
    }
}

#[test]
fn a_client_of_several_slices_is_of_each() {
    let mut scene = Neighbours::new();
    let mut command = scene.host.program_of("00:06.0-1", &["long", "600"]);
    command.stdout(Stdio::piped());
    let victim = command.env("YUNION_MPS_DEVICE", "00:06.0-3,00:06.0-2").spawn().unwrap();
    scene.computes(victim.id());
    succeeded(&scene.host.mpsctl(&["terminate", "--device", "00:06.0-1"]));
    assert!(scene.listed().contains(&victim.id()));
    succeeded(&scene.host.mpsctl(&["terminate", "--device", "0000:00:06.0-2"]));
    assert_terminated(victim);
    assert!(scene.bystander_survives());
}

#[test]
fn terminate_by_container() {
    let mut scene = Neighbours::new();
    let user = own_user();
    for _ in 0..ROUNDS {
        let (Some(container), Some(other)) = (ContainerGroup::new(), ContainerGroup::new()) else {
            skip("terminate_by_container", NO_CONTAINER_GROUP);
            return;
        };
        let (shallow, deep) = (scene.victim(), scene.victim());
        container.take(shallow.id(), "");
        container.take(deep.id(), "init/deeper");
        other.take(scene.bystander.id(), "init");
        let id = container.id.as_str();
        let said = succeeded(&scene.host.mpsctl(&["terminate", "--container", &id[..12]]));
        let inside = format!("{SLICE}, container {}", &id[..12]);
        let both = describe(&[(shallow.id(), &user, &inside), (deep.id(), &user, &inside)]);
        let expected = format!("No process in container {} uses a GPU any more.\n", &id[..12]);
        assert_eq!(said, format!("{expected}Ended the GPU work of {both}.\n"));
        assert_terminated(shallow);
        assert_terminated(deep);
        // The container has no client any more, and a second request succeeds too.
        succeeded(&scene.host.mpsctl(&["terminate", "--container", &id.to_uppercase()]));
        assert!(scene.bystander_survives());
        other.let_go(scene.bystander.id());
    }
    for wrong in ["", "0123456789a", "0123456789xyz"] {
        let complaint = failed(&scene.host.mpsctl(&["terminate", "--container", wrong]));
        assert!(complaint.contains("is no container id"), "{complaint}");
    }
    let complaint = failed(&scene.host.mpsctl(&["terminate", "--container", &"0".repeat(65)]));
    assert!(complaint.contains("a container id has at most 64 digits"), "{complaint}");
}

#[test]
fn an_id_of_two_containers_is_refused() {
    let mut scene = Neighbours::new();
    let (Some(one), Some(two)) = (ContainerGroup::new(), ContainerGroup::new()) else {
        skip("an_id_of_two_containers_is_refused", NO_CONTAINER_GROUP);
        return;
    };
    // The id of the second container differs from the first only in its last character.
    let alike = ContainerGroup {
        id: format!("{}{}", &one.id[..63], "f"),
        directory: one.directory.with_file_name(format!("docker-{}f.scope", &one.id[..63])),
    };
    fs::create_dir_all(alike.directory.join("init/deeper")).unwrap();
    drop(two);
    let (first, second) = (scene.victim(), scene.victim());
    one.take(first.id(), "");
    alike.take(second.id(), "");
    let complaint = failed(&scene.host.mpsctl(&["terminate", "--container", &one.id[..12]]));
    assert!(complaint.contains("is the beginning of several container ids"), "{complaint}");
    assert_eq!(scene.listed().len(), 3);
    succeeded(&scene.host.mpsctl(&["terminate", "--container", &one.id]));
    assert_terminated(first);
    succeeded(&scene.host.mpsctl(&["terminate", "--container", &alike.id]));
    assert_terminated(second);
    assert!(scene.bystander_survives());
}

/// A user's control group has a name that begins like the id of a container. `terminate` still accepts the container's short
/// id, since the service ignores control groups that root has not made.
#[test]
fn a_strangers_control_group_is_in_no_containers_way() {
    let mut scene = Neighbours::new();
    let Some(container) = ContainerGroup::new() else {
        skip("a_strangers_control_group_is_in_no_containers_way", NO_CONTAINER_GROUP);
        return;
    };
    let parent = container.directory.with_file_name(format!("delegated-{}.service", std::process::id()));
    let alike = ContainerGroup {
        id: format!("{}f", &container.id[..63]),
        directory: parent.join(format!("docker-{}f.scope", &container.id[..63])),
    };
    fs::create_dir_all(alike.directory.join("init/deeper")).unwrap();
    chown(&parent, Some(65534), Some(65534)).unwrap();
    let (victim, stranger) = (scene.victim(), scene.victim());
    container.take(victim.id(), "");
    alike.take(stranger.id(), "");
    succeeded(&scene.host.mpsctl(&["terminate", "--container", &container.id[..12]]));
    assert_terminated(victim);
    assert!(scene.listed().contains(&stranger.id()));
    // The container with the similar id has ended. So the short id is unambiguous now.
    succeeded(&scene.host.mpsctl(&["terminate", "--container", &alike.id[..12]]));
    assert_terminated(stranger);
    assert!(scene.bystander_survives());
    drop(alike);
    let _ = fs::remove_dir(parent);
}

/// A client with an unknown slice may have any slice. So `terminate --device` must not report that a slice has no client any
/// more.
#[test]
fn a_client_that_lost_its_environment_is_named() {
    let mut scene = Neighbours::new();
    let mut command = scene.host.program_of("00:06.0-1", &["long", "600"]);
    command.stdout(Stdio::piped());
    // The directory of a slice would tell the service the client's slice. The pipe directory of all slices does not.
    command.env("CUDA_MPS_PIPE_DIRECTORY", scene.host.path("mps/pipe"));
    let silent = command.env_remove("YUNION_MPS_DEVICE").spawn().unwrap();
    scene.computes(silent.id());
    let victim = scene.victim();
    for name in ["00:06.0-1", "0000:00:06.0-1", "00000000:00:06.0-1"] {
        let complaint = failed(&scene.host.mpsctl(&["terminate", "--device", name]));
        let who = format!(
            "may have one of the slices, and their GPU work goes on: PID {} of user {} (",
            silent.id(),
            own_user()
        );
        assert!(complaint.contains(&who) && complaint.contains("by PID or container"), "{complaint}");
    }
    assert_terminated(victim);
    succeeded(&scene.host.mpsctl(&["terminate", &silent.id().to_string()]));
    assert_terminated(silent);
    succeeded(&scene.host.mpsctl(&["terminate", "--device", "00:06.0-1"]));
    assert!(scene.bystander_survives());
}

#[test]
fn what_cannot_be_terminated_says_why() {
    let mut scene = Neighbours::new();
    let own = std::process::id().to_string();
    for pid in [own.as_str(), "0", "4294967295"] {
        let complaint = failed(&scene.host.mpsctl(&["terminate", pid]));
        let expected = format!(
            "process {pid} is not an MPS client on this host; yunion-mpsctl clients lists the clients; a \
             program with BYPASS in this list runs without MPS: end the program with kill"
        );
        assert_eq!(complaint, format!("yunion-mpsctl: {expected}\n"));
    }
    let complaint = failed(&scene.host.mpsctl(&["terminate", "--device", "00:07.0-1"]));
    assert!(complaint.contains("there is no slice or GPU \"00:07.0-1\""), "{complaint}");
    let complaint = failed(&scene.host.mpsctl(&["terminate", "--device", "00:06.0"]));
    assert!(complaint.contains("00:06.0 is a whole GPU"), "{complaint}");
    for arguments in [&["terminate"][..], &["terminate", "1", "--device", "00:06.0-1"], &["terminate", "-1"]]
    {
        assert_eq!(scene.host.mpsctl(arguments).status.code(), Some(2), "{arguments:?}");
    }
    assert!(scene.bystander_survives());
}

fn call(command: &mut Command, method: &str, arguments: &[&str]) -> String {
    command.args([
        "call",
        "--system",
        "--dest",
        "io.yunion.Mps1",
        "--object-path",
        "/io/yunion/Mps1/Manager",
    ]);
    command.args(["--method", &format!("io.yunion.Mps1.{method}")]).args(arguments);
    text(&command.output().unwrap())
}

/// A user other than root may not end GPU work, not even in the user's own programs: the control daemon waits for a program
/// that it disconnects, and meanwhile serves no other client.
#[test]
fn only_root_may_end_gpu_work() {
    if !root_or_skip("only_root_may_end_gpu_work") {
        return;
    }
    let mut scene = Neighbours::new();
    let victim = scene.user_victim();
    let own = victim.id().to_string();
    let bystander = scene.bystander.id().to_string();
    for (method, arguments) in [
        ("Manager.TerminateClient", &[own.as_str()][..]),
        ("Manager.TerminateClient", &[&bystander]),
        ("Control.ReleaseDevices", &["['00:06.0-0']"]),
        ("Control.ReleaseContainer", &["0123456789ab"]),
        ("Control.Apply", &["true"]),
        ("Control.RestartServer", &["00:06.0"]),
    ] {
        let mut gdbus = scene.host.command_as_member("gdbus");
        let refusal = call(&mut gdbus, method, arguments);
        assert!(
            refusal.contains("GDBus.Error:org.freedesktop.DBus.Error.AccessDenied: "),
            "{method}: {refusal}"
        );
    }
    for arguments in [&["terminate", "--device", "00:06.0-0"][..], &["terminate", &own]] {
        let refused =
            scene.host.command_as_member(binaries().join("yunion-mpsctl")).args(arguments).output().unwrap();
        assert!(failed(&refused).starts_with("yunion-mpsctl: only root may "), "{refused:?}");
    }
    assert!(scene.listed().contains(&victim.id()));
    succeeded(&scene.host.mpsctl(&["terminate", &own]));
    assert_terminated(victim);
    assert!(scene.bystander_survives());
}

#[test]
fn servers_are_named_by_their_gpus() {
    let scene = Neighbours::new();
    let refusal = call(&mut scene.host.command("gdbus"), "Control.RestartServer", &["00:07.0"]);
    assert!(
        refusal.contains("io.yunion.Mps1.Error.NoSuchDevice: there is no slice or GPU \"00:07.0\""),
        "{refusal}"
    );
}

/// `RestartServer` restarts a server only if the server has no clients.
#[test]
fn a_server_is_restarted_between_clients() {
    let mut scene = Neighbours::new();
    let restart = || call(&mut scene.host.command("gdbus"), "Control.RestartServer", &["00:06.0-1"]);
    let server = |status: &Value| status["control_daemons"][0]["servers"][0].as_u64();
    let before = server(&scene.host.wait_for_state("ready")).unwrap();
    let refusal = restart();
    assert!(
        refusal.contains(
            "io.yunion.Mps1.Error.Busy: the server can't be replaced while the control daemon has 1 client"
        ),
        "{refusal}"
    );
    scene.bystander.kill().unwrap();
    scene.bystander.wait().unwrap();
    wait_for("no client", || scene.listed().is_empty().then_some(()));
    assert_eq!(restart(), "()\n");
    let after = scene.host.wait_for_status("another server", |status| {
        status["service"]["state"] == "ready" && server(status).is_some_and(|server| server != before)
    });
    assert_eq!(after["control_daemons"][0]["starts"], 1);
}

/// After its GPU work was ended, a program stays a client until it calls CUDA again. `terminate` does not wait for this call,
/// and a later kill of the program harms no other client.
#[test]
fn a_client_that_stays_is_done_with() {
    let mut scene = Neighbours::new();
    let mut staying = scene.host.program_of("00:06.0-1", &["hold", "600", "--stay"]);
    let staying = staying.stdout(Stdio::piped()).spawn().unwrap();
    scene.computes(staying.id());
    succeeded(&scene.host.mpsctl(&["terminate", "--device", "00:06.0-1"]));
    succeeded(&scene.host.mpsctl(&["terminate", "--device", "00:06.0-1"]));
    // `terminate` sends no signal to the client. So the client's process still sleeps.
    wait_for("it sleeps on", || (process_state(staying.id()) == Some('S')).then_some(()));
    signal_pid(staying.id(), Signal::KILL);
    assert!(ended(staying).1.contains(TERMINATED));
    assert!(scene.bystander_survives());
}

/// A control daemon waits for a client that it terminates, and answers no other caller meanwhile. A tenant could stop the
/// client by SIGSTOP, so the service sends SIGCONT to the client.
#[test]
fn a_client_that_is_stopped_holds_up_nobody() {
    let mut scene = Neighbours::new();
    for _ in 0..ROUNDS {
        let victim = scene.victim();
        signal_pid(victim.id(), Signal::STOP);
        wait_for("a stopped process", || (process_state(victim.id()) == Some('T')).then_some(()));
        succeeded(&scene.host.mpsctl(&["terminate", &victim.id().to_string()]));
        assert_terminated(victim);
        assert!(scene.host.json(&["list"]).is_some());
    }
    assert!(scene.bystander_survives());
}

/// A client that a debugger has stopped can't be continued by a signal, and a tenant may start such a debugger. A request to
/// end the client's GPU work must not block other callers.
#[test]
fn a_client_that_a_debugger_holds_holds_up_nobody() {
    let mut scene = Neighbours::new();
    let victim = scene.victim();
    let pid = victim.id().to_string();
    let debugger = scene.host.debugger(victim.id());
    let terminate =
        scene.ctl(&["terminate", &pid]).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    wait_for("the refusal", || {
        scene.host.log().contains("can't be continued: the process stays stopped").then_some(())
    });
    assert!(scene.listed().contains(&victim.id()));
    assert!(scene.host.json(&["clients"]).is_some());
    debugger.end();
    assert_eq!(ended(terminate).0, Some(0));
    assert_terminated(victim);
    assert!(scene.bystander_survives());
}

const STOP_AGAIN_AND_AGAIN: &str = "import os, signal, sys, time\n\
    try:\n\
    \x20   while True:\n\
    \x20       os.kill(int(sys.argv[1]), signal.SIGSTOP)\n\
    \x20       time.sleep(0.0003)\n\
    except ProcessLookupError:\n\
    \x20   pass\n";

/// A tenant's program stops the client again and again. The service continues the client until the control daemon has
/// terminated it.
#[test]
fn a_client_that_is_stopped_again_and_again_holds_up_nobody() {
    let mut scene = Neighbours::new();
    let mut longest = Duration::ZERO;
    for _ in 0..ROUNDS {
        let victim = scene.victim();
        let pid = victim.id().to_string();
        let mut companion = scene.host.command("/usr/bin/python3");
        let mut companion = companion.args(["-c", STOP_AGAIN_AND_AGAIN, &pid]).spawn().unwrap();
        wait_for("a stopped process", || (process_state(victim.id()) == Some('T')).then_some(()));
        let mut terminate = scene.ctl(&["terminate", &pid]);
        let mut terminate = terminate.stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        while terminate.try_wait().unwrap().is_none() {
            let begun = Instant::now();
            scene.listed();
            longest = longest.max(begun.elapsed());
        }
        let (status, said) = ended(terminate);
        companion.kill().unwrap();
        companion.wait().unwrap();
        signal_pid(victim.id(), Signal::CONT);
        assert_eq!(status, Some(0), "{said}");
        assert_terminated(victim);
    }
    println!("a client stopped every 300 us: the control daemon was away for {longest:?} at most");
    assert!(longest < Duration::from_secs(5), "{longest:?}");
    assert!(scene.bystander_survives());
}

/// A control group that can freeze its processes, as `docker pause` does.
struct Freezer {
    group: PathBuf,
    file: &'static str,
    states: [&'static str; 2],
}

impl Freezer {
    /// Makes a [`Freezer`] in each hierarchy of this machine that can freeze processes.
    fn all() -> Vec<Self> {
        let kinds = [
            ("/sys/fs/cgroup/unified", "cgroup.freeze", ["0", "1"]),
            ("/sys/fs/cgroup", "cgroup.freeze", ["0", "1"]),
            ("/sys/fs/cgroup/freezer", "freezer.state", ["THAWED", "FROZEN"]),
        ];
        let made = kinds.into_iter().filter_map(|(root, file, states)| {
            let group = Path::new(root).join(format!("mps-test-{}-frozen", std::process::id()));
            // Without a hierarchy at `root`, `create_dir_all` would make a plain directory there.
            let is_root = Path::new(root).join("cgroup.procs").exists();
            if !is_root || fs::create_dir_all(group.join("deeper")).is_err() {
                return None;
            }
            let freezer = Self { group, file, states };
            freezer.group.join(file).exists().then_some(freezer)
        });
        made.collect()
    }

    fn freeze(&self, pid: u32) {
        fs::write(self.group.join("deeper/cgroup.procs"), pid.to_string()).unwrap();
        fs::write(self.group.join(self.file), self.states[1]).unwrap();
        wait_for("it is frozen", || self.is_frozen().then_some(()));
    }

    fn is_frozen(&self) -> bool {
        let said = |file: &str| fs::read_to_string(self.group.join(file)).unwrap_or_default();
        said("cgroup.events").contains("frozen 1") || said("freezer.state").trim() == "FROZEN"
    }

    fn thaw(&self) {
        fs::write(self.group.join(self.file), self.states[0]).unwrap();
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        self.thaw();
        let removed = || fs::remove_dir(self.group.join("deeper")).and_then(|()| fs::remove_dir(&self.group));
        // A process that is ending is in its control group for another moment.
        for _ in 0..100 {
            if removed().is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A paused container is frozen: its processes do not have the state of stopped processes, and no signal continues them. The
/// service thaws the container to end its GPU work, and then freezes it again.
#[test]
fn a_client_in_a_frozen_control_group_holds_up_nobody() {
    if !root_or_skip("a_client_in_a_frozen_control_group_holds_up_nobody") {
        return;
    }
    let freezers = Freezer::all();
    if freezers.is_empty() {
        skip("a_client_in_a_frozen_control_group_holds_up_nobody", "no control group can be frozen here");
        return;
    }
    let mut scene = Neighbours::new();
    for freezer in freezers {
        println!("{}", freezer.group.display());
        let victim = scene.user_victim();
        let pid = victim.id().to_string();
        freezer.freeze(victim.id());
        assert!(freezer.is_frozen() && scene.listed().contains(&victim.id()));
        succeeded(&scene.host.mpsctl(&["terminate", &pid]));
        assert!(freezer.is_frozen(), "it is not frozen any more");
        assert!(scene.host.json(&["clients"]).is_some());
        freezer.thaw();
        assert_terminated(victim);
        assert!(scene.bystander_survives());
    }
}

/// A Python program that calls `TerminateClient` for one process all the time and reads no answers. It prints a line after its
/// first hundred calls.
const FLOOD: &str = r#"
import os, socket, struct, sys, time
address, pid, count = sys.argv[1].removeprefix("unix:path="), int(sys.argv[2]) or os.getpid(), int(sys.argv[3])
bus = socket.socket(socket.AF_UNIX)
bus.connect(address)
bus.sendall(b"\0AUTH EXTERNAL " + str(os.getuid()).encode().hex().encode() + b"\r\n")
assert bus.recv(200).startswith(b"OK")
bus.sendall(b"BEGIN\r\n")

def call(serial, flags, fields, body=b""):
    array = b""
    for code, kind, text in fields:
        array += bytes(-len(array) % 8) + bytes([code, 1]) + kind + b"\0"
        text = text.encode()
        array += bytes([len(text)]) if kind == b"g" else bytes(-len(array) % 4) + struct.pack("<I", len(text))
        array += text + b"\0"
    head = struct.pack("<cBBBIII", b"l", 1, flags, 1, len(body), serial, len(array)) + array
    return head + bytes(-len(head) % 8) + body

hello = [(1, b"o", "/org/freedesktop/DBus"), (2, b"s", "org.freedesktop.DBus"), (3, b"s", "Hello"),
         (6, b"s", "org.freedesktop.DBus")]
bus.sendall(call(1, 0, hello))
assert bus.recv(1000)
terminate = [(1, b"o", "/io/yunion/Mps1/Manager"), (2, b"s", "io.yunion.Mps1.Manager"), (3, b"s", "TerminateClient"),
             (6, b"s", "io.yunion.Mps1"), (8, b"g", "u")]
for number in range(count):
    bus.sendall(call(2 + number, 1, terminate, struct.pack("<I", pid)))
    if number > 500:
        time.sleep(0.002)
    if number == 100:
        print("flows", flush=True)
print("sent", flush=True)
sys.stdin.read()
"#;

/// Starts `FLOOD` as a user other than root, for the process `pid` or, with 0, for the process of `FLOOD` itself.
fn flood(host: &Host, pid: u32) -> Child {
    let mut python = host.command_as_member("/usr/bin/python3");
    python.args(["-c", FLOOD, &host.bus_address(), &pid.to_string(), "8000"]);
    let mut python = python.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut flows = [0; 6];
    python.stdout.as_mut().unwrap().read_exact(&mut flows).unwrap();
    assert_eq!(&flows, b"flows\n");
    python
}

#[test]
fn a_flood_of_terminations_holds_up_neither_supervision_nor_root() {
    if !root_or_skip("a_flood_of_terminations_holds_up_neither_supervision_nor_root") {
        return;
    }
    let mut scene = Neighbours::new();
    let theirs = scene.bystander.id();
    for (whose, pid) in [("its own", 0), ("root's", theirs)] {
        let victim = scene.victim();
        let mut flooding = flood(&scene.host, pid);
        let begun = Instant::now();
        assert!(scene.host.json(&["clients"]).is_some());
        let listed = begun.elapsed();
        let begun = Instant::now();
        succeeded(&scene.host.mpsctl(&["terminate", &victim.id().to_string()]));
        let terminated = begun.elapsed();
        let status = scene.host.json(&["status"]).unwrap();
        let begun = Instant::now();
        signal_pid(control_pid(&status), Signal::KILL);
        scene.host.wait_for_status("another control daemon", |now| {
            now["service"]["state"] == "ready" && control_daemon(now)["pid"] != control_daemon(&status)["pid"]
        });
        let served = begun.elapsed();
        println!(
            "a user's flood for {whose} process: root's clients {listed:?}, root's terminate {terminated:?}, \
             control daemon killed and served again {served:?}"
        );
        flooding.kill().unwrap();
        flooding.wait().unwrap();
        assert_terminated(victim);
        for (what, took) in [("clients", listed), ("terminate", terminated), ("served again", served)] {
            assert!(took < Duration::from_secs(10), "{what}: {took:?}");
        }
        let _ = scene.bystander.wait();
        scene.bystander = bystander(&scene.host);
        scene.computes(scene.bystander.id());
    }
}

/// A control daemon outlives the service that has started it. The next service does not need this control daemon, or does not
/// even know it from the state file. A request to end the GPU work of its client must still reach this control daemon.
#[test]
fn control_daemons_that_do_not_serve_as_planned_are_asked_too() {
    for forgotten in [false, true] {
        let mut scene = Neighbours::new();
        let victim = scene.victim();
        scene.host.signal(Signal::KILL);
        scene.host.ended();
        if forgotten {
            fs::remove_file(scene.host.path("run/state.json")).unwrap();
        } else {
            scene.host.configure("cuda_mps_topology: per_gpu");
        }
        scene.host.start();
        let reason = if forgotten {
            "that this service has not started"
        } else {
            "this control daemon is no longer needed"
        };
        scene.host.wait_for_status(reason, |status| {
            let daemons = status["control_daemons"].as_array().unwrap();
            daemons.iter().any(|one| one["reason"].as_str().unwrap().contains(reason))
        });
        if !forgotten {
            let clients = scene.host.json(&["clients"]).unwrap().to_string();
            assert!(clients.contains(&victim.id().to_string()), "{clients}");
        }
        succeeded(&scene.host.mpsctl(&["terminate", &victim.id().to_string()]));
        assert_terminated(victim);
        assert!(scene.bystander.try_wait().unwrap().is_none());
    }
}

#[test]
fn a_control_daemon_that_hangs_holds_up_nobody_else() {
    let mut scene = Neighbours::new();
    scene.host.wait_for_state("ready");
    let victim = scene.victim();
    scene.host.plant("mps/fault/front-end-hangs", "");
    let pid = victim.id().to_string();
    let ways = [&["terminate", pid.as_str()][..], &["terminate", "--device", "00:06.0-1"]];
    let attempt = |way: &[&str]| {
        let mut command = scene.ctl(way);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut attempts = ways.map(attempt);
    // The service's loop handles reloads and requests to end GPU work. The reload is answered, so the pending requests do not
    // block the loop.
    assert!(scene.host.json(&["list"]).is_some());
    succeeded(&scene.host.mpsctl(&["reload"]));
    let pending =
        attempts.iter_mut().map(|attempt| attempt.try_wait().unwrap()).filter(Option::is_none).count();
    assert!(pending > 0, "the loop was held up");
    for attempt in attempts {
        let (status, said) = ended(attempt);
        assert_eq!(status, Some(1), "{said}");
        // Commands to a control daemon are sent one at a time, each with a limit of 5 s, and its supervisor sends commands too.
        // So the last request may time out before its command is sent.
        let silent =
            ["did not answer `get_server_list` within 5 s", "did not get its turn at the control daemon"];
        assert!(silent.iter().any(|reason| said.contains(reason)), "{said}");
    }
    scene.host.clear("mps/fault/front-end-hangs");
    succeeded(&scene.host.mpsctl(&["terminate", "--device", "00:06.0-1"]));
    assert_terminated(victim);
    assert!(scene.bystander_survives());
}

#[test]
fn run_ends_gpu_work_before_it_passes_a_signal_on() {
    let mut scene = Neighbours::new();
    for signal in [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT] {
        for _ in 0..ROUNDS {
            let run = scene.run(&["cuda-client", "long", "600"]);
            scene.another_computes();
            signal_pid(run.id(), signal);
            assert_released(ended(run), signal);
            assert!(scene.bystander_survives(), "{signal:?}");
        }
    }
}

#[test]
fn run_finds_all_that_the_command_has_started() {
    let mut scene = Neighbours::new();
    for script in [
        "trap 'echo signalled; exit 9' TERM; cuda-client long 600; while :; do sleep 0.01; done",
        "trap 'echo signalled; exit 9' TERM; setsid -w cuda-client long 600; while :; do sleep 0.01; done",
        // The subshell ends at once. So the client's parent is no longer a process of the command.
        "trap 'echo signalled; exit 9' TERM; (cuda-client long 600 &); while :; do sleep 0.01; done",
    ] {
        for _ in 0..ROUNDS {
            let run = scene.run(&["sh", "-c", script]);
            scene.another_computes();
            signal_pid(run.id(), Signal::TERM);
            let (status, said) = ended(run);
            assert!(
                said.contains("signalled")
                    && !said.contains("which can cause a fault in other clients of the GPU"),
                "{script}: {said}"
            );
            assert_eq!(status, Some(9), "{script}: {said}");
            // A client in the process group of the command gets the signal too, which may end the client before its last line.
            // `setsid` starts the client in another process group.
            assert!(said.contains(TERMINATED) || !script.contains("setsid"), "{script}: {said}");
            assert!(scene.bystander_survives(), "{script}");
        }
    }
}

/// The kernel cuts this name inside a character. So /proc/PID/stat and /proc/PID/status of the program are not valid UTF-8.
const CUT_NAME: &str = "x训练任务模型";

fn under_cut_name(host: &Host, program: &Path) -> String {
    let named = host.path(CUT_NAME);
    std::os::unix::fs::symlink(program, &named).unwrap();
    named.display().to_string()
}

fn has_cut_name(pid: u32) -> bool {
    fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| std::str::from_utf8(&name).is_err())
}

#[test]
fn run_knows_a_client_by_any_name() {
    let mut scene = Neighbours::new();
    let client = under_cut_name(&scene.host, &scene.host.path("bin/cuda-client"));
    for signal in [Signal::INT, Signal::TERM] {
        for _ in 0..ROUNDS {
            let run = scene.run(&["sh", "-c", &format!("{client} long 600; exit 3")]);
            let victim = scene.another_computes();
            assert!(has_cut_name(victim), "then this proves nothing");
            signal_pid(run.id(), signal);
            assert_released(ended(run), signal);
            assert!(scene.bystander_survives(), "{signal:?}");
        }
    }
}

/// SIGUSR1 reaches a command that handles it, and the command runs on. A name that is cut inside a character must not prevent
/// this.
#[test]
fn run_passes_a_users_signal_on_by_any_name() {
    const SCRIPT: &str = "trap 'echo told' USR1; cuda-client long 600 & while :; do sleep 0.01; done";
    let mut scene = Neighbours::new();
    let shell = under_cut_name(&scene.host, Path::new("/bin/sh"));
    let mut run = scene.run(&[&shell, "-c", SCRIPT]);
    let victim = scene.another_computes();
    let commands = || fs::read_to_string(format!("/proc/{0}/task/{0}/children", run.id())).unwrap();
    let command: u32 = wait_for("the command", || commands().split_whitespace().next()?.parse().ok());
    assert!(has_cut_name(command), "then this proves nothing");
    signal_pid(run.id(), Signal::USR1);
    let mut told = [0; 5];
    run.stdout.as_mut().unwrap().read_exact(&mut told).unwrap();
    assert_eq!(&told, b"told\n");
    assert!(scene.listed().contains(&victim), "its GPU work was ended");
    signal_pid(run.id(), Signal::TERM);
    assert_released(ended(run), Signal::TERM);
    assert!(scene.bystander_survives());
}

#[test]
fn run_passes_signals_on_when_the_daemon_does_not_answer() {
    const WARNING: &str = "the command gets the signal while its GPU work may go on, which can cause a fault \
                           in other clients of the GPU: ";
    let one = "trap 'end=7' INT; echo up; while test -z $end; do sleep 0.01; done; exit $end";
    let both = "trap 'int=7' INT; trap 'term=1; echo TERM' TERM; echo up; \
                until test \"$int$term\" = 71; do sleep 0.01; done; exit $int";
    let started = |scene: &Neighbours, script: &str| {
        let mut run = scene.run(&["sh", "-c", script]);
        let mut up = [0; 3];
        run.stdout.as_mut().unwrap().read_exact(&mut up).unwrap();
        assert_eq!(&up, b"up\n");
        run
    };
    let mut scene = Neighbours::new();
    // The service hangs. `run` waits 5 s for its answer, and then passes the signal on.
    let run = started(&scene, one);
    signal_pid(scene.host.pid(), Signal::STOP);
    signal_pid(run.id(), Signal::INT);
    let (status, said) = ended(run);
    assert_eq!(status, Some(7), "{said}");
    assert!(said.contains(&format!("{WARNING}the GPU work did not end within 5 s")), "{said}");
    // After a second signal, `run` passes both signals on at once. The command may get them in any order.
    signal_pid(scene.host.pid(), Signal::CONT);
    let run = started(&scene, both);
    signal_pid(scene.host.pid(), Signal::STOP);
    signal_pid(run.id(), Signal::TERM);
    signal_pid(run.id(), Signal::INT);
    let (status, said) = ended(run);
    assert_eq!(status, Some(7), "{said}");
    assert!(said.contains("TERM") && !said.contains(WARNING), "{said}");
    signal_pid(scene.host.pid(), Signal::CONT);
    let run = started(&scene, one);
    scene.host.signal(Signal::KILL);
    scene.host.ended();
    signal_pid(run.id(), Signal::INT);
    let (status, said) = ended(run);
    assert_eq!(status, Some(7), "{said}");
    assert!(said.contains(&format!("{WARNING}yunion-mps-daemon is not running")), "{said}");
}

#[test]
fn run_leaves_ignored_signals_ignored() {
    let scene = Neighbours::new();
    let mut command = scene.host.command("nohup");
    command.arg(binaries().join("yunion-mpsctl")).args([
        "run",
        "00:06.0-1",
        "--",
        "grep",
        "SigIgn",
        "/proc/self/status",
    ]);
    let said = succeeded(&command.output().unwrap());
    let mask = u64::from_str_radix(said.trim().rsplit_once('\t').unwrap().1, 16).unwrap();
    assert_eq!(mask & 1, 1, "SIGHUP reaches the command: {said}");
}

/// A terminal with a foreground program. A test types by writing to `keyboard`.
struct Terminal {
    python: Child,
    keyboard: ChildStdin,
}

impl Terminal {
    fn run(scene: &Neighbours, command: &[&str]) -> Self {
        let program =
            "import os, pty, sys\nsys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])) & 255)";
        let mut python = scene.host.command("/usr/bin/python3");
        python
            .args(["-c", program])
            .arg(binaries().join("yunion-mpsctl"))
            .args(["run", "00:06.0-1", "--"])
            .args(command);
        let mut python = python.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let keyboard = python.stdin.take().unwrap();
        Self { python, keyboard }
    }

    fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until yunion-mpsctl is the foreground program, and returns its PID.
    fn foreground(&self) -> u32 {
        let python = self.python.id();
        wait_for("a program on the terminal", || {
            let children = fs::read_to_string(format!("/proc/{python}/task/{python}/children")).ok()?;
            children.split_whitespace().next()?.parse().ok()
        })
    }

    fn ended(self) -> (Option<i32>, String) {
        // The end of the terminal's input would end the program. So the input stays open until the program has ended.
        let Self { python, keyboard } = self;
        let ended = ended(python);
        drop(keyboard);
        ended
    }
}

#[test]
fn ctrl_c_ends_gpu_work_first() {
    let mut scene = Neighbours::new();
    // `\x03` is Ctrl-C, and `\x1c` is Ctrl-\.
    for (key, signal) in [("\x03", Signal::INT), ("\x1c", Signal::QUIT)] {
        for _ in 0..ROUNDS {
            let mut terminal = Terminal::run(&scene, &["cuda-client", "long", "600"]);
            scene.another_computes();
            terminal.press(key);
            assert_released(terminal.ended(), signal);
            assert!(scene.bystander_survives());
        }
    }
}

#[test]
fn a_terminal_that_goes_ends_gpu_work_first() {
    let mut scene = Neighbours::new();
    for _ in 0..ROUNDS {
        let mut terminal = Terminal::run(&scene, &["cuda-client", "long", "600"]);
        let victim = scene.another_computes();
        terminal.python.kill().unwrap();
        terminal.python.wait().unwrap();
        wait_for("the client ends", || process_state(victim).is_none_or(|state| state == 'Z').then_some(()));
        assert!(scene.bystander_survives());
    }
}

#[test]
fn ctrl_z_stops_both_and_both_continue() {
    let mut scene = Neighbours::new();
    let mut terminal = Terminal::run(&scene, &["cuda-client", "long", "600"]);
    let victim = scene.another_computes();
    let run = terminal.foreground();
    for _ in 0..ROUNDS {
        terminal.press("\x1a");
        for pid in [run, victim] {
            wait_for("it stops", || (process_state(pid) == Some('T')).then_some(()));
        }
        signal_pid(run, Signal::CONT);
        for pid in [run, victim] {
            wait_for("it continues", || (process_state(pid) == Some('S')).then_some(()));
        }
    }
    terminal.press("\x03");
    assert_released(terminal.ended(), Signal::INT);
    assert!(scene.bystander_survives());
}

#[test]
fn the_command_reads_from_its_terminal_and_changes_it() {
    let scene = Neighbours::new();
    let script = "stty -echo && test -t 0 && echo ask && read -r line && stty echo && echo \"got $line\"";
    let mut terminal = Terminal::run(&scene, &["sh", "-c", script]);
    let mut asked = [0; 5];
    terminal.python.stdout.as_mut().unwrap().read_exact(&mut asked).unwrap();
    assert_eq!(&asked, b"ask\r\n");
    terminal.press("hello\n");
    assert_eq!(terminal.ended(), (Some(0), "got hello\r\n".to_owned()));
}
