//! Clients of two tenants on one GPU: a victim in a long CUDA kernel, and a bystander. A test ends the victim's GPU work, and
//! the bystander must survive.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use super::client::Client;
use super::host::{Host, binaries, process_state};
use super::wait::wait_for;

/// The text that a client prints when the control daemon has ended its GPU work.
pub(crate) const TERMINATED: &str = "the MPS client has been terminated by the server (810)";

pub(crate) struct Neighbours {
    pub(crate) host: Host,
    pub(crate) pipe_directory: PathBuf,
    pub(crate) bystander: Client,
}

pub(crate) fn bystander(host: &Host) -> Client {
    Client::start(host.program_of("00:06.0-0", &["hold", "600"]).stdout(Stdio::piped()))
}

impl Neighbours {
    pub(crate) fn new() -> Self {
        let mut host = Host::new("h200");
        host.start();
        let status = host.wait_for_state("ready");
        let pipe_directory = PathBuf::from(status["control_daemons"][0]["pipe_directory"].as_str().unwrap());
        let bystander = bystander(&host);
        let neighbours = Self { host, pipe_directory, bystander };
        neighbours.computes(neighbours.bystander.id());
        neighbours
    }

    pub(crate) fn listed(&self) -> Vec<u32> {
        let table = self.host.front_end(&self.pipe_directory, "ps");
        table.lines().filter_map(|line| line.split_whitespace().next()?.parse().ok()).collect()
    }

    /// Waits until a client is in its CUDA kernel. During the kernel the client's process sleeps (state `S`).
    pub(crate) fn computes(&self, pid: u32) {
        wait_for("the client computes", || {
            (self.listed().contains(&pid) && process_state(pid) == Some('S')).then_some(())
        });
    }

    /// Waits until a client other than the bystander is in a CUDA kernel, and returns its PID.
    pub(crate) fn another_computes(&self) -> u32 {
        let bystander = self.bystander.id();
        let pid = wait_for("another client", || self.listed().into_iter().find(|pid| *pid != bystander));
        self.computes(pid);
        pid
    }

    pub(crate) fn victim(&self) -> Child {
        let victim =
            self.host.program_of("00:06.0-1", &["long", "600"]).stdout(Stdio::piped()).spawn().unwrap();
        self.computes(victim.id());
        victim
    }

    pub(crate) fn user_victim(&self) -> Child {
        let mut command = self.host.command_as_member(self.host.path("bin/cuda-client"));
        command.envs(self.host.environment_of("00:06.0-1")).args(["long", "600"]).stdout(Stdio::piped());
        let victim = command.spawn().unwrap();
        self.computes(victim.id());
        victim
    }

    /// Waits until all other clients have ended, and returns true if the bystander still computes. A fault would hit the
    /// bystander before the control daemon stops listing the client that caused the fault.
    pub(crate) fn bystander_survives(&mut self) -> bool {
        let bystander = self.bystander.id();
        wait_for("the others are gone", || self.listed().iter().all(|pid| *pid == bystander).then_some(()));
        let status = self.host.wait_for_state("ready");
        let server = status["control_daemons"][0]["servers"][0].as_u64().unwrap();
        let said = self.host.front_end(&self.pipe_directory, &format!("get_server_status {server}"));
        said.trim() == "ACTIVE"
            && self.listed() == [bystander]
            && self.bystander.try_wait().unwrap().is_none()
    }

    pub(crate) fn ctl(&self, arguments: &[&str]) -> Command {
        let mut command = self.host.command(binaries().join("yunion-mpsctl"));
        command.args(arguments);
        command
    }

    pub(crate) fn run(&self, command: &[&str]) -> Child {
        let mut run = self.ctl(&["run", "00:06.0-1", "--"]);
        run.args(command).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

pub(crate) fn ended(mut child: Child) -> (Option<i32>, String) {
    let status = wait_for("the process ends", || child.try_wait().unwrap());
    let mut said = String::new();
    child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    if let Some(mut stderr) = child.stderr.take() {
        stderr.read_to_string(&mut said).unwrap();
    }
    (status.code(), said)
}

pub(crate) fn assert_terminated(victim: Child) {
    let (status, said) = ended(victim);
    assert!(said.contains(TERMINATED), "{said}");
    assert_eq!(status, Some(3));
}
