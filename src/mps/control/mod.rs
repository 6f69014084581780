//! Sends commands to a control daemon through its front end, with a deadline, and verifies their effect.
//!
//! The front end is `nvidia-cuda-mps-control`, which reads commands from standard input. It exits with 0 for nearly everything,
//! answers a bad value with the old value, and does not answer most settings. So this module reads each setting back. The
//! control daemon sometimes fails when several front ends ask at once. So all calls for one pipe directory wait for each other,
//! in the order in which they came ([`FrontEnds`]).

mod answers;
mod error;
mod front_end;
mod inspection;

use common::host::socket::{connect, listener};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use mps_core::Permit;
use mps_core::mps::{Client, ClientPids, Inspection, Limits, ServerStatus};
use mps_core::tenants::ClientEnd;
use rustix::io::Errno;
use tokio::sync::Semaphore;
use tokio::time::timeout;

pub(crate) use error::ControlError;

use error::{name, unexpected};
use front_end::Queue;

/// The deadline for one answer of a control daemon. Measured: 2 ms. A stopped control daemon never answers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

const SERVERS: &str = "get_server_list";

/// This command always has an answer, such as `25.0`, which can't be a PID. So it separates the answers of commands that may
/// have no answer.
const PERCENTAGE: &str = "get_default_active_thread_percentage";

const LISTINGS: u32 = 4;

/// The most front ends that run at the same time. A host may have a control daemon for each of hundreds of slices.
const FRONT_ENDS: usize = 64;

/// Makes the [`Control`] for each pipe directory. Each pipe directory has one queue of front ends, and all clones share the
/// queues.
#[derive(Debug, Clone)]
pub(crate) struct FrontEnds {
    program: PathBuf,
    queues: Arc<Mutex<BTreeMap<PathBuf, Weak<Queue>>>>,
    places: Arc<Semaphore>,
}

impl FrontEnds {
    /// `program` is a path or a name in `PATH`.
    pub(crate) fn new(program: PathBuf) -> Self {
        Self { program, queues: Arc::default(), places: Arc::new(Semaphore::new(FRONT_ENDS)) }
    }

    /// Returns the [`Control`] for a pipe directory. The control daemon in this directory need not be one of the service.
    pub(crate) fn control_in(&self, pipe_directory: &Path) -> Control {
        let (program, pipe_directory) = (self.program.clone(), pipe_directory.to_owned());
        let queue = self.queue(&pipe_directory);
        Control { program, pipe_directory, queue, places: Arc::clone(&self.places) }
    }

    fn queue(&self, pipe_directory: &Path) -> Arc<Queue> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.retain(|_, queue| queue.strong_count() > 0);
        queues.get(pipe_directory).and_then(Weak::upgrade).unwrap_or_else(|| {
            let queue = Arc::default();
            queues.insert(pipe_directory.to_owned(), Arc::downgrade(&queue));
            queue
        })
    }
}

#[derive(Debug)]
pub(crate) struct Control {
    program: PathBuf,
    pipe_directory: PathBuf,
    queue: Arc<Queue>,
    places: Arc<Semaphore>,
}

impl Control {
    async fn ask(&self, command: &str) -> Result<String, ControlError> {
        self.ask_within(command, ANSWER_TIMEOUT).await
    }

    /// Sends a command that always has an answer. An empty answer is an error.
    async fn ask_for_something(&self, command: &str) -> Result<String, ControlError> {
        let answer = self.ask(command).await?;
        if answer.is_empty() {
            return Err(ControlError::Unanswered { command: name(command) });
        }
        Ok(answer)
    }

    async fn ask_within(&self, command: &str, patience: Duration) -> Result<String, ControlError> {
        let _turn = self.queue.lock().await;
        let _place = self.places.acquire().await;
        match timeout(patience, self.send(command)).await {
            Ok(answer) => answer,
            Err(_) => Err(ControlError::Silent { command: name(command), after: patience }),
        }
    }

    /// Sends a command again after an empty answer. The answer is empty if there is no client, but also if the control daemon
    /// hung and then closed the connection. A caller that mistakes a hung control daemon for an idle one could end a server
    /// that has clients. A control daemon that no longer hangs answers the second command.
    async fn ask_again_if_empty(&self, command: &str) -> Result<String, ControlError> {
        let answer = self.ask(command).await?;
        if answer.is_empty() { self.ask(command).await } else { Ok(answer) }
    }

    pub(crate) async fn server_status(&self, server: u32) -> Result<ServerStatus, ControlError> {
        Ok(self.inspect(&[server], None).await?.status(server))
    }

    /// Asks a control daemon in one conversation for all servers, for the statuses of the servers in `at`, and for the limits
    /// of these servers and of servers that are started later. Of the limits, the result has only those that differ from
    /// `limits`. A server that has ended is not compared. Memory limits of 1 GiB or more are compared in whole GiB.
    pub(crate) async fn inspect(
        &self,
        at: &[u32],
        limits: Option<&Limits>,
    ) -> Result<Inspection, ControlError> {
        let commands = inspection::commands(at, limits);
        let answer = self.ask_for_something(&commands).await?;
        inspection::parse(&answer, at, limits).ok_or_else(|| {
            unexpected(&commands, &answer, "the statuses, limits and PIDs that were asked for")
        })
    }

