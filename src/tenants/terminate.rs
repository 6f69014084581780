//! Ends the GPU work of a tenant and leaves its neighbours alone.
//!
//! A signal that ends a client in the middle of a kernel takes the memory away under that kernel. This is a fault, and
//! a fault hits every client on that GPU. `terminate_client` ends the kernel first. So the host agent asks for this
//! before it stops a process or a container.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::host::blocking::Blocking;
use crate::host::proc;
use crate::membership::containers::{containers_in, is_the_hosts};
use crate::membership::{SliceMounts, Slices};
use crate::mps::control::{Caller, CallersControl, ControlError, ServerStatus, Terminated};
use crate::mps::process::Held;
use crate::tenants::clients::{users, whose};
use crate::tenants::in_words::{Whose, shortened};

/// The time that the clients get to let go. Measured: 50 ms for a program that ends when CUDA gives it an error.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The first pause between two looks; it doubles up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// The digits of the shortest spelling of a container's id, and of the whole id.
const SHORTEST_ID: usize = 12;
const ID: usize = 64;

/// The processes with GPU work that is to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Wanted {
    Process(u32),
    /// A process, if it is this user's.
    ProcessOf {
        pid: u32,
        user: u32,
    },
    /// Every process that has one of these slices, by name.
    Slices(Vec<String>),
    /// Every process in a container, or in a container inside it.
    Container(ContainerId),
}

impl Wanted {
    /// Who asks: a user may end only the work of a process that is this user's.
    pub(crate) fn caller(&self) -> Caller {
        match self {
            Self::ProcessOf { .. } => Caller::User,
            Self::Process(_) | Self::Slices(_) | Self::Container(_) => Caller::Root,
        }
    }

    /// The beginning of the event that names the clients with work that was ended. yunion-mpsctl finds the event by it.
    pub(crate) fn event(&self) -> String {
        let whom = match self {
            Self::Process(pid) | Self::ProcessOf { pid, .. } => format!("process {pid}"),
            Self::Slices(names) => shortened(names),
            Self::Container(ContainerId(id)) => format!("container {id}"),
        };
        format!("GPU work ended for {whom}, of ")
    }
}

/// The id of a container, or its beginning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ContainerId(String);

impl ContainerId {
    /// Takes the 64 hexadecimal digits of a container, or at least the first 12 of them.
    pub(crate) fn new(text: &str) -> Result<Self, TerminationError> {
        let is_id = (SHORTEST_ID..=ID).contains(&text.len()) && text.bytes().all(|c| c.is_ascii_hexdigit());
        if is_id { Ok(Self(text.to_ascii_lowercase())) } else { Err(TerminationError::NoId(text.to_owned())) }
    }
}

/// The reason why some wanted processes may have GPU work left.
#[derive(Debug, thiserror::Error)]
pub enum TerminationError {
    /// The text is not the id of a container.
    #[error(
        "{0:?} is no container id; give its 64 hexadecimal digits, or at least the first {SHORTEST_ID} of them"
    )]
    NoId(String),
    /// Several containers have ids that begin so. Nothing was done.
    #[error("{id} is the beginning of several containers: {}; give more digits", found.join(", "))]
    SeveralContainers { id: String, found: Vec<String> },
    /// The process is no client of any control daemon here.
    #[error("process {0} is no client of a GPU here; ListClients shows those there are")]
    NoSuchClient(u32),
    /// The process is no client of any control daemon here, or another user's.
    #[error("process {pid} is no client of a GPU here that user {user} has started")]
    NotTheirs { pid: u32, user: u32 },
    /// A process can't be looked at, so nobody knows whether it is wanted. The work of the others was ended.
    #[error("process {pid} can't be looked at: {source}")]
    Unreadable { pid: u32, source: io::Error },
    /// A control daemon did not answer. Work on the other control daemons was ended.
    #[error(transparent)]
    Control(#[from] ControlError),
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
    controls: Vec<Arc<CallersControl>>,
    wanted: Wanted,
    slices: Slices,
    kernel: Blocking,
) -> (Vec<Whose>, Result<(), TerminationError>) {
    let mut termination = Termination {
        controls,
        wanted,
        slices,
        kernel,
        ended: BTreeMap::new(),
        had_work: Vec::new(),
        left: None,
        only_hosts: false,
    };
    let result = match tokio::time::timeout(TIMEOUT, termination.run()).await {
        Ok(result) => result,
        Err(_) => Err(termination.left.map_or(TerminationError::NotKnown, TerminationError::StillThere)),
    };
    (termination.had_work, result)
}

