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

/// The use of a control daemon that has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Judged {
    /// The control daemon has ended meanwhile.
    Ended(Failure),
    /// No program uses the control daemon.
    Idle,
    /// The control daemon has no client, but these programs without MPS prevent the start of its server.
    KeptOut(String),
    /// The control daemon has clients, or its clients are not known. The text says which of the two.
    Clients(String),
}

impl<S: Shell> Serving<'_, S> {
    /// Finds out if programs use the control daemon, which has failed.
    pub async fn judge(&mut self) -> Judged {
        // The control daemon may have ended: because the service has asked for its end, or because another process has killed
        // it.
        if self.shell.ends_now().await {
            return Judged::Ended(self.ended().await);
        }
        match self.in_use().await {
            // In compute mode `DEFAULT` a program that has the GPU open does not prevent the start of a server.
            Ok(0) if self.wanted.id.tenure() == Tenure::InTurns => Judged::Idle,
            Ok(0) => {
                let holders = self.shell.holders(&self.run.servers.alive()).await;
                if holders.is_empty() { Judged::Idle } else { Judged::KeptOut(holders) }
            }
            Ok(clients) => {
                Judged::Clients(format!("left running for its {clients}", clients = clients_counted(clients)))
            }
            Err(error) => Judged::Clients(format!("left running, since its clients are not known: {error}")),
        }
    }

    /// The number of clients of the control daemon. The error is the reason why the number is not known. The control daemon
    /// itself is asked first. The list of the control daemon is not used if it does not answer, if another control daemon answers
    /// in its directory, or after a fault. If the list is not used, the service looks at the child processes of the control
    /// daemon: clients need servers, which are children of the control daemon. NVML is asked last.
    pub(super) async fn in_use(&mut self) -> Result<usize, String> {
        let why = match self.count_its_clients().await {
            Ok(0) if self.is_any_server_faulted().await => {
                "the control daemon lists no client, but its list is not reliable after a fatal GPU error"
                    .to_owned()
            }
            // The control daemon is asked for its clients once more: a client may have come during the question about faults.
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

    /// The number of clients in the list of the control daemon.
    async fn count_its_clients(&mut self) -> Result<usize, String> {
        let clients = self.list_clients().await;
        clients.map(|clients| clients.values().flatten().count()).map_err(Failure::into_text)
    }

    /// The clients of the control daemon. If another control daemon has taken its directory before or during the question,
    /// the answer may be from that control daemon, so the result is an error.
    pub(super) async fn list_clients(&mut self) -> Result<ClientPids, Failure> {
        let elsewhere = "the control daemon does not listen in its pipe directory any more";
        if !self.listens_in_place() {
            return Err(Failure::Failed(elsewhere.to_owned()));
        }
        let clients = self.shell.client_pids(&self.run.servers.alive()).await;
        if self.listens_in_place() { clients } else { Err(Failure::Failed(elsewhere.to_owned())) }
    }

    /// Returns whether a server handles a fatal GPU error. The control daemon is asked too, since the log may not be writable.
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

    /// Ends the control daemon together with its clients, which the caller has reported. With a permit for an unused control
    /// daemon, the control daemon stays if a client has come since the clients were counted.
    ///
    /// # Errors
    /// The control daemon has not ended.
    pub async fn end(&mut self, may_end: Permit) -> Result<(), String> {
        self.continue_if_stopped();
        let has_ended = if may_end.cause() == Cause::Unused {
            self.close_door().await?;
            self.end_unused().await?
        } else {
            // With a permit for any other cause than `Unused`, the control daemon ends even if it has clients, so it does not
            // matter if a link can't be removed.
            let _ = self.shell.keep_waiting();
            self.run.door = Door::ClosedForGood;
            if matches!(may_end.cause(), Cause::Stop | Cause::Disabled) {
                self.shell.show(|view| view.enter(ControlDaemonState::Stopping, false, ""));
            } else if may_end.cause() == Cause::Forced {
                // The state must show at once that the control daemon is about to end, so that its slices are not given to new
                // containers.
                self.show_state();
            }
            self.shell.quit(may_end).await || self.shell.end_by_signal(may_end).await
        };
        if has_ended {
            return Ok(());
        }
        // If the request to end the control daemon got lost, the next check finds that it lives. A control daemon that lives on
        // gets its order again, and new clients are let in.
        let lives = "the control daemon was asked to end, and has not ended yet";
        self.missed(lives.to_owned());
        self.show_state();
        Err(lives.to_owned())
    }

    /// Asks the control daemon to end while the door is closed. Returns true if the control daemon has ended.
    async fn end_unused(&mut self) -> Result<bool, String> {
        let Some(may_end) = Permit::unused(self.in_use().await.ok()) else {
            self.open_door();
            return Err("a client connected while the service counted the clients".to_owned());
        };
        self.run.door = Door::ClosedForGood;
        if self.shell.quit_if_idle(may_end).await {
            return Ok(true);
        }
        // The control daemon was asked to end and still runs: it hangs, or it had a client that the service did not see. The
        // clients of the control daemon are counted again before a signal ends it.
        match Permit::unused(self.in_use().await.ok()) {
            Some(may_end) => Ok(self.shell.end_by_signal(may_end).await),
            None => Ok(false),
        }
    }
}
