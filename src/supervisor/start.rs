//! Brings a control daemon up: takes one of ours over, or replaces somebody else's, or starts a new one.

use common::host::program;
use std::path::Path;
use std::sync::Arc;

use mps_core::Permit;
use mps_core::serve::Failure;

use crate::mps::control::{Control, ControlError};
use crate::mps::launch::{Launch, PausedProcess};
use crate::mps::log::Follower;
use crate::mps::process::{self, Process};
use common::counted::counted;
use common::directories::{self, LogFile, immutable};
use common::host::{driver, systemd};
use common::published::control_daemon::ControlDaemonState;
use common::state_file::Running;

use super::run::Run;
use super::{Machine, PROGRAM, Worker};

impl Machine {
    /// Takes over the control daemon that the state file has as ours, if it still lives.
    pub(super) async fn take_over(&mut self) -> Result<(), Failure> {
        let id = self.worker.reporter.id();
        let Some(running) = self.worker.tools.state_file.lock().control_daemon(&id).cloned() else {
            return Ok(());
        };
        let process = match Process::adopt(running.process) {
            Ok(Some(process)) => process,
            Ok(None) => {
                // It ended while no service ran.
                self.end_run();
                return Ok(());
            }
            Err(error) => {
                let pid = running.process.pid;
                return Err(Failure::Failed(format!(
                    "control daemon (PID {pid}) can't be taken over: {error}"
                )));
            }
        };
        // It may have clients, and they must be listed even if the rest fails.
        let control = Arc::new(self.worker.tools.front_ends.control_in(running.control_directory()));
        self.worker.control.send_replace(Some(Arc::clone(&control)));
        let pid = running.process.pid;
        let log_path = running.log_directory.join("control.log");
        // Its standard output, since the file may have been removed; from the beginning, for what it says of servers.
        let log = process.output_file().and_then(|file| {
            let length = file.metadata()?.len();
            Ok((Follower::new(file, &log_path, 0, &self.worker.tools.changes), length))
        });
        let (log, length) = log.map_err(|error| Failure::Failed(format!("log of PID {pid}: {error}")))?;
        // A log that was begun again is shorter than the offset. Its new lines must not count as known.
        let quiet_until = running.log_offset.min(length);
        self.worker.has_run = true;
        self.worker.reporter.update(|status| status.view.pid = Some(pid));
        let mut serving = self.hold(Run::new(process, running, Arc::clone(&control), log, quiet_until));
        serving.continue_if_stopped();
        let answers = match serving.listens().await {
            Ok(()) => control.servers().await.map(drop).map_err(Failure::from),
            Err(failure) => Err(failure),
        };
        match answers {
            Ok(()) if control.daemon_pid() == Some(pid) => {}
            Ok(()) => {
                return Err(Failure::Waiting(format!(
                    "another control daemon has taken the directory of PID {pid}"
                )));
            }
            Err(Failure::Ended { .. }) => {
                self.end_run();
                return Ok(());
            }
            // It hangs, or can't be reached. It may have clients, so `watch` goes on with it.
            Err(failure) => serving.no_answer(failure.into_text()),
        }
        serving.read_on().await;
        self.worker.reporter.event(format!("control daemon {id} (PID {pid}) taken over"));
        tracing::debug!(step = "taken-over", "control daemon {pid} is ours again");
        Ok(())
    }

