//! A booted systemd for tests, in a container. The root of the container is an overlay over this host's files. The container
//! needs no image and no network, boots in half a second, and changes nothing on the host.

use std::ffi::OsStr;
use std::fs;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::wait::{DEADLINE, PAUSE};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hierarchy {
    /// Version 2, as on every present distribution.
    Unified,
    /// Version 1, as on RHEL 8.
    Legacy,
}

impl Hierarchy {
    /// True if this host and the container's systemd support this version of control groups.
    pub(crate) fn available(self) -> bool {
        match self {
            Self::Unified => true,
            Self::Legacy => {
                let base = std::env::var_os("E2E_ROOT").unwrap_or_else(|| "/".into());
                let systemctl = Command::new("chroot").arg(base).args(["systemctl", "--version"]).output();
                Path::new("/sys/fs/cgroup/systemd/cgroup.procs").exists()
                    && release(&text(&systemctl.unwrap().stdout)) < WITHOUT_LEGACY
            }
        }
    }
}

/// True if the machines have this file. `scripts/machine-root.sh` installs all files that the tests need, but another
/// distribution may lack some.
pub(crate) fn has(path: &str) -> bool {
    let base = std::env::var_os("E2E_ROOT");
    base.is_none_or(|base| Path::new(&base).join(path.trim_start_matches('/')).exists())
}

/// The first release of systemd that does not support the legacy hierarchy.
const WITHOUT_LEGACY: u32 = 258;

fn release(version: &str) -> u32 {
    let number = version.split_ascii_whitespace().nth(1).and_then(|word| word.parse().ok());
    number.unwrap_or_else(|| panic!("no version in: {version}"))
}

/// Files that a machine gets in addition to the host's files, or instead of them.
pub(crate) struct Stage(TempDir);

impl Stage {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn place(&self, path: &str) -> PathBuf {
        let place = self.0.path().join(path.trim_start_matches('/'));
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        place
    }

    pub(crate) fn write(&self, path: &str, text: &str) {
        fs::write(self.place(path), text).unwrap();
    }

    pub(crate) fn put(&self, from: &Path, path: &str) {
        fs::copy(from, self.place(path)).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    }

    /// Adds a file that cargo has built, without its symbols, which are most of the file.
    pub(crate) fn install(&self, built: &Path, path: &str) {
        assert!(built.exists(), "{} is not built: cargo build --workspace", built.display());
        let strip =
            Command::new("install").args(["-s", "-m", "755"]).arg(built).arg(self.place(path)).output();
        let strip = strip.unwrap_or_else(|error| panic!("install: {error}"));
        assert!(strip.status.success(), "install -s {}: {}", built.display(), text(&strip.stderr));
    }
}

/// A running machine, which is shut down when this value is dropped.
pub(crate) struct Machine {
    script: Child,
    /// The PID that the machine's systemd has on the host.
    leader: u32,
    name: String,
    directory: TempDir,
}

impl Machine {
    pub(crate) fn boot(stage: &Stage, hierarchy: Hierarchy) -> Self {
        // The random name of this directory is also the machine's name, which must be unique on the host.
        let directory = tempfile::Builder::new().prefix("mps-e2e-").rand_bytes(8).tempdir().unwrap();
        let name = directory.path().file_name().unwrap().to_str().unwrap().to_owned();
        fs::create_dir(directory.path().join("mnt")).unwrap();
        std::os::unix::fs::symlink(stage.0.path(), directory.path().join("stage")).unwrap();
        let console = fs::File::create(directory.path().join("console")).unwrap();
        // If the test program is killed, the kernel kills the process of the script, and the machine ends with the
        // script.
        let script = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"])
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/e2e/boot.sh"))
            .arg(directory.path())
            .arg(&name)
            .arg(if hierarchy == Hierarchy::Unified { "1" } else { "0" })
            .stdin(Stdio::null())
            .stdout(console.try_clone().unwrap())
            .stderr(console)
            .spawn()
            .unwrap_or_else(|error| panic!("setpriv: {error}; scripts/deps.sh installs it"));
        let mut machine = Self { script, leader: 0, name, directory };
        machine.wait_until_up(0);
        machine
    }

