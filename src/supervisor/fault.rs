//! A fatal GPU error of a server, and the pause before the next server.

use std::collections::BTreeSet;
use std::time::Duration;

use mps_core::fault::FAULT_PAUSE;
use mps_core::next_pause;
use tokio::time::Instant;

/// A fatal GPU error that a server has not got over yet.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) server: u32,
    pub(super) since: Instant,
    /// The clients that were hit, each behind its GPU's ordinal. One that uses two GPUs can be hit on both.
    pub(super) clients: BTreeSet<(usize, u32)>,
    /// The clients of them that were told. The log may name more later.
    pub(super) told: BTreeSet<(usize, u32)>,
    pub(super) due: Instant,
    /// Why it is not ended though it could be.
    pub(super) held_up: Option<String>,
}

impl Fault {
    pub(super) fn new(server: u32) -> Self {
        let since = Instant::now();
        let due = since + FAULT_PAUSE;
        Self { server, since, clients: BTreeSet::new(), told: BTreeSet::new(), due, held_up: None }
    }

    pub(super) fn reason(&self) -> String {
        let held_up = self.held_up.as_ref().map(|why| format!("; {why}")).unwrap_or_default();
        format!(
            "server {} met a fatal GPU error and takes no client until its present ones have ended{held_up}",
            self.server
        )
    }
}

/// The pause between a server's end and the start of the next one, ahead of the first client.
#[derive(Debug)]
pub(super) struct Revival {
    pub(super) pause: Duration,
    pub(super) last_success: Instant,
}

impl Default for Revival {
    fn default() -> Self {
        Self { pause: Duration::ZERO, last_success: Instant::now() }
    }
}

impl Revival {
    /// The time for the next server. The pause after that is longer.
    pub(super) fn next(&mut self) -> Instant {
        let revive_at = Instant::now() + self.pause;
        self.pause = next_pause(self.pause);
        revive_at
    }
}
