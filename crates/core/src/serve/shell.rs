//! All questions and acts that serving needs, and the events and requests that come to it. The service carries them out with
//! processes, files and NVML, the tests' world in memory.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use super::blocker::ShownState;
use super::gpus::{GpuReach, GpuShell};
use crate::mps::{Client, ClientPids, Inspection, Limits, Meaning};
use crate::terms::ProcessId;
use crate::{CoreTime, GpuUuid, Permit};

/// The next event of a control daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Occurrence {
    /// The control daemon or a server has written a line to the log.
    Said(Said),
    /// The control daemon has ended.
    Ended,
    /// One of its servers has ended.
    ServerEnded(u32),
    /// A request has come. [`Shell::answer`] answers a request that has an answer.
    Asked(Requested),
    /// Nothing has happened until the deadline.
    Nothing,
}

/// A line of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    pub meaning: Meaning,
    /// False if an earlier service has read the line already.
    pub is_news: bool,
}

/// A request about a control daemon that serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requested {
    /// Make a change that waits for the end of clients: now if `force` is set, or if there are none. The caller gets an answer.
    Apply {
        /// True if the change also ends clients.
        force: bool,
    },
    /// Check now.
    Check,
    /// End the server and start a new one, if the server has no clients. The caller gets an answer.
    RestartServer,
}

/// Why a control daemon does not serve, or has not answered, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The control daemon does not work properly.
    Failed(String),
    /// The process has ended. The cause may be that it does not know the multi-user option.
    Ended {
        /// How it has ended.
        text: String,
        /// True if the control daemon does not know the multi-user option.
        refuses_multiuser: bool,
    },
    /// Something outside must change first.
    Waiting(String),
    /// A control daemon that the service has not started is in its place, and has clients. It stays until they have ended.
    InUse(String),
    /// Something else is not ready: a part of the driver that is loaded later, or the front end's program while an upgrade
    /// replaces it. The control daemon itself may work.
    NotYet(String),
    /// The control daemon has not answered in time, or has closed the connection without an answer.
    Silent(String),
    /// No process listens in its directory.
    Unreachable(String),
    /// The service does not understand the answers, which may be those of a newer driver. A new control daemon would answer the
    /// same.
    NotUnderstood(String),
}

impl Failure {
    /// The reason.
    pub fn into_text(self) -> String {
        match self {
            Self::Failed(text)
            | Self::Ended { text, .. }
            | Self::Waiting(text)
            | Self::InUse(text)
            | Self::NotYet(text)
            | Self::Silent(text)
            | Self::Unreachable(text)
            | Self::NotUnderstood(text) => text,
        }
    }
}

/// The kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// An ordinary event.
    Event,
    /// An administrator may have to act.
    Warning,
    /// A server has met a fatal GPU error.
    ServerFault {
        /// The server's PID.
        server: u32,
    },
    /// A server has ended by itself.
    ServerFailed {
        /// The server's PID.
        server: u32,
    },
}

/// Something that is published until it changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Showing {
    /// The state of the control daemon. None: the shown state stays.
    State {
        /// The state.
        state: Option<ShownState>,
        /// True if the control daemon ends as soon as it has no client.
        ends_when_idle: bool,
    },
    /// The next step waits for the end of clients, which may take days.
    PutOff,
    /// The active thread percentage that is in force.
    InForce {
        /// The percentage.
        thread_percentage: u8,
    },
    /// The servers, and the GPUs of the order.
    Servers {
        /// The PIDs of the servers, the newest last.
        alive: Vec<u32>,
        /// By UUID.
        gpus: BTreeMap<GpuUuid, ShownGpu>,
    },
    /// The clients that have waited long for a server.
    WaitingClients(Vec<ProcessId>),
}

/// A GPU as it is published.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ShownGpu {
    /// The memory limit in MiB that a running server has in force.
    pub memory_limit_mib: Option<u64>,
    /// Why the GPU is not served as planned; empty if it is.
    pub reason: String,
    /// The reason why the GPU takes no more clients; empty while it takes clients.
    pub full: String,
    /// The number of its clients, if NVML does not list them and the control daemon was asked.
    pub unlisted_clients: Option<u32>,
}

