//! The control daemons of a plan: some serve, some are on the way out, some wait until their GPUs are free.

mod clients;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use crate::dbus::Reply;
use crate::message::{Message, Subject};
use crate::mps::process;
use crate::supervisor::admission::close_unsupervised;
use crate::supervisor::compute_modes::ComputeModes;
use crate::supervisor::{Goal, Order, Status, Supervisor, Tools};
use common::bus::error::RequestError;
use common::config::Settings;
use common::plan::{self, Configured, Plan};
use common::state_file::Running;

/// The most processes without MPS that are waited for; the regular look finds the end of the others.
const HOLDERS: usize = 64;

/// The supervisors, and everything else that is done about GPUs.
#[derive(Debug)]
pub(super) struct Fleet {
    tools: Tools,
    /// By id, so that a control daemon never has two. Some are on the way out: another control daemon gets their GPUs.
    supervisors: BTreeMap<String, Supervisor>,
    /// To be started when other control daemons have left their GPUs.
    pending: Vec<Order>,
    /// The GPUs that keep our compute mode.
    kept: watch::Sender<Configured>,
    /// Compute modes that are being set or put back for GPUs without a supervisor.
    modes: Vec<JoinHandle<()>>,
    /// Wait for the end of processes that keep a server out.
    holders: JoinSet<()>,
    /// Orders to end control daemons for a change, until they are carried out.
    forced: Vec<JoinHandle<()>>,
}

impl Fleet {
    pub(super) fn new(tools: Tools, kept: watch::Sender<Configured>) -> Self {
        Self {
            tools,
            supervisors: BTreeMap::new(),
            pending: Vec::new(),
            kept,
            modes: Vec::new(),
            holders: JoinSet::new(),
            forced: Vec::new(),
        }
    }

    pub(super) fn compute_modes(&self) -> &ComputeModes {
        &self.tools.compute_modes
    }

    /// Makes the control daemons match a plan.
    pub(super) fn pursue(&mut self, plan: &Plan, settings: &Settings) {
        let ours = settings.enabled && settings.supervision.set_compute_mode;
        self.kept.send_replace(if ours { plan.configured.clone() } else { Configured::default() });
        self.pending.clear();
        self.forget_ended();
        let mut unwanted: BTreeMap<&String, &Supervisor> = self.supervisors.iter().collect();
        for control_daemon in &plan.control_daemons {
            let order = order(control_daemon.clone(), settings, self.held(control_daemon));
            match unwanted.remove(&order.plan.id) {
                // If it is leaving, it is called back: a change that is taken back must not wait for clients.
                Some(supervisor) => supervisor.pursue(Goal::Serve, order),
                None => self.pending.push(order),
            }
        }
        // Clients keep a GPU that goes elsewhere until they are done. Without MPS, nobody waits for them.
        let end = if settings.enabled { Goal::Retire } else { Goal::Stop };
        for supervisor in unwanted.into_values().filter(|supervisor| supervisor.serves()) {
            supervisor.end(end.clone());
        }
        self.end_leftovers(plan, settings, &end);
        self.close_to_others(plan, settings);
    }

    /// The GPUs of a plan that other control daemons still have, each with the id of that control daemon.
    fn held(&self, plan: &plan::ControlDaemonPlan) -> BTreeMap<String, String> {
        self.tools.state_file.lock().in_other_hands(plan)
    }

    fn forget_ended(&mut self) {
        self.supervisors.retain(|_, supervisor| !supervisor.ended());
    }

    /// Closes GPUs that processes without MPS hold to more of them. Such a GPU is served as soon as the last one ends.
    fn close_to_others(&mut self, plan: &Plan, settings: &Settings) {
        let held = || plan.gpus.iter().filter(|gpu| !gpu.holders().is_empty());
        self.holders = JoinSet::new();
        for (pid, _) in held().flat_map(plan::GpuPlan::holders).take(HOLDERS) {
            self.holders.spawn(process::ended(*pid));
        }
        if !settings.supervision.set_compute_mode {
            return;
        }
        for uuid in held().filter_map(|gpu| gpu.gpu.uuid().map(str::to_owned)) {
            let compute_modes = self.tools.compute_modes.clone();
            self.see_to_mode(async move {
                if let Err(error) = compute_modes.take(&uuid).await {
                    tracing::warn!(gpu_uuid = uuid, "compute mode of {uuid}: {error}");
                }
            });
        }
    }