    /// The PIDs of the clients of each server. One conversation with the control daemon is enough if `expected` has the PIDs of
    /// all servers. No tenant can influence these lists. The answer to `ps`, however, has the names of programs unchanged, with
    /// their line breaks.
    pub(crate) async fn client_pids(&self, expected: &[u32]) -> Result<ClientPids, ControlError> {
        let mut servers: BTreeSet<u32> = expected.iter().copied().collect();
        for _ in 0..LISTINGS {
            let mut commands = PERCENTAGE.to_owned();
            for server in &servers {
                let _ = write!(commands, "\nget_client_list {server}\n{PERCENTAGE}");
            }
            let answer = self.ask_again_if_empty(&format!("{commands}\n{SERVERS}")).await?;
            if answer.is_empty() {
                break;
            }
            let (clients, there) = answers::parse_client_lists(&answer, &servers)
                .ok_or_else(|| unexpected(SERVERS, &answer, "a PID on each line"))?;
            if there == servers {
                return Ok(clients);
            }
            servers = there;
        }
        Err(ControlError::Unanswered { command: SERVERS.to_owned() })
    }

    pub(crate) async fn clients(&self, expected: &[u32]) -> Result<Vec<Client>, ControlError> {
        self.connections(&self.client_pids(expected).await?).await
    }

    /// The connections of the clients in `known`, and of no other clients. A program can choose its name so that `ps` shows a
    /// false connection of a client in `known`.
    pub(crate) async fn connections(&self, known: &ClientPids) -> Result<Vec<Client>, ControlError> {
        const COMMAND: &str = "ps";
        if known.values().all(BTreeSet::is_empty) {
            return Ok(Vec::new());
        }
        let answer = self.ask_again_if_empty(COMMAND).await?;
        let mut rows = answers::parse_clients(&answer)
            .ok_or_else(|| unexpected(COMMAND, &answer, "a table of clients"))?;
        rows.retain(|row| known.get(&row.server).is_some_and(|pids| pids.contains(&row.pid)));
        // `ps` may lack a client that has connected or ended just now. The missing client is added without its connection.
        for (server, pids) in known {
            for pid in pids {
                if !rows.iter().any(|row| (row.server, row.pid) == (*server, *pid)) {
                    rows.push(Client { pid: *pid, id: None, server: *server, gpu_prefix: String::new() });
                }
            }
        }
        Ok(rows)
    }

    /// Ends the GPU work of one client. The other clients of the server go on. `server` and `client` are PIDs. Measured: the
    /// GPU work ends within 12 ms, even during a long CUDA kernel.
    pub(crate) async fn terminate_client(
        &self,
        server: u32,
        client: u32,
        may_end: Permit,
    ) -> Result<ClientEnd, ControlError> {
        let command = format!("terminate_client {server} {client}");
        tracing::debug!("{command}: {:?}", may_end.cause());
        let answer = self.ask_for_something(&command).await?;
        answers::parse_terminated(&answer)
            .ok_or_else(|| unexpected(&command, &answer, "0, or 1 with a reason"))
    }

    /// The PID of the process that listens in the pipe directory, see [`listener`]. None while the service itself listens there
    /// with its waiting socket, which `waiting.rs` explains.
    pub(crate) fn daemon_pid(&self) -> Option<u32> {
        listener(&self.pipe_directory).filter(|pid| *pid != std::process::id())
    }

    /// True if it is certain that no process listens in the pipe directory.
    pub(crate) fn is_nobody(&self) -> bool {
        matches!(connect(&self.pipe_directory), Err(Errno::NOENT | Errno::CONNREFUSED))
    }

    /// Sets the active thread percentage, and the pinned memory limit of each GPU in MiB. The limits apply to the next clients
    /// of the running `server`, or without `server` to servers that are started later. The control daemon accepts any value, so
    /// the same front end reads all limits back. The control daemon reports a memory limit of 1 GiB or more only in whole GiB,
    /// and only the server's log has the exact value. Returns the PIDs of the servers. A `server` that has ended is not among
    /// them.
    pub(crate) async fn set_limits(
        &self,
        server: Option<u32>,
        limits: &Limits,
    ) -> Result<Vec<u32>, ControlError> {
        self.set(&inspection::setting(server, limits), limits).await
    }

    /// Sets the limits of servers that are started later, as [`Control::set_limits`] does. Then starts the server of a user,
    /// see [`Control::start_server`]. The result does not have the PID of this new server.
    pub(crate) async fn set_limits_and_start(
        &self,
        limits: &Limits,
        uid: u32,
    ) -> Result<Vec<u32>, ControlError> {
        self.set(&format!("{}\n{}", inspection::setting(None, limits), start(uid)), limits).await
    }

