//! Repairs a server after a fatal GPU error, and replaces a server that has ended. Each repair is the smallest step that is
//! enough.

use alloc::borrow::ToOwned;
use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;
use core::time::Duration;

use super::Serving;
use super::blocker::{Blocker, ClearedBy};
use super::effect::RunEffect;
use super::fault::{AfterGrace, FAULT_PAUSE, Fault, HealStep, after_grace, is_over, next_look, next_step};
use super::limits::TAKES_LIMITS;
use super::news::News;
use super::shell::{Failure, Shell};
use crate::mps::ServerStatus;
use crate::terms::ProcessId;
use crate::{CoreTime, HEALTHY_AGAIN, Permit, next_pause};

/// The pause between the end of a server and the start of the next server. The service starts the next server before its first
/// client comes.
#[derive(Debug)]
pub(super) struct Revival {
    pause: Duration,
    last_success: CoreTime,
}

impl Revival {
    pub(super) fn new(now: CoreTime) -> Self {
        Self { pause: Duration::ZERO, last_success: now }
    }

    /// The moment at which the next server starts. Each call makes the pause before the next start longer.
    fn next(&mut self, now: CoreTime) -> CoreTime {
        let revive_at = now + self.pause;
        self.pause = next_pause(self.pause);
        revive_at
    }
}

