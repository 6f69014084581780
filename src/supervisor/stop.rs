//! Ends a control daemon: at once, or when it has no client any more.

use std::collections::BTreeSet;
use std::time::Duration;

use mps_core::{ActOutcome, Cause, Goal, Permit, RunUse, WhyFailed};

use crate::message::{Message, Subject};
use crate::mps::process::{self, Stopped};
use crate::supervisor::bypass::{Bypass, describe, find};
use common::counted::counted;
use common::host::proc;
use common::published::control_daemon::ControlDaemonState;

use super::{Failing, Failure, Machine, Serving, tried_again};

impl Machine {
    /// Takes note of a failure, and says what it means for the next step.
    pub(super) fn failed(&mut self, failure: Failure) -> WhyFailed {
        let trouble = match &failure {
            Failure::Ended { .. } => WhyFailed::Gone,
            Failure::NotUnderstood(_) => WhyFailed::NotUnderstood,
            _ => WhyFailed::Ill,
        };
        let waits = matches!(failure, Failure::Waiting(_));
        let state = if waits { ControlDaemonState::Waiting } else { ControlDaemonState::Backoff };
        let reason = failure.into_text();
        if trouble == WhyFailed::Gone {
            self.end_run();
        }
        // Otherwise it is told with the pause that follows.
        if let Goal::Stop(permit) = self.worker.goal
            && permit.cause() == Cause::Stop
        {
            self.worker.reporter.warning(reason.clone());
        }
        self.failing = Some(Failing { state, reason });
        trouble
    }

    /// Finds out who uses a control daemon that has failed, and adds that to the reason that is shown.
    pub(super) async fn judge(&mut self) -> RunUse {
        if let Some(ended) = self.ended_meanwhile().await {
            self.failed(ended);
            return RunUse::Gone;
        }
        let Some(serving) = self.serving() else { return RunUse::Gone };
        let (clients, left) = match serving.in_use().await {
            Ok(0) => {
                let holders = serving.holders().await;
                if holders.is_empty() {
                    return RunUse::Idle;
                }
                if let Some(failing) = &mut self.failing {
                    let holders = describe(&holders);
                    let held = "its server is kept out, until they end, by programs without MPS";
                    failing.reason = format!("{held}: {holders}; {}", failing.reason);
                }
                return RunUse::KeptOut;
            }
            Ok(clients) => (RunUse::Clients, format!("left to its {}", counted(clients, "client"))),
            Err(error) => (RunUse::Clients, format!("left alone, since its clients are not known: {error}")),
        };
        if let Some(failing) = &mut self.failing {
            failing.state = ControlDaemonState::Waiting;
            failing.reason = format!("{}; {left}", failing.reason);
        }
        clients
    }

    /// Shows why it does not serve. The same reason again is no news.
    pub(super) fn rest(&mut self, pause: Duration) {
        let reporter = &self.worker.reporter;
        let Some(Failing { state, reason }) = self.failing.take() else { return };
        reporter.put_off();
        if reporter.reason() != reason {
            let message = if state == ControlDaemonState::Waiting {
                Message::ControlDaemonWaits
            } else {
                Message::ControlDaemonFailed
            };
            let text = format!("{reason}; {}", tried_again(pause));
            reporter.report(message, Subject::default(), text);
        }
        reporter.enter(state, false, &reason);
    }

    /// The end of the control daemon, if it has ended while it was asked something: it had been asked to end before, or was
    /// killed.
    async fn ended_meanwhile(&mut self) -> Option<Failure> {
        let mut serving = self.serving()?;
        let status = serving.run.process.exited_by_now().await?;
        Some(serving.ended(status).await)
    }

    /// Ends the control daemon.
    pub(super) async fn end(&mut self, may_end: Permit) -> ActOutcome {
        if let Goal::Stop(_) = self.worker.goal {
            self.worker.reporter.enter(ControlDaemonState::Stopping, false, "");
        }
        let Some(mut serving) = self.serving() else { return ActOutcome::Ended };
        if !serving.end(may_end).await {
            return ActOutcome::Lives;
        }
        self.end_run();
        ActOutcome::Ended
    }

    /// Takes note that no control daemon of ours runs. If one ran, what was still to be said of it is said.
    pub(super) fn end_run(&mut self) {
        if let Some(mut run) = self.run.take() {
            run.tell_fault(&self.worker.reporter, &self.worker.tools.faults);
            if let Some(count) = self.worker.rate_limit.suppressed() {
                self.worker.reporter.warning(run.too_much_is_written(count));
            }
        }
        self.worker.admission.end();
        self.worker.control.send_replace(None);
        let id = self.worker.reporter.id();
        if let Err(error) = self.worker.tools.state_file.lock().forget_control_daemon(&id) {
            self.worker.reporter.warning(format!("the state file can't be written: {error}"));
        }
        tracing::debug!(step = "forgotten", "no control daemon is written down for {id}");
        self.worker.reporter.update(|status| {
            status.view.pid = None;
            status.view.cpus = None;
            status.view.servers.clear();
            status.waiting.clear();
            status.serving = false;
            status.ends_when_idle = false;
            for gpu in status.gpus.values_mut() {
                gpu.thread_percentage = None;
                gpu.memory_limit_mib = None;
            }
        });
    }
}

