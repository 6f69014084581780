//! Everything that serving asks of the outside, and the outside asks of it. The service carries it out with processes, files
//! and NVML; the tests' world carries it out in memory.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use super::blocker::ShownState;
use super::gpus::{GpuReach, GpuShell};
use crate::mps::{Client, ClientPids, Inspection, Limits, Meaning};
use crate::terms::ProcessId;
use crate::{CoreTime, GpuUuid, Permit};

/// The next thing that happens to a control daemon.
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
    /// False: an earlier service has taken note of it.
    pub is_news: bool,
}

/// A request about a control daemon that serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requested {
    /// Make a change that waits for clients to end: now if `force`, or if there are none. It has an answer.
    Apply {
        /// With its clients.
        force: bool,
    },
    /// Check now.
    Check,
    /// End the server and start another, if it has no clients. It has an answer.
    RestartServer,
}

/// Why a control daemon does not serve, or has not answered, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The control daemon does not work as it should.
    Failed(String),
    /// The process has ended, perhaps since it does not know the multi-user option.
    Ended {
        /// How.
        text: String,
        /// True if the control daemon does not know the multi-user option.
        refuses_multiuser: bool,
    },
    /// Something outside must change first.
    Waiting(String),
    /// A foreign control daemon has the place, and serves its clients until they end.
    InUse(String),
    /// Something beside it is not ready: a part of the driver that comes later, or the program of front ends, which an upgrade
    /// replaces. That says nothing of the control daemon itself.
    NotYet(String),
    /// The control daemon has not answered in time, or dropped the question.
    Silent(String),
    /// No process listens in its directory.
    Unreachable(String),
    /// The service does not understand the answers, which may be a newer driver's. A new control daemon would answer the same.
    NotUnderstood(String),
}

impl Failure {
    /// The words.
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

/// A message that is reported once.
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
    /// The state of the control daemon. None: it stays as it is.
    State {
        /// The state.
        state: Option<ShownState>,
        /// True if the control daemon ends as soon as it has no client.
        ends_when_idle: bool,
    },
    /// The next step waits for clients to end. That may take days.
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
    /// Why it is not served as planned; empty when it is.
    pub reason: String,
    /// The reason why the GPU takes no more clients; empty while it takes clients.
    pub full: String,
    /// The number of its clients, if NVML lists none of them and they were counted.
    pub unlisted_clients: Option<u32>,
}

/// The clients on each GPU by UUID, as NVML lists them, or why it does not.
pub type ClientsOnGpus = BTreeMap<GpuUuid, Result<BTreeSet<u32>, String>>;

/// Carries out all that is decided about one control daemon that runs. Each call comes back: it has a deadline of its own.
pub trait Shell: GpuShell {
    /// The present moment.
    fn now(&self) -> CoreTime;

    /// Waits for the next thing that happens, until a moment. Requests wait unless they are taken here. An error: the log
    /// can't be read.
    fn next(
        &mut self,
        until: CoreTime,
        takes_requests: bool,
    ) -> impl Future<Output = Result<Occurrence, Failure>> + Send;

    /// Lets time pass, and looks at nothing.
    fn pause(&mut self, duration: Duration) -> impl Future<Output = ()> + Send;

    /// The end of the log at this moment; if wanted, all but its last lines are passed over. None: it is not known.
    fn end_of_log(&mut self, skips: bool) -> Option<u64>;

    /// The next line before this place in the log. One at a time: an act that is broken off loses no line.
    fn line_before(&mut self, end: u64) -> impl Future<Output = Option<Said>> + Send;

    /// The last words of the log, as the end of a sentence.
    fn words(&self) -> String;

    /// The reason why its servers wait, by the last words of the log, if that comes by itself.
    fn not_ready_yet(&self) -> Option<String>;

    /// Resolves to true if the process has ended, or ends at this moment.
    fn ends_now(&mut self) -> impl Future<Output = bool> + Send;

    /// The exit status in words.
    fn how_it_ended(&self) -> Failure;

    /// Asks for all servers, for the statuses of these, and for the limits that differ: of the servers to come, and of these.
    /// A server that has ended has no limits.
    fn inspect(
        &mut self,
        servers: &[u32],
        limits: Option<&Limits>,
    ) -> impl Future<Output = Result<Inspection, Failure>> + Send;

    /// Sets the limits of a server's clients to come, or without `server` of servers to come. Returns the servers.
    fn set_limits(
        &mut self,
        server: Option<u32>,
        limits: &Limits,
    ) -> impl Future<Output = Result<Vec<u32>, Failure>> + Send;

    /// Sets the limits of servers to come, and starts the server of root. That one is not among the servers that it returns.
    fn set_limits_and_start(
        &mut self,
        limits: &Limits,
    ) -> impl Future<Output = Result<Vec<u32>, Failure>> + Send;

