//! The control daemons of the plan and of earlier plans. The core decides if a control daemon serves, ends, or waits for its
//! GPUs, and the supervisors carry out the decisions.

mod clients;
mod conductor;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use mps_core::terms::{DaemonId, ServedGpu};
use mps_core::{CoreEvent, Demand, Goal, MpsSwitch, Order, Tenure};
use tokio::task::{JoinHandle, JoinSet};

use crate::compose::Moment;
use crate::dbus::Reply;
use crate::mps::process;
use crate::register::Clients;
use crate::supervisor::admission::close_unsupervised;
use crate::supervisor::{Status, SupervisorHandle, Tools};
use common::bus::error::RequestError;
use common::config::{Settings, Supervision};
use common::plan::{self, Configured, Plan};
use common::state_file::Running;
use conductor::{Conducted, Conductor};

/// The service awaits the end of at most this many programs without MPS. The next regular scan of the host notices the end of
/// further programs.
const HOLDERS: usize = 64;

#[derive(Debug)]
pub(super) struct Fleet {
    tools: Tools,
    conductor: Conductor,
    /// Each task waits for the end of a program without MPS that prevents the start of a server.
    holders: JoinSet<()>,
    /// Tasks that carry out `apply --force` and answer the caller.
    forced: Vec<JoinHandle<()>>,
    servers_path: PathBuf,
}

impl Fleet {
    pub(super) fn new(tools: Tools) -> Self {
        let conductor = Conductor::new(tools.clone());
        let servers_path = PathBuf::new();
        Self { tools, conductor, holders: JoinSet::new(), forced: Vec::new(), servers_path }
    }

    pub(super) fn clients(&self) -> &Clients {
        &self.tools.clients
    }

    pub(super) fn tools(&self) -> &Tools {
        &self.tools
    }

    pub(super) fn pursue(&mut self, plan: &Plan, settings: &Settings) {
        let mps = if settings.enabled { MpsSwitch::On } else { MpsSwitch::TurnedOff };
        self.pursue_with(mps, plan, settings);
    }

    /// Finds the control daemons that an earlier service has started. Used when the service starts with MPS disabled, so that
    /// there is no plan.
    pub(super) fn pursue_nothing(&mut self, settings: &Settings) {
        self.pursue_with(MpsSwitch::OffAtStart, &Plan::default(), settings);
    }

    fn pursue_with(&mut self, mps: MpsSwitch, plan: &Plan, settings: &Settings) {
        self.servers_path.clone_from(&settings.supervision.servers_path);
        let sets_modes = settings.enabled && settings.supervision.set_compute_mode;
        let held = plan.gpus.iter().filter(|gpu| !gpu.holders().is_empty());
        // A holder is a process that uses a GPU without MPS, so that the GPU can't be served. When a holder ends, the main loop
        // scans the host again.
        self.holders = JoinSet::new();
        for (pid, _) in held.clone().flat_map(plan::GpuPlan::holders).take(HOLDERS) {
            self.holders.spawn(process::ended(*pid));
        }
        let closed = held.filter(|_| sets_modes).filter_map(|gpu| gpu.gpu.uuid().map(str::to_owned));
        self.conductor.on(CoreEvent::Pursue(Demand {
            orders: plan.control_daemons.iter().map(|one| order(one.clone())).collect(),
            left: self.left(plan, settings),
            mps,
            kept: if sets_modes { plan.configured.clone() } else { Configured::default() },
            closed: closed.collect(),
        }));
    }

    fn left(&self, plan: &Plan, settings: &Settings) -> Vec<Order<plan::ControlDaemonPlan>> {
        let supervision = Arc::new(settings.supervision.clone());
        let state_file = self.tools.state_file.lock();
        let unwanted = state_file
            .control_daemons()
            .iter()
            .filter(|(id, _)| !plan.control_daemons.iter().any(|one| one.id == **id));
        unwanted.map(|(id, running)| order(leftover(id, running, plan, &supervision))).collect()
    }

    pub(super) async fn holder_ended(&mut self) -> Option<()> {
        self.holders.join_next().await.map(|_| ())
    }

