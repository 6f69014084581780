//! Chooses the next act for one control daemon, from its first order to its end.

use alloc::vec::Vec;
use core::mem;
use core::time::Duration;

use crate::{ActOutcome, Cause, CoreTime, DaemonAct, GpuUuid, HeldGpus, Order, Permit, RunUse, WhyFailed};

/// The pause after the second failure in a row. There is no pause after the first failure. Each further failure doubles the
/// pause, up to [`LAST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// The longest pause after a failure. A container that starts during the pause waits at most 25 s for its slice, so the pause
/// must be shorter.
const LAST_PAUSE: Duration = Duration::from_secs(20);

/// The longest pause while programs without MPS prevent the start of a server. The pause is short, since these programs may end
/// at any moment.
const HELD_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause while the control daemon waits for something outside of it, such as the fabric manager.
const SOON: Duration = Duration::from_secs(3);

/// Returns whether new programs should wait for the next control daemon during this pause. New programs do not wait during a
/// long pause, which follows several failures in a row, since the control daemon might never start.
pub fn programs_wait(pause: Duration) -> bool {
    pause < HELD_PAUSE
}

/// After a control daemon or a server has worked for this time, its next failure counts as the first failure in a row.
pub const HEALTHY_AGAIN: Duration = Duration::from_secs(60);

pub fn next_pause(pause: Duration) -> Duration {
    (pause * 2).clamp(FIRST_PAUSE, LAST_PAUSE)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    Serve,
    /// The control daemon ends once its last client has ended.
    Retire,
    /// The control daemon ends now, together with its clients.
    Stop(Permit),
    /// The control daemon and its clients continue, and the next process of the service takes over.
    Leave,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    /// No act is under way. The goal decides the next act.
    Open,
    /// No act is under way, and this act comes next.
    Then(DaemonAct),
    /// This act is under way. `since` is the moment at which the act began.
    Busy { act: DaemonAct, since: CoreTime, interrupted: bool },
    /// The pause after a failure. The pause ends at `until`, or earlier if the order, the goal, or the GPUs of other control
    /// daemons change.
    Resting { until: CoreTime },
}

/// The order at the beginning of the last act. The supervisor works with this order until the act has ended, even if a newer
/// order comes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Told {
    revision: u64,
    held: HeldGpus,
    /// The GPUs that the control daemon has during the act. A newer order may name other GPUs.
    gpus: Vec<GpuUuid>,
    sets_modes: bool,
}

impl Told {
    fn has(&self, gpu: &str) -> bool {
        self.gpus.iter().any(|one| one == gpu)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    Act(DaemonAct),
    Interrupt,
    /// The control daemon waits for GPUs that other control daemons have, and needs no supervisor meanwhile. With a supervisor,
    /// the service would publish that the control daemon starts, for as long as the clients on these GPUs stay.
    Wait,
    Release,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lifecycle<P> {
    order: Order<P>,
    goal: Goal,
    revision: u64,
    told: Option<Told>,
    /// The GPUs of the control daemon in the state file. None if the state file does not name the control daemon.
    written: Option<Vec<GpuUuid>>,
    /// True if the service watches the process, and therefore notices its end.
    watched: bool,
    /// True if a control daemon with this id has run before. A first start waits until all GPUs of the order are free.
    /// Otherwise the control daemon would need a restart to get the missing GPUs, and its clients could prevent the restart
    /// forever. A later start does not wait, so that the GPUs that were served before are served again at once.
    has_run: bool,
    /// True if the service has stopped trying to end the control daemon, since every attempt has failed.
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

    /// The GPUs that the control daemon runs with, and the GPUs of its order that no other control daemon has. A GPU may appear
    /// twice.
    pub(crate) fn gpus<'g>(&'g self, held: &'g HeldGpus) -> impl Iterator<Item = &'g GpuUuid> {
        let running = self.written.iter().flatten();
        // The GPUs of the running control daemon count even if the state file still names one of them for a control daemon that
        // has ended.
        running.chain(self.order.gpus.iter().filter(|gpu| !held.contains_key(*gpu)))
    }

    /// Returns whether the control daemon has not started: no act has begun, and no process runs.
    pub(crate) fn is_pending(&self) -> bool {
        self.told.is_none() && self.written.is_none()
    }

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

    pub(crate) fn has(&self, gpu: &str) -> bool {
        let starts = matches!(self.phase, Phase::Busy { act: DaemonAct::Start, .. });
        self.written.iter().flatten().any(|one| one == gpu)
            || starts && self.told.iter().any(|told| told.has(gpu))
    }

    /// Returns whether the service's compute mode must stay on this GPU. Either the control daemon has the GPU, or the act
    /// under way may still set the mode, perhaps by an older order.
    pub(crate) fn keeps_mode(&self, gpu: &str) -> bool {
        let sets = matches!(self.phase, Phase::Busy { act: DaemonAct::Start | DaemonAct::Serve, .. });
        let still_sets = || self.told.as_ref().is_some_and(|told| told.sets_modes && told.has(gpu));
        (self.order.sets_modes && self.has(gpu)) || (sets && still_sets())
    }

    fn is_stale(&self) -> bool {
        self.told.as_ref().is_none_or(|told| told.revision != self.revision)
    }

    /// The moment of the next step if no event comes before. None if the next step needs an event.
    pub(crate) fn due(&self) -> Option<CoreTime> {
        match self.phase {
            Phase::Resting { until } => Some(until),
            _ => None,
        }
    }

    /// The next step. `held` has the GPUs that other control daemons have. While the compute mode of one of the GPUs is being
    /// changed (`modes_change`), no act begins that may set a compute mode. Otherwise each change could save the mode of the
    /// other change as the mode to restore.
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
                // The pause is over, so [`Self::due`] must not return its end again. Otherwise the caller would call in a tight
                // loop while the control daemon waits for GPUs.
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

    /// The step that the goal requires. None if the control daemon has to wait for GPUs that other control daemons have.
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

    pub(crate) fn done(
        &mut self,
        written: Option<Vec<GpuUuid>>,
        watched: bool,
        outcome: ActOutcome,
        now: CoreTime,
    ) {
        let Phase::Busy { act, since, .. } = self.phase else { return };
        let is_gone = (act, outcome, watched) == (DaemonAct::TakeOver, ActOutcome::Done, false);
        // `written` may still name a control daemon that has ended, since the state file can't be written while the disk is
        // full.
        (self.written, self.watched, self.phase) = (written.filter(|_| !is_gone), watched, Phase::Open);
        self.has_run |= watched;
        let is_stale = self.is_stale();
        match (self.goal, outcome) {
            // The order or the goal has changed during the act. The outcome of the act no longer matters, and the next act
            // begins at once.
            _ if is_stale => {}
            (Goal::Leave, _) => self.watched = false,
            // The service could not end the control daemon. The control daemon stays in the state file, where the next process
            // of the service finds it.
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

    /// Begins a pause of at most `longest`, and makes the next pause longer.
    fn rest(&mut self, longest: Duration) {
        self.phase = Phase::Then(DaemonAct::Rest(self.pause.min(longest)));
        self.pause = next_pause(self.pause);
    }
}
