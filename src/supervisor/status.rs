//! The status that a supervisor publishes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use mps_core::links::Way;
use mps_core::serve::{Showing, ShownAs, ShownGpu, ShownState};
use mps_core::terms::{DaemonId, ProcessId};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::message::{Message, Subject};
use crate::supervisor::bypass::Bypass;
use common::host::compute_mode::ComputeMode;
use common::plan::ControlDaemonPlan;
use common::published::control_daemon::{ControlDaemonState, ControlDaemonView};
use common::published::events::{Event, Events};

/// The time for which a control daemon may wait for something that is not ready before the wait counts as a failure: the
/// fabric manager of a host with `NVSwitch` needs a minute or two after a boot.
const PATIENCE: Duration = Duration::from_secs(180);

/// A wait of a control daemon that ends without an action of an administrator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PlannedWait {
    /// A control daemon that the service has not started is in its place, and serves its clients until they end.
    ForOthers,
    /// Something that the control daemon needs, such as the fabric manager, has not been ready since this moment.
    NotReady(Instant),
}

impl PlannedWait {
    /// Keeps the beginning of the wait `before` if both waits are for the same thing.
    fn since(self, before: Option<Self>) -> Self {
        match (self, before) {
            (Self::NotReady(_), Some(before @ Self::NotReady(_))) => before,
            (new, _) => new,
        }
    }

    /// Returns true if the wait takes longer than expected.
    fn is_overdue(self) -> bool {
        matches!(self, Self::NotReady(since) if since.elapsed() >= PATIENCE)
    }
}

/// The status of a control daemon and its GPUs.
// Each fact has a bool of its own, since no fact excludes another fact.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Status {
    /// The plan that the status is about. A newer plan may exist.
    pub plan: Arc<ControlDaemonPlan>,
    pub view: ControlDaemonView,
    /// True if a client that starts now is served with the planned limits. The client may be served even in the state
    /// `waiting`, if the control daemon waits for the end of clients before a change.
    pub serving: bool,
    /// The GPUs, by UUID.
    pub gpus: BTreeMap<String, GpuStatus>,
    /// The clients that have waited long for a server.
    pub waiting: Vec<ProcessId>,
    /// True once the plan is in force, or the reason is known why it is not.
    pub settled: bool,
    /// True if the next step of the supervisor waits for the end of clients, or follows after a failure. The next step
    /// may then come days later.
    pub put_off: bool,
    /// The wait because of which the control daemon does not serve. None if the control daemon serves, or an administrator
    /// has to do something.
    pub waits: Option<PlannedWait>,
    /// True if the control daemon runs, and ends as soon as it has no client.
    pub ends_when_idle: bool,
    /// The slices whose directory has no link to the control daemon, with the reasons.
    pub missing_links: BTreeMap<Way, String>,
    /// The last events about the control daemon, oldest first.
    pub events: Events,
}

impl Status {
    /// Changes this status to one about a new plan. A control daemon that serves goes on; only GPUs that need other
    /// limits are not served as planned any more. If no control daemon serves, or it serves in another directory, the
    /// new plan is not served yet.
    pub(super) fn take(&mut self, plan: &ControlDaemonPlan) {
        if *self.plan == *plan {
            return;
        }
        let before = std::mem::replace(&mut self.plan, Arc::new(plan.clone()));
        self.gpus = gpus(plan, &self.gpus);
        self.view.wanted_cpus = plan.cpus;
        self.settled = false;
        self.put_off = false;
        if self.serving && before.pipe_directory == plan.pipe_directory {
            for uuid in plan.to_be_set_since(&before) {
                if let Some(gpu) = self.gpus.get_mut(uuid) {
                    gpu.being_set = true;
                }
            }
        } else {
            self.view.state = ControlDaemonState::Starting;
            self.view.since = SystemTime::now();
            self.serving = false;
        }
    }

