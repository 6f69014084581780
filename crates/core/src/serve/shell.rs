//! The questions and acts that serving needs, and the events and requests to which serving reacts. The service carries out
//! the questions and acts with processes, files and NVML; the tests carry them out in memory.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use super::gpus::{GpuReach, GpuShell};
use crate::mps::{Client, ClientPids, Inspection, Limits, Meaning};
use crate::{CoreTime, GpuUuid, Permit};

/// The next event about a control daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Occurrence {
    /// The control daemon or a server has written a line to the log.
    Said(Said),
    /// The process of the control daemon has ended.
    Ended,
    /// The server with this PID has ended.
    ServerEnded(u32),
    /// A caller has made a request. [`Shell::answer`] answers a request that has an answer.
    Asked(Requested),
    /// No event has come before the deadline.
    Nothing,
}

/// A line in the log of the control daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    pub meaning: Meaning,
    /// True if the line is new. False if an earlier process of the service has read the line already.
    pub is_news: bool,
}

/// A request about a control daemon that serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requested {
    /// Make a change of the control daemon that waits for the end of clients. Without `force`, the service makes the change
    /// only if there are no clients. The caller of the request gets an answer.
    Apply {
        /// True if the change is made even if it ends clients.
        force: bool,
    },
    /// Do the health check now.
    Check,
    /// End the server and start a new one, if the server has no clients. The caller of the request gets an answer.
    RestartServer,
}

/// The reason why a control daemon does not serve, or has not answered, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The control daemon does not work properly.
    Failed(String),
    /// The process has ended.
    Ended {
        /// The way in which the process has ended, in words.
        text: String,
        /// True if the process has ended because it does not know the multi-user option.
        refuses_multiuser: bool,
    },
    /// Something outside of the control daemon must change before the control daemon can serve.
    Waiting(String),
    /// A foreign control daemon, which the service has not started, listens in the control daemon's directory, and has
    /// clients. The foreign control daemon stays until its clients have ended.
    InUse(String),
    /// Something outside of the control daemon is not ready: a part of the driver that is loaded later, or the front end's
    /// program while an upgrade replaces it. The control daemon itself may work.
    NotYet(String),
    /// The control daemon has not answered in time, or has closed the connection without an answer.
    Silent(String),
    /// No process listens in the control daemon's directory.
    Unreachable(String),
    /// The service does not understand the control daemon's answers, which may be those of a newer driver. A newly started
    /// control daemon would give the same answers.
    NotUnderstood(String),
}

impl Failure {
    /// The reason for the failure, in words.
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

/// The PIDs of the clients on each GPU, by UUID, as NVML lists them. An error is the reason why NVML does not list the
/// clients of a GPU.
pub type ClientsOnGpus = BTreeMap<GpuUuid, Result<BTreeSet<u32>, String>>;

/// The questions and acts about one running control daemon. Each call has its own deadline, so no call waits forever.
pub trait Shell: GpuShell {
    /// The present moment.
    fn now(&self) -> CoreTime;

    /// Waits for the next event, at most until a moment. Only `next` returns the requests of callers. An error means that the
    /// log can't be read.
    fn next(
        &mut self,
        until: CoreTime,
        takes_requests: bool,
    ) -> impl Future<Output = Result<Occurrence, Failure>> + Send;

    /// Waits, and ignores all events.
    fn pause(&mut self, duration: Duration) -> impl Future<Output = ()> + Send;

    /// The present end of the log, as a number of bytes. With `skips`, later calls skip all lines before this end of the log
    /// except for the last lines. None if the end is not known.
    fn end_of_log(&mut self, skips: bool) -> Option<u64>;

    /// The next line of the log before the place `end`. Each call returns one line, so that no line is lost when an act is
    /// broken off. None if there is no further line.
    fn line_before(&mut self, end: u64) -> impl Future<Output = Option<Said>> + Send;

    /// The last lines of the log, as the end of a sentence.
    fn words(&self) -> String;

    /// The reason, from the last lines of the log, why servers do not start yet, if the reason ends without an administrator.
    /// None if there is no such reason.
    fn not_ready_yet(&self) -> Option<String>;

    /// Returns true if the process of the control daemon has ended, or ends within a moment.
    fn ends_now(&mut self) -> impl Future<Output = bool> + Send;

    /// The failure that says how the process of the control daemon has ended, with its exit status.
    fn how_it_ended(&self) -> Failure;

    /// Asks the control daemon for all servers, for the statuses of `servers`, and for the limits that differ from the expected
    /// limits, of these servers and of servers that are started later. A server that has ended has no limits.
    fn inspect(
        &mut self,
        servers: &[u32],
        limits: Option<&Limits>,
    ) -> impl Future<Output = Result<Inspection, Failure>> + Send;

    /// Sets the limits for the next clients of a server. Without `server`, sets the defaults of servers that are started later.
    /// Returns the servers that run.
    fn set_limits(
        &mut self,
        server: Option<u32>,
        limits: &Limits,
    ) -> impl Future<Output = Result<Vec<u32>, Failure>> + Send;

    /// Sets the defaults of servers that are started later, and starts the server of root. Returns the other servers.
    fn set_limits_and_start(
        &mut self,
        limits: &Limits,
    ) -> impl Future<Output = Result<Vec<u32>, Failure>> + Send;

    /// Starts the server of root, unless it runs already.
    fn start_server(&mut self) -> impl Future<Output = Result<(), Failure>> + Send;

