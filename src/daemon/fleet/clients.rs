//! The clients of the control daemons: their slices, and the clients that would end with a control daemon.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use mps_core::Goal;
use mps_core::register::KnownClient;
use mps_core::terms::DaemonId;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::Fleet;
use crate::mps::control::Control;
use crate::register::Clients;
use crate::supervisor::{Status, SupervisorHandle};
use crate::tenants::ending_shell::ClientsDaemon;
use common::host::identity;
use common::membership::Slices;
use common::state_file::Running;

/// The longest wait for each question about clients before control daemons are ended. An answer takes milliseconds, and a
/// missing answer must not delay the end.
const PATIENCE: Duration = Duration::from_secs(3);

impl Fleet {
    /// The statuses of all control daemons, even of control daemons that are about to end.
    pub(crate) fn statuses(&self) -> Vec<Arc<Status>> {
        self.ask_all(SupervisorHandle::status)
    }

    /// The slices of all control daemons, ordered or running. A control daemon that no longer fits its order serves its clients
    /// to their end, and the containers of these clients still have its directories.
    pub(crate) fn slices(&self) -> Slices {
        let statuses = self.ask_all(SupervisorHandle::status);
        let conducted = self.conductor.lock();
        let pending = conducted.core.pending().map(|order| &order.payload);
        let state_file = self.tools.state_file.lock();
        let running = state_file.control_daemons();
        let directories = running.iter().flat_map(|(id, running)| running.directories_of_clients(id));
        let commanded = statuses.iter().map(|status| status.view.control_directory.as_path());
        Slices::from_plans(statuses.iter().map(|status| &*status.plan).chain(pending))
            .and_of(running.values().flat_map(Running::named_gpus))
            .and_in(directories)
            .commanded_in(commanded.chain(running.values().map(Running::control_directory)))
            .bound_by(state_file.bindings())
            .recorded_in(&self.servers_path)
    }

    /// The control daemons that a stop of the service ends: all that run, even if the service has not taken them over.
    pub(crate) fn ended_by_stop(&self) -> Vec<DaemonId> {
        self.doomed(|_| true)
    }

    /// The control daemons that end when the configuration disables MPS. A control daemon that already waits for the end of its
    /// clients is not among them, and goes on until then.
    pub(crate) fn ended_by_disabling(&self) -> Vec<DaemonId> {
        self.doomed(|id| self.conductor.lock().core.goal(id).is_none_or(|goal| goal == Goal::Serve))
    }

    /// The control daemons that `apply --force` ends: those with a change that waits for the end of clients.
    pub(crate) fn ended_by_force(&self) -> Vec<DaemonId> {
        self.doomed(|id| self.status(id).is_some_and(|status| status.shown.ends_when_idle))
    }

    fn doomed(&self, ends: impl Fn(&DaemonId) -> bool) -> Vec<DaemonId> {
        let running = self.tools.state_file.lock().control_daemons().clone();
        let ours = running.into_iter().filter(|(id, running)| ends(id) && identity::runs(running.process));
        ours.map(|(id, _)| id).collect()
    }

    /// The clients of these control daemons, including clients that wait for a server.
    pub(crate) async fn users_of(&self, daemons: &[DaemonId]) -> Vec<KnownClient> {
        let clients = &self.tools.clients;
        let (mut gpus, mut pids, mut asked) = (BTreeSet::new(), BTreeSet::new(), JoinSet::new());
        for id in daemons {
            let Some(running) = self.tools.state_file.lock().control_daemon(id).cloned() else { continue };
            let status = self.status(id);
            if status.as_ref().and_then(|status| status.view.pid) != Some(running.process.pid) {
                let control = self.tools.front_ends.control_in(running.control_directory());
                asked.spawn(ask_for_clients(id.clone(), running.process.pid, control, clients.clone()));
            }
            pids.extend(status.iter().flat_map(|status| &status.shown.waiting).map(|process| process.pid));
            gpus.extend(running.gpus);
        }
        asked.join_all().await;
        pids.extend(daemons.iter().flat_map(|id| clients.at_work(id)));
        // The driver may know a client before its line in the control daemon's log is read, so NVML is asked too.
        let gpus: Vec<String> = gpus.into_iter().collect();
        let registered: BTreeSet<u32> = clients.served().iter().map(|(_, process, _)| process.pid).collect();
        let there = timeout(PATIENCE, self.tools.nvml.mps_clients(&gpus)).await.unwrap_or_default();
        pids.extend(there.into_values().flatten().flatten().filter(|pid| !registered.contains(pid)));
        // If a process can't be examined in time, the register's earlier facts are used.
        let _ = timeout(PATIENCE, clients.look_up_anew(pids.iter().copied())).await;
        let known = pids.into_iter().map(|pid| clients.last_with(pid));
        known.filter(|client| identity::runs(client.process)).collect()
    }

    pub(crate) fn with_clients(&self) -> Vec<ClientsDaemon> {
        self.conductor.with_clients()
    }

    pub(crate) fn finds_clients(&self) -> impl Fn() -> Vec<ClientsDaemon> + Send + Sync + 'static {
        let conductor = self.conductor.clone();
        move || conductor.with_clients()
    }

    fn status(&self, id: &DaemonId) -> Option<Arc<Status>> {
        self.conductor.lock().supervisors.get(id).map(SupervisorHandle::status)
    }
}

async fn ask_for_clients(id: DaemonId, pid: u32, control: Control, clients: Clients) {
    let why = match timeout(PATIENCE, control.client_pids(&[])).await {
        Ok(Ok(_)) if control.daemon_pid() != Some(pid) => {
            "the control daemon does not listen in its pipe directory any more".to_owned()
        }
        Ok(Ok(listed)) => {
            let pids = listed.into_values().flatten();
            return clients.are(&id, pids.map(|pid| (pid, BTreeSet::new())).collect());
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => {
            format!("the control daemon has not answered for {seconds} s", seconds = PATIENCE.as_secs())
        }
    };
    tracing::warn!(
        "control daemon {id} is ended together with its clients, but the service has no list of these \
         clients: {why}"
    );
}
