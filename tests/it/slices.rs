//! The directories of slices: a container that has nothing else is served with its limits, whatever happens to the
//! control daemon.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::host::{Host, control_daemon, control_pid, signal_pid, text};
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

/// Whether the slice's directory leads to the control daemon in this directory, and has nothing else.
pub(crate) fn leads_to(directory: &Path, pipe_directory: &Path) -> bool {
    let Ok(files) = fs::read_dir(directory) else { return false };
    let files: Vec<_> = files.map(|file| file.unwrap().file_name()).collect();
    files == ["control"] && inode(&directory.join("control")) == inode(&pipe_directory.join("control"))
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
                if before.is_some() && before == healthy() {
                    let said = text(&said);
                    assert!(said.contains(" sms 32 "), "{said}");
                    served.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        // The pause before the next control daemon doubles with each that is killed.
        for _ in 0..6 {
            let so_far = served.load(Ordering::Relaxed);
            another_control_daemon(&host);
            wait_for("a client of the new control daemon", || {
                (served.load(Ordering::Relaxed) > so_far).then_some(())
            });
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn a_link_that_is_taken_away_is_renewed_and_told() {
    let mut host = Host::serving("h200");
    let slice = host.list()[2]["addr"].as_str().unwrap().to_owned();
    let (directory, pipe) = (directory_of(&host, &slice), host.path("mps/pipe"));
    assert!(leads_to(&directory, &pipe), "{directory:?}");
    fs::remove_file(directory.join("control")).unwrap();
    assert!(host.call("Control.Reload").status.success());
    wait_for("the link", || leads_to(&directory, &pipe).then_some(()));
    let told = format!("{} did not lead to the control daemon, and does again", directory.display());
    wait_for("the warning", || host.log().contains(&told).then_some(()));
    assert_eq!(host.log().matches("did not lead").count(), 1, "{}", host.log());
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
    wait_for("the pause", || host.log().contains(&format!("{reason}; tried again in 0.1 s")).then_some(()));
    fs::remove_file(&directory).unwrap();
    host.wait_for_state("ready");
    assert!(leads_to(&directory, &host.path("mps/pipe")));
    assert_eq!(host.stop().code(), Some(0));
}

/// A reload with fewer slices takes their links away, and one with more gives them back before they are healthy, in the
/// same directories.
#[test]
fn links_follow_the_number_of_slices() {
    let mut host = Host::serving("h200");
    let slices: Vec<String> =
        host.list().iter().map(|device| device["addr"].as_str().unwrap().to_owned()).collect();
    let pipe = host.path("mps/pipe");
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
        assert!(leads_to(&directory, Path::new(device["pipe_directory"].as_str().unwrap())), "{device}");
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
