//! The register of clients (`mps_core::register`), and the task that examines clients for it. The task examines several new
//! clients together, on threads other than the main loop's. A caller that needs facts about a client waits for the next
//! examination, which takes microseconds.
//!
//! The kernel can block a thread that reads the memory of a process, if the process is stuck in the driver. So each read of
//! memory has a deadline. An answer after the deadline still gets into the register.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mps_core::GpuUuid;
use mps_core::mps::Meaning;
use mps_core::register::{KnownClient, Register};
use mps_core::terms::{DaemonId, ProcessId};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use common::host::blocking::Blocking;
use common::host::identity;
use common::membership::{ProcessSight, SliceMounts, Slices};

/// The longest wait for the part of an examination that does not read memory. This part usually takes microseconds. But the
/// host agent may have many records of containers, and the service reads a half-written record several times.
const PATIENCE: Duration = Duration::from_secs(10);

/// The longest wait for the environment of one process. The environment is in the memory of the process, so a read of it can
/// hang.
const MEMORY_PATIENCE: Duration = Duration::from_secs(5);

const QUESTIONS: usize = 32;

/// All clones share one register.
#[derive(Debug, Clone)]
pub(crate) struct Clients(Arc<Lookout>);

#[derive(Debug)]
struct Lookout {
    known: Mutex<LookedAt>,
    looks: watch::Sender<Looks>,
    /// Reads the memory of processes, on threads other than the main loop's.
    memory: Blocking,
    begun: Instant,
}

#[derive(Debug)]
struct LookedAt {
    register: Register,
    slices: Slices,
}

/// The state of the examinations, which are numbered from 1. Several examinations can run at the same time.
#[derive(Debug, Default)]
struct Looks {
    is_wanted: bool,
    begun: u64,
    under_way: BTreeSet<u64>,
}

impl Looks {
    /// True if the examination with this number and all examinations before it have ended.
    fn have_ended(&self, number: u64) -> bool {
        self.begun >= number && self.under_way.range(..=number).next().is_none()
    }
}

/// A process to examine, and the facts that were found. When a [`Question`] is dropped, the register gets the facts, or learns
/// that there are none.
struct Question {
    clients: Clients,
    process: ProcessId,
    found: Option<KnownClient>,
}

impl Question {
    fn has_found(&mut self, client: KnownClient) {
        self.found = Some(client);
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        let now = self.clients.0.begun.elapsed();
        let mut known = self.clients.known();
        if known.register.answer(self.process, self.found.take(), now) {
            tracing::debug!("client {}", known.register.describe(self.process.pid));
        }
    }
}

impl Clients {
    pub(crate) fn new() -> Self {
        let known = LookedAt { register: Register::default(), slices: Slices::default() };
        let clients = Self(Arc::new(Lookout {
            known: Mutex::new(known),
            looks: watch::Sender::default(),
            memory: Blocking::new(QUESTIONS),
            begun: Instant::now(),
        }));
        tokio::spawn(clients.clone().look_when_wanted());
        clients
    }

    /// Sets the slices to which the register assigns clients. If the slices have changed, all clients are examined again.
    pub(crate) fn pursue(&self, slices: Slices) {
        let mut known = self.known();
        if known.slices != slices {
            known.slices = slices;
            known.register.look_again();
            self.wake(&known);
        }
    }

    pub(crate) fn slices(&self) -> Slices {
        self.known().slices.clone()
    }

    /// Updates the register from a line of a control daemon's log. A new client is examined at once, since it may not live
    /// long.
    pub(crate) fn observe(&self, daemon: &DaemonId, meaning: &Meaning) {
        let now = self.0.begun.elapsed();
        match meaning {
            Meaning::ClientAdmitted(pid) => {
                let running = identity::read(*pid).ok();
                let mut known = self.known();
                known.register.came(daemon, *pid, running, now);
                self.wake(&known);
            }
            Meaning::TornDown { client, .. } => {
                let running = identity::read(*client).ok();
                let mut known = self.known();
                known.register.hit(daemon, *client, running, now);
                self.wake(&known);
            }
            Meaning::ClientLeft(pid) => self.known().register.left(daemon, *pid),
            Meaning::ServerExited { .. } => self.known().register.all_left(daemon),
            _ => {}
        }
    }

    pub(crate) fn all_left(&self, daemon: &DaemonId) {
        self.known().register.all_left(daemon);
    }

    pub(crate) fn are(&self, daemon: &DaemonId, listed: BTreeMap<u32, BTreeSet<GpuUuid>>) {
        let processes = listed.into_iter().filter_map(|(pid, gpus)| Some((identity::read(pid).ok()?, gpus)));
        let (processes, now) = (processes.collect(), self.0.begun.elapsed());
        let mut known = self.known();
        known.register.listed(daemon, processes, now);
        self.wake(&known);
    }

