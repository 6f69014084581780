//! The clients of the control daemons: where to ask for them, their slices, and who would end with which control daemon.

use std::collections::BTreeMap;
use std::sync::Arc;

use mps_core::Goal;
use mps_core::terms::DaemonId;
use tokio::sync::watch;

use super::Fleet;
use crate::daemon::shutdown_report::Doomed;
use crate::mps::control::Control;
use crate::supervisor::bypass::Bypass;
use crate::supervisor::{Status, SupervisorHandle};
use crate::tenants::clients::ServingDaemon;
use crate::tenants::ending_shell::{ClientsDaemon, OwnDaemon};
use common::host::identity;
use common::membership::Slices;
use common::state_file::Running;

impl Fleet {
    /// Every control daemon with its GPUs, for those who ask for clients. A control daemon on the way out waits for
    /// its clients.
    pub(crate) fn serving(&self) -> Vec<ServingDaemon> {
        let serving = |supervisor: &SupervisorHandle| {
            let status = supervisor.status();
            let bypasses = bypasses(&status).collect();
            let Status { gpus, waiting, view, .. } = status;
            let (control, gpus) = (supervisor.control(), self.looked_after(&view.id, gpus.into_keys()));
            ServingDaemon {
                tenure: view.id.tenure(),
                control,
                gpus,
                servers: view.servers,
                bypasses,
                waiting,
            }
        };
        self.ask_all(serving)
    }

    /// The GPUs of a control daemon, and the GPUs that it is to have and no other one has. No client that uses these through
    /// another control daemon of ours counts as using them without MPS.
    fn looked_after(&self, id: &DaemonId, planned: impl Iterator<Item = String>) -> Vec<String> {
        let state_file = self.tools.state_file.lock();
        let own = state_file.control_daemon(id).map(|running| running.gpus.clone()).unwrap_or_default();
        let free = planned.filter(|uuid| !own.contains(uuid) && !state_file.is_in_our_hands(uuid));
        let free: Vec<String> = free.collect();
        own.into_iter().chain(free).collect()
    }

    /// The slices of all control daemons, ordered or running. A control daemon that an order
    /// does not fit runs on where it is, as long as it has clients, and their containers have its directories.
    pub(crate) fn slices(&self) -> Slices {
        let statuses = self.ask_all(SupervisorHandle::status);
        let conducted = self.conductor.lock();
        let pending = conducted.core.pending().map(|order| &order.payload.plan);
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

    /// Every control daemon of ours that runs, taken over or not, if a stop ends it.
    pub(crate) fn ended_by_stop(&self) -> Vec<Doomed> {
        self.doomed(|_| true)
    }

    /// The same for a configuration that disables MPS. A control daemon on the way out keeps its clients, and the state
    /// says so.
    pub(crate) fn ended_by_disabling(&self) -> Vec<Doomed> {
        self.doomed(|id| self.conductor.lock().core.goal(id).is_none_or(|goal| goal == Goal::Serve))
    }

    /// The same for an order to make the changes that wait for clients to end.
    pub(crate) fn ended_by_force(&self) -> Vec<Doomed> {
        self.doomed(|id| self.status(id).is_some_and(|status| status.ends_when_idle))
    }

    fn doomed(&self, ends: impl Fn(&DaemonId) -> bool) -> Vec<Doomed> {
        let running = self.tools.state_file.lock().control_daemons().clone();
        let ours = running.into_iter().filter(|(id, running)| ends(id) && identity::runs(running.process));
        ours.map(|(id, running)| {
            let serving = self.serving_if_in_place(&id, running);
            (id.to_string(), serving)
        })
        .collect()
    }

    /// The way to the clients of a control daemon, by its entry in the state file: its supervisor may not have taken it
    /// over yet.
    fn serving_if_in_place(&self, id: &DaemonId, running: Running) -> Result<ServingDaemon, String> {
        let control = self.tools.front_ends.control_in(running.control_directory());
        if control.daemon_pid() != Some(running.process.pid) {
            return Err("it does not listen in its pipe directory any more".to_owned());
        }
        let status = self.status(id);
        let (_, control) = watch::channel(Some(Arc::new(control)));
        Ok(ServingDaemon {
            tenure: id.tenure(),
            control,
            gpus: running.gpus,
            servers: status.iter().flat_map(|status| status.view.servers.clone()).collect(),
            bypasses: status.iter().flat_map(bypasses).collect(),
            waiting: status.map(|status| status.waiting).unwrap_or_default(),
        })
    }

    /// Every control daemon that may have clients: each of ours that runs, taken over or not, and any other in its place.
    pub(crate) fn with_clients(&self) -> Vec<ClientsDaemon> {
        let in_place =
            self.ask_all(|supervisor| (supervisor.status().view.id, supervisor.control_in_place()));
        let mut in_place: BTreeMap<DaemonId, Arc<Control>> =
            in_place.into_iter().filter_map(|(id, control)| Some((id, control?))).collect();
        let state_file = self.tools.state_file.lock();
        let running =
            state_file.control_daemons().iter().filter(|(_, running)| identity::runs(running.process));
        let mut all: Vec<ClientsDaemon> = running
            .map(|(id, running)| {
                in_place.remove(id);
                let control = Arc::new(self.tools.front_ends.control_in(running.control_directory()));
                ClientsDaemon {
                    control,
                    slice: id.only_slice(),
                    ours: Some(OwnDaemon { process: running.process, gpus: running.gpus.clone() }),
                }
            })
            .collect();
        let others = in_place.into_iter();
        all.extend(others.map(|(id, control)| ClientsDaemon { control, slice: id.only_slice(), ours: None }));
        all
    }

    fn status(&self, id: &DaemonId) -> Option<Status> {
        self.conductor.lock().supervisors.get(id).map(SupervisorHandle::status)
    }
}

/// The processes that are known to use its GPUs without its servers.
fn bypasses(status: &Status) -> impl Iterator<Item = Bypass> {
    status.gpus.values().flat_map(|gpu| gpu.bypasses.clone())
}
