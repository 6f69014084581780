//! Finds clients that wait for a server. Without multi-user mode the users of a control daemon take turns, and a client that
//! waits for its turn gets no message about it.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::vec::Vec;
use core::time::Duration;

use super::Serving;
use super::news::News;
use super::shell::Shell;
use crate::CoreTime;
use crate::mps::Meaning;
use crate::terms::ProcessId;

/// A client is reported after it has waited for this time. Measured: the first client waits 0.15 s for its server to start.
const PATIENCE: Duration = Duration::from_secs(5);

/// The most waiting clients that the service remembers: of all users together, and of one user. Without a limit, a user could
/// fill the memory, since a user can start any number of clients.
const KEPT: usize = 64;
const KEPT_OF_A_USER: usize = 16;

#[derive(Debug, Default)]
pub(super) struct WaitingClients {
    waiting: BTreeMap<u32, WaitingClient>,
    /// The users for whom a waiting client was reported.
    told: BTreeSet<u32>,
    pub(super) due: Option<CoreTime>,
}

#[derive(Debug, Clone, Copy)]
struct WaitingClient {
    process: ProcessId,
    uid: u32,
    since: CoreTime,
}

impl WaitingClient {
    fn is_long_waiting(&self, now: CoreTime) -> bool {
        now.saturating_sub(self.since) >= PATIENCE
    }
}

impl WaitingClients {
    fn has_room(&self, uid: u32) -> bool {
        let of_user = self.waiting.values().filter(|one| one.uid == uid).count();
        self.waiting.len() < KEPT && of_user < KEPT_OF_A_USER
    }

    fn add(&mut self, process: ProcessId, uid: u32, now: CoreTime) {
        let new = WaitingClient { process, uid, since: now };
        let known = self.waiting.entry(process.pid).or_insert(new);
        // An ended client may have had the PID before.
        if known.process != process {
            *known = new;
        }
        self.due.get_or_insert(now + PATIENCE);
    }

    fn admitted(&mut self, client: u32, now: CoreTime) {
        // The admitted client may be published as waiting. The check is then due at once, and removes the client from the
        // published list.
        if self.waiting.remove(&client).is_some_and(|one| one.is_long_waiting(now)) {
            self.due = Some(now);
        }
    }

    /// Forgets the clients that have ended. Returns the clients that have waited long, each with its user id.
    fn take_long_waiting(
        &mut self,
        now: CoreTime,
        process: impl Fn(u32) -> Option<ProcessId>,
    ) -> Vec<(ProcessId, u32)> {
        self.waiting.retain(|pid, one| process(*pid) == Some(one.process));
        let next = |one: &WaitingClient| {
            if one.is_long_waiting(now) { now + PATIENCE } else { one.since + PATIENCE }
        };
        self.due = self.waiting.values().map(next).min();
        let long = self.waiting.values().filter(|one| one.is_long_waiting(now));
        long.map(|one| (one.process, one.uid)).collect()
    }

    /// The first waiting client of each user for whom no client was reported yet.
    fn take_untold(&mut self, waiting: &[(ProcessId, u32)]) -> Vec<(ProcessId, u32)> {
        self.told.retain(|uid| waiting.iter().any(|(_, waits)| waits == uid));
        waiting.iter().filter(|(_, uid)| self.told.insert(*uid)).copied().collect()
    }
}

