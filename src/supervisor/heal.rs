//! Mends a server that met a fatal GPU error, and replaces one that has ended: always with the smallest step that
//! helps.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mps_core::HEALTHY_AGAIN;
use mps_core::fault::{self, AfterGrace, FAULT_PAUSE, FaultyServer, HealStep};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::message::{Message, Subject};
use crate::mps::control::{Client, Control, ControlError, ServerStatus};
use crate::mps::process;
use common::counted::counted;
use common::host::proc;
use common::membership::Slices;

use super::blocker::{Blocker, ClearedBy};
use super::fault::Fault;
use super::run::Run;
use super::status::Reporter;
use super::{ClientFault, Failure, Serving, tried_again};

/// The most clients that one message names.
const NAMED: usize = 32;

/// Measured: the client that this line named was a bystander.
const DOUBT: &str = "the log can't tell which of them caused it: its line \"Client {PID: ...} encountered a fatal GPU \
                     error\" names a client that was hit, and is no proof against it";

impl Run {
    /// Tells which clients were hit, each once.
    pub(super) fn tell_fault(&mut self, reporter: &Reporter, faults: &mpsc::Sender<ClientFault>) {
        let Some(fault) = self.blockers.fault_mut() else { return };
        let new = &fault.clients - &fault.told;
        fault.told.clone_from(&fault.clients);
        let mut hit: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        for (ordinal, client) in new {
            hit.entry(ordinal).or_default().push(client);
        }
        for (ordinal, pids) in hit {
            let gpu_uuid = self.running.gpus.get(ordinal).cloned().unwrap_or_default();
            let reason = format!("server {} met a fatal GPU error on device {ordinal}", fault.server);
            let control = reporter.id();
            let about = Subject {
                control: Some(&control),
                server: Some(fault.server),
                ordinal: Some(ordinal),
                ..Subject::gpu(&gpu_uuid)
            };
            let named: Vec<String> = pids.iter().map(|pid| self.known_clients.describe(*pid)).collect();
            let text = format!("{reason}; clients that were hit: {}", shortened(&named));
            Message::ClientsHit.log(about, format_args!("{text}; {DOUBT}"));
            for (pid, named) in pids.iter().zip(named) {
                Message::log_client(about, *pid, format_args!("hit by the fatal GPU error: {named}"));
            }
            reporter.keep_event(text.clone());
            if let Err(error) = faults.try_send(ClientFault { gpu_uuid, pids, reason: text }) {
                tracing::debug!("a fault is not told: {error}");
            }
        }
    }
}