    pub(crate) fn served(&self) -> Vec<(DaemonId, ProcessId, BTreeSet<GpuUuid>)> {
        self.known().register.served()
    }

    pub(crate) fn has_clients(&self, daemon: &DaemonId) -> bool {
        self.known().register.has_clients(daemon)
    }

    /// The clients that have not lost their work to a fatal GPU error.
    pub(crate) fn at_work(&self, daemon: &DaemonId) -> Vec<u32> {
        self.known().register.at_work(daemon)
    }

    /// Has the processes with these PIDs examined, unless the register knows them. The call does not wait.
    pub(crate) fn want(&self, pids: impl IntoIterator<Item = u32>) {
        self.want_all(&running(pids));
    }

    /// Has all clients examined again. The call does not wait.
    pub(crate) fn want_anew(&self) {
        let mut known = self.known();
        let all = known.register.processes();
        known.register.want_anew(all);
        self.wake(&known);
    }

    fn want_all(&self, processes: &[ProcessId]) {
        let mut known = self.known();
        known.register.want(processes.iter().copied(), self.0.begun.elapsed());
        self.wake(&known);
    }

    /// Examines these processes, unless the register knows them. Returns the facts about the processes that still run.
    pub(crate) async fn look_up(&self, processes: &[ProcessId]) -> BTreeMap<u32, KnownClient> {
        self.want_all(processes);
        self.looked_at(processes).await
    }

    pub(crate) async fn look_up_anew(
        &self,
        pids: impl IntoIterator<Item = u32>,
    ) -> BTreeMap<u32, KnownClient> {
        let processes = running(pids);
        {
            let mut known = self.known();
            known.register.want_anew(processes.iter().copied());
            self.wake(&known);
        }
        self.looked_at(&processes).await
    }

    async fn looked_at(&self, processes: &[ProcessId]) -> BTreeMap<u32, KnownClient> {
        let mut looks = self.0.looks.subscribe();
        let last = {
            let looks = looks.borrow();
            looks.begun + u64::from(looks.is_wanted)
        };
        // `wait_for` fails only after its sender was dropped, and `self` has the sender.
        let _ = looks.wait_for(|looks| looks.have_ended(last)).await;
        let known = self.known();
        let its = |process: &ProcessId| {
            let client = known.register.get(process.pid).filter(|client| client.process == *process)?;
            Some((process.pid, client.clone()))
        };
        processes.iter().filter_map(its).collect()
    }

    pub(crate) fn get(&self, process: ProcessId) -> KnownClient {
        let known = self.known();
        let client = known.register.get(process.pid).filter(|client| client.process == process);
        client.cloned().unwrap_or_else(|| KnownClient::only(process))
    }

    /// The known facts about the last client that had this PID. The client may have ended.
    pub(crate) fn last_with(&self, pid: u32) -> KnownClient {
        let client = self.known().register.get(pid).cloned();
        client.unwrap_or_else(|| KnownClient::only(ProcessId { pid, start_time: 0 }))
    }

    pub(crate) fn has_found(&self, process: ProcessId) -> bool {
        self.known().register.has_found(process)
    }

    pub(crate) fn describe(&self, pid: u32) -> String {
        self.known().register.describe(pid)
    }

