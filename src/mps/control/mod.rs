//! The control daemon's front end: one command at a time, with a deadline, and with its effect verified.
//!
//! The front end is `nvidia-cuda-mps-control`, which reads commands from standard input. It exits with 0 for nearly
//! everything, answers a bad value with the old one, and answers most settings with nothing. So each setting here is
//! read back. The control daemon sometimes fails when several front ends ask at once, so all calls for one pipe
//! directory stand in one queue ([`FrontEnds`]). Calls made for callers on the bus wait behind the supervisor's calls.
//!
//! A command goes from here through [`turns`] to [`front_end`], and its answer through [`answers`] back to here.

mod answers;
mod error;
mod front_end;
mod turns;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::sync::watch;
use tokio::time::timeout;

pub(crate) use answers::{Client, ClientPids, ServerStatus, Terminated};
pub(crate) use error::ControlError;
pub(crate) use turns::Caller;

use error::unexpected;
use front_end::FrontEnd;
use turns::{Rank, TURN_TIMEOUT, Turns};

/// The deadline for one answer. Measured: 2 ms. A stopped control daemon never answers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The command that names the servers.
const SERVERS: &str = "get_server_list";

/// The only way to a [`Control`]: it has one queue for each pipe directory. All its clones share the queues.
#[derive(Debug, Clone)]
pub(crate) struct FrontEnds {
    program: PathBuf,
    queues: Arc<Mutex<BTreeMap<PathBuf, Weak<Turns>>>>,
}

impl FrontEnds {
    /// Runs `program`, by its path or by its name in `PATH`.
    pub(crate) fn new(program: PathBuf) -> Self {
        Self { program, queues: Arc::default() }
    }

    /// The way to the control daemon of this pipe directory, even if this service did not start it.
    pub(crate) fn of(&self, pipe_directory: &Path) -> Control {
        let (program, pipe_directory) = (self.program.clone(), pipe_directory.to_owned());
        let turns = self.queue(&pipe_directory);
        let front_end = Arc::new(FrontEnd { program, pipe_directory, turns });
        Control(CallersControl { front_end, rank: Rank::Supervisor })
    }

    fn queue(&self, pipe_directory: &Path) -> Arc<Turns> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.retain(|_, turns| turns.strong_count() > 0);
        queues.get(pipe_directory).and_then(Weak::upgrade).unwrap_or_else(|| {
            let turns = Arc::default();
            queues.insert(pipe_directory.to_owned(), Arc::downgrade(&turns));
            turns
        })
    }
}

/// The PID of the control daemon that listens in a pipe directory, as the kernel reports it.
pub(crate) fn listener(pipe_directory: &Path) -> Option<u32> {
    connect(pipe_directory).ok()
}

/// Connects to the socket in a pipe directory, and returns the PID of its listener.
fn connect(pipe_directory: &Path) -> Result<u32, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    net::connect(&socket, &SocketAddrUnix::new(pipe_directory.join("control"))?)?;
    let peer = net::sockopt::socket_peercred(&socket)?;
    u32::try_from(peer.pid.as_raw_nonzero().get()).map_err(|_| Errno::SRCH)
}

/// A control daemon for a caller on the bus: the caller waits for a turn and can only ask what callers may ask.
#[derive(Debug)]
pub(crate) struct CallersControl {
    front_end: Arc<FrontEnd>,
    rank: Rank,
}

/// A control daemon for its supervisor, which asks before everybody else, and may also ask what callers may ask.
#[derive(Debug)]
pub(crate) struct Control(CallersControl);

impl Deref for Control {
    type Target = CallersControl;

    fn deref(&self) -> &CallersControl {
        &self.0
    }
}

/// The way to a supervised control daemon for callers on the bus.
#[derive(Debug, Clone)]
pub(crate) struct Access {
    /// None while no control daemon runs.
    control: watch::Receiver<Option<Arc<Control>>>,
    caller: Caller,
}

impl Access {
    pub(crate) fn new(control: watch::Receiver<Option<Arc<Control>>>, caller: Caller) -> Self {
        Self { control, caller }
    }

    /// The control daemon that runs now, or None.
    pub(crate) fn now(&self) -> Option<CallersControl> {
        self.control.borrow().as_ref().map(|control| control.on_behalf(self.caller))
    }

    /// Waits until the control daemon behind `asked` no longer runs.
    pub(crate) async fn replaced(&self, asked: &CallersControl) {
        let mut control = self.control.clone();
        let is_it = |now: &Arc<Control>| Arc::ptr_eq(&now.front_end, &asked.front_end);
        // An error means that its supervisor has ended.
        let _ = control.wait_for(|now| !now.as_ref().is_some_and(is_it)).await;
    }
}

