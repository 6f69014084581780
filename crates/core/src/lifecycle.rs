//! Chooses the next act for one control daemon, from its order to its end.

use alloc::vec::Vec;
use core::mem;
use core::time::Duration;

use crate::{ActOutcome, Cause, CoreTime, DaemonAct, GpuUuid, HeldGpus, Order, Permit, RunUse, WhyFailed};

/// The pause before a control daemon is started again after its second failure in a row. After the first failure there is no
/// pause. The pause doubles up to [`LAST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// The longest pause after a failure. A container that is restarted during the pause waits at most 25 s for its slice, before the
/// container engine gives up.
const LAST_PAUSE: Duration = Duration::from_secs(20);

/// The longest pause while programs without MPS prevent the start of a server. Programs without MPS may end at any moment.
const HELD_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause while the control daemon waits for something else to be ready, such as the fabric manager.
const SOON: Duration = Duration::from_secs(3);

/// Returns true if programs should wait for the next control daemon during this pause after a failure. After several failures
/// in a row it is unknown when a control daemon works again.
pub fn programs_wait(pause: Duration) -> bool {
    pause < HELD_PAUSE
}

/// After a control daemon has worked for this time, the pause after its next failure is short again.
pub const HEALTHY_AGAIN: Duration = Duration::from_secs(60);

/// The pause after the next failure, if the pause after the last failure was `pause`.
pub fn next_pause(pause: Duration) -> Duration {
    (pause * 2).clamp(FIRST_PAUSE, LAST_PAUSE)
}

/// The aim of a control daemon's supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// The control daemon serves its order.
    Serve,
    /// The control daemon ends once its last client has ended.
    Retire,
    /// The control daemon ends now, together with its clients.
    Stop(Permit),
    /// The control daemon stays, with its clients: the next service takes it over.
    Leave,
}

/// The work on a control daemon at this moment.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    /// No act is under way. The next act follows from the goal.
    Open,
    /// No act is under way. This act is the next one.
    Then(DaemonAct),
    /// This act has been under way since this moment.
    Busy { act: DaemonAct, since: CoreTime, interrupted: bool },
    /// The pause after a failure. The pause ends at `until`, or when the order or the goal changes.
    Resting { until: CoreTime },
}

/// The order that the last act was begun with. The service works with the order of an act until the act has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Told {
    revision: u64,
    held: HeldGpus,
    /// The GPUs that the order gives to the control daemon. A later order may name other GPUs.
    gpus: Vec<GpuUuid>,
    sets_modes: bool,
}

impl Told {
    fn has(&self, gpu: &str) -> bool {
        self.gpus.iter().any(|one| one == gpu)
    }
}

/// The next step of a supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    Act(DaemonAct),
    Interrupt,
    /// The control daemon waits for GPUs that others have, and needs no supervisor meanwhile: a supervisor would be shown as
    /// starting for as long as the clients on these GPUs stay.
    Wait,
    Release,
}

/// One control daemon: its order, and the facts that the core knows about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lifecycle<P> {
    order: Order<P>,
    goal: Goal,
    /// The number of changes of order and goal so far.
    revision: u64,
    /// The order that the last act was begun with. None if no act was begun.
    told: Option<Told>,
    /// The GPUs that the state file names for the control daemon. None if the state file does not have the control daemon.
    written: Option<Vec<GpuUuid>>,
    /// True if the service watches the process, and so learns of its end.
    watched: bool,
    /// True if a control daemon has run under this id before. The next control daemon with this id waits until all of its GPUs
    /// are free: it could get a missing GPU only by a restart, and clients on its other GPUs could prevent the restart for ever.
    has_run: bool,
    /// True if every attempt of the service to end the control daemon has failed.
    given_up: bool,
    phase: Phase,
    pause: Duration,
}

impl<P: Clone + PartialEq> Lifecycle<P> {
    pub(crate) fn new(order: Order<P>, goal: Goal, written: Option<Vec<GpuUuid>>) -> Self {
        Self {
            order,
            goal,
            revision: 0,
            told: None,
            has_run: written.is_some(),
            written,
            watched: false,
            given_up: false,
            phase: Phase::Open,
            pause: Duration::ZERO,
        }
    }

