//! Finds clients that wait for a server. Without multi-user mode the users of a control daemon take turns, and a client
//! that waits for its turn says nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mps_core::mps::Meaning;
use tokio::time::Instant;

use common::host::identity::Identity;
use common::host::proc;

use super::status::Reporter;

/// The time after which a waiting client is told of, and the time between two looks. Measured: the first client waits
/// 0.15 s for its server to start.
const PATIENCE: Duration = Duration::from_secs(5);

/// The most clients that are remembered, in all and of one user. A user can start any number of clients.
const KEPT: usize = 64;
const KEPT_OF_A_USER: usize = 16;

/// The clients that are known to wait.
#[derive(Debug, Default)]
pub(super) struct WaitingClients {
    waiting: BTreeMap<u32, WaitingClient>,
    /// The users that were told of.
    told: BTreeSet<u32>,
    /// The time of the next look.
    pub(super) due: Option<Instant>,
}

#[derive(Debug)]
struct WaitingClient {
    process: Identity,
    uid: u32,
    since: Instant,
}

impl WaitingClients {
    pub(super) fn observe(&mut self, meaning: &Meaning) {
        match meaning {
            Meaning::ClientPending { client, uid } => self.add(*client, *uid),
            Meaning::ClientAdmitted(client) => {
                let gone = self.waiting.remove(client);
                // A client that was shown is taken back at once.
                let told = gone.filter(|one| one.since.elapsed() >= PATIENCE);
                self.due = told.map(|_| Instant::now()).or(self.due);
            }
            _ => {}
        }
    }

    fn add(&mut self, client: u32, uid: u32) {
        let of_user = self.waiting.values().filter(|one| one.uid == uid).count();
        if self.waiting.len() >= KEPT || of_user >= KEPT_OF_A_USER {
            return;
        }
        // The line may be an old one, and the PID somebody else's by now.
        let Some(process) = Identity::read(client).ok().filter(|_| runs_as(client, uid)) else { return };
        let since = Instant::now();
        self.waiting.entry(client).or_insert(WaitingClient { process, uid, since });
        self.due = Some(self.due.unwrap_or(since + PATIENCE));
    }

    /// Forgets the clients that have ended. Returns the clients that have waited long, with their users.
    fn take_long_waiting(&mut self) -> Vec<(Identity, u32)> {
        self.waiting.retain(|pid, one| Identity::read(*pid).is_ok_and(|now| now == one.process));
        let now = Instant::now();
        let next = |one: &WaitingClient| {
            if one.since + PATIENCE > now { one.since + PATIENCE } else { now + PATIENCE }
        };
        self.due = self.waiting.values().map(next).min();
        let long = self.waiting.values().filter(|one| one.since.elapsed() >= PATIENCE);
        long.map(|one| (one.process, one.uid)).collect()
    }
}

/// True if the process runs as this user.
fn runs_as(pid: u32, uid: u32) -> bool {
    proc::status(pid).is_ok_and(|status| status.uids().contains(&uid))
}

impl WaitingClients {
    /// Finds the clients that still wait, and tells of them once for each user. Users take turns where one is served alone.
    pub(super) fn tell(&mut self, reporter: &Reporter, served_alone: Option<u32>) {
        let waiting = self.take_long_waiting();
        let uids: BTreeSet<u32> = waiting.iter().map(|(_, uid)| *uid).collect();
        self.told.retain(|uid| uids.contains(uid));
        for (process, uid) in &waiting {
            if !self.told.insert(*uid) {
                continue;
            }
            let (pid, command) = (process.pid, proc::name(process.pid).unwrap_or_default());
            let why = match served_alone {
                Some(served) if served != *uid => format!(
                    "until the clients of user {served} have ended: this control daemon serves one user at a time"
                ),
                _ => "and no server takes it".to_owned(),
            };
            reporter.warning(format!("client {pid} ({command}) of user {uid} waits {why}"));
        }
        reporter.update(|status| {
            status.waiting = waiting.into_iter().map(|(process, _)| process).collect();
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_each_user_only_so_many_are_kept() {
        let own = rustix::process::geteuid().as_raw();
        let mut pending = WaitingClients::default();
        let process = Identity::read(std::process::id()).unwrap();
        for pid in 1..=100_000_u32 {
            let uid = pid % 2;
            let (since, of_user) =
                (Instant::now(), pending.waiting.values().filter(|one| one.uid == uid).count());
            if of_user < KEPT_OF_A_USER {
                pending.waiting.insert(u32::MAX - pid, WaitingClient { process, uid, since });
            } else {
                break;
            }
        }
        pending.observe(&Meaning::ClientPending { client: process.pid, uid: own });
        let kept = pending.waiting.values().filter(|one| one.uid == own).count();
        assert!(kept <= KEPT_OF_A_USER, "{kept}");
        // A PID without a process is nobody.
        assert_eq!(pending.take_long_waiting(), []);
        pending.observe(&Meaning::ClientPending { client: process.pid, uid: own });
        assert_eq!(pending.waiting.len(), 1);
        pending.observe(&Meaning::ClientPending { client: process.pid, uid: own + 1 });
        assert_eq!(pending.waiting.len(), 1, "a process of another user is not the one that waits");
        pending.observe(&Meaning::ClientAdmitted(process.pid));
        assert_eq!(pending.waiting.len(), 0);
    }
}
