//! Watches the budgets of slices, with a task for each GPU. The task asks NVML for the clients of the GPU and their memory:
//! when a client has come, after each health check of a control daemon with clients, and every second while a slice has several
//! clients. The driver limits each client by itself, but not the sum of several clients.

use common::published::usage::{GpuUse, SliceUse};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mps_core::register::{KnownClient, RecordedContainer, Tenant};
use mps_core::terms::{DeviceName, GpuId, ProcessId};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};

use super::describe::describe;
use super::ending_shell::{ClientsDaemon, EndingShell};
use super::slice_members::by_slice;
use crate::mps::process::Held;
use crate::register::Clients;
use crate::supervisor::nvml_worker::NvmlWorker;
use crate::supervisor::wake_ups::{GpuWakeUps, WakeUps};
use crate::supervisor::{BusSignal, Tools};
use common::config::OnOveruse;
use common::host::identity;
use common::host::xid::CriticalError;
use common::plan::GpuPlan;
use common::published::usage::InUse;
use mps_core::CoreTime;
use mps_core::tenants::{
    BudgetWatch, Enforcer, Look, OverBudget, OveruseNews, SliceBudgets, Victim, VictimState,
};

/// An answer of NVML that is younger than this also serves the next caller.
const FRESH: Duration = Duration::from_secs(1);

/// If NVML fails to list the clients, the last known number of clients is shown for this time. Then the number is shown as
/// unknown.
const STAND: Duration = Duration::from_secs(5);

/// The main loop gets the same container of the host agent's records again after this time. If it could not bind the container
/// before, a slice may be free by then.
const AGAIN: Duration = Duration::from_secs(60);

const ASKED: Duration = Duration::from_secs(2);

#[derive(Debug, Clone)]
pub(crate) struct GpuBudget {
    gpu: GpuId,
    budgets: SliceBudgets,
}

impl GpuBudget {
    /// Returns the UUID and the budgets of a GPU. None if the clients of the GPU can't be counted.
    pub(crate) fn from_plan(plan: &GpuPlan, on_overuse: OnOveruse) -> Option<(String, Self)> {
        if !plan.clients_counted {
            return None;
        }
        let terminate = on_overuse == OnOveruse::Terminate;
        let budgets = SliceBudgets { budgets: plan.sizes.clone(), terminate };
        Some((plan.gpu.uuid()?.to_owned(), Self { gpu: plan.gpu.id(), budgets }))
    }

    fn name(&self, slice: u32) -> String {
        self.gpu.slice(slice).to_string()
    }
}

#[derive(Debug)]
pub(crate) enum LoopEvent {
    /// A slice exceeds its budget: the name of the slice, the D-Bus signal, and the message.
    OverUse(String, BusSignal, String),
    /// The name of a slice that exceeded its budget, and the message. The message names clients that were ended, or that could
    /// not be ended.
    CutBack(String, String),
    Event(String),
    /// A critical error (Xid) that NVML reports for the GPU with this UUID.
    CriticalError(String, CriticalError),
    /// A container that should be bound to a slice. The host agent's records name this slice, or a GPU of which the container
    /// gets any slice.
    Recorded(RecordedContainer, DeviceName),
}

type FindsDaemons = Arc<dyn Fn() -> Vec<ClientsDaemon> + Send + Sync>;

pub(crate) struct Budgets {
    nvml: NvmlWorker,
    wake_ups: GpuWakeUps,
    clients: Clients,
    changed: Arc<Notify>,
    events: mpsc::Sender<LoopEvent>,
    daemons: FindsDaemons,
    /// By the UUIDs of the GPUs.
    watched: BTreeMap<String, WatchHandle>,
}

/// The task that watches one GPU ends when its handle is dropped.
#[derive(Debug)]
struct WatchHandle {
    budget: watch::Sender<GpuBudget>,
    /// The time at which the task last began to list the clients, and the use of the GPU that it found.
    looked: watch::Receiver<(Option<Instant>, GpuUse)>,
    wake_ups: Arc<WakeUps>,
    task: JoinHandle<()>,
}

impl Drop for WatchHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Budgets {
    pub(crate) fn new(tools: &Tools, events: mpsc::Sender<LoopEvent>, daemons: FindsDaemons) -> Self {
        let Tools { nvml, wake_ups, clients, changed, .. } = tools.clone();
        Self { nvml, wake_ups, clients, changed, events, daemons, watched: BTreeMap::new() }
    }

    pub(crate) fn pursue(&mut self, gpus: impl IntoIterator<Item = (String, GpuBudget)>) {
        let mut before = std::mem::take(&mut self.watched);
        for (uuid, budget) in gpus {
            let watched = match before.remove(&uuid) {
                Some(watched) => {
                    watched.budget.send_replace(budget);
                    watched
                }
                None => self.watch(&uuid, budget),
            };
            self.watched.insert(uuid, watched);
        }
    }