impl<S: Shell> Serving<'_, S> {
    pub(super) fn observe_waiting(&mut self, meaning: &Meaning) {
        let now = self.shell.now();
        let waiting = &mut self.run.waiting_clients;
        match *meaning {
            Meaning::ClientAdmitted(client) => waiting.admitted(client, now),
            // The line of the log may be old, and another process may have the client's PID now. The process must therefore run
            // as the user in the line.
            Meaning::ClientPending { client, uid } if waiting.has_room(uid) => {
                let process = self.shell.process(client);
                if let Some(process) = process.filter(|_| self.shell.runs_as(client, uid)) {
                    waiting.add(process, uid, now);
                }
            }
            _ => {}
        }
    }

    /// Reports one client of each user that has waited long, and publishes all clients that have waited long.
    pub(super) fn tell_waiting(&mut self) {
        let served_alone = self.run.servers.user_served().filter(|_| !self.run.multiuser);
        let (now, shell) = (self.shell.now(), &self.shell);
        let waiting = self.run.waiting_clients.take_long_waiting(now, |pid| shell.process(pid));
        for (ProcessId { pid, .. }, uid) in self.run.waiting_clients.take_untold(&waiting) {
            let why = match served_alone {
                Some(served) if served != uid => format!(
                    "until the clients of user {served} have ended: this control daemon serves one user at a time"
                ),
                _ => "for an MPS server, but no server accepts the client".into(),
            };
            let command = self.shell.command(pid);
            self.shell.tell(News::Warning, format!("client {pid} ({command}) of user {uid} waits {why}"));
        }
        self.shell.show(|view| view.waiting = waiting.into_iter().map(|(process, _)| process).collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: CoreTime = CoreTime::from_secs(100);
    const SECOND: Duration = Duration::from_secs(1);

    fn process(pid: u32, start_time: u64) -> ProcessId {
        ProcessId { pid, start_time }
    }

    #[test]
    fn of_each_user_only_so_many_are_kept() {
        let mut clients = WaitingClients::default();
        let mut pids = 1..;
        for _ in 0..100 {
            for uid in 0..8 {
                if clients.has_room(uid) {
                    clients.add(process(pids.next().unwrap(), 1), uid, NOW);
                }
            }
        }
        let of_user = |uid| clients.waiting.values().filter(|one| one.uid == uid).count();
        assert_eq!((0..8).map(of_user).collect::<Vec<_>>(), [8; 8]);
        let mut clients = WaitingClients::default();
        (1..=16).for_each(|pid| clients.add(process(pid, 1), 7, NOW));
        assert!(!clients.has_room(7) && clients.has_room(8));
    }

    #[test]
    fn one_that_waits_is_told_of_after_a_while_and_once_for_its_user() {
        let mut clients = WaitingClients::default();
        let there = |pid: u32| (pid != 3).then_some(process(pid, u64::from(pid) * 10));
        clients.add(process(1, 10), 7, NOW);
        clients.add(process(1, 10), 7, NOW + SECOND);
        clients.add(process(2, 20), 7, NOW + SECOND);
        clients.add(process(3, 30), 8, NOW);
        assert_eq!(clients.due, Some(NOW + PATIENCE));
        assert_eq!(clients.take_long_waiting(NOW + 4 * SECOND, there), []);
        assert_eq!(clients.due, Some(NOW + PATIENCE));
        let long = clients.take_long_waiting(NOW + PATIENCE, there);
        assert_eq!(long, [(process(1, 10), 7)], "3 has ended, and 2 waits since a second later");
        assert_eq!(clients.due, Some(NOW + PATIENCE + SECOND));
        assert_eq!(clients.take_untold(&long), [(process(1, 10), 7)]);
        let long = clients.take_long_waiting(NOW + PATIENCE + SECOND, there);
        assert_eq!(long, [(process(1, 10), 7), (process(2, 20), 7)]);
        assert_eq!(clients.due, Some(NOW + PATIENCE + SECOND + PATIENCE));
        assert_eq!(clients.take_untold(&long), [], "its user was reported");
        let of_others = |pid| there(pid).map(|one| process(pid, one.start_time + 1));
        assert_eq!(clients.take_long_waiting(NOW + 3 * PATIENCE, of_others), [], "the PIDs are others' now");
        assert_eq!(clients.due, None);
        assert_eq!(clients.take_untold(&[]), []);
        assert_eq!(clients.take_untold(&long), [(process(1, 10), 7)], "it waits once more");
    }

    #[test]
    fn a_client_with_the_pid_of_an_ended_client_waits_for_itself() {
        let mut clients = WaitingClients::default();
        clients.add(process(1, 10), 7, NOW);
        clients.add(process(1, 20), 8, NOW + SECOND);
        let there = |pid| Some(process(pid, 20));
        assert_eq!(clients.take_long_waiting(NOW + PATIENCE, there), []);
        assert_eq!(clients.take_long_waiting(NOW + PATIENCE + SECOND, there), [(process(1, 20), 8)]);
    }

    #[test]
    fn one_that_was_shown_is_taken_back_at_once() {
        let mut clients = WaitingClients::default();
        clients.add(process(1, 10), 7, NOW);
        clients.add(process(2, 20), 7, NOW);
        clients.admitted(1, NOW + SECOND);
        assert_eq!(clients.due, Some(NOW + PATIENCE), "no user was reported");
        clients.admitted(2, NOW + PATIENCE);
        assert_eq!(clients.due, Some(NOW + PATIENCE));
        clients.admitted(3, NOW + 2 * PATIENCE);
        assert_eq!(clients.due, Some(NOW + PATIENCE), "no client waited");
        assert!(clients.waiting.is_empty());
    }
}