    /// Waits until the machine has booted. `before` is the `leader` before a reboot, or 0.
    fn wait_until_up(&mut self, before: u32) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.script.try_wait().unwrap() {
                panic!("the machine does not boot ({status}):\n{}", self.console());
            }
            if let Some(leader) = self.find_leader().filter(|leader| *leader != before) {
                self.leader = leader;
                // The machine also starts the host's units, and some of them may fail. So the state "degraded" is accepted.
                let state = self.run(&["systemctl", "is-system-running", "--wait"]);
                if ["running", "degraded"].contains(&text(&state.stdout).trim()) {
                    return;
                }
            }
            assert!(Instant::now() < deadline, "the machine is not up:\n{}", self.console());
            sleep(PAUSE);
        }
    }

    /// Returns the PID that the machine's systemd has on the host. systemd is a child of systemd-nspawn, which is a child of
    /// `boot.sh`. systemd-nspawn has other children before it starts systemd.
    fn find_leader(&self) -> Option<u32> {
        child(child(self.script.id(), "systemd-nspawn")?, "systemd")
    }

    pub(crate) fn console(&self) -> String {
        let console = fs::read(self.directory.path().join("console")).unwrap_or_default();
        text(&console)
    }

    /// Makes a command that runs in the machine as root. Its environment has only the `PATH` and the locale.
    pub(crate) fn command<S: AsRef<OsStr>>(&self, words: &[S]) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--target={}", self.leader)).args(["--all", "--wd", "--", "/usr/bin/env", "-i"]);
        command.args(["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"]);
        command.args(words).stdin(Stdio::null());
        command
    }

    pub(crate) fn run<S: AsRef<OsStr>>(&self, words: &[S]) -> Output {
        let mut command = self.command(words);
        command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
    }

    #[track_caller]
    pub(crate) fn printed<S: AsRef<OsStr> + std::fmt::Debug>(&self, words: &[S]) -> String {
        let output = self.run(words);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{words:?}: {}\n{out}{err}", output.status);
        out
    }

    #[track_caller]
    pub(crate) fn complained<S: AsRef<OsStr> + std::fmt::Debug>(&self, words: &[S]) -> String {
        let output = self.run(words);
        assert!(!output.status.success(), "{words:?} succeeded: {}", text(&output.stdout));
        text(&output.stderr)
    }

    #[track_caller]
    pub(crate) fn sh(&self, script: &str) -> String {
        self.printed(&["sh", "-euc", script])
    }

    pub(crate) fn write(&self, path: &str, contents: &str) {
        let script = "mkdir -p \"$(dirname \"$1\")\"; cat >\"$1\"";
        let mut writer =
            self.command(&["sh", "-euc", script, "sh", path]).stdin(Stdio::piped()).spawn().unwrap();
        writer.stdin.take().unwrap().write_all(contents.as_bytes()).unwrap();
        assert!(writer.wait().unwrap().success(), "{path} can't be written");
    }

    #[track_caller]
    pub(crate) fn property(&self, unit: &str, name: &str) -> String {
        let property = format!("--property={name}");
        self.printed(&["systemctl", "show", "--value", &property, unit]).trim_end().to_owned()
    }

    pub(crate) fn systemd_version(&self) -> u32 {
        release(&self.printed(&["systemctl", "--version"]))
    }

    /// Returns a cursor to the present end of the machine's journal.
    pub(crate) fn cursor(&self) -> String {
        self.printed(&["journalctl", "--sync"]);
        let shown = self.printed(&["journalctl", "--lines=1", "--show-cursor", "--quiet"]);
        let cursor = shown.lines().find_map(|line| line.strip_prefix("-- cursor: "));
        cursor.unwrap_or_else(|| panic!("no cursor in: {shown}")).to_owned()
    }

    pub(crate) fn journal(&self, cursor: &str) -> Vec<Value> {
        let after = format!("--after-cursor={cursor}");
        self.printed(&["journalctl", "--sync"]);
        let lines = self.printed(&["journalctl", "--quiet", "--output=json", "--all", &after]);
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub(crate) fn messages(&self, cursor: &str) -> Vec<String> {
        self.journal(cursor)
            .iter()
            .map(|entry| entry["MESSAGE"].as_str().unwrap_or_default().to_owned())
            .collect()
    }

    pub(crate) fn reboot(&mut self) {
        let before = self.leader;
        self.run(&["systemctl", "reboot"]);
        self.wait_until_up(before);
    }

    /// Shuts the machine down. Returns false if the machine did not end in time and was killed.
    fn power_off(&mut self) -> bool {
        let asked = self.leader != 0 && self.run(&["systemctl", "poweroff"]).status.success();
        let deadline = Instant::now() + if asked { DEADLINE } else { Duration::ZERO };
        loop {
            match self.script.try_wait() {
                Ok(Some(_)) => return true,
                Ok(None) if Instant::now() < deadline => sleep(PAUSE),
                _ => break,
            }
        }
        let _ = self.script.kill();
        let _ = self.script.wait();
        false
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // If the machine has never booted, `boot` has already reported the failure.
        if !self.power_off() && self.leader != 0 {
            eprintln!("the machine did not power off and was killed:\n{}", self.console());
        }
        for hierarchy in ["", "/systemd", "/unified", "/freezer"] {
            let group = Path::new("/sys/fs/cgroup").join(hierarchy.trim_start_matches('/')).join(&self.name);
            let deadline = Instant::now() + DEADLINE;
            // The kernel removes no control group that has a process, and a process of a killed machine may need a moment to
            // end.
            while let Err(error) = remove_groups(&group) {
                if Instant::now() >= deadline {
                    eprintln!("{} is left: {error}", group.display());
                    break;
                }
                sleep(PAUSE);
            }
        }
    }
}

fn child(of: u32, name: &str) -> Option<u32> {
    let children = fs::read_to_string(format!("/proc/{of}/task/{of}/children")).ok()?;
    children.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).find(|pid: &u32| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim_end() == name)
    })
}

/// Removes a control group and all control groups below it. A control group that does not exist is no error.
fn remove_groups(group: &Path) -> std::io::Result<()> {
    let entries = match fs::read_dir(group) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_groups(&entry.path())?;
        }
    }
    fs::remove_dir(group)
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