    pub(super) fn has_leftovers(&self) -> bool {
        let state_file = self.tools.state_file.lock();
        !state_file.control_daemons().is_empty() || !state_file.changed_gpus().is_empty()
    }

    pub(super) fn at_this_moment(&self) -> Moment {
        let Conducted { core, supervisors, .. } = &*self.conductor.lock();
        let all: BTreeMap<&DaemonId, Arc<Status>> =
            supervisors.iter().map(|(id, supervisor)| (id, supervisor.status())).collect();
        let view = |id: &DaemonId| all.get(id).map(|status| &status.shown);
        let settled = core.is_settled(view);
        let starting = !settled && core.is_starting(view);
        let (mut statuses, mut leaving) = (Vec::new(), Vec::new());
        for (id, status) in all {
            match core.goal(id) {
                Some(Goal::Serve) => statuses.push(status),
                Some(_) => leaving.push(status),
                None => {}
            }
        }
        Moment { now: self.tools.begun.elapsed(), statuses, leaving, held: core.kept(), starting, settled }
    }

    fn ask_those<T>(
        &self,
        wanted: impl Fn(Goal) -> bool,
        question: impl Fn(&SupervisorHandle) -> T,
    ) -> Vec<T> {
        let Conducted { core, supervisors, .. } = &*self.conductor.lock();
        let wanted = supervisors.iter().filter(|(id, _)| core.goal(id).is_some_and(&wanted));
        wanted.map(|(_, supervisor)| question(supervisor)).collect()
    }

    fn ask_all<T>(&self, question: impl Fn(&SupervisorHandle) -> T) -> Vec<T> {
        self.ask_those(|_| true, question)
    }

    pub(super) fn check_all(&self) {
        self.ask_all(SupervisorHandle::check);
    }

    pub(super) fn met_xid(&self, uuid: &str, xid: u64) {
        self.ask_all(|supervisor| {
            if supervisor.status().shown.gpus.contains_key(uuid) {
                supervisor.met_xid(xid);
            }
        });
    }

    /// Ends all control daemons with their clients, including those that have no supervisor yet, and restores the compute
    /// modes.
    pub(super) fn stop(&mut self, settings: &Settings) {
        self.holders = JoinSet::new();
        let left = self.left(&Plan::default(), settings);
        self.conductor.on(CoreEvent::Stop { left });
    }

    pub(super) fn leave(&mut self) {
        self.holders = JoinSet::new();
        self.conductor.on(CoreEvent::Leave);
    }

    /// True if all acts are done that [`Fleet::stop`] or [`Fleet::leave`] has caused.
    pub(super) fn has_stopped(&self) -> bool {
        self.conductor.lock().core.is_at_rest()
    }

    pub(super) fn gpus_left(&self) -> Vec<String> {
        let state_file = self.tools.state_file.lock();
        state_file.control_daemons().values().flat_map(|one| one.gpus.clone()).collect()
    }

    pub(super) fn is_ending_one(&mut self) -> bool {
        self.forced.retain(|order| !order.is_finished());
        !self.forced.is_empty() || !self.ask_those(|goal| matches!(goal, Goal::Stop(_)), |_| ()).is_empty()
    }

    /// Has supervisors make the changes of control daemons that wait for the end of clients. With `force`, the changes are made
    /// at once, which ends the clients. A separate task gives the answer, since control daemons need some time to end.
    pub(super) fn apply(&mut self, force: bool, reply: Reply<()>) {
        let asked = self.ask_all(|supervisor| {
            let status = supervisor.status();
            // A supervisor without a running control daemon has no clients, so no change waits for clients.
            status.view.pid.map(|_| (status.view.id.clone(), supervisor.apply(force)))
        });
        let changed = Arc::clone(&self.tools.changed);
        let answered = async move {
            let mut in_the_way = Vec::new();
            for (id, answer) in asked.into_iter().flatten() {
                match answer.await {
                    Ok(Ok(())) => {}
                    Ok(Err(reason)) => in_the_way.push(format!("control daemon {id}: {reason}")),
                    Err(_) => in_the_way.push(busy(&id.to_string())),
                }
            }
            if in_the_way.is_empty() { Ok(()) } else { Err(RequestError::Busy(in_the_way.join("; "))) }
        };
        let applied = tokio::spawn(async move {
            answer_unless_given_up(reply, answered).await;
            changed.notify_one();
        });
        if force {
            self.forced.push(applied);
        }
    }