    /// The PIDs of the clients of each server. `expected` has the PIDs of the servers that the service knows.
    fn client_pids(&mut self, expected: &[u32]) -> impl Future<Output = Result<ClientPids, Failure>> + Send;

    /// The connections of all clients. `expected` has the PIDs of the servers that the service knows.
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

    /// The PID of the process that listens in the directory of the control daemon. None if the PID is not known, or if no
    /// process listens in the directory.
    fn listener(&self) -> Option<u32>;

    /// Returns whether it is certain that no process listens in the directory of the control daemon.
    fn is_nobody(&self) -> bool;

    /// Returns whether the control daemon has child processes, which are its servers. None if the service does not
    /// know if the control daemon has child processes.
    fn has_children(&self) -> Option<bool>;

    /// Continues the control daemon and these servers if a signal has stopped them, and writes a message about it.
    fn continue_if_stopped(&mut self, servers: &[u32]);

    /// Asks the control daemon to end as soon as it has no client. Returns true if the control daemon has ended.
    fn quit_if_idle(&mut self, may_end: Permit) -> impl Future<Output = bool> + Send;

    /// Asks the control daemon to end with its clients. Returns true if the control daemon has ended.
    fn quit(&mut self, may_end: Permit) -> impl Future<Output = bool> + Send;

    /// Ends the control daemon by signals, with its clients. Returns true if the control daemon has ended.
    fn end_by_signal(&mut self, may_end: Permit) -> impl Future<Output = bool> + Send;

    /// The clients that NVML lists on the GPUs of the control daemon. If several control daemons serve a GPU, NVML does not say
    /// to which of them a client belongs. The result for a GPU of several control daemons has only the clients in `ours`, and
    /// is an error if the GPU has only other clients.
    fn clients_on_gpus(&mut self, ours: &BTreeSet<u32>) -> impl Future<Output = ClientsOnGpus> + Send;

    /// The programs on the control daemon's GPUs that are neither servers nor clients, in words; empty if there are no such
    /// programs.
    fn holders(&mut self, servers: &[u32]) -> impl Future<Output = String> + Send;

    /// Returns whether a process runs as this user.
    fn runs_as(&self, pid: u32, uid: u32) -> bool;

    /// The command of a process, for people; empty if the process has ended.
    fn command(&self, pid: u32) -> String;

    /// Gives clients of every user access to the control daemon's socket, and lets only root command the control daemon.
    /// Returns the reasons if the access can't be changed.
    fn let_users_in(&mut self) -> Vec<String>;

    /// Makes the links point to the control daemon, which has its limits.
    ///
    /// # Errors
    /// The control daemon's own directory can't be used.
    fn lead_here(&mut self) -> Result<(), Failure>;

    /// Renews the links that other programs have removed or replaced. Returns the reason if a link can't be renewed.
    fn keep_links(&mut self) -> Option<String>;

    /// Makes the links point to the waiting socket, so that new programs wait. If the control daemon has its socket in the pipe
    /// directory itself, the socket stays open to programs.
    ///
    /// # Errors
    /// The named links still point to the control daemon.
    fn keep_waiting(&mut self) -> Result<(), String>;

    /// Makes the links point to the control daemon again.
    fn reopen_ways(&mut self);

    /// Releases the programs that have waited at the waiting socket. Each released program starts without MPS, unless a server
    /// prevents the program from using the GPU.
    fn let_go(&mut self);

    /// Updates the state file and the published facts about the process. With `stays`, the service also reports a log that
    /// can't be written.
    fn keep_state_file(&mut self, stays: bool);

    /// Begins a new log if the log has become too long.
    fn rotate_log(&mut self);

    /// True if the control daemon has the pipe directory of the order.
    fn is_in_place(&self) -> bool;

    /// The reason why the order needs another control daemon than the running one. None if the running control daemon can
    /// carry out the order. A GPU that is left out of service does not count as a reason.
    fn misfit(&self, reach: &GpuReach) -> Option<String>;

    /// Reports that a step towards serving the order is done.
    fn passed(&self, step: &'static str, text: &str);

    /// Reports the clients that a fatal GPU error of this server has hit on the GPU with this ordinal.
    fn tell_hit(&mut self, server: u32, ordinal: usize, clients: Vec<u32>);

    /// The clients as text, for a message.
    fn describe(&self, clients: &BTreeSet<u32>) -> String;

    /// Records that a new client has connected.
    fn client_came(&mut self, client: u32);

    /// Asks the service to find out the owners of these clients, before a message names the clients.
    fn remember_clients(&mut self, clients: &BTreeSet<u32>);

    /// Records the clients that the control daemon lists, each with the GPUs that it is known to use.
    fn clients_are(&mut self, listed: BTreeMap<u32, BTreeSet<GpuUuid>>);

    /// Returns whether the control daemon is known to have clients.
    fn has_clients(&self) -> bool;

    /// Records that the control daemon was checked while it had clients.
    fn checked_in_use(&mut self);

    /// Watches a server, so that an occurrence reports its end.
    fn watch_server(&mut self, server: u32);

    /// Returns whether the caller of the last request still waits for its answer. If the caller does not wait, it already
    /// has the answer that the request failed, so the request must not be carried out.
    fn is_awaited(&self) -> bool;

    /// Sends the answer to the caller of the last request.
    fn answer(&mut self, answer: Result<(), String>);
}