    /// Starts a control daemon for the order.
    pub(super) async fn start(&mut self) -> Result<(), Failure> {
        self.worker.reporter.enter(ControlDaemonState::Starting, false, "");
        let plan = self.worker.order.plan.clone();
        let program = program::find_program(PROGRAM).map_err(|reason| Failure::Waiting(reason.into()))?;
        let control = Arc::new(self.worker.tools.front_ends.control_in(plan.control_directory()));
        self.worker.make_way(&control, plan.control_directory()).await?;
        let bad_directory = |error: directories::BadDirectory| Failure::Waiting(error.to_string());
        let pipe = directories::open(&plan.pipe_directory).map_err(bad_directory)?;
        if plan.private_directory.is_none() || plan.log_directory.starts_with(&plan.pipe_directory) {
            // Not only links are made there. The flag is of an earlier control daemon.
            let _ = immutable::set(&pipe, false);
        }
        if let Some(private) = &plan.private_directory {
            directories::open_private(private).map_err(bad_directory)?;
            // An earlier version of this service, or somebody else, may have started one in the pipe directory.
            let other = self.worker.tools.front_ends.control_in(&plan.pipe_directory);
            if other.daemon_pid().is_some() {
                self.worker.make_way(&other, &plan.pipe_directory).await?;
            }
        }
        let processes = self.worker.read_gpus().await;
        self.worker.find_bypasses(None, processes).await;
        self.worker.take_compute_modes().await;
        let gpus = self.worker.gpus_in_reach();
        if gpus.is_empty() {
            return Err(Failure::Waiting(self.worker.why_no_gpu()));
        }
        tracing::debug!(step = "compute-modes", "compute modes are set");

        let mut multiuser = plan.multiuser && !self.worker.multiuser_refused;
        loop {
            let run = self.worker.spawn(&program, &control, &gpus, multiuser).await?;
            match self.hold(run).listens().await {
                Ok(()) => break,
                Err(Failure::Ended { refuses_multiuser: true, .. }) if multiuser => self.end_run(),
                Err(failure) => return Err(failure),
            }
            let refuses = "this driver's control daemon refuses multi-user mode";
            if !plan.multiuser_optional {
                let setting = if plan.slice_directories.is_some() || plan.private_directory.is_some() {
                    "off"
                } else {
                    "auto"
                };
                return Err(Failure::Waiting(format!("{refuses}; set cuda_mps_multiuser to {setting}")));
            }
            self.worker.reporter.event(format!("{refuses}; it runs without"));
            self.worker.multiuser_refused = true;
            multiuser = false;
        }
        tracing::debug!(step = "listens", "the control daemon listens");
        self.worker.control.send_replace(Some(control));
        self.has_just_started = true;
        if std::mem::replace(&mut self.worker.has_run, true) {
            self.worker.reporter.update(|status| status.view.restarts += 1);
        }
        Ok(())
    }
}

impl Worker {
    /// Makes sure that no other control daemon listens in the pipe directory. If it has no clients it is replaced, no
    /// matter who started it. If it has clients it is left to them.
    async fn make_way(&self, control: &Control, pipe_directory: &Path) -> Result<(), Failure> {
        if control.is_nobody() {
            return Ok(());
        }
        let directory = pipe_directory.display();
        let clients = match control.client_pids(&[]).await {
            Err(ControlError::NoDaemon { .. }) => return Ok(()),
            Err(error @ ControlError::NotRun { .. }) => return Err(error.into()),
            // Nobody listens there: the front end itself fails.
            Err(error) if control.daemon_pid().is_none() => return Err(error.into()),
            Err(error) => Err(error),
            Ok(clients) => Ok(clients.values().flatten().count()),
        };
        let pid = control.daemon_pid();
        let named = pid.map_or("an unknown PID".to_owned(), |pid| format!("PID {pid}"));
        let end_it = format!("end it with `echo quit | CUDA_MPS_PIPE_DIRECTORY={directory} {PROGRAM}`");
        let may_end = Permit::unused(clients.as_ref().ok().copied());
        match (clients, pid.zip(may_end)) {
            (_, Some((pid, may_end))) => {
                let taken = Process::open(pid)
                    .map_err(|error| Failure::Failed(format!("control daemon {named}: {error}")))?;
                let Some(mut other) = taken else { return Ok(()) };
                self.reporter.event(format!(
                    "control daemon {named} in {directory} was not started by this service and has no client: replacing it"
                ));
                if process::stop_idle(&mut other, control, may_end).await {
                    return Ok(());
                }
                Err(Failure::Waiting(format!(
                    "control daemon {named} in {directory} was asked to end and has not yet"
                )))
            }
            (Ok(clients), _) => Err(Failure::Waiting(format!(
                "a control daemon that is not ours ({named}) serves {} in {directory}; it is replaced when they \
                 are done, or {end_it}",
                counted(clients, "client")
            ))),
            (Err(error), _) => Err(Failure::Waiting(format!(
                "a control daemon that is not ours ({named}) holds {directory}: {error}; {end_it}"
            ))),
        }
    }

