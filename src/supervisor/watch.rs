//! A control daemon that serves: the checks, and their consequences.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::counted::counted;
use crate::host::nvml::GpuProcess;
use crate::mps::control::{Control, ControlError, ServerStatus};
use crate::mps::directories;
use crate::mps::log::Meaning;
use crate::mps::process;
use crate::supervisor::compute_modes::SERVED;

use super::heal::still_faulted;
use super::hindrance::{ClearedBy, Hindrance, News, Progress};
use super::run::Occurrence;
use super::{Command, Ended, Failure, Goal, Worker};

/// The time between two regular checks, without clients and with them. If a control daemon hangs, its next client hangs
/// too.
const CHECK_PERIOD: Duration = Duration::from_secs(30);
const CHECK_PERIOD_IN_USE: Duration = Duration::from_secs(10);

/// The time between two checks of a control daemon that does not answer.
const MISSED_PERIOD: Duration = Duration::from_secs(1);

/// The time until a check when the log speaks of limits that differ from the order.
const CHECK_SOON: Duration = Duration::from_millis(100);

/// The time between two counts of the clients while a change waits for their end. The log tells of most ends at once.
const CLIENTS_PERIOD: Duration = Duration::from_secs(10);

/// The longest time for a server without clients to end, and the time between two looks. Measured: 70 ms to 2 s.
const IDLE_SERVER_TIMEOUT: Duration = Duration::from_secs(4);
const IDLE_SERVER_PAUSE: Duration = Duration::from_millis(50);

/// The time from a client's end to the count of the others. The control daemon still lists the client for a moment.
const CLIENT_LEFT_PAUSE: Duration = Duration::from_millis(200);

impl Worker {
    /// Watches the control daemon until it ends or has to start again.
    pub(super) async fn watch(&mut self, goal: &Goal, commands: &mut mpsc::Receiver<Command>) -> Ended {
        let unreached = self.run.as_ref().is_some_and(|run| run.hindrances.is_unreached());
        let mut check_at = Instant::now() + if unreached { Duration::ZERO } else { CHECK_PERIOD };
        let mut clients_at = Instant::now();
        loop {
            let Some(run) = &mut self.run else { return Ended::Failure(Failure::not_running()) };
            let mut due = check_at;
            if run.hindrances.ends_when_idle() {
                if std::mem::take(&mut run.client_left) {
                    clients_at = clients_at.min(Instant::now() + CLIENT_LEFT_PAUSE);
                }
                due = due.min(clients_at);
            }
            let looks = [
                run.hindrances.revival().map(|(at, _)| at),
                run.hindrances.fault().map(|fault| fault.look_at),
                self.bypasses.look_at,
                run.places.look_at,
                run.pending.look_at,
            ];
            due = looks.into_iter().flatten().fold(due, Instant::min);
            let occurrence = tokio::select! {
                occurrence = self.next(due) => occurrence,
                Some(command) = commands.recv() => {
                    match self.obey(command, goal, &mut check_at).await {
                        Some(ended) => return ended,
                        None => continue,
                    }
                }
            };
            let now = Instant::now();
            let done = match occurrence {
                Err(failure) => Err(failure),
                Ok(Occurrence::Ended(status)) => Err(self.control_daemon_ended(status).await),
                Ok(Occurrence::ServerEnded(server)) => {
                    self.server_gone(server).await;
                    Ok(())
                }
                Ok(Occurrence::Line(line)) => {
                    if let Meaning::ServerReady(server) = line.meaning {
                        self.watch_server(server);
                    }
                    if line.meaning.is_of_servers() && self.compare_servers() {
                        check_at = check_at.min(now + CHECK_SOON);
                    }
                    if self.run.as_ref().is_some_and(|run| run.in_use) {
                        check_at = check_at.min(now + CHECK_PERIOD_IN_USE);
                    }
                    self.rotate_log();
                    Ok(())
                }
                Ok(Occurrence::Nothing) if now >= check_at => {
                    let checked = self.check().await;
                    check_at = Instant::now() + self.check_period();
                    match checked {
                        Ok(Check::ConfigureAgain) => return Ended::Anew,
                        Ok(Check::Done) => Ok(()),
                        Err(failure) => Err(failure),
                    }
                }
                Ok(Occurrence::Nothing) => self.act(now).await,
            };
            match done {
                Ok(()) => {}
                // One miss. The regular check goes on counting.
                Err(Failure::Silent(error)) => {
                    self.missed(error);
                    self.show_state();
                    check_at = Instant::now() + self.check_period();
                }
                Err(failure) => return Ended::Failure(failure),
            }
            if self.run.as_ref().is_some_and(|run| run.hindrances.ends_when_idle()) && now >= clients_at {
                clients_at = Instant::now() + CLIENTS_PERIOD;
                if self.in_use().await == Ok(0) && self.end_idle().await {
                    self.reporter.unsettled();
                    return ended(goal);
                }
                self.reporter.put_off();
                self.show_state();
            }
        }
    }