    async fn set(&self, commands: &str, limits: &Limits) -> Result<Vec<u32>, ControlError> {
        let answer = self.ask_for_something(commands).await?;
        inspection::parse_set(&answer, limits).ok_or_else(|| {
            unexpected(commands, &answer, &format!("{}, and the servers", inspection::set(limits).join(", ")))
        })
    }

    /// Starts the server of a user before the first client comes. The command has no answer, and no effect if the server exists
    /// already.
    pub(crate) async fn start_server(&self, uid: u32) -> Result<(), ControlError> {
        self.ask(&start(uid)).await.map(|_| ())
    }

    /// Asks the control daemon to end as soon as it has no client, which may be long after this call. The error is
    /// [`ControlError::Silent`] if the control daemon still has a client after `timeout`.
    pub(crate) async fn quit_when_idle(&self, timeout: Duration) -> Result<(), ControlError> {
        self.ask_within("quit", timeout).await.map(|_| ())
    }

    /// Ends a server that has no client. A server with clients stays. The control daemon never answers this command.
    pub(crate) async fn shut_down_idle_server(
        &self,
        server: u32,
        may_end: Permit,
    ) -> Result<(), ControlError> {
        self.end(&format!("shutdown_server {server}"), may_end).await
    }

    /// Ends a server and its clients. The control daemon answers before the server has ended.
    pub(crate) async fn shut_down_server(&self, server: u32, may_end: Permit) -> Result<(), ControlError> {
        self.end(&format!("shutdown_server {server} -f"), may_end).await
    }

    async fn end(&self, command: &str, may_end: Permit) -> Result<(), ControlError> {
        tracing::debug!("{command}: {:?}", may_end.cause());
        self.ask(command).await.map(|_| ())
    }

    /// Asks the control daemon to end with its clients. The clients have `timeout` to end by themselves. If the control daemon
    /// hangs for longer than `timeout`, the error is [`ControlError::Silent`].
    pub(crate) async fn quit(&self, timeout: Duration) -> Result<(), ControlError> {
        let command = format!("quit -t {}", timeout.as_secs().max(1));
        self.ask_within(&command, timeout + Duration::from_secs(1)).await.map(|_| ())
    }
}

fn start(uid: u32) -> String {
    format!("start_server -uid {uid}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control(directory: &Path, script: &str) -> Control {
        let program = directory.join("front-end");
        // The shell writes the program. If this process wrote it, a child that another thread forks meanwhile could inherit the
        // open file. The kernel refuses to execute a file that is open for writing.
        let write = "printf %s \"$2\" >\"$1\" && chmod 755 \"$1\"";
        let written =
            std::process::Command::new("sh").args(["-c", write, "sh"]).arg(&program).arg(script).status();
        assert!(written.unwrap().success());
        FrontEnds::new(program).control_in(directory)
    }

    #[tokio::test]
    async fn a_dropped_conversation_does_not_mean_no_clients() {
        let directory = tempfile::tempdir().unwrap();
        let dropped = directory.path().join("dropped");
        // This front end answers the first connection for each command with nothing, like a control daemon that has closed the
        // connection.
        let script = format!(
            "#!/bin/sh\nfirst=yes\nwhile read -r command rest; do\n\
             if test $first && mkdir {0}-$command 2>/dev/null; then exit 0; fi\nfirst=\n\
             case $command in get_default*) echo 100.0;; get_server_list) echo 939;; get_client_list) echo 1153;;\n\
             ps) echo PID ID SERVER DEVICE NAMESPACE COMMAND; echo 1153 33 939 GPU-168acfc9 4026531836 work;;\nesac\ndone\n",
            dropped.display()
        );
        let control = control(directory.path(), &script);
        let client = Client { pid: 1153, id: Some(33), server: 939, gpu_prefix: "GPU-168acfc9".to_owned() };
        assert_eq!(control.clients(&[]).await.unwrap(), [client]);
    }

    #[tokio::test]
    async fn no_clients_have_to_be_answered() {
        let directory = tempfile::tempdir().unwrap();
        let answers = |clients: &str| {
            format!(
                "#!/bin/sh\nwhile read -r command rest; do case $command in {clients}\nget_server_list) echo 939;; \
                 esac; done\n"
            )
        };
        let idle = control(directory.path(), &answers("get_default*) echo 100.0;;"));
        for expected in [&[][..], &[939], &[7]] {
            let clients = idle.client_pids(expected).await.unwrap();
            assert_eq!(clients, ClientPids::from([(939, BTreeSet::new())]), "{expected:?}");
        }
        let silent = control(directory.path(), "#!/bin/sh\n");
        let error = silent.client_pids(&[]).await.unwrap_err();
        assert!(matches!(error, ControlError::Unanswered { .. }), "{error}");
        let strange = control(directory.path(), &answers(""));
        let error = strange.client_pids(&[]).await.unwrap_err();
        assert!(matches!(error, ControlError::Unexpected { .. }), "{error}");
    }
}