    /// Resolves when a process that kept a server out has ended.
    pub(super) async fn holder_ended(&mut self) -> Option<()> {
        self.holders.join_next().await.map(|_| ())
    }

    /// Does something about a compute mode beside the loop, and wakes the loop up at the end.
    fn see_to_mode(&mut self, what: impl Future<Output = ()> + Send + 'static) {
        let changed = Arc::clone(&self.tools.changed);
        self.modes.push(tokio::spawn(async move {
            what.await;
            changed.notify_one();
        }));
    }

    /// Whether an earlier service has left control daemons or compute modes.
    pub(super) fn has_leftovers(&self) -> bool {
        let state_file = self.tools.state_file.lock();
        !state_file.control_daemons().is_empty() || !state_file.changed_gpus().is_empty()
    }

    /// Ends what an earlier service has left: control daemons that the plan has no use for, and compute modes of GPUs
    /// that nobody serves any more.
    pub(super) fn end_leftovers(&mut self, plan: &Plan, settings: &Settings, end: &Goal) {
        let (left, gpus) = {
            let state_file = self.tools.state_file.lock();
            (state_file.control_daemons().clone(), state_file.changed_gpus())
        };
        let mut held: Vec<String> =
            plan.control_daemons.iter().flat_map(|one| &one.gpus).map(|gpu| gpu.uuid.clone()).collect();
        held.extend(self.leaving().flat_map(|leaving| leaving.status().gpus.into_keys()));
        for (id, running) in left {
            held.extend(running.gpus.iter().cloned());
            let wanted = plan.control_daemons.iter().any(|one| one.id == id);
            if !wanted && !self.supervisors.contains_key(&id) {
                let order = order(leftover(&id, &running, plan), settings, BTreeMap::new());
                self.supervisors.insert(id, Supervisor::start(order, end.clone(), self.tools.clone()));
            }
        }
        for uuid in gpus.into_iter().filter(|uuid| !held.contains(uuid)) {
            let compute_modes = self.tools.compute_modes.clone();
            self.see_to_mode(async move {
                if let Err(error) = compute_modes.restore(&uuid).await {
                    let text = format_args!("compute mode of {uuid} can't be restored: {error}");
                    Message::ComputeModeStays.log(Subject::gpu(&uuid), text);
                }
            });
        }
    }

    /// Starts the control daemons that waited for GPUs which are free now, and tells the others which GPUs are free.
    pub(super) fn move_on(&mut self) {
        self.forget_ended();
        self.modes.retain(|mode| !mode.is_finished());
        self.forced.retain(|order| !order.is_finished());
        for supervisor in self.serving_ones() {
            supervisor.go_without(|plan| self.held(plan));
        }
        for mut order in std::mem::take(&mut self.pending) {
            order.held = self.held(&order.plan);
            if self.can_begin(&order) {
                let supervisor = Supervisor::start(order.clone(), Goal::Serve, self.tools.clone());
                self.supervisors.insert(order.plan.id, supervisor);
            } else {
                self.pending.push(order);
            }
        }
    }

    /// Whether an order is to be carried out now. A new control daemon waits until all of its GPUs are free: it would have
    /// to restart for a GPU that it began without, and clients of its other GPUs could keep it from that for ever.
    fn can_begin(&self, order: &Order) -> bool {
        let runs = self.tools.state_file.lock().control_daemon(&order.plan.id).is_some();
        runs || order.held.is_empty()
    }

    /// Whether a control daemon that is to leave its GPUs does so only when its clients have ended, or some trouble is over.
    fn is_put_off(&self, id: &str) -> bool {
        self.supervisors.get(id).is_none_or(|supervisor| supervisor.status().put_off)
    }