    /// Writes a new control daemon down.
    fn write_down(&self, running: &Running) -> Result<(), Failure> {
        let written =
            self.tools.state_file.lock().remember_control_daemon(&self.reporter.id(), running.clone());
        written.map_err(|error| {
            Failure::Failed(format!(
                "a new control daemon can't be written down, so none is started: {error}"
            ))
        })
    }

    /// Starts the process and follows its log from where it begins.
    async fn spawn(
        &mut self,
        program: &Path,
        control: &Arc<Control>,
        gpus: &[String],
        multiuser: bool,
    ) -> Result<Run, Failure> {
        let plan = &self.order.plan;
        let id = self.reporter.id();
        let not_started =
            |error: std::io::Error| Failure::Failed(format!("the control daemon can't be started: {error}"));
        let logs =
            directories::open(&plan.log_directory).map_err(|error| Failure::Waiting(error.to_string()))?;
        let path = plan.log_directory.join("control.log");
        let log_error = |error: std::io::Error| Failure::Failed(format!("{}: {error}", path.display()));
        let LogFile { output, file, moved_away } =
            directories::open_log(&logs, "control.log").map_err(log_error)?;
        if let Some(what) = moved_away {
            self.reporter.warning(format!("{} {what}; the log is a new file", path.display()));
        }
        let begin = file.metadata().map_err(log_error)?.len();
        let log = Follower::new(file, &path, begin, &self.tools.changes);

        let environment = [
            ("CUDA_MPS_PIPE_DIRECTORY", plan.control_directory().display().to_string()),
            ("CUDA_MPS_LOG_DIRECTORY", plan.log_directory.display().to_string()),
            ("CUDA_VISIBLE_DEVICES", gpus.join(",")),
        ];
        let arguments = driver::control_daemon_arguments(multiuser);
        let waiting = PausedProcess::start(Launch {
            program,
            arguments: &arguments,
            cpus: plan.cpus,
            environment: &environment,
            output,
        })
        .map_err(not_started)?;
        let running = Running {
            process: waiting.identity(),
            pipe_directory: plan.pipe_directory.clone(),
            private_directory: plan.private_directory.clone(),
            slice_directories: plan.slice_directories.clone(),
            log_directory: plan.log_directory.clone(),
            gpus: gpus.to_vec(),
            multiuser,
            near_cpus: plan.cpus.is_some(),
            log_offset: begin,
        };
        let pid = running.process.pid;
        tracing::debug!(step = "spawned", "PID {pid} waits for the word");
        self.write_down(&running)?;
        tracing::debug!(step = "written-down", "PID {pid} is written down");
        if systemd::runs_us() {
            match systemd::move_to_scope(&id, pid).await {
                Ok(scope) => tracing::debug!(step = "scope", "PID {pid} is in {scope}"),
                Err(error) => {
                    self.reporter.warning(format!(
                        "control daemon {id} stays in this service's control group: {error}"
                    ));
                    systemd::lift_limits().await.map_err(|error| {
                        Failure::Failed(format!(
                            "no control daemon is started where MemoryMax= of this service could end it: {error}"
                        ))
                    })?;
                }
            }
        }
        let process = waiting.go().await.map_err(not_started)?;
        tracing::debug!(step = "started", "PID {pid} has the word");
        self.reporter.update(|status| {
            status.view.pid = Some(pid);
            status.view.starts += 1;
        });
        self.reporter.event(format!("control daemon {id} started as PID {pid}"));
        Ok(Run::new(process, running, Arc::clone(control), log, 0))
    }
}
