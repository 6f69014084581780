//! Finds out if programs use a control daemon, and ends the control daemon.

use alloc::borrow::ToOwned;
use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;

use super::Serving;
use super::door::Door;
use super::heal::clients_counted;
use super::shell::{Failure, Shell};
use crate::mps::{ClientPids, Inspection, ServerStatus};
use crate::view::ControlDaemonState;
use crate::{Cause, Permit, Tenure};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Judged {
    Ended(Failure),
    Idle,
    /// The control daemon has no client, but these programs without MPS prevent the start of its server.
    KeptOut(String),
    /// The control daemon has clients, or the service can't find out if it has clients. The text says which of the two.
    Clients(String),
}

impl<S: Shell> Serving<'_, S> {
    pub async fn judge(&mut self) -> Judged {
        // The control daemon may have ended by now, since the service has asked for its end or another process has killed it.
        if self.shell.ends_now().await {
            return Judged::Ended(self.ended().await);
        }
        match self.in_use().await {
            // The tenure `InTurns` means compute mode `DEFAULT`. In this mode, a program that has the GPU open does not prevent
            // the start of a server.
            Ok(0) if self.wanted.id.tenure() == Tenure::InTurns => Judged::Idle,
            Ok(0) => {
                let holders = self.shell.holders(&self.run.servers.alive()).await;
                if holders.is_empty() { Judged::Idle } else { Judged::KeptOut(holders) }
            }
            Ok(clients) => Judged::Clients(format!(
                "the control daemon keeps running for its {clients}",
                clients = clients_counted(clients)
            )),
            Err(error) => Judged::Clients(format!(
                "the control daemon keeps running, since its clients are not known: {error}"
            )),
        }
    }

    /// The number of clients of the control daemon, or the reason why the number is not known. The service asks the control
    /// daemon first. The control daemon's list does not count after a fault, or if another control daemon may have answered.
    /// The service then asks if the control daemon has child processes: clients need servers, and servers are child processes
    /// of the control daemon. NVML is asked last.
    pub(super) async fn in_use(&mut self) -> Result<usize, String> {
        let why = match self.count_its_clients().await {
            Ok(0) if self.is_any_server_faulted().await => {
                "the control daemon lists no client, but its list is not reliable after a fatal GPU error"
                    .to_owned()
            }
            // A client may have connected while the service asked about faults, so the service counts the clients again.
            Ok(0) => return self.count_its_clients().await,
            Ok(clients) => return Ok(clients),
            Err(why) => why,
        };
        if self.shell.has_children() == Some(false) {
            return Ok(0);
        }
        let mut clients = BTreeSet::new();
        let mut unknown = None;
        for there in self.shell.clients_on_gpus(&BTreeSet::new()).await.into_values() {
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

    async fn count_its_clients(&mut self) -> Result<usize, String> {
        let clients = self.list_clients().await;
        clients.map(|clients| clients.values().flatten().count()).map_err(Failure::into_text)
    }

    /// The clients that the control daemon lists. The result is an error if another control daemon listens in the directory
    /// before or after the question, since that control daemon may have answered.
    pub(super) async fn list_clients(&mut self) -> Result<ClientPids, Failure> {
        let elsewhere = "the control daemon does not listen in its pipe directory any more";
        if !self.listens_in_place() {
            return Err(Failure::Failed(elsewhere.to_owned()));
        }
        let clients = self.shell.client_pids(&self.run.servers.alive()).await;
        if self.listens_in_place() { clients } else { Err(Failure::Failed(elsewhere.to_owned())) }
    }

    /// Returns whether a server handles a fatal GPU error. The service also asks the control daemon, since lines are missing
    /// from the log while it can't be written.
    pub(super) async fn is_any_server_faulted(&mut self) -> bool {
        self.read_on().await;
        if self.run.blockers.fault().is_some() {
            return true;
        }
        let known = self.run.servers.alive();
        let mut look = self.shell.inspect(&known, None).await;
        if let Ok(Inspection { servers, .. }) = &look
            && servers.iter().any(|server| !known.contains(server))
        {
            look = self.shell.inspect(&servers.clone(), None).await;
        }
        look.map_or(true, |look| look.with(&[ServerStatus::Fault]).next().is_some())
    }

    pub(super) fn listens_in_place(&self) -> bool {
        self.shell.listener() == Some(self.shell.pid())
    }

    /// Ends the control daemon together with its clients. The caller has already reported these clients. With a permit for
    /// [`Cause::Unused`], the control daemon is not ended if a client has come since the clients were counted.
    ///
    /// # Errors
    /// The control daemon has not ended.
    pub async fn end(&mut self, may_end: Permit) -> Result<(), String> {
        self.continue_if_stopped();
        let has_ended = if may_end.cause() == Cause::Unused {
            self.close_door().await?;
            self.end_unused().await?
        } else {
            // An error means that a link still leads new programs to the control daemon. The error is ignored, since the
            // control daemon ends even if it has clients.
            let _ = self.shell.keep_waiting();
            self.run.door = Door::ClosedForGood;
            if matches!(may_end.cause(), Cause::Stop | Cause::Disabled) {
                self.shell.show(|view| view.enter(ControlDaemonState::Stopping, false, ""));
            } else if may_end.cause() == Cause::Forced {
                // The published state must show at once that the control daemon is about to end, so that no new container gets
                // its slices.
                self.show_state();
            }
            self.shell.quit(may_end).await || self.shell.end_by_signal(may_end).await
        };
        if has_ended {
            return Ok(());
        }
        // The request to end the control daemon may be lost. If the next check finds that the control daemon runs, it gets its
        // order again and takes new clients.
        let lives = "the control daemon was asked to end, and has not ended yet";
        self.missed(lives.to_owned());
        self.show_state();
        Err(lives.to_owned())
    }

    /// Asks the control daemon to end. The caller has already closed the door (see `door.rs`), so new programs wait. Returns
    /// true if the control daemon has ended.
    async fn end_unused(&mut self) -> Result<bool, String> {
        let Some(may_end) = Permit::unused(self.in_use().await.ok()) else {
            self.open_door();
            return Err("a client connected while the service counted the clients".to_owned());
        };
        self.run.door = Door::ClosedForGood;
        if self.shell.quit_if_idle(may_end).await {
            return Ok(true);
        }
        // The control daemon was asked to end and still runs. It hangs, or it had a client that the service did not see. The
        // service counts the clients again before a signal ends the control daemon.
        match Permit::unused(self.in_use().await.ok()) {
            Some(may_end) => Ok(self.shell.end_by_signal(may_end).await),
            None => Ok(false),
        }
    }
}
