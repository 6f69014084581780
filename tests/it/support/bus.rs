//! A private message bus with the rules of the system bus and the shipped policy, and programs that call the service on it.

use super::host::mpsctl;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Output, Stdio};

use tempfile::TempDir;
use tokio::process::Command;

use super::host::without_foreign_variables;
use super::wait::DEADLINE;

/// The configuration of the private dbus-daemon. It has the rules of the system bus. `scripts/bus-conf.sh` reads the same file.
const CONFIGURATION: &str = include_str!("../../support/bus.conf");

/// The group that plays the group yunion-mps in the policy. dbus-daemon reads the groups of a user from the host's files, which
/// may have no group yunion-mps. In these files, this group is the group of the user of [`AS_MEMBER`].
const MEMBERS: u32 = 65_534;

/// Options of setpriv for a user who is a member of the group yunion-mps.
pub(crate) const AS_MEMBER: [&str; 3] = ["--reuid=65534", "--regid=65534", "--clear-groups"];

/// Options of setpriv for a user who is no member of the group yunion-mps. The bus policy refuses the calls of this user.
pub(crate) const AS_STRANGER: [&str; 3] = ["--reuid=1", "--regid=1", "--clear-groups"];

pub(crate) fn ctl(bus: &PrivateBus, arguments: &[&str]) -> Command {
    let mut command = bus.command(mpsctl());
    command.args(arguments);
    command
}

pub(crate) async fn ended(command: &mut Command) -> (Option<i32>, String, String) {
    let output = output(command).await;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

/// A dbus-daemon for one test, which ends when this value is dropped.
pub(crate) struct PrivateBus {
    daemon: Child,
    directory: TempDir,
}

impl PrivateBus {
    pub(crate) fn start() -> Self {
        Self::with_policy(|shipped| shipped)
    }

    /// Starts a bus with the shipped policy, after `change` has changed the policy's text.
    pub(crate) fn with_policy(change: impl FnOnce(String) -> String) -> Self {
        // The directory is in /tmp even if `TMPDIR` names another. Other users must be able to reach the socket, and a long
        // path would not fit into the address of a socket.
        let directory = tempfile::Builder::new().prefix("bus").tempdir_in("/tmp").unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/config/io.yunion.Mps1.conf");
        // On this bus, the user who runs the tests has the rights that the policy gives to root.
        let policy = change(fs::read_to_string(shipped).unwrap());
        let user = rustix::process::getuid().to_string();
        let policy = policy.replace("user=\"root\"", &format!("user=\"{user}\""));
        let policy = policy.replace("group=\"yunion-mps\"", &format!("group=\"{MEMBERS}\""));
        fs::write(directory.path().join("policy.conf"), policy).unwrap();
        let configuration =
            CONFIGURATION.replace("DIRECTORY", directory.path().to_str().unwrap()).replace("USER", &user);
        let configuration_file = directory.path().join("bus.conf");
        fs::write(&configuration_file, configuration).unwrap();

        let mut daemon = std::process::Command::new("dbus-daemon")
            .args(["--nofork", "--nopidfile", "--print-address"])
            .arg(format!("--config-file={}", configuration_file.display()))
            .stdout(Stdio::piped())
            .stderr(fs::File::create(directory.path().join("complaints")).unwrap())
            .spawn()
            .unwrap_or_else(|e| panic!("dbus-daemon: {e}; install {}", package("dbus-daemon")));
        // dbus-daemon prints its address when it listens. If it can't listen, it ends without an address.
        let mut address = String::new();
        BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut address).unwrap();
        let complaints = fs::read_to_string(directory.path().join("complaints")).unwrap();
        assert!(address.starts_with("unix:path="), "dbus-daemon did not start: {complaints}");
        Self { daemon, directory }
    }

    pub(crate) fn address(&self) -> String {
        format!("unix:path={}", self.directory.path().join("socket").display())
    }

    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        without_foreign_variables(command.as_std_mut());
        command.env("DBUS_SYSTEM_BUS_ADDRESS", self.address()).stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// Makes a command that runs as the user of [`AS_STRANGER`]. Only root can start the command.
    pub(crate) fn command_as_stranger(&self, program: &str) -> Command {
        let mut command = self.command("setpriv");
        command.args(AS_STRANGER).arg(program);
        command
    }

    /// Makes a command that runs as a member of the group yunion-mps. Only root can start it.
    pub(crate) fn command_as_member(&self, program: &str) -> Command {
        let mut command = self.command("setpriv");
        command.args(AS_MEMBER).arg(program);
        command
    }

    pub(crate) fn stop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

impl Drop for PrivateBus {
    fn drop(&mut self) {
        self.stop();
    }
}

pub(crate) async fn output(command: &mut Command) -> Output {
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    match tokio::time::timeout(DEADLINE, command.output()).await {
        Ok(Ok(output)) => output,
        Ok(Err(e)) => panic!("{program}: {e}; install {}", package(&program)),
        Err(late) => panic!("{program} did not end: {late}"),
    }
}

pub(crate) async fn printed(command: &mut Command) -> String {
    let output = output(command).await;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

pub(crate) async fn complained(command: &mut Command) -> String {
    let output = output(command).await;
    assert!(!output.status.success(), "{command:?} succeeded: {}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn package(program: &str) -> &'static str {
    match program {
        "dbus-daemon" => "the Debian package dbus-daemon",
        "busctl" => "the Debian package systemd",
        "gdbus" => "the Debian package libglib2.0-bin",
        "/usr/bin/python3" => "the Debian packages python3 and python3-dbus",
        "setpriv" => "the Debian package util-linux",
        _ => "it",
    }
}