    fn pass_through(&mut self, state: ControlDaemonState, serving: bool, reason: &str) {
        if self.view.state != state {
            self.view.since = SystemTime::now();
        }
        self.view.state = state;
        self.serving = serving;
        self.put_off &= !matches!(state, ControlDaemonState::Starting | ControlDaemonState::Ready);
        // During a new start the reason of the last failure stays in the status, until the start has succeeded.
        if state != ControlDaemonState::Starting {
            reason.clone_into(&mut self.view.reason);
            self.waits = None;
        }
    }

    /// Returns true if the control daemon does not serve, but no administrator has to do anything about it.
    pub(crate) fn goes_on_as_planned(&self) -> bool {
        let waits = self.waits.is_some_and(|waits| !waits.is_overdue());
        waits || self.view.state == ControlDaemonState::Faulted
    }

    /// Records that the supervisor has no change for the plan under way. No GPU waits for its limits any more: the limits
    /// are in force, or the status of the GPU has the reason why they are not.
    fn settle(&mut self) {
        self.settled = true;
        for gpu in self.gpus.values_mut() {
            gpu.being_set = false;
        }
    }
}

/// The status of one GPU of a control daemon.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct GpuStatus {
    /// The compute mode of the GPU when it was last read.
    pub compute_mode: Option<ComputeMode>,
    /// The reason why the control daemon serves without the GPU for now; empty if the GPU is not left out.
    pub left_out: String,
    /// The reason why the GPU is not served as planned though it is not left out; empty if it is served.
    pub reason: String,
    /// The reason why the GPU takes no more clients; empty while it takes clients.
    pub full: String,
    /// The number of clients on the GPU, from the control daemon. None if NVML lists the clients, or the control
    /// daemon was not asked.
    pub unlisted_clients: Option<u32>,
    /// The thread percentage that the control daemon has in force for its clients. None if it is not known.
    pub thread_percentage: Option<u8>,
    /// The memory limit in MiB that a running server has in force.
    pub memory_limit_mib: Option<u64>,
    /// The processes that use the GPU without a server of this control daemon.
    pub bypasses: Vec<Bypass>,
    /// True if the processes in `bypasses` prevent a server from opening the GPU.
    pub server_kept_out: bool,
    /// True while the limits of the present plan are being set.
    pub being_set: bool,
}

/// Publishes the status of a supervisor when it has changed.
#[derive(Debug)]
pub(super) struct Reporter {
    status: watch::Sender<Status>,
    changed: Arc<Notify>,
}

impl Reporter {
    pub(super) fn new(plan: &ControlDaemonPlan, changed: Arc<Notify>) -> (Self, watch::Receiver<Status>) {
        let view = ControlDaemonView {
            id: plan.id.clone(),
            state: ControlDaemonState::Starting,
            reason: String::new(),
            pid: None,
            servers: Vec::new(),
            pipe_directory: plan.pipe_directory.clone(),
            control_directory: plan.control_directory().to_owned(),
            log_directory: plan.log_directory.clone(),
            multiuser: None,
            cpus: None,
            wanted_cpus: plan.cpus,
            starts: 0,
            restarts: 0,
            server_restarts: 0,
            faults: 0,
            since: SystemTime::now(),
        };
        let (status, seen) = watch::channel(Status {
            plan: Arc::new(plan.clone()),
            view,
            serving: false,
            gpus: gpus(plan, &BTreeMap::new()),
            waiting: Vec::new(),
            settled: false,
            put_off: false,
            waits: None,
            ends_when_idle: false,
            missing_links: BTreeMap::new(),
            events: Events::default(),
        });
        (Self { status, changed }, seen)
    }

