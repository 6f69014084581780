//! A fatal GPU error of a server: when it is over, and who may be ended for it. It hits every client on the GPU, and no
//! other: a server holds the clients of all GPUs of its control daemon.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;
use core::time::Duration;

use crate::mps::ServerStatus;
use crate::{Cause, CoreTime, Permit};

/// The time between two looks at a faulted server. Measured: it is well 0.2 s after its last client has gone.
pub const FAULT_PAUSE: Duration = Duration::from_millis(250);

/// The longest time between two looks.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The time that the log gets to name the clients that were hit. It names them within a second, one after the other.
const NAMES_TIMEOUT: Duration = Duration::from_secs(5);

/// The time until the next look at a fault that is so old.
pub fn next_look(age: Duration) -> Duration {
    FAULT_PAUSE.max(age / 10).min(LONGEST_PAUSE)
}

/// A fatal GPU error that a server has not got over yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) server: u32,
    pub(super) since: CoreTime,
    /// The number of lines in the log about the fault. The server may have met another error since.
    pub(super) lines: usize,
    /// The clients that were hit, each behind its GPU's ordinal. A client that uses two GPUs can be hit on both.
    pub(super) clients: BTreeSet<(usize, u32)>,
    /// The victims that were reported. The log may name more later.
    pub(super) told: BTreeSet<(usize, u32)>,
    pub(super) due: CoreTime,
    /// Why it is not ended though it could be.
    pub(super) held_up: Option<String>,
}

impl Fault {
    pub(super) fn new(server: u32, now: CoreTime) -> Self {
        let due = now + FAULT_PAUSE;
        let (clients, told) = (BTreeSet::new(), BTreeSet::new());
        Self { server, since: now, lines: 0, clients, told, due, held_up: None }
    }

    /// The clients that were hit, on whichever GPU: a client of two GPUs has lost its work on both.
    pub(super) fn pids(&self) -> BTreeSet<u32> {
        self.clients.iter().map(|(_, pid)| *pid).collect()
    }

    /// True if this is still what was known of it, and nothing new.
    pub(super) fn is_same(&self, known: &Self) -> bool {
        (self.server, self.since, self.lines) == (known.server, known.since, known.lines)
            && self.clients == known.clients
    }

    pub(super) fn reason(&self) -> String {
        let held_up = self.held_up.as_ref().map(|why| format!("; {why}")).unwrap_or_default();
        format!(
            "server {} met a fatal GPU error and takes no client until its present ones have ended{held_up}",
            self.server
        )
    }
}

/// The next step against a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealStep {
    /// The fault is over, unless the log names more clients.
    Recovered,
    /// The fault is over, since the server has ended.
    ServerGone,
    /// Nothing: the clients have their grace.
    Wait,
    /// See whether any victim is still there.
    LookForThoseHit,
    /// See whether the server can be ended.
    LookWhoStays,
}

/// The next step against a fault that is so old, where clients have so long to end by themselves.
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

/// True if a fault is over on a driver that can't say so: no client that was hit is left. None: the log may not have named them
/// yet. Until then the server is not ended: it may be well already, and others at work on it.
pub fn is_over(hit: &BTreeSet<u32>, is_left: impl Fn(u32) -> bool, age: Duration) -> Option<bool> {
    if hit.is_empty() && age < NAMES_TIMEOUT {
        return None;
    }
    Some(!hit.iter().any(|pid| is_left(*pid)))
}

/// The fate of a server that is still faulted after the grace of its clients. Each has the clients that stay.
#[derive(Debug, PartialEq, Eq)]
pub enum AfterGrace {
    /// The server may be ended: all its clients have lost their work.
    End(Permit, BTreeSet<u32>),
    /// The server lives on: the log has named no client, and on another GPU some of these clients may be well.
    GpuNotKnown(BTreeSet<u32>),
    /// The server lives on for this number of other clients, which are well.
    OthersAreWell(BTreeSet<u32>, usize),
}

/// Decides on a faulted server with these clients. The log has named the clients that were hit; it names no client if it could
/// not be written, or if a former service has read that part. A client that it has not named may have come between two errors,
/// even to the same GPU. Where its control daemon has one GPU and no client is named, the error has hit every client.
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