    fn known(&self) -> MutexGuard<'_, LookedAt> {
        self.0.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self, known: &LookedAt) {
        if known.register.wants_look() {
            self.0.looks.send_modify(|looks| looks.is_wanted = true);
        }
    }

    async fn look_when_wanted(self) {
        let mut looks = self.0.looks.subscribe();
        let kernel = Blocking::new(QUESTIONS);
        while looks.wait_for(|looks| looks.is_wanted).await.is_ok() {
            let (number, slices, questions) = self.begin_look();
            let clients = self.clone();
            let first = kernel.ask(PATIENCE, move || clients.look(&slices, questions)).await;
            let clients = self.clone();
            // A read of memory can take long, so a separate task makes it. Meanwhile callers that do not need the memory go on,
            // and the next examination can begin.
            tokio::spawn(async move {
                clients.look_at_memory(first.unwrap_or_default()).await;
                clients.0.looks.send_modify(|looks| _ = looks.under_way.remove(&number));
            });
        }
    }

    fn begin_look(&self) -> (u64, Slices, Vec<Question>) {
        let mut known = self.known();
        let mut number = 0;
        self.0.looks.send_modify(|looks| {
            (looks.is_wanted, looks.begun) = (false, looks.begun + 1);
            number = looks.begun;
            looks.under_way.insert(number);
        });
        let of = |process| Question { clients: self.clone(), process, found: None };
        let questions = known.register.begin_look().into_iter().map(of).collect();
        (number, known.slices.clone(), questions)
    }

    /// Examines these processes without reading their memory. Returns each process with an environment that decides about its
    /// slices: the caller must then read the memory of the process.
    fn look(&self, slices: &Slices, questions: Vec<Question>) -> Vec<(Question, KnownClient, ProcessSight)> {
        self.make_room();
        if questions.is_empty() {
            return Vec::new();
        }
        let host = SliceMounts::find(slices);
        let mut open = Vec::new();
        for mut question in questions {
            match host.look_at(question.process) {
                Ok((client, sight)) if sight.asks_environment() => {
                    self.known().register.first_answer(client.clone());
                    open.push((question, client, sight));
                }
                Ok((client, _)) => question.has_found(client),
                Err(error) => {
                    tracing::debug!(
                        "client {pid} can't be read in /proc: {error}",
                        pid = question.process.pid
                    );
                }
            }
        }
        open
    }

    async fn look_at_memory(&self, open: Vec<(Question, KnownClient, ProcessSight)>) {
        let mut asked = JoinSet::new();
        // Each process has a task of its own. If the memory of a process can't be read for a while, the process does not delay
        // the others.
        for (mut question, client, sight) in open {
            let kernel = self.0.memory.clone();
            asked.spawn(async move {
                let look = move || {
                    let slices = sight.slices(question.process.pid);
                    // If the process has ended meanwhile, another process may have had its PID during the read. So the result
                    // is dropped.
                    let runs = identity::read(question.process.pid).ok() == Some(question.process);
                    if let Ok(slices) = slices
                        && runs
                    {
                        question.has_found(KnownClient { slices, ..client });
                    }
                };
                kernel.ask(MEMORY_PATIENCE, look).await;
            });
        }
        while asked.join_next().await.is_some() {}
    }

    fn make_room(&self) {
        if self.known().register.is_full() {
            // The register is not locked while the kernel is asked which processes run, so that other callers do not wait.
            let ended = self.known().register.processes().into_iter().filter(|one| !identity::runs(*one));
            let ended: BTreeSet<ProcessId> = ended.collect();
            self.known().register.make_room(|process| !ended.contains(&process));
        }
    }
}

fn running(pids: impl IntoIterator<Item = u32>) -> Vec<ProcessId> {
    let pids: BTreeSet<u32> = pids.into_iter().collect();
    pids.into_iter().filter_map(|pid| identity::read(pid).ok()).collect()
}

impl fmt::Debug for Question {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "look at {:?}", self.process)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_is_known_from_its_first_line_until_another_has_its_pid() {
        let clients = Clients::new();
        let own = identity::read(std::process::id()).unwrap();
        let daemon = DaemonId::Shared;
        clients.observe(&daemon, &Meaning::ClientAdmitted(own.pid));
        let known = clients.look_up(&[own]).await;
        let words = clients.describe(own.pid);
        assert!(words.starts_with(&format!("PID {} of user ", own.pid)), "{words}");
        assert_eq!((known.get(&own.pid), clients.has_found(own)), (Some(&clients.get(own)), true));
        assert_eq!(clients.at_work(&daemon), [own.pid]);
        clients.observe(&daemon, &Meaning::ClientLeft(own.pid));
        assert_eq!((clients.at_work(&daemon), clients.describe(own.pid)), (Vec::new(), words));
        // An older process with the same PID is another client, and the register knows nothing about it.
        let before = ProcessId { start_time: own.start_time - 1, ..own };
        assert_eq!(clients.get(before), KnownClient::only(before));
        assert_eq!(clients.describe(u32::MAX), "PID 4294967295 of an unknown user");
    }

    #[tokio::test]
    async fn those_who_ask_together_share_a_look() {
        let clients = Clients::new();
        let own = std::process::id();
        let parent = std::os::unix::process::parent_id();
        let mut asked = JoinSet::new();
        for _ in 0..8 {
            let clients = clients.clone();
            asked.spawn(async move { clients.look_up_anew([own, parent, u32::MAX]).await });
        }
        for known in asked.join_all().await {
            assert_eq!(known.keys().copied().collect::<BTreeSet<_>>(), BTreeSet::from([own, parent]));
        }
        let begun = clients.0.looks.borrow().begun;
        assert!(begun <= 8, "{begun} looks");
        let own = identity::read(own).unwrap();
        clients.look_up(&[own]).await;
        assert_eq!(clients.0.looks.borrow().begun, begun);
    }
}
