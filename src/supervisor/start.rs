//! Brings a control daemon up: takes one of ours over, or replaces somebody else's, or starts a new one. Then sets its
//! limits and starts its server.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::counted::counted;
use crate::host::{driver, systemd};
use crate::mps::control::{Control, ControlError, ServerStatus};
use crate::mps::directories::{self, LogFile};
use crate::mps::log::Follower;
use crate::mps::process::{self, Launch, Process, Waiting};
use crate::plan::Present;
use crate::supervisor::state_file::Running;
use crate::supervisor::view::ControlDaemonState;

use super::hindrance::{ClearedBy, Hindrance};
use super::limits::{LIMITS_TIMEOUT, set_defaults};
use super::run::Run;
use super::servers::Limits;
use super::{Failure, PROGRAM, Worker};

/// The longest time for a new control daemon to answer. Measured: 20 ms.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The time between two questions to it.
const ANSWER_PAUSE: Duration = Duration::from_millis(20);

/// The longest time for a server to be ready. Measured: 0.15 s for one GPU. It opens one GPU after the other.
const SERVER_TIMEOUT: Duration = Duration::from_secs(60);

/// The time between two questions for its state.
const SERVER_PAUSE: Duration = Duration::from_millis(50);

impl Worker {
    /// Takes over the control daemon that the state file has as ours, if it still lives.
    pub(super) async fn take_over(&mut self) -> Result<(), Failure> {
        let id = self.reporter.id();
        let Some(running) = self.with_state_file(|state_file| state_file.control_daemon(&id).cloned()) else {
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
        let control = Arc::new(self.tools.front_ends.of(&running.pipe_directory));
        self.control.send_replace(Some(Arc::clone(&control)));
        let pid = running.process.pid;
        let log_path = running.log_directory.join("control.log");
        // Its standard output, since the file may have been removed; from the beginning, for what it says of servers.
        let log = process.output_file().and_then(|file| {
            let length = file.metadata()?.len();
            Ok((Follower::new(file, &log_path, 0)?, length))
        });
        let (log, length) = log.map_err(|error| Failure::Failed(format!("log of PID {pid}: {error}")))?;
        // A log that was begun again is shorter than the offset. Its new lines must not count as known.
        let quiet_until = running.log_offset.min(length);
        self.run = Some(Run::new(process, running, Arc::clone(&control), log, quiet_until));
        self.has_run = true;
        self.reporter.update(|status| status.view.pid = Some(pid));
        self.continue_if_stopped();
        match self.answers(&control).await {
            Ok(()) if control.daemon_pid() == Some(pid) => {}
            Ok(()) => {
                return Err(Failure::Waiting(format!(
                    "another control daemon has taken the pipe directory of PID {pid}"
                )));
            }
            // It hangs, or can't be reached. It may have clients, so `watch` goes on with it.
            Err(failure) => match &mut self.run {
                Some(run) => _ = run.hindrances.take_in(Some(Hindrance::no_answer(failure.into_text()))),
                None => return Ok(()),
            },
        }
        self.read_on().await;
        self.reporter.event(format!("control daemon {id} (PID {pid}) taken over"));
        tracing::debug!(step = "taken-over", "control daemon {pid} is ours again");
        Ok(())
    }

    /// Starts a control daemon for the order.
    pub(super) async fn start(&mut self) -> Result<(), Failure> {
        self.reporter.enter(ControlDaemonState::Starting, false, "");
        let plan = self.order.plan.clone();
        let program = process::find_program(PROGRAM).map_err(|reason| Failure::Waiting(reason.into()))?;
        let control = Arc::new(self.tools.front_ends.of(&plan.pipe_directory));
        self.make_way(&control, &plan.pipe_directory).await?;
        let bad_directory = |error: directories::BadDirectory| Failure::Waiting(error.to_string());
        directories::open(&plan.pipe_directory).map_err(bad_directory)?;
        let processes = self.look_at_gpus().await;
        self.look_for_bypasses(None, &processes).await;
        let gpus: Vec<String> = plan
            .gpus
            .iter()
            .map(|gpu| gpu.uuid.clone())
            .filter(|uuid| !self.unreachable.contains(uuid))
            .collect();
        if gpus.is_empty() {
            return Err(Failure::Waiting("none of its GPUs can be reached".to_owned()));
        }
        self.take_compute_modes(&gpus).await?;
        tracing::debug!(step = "compute-modes", "compute modes are set");

        let mut multiuser = plan.multiuser && !self.multiuser_refused;
        loop {
            self.spawn(&program, &control, &gpus, multiuser).await?;
            match self.answers(&control).await {
                Ok(()) => break,
                Err(Failure::RefusesMultiuser(_)) if multiuser && plan.multiuser_optional => {
                    self.reporter.event(
                        "this driver's control daemon refuses multi-user mode; it runs without".to_owned(),
                    );
                    self.multiuser_refused = true;
                    multiuser = false;
                }
                Err(Failure::RefusesMultiuser(_)) if multiuser => {
                    return Err(Failure::Waiting(
                        "this driver's control daemon refuses multi-user mode; set cuda_mps_multiuser to auto".to_owned(),
                    ));
                }
                Err(failure) => return Err(failure),
            }
        }
        tracing::debug!(step = "answers", "the control daemon answers");
        self.control.send_replace(Some(control));
        if std::mem::replace(&mut self.has_run, true) {
            self.reporter.update(|status| status.view.restarts += 1);
        }
        Ok(())
    }

    /// Makes sure that no other control daemon listens in the pipe directory. If it has no clients it is replaced, no
    /// matter who started it. If it has clients it is left to them.
    async fn make_way(&mut self, control: &Control, pipe_directory: &Path) -> Result<(), Failure> {
        let directory = pipe_directory.display();
        let asked = match control.servers().await {
            Ok(_) => control.client_pids().await,
            Err(error) => Err(error),
        };
        let clients = match asked {
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
        match (clients, pid) {
            (Ok(0), Some(pid)) => {
                let taken = Process::of(pid)
                    .map_err(|error| Failure::Failed(format!("control daemon {named}: {error}")))?;
                let Some(mut other) = taken else { return Ok(()) };
                self.reporter.event(format!(
                    "control daemon {named} in {directory} is not ours and has no client: replaced"
                ));
                if process::stop_idle(&mut other, control).await {
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

    async fn take_compute_modes(&mut self, gpus: &[String]) -> Result<(), Failure> {
        if !self.order.set_compute_mode {
            return Ok(());
        }
        for uuid in gpus {
            let taken = self.tools.compute_modes.take(uuid).await;
            taken.map_err(|error| Failure::Failed(format!("compute mode of {uuid}: {error}")))?;
        }
        self.look_at_gpus().await;
        Ok(())
    }

    /// Starts the process and follows its log from where it begins.
    async fn spawn(
        &mut self,
        program: &Path,
        control: &Arc<Control>,
        gpus: &[String],
        multiuser: bool,
    ) -> Result<(), Failure> {
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
        let log = Follower::new(file, &path, begin).map_err(log_error)?;

        let environment = [
            ("CUDA_MPS_PIPE_DIRECTORY", plan.pipe_directory.display().to_string()),
            ("CUDA_MPS_LOG_DIRECTORY", plan.log_directory.display().to_string()),
            ("CUDA_VISIBLE_DEVICES", gpus.join(",")),
        ];
        let arguments = driver::control_daemon_arguments(plan.driver, multiuser);
        let waiting =
            Waiting::start(Launch { program, arguments: &arguments, environment: &environment, output })
                .map_err(not_started)?;
        let running = Running {
            process: waiting.identity(),
            pipe_directory: plan.pipe_directory.clone(),
            log_directory: plan.log_directory.clone(),
            gpus: gpus.to_vec(),
            multiuser,
            log_offset: begin,
        };
        let pid = running.process.pid;
        tracing::debug!(step = "spawned", "PID {pid} waits for the word");
        self.with_state_file(|state_file| state_file.remember_control_daemon(&id, running.clone())).map_err(
            |error| {
                Failure::Failed(format!(
                    "a new control daemon can't be written down, so none is started: {error}"
                ))
            },
        )?;
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
        self.run = Some(Run::new(process, running, Arc::clone(control), log, 0));
        self.reporter.update(|status| {
            status.view.pid = Some(pid);
            status.view.starts += 1;
        });
        self.reporter.event(format!("control daemon {id} started as PID {pid}"));
        Ok(())
    }

    /// Waits until the control daemon answers its front end.
    async fn answers(&mut self, control: &Control) -> Result<(), Failure> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            let Err(error) = control.servers().await else { return Ok(()) };
            if Instant::now() >= deadline {
                return Err(Failure::Failed(format!(
                    "no answer within {} s of its start: {error}{}",
                    ANSWER_TIMEOUT.as_secs(),
                    self.words()
                )));
            }
            self.pause(ANSWER_PAUSE).await?;
        }
    }

    /// Makes the control daemon that runs serve the order, as far as it can without ending a client.
    pub(super) async fn configure(&mut self) -> Result<(), Failure> {
        let run = self.present()?;
        let (running, control, unreached) =
            (run.running.clone(), Arc::clone(&run.control), run.hindrances.is_unreached());
        self.reporter.update(|status| {
            status.view.pipe_directory.clone_from(&running.pipe_directory);
            status.view.log_directory.clone_from(&running.log_directory);
        });
        if unreached {
            self.show_state();
            return Ok(());
        }
        // A stopped control daemon would answer nothing.
        self.continue_if_stopped();
        self.look_at_gpus().await;
        if !self.order.set_compute_mode {
            for uuid in &running.gpus {
                self.restore_compute_mode(uuid).await;
            }
        }
        self.give_back_gpus(&running).await;
        self.find_misfit();
        if self.place_is_taken(&control) {
            self.show_state();
            return Ok(());
        }
        self.let_users_in();
        let limits = self.limits()?;
        if self.retiring {
            // Clients that come until it ends get the same limits as the clients before.
            self.show_state();
            return Ok(());
        }
        set_defaults(&control, &limits).await?;
        tracing::debug!(step = "defaults", "defaults are set");
        let servers = control.servers().await?;
        self.present()?.servers.keep(&servers);
        for server in &servers {
            self.watch_server(*server);
            self.set_live(&control, *server, &limits).await?;
        }
        if servers.is_empty() && running.multiuser && self.order.plan.prewarm {
            self.prewarm(&control, &limits).await?;
        }
        tracing::debug!(step = "limits", "limits are confirmed");
        let percentage = limits.thread_percentage;
        self.reporter.update(|status| {
            status.view.multiuser = Some(running.multiuser);
            for (uuid, gpu) in &mut status.gpus {
                gpu.thread_percentage = running.gpus.contains(uuid).then_some(percentage);
            }
        });
        let run = self.present()?;
        run.configured = true;
        let hindered = run.hindrances.has(ClearedBy::Check);
        // The first look finds programs that slipped in before.
        self.bypasses.look_at = Some(Instant::now());
        self.compare_servers();
        self.keep_state_file();
        if !hindered {
            self.reporter.event(format!("control daemon {} is ready", self.reporter.id()));
        }
        self.show_state();
        tracing::debug!(step = "ready", "the control daemon serves");
        Ok(())
    }

    /// Puts back the compute modes of GPUs that neither the control daemon nor the order has any more.
    async fn give_back_gpus(&mut self, running: &Running) {
        let wanted = |uuid: &String| self.order.plan.gpus.iter().any(|gpu| gpu.uuid == *uuid);
        let former = self.former_gpus.iter().filter(|uuid| !wanted(uuid) && !running.gpus.contains(uuid));
        for uuid in former.cloned().collect::<Vec<_>>() {
            self.restore_compute_mode(&uuid).await;
            self.former_gpus.remove(&uuid);
        }
        self.former_gpus.extend(running.gpus.iter().cloned());
    }

    /// Starts the server before the first client comes, and waits until it is ready with the planned limits.
    pub(super) async fn prewarm(&mut self, control: &Control, limits: &Limits) -> Result<(), Failure> {
        let servers = control.servers().await?;
        self.present()?.servers.keep(&servers);
        control.start_server(0).await?;
        tracing::debug!(step = "prewarm", "a server was asked for");
        let deadline = Instant::now() + SERVER_TIMEOUT;
        let server = loop {
            // The log tells of an end, the list of a life; a log that can't be written says nothing.
            let mut active = None;
            for server in control.servers().await? {
                if matches!(
                    control.server_status(server).await?,
                    ServerStatus::Active | ServerStatus::Unsupported
                ) {
                    active = Some(server);
                }
            }
            if let Some(server) = active {
                break server;
            }
            self.pause(SERVER_PAUSE).await?;
            let servers = &self.present()?.servers;
            if servers.alive().is_empty()
                && let Some((server, status)) = servers.last_exit()
            {
                return Err(Failure::Failed(format!(
                    "server {server} exited with status {status} before it was ready{}",
                    self.words()
                )));
            }
            if Instant::now() >= deadline {
                return Err(Failure::Failed(format!(
                    "no server is ready after {} s{}",
                    SERVER_TIMEOUT.as_secs(),
                    self.words()
                )));
            }
        };
        self.watch_server(server);
        // The list is ahead of the log by a moment.
        let deadline = Instant::now() + LIMITS_TIMEOUT;
        while !self.present()?.servers.get(server).is_some_and(|known| known.ready)
            && self.step(deadline).await?
        {}
        self.confirm_or_correct(control, server, limits).await
    }

    /// Finds out whether the control daemon that runs can serve the order.
    pub(super) fn find_misfit(&mut self) {
        let Some(run) = &mut self.run else { return };
        let running = &run.running;
        let misfit = if self.retiring {
            Some("it is not needed any more".to_owned())
        } else {
            let present = Present {
                pipe_directory: &running.pipe_directory,
                log_directory: &running.log_directory,
                gpus: &running.gpus,
                multiuser: running.multiuser,
            };
            self.order.plan.misfit(&present, |uuid| !self.unreachable.contains(uuid))
        };
        match misfit {
            Some(why) => run.hindrances.put(Hindrance::Misfit(why)),
            None => run.hindrances.clear(ClearedBy::Order),
        }
    }
}
