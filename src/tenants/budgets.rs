//! Watches over the budgets of the slices of each GPU. A look asks NVML for the clients and their memory, and the kernel
//! for their slices; it starts no front end. A look follows when a client has come and with each health check of the
//! control daemon, and every second while some slice has two clients or more: the driver itself binds one.

use common::published::usage::{GpuUse, SliceUse};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};

use super::clients::{owner, users};
use super::describe::{Whose, describe};
use super::ending::{ClientsDaemon, EndingShell};
use super::enforcement::{Enforcer, OverBudget, Victim, VictimState};
use super::members::{Members, SlicedGpu};
use super::overuse::{MESSAGES, ShownOveruse};
use crate::rate_limit::RateLimit;
use crate::supervisor::bells::{Bell, Bells};
use crate::supervisor::compute_modes::ComputeModes;
use common::config::OnOveruse;
use common::host::blocking::Blocking;
use common::host::identity::Identity;
use common::membership::{Slices, Tenant};
use common::plan::GpuPlan;
use common::published::usage::InUse;
use mps_core::budget::{self, Budget, Member, Part};

/// The least time between two looks: clients that come together share one.
const SHARE: Duration = Duration::from_millis(250);

/// The time to the next look while some slice has two clients or more, and after a client has come: the driver lists a
/// client a moment after the control daemon has admitted it.
const PERIOD: Duration = Duration::from_secs(1);

/// The age of a look that is new enough for whoever asks: all who ask together cause one look in this time.
const FRESH: Duration = Duration::from_secs(1);

/// The time for which whoever asks waits for the look at a GPU.
const ASKED: Duration = Duration::from_secs(2);

/// The longest pause between two attempts to end clients of which none could be ended.
const LAST_PAUSE: Duration = Duration::from_secs(30);

/// The time for all questions about the owners of clients. Each takes microseconds.
const PATIENCE: Duration = Duration::from_secs(1);

/// The budgets of a GPU's slices, and the answer to more.
#[derive(Debug, Clone)]
pub(crate) struct GpuBudget {
    cut: SlicedGpu,
    budget: Budget,
    on_overuse: OnOveruse,
}

impl GpuBudget {
    /// The budgets of this GPU's slices, with its UUID. None if its clients can't be counted.
    pub(crate) fn from_plan(plan: &GpuPlan, on_overuse: OnOveruse, all: &Slices) -> Option<(String, Self)> {
        let cut = SlicedGpu { gpu: plan.gpu.id(), slices: plan.slices, all: all.clone() };
        let budget = Budget { memory_mib: plan.memory_limit_mib, max_clients: plan.max_clients? };
        Some((plan.gpu.uuid()?.to_owned(), Self { cut, budget, on_overuse }))
    }

    /// Whether clients that were right before may be too much now.
    fn is_stricter_than(&self, before: &Self) -> bool {
        self.budget.memory_mib < before.budget.memory_mib
            || self.budget.max_clients < before.budget.max_clients
            || self.cut.slices != before.cut.slices
            || (self.on_overuse == OnOveruse::Terminate && before.on_overuse == OnOveruse::Report)
    }

    fn name(&self, slice: u32) -> String {
        self.cut.gpu.slice(slice).to_string()
    }
}

/// A slice has gone over its budget, or is over it in another way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OverUse {
    /// The name of the slice.
    pub device: String,
    /// The exceeded parts of its budget, each in one word.
    pub reasons: Vec<&'static str>,
    /// Its clients.
    pub pids: Vec<u32>,
}

/// Something for the loop to tell, or to answer.
#[derive(Debug)]
pub(crate) enum BudgetEvent {
    OverUse(OverUse, String),
    /// The name of a slice that was over its budget, and which clients have lost their work for it, or can't.
    CutBack(String, String),
    Event(String),
    /// The clients were looked at, for whoever waits for that.
    Looked(oneshot::Sender<()>),
    /// Who can end the work of clients.
    Daemons(oneshot::Sender<Vec<ClientsDaemon>>),
}

/// The watches over all GPUs.
#[derive(Debug)]
pub(crate) struct Budgets {
    nvml: ComputeModes,
    bells: Bells,
    /// Wakes the loop up.
    changed: Arc<Notify>,
    events: mpsc::Sender<BudgetEvent>,
    /// By UUID.
    watched: BTreeMap<String, WatchHandle>,
}

/// A watch over one GPU. It ends with this value.
#[derive(Debug)]
struct WatchHandle {
    budget: watch::Sender<GpuBudget>,
    uses: watch::Receiver<GpuUse>,
    /// When the last look began that has ended.
    looked: watch::Receiver<Option<Instant>>,
    bell: Arc<Bell>,
    task: JoinHandle<()>,
}

