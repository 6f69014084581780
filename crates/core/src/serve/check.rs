//! The health check of a control daemon that serves, and its consequences.

use alloc::borrow::ToOwned;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;

use super::blocker::{Blocker, Change, ClearedBy, Progress};
use super::door::Door;
use super::effect::RunEffect;
use super::gpus::{ProcessesOnGpus, clients_among};
use super::news::News;
use super::shell::{Failure, Shell};
use super::{Ended, Serving};
use crate::GpuUuid;
use crate::mps::{Client, ServerStatus};
use crate::terms::GpuProcess;

impl<S: Shell> Serving<'_, S> {
    /// Checks the answers, servers, limits, compute modes and files of the control daemon.
    pub(super) async fn check(&mut self) -> Result<Option<Ended>, Failure> {
        self.continue_if_stopped();
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
                    if self.still_faulted(server).await? {
                        self.fault_seen(server);
                    }
                }
                self.run.blockers.clear(ClearedBy::Access);
                self.let_users_in();
                if self.run.configured
                    && let Some(bad) = self.shell.keep_links()
                {
                    self.run.blockers.put(Blocker::BadDirectory(bad));
                }
                if change == Change::AnswersAgain {
                    let text = format!("control daemon {id} answers again", id = self.wanted.id);
                    self.shell.tell(News::Event, text);
                    self.learn_clients().await;
                    // The control daemon may have missed commands while it did not answer, so it is configured again.
                    return Ok(Some(Ended::Again));
                }
                answer = Some(look);
            }
            Err(Failure::Silent(error)) => self.missed(error),
            Err(Failure::Unreachable(error)) => self.is_unreachable(error),
            Err(error) => return Err(error),
        }
        if let Some(look) = &answer
            && !self.run.blockers.has_failed_check()
        {
            self.keep_limits(look).await?;
        }
        let there = self.read_gpus().await?;
        let in_use = !clients_among(&there).is_empty();
        if in_use || self.run.in_use {
            self.shell.carry_out(RunEffect::CheckedInUse);
        }
        self.run.in_use = in_use;
        if in_use {
            self.run.quiet_since = self.shell.now();
        }
        self.run.capacity.suspect(&self.wanted.gpus, &there, self.shell.now());
        self.reach.keep_modes(&mut self.shell, &self.wanted, &self.run.gpus).await;
        // After a fatal GPU error the control daemon's list of clients may be incomplete, so clients could be taken for
        // programs without MPS.
        if answer.is_some() && !self.run.blockers.has(ClearedBy::Healing) {
            self.find_bypasses(there).await;
        }
        self.find_misfit();
        self.compare_servers();
        self.keep_state_file();
        self.shell.carry_out(RunEffect::RotateLog);
        self.show_state();
        Ok(None)
    }

    pub(super) async fn read_gpus(&mut self) -> Result<ProcessesOnGpus, Failure> {
        match self.reach.look(&mut self.shell, &self.wanted).await {
            Some(there) => Ok(there),
            None => Err(self.ended().await),
        }
    }

    /// Searches for bypasses on the GPUs of the control daemon. A GPU that is out of service is skipped, since another control
    /// daemon may have it, with servers and clients of its own. The control daemon is asked for its clients only if it may have
    /// clients, or if a GPU has other processes than the known servers. If the control daemon does not list its clients, the
    /// bypasses of the last search stay.
    pub(super) async fn find_bypasses(&mut self, mut there: ProcessesOnGpus) {
        there.retain(|gpu, _| self.run.gpus.contains(gpu));
        let mut servers: BTreeSet<u32> = self.run.servers.alive().into_iter().collect();
        let mut clients = clients_among(&there);
        self.shell.carry_out(RunEffect::RememberClients(clients.clone()));
        self.run.bypasses_at = None;
        let are_all_servers = there.values().flatten().all(|process| servers.contains(&process.pid));
        if !are_all_servers || self.shell.has_clients() {
            // The control daemon knows a client before the client appears on the GPU. The control daemon is therefore asked
            // after NVML; otherwise a new client could be taken for a bypass.
            let Ok(all) = self.list_clients().await else {
                self.run.bypasses_at = self.wanted.guard_period.map(|period| self.shell.now() + period);
                return;
            };
            let listed: BTreeSet<u32> = all.values().flatten().copied().collect();
            // If the control daemon's list lacks a client that NVML lists, a fatal GPU error may have made the list incomplete.
            // The clients that are missing from the list would be taken for bypasses, so the list is not used after such an
            // error.
            if !clients.is_subset(&listed) && self.is_any_server_faulted().await {
                return;
            }
            let is_there = |pid: u32, there: &[GpuProcess]| there.iter().any(|process| process.pid == pid);
            let gpus_of = |pid: u32| {
                let its = there.iter().filter(|(_, there)| is_there(pid, there));
                its.map(|(gpu, _)| gpu.clone()).collect()
            };
            let used = listed.iter().map(|pid| (*pid, gpus_of(*pid))).collect();
            self.shell.carry_out(RunEffect::ClientsAre(used));
            servers = all.into_keys().collect();
            clients = listed;
        }
        let (now, ours) = (self.shell.now(), (&servers, &clients));
        let due = self.reach.find_bypasses(&mut self.shell, &self.wanted, &there, ours, now);
        let guard = self.wanted.guard_period.map(|period| now + period);
        self.run.bypasses_at = due.into_iter().chain(guard).min();
    }

    /// Asks the control daemon for its clients, since lines of the log about clients may be missing.
    pub(super) async fn learn_clients(&mut self) {
        if self.listens_in_place()
            && let Ok(clients) = self.shell.clients(&self.run.servers.alive()).await
        {
            self.list_is(&clients);
        }
    }

    /// Records the clients that the control daemon lists. The list is ignored if another control daemon has taken the
    /// directory, since it lists its own clients. The list is also ignored after a fatal GPU error, since it may be incomplete.
    /// Returns false if the list is ignored.
    pub(super) fn list_is(&mut self, clients: &[Client]) -> bool {
        if !self.listens_in_place() || self.run.blockers.has(ClearedBy::Healing) {
            return false;
        }
        let mut listed: BTreeMap<u32, BTreeSet<GpuUuid>> = BTreeMap::new();
        for client in clients {
            let gpus = self.run.gpus.iter().filter(|uuid| client.is_on(uuid)).cloned();
            listed.entry(client.pid).or_default().extend(gpus);
        }
        self.shell.carry_out(RunEffect::ClientsAre(listed));
        true
    }

    /// Updates the state file, with which the next process of the service takes the control daemon over. If the order needs
    /// another control daemon anyway, the service does not report that the log can't be written.
    pub(super) fn keep_state_file(&mut self) {
        // The clients that a fatal GPU error has hit must be reported before the state file records that the log's lines were
        // read. The next process of the service reports only later lines.
        self.tell_fault();
        let stays = !self.run.blockers.has(ClearedBy::Order);
        self.shell.carry_out(RunEffect::KeepStateFile { stays });
    }

    /// Prepares the control daemon for the next process of the service, which takes it over.
    pub fn leave(&mut self) {
        self.keep_state_file();
    }

    /// Records that the control daemon runs, but that its sockets were removed. The control daemon can't make its sockets
    /// again.
    pub(super) fn is_unreachable(&mut self, error: String) {
        self.run.blockers.observe(Some(Blocker::DirectoryGone(error)));
        self.show_state();
    }

    /// Returns whether another control daemon answers in this control daemon's directory. The service must then send no command
    /// there, since the other control daemon would get the command.
    pub(super) fn place_is_taken(&mut self) -> bool {
        let own = self.shell.pid();
        let other = self.shell.listener().filter(|listener| *listener != own);
        if let Some(other) = other {
            self.run.blockers.observe(Some(Blocker::PlaceTaken(other)));
        }
        other.is_some()
    }

    pub(super) fn let_users_in(&mut self) {
        for bad in self.shell.let_users_in() {
            self.run.blockers.put(Blocker::BadDirectory(bad));
        }
    }

    /// Publishes the servers and their limits, and compares the limits in the log with the order. Returns true if a limit
    /// differs.
    pub(super) fn compare_servers(&mut self) -> bool {
        let run = &*self.run;
        let limits = run.limits(&self.wanted);
        let alive = run.servers.alive();
        let newest = alive.iter().rev().find_map(|pid| Some((*pid, run.servers.get(*pid)?)));
        let difference = newest
            .filter(|(_, server)| server.has_written(&limits))
            .and_then(|(pid, server)| Some(format!("server {pid}: {}", server.differs_from(&limits)?)));
        let confirmed = newest.map(|(_, server)| server.memory_bytes.clone()).unwrap_or_default();
        self.shell.show(|view| {
            view.servers.clone_from(&alive);
            for (uuid, gpu) in &mut view.gpus {
                let ordinal = run.gpus.iter().position(|served| served == uuid);
                gpu.reason = match (ordinal, &difference) {
                    (None, _) => "the control daemon serves this GPU only after its next restart".to_owned(),
                    (Some(_), Some(difference)) => difference.clone(),
                    (Some(_), None) => String::new(),
                };
                let bytes = ordinal.and_then(|ordinal| confirmed.get(&ordinal));
                gpu.memory_limit_mib = bytes.map(|bytes| bytes >> 20);
                gpu.full = run.capacity.full(uuid);
                gpu.unlisted_clients = run.capacity.unlisted(uuid);
            }
        });
        difference.is_some()
    }

    pub(super) fn show_state(&mut self) {
        let run = &mut *self.run;
        let progress = Progress {
            configured: run.configured,
            in_place: self.shell.is_in_place(),
            leads: matches!(run.door, Door::Open | Door::Opened),
            retiring: self.wanted.retiring,
        };
        if !run.blockers.ends_when_idle() {
            run.clients_unknown = None;
        }
        self.shell.show(|view| run.blockers.show(view, progress, run.clients_unknown.as_deref()));
    }
}
