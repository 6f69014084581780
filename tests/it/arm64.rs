//! Tests the packages for aarch64 on a machine of another architecture. An emulator runs the programs, in namespaces where the
//! kernel passes them to the emulator (`tests/arm64/emulated.sh`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

use crate::support::host::{EMULATED, alive, text};
use crate::support::skip::{root_or_skip, skip};
use crate::support::wait::wait_for;

/// `make test` runs these tests on simulated hosts a second time, with programs for aarch64. `make test-arm64` runs more tests.
const AGAIN: [&str; 5] = [
    "serving::the_h200_is_ready_when_its_server_has_its_limits",
    "reload::more_slices",
    "first_steps::setup_of_a_host_without_the_platform_is_one_file",
    "supervision::the_compute_mode_of_before_outlives_a_killed_daemon",
    "real_control_daemons::of_555_serves_all_users",
];

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Returns true if the emulator can run programs for aarch64 on this machine. Otherwise reports the test as skipped.
fn can_run(what: &str) -> bool {
    if cfg!(target_arch = "aarch64") {
        skip(what, "this machine is aarch64");
        return false;
    }
    if !root_or_skip(what) {
        return false;
    }
    let emulator = source(".cache/arm64/qemu-aarch64");
    assert!(emulator.is_file(), "{} is missing; scripts/arm64-root.sh fetches it", emulator.display());
    // Before Linux 6.7, a user namespace can't register an emulator.
    let mut mount = Command::new("unshare");
    mount.args(["--user", "--map-root-user", "--mount", "mount", "-t", "binfmt_misc", "binfmt_misc"]);
    let can = mount.arg("/proc/sys/fs/binfmt_misc").stderr(Stdio::null()).status().unwrap().success();
    if !can {
        skip(what, "this kernel has no emulators for a user namespace");
    }
    can
}

fn emulated() -> Command {
    let mut command = Command::new("setpriv");
    // If the test is killed, the kernel kills the script, and all processes in its namespaces end too.
    command.args(["--pdeathsig", "KILL"]).arg(source("tests/arm64/emulated.sh"));
    command
}

fn programs() -> PathBuf {
    let programs = source("target/under-test/programs/arm64");
    let is_built = programs.join("yunion-mps-daemon").is_file();
    assert!(is_built, "{} is missing; scripts/arm64-under-test.sh makes it", programs.display());
    programs
}

fn deb() -> PathBuf {
    let release = std::env::var_os("RELEASE").is_some_and(|value| !value.is_empty());
    let directory = source(if release { "dist/arm64" } else { "target/under-test/arm64" });
    let found: Vec<PathBuf> = fs::read_dir(&directory)
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("yunion-mps-daemon_"))
        .collect();
    let [deb] = &found[..] else {
        let made_by = if release { "make deb ARCH=arm64" } else { "scripts/arm64-under-test.sh" };
        panic!("not one deb of the service in {}: {found:?}; {made_by} makes it", directory.display())
    };
    deb.clone()
}

/// Namespaces with an installed Debian for arm64. No systemd runs there.
struct Root {
    namespaces: Child,
    /// The first process in the namespaces, by its PID on this machine.
    first: u32,
}

fn children(pid: u32) -> Vec<u32> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    children.split_ascii_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

