//! Records and publishes the failures of a control daemon, and ends the control daemon.

use std::time::Duration;

use mps_core::serve::{Failing, Failure, Judged, Known};
use mps_core::{ActOutcome, Cause, Goal, Permit, RunUse, WhyFailed, programs_wait};

use crate::message::{Message, Subject};

use super::daemon_run::DaemonRun;
use super::{Machine, Worker};

impl Machine {
    pub(super) fn failed(&mut self, failure: Failure) -> WhyFailed {
        let why = failure.why();
        let now = self.worker.tools.begun.elapsed();
        let failing = Failing::new(failure, &self.worker.reporter.status().shown, now);
        if why == WhyFailed::Gone {
            if let Some((run, _)) = &self.run {
                run.tell_clients_of_the_end(&self.worker.reporter, &self.worker.tools.clients);
            }
            // The end and the new state are published in one step. Otherwise a control daemon that has ended could be shown as
            // ready.
            self.worker.end_run(&mut self.run, Some(&failing));
        }
        // During a stop of the service, a failure is reported at once. At other times `rest` reports it, together with the
        // pause before the next start.
        if let Goal::Stop(permit) = self.worker.goal
            && permit.cause() == Cause::Stop
        {
            self.worker.reporter.warning(failing.reason.clone());
        }
        self.failing = Some(failing);
        why
    }

    /// Finds out which clients use a control daemon that has failed, and adds these clients to the reason in the status.
    pub(super) async fn judge(&mut self) -> RunUse {
        let judged = match self.serving() {
            Some(mut serving) => serving.judge().await,
            None => return RunUse::Gone,
        };
        let run_use = judged.run_use();
        if let Judged::Ended(ended) = judged {
            self.failed(ended);
        } else if let Some(failing) = &mut self.failing {
            failing.add(&judged);
        }
        run_use
    }

    /// Publishes why the control daemon does not serve. The same reason as before is not reported again.
    pub(super) fn rest(&mut self, pause: Duration) {
        if !programs_wait(pause) {
            self.worker.let_go();
        }
        let reporter = &self.worker.reporter;
        let Some(failing) = self.failing.take() else { return };
        if let Some((is_waiting, text)) = failing.text(pause) {
            let message = if is_waiting { Message::ControlDaemonWaits } else { Message::ControlDaemonFailed };
            reporter.report(message, Subject::default(), text);
        }
        reporter.show(|view| failing.rest(view));
    }

    pub(super) async fn end(&mut self, may_end: Permit) -> ActOutcome {
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
    /// Records that the control daemon has ended. Reports the clients that a fatal GPU error has hit, and the number of log
    /// lines that the journal lacks. Publishes the state after the failure `failing`. Without a failure, the published state
    /// does not change.
    pub(super) fn end_run(&mut self, run: &mut Option<(DaemonRun, Known)>, failing: Option<&Failing>) {
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
        self.reporter.has_ended(failing);
    }
}
