//! Makes the kernel enforce the memory limits of control groups that are bound to slices. A separate task sets and removes
//! these limits, so that the main loop does not wait for the driver.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use super::budgets::LoopEvent;
use crate::supervisor::nvml_worker::NvmlWorker;
use mps_core::kernel_limits::{KernelLimits, LimitGoal, LimitOutcome, LimitedGroup};

/// The longest wait of a caller of the D-Bus method `Bind` until the kernel enforces the memory limit. NVML answers within a
/// millisecond.
const PATIENCE: Duration = Duration::from_secs(3);

pub(crate) type LimitGoals = BTreeMap<LimitedGroup, LimitGoal>;

/// All clones share one task, the goals and the outcomes.
#[derive(Debug, Clone)]
pub(crate) struct KernelLimitKeeper {
    nvml: NvmlWorker,
    changed: Arc<Notify>,
    events: mpsc::Sender<LoopEvent>,
    begun: Instant,
    limits: Arc<watch::Sender<SharedLimits>>,
}

#[derive(Debug, Default)]
struct SharedLimits {
    goals: LimitGoals,
    limits: KernelLimits,
    /// The number of changes of the goals.
    wanted: u64,
    /// The number of changes of the goals that the task has carried out completely.
    tried: u64,
}

impl KernelLimitKeeper {
    pub(crate) fn new(nvml: NvmlWorker, changed: Arc<Notify>, events: mpsc::Sender<LoopEvent>) -> Self {
        let keeper = Self { nvml, changed, events, begun: Instant::now(), limits: Arc::default() };
        tokio::spawn(keeper.clone().run());
        keeper
    }

    pub(crate) fn is_new(&self) -> bool {
        self.limits.borrow().wanted == 0
    }

    /// Replaces the goals. A limit without a goal is removed, and a limit that the kernel has refused is tried again.
    pub(crate) fn pursue(&self, goals: LimitGoals) {
        self.change_goals(|before| *before = goals);
    }

    pub(crate) fn add(&self, more: LimitGoals) {
        self.change_goals(|goals| goals.extend(more));
    }

    fn change_goals(&self, change: impl FnOnce(&mut LimitGoals)) {
        self.limits.send_modify(|SharedLimits { goals, limits, wanted, .. }| {
            change(goals);
            *wanted += 1;
            limits.pursue(goals, self.begun.elapsed());
        });
    }

    pub(crate) fn tried(&self) -> impl Future<Output = ()> + Send + 'static {
        let (wanted, mut limits) = (self.limits.borrow().wanted, self.limits.subscribe());
        async move {
            let _ = timeout(PATIENCE, limits.wait_for(|limits| limits.tried >= wanted)).await;
        }
    }

    pub(crate) fn outcomes(&self) -> BTreeMap<LimitedGroup, LimitOutcome> {
        let limits = self.limits.borrow();
        limits.limits.outcomes().map(|(place, outcome)| (place.clone(), outcome.clone())).collect()
    }

    async fn run(self) {
        let mut limits = self.limits.subscribe();
        let (mut attempts, mut busy) = (JoinSet::new(), BTreeSet::new());
        loop {
            let (next, wanted) = {
                let limits = limits.borrow_and_update();
                (limits.limits.next(&busy), limits.wanted)
            };
            let due = match next {
                Some((due, place, goal)) if due <= self.begun.elapsed() => {
                    busy.insert(place.gpu.clone());
                    let keeper = self.clone();
                    attempts.spawn(async move {
                        keeper.act(&place, &goal).await;
                        place.gpu
                    });
                    continue;
                }
                next => next.map(|(due, ..)| self.begun + due),
            };
            if attempts.is_empty() {
                self.limits.send_if_modified(|limits| std::mem::replace(&mut limits.tried, wanted) != wanted);
            }
            tokio::select! {
                _ = limits.changed() => {}
                Some(Ok(gpu)) = attempts.join_next() => {
                    busy.remove(&gpu);
                }
                () = until(due) => {}
            }
        }
    }

    async fn act(&self, place: &LimitedGroup, goal: &LimitGoal) {
        let outcome = self.nvml.pursue_memory_limit(place, goal).await;
        let (mut is_news, mut is_shown) = (false, false);
        self.limits.send_modify(|SharedLimits { limits, .. }| {
            let before = limits.outcome(place).cloned();
            is_news = limits.has_acted(place, goal, outcome.clone(), self.begun.elapsed());
            is_shown = limits.outcome(place) != before.as_ref();
        });
        if is_news {
            self.log_outcome(place, goal, outcome).await;
        }
        if is_shown {
            self.changed.notify_one();
        }
    }

    async fn log_outcome(&self, place: &LimitedGroup, goal: &LimitGoal, outcome: LimitOutcome) {
        let (uuid, path) = (&place.gpu, &place.group.path);
        match (outcome, goal) {
            (LimitOutcome::Refused(reason), LimitGoal::Hold(_)) => tracing::info!(
                gpu_uuid = uuid,
                "the kernel does not enforce the memory limit of control group {path} on GPU {uuid}, so only \
                 the service watches the memory, and tries to set the limit each minute: {reason}"
            ),
            (LimitOutcome::Refused(reason), LimitGoal::Lift(_)) => tracing::info!(
                gpu_uuid = uuid,
                "the memory limit of control group {path} on GPU {uuid} can't be lifted; the service tries \
                 again each minute: {reason}"
            ),
            (LimitOutcome::Replaced(found), LimitGoal::Hold(mib)) => {
                let text = format!(
                    "another program has changed the memory limit of control group {path} on GPU {uuid}: \
                     the limit was {found}, and is {mib} MiB again; NVIDIA's container toolkit sets a limit \
                     for a container with NVIDIA_GPU_MEMORY_LIMIT in its environment"
                );
                // Sending fails only when the main loop has ended, at the end of the service.
                let _ = self.events.send(LoopEvent::Event(text)).await;
            }
            _ => {}
        }
    }
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}
