//! A fatal GPU error of a server: when it is over, and who may be ended for it. It hits every client on the GPU, and no
//! other: a server holds the clients of all GPUs of its control daemon.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use crate::mps::ServerStatus;
use crate::{Cause, CoreTime, GpuUuid, Permit};

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
    /// The clients that were hit, each behind its GPU's ordinal. One that uses two GPUs can be hit on both.
    pub(super) clients: BTreeSet<(usize, u32)>,
    /// The clients of them that were told. The log may name more later.
    pub(super) told: BTreeSet<(usize, u32)>,
    pub(super) due: CoreTime,
    /// Why it is not ended though it could be.
    pub(super) held_up: Option<String>,
}

impl Fault {
    pub(super) fn new(server: u32, now: CoreTime) -> Self {
        let due = now + FAULT_PAUSE;
        Self { server, since: now, clients: BTreeSet::new(), told: BTreeSet::new(), due, held_up: None }
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
    /// It is over, unless the log names more clients.
    Recovered,
    /// It is over with the server.
    ServerGone,
    /// Nothing: the clients have their grace.
    Wait,
    /// See whether anybody who was hit is still there.
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

/// Whether a fault is over on a driver that can't say so: nobody who was hit is left. None: the log may not have named them
/// yet. Until then the server is not ended: it may be well already, and others at work on it.
pub fn is_over(hit: &BTreeSet<u32>, is_left: impl Fn(u32) -> bool, age: Duration) -> Option<bool> {
    if hit.is_empty() && age < NAMES_TIMEOUT {
        return None;
    }
    Some(!hit.iter().any(|pid| is_left(*pid)))
}

/// The fate of a server that is still faulted after the grace of its clients. Each has the clients that stay on the GPUs that
/// were hit.
#[derive(Debug, PartialEq, Eq)]
pub enum AfterGrace<'c, C> {
    /// It may be ended: it holds nobody but clients that have lost their work.
    End(Permit, Vec<&'c C>),
    /// It is left alone: the log has named no GPU, and some of these clients, on several GPUs, are well.
    GpuNotKnown(Vec<&'c C>),
    /// It is left to this number of clients on other GPUs, which are well.
    OthersAreWell(Vec<&'c C>, usize),
}

/// Decides on a faulted server with these clients, where these GPUs were hit; none if nobody knows. `gpu` is the beginning of
/// the UUID of a client's GPU, empty if it is not known.
pub fn after_grace<'c, C>(
    hit: &BTreeSet<GpuUuid>,
    clients: &'c [C],
    gpu: fn(&C) -> &str,
) -> AfterGrace<'c, C> {
    let was_hit =
        |client: &&C| !gpu(client).is_empty() && hit.iter().any(|uuid| uuid.starts_with(gpu(client)));
    let (stay, elsewhere): (Vec<&C>, Vec<&C>) =
        clients.iter().partition(|client| hit.is_empty() || was_hit(client));
    let several_gpus = stay.iter().any(|client| stay.iter().any(|other| gpu(other) != gpu(client)));
    if hit.is_empty() && several_gpus {
        AfterGrace::GpuNotKnown(stay)
    } else if elsewhere.is_empty() {
        AfterGrace::End(Permit::new(Cause::Fault), stay)
    } else {
        AfterGrace::OthersAreWell(stay, elsewhere.len())
    }
}