    fn watch(&self, uuid: &str, budget: GpuBudget) -> WatchHandle {
        let (sender, received) = watch::channel(budget.clone());
        let (looked, looked_seen) = watch::channel((None, GpuUse::default()));
        let wake_ups = self.wake_ups.for_gpu(uuid);
        let begun = Instant::now();
        let watch = GpuWatch {
            uuid: uuid.to_owned(),
            begun,
            watch: BudgetWatch::new(budget.budgets.clone(), CoreTime::ZERO),
            gpu: budget,
            nvml: self.nvml.clone(),
            clients: self.clients.clone(),
            changed: Arc::clone(&self.changed),
            events: self.events.clone(),
            daemons: Arc::clone(&self.daemons),
            looked,
            over: watch::Sender::default(),
            passed_on: BTreeMap::new(),
            looked_at: begun.checked_sub(FRESH).unwrap_or(begun),
            seen_at: begun,
            due: Some(begun),
            enforcer: Enforcer::default(),
        };
        let task = tokio::spawn(watch.run(received, Arc::clone(&wake_ups)));
        WatchHandle { budget: sender, looked: looked_seen, wake_ups, task }
    }

    /// Makes each task list the clients of its GPU, unless the task has just done so, and waits for these lists. A GPU that
    /// does not answer in time does not delay the other GPUs.
    pub(crate) fn look_now(&self) -> impl Future<Output = ()> + Send + 'static {
        let now = Instant::now();
        let is_fresh =
            move |(looked, _): &(Option<Instant>, GpuUse)| looked.is_some_and(|looked| looked + FRESH > now);
        let mut looks = JoinSet::new();
        for watched in self.watched.values() {
            if !is_fresh(&watched.looked.borrow()) {
                watched.wake_ups.look.notify_one();
                let mut looked = watched.looked.clone();
                looks.spawn(async move { drop(looked.wait_for(is_fresh).await) });
            }
        }
        async move { drop(timeout(ASKED, looks.join_all()).await) }
    }

    pub(crate) fn uses(&self) -> BTreeMap<String, GpuUse> {
        self.watched.iter().map(|(uuid, watched)| (uuid.clone(), watched.looked.borrow().1.clone())).collect()
    }
}

type Attempted = (Enforcer<Held>, Vec<Victim>);

struct GpuWatch {
    uuid: String,
    gpu: GpuBudget,
    watch: BudgetWatch,
    begun: Instant,
    nvml: NvmlWorker,
    clients: Clients,
    changed: Arc<Notify>,
    events: mpsc::Sender<LoopEvent>,
    daemons: FindsDaemons,
    looked: watch::Sender<(Option<Instant>, GpuUse)>,
    /// According to the last list of clients, these slices exceed their budgets, and their clients may be ended.
    over: watch::Sender<Vec<OverBudget<Tenant>>>,
    /// The time at which the container of each client was last reported to the main loop, which binds it to a slice.
    passed_on: BTreeMap<ProcessId, Instant>,
    looked_at: Instant,
    /// The time of the last question that NVML has answered.
    seen_at: Instant,
    due: Option<Instant>,
    /// Decides which clients are ended. A separate task has the enforcer while that task ends clients.
    enforcer: Enforcer<Held>,
}

