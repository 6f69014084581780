//! The questions and acts that serving needs, and the events and requests to which serving reacts. The service carries out the
//! questions and acts with processes, files and NVML. The tests carry them out in memory.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use super::effect::RunEffect;
use super::gpus::{GpuReach, GpuShell};
use crate::mps::{Client, ClientPids, Inspection, Limits, Meaning};
use crate::{CoreTime, GpuUuid, Permit};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Occurrence {
    /// The control daemon or one of its servers has written a line to the log.
    Said(Said),
    Ended,
    ServerEnded(u32),
    /// A caller has made a request. [`RunEffect::Answer`] sends the answer of a request.
    Asked(Requested),
    /// No event has come before the deadline.
    Nothing,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    pub meaning: Meaning,
    /// False if an earlier process of the service has already read the line.
    pub is_news: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requested {
    /// Make the pending change of the control daemon, which waits for the end of clients. Without `force`, the change is made
    /// only if there are no clients. With `force`, the change ends the clients. The caller gets an answer.
    Apply {
        force: bool,
    },
    Check,
    /// Replace the server, if it has no clients. The caller gets an answer.
    RestartServer,
}

/// The reason, in words, why a control daemon does not serve or has not answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    Failed(String),
    Ended {
        text: String,
        /// True if the process has ended because it does not know the multi-user option.
        refuses_multiuser: bool,
    },
    /// Something outside of the control daemon must change before the control daemon can serve.
    Waiting(String),
    /// A control daemon that the service has not started listens in this control daemon's directory, and has clients. The
    /// service waits until these clients have ended.
    InUse(String),
    /// Something that the control daemon needs is not ready: a part of the driver that is loaded later, or the front end's
    /// program while an upgrade replaces it. The control daemon itself may work.
    NotYet(String),
    /// The control daemon has not answered in time, or has closed the connection without an answer.
    Silent(String),
    /// No process listens in the control daemon's directory.
    Unreachable(String),
    /// The service can't parse the control daemon's answers, which may be those of a newer driver. A new control daemon would
    /// give the same answers.
    NotUnderstood(String),
}

impl Failure {
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

/// The PIDs of the clients on each GPU, by UUID, as NVML lists them. An error says why NVML does not list the clients of a GPU.
pub type ClientsOnGpus = BTreeMap<GpuUuid, Result<BTreeSet<u32>, String>>;

/// The questions and acts about one running control daemon. Each call has its own deadline, so no call waits forever.
pub trait Shell: GpuShell {
    fn now(&self) -> CoreTime;

    fn carry_out(&mut self, effect: RunEffect);

    /// Waits for the next event, at most until `until`. Requests of callers are returned only if `takes_requests` is true. An
    /// error means that the log can't be read.
    fn next(
        &mut self,
        until: CoreTime,
        takes_requests: bool,
    ) -> impl Future<Output = Result<Occurrence, Failure>> + Send;

    /// Waits without handling events. The next call of [`Self::next`] returns events that have come in the meantime.
    fn pause(&mut self, duration: Duration) -> impl Future<Output = ()> + Send;

    /// The size of the log in bytes. None if it is not known. With `skips`, later calls of [`Self::next`] and
    /// [`Self::line_before`] skip the lines that are in the log now, except for the last few lines.
    fn end_of_log(&mut self, skips: bool) -> Option<u64>;

    /// The next line of the log before the byte offset `end`. Each call returns one line, so that no line is lost when an act
    /// is broken off. None if there is no further line.
    fn line_before(&mut self, end: u64) -> impl Future<Output = Option<Said>> + Send;

    /// The last lines of the log, worded as the end of a sentence.
    fn words(&self) -> String;

    /// The reason, from the last lines of the log, why servers can't start yet. None if there is no reason, or if an
    /// administrator has to act.
    fn not_ready_yet(&self) -> Option<String>;

    /// Returns true if the process of the control daemon has ended, or ends within a moment.
    fn ends_now(&mut self) -> impl Future<Output = bool> + Send;

    fn how_it_ended(&self) -> Failure;

    /// Asks the control daemon for all servers, for the statuses of `servers`, and for the limits that differ from `limits`.
    /// The compared limits are those of `servers`, and the defaults for servers that start later.
    fn inspect(
        &mut self,
        servers: &[u32],
        limits: Option<&Limits>,
    ) -> impl Future<Output = Result<Inspection, Failure>> + Send;

