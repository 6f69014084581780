//! The directories of slices: a container that has nothing else is served with its limits, whatever happens to the
//! control daemon.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::host::{Host, binaries, control_daemon, control_pid, signal_pid, text};
use crate::support::skip::root_or_skip;
use crate::support::wait::wait_for;

/// The directory of a slice on the host.
fn directory_of(host: &Host, slice: &str) -> PathBuf {
    let container = host.container_of(slice);
    let mounts = container["mounts"].as_array().unwrap();
    assert_eq!(mounts.len(), 1, "{container}");
    assert_eq!(mounts[0]["container"], container["environment"]["CUDA_MPS_PIPE_DIRECTORY"]);
    assert_eq!(mounts[0]["read_only"], true);
    mounts[0]["host"].as_str().unwrap().into()
}

fn inode(path: &Path) -> Option<u64> {
    fs::symlink_metadata(path).map(|found| found.ino()).ok()
}

/// Whether the slice's directory leads to the control daemon with its sockets in this directory, and has nothing else.
pub(crate) fn leads_to(directory: &Path, control_directory: &Path) -> bool {
    files(directory) == ["control"]
        && inode(&directory.join("control")) == inode(&control_directory.join("control"))
}

/// The names of the files in a directory that can be read.
fn files(directory: &Path) -> Vec<String> {
    let Ok(files) = fs::read_dir(directory) else { return Vec::new() };
    let mut files: Vec<_> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    files.sort();
    files
}

/// The private directory of the only control daemon.
fn private(host: &Host) -> PathBuf {
    host.path("mps/pipe.private")
}

