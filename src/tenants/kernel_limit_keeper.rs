//! Has the kernel enforce the memory limits of control groups that are bound to slices. A separate task sets and removes the
//! limits, one after another, so that the loop does not wait for the driver.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};

use super::budgets::LoopEvent;
use crate::supervisor::nvml_worker::NvmlWorker;
use mps_core::kernel_limits::{KernelLimits, LimitGoal, LimitOutcome, LimitedGroup};

/// The longest time that a caller of the D-Bus method Bind waits until the kernel enforces the memory limit. NVML
/// answers within a millisecond.
const PATIENCE: Duration = Duration::from_secs(3);

pub(crate) type LimitGoals = BTreeMap<LimitedGroup, LimitGoal>;

/// The outcome for each limit that the kernel should enforce.
pub(crate) type LimitOutcomes = BTreeMap<LimitedGroup, LimitOutcome>;

/// Has a task that makes the kernel enforce memory limits. The task ends when the [`KernelLimitKeeper`] is dropped.
#[derive(Debug)]
pub(crate) struct KernelLimitKeeper {
    /// The limits that the kernel should enforce, and the number of changes of these goals.
    goals: watch::Sender<(u64, LimitGoals)>,
    /// The number of changes of the goals that the task has carried out completely, and the outcomes so far.
    tried: watch::Receiver<(u64, LimitOutcomes)>,
}

impl KernelLimitKeeper {
    /// Starts the task. The task notifies `changed` when there is a new outcome for a limit.
    pub(crate) fn new(nvml: NvmlWorker, changed: Arc<Notify>, events: mpsc::Sender<LoopEvent>) -> Self {
        let (goals, wanted) = watch::channel((0, LimitGoals::new()));
        let (tried, tried_seen) = watch::channel((0, LimitOutcomes::new()));
        let task =
            Acts { nvml, changed, events, begun: Instant::now(), limits: KernelLimits::default(), tried };
        tokio::spawn(task.run(wanted));
        Self { goals, tried: tried_seen }
    }

    /// True if no goals were set yet.
    pub(crate) fn is_new(&self) -> bool {
        self.goals.borrow().0 == 0
    }

    /// Replaces the goals. A limit that has no goal in `goals` is removed, and a limit that the kernel has refused is
    /// tried again.
    pub(crate) fn pursue(&self, goals: LimitGoals) {
        self.goals.send_modify(|(number, before)| (*number, *before) = (number.saturating_add(1), goals));
    }

    /// Adds goals. If a limit already has a goal, its new goal replaces the former goal.
    pub(crate) fn add(&self, more: LimitGoals) {
        self.goals.send_modify(|(number, goals)| {
            *number = number.saturating_add(1);
            goals.extend(more);
        });
    }

    /// Waits until the task has tried each present goal, for some seconds at most.
    pub(crate) fn tried(&self) -> impl Future<Output = ()> + Send + 'static {
        let (number, mut tried) = (self.goals.borrow().0, self.tried.clone());
        async move {
            let _ = timeout(PATIENCE, tried.wait_for(|(tried, _)| *tried >= number)).await;
        }
    }

    pub(crate) fn outcomes(&self) -> LimitOutcomes {
        self.tried.borrow().1.clone()
    }
}

/// The task that sets and removes limits.
#[derive(Debug)]
struct Acts {
    nvml: NvmlWorker,
    changed: Arc<Notify>,
    events: mpsc::Sender<LoopEvent>,
    begun: Instant,
    limits: KernelLimits,
    tried: watch::Sender<(u64, LimitOutcomes)>,
}

impl Acts {
    async fn run(mut self, mut goals: watch::Receiver<(u64, LimitGoals)>) {
        let mut number = 0;
        loop {
            if goals.has_changed().unwrap_or(false) {
                let has_changed = {
                    let newest = goals.borrow_and_update();
                    number = newest.0;
                    self.limits.pursue(&newest.1, self.begun.elapsed())
                };
                if has_changed {
                    self.publish();
                }
            }
            if let Some((place, goal)) = self.limits.next(self.begun.elapsed()) {
                self.act(&place, &goal).await;
                continue;
            }
            self.tried.send_modify(|(tried, _)| *tried = number);
            let due = self.limits.due().map(|due| self.begun + due);
            tokio::select! {
                changed = goals.changed() => match changed {
                    Ok(()) => goals.mark_changed(),
                    Err(_) => return,
                },
                () = until(due) => {}
            }
        }
    }

    async fn act(&mut self, place: &LimitedGroup, goal: &LimitGoal) {
        let outcome = self.nvml.pursue_memory_limit(place, goal).await;
        if self.limits.has_acted(place, goal, outcome.clone(), self.begun.elapsed()) {
            self.tell(place, goal, outcome).await;
        }
        let shown = self.limits.outcome(place).cloned();
        self.publish_if(|before| match shown {
            Some(outcome) => before.insert(place.clone(), outcome.clone()) != Some(outcome),
            None => before.remove(place).is_some(),
        });
    }

    async fn tell(&self, place: &LimitedGroup, goal: &LimitGoal, outcome: LimitOutcome) {
        let (uuid, path) = (&place.gpu, &place.group.path);
        match (outcome, goal) {
            (LimitOutcome::Refused(reason), LimitGoal::Hold(_)) => tracing::info!(
                gpu_uuid = uuid,
                "the kernel does not hold the memory limit of control group {path} on GPU {uuid}, so only \
                 the service watches the memory, and tries the limit again each minute: {reason}"
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
                // Sending fails only when the loop has ended, at the end of the service.
                let _ = self.events.send(LoopEvent::Event(text)).await;
            }
            _ => {}
        }
    }

    fn publish(&self) {
        let outcomes: LimitOutcomes =
            self.limits.outcomes().map(|(place, outcome)| (place.clone(), outcome.clone())).collect();
        self.publish_if(|before| std::mem::replace(before, outcomes.clone()) != outcomes);
    }

    /// Changes the outcomes with `change`, and notifies the loop if `change` returns true.
    fn publish_if(&self, change: impl FnOnce(&mut LimitOutcomes) -> bool) {
        if self.tried.send_if_modified(|(_, outcomes)| change(outcomes)) {
            self.changed.notify_one();
        }
    }
}

async fn until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}