    /// Publishes a fact about the running control daemon, which has the GPUs in `served`.
    pub(super) fn show(&self, shown: Showing, served: &[String], multiuser: bool) {
        match shown {
            Showing::State { state, ends_when_idle } => {
                self.update(|status| status.ends_when_idle = ends_when_idle);
                let Some(ShownState { state, serving, settled, reason }) = state else { return };
                let state = match state {
                    ShownAs::Starting => {
                        self.update(|status| status.settled = false);
                        ControlDaemonState::Starting
                    }
                    ShownAs::Ready => ControlDaemonState::Ready,
                    ShownAs::Faulted => ControlDaemonState::Faulted,
                    ShownAs::Backoff => ControlDaemonState::Backoff,
                    ShownAs::Waiting => ControlDaemonState::Waiting,
                };
                if settled {
                    self.enter(state, serving, &reason);
                } else {
                    self.pass_through(state, serving, &reason);
                }
            }
            Showing::PutOff => self.put_off(),
            Showing::WaitingClients(clients) => self.update(|status| status.waiting = clients),
            Showing::InForce { thread_percentage } => self.update(|status| {
                status.view.multiuser = Some(multiuser);
                for (uuid, gpu) in &mut status.gpus {
                    gpu.thread_percentage = served.contains(uuid).then_some(thread_percentage);
                }
            }),
            Showing::Servers { alive, mut gpus } => self.update(|status| {
                status.view.servers = alive;
                for (uuid, gpu) in &mut status.gpus {
                    let ShownGpu { memory_limit_mib, reason, full, unlisted_clients } =
                        gpus.remove(uuid).unwrap_or_default();
                    (gpu.memory_limit_mib, gpu.reason) = (memory_limit_mib, reason);
                    (gpu.full, gpu.unlisted_clients) = (full, unlisted_clients);
                }
            }),
        }
    }

    /// Publishes a state in which the control daemon stays until the next event.
    pub(super) fn enter(&self, state: ControlDaemonState, serving: bool, reason: &str) {
        self.update(|status| {
            status.pass_through(state, serving, reason);
            if state != ControlDaemonState::Starting {
                status.settle();
            }
        });
    }

    /// Publishes that the control daemon does not serve. The next attempt follows after a pause or an event, which
    /// may take days.
    pub(super) fn enter_failing(&self, state: ControlDaemonState, reason: &str, waits: Option<PlannedWait>) {
        self.update(|status| {
            let waits = waits.map(|waits| waits.since(status.waits));
            status.pass_through(state, false, reason);
            status.waits = waits;
            status.put_off = true;
            status.settle();
        });
    }

    /// Publishes a state through which the control daemon passes on the way to its plan.
    pub(super) fn pass_through(&self, state: ControlDaemonState, serving: bool, reason: &str) {
        self.update(|status| status.pass_through(state, serving, reason));
    }

    /// Publishes that the supervisor's next step waits for the end of clients.
    pub(super) fn put_off(&self) {
        self.update(|status| {
            status.put_off = true;
            status.settle();
        });
    }

    pub(super) fn event(&self, text: String) {
        tracing::info!(mps_control = %self.id(), "{text}");
        self.keep_event(Event::now(text));
    }

    /// Logs a message of this kind, and records it as an event.
    pub(super) fn report(&self, message: Message, about: Subject<'_>, text: String) {
        let id = self.id().to_string();
        message.log(Subject { control: Some(&id), ..about }, &text);
        self.keep_event(message.event(text));
    }

    pub(super) fn warning(&self, text: String) {
        tracing::warn!(mps_control = %self.id(), "{text}");
        self.keep_event(Event::now(text));
    }

    /// Records an event that was logged already.
    pub(super) fn keep_event(&self, event: Event) {
        self.update(|status| status.events.push(event));
    }

    pub(super) fn id(&self) -> DaemonId {
        self.status.borrow().view.id.clone()
    }

    pub(super) fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    pub(super) fn reason(&self) -> String {
        self.status.borrow().view.reason.clone()
    }

    pub(super) fn update_gpu(&self, uuid: &str, change: impl FnOnce(&mut GpuStatus)) {
        self.update(|status| {
            if let Some(gpu) = status.gpus.get_mut(uuid) {
                change(gpu);
            }
        });
    }