impl CallersControl {
    /// Asks one command and returns its answer without the last newline.
    async fn ask(&self, command: &str) -> Result<String, ControlError> {
        self.ask_within(command, ANSWER_TIMEOUT).await
    }

    /// Asks a command that always has an answer.
    async fn ask_for_something(&self, command: &str) -> Result<String, ControlError> {
        let answer = self.ask(command).await?;
        if answer.is_empty() {
            return Err(ControlError::Unanswered { command: command.to_owned() });
        }
        Ok(answer)
    }

    async fn ask_within(&self, command: &str, patience: Duration) -> Result<String, ControlError> {
        let turn = self.front_end.turns.next(self.rank);
        let _turn = match self.rank {
            // A supervisor waits for one question at most.
            Rank::Supervisor => turn.await,
            Rank::Caller(_) => timeout(TURN_TIMEOUT, turn)
                .await
                .map_err(|_| ControlError::Crowded { command: command.to_owned() })?,
        };
        match timeout(patience, self.front_end.ask(command)).await {
            Ok(answer) => answer,
            Err(_) => Err(ControlError::Silent { command: command.to_owned(), after: patience }),
        }
    }

    /// Asks again after an empty answer. The control daemon answers nothing if there is no client, but also if it hung
    /// and dropped the conversation. A caller that took the second case for the first could end a server that has
    /// clients. A control daemon that answers again does not drop the second question.
    async fn ask_again_if_empty(&self, command: &str) -> Result<String, ControlError> {
        let answer = self.ask(command).await?;
        if answer.is_empty() { self.ask(command).await } else { Ok(answer) }
    }

    pub(crate) async fn server_status(&self, server: u32) -> Result<ServerStatus, ControlError> {
        let command = format!("get_server_status {server}");
        let answer = self.ask_for_something(&command).await?;
        answers::parse_status(&answer)
            .ok_or_else(|| unexpected(&command, &answer, "INITIALIZING, ACTIVE or FAULT"))
    }

    /// The servers, each with the PIDs of its clients. No tenant can influence these answers, unlike that of `ps`,
    /// which prints the names of programs as they are, line breaks included.
    pub(crate) async fn client_pids(&self) -> Result<ClientPids, ControlError> {
        let servers = pids(&self.ask_again_if_empty(SERVERS).await?)?;
        let mut all = ClientPids::new();
        for server in servers.iter().copied() {
            let command = format!("get_client_list {server}");
            // The list of servers proves that the answer was not dropped, even if there is no client: one connection carries
            // both (seen with 535, 550 and 555).
            let answer = self.ask_again_if_empty(&format!("{command}\n{SERVERS}")).await?;
            if answer.is_empty() {
                return Err(ControlError::Unanswered { command });
            }
            let mut clients = answers::parse_client_list(&answer)
                .ok_or_else(|| unexpected(&command, &answer, "a PID on each line"))?;
            clients.retain(|pid| !servers.contains(pid));
            all.insert(server, clients);
        }
        Ok(all)
    }

    /// The clients of every server.
    pub(crate) async fn clients(&self) -> Result<Vec<Client>, ControlError> {
        self.connections(&self.client_pids().await?).await
    }

    /// The connections of these clients. A program can choose its name so that `ps` shows a further connection of a
    /// known client, but not so that `ps` shows a further client.
    pub(crate) async fn connections(&self, known: &ClientPids) -> Result<Vec<Client>, ControlError> {
        const COMMAND: &str = "ps";
        if known.values().all(BTreeSet::is_empty) {
            return Ok(Vec::new());
        }
        let answer = self.ask_again_if_empty(COMMAND).await?;
        let mut rows = answers::parse_clients(&answer)
            .ok_or_else(|| unexpected(COMMAND, &answer, "a table of clients"))?;
        rows.retain(|row| known.get(&row.server).is_some_and(|pids| pids.contains(&row.pid)));
        // A client without a row has just come or gone.
        for (server, pids) in known {
            for pid in pids {
                if !rows.iter().any(|row| (row.server, row.pid) == (*server, *pid)) {
                    rows.push(Client { pid: *pid, id: None, server: *server, gpu_prefix: String::new() });
                }
            }
        }
        Ok(rows)
    }