    /// Does what is due besides the regular check.
    async fn act(&mut self, now: Instant) -> Result<(), Failure> {
        let Some(run) = &mut self.run else { return Ok(()) };
        let control = Arc::clone(&run.control);
        if run.hindrances.fault().is_some_and(|fault| now >= fault.look_at) {
            return self.heal(&control).await;
        }
        if run.hindrances.revival().is_some_and(|(at, _)| now >= at) {
            return self.revive(&control).await;
        }
        let well = !run.hindrances.has(ClearedBy::Check) && !run.hindrances.has(ClearedBy::Healing);
        let places = run.places.look_at.is_some_and(|at| now >= at);
        let pending = run.pending.look_at.is_some_and(|at| now >= at);
        if self.bypasses.look_at.take_if(|at| now >= *at).is_some() && well {
            let processes = self.look_at_gpus().await;
            self.look_for_bypasses(Some(&control), &processes).await;
        }
        if places {
            self.look_at_places(&control).await?;
        }
        if pending {
            self.look_at_pending();
        }
        Ok(())
    }

    fn check_period(&self) -> Duration {
        match &self.run {
            Some(run) if run.hindrances.is_silent() => MISSED_PERIOD,
            Some(run) if run.in_use => CHECK_PERIOD_IN_USE,
            _ => CHECK_PERIOD,
        }
    }

    /// Counts a look that ended without an answer.
    fn missed(&mut self, error: String) {
        let Some(run) = &mut self.run else { return };
        if run.hindrances.take_in(Some(Hindrance::no_answer(error.clone()))) == News::FirstMiss {
            self.reporter.warning(error);
        }
    }

    /// The regular check: the answers, servers, limits, compute modes and files of the control daemon.
    async fn check(&mut self) -> Result<Check, Failure> {
        self.continue_if_stopped();
        let run = self.present()?;
        let control = Arc::clone(&run.control);
        let mut answers = false;
        let known = run.hindrances.fault().map(|fault| fault.server);
        match servers_and_faults(&control, known).await {
            Ok(_) if self.place_is_taken(&control) => {}
            Ok((servers, faulted)) => {
                let run = self.present()?;
                let news = run.hindrances.take_in(None);
                answers = true;
                run.servers.keep(&servers);
                for server in servers {
                    self.watch_server(server);
                }
                for server in faulted {
                    self.fault_seen(server);
                }
                self.let_users_in();
                if news == News::AnswersAgain {
                    self.reporter.event("the control daemon answers again".to_owned());
                    // It may have missed a command meanwhile.
                    return Ok(Check::ConfigureAgain);
                }
            }
            Err(error @ (ControlError::Silent { .. } | ControlError::Unanswered { .. })) => {
                self.missed(error.to_string());
            }
            Err(error @ ControlError::NoDaemon { .. }) => {
                // It lives, so its sockets have gone: it can't make them again.
                self.present()?.hindrances.take_in(Some(Hindrance::DirectoryGone(error.to_string())));
            }
            Err(error) => return Err(error.into()),
        }
        if answers && !self.present()?.hindrances.has(ClearedBy::Check) {
            self.keep_limits(&control).await?;
        }
        let processes = self.look_at_gpus().await;
        let Some(run) = &mut self.run else { return Err(Failure::not_running()) };
        run.in_use = processes.values().flatten().any(|process| process.via_mps);
        run.places.suspect(&self.order.plan.gpus, &processes);
        self.keep_compute_modes().await;
        // After a fatal error, a server's clients are not reliably listed.
        if answers && !self.present()?.hindrances.has(ClearedBy::Healing) {
            self.look_for_bypasses(Some(&control), &processes).await;
        }
        self.find_misfit();
        self.compare_servers();
        self.keep_state_file();
        self.rotate_log();
        self.tell_left_out();
        self.show_state();
        Ok(Check::Done)
    }

    /// True if another control daemon answers in our pipe directory. Then nothing must be told to it.
    pub(super) fn place_is_taken(&mut self, control: &Control) -> bool {
        let Some(run) = &mut self.run else { return false };
        let other = control.daemon_pid().filter(|listener| *listener != run.running.process.pid);
        if let Some(other) = other {
            run.hindrances.take_in(Some(Hindrance::PlaceTaken(other)));
        }
        other.is_some()
    }

    /// Makes sure that clients of every user can get to the socket.
    pub(super) fn let_users_in(&mut self) {
        let Some(run) = &mut self.run else { return };
        match directories::let_users_in(&run.running.pipe_directory) {
            Ok(repaired) => {
                for what in repaired {
                    self.reporter.warning(format!("{what}; clients of other users were kept out"));
                }
            }
            Err(bad) => _ = run.hindrances.take_in(Some(Hindrance::BadDirectory(bad.to_string()))),
        }
    }

