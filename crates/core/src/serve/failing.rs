//! The reason why a control daemon does not serve. The supervisor keeps the reason from the failure of the control daemon until
//! the pause after the failure begins.

use alloc::format;
use alloc::string::String;
use core::time::Duration;

use super::heal::tried_again;
use super::{Failure, Judged};
use crate::view::{ControlDaemonState, DaemonView, PlannedWait};
use crate::{CoreTime, RunUse, WhyFailed};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failing {
    pub reason: String,
    state: ControlDaemonState,
    waits: Option<PlannedWait>,
    /// The reason that the view had before the failure. The same reason is not reported again.
    before: String,
}

impl Failing {
    pub fn new(failure: Failure, view: &DaemonView, now: CoreTime) -> Self {
        let waits = match failure {
            Failure::InUse(_) => Some(PlannedWait::ForOthers),
            Failure::NotYet(_) => Some(PlannedWait::NotReady(now)),
            _ => None,
        };
        let is_waiting = waits.is_some() || matches!(failure, Failure::Waiting(_));
        let state = if is_waiting { ControlDaemonState::Waiting } else { ControlDaemonState::Backoff };
        Self { reason: failure.into_text(), state, waits, before: view.reason.clone() }
    }

    /// Adds the programs that use the control daemon or its GPUs to the reason: the clients for which the control daemon keeps
    /// running, or the programs without MPS that prevent the start of its server.
    pub fn add(&mut self, judged: &Judged) {
        match judged {
            Judged::Ended(_) | Judged::Idle => {}
            Judged::KeptOut(holders) => {
                let held = "end these programs, since no MPS server can start while they use the GPU without \
                            MPS";
                self.reason = format!("{held}: {holders}; {}", self.reason);
            }
            Judged::Clients(left) => {
                self.state = ControlDaemonState::Waiting;
                self.reason = format!("{}; {left}", self.reason);
            }
        }
    }

    /// The text to report with the pause that follows, and true if the control daemon is in the state `waiting`. None if the
    /// reason was reported before.
    pub fn text(&self, pause: Duration) -> Option<(bool, String)> {
        let text = || format!("{reason}; {}", tried_again(pause), reason = self.reason);
        (self.before != self.reason).then(|| (self.state == ControlDaemonState::Waiting, text()))
    }

    pub fn end(&self, view: &mut DaemonView) {
        view.pass_through(self.state, false, &self.reason);
        view.has_ended();
    }

    /// Records in the view that the pause after the failure begins.
    pub fn rest(&self, view: &mut DaemonView) {
        view.enter_failing(self.state, &self.reason, self.waits);
    }
}

impl Failure {
    pub fn why(&self) -> WhyFailed {
        match self {
            Self::Ended { .. } => WhyFailed::Gone,
            Self::NotUnderstood(_) => WhyFailed::NotUnderstood,
            Self::NotYet(_) => WhyFailed::NotYet,
            _ => WhyFailed::Ill,
        }
    }
}

impl Judged {
    pub fn run_use(&self) -> RunUse {
        match self {
            Self::Ended(_) => RunUse::Gone,
            Self::Idle => RunUse::Idle,
            Self::KeptOut(_) => RunUse::KeptOut,
            Self::Clients(_) => RunUse::Clients,
        }
    }
}
