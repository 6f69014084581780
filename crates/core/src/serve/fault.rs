//! A fatal GPU error of a server: when the fault is over, and which processes may be ended because of it. A fatal GPU error
//! hits every client on its GPU, and no client on another GPU. A server has the clients of all GPUs of its control daemon, so
//! some clients of the server may not be hit.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;
use core::time::Duration;

use crate::mps::ServerStatus;
use crate::{Cause, CoreTime, Permit};

/// The first pause between two status queries for a faulted server. Measured: the server has recovered 0.2 s after its last
/// client has ended.
pub const FAULT_PAUSE: Duration = Duration::from_millis(250);

/// The longest pause between two status queries for a faulted server. The pause grows with the age of the fault.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The time that the service waits until the log names the clients that were hit, for a driver that can't report the status of
/// a server. If the log names no client within this time, the fault counts as over. The log names the clients within a second,
/// one after the other.
const NAMES_TIMEOUT: Duration = Duration::from_secs(5);

pub fn next_look(age: Duration) -> Duration {
    FAULT_PAUSE.max(age / 10).min(LONGEST_PAUSE)
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) server: u32,
    pub(super) since: CoreTime,
    /// The number of lines in the log about the fault. If the number grows later, the server has met another fatal GPU error.
    pub(super) lines: usize,
    /// The clients that were hit: the GPU's ordinal and the client's PID. A client that uses two GPUs can be hit on both.
    pub(super) clients: BTreeSet<(usize, u32)>,
    /// The clients that the service has reported as hit. The log may name more clients later.
    pub(super) told: BTreeSet<(usize, u32)>,
    pub(super) due: CoreTime,
    /// The reason why the server is not ended, though its clients had their time to end by themselves. None if the service has
    /// no reason to report.
    pub(super) held_up: Option<String>,
}

impl Fault {
    pub(super) fn new(server: u32, now: CoreTime) -> Self {
        let due = now + FAULT_PAUSE;
        let (clients, told) = (BTreeSet::new(), BTreeSet::new());
        Self { server, since: now, lines: 0, clients, told, due, held_up: None }
    }

    pub(super) fn pids(&self) -> BTreeSet<u32> {
        self.clients.iter().map(|(_, pid)| *pid).collect()
    }

    /// Returns whether nothing has changed since `known`, an earlier copy of this fault.
    pub(super) fn is_same(&self, known: &Self) -> bool {
        (self.server, self.since, self.lines) == (known.server, known.since, known.lines)
            && self.clients == known.clients
    }

    pub(super) fn reason(&self) -> String {
        let held_up = self.held_up.as_ref().map(|why| format!("; {why}")).unwrap_or_default();
        format!(
            "server {server} met a fatal GPU error and takes no new client until its present clients have \
             ended{held_up}",
            server = self.server
        )
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealStep {
    Recovered,
    ServerGone,
    /// The clients still have time to end by themselves.
    Wait,
    /// Find out if a client that was hit still runs, since the control daemon can't report the server's status.
    LookForThoseHit,
    /// Find out which clients still run, and if the server may be ended.
    LookWhoStays,
}

/// The next step after a fatal GPU error. `age` is the time since the error, and `grace` is the time that clients have to end
/// by themselves.
pub fn next_step(server: ServerStatus, age: Duration, grace: Duration) -> HealStep {
    match server {
        ServerStatus::Active => HealStep::Recovered,
        ServerStatus::Unsupported => HealStep::LookForThoseHit,
        ServerStatus::Gone => HealStep::ServerGone,
        ServerStatus::Initializing => HealStep::Wait,
        ServerStatus::Fault if age < grace => HealStep::Wait,
        ServerStatus::Fault => HealStep::LookWhoStays,
    }
}

/// Returns whether a fault is over, for a driver that can't report the status of a server. The fault is over once no client in
/// `hit` runs any more. None while the log may still name further clients that were hit.
pub fn is_over(hit: &BTreeSet<u32>, is_left: impl Fn(u32) -> bool, age: Duration) -> Option<bool> {
    if hit.is_empty() && age < NAMES_TIMEOUT {
        return None;
    }
    Some(!hit.iter().any(|pid| is_left(*pid)))
}

/// The decision about a server that is still faulted after its clients had their time to end. The set in each variant has the
/// clients that still run.
#[derive(Debug, PartialEq, Eq)]
pub enum AfterGrace {
    /// The server may be ended, since all of its clients have lost their work.
    End(Permit, BTreeSet<u32>),
    /// The server stays. The log has named no client, so some of these clients may work on a GPU that was not hit.
    GpuNotKnown(BTreeSet<u32>),
    /// The server stays, since it also has this number of clients that were not hit.
    OthersAreWell(BTreeSet<u32>, usize),
}

/// Decides about a faulted server with these clients. `named` has the clients that the log names as hit. The log names no
/// client while it can't be written, and the service does not see names that an earlier process of the service has read. If
/// `named` is empty and the control daemon has one GPU, the error has hit every client. If `named` has some clients, a client
/// that is missing from it counts as not hit, since this client may have connected between two errors.
pub fn after_grace(named: &BTreeSet<u32>, has_one_gpu: bool, clients: BTreeSet<u32>) -> AfterGrace {
    if named.is_empty() && !has_one_gpu {
        return AfterGrace::GpuNotKnown(clients);
    }
    let well = clients.iter().filter(|pid| !named.is_empty() && !named.contains(pid)).count();
    if well == 0 {
        AfterGrace::End(Permit::new(Cause::Fault), clients)
    } else {
        AfterGrace::OthersAreWell(&clients & named, well)
    }
}
