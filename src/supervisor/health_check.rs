//! The health check of a control daemon that serves, and its consequences.

use crate::mps::control::{ControlError, ServerStatus};
use crate::mps::process;
use common::directories;
use common::host::cpus::Cpus;

use super::blocker::{Blocker, Change, ClearedBy, Progress};
use super::heal::still_faulted;
use super::{Ended, Failure, Serving};

impl Serving<'_> {
    /// The health check: the answers, servers, limits, compute modes and files of the control daemon.
    pub(super) async fn check(&mut self) -> Result<Option<Ended>, Failure> {
        self.continue_if_stopped();
        self.show_cpus();
        let mut answer = None;
        match self.inspect().await {
            Ok(_) if self.place_is_taken() => {}
            Ok(look) => {
                let change = self.run.blockers.observe(None);
                self.run.servers.keep(&look.servers);
                for server in &look.servers {
                    self.watch_server(*server);
                }
                for server in look.with(&[ServerStatus::Fault]) {
                    if still_faulted(&self.run.control, server).await? {
                        self.fault_seen(server);
                    }
                }
                self.run.blockers.clear(ClearedBy::Access);
                self.let_users_in();
                if self.run.configured {
                    self.keep_links();
                }
                if change == Change::AnswersAgain {
                    self.worker.reporter.event("the control daemon answers again".to_owned());
                    // It may have missed a command meanwhile.
                    return Ok(Some(Ended::Again));
                }
                answer = Some(look);
            }
            Err(error @ (ControlError::Silent { .. } | ControlError::Unanswered { .. })) => {
                self.missed(error.to_string());
            }
            Err(error @ ControlError::NoDaemon { .. }) => {
                // It lives, so its sockets have gone: it can't make them again.
                self.run.blockers.observe(Some(Blocker::DirectoryGone(error.to_string())));
            }
            Err(error) => return Err(error.into()),
        }
        if let Some(look) = &answer
            && !self.run.blockers.has_failed_check()
        {
            self.keep_limits(look).await?;
        }
        let processes = self.read_gpus().await?;
        let in_use = processes.values().flatten().any(|process| process.via_mps);
        if in_use || self.run.in_use {
            self.worker.tools.bells.ring(&self.run.running.gpus, |bell| &bell.checked);
        }
        self.run.in_use = in_use;
        self.run.capacity.suspect(&self.worker.order.plan.gpus, &processes);
        self.keep_compute_modes().await;
        // After a fatal error, a server's clients are not reliably listed.
        if answer.is_some() && !self.run.blockers.has(ClearedBy::Healing) {
            self.worker.find_bypasses(Some(self.run), processes).await;
        }
        self.find_misfit();
        self.compare_servers();
        self.keep_state_file();
        self.rotate_log();
        self.tell_left_out();
        self.show_state();
        Ok(None)
    }

    /// True if another control daemon answers in our pipe directory. Then nothing must be told to it.
    pub(super) fn place_is_taken(&mut self) -> bool {
        let own = self.run.running.process.pid;
        let other = self.run.control.daemon_pid().filter(|listener| *listener != own);
        if let Some(other) = other {
            self.run.blockers.observe(Some(Blocker::PlaceTaken(other)));
        }
        other.is_some()
    }

    /// Makes sure that clients of every user can get to the socket.
    pub(super) fn let_users_in(&mut self) {
        let running = &self.run.running;
        match directories::let_users_in(&running.pipe_directory, running.control_directory()) {
            Ok(repaired) => {
                for what in repaired {
                    self.worker.reporter.warning(format!("{what}; it kept clients of other users out"));
                }
            }
            Err(bad) => self.run.blockers.put(Blocker::BadDirectory(bad.to_string())),
        }
        let Some(private) = &self.run.running.private_directory else { return };
        match directories::keep_others_out(private) {
            Ok(None) => {}
            Ok(Some(what)) => {
                self.worker.reporter.warning(format!("{what}; others could command the control daemon"));
            }
            Err(bad) => self.run.blockers.put(Blocker::BadDirectory(bad.to_string())),
        }
    }

    /// Continues the control daemon and its servers if somebody has stopped them: a stopped process serves no client.
    pub(super) fn continue_if_stopped(&mut self) {
        let control_daemon = self.run.running.process.pid;
        for pid in self.run.servers.alive().into_iter().chain([control_daemon]) {
            if let Some(continued) = process::continue_if_stopped(pid) {
                self.worker.reporter.warning(continued);
            }
        }
    }

    /// Keeps the state file and its log offset up to date, for the next service that takes over.
    pub(super) fn keep_state_file(&mut self) {
        let run = &mut *self.run;
        let trouble = run.log.trouble().filter(|_| !run.blockers.has(ClearedBy::Order));
        if trouble != run.log_trouble {
            run.log_trouble = trouble;
            let path = run.log.path().display();
            match trouble {
                Some(trouble) => self.worker.reporter.warning(format!("{path}: {trouble}")),
                None => self.worker.reporter.event(format!("{path} can be written again")),
            }
        }
        run.running.log_offset = run.log.offset();
        let (id, running) = (self.worker.reporter.id(), run.running.clone());
        let mut state_file = self.worker.tools.state_file.lock();
        let repaired = state_file.repair();
        match repaired
            .and_then(|repaired| state_file.remember_control_daemon(&id, running).map(|()| repaired))
        {
            Ok(false) => {}
            Ok(true) => {
                self.worker.reporter.warning("the state file was lost or damaged; rewritten".to_owned());
            }
            Err(error) => self.worker.reporter.warning(format!("the state file can't be written: {error}")),
        }
    }

    /// Shows the CPUs on which the control daemon may run. Somebody else may have bound it, or its control group.
    pub(super) fn show_cpus(&self) {
        let cpus = Cpus::allowed_for(self.run.process.identity().pid).map(Cpus::describe);
        self.worker.reporter.update(|status| status.view.cpus = cpus);
    }

    pub(super) fn rotate_log(&mut self) {
        let log = &mut self.run.log;
        match log.rotated() {
            Some(Ok(())) => tracing::debug!("{} was rotated", log.path().display()),
            Some(Err(error)) => {
                let text =
                    format!("{} was rotated, and the old one is not kept: {error}", log.path().display());
                self.worker.reporter.warning(text);
            }
            None if log.offset() > self.worker.order.supervision.log_max_bytes => {
                log.rotate(self.worker.order.supervision.log_max_bytes);
            }
            None => {}
        }
    }

    /// Compares the limits that the servers have written with the order. True if they differ.
    pub(super) fn compare_servers(&mut self) -> bool {
        let run = &*self.run;
        let limits = run.limits(&self.worker.order);
        let alive = run.servers.alive();
        let newest = alive.iter().rev().find_map(|pid| Some((*pid, run.servers.get(*pid)?)));
        let difference = newest
            .filter(|(_, server)| server.has_written(&limits))
            .and_then(|(pid, server)| Some(format!("server {pid}: {}", server.differs_from(&limits)?)));
        let confirmed = newest.map(|(_, server)| server.memory_bytes.clone()).unwrap_or_default();
        self.worker.reporter.update(|status| {
            status.view.servers.clone_from(&alive);
            for (uuid, gpu) in &mut status.gpus {
                let ordinal = run.running.gpus.iter().position(|served| served == uuid);
                gpu.memory_limit_mib =
                    ordinal.and_then(|ordinal| confirmed.get(&ordinal)).map(|bytes| bytes >> 20);
                gpu.reason = match (ordinal, &difference) {
                    (None, _) => "not in the control daemon's hands until it restarts".to_owned(),
                    (Some(_), Some(difference)) => difference.clone(),
                    (Some(_), None) => String::new(),
                };
                gpu.full = run.capacity.full(uuid);
                gpu.unlisted_clients = run.capacity.unlisted(uuid);
            }
        });
        difference.is_some()
    }

    /// Shows the state of the control daemon.
    pub(super) fn show_state(&mut self) {
        let run = &mut *self.run;
        let progress = Progress {
            configured: run.configured,
            in_place: run.running.pipe_directory == self.worker.order.plan.pipe_directory,
            retiring: self.worker.is_retiring(),
        };
        let ends_when_idle = run.blockers.ends_when_idle();
        self.worker.reporter.update(|status| status.ends_when_idle = ends_when_idle);
        if !ends_when_idle {
            run.clients_unknown = None;
        }
        let Some(shown) = run.blockers.shown(progress) else { return };
        let unknown = run.clients_unknown.as_ref().map_or(String::new(), |why| {
            format!(
                "; its clients are not known ({why}), and `yunion-mpsctl apply --force` ends it with them"
            )
        });
        let reason = shown.reason + &unknown;
        if shown.settled {
            self.worker.reporter.enter(shown.state, shown.serving, &reason);
        } else {
            self.worker.reporter.pass_through(shown.state, shown.serving, &reason);
        }
    }
}
