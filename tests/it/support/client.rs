//! Clients: processes of the simulated CUDA program `cuda-client`.

use std::ops::{Deref, DerefMut};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use super::host::{Host, process_state, text};
use super::wait::wait_for;

/// A running program of a test, usually a CUDA program. The program is killed when this value is dropped.
#[derive(Debug)]
pub(crate) struct Client(Child);

impl Client {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")))
    }

    /// Kills the program, and waits until it has ended.
    pub(crate) fn end(self) {
        drop(self);
    }
}

impl Deref for Client {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Client {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A Python program that stops a process by ptrace, as a debugger does.
const DEBUGGER: &str = "import ctypes, sys, time\n\
    libc = ctypes.CDLL(None, use_errno=True)\n\
    assert libc.ptrace(16, int(sys.argv[1]), None, None) == 0\n\
    print('held', flush=True)\n\
    time.sleep(600)\n";

/// Returns the text by which the service's messages name clients. Each tuple has the PID, the user, and the words after the
/// user.
pub(crate) fn describe(clients: &[(u32, &str, &str)]) -> String {
    let mut clients = clients.to_vec();
    clients.sort_unstable();
    let named: Vec<String> =
        clients.iter().map(|(pid, user, more)| format!("PID {pid} of user {user}{more}")).collect();
    let plural = if named.len() == 1 { "" } else { "s" };
    format!("{} client{plural}: {}", named.len(), named.join("; "))
}

pub(crate) fn own_user() -> String {
    let id = Command::new("id").arg("-un").output().unwrap();
    String::from_utf8(id.stdout).unwrap().trim().to_owned()
}

impl Host {
    /// Makes a command that runs `cuda-client` as a client of the control daemon in the pipe directory of host.conf.
    pub(crate) fn program(&self, arguments: &[&str]) -> Command {
        let mut command = self.command("cuda-client");
        command.args(arguments).env("CUDA_MPS_PIPE_DIRECTORY", self.pipe()).stdout(Stdio::null());
        command
    }

    pub(crate) fn program_of(&self, device: &str, arguments: &[&str]) -> Command {
        let mut command = self.program(arguments);
        command.envs(self.environment_of(device));
        command
    }

    /// Returns the environment of a container that has a slice. A variable with the path of a mount gets the path on the host
    /// instead.
    pub(crate) fn environment_of(&self, device: &str) -> Vec<(String, String)> {
        let answer = self.container_of(device);
        let mounts = answer["mounts"].as_array().unwrap();
        let here = |value: &Value| {
            let mount = mounts.iter().find(|mount| mount["container"] == *value);
            mount.map_or(value, |mount| &mount["host"]).as_str().unwrap().to_owned()
        };
        let variables = answer["environment"].as_object().unwrap().iter();
        variables.map(|(name, value)| (name.clone(), here(value))).collect()
    }

    /// Returns the settings that the service gives a container for a slice, even if the slice is bound to a control group.
    pub(crate) fn container_of(&self, device: &str) -> Value {
        let answer = self.mpsctl(&["env", device, "--share", "--format", "json"]);
        assert!(answer.status.success(), "{}", text(&answer));
        serde_json::from_slice(&answer.stdout).unwrap()
    }

    /// Starts a client that computes until it is killed, and waits until the control daemon lists it.
    pub(crate) fn client(&self) -> Client {
        self.served(&mut self.program(&["hold", "600"]))
    }

    /// Starts a client of a slice that computes until it is killed, and waits until the service lists it.
    pub(crate) fn client_of(&self, device: &str) -> Client {
        let client = Client::start(&mut self.program_of(device, &["hold", "600"]));
        self.wait_until_listed(client.id());
        client
    }

    pub(crate) fn wait_until_listed(&self, pid: u32) {
        wait_for("the client", || {
            let clients = self.json(&["clients"])?;
            clients.as_array().unwrap().iter().any(|client| client["pid"] == pid).then_some(())
        });
    }

    pub(crate) fn clients(&self) -> Vec<Value> {
        self.json(&["clients"]).unwrap().as_array().unwrap().clone()
    }

    pub(crate) fn listed(&self, pid: u32) -> Option<Value> {
        self.clients().into_iter().find(|client| client["pid"] == pid)
    }

    /// Starts a client of the control daemon in the pipe directory of host.conf, and waits until it is served. The client also
    /// counts as served if its GPU work was already ended.
    pub(crate) fn served(&self, command: &mut Command) -> Client {
        let mut client = Client::start(command);
        let (pipe, pid) = (self.pipe(), client.id().to_string());
        wait_for("the client", || {
            let clients = self.front_end(&pipe, "ps");
            let is_listed = clients.lines().any(|line| line.split_whitespace().next() == Some(&pid));
            (is_listed || client.try_wait().unwrap().is_some()).then_some(())
        });
        client
    }

    /// Starts a client, and waits until the service has logged its owner, which needs `log_level: debug`. From then on, the
    /// service can name the owner even after the client's end.
    pub(crate) fn known(&self, command: &mut Command) -> Client {
        let client = self.served(command);
        let words = format!(" client PID {} of ", client.id());
        wait_for("the client's owner", || self.log().contains(&words).then_some(()));
        client
    }

    /// Starts the host's only client, and waits until NVML lists its memory, a moment after the control daemon has admitted it.
    pub(crate) fn only_client(&self) -> Client {
        let client = Client::start(&mut self.program(&["hold", "600"]));
        self.wait_for_only_client();
        client
    }

    pub(crate) fn debugger(&self, pid: u32) -> Client {
        let mut python = self.command("/usr/bin/python3");
        let debugger = Client::start(python.args(["-c", DEBUGGER, &pid.to_string()]));
        wait_for("a held process", || (process_state(pid) == Some('t')).then_some(()));
        debugger
    }

    /// Starts a client that causes a fatal GPU error. The error hits all other clients of the GPU.
    pub(crate) fn fault(&self) {
        let culprit = self.program(&["fault"]).output().unwrap();
        assert_eq!(culprit.status.code(), Some(4), "{}", text(&culprit));
    }
}