    /// Ends the GPU work of one client of a server and leaves the server's other clients alone. Both are given by their
    /// PIDs. Measured: 12 ms, even during a long kernel.
    pub(crate) async fn terminate_client(
        &self,
        server: u32,
        client: u32,
    ) -> Result<Terminated, ControlError> {
        let command = format!("terminate_client {server} {client}");
        let answer = self.ask_for_something(&command).await?;
        answers::parse_terminated(&answer)
            .ok_or_else(|| unexpected(&command, &answer, "0, or 1 with a reason"))
    }
}

impl Control {
    /// The same control daemon for a caller on the bus.
    pub(crate) fn on_behalf(&self, caller: Caller) -> CallersControl {
        CallersControl { front_end: Arc::clone(&self.front_end), rank: Rank::Caller(caller) }
    }

    /// See [`listener`].
    pub(crate) fn daemon_pid(&self) -> Option<u32> {
        listener(&self.front_end.pipe_directory)
    }

    /// Whether certainly nobody listens in the pipe directory.
    pub(crate) fn is_nobody(&self) -> bool {
        matches!(connect(&self.front_end.pipe_directory), Err(Errno::NOENT | Errno::CONNREFUSED))
    }

    /// The PIDs of the servers. The answer also proves that the control daemon responds.
    pub(crate) async fn servers(&self) -> Result<Vec<u32>, ControlError> {
        pids(&self.ask(SERVERS).await?)
    }

    /// The PIDs of the servers, and which of the `known` ones are in FAULT.
    pub(crate) async fn servers_and_faults(
        &self,
        known: &[u32],
    ) -> Result<(Vec<u32>, Vec<u32>), ControlError> {
        if known.is_empty() {
            return Ok((self.servers().await?, Vec::new()));
        }
        let mut commands: Vec<String> =
            known.iter().map(|server| format!("get_server_status {server}")).collect();
        commands.push(SERVERS.to_owned());
        let answer = self.ask_for_something(&commands.join("\n")).await?;
        answers::parse_servers_and_faults(&answer, known)
            .ok_or_else(|| unexpected(SERVERS, &answer, "the status of each server, and their PIDs"))
    }

    /// Sets the limits of a running server's future clients, or without `server` the limits of future servers: the active
    /// thread percentage, and the device pinned memory limit, in MiB, of each GPU by its ordinal. One front end sets and
    /// reads all of them. The control daemon accepts anything, and reports memory in whole GiB, so the check is only as exact
    /// as that. The server writes the exact values to its log. Returns the PIDs of the servers.
    pub(crate) async fn set_limits(
        &self,
        server: Option<u32>,
        percentage: u8,
        memory_mib: &BTreeMap<usize, u64>,
    ) -> Result<Vec<u32>, ControlError> {
        let (default, server) = target(server);
        let set_percentage = format!("set_{default}active_thread_percentage{server} {percentage}");
        let memory =
            |verb: &str, ordinal: usize| format!("{verb}_{default}device_pinned_mem_limit{server} {ordinal}");
        let mut commands = vec![set_percentage.clone()];
        commands
            .extend(memory_mib.iter().map(|(ordinal, mib)| format!("{} {mib}M", memory("set", *ordinal))));
        commands.extend(memory_mib.keys().map(|ordinal| memory("get", *ordinal)));
        commands.push(SERVERS.to_owned());
        let answer = self.ask_for_something(&commands.join("\n")).await?;
        // The percentage is answered with the value that now applies, a memory limit with nothing.
        let mut lines = answer.lines().map(str::trim);
        let said = lines.next().unwrap_or_default();
        if !answers::is_percentage(said, percentage) {
            let expected = format!("{percentage}.0, the value now in force");
            return Err(unexpected(&set_percentage, said, &expected));
        }
        for (ordinal, mib) in memory_mib {
            let (said, expected) =
                (lines.next().unwrap_or_default(), answers::memory_limit_as_read_back(*mib));
            if said != expected {
                return Err(unexpected(&memory("get", *ordinal), said, &expected));
            }
        }
        pids(&lines.collect::<Vec<_>>().join("\n"))
    }

    /// Reads the limits of a server's future clients back, or without `server` the limits of future servers, and
    /// describes each that differs from the given value. A server that has ended has no limits. Memory is compared in
    /// whole GiB.
    pub(crate) async fn differing_limits(
        &self,
        server: Option<u32>,
        percentage: u8,
        memory_mib: &BTreeMap<usize, u64>,
    ) -> Result<Vec<String>, ControlError> {
        let (default, server) = target(server);
        // One front end asks for all of the limits.
        let mut commands = format!("get_{default}active_thread_percentage{server}");
        for ordinal in memory_mib.keys() {
            commands.push_str(&format!("\nget_{default}device_pinned_mem_limit{server} {ordinal}"));
        }
        let answer = self.ask_for_something(&commands).await?;
        Ok(answers::differences(&answer, percentage, memory_mib))
    }

