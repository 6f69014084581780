//! The control daemon's front end: one command at a time, with a deadline, and with its effect verified.
//!
//! The front end is `nvidia-cuda-mps-control`, which reads commands from standard input. It exits with 0 for nearly
//! everything, answers a bad value with the old one, and answers most settings with nothing. So each setting here is
//! read back. The control daemon sometimes fails when several front ends ask at once, so all calls for one pipe
//! directory stand in one queue ([`FrontEnds`]). Calls made for callers on the bus ([`CallersControl`]) wait behind the
//! supervisor's calls.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;
use tokio::sync::watch;
use tokio::time::timeout;

use super::turns::{Rank, Turns};
use crate::host::driver::is_unknown_command;

/// The deadline for one answer. Measured: 2 ms. A stopped control daemon never answers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest time that a bus caller's question waits for its turn. Each question before it takes [`ANSWER_TIMEOUT`]
/// at most.
const TURN_TIMEOUT: Duration = Duration::from_secs(10);

/// The number of tries for a command that the control daemon does not accept, and the pause between two tries. The
/// control daemon sometimes fails one of two front ends that ask at once.
const SENDS: u32 = 20;
const SEND_PAUSE: Duration = Duration::from_millis(25);

/// An answer has a few lines per client. More than this is not an answer.
const ANSWER_MAX_BYTES: usize = 1 << 20;

/// The reason why a command had no verified effect.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The front end could not be run.
    #[error("{program}: {source}")]
    NotRun {
        /// The program.
        program: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// No control daemon listens in the pipe directory.
    #[error("no control daemon answers in {pipe_directory}: {said}")]
    NoDaemon {
        /// The pipe directory.
        pipe_directory: PathBuf,
        /// The front end's own words.
        said: String,
    },
    /// The control daemon gave no answer in time: it hangs or is stopped.
    #[error("the control daemon did not answer `{command}` within {} s", after.as_secs())]
    Silent {
        /// The command.
        command: String,
        /// The deadline.
        after: Duration,
    },
    /// Others with a higher rank kept asking until the deadline.
    #[error("`{command}` did not get its turn at the control daemon within {} s", TURN_TIMEOUT.as_secs())]
    Crowded {
        /// The command.
        command: String,
    },
    /// The control daemon gave no answer to a command that always has one. It drops the conversations that waited while
    /// it hung.
    #[error("the control daemon gave no answer to `{command}`")]
    Unanswered {
        /// The command.
        command: String,
    },
    /// The answer is none that the command can have.
    #[error("`{command}` was answered with {answer:?}, expected {expected}")]
    Unexpected {
        /// The command.
        command: String,
        /// The answer, cut to a readable length.
        answer: String,
        /// The expected answer.
        expected: String,
    },
}

/// The status that a server reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServerStatus {
    /// The server is not ready yet.
    Initializing,
    /// The server takes clients.
    Active,
    /// The server met a fatal GPU error. It takes no client until the present clients are gone.
    Fault,
    /// There is no such server.
    Gone,
    /// The control daemon does not know the command.
    Unsupported,
}

/// Servers, each with the PIDs of its clients.
pub(crate) type ClientPids = BTreeMap<u32, BTreeSet<u32>>;

/// A connection of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Client {
    /// The client's PID on the host.
    pub pid: u32,
    /// The number that distinguishes the client's connections: a process that starts over gets another number. None if
    /// it is not known.
    pub id: Option<u64>,
    /// Its server's PID.
    pub server: u32,
    /// The beginning of its GPU's UUID. Empty if it is not known.
    pub gpu_prefix: String,
}

impl Client {
    /// Whether the client uses one of these GPUs.
    pub(crate) fn is_on<'a>(&self, mut uuids: impl Iterator<Item = &'a String>) -> bool {
        !self.gpu_prefix.is_empty() && uuids.any(|uuid| uuid.starts_with(&self.gpu_prefix))
    }
}

/// The result of the request to end a client's GPU work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Terminated {
    /// The client's GPU work has ended. The program gets CUDA error 810.
    Done,
    /// The server has no such client.
    NoSuchClient,
    /// There is no such server.
    NoSuchServer,
}

