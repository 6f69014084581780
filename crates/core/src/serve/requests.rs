//! Carries out the requests of administrators: to make a change that waits for the end of clients, and to replace the server.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use core::time::Duration;

use super::effect::RunEffect;
use super::heal::clients_counted;
use super::shell::{Failure, Requested, Shell};
use super::{Ended, Serving};
use crate::Permit;

/// The longest time until a server without clients has ended, and the pause between two checks of the server. Measured: a
/// server without clients ends within 70 ms to 2 s.
const IDLE_SERVER_TIMEOUT: Duration = Duration::from_secs(4);
const IDLE_SERVER_PAUSE: Duration = Duration::from_millis(50);

impl<S: Shell> Serving<'_, S> {
    /// Carries out a request, unless its caller has stopped waiting. Returns how serving ends, if the request has ended the
    /// control daemon.
    pub(super) async fn obey(&mut self, request: Requested) -> Option<Ended> {
        match request {
            Requested::Apply { force } => {
                let answer = self.apply(force).await;
                let has_ended = answer == Ok(true);
                self.shell.carry_out(RunEffect::Answer(answer.map(drop)));
                return has_ended.then_some(Ended::Stopped);
            }
            Requested::Check => self.run.check_at = self.shell.now(),
            Requested::RestartServer => {
                let done = self.restart_servers().await;
                self.shell.carry_out(RunEffect::Answer(done));
            }
        }
        None
    }

    /// Makes the change that waits for the end of clients. Returns true if the control daemon was ended for the change.
    async fn apply(&mut self, force: bool) -> Result<bool, String> {
        let Some(change) = self.run.blockers.why_it_ends() else { return Ok(false) };
        let clients = self.in_use().await;
        let Some(may_end) = Permit::for_a_change(force, clients.as_ref().ok().copied()) else {
            let who = clients.map_or_else(|error| format!("not known: {error}"), clients_counted);
            return Err(format!(
                "{change}; the service ends the control daemon only after its clients have ended ({who}); \
                 `yunion-mpsctl apply --force` ends the clients"
            ));
        };
        if !self.shell.is_awaited() {
            return Err("the caller no longer waits for the answer".to_owned());
        }
        self.end(may_end).await.map(|()| true)
    }

    /// Replaces the servers while new programs wait. Otherwise a server that was asked to end could still get a client. The
    /// server would stay for this client, and refuse all other clients.
    async fn restart_servers(&mut self) -> Result<(), String> {
        self.may_end_servers().await?;
        self.close_door().await?;
        let done = self.restart_idle_servers().await;
        self.open_door();
        done
    }

    async fn may_end_servers(&mut self) -> Result<Permit, String> {
        let clients = self.in_use().await?;
        Permit::unused(Some(clients)).ok_or_else(|| {
            format!(
                "the server can't be replaced while the control daemon has {}; yunion-mpsctl clients lists \
                 the clients",
                clients_counted(clients)
            )
        })
    }

    async fn restart_idle_servers(&mut self) -> Result<(), String> {
        let may_end = self.may_end_servers().await?;
        let servers = self.shell.inspect(&[], None).await.map_err(Failure::into_text)?.servers;
        for server in servers.iter().copied() {
            if !self.shell.is_awaited() {
                return Err("the caller no longer waits for the answer".to_owned());
            }
            self.watch_server(server);
            let ended = self.shell.shut_down_idle_server(server, may_end).await;
            ended.map_err(Failure::into_text)?;
        }
        let deadline = self.shell.now() + IDLE_SERVER_TIMEOUT;
        loop {
            let there = self.shell.inspect(&[], None).await.map_err(Failure::into_text)?.servers;
            if !there.iter().any(|server| servers.contains(server)) {
                self.run.servers.keep(&there);
                return Ok(());
            }
            if self.shell.now() >= deadline {
                return Err(
                    "the server can't be replaced, since a client connected meanwhile; try again when no \
                     client is connected"
                        .to_owned(),
                );
            }
            self.shell.pause(IDLE_SERVER_PAUSE).await;
        }
    }
}
