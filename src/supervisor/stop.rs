//! Ends a control daemon: at once, or when it has no client any more.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::counted::counted;
use crate::mps::process;
use crate::supervisor::bypass::{Bypass, find, in_words};
use crate::supervisor::view::ControlDaemonState;

use super::{Failure, Worker};

impl Worker {
    /// Takes note of a failure. A control daemon that nobody uses is ended, to be started again; one that has clients is
    /// left to them. Whether programs without MPS keep its server out.
    pub(super) async fn failed(&mut self, failure: Failure, pause: Duration) -> bool {
        let waiting = matches!(failure, Failure::Waiting(_));
        let mut state = if waiting { ControlDaemonState::Waiting } else { ControlDaemonState::Backoff };
        let mut reason = failure.into_text();
        let mut held = false;
        if self.run.is_some() {
            match self.in_use().await {
                Ok(0) => match self.holders().await {
                    holders if holders.is_empty() => _ = self.end_idle().await,
                    // Without a control daemon the next program would slip in, too.
                    holders => {
                        held = true;
                        reason = format!(
                            "its server is kept out, until they end, by programs without MPS: {}; {reason}",
                            in_words(&holders)
                        );
                    }
                },
                Ok(clients) => {
                    state = ControlDaemonState::Waiting;
                    reason = format!("{reason}; left to its {}", counted(clients, "client"));
                }
                Err(error) => {
                    state = ControlDaemonState::Waiting;
                    reason = format!("{reason}; left alone, since its clients are not known: {error}");
                }
            }
        }
        self.reporter.put_off();
        if self.reporter.reason() != reason {
            self.reporter.warning(format!("{reason}; tried again in {:.1} s", pause.as_secs_f64()));
        }
        self.reporter.enter(state, false, &reason);
        held
    }

    /// The processes on its GPUs that are neither servers nor clients.
    async fn holders(&self) -> Vec<Bypass> {
        let Some(run) = &self.run else { return Vec::new() };
        let servers = run.servers.alive();
        let mut holders = Vec::new();
        for uuid in &run.running.gpus {
            let mut there = self.tools.compute_modes.processes(uuid).await.unwrap_or_default();
            there.retain(|process| !process.via_mps);
            holders.extend(find(uuid, &there, &servers, &BTreeSet::new()));
        }
        holders
    }

    /// The number of clients of the control daemon. NVML is asked if the control daemon does not answer, or another one answers
    /// in its place.
    pub(super) async fn in_use(&self) -> Result<usize, String> {
        let Some(run) = &self.run else { return Ok(0) };
        let mut why = "it does not listen in its pipe directory any more".to_owned();
        if run.control.daemon_pid() == Some(run.running.process.pid) {
            match run.control.client_pids().await {
                Ok(clients) => return Ok(clients.values().flatten().count()),
                Err(error) => why = error.to_string(),
            }
        }
        let mut clients = BTreeSet::new();
        for uuid in &run.running.gpus {
            let asked = self.tools.compute_modes.mps_clients(uuid).await;
            clients.extend(asked.map_err(|nvml| format!("{why}; {nvml}"))?);
        }
        Ok(clients.len())
    }

    /// Ends a control daemon that nobody uses, without harm to a client that comes this moment: the control daemon then
    /// stays until that client is done. Whether it has ended.
    pub(super) async fn end_idle(&mut self) -> bool {
        self.continue_if_stopped();
        let Some(run) = &mut self.run else { return true };
        if process::stop_idle(&mut run.process, &run.control).await {
            let why = if self.retiring { ": it had no client" } else { ", to start anew" };
            let (id, pid) = (self.reporter.id(), run.running.process.pid);
            self.reporter.event(format!("control daemon {id} (PID {pid}) ended{why}"));
            self.end_run();
            return true;
        }
        // It hangs, or a client has come after all.
        if self.in_use().await == Ok(0) {
            self.stop_control_daemon().await;
        }
        self.run.is_none()
    }

    /// Ends the control daemon if one runs, with its clients.
    pub(super) async fn stop_control_daemon(&mut self) {
        self.continue_if_stopped();
        let Some(run) = &mut self.run else { return };
        let (id, pid) = (self.reporter.id(), run.running.process.pid);
        tracing::debug!(step = "quit", "control daemon {pid} is asked to end");
        match process::stop(&mut run.process, &run.control, self.order.quit_timeout).await {
            Ok(how) => {
                tracing::debug!(step = "ended", "control daemon {pid} has ended and is still written down");
                self.reporter.event(format!("control daemon {id} (PID {pid}) ended by {how}"));
                self.end_run();
            }
            Err(error) => {
                self.reporter.warning(format!("control daemon {id} (PID {pid}) can't be stopped: {error}"));
            }
        }
    }

    /// Ends everything: the control daemon first, then the compute modes are put back.
    pub(super) async fn end(&mut self) {
        self.reporter.enter(ControlDaemonState::Stopping, false, "");
        if self.run.is_none() {
            // A control daemon of ours is ours to end, even if it was not taken over yet.
            if let Err(failure) = self.take_over().await {
                self.reporter.warning(failure.into_text());
            }
        }
        let mut gpus: BTreeSet<String> = self.order.plan.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        gpus.extend(self.run.iter().flat_map(|run| run.running.gpus.clone()));
        // The order may have given up GPUs that no later control daemon came up without.
        gpus.append(&mut self.former_gpus);
        self.stop_control_daemon().await;
        if self.run.is_none() {
            for uuid in gpus {
                self.restore_compute_mode(&uuid).await;
            }
        }
    }

    pub(super) async fn restore_compute_mode(&mut self, uuid: &str) {
        if let Err(error) = self.tools.compute_modes.restore(uuid).await {
            self.reporter.warning(format!("compute mode of {uuid} is not put back: {error}"));
        }
    }
}
