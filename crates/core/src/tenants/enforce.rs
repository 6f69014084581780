//! Ends the GPU work of the newest clients of slices that are over their budgets.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use super::budget::next_victim;
use super::client_shell::{ClientShell, Connections, ListedClient, known_clients};
use super::end_client::{ClientEnd, end_client};
use super::watch::{OverBudget, Victim, VictimState};
use crate::terms::ProcessId;
use crate::{CoreTime, Permit};

/// The pause after the first failed attempt to end a client, and the longest pause. The pause doubles after each failure.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(60);

/// The time for which a list of clients, or a look at the members of a slice, is used to choose a client to end. Ending one
/// client can take half a minute, and other clients may leave meanwhile.
const BELIEVED_FOR: Duration = Duration::from_secs(2);

/// The questions and acts with which an [`Enforcer`] ends clients.
pub trait MemberShell: ClientShell {
    /// The process to which this handle belongs.
    fn process(&self, held: &Self::Held) -> ProcessId;

    /// Returns whether this process still runs. A later process with the same PID does not count.
    fn runs(&self, process: ProcessId) -> bool;
}

/// The connections of a client at one server.
struct Connected<C> {
    control: C,
    /// The start time of the process that had the client's PID when the control daemon listed it. None if no process had the
    /// PID.
    started: Option<u64>,
    server: u32,
    connections: Connections,
}

/// The clients of all control daemons, by PID. A client may be connected to several servers.
type AllConnected<C> = BTreeMap<u32, Vec<Connected<C>>>;

/// The result of an attempt to bring slices back into their budgets.
#[derive(Debug, PartialEq, Eq)]
pub struct Enforced {
    /// The clients that the attempt has tried to end.
    pub victims: Vec<Victim>,
    /// The reason why the attempt ended before its time: a fault, or a control daemon that does not answer. None if the
    /// attempt was completed.
    pub broken_off: Option<String>,
}

/// Ends clients of slices over their budgets, and remembers the clients that were ended, that may have been ended, and that
/// could not be ended, so that no attempt is repeated without need. `H` is a handle of a process.
#[derive(Debug)]
pub struct Enforcer<H> {
    /// The processes whose work was ended, by PID, with the connections that they had at that time. The handles distinguish
    /// these processes from later processes with the same PID.
    ended: BTreeMap<u32, (H, Connections)>,
    /// The processes, by PID, that may have lost some or all of their work, since a control daemon has not answered. While a
    /// process in this map lives, the service ends its work before that of other clients.
    in_doubt: BTreeMap<u32, H>,
    /// The processes that could not be ended, by PID, each with the time of the next attempt and the pause before that attempt.
    stubborn: BTreeMap<u32, (ProcessId, CoreTime, Duration)>,
}

impl<H> Default for Enforcer<H> {
    fn default() -> Self {
        Self { ended: BTreeMap::new(), in_doubt: BTreeMap::new(), stubborn: BTreeMap::new() }
    }
}

/// The result of the attempt to end one client.
enum End {
    /// The attempt on this client is over, and the next client can be ended.
    Came(VictimState),
    /// The client has ended by itself.
    Gone,
    /// No further client may be ended now, for this reason. `is_in_doubt` is true if this client may have lost its work.
    BreaksOff { reason: String, is_in_doubt: bool },
}

impl<H: Clone> Enforcer<H> {
    /// Ends the work of the newest members of each slice that is over its budget, until the remaining members fit. `over`
    /// returns the slices of the latest look at the clients, since the service looks at the clients again during the
    /// attempt.
    pub async fn enforce<S: MemberShell<Held = H>, T>(
        &mut self,
        shell: &mut S,
        over: impl Fn() -> Vec<OverBudget<T>>,
    ) -> Enforced {
        let (mut victims, mut gone) = (Vec::new(), Vec::new());
        let connected = self.list(shell).await;
        let until = shell.now() + BELIEVED_FOR;
        while shell.now() < until
            && let Some((slice, process, may_end)) = self.next(shell, over(), &connected, &gone)
        {
            let servers = connected.get(&process.pid).map(Vec::as_slice).unwrap_or_default();
            match self.end(shell, process, servers, may_end).await {
                End::Gone => gone.push(process),
                End::Came(state) => victims.push(Victim { slice, process, state }),
                End::BreaksOff { reason, is_in_doubt } => {
                    let state = is_in_doubt.then(|| VictimState::Unknown(reason.clone()));
                    victims.extend(state.map(|state| Victim { slice, process, state }));
                    return Enforced { victims, broken_off: Some(reason) };
                }
            }
        }
        Enforced { victims, broken_off: None }
    }