    /// Whether a control daemon starts, or takes a GPU in, as soon as another one, which ends now, has left its GPUs.
    pub(super) fn starting(&self) -> bool {
        let begins = |order: &Order| !self.held(&order.plan).values().any(|id| self.is_put_off(id));
        let is_freed_soon = |held: &BTreeMap<String, String>| !held.values().all(|id| self.is_put_off(id));
        self.pending.iter().any(begins)
            || self.serving_ones().any(|supervisor| is_freed_soon(&self.held(&supervisor.status().plan)))
    }

    /// The GPUs that control daemons on the way out still have, each with the id of that control daemon.
    pub(super) fn held_by_leaving(&self) -> BTreeMap<String, String> {
        let state_file = self.tools.state_file.lock();
        let leaving = self.supervisors.iter().filter(|(_, supervisor)| !supervisor.serves());
        let running = leaving.filter_map(|(id, _)| Some((id, state_file.control_daemon(id)?)));
        let gpus =
            running.flat_map(|(id, running)| running.gpus.iter().map(move |uuid| (uuid.clone(), id.clone())));
        gpus.collect()
    }

    /// Whether every plan is in force, or the reason why it is not is known.
    pub(super) fn settled(&self) -> bool {
        !self.starting() && self.serving_ones().all(|supervisor| supervisor.status().settled)
    }

    /// The control daemons that are to serve.
    pub(super) fn statuses(&self) -> Vec<Status> {
        self.serving_ones().map(Supervisor::status).collect()
    }

    /// The control daemons on the way out.
    pub(super) fn statuses_of_leaving(&self) -> Vec<Status> {
        self.leaving().map(Supervisor::status).collect()
    }

    fn all(&self) -> impl Iterator<Item = &Supervisor> {
        self.supervisors.values()
    }

    fn serving_ones(&self) -> impl Iterator<Item = &Supervisor> {
        self.all().filter(|supervisor| supervisor.serves())
    }

    fn leaving(&self) -> impl Iterator<Item = &Supervisor> {
        self.all().filter(|supervisor| !supervisor.serves())
    }

    /// Continues every control daemon and server that SIGSTOP has stopped, and says so.
    pub(super) fn continue_stopped(&self) -> Vec<String> {
        let processes = self.all().flat_map(|supervisor| {
            let view = supervisor.status().view;
            view.servers.into_iter().chain(view.pid)
        });
        processes.filter_map(process::continue_if_stopped).collect()
    }

    /// Has every control daemon checked now.
    pub(super) fn check_all(&self) {
        self.all().for_each(Supervisor::check);
    }

    /// Tells the control daemon that serves a GPU of its critical error.
    pub(super) fn met_xid(&self, uuid: &str, xid: u64) {
        let serves = |supervisor: &&Supervisor| supervisor.status().gpus.contains_key(uuid);
        self.all().filter(serves).for_each(|supervisor| supervisor.met_xid(xid));
    }

    /// Gives every control daemon its last goal.
    pub(super) async fn stop(&mut self, goal: &Goal, settings: &Settings) {
        self.pending.clear();
        self.holders = JoinSet::new();
        self.kept.send_replace(Configured::default());
        // A mode that is just being set would not be found to put back.
        for mode in std::mem::take(&mut self.modes) {
            let _ = mode.await;
        }
        for supervisor in self.all() {
            supervisor.end(goal.clone());
        }
        if *goal == Goal::Stop {
            // Without a plan nobody has taken them over.
            self.end_leftovers(&Plan::default(), settings, goal);
        }
    }

    /// Whether nothing is left to do after [`Fleet::stop`].
    pub(super) fn has_stopped(&self) -> bool {
        self.supervisors.is_empty() && self.modes.is_empty()
    }

    /// The GPUs of control daemons that an earlier service has started, by UUID.
    pub(super) fn gpus_left(&self) -> Vec<String> {
        let state_file = self.tools.state_file.lock();
        state_file.control_daemons().values().flat_map(|one| one.gpus.clone()).collect()
    }