impl GpuWatch {
    async fn run(mut self, mut budget: watch::Receiver<GpuBudget>, wake_ups: Arc<WakeUps>) {
        let mut attempted: Option<JoinHandle<Attempted>> = None;
        loop {
            tokio::select! {
                changed = budget.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.gpu = budget.borrow_and_update().clone();
                    self.watch.pursue(self.gpu.budgets.clone());
                    self.over.send_replace(Vec::new());
                    self.passed_on.clear();
                }
                () = wake_ups.look.notified() => {}
                () = wake_ups.came.notified() => self.watch.client_has_come(self.begun.elapsed()),
                ended = or_never(attempted.as_mut()) => {
                    attempted = None;
                    self.has_attempted(ended.ok()).await;
                    continue;
                }
                () = or_never(self.due.map(sleep_until)) => {}
            }
            sleep_until(self.looked_at + self.watch.share(self.begun.elapsed())).await;
            let begins_attempt = self.measure().await;
            self.looked.send_modify(|(looked, _)| *looked = Some(self.looked_at));
            if begins_attempt {
                attempted = Some(self.begin_attempt());
            }
        }
    }

    /// Lists the clients, and publishes and reports changes. Returns true if an attempt to end clients has to begin now.
    async fn measure(&mut self) -> bool {
        self.looked_at = Instant::now();
        let now = self.begun.elapsed();
        let uuid = &self.uuid;
        let processes = match self.nvml.processes(uuid).await {
            Ok(processes) => processes,
            Err(error) => {
                tracing::debug!(gpu_uuid = uuid, "NVML can't list the clients of GPU {uuid}: {error}");
                self.due = self.watch.is_blind(now).map(|due| self.begun + due);
                self.over.send_replace(Vec::new());
                if self.looked_at.duration_since(self.seen_at) > STAND {
                    self.publish(&GpuUse::default());
                }
                return false;
            }
        };
        self.seen_at = self.looked_at;
        tracing::debug!(gpu_uuid = uuid, step = "budgets", "the clients of GPU {uuid} are counted");
        let via_mps = processes.iter().filter(|process| process.via_mps);
        let found: Vec<ProcessId> = via_mps.filter_map(|process| identity::read(process.pid).ok()).collect();
        let known = self.clients.look_up(&found).await;
        self.pass_on_recorded(&known).await;
        let slices = u32::try_from(self.gpu.budgets.budgets.len()).unwrap_or(u32::MAX);
        let members = by_slice(&found, &processes, &known, self.gpu.gpu, slices);
        let look = self.watch.decide(&found, members, identity::runs, now);
        let Look { uses, news, over, begins_attempt, due } = look;
        self.due = due.map(|due| self.begun + due);
        self.over.send_replace(over);
        let clients = processes.iter().filter(|process| process.via_mps);
        let all = Some(InUse::sum(clients.map(|process| process.memory_mib)));
        let slices = uses.into_iter().map(|(in_use, overuse)| SliceUse {
            clients: in_use.clients,
            memory_mib: in_use.memory_mib,
            overuse,
        });
        self.publish(&GpuUse { slices: slices.collect(), all });
        for one in news {
            let event = self.describe(&one);
            self.send(event).await;
        }
        begins_attempt
    }

    fn publish(&self, uses: &GpuUse) {
        let is_new = |(_, before): &mut (_, GpuUse)| std::mem::replace(before, uses.clone()) != *uses;
        if self.looked.send_if_modified(is_new) {
            self.changed.notify_one();
        }
    }

    /// Reports to the main loop the containers that should be bound to a slice of this GPU. A client causes at most one report
    /// within [`AGAIN`].
    async fn pass_on_recorded(&mut self, known: &BTreeMap<u32, KnownClient>) {
        self.passed_on.retain(|process, since| known.contains_key(&process.pid) && since.elapsed() < AGAIN);
        let mut recorded: Vec<(RecordedContainer, DeviceName)> = Vec::new();
        for client in known.values() {
            if self.passed_on.contains_key(&client.process) {
                continue;
            }
            self.passed_on.insert(client.process, self.looked_at);
            let container = client.recorded.as_ref();
            let new = container.and_then(|one| Some((one.clone(), one.device_on(self.gpu.gpu)?)));
            recorded.extend(new.filter(|new| !recorded.contains(new)));
        }
        for (container, device) in recorded {
            self.send(LoopEvent::Recorded(container, device)).await;
        }
    }

    fn owner(&self, process: ProcessId) -> KnownClient {
        KnownClient { slices: None, ..self.clients.get(process) }
    }

    fn describe(&self, news: &OveruseNews) -> LoopEvent {
        let device = self.gpu.name(news.slice);
        let pids: Vec<u32> = news.clients.iter().map(|process| process.pid).collect();
        if news.reasons.is_empty() {
            return LoopEvent::Event(news.text(&device, ""));
        }
        let clients = news.clients.iter().map(|process| self.owner(*process));
        let who = describe(clients).unwrap_or_default();
        let text = news.text(&device, &who);
        let signal = BusSignal::OverUse { device: device.clone(), reasons: news.reasons.clone(), pids };
        LoopEvent::OverUse(device, signal, text)
    }

    async fn send(&self, event: LoopEvent) {
        // Sending fails only when the main loop has ended, at the end of the service.
        let _ = self.events.send(event).await;
    }

    fn begin_attempt(&mut self) -> JoinHandle<Attempted> {
        let over = self.over.subscribe();
        let mut enforcer = std::mem::take(&mut self.enforcer);
        let (daemons, begun) = (Arc::clone(&self.daemons), self.begun);
        // A separate task ends the clients, since the control daemon waits for the end of each client. Meanwhile this task goes
        // on to list the clients.
        tokio::spawn(async move {
            let mut shell = EndingShell::new(daemons(), begun, ());
            let (victims, broken_off) =
                enforcer.enforce(&mut shell, || over.borrow().clone(), identity::runs).await;
            if let Some(reason) = broken_off {
                tracing::debug!(
                    "the service breaks off an attempt to end GPU work of slices that are over their \
                     budgets: {reason}"
                );
            }
            (enforcer, victims)
        })
    }

    /// Records the end of an attempt to end clients, and reports the clients that have lost their work. `attempted` is None if
    /// the task of the attempt has failed.
    async fn has_attempted(&mut self, attempted: Option<Attempted>) {
        let (enforcer, victims) =
            attempted.map_or_else(Default::default, |(enforcer, victims)| (enforcer, Some(victims)));
        self.enforcer = enforcer;
        for news in self.watch.has_attempted(victims, self.begun.elapsed()) {
            let mut clients = news.clients.iter().map(|process| self.owner(*process));
            let who = match news.state {
                VictimState::Ended => describe(clients),
                VictimState::Stays(_) | VictimState::Unknown(_) => clients.next().map(|one| one.to_string()),
            };
            if let Some(who) = who {
                let device = self.gpu.name(news.slice);
                let text = news.text(&device, &who);
                self.send(LoopEvent::CutBack(device, text)).await;
            }
        }
    }
}

async fn or_never<T>(what: Option<impl Future<Output = T>>) -> T {
    match what {
        Some(what) => what.await,
        None => std::future::pending().await,
    }
}
