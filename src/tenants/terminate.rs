//! Ends the GPU work of a tenant and leaves its neighbours alone.
//!
//! A signal that ends a client in the middle of a kernel takes the memory away under that kernel. This is a fault, and
//! a fault hits every client on that GPU. `terminate_client` ends the kernel first. So the host agent asks for this
//! before it stops a process or a container.

use common::published::termination::TerminationTarget;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use mps_core::Permit;
use tokio::time::Instant;

use crate::mps::control::Control;
use crate::mps::process::Held;
use crate::tenants::clients::{users, whose};
use crate::tenants::describe::{NAMED, Whose};
use crate::tenants::ending::EndingShell;
use common::host::blocking::Blocking;
use common::host::device_name::{DeviceName, SliceId};
use common::host::proc;
use common::membership::containers::{containers_in, is_the_hosts};
use common::membership::{DEVICE_VARIABLE, KnownBy, Membership, SliceMounts, Slices};
use mps_core::tenants::{ClientEnd, ClientShell, Connections, ListedClient, end_client};

/// The time that the clients get to let go. Measured: 50 ms for a program that ends when CUDA gives it an error.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The first pause between two looks; it doubles up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// The time for which a client has to be without a known slice before a release of slices fails for it. A process that is
/// just ending has no environment any more.
const UNPLACED_FOR: Duration = Duration::from_secs(1);

/// The reason why some wanted processes may have GPU work left.
#[derive(Debug, thiserror::Error)]
pub enum TerminationError {
    /// Several containers have ids that begin so. Nothing was done.
    #[error("{id} is the beginning of several containers: {}; give more digits", found.join(", "))]
    SeveralContainers { id: String, found: Vec<String> },
    /// The process is no client of any control daemon here.
    #[error("process {0} is no client of a GPU here; yunion-mpsctl clients lists the clients")]
    NoSuchClient(u32),
    /// The process is no client of any control daemon here, or another user's.
    #[error("process {pid} is no client of a GPU here that user {user} has started")]
    NotTheirs { pid: u32, user: u32 },
    /// A process can't be looked at, so nobody knows whether it is wanted. The work of the others was ended.
    #[error("process {pid} can't be looked at: {source}")]
    Unreadable { pid: u32, source: io::Error },
    /// Clients on the GPUs of the wanted slices, in words. Nobody knows which slices they have, so nobody knows whether they
    /// are wanted. The work of the others was ended.
    #[error(
        "no process that is known to have these slices uses them any more; not known of {0}: neither a mounted directory \
         nor {DEVICE_VARIABLE} in the environment says which slice of this GPU they have, and their GPU work goes on; \
         terminate them by PID or container before anybody stops them"
    )]
    Unplaced(String),
    /// A control daemon did not answer. Work on the other control daemons was ended.
    #[error("{0}")]
    Control(String),
    /// Time is up. The processes have not been sent a signal.
    #[error("after {} s the GPU work of these clients could not be ended: {}; no signal was sent to them", TIMEOUT.as_secs(), pids(.0))]
    StillThere(BTreeSet<u32>),
    /// Time is up, and not even the clients are known.
    #[error("after {} s it is not known which clients there are", TIMEOUT.as_secs())]
    NotKnown,
}