    /// The next client to end, with its slice. Three kinds of members are left out: a member that was ended and has no new
    /// connection, a member without any connection, and a member whose PID belongs to another process now. If a process can't
    /// be ended, the next newest process is chosen.
    fn next<S: MemberShell<Held = H>, T>(
        &self,
        shell: &S,
        over: Vec<OverBudget<T>>,
        connected: &AllConnected<S::Control>,
        gone: &[ProcessId],
    ) -> Option<(u32, ProcessId, Permit)> {
        let now = shell.now();
        over.into_iter().filter(|one| now < one.as_of + BELIEVED_FOR).find_map(|mut one| {
            one.members.retain(|member| {
                let pid = member.process.pid;
                let is_it = |one: &Connected<_>| one.started == Some(member.process.start_time);
                let servers = connected.get(&pid).filter(|servers| servers.iter().all(is_it));
                let servers = servers.filter(|servers| !self.has_ended(shell, pid, servers));
                servers.is_some() && !gone.contains(&member.process) && shell.runs(member.process)
            });
            for member in &mut one.members {
                member.stays |= self.is_stubborn(member.process, now);
            }
            let process = next_victim(one.budget, &one.members, |process| self.is_in_doubt(shell, process))?;
            Some((one.slice, process, one.may_end))
        })
    }

    /// Asks all control daemons for their clients. A client that no control daemon lists counts as ended, so the service may
    /// end too few clients, but never too many.
    async fn list<S: MemberShell<Held = H>>(&mut self, shell: &mut S) -> AllConnected<S::Control> {
        let mut connected = AllConnected::new();
        let (known, missing) = known_clients(shell.list().await);
        let is_complete = missing.is_none();
        for (control, listed) in known {
            for ((server, pid), client) in listed.clients {
                let ListedClient { started, connections, .. } = client;
                let one = Connected { control: control.clone(), started, server, connections };
                connected.entry(pid).or_default().push(one);
            }
        }
        let may_be_there = |pid: &u32| !is_complete || connected.contains_key(pid);
        self.stubborn.retain(|pid, _| may_be_there(pid));
        // After a fatal error a control daemon may list no client, so a client that is missing from the list is forgotten
        // only when its process has ended.
        self.ended.retain(|_, (held, _)| shell.is_alive(held));
        self.in_doubt.retain(|_, held| shell.is_alive(held));
        connected
    }

    /// Returns whether a client has no work: every connection existed already when the client's work was ended. A client that
    /// starts work again has a new connection. Users can forge connections, but can't remove any.
    fn has_ended<S: MemberShell<Held = H>>(
        &self,
        shell: &S,
        pid: u32,
        servers: &[Connected<S::Control>],
    ) -> bool {
        self.ended.get(&pid).is_some_and(|(held, ended)| {
            shell.is_alive(held) && servers.iter().all(|one| one.connections.is_subset(ended))
        })
    }

    fn is_stubborn(&self, process: ProcessId, now: CoreTime) -> bool {
        let stubborn = self.stubborn.get(&process.pid);
        stubborn.is_some_and(|(known, until, _)| *known == process && now < *until)
    }

    fn is_in_doubt<S: MemberShell<Held = H>>(&self, shell: &S, process: ProcessId) -> bool {
        self.in_doubt.get(&process.pid).is_some_and(|held| shell.process(held) == process)
    }

    /// Ends the work of a client at all servers to which it is connected.
    async fn end<S: MemberShell<Held = H>>(
        &mut self,
        shell: &mut S,
        process: ProcessId,
        servers: &[Connected<S::Control>],
        may_end: Permit,
    ) -> End {
        let pid = process.pid;
        let held = match shell.hold(pid) {
            Ok(Some(held)) if shell.process(&held) == process => held,
            Ok(_) => return End::Gone,
            Err(why) => return End::Came(self.stays(shell.now(), process, why)),
        };
        let mut ended = Connections::new();
        for Connected { control, server, connections, .. } in servers {
            let came = end_client(shell, control, *server, &held, may_end).await;
            let has_lost = !ended.is_empty() || matches!(came, ClientEnd::NotKnown(_));
            if has_lost {
                // A client on several servers counts as a client that may have lost its work, until the attempts at
                // all of its servers have got answers.
                self.in_doubt.insert(pid, held.clone());
            }
            let reason = match came {
                ClientEnd::Done => {
                    ended.extend(connections.iter().copied());
                    continue;
                }
                ClientEnd::NotThere => continue,
                ClientEnd::StaysStopped(why) => return End::Came(self.stays(shell.now(), process, why)),
                ClientEnd::Faulted => format!("server {server} handles a fault"),
                ClientEnd::NotAsked(why) => why,
                ClientEnd::NotKnown(why) => {
                    self.stays(shell.now(), process, String::new());
                    why
                }
            };
            return End::BreaksOff { reason, is_in_doubt: has_lost };
        }
        if ended.is_empty() {
            return End::Gone;
        }
        self.stubborn.remove(&pid);
        self.in_doubt.remove(&pid);
        self.ended.insert(pid, (held, ended));
        End::Came(VictimState::Ended)
    }

    /// Records that a client could not be ended. The next attempt on this client is made after a pause, which is longer each
    /// time.
    fn stays(&mut self, now: CoreTime, process: ProcessId, reason: String) -> VictimState {
        let before = self.stubborn.get(&process.pid).filter(|(known, ..)| *known == process);
        let pause = before.map_or(FIRST_PAUSE, |(.., pause)| (*pause * 2).min(LAST_PAUSE));
        self.stubborn.insert(process.pid, (process, now + pause, pause));
        VictimState::Stays(reason)
    }
}
