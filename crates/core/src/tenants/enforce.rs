//! Ends the GPU work of the newest clients of slices that are over their budgets.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use super::budget::next_victim;
use super::client_shell::{ClientEnd, ClientShell, Connections, DaemonClients, ListedClient, known_clients};
use super::end_client::end_client;
use super::watch::{OverBudget, Victim, VictimState};
use crate::terms::ProcessId;
use crate::{CoreTime, Permit};

/// The pause after the first failed attempt to end a client, and the longest pause. The pause doubles after each failed
/// attempt.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(60);

/// The longest time for which the service trusts a list of clients, or a reading of a slice's members. Ending one client can
/// take half a minute, and other clients may end meanwhile.
const BELIEVED_FOR: Duration = Duration::from_secs(2);

/// The servers that have a client with this PID, each with its control daemon and the client's entry in that control daemon's
/// list.
fn servers_of<C>(listed: &[(C, DaemonClients)], pid: u32) -> impl Iterator<Item = (&C, u32, &ListedClient)> {
    listed.iter().flat_map(move |(control, daemon)| {
        let its = daemon.clients.iter().filter(move |((_, one), _)| *one == pid);
        its.map(move |((server, _), client)| (control, *server, client))
    })
}

/// Ends clients of slices that are over their budgets. Remembers the clients that were ended, that may have been ended, and
/// that could not be ended, so that no attempt is repeated without need. `H` is a handle of a process.
#[derive(Debug)]
pub struct Enforcer<H> {
    /// The work of these processes was ended. The key is the PID. The value has the connections that the process had at that
    /// time, and a handle. The handle shows if the PID still belongs to the same process.
    ended: BTreeMap<u32, (H, Connections)>,
    /// The processes, by PID, that may have lost work, since a control daemon did not answer. While a process in this map
    /// lives, the service ends its work before the work of other clients.
    in_doubt: BTreeMap<u32, (ProcessId, H)>,
    /// The processes that could not be ended, by PID, each with the time of the next attempt and the pause before this attempt.
    stubborn: BTreeMap<u32, (ProcessId, CoreTime, Duration)>,
}

impl<H> Default for Enforcer<H> {
    fn default() -> Self {
        Self { ended: BTreeMap::new(), in_doubt: BTreeMap::new(), stubborn: BTreeMap::new() }
    }
}

impl<H: Clone> Enforcer<H> {
    /// Ends the work of the newest members of each slice that is over its budget, until the other members fit. `over` returns
    /// the slices that are over their budgets at the latest reading. `over` is called again before each end, since the readings
    /// go on while this function ends clients. `runs` returns whether a process still runs.
    ///
    /// Returns the clients that this function has tried to end. The second value is the reason if this function has ended no
    /// further clients because of a fatal GPU error, or because a control daemon has not answered.
    pub async fn enforce<S: ClientShell<Held = H>, T>(
        &mut self,
        shell: &mut S,
        over: impl Fn() -> Vec<OverBudget<T>>,
        runs: impl Fn(ProcessId) -> bool,
    ) -> (Vec<Victim>, Option<String>) {
        let (mut victims, mut gone) = (Vec::new(), Vec::new());
        let listed = self.list(shell).await;
        let until = shell.now() + BELIEVED_FOR;
        while shell.now() < until
            && let Some((slice, process, may_end)) = self.next(shell, over(), &listed, &gone, &runs)
        {
            let (state, broken_off) = self.end(shell, process, &listed, may_end, &runs).await;
            match state {
                Some(state) => victims.push(Victim { slice, process, state }),
                None => gone.push(process),
            }
            if broken_off.is_some() {
                return (victims, broken_off);
            }
        }
        (victims, None)
    }

    /// The next client to end, with its slice. The service skips a member without a connection, and a member that was ended and
    /// has no new connection. It also skips a member if the member's PID belongs to another process now. A member that could
    /// not be ended recently is skipped too, so that the next newest member is chosen.
    fn next<S: ClientShell<Held = H>, T>(
        &self,
        shell: &S,
        over: Vec<OverBudget<T>>,
        listed: &[(S::Control, DaemonClients)],
        gone: &[ProcessId],
        runs: impl Fn(ProcessId) -> bool,
    ) -> Option<(u32, ProcessId, Permit)> {
        let now = shell.now();
        over.into_iter().filter(|one| now < one.as_of + BELIEVED_FOR).find_map(|mut one| {
            one.members.retain(|member| {
                let pid = member.process.pid;
                let mut started = servers_of(listed, pid).map(|(.., client)| client.started).peekable();
                started.peek().is_some()
                    && started.all(|started| started == Some(member.process.start_time))
                    && !self.has_ended(shell, pid, listed)
                    && !gone.contains(&member.process)
                    && runs(member.process)
            });
            for member in &mut one.members {
                member.stays |= self.is_stubborn(member.process, now);
            }
            let process = next_victim(one.budget, &one.members, |process| self.is_in_doubt(process))?;
            Some((one.slice, process, one.may_end))
        })
    }