impl Root {
    fn new() -> Self {
        let namespaces = emulated().arg(source("tests/arm64/root.sh")).stdin(Stdio::null()).spawn().unwrap();
        let mut root = Self { namespaces, first: 0 };
        root.first = wait_for("the first process", || {
            // The script `root.sh` may have children besides `unshare`, which starts the first process in the namespaces.
            let is_unshare = |pid: &u32| {
                fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "unshare\n")
            };
            let unshare = children(root.namespaces.id()).into_iter().find(is_unshare)?;
            children(unshare).first().copied()
        });
        wait_for("a Debian for arm64", || {
            root.run("test -e /run/is-up && uname -m").stdout.starts_with(b"aarch64").then_some(())
        });
        root
    }

    /// Makes a command that runs a shell script in the Debian for arm64, with the programs of its simulated host first in the
    /// `PATH`.
    fn command(&self, script: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--target={}", self.first)).args(["--user", "--mount", "--pid", "--ipc"]);
        command.args(["--root", "--wd", "/usr/bin/env", "-i", "LC_ALL=C.UTF-8", "YUNION_MPS_SIM=/srv/host"]);
        command.arg("PATH=/srv/host/bin:/usr/sbin:/usr/bin").arg("LD_LIBRARY_PATH=/srv/host/lib");
        command.args(["sh", "-euc", script]).stdin(Stdio::null());
        command
    }

    fn run(&self, script: &str) -> Output {
        self.command(script).output().unwrap()
    }

    #[track_caller]
    fn sh(&self, script: &str) -> String {
        let output = self.run(script);
        assert!(output.status.success(), "{script}: {}\n{}", output.status, text(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Starts a program in the background, with its output in a file. Returns its PID in the namespaces.
    #[track_caller]
    fn start(&self, program: &str, output: &str) -> String {
        self.sh(&format!("{program} >>{output} 2>&1 </dev/null & echo $!")).trim().to_owned()
    }

    fn json(&self, arguments: &str) -> Value {
        let output = self.run(&format!("yunion-mpsctl {arguments} --json"));
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    }

    fn wait_until_ready(&self) -> Value {
        wait_for("the state ready", || {
            let status = self.json("status");
            (status["service"]["state"] == "ready").then_some(status)
        })
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ = self.namespaces.kill();
        let _ = self.namespaces.wait();
    }
}

const DAEMON: &str = "yunion-mps-daemon --sysroot /srv/host/sysroot";

/// Installs, uses and purges the deb for aarch64. A client runs on when the service reloads, and when the service is killed.
#[test]
fn the_deb_installs_serves_and_leaves_nothing() {
    if !can_run("the deb for aarch64") {
        return;
    }
    let root = Root::new();
    let tree = |path: &Path| format!("/srv/tree/{}", path.strip_prefix(source("")).unwrap().display());
    root.sh("systemd-sysusers");
    let said = root.sh(&format!("dpkg --install {} 2>&1", tree(&deb())));
    assert!(said.contains("run 'yunion-mpsctl setup'"), "{said}");
    assert_eq!(root.sh("dpkg --verify yunion-mps-daemon"), "");
    assert_eq!(root.sh("dpkg-query --show --showformat '${Architecture}' yunion-mps-daemon"), "arm64");
    assert!(root.sh("getent group yunion-mps").starts_with("yunion-mps:"));

    root.sh(&format!("cd / && {}/yunion-mps-sim create h200 /srv/host", tree(&programs())));
    root.start("dbus-daemon --system --nofork --nopidfile", "/srv/bus.log");
    root.sh("rm /srv/host/sysroot/etc/yunion/*");
    root.sh("yunion-mpsctl setup --yes --slices 4 --sysroot /srv/host/sysroot");
    let plan = root.sh(&format!("{DAEMON} --check"));
    assert!(plan.contains("00:06.0-3"), "{plan}");

    let first = root.start(DAEMON, "/srv/daemon.log");
    let status = root.wait_until_ready();
    let control_daemon = status["control_daemons"][0]["pid"].clone();
    assert!(control_daemon.is_u64(), "{status:#}");
    assert_eq!(root.json("list").as_array().unwrap().len(), 4);
    let client = root.start("yunion-mpsctl run 00:06.0-1 -- cuda-client hold 600", "/srv/client.log");
    let clients = || root.json("clients");
    let listed = wait_for("the client in its slice", || {
        let listed = clients();
        (listed[0]["device"] == "00:06.0-1" && listed[0]["memory_mib"].is_u64()).then_some(listed)
    });
    let unharmed = || {
        let status = root.wait_until_ready();
        assert_eq!(status["control_daemons"][0]["pid"], control_daemon);
        wait_for("the same client", || (clients()[0]["pid"] == listed[0]["pid"]).then_some(()));
        root.sh(&format!("kill -0 {client}"));
    };

    root.sh("sed -i 's/^cuda_mps_replicas: 4/cuda_mps_replicas: 5/' /srv/host/sysroot/etc/yunion/host.conf");
    root.sh(&format!("kill -HUP {first}"));
    wait_for("a fifth slice", || (root.json("list").as_array()?.len() == 5).then_some(()));
    unharmed();

    root.sh(&format!("kill -KILL {first}"));
    wait_for("the end of the service", || root.json("status").is_null().then_some(()));
    let second = root.start(DAEMON, "/srv/daemon.log");
    unharmed();

    root.sh(&format!("kill -TERM {second}"));
    wait_for("no process of MPS", || {
        let left = root.sh("cat /proc/[0-9]*/comm 2>/dev/null || :");
        (!left.contains("nvidia-cuda-mps") && !left.contains("yunion-mps")).then_some(())
    });
    let mode = root.sh("nvidia-smi --query-gpu=compute_mode --format=csv,noheader");
    assert_eq!(mode.trim(), "Default");
    root.sh("dpkg --purge yunion-mps-daemon 2>&1");
    assert_eq!(root.sh("ls /usr/bin | grep yunion || :"), "");
    let first_process = root.first;
    drop(root);
    wait_for("no namespace left", || (!alive(first_process)).then_some(()));
}

/// Runs tests again with programs for aarch64, on simulated hosts and with NVIDIA's control daemon for aarch64.
#[test]
fn tests_hold_with_programs_for_aarch64() {
    if !can_run("programs for aarch64") {
        return;
    }
    again(&AGAIN);
}

/// Parts of the names of the tests that `make test-arm64` runs again.
const MORE: [&str; 4] = ["serving::", "first_steps::", "drain::", "real_control_daemons::"];

/// The tests among [`MORE`] that fail in the emulator, with the reason.
const NOT_IN_THE_EMULATOR: [(&str, &str); 2] = [
    ("serving::clients_are_listed_with_their_slices", "the program of every process is the emulator"),
    (
        "serving::a_front_end_that_fails_says_nothing_of_the_control_daemon",
        "a program that can't be executed ends with status 127, since vfork is a fork",
    ),
];

#[test]
#[ignore = "takes minutes: make test-arm64"]
fn more_tests_hold_with_programs_for_aarch64() {
    if !can_run("more programs for aarch64") {
        return;
    }
    let skipped = NOT_IN_THE_EMULATOR.iter().flat_map(|(test, _)| ["--skip", test]);
    again(&MORE.into_iter().chain(skipped).collect::<Vec<_>>());
}

/// Runs these tests again, with programs for aarch64 instead of the programs of this machine.
#[track_caller]
fn again(tests: &[&str]) {
    let mut command = emulated();
    command.arg(source("tests/arm64/libraries.sh")).arg(std::env::current_exe().unwrap()).args(tests);
    command.env("RUST_TEST_THREADS", "2").env(EMULATED, programs());
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = text(&output);
    let ran = said.lines().filter(|line| line.starts_with("test ") && line.ends_with(" ... ok")).count();
    assert!(output.status.success() && ran >= tests.len(), "{said}");
}