/// The clients on each GPU by UUID, as NVML lists them, or the reason why NVML does not list them.
pub type ClientsOnGpus = BTreeMap<GpuUuid, Result<BTreeSet<u32>, String>>;

/// Carries out all decisions about one running control daemon. Each call returns: it has its own deadline.
pub trait Shell: GpuShell {
    /// The present moment.
    fn now(&self) -> CoreTime;

    /// Waits for the next event, at most until a moment. Requests come only through this call. An error: the log can't be read.
    fn next(
        &mut self,
        until: CoreTime,
        takes_requests: bool,
    ) -> impl Future<Output = Result<Occurrence, Failure>> + Send;

    /// Waits, and ignores all events.
    fn pause(&mut self, duration: Duration) -> impl Future<Output = ()> + Send;

    /// The present end of the log. With `skips`, all but the last lines before it are skipped. None: it is not known.
    fn end_of_log(&mut self, skips: bool) -> Option<u64>;

    /// The next line before this place in the log. Each call returns one line, so that no line is lost when an act is broken off.
    fn line_before(&mut self, end: u64) -> impl Future<Output = Option<Said>> + Send;

    /// The last lines of the log, as the end of a sentence.
    fn words(&self) -> String;

    /// Why servers do not start yet, by the last lines of the log, if the reason will pass without an administrator.
    fn not_ready_yet(&self) -> Option<String>;

    /// Returns true if the process has ended, or ends within a moment.
    fn ends_now(&mut self) -> impl Future<Output = bool> + Send;

    /// The failure with the exit status in words.
    fn how_it_ended(&self) -> Failure;

    /// Asks for all servers, for the statuses of `servers`, and for the limits that differ, of these and of servers that are
    /// started later. A server that has ended has no limits.
    fn inspect(
        &mut self,
        servers: &[u32],
        limits: Option<&Limits>,
    ) -> impl Future<Output = Result<Inspection, Failure>> + Send;

    /// Sets the limits of a server's next clients. Without `server`, sets the defaults of servers that are started later. Returns
    /// the servers.
    fn set_limits(
        &mut self,
        server: Option<u32>,
        limits: &Limits,
    ) -> impl Future<Output = Result<Vec<u32>, Failure>> + Send;

    /// Sets the defaults of servers that are started later, and starts the server of root. The returned servers do not include
    /// this one.
    fn set_limits_and_start(
        &mut self,
        limits: &Limits,
    ) -> impl Future<Output = Result<Vec<u32>, Failure>> + Send;

    /// Starts the server of root, unless it runs.
    fn start_server(&mut self) -> impl Future<Output = Result<(), Failure>> + Send;

    /// The clients of each server. `expected` are the known servers.
    fn client_pids(&mut self, expected: &[u32]) -> impl Future<Output = Result<ClientPids, Failure>> + Send;

    /// The connections of all clients.
    fn clients(&mut self, expected: &[u32]) -> impl Future<Output = Result<Vec<Client>, Failure>> + Send;