    pub(crate) fn order(&self) -> &Order<P> {
        &self.order
    }

    pub(crate) fn goal(&self) -> Goal {
        self.goal
    }

    pub(crate) fn written(&self) -> Option<&Vec<GpuUuid>> {
        self.written.as_ref()
    }

    /// The GPUs with which the control daemon runs, and the GPUs that it should get and that no other control daemon has. A GPU may
    /// appear twice.
    pub(crate) fn gpus<'g>(&'g self, held: &'g HeldGpus) -> impl Iterator<Item = &'g GpuUuid> {
        let running = self.written.iter().flatten();
        // The GPUs of the running control daemon are its own, even if the state file still lists an ended control daemon with
        // one of them.
        running.chain(self.order.gpus.iter().filter(|gpu| !held.contains_key(*gpu)))
    }

    /// Returns whether the order waits: no act was begun for the control daemon, and no process runs.
    pub(crate) fn is_pending(&self) -> bool {
        self.told.is_none() && self.written.is_none()
    }

    /// Sets the goal, and a new order if there is one. Setting the same goal and order again changes nothing.
    pub(crate) fn pursue(&mut self, goal: Goal, order: Option<Order<P>>) {
        let order = order.filter(|order| *order != self.order);
        if self.goal == goal && order.is_none() {
            return;
        }
        self.goal = goal;
        self.order = order.unwrap_or_else(|| self.order.clone());
        self.revision += 1;
        self.given_up = false;
        self.pause = Duration::ZERO;
    }

    /// Returns whether the control daemon has this GPU, or is being started with it.
    pub(crate) fn has(&self, gpu: &str) -> bool {
        let starts = matches!(self.phase, Phase::Busy { act: DaemonAct::Start, .. });
        self.written.iter().flatten().any(|one| one == gpu)
            || starts && self.told.iter().any(|told| told.has(gpu))
    }

    /// Returns whether the compute mode of this GPU must stay for this control daemon. The mode must stay if the present
    /// order names the GPU, or if the order of the act under way does.
    pub(crate) fn keeps_mode(&self, gpu: &str) -> bool {
        let sets = matches!(self.phase, Phase::Busy { act: DaemonAct::Start | DaemonAct::Serve, .. });
        let still_sets = || self.told.as_ref().is_some_and(|told| told.sets_modes && told.has(gpu));
        (self.order.sets_modes && self.has(gpu)) || (sets && still_sets())
    }

    /// Returns whether the order or the goal has changed since the last act began.
    fn is_stale(&self) -> bool {
        self.told.as_ref().is_none_or(|told| told.revision != self.revision)
    }

    /// The moment at which the next step is due though no event comes. None if there is no such moment.
    pub(crate) fn due(&self) -> Option<CoreTime> {
        match self.phase {
            Phase::Resting { until } => Some(until),
            _ => None,
        }
    }

    /// The next step, given the GPUs that other control daemons have. While a compute mode is being changed (`modes_change`),
    /// no act that may set a compute mode is returned: each of the two changes would record the other's mode as the former
    /// mode.
    pub(crate) fn next(&mut self, held: &HeldGpus, modes_change: bool, now: CoreTime) -> Option<Next> {
        let has_other_order = self.is_stale();
        let has_other_gpus = self.told.as_ref().is_none_or(|told| told.held != *held);
        let act = match &mut self.phase {
            Phase::Busy { act, interrupted, .. } => {
                let is_stale = match act {
                    DaemonAct::TakeOver | DaemonAct::Start => has_other_order,
                    DaemonAct::Serve => has_other_order || has_other_gpus,
                    _ => false,
                };
                let interrupts = is_stale && !mem::replace(interrupted, *interrupted || is_stale);
                return interrupts.then_some(Next::Interrupt);
            }
            Phase::Resting { until } if now < *until && !has_other_order && !has_other_gpus => return None,
            Phase::Then(act) => *act,
            Phase::Open | Phase::Resting { .. } => {
                // The moment to act has come, so [`Self::due`] must not return it again. The control daemon may still have to
                // wait for GPUs.
                self.phase = Phase::Open;
                match self.choose(held) {
                    None => return self.told.take().map(|_| Next::Wait),
                    Some(Next::Act(DaemonAct::Start | DaemonAct::Serve)) if modes_change => return None,
                    Some(Next::Act(act)) => act,
                    other => return other,
                }
            }
        };
        if let DaemonAct::Rest(pause) = act {
            self.phase = Phase::Resting { until: now + pause };
        } else {
            self.phase = Phase::Busy { act, since: now, interrupted: false };
            let gpus = self.gpus(held).cloned().collect();
            self.told = Some(Told {
                revision: self.revision,
                held: held.clone(),
                gpus,
                sets_modes: self.order.sets_modes,
            });
        }
        Some(Next::Act(act))
    }

