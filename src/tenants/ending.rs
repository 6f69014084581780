//! Carries out the end of clients' work: with front ends and the kernel.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use mps_core::mps::ServerStatus;
use mps_core::tenants::{ClientShell, DaemonClients, TerminateAnswer, by_client};
use mps_core::{CoreTime, Permit};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::mps::control::{Control, ControlError};
use crate::mps::process::{GoingOn, Held};

/// A control daemon that may have clients.
#[derive(Debug, Clone)]
pub(crate) struct ClientsDaemon {
    pub control: Arc<Control>,
    /// The UUIDs of its GPUs. None if it is somebody else's.
    pub gpus: Option<Vec<String>>,
}

/// Ends the work of clients of these control daemons.
#[derive(Debug)]
pub(crate) struct EndingShell {
    daemons: Vec<ClientsDaemon>,
    begun: Instant,
}

impl EndingShell {
    /// The present moment is the time since `begun`.
    pub(crate) fn new(daemons: Vec<ClientsDaemon>, begun: Instant) -> Self {
        Self { daemons, begun }
    }
}

async fn clients(daemon: &ClientsDaemon) -> Result<DaemonClients, ControlError> {
    let control = &daemon.control;
    let pids = control.client_pids(&[]).await?;
    let clients = by_client(control.connections(&pids).await?);
    let servers: Vec<u32> = pids.into_keys().collect();
    let faulted = if servers.is_empty() {
        BTreeSet::new()
    } else {
        control.inspect(&servers, None).await?.with(&[ServerStatus::Fault]).collect()
    };
    Ok(DaemonClients { gpus: daemon.gpus.clone(), clients, faulted })
}

impl ClientShell for EndingShell {
    type Control = Arc<Control>;
    type Held = Held;
    type GoingOn = GoingOn;

    fn now(&self) -> CoreTime {
        self.begun.elapsed()
    }

    async fn pause(&mut self, duration: Duration) {
        sleep(duration).await;
    }

    async fn list(&mut self) -> Vec<(Arc<Control>, Result<DaemonClients, String>)> {
        let mut asked = JoinSet::new();
        for daemon in &self.daemons {
            let daemon = daemon.clone();
            asked.spawn(async move {
                let listed = clients(&daemon).await;
                (daemon.control, listed.map_err(|error| error.to_string()))
            });
        }
        asked.join_all().await
    }

    fn hold(&mut self, pid: u32) -> Result<Option<Held>, String> {
        Held::open(pid).map_err(|error| error.to_string())
    }

    fn is_alive(&self, held: &Held) -> bool {
        held.alive()
    }

    async fn server_status(&mut self, control: &Arc<Control>, server: u32) -> Result<ServerStatus, String> {
        control.server_status(server).await.map_err(|error| error.to_string())
    }

    async fn go_on(&mut self, held: &Held) -> Result<GoingOn, String> {
        held.go_on().await.map_err(|error| {
            let pid = held.pid();
            tracing::warn!(mps_client_pid = pid, "client {pid} can't be continued: {error}");
            error.to_string()
        })
    }

    async fn terminate_client(
        &mut self,
        control: &Arc<Control>,
        server: u32,
        mut client: GoingOn,
        may_end: Permit,
    ) -> Result<TerminateAnswer, String> {
        let pid = client.pid();
        let answer = tokio::select! {
            answer = control.terminate_client(server, pid, may_end) => answer,
            never = client.keep() => match never {},
        };
        if client.was_held() {
            tracing::info!(
                mps_client_pid = pid,
                "client {pid} was stopped or frozen; it was continued to end its GPU work"
            );
        }
        answer.map_err(|error| error.to_string())
    }
}
