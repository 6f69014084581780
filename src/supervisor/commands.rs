//! Carries out the commands of administrators: to make a change that waits for clients, and to replace the server.

use std::sync::Arc;
use std::time::Duration;

use mps_core::Permit;
use tokio::time::Instant;

use crate::mps::control::ControlError;
use common::counted::counted;

use super::{Ended, Serving, SupervisorCommand};

/// The longest time for a server without clients to end, and the time between two looks. Measured: 70 ms to 2 s.
const IDLE_SERVER_TIMEOUT: Duration = Duration::from_secs(4);
const IDLE_SERVER_PAUSE: Duration = Duration::from_millis(50);

impl Serving<'_> {
    /// Carries a command out. It may end the run.
    pub(super) async fn obey(&mut self, command: SupervisorCommand) -> Option<Ended> {
        // A command is carried out even if its sender has gone.
        match command {
            SupervisorCommand::Apply { force, reply } => {
                let Some(change) = self.run.blockers.why_it_ends() else {
                    let _ = reply.send(Ok(()));
                    return None;
                };
                let clients = self.in_use().await;
                let Some(may_end) = Permit::for_a_change(force, clients.as_ref().ok().copied()) else {
                    let who = clients.map_or_else(|error| error, |clients| counted(clients, "client"));
                    let _ = reply.send(Err(format!("{change}: in the way: {who}")));
                    return None;
                };
                let ended = self.end(may_end).await;
                let _ = reply.send(if ended { Ok(()) } else { Err("a client came in between".to_owned()) });
                return ended.then_some(Ended::Stopped);
            }
            SupervisorCommand::Check => self.run.check_at = Instant::now(),
            // Whatever it has done to the servers, the check finds it.
            SupervisorCommand::Xid(xid) => {
                tracing::debug!("checked now, since a GPU met Xid {xid}");
                self.run.check_at = Instant::now();
            }
            SupervisorCommand::RestartServer { reply } => {
                let done = self.restart_servers().await;
                let _ = reply.send(done);
            }
        }
        None
    }

    async fn restart_servers(&mut self) -> Result<(), String> {
        let control = Arc::clone(&self.run.control);
        let clients = self.in_use().await?;
        let Some(may_end) = Permit::unused(Some(clients)) else {
            return Err(format!("in the way: {}", counted(clients, "client")));
        };
        let describe = |error: ControlError| error.to_string();
        let servers = control.servers().await.map_err(describe)?;
        for server in servers.iter().copied() {
            self.watch_server(server);
            control.shut_down_idle_server(server, may_end).await.map_err(describe)?;
        }
        let deadline = Instant::now() + IDLE_SERVER_TIMEOUT;
        while control.servers().await.map_err(describe)?.iter().any(|server| servers.contains(server)) {
            if Instant::now() >= deadline {
                return Err("in the way: a client that has come in between".to_owned());
            }
            tokio::time::sleep(IDLE_SERVER_PAUSE).await;
        }
        Ok(())
    }
}
