//! Tests of the directories of slices. A container with only the directory of its slice is served with the slice's limits, even
//! if the control daemon is replaced.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::support::container::contained;
use crate::support::host::{
    Host, alive, binaries, control_daemon, control_pid, flag_can_be_set, signal_pid, text,
};
use crate::support::skip::{root_or_skip, skip};
use crate::support::slice::{directory_of, files, inode, leads_to};
use crate::support::wait::wait_for;

/// The private directory of the only control daemon, which has the socket for commands.
fn private(host: &Host) -> PathBuf {
    host.path("mps/pipe.private")
}

/// A shell in its own mount namespace, which sees the directory of a slice as a container would, and no pipe directory. It
/// starts a client for each line of its input.
struct ContainerShell {
    shell: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl ContainerShell {
    fn start(host: &Host, slice: &str) -> Self {
        let container = host.container_of(slice);
        let directory = directory_of(host, slice);
        let script = "set +e; while read -r line; do cuda-client $line; echo \"status $?\"; done";
        let mut command = contained(host, &directory, script);
        for (name, value) in container["environment"].as_object().unwrap() {
            command.env(name, value.as_str().unwrap());
        }
        let mut shell = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (shell.stdin.take().unwrap(), shell.stdout.take().unwrap());
        Self { shell, input, output: BufReader::new(output) }
    }

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

impl Drop for ContainerShell {
    fn drop(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}

fn another_control_daemon(host: &Host) {
    another_control_daemon_in(host, "ready");
}

/// Kills the control daemon, and waits until another one serves. The service is in the state `state` before and after.
fn another_control_daemon_in(host: &Host, state: &str) {
    let before = control_pid(&host.wait_for_state(state));
    signal_pid(before, Signal::KILL);
    host.wait_for_status("another control daemon", |status| {
        let daemon = control_daemon(status);
        status["service"]["state"] == state && daemon["state"] == "ready" && daemon["pid"] != before
    });
}

/// Makes the service replace the idle control daemon, by a change of the log directory.
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
    let mut container = ContainerShell::start(&host, &slice);
    for _ in 0..4 {
        let said = container.run("props");
        assert!(said.contains(" sms 32 ") && said.contains(" free 35797 "), "{said}");
        another_control_daemon(&host);
    }
    drop(container);
    assert_eq!(host.stop().code(), Some(0));
}

/// Clients start all the time while control daemons are replaced. If the slice has been healthy with the same control daemon
/// before and after a client, that client must have been served.
#[test]
fn links_follow_control_daemons_under_a_stream_of_clients() {
    // The loop that starts clients ends after this time even if the test fails.
    const LONGEST_STREAM: Duration = Duration::from_secs(300);
    let mut host = Host::serving("h200");
    let slice = host.list()[1]["addr"].as_str().unwrap().to_owned();
    let environment = host.environment_of(&slice);
    let (directory, private) = (directory_of(&host, &slice), private(&host));
    let (done, served) = (AtomicBool::new(false), AtomicU32::new(0));
    let healthy = || {
        let status = host.json(&["status"])?;
        let pid = control_daemon(&status)["pid"].clone();
        let is_it = |device: &&Value| device["addr"] == slice.as_str();
        let listed = host.json(&["list"])?;
        let healthy = listed.as_array()?.iter().find(is_it)?["healthy"] == true;
        // The service removes a link just before the status shows the end of its control daemon. So the test also reads the
        // link.
        let leads = leads_to(&directory, &private);
        (healthy && leads && pid.is_u64()).then_some(pid)
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            let begun = Instant::now();
            for number in 1.. {
                if done.load(Ordering::Relaxed) || begun.elapsed() > LONGEST_STREAM {
                    break;
                }
                // The service replaces an idle control daemon only after two seconds without a new client. So the stream of
                // clients must pause.
                if number % 8 == 0 {
                    thread::sleep(Duration::from_millis(2500));
                }
                let before = healthy();
                let mut program = host.command("cuda-client");
                let said = program.arg("props").envs(environment.iter().cloned()).output().unwrap();
                let said = text(&said);
                // The control daemon may have ended although the service has not noticed the end yet. The test does not count a
                // client of that control daemon.
                let pid = before.as_ref().and_then(Value::as_u64).and_then(|pid| u32::try_from(pid).ok());
                let has_ended = pid.is_some_and(|pid| !alive(pid));
                let cut_off = has_ended || said.contains("(805)") || said.contains("(806)");
                if before.is_some() && before == healthy() && !cut_off {
                    assert!(said.contains(" sms 32 "), "{said}");
                    served.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        // The pause before the next start doubles with each killed control daemon. So the test kills only five.
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

fn serving_without_the_flag() -> Host {
    let mut host = Host::new("h200");
    host.start_without_the_flag();
    host.wait_for_state("ready");
    host
}

/// Causes a health check, by a reload.
fn check(host: &Host) {
    assert!(host.call("Control.Reload").status.success());
}

/// The directories that the service protects by the immutable flag.
fn kept(host: &Host) -> Vec<PathBuf> {
    let pipe = host.path("mps/pipe");
    let slices = host.list();
    let slices = slices.iter().map(|slice| directory_of(host, slice["addr"].as_str().unwrap()));
    slices.chain([pipe.join("slices"), pipe]).collect()
}

fn flags(directories: &[PathBuf]) -> Vec<bool> {
    let listed = Command::new("lsattr").arg("-d").args(directories).output().unwrap();
    let lines = String::from_utf8(listed.stdout).unwrap();
    lines.lines().map(|line| line.split(' ').next().unwrap().contains('i')).collect()
}

/// The immutable flag keeps root in a container from changing the service's directories, even in a container that has the whole
/// pipe directory with write access. The service itself can still change its directories.
#[test]
fn nobody_else_changes_the_directories() {
    if !flag_can_be_set() {
        return skip("nobody_else_changes_the_directories", "the immutable flag can't be set in /tmp");
    }
    let mut host = Host::serving("h200");
    let directories = kept(&host);
    let slice = host.list()[1]["addr"].as_str().unwrap().to_owned();
    let (directory, pipe, private) = (directory_of(&host, &slice), host.path("mps/pipe"), private(&host));
    let nobody_changes = |row: &str| {
        assert_eq!(flags(&directories), vec![true; directories.len()], "{row}");
        for (program, path) in [
            ("rm", pipe.join("control")),
            ("rm", directory.join("control")),
            ("rmdir", directory.clone()),
            ("mkdir", directory.join("new")),
            ("mkdir", pipe.join("slices/new")),
            ("mkdir", pipe.join("new")),
            ("touch", directory.clone()),
        ] {
            if program == "rm" && !path.exists() {
                continue;
            }
            let output = host.without_the_flag(program).arg(&path).env("LC_ALL", "C").output().unwrap();
            let said = text(&output);
            assert!(said.contains("Operation not permitted"), "{row}: {program} {path:?}: {said}");
        }
        for from in [&directory, &pipe.join("slices"), &pipe] {
            let to = host.path("mps/elsewhere");
            let output = host.without_the_flag("mv").args([from, &to]).env("LC_ALL", "C").output().unwrap();
            assert!(text(&output).contains("Operation not permitted"), "{row}: {from:?}: {}", text(&output));
        }
    };
    nobody_changes("served");
    let client = host.client();
    another_control_daemon(&host);
    client.end();
    nobody_changes("another control daemon");
    for (command, there) in [("drain", false), ("undrain", true)] {
        let output = host.mpsctl(&[command, &slice]);
        assert!(output.status.success(), "{}", text(&output));
        assert_eq!(leads_to(&directory, &private), there);
        nobody_changes(command);
    }
    // A killed service leaves the immutable flags in place. A service that stops removes them.
    host.signal(Signal::KILL);
    host.ended();
    another_service_changes_the_links(&mut host, &directories);
    assert_eq!(host.stop().code(), Some(0));
    assert_eq!(flags(&directories), vec![false; directories.len()], "anybody can remove them");
    fs::remove_dir_all(&pipe).unwrap();
}

/// Checks that a new service can change the links although the killed service has not removed the immutable flags.
fn another_service_changes_the_links(host: &mut Host, directories: &[PathBuf]) {
    assert_eq!(flags(directories), vec![true; directories.len()], "of the killed service");
    for pid in host.processes() {
        signal_pid(pid, Signal::KILL);
    }
    host.start();
    host.wait_for_state("ready");
    // The kernel may give a new socket the inode number of a removed socket. So a changed number is no proof of a new link.
    // Instead, the test compares the link with the control daemon's socket, and sends a command through the link.
    assert_eq!(inode(&host.path("mps/pipe/control")), inode(&private(host).join("control")));
    assert_eq!(host.front_end(&host.path("mps/pipe"), "get_default_active_thread_percentage"), "25.0\n");
    assert_eq!(flags(directories), vec![true; directories.len()]);
}

/// The service removes the immutable flags of directories that it no longer uses, so that other programs can remove them. The
/// test changes the pipe directory, disables MPS, and stops the service.
#[test]
fn directories_are_given_back() {
    if !flag_can_be_set() {
        return skip("directories_are_given_back", "the immutable flag can't be set in /tmp");
    }
    let mut host = Host::serving("h200");
    let first = kept(&host);
    host.configure(&format!("cuda_mps_pipe_directory: {}", host.path("mps/next").display()));
    check(&host);
    let next = host.path("mps/next");
    wait_for("the other directories", || {
        inode(&next.join("control")).and_then(|_| flags(std::slice::from_ref(&next))[0].then_some(()))
    });
    wait_for("the former flags to go", || (!flags(&first).contains(&true)).then_some(()));
    fs::remove_dir_all(host.path("mps/pipe")).unwrap();
    // With a control daemon for each GPU, the service makes further pipe directories in the pipe directory. So the service
    // removes the immutable flag of the pipe directory.
    host.configure("cuda_mps_topology: per_gpu");
    check(&host);
    host.wait_for_status("the other topology", |status| {
        status["service"]["state"] == "ready" && control_daemon(status)["id"] != "shared"
    });
    assert!(!flags(std::slice::from_ref(&next))[0] && flags(&[next.join("slices")])[0]);
    host.configure("enable_cuda_mps: false");
    check(&host);
    host.wait_for_state("disabled");
    wait_for("all flags to go", || (!flags(&[next.join("slices")])[0]).then_some(()));
    fs::remove_dir_all(&next).unwrap();
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn a_directory_with_things_of_others_stays_changeable() {
    let mut host = Host::new("h200");
    let pipe = host.path("mps/pipe");
    fs::create_dir_all(pipe.join("of another program")).unwrap();
    host.start();
    host.wait_for_state("ready");
    assert_eq!(flags(&[pipe.clone(), pipe.join("slices")]), [false, flag_can_be_set()]);
    fs::write(pipe.join("more"), "").unwrap();
    assert_eq!(host.stop().code(), Some(0));
}

/// Without the immutable flag, another program can remove the link of a slice. The health check makes the link again and
/// reports it.
#[test]
fn a_link_that_is_taken_away_is_renewed_and_told() {
    let mut host = serving_without_the_flag();
    let slice = host.list()[2]["addr"].as_str().unwrap().to_owned();
    let (directory, pipe, private) = (directory_of(&host, &slice), host.path("mps/pipe"), private(&host));
    assert!(leads_to(&directory, &private), "{directory:?}");
    fs::remove_file(directory.join("control")).unwrap();
    check(&host);
    wait_for("the link", || leads_to(&directory, &private).then_some(()));
    let told = format!(
        "{} had no link to the control daemon's socket; the service has made the links again",
        directory.display()
    );
    wait_for("the warning", || host.log().contains(&told).then_some(()));

    // A container that can write to the pipe directory may remove the links of all slices. The service makes them again without
    // a reload.
    let client = host.client();
    fs::remove_file(pipe.join("control")).unwrap();
    fs::remove_dir_all(pipe.join("slices")).unwrap();
    wait_for("all links", || {
        let led = inode(&pipe.join("control")) == inode(&private.join("control"));
        (led && leads_to(&directory, &private)).then_some(())
    });
    wait_for("the warning", || {
        (host.log().matches("had no link to the control daemon's socket").count() == 2).then_some(())
    });
    assert_eq!(host.wait_for_state("ready")["gpus"][0]["healthy"], true);
    client.end();
    assert_eq!(host.stop().code(), Some(0));
}

/// Through the pipe directory, a program can become a client of the control daemon and read its limits, but can't change its
/// limits or end it.
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
    let told = format!("the mode of {} was 0755; the service has set 0700 again", private.display());
    wait_for("the warning", || host.log().contains(&told).then_some(()));
    assert_eq!(fs::metadata(&private).unwrap().mode() & 0o7777, 0o700);
    assert_eq!(host.stop().code(), Some(0));
}

/// A log directory in the pipe directory causes a warning only, unless it has the path of the control daemon's FIFO.
#[test]
fn the_log_directory_may_be_in_the_pipe_directory() {
    let mut host = Host::new("h200");
    let mps = host.path("mps/both");
    host.configure(&format!("cuda_mps_pipe_directory: {0}\ncuda_mps_log_directory: {0}/log", mps.display()));
    host.start();
    let warning = "cuda_mps_log_directory: found ";
    wait_for("the warning", || host.log().contains(warning).then_some(()));
    for _ in 0..2 {
        host.wait_for_state("ready");
        assert_eq!(files(&mps), ["control", "log", "slices"]);
        assert!(mps.join("log/control.log").is_file());
        assert_eq!(flags(std::slice::from_ref(&mps)), [flag_can_be_set()]);
        let said = host.command("cuda-client").arg("props").env("CUDA_MPS_PIPE_DIRECTORY", &mps).output();
        let said = text(&said.unwrap());
        assert!(said.contains(" sms 32 "), "{said}");
        another_control_daemon(&host);
    }
    assert_eq!(host.stop().code(), Some(0));
}

/// With an older driver, a control daemon has its sockets in the pipe directory. After an upgrade of the driver it serves on,
/// and the service replaces it when it has no clients.
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
    assert!(
        reason.starts_with(&format!("the control daemon's sockets move to {}", private.display())),
        "{reason}"
    );
    assert_eq!(status["gpus"][0]["healthy"], true, "{status:#}");
    // The control daemon still listens in the pipe directory. So the links of the slices lead to the socket there.
    let slice = host.list()[1]["addr"].as_str().unwrap().to_owned();
    assert!(leads_to(&directory_of(&host, &slice), &pipe));
    let said = text(&host.program_of(&slice, &["props"]).stdout(Stdio::piped()).output().unwrap());
    assert!(said.contains(" sms 32 "), "{said}");

    client.end();
    let after = host.wait_for_status("another control daemon", |status| {
        status["service"]["state"] == "ready" && control_pid(status) != control_pid(&before)
    });
    assert_eq!(control_daemon(&after)["control_directory"], private.to_str().unwrap());
    // The service removes the old socket in the pipe directory when the new control daemon serves.
    wait_for("no other socket", || (files(&pipe) == ["control", "slices"]).then_some(()));
    assert!(leads_to(&directory_of(&host, &slice), &private));
    assert_eq!(host.stop().code(), Some(0));
}

/// If the pipe directory is a mount, no hard link from the private directory is possible. The sockets then stay in the pipe
/// directory, and a message says so.
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
        host.log().contains("is a mount of its own, so the control daemon has no private directory"),
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
    // The sockets can't be moved. So the next service does not plan to replace the control daemon, and is ready.
    host.signal(Signal::KILL);
    host.ended();
    host.start();
    let again = host.wait_for_state("ready");
    assert_eq!(control_pid(&again), control_pid(&status));
    assert_eq!(host.stop().code(), Some(0));
    mount(&["umount"]);
}

/// The directory of a drained slice has no link, and a container from before the drain sees this too. After `undrain`, the link
/// is there before the slice is healthy.
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
    // The service itself has removed the link of the drained slice. So it must not report the link as missing.
    assert!(!host.log().contains("had no link to the control daemon's socket"), "{}", host.log());
    assert_eq!(host.stop().code(), Some(0));
}

/// Slices are drained and undrained all the time. If a slice is healthy before and after the test has read its link, the link
/// must have been there.
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
                assert_eq!(leads_to(&directory, &private), command == "undrain");
            }
            let so_far = seen.load(Ordering::Relaxed);
            wait_for("a look at the healthy slice", || (seen.load(Ordering::Relaxed) > so_far).then_some(()));
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(host.stop().code(), Some(0));
}

/// A tenant who can write to the pipe directory makes files with the names of the service's links. The service renames these
/// files, reports them, and serves every slice.
#[test]
fn a_thing_in_the_way_is_renamed_and_told() {
    let mut host = serving_without_the_flag();
    let slice = host.list()[1]["addr"].as_str().unwrap().to_owned();
    let (directory, pipe, private) = (directory_of(&host, &slice), host.path("mps/pipe"), private(&host));
    let slices = pipe.join("slices");
    assert_eq!(host.stop().code(), Some(0));
    fs::remove_dir_all(&directory).unwrap();
    fs::write(&directory, "kept").unwrap();
    let _ = fs::remove_file(pipe.join("control"));
    fs::create_dir_all(pipe.join("control/below")).unwrap();
    host.start_without_the_flag();
    let before = control_pid(&host.wait_for_state("ready"));
    assert!(leads_to(&directory, &private));
    assert_eq!(inode(&pipe.join("control")), inode(&private.join("control")));
    let renamed = PathBuf::from(format!("{}.refused-1", directory.display()));
    assert_eq!(fs::read_to_string(&renamed).unwrap(), "kept");
    let name = renamed.file_name().unwrap().to_str().unwrap();
    let told = format!("{} was not a directory and was renamed to {name}", directory.display());
    assert!(host.log().contains(&told), "{}", host.log());
    assert!(
        host.log().contains("pipe/control was a directory and was renamed to control.refused-1"),
        "{}",
        host.log()
    );

    // The service repairs links without a restart of the control daemon, even if the control daemon has no clients.
    fs::create_dir(directory.join(".control.new")).unwrap();
    fs::remove_file(directory.join("control")).unwrap();
    check(&host);
    let led = || inode(&directory.join("control")) == inode(&private.join("control"));
    wait_for("the link", || led().then_some(()));
    fs::rename(&slices, host.path("mps/moved")).unwrap();
    std::os::unix::fs::symlink("/", &slices).unwrap();
    check(&host);
    wait_for("all links", || leads_to(&directory, &private).then_some(()));
    assert_eq!(control_pid(&host.wait_for_state("ready")), before);
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn a_bad_directory_costs_its_slice_alone() {
    if !root_or_skip("a_bad_directory_costs_its_slice_alone") {
        return;
    }
    let mut host = Host::serving("h200");
    let listed = |host: &Host, key: &str| -> Vec<Value> {
        host.list().iter().map(|device| device[key].clone()).collect()
    };
    let names = listed(&host, "addr");
    let slice = names[1].as_str().unwrap();
    let (directory, private) = (directory_of(&host, slice), private(&host));
    let mount = |arguments: &[&str]| {
        let done = Command::new(arguments[0]).args(&arguments[1..]).arg(&directory).status().unwrap();
        assert!(done.success(), "{arguments:?}");
    };
    let before = control_pid(&host.wait_for_state("ready"));
    mount(&["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs"]);
    assert!(host.call("Control.Reload").status.success());
    let status = host.wait_for_state("degraded");
    let reason =
        format!("{}: a link to the control daemon's socket can't be made here: ", directory.display());
    let said = status["service"]["state_reason"].as_str().unwrap();
    assert!(said.starts_with(&format!("slice {slice} is not served: {reason}")), "{said}");
    assert_eq!(listed(&host, "healthy"), [true, false, true, true]);
    assert!(
        listed(&host, "reason")[1].as_str().unwrap().starts_with(&reason),
        "{:?}",
        listed(&host, "reason")
    );
    assert_eq!(
        (&status["gpus"][0]["healthy"], &control_daemon(&status)["state"]),
        (&true.into(), &"ready".into())
    );
    let refused = host.mpsctl(&["undrain", slice]);
    assert!(!refused.status.success() && text(&refused).contains(&reason), "{}", text(&refused));
    let mut doctor = host.command(binaries().join("yunion-mpsctl"));
    let doctor = text(&doctor.arg("doctor").arg("--sysroot").arg(host.path("sysroot")).output().unwrap());
    assert!(doctor.contains(&format!("error: slice-not-served: {slice}\n")), "{doctor}");
    assert!(!doctor.contains("kill "), "{doctor}");
    let served = host.program_of(names[2].as_str().unwrap(), &["props"]).output().unwrap();
    assert!(served.status.success(), "{}", text(&served));

    // A mount prevents the link of one slice. A new control daemon and a new service still serve the other slices.
    another_control_daemon_in(&host, "degraded");
    host.signal(Signal::KILL);
    host.ended();
    host.start();
    let status = host.wait_for_state("degraded");
    assert_eq!(listed(&host, "healthy"), [true, false, true, true]);
    assert_ne!(control_pid(&status), before);
    mount(&["umount"]);
    host.reload();
    assert_eq!(control_pid(&host.wait_for_state("ready")), control_pid(&status));
    assert!(leads_to(&directory, &private) && listed(&host, "healthy") == [true, true, true, true]);
    assert_eq!(host.stop().code(), Some(0));
}

/// The path of the pipe directory is too long for a socket in the private directory beside it. The service warns, and names the
/// greatest possible length.
#[test]
fn a_pipe_directory_that_is_too_long_is_told() {
    for (topology, most) in [("shared", 79), ("per_gpu", 38)] {
        let mut host = Host::new("h200");
        let base = host.path("p").display().to_string();
        let long = |length: usize| base.clone() + &"x".repeat(length - base.len());
        for (length, warned) in [(most, false), (most + 1, true)] {
            let pipe = long(length);
            host.configure(&format!("cuda_mps_topology: {topology}\ncuda_mps_pipe_directory: {pipe}"));
            host.start();
            host.wait_for_state("ready");
            let has_private = Path::new(&format!("{pipe}.private")).is_dir();
            assert_eq!(has_private, !warned, "{topology} {length}");
            let mut doctor = host.command(binaries().join("yunion-mpsctl"));
            let doctor = doctor.arg("doctor").arg("--sysroot").arg(host.path("sysroot")).output().unwrap();
            let remedy = format!("choose a directory with a path of at most {most} bytes");
            for (place, said) in
                [("check", text(&host.check())), ("doctor", text(&doctor)), ("log", host.log())]
            {
                assert_eq!(said.contains(&remedy), warned, "{topology} {length} {place}: {said}");
            }
            assert_eq!(host.stop().code(), Some(0));
        }
    }
}

/// A reload with fewer slices removes links. A reload with more slices makes them again in the same directories, before the
/// slices are healthy.
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

/// The path of a slice's directory does not depend on the topology. The link in it leads to the control daemon of the slice's
/// GPU.
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

/// With an older driver, clients may need other files of the pipe directory than the socket. So the service makes no
/// directories of slices.
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