    /// Starts the server of a user before the first client comes. The command has no answer, and no effect if the
    /// server exists already.
    pub(crate) async fn start_server(&self, uid: u32) -> Result<(), ControlError> {
        self.ask(&format!("start_server -uid {uid}")).await.map(|_| ())
    }

    /// Asks the control daemon to end as soon as it has no client. The control daemon obeys however long that takes.
    /// The error is [`ControlError::Silent`] if it still has a client after `timeout`.
    pub(crate) async fn quit_when_idle(&self, timeout: Duration) -> Result<(), ControlError> {
        self.ask_within("quit", timeout).await.map(|_| ())
    }

    /// Ends a server that has no client. A server with clients stays, and the command has no answer either way.
    pub(crate) async fn shut_down_idle_server(&self, server: u32) -> Result<(), ControlError> {
        self.ask(&format!("shutdown_server {server}")).await.map(|_| ())
    }

    /// Ends a server and its clients. The control daemon answers before the server is gone.
    pub(crate) async fn shut_down_server(&self, server: u32) -> Result<(), ControlError> {
        self.ask(&format!("shutdown_server {server} -f")).await.map(|_| ())
    }

    /// Asks the control daemon to end after it has given its clients `timeout`. The control daemon can hang for longer.
    /// The error is [`ControlError::Silent`] then.
    pub(crate) async fn quit(&self, timeout: Duration) -> Result<(), ControlError> {
        let command = format!("quit -t {}", timeout.as_secs().max(1));
        self.ask_within(&command, timeout + Duration::from_secs(1)).await.map(|_| ())
    }
}

/// The PIDs in an answer to [`SERVERS`].
fn pids(answer: &str) -> Result<Vec<u32>, ControlError> {
    answers::parse_pids(answer).ok_or_else(|| unexpected(SERVERS, answer, "a PID on each line"))
}

/// The part of a command's name and its argument that say for whom a limit is: a server's clients, or all servers
/// to come.
fn target(server: Option<u32>) -> (&'static str, String) {
    match server {
        Some(server) => ("", format!(" {server}")),
        None => ("default_", String::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A way to a control daemon, with this shell script in the place of the front end.
    fn control(directory: &Path, script: &str) -> Control {
        let program = directory.join("front-end");
        // The shell writes the program. If this process wrote it, a child that another thread forks meanwhile could
        // hold the file open, and the kernel executes no file that is open for writing.
        let write = "printf %s \"$2\" >\"$1\" && chmod 755 \"$1\"";
        let written =
            std::process::Command::new("sh").args(["-c", write, "sh"]).arg(&program).arg(script).status();
        assert!(written.unwrap().success());
        FrontEnds::new(program).of(directory)
    }

    #[tokio::test]
    async fn a_dropped_conversation_does_not_mean_no_clients() {
        let directory = tempfile::tempdir().unwrap();
        let dropped = directory.path().join("dropped");
        // The control daemon drops the first conversation about each command.
        let script = format!(
            "#!/bin/sh\nread -r command rest\nif mkdir {0}-$command 2>/dev/null; then exit 0; fi\n\
             case $command in get_server_list) echo 939;; get_client_list) echo 1153; echo 939;;\n\
             ps) echo PID ID SERVER DEVICE NAMESPACE COMMAND; echo 1153 33 939 GPU-168acfc9 4026531836 work;;\nesac\n",
            dropped.display()
        );
        let control = control(directory.path(), &script);
        let client = Client { pid: 1153, id: Some(33), server: 939, gpu_prefix: "GPU-168acfc9".to_owned() };
        assert_eq!(control.clients().await.unwrap(), [client]);
    }

    #[tokio::test]
    async fn no_clients_have_to_be_answered() {
        let directory = tempfile::tempdir().unwrap();
        let answers = |clients: &str| {
            format!(
                "#!/bin/sh\nread -r command rest\ncase $command in get_server_list) echo 939;; {clients}esac\n"
            )
        };
        let idle = control(directory.path(), &answers("get_client_list) echo 939;; "));
        assert_eq!(idle.client_pids().await.unwrap(), ClientPids::from([(939, BTreeSet::new())]));
        let silent = control(directory.path(), &answers(""));
        let error = silent.client_pids().await.unwrap_err();
        assert!(matches!(error, ControlError::Unanswered { .. }), "{error}");
    }
}
