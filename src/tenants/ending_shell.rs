//! Ends the GPU work of clients as the core decides, through front ends and with the kernel's facts about processes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use mps_core::mps::ServerStatus;
use mps_core::tenants::{ClientEnd, ClientShell, DaemonClients, ListAnswer, by_client};
use mps_core::terms::SliceId;
use mps_core::{CoreTime, Permit};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::mps::control::{Control, ControlError};
use crate::mps::process::{GoingOn, Held};
use common::host::identity;
use common::host::proc;
use common::state_file::Running;

/// The longest wait for the list of clients of one control daemon. The service needs several answers of the control daemon for
/// this list, and waits a shorter time for each answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// The longest wait for the list of clients of a control daemon that serves only a slice that the request does not name. Such a
/// control daemon hardly ever has clients that the request means, so it must not delay the request when it hangs.
const OTHERS_PATIENCE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
pub(crate) struct ClientsDaemon {
    pub control: Arc<Control>,
    /// The only slice that the control daemon serves. None if the control daemon serves all slices of its GPUs.
    pub slice: Option<SliceId>,
    /// The control daemon's entry in the state file. None for a foreign control daemon, which listens in a directory of the
    /// service.
    pub ours: Option<Running>,
}

#[derive(Debug)]
pub(crate) struct EndingShell<P = ()> {
    daemons: Vec<ClientsDaemon>,
    /// Control daemons that each serve only a slice that the request does not name. The service asks these control daemons too,
    /// since a client can connect to the control daemon of a slice that it does not have. Without their answers the request
    /// goes on.
    others: Vec<ClientsDaemon>,
    patience: Duration,
    begun: Instant,
    pub(super) processes: P,
}

impl<P> EndingShell<P> {
    /// `begun` is the moment from which the core counts its times.
    pub(crate) fn new(daemons: Vec<ClientsDaemon>, begun: Instant, processes: P) -> Self {
        Self { daemons, others: Vec::new(), patience: PATIENCE, begun, processes }
    }

    pub(crate) fn with_others(self, others: Vec<ClientsDaemon>) -> Self {
        Self { others, ..self }
    }

    pub(crate) fn within(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }
}

async fn servers_in_fault(control: &Control, servers: &[u32]) -> Result<BTreeSet<u32>, ControlError> {
    if servers.is_empty() {
        return Ok(BTreeSet::new());
    }
    Ok(control.inspect(servers, None).await?.with(&[ServerStatus::Fault]).collect())
}

async fn clients(control: &Control) -> Result<DaemonClients, ControlError> {
    let servers = control.inspect(&[], None).await?.servers;
    // While a server handles a fatal GPU error, its control daemon may omit clients from the list. So the statuses of the
    // servers are read before the list and again after it.
    let mut faulted = servers_in_fault(control, &servers).await?;
    let pids = control.client_pids(&servers).await?;
    let started = |pid| identity::read(pid).ok().map(|process| process.start_time);
    let clients = by_client(control.connections(&pids).await?, started);
    let servers: Vec<u32> = pids.into_keys().collect();
    faulted.extend(servers_in_fault(control, &servers).await?);
    Ok(DaemonClients { clients, faulted, ..DaemonClients::default() })
}

async fn clients_of(daemon: &ClientsDaemon, patience: Duration) -> ListAnswer {
    let ClientsDaemon { control, ours, .. } = daemon;
    let is_elsewhere = || {
        let listener = control.daemon_pid();
        ours.as_ref().is_some_and(|ours| listener.is_some_and(|listener| listener != ours.process.pid))
    };
    let was_elsewhere = is_elsewhere();
    let listed = timeout(patience, clients(control)).await;
    let silent = |_| {
        format!(
            "the control daemon has not listed its clients within {seconds} s",
            seconds = patience.as_secs()
        )
    };
    match listed.map_err(silent).and_then(|listed| listed.map_err(|error| error.to_string())) {
        Ok(clients) => Ok(Some(DaemonClients {
            gpus: ours.as_ref().map(|ours| ours.gpus.clone()),
            place_is_taken: was_elsewhere || is_elsewhere(),
            ..clients
        })),
        Err(why) => {
            let has_no_server = ours.as_ref().is_some_and(|Running { process, .. }| {
                !identity::runs(*process) || proc::has_children(process.pid).is_ok_and(|has_some| !has_some)
            });
            if has_no_server { Ok(None) } else { Err(why) }
        }
    }
}

impl<P: Send + Sync> ClientShell for EndingShell<P> {
    type Control = Arc<Control>;
    type Held = Held;
    type GoingOn = GoingOn;

    fn now(&self) -> CoreTime {
        self.begun.elapsed()
    }

    async fn pause(&mut self, duration: Duration) {
        sleep(duration).await;
    }

    async fn list(&mut self) -> Vec<(Arc<Control>, ListAnswer)> {
        let mut asked = JoinSet::new();
        for daemon in self.daemons.clone() {
            let patience = self.patience;
            asked.spawn(async move {
                let listed = clients_of(&daemon, patience).await;
                Some((daemon.control, listed))
            });
        }
        for daemon in self.others.clone() {
            asked.spawn(async move {
                let listed = clients_of(&daemon, OTHERS_PATIENCE).await;
                listed.is_ok().then_some((daemon.control, listed))
            });
        }
        asked.join_all().await.into_iter().flatten().collect()
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
            tracing::warn!(
                mps_client_pid = pid,
                "client {pid} is stopped or frozen and can't be continued: {error}"
            );
            error.to_string()
        })
    }

    async fn terminate_client(
        &mut self,
        control: &Arc<Control>,
        server: u32,
        mut client: GoingOn,
        may_end: Permit,
    ) -> ClientEnd {
        let pid = client.pid();
        let answer = tokio::select! {
            answer = control.terminate_client(server, pid, may_end) => answer,
            never = client.keep() => match never {},
        };
        if client.was_held() {
            tracing::info!(
                mps_client_pid = pid,
                "client {pid} was stopped or frozen; the service has continued the client to end its GPU work"
            );
        }
        answer.unwrap_or_else(|error| ClientEnd::NotKnown(error.to_string()))
    }
}