    /// Whether a control daemon is being ended with its clients.
    pub(super) fn is_ending_one(&self) -> bool {
        !self.forced.is_empty() || self.all().any(Supervisor::stops)
    }

    /// Makes the changes that wait for clients to end. The answer comes beside the loop: control daemons take their time.
    pub(super) fn apply(&mut self, force: bool, reply: Reply<()>) {
        // Where nothing runs, nothing waits.
        let running = self.all().filter(|one| one.status().view.pid.is_some());
        let asked: Vec<_> =
            running.map(|supervisor| (supervisor.status().view.id, supervisor.apply(force))).collect();
        let changed = Arc::clone(&self.tools.changed);
        let applied = tokio::spawn(async move {
            let mut in_the_way = Vec::new();
            for (id, answer) in asked {
                match answer.await {
                    Ok(Ok(())) => {}
                    Ok(Err(reason)) => in_the_way.push(format!("control daemon {id}: {reason}")),
                    Err(_) => in_the_way.push(busy(&id)),
                }
            }
            let done =
                if in_the_way.is_empty() { Ok(()) } else { Err(RequestError::Busy(in_the_way.join("; "))) };
            let _ = reply.send(done);
            changed.notify_one();
        });
        if force {
            self.forced.push(applied);
        }
    }

    /// Makes and takes away the links to all control daemons of ours that run, as the state file has slices drained. The error
    /// says which links can't be taken away.
    pub(super) fn link(&self) -> Result<(), String> {
        let (running, drained) = {
            let state_file = self.tools.state_file.lock();
            (state_file.control_daemons().clone(), state_file.drained().clone())
        };
        let mut stuck: BTreeSet<String> = self.all().flat_map(Supervisor::link).collect();
        let ids: Vec<String> = self.all().map(|supervisor| supervisor.status().view.id).collect();
        for (_, running) in running.iter().filter(|(id, _)| !ids.contains(id)) {
            stuck.extend(close_unsupervised(running, &drained).err());
        }
        if stuck.is_empty() { Ok(()) } else { Err(stuck.into_iter().collect::<Vec<_>>().join("; ")) }
    }

    /// Replaces the server of a control daemon that serves `gpu`.
    pub(super) fn restart_server(&self, id: &str, gpu: &str, reply: Reply<()>) {
        let Some(supervisor) = self.supervisors.get(id).filter(|supervisor| supervisor.serves()) else {
            return drop(reply.send(Err(RequestError::Busy(format!("no control daemon serves {gpu}")))));
        };
        let (answer, id) = (supervisor.restart_server(), id.to_owned());
        tokio::spawn(async move {
            let done = answer.await.unwrap_or_else(|_| Err(busy(&id)));
            let _ = reply.send(done.map_err(RequestError::Busy));
        });
    }
}

fn busy(id: &str) -> String {
    format!("control daemon {id} has other things to do; ask again")
}

fn order(plan: plan::ControlDaemonPlan, settings: &Settings, held: BTreeMap<String, String>) -> Order {
    Order { plan, supervision: settings.supervision, held }
}

/// The plan of a control daemon that runs and has no place in any plan, as far as it is known.
fn leftover(id: &str, running: &Running, plan: &Plan) -> plan::ControlDaemonPlan {
    let planned = |uuid: &str| plan.gpus.iter().find(|gpu| gpu.gpu.uuid() == Some(uuid));
    let gpus = running.gpus.iter().map(|uuid| plan::ServedGpu {
        uuid: uuid.clone(),
        id: planned(uuid).map(|gpu| gpu.gpu.id()),
        slices: 0,
        memory_limit_mib: 0,
        slice_memory_mib: 0,
        slice_thread_percentage: 100,
        limits_enforced: false,
        // It takes no client of ours.
        capacity: u32::MAX,
        clients_listed: true,
    });
    plan::ControlDaemonPlan {
        id: id.to_owned(),
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
    }
}