    /// Continues the control daemon and its servers if somebody has stopped them: a stopped process serves no client.
    pub(super) fn continue_if_stopped(&mut self) {
        let Some(run) = &self.run else { return };
        let mut stopped = Vec::new();
        if run.process.is_stopped() {
            stopped.push((run.process.identity().pid, run.process.signal(Signal::CONT)));
        }
        for server in run.servers.alive() {
            let server = process::Process::of(server);
            if let Some(server) = server.ok().flatten().filter(process::Process::is_stopped) {
                stopped.push((server.identity().pid, server.signal(Signal::CONT)));
            }
        }
        for (pid, continued) in stopped {
            match continued {
                Ok(()) => self.reporter.warning(format!("PID {pid} was stopped by a signal; continued")),
                Err(error) => self
                    .reporter
                    .warning(format!("PID {pid} was stopped by a signal, and can't be continued: {error}")),
            }
        }
    }

    /// Asks NVML for the compute mode and the processes of each GPU. The status of a GPU says if it can't be reached;
    /// the other GPUs stay served.
    pub(super) async fn look_at_gpus(&mut self) -> BTreeMap<String, Vec<GpuProcess>> {
        let mut processes = BTreeMap::new();
        let gpus: Vec<String> = self.order.plan.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        for uuid in gpus {
            let found = self.tools.compute_modes.look(&uuid).await.map(|(mode, there)| {
                processes.insert(uuid.clone(), there);
                mode
            });
            self.reporter.update_gpu(&uuid, |status| match &found {
                Ok(mode) => {
                    status.compute_mode = Some(*mode);
                    status.unreachable.clear();
                }
                Err(error) => {
                    status.compute_mode = None;
                    status.unreachable.clone_from(error);
                }
            });
            let changed = match &found {
                Ok(_) => self.unreachable.remove(&uuid),
                Err(_) => self.unreachable.insert(uuid.clone()),
            };
            match found {
                Err(error) if changed => self.reporter.warning(format!("GPU {uuid}: {error}")),
                Ok(_) if changed => self.reporter.event(format!("GPU {uuid} can be reached again")),
                _ => {}
            }
        }
        processes
    }

    /// Sets a compute mode again that somebody else has changed.
    async fn keep_compute_modes(&mut self) {
        let Some(run) = self.run.as_ref().filter(|_| self.order.set_compute_mode) else { return };
        for uuid in run.running.gpus.iter().filter(|uuid| !self.unreachable.contains(*uuid)) {
            match self.tools.compute_modes.take(uuid).await {
                Ok(false) => {}
                Ok(true) => {
                    self.reporter.warning(format!(
                        "compute mode of {uuid} was changed by others; set to {SERVED} again"
                    ));
                    self.reporter.update_gpu(uuid, |status| status.compute_mode = Some(SERVED));
                }
                Err(error) => self.reporter.warning(format!("compute mode of {uuid}: {error}")),
            }
        }
    }

    /// Keeps the state file and its log offset up to date, for the next service that takes over.
    pub(super) fn keep_state_file(&mut self) {
        let Some(run) = &mut self.run else { return };
        let trouble = run.log.trouble().filter(|_| !run.hindrances.has(ClearedBy::Order));
        if trouble != run.log_trouble {
            run.log_trouble = trouble;
            let path = run.log.path().display();
            match trouble {
                Some(trouble) => self.reporter.warning(format!("{path}: {trouble}")),
                None => self.reporter.event(format!("{path} can be written again")),
            }
        }
        run.running.log_offset = run.log.offset();
        let (id, running) = (self.reporter.id(), run.running.clone());
        let kept = self.with_state_file(|state_file| {
            let repaired = state_file.repair()?;
            state_file.remember_control_daemon(&id, running)?;
            Ok::<bool, std::io::Error>(repaired)
        });
        match kept {
            Ok(false) => {}
            Ok(true) => self.reporter.warning("the state file was lost or damaged; written again".to_owned()),
            Err(error) => self.reporter.warning(format!("the state file can't be written: {error}")),
        }
    }

    fn rotate_log(&mut self) {
        let Some(log) = self.run.as_mut().map(|run| &mut run.log) else { return };
        match log.rotated() {
            Some(Ok(())) => tracing::debug!("{} is started anew", log.path().display()),
            Some(Err(error)) => {
                let text =
                    format!("{} is started anew, the old one is not kept: {error}", log.path().display());
                self.reporter.warning(text);
            }
            None if log.offset() > self.order.log_max_bytes => log.rotate(self.order.log_max_bytes),
            None => {}
        }
    }

