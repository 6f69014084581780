//! A request to end the GPU work of all clients that its target covers.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::mem;
use core::time::Duration;

use super::client_shell::{ClientEnd, Connections, DaemonClients, ListedClient, known_clients};
use super::end_client::end_client;
use super::target::{Meant, Target};
use super::termination_error::{LeftClient, TerminationError, WhyLeft};
use super::termination_shell::{RequestNews, TerminationShell};
use crate::{CoreTime, GpuUuid, Permit};

/// The first and the longest pause between two searches for clients that have not ended yet. The pause doubles after each
/// search.
const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// A request for slices fails if clients with unknown slices stay for this time. The slices of a process are also unknown for a
/// moment while the process ends, since it then has no environment any more.
const UNPLACED_FOR: Duration = Duration::from_secs(1);

/// The PIDs of a server and of a client of this server.
type AtServer = (u32, u32);

/// A request to end GPU work, and its results so far. The caller can stop the request at each `await`. The answer is then
/// [`Termination::out_of_time`].
pub struct Termination<T: TerminationShell> {
    target: Target,
    /// The work of these processes was ended. The key has the server and the client. The value has the connections that the
    /// process had at that time, and a handle. The handle shows if the PID still belongs to the same process.
    ended: BTreeMap<AtServer, (T::Held, Connections)>,
    had_work: Vec<T::Owner>,
    /// The clients that the request means and that have work, or may have work. The key has the server and the client, and the
    /// value has a handle of the client's process.
    left: BTreeMap<AtServer, (T::Held, LeftClient<T::Owner>)>,
    /// The reason why the last search may have missed clients. None if the last search has missed no client.
    doubt: Option<String>,
    has_found_any: bool,
    /// The process that had the PID in the request when the request began. The request does not mean a later process with this
    /// PID.
    named: Option<T::Held>,
    is_nobody_left: bool,
    /// The moment since which every search has found clients with unknown slices. None if the last search has found no client
    /// with unknown slices.
    unplaced_since: Option<CoreTime>,
    /// True once the request's container was found among the containers of the host's own runtime. The request then ignores
    /// other containers with a matching id.
    only_hosts: bool,
}

struct MeantClient<T: TerminationShell> {
    control: T::Control,
    gpus: Option<Vec<GpuUuid>>,
    server: u32,
    pid: u32,
    connections: Connections,
    held: T::Held,
    /// The client's containers that the request may mean, by id. True stands for a container of the host's own runtime.
    containers: BTreeMap<String, bool>,
}

struct RequestLook<T: TerminationShell> {
    found: Vec<MeantClient<T>>,
    /// The PIDs of clients with unknown slices that may use a GPU of the request's slices.
    unplaced: BTreeSet<u32>,
    /// The reason why a control daemon has not answered, so that the search may have missed clients.
    silent: Option<String>,
    /// The first process that the service can't examine, and the reason. The request may mean this process.
    unreadable: Option<(u32, String)>,
    /// False if a control daemon with several GPUs, or with a faulted server, may have omitted clients from its list.
    is_sure: bool,
}

impl<T: TerminationShell> RequestLook<T> {
    fn has_read_all(&self) -> bool {
        self.silent.is_none() && self.unreadable.is_none()
    }
}

impl<T: TerminationShell> Termination<T> {
    pub fn new(target: Target) -> Self {
        Self {
            target,
            ended: BTreeMap::new(),
            had_work: Vec::new(),
            left: BTreeMap::new(),
            doubt: None,
            has_found_any: false,
            named: None,
            is_nobody_left: false,
            unplaced_since: None,
            only_hosts: false,
        }
    }