    /// Makes and removes links after slices were closed to new clients, or opened again, in the state file. The links of all
    /// running control daemons of the service are checked. The error names the links that can't be removed.
    pub(super) fn link(&self) -> Result<(), String> {
        let (running, closed) = {
            let state_file = self.tools.state_file.lock();
            (state_file.control_daemons().clone(), state_file.closed())
        };
        let mut stuck: BTreeSet<String> =
            self.ask_all(SupervisorHandle::link).into_iter().flatten().collect();
        let conducted = self.conductor.lock();
        for (_, running) in running.iter().filter(|(id, _)| !conducted.supervisors.contains_key(id)) {
            stuck.extend(close_unsupervised(running, &closed).err());
        }
        if stuck.is_empty() { Ok(()) } else { Err(stuck.into_iter().collect::<Vec<_>>().join("; ")) }
    }

    pub(super) fn restart_server(&self, id: &DaemonId, gpu: &str, reply: Reply<()>) {
        let Conducted { core, supervisors, .. } = &*self.conductor.lock();
        let serving = supervisors.get(id).filter(|_| core.goal(id) == Some(Goal::Serve));
        let Some(answer) = serving.map(SupervisorHandle::restart_server) else {
            return drop(reply.send(Err(RequestError::Busy(format!("no control daemon serves {gpu}")))));
        };
        let id = id.to_string();
        tokio::spawn(answer_unless_given_up(reply, async move {
            let answer = answer.await.unwrap_or_else(|_| Err(busy(&id).into()));
            answer.map_err(|in_the_way| RequestError::Busy(in_the_way.into()))
        }));
    }
}

/// Answers a caller's request. If the caller stops waiting, the request is dropped, and the supervisors do not carry it out.
async fn answer_unless_given_up(
    mut reply: Reply<()>,
    answered: impl Future<Output = Result<(), RequestError>>,
) {
    tokio::select! {
        done = answered => drop(reply.send(done)),
        () = reply.closed() => {}
    }
}

fn busy(id: &str) -> String {
    format!("control daemon {id} has too many requests to carry out; ask again later")
}

fn order(plan: plan::ControlDaemonPlan) -> Order<plan::ControlDaemonPlan> {
    Order {
        id: plan.id.clone(),
        gpus: plan.gpus.iter().map(|gpu| gpu.uuid.clone()).collect(),
        sets_modes: plan.supervision.set_compute_mode,
        payload: plan,
    }
}

/// Makes a plan, from the state file, for a running control daemon that is in no plan any more.
fn leftover(
    id: &DaemonId,
    running: &Running,
    plan: &Plan,
    supervision: &Arc<Supervision>,
) -> plan::ControlDaemonPlan {
    let planned = |uuid: &str| plan.gpus.iter().find(|gpu| gpu.gpu.uuid() == Some(uuid));
    let gpus = running.gpus.iter().map(|uuid| ServedGpu {
        uuid: uuid.clone(),
        id: planned(uuid).map(|gpu| gpu.gpu.id()),
        memory_limit_mib: 0,
        sizes: BTreeMap::new(),
        limits_enforced: false,
        // A leftover control daemon gets no new clients, so the capacity of its GPUs does not matter.
        capacity: u32::MAX,
        clients_listed: id.tenure() == Tenure::Alone,
    });
    plan::ControlDaemonPlan {
        id: id.clone(),
        pipe_directory: running.pipe_directory.clone(),
        private_directory: running.private_directory.clone(),
        log_directory: running.log_directory.clone(),
        slice_directories: running.slice_directories.clone(),
        gpus: gpus.collect(),
        thread_percentage: 100,
        multiuser: running.multiuser,
        multiuser_optional: true,
        prewarm: false,
        cpus: None,
        supervision: Arc::clone(supervision),
    }
}