    /// Ends a server if it has no client.
    fn shut_down_idle_server(
        &mut self,
        server: u32,
        may_end: Permit,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Ends a server with its clients.
    fn shut_down_server(
        &mut self,
        server: u32,
        may_end: Permit,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// The PID of the control daemon.
    fn pid(&self) -> u32;

    /// The process that listens in the directory of the control daemon.
    fn listener(&self) -> Option<u32>;

    /// True if it is certain that no process listens there.
    fn is_nobody(&self) -> bool;

    /// True if the control daemon has child processes, which are its servers. None: that is not known.
    fn has_children(&self) -> Option<bool>;

    /// Continues the control daemon and these servers if a signal has stopped them, and writes a message about it.
    fn continue_if_stopped(&mut self, servers: &[u32]);

    /// Asks the control daemon to end as soon as it has no client. Returns true if it has ended.
    fn quit_if_idle(&mut self, may_end: Permit) -> impl Future<Output = bool> + Send;

    /// Asks the control daemon to end with its clients. Returns true if it has ended.
    fn quit(&mut self, may_end: Permit) -> impl Future<Output = bool> + Send;

    /// Ends the control daemon by signals, with its clients. Returns true if it has ended.
    fn end_by_signal(&mut self, may_end: Permit) -> impl Future<Output = bool> + Send;

    /// The clients that NVML lists on the GPUs of the control daemon. If several control daemons serve a GPU, NVML does not say
    /// which client belongs to which of them. Then the result has only those clients that are in `ours`, and is an error if there
    /// are only others.
    fn clients_on_gpus(&mut self, ours: &BTreeSet<u32>) -> impl Future<Output = ClientsOnGpus> + Send;

    /// The programs on its GPUs that are neither servers nor clients, in words; empty if there are none.
    fn holders(&mut self, servers: &[u32]) -> impl Future<Output = String> + Send;

    /// True if a process runs as this user.
    fn runs_as(&self, pid: u32, uid: u32) -> bool;

    /// The command of a process, for people; empty if it has ended.
    fn command(&self, pid: u32) -> String;

    /// Gives clients of every user access to the socket, and lets only root command the control daemon. Returns the reasons why
    /// that fails.
    fn let_users_in(&mut self) -> Vec<String>;

    /// Makes the links point to the control daemon, which has its limits.
    ///
    /// # Errors
    /// The control daemon's own directory can't be used.
    fn lead_here(&mut self) -> Result<(), Failure>;

    /// Renews the links that other programs have removed or replaced. Returns the reason why that fails.
    fn keep_links(&mut self) -> Option<String>;

    /// Makes the links point to the waiting socket, so that new programs wait. If the control daemon has its socket in the pipe
    /// directory itself, this way stays open.
    ///
    /// # Errors
    /// These links still point to the control daemon.
    fn keep_waiting(&mut self) -> Result<(), String>;

    /// Makes the links point to the control daemon again.
    fn reopen_ways(&mut self);

    /// Releases the programs that have waited. Each starts without MPS, unless a server prevents it from using the GPU.
    fn let_go(&mut self);

    /// Updates the state file and all that is shown about the process. A log that can't be written is reported only if the
    /// control daemon stays.
    fn keep_state_file(&mut self, stays: bool);

    /// Begins the log again if it has become too long.
    fn rotate_log(&mut self);

    /// True if the control daemon has the pipe directory of the order.
    fn is_in_place(&self) -> bool;

    /// Why the order needs another control daemon than the running one. A GPU that is left out is no reason.
    fn misfit(&self, reach: &GpuReach) -> Option<String>;

    /// A step towards serving the order is done.
    fn passed(&self, step: &'static str, text: &str);

    /// Writes a message, once.
    fn tell(&mut self, news: News, text: String);

    /// Publishes something.
    fn show(&mut self, shown: Showing);

    /// Reports the clients that were hit by a fatal GPU error of this server, on the GPU with this ordinal.
    fn tell_hit(&mut self, server: u32, ordinal: usize, clients: Vec<u32>);

    /// Describes clients.
    fn describe(&self, clients: &BTreeSet<u32>) -> String;

    /// A new client has connected.
    fn client_came(&mut self, client: u32);

    /// Has the service find out the owners of these clients, before a message names the clients.
    fn remember_clients(&mut self, clients: &BTreeSet<u32>);

    /// The control daemon lists these clients, each with its GPUs as far as they are known.
    fn clients_are(&mut self, listed: BTreeMap<u32, BTreeSet<GpuUuid>>);

    /// Returns whether it is known to have clients.
    fn has_clients(&self) -> bool;

    /// The control daemon was checked while it had clients.
    fn checked_in_use(&mut self);

    /// Watches a server, so that its end becomes known.
    fn watch_server(&mut self, server: u32);

    /// True if the caller of the last request still waits for its answer. Otherwise the caller already has the answer that the
    /// request failed, so the request must not be carried out.
    fn is_awaited(&self) -> bool;

    /// Answers the last request.
    fn answer(&mut self, answer: Result<(), String>);
}