    /// Starts the server of root, unless it is there.
    fn start_server(&mut self) -> impl Future<Output = Result<(), Failure>> + Send;

    /// The clients of each server. `expected` are the servers as far as they are known.
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

    /// The process that listens in its directory.
    fn listener(&self) -> Option<u32>;

    /// True if certainly no process listens there.
    fn is_nobody(&self) -> bool;

    /// True if it has servers, by its children. None: that is not known.
    fn has_children(&self) -> Option<bool>;

    /// Continues the control daemon and these servers if they were stopped by a signal, and says so.
    fn continue_if_stopped(&mut self, servers: &[u32]);

    /// Asks the control daemon to end as soon as it has no client. Returns true if it has ended.
    fn quit_if_idle(&mut self, may_end: Permit) -> impl Future<Output = bool> + Send;

    /// Asks the control daemon to end with its clients. Returns true if it has ended.
    fn quit(&mut self, may_end: Permit) -> impl Future<Output = bool> + Send;

    /// Ends the control daemon by signals, with its clients. Returns true if it has ended.
    fn end_by_signal(&mut self, may_end: Permit) -> impl Future<Output = bool> + Send;

    /// The clients that NVML lists on the GPUs of the control daemon. Of a GPU that several control daemons serve, these are
    /// the clients among `ours`: NVML does not say which client is of which control daemon. It is an error where others
    /// alone are there, since these may be ours.
    fn clients_on_gpus(&mut self, ours: &BTreeSet<u32>) -> impl Future<Output = ClientsOnGpus> + Send;

    /// The programs on its GPUs that are neither servers nor clients, in words; empty if there are none.
    fn holders(&mut self, servers: &[u32]) -> impl Future<Output = String> + Send;

    /// True if a process runs as this user.
    fn runs_as(&self, pid: u32, uid: u32) -> bool;

    /// The command of a process, for people; empty if it has ended.
    fn command(&self, pid: u32) -> String;

    /// Lets clients of every user get to the socket, and keeps others from commanding it. Returns the reasons why it can't.
    fn let_users_in(&mut self) -> Vec<String>;

    /// Leads clients to the control daemon, which has its limits.
    ///
    /// # Errors
    /// Something is wrong with its own directory.
    fn lead_here(&mut self) -> Result<(), Failure>;

    /// Renews the ways that others have removed or replaced. Returns the reason why it can't.
    fn keep_links(&mut self) -> Option<String>;

    /// Programs that come from now on wait, instead of getting to the control daemon. A way that is the control daemon's own
    /// pipe directory stays open.
    ///
    /// # Errors
    /// These ways still lead to the control daemon.
    fn keep_waiting(&mut self) -> Result<(), String>;

    /// Leads clients to the control daemon again, by the ways that have led there before.
    fn reopen_ways(&mut self);

    /// Lets the programs go that have waited. Each begins without MPS, unless a server keeps it off the GPU.
    fn let_go(&mut self);

    /// Keeps the state file, and all that is shown of the process, up to date. A log that can't be written is reported if that
    /// matters: the control daemon stays.
    fn keep_state_file(&mut self, stays: bool);

    /// Begins the log again if it has become too long.
    fn rotate_log(&mut self);

    /// True if the control daemon has the pipe directory of the order.
    fn is_in_place(&self) -> bool;

    /// Why the order needs another control daemon than the running one. A GPU that is left out is passed over.
    fn misfit(&self, reach: &GpuReach) -> Option<String>;

    /// A step of the way to the order is behind it.
    fn passed(&self, step: &'static str, text: &str);

    /// Tells people something, once.
    fn tell(&mut self, news: News, text: String);

    /// Publishes something.
    fn show(&mut self, shown: Showing);

    /// Tells who was hit by a fatal GPU error of this server, on the GPU with this number.
    fn tell_hit(&mut self, server: u32, ordinal: usize, clients: Vec<u32>);

    /// Describes clients.
    fn describe(&self, clients: &BTreeSet<u32>) -> String;

    /// A client has come.
    fn client_came(&mut self, client: u32);

    /// Has the service learn the owners of these clients, before a message names them.
    fn remember_clients(&mut self, clients: &BTreeSet<u32>);

    /// The control daemon was checked while it had clients.
    fn checked_in_use(&mut self);

    /// Makes sure that the end of a server becomes known.
    fn watch_server(&mut self, server: u32);

    /// True if the asker of the request that was taken last still waits for its answer. A request that no asker waits for any
    /// more must not be carried out: its caller has the answer that the request failed.
    fn is_awaited(&self) -> bool;

    /// Answers the request that was taken last.
    fn answer(&mut self, answer: Result<(), String>);
}