/// The kind of user that asks the control daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caller {
    /// Root, who waits for no other user.
    Root,
    /// Any other user.
    User,
}

impl Caller {
    /// The kind of this user. If the service does not run as root, its own user counts as root.
    pub(crate) fn of(uid: u32) -> Self {
        let is_root = uid == 0 || uid == rustix::process::geteuid().as_raw();
        if is_root { Self::Root } else { Self::User }
    }
}

/// One control daemon, for its supervisor, who asks before everybody else.
#[derive(Debug)]
pub(crate) struct Control {
    front_end: Arc<FrontEnd>,
    rank: Rank,
}

#[derive(Debug)]
struct FrontEnd {
    program: PathBuf,
    pipe_directory: PathBuf,
    turns: Arc<Turns>,
}

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

    /// The way to the control daemon of this pipe directory, even if this service did not start it. All calls share one
    /// queue.
    pub(crate) fn of(&self, pipe_directory: &Path) -> Control {
        let (program, pipe_directory) = (self.program.clone(), pipe_directory.to_owned());
        let turns = self.queue(&pipe_directory);
        Control { front_end: Arc::new(FrontEnd { program, pipe_directory, turns }), rank: Rank::Supervisor }
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
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()?;
    net::connect(&socket, &SocketAddrUnix::new(pipe_directory.join("control")).ok()?).ok()?;
    let peer = net::sockopt::socket_peercred(&socket).ok()?;
    u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
}

/// The same control daemon for a caller on the bus: the caller waits for a turn and can only ask what callers may ask.
#[derive(Debug)]
pub(crate) struct CallersControl(Control);

/// The way to a supervised control daemon for callers on the bus.
#[derive(Debug, Clone)]
pub(crate) struct Access {
    /// None while no control daemon runs.
    control: watch::Receiver<Option<Arc<Control>>>,
    caller: Caller,
}

impl Access {
    /// The access for this caller.
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
        let is_it = |now: &Arc<Control>| Arc::ptr_eq(&now.front_end, &asked.0.front_end);
        // An error means that its supervisor has ended.
        let _ = control.wait_for(|now| !now.as_ref().is_some_and(is_it)).await;
    }
}

impl CallersControl {
    /// The status that a server reports.
    ///
    /// # Errors
    /// The control daemon gave no answer, or one that the command can't have.
    pub(crate) async fn server_status(&self, server: u32) -> Result<ServerStatus, ControlError> {
        self.0.server_status(server).await
    }

    /// The servers, each with the PIDs of its clients.
    ///
    /// # Errors
    /// The control daemon gave no answer, or one that the command can't have.
    pub(crate) async fn client_pids(&self) -> Result<ClientPids, ControlError> {
        self.0.client_pids().await
    }

    /// See [`Control::connections`].
    ///
    /// # Errors
    /// The control daemon gave no answer, or one that the command can't have.
    pub(crate) async fn connections(&self, known: &ClientPids) -> Result<Vec<Client>, ControlError> {
        self.0.connections(known).await
    }

    /// The clients of every server.
    ///
    /// # Errors
    /// The control daemon gave no answer, or one that the command can't have.
    pub(crate) async fn clients(&self) -> Result<Vec<Client>, ControlError> {
        self.0.clients().await
    }

    /// Ends the GPU work of one client of a server and leaves the server's other clients alone. Both are given by their
    /// PIDs. Measured: 12 ms, even during a long kernel.
    ///
    /// # Errors
    /// The control daemon gave no answer, or one that the command can't have.
    pub(crate) async fn terminate_client(
        &self,
        server: u32,
        client: u32,
    ) -> Result<Terminated, ControlError> {
        let command = format!("terminate_client {server} {client}");
        let answer = self.0.ask_for_something(&command).await?;
        parse_terminated(&answer).ok_or_else(|| unexpected(&command, &answer, "0, or 1 with a reason"))
    }
}