impl<S: Shell> Serving<'_, S> {
    pub(super) fn fault_seen(&mut self, server: u32) {
        if self.run.blockers.fault().is_none_or(|fault| fault.server != server) {
            // Another server may have been faulted before. The clients that its error has hit are reported before the new fault
            // replaces the old fault.
            self.tell_fault();
            self.run.blockers.put(Blocker::Faulted(Fault::new(server, self.shell.now())));
            let text = format!("server {server} met a fatal GPU error");
            self.shell.tell(News::ServerFault { server }, text);
            self.show_state();
        }
    }

    /// Records a line of the log about a fatal GPU error of the server. The line may report another error than the known error.
    pub(super) fn fault_told(&mut self, server: u32) {
        self.fault_seen(server);
        if let Some(fault) = self.fault() {
            fault.lines += 1;
        }
    }

    fn fault(&mut self) -> Option<&mut Fault> {
        self.run.blockers.fault_mut()
    }

    pub(super) fn client_hit(&mut self, server: u32, client: u32, ordinal: usize) {
        self.fault_seen(server);
        // The client may end in a moment. The service therefore finds out the client's owner at once, so that the message about
        // the client can name the owner.
        self.shell.carry_out(RunEffect::RememberClients([client].into()));
        if let Some(fault) = self.fault() {
            fault.clients.insert((ordinal, client));
        }
    }

    pub(super) async fn heal(&mut self) -> Result<(), Failure> {
        self.tell_fault();
        let now = self.shell.now();
        let Some(fault) = self.fault() else { return Ok(()) };
        let (server, age) = (fault.server, now.saturating_sub(fault.since));
        fault.due = now + next_look(age);
        let known = fault.clone();
        let status = self.server_status(server).await?;
        match next_step(status, age, self.wanted.fault_grace) {
            // Another control daemon has taken this control daemon's directory, and has answered. It does not know the faulted
            // server, so its answer says nothing about the server.
            HealStep::Recovered | HealStep::ServerGone if self.place_is_taken() => {}
            HealStep::Recovered => self.well_again(server).await?,
            HealStep::ServerGone => self.server_gone(server).await,
            HealStep::Wait => {}
            HealStep::LookForThoseHit => self.look_for_those_hit(server).await?,
            HealStep::LookWhoStays => self.look_who_stays(&known).await?,
        }
        self.show_state();
        Ok(())
    }

    /// Finds out if a client that was hit still runs. Driver 535 needs this function, since its control daemon can't report the
    /// status of a server.
    async fn look_for_those_hit(&mut self, server: u32) -> Result<(), Failure> {
        let clients = self.shell.clients(&[server]).await?;
        // Another control daemon may have taken the directory, and may have listed its own clients.
        if self.place_is_taken() {
            return Ok(());
        }
        self.read_on().await;
        let now = self.shell.now();
        let fault = self.run.blockers.fault_mut().filter(|fault| fault.server == server);
        let Some(fault) = fault else { return Ok(()) };
        let hit = fault.pids();
        let there = clients.into_iter().filter(|client| client.server == server).map(|client| client.pid);
        let left: BTreeSet<u32> = there.filter(|pid| hit.contains(pid)).collect();
        match is_over(&hit, |pid| left.contains(&pid), now.saturating_sub(fault.since)) {
            None => {}
            Some(true) => {
                // The server recovers a moment after its last client that was hit has ended, so the service waits for a moment.
                self.shell.pause(FAULT_PAUSE).await;
                self.well_again(server).await?;
            }
            Some(false) => {
                let there = self.shell.describe(&left);
                fault.held_up = Some(format!(
                    "these clients have not ended: {there}; end these clients: this driver does not report the \
                     status of a server, so the service takes the server for recovered only after these \
                     clients have ended"
                ));
            }
        }
        Ok(())
    }

    async fn well_again(&mut self, server: u32) -> Result<(), Failure> {
        let known = self.run.blockers.fault().cloned();
        // The server took no limits while it was faulted, and the order may have changed meanwhile. The recovered server
        // therefore gets the limits of the order now.
        if self.run.configured && !self.wanted.retiring {
            let limits = self.limits();
            self.set_live(server, &limits).await?;
        }
        // The server may have ended, or may have met another error, while it got its limits. The fault then stays, and the
        // service asks for the server's status again.
        let status = self.server_status(server).await?;
        self.read_on().await;
        let present = self.run.blockers.fault();
        let is_same = present.zip(known.as_ref()).is_some_and(|(present, known)| present.is_same(known));
        if is_same && TAKES_LIMITS.contains(&status) && !self.place_is_taken() {
            self.fault_is_over();
            self.shell.tell(News::Event, format!("server {server} has recovered"));
        }
        Ok(())
    }

    /// The UUIDs of the GPUs that the log names as hit. Empty if the log could not be written, or if an earlier process of the
    /// service has read the lines about the fault.
    fn gpus_hit(&self) -> BTreeSet<String> {
        let hit = self.run.blockers.fault().into_iter().flat_map(|fault| &fault.clients);
        hit.filter_map(|(ordinal, _)| self.run.gpus.get(*ordinal)).cloned().collect()
    }

    /// Reports each client that the fatal GPU error has hit. Each client is reported only once.
    pub(super) fn tell_fault(&mut self) {
        let Some((server, hit)) = self.run.take_hit() else { return };
        for (ordinal, clients) in hit {
            self.shell.carry_out(RunEffect::TellHit { server, ordinal, clients });
        }
    }

    /// Records that the fault is over. The clients that were hit are reported first. Then the state file records that the lines
    /// about the fault were read, so that the next process of the service does not report the fault again.
    fn fault_is_over(&mut self) {
        self.tell_fault();
        self.run.blockers.clear(ClearedBy::Healing);
        self.open_door();
        self.keep_state_file();
    }

    /// Ends the faulted server after its clients had their time to end, unless a client that was not hit would lose work. The
    /// command `terminate_client` would end less work, but it waits for a client that does not end by itself. Meanwhile the
    /// control daemon answers no other request (measured: 32 s, until the client ended).
    async fn look_who_stays(&mut self, known: &Fault) -> Result<(), Failure> {
        let server = known.server;
        let listed = self.shell.clients(&[server]).await?.into_iter();
        let mut clients = listed.filter(|client| client.server == server).map(|client| client.pid).collect();
        let unknown = self.add_clients_of_nvml(&known.pids(), &mut clients).await;
        let held_up = match after_grace(&known.pids(), self.run.gpus.len() == 1, clients) {
            AfterGrace::End(..) if unknown.is_some() => format!(
                "the service does not end the server, since not all its clients are known: {why}",
                why = unknown.unwrap_or_default()
            ),
            AfterGrace::End(may_end, stay) => match self.close_door().await {
                Ok(()) => {
                    let asked = self.end_faulted(known, may_end, &stay).await;
                    if asked != Ok(true) {
                        self.open_door();
                    }
                    return asked.map(drop);
                }
                Err(why) => format!("the service does not end the server: {why}"),
            },
            AfterGrace::GpuNotKnown(stay) => format!(
                "the service does not know which GPU had the error, so it does not end the server of these \
                 clients: {clients}; end the clients that get CUDA error 700",
                clients = self.shell.describe(&stay)
            ),
            AfterGrace::OthersAreWell(stay, others) => {
                let (hit, healthy) = (self.shell.describe(&stay), clients_counted(others));
                format!(
                    "end these clients, which have lost their work by the error: {hit}; the service \
                     does not end the server, since it has {healthy} on healthy GPUs"
                )
            }
        };
        if let Some(fault) = self.fault() {
            fault.held_up = Some(held_up);
        }
        Ok(())
    }

    /// Ends a faulted server. The server's clients have lost their work. Returns true if the control daemon was asked to end
    /// the server. The caller has closed the door (see `door.rs`). Before that, the server may have recovered, taken other
    /// clients, and met another error that is missing from the log. The service therefore asks for the server's status last,
    /// while the door is closed: a faulted server takes no client, and a server that recovers now gets no client.
    async fn end_faulted(
        &mut self,
        known: &Fault,
        may_end: Permit,
        stay: &BTreeSet<u32>,
    ) -> Result<bool, Failure> {
        let server = known.server;
        let processes = self.processes(stay);
        let is_same = self.run.blockers.fault().is_some_and(|fault| fault.is_same(known));
        if !is_same || self.server_status(server).await? != ServerStatus::Fault {
            return Ok(false);
        }
        // While the control daemon can't be reached, the service closes the door even if a link still points to the control
        // daemon. The control daemon answers now, so new programs could reach the server through this link. The service
        // therefore tries again to make all links point to the waiting socket.
        if self.shell.keep_waiting().is_err() {
            return Ok(false);
        }
        if stay.is_empty() {
            let text = format!(
                "server {server} was ended, since it had no client and did not recover from its fatal GPU \
                 error"
            );
            self.shell.tell(News::Warning, text);
            self.shell.shut_down_idle_server(server, may_end).await?;
            return Ok(true);
        }
        if self.processes(stay).is_disjoint(&processes) {
            return Ok(false);
        }
        let stay = self.shell.describe(stay);
        let text = format!(
            "server {server} was ended, since these clients still ran long after its fatal GPU error: {stay}"
        );
        self.shell.tell(News::Warning, text);
        self.shell.shut_down_server(server, may_end).await?;
        Ok(true)
    }

    fn processes(&self, pids: &BTreeSet<u32>) -> BTreeSet<ProcessId> {
        pids.iter().filter_map(|pid| self.shell.process(*pid)).collect()
    }

    /// Adds the clients that NVML lists, since the control daemon may list no client after a fatal GPU error. Returns NVML's
    /// error if a client that was not hit may be missing. While the control daemon lists clients, an error about a GPU that was
    /// hit does not count: all clients of the server on this GPU were hit, and the server takes no new client until it has
    /// recovered.
    async fn add_clients_of_nvml(
        &mut self,
        named: &BTreeSet<u32>,
        clients: &mut BTreeSet<u32>,
    ) -> Option<String> {
        let (mut unknown, lists_nobody) = (None, clients.is_empty());
        let hit = self.gpus_hit();
        for (gpu, there) in self.shell.clients_on_gpus(named).await {
            match there {
                Ok(there) => clients.extend(there),
                Err(error) if lists_nobody || !hit.contains(&gpu) => unknown = Some(error),
                Err(_) => {}
            }
        }
        unknown
    }

    /// Watches the server, so that the service notices its end even if the log does not report it.
    pub(super) fn watch_server(&mut self, server: u32) {
        let has_ended = self.run.servers.get(server).is_some_and(|server| !server.is_running());
        if !has_ended && self.run.watched_servers.insert(server) {
            self.shell.carry_out(RunEffect::WatchServer(server));
        }
    }

    pub(super) async fn server_status(&mut self, server: u32) -> Result<ServerStatus, Failure> {
        Ok(self.shell.inspect(&[server], None).await?.status(server))
    }

    /// Returns whether a server with the status FAULT really met a fatal GPU error, though the log does not report one.
    /// Measured on an H200: a server that a signal has killed has this status too, until its control daemon notices the end.
    pub(super) async fn still_faulted(&mut self, server: u32) -> Result<bool, Failure> {
        self.shell.pause(FAULT_PAUSE).await;
        Ok(self.server_status(server).await? == ServerStatus::Fault)
    }

    pub(super) async fn forget_server(&mut self, server: u32) {
        if self.fault().is_some_and(|fault| fault.server == server) {
            self.read_on().await;
        }
        if self.fault().is_some_and(|fault| fault.server == server) {
            self.fault_is_over();
        }
        self.run.servers.has_ended(server);
        self.run.watched_servers.remove(&server);
        self.run.capacity.some_left(&self.wanted.gpus, self.shell.now());
    }

    pub(super) async fn server_gone(&mut self, server: u32) {
        let known = self.run.watched_servers.contains(&server);
        self.forget_server(server).await;
        if !known {
            return;
        }
        self.shell.tell(News::Event, format!("server {server} has ended"));
        // The clients of a server end with it, so the clients must be counted again.
        self.run.client_left = true;
        self.miss_server();
        self.compare_servers();
        self.show_state();
    }

    /// Plans the start of a server if no server runs, since in multi-user mode a server starts before its first client comes.
    /// Returns true if no start was planned before.
    pub(super) fn miss_server(&mut self) -> bool {
        let run = &mut *self.run;
        let is_wanted = run.configured && run.multiuser && self.wanted.prewarm && !self.wanted.retiring;
        let is_missed = run.servers.alive().is_empty() && run.blockers.revival().is_none();
        if !is_wanted || !is_missed || run.blockers.fault().is_some() || run.blockers.is_unreached() {
            return false;
        }
        let (now, ended) = (self.shell.now(), run.servers.last_ended());
        let has_served =
            ended.is_some_and(|(pid, server)| server.has_ended || run.watched_servers.contains(&pid));
        if has_served && now.saturating_sub(run.revival.last_success) >= HEALTHY_AGAIN {
            run.revival.pause = Duration::ZERO;
        }
        let revive_at = run.revival.next(now);
        let reason = self.how_the_server_ended();
        self.run.blockers.put(Blocker::ServerEnded { reason, revive_at });
        true
    }

    /// The end of the last server, in words.
    pub(super) fn how_the_server_ended(&self) -> String {
        let words = self.shell.words();
        match self.run.servers.last_ended().map(|(pid, server)| (pid, server.exit_status)) {
            Some((pid, Some(status))) => format!("server {pid} exited with status {status}{words}"),
            Some((pid, None)) => format!("server {pid} has ended{words}"),
            None => format!("the server has ended{words}"),
        }
    }

    /// Starts the next server, unless a new client has already caused the start of a server.
    pub(super) async fn revive(&mut self) -> Result<(), Failure> {
        let before = self.run.blockers.revival().map(|(_, reason)| reason.to_owned()).unwrap_or_default();
        self.run.blockers.clear(ClearedBy::Revival);
        let limits = self.limits();
        // The next server starts with the control daemon's defaults, which another program may have changed. The service
        // therefore checks and corrects the defaults first.
        let look = self.shell.inspect(&[], Some(&limits)).await?;
        self.keep_defaults(&look, &limits).await?;
        match self.prewarm(&limits).await {
            Ok(()) => {
                self.run.blockers.clear(ClearedBy::Revival);
                self.run.revival.last_success = self.shell.now();
            }
            Err(ended @ Failure::Ended { .. }) => return Err(ended),
            Err(failure) => {
                let reason = failure.into_text();
                if before != reason {
                    let again = tried_again(self.run.revival.pause);
                    self.shell.tell(News::Warning, format!("{reason}; {again}"));
                }
                let revive_at = self.run.revival.next(self.shell.now());
                self.run.blockers.put(Blocker::ServerEnded { reason, revive_at });
            }
        }
        self.compare_servers();
        self.show_state();
        Ok(())
    }
}

pub fn tried_again(pause: Duration) -> String {
    if pause.is_zero() {
        "retrying at once".to_owned()
    } else {
        format!("retrying in {:.1} s", pause.as_secs_f64())
    }
}

pub(crate) fn clients_counted(count: usize) -> String {
    if count == 1 { "1 client".to_owned() } else { format!("{count} clients") }
}
