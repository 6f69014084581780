//! The handle of a supervisor, for the fleet: passes on acts and requests, and reads the status.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::SystemTime;

use mps_core::serve::{GpuReach, Requested};
use mps_core::{CoreEvent, DaemonAct, Goal, HeldGpus, Order};
use tokio::sync::{Mutex, mpsc, oneshot, watch as channel};

use crate::mps::control::{Control, FrontEnds};
use common::plan::ControlDaemonPlan;
use common::problem::Problem;

use super::admission::SharedAdmission;
use super::status::{Reporter, Status};
use super::{Answer, LINES, Machine, Tools, Worker};

/// The handle of a supervisor. If a [`SupervisorHandle`] is dropped, the control daemon and its clients go on.
#[derive(Debug)]
pub(crate) struct SupervisorHandle {
    plan: ControlDaemonPlan,
    /// The moment since which `plan` holds.
    since: SystemTime,
    /// Held by the act that runs; further acts wait in the order in which they came.
    machine: Arc<Mutex<Machine>>,
    /// The queue of the core.
    events: mpsc::UnboundedSender<CoreEvent<ControlDaemonPlan>>,
    /// The sender that interrupts the running act. None if no act can be interrupted.
    interrupt: Option<oneshot::Sender<()>>,
    status: channel::Receiver<Status>,
    front_ends: FrontEnds,
    requests: mpsc::Sender<(Requested, Option<Answer>)>,
    admission: SharedAdmission,
}

impl SupervisorHandle {
    /// Makes a supervisor. Each act of the supervisor is a task, which reports its outcome to the core.
    pub(crate) fn new(
        plan: &ControlDaemonPlan,
        goal: Goal,
        tools: Tools,
        events: mpsc::UnboundedSender<CoreEvent<ControlDaemonPlan>>,
    ) -> Self {
        let (reporter, status) = Reporter::new(plan, Arc::clone(&tools.changed));
        let front_ends = tools.front_ends.clone();
        let (requests, requested) = mpsc::channel(4);
        let (state_file, changed) = (tools.state_file.clone(), Arc::clone(&tools.changed));
        let admission = SharedAdmission::new(plan, goal == Goal::Retire, state_file, changed);
        let worker = Worker {
            plan: plan.clone(),
            goal,
            held: BTreeMap::new(),
            tools,
            reporter,
            has_run: false,
            has_served: false,
            multiuser_refused: false,
            processes: BTreeMap::new(),
            rate_limit: LINES,
            admission: admission.clone(),
            links_stuck: BTreeSet::new(),
            not_beside: None,
        };
        let reach = GpuReach::default();
        let machine = Machine { worker, reach, run: None, failing: None, requests: requested };
        let (plan, machine, since) = (plan.clone(), Arc::new(Mutex::new(machine)), SystemTime::now());
        Self { plan, since, machine, events, interrupt: None, status, front_ends, requests, admission }
    }

    /// Has the supervisor carry out an act, after the act that is running.
    pub(crate) fn carry_out(
        &mut self,
        order: Order<ControlDaemonPlan>,
        goal: Goal,
        held: HeldGpus,
        act: DaemonAct,
    ) {
        let (sender, interrupt) = oneshot::channel();
        self.interrupt = Some(sender);
        let (machine, events) = (Arc::clone(&self.machine), self.events.clone());
        tokio::spawn(async move {
            let mut machine = machine.lock().await;
            if let Some(done) = machine.act(order.payload, goal, held, act, interrupt).await {
                // Sending fails only when the receiver is dropped, at the end of the service.
                let _ = events.send(done);
            }
        });
    }

    /// Interrupts the running act.
    pub(crate) fn interrupt(&mut self) {
        if let Some(interrupt) = self.interrupt.take() {
            let _ = interrupt.send(());
        }
    }

    /// Publishes a new plan, and makes and removes the links to the control daemon as the plan says, even during an
    /// act.
    pub(crate) fn follow(&mut self, plan: &ControlDaemonPlan, goal: Goal) {
        match goal {
            Goal::Serve | Goal::Retire => self.admission.pursue(plan, goal == Goal::Retire),
            // The links stay: a link to a control daemon that ends does no harm, and clients of a control daemon that the
            // next service takes over need their links.
            Goal::Stop(_) | Goal::Leave => {}
        }
        if self.plan != *plan {
            self.since = SystemTime::now();
            self.plan.clone_from(plan);
        }
    }

    /// Lets other users change and remove the directories of the links: the control daemon has no supervisor any
    /// more.
    pub(crate) fn release(&self) {
        self.admission.release();
    }

    /// The present status. The status is about the last plan, even if the supervisor has not taken that plan yet.
    pub(crate) fn status(&self) -> Status {
        let mut status = self.status.borrow().clone();
        status.take(&self.plan, self.since);
        status.missing_links = self.admission.missing();
        status
    }

    /// Returns the front end for the control daemon that listens in the pipe directory. If no control daemon of the
    /// service runs, a foreign control daemon may listen in the pipe directory: programs that connect through this
    /// directory are clients of the foreign control daemon.
    pub(crate) fn control_in_place(&self) -> Option<Arc<Control>> {
        let status = self.status.borrow();
        let directories = [&status.view.control_directory, &status.view.pipe_directory];
        let mut there = directories.into_iter().map(|directory| self.front_ends.control_in(directory));
        there.find(|control| control.daemon_pid().is_some()).map(Arc::new)
    }

    /// Asks the supervisor to make the change that waits for the end of clients, at once if `force` is set or there are
    /// no clients. The error names the clients that prevent the change.
    pub(crate) fn apply(&self, force: bool) -> oneshot::Receiver<Result<(), Problem>> {
        self.ask(Requested::Apply { force })
    }

    /// Asks the supervisor to end the server and to start a new one. The error names the clients that prevent the
    /// restart.
    pub(crate) fn restart_server(&self) -> oneshot::Receiver<Result<(), Problem>> {
        self.ask(Requested::RestartServer)
    }

    /// Makes and removes the links to the control daemon, so that a slice that is drained in the state file has no
    /// link, even during an act. Returns the links that can't be removed, in words.
    pub(crate) fn link(&self) -> BTreeSet<String> {
        if let Err(bad) = self.admission.apply() {
            tracing::debug!("{bad}");
        }
        self.admission.stuck()
    }

    /// Asks the supervisor for the health check now.
    pub(crate) fn check(&self) {
        self.send(Requested::Check, None);
    }

    /// Reports a critical error (Xid) of one of the control daemon's GPUs to the supervisor.
    pub(crate) fn met_xid(&self, xid: u64) {
        tracing::debug!("the control daemon is checked now, since a GPU reported Xid {xid}");
        // The health check finds out which servers the error has hit, so only the check is requested.
        self.send(Requested::Check, None);
    }

    fn ask(&self, request: Requested) -> oneshot::Receiver<Result<(), Problem>> {
        let (reply, answer) = oneshot::channel();
        self.send(request, Some(reply));
        answer
    }

    /// Sends a request to the supervisor, or drops it if too many requests wait. If the request is dropped, the channel for
    /// the answer is closed.
    fn send(&self, request: Requested, reply: Option<Answer>) {
        if let Err(error) = self.requests.try_send((request, reply)) {
            tracing::debug!("too many requests wait for a control daemon, so a request is dropped: {error}");
        }
    }
}