/// A shell in a mount namespace that sees a slice's directory at its place in a container, and no pipe directory. It
/// starts a program for each line that it gets.
struct Container {
    shell: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Container {
    fn start(host: &Host, slice: &str) -> Self {
        let container = host.container_of(slice);
        let directory = directory_of(host, slice);
        let script = "set -e\n\
            mount --make-rprivate /\n\
            mount --bind \"$0\" /mnt\n\
            mount -t tmpfs tmpfs /run\n\
            mkdir /run/yunion-mps\n\
            mount --bind -o ro /mnt /run/yunion-mps\n\
            umount /mnt\n\
            mount -t tmpfs tmpfs \"$1\"\n\
            set +e\n\
            while read -r line; do cuda-client $line; echo \"status $?\"; done";
        let mut command: Command = host.command("unshare");
        command.args(["--mount", "sh", "-c", script]).arg(directory).arg(host.path("mps/pipe"));
        for (name, value) in container["environment"].as_object().unwrap() {
            command.env(name, value.as_str().unwrap());
        }
        let mut shell = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (shell.stdin.take().unwrap(), shell.stdout.take().unwrap());
        Self { shell, input, output: BufReader::new(output) }
    }

    /// Runs the program with these arguments, and returns its output.
    fn run(&mut self, arguments: &str) -> String {
        writeln!(self.input, "{arguments}").unwrap();
        let mut all = String::new();
        loop {
            let begin = all.len();
            assert_ne!(self.output.read_line(&mut all).unwrap(), 0, "{all}");
            if let Some(status) = all[begin..].strip_prefix("status ") {
                assert_eq!(status.trim(), "0", "{all}");
                all.truncate(begin);
                return all;
            }
        }
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

/// Kills the control daemon, and waits until another one serves.
fn another_control_daemon(host: &Host) {
    let before = control_pid(&host.wait_for_state("ready"));
    signal_pid(before, Signal::KILL);
    host.wait_for_status("another control daemon", |status| {
        status["service"]["state"] == "ready" && control_daemon(status)["pid"] != before
    });
}

/// Has the control daemon replaced when it is idle, since its log is to be elsewhere.
fn another_by_reload(host: &Host) {
    let status = host.wait_for_state("ready");
    let log = control_daemon(&status)["log_directory"].as_str().unwrap();
    host.configure(&format!("cuda_mps_log_directory: {log}.next"));
    host.call("Control.Reload");
    host.wait_for_status("another control daemon", |after| {
        after["service"]["state"] == "ready" && control_daemon(after)["pid"] != control_pid(&status)
    });
}

#[test]
fn a_container_with_its_slices_directory_alone_is_served() {
    if !root_or_skip("a_container_with_its_slices_directory_alone_is_served") {
        return;
    }
    let mut host = Host::serving("h200");
    let slice = host.list()[1]["addr"].as_str().unwrap().to_owned();
    let mut container = Container::start(&host, &slice);
    for _ in 0..4 {
        let said = container.run("props");
        assert!(said.contains(" sms 32 ") && said.contains(" free 35797 "), "{said}");
        another_control_daemon(&host);
    }
    drop(container);
    assert_eq!(host.stop().code(), Some(0));
}

/// Clients come all the time while control daemons are killed. A client of a slice that was healthy before and after
/// it came, by the same control daemon, was served by it.
#[test]
fn links_follow_control_daemons_under_a_stream_of_clients() {
    let mut host = Host::serving("h200");
    let slice = host.list()[1]["addr"].as_str().unwrap().to_owned();
    let environment = host.environment_of(&slice);
    let (done, served) = (AtomicBool::new(false), AtomicU32::new(0));
    let healthy = || {
        let status = host.json(&["status"])?;
        let pid = control_daemon(&status)["pid"].clone();
        let is_it = |device: &&Value| device["addr"] == slice.as_str();
        let listed = host.json(&["list"])?;
        let healthy = listed.as_array()?.iter().find(is_it)?["healthy"] == true;
        (healthy && pid.is_u64()).then_some(pid)
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let before = healthy();
                let mut program = host.command("cuda-client");
                let said = program.arg("props").envs(environment.iter().cloned()).output().unwrap();
                let said = text(&said);
                // Its control daemon was killed or ended while it was served, and the service does not know yet.
                let cut_off = said.contains("(805)") || said.contains("(806)");
                if before.is_some() && before == healthy() && !cut_off {
                    assert!(said.contains(" sms 32 "), "{said}");
                    served.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        // The pause before the next control daemon doubles with each that is killed.
        for _ in 0..5 {
            for replace in [another_control_daemon, another_by_reload] {
                let so_far = served.load(Ordering::Relaxed);
                replace(&host);
                wait_for("a client of the new control daemon", || {
                    (served.load(Ordering::Relaxed) > so_far).then_some(())
                });
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn a_link_that_is_taken_away_is_renewed_and_told() {
    let mut host = Host::serving("h200");
    let slice = host.list()[2]["addr"].as_str().unwrap().to_owned();
    let (directory, pipe, private) = (directory_of(&host, &slice), host.path("mps/pipe"), private(&host));
    assert!(leads_to(&directory, &private), "{directory:?}");
    fs::remove_file(directory.join("control")).unwrap();
    wait_for("the link", || leads_to(&directory, &private).then_some(()));
    let told = format!("{} did not lead to the control daemon, and does again", directory.display());
    wait_for("the warning", || host.log().contains(&told).then_some(()));

    // A container that can write to the pipe directory can do worse, and again and again. That is told once a minute.
    for _ in 0..5 {
        fs::remove_file(pipe.join("control")).unwrap();
        fs::remove_dir_all(pipe.join("slices")).unwrap();
        wait_for("all links", || {
            let led = inode(&pipe.join("control")) == inode(&private.join("control"));
            (led && leads_to(&directory, &private)).then_some(())
        });
    }
    assert_eq!(host.log().matches("did not lead").count(), 1, "{}", host.log());
    let client = host.client();
    assert_eq!(host.wait_for_state("ready")["gpus"][0]["healthy"], true);
    client.end();
    assert_eq!(host.stop().code(), Some(0));
}

/// The pipe directory makes clients, and nobody who has it a commander of the control daemon.
#[test]
fn the_pipe_directory_has_a_link_and_the_slices() {
    let mut host = Host::serving("h200");
    let (pipe, private) = (host.path("mps/pipe"), private(&host));
    assert_eq!(files(&pipe), ["control", "slices"]);
    assert_eq!(fs::metadata(&private).unwrap().mode() & 0o7777, 0o700);
    let daemon = control_daemon(&host.wait_for_state("ready")).clone();
    assert_eq!(daemon["pipe_directory"], pipe.to_str().unwrap());
    assert_eq!(daemon["control_directory"], private.to_str().unwrap());

    let refused = host.front_end(&pipe, "set_default_active_thread_percentage 7");
    assert!(refused.starts_with("Insufficient privileges"), "{refused}");
    assert_eq!(host.front_end(&pipe, "quit"), "Not enough privilege to execute quit command\n");
    assert_eq!(host.front_end(&pipe, "get_default_active_thread_percentage"), "25.0\n");
    assert_eq!(host.front_end(&private, "set_default_active_thread_percentage 25"), "25.0\n");

    let client = host.client();
    for attempt in 0..3 {
        another_control_daemon(&host);
        assert_eq!(files(&pipe), ["control", "slices"], "{attempt}");
    }
    client.end();
    if root_or_skip("another user looks into the private directory") {
        let looked = host
            .command("setpriv")
            .args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "ls"])
            .arg(&private)
            .output()
            .unwrap();
        assert!(text(&looked).contains("Permission denied"), "{}", text(&looked));
    }
    fs::set_permissions(&private, PermissionsExt::from_mode(0o755)).unwrap();
    assert!(host.call("Control.Reload").status.success());
    let told = format!("mode of {} was 0755, and is 0700 again", private.display());
    wait_for("the warning", || host.log().contains(&told).then_some(()));
    assert_eq!(fs::metadata(&private).unwrap().mode() & 0o7777, 0o700);
    assert_eq!(host.stop().code(), Some(0));
}

/// As on a machine without the platform: the pipe directory is where CUDA looks by itself, and the log directory is in it.
#[test]
fn the_log_directory_may_be_in_the_pipe_directory() {
    let mut host = Host::new("h200");
    let mps = host.path("mps/both");
    host.configure(&format!("cuda_mps_pipe_directory: {0}\ncuda_mps_log_directory: {0}/log", mps.display()));
    host.start();
    for _ in 0..2 {
        host.wait_for_state("ready");
        assert_eq!(files(&mps), ["control", "log", "slices"]);
        assert!(mps.join("log/control.log").is_file());
        let said = host.command("cuda-client").arg("props").env("CUDA_MPS_PIPE_DIRECTORY", &mps).output();
        let said = text(&said.unwrap());
        assert!(said.contains(" sms 32 "), "{said}");
        another_control_daemon(&host);
    }
    assert_eq!(host.stop().code(), Some(0));
}

/// A control daemon that has its sockets in the pipe directory, as with an older driver, serves on and is replaced when
/// nobody needs it any more.
#[test]
fn sockets_move_when_the_last_client_has_ended() {
    let mut host = Host::new("h200");
    host.plant("driver", "575.57.08\n");
    host.start();
    let before = host.wait_for_state("ready");
    let (pipe, private) = (host.path("mps/pipe"), private(&host));
    assert_eq!(control_daemon(&before)["control_directory"], pipe.to_str().unwrap());
    assert!(files(&pipe).contains(&"control_privileged".to_owned()) && !private.exists());
    let client = host.client();
    host.signal(Signal::KILL);
    host.ended();
    host.plant("driver", "580.159.04\n");
    host.start();
    let status = host
        .wait_for_status("the wait for the client", |status| control_daemon(status)["state"] == "waiting");
    assert_eq!(control_pid(&status), control_pid(&before));
    let reason = control_daemon(&status)["reason"].as_str().unwrap();
    assert!(reason.starts_with(&format!("its sockets move to {}", private.display())), "{reason}");
    assert_eq!(status["gpus"][0]["healthy"], true, "{status:#}");
    // Its slices are served as before, by links to the sockets where they are.
    let slice = host.list()[1]["addr"].as_str().unwrap().to_owned();
    assert!(leads_to(&directory_of(&host, &slice), &pipe));
    let said = text(&host.program_of(&slice, &["props"]).stdout(Stdio::piped()).output().unwrap());
    assert!(said.contains(" sms 32 "), "{said}");

    client.end();
    let after = host.wait_for_status("another control daemon", |status| {
        status["service"]["state"] == "ready" && control_pid(status) != control_pid(&before)
    });
    assert_eq!(control_daemon(&after)["control_directory"], private.to_str().unwrap());
    assert_eq!(files(&pipe), ["control", "slices"]);
    assert!(leads_to(&directory_of(&host, &slice), &private));
    assert_eq!(host.stop().code(), Some(0));
}

/// Where no link can lead out of the pipe directory, the sockets stay there, and an administrator is told.
#[test]
fn a_pipe_directory_that_is_a_mount_has_the_sockets() {
    if !root_or_skip("a_pipe_directory_that_is_a_mount_has_the_sockets") {
        return;
    }
    let mut host = Host::new("h200");
    let pipe = host.path("mps/pipe");
    fs::create_dir_all(&pipe).unwrap();
    let mount = |arguments: &[&str]| {
        let done = Command::new(arguments[0]).args(&arguments[1..]).arg(&pipe).status().unwrap();
        assert!(done.success(), "{arguments:?}");
    };
    mount(&["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs"]);
    host.start();
    let status = host.wait_for_state("ready");
    assert_eq!(control_daemon(&status)["control_directory"], pipe.to_str().unwrap());
    let slice = host.list()[1]["addr"].as_str().unwrap().to_owned();
    assert!(leads_to(&directory_of(&host, &slice), &pipe) && !private(&host).exists());
    assert!(
        host.log().contains("is a mount of its own, so no private directory is beside it"),
        "{}",
        host.log()
    );
    let doctor = text(
        &host
            .command(binaries().join("yunion-mpsctl"))
            .arg("doctor")
            .arg("--sysroot")
            .arg(host.path("sysroot"))
            .output()
            .unwrap(),
    );
    assert!(doctor.contains("sockets-not-private"), "{doctor}");
    // Nothing waits for the move that can't be.
    host.signal(Signal::KILL);
    host.ended();
    host.start();
    let again = host.wait_for_state("ready");
    assert_eq!(control_pid(&again), control_pid(&status));
    assert_eq!(host.stop().code(), Some(0));
    mount(&["umount"]);
}

/// A drained slice leads nowhere, also for a container that was started before, and leads to the control daemon again
/// before it is healthy.
#[test]
fn a_drained_slice_leads_nowhere() {
    let mut host = Host::serving("h200");
    let slices: Vec<String> =
        host.list().iter().map(|device| device["addr"].as_str().unwrap().to_owned()).collect();
    let (pipe, private) = (host.path("mps/pipe"), private(&host));
    let directories: Vec<PathBuf> = slices.iter().map(|slice| directory_of(&host, slice)).collect();
    let done = |arguments: &[&str]| {
        let output = host.mpsctl(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output));
    };
    let lead = || directories.iter().map(|directory| leads_to(directory, &private)).collect::<Vec<_>>();
    let all_but_1: Vec<bool> = (0..slices.len()).map(|ordinal| ordinal != 1).collect();
    let client = host.client();
    done(&["drain", &slices[1]]);
    assert_eq!(lead(), all_but_1);
    assert!(pipe.join("control").exists());
    done(&["undrain", &slices[1]]);
    assert_eq!(lead(), vec![true; slices.len()]);

    // The drain holds for every control daemon and every service, whichever comes later.
    done(&["drain", &slices[1]]);
    another_control_daemon(&host);
    assert_eq!(lead(), all_but_1);
    client.end();
    done(&["drain", "--all"]);
    assert_eq!(lead(), vec![false; slices.len()]);
    assert!(!pipe.join("control").exists());
    host.signal(Signal::KILL);
    host.ended();
    host.start();
    host.wait_for_state("ready");
    another_control_daemon(&host);
    assert_eq!(files(&pipe), ["slices"]);
    assert!(directories.iter().all(|directory| files(directory).is_empty()));

    let output = host.mpsctl(&["undrain", "--all"]);
    assert!(output.status.success(), "{}", text(&output));
    assert!(directories.iter().all(|directory| leads_to(directory, &private)));
    assert_eq!(files(&pipe), ["control", "slices"]);
    assert!(host.list().iter().all(|device| device["healthy"] == true));
    // Nobody else has touched a link.
    assert!(!host.log().contains("did not lead"), "{}", host.log());
    assert_eq!(host.stop().code(), Some(0));
}

/// Slices are drained and taken back all the time. Whenever one is listed as healthy before and after, it had its link.
#[test]
fn a_healthy_slice_has_its_link_while_slices_are_drained() {
    let mut host = Host::serving("h200");
    let slice = host.list()[1]["addr"].as_str().unwrap().to_owned();
    let (directory, private) = (directory_of(&host, &slice), private(&host));
    let generation = || {
        let status = host.json(&["status"])?;
        status["service"]["generation"].as_u64()
    };
    let healthy = || {
        let listed = host.json(&["list"])?;
        let is_it = |device: &&Value| device["addr"] == slice.as_str();
        (listed.as_array()?.iter().find(is_it)?["healthy"] == true).then_some(())
    };
    let (done, seen) = (AtomicBool::new(false), AtomicU32::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let before = generation();
                if healthy().is_some() {
                    let led = leads_to(&directory, &private);
                    if before.is_some() && before == generation() {
                        assert!(led, "healthy without a link");
                        seen.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        });
        for _ in 0..20 {
            for command in ["drain", "undrain"] {
                let output = host.mpsctl(&[command, &slice]);
                assert!(output.status.success(), "{}", text(&output));
                // At once after the answer.
                assert_eq!(leads_to(&directory, &private), command == "undrain");
            }
            let so_far = seen.load(Ordering::Relaxed);
            wait_for("a look at the healthy slice", || (seen.load(Ordering::Relaxed) > so_far).then_some(()));
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(host.stop().code(), Some(0));
}

/// Something in the place of a slice's directory keeps its GPU from being called ready. The control daemon is tried
/// again after pauses, and not as fast as it can be started.
#[test]
fn a_slice_without_a_directory_is_not_ready() {
    let mut host = Host::serving("h200");
    let slice = host.list()[1]["addr"].as_str().unwrap().to_owned();
    let directory = directory_of(&host, &slice);
    assert_eq!(host.stop().code(), Some(0));
    fs::remove_dir_all(&directory).unwrap();
    fs::write(&directory, "").unwrap();
    host.start();
    let reason = format!("{}: is not a directory; remove it", directory.display());
    host.wait_for_failure(&reason);
    wait_for("the pause", || host.log().contains(&format!("{reason}; tried again at once")).then_some(()));
    fs::remove_file(&directory).unwrap();
    host.wait_for_state("ready");
    assert!(leads_to(&directory, &private(&host)));
    assert_eq!(host.stop().code(), Some(0));
}

/// The same while the control daemon has a client, which carries on.
#[test]
fn a_slice_that_loses_its_directory_is_not_ready() {
    let mut host = Host::serving("h200");
    let slice = host.list()[1]["addr"].as_str().unwrap().to_owned();
    let directory = directory_of(&host, &slice);
    let mut client = host.client();
    fs::remove_dir_all(&directory).unwrap();
    // The service may have made it again in between.
    wait_for("something in its place", || {
        let _ = fs::remove_dir_all(&directory);
        fs::write(&directory, "").ok()
    });
    let reason = format!("{}: is not a directory; remove it", directory.display());
    host.wait_for_failure(&reason);
    assert!(host.call("Control.Reload").status.success());
    host.wait_for_failure(&reason);
    fs::remove_file(&directory).unwrap();
    assert!(host.call("Control.Reload").status.success());
    host.wait_for_state("ready");
    assert!(leads_to(&directory, &private(&host)));
    assert!(client.try_wait().unwrap().is_none());
    client.end();
    assert_eq!(host.stop().code(), Some(0));
}

/// A reload with fewer slices takes their links away, and one with more gives them back before they are healthy, in the
/// same directories.
#[test]
fn links_follow_the_number_of_slices() {
    let mut host = Host::serving("h200");
    let slices: Vec<String> =
        host.list().iter().map(|device| device["addr"].as_str().unwrap().to_owned()).collect();
    let pipe = private(&host);
    let last = directory_of(&host, slices.last().unwrap());
    let held = inode(&last);
    let configure = |count: usize| {
        host.devices(&[&format!("path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: {count}")]);
        assert!(host.call("Control.Reload").status.success());
    };
    configure(1);
    wait_for("the link of the last slice to go", || (!last.join("control").exists()).then_some(()));
    assert!(leads_to(&directory_of(&host, &slices[0]), &pipe));
    configure(slices.len());
    wait_for("the last slice", || {
        let listed = host.list();
        let there = listed.iter().find(|device| device["addr"] == slices.last().unwrap().as_str())?;
        (there["healthy"] == true).then_some(())
    });
    assert!(leads_to(&last, &pipe) && inode(&last) == held);
    assert_eq!(host.stop().code(), Some(0));
}

/// With a control daemon for each GPU, a slice's directory is where it always is, and leads to its own control daemon.
#[test]
fn the_topology_does_not_show_in_the_directories() {
    let mut host = Host::new("h200x8");
    host.configure("cuda_mps_topology: per_gpu");
    host.start();
    host.wait_for_state("ready");
    for device in host.list() {
        let slice = device["addr"].as_str().unwrap();
        let directory = directory_of(&host, slice);
        assert_eq!(directory, host.path("mps/pipe/slices").join(slice.replace(':', "_")));
        let uuid = device["device_path"].as_str().unwrap();
        assert!(leads_to(&directory, &private(&host).join(uuid)), "{device}");
        assert_eq!(files(&host.path("mps/pipe").join(uuid)), ["control"]);
    }
    assert_eq!(host.stop().code(), Some(0));
}

/// Nothing is linked where a client is not known to do without the rest.
#[test]
fn an_older_driver_has_no_directories_of_slices() {
    let mut host = Host::serving("tesla-p40");
    let container = host.container_of("00:06.0-1");
    let pipe = host.path("mps/pipe");
    assert_eq!(container["environment"]["CUDA_MPS_PIPE_DIRECTORY"], pipe.to_str().unwrap());
    assert_eq!(container["mounts"].as_array().unwrap().len(), 2, "{container}");
    assert!(!pipe.join("slices").exists());
    assert_eq!(host.stop().code(), Some(0));
}