fn pids(left: &BTreeSet<u32>) -> String {
    left.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Ends the GPU work of all wanted processes, and returns when the work is over. A process that waits for something
/// else notices at its next call to CUDA, and stays listed as a client until then. From now on no signal to such a
/// process can hurt its neighbours. The first answer names the clients that had work, also after an error.
pub(crate) async fn terminate(
    shell: EndingShell,
    wanted: TerminationTarget,
    slices: Slices,
    kernel: Blocking,
) -> (Vec<Whose>, Result<(), TerminationError>) {
    let mut termination = Termination {
        shell,
        wanted,
        slices,
        kernel,
        ended: BTreeMap::new(),
        had_work: Vec::new(),
        left: None,
        unplaced_since: None,
        only_hosts: false,
    };
    let result = match tokio::time::timeout(TIMEOUT, termination.run()).await {
        Ok(result) => result,
        Err(_) => Err(termination.left.map_or(TerminationError::NotKnown, TerminationError::StillThere)),
    };
    (termination.had_work, result)
}

struct Termination {
    shell: EndingShell,
    wanted: TerminationTarget,
    slices: Slices,
    kernel: Blocking,
    /// The processes without work any more, by server and client, with the connections that they had. Each is held, so
    /// that no other process with its PID is taken for it.
    ended: BTreeMap<(u32, u32), (Held, Connections)>,
    /// The same clients in the words of people, as they were before the end of their work.
    had_work: Vec<Whose>,
    /// The processes with work at the last look; None before the first look that found any.
    left: Option<BTreeSet<u32>>,
    /// The time since when each look has found clients without a known slice.
    unplaced_since: Option<Instant>,
    /// The wanted container is known to be made by the host's own runtime.
    only_hosts: bool,
}

impl Termination {
    async fn run(&mut self) -> Result<(), TerminationError> {
        let mut pause = FIRST_PAUSE;
        loop {
            let Picked { found, unplaced, trouble } = self.find_targets().await?;
            if found.is_empty() && trouble.is_none() && self.left.is_none() {
                match self.wanted {
                    TerminationTarget::Process(pid) => return Err(TerminationError::NoSuchClient(pid)),
                    TerminationTarget::ProcessOf { pid, user } => {
                        return Err(TerminationError::NotTheirs { pid, user });
                    }
                    TerminationTarget::Slices(_) | TerminationTarget::Container(_) => {}
                }
            }
            let at_work: Vec<TargetClient> =
                found.into_iter().filter(|found| !self.has_ended(found)).collect();
            self.left.get_or_insert_default().clear();
            if at_work.is_empty() && unplaced.is_empty() && trouble.is_none() {
                return Ok(());
            }
            let others_are_done = at_work.is_empty();
            // A process that can't be looked at must not save the others.
            self.terminate(at_work).await?;
            if let Some(trouble) = trouble {
                return Err(trouble);
            }
            let since = if unplaced.is_empty() { None } else { self.unplaced_since };
            self.unplaced_since = (!unplaced.is_empty()).then(|| since.unwrap_or_else(Instant::now));
            if others_are_done && since.is_some_and(|since| since.elapsed() >= UNPLACED_FOR) {
                return Err(TerminationError::Unplaced(named(&unplaced)));
            }
            self.shell.pause(pause).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// The wanted clients as they are now, and the reason why some may be missing.
    async fn find_targets(&mut self) -> Result<Picked, TerminationError> {
        let (mut listed, mut silent) = (Vec::new(), None);
        for (control, clients) in self.shell.list().await {
            match clients {
                Ok(there) => listed.push((control, there.clients)),
                Err(error) => _ = silent.get_or_insert(TerminationError::Control(error)),
            }
        }
        let (wanted, slices) = (self.wanted.clone(), self.slices.clone());
        // Not on the loop's thread: a process that is stuck in the driver can hold up anybody who reads its memory.
        let only_hosts = self.only_hosts;
        let picked = self.kernel.ask(TIMEOUT, move || pick(listed, &wanted, &slices, only_hosts)).await;
        let picked = picked.ok_or(TerminationError::NotKnown)??;
        self.only_hosts |= picked.found.iter().any(|found| found.hosts);
        Ok(Picked { trouble: silent.or(picked.trouble), ..picked })
    }

    /// Whether a client's work has been ended: the client still has a connection from that time. A client that has
    /// started over has only new connections, since the old ones are useless. Other users can forge additional
    /// connections, but they can't remove any.
    fn has_ended(&self, found: &TargetClient) -> bool {
        self.ended
            .get(&(found.server, found.pid))
            .is_some_and(|(held, connections)| held.alive() && !found.connections.is_disjoint(connections))
    }

    /// Ends the work of each client.
    async fn terminate(&mut self, found: Vec<TargetClient>) -> Result<(), TerminationError> {
        let mut trouble = None;
        for TargetClient { control, server, pid, connections, held, whose, hosts: _ } in found {
            // A process that has ended may have left its PID to another.
            if !held.alive() {
                continue;
            }
            match end_client(&mut self.shell, &control, server, &held, Permit::asked_for()).await {
                // After a fatal GPU error, the client has no work left.
                ClientEnd::Done | ClientEnd::Faulted => {
                    tracing::info!(
                        mps_server_pid = server,
                        mps_client_pid = pid,
                        "GPU work ended on request: {whose}"
                    );
                    self.had_work.push(whose);
                    self.ended.insert((server, pid), (held, connections));
                }
                // It has just gone, it is just coming, or a debugger holds it: the next look tells.
                ClientEnd::NotThere | ClientEnd::StaysStopped(_) => {
                    self.left.get_or_insert_default().insert(pid);
                }
                ClientEnd::NotAsked(error) | ClientEnd::NotKnown(error) => {
                    self.left.get_or_insert_default().insert(pid);
                    trouble.get_or_insert(TerminationError::Control(error));
                }
            }
        }
        trouble.map_or(Ok(()), Err)
    }
}

/// A wanted client at one of its servers.
#[derive(Debug)]
struct TargetClient {
    control: Arc<Control>,
    server: u32,
    pid: u32,
    connections: Connections,
    held: Held,
    whose: Whose,
    /// Whether it is in a wanted container that the host's own runtime has made.
    hosts: bool,
}

/// A client on a GPU of the wanted slices without a known slice.
#[derive(Debug)]
struct Unplaced {
    whose: Whose,
    /// The program that it runs.
    command: String,
}

/// The clients of the control daemons, as far as they concern a termination.
#[derive(Debug, Default)]
struct Picked {
    found: Vec<TargetClient>,
    unplaced: Vec<Unplaced>,
    /// The first reason why some may be missing.
    trouble: Option<TerminationError>,
}

/// The clients of a control daemon, by server and client.
type ListedClients = (Arc<Control>, BTreeMap<(u32, u32), ListedClient>);

/// The first of these clients by name.
fn named(unplaced: &[Unplaced]) -> String {
    let words = |one: &Unplaced| format!("{} ({})", one.whose, one.command);
    let mut names: Vec<String> = unplaced.iter().take(NAMED).map(words).collect();
    if let Some(more) = unplaced.len().checked_sub(NAMED).filter(|more| *more > 0) {
        names.push(format!("and {more} more"));
    }
    names.join("; ")
}

/// The wanted clients. It is an error if none of them may be touched.
fn pick(
    listed: Vec<ListedClients>,
    wanted: &TerminationTarget,
    slices: &Slices,
    only_hosts: bool,
) -> Result<Picked, TerminationError> {
    let Picked { mut found, mut unplaced, mut trouble } = Picked::default();
    let mut containers = BTreeSet::new();
    let (users, mounts) = (users(), SliceMounts::find(slices));
    let gpus = if let TerminationTarget::Slices(names) = wanted { slices.gpus_of(names) } else { Vec::new() };
    let gpus: Vec<String> = gpus.into_iter().map(str::to_owned).collect();
    for (control, clients) in listed {
        for ((server, pid), client) in clients {
            match hold_if_wanted(pid, wanted, &mounts) {
                Ok(None) => {}
                Ok(Some((_, TargetMatch::Unplaced))) => {
                    if client.may_be_on(&gpus) && !unplaced.iter().any(|one: &Unplaced| one.whose.pid == pid)
                    {
                        let command = proc::program(pid);
                        unplaced.push(Unplaced { whose: whose(pid, &mounts, &users), command });
                    }
                }
                Ok(Some((held, TargetMatch::Wanted(Match { containers: ids, slices })))) => {
                    let hosts = ids.iter().any(|id| id.hosts);
                    containers.extend(ids);
                    let control = Arc::clone(&control);
                    let known = whose(pid, &mounts, &users);
                    let whose = Whose { slices: slices.or(known.slices), ..known };
                    let connections = client.connections;
                    found.push(TargetClient { control, server, pid, connections, held, whose, hosts });
                }
                Err(source) => _ = trouble.get_or_insert(TerminationError::Unreadable { pid, source }),
            }
        }
    }
    // A user can give a control group of his own the name of a container. The host's containers come first.
    if only_hosts || containers.iter().any(|id| id.hosts) {
        containers.retain(|id| id.hosts);
        found.retain(|found| found.hosts);
    }
    match wanted {
        TerminationTarget::Container(id) if containers.len() > 1 => {
            let found = containers.into_iter().map(|found| found.id).collect();
            Err(TerminationError::SeveralContainers { id: id.to_string(), found })
        }
        _ => Ok(Picked { found, unplaced, trouble }),
    }
}

/// A container around a process.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct EnclosingContainer {
    id: String,
    /// Whether the host's own runtime has made it.
    hosts: bool,
}

/// A client that a termination concerns.
#[derive(Debug, PartialEq, Eq)]
enum TargetMatch {
    Wanted(Match),
    /// Slices are wanted, and it is not known which slice the process has.
    Unplaced,
}

/// Why a process is wanted.
#[derive(Debug, Default, PartialEq, Eq)]
struct Match {
    /// The wanted containers around it.
    containers: BTreeSet<EnclosingContainer>,
    /// The wanted slices that it has.
    slices: Option<Vec<DeviceName>>,
}

/// Holds a process that the termination concerns. None if it does not concern the process, or the process has gone.
fn hold_if_wanted(
    pid: u32,
    wanted: &TerminationTarget,
    mounts: &SliceMounts,
) -> io::Result<Option<(Held, TargetMatch)>> {
    let Some(held) = Held::open(pid)? else { return Ok(None) };
    let found = find_wanted(pid, wanted, mounts);
    // If the process has ended, its PID may have been another's while it was read.
    if held.alive() { Ok(found?.map(|found| (held, found))) } else { Ok(None) }
}

fn find_wanted(
    pid: u32,
    wanted: &TerminationTarget,
    mounts: &SliceMounts,
) -> io::Result<Option<TargetMatch>> {
    let found = match wanted {
        TerminationTarget::Slices(slices) => {
            return mounts.slices_of(pid).map(|known| find_slices(slices, known));
        }
        TerminationTarget::Process(other) => (*other == pid).then(Match::default),
        // A program that has changed its user acts for others, too.
        TerminationTarget::ProcessOf { pid: other, user } => {
            let theirs = *other == pid && proc::status(pid)?.uids().iter().all(|uid| uid == user);
            theirs.then(Match::default)
        }
        TerminationTarget::Container(id) => {
            let cgroups = proc::cgroups_text(pid)?.to_ascii_lowercase();
            let ids = containers_in(&cgroups).filter(|found| id.begins(found));
            let ids: BTreeSet<EnclosingContainer> = ids
                .map(|id| EnclosingContainer { id: id.to_owned(), hosts: is_the_hosts(&cgroups, id) })
                .collect();
            (!ids.is_empty()).then(|| Match { containers: ids, ..Match::default() })
        }
    };
    Ok(found.map(TargetMatch::Wanted))
}

/// Compares the slices of a process with the wanted ones. The name of a GPU in the environment tells no slice.
fn find_slices(wanted: &[SliceId], known: Option<Membership>) -> Option<TargetMatch> {
    let Some(Membership { slices, known_by }) = known else { return Some(TargetMatch::Unplaced) };
    let slice = |name: &DeviceName| if let DeviceName::Slice(slice) = name { Some(*slice) } else { None };
    let is_near = |slice: SliceId| wanted.iter().any(|wanted| wanted.gpu == slice.gpu);
    let is_placed = known_by == KnownBy::Mount || slices.iter().filter_map(slice).any(is_near);
    let is_wanted = |name: &DeviceName| slice(name).is_some_and(|slice| wanted.contains(&slice));
    let matching: Vec<DeviceName> = slices.into_iter().filter(is_wanted).collect();
    match (matching.is_empty(), is_placed) {
        (false, _) => Some(TargetMatch::Wanted(Match { slices: Some(matching), ..Match::default() })),
        (true, true) => None,
        (true, false) => Some(TargetMatch::Unplaced),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one() -> SliceId {
        SliceId::with_directory_name("00_06.0-1").unwrap()
    }

    #[test]
    fn a_process_is_looked_at_for_what_is_wanted() {
        let pid = std::process::id();
        let mounts = SliceMounts::find(&Slices::default());
        let found = |wanted| hold_if_wanted(pid, &wanted, &mounts).unwrap().map(|(_, found)| found);
        let wanted = || Some(TargetMatch::Wanted(Match::default()));
        assert_eq!(found(TerminationTarget::Process(pid)), wanted());
        assert_eq!(found(TerminationTarget::Process(pid + 1)), None);
        let user = rustix::process::getuid().as_raw();
        assert_eq!(found(TerminationTarget::ProcessOf { pid, user }), wanted());
        assert_eq!(found(TerminationTarget::ProcessOf { pid, user: user + 1 }), None);
        assert_eq!(found(TerminationTarget::ProcessOf { pid: pid + 1, user }), None);
        assert_eq!(found(TerminationTarget::Slices(vec![one()])), Some(TargetMatch::Unplaced));
        assert!(hold_if_wanted(u32::MAX, &TerminationTarget::Slices(Vec::new()), &mounts).unwrap().is_none());
    }

    #[test]
    fn a_process_has_the_wanted_slice_or_another_or_nobody_knows() {
        let found = |slices: &[&str], known_by| {
            let slices = slices.iter().map(|slice| slice.parse().unwrap()).collect();
            find_slices(&[one()], Some(Membership { slices, known_by }))
        };
        for known_by in [KnownBy::Mount, KnownBy::Environment] {
            let slices = Some(vec![DeviceName::Slice(one())]);
            let wanted = Some(TargetMatch::Wanted(Match { slices, ..Match::default() }));
            assert_eq!(found(&["00:07.0-3", "00:06.0-1"], known_by), wanted);
            assert_eq!(found(&["00:07.0-3", "00:06.0-2"], known_by), None, "another slice of this GPU");
        }
        assert_eq!(found(&["00:07.0-1"], KnownBy::Mount), None, "no other slice is mounted there");
        for claimed in ["00:06.0", "00:07.0-1", "00:16.0-1"] {
            assert_eq!(found(&[claimed], KnownBy::Environment), Some(TargetMatch::Unplaced), "{claimed}");
        }
        assert_eq!(find_slices(&[one()], None), Some(TargetMatch::Unplaced));
    }

    #[test]
    fn a_client_may_be_on_a_gpu_that_nobody_names() {
        let on = |prefix: &str| {
            let client =
                ListedClient { gpus: BTreeSet::from([prefix.to_owned()]), ..ListedClient::default() };
            client.may_be_on(&["GPU-168acfc9-c926-5401-354d-2910ddcd391b".to_owned()])
        };
        assert!(on("GPU-168acfc9-c926-5401") && on("") && !on("GPU-2"));
    }

    #[test]
    fn whoever_is_left_is_named() {
        let error = TerminationError::StillThere(BTreeSet::from([7, 8])).to_string();
        assert!(error.contains("could not be ended: 7, 8;"), "{error}");
    }
}
