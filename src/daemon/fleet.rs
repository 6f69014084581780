//! The control daemons of a plan: some serve, some are on the way out, some wait until their GPUs are free.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use super::farewell::Doomed;
use crate::config::Settings;
use crate::dbus::{Reply, RequestError};
use crate::host::driver::Series;
use crate::host::gpu::PciAddress;
use crate::membership::Slices;
use crate::message::{About, Message};
use crate::mps::control::{Access, Caller, CallersControl};
use crate::mps::identity::Identity;
use crate::mps::process;
use crate::plan::{self, Configured, Plan};
use crate::supervisor::bypass::Bypass;
use crate::supervisor::compute_modes::ComputeModes;
use crate::supervisor::state_file::Running;
use crate::supervisor::{Goal, Order, Status, Supervisor, Tools};
use crate::tenants::clients::Serving;

/// The most processes without MPS that are waited for; the regular look finds the end of the others.
const HOLDERS: usize = 64;

/// The supervisors, and everything else that is done about GPUs.
#[derive(Debug)]
pub(super) struct Fleet {
    tools: Tools,
    supervisors: BTreeMap<String, Supervisor>,
    /// Asked to end. Another control daemon gets their GPUs when they have ended.
    leaving: Vec<Supervisor>,
    /// To be started when nobody who leaves has their GPUs any more.
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
            leaving: Vec::new(),
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
        let ours = settings.enabled && settings.set_compute_mode;
        self.kept.send_replace(if ours { plan.configured.clone() } else { Configured::default() });
        self.pending.clear();
        let mut gone = std::mem::take(&mut self.supervisors);
        for control_daemon in &plan.control_daemons {
            let order = order(control_daemon.clone(), settings);
            match gone.remove(&order.plan.id).or_else(|| self.call_back(&order, &gone)) {
                Some(supervisor) => {
                    supervisor.pursue(Goal::Serve, order.clone());
                    self.supervisors.insert(order.plan.id, supervisor);
                }
                None => self.pending.push(order),
            }
        }
        // Clients keep a GPU that goes elsewhere until they are done. Without MPS, nobody waits for them.
        let end = if settings.enabled { Goal::Retire } else { Goal::Stop };
        for supervisor in gone.into_values() {
            supervisor.end(end.clone());
            self.leaving.push(supervisor);
        }
        self.end_leftovers(plan, settings, &end);
        self.close_to_others(plan, settings);
    }

    /// Takes back a supervisor that leaves and has the GPUs of an order: a change that is taken back must not wait for
    /// clients. None while another one that leaves has one of these GPUs.
    fn call_back(&mut self, order: &Order, gone: &BTreeMap<String, Supervisor>) -> Option<Supervisor> {
        let has_one = |supervisor: &Supervisor| {
            let status = supervisor.status();
            order.plan.gpus.iter().any(|gpu| status.gpus.contains_key(&gpu.uuid))
        };
        let is_it = |leaving: &Supervisor| !leaving.ended() && leaving.status().view.id == order.plan.id;
        let place = self.leaving.iter().position(is_it)?;
        let mut others = self.leaving.iter().filter(|leaving| !is_it(leaving)).chain(gone.values());
        if others.any(has_one) {
            return None;
        }
        Some(self.leaving.swap_remove(place))
    }

    /// Closes GPUs that processes without MPS hold to more of them. Such a GPU is served as soon as the last one ends.
    fn close_to_others(&mut self, plan: &Plan, settings: &Settings) {
        let held = || plan.gpus.iter().filter(|gpu| !gpu.holders().is_empty());
        self.holders = JoinSet::new();
        for (pid, _) in held().flat_map(plan::GpuPlan::holders).take(HOLDERS) {
            self.holders.spawn(process::ended(*pid));
        }
        if !settings.set_compute_mode {
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
        held.extend(self.leaving.iter().flat_map(|leaving| leaving.status().gpus.into_keys()));
        for (id, running) in left {
            held.extend(running.gpus.iter().cloned());
            let known = plan.control_daemons.iter().any(|one| one.id == id)
                || self.leaving.iter().any(|leaving| leaving.status().view.id == id);
            if !known {
                let order = order(leftover(&id, &running, plan), settings);
                self.leaving.push(Supervisor::start(order, end.clone(), self.tools.clone()));
            }
        }
        for uuid in gpus.into_iter().filter(|uuid| !held.contains(uuid)) {
            let compute_modes = self.tools.compute_modes.clone();
            self.see_to_mode(async move {
                if let Err(error) = compute_modes.restore(&uuid).await {
                    let text = format_args!("compute mode of {uuid} is not put back: {error}");
                    Message::ComputeModeStays.log(About::gpu(&uuid), text);
                }
            });
        }
    }

    /// Starts the control daemons that waited for GPUs which are free now.
    pub(super) fn move_on(&mut self) {
        self.leaving.retain(|supervisor| !supervisor.ended());
        self.modes.retain(|mode| !mode.is_finished());
        self.forced.retain(|order| !order.is_finished());
        for order in std::mem::take(&mut self.pending) {
            if self.in_the_way(&order).next().is_some() {
                self.pending.push(order);
            } else {
                let supervisor = Supervisor::start(order.clone(), Goal::Serve, self.tools.clone());
                self.supervisors.insert(order.plan.id, supervisor);
            }
        }
    }

    /// The supervisors on the way out that have GPUs of an order.
    fn in_the_way(&self, order: &Order) -> impl Iterator<Item = Status> {
        let has_one = |status: &Status| order.plan.gpus.iter().any(|gpu| status.gpus.contains_key(&gpu.uuid));
        self.leaving.iter().map(Supervisor::status).filter(has_one)
    }

    /// Whether a control daemon starts as soon as another one, which ends now, has left its GPUs.
    pub(super) fn starting(&self) -> bool {
        self.pending.iter().any(|order| !self.in_the_way(order).any(|one| one.put_off))
    }

    /// Whether every plan is in force, or the reason why it is not is known.
    pub(super) fn settled(&self) -> bool {
        !self.starting() && self.supervisors.values().all(|supervisor| supervisor.status().settled)
    }

    /// The control daemons that are to serve.
    pub(super) fn statuses(&self) -> Vec<Status> {
        self.supervisors.values().map(Supervisor::status).collect()
    }

    /// The control daemons on the way out.
    pub(super) fn statuses_of_leaving(&self) -> Vec<Status> {
        self.leaving.iter().map(Supervisor::status).collect()
    }

    fn all(&self) -> impl Iterator<Item = &Supervisor> {
        self.supervisors.values().chain(&self.leaving)
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
        self.supervisors.values().filter(serves).for_each(|supervisor| supervisor.met_xid(xid));
    }

    /// Gives every control daemon its last goal.
    pub(super) async fn stop(&mut self, goal: &Goal, settings: &Settings) {
        self.pending.clear();
        self.holders = JoinSet::new();
        self.leaving.extend(std::mem::take(&mut self.supervisors).into_values());
        self.kept.send_replace(Configured::default());
        // A mode that is just being set would not be found to put back.
        for mode in std::mem::take(&mut self.modes) {
            let _ = mode.await;
        }
        for supervisor in &self.leaving {
            supervisor.end(goal.clone());
        }
        if *goal == Goal::Stop {
            // Without a plan nobody has taken them over.
            self.end_leftovers(&Plan::default(), settings, goal);
        }
    }

    /// Whether nothing is left to do after [`Fleet::stop`].
    pub(super) fn has_stopped(&self) -> bool {
        self.leaving.is_empty() && self.modes.is_empty()
    }

    /// The GPUs of control daemons that an earlier service has started, by UUID.
    pub(super) fn gpus_left(&self) -> Vec<String> {
        let state_file = self.tools.state_file.lock();
        state_file.control_daemons().values().flat_map(|one| one.gpus.clone()).collect()
    }

    /// Every control daemon with its GPUs, for a caller who wants to know the clients. A control daemon on the way out
    /// waits for its clients.
    pub(super) fn serving(&self, caller: Caller) -> Vec<Serving> {
        let serving = |supervisor: &Supervisor| {
            let status = supervisor.status();
            let bypasses = bypasses(&status).collect();
            let Status { gpus, waiting, view, .. } = status;
            let (control, gpus) = (supervisor.access(caller), gpus.into_keys().collect());
            Serving { control, gpus, servers: view.servers, bypasses, waiting }
        };
        self.all().map(serving).collect()
    }

    /// The slices of all control daemons.
    pub(super) fn slices(&self) -> Slices {
        let statuses: Vec<Status> = self.all().map(Supervisor::status).collect();
        Slices::of(statuses.iter().map(|status| &status.plan))
            .commanded_in(statuses.iter().map(|status| status.view.control_directory.clone()))
    }

    /// Every control daemon of ours that runs, taken over or not, if a stop ends it.
    pub(super) fn ended_by_stop(&self) -> Vec<Doomed> {
        self.doomed(|_| true)
    }

    /// The same for a configuration that disables MPS. A control daemon on the way out keeps its clients.
    pub(super) fn ended_by_disabling(&self) -> Vec<Doomed> {
        self.doomed(|id| !self.leaving.iter().any(|one| one.status().view.id == id))
    }

    /// The same for an order to make the changes that wait for clients to end.
    pub(super) fn ended_by_force(&self) -> Vec<Doomed> {
        self.doomed(|id| {
            let is_it = |status: &Status| status.view.id == id && status.ends_when_idle;
            self.all().map(Supervisor::status).any(|status| is_it(&status))
        })
    }

    fn doomed(&self, ends: impl Fn(&str) -> bool) -> Vec<Doomed> {
        let running = self.tools.state_file.lock().control_daemons().clone();
        let ours = running.into_iter().filter(|(id, running)| ends(id) && is_alive(running));
        ours.map(|(id, running)| {
            let serving = self.serving_if_in_place(&id, running);
            (id, serving)
        })
        .collect()
    }

    /// The way to the clients of a control daemon, by its entry in the state file: its supervisor may not have taken it
    /// over yet.
    fn serving_if_in_place(&self, id: &str, running: Running) -> Result<Serving, String> {
        let control = self.tools.front_ends.of(running.control_directory());
        if control.daemon_pid() != Some(running.process.pid) {
            return Err("it does not listen in its pipe directory any more".to_owned());
        }
        let status = self.all().map(Supervisor::status).find(|status| status.view.id == id);
        let (_, control) = watch::channel(Some(Arc::new(control)));
        Ok(Serving {
            control: Access::new(control, Caller::Root),
            gpus: running.gpus,
            servers: status.iter().flat_map(|status| status.view.servers.clone()).collect(),
            bypasses: status.iter().flat_map(bypasses).collect(),
            waiting: status.map(|status| status.waiting).unwrap_or_default(),
        })
    }

    /// Whether a control daemon is being ended with its clients.
    pub(super) fn is_ending_one(&self) -> bool {
        !self.forced.is_empty() || self.leaving.iter().any(Supervisor::stops)
    }

    /// Every control daemon that may have clients, for this caller. Control daemons that an earlier service has left
    /// count only if `unsupervised`: nobody takes them over without a plan.
    pub(super) fn controls(&self, caller: Caller, unsupervised: bool) -> Vec<Arc<CallersControl>> {
        let left = if unsupervised { self.unsupervised(caller) } else { Vec::new() };
        let ours = self.all().filter_map(|supervisor| supervisor.control_in_place(caller));
        ours.chain(left).map(Arc::new).collect()
    }

    fn unsupervised(&self, caller: Caller) -> Vec<CallersControl> {
        let state_file = self.tools.state_file.lock();
        let running = state_file.control_daemons().values();
        let alive = running.filter(|running| is_alive(running));
        let front_end = |running: &Running| self.tools.front_ends.of(running.control_directory());
        alive.map(|running| front_end(running).on_behalf(caller)).collect()
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

    /// Makes the directories lead to their control daemons, as the state file has them drained. Resolves when they do.
    pub(super) fn link(&self) -> impl Future<Output = ()> + Send + use<> {
        let links: Vec<_> = self.supervisors.values().filter_map(Supervisor::link).collect();
        async move {
            for link in links {
                link.await;
            }
        }
    }

    /// Replaces the server of a control daemon that serves `gpu`.
    pub(super) fn restart_server(&self, id: &str, gpu: &str, reply: Reply<()>) {
        let Some(supervisor) = self.supervisors.get(id) else {
            return drop(reply.send(Err(RequestError::Busy(format!("no control daemon serves {gpu}")))));
        };
        let (answer, id) = (supervisor.restart_server(), id.to_owned());
        tokio::spawn(async move {
            let done = answer.await.unwrap_or_else(|_| Err(busy(&id)));
            let _ = reply.send(done.map_err(RequestError::Busy));
        });
    }
}

fn is_alive(running: &Running) -> bool {
    Identity::of(running.process.pid).ok() == Some(running.process)
}

/// The processes that are known to use its GPUs without its servers.
fn bypasses(status: &Status) -> impl Iterator<Item = Bypass> {
    status.gpus.values().flat_map(|gpu| gpu.bypasses.clone())
}

fn busy(id: &str) -> String {
    format!("control daemon {id} has other things to do; ask again")
}

fn order(plan: plan::ControlDaemonPlan, settings: &Settings) -> Order {
    Order {
        plan,
        set_compute_mode: settings.set_compute_mode,
        quit_timeout: settings.quit_timeout,
        fault_grace: settings.fault_grace,
        log_max_bytes: settings.log_max_bytes,
    }
}

/// The plan of a control daemon that runs and has no place in any plan, as far as it is known.
fn leftover(id: &str, running: &Running, plan: &Plan) -> plan::ControlDaemonPlan {
    let address = |uuid: &str| {
        let gpu = plan.gpus.iter().find(|gpu| gpu.gpu.uuid() == Some(uuid));
        gpu.map_or(PciAddress { domain: 0, bus: 0, device: 0, function: 0 }, |gpu| gpu.gpu.pci.address)
    };
    let gpus = running.gpus.iter().map(|uuid| plan::ServedGpu {
        uuid: uuid.clone(),
        pci: address(uuid),
        slices: 0,
        memory_limit_mib: 0,
        slice_memory_mib: 0,
        slice_thread_percentage: 100,
        limits_enforced: false,
        // It takes no client of ours.
        places: u32::MAX,
    });
    plan::ControlDaemonPlan {
        id: id.to_owned(),
        pipe_directory: running.pipe_directory.clone(),
        private_directory: running.private_directory.clone(),
        log_directory: running.log_directory.clone(),
        slice_directories: None,
        gpus: gpus.collect(),
        driver: Series::default(),
        thread_percentage: 100,
        multiuser: running.multiuser,
        multiuser_optional: true,
        prewarm: false,
        cpus: None,
    }
}