    /// Asks all control daemons for their clients. A client that no control daemon lists counts as ended. The service may
    /// therefore end too few clients, but never too many.
    async fn list<S: ClientShell<Held = H>>(&mut self, shell: &mut S) -> Vec<(S::Control, DaemonClients)> {
        let (listed, missing) = known_clients(shell.list().await);
        if missing.is_none() {
            self.stubborn.retain(|pid, _| servers_of(&listed, *pid).next().is_some());
        }
        // After a fatal GPU error a control daemon may list no client. A client that is missing from the list is therefore
        // forgotten only after its process has ended.
        self.ended.retain(|_, (held, _)| shell.is_alive(held));
        self.in_doubt.retain(|_, (_, held)| shell.is_alive(held));
        listed
    }

    /// Returns whether a client has no work, since all its connections existed already when its work was ended. A client that
    /// starts work again has a new connection. Users can forge connections, but can't remove any.
    fn has_ended<S: ClientShell<Held = H>>(
        &self,
        shell: &S,
        pid: u32,
        listed: &[(S::Control, DaemonClients)],
    ) -> bool {
        self.ended.get(&pid).is_some_and(|(held, ended)| {
            let mut servers = servers_of(listed, pid);
            shell.is_alive(held) && servers.all(|(.., client)| client.connections.is_subset(ended))
        })
    }

    fn is_stubborn(&self, process: ProcessId, now: CoreTime) -> bool {
        let stubborn = self.stubborn.get(&process.pid);
        stubborn.is_some_and(|(known, until, _)| *known == process && now < *until)
    }

    fn is_in_doubt(&self, process: ProcessId) -> bool {
        self.in_doubt.get(&process.pid).is_some_and(|(known, _)| *known == process)
    }

    /// Ends the work of a client at all servers to which it is connected. Returns the state of the client after the attempt.
    /// The state is None if the client has ended by itself, or if no control daemon was asked to end it. The second value is
    /// the reason if no further client may be ended now.
    async fn end<S: ClientShell<Held = H>>(
        &mut self,
        shell: &mut S,
        process: ProcessId,
        listed: &[(S::Control, DaemonClients)],
        may_end: Permit,
        runs: impl Fn(ProcessId) -> bool,
    ) -> (Option<VictimState>, Option<String>) {
        let pid = process.pid;
        let held = match shell.hold(pid) {
            // If the process still runs, the handle is a handle of this process: no other process had the PID when the handle
            // was opened.
            Ok(Some(held)) if runs(process) => held,
            Ok(_) => return (None, None),
            Err(why) => return (Some(self.stays(shell.now(), process, why)), None),
        };
        let mut ended = Connections::new();
        for (control, server, client) in servers_of(listed, pid) {
            let came = end_client(shell, control, server, &held, may_end).await;
            let has_lost = !ended.is_empty() || matches!(came, ClientEnd::NotKnown(_));
            if has_lost {
                // A client of several servers counts as a client that may have lost its work, until the attempts at all of its
                // servers have got answers.
                self.in_doubt.insert(pid, (process, held.clone()));
            }
            let reason = match came {
                ClientEnd::Done => {
                    ended.extend(client.connections.iter().copied());
                    continue;
                }
                ClientEnd::NotThere => continue,
                ClientEnd::StaysStopped(why) => return (Some(self.stays(shell.now(), process, why)), None),
                ClientEnd::Faulted => format!("server {server} handles a fatal GPU error"),
                ClientEnd::NotAsked(why) => why,
                ClientEnd::NotKnown(why) => {
                    self.stays(shell.now(), process, String::new());
                    why
                }
            };
            return (has_lost.then(|| VictimState::Unknown(reason.clone())), Some(reason));
        }
        if ended.is_empty() {
            return (None, None);
        }
        self.stubborn.remove(&pid);
        self.in_doubt.remove(&pid);
        self.ended.insert(pid, (held, ended));
        (Some(VictimState::Ended), None)
    }

    /// Records that a client could not be ended. The pause before the next attempt doubles each time.
    fn stays(&mut self, now: CoreTime, process: ProcessId, reason: String) -> VictimState {
        let before = self.stubborn.get(&process.pid).filter(|(known, ..)| *known == process);
        let pause = before.map_or(FIRST_PAUSE, |(.., pause)| (*pause * 2).min(LAST_PAUSE));
        self.stubborn.insert(process.pid, (process, now + pause, pause));
        VictimState::Stays(reason)
    }
}