    /// Ends the GPU work of all clients that the request means, and returns when the work has ended. A process notices the end
    /// of its work at its next CUDA call, and is listed as a client until then. A signal that kills the process after the end
    /// of its work can't cause a fault for other clients.
    ///
    /// # Errors
    /// Clients may still have work.
    pub async fn run(&mut self, shell: &mut T) -> Result<(), TerminationError<T::Owner>> {
        if let Target::Process(pid) | Target::ProcessOf { pid, .. } = self.target {
            let held = shell.hold(pid).map_err(|why| TerminationError::Unreadable { pid, why })?;
            let Some(held) = held else { return self.answer() };
            self.named = Some(held);
        }
        let mut pause = FIRST_PAUSE;
        loop {
            let look = self.find_clients(shell).await?;
            let is_nobody_left = look.found.is_empty()
                && look.unplaced.is_empty()
                && look.has_read_all()
                && self.doubt.is_none();
            let is_certain = look.is_sure || self.is_nobody_left;
            self.is_nobody_left = is_nobody_left;
            if is_nobody_left && is_certain {
                return self.answer();
            }
            let others_are_done = look.found.is_empty();
            // If a process can't be examined, the request fails, but only after the work of all other clients was ended.
            self.end_work(shell, look.found).await?;
            if let Some(why) = look.silent {
                return Err(TerminationError::Silent { why, left: self.left() });
            }
            if let Some((pid, why)) = look.unreadable {
                return Err(TerminationError::Unreadable { pid, why });
            }
            self.look_at_unplaced(shell, look.unplaced, others_are_done).await?;
            shell.pause(pause).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// The answer if the caller stops the request now.
    pub fn out_of_time(&self) -> TerminationError<T::Owner> {
        TerminationError::OutOfTime {
            after: self.target.timeout(),
            left: self.left(),
            doubt: self.doubt.clone(),
        }
    }

    /// The clients that have lost their work through the request, as they were described before the end.
    pub fn had_work(self) -> Vec<T::Owner> {
        self.had_work
    }

    fn left(&self) -> Vec<LeftClient<T::Owner>> {
        self.left.values().map(|(_, client)| client.clone()).collect()
    }

    /// The answer when no client that the request means has work any more.
    fn answer(&self) -> Result<(), TerminationError<T::Owner>> {
        match self.target {
            Target::Process(pid) if !self.has_found_any => Err(TerminationError::NoSuchClient(pid)),
            Target::ProcessOf { pid, user } if !self.has_found_any => {
                Err(TerminationError::NotTheirs { pid, user })
            }
            _ => Ok(()),
        }
    }

    /// Returns whether the work of a client has ended. The client then still has a connection from the time when its work was
    /// ended. A client that has started work again has only new connections, since its old connections are useless. Other users
    /// can forge further connections, but can't remove any.
    fn has_ended(&self, shell: &T, found: &MeantClient<T>) -> bool {
        let Some((held, connections)) = self.ended.get(&(found.server, found.pid)) else { return false };
        shell.is_alive(held) && !found.connections.is_disjoint(connections)
    }

    async fn find_clients(&mut self, shell: &mut T) -> Result<RequestLook<T>, TerminationError<T::Owner>> {
        let (known, silent) = known_clients(shell.list().await);
        let (found, unplaced) = (Vec::new(), BTreeSet::new());
        let mut look = RequestLook { found, unplaced, silent, unreadable: None, is_sure: true };
        shell.begin_look();
        // A process that has ended is forgotten, since another process may have its PID now.
        self.left.retain(|_, (held, _)| shell.is_alive(held));
        self.doubt = None;
        for (control, mut daemon) in known {
            let has_one_gpu = has_one_gpu(daemon.gpus.as_deref());
            look.is_sure &= has_one_gpu && daemon.faulted.is_empty();
            // On a server with one GPU, a fatal error has hit all clients, so they have no work any more. On a server with
            // several GPUs, some clients may have work, and the control daemon's list may lack them. The service therefore asks
            // NVML too.
            if !daemon.faulted.is_empty() && !has_one_gpu {
                let doubt = add_clients_of_nvml(shell, &mut daemon).await;
                self.doubt = self.doubt.take().or(doubt);
            }
            let DaemonClients { gpus, clients, .. } = daemon;
            for ((server, pid), client) in clients {
                self.take_up_if_meant(shell, &mut look, (&control, gpus.as_ref()), (server, pid), client)
                    .await;
            }
        }
        self.narrow(&mut look)?;
        self.has_found_any |= !look.found.is_empty();
        look.found.retain(|one| !self.has_ended(shell, one));
        let is_complete = look.is_sure && look.has_read_all() && self.doubt.is_none();
        let is_found = |key| look.found.iter().any(|one| (one.server, one.pid) == key);
        self.left.retain(|key, (held, _)| is_found(*key) || !is_complete && shell.is_alive(held));
        Ok(look)
    }

    async fn take_up_if_meant(
        &mut self,
        shell: &mut T,
        look: &mut RequestLook<T>,
        (control, gpus): (&T::Control, Option<&Vec<GpuUuid>>),
        (server, pid): AtServer,
        client: ListedClient,
    ) {
        let held = match shell.hold(pid) {
            Ok(Some(held)) => held,
            Ok(None) => return,
            Err(why) => {
                look.unreadable.get_or_insert((pid, why));
                return;
            }
        };
        let meant = self.target.means(shell, pid).await;
        // If the process has ended during the examination, the facts may be those of another process that has got its PID.
        if !shell.is_alive(&held) {
            return;
        }
        match meant {
            Ok(Meant::No) => {}
            Ok(Meant::NotKnown) => {
                if let Target::Slices(names) = &self.target
                    && client.may_be_on(&shell.gpus_of(names))
                {
                    look.unplaced.insert(pid);
                }
            }
            Ok(Meant::Yes(_)) if self.named.as_ref().is_some_and(|named| !shell.is_alive(named)) => {}
            Ok(Meant::Yes(containers)) => {
                let (control, gpus) = (control.clone(), gpus.cloned());
                let connections = client.connections;
                let found = MeantClient { control, gpus, server, pid, connections, held, containers };
                if !self.has_ended(shell, &found) {
                    // The service reads the client's owner now, while the process runs. If the request runs out of time, the
                    // answer names the owner.
                    let owner = shell.owner(pid).await;
                    let client = LeftClient { pid, owner, why: WhyLeft::AtWork };
                    self.left.entry((server, pid)).or_insert_with(|| (found.held.clone(), client));
                }
                look.found.push(found);
            }
            Err(why) => _ = look.unreadable.get_or_insert((pid, why)),
        }
    }

    /// Fails if several containers match the request. If a container of the host's own runtime matches, only containers of this
    /// runtime count, since a user can give any control group the name of a container.
    fn narrow(&mut self, look: &mut RequestLook<T>) -> Result<(), TerminationError<T::Owner>> {
        let Target::Container(id) = &self.target else { return Ok(()) };
        let is_the_hosts = |one: &MeantClient<T>| one.containers.values().any(|is_the_hosts| *is_the_hosts);
        self.only_hosts |= look.found.iter().any(is_the_hosts);
        if self.only_hosts {
            let (found, others): (_, Vec<_>) = mem::take(&mut look.found).into_iter().partition(is_the_hosts);
            look.found = found;
            for other in others {
                self.left.remove(&(other.server, other.pid));
            }
        }
        let containers = look.found.iter().flat_map(|found| &found.containers);
        let counts =
            |(id, is_the_hosts): (&String, &bool)| (*is_the_hosts || !self.only_hosts).then(|| id.clone());
        let found: BTreeSet<String> = containers.filter_map(counts).collect();
        if found.len() > 1 {
            let found = found.into_iter().collect();
            return Err(TerminationError::SeveralContainers { id: id.clone(), found });
        }
        Ok(())
    }

    async fn end_work(
        &mut self,
        shell: &mut T,
        at_work: Vec<MeantClient<T>>,
    ) -> Result<(), TerminationError<T::Owner>> {
        let mut trouble = None;
        for one in at_work {
            trouble = trouble.or(self.end_one(shell, one).await);
        }
        trouble.map_or(Ok(()), |why| Err(TerminationError::Silent { why, left: self.left() }))
    }

    /// Ends the work of one client at one server. Returns the reason if the control daemon has not answered.
    async fn end_one(&mut self, shell: &mut T, one: MeantClient<T>) -> Option<String> {
        let MeantClient { control, gpus, server, pid, mut connections, held, .. } = one;
        let key = (server, pid);
        // If the request is broken off before the control daemon answers, the request's answer must say that this client may
        // have ended.
        self.is_left(key, WhyLeft::MayHaveEnded);
        match end_client(shell, &control, server, &held, Permit::asked_for()).await {
            ClientEnd::Done => {}
            // On a server with one GPU, a fatal error has hit all clients, so this client has lost its work already.
            ClientEnd::Faulted if has_one_gpu(gpus.as_deref()) => {}
            ClientEnd::Faulted => {
                self.is_left(key, WhyLeft::Faulted { server });
                return None;
            }
            ClientEnd::StaysStopped(why) => {
                self.is_left(key, WhyLeft::StaysStopped(why));
                return None;
            }
            // The server has no such client. The next search finds out if the client has ended.
            ClientEnd::NotThere => {
                self.is_left(key, WhyLeft::AtWork);
                return None;
            }
            ClientEnd::NotAsked(why) => {
                self.is_left(key, WhyLeft::AtWork);
                return Some(why);
            }
            ClientEnd::NotKnown(why) => {
                if let Some((_, client)) = self.left.get(&key) {
                    shell.tell_of_request(RequestNews::MayHaveEnded, server, pid, &client.owner);
                }
                return Some(why);
            }
        }
        if let Some((_, client)) = self.left.remove(&key) {
            shell.tell_of_request(RequestNews::Ended, server, pid, &client.owner);
            self.had_work.push(client.owner);
        }
        // Without a number, an old connection can't be distinguished from a new connection, so only connections with numbers
        // are remembered.
        connections.retain(Option::is_some);
        self.ended.insert(key, (held, connections));
        None
    }

    fn is_left(&mut self, key: AtServer, why: WhyLeft) {
        if let Some((_, client)) = self.left.get_mut(&key) {
            client.why = why;
        }
    }

    /// Fails if only clients with unknown slices are at work on the GPUs of the request, and this lasts for `UNPLACED_FOR`.
    async fn look_at_unplaced(
        &mut self,
        shell: &mut T,
        unplaced: BTreeSet<u32>,
        others_are_done: bool,
    ) -> Result<(), TerminationError<T::Owner>> {
        if unplaced.is_empty() {
            self.unplaced_since = None;
            return Ok(());
        }
        let now = shell.now();
        let since = *self.unplaced_since.get_or_insert(now);
        if !others_are_done || now.saturating_sub(since) < UNPLACED_FOR {
            return Ok(());
        }
        let mut words = Vec::new();
        for pid in unplaced {
            words.push(format!("{} ({})", shell.owner(pid).await, shell.program(pid).await));
        }
        Err(TerminationError::Unplaced(words))
    }
}

fn has_one_gpu(gpus: Option<&[GpuUuid]>) -> bool {
    gpus.is_some_and(|gpus| gpus.len() == 1)
}

/// Adds the clients that NVML lists, since a control daemon may list no client after a fatal GPU error. Returns the reason why
/// clients may still be missing.
async fn add_clients_of_nvml<T: TerminationShell>(
    shell: &mut T,
    daemon: &mut DaemonClients,
) -> Option<String> {
    let server = daemon.faulted.first().copied()?;
    let why = |why: &str| {
        format!(
            "server {server} handles a fatal GPU error, and its control daemon may not list all \
             clients; {why}"
        )
    };
    let Some(gpus) = &daemon.gpus else {
        return Some(why("the service can't ask NVML for the others, since it does not know their GPUs"));
    };
    let listed: BTreeSet<u32> = daemon.clients.keys().map(|(_, pid)| *pid).collect();
    let mut doubt = None;
    for (gpu, there) in shell.clients_on(gpus).await {
        match there {
            Ok(there) => {
                for pid in there.difference(&listed) {
                    let client = daemon.clients.entry((server, *pid)).or_default();
                    client.connections.insert(None);
                    client.gpus.insert(gpu.clone());
                }
            }
            Err(error) => doubt = doubt.or_else(|| Some(why(&error))),
        }
    }
    doubt
}