impl Serving<'_> {
    /// The log, or the server itself, says that it met a fatal GPU error.
    pub(super) fn fault_seen(&mut self, server: u32) {
        if self.run.blockers.fault().is_none_or(|fault| fault.server != server) {
            self.run.blockers.put(Blocker::Faulted(Fault::new(server)));
            self.worker.reporter.update(|status| status.view.faults += 1);
            let about = Subject { server: Some(server), ..Subject::default() };
            let text = format!("server {server} met a fatal GPU error");
            self.worker.reporter.report(Message::ServerFault, about, text);
            self.show_state();
        }
    }

    fn fault(&mut self) -> Option<&mut Fault> {
        self.run.blockers.fault_mut()
    }

    /// The log says that a client is torn down for it.
    pub(super) fn client_hit(&mut self, server: u32, client: u32, ordinal: usize) {
        self.fault_seen(server);
        // It may be there for a moment, if it came before the service.
        self.run.known_clients.remember([client], || Slices::from_plans([&self.worker.order.plan]));
        if let Some(fault) = self.fault() {
            fault.clients.insert((ordinal, client));
        }
    }

    /// The next step against a fault.
    pub(super) async fn heal(&mut self) -> Result<(), Failure> {
        self.tell_fault();
        let Some(fault) = self.fault() else { return Ok(()) };
        let (server, age) = (fault.server, fault.since.elapsed());
        fault.due = Instant::now() + fault::next_look(age);
        let status = match self.run.control.server_status(server).await? {
            ServerStatus::Active => FaultyServer::Well,
            ServerStatus::Unsupported => FaultyServer::Unsaid,
            ServerStatus::Gone => FaultyServer::Gone,
            ServerStatus::Initializing => FaultyServer::Coming,
            ServerStatus::Fault => FaultyServer::Faulted,
        };
        match fault::next_step(status, age, self.worker.order.supervision.fault_grace) {
            HealStep::Recovered => self.well_again(server).await,
            HealStep::ServerGone => self.server_gone(server).await,
            HealStep::Wait => {}
            HealStep::LookForThoseHit => self.look_for_those_hit(server).await?,
            HealStep::LookWhoStays => self.look_who_stays(server).await?,
        }
        self.show_state();
        Ok(())
    }

    /// A control daemon of driver 535 can't say how its server is.
    async fn look_for_those_hit(&mut self, server: u32) -> Result<(), ControlError> {
        let mut clients = self.run.control.clients(&[server]).await?;
        self.read_on().await;
        let Some(fault) = self.fault() else { return Ok(()) };
        let hit: BTreeSet<u32> = fault.clients.iter().map(|(_, pid)| *pid).collect();
        clients.retain(|client| client.server == server && hit.contains(&client.pid));
        let is_left = |pid| clients.iter().any(|client| client.pid == pid);
        match fault::is_over(&hit, is_left, fault.since.elapsed()) {
            None => {}
            Some(true) => self.well_again(server).await,
            Some(false) => {
                fault.held_up = Some(format!(
                    "still there: {}; end them, since this driver does not say when the server is well",
                    describe(&clients)
                ));
            }
        }
        Ok(())
    }

    async fn well_again(&mut self, server: u32) {
        let known = self.clients_hit();
        self.read_on().await;
        // The log has named more clients, so the server may have met another error: it is asked again.
        if self.clients_hit() > known {
            return;
        }
        self.run.blockers.clear(ClearedBy::Healing);
        self.worker.reporter.event(format!("server {server} has recovered"));
    }

    fn clients_hit(&self) -> usize {
        self.run.blockers.fault().map_or(0, |fault| fault.clients.len())
    }

    /// The GPUs that the log has named. It names none if it could not be written, or if a former service has read that
    /// part.
    fn gpus_hit(&self) -> BTreeSet<String> {
        let hit = self.run.blockers.fault().into_iter().flat_map(|fault| &fault.clients);
        hit.filter_map(|(ordinal, _)| self.run.running.gpus.get(*ordinal)).cloned().collect()
    }

    fn tell_fault(&mut self) {
        self.run.tell_fault(&self.worker.reporter, &self.worker.tools.faults);
    }

    /// After the grace: ends the server, if nobody else loses work with it. `terminate_client` would be the smaller step, but
    /// it waits for the client, which is why we are here, and the control daemon does nothing else for anybody meanwhile
    /// (measured: 32 s, until the client ended).
    async fn look_who_stays(&mut self, server: u32) -> Result<(), Failure> {
        let mut clients = self.run.control.clients(&[server]).await?;
        clients.retain(|client| client.server == server);
        let held_up = match fault::after_grace(&self.gpus_hit(), &clients, |client| &client.gpu_prefix) {
            AfterGrace::End(may_end, stay) => {
                let stay = describe(stay);
                let text = format!("server {server} ended: still there long after its fault: {stay}");
                self.worker.reporter.warning(text);
                return Ok(self.run.control.shut_down_server(server, may_end).await?);
            }
            AfterGrace::GpuNotKnown(stay) => format!(
                "which GPU it was is not known any more, so the server is left to its clients on several of them: {}; \
                 end the clients that get CUDA error 700",
                describe(stay)
            ),
            AfterGrace::OthersAreWell(stay, others) => format!(
                "still there: {}; end them, since the server is left to its {} on GPUs that are well",
                describe(stay),
                counted(others, "client")
            ),
        };
        if let Some(fault) = self.fault() {
            fault.held_up = Some(held_up);
        }
        Ok(())
    }

    /// Makes sure that the server's end becomes known.
    pub(super) fn watch_server(&mut self, server: u32) {
        if !self.run.watched_servers.insert(server) {
            return;
        }
        let ended = self.run.server_ended.clone();
        if std::mem::replace(&mut self.worker.has_served, true) {
            self.worker.reporter.update(|status| status.view.server_restarts += 1);
        }
        tokio::spawn(async move {
            process::ended(server).await;
            // An error means that the run has ended.
            let _ = ended.send(server).await;
        });
    }

    pub(super) async fn forget_server(&mut self, server: u32) {
        if self.fault().is_some_and(|fault| fault.server == server) {
            self.read_on().await;
            self.tell_fault();
        }
        if self.fault().is_some_and(|fault| fault.server == server) {
            self.run.blockers.clear(ClearedBy::Healing);
        }
        self.run.servers.forget(server);
        self.run.watched_servers.remove(&server);
    }

    /// A server has ended. In multi-user mode the next one is started ahead of its first client.
    pub(super) async fn server_gone(&mut self, server: u32) {
        let known = self.run.watched_servers.contains(&server);
        self.forget_server(server).await;
        if !known {
            return;
        }
        self.worker.reporter.event(format!("server {server} has ended"));
        let run = &mut *self.run;
        // Its clients have gone with it.
        run.client_left = true;
        let wanted = !self.worker.is_retiring() && self.worker.order.plan.prewarm && run.running.multiuser;
        if wanted && run.servers.alive().is_empty() {
            if run.revival.last_success.elapsed() >= HEALTHY_AGAIN {
                run.revival.pause = Duration::ZERO;
            }
            let reason = format!("server {server} has ended{}", run.words());
            let revive_at = run.revival.next();
            run.blockers.put(Blocker::ServerEnded { reason, revive_at });
        }
        self.compare_servers();
        self.show_state();
    }

    /// Starts the next server, unless a client was faster.
    pub(super) async fn revive(&mut self) -> Result<(), Failure> {
        let before = self.run.blockers.revival().map(|(_, reason)| reason.to_owned()).unwrap_or_default();
        self.run.blockers.clear(ClearedBy::Revival);
        let limits = self.limits();
        // Otherwise the server would start with defaults that somebody else has changed.
        let look = self.run.control.inspect(&[], Some(&limits)).await?;
        self.keep_defaults(&look, &limits).await?;
        match self.prewarm(&limits).await {
            Ok(()) => {
                self.run.blockers.clear(ClearedBy::Revival);
                self.run.revival.last_success = Instant::now();
            }
            Err(ended @ Failure::Ended { .. }) => return Err(ended),
            Err(failure) => {
                let reason = failure.into_text();
                if before != reason {
                    let again = tried_again(self.run.revival.pause);
                    self.worker.reporter.warning(format!("{reason}; {again}"));
                }
                let revive_at = self.run.revival.next();
                self.run.blockers.put(Blocker::ServerEnded { reason, revive_at });
            }
        }
        self.compare_servers();
        self.show_state();
        Ok(())
    }
}

/// The first of these clients, each in words.
fn shortened(named: &[String]) -> String {
    let mut words: Vec<String> = named.iter().take(NAMED).cloned().collect();
    if let Some(more) = named.len().checked_sub(NAMED).filter(|more| *more > 0) {
        words.push(format!("and {more} more"));
    }
    words.join("; ")
}

/// These clients in words: `1153 (/tmp/work), 1154 (/tmp/work)`.
fn describe<'c>(clients: impl IntoIterator<Item = &'c Client>) -> String {
    let named = clients.into_iter().map(|client| format!("{} ({})", client.pid, proc::program(client.pid)));
    named.collect::<Vec<_>>().join(", ")
}

/// True if a server that says FAULT really met a fatal GPU error, though the log tells of none. A server that was
/// killed by a signal says FAULT too, until its control daemon notes its end (H200).
pub(super) async fn still_faulted(control: &Control, server: u32) -> Result<bool, ControlError> {
    tokio::time::sleep(FAULT_PAUSE).await;
    Ok(control.server_status(server).await? == ServerStatus::Fault)
}