impl Drop for WatchHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Budgets {
    pub(crate) fn new(
        nvml: ComputeModes,
        bells: Bells,
        changed: Arc<Notify>,
        events: mpsc::Sender<BudgetEvent>,
    ) -> Self {
        Self { nvml, bells, changed, events, watched: BTreeMap::new() }
    }

    /// Watches over these GPUs from now on, and over no others.
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
        let (uses, uses_seen) = watch::channel(GpuUse::default());
        let (looked, looked_seen) = watch::channel(None);
        let bell = self.bells.for_gpu(uuid);
        let now = Instant::now();
        let watch = GpuWatch {
            uuid: uuid.to_owned(),
            gpu: budget,
            nvml: self.nvml.clone(),
            kernel: Blocking::new(1),
            changed: Arc::clone(&self.changed),
            events: self.events.clone(),
            uses,
            looked,
            members: Members::new(),
            spare: true,
            slices: BTreeMap::new(),
            looked_at: now.checked_sub(SHARE).unwrap_or(now),
            due: Some(now),
            busy: false,
            attempt: Attempt { at: now, pause: PERIOD },
            enforcer: Some(Enforcer::default()),
        };
        let task = tokio::spawn(watch.run(received, Arc::clone(&bell)));
        WatchHandle { budget: sender, uses: uses_seen, looked: looked_seen, bell, task }
    }

    /// Has every GPU looked at that was not looked at just now. The answer goes through the loop, behind the published
    /// result. A GPU that does not answer in time holds up nobody.
    pub(crate) fn look_now(&self, published: oneshot::Sender<()>) {
        let now = Instant::now();
        let is_fresh = move |looked: &Option<Instant>| looked.is_some_and(|looked| looked + FRESH > now);
        let mut looks = JoinSet::new();
        for watched in self.watched.values() {
            if !is_fresh(&watched.looked.borrow()) {
                watched.bell.asked.notify_one();
                let mut looked = watched.looked.clone();
                looks.spawn(async move { drop(looked.wait_for(is_fresh).await) });
            }
        }
        let events = self.events.clone();
        tokio::spawn(async move {
            let _ = timeout(ASKED, looks.join_all()).await;
            let _ = events.send(BudgetEvent::Looked(published)).await;
        });
    }

    /// The use of the GPUs and their slices, by the UUIDs of the GPUs.
    pub(crate) fn uses(&self) -> BTreeMap<String, GpuUse> {
        self.watched.iter().map(|(uuid, watched)| (uuid.clone(), watched.uses.borrow().clone())).collect()
    }
}

/// When clients may be ended next.
#[derive(Debug)]
struct Attempt {
    at: Instant,
    /// The pause after an attempt that ends nobody.
    pause: Duration,
}

/// All that is told of one slice.
#[derive(Debug)]
struct SliceMessages {
    shown: ShownOveruse,
    /// The number of messages about ended clients that may be written.
    endings: RateLimit,
}

impl SliceMessages {
    fn new() -> Self {
        Self { shown: ShownOveruse::new(), endings: RateLimit::new(MESSAGES) }
    }
}

/// The end of an attempt, with the owners of the clients that were there at its beginning.
type Attempted = (Enforcer, Vec<Victim>, BTreeMap<u32, Whose>);

struct GpuWatch {
    uuid: String,
    gpu: GpuBudget,
    nvml: ComputeModes,
    /// Asks the kernel for the owners of clients.
    kernel: Blocking,
    changed: Arc<Notify>,
    events: mpsc::Sender<BudgetEvent>,
    uses: watch::Sender<GpuUse>,
    looked: watch::Sender<Option<Instant>>,
    members: Members,
    /// The clients that the next look finds are spared: they were there before the service, or before the budget became
    /// smaller. No restart and no reload ends the work of clients.
    spare: bool,
    /// By the ordinals of the slices.
    slices: BTreeMap<u32, SliceMessages>,
    looked_at: Instant,
    due: Option<Instant>,
    /// Some slice had two clients or more at the last look.
    busy: bool,
    attempt: Attempt,
    /// None while clients are being ended.
    enforcer: Option<Enforcer>,
}