    pub(super) fn update(&self, change: impl FnOnce(&mut Status)) {
        if self.change(change) {
            self.changed.notify_one();
        }
    }

    /// Records that the control daemon has ended, and publishes `shown` as its state. This call does not wake the main
    /// loop, so that the line about the end in the service's log does not wait for the publication. The running act
    /// ends right after this call, and the end of the act wakes the main loop.
    pub(super) fn has_ended(&self, shown: Option<(ControlDaemonState, &str)>) {
        self.change(|status| {
            if let Some((state, reason)) = shown {
                status.pass_through(state, false, reason);
            }
            status.view.pid = None;
            status.view.cpus = None;
            status.view.servers.clear();
            status.waiting.clear();
            status.serving = false;
            status.ends_when_idle = false;
            for gpu in status.gpus.values_mut() {
                gpu.thread_percentage = None;
                gpu.memory_limit_mib = None;
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut Status)) -> bool {
        self.status.send_if_modified(|status| {
            let before = status.clone();
            change(status);
            *status != before
        })
    }
}

fn gpus(plan: &ControlDaemonPlan, known: &BTreeMap<String, GpuStatus>) -> BTreeMap<String, GpuStatus> {
    let of = |uuid: &String| known.get(uuid).cloned().unwrap_or_default();
    plan.gpus.iter().map(|gpu| (gpu.uuid.clone(), of(&gpu.uuid))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(thread_percentage: u8) -> ControlDaemonPlan {
        ControlDaemonPlan {
            id: DaemonId::Shared,
            pipe_directory: "/tmp/pipe".into(),
            log_directory: "/tmp/log".into(),
            private_directory: None,
            slice_directories: None,
            gpus: Vec::new(),
            thread_percentage,
            multiuser: true,
            multiuser_optional: true,
            prewarm: true,
            cpus: None,
            supervision: Arc::default(),
        }
    }

    /// A new plan must not be published as served before the supervisor has taken it.
    #[test]
    fn a_plan_is_served_only_once_somebody_has_said_so_of_it() {
        let (reporter, seen) = Reporter::new(&plan(50), Arc::default());
        reporter.enter(ControlDaemonState::Ready, true, "");
        let mut status = seen.borrow().clone();
        status.take(&plan(50));
        assert!(status.serving && status.settled);
        assert_eq!(status.view.state, ControlDaemonState::Ready);
        status.take(&plan(25));
        assert!(!status.settled);
        let mut elsewhere = plan(25);
        elsewhere.pipe_directory = "/tmp/elsewhere".into();
        status.take(&elsewhere);
        assert!(!status.serving && !status.settled);
        assert_eq!(status.view.state, ControlDaemonState::Starting);
    }

    #[test]
    fn a_wait_is_planned_for_minutes_and_begins_anew_after_anything_else() {
        let (reporter, seen) = Reporter::new(&plan(50), Arc::default());
        let fails = |waits| reporter.enter_failing(ControlDaemonState::Waiting, "not ready", waits);
        let is_planned = || seen.borrow().goes_on_as_planned();
        let long_ago = Instant::now().checked_sub(PATIENCE).unwrap();
        fails(Some(PlannedWait::NotReady(Instant::now())));
        assert!(is_planned());
        reporter.enter(ControlDaemonState::Ready, true, "");
        fails(Some(PlannedWait::NotReady(long_ago)));
        reporter.enter(ControlDaemonState::Starting, false, "");
        fails(Some(PlannedWait::NotReady(Instant::now())));
        assert!(!is_planned(), "it has lasted for minutes");
        fails(None);
        assert!(!is_planned());
        fails(Some(PlannedWait::NotReady(Instant::now())));
        assert!(is_planned(), "it is another wait");
        fails(Some(PlannedWait::ForOthers));
        assert!(is_planned());
    }
}
