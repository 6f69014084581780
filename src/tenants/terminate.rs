//! Carries out requests to end the GPU work of a tenant without harm for other clients. The host agent makes such a request
//! before it stops a process or a container.

use std::collections::BTreeMap;
use std::time::Duration;

use mps_core::register::{KnownClient, Membership};
use mps_core::serve::ClientsOnGpus;
use mps_core::tenants::{Reception, RequestNews, Target, Termination, TerminationError, TerminationShell};
use mps_core::terms::SliceId;

use super::ending_shell::{ClientsDaemon, EndingShell};
use crate::register::Clients;
use crate::supervisor::nvml_worker::NvmlWorker;
use common::host::blocking::Blocking;
use common::host::control_groups;
use common::host::identity;
use common::host::proc;
use common::membership::containers::{containers_in, of_the_hosts};

/// The longest wait for the kernel's answer about a process. The answer takes microseconds, but a read of the memory of a
/// process that is stuck in the driver blocks.
const PATIENCE: Duration = Duration::from_secs(2);

/// The longest wait for the list of clients of one control daemon when a container runtime is about to send a signal. The
/// request has little time, and most of it is for the end of the GPU work.
const PATIENCE_BEFORE_A_SIGNAL: Duration = Duration::from_secs(1);

/// Ends the GPU work of all processes that the request means. Returns when the work has ended, or after the timeout of the
/// request. The first part of the result names the clients that had work, even after an error.
pub(crate) async fn terminate(
    daemons: Vec<ClientsDaemon>,
    wanted: Target,
    processes: Processes,
) -> (Vec<KnownClient>, Result<(), TerminationError<KnownClient>>) {
    let (asked, others) = daemons.into_iter().partition(|daemon| can_serve(daemon, &wanted));
    let mut shell = EndingShell::new(asked, tokio::time::Instant::now(), processes).with_others(others);
    if let Target::Signalled(_) = wanted {
        shell = shell.within(PATIENCE_BEFORE_A_SIGNAL);
    }
    let timeout = wanted.timeout();
    let mut termination = Termination::new(wanted);
    let ended = tokio::time::timeout(timeout, termination.run(&mut shell)).await;
    let result = ended.unwrap_or_else(|_| Err(termination.out_of_time()));
    (termination.had_work(), result)
}

/// True if a control daemon can have clients that the request means. The service does not wait long for other control daemons,
/// since a hung one must not delay the request.
fn can_serve(daemon: &ClientsDaemon, wanted: &Target) -> bool {
    match (wanted, daemon.slice) {
        (Target::Slices(slices), Some(only)) => slices.contains(&only),
        _ => true,
    }
}

fn reception(pid: u32, signal: i32) -> std::io::Result<Reception> {
    let status = proc::status(pid)?;
    Ok(if status.catches(signal) || proc::blocks(pid, signal)? {
        Reception::Handled
    } else if status.ignores(signal) || status.is_first_of_its_namespace() {
        Reception::Ignored
    } else {
        Reception::Fatal
    })
}

#[derive(Debug)]
pub(crate) struct Processes {
    clients: Clients,
    kernel: Blocking,
    nvml: NvmlWorker,
}

impl Processes {
    pub(crate) fn new(clients: Clients, kernel: Blocking, nvml: NvmlWorker) -> Self {
        Self { clients, kernel, nvml }
    }

    /// Asks the kernel a question, on a thread other than the main loop's and with a deadline.
    async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce() -> std::io::Result<T> + Send + 'static,
    ) -> Result<T, String> {
        self.kernel.ask(PATIENCE, question).await.ok_or_else(silent)?.map_err(|error| error.to_string())
    }
}

fn silent() -> String {
    format!(
        "the kernel did not answer within {seconds} s; the system call may be stuck in the NVIDIA driver",
        seconds = PATIENCE.as_secs()
    )
}

impl TerminationShell for EndingShell<Processes> {
    type Owner = KnownClient;

    fn begin_look(&mut self) {
        self.processes.clients.want_anew();
    }

    async fn users(&mut self, pid: u32) -> Result<Vec<u32>, String> {
        self.processes.ask(move || Ok(proc::status(pid)?.uids())).await
    }

    async fn slices(&mut self, pid: u32) -> Result<Option<Membership>, String> {
        let clients = &self.processes.clients;
        let process = identity::read(pid).map_err(|error| error.to_string())?;
        let known = clients.look_up(&[process]).await.remove(&pid).and_then(|client| client.slices);
        if known.is_some() || clients.has_found(process) { Ok(known) } else { Err(silent()) }
    }

    async fn containers(&mut self, pid: u32) -> Result<BTreeMap<String, bool>, String> {
        let around = |cgroups: &str| {
            let (of_the_hosts, mut containers) = (of_the_hosts(cgroups), BTreeMap::new());
            for id in containers_in(cgroups) {
                *containers.entry(id.to_ascii_lowercase()).or_default() |= of_the_hosts == Some(id);
            }
            containers
        };
        self.processes.ask(move || Ok(around(&proc::cgroups_text(pid)?))).await
    }

    async fn control_group(&mut self, pid: u32) -> Result<String, String> {
        self.processes.ask(move || control_groups::path_of(pid)).await
    }

    async fn reception(&mut self, pid: u32, signal: u32) -> Result<Option<Reception>, String> {
        self.processes
            .ask(move || match reception(pid, signal.cast_signed()) {
                Err(error) if proc::is_gone(&error) => Ok(None),
                answer => answer.map(Some),
            })
            .await
    }

    async fn owner(&mut self, pid: u32) -> KnownClient {
        let clients = &self.processes.clients;
        if let Ok(process) = identity::read(pid) {
            clients.look_up(&[process]).await;
        }
        clients.last_with(pid)
    }

    async fn program(&mut self, pid: u32) -> String {
        self.processes.ask(move || Ok(proc::program(pid))).await.unwrap_or_default()
    }

    fn gpus_of(&self, slices: &[SliceId]) -> Vec<String> {
        self.processes.clients.slices().gpus_of(slices).into_iter().map(str::to_owned).collect()
    }

    async fn clients_on(&mut self, gpus: &[String]) -> ClientsOnGpus {
        self.processes.nvml.mps_clients(gpus).await
    }

    fn tell_of_request(&mut self, news: RequestNews, server: u32, pid: u32, owner: &KnownClient) {
        match news {
            RequestNews::Ended => tracing::info!(
                mps_server_pid = server,
                mps_client_pid = pid,
                "GPU work ended on request: {owner}"
            ),
            RequestNews::MayHaveEnded => tracing::warn!(
                mps_server_pid = server,
                mps_client_pid = pid,
                "the control daemon has not answered the request to end the GPU work of this client, so the \
                 work may have ended or not: {owner}"
            ),
        }
    }
}