    /// The step that follows from the goal. None if the control daemon waits for GPUs that other control daemons have.
    fn choose(&self, held: &HeldGpus) -> Option<Next> {
        let is_left = self.written.is_some() && !self.given_up;
        Some(Next::Act(match self.goal {
            Goal::Stop(permit) if self.watched => DaemonAct::End(permit),
            Goal::Leave if self.watched => DaemonAct::Leave,
            Goal::Serve | Goal::Retire if self.watched => DaemonAct::Serve,
            Goal::Serve | Goal::Retire | Goal::Stop(_) if is_left => DaemonAct::TakeOver,
            Goal::Serve if self.has_run || held.is_empty() => DaemonAct::Start,
            Goal::Serve => return None,
            Goal::Retire | Goal::Stop(_) | Goal::Leave => return Some(Next::Release),
        }))
    }

    /// Records the outcome of the act that was under way.
    pub(crate) fn done(
        &mut self,
        written: Option<Vec<GpuUuid>>,
        watched: bool,
        outcome: ActOutcome,
        now: CoreTime,
    ) {
        let Phase::Busy { act, since, .. } = self.phase else { return };
        let is_gone = (act, outcome, watched) == (DaemonAct::TakeOver, ActOutcome::Done, false);
        // `written` may still name the control daemon, since the state file can't be written while the disk is full.
        (self.written, self.watched, self.phase) = (written.filter(|_| !is_gone), watched, Phase::Open);
        self.has_run |= watched;
        let is_stale = self.is_stale();
        match (self.goal, outcome) {
            // The order has changed during the act, so the outcome does not matter and the new order is tried at once.
            _ if is_stale => {}
            (Goal::Leave, _) => self.watched = false,
            // The control daemon could not be ended. The control daemon stays in the state file, where the next service finds
            // it.
            (Goal::Stop(permit), ActOutcome::Lives) if permit.cause() == Cause::Stop => {
                (self.watched, self.given_up) = (false, true);
            }
            (Goal::Stop(permit), ActOutcome::Failed(_)) if permit.cause() == Cause::Stop => {
                self.given_up = true;
            }
            (Goal::Stop(_), ActOutcome::Failed(_)) if watched => {}
            (_, ActOutcome::Failed(trouble)) => {
                if act == DaemonAct::Serve && now.saturating_sub(since) >= HEALTHY_AGAIN {
                    self.pause = Duration::ZERO;
                }
                match trouble {
                    WhyFailed::Ill if watched => self.phase = Phase::Then(DaemonAct::Judge),
                    WhyFailed::NotYet => self.rest(SOON),
                    _ => self.rest(LAST_PAUSE),
                }
            }
            (_, ActOutcome::Used(RunUse::Idle)) => {
                self.phase = Phase::Then(DaemonAct::End(Permit::new(Cause::Unused)));
            }
            (_, ActOutcome::Used(RunUse::KeptOut)) => self.rest(HELD_PAUSE),
            (_, ActOutcome::Used(RunUse::Gone | RunUse::Clients) | ActOutcome::Lives) => {
                self.rest(LAST_PAUSE);
            }
            (Goal::Serve | Goal::Retire, ActOutcome::Ended) if act != DaemonAct::Serve => {
                self.rest(LAST_PAUSE);
            }
            (_, ActOutcome::Done | ActOutcome::Ended | ActOutcome::Again | ActOutcome::Interrupted) => {}
        }
    }

    /// Begins a pause, at most `longest`. Each pause is longer than the one before.
    fn rest(&mut self, longest: Duration) {
        self.phase = Phase::Then(DaemonAct::Rest(self.pause.min(longest)));
        self.pause = next_pause(self.pause);
    }
}
