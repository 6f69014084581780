//! Records and publishes the failures of a control daemon, and ends the control daemon.

use std::time::Duration;

use mps_core::serve::{Failure, Judged, Known, tried_again};
use mps_core::view::{ControlDaemonState, PlannedWait};
use mps_core::{ActOutcome, Cause, Goal, Permit, RunUse, WhyFailed, programs_wait};

use crate::message::{Message, Subject};

use super::daemon_run::DaemonRun;
use super::{Failing, Machine, Worker};

impl Machine {
    pub(super) fn failed(&mut self, failure: Failure) -> WhyFailed {
        let trouble = match &failure {
            Failure::Ended { .. } => WhyFailed::Gone,
            Failure::NotUnderstood(_) => WhyFailed::NotUnderstood,
            Failure::NotYet(_) => WhyFailed::NotYet,
            _ => WhyFailed::Ill,
        };
        let waits = match &failure {
            Failure::InUse(_) => Some(PlannedWait::ForOthers),
            Failure::NotYet(_) => Some(PlannedWait::NotReady(self.worker.tools.begun.elapsed())),
            _ => None,
        };
        let is_waiting = waits.is_some() || matches!(failure, Failure::Waiting(_));
        let state = if is_waiting { ControlDaemonState::Waiting } else { ControlDaemonState::Backoff };
        let (reason, before) = (failure.into_text(), self.worker.reporter.reason());
        if trouble == WhyFailed::Gone {
            if let Some((run, _)) = &self.run {
                run.tell_clients_of_the_end(&self.worker.reporter, &self.worker.tools.clients);
            }
            // The end and the new state are published in one step. Otherwise a control daemon that has ended could be shown as
            // ready.
            self.worker.end_run(&mut self.run, Some((state, &reason)));
        }
        // During a stop of the service, a failure is reported at once. At other times `rest` reports the failure, together with
        // the pause that follows it.
        if let Goal::Stop(permit) = self.worker.goal
            && permit.cause() == Cause::Stop
        {
            self.worker.reporter.warning(reason.clone());
        }
        self.failing = Some(Failing { state, reason, waits, before });
        trouble
    }

    /// Finds out which clients use a control daemon that has failed, and adds them to the reason in the status.
    pub(super) async fn judge(&mut self) -> RunUse {
        let judged = match self.serving() {
            Some(mut serving) => serving.judge().await,
            None => return RunUse::Gone,
        };
        match (judged, &mut self.failing) {
            (Judged::Ended(ended), _) => {
                self.failed(ended);
                RunUse::Gone
            }
            (Judged::Idle, _) => RunUse::Idle,
            (Judged::KeptOut(holders), failing) => {
                if let Some(failing) = failing {
                    let held = "no server can start before these programs without MPS have ended";
                    failing.reason = format!("{held}: {holders}; {}", failing.reason);
                }
                RunUse::KeptOut
            }
            (Judged::Clients(left), failing) => {
                if let Some(failing) = failing {
                    failing.state = ControlDaemonState::Waiting;
                    failing.reason = format!("{}; {left}", failing.reason);
                }
                RunUse::Clients
            }
        }
    }

    /// Publishes why the control daemon does not serve. The same reason as before is not reported again.
    pub(super) fn rest(&mut self, pause: Duration) {
        if !programs_wait(pause) {
            self.worker.let_go();
        }
        let reporter = &self.worker.reporter;
        let Some(Failing { state, reason, waits, before }) = self.failing.take() else { return };
        if before != reason {
            let message = if state == ControlDaemonState::Waiting {
                Message::ControlDaemonWaits
            } else {
                Message::ControlDaemonFailed
            };
            let text = format!("{reason}; {}", tried_again(pause));
            reporter.report(message, Subject::default(), text);
        }
        reporter.show(|view| view.enter_failing(state, &reason, waits));
    }

    pub(super) async fn end(&mut self, may_end: Permit) -> ActOutcome {
        if let Goal::Stop(_) = self.worker.goal {
            self.worker.reporter.show(|view| view.enter(ControlDaemonState::Stopping, false, ""));
        }
        let Some(mut serving) = self.serving() else { return ActOutcome::Ended };
        if let Err(lives) = serving.end(may_end).await {
            tracing::debug!("{lives}");
            return ActOutcome::Lives;
        }
        self.worker.end_run(&mut self.run, None);
        ActOutcome::Ended
    }
}

impl Worker {
    /// Records that the control daemon has ended. Reports the clients that a fatal GPU error has hit, and how many log lines
    /// were not passed on. `shown` is the state to publish. Without `shown`, the published state stays.
    pub(super) fn end_run(
        &mut self,
        run: &mut Option<(DaemonRun, Known)>,
        shown: Option<(ControlDaemonState, &str)>,
    ) {
        if let Some((run, mut known)) = run.take() {
            if let Some((server, hit)) = known.take_hit() {
                for (ordinal, clients) in hit {
                    run.tell_hit(server, ordinal, clients, &self.reporter, &self.tools);
                }
            }
            if let Some(count) = self.rate_limit.suppressed() {
                self.reporter.warning(run.too_much_is_written(count));
            }
        }
        self.admission.end();
        let id = self.reporter.id();
        self.tools.clients.all_left(&id);
        if let Err(error) = self.tools.state_file.lock().forget_control_daemon(&id) {
            self.reporter.warning(format!("the state file can't be written: {error}"));
        }
        tracing::debug!(step = "forgotten", "the state file has no control daemon {id} any more");
        self.reporter.has_ended(shown);
    }
}
