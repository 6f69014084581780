//! Ends the GPU work of the newest clients of slices that are over their budgets.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mps_core::Permit;
use tokio::time::Instant;

use super::ending::EndingShell;
use crate::mps::control::Control;
use crate::mps::process::Held;
use common::host::identity::Identity;
use common::membership::Tenant;
use mps_core::budget::{self, Budget, Member};
use mps_core::tenants::{ClientEnd, ClientShell, Connections, end_client};

/// The first pause after a client could not be ended; it doubles up to the last.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(60);

/// A slice that is over its budget.
#[derive(Debug)]
pub(super) struct OverBudget {
    /// Its ordinal.
    pub slice: u32,
    pub budget: Budget,
    pub members: Vec<Member<Identity, Tenant>>,
    pub may_end: Permit,
}

/// The state of a client after the attempt to end it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum VictimState {
    Ended,
    /// It could not be ended, for this reason. It is left alone for a while.
    Stays(String),
}

/// A client that was to be ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Victim {
    /// The ordinal of its slice.
    pub slice: u32,
    pub process: Identity,
    pub state: VictimState,
}

/// A client of the control daemons: the server that it has its connections to.
struct Connected<'c> {
    control: &'c Arc<Control>,
    server: u32,
    connections: &'c Connections,
}

/// Knows the clients that it has ended and the clients that could not be ended, so that it tries nothing again without
/// need.
#[derive(Debug, Default)]
pub(super) struct Enforcer {
    /// The processes without work any more, by PID, with the connections that they had. Each is held, so that no other
    /// process with its PID is taken for it.
    ended: BTreeMap<u32, (Held, Connections)>,
    /// The processes that could not be ended, by PID: when the next attempt may come, and the pause before it.
    stubborn: BTreeMap<u32, (Identity, Instant, Duration)>,
}

impl Enforcer {
    /// Ends the work of the newest members of each slice until the rest fits. A member that was ended before counts as
    /// gone while it has no new connection, and so does a process without any connection.
    pub(super) async fn enforce(&mut self, shell: &mut EndingShell, slices: Vec<OverBudget>) -> Vec<Victim> {
        let (mut listed, mut silent) = (Vec::new(), None);
        for (control, clients) in shell.list().await {
            match clients {
                Ok(there) => listed.push((control, there.clients)),
                Err(error) => _ = silent.get_or_insert(error),
            }
        }
        if let Some(error) = &silent {
            // A client that is not listed counts as gone, so fewer are ended.
            tracing::debug!("budgets are enforced, and not all clients are known: {error}");
        }
        let mut connected: BTreeMap<u32, Vec<Connected<'_>>> = BTreeMap::new();
        for (control, clients) in &listed {
            for ((server, pid), client) in clients {
                let server = Connected { control, server: *server, connections: &client.connections };
                connected.entry(*pid).or_default().push(server);
            }
        }
        let may_be_there = |pid: &u32| silent.is_some() || connected.contains_key(pid);
        self.ended.retain(|pid, (held, _)| may_be_there(pid) && held.alive());
        self.stubborn.retain(|pid, _| may_be_there(pid));
        let mut victims = Vec::new();
        for OverBudget { slice, budget, mut members, may_end } in slices {
            members.retain(|member| {
                let pid = member.process.pid;
                connected.get(&pid).is_some_and(|servers| !self.has_ended(pid, servers))
            });
            for member in &mut members {
                member.stays |= self.is_stubborn(member.process);
            }
            while let Some(process) = budget::victims(budget, &members).first().copied() {
                let servers = connected.get(&process.pid).map(Vec::as_slice).unwrap_or_default();
                let state = match self.end(shell, process, servers, may_end).await {
                    Ok(state) => state,
                    // After a fault, and with a control daemon that does not answer, nobody is touched.
                    Err(reason) => {
                        tracing::debug!("no budget is enforced any further: {reason}");
                        return victims;
                    }
                };
                if let Some(VictimState::Stays(_)) = state {
                    // The next newest goes in its place.
                    members.iter_mut().filter(|one| one.process == process).for_each(|one| one.stays = true);
                } else {
                    members.retain(|one| one.process != process);
                }
                victims.extend(state.map(|state| Victim { slice, process, state }));
            }
        }
        victims
    }

    /// Whether a client has no work: it has no connection that it did not have when its work was ended. A client that
    /// starts over has a new one. Users can forge connections, but they can't remove any.
    fn has_ended(&self, pid: u32, servers: &[Connected<'_>]) -> bool {
        self.ended.get(&pid).is_some_and(|(held, ended)| {
            held.alive() && servers.iter().all(|one| one.connections.is_subset(ended))
        })
    }

    fn is_stubborn(&self, process: Identity) -> bool {
        self.stubborn
            .get(&process.pid)
            .is_some_and(|(known, until, _)| *known == process && Instant::now() < *until)
    }

    /// Ends the work of a client at all its servers. None if the client has just gone. It is an error if no other client
    /// may be touched either.
    async fn end(
        &mut self,
        shell: &mut EndingShell,
        process: Identity,
        servers: &[Connected<'_>],
        may_end: Permit,
    ) -> Result<Option<VictimState>, String> {
        let held = match Held::open(process.pid) {
            Ok(Some(held)) if Identity::read(process.pid).ok() == Some(process) => held,
            Ok(_) => return Ok(None),
            Err(error) => return Ok(Some(self.stays(process, error.to_string()))),
        };
        let mut ended = Connections::new();
        for Connected { control, server, connections } in servers {
            match end_client(shell, control, *server, &held, may_end).await {
                ClientEnd::Done => ended.extend(*connections),
                ClientEnd::NotThere => {}
                ClientEnd::Faulted => return Err(format!("server {server} handles a fault")),
                ClientEnd::StaysStopped(_) => {
                    return Ok(Some(self.stays(process, "it can't be continued".to_owned())));
                }
                ClientEnd::NotAsked(error) => return Err(error),
                ClientEnd::NotKnown(error) => {
                    self.stays(process, String::new());
                    return Err(error);
                }
            }
        }
        if ended.is_empty() {
            return Ok(None);
        }
        self.stubborn.remove(&process.pid);
        self.ended.insert(process.pid, (held, ended));
        Ok(Some(VictimState::Ended))
    }

    /// Leaves a client alone for a while, and longer each time.
    fn stays(&mut self, process: Identity, reason: String) -> VictimState {
        let before = self.stubborn.get(&process.pid).filter(|(known, ..)| *known == process);
        let pause = before.map_or(FIRST_PAUSE, |(.., pause)| (*pause * 2).min(LAST_PAUSE));
        self.stubborn.insert(process.pid, (process, Instant::now() + pause, pause));
        VictimState::Stays(reason)
    }
}
