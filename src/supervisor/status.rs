//! The status that a supervisor publishes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use mps_core::GpuUuid;
use mps_core::links::Way;
use mps_core::serve::Failing;
use mps_core::terms::DaemonId;
use mps_core::view::{ControlDaemonState, DaemonView};
use tokio::sync::{Notify, watch};

use crate::message::{Message, Subject};
use crate::supervisor::bypass::Bypass;
use common::host::compute_mode::ComputeMode;
use common::plan::ControlDaemonPlan;
use common::published::control_daemon::ControlDaemonView;
use common::published::events::{Event, Events};

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Status {
    /// The plan that the status describes. The fleet may have a newer plan.
    pub plan: Arc<ControlDaemonPlan>,
    pub shown: DaemonView,
    /// The facts that are published. The state, the reason, the servers and the multi-user mode are copies from `shown`, which
    /// [`Status::change`] makes.
    pub view: ControlDaemonView,
    /// The compute mode that NVML last gave for each GPU, by the GPU's UUID.
    pub compute_modes: BTreeMap<String, ComputeMode>,
    pub bypasses: Vec<Bypass>,
    /// The directories that lack a link to the control daemon, each with the reason.
    pub missing_links: BTreeMap<Way, String>,
    pub events: Events,
}

impl Status {
    /// Makes this the status of a new plan, which the service has had since the moment `since`. If the pipe directory stays the
    /// same, a control daemon that serves still counts as serving.
    pub(super) fn take(&mut self, plan: &ControlDaemonPlan, since: SystemTime) {
        if *self.plan == *plan {
            return;
        }
        let before = std::mem::replace(&mut self.plan, Arc::new(plan.clone()));
        let goes_on = before.pipe_directory == plan.pipe_directory;
        if *plan == (ControlDaemonPlan { supervision: Arc::clone(&plan.supervision), ..(*before).clone() }) {
            // Only the settings for the supervision differ, so nothing changes for clients. The view is settled again once the
            // supervisor has the new settings.
            self.shown.settled = false;
            return;
        }
        let to_be_set = plan.to_be_set_since(&before).map(str::to_owned).collect();
        self.view.wanted_cpus = plan.cpus;
        self.change(since, |shown| shown.take_order(gpus(plan), goes_on, &to_be_set));
        // No health check covers a GPU that has left the plan. So the last facts about this GPU are removed, since they would
        // never change.
        let gpus = &self.shown.gpus;
        self.bypasses.retain(|bypass| gpus.contains_key(&bypass.gpu_uuid));
        self.compute_modes.retain(|uuid, _| gpus.contains_key(uuid));
    }

    /// Changes `shown`, the facts that the core decides, and copies them to `view`. If the state of the control daemon changes,
    /// `since` is the beginning of the new state.
    fn change(&mut self, since: SystemTime, change: impl FnOnce(&mut DaemonView)) {
        change(&mut self.shown);
        let (view, shown) = (&mut self.view, &self.shown);
        if view.state != shown.state {
            (view.state, view.since) = (shown.state, since);
        }
        view.reason.clone_from(&shown.reason);
        view.servers.clone_from(&shown.servers);
        view.multiuser = shown.multiuser;
    }

    pub(crate) fn bypasses_on<'s>(&'s self, uuid: &'s str) -> impl Iterator<Item = &'s Bypass> {
        self.bypasses.iter().filter(move |bypass| bypass.gpu_uuid == uuid)
    }
}

#[derive(Debug)]
pub(super) struct Reporter {
    status: watch::Sender<Arc<Status>>,
    changed: Arc<Notify>,
}

impl Reporter {
    pub(super) fn new(
        plan: &ControlDaemonPlan,
        changed: Arc<Notify>,
    ) -> (Self, watch::Receiver<Arc<Status>>) {
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
        let (status, seen) = watch::channel(Arc::new(Status {
            plan: Arc::new(plan.clone()),
            shown: DaemonView::new(gpus(plan)),
            view,
            compute_modes: BTreeMap::new(),
            bypasses: Vec::new(),
            missing_links: BTreeMap::new(),
            events: Events::default(),
        }));
        (Self { status, changed }, seen)
    }

    pub(super) fn show(&self, change: impl FnOnce(&mut DaemonView)) {
        self.update(|status| status.change(SystemTime::now(), change));
    }

    pub(super) fn event(&self, text: String) {
        tracing::info!(mps_control = %self.id(), "{text}");
        self.keep_event(Event::now(text));
    }

    pub(super) fn report(&self, message: Message, about: Subject<'_>, text: String) {
        let id = self.id().to_string();
        message.log(Subject { control: Some(&id), ..about }, &text);
        self.keep_event(message.event(text));
    }

    pub(super) fn warning(&self, text: String) {
        tracing::warn!(mps_control = %self.id(), "{text}");
        self.keep_event(Event::now(text));
    }

    pub(super) fn keep_event(&self, event: Event) {
        self.update(|status| status.events.push(event));
    }

    pub(super) fn id(&self) -> DaemonId {
        self.status.borrow().view.id.clone()
    }

    pub(super) fn status(&self) -> Arc<Status> {
        Arc::clone(&self.status.borrow())
    }

    pub(super) fn update(&self, change: impl FnOnce(&mut Status)) {
        if self.change(change) {
            self.changed.notify_one();
        }
    }

    /// Publishes that the control daemon has ended, with `failing` as the reason if there is one. This call does not wake the
    /// main loop, since a publication would delay the log line about the end. The main loop wakes a moment later, when the
    /// running act ends.
    pub(super) fn has_ended(&self, failing: Option<&Failing>) {
        self.change(|status| {
            (status.view.pid, status.view.cpus) = (None, None);
            status.change(SystemTime::now(), |view| match failing {
                Some(failing) => failing.end(view),
                None => view.has_ended(),
            });
        });
    }

    fn change(&self, change: impl FnOnce(&mut Status)) -> bool {
        self.status.send_if_modified(|status| {
            let mut changed = Status::clone(status);
            change(&mut changed);
            let has_changed = changed != **status;
            if has_changed {
                *status = Arc::new(changed);
            }
            has_changed
        })
    }
}

fn gpus(plan: &ControlDaemonPlan) -> impl Iterator<Item = GpuUuid> {
    plan.gpus.iter().map(|gpu| gpu.uuid.clone())
}