    /// Sets the limits for the next clients of a server. If `server` is None, sets the defaults for servers that start later.
    /// Returns the PIDs of the running servers. A server that has ended takes no limits, and is not among them.
    fn set_limits(
        &mut self,
        server: Option<u32>,
        limits: &Limits,
    ) -> impl Future<Output = Result<Vec<u32>, Failure>> + Send;

    /// Sets the defaults for servers that start later, and starts the server of root. Returns the PIDs of the other servers.
    fn set_limits_and_start(
        &mut self,
        limits: &Limits,
    ) -> impl Future<Output = Result<Vec<u32>, Failure>> + Send;

    /// Starts the server of root, unless it runs already.
    fn start_server(&mut self) -> impl Future<Output = Result<(), Failure>> + Send;

    /// The PIDs of each server's clients. `expected` has the PIDs of the servers that the service knows.
    fn client_pids(&mut self, expected: &[u32]) -> impl Future<Output = Result<ClientPids, Failure>> + Send;

    /// The connections of all clients. `expected` has the PIDs of the servers that the service knows.
    fn clients(&mut self, expected: &[u32]) -> impl Future<Output = Result<Vec<Client>, Failure>> + Send;

    fn shut_down_idle_server(
        &mut self,
        server: u32,
        may_end: Permit,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Ends a server together with its clients.
    fn shut_down_server(
        &mut self,
        server: u32,
        may_end: Permit,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    fn pid(&self) -> u32;

    /// The PID of the process that listens in the control daemon's directory. None if no process listens there, or if the PID
    /// is not known.
    fn listener(&self) -> Option<u32>;

    /// Returns true if it is certain that no process listens in the control daemon's directory.
    fn is_nobody(&self) -> bool;

    /// Returns whether the control daemon has child processes. Its servers are its children. None if the service can't find
    /// out.
    fn has_children(&self) -> Option<bool>;

    /// Asks the control daemon to end as soon as it has no client. Returns true if the control daemon has ended.
    fn quit_if_idle(&mut self, may_end: Permit) -> impl Future<Output = bool> + Send;

    /// Asks the control daemon to end together with its clients. Returns true if the control daemon has ended.
    fn quit(&mut self, may_end: Permit) -> impl Future<Output = bool> + Send;

    /// Ends the control daemon and its clients by signals. Returns true if the control daemon has ended.
    fn end_by_signal(&mut self, may_end: Permit) -> impl Future<Output = bool> + Send;

    /// The clients that NVML lists on the control daemon's GPUs. If several control daemons serve a GPU, NVML does not say to
    /// which control daemon a client belongs. The result for this GPU then has only the clients in `ours`, which certainly
    /// belong to this control daemon. The result is an error if the GPU has only other clients.
    fn clients_on_gpus(&mut self, ours: &BTreeSet<u32>) -> impl Future<Output = ClientsOnGpus> + Send;

    /// The programs on the control daemon's GPUs that are neither servers nor clients, in words. Empty if there are no other
    /// programs.
    fn holders(&mut self, servers: &[u32]) -> impl Future<Output = String> + Send;

    fn runs_as(&self, pid: u32, uid: u32) -> bool;

    /// The name of the process's program, for messages. Empty if the process has ended.
    fn command(&self, pid: u32) -> String;

    /// Lets clients of all users connect to the control daemon's socket, and lets only root send commands. Returns the reasons
    /// if clients of some users can't connect.
    fn let_users_in(&mut self) -> Vec<String>;

    /// Makes the links point to the control daemon. The caller has set the control daemon's limits before.
    ///
    /// # Errors
    /// The control daemon's own directory can't be used.
    fn lead_here(&mut self) -> Result<(), Failure>;

    /// Makes the links again that other programs have removed or replaced. Returns the reason if a link can't be made.
    fn keep_links(&mut self) -> Option<String>;

    /// Makes the links point to the waiting socket, so that new programs wait. If the control daemon's socket is in the pipe
    /// directory itself, programs can still reach the control daemon.
    ///
    /// # Errors
    /// The links that still point to the control daemon, in words.
    fn keep_waiting(&mut self) -> Result<(), String>;

    /// Returns whether the control daemon uses the pipe directory that the order names.
    fn is_in_place(&self) -> bool;

    /// The reason why the order needs another control daemon than the running one. None if the running control daemon can carry
    /// out the order. A GPU that is out of service does not count as a reason.
    fn misfit(&self, reach: &GpuReach) -> Option<String>;

    fn describe(&self, clients: &BTreeSet<u32>) -> String;

    fn has_clients(&self) -> bool;

    /// Returns whether the caller of the last request still waits for its answer. A caller that does not wait any more has got
    /// an error, so the request must not be carried out.
    fn is_awaited(&self) -> bool;
}