impl GpuWatch {
    async fn run(mut self, mut budget: watch::Receiver<GpuBudget>, bell: Arc<Bell>) {
        let mut attempted: Option<JoinHandle<Attempted>> = None;
        loop {
            let mut come = false;
            tokio::select! {
                changed = budget.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let now = budget.borrow_and_update().clone();
                    self.spare |= now.is_stricter_than(&self.gpu);
                    self.slices.retain(|slice, _| *slice < now.cut.slices);
                    self.gpu = now;
                    self.members.look_again();
                }
                () = bell.checked.notified() => {}
                () = bell.asked.notified() => {}
                () = bell.came.notified() => {
                    come = true;
                    self.attempt.at = self.attempt.at.min(Instant::now() + PERIOD);
                    self.attempt.pause = PERIOD;
                }
                ended = or_never(attempted.as_mut()) => {
                    attempted = None;
                    self.has_attempted(ended.ok()).await;
                    continue;
                }
                () = or_never(self.due.map(sleep_until)) => {}
            }
            sleep_until(self.looked_at + SHARE).await;
            let over = self.measure(come).await;
            self.looked.send_replace(Some(self.looked_at));
            if !over.is_empty() && attempted.is_none() {
                attempted = self.begin_attempt(over).await;
            }
        }
    }

    /// Looks at the clients, and publishes and tells what is new. Returns the slices that are over their budgets.
    async fn measure(&mut self, come: bool) -> Vec<OverBudget> {
        let now = Instant::now();
        self.looked_at = now;
        let uuid = &self.uuid;
        let processes = match self.nvml.processes(uuid).await {
            Ok(processes) => processes,
            Err(error) => {
                tracing::debug!(gpu_uuid = uuid, "the clients of {uuid} are not known: {error}");
                let is_shown = |told: &SliceMessages| !told.shown.parts().is_empty();
                self.due = (come || self.busy || self.slices.values().any(is_shown)).then(|| now + PERIOD);
                return Vec::new();
            }
        };
        tracing::debug!(gpu_uuid = uuid, step = "budgets", "the clients of {uuid} are counted");
        if std::mem::take(&mut self.spare) {
            self.members.spare(&processes);
        }
        let mut members = self.members.by_slice(&processes, &self.gpu.cut).await;
        let (mut uses, mut over, mut events) = (Vec::new(), Vec::new(), Vec::new());
        for slice in 0..self.gpu.cut.slices {
            let of_slice = members.remove(&slice).unwrap_or_default();
            let in_use = budget::in_use(&of_slice);
            let exceeded = budget::exceeded(self.gpu.budget, in_use);
            let (shown, changed) = self.show(slice, &exceeded);
            if changed {
                events.push(self.describe(slice, &shown, in_use, &of_slice).await);
            }
            let overuse = budget::describe(self.gpu.budget, &shown);
            uses.push(SliceUse { clients: in_use.clients, memory_mib: in_use.memory_mib, overuse });
            if !exceeded.is_empty()
                && let Ok(may_end) = budget::may_cut_back(&of_slice)
            {
                over.push(OverBudget { slice, budget: self.gpu.budget, members: of_slice, may_end });
            }
        }
        self.busy = uses.iter().any(|one| one.clients > 1);
        let again = self.slices.values_mut().filter_map(|told| told.shown.next_check(now));
        let busy = (come || self.busy).then(|| now + PERIOD);
        self.due = again.chain(busy).min();
        let clients = processes.iter().filter(|process| process.via_mps);
        let all = Some(InUse::sum(clients.map(|process| process.memory_mib)));
        let uses = GpuUse { slices: uses, all };
        if self.uses.send_if_modified(|before| std::mem::replace(before, uses.clone()) != uses) {
            self.changed.notify_one();
        }
        for event in events {
            self.send(event).await;
        }
        over
    }

    /// The parts of a slice's budget that are shown as exceeded from now on, and whether these are others than before.
    fn show(&mut self, slice: u32, exceeded: &BTreeSet<Part>) -> (BTreeSet<Part>, bool) {
        let now = Instant::now();
        if !self.slices.contains_key(&slice) && exceeded.is_empty() {
            return (BTreeSet::new(), false);
        }
        let told = self.slices.entry(slice).or_insert_with(SliceMessages::new);
        let changed = told.shown.observe(exceeded, now);
        (told.shown.parts(), changed)
    }

    /// The words that are shown of a slice.
    async fn describe(
        &self,
        slice: u32,
        shown: &BTreeSet<Part>,
        in_use: InUse,
        members: &[Member<Identity, Tenant>],
    ) -> BudgetEvent {
        let device = self.gpu.name(slice);
        if shown.is_empty() {
            return BudgetEvent::Event(format!("{device} is within its budget again"));
        }
        let words = budget::describe(self.gpu.budget, shown);
        let memory = in_use.memory_mib.map(|mib| format!("{mib} MiB ")).unwrap_or_default();
        let pids: Vec<u32> = members.iter().map(|member| member.process.pid).collect();
        let who = describe(self.owners(pids.clone()).await.into_values()).unwrap_or_default();
        let spared = match budget::may_cut_back(members) {
            Err(reason) if self.gpu.on_overuse == OnOveruse::Terminate => {
                format!("; nobody's work is ended: {reason}")
            }
            _ => String::new(),
        };
        let text = format!("{device} is over its budget: {words}; {memory}in use by {who}{spared}");
        let reasons = shown.iter().map(|part| part.as_str()).collect();
        BudgetEvent::OverUse(OverUse { device, reasons, pids }, text)
    }

    async fn send(&self, event: BudgetEvent) {
        // The loop takes the events as long as the service runs.
        let _ = self.events.send(event).await;
    }

    /// The owners of these clients. A process that can't be looked at now has its PID alone.
    async fn owners(&self, pids: Vec<u32>) -> BTreeMap<u32, Whose> {
        let unknown = |pid: &u32| (*pid, Whose { pid: *pid, user: None, slices: None, container: None });
        let nobody = pids.iter().map(unknown).collect();
        let asked = self.kernel.ask(PATIENCE, move || {
            let users = users();
            pids.into_iter().map(|pid| (pid, owner(pid, &users))).collect()
        });
        asked.await.unwrap_or(nobody)
    }

    /// Begins to end clients of these slices, if that is wanted and it is time.
    async fn begin_attempt(&mut self, over: Vec<OverBudget>) -> Option<JoinHandle<Attempted>> {
        let can_go = over.iter().any(|slice| slice.members.iter().any(|member| !member.stays));
        if self.gpu.on_overuse != OnOveruse::Terminate || !can_go || Instant::now() < self.attempt.at {
            return None;
        }
        let pids = over.iter().flat_map(|slice| &slice.members).map(|member| member.process.pid).collect();
        let owners = self.owners(pids).await;
        let mut enforcer = self.enforcer.take()?;
        let events = self.events.clone();
        // Beside the looks: the control daemon waits for each client that it ends.
        Some(tokio::spawn(async move {
            let (reply, answer) = oneshot::channel();
            let _ = events.send(BudgetEvent::Daemons(reply)).await;
            let mut shell = EndingShell::new(answer.await.unwrap_or_default());
            let victims = enforcer.enforce(&mut shell, over).await;
            (enforcer, victims, owners)
        }))
    }

    /// Takes note of the end of an attempt, and tells which clients have lost their work. None: the attempt has failed.
    async fn has_attempted(&mut self, attempted: Option<Attempted>) {
        let (enforcer, victims, owners) = attempted.unwrap_or_default();
        self.enforcer = Some(enforcer);
        let now = Instant::now();
        let ended_one = victims.iter().any(|victim| victim.state == VictimState::Ended);
        self.attempt.pause = if ended_one { PERIOD } else { (self.attempt.pause * 2).min(LAST_PAUSE) };
        self.attempt.at = now + self.attempt.pause;
        let slices: BTreeSet<u32> = victims.iter().map(|victim| victim.slice).collect();
        for slice in slices {
            let of_slice = || victims.iter().filter(|victim| victim.slice == slice);
            let owner = |victim: &Victim| owners.get(&victim.process.pid).cloned();
            let ended = of_slice().filter(|victim| victim.state == VictimState::Ended).filter_map(owner);
            let stay = of_slice().find_map(|victim| match &victim.state {
                VictimState::Stays(reason) => Some((owner(victim)?, reason)),
                VictimState::Ended => None,
            });
            let told = self.slices.entry(slice).or_insert_with(SliceMessages::new);
            if !told.endings.take(ended.clone().count(), now) {
                continue;
            }
            let suppressed = told.endings.suppressed().map_or(String::new(), |suppressed| {
                format!("; before, also of {suppressed} clients that are not named")
            });
            let device = self.gpu.name(slice);
            if let Some(who) = describe(ended) {
                let text = format!("GPU work ended since {device} was over its budget, of {who}{suppressed}");
                self.send(BudgetEvent::CutBack(device.clone(), text)).await;
            }
            if let Some((who, reason)) = stay {
                let text =
                    format!("{device} is over its budget, and the work of {who} can't be ended: {reason}");
                self.send(BudgetEvent::CutBack(device, text)).await;
            }
        }
    }
}

/// Waits for something, and for ever if there is nothing to wait for.
async fn or_never<T>(what: Option<impl Future<Output = T>>) -> T {
    match what {
        Some(what) => what.await,
        None => std::future::pending().await,
    }
}