impl Control {
    /// The same control daemon for a caller on the bus.
    pub(crate) fn on_behalf(&self, caller: Caller) -> CallersControl {
        let rank = match caller {
            Caller::Root => Rank::Root,
            Caller::User => Rank::User,
        };
        CallersControl(Self { front_end: Arc::clone(&self.front_end), rank })
    }

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
            Rank::Root | Rank::User => timeout(TURN_TIMEOUT, turn)
                .await
                .map_err(|_| ControlError::Crowded { command: command.to_owned() })?,
        };
        match timeout(patience, self.front_end.ask(command)).await {
            Ok(answer) => answer,
            Err(_) => Err(ControlError::Silent { command: command.to_owned(), after: patience }),
        }
    }

    /// See [`listener`].
    pub(crate) fn daemon_pid(&self) -> Option<u32> {
        listener(&self.front_end.pipe_directory)
    }

    /// The PIDs of the servers. The answer also proves that the control daemon responds.
    pub(crate) async fn servers(&self) -> Result<Vec<u32>, ControlError> {
        const COMMAND: &str = "get_server_list";
        let answer = self.ask(COMMAND).await?;
        parse_pids(&answer).ok_or_else(|| unexpected(COMMAND, &answer, "a PID on each line"))
    }

    /// The status that a server reports.
    pub(crate) async fn server_status(&self, server: u32) -> Result<ServerStatus, ControlError> {
        let command = format!("get_server_status {server}");
        let answer = self.ask_for_something(&command).await?;
        parse_status(&answer).ok_or_else(|| unexpected(&command, &answer, "INITIALIZING, ACTIVE or FAULT"))
    }

    /// The servers, each with the PIDs of its clients. No tenant can influence these answers, unlike that of `ps`,
    /// which prints the names of programs as they are, line breaks included.
    pub(crate) async fn client_pids(&self) -> Result<ClientPids, ControlError> {
        const COMMAND: &str = "get_server_list";
        let answer = self.ask_again_if_empty(COMMAND).await?;
        let servers =
            parse_pids(&answer).ok_or_else(|| unexpected(COMMAND, &answer, "a PID on each line"))?;
        let mut all = ClientPids::new();
        for server in servers {
            let command = format!("get_client_list {server}");
            let answer = self.ask_again_if_empty(&command).await?;
            let clients = parse_client_list(&answer)
                .ok_or_else(|| unexpected(&command, &answer, "a PID on each line"))?;
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
        let mut rows =
            parse_clients(&answer).ok_or_else(|| unexpected(COMMAND, &answer, "a table of clients"))?;
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

    /// Asks again after an empty answer. The control daemon answers nothing if there is no client, but also if it hung
    /// and dropped the conversation. A caller that took the second case for the first could end a server that has
    /// clients. A control daemon that answers again does not drop the second question.
    async fn ask_again_if_empty(&self, command: &str) -> Result<String, ControlError> {
        let answer = self.ask(command).await?;
        if answer.is_empty() { self.ask(command).await } else { Ok(answer) }
    }

    /// Sets the active thread percentage of future servers.
    pub(crate) async fn set_default_thread_percentage(&self, percentage: u8) -> Result<(), ControlError> {
        self.set_percentage(&format!("set_default_active_thread_percentage {percentage}"), percentage).await
    }

    /// The answer to either command is the value that now applies.
    async fn set_percentage(&self, command: &str, percentage: u8) -> Result<(), ControlError> {
        let answer = self.ask_for_something(command).await?;
        if is_percentage(&answer, percentage) {
            return Ok(());
        }
        Err(unexpected(command, &answer, &format!("{percentage}.0, the value now in force")))
    }

    /// Sets the device pinned memory limit, in MiB, of future servers, for the GPU of this ordinal. The control daemon
    /// accepts anything and answers nothing. It reports the limit in whole GiB, so the check is only as exact as that.
    /// The log has the exact value once a server runs.
    pub(crate) async fn set_default_memory_limit(
        &self,
        ordinal: usize,
        mib: u64,
    ) -> Result<(), ControlError> {
        self.ask(&format!("set_default_device_pinned_mem_limit {ordinal} {mib}M")).await?;
        self.check_memory_limit(&format!("get_default_device_pinned_mem_limit {ordinal}"), mib).await
    }

    async fn check_memory_limit(&self, command: &str, mib: u64) -> Result<(), ControlError> {
        let answer = self.ask_for_something(command).await?;
        let expected = memory_limit_as_read_back(mib);
        if answer.trim() == expected { Ok(()) } else { Err(unexpected(command, &answer, &expected)) }
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

    /// Sets the active thread percentage of a running server's future clients.
    pub(crate) async fn set_thread_percentage(
        &self,
        server: u32,
        percentage: u8,
    ) -> Result<(), ControlError> {
        self.set_percentage(&format!("set_active_thread_percentage {server} {percentage}"), percentage).await
    }

    /// Sets the device pinned memory limit, in MiB, of a running server's future clients. It is verified to the GiB,
    /// like [`Control::set_default_memory_limit`]. The server writes the exact value to its log.
    pub(crate) async fn set_memory_limit(
        &self,
        server: u32,
        ordinal: usize,
        mib: u64,
    ) -> Result<(), ControlError> {
        self.ask(&format!("set_device_pinned_mem_limit {server} {ordinal} {mib}M")).await?;
        self.check_memory_limit(&format!("get_device_pinned_mem_limit {server} {ordinal}"), mib).await
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

    /// Reads the limits of a server's future clients back, or without `server` the limits of future servers, and
    /// describes each that differs from the given value. A server that has ended has no limits. Memory is compared in
    /// whole GiB.
    pub(crate) async fn differing_limits(
        &self,
        server: Option<u32>,
        percentage: u8,
        memory_mib: &BTreeMap<usize, u64>,
    ) -> Result<Vec<String>, ControlError> {
        let (of, server) = match server {
            Some(server) => ("", format!(" {server}")),
            None => ("default_", String::new()),
        };
        // One front end asks for all of the limits.
        let mut commands = format!("get_{of}active_thread_percentage{server}");
        for ordinal in memory_mib.keys() {
            commands.push_str(&format!("\nget_{of}device_pinned_mem_limit{server} {ordinal}"));
        }
        let answer = self.ask_for_something(&commands).await?;
        Ok(differences(&answer, percentage, memory_mib))
    }
}

/// The differences in an answer that has one line for the percentage and one for the memory limit of each GPU.
fn differences(answer: &str, percentage: u8, memory_mib: &BTreeMap<usize, u64>) -> Vec<String> {
    let mut lines = answer.lines().map(|line| shorten(line.trim()));
    let said = lines.next().unwrap_or_default();
    if said.starts_with("Server") || is_unknown_command(&said) {
        return Vec::new();
    }
    let mut found = Vec::new();
    if !is_percentage(&said, percentage) {
        found.push(format!("active thread percentage {said} instead of {percentage}"));
    }
    let limits: Vec<String> = lines.collect();
    if limits.len() == memory_mib.len() {
        let differing = memory_mib
            .iter()
            .zip(limits)
            .filter(|((_, mib), said)| *said != memory_limit_as_read_back(**mib));
        found.extend(differing.map(|((ordinal, mib), said)| {
            format!("device pinned memory limit {said} instead of {mib} MiB on device {ordinal}")
        }));
    } else {
        // The control daemon answers nothing for a limit that is not set.
        found.push("no device pinned memory limit on some device".to_owned());
    }
    found
}

fn is_percentage(said: &str, percentage: u8) -> bool {
    said.trim().parse().is_ok_and(|value: f64| (value - f64::from(percentage)).abs() < 0.05)
}

/// The beginning of a line of an answer, for a message.
fn shorten(line: &str) -> String {
    line.chars().take(40).collect()
}

impl FrontEnd {
    /// Asks until the control daemon accepts the command. Every local user may ask at the same moment, so one try may
    /// fail.
    async fn ask(&self, command: &str) -> Result<String, ControlError> {
        for _ in 0..SENDS {
            if let Some(answer) = self.run(command).await? {
                return Ok(answer);
            }
            tokio::time::sleep(SEND_PAUSE).await;
        }
        Err(ControlError::Unanswered { command: command.to_owned() })
    }

    /// Runs the front end with one command and returns its output without the last newline. None if the control daemon
    /// did not accept the command.
    async fn run(&self, command: &str) -> Result<Option<String>, ControlError> {
        let not_run = |source| ControlError::NotRun { program: self.program.clone(), source };
        let mut front_end = Command::new(&self.program)
            .env("CUDA_MPS_PIPE_DIRECTORY", &self.pipe_directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A front end that waits for a stopped control daemon ends when the caller gives up.
            .kill_on_drop(true)
            .spawn()
            .map_err(not_run)?;
        if let Some(mut stdin) = front_end.stdin.take() {
            // A front end that finds no control daemon may end before it reads the command. Its output then tells the
            // reason.
            let _ = stdin.write_all(format!("{command}\n").as_bytes()).await;
        }
        let (stdout, stderr) = (front_end.stdout.take(), front_end.stderr.take());
        let (stdout, stderr) = tokio::try_join!(read(stdout), read(stderr)).map_err(not_run)?;
        let answer = String::from_utf8_lossy(&stdout);
        if stdout.len() > ANSWER_MAX_BYTES {
            return Err(unexpected(command, &answer, "at most 1 MiB"));
        }
        let status = front_end.wait().await.map_err(not_run)?;
        let said = String::from_utf8_lossy(&stderr);
        if said.contains("Cannot send command") {
            return Ok(None);
        }
        if !status.success() || said.contains("Cannot find MPS control daemon") {
            let said = if said.trim().is_empty() { status.to_string() } else { said.trim().to_owned() };
            return Err(ControlError::NoDaemon { pipe_directory: self.pipe_directory.clone(), said });
        }
        Ok(Some(answer.trim_end_matches('\n').to_owned()))
    }
}

/// Reads everything that a front end prints, up to one byte more than the allowed size.
async fn read(stream: Option<impl AsyncRead + Unpin>) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        stream.take(ANSWER_MAX_BYTES as u64 + 1).read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}

fn unexpected(command: &str, answer: &str, expected: &str) -> ControlError {
    let mut short: String = answer.chars().take(200).collect();
    if short.len() < answer.len() {
        short.push('…');
    }
    ControlError::Unexpected { command: command.to_owned(), answer: short, expected: expected.to_owned() }
}

/// A memory limit, set in MiB, in the form in which the control daemon reports it: in MiB below 1 GiB, otherwise in
/// whole GiB.
fn memory_limit_as_read_back(mib: u64) -> String {
    if mib < 1024 { format!("{mib}M") } else { format!("{}G", mib / 1024) }
}

fn parse_pids(answer: &str) -> Option<Vec<u32>> {
    answer.lines().map(str::trim).filter(|line| !line.is_empty()).map(|line| line.parse().ok()).collect()
}

/// The PIDs of a server's clients. A server that has gone has none.
fn parse_client_list(answer: &str) -> Option<BTreeSet<u32>> {
    let is_gone = answer.starts_with("Server") && answer.trim_end().ends_with("not found");
    if is_gone { Some(BTreeSet::new()) } else { Some(parse_pids(answer)?.into_iter().collect()) }
}

fn parse_status(answer: &str) -> Option<ServerStatus> {
    match answer.trim() {
        "INITIALIZING" => Some(ServerStatus::Initializing),
        "ACTIVE" => Some(ServerStatus::Active),
        "FAULT" => Some(ServerStatus::Fault),
        other if other.starts_with("Server") && other.ends_with("not found") => Some(ServerStatus::Gone),
        other if is_unknown_command(other) => Some(ServerStatus::Unsupported),
        _ => None,
    }
}

/// The answer is a line `0`, or a reason and a line `1`.
fn parse_terminated(answer: &str) -> Option<Terminated> {
    let mut lines = answer.lines().map(str::trim).filter(|line| !line.is_empty());
    let reason = lines.next()?;
    match (reason, lines.next_back()) {
        ("0", None) => Some(Terminated::Done),
        (reason, Some("1")) if reason.starts_with("Invalid process") => Some(Terminated::NoSuchClient),
        (reason, Some("1")) if reason.starts_with("Server") && reason.contains("not found") => {
            Some(Terminated::NoSuchServer)
        }
        _ => None,
    }
}

fn parse_clients(answer: &str) -> Option<Vec<Client>> {
    let mut lines = answer.lines().filter(|line| !line.trim().is_empty());
    match lines.next() {
        // An empty answer or `Server not found` means that there is no server, so there is no client.
        None => return Some(Vec::new()),
        Some(first) if first.trim() == "Server not found" => return Some(Vec::new()),
        Some(header)
            if header.split_whitespace().eq(["PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND"]) => {}
        Some(_) => return None,
    }
    // A line that is no row is the rest of a program's name with a line break in it.
    Some(lines.filter_map(parse_client).collect())
}

/// A row of `ps`, up to the GPU. The tenant can choose the rest of the row.
fn parse_client(line: &str) -> Option<Client> {
    let mut fields = line.split_whitespace();
    let pid = fields.next()?.parse().ok()?;
    let id = Some(fields.next()?.parse().ok()?);
    let server = fields.next()?.parse().ok()?;
    let gpu_prefix = fields.next()?.to_owned();
    Some(Client { pid, id, server, gpu_prefix })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    // Control daemons of drivers 535, 550, 555 and 580 gave the answers below.

    #[test]
    fn server_lists() {
        assert_eq!(parse_pids(""), Some(vec![]));
        assert_eq!(parse_pids("939\n944"), Some(vec![939, 944]));
        assert_eq!(parse_pids("Unknown command \"get_server_list\""), None);
    }

    #[test]
    fn server_statuses() {
        assert_eq!(parse_status("ACTIVE"), Some(ServerStatus::Active));
        assert_eq!(parse_status("INITIALIZING"), Some(ServerStatus::Initializing));
        assert_eq!(parse_status("FAULT"), Some(ServerStatus::Fault));
        assert_eq!(parse_status("Server 1 not found"), Some(ServerStatus::Gone));
        assert_eq!(parse_status("Unknown command \"get_server_status\""), Some(ServerStatus::Unsupported));
        assert_eq!(parse_status("garbage"), None);
    }

    #[test]
    fn client_tables() {
        assert_eq!(parse_clients("Server not found"), Some(vec![]));
        assert_eq!(parse_clients(""), Some(vec![]));
        let table = "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        \n\
                     1153      33        939            GPU-168acfc9-c926-5401    4026531836     /tmp/work      ";
        let client =
            Client { pid: 1153, id: Some(33), server: 939, gpu_prefix: "GPU-168acfc9-c926-5401".to_owned() };
        assert_eq!(parse_clients(table), Some(vec![client]));
        let blank = "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        \n\
            3523      1         3526           GPU-76aef7ff-372d-2432                   cuda-client    ";
        let pids = |table: &str| parse_clients(table).map(|all| all.iter().map(|one| one.pid).collect());
        assert_eq!(pids(blank), Some(vec![3523]));
        let broken = format!("{blank}\nb/c\n3524 2 3526 GPU-76aef7ff-372d-2432 4026531836 other");
        assert_eq!(pids(&broken), Some(vec![3523, 3524]));
        assert_eq!(pids("PID ID SERVER DEVICE NAMESPACE COMMAND\nx 1 2 G 3 c"), Some(vec![]));
        assert_eq!(pids("garbage"), None);
    }

    #[test]
    fn client_lists() {
        assert_eq!(parse_client_list(""), Some(BTreeSet::new()));
        assert_eq!(parse_client_list("1153\n1154\n1153"), Some(BTreeSet::from([1153, 1154])));
        assert_eq!(parse_client_list("Server 1 not found"), Some(BTreeSet::new()));
        assert_eq!(parse_client_list("Unknown command \"get_client_list\""), None);
    }

    #[test]
    fn a_client_without_a_gpu_is_on_none() {
        let on = |gpu_prefix: &str| {
            Client { pid: 1, id: None, server: 2, gpu_prefix: gpu_prefix.to_owned() }
                .is_on([&"GPU-76aef7ff-372d".to_owned()].into_iter())
        };
        assert!(on("GPU-76aef7ff") && !on("GPU-86") && !on(""));
    }

    #[test]
    fn terminated_clients() {
        assert_eq!(parse_terminated("0"), Some(Terminated::Done));
        assert_eq!(parse_terminated("Invalid process 99999!\n1"), Some(Terminated::NoSuchClient));
        assert_eq!(parse_terminated("Server 1 not found!\n1"), Some(Terminated::NoSuchServer));
        for other in ["", "1", "00", "0\n1", "Unknown command \"terminate_client\"", "Invalid process 1!\n0"]
        {
            assert_eq!(parse_terminated(other), None, "{other:?}");
        }
    }

    #[test]
    fn limits_read_back_floored_to_gib() {
        for (mib, expected) in [(512, "512M"), (1023, "1023M"), (1024, "1G"), (5760, "5G"), (35942, "35G")] {
            assert_eq!(memory_limit_as_read_back(mib), expected);
        }
    }

    #[test]
    fn limits_that_differ_are_described() {
        let memory = BTreeMap::from([(0, 35942), (1, 512)]);
        let found = |answer: &str| differences(answer, 25, &memory);
        assert_eq!(found("25.0\n35G\n512M"), Vec::<String>::new());
        assert_eq!(
            found("7.0\n1G\n512M"),
            [
                "active thread percentage 7.0 instead of 25",
                "device pinned memory limit 1G instead of 35942 MiB on device 0"
            ]
        );
        assert_eq!(found("25.0\n35G"), ["no device pinned memory limit on some device"]);
        assert_eq!(found("Server 1 not found\nServer 1 not found\nServer 1 not found"), Vec::<String>::new());
        assert_eq!(found("Unknown command \"get_active_thread_percentage\""), Vec::<String>::new());
        assert_eq!(found(&"x".repeat(9999))[0].len(), "active thread percentage  instead of 25".len() + 40);
    }

    #[tokio::test]
    async fn a_dropped_conversation_does_not_mean_no_clients() {
        let directory = tempfile::tempdir().unwrap();
        let (program, dropped) = (directory.path().join("front-end"), directory.path().join("dropped"));
        // The control daemon drops the first conversation about each command.
        let script = format!(
            "#!/bin/sh\nread -r command rest\nif mkdir {0}-$command 2>/dev/null; then exit 0; fi\n\
             case $command in get_server_list) echo 939;; get_client_list) echo 1153;;\n\
             ps) echo PID ID SERVER DEVICE NAMESPACE COMMAND; echo 1153 33 939 GPU-168acfc9 4026531836 work;;\nesac\n",
            dropped.display()
        );
        // The shell writes the program. If this process wrote it, a child that another thread forks meanwhile could
        // hold the file open, and the kernel executes no file that is open for writing.
        let write = "printf %s \"$2\" >\"$1\" && chmod 755 \"$1\"";
        let written =
            std::process::Command::new("sh").args(["-c", write, "sh"]).arg(&program).arg(script).status();
        assert!(written.unwrap().success());
        let control = FrontEnds::new(program).of(directory.path());
        let client = Client { pid: 1153, id: Some(33), server: 939, gpu_prefix: "GPU-168acfc9".to_owned() };
        assert_eq!(control.clients().await.unwrap(), [client]);
    }

    proptest! {
        #[test]
        fn no_answer_makes_the_parsers_panic(answer in "\\PC{0,300}(\n\\PC{0,80}){0,5}") {
            let _ = (parse_pids(&answer), parse_status(&answer), parse_clients(&answer));
            let _ = (parse_terminated(&answer), parse_client_list(&answer));
            let _ = unexpected("ps", &answer, "").to_string();
        }
    }
}