impl Serving<'_> {
    /// The processes on its GPUs that are neither servers nor clients.
    async fn holders(&self) -> Vec<Bypass> {
        let run = &*self.run;
        let servers = run.servers.alive();
        let mut holders = Vec::new();
        for (uuid, there) in self.worker.tools.compute_modes.all_processes(&run.running.gpus).await {
            let mut there = there.unwrap_or_default();
            there.retain(|process| !process.via_mps);
            holders.extend(find(&uuid, &there, &servers, &BTreeSet::new()));
        }
        holders
    }

    /// The number of clients of the control daemon, or why it is not known. If the control daemon does not answer, or
    /// another one answers in its place, or it has lost its clients for a fault and may not list the others, its processes
    /// are looked at: clients work in its servers, which are its children. Then NVML is asked.
    pub(super) async fn in_use(&self) -> Result<usize, String> {
        let why = match self.count_its_clients().await {
            Ok(0) if self.run.blockers.fault().is_some() => {
                "it lists no client, and its list is not relied on after a fatal GPU error".to_owned()
            }
            Ok(clients) => return Ok(clients),
            Err(why) => why,
        };
        if proc::has_children(self.run.running.process.pid).is_ok_and(|has_servers| !has_servers) {
            return Ok(0);
        }
        let mut clients = BTreeSet::new();
        let mut unknown = None;
        for there in self.worker.tools.compute_modes.mps_clients(&self.run.running.gpus).await.into_values() {
            match there {
                Ok(there) => clients.extend(there),
                Err(error) => unknown = Some(error),
            }
        }
        match unknown {
            Some(error) if clients.is_empty() => Err(format!("{why}; {error}")),
            _ => Ok(clients.len()),
        }
    }

    /// The number of clients that the control daemon lists.
    async fn count_its_clients(&self) -> Result<usize, String> {
        let run = &*self.run;
        if run.control.daemon_pid() != Some(run.running.process.pid) {
            return Err("it does not listen in its pipe directory any more".to_owned());
        }
        let clients = run.control.client_pids(&run.servers.alive()).await;
        clients.map(|clients| clients.values().flatten().count()).map_err(|error| error.to_string())
    }

    /// Ends the control daemon, and says whether it has ended. Its clients end with it, unless it is unused.
    pub(super) async fn end(&mut self, may_end: Permit) -> bool {
        if may_end.cause() == Cause::Unused { self.end_idle(may_end).await } else { self.stop(may_end).await }
    }

    /// Ends a control daemon that nobody uses, without harm to a client that comes this moment: the control daemon then
    /// stays until that client is done. Whether it has ended.
    async fn end_idle(&mut self, may_end: Permit) -> bool {
        self.continue_if_stopped();
        let run = &mut *self.run;
        if process::stop_idle(&mut run.process, &run.control, may_end).await {
            let why = if self.worker.is_retiring() { ": it had no client" } else { ", to be restarted" };
            let (id, pid) = (self.worker.reporter.id(), run.running.process.pid);
            self.worker.reporter.event(format!("control daemon {id} (PID {pid}) ended{why}"));
            return true;
        }
        // It hangs, or a client has come after all.
        match Permit::unused(self.in_use().await.ok()) {
            Some(may_end) => self.end_by_signal(may_end).await,
            None => false,
        }
    }

    /// Ends the control daemon with its clients, which the caller has named. Whether it has ended.
    async fn stop(&mut self, may_end: Permit) -> bool {
        self.continue_if_stopped();
        let run = &mut *self.run;
        tracing::debug!(step = "quit", "control daemon {} is asked to end", run.running.process.pid);
        let quit_timeout = self.worker.order.supervision.quit_timeout;
        if process::stop(&mut run.process, &run.control, quit_timeout, may_end).await {
            self.say_how_it_ended(Stopped::Quit);
            return true;
        }
        self.end_by_signal(may_end).await
    }

    /// Ends the control daemon by signals, and says before whom that hits. Whether it has ended.
    async fn end_by_signal(&mut self, may_end: Permit) -> bool {
        let (id, pid) = (self.worker.reporter.id(), self.run.running.process.pid);
        let reporter = &self.worker.reporter;
        reporter
            .warning(format!("control daemon {id} (PID {pid}) does not quit and is sent SIGTERM: {may_end}"));
        match process::end_by_signal(&mut self.run.process, may_end).await {
            Ok(how) => {
                self.say_how_it_ended(how);
                true
            }
            Err(error) => {
                reporter.warning(format!("control daemon {id} (PID {pid}) can't be stopped: {error}"));
                false
            }
        }
    }

    fn say_how_it_ended(&self, how: Stopped) {
        let (id, pid) = (self.worker.reporter.id(), self.run.running.process.pid);
        tracing::debug!(step = "ended", "control daemon {pid} has ended and is still written down");
        self.worker.reporter.event(format!("control daemon {id} (PID {pid}) ended by {how}"));
    }
}