/// The connections of a client, by the ids that `ps` gives them.
pub(super) type Connections = BTreeSet<Option<u64>>;

struct Termination {
    controls: Vec<Arc<CallersControl>>,
    wanted: Wanted,
    slices: Slices,
    kernel: Blocking,
    /// The processes without work any more, by server and client, with the connections that they had. Each is held, so
    /// that no other process with its PID is taken for it.
    ended: BTreeMap<(u32, u32), (Held, Connections)>,
    /// The same clients in the words of people, as they were before the end of their work.
    had_work: Vec<Whose>,
    /// The processes with work at the last look; None before the first look that found any.
    left: Option<BTreeSet<u32>>,
    /// The wanted container is known to be made by the host's own runtime.
    only_hosts: bool,
}

impl Termination {
    async fn run(&mut self) -> Result<(), TerminationError> {
        let mut pause = FIRST_PAUSE;
        loop {
            let (found, trouble) = self.look().await?;
            if found.is_empty() && trouble.is_none() && self.left.is_none() {
                match self.wanted {
                    Wanted::Process(pid) => return Err(TerminationError::NoSuchClient(pid)),
                    Wanted::ProcessOf { pid, user } => return Err(TerminationError::NotTheirs { pid, user }),
                    Wanted::Slices(_) | Wanted::Container(_) => {}
                }
            }
            let at_work: Vec<Found> = found.into_iter().filter(|found| !self.has_ended(found)).collect();
            self.left.get_or_insert_default().clear();
            if at_work.is_empty() && trouble.is_none() {
                return Ok(());
            }
            // A process that can't be looked at must not save the others.
            self.terminate(at_work).await?;
            if let Some(trouble) = trouble {
                return Err(trouble);
            }
            sleep(pause).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// The wanted clients as they are now, and the reason why some may be missing.
    async fn look(&mut self) -> Result<(Vec<Found>, Option<TerminationError>), TerminationError> {
        let (listed, silent) = list_clients(&self.controls).await;
        let (wanted, slices) = (self.wanted.clone(), self.slices.clone());
        // Not on the loop's thread: a process that is stuck in the driver can hold up anybody who reads its memory.
        let only_hosts = self.only_hosts;
        let picked = self.kernel.ask(TIMEOUT, move || pick(listed, &wanted, &slices, only_hosts)).await;
        let (found, unreadable) = picked.ok_or(TerminationError::NotKnown)??;
        self.only_hosts |= found.iter().any(|found| found.hosts);
        Ok((found, silent.or(unreadable)))
    }

    /// Whether a client's work has been ended: the client still has a connection from that time. A client that has
    /// started over has only new connections, since the old ones are useless. Other users can forge additional
    /// connections, but they can't remove any.
    fn has_ended(&self, found: &Found) -> bool {
        self.ended
            .get(&(found.server, found.pid))
            .is_some_and(|(held, connections)| held.alive() && !found.connections.is_disjoint(connections))
    }

    /// Ends the work of each client.
    async fn terminate(&mut self, found: Vec<Found>) -> Result<(), TerminationError> {
        let mut trouble = None;
        for Found { control, server, pid, connections, held, whose, hosts: _ } in found {
            // A process that has ended may have left its PID to another.
            if !held.alive() {
                continue;
            }
            match end_work(&control, server, pid, &held).await {
                Ok(Some(Terminated::Done)) => {
                    tracing::info!(
                        mps_server_pid = server,
                        mps_client_pid = pid,
                        "GPU work ended on request: {whose}"
                    );
                    self.had_work.push(whose);
                    self.ended.insert((server, pid), (held, connections));
                }
                // It has just gone, it is just coming, or a debugger holds it: the next look tells.
                Ok(Some(Terminated::NoSuchClient | Terminated::NoSuchServer) | None) => {
                    self.left.get_or_insert_default().insert(pid);
                }
                Err(error) => {
                    self.left.get_or_insert_default().insert(pid);
                    trouble.get_or_insert(error);
                }
            }
        }
        trouble.map_or(Ok(()), Err)
    }
}

/// Ends the GPU work of one client. If its server met a fatal GPU error, the client has no work left.
async fn end_work(
    control: &CallersControl,
    server: u32,
    pid: u32,
    held: &Held,
) -> Result<Option<Terminated>, TerminationError> {
    if control.server_status(server).await? == ServerStatus::Fault {
        return Ok(Some(Terminated::Done));
    }
    end_client(control, server, pid, held).await
}

/// Ends the GPU work of one client of a server that met no fatal GPU error. The control daemon waits for the client
/// meanwhile, and everybody waits for the control daemon. So nobody may wait for a client that can't take part. A
/// client that is stopped or frozen is continued first, and again as often as it stops before the answer comes. A
/// client is never killed, since that would be a fault for its neighbours. None if the client can't be continued, and
/// nothing was done.
pub(super) async fn end_client(
    control: &CallersControl,
    server: u32,
    pid: u32,
    held: &Held,
) -> Result<Option<Terminated>, TerminationError> {
    let mut going_on = match held.go_on().await {
        Ok(going_on) => going_on,
        Err(error) => {
            tracing::warn!(mps_client_pid = pid, "client {pid} can't be continued: {error}");
            return Ok(None);
        }
    };
    let answer = tokio::select! {
        answer = control.terminate_client(server, pid) => answer,
        never = going_on.keep() => match never {},
    };
    if going_on.was_held() {
        tracing::info!(
            mps_client_pid = pid,
            "client {pid} was stopped or frozen; it was continued to end its GPU work"
        );
    }
    Ok(Some(answer?))
}

/// A wanted client at one of its servers.
#[derive(Debug)]
struct Found {
    control: Arc<CallersControl>,
    server: u32,
    pid: u32,
    connections: Connections,
    held: Held,
    whose: Whose,
    /// Whether it is in a wanted container that the host's own runtime has made.
    hosts: bool,
}

/// The clients of a control daemon: their connections, by server and client.
type Listed = (Arc<CallersControl>, BTreeMap<(u32, u32), Connections>);

/// The clients of every control daemon. All are asked at once: one that hangs must not use up the time of the others.
pub(super) async fn list_clients(
    controls: &[Arc<CallersControl>],
) -> (Vec<Listed>, Option<TerminationError>) {
    let mut asked = JoinSet::new();
    for control in controls {
        let control = Arc::clone(control);
        asked.spawn(async move { control.clients(&[]).await.map(|clients| (control, clients)) });
    }
    let (mut listed, mut silent) = (Vec::new(), None);
    while let Some(answer) = asked.join_next().await {
        match answer {
            Ok(Ok((control, clients))) => {
                // A client of two GPUs has two lines.
                let mut connections: BTreeMap<_, Connections> = BTreeMap::new();
                for client in clients {
                    connections.entry((client.server, client.pid)).or_default().insert(client.id);
                }
                listed.push((control, connections));
            }
            Ok(Err(error)) => _ = silent.get_or_insert(TerminationError::Control(error)),
            Err(_) => _ = silent.get_or_insert(TerminationError::NotKnown),
        }
    }
    (listed, silent)
}

/// The wanted clients, and the first client that could not be looked at. It is an error if none of them may be touched.
fn pick(
    listed: Vec<Listed>,
    wanted: &Wanted,
    slices: &Slices,
    only_hosts: bool,
) -> Result<(Vec<Found>, Option<TerminationError>), TerminationError> {
    let (mut found, mut unreadable) = (Vec::new(), None);
    let mut containers = BTreeSet::new();
    let (users, mounts) = (users(), SliceMounts::look(slices));
    for (control, clients) in listed {
        for ((server, pid), connections) in clients {
            match hold_if_wanted(pid, wanted, &mounts) {
                Ok(None) => {}
                Ok(Some((held, Match { containers: ids, slices }))) => {
                    let hosts = ids.iter().any(|id| id.hosts);
                    containers.extend(ids);
                    let control = Arc::clone(&control);
                    let known = whose(pid, &mounts, &users);
                    let whose = Whose { slices: slices.or(known.slices), ..known };
                    found.push(Found { control, server, pid, connections, held, whose, hosts });
                }
                Err(source) => _ = unreadable.get_or_insert(TerminationError::Unreadable { pid, source }),
            }
        }
    }
    // A user can give a control group of his own the name of a container. The host's containers come first.
    if only_hosts || containers.iter().any(|id| id.hosts) {
        containers.retain(|id| id.hosts);
        found.retain(|found| found.hosts);
    }
    match wanted {
        Wanted::Container(ContainerId(id)) if containers.len() > 1 => {
            let found = containers.into_iter().map(|found| found.id).collect();
            Err(TerminationError::SeveralContainers { id: id.clone(), found })
        }
        _ => Ok((found, unreadable)),
    }
}

/// A container around a process.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Container {
    id: String,
    /// Whether the host's own runtime has made it.
    hosts: bool,
}

/// Why a process is wanted.
#[derive(Debug, Default, PartialEq, Eq)]
struct Match {
    /// The wanted containers around it.
    containers: BTreeSet<Container>,
    /// The wanted slices that it has.
    slices: Option<Vec<String>>,
}

/// Holds a process and returns it with the reason why it is wanted. None if it is not wanted or has gone.
fn hold_if_wanted(pid: u32, wanted: &Wanted, mounts: &SliceMounts) -> io::Result<Option<(Held, Match)>> {
    let Some(held) = Held::open(pid)? else { return Ok(None) };
    let found = find_wanted(pid, wanted, mounts);
    // If the process has ended, its PID may have been another's while it was read.
    if held.alive() { Ok(found?.map(|found| (held, found))) } else { Ok(None) }
}

fn find_wanted(pid: u32, wanted: &Wanted, mounts: &SliceMounts) -> io::Result<Option<Match>> {
    match wanted {
        Wanted::Process(other) => Ok((*other == pid).then(Match::default)),
        // A program that has changed its user acts for others, too.
        Wanted::ProcessOf { pid: other, user } => {
            let theirs = *other == pid && proc::status(pid)?.uids().iter().all(|uid| uid == user);
            Ok(theirs.then(Match::default))
        }
        Wanted::Slices(names) => {
            let mut slices = mounts.of(pid)?.map(|known| known.slices).unwrap_or_default();
            slices.retain(|slice| names.contains(slice));
            Ok((!slices.is_empty()).then(|| Match { slices: Some(slices), ..Match::default() }))
        }
        Wanted::Container(ContainerId(id)) => {
            let cgroups = proc::cgroups_text(pid)?.to_ascii_lowercase();
            let ids = containers_in(&cgroups).filter(|found| found.starts_with(id.as_str()));
            let ids: BTreeSet<Container> =
                ids.map(|id| Container { id: id.to_owned(), hosts: is_the_hosts(&cgroups, id) }).collect();
            Ok((!ids.is_empty()).then(|| Match { containers: ids, ..Match::default() }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_hexadecimal_and_long_enough() {
        let full = "0123456789ABCDEF".repeat(4);
        assert_eq!(ContainerId::new(&full).unwrap(), ContainerId(full.to_lowercase()));
        assert!(ContainerId::new("0123456789ab").is_ok());
        for text in ["", "0123456789a", "0123456789xy", &format!("{full}0"), "0123456789a\u{e9}"] {
            let error = ContainerId::new(text).unwrap_err().to_string();
            assert!(error.contains("at least the first 12"), "{error}");
        }
    }

    #[test]
    fn a_process_is_looked_at_for_what_is_wanted() {
        let pid = std::process::id();
        let mounts = SliceMounts::look(&Slices::default());
        let found = |wanted| hold_if_wanted(pid, &wanted, &mounts).unwrap().map(|(_, found)| found);
        assert_eq!(found(Wanted::Process(pid)), Some(Match::default()));
        assert_eq!(found(Wanted::Process(pid + 1)), None);
        let user = rustix::process::getuid().as_raw();
        assert_eq!(found(Wanted::ProcessOf { pid, user }), Some(Match::default()));
        assert_eq!(found(Wanted::ProcessOf { pid, user: user + 1 }), None);
        assert_eq!(found(Wanted::ProcessOf { pid: pid + 1, user }), None);
        assert_eq!(found(Wanted::Slices(vec!["no such slice".to_owned()])), None);
        assert!(hold_if_wanted(u32::MAX, &Wanted::Slices(Vec::new()), &mounts).unwrap().is_none());
    }

    #[test]
    fn whoever_is_left_is_named() {
        let error = TerminationError::StillThere(BTreeSet::from([7, 8])).to_string();
        assert!(error.contains("could not be ended: 7, 8;"), "{error}");
    }
}