    /// Compares the limits that the servers have written with the order. True if they differ.
    pub(super) fn compare_servers(&mut self) -> bool {
        let Some(run) = &self.run else { return false };
        let limits = run.limits(&self.order);
        let alive = run.servers.alive();
        let newest = alive.iter().rev().find_map(|pid| Some((*pid, run.servers.get(*pid)?)));
        let difference = newest
            .filter(|(_, server)| server.has_written(&limits))
            .and_then(|(pid, server)| Some(format!("server {pid}: {}", server.differs_from(&limits)?)));
        let confirmed = newest.map(|(_, server)| server.memory_bytes.clone()).unwrap_or_default();
        self.reporter.update(|status| {
            status.view.servers.clone_from(&alive);
            for (uuid, gpu) in &mut status.gpus {
                let ordinal = run.running.gpus.iter().position(|served| served == uuid);
                gpu.memory_limit_mib =
                    ordinal.and_then(|ordinal| confirmed.get(&ordinal)).map(|bytes| bytes >> 20);
                gpu.reason = match (ordinal, &difference) {
                    (None, _) => "not in the control daemon's hands until it starts anew".to_owned(),
                    (Some(_), Some(difference)) => difference.clone(),
                    (Some(_), None) => run.places.reason(uuid).unwrap_or_default(),
                };
            }
        });
        difference.is_some()
    }

    /// Shows the state of the control daemon.
    pub(super) fn show_state(&mut self) {
        let Some(run) = &self.run else { return };
        let progress = Progress {
            configured: run.configured,
            in_place: run.running.pipe_directory == self.order.plan.pipe_directory,
            retiring: self.retiring,
        };
        match run.hindrances.shown(progress) {
            Some(shown) if shown.settled => self.reporter.enter(shown.state, shown.serving, &shown.reason),
            Some(shown) => self.reporter.pass_through(shown.state, shown.serving, &shown.reason),
            None => {}
        }
    }

    async fn obey(&mut self, command: Command, goal: &Goal, check_at: &mut Instant) -> Option<Ended> {
        // A command is carried out even if its sender has gone.
        match command {
            Command::Apply { force, reply } => {
                let change = self.run.as_ref().and_then(|run| run.hindrances.why_it_ends());
                let Some(change) = change else {
                    let _ = reply.send(Ok(()));
                    return None;
                };
                let clients = self.in_use().await;
                if force || clients == Ok(0) {
                    if force {
                        self.stop_control_daemon().await;
                    } else {
                        self.end_idle().await;
                    }
                    let done = self.run.is_none();
                    if done {
                        self.reporter.unsettled();
                    }
                    let _ =
                        reply.send(if done { Ok(()) } else { Err("a client came in between".to_owned()) });
                    return done.then(|| ended(goal));
                }
                let who = clients.map_or_else(|error| error, |clients| counted(clients, "client"));
                let _ = reply.send(Err(format!("{change}: in the way: {who}")));
            }
            Command::Check => *check_at = Instant::now(),
            Command::RestartServer { reply } => {
                let done = self.restart_servers().await;
                let _ = reply.send(done);
            }
        }
        None
    }

    async fn restart_servers(&mut self) -> Result<(), String> {
        let control =
            self.run.as_ref().map(|run| Arc::clone(&run.control)).ok_or("no control daemon runs")?;
        match self.in_use().await? {
            0 => {}
            clients => return Err(format!("in the way: {}", counted(clients, "client"))),
        }
        let in_words = |error: ControlError| error.to_string();
        let servers = control.servers().await.map_err(in_words)?;
        for server in servers.iter().copied() {
            self.watch_server(server);
            control.shut_down_idle_server(server).await.map_err(in_words)?;
        }
        let deadline = Instant::now() + IDLE_SERVER_TIMEOUT;
        while control.servers().await.map_err(in_words)?.iter().any(|server| servers.contains(server)) {
            if Instant::now() >= deadline {
                return Err("in the way: a client that has come in between".to_owned());
            }
            tokio::time::sleep(IDLE_SERVER_PAUSE).await;
        }
        Ok(())
    }
}

/// The result of a check.
enum Check {
    Done,
    /// The control daemon may have missed a command.
    ConfigureAgain,
}

fn ended(goal: &Goal) -> Ended {
    if *goal == Goal::Retire { Ended::Retired } else { Ended::Anew }
}

/// All servers, and the servers in FAULT without the `known` one.
async fn servers_and_faults(
    control: &Control,
    known: Option<u32>,
) -> Result<(Vec<u32>, Vec<u32>), ControlError> {
    let servers = control.servers().await?;
    let mut faulted = Vec::new();
    for server in servers.iter().copied().filter(|server| Some(*server) != known) {
        if control.server_status(server).await? == ServerStatus::Fault
            && still_faulted(control, server).await?
        {
            faulted.push(server);
        }
    }
    Ok((servers, faulted))
}
