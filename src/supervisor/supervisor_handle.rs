//! The handle of a supervisor, by which the fleet passes on acts and requests and reads the status.

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

/// Dropping a [`SupervisorHandle`] ends neither the control daemon nor its clients.
#[derive(Debug)]
pub(crate) struct SupervisorHandle {
    plan: ControlDaemonPlan,
    since: SystemTime,
    /// The supervisor's data. The running act locks them. Further acts wait for the lock, in the order in which they came.
    machine: Arc<Mutex<Machine>>,
    events: mpsc::UnboundedSender<CoreEvent<ControlDaemonPlan>>,
    /// Interrupts the act that was ordered last. None before the first act, and after an interruption.
    interrupt: Option<oneshot::Sender<()>>,
    status: channel::Receiver<Arc<Status>>,
    front_ends: FrontEnds,
    requests: mpsc::Sender<(Requested, Option<Answer>)>,
    admission: SharedAdmission,
}

impl SupervisorHandle {
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

    /// Starts a task that carries out the act once all earlier acts have ended.
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
                // Sending fails only at the end of the service, when the receiver is dropped.
                let _ = events.send(done);
            }
        });
    }

    pub(crate) fn interrupt(&mut self) {
        if let Some(interrupt) = self.interrupt.take() {
            let _ = interrupt.send(());
        }
    }

    /// Publishes a new plan, and adapts the links to it, even while an act runs.
    pub(crate) fn follow(&mut self, plan: &ControlDaemonPlan, goal: Goal) {
        match goal {
            Goal::Serve | Goal::Retire => self.admission.pursue(plan, goal == Goal::Retire),
            // The links stay. A link to a control daemon that ends does no harm. If the next service takes the control daemon
            // over, clients still need the links.
            Goal::Stop(_) | Goal::Leave => {}
        }
        if self.plan != *plan {
            self.since = SystemTime::now();
            self.plan.clone_from(plan);
        }
    }

    /// Removes the immutable flag from the directories of the links. The service calls this when the control daemon needs no
    /// supervisor any more, so that other users can change and remove the directories.
    pub(crate) fn release(&self) {
        self.admission.release();
    }

    /// Returns the status, described for the newest plan, even if the supervisor does not use this plan yet.
    pub(crate) fn status(&self) -> Arc<Status> {
        let status = Arc::clone(&self.status.borrow());
        let missing_links = self.admission.missing();
        if *status.plan == self.plan && status.missing_links == missing_links {
            return status;
        }
        let mut status = Status { missing_links, ..Status::clone(&status) };
        status.take(&self.plan, self.since);
        Arc::new(status)
    }

    /// Returns the front end for the control daemon that listens in the order's directories. While no control daemon of the
    /// service runs, a foreign control daemon may listen there and have clients.
    pub(crate) fn control_in_place(&self) -> Option<Arc<Control>> {
        let status = self.status.borrow();
        let directories = [&status.view.control_directory, &status.view.pipe_directory];
        let mut there = directories.into_iter().map(|directory| self.front_ends.control_in(directory));
        there.find(|control| control.daemon_pid().is_some()).map(Arc::new)
    }

    /// Asks the supervisor to make the pending change, which waits for the end of clients. With `force` the change is made at
    /// once, otherwise only if there is no client. The error has the number of clients that prevent the change.
    pub(crate) fn apply(&self, force: bool) -> oneshot::Receiver<Result<(), Problem>> {
        self.ask(Requested::Apply { force })
    }

    pub(crate) fn restart_server(&self) -> oneshot::Receiver<Result<(), Problem>> {
        self.ask(Requested::RestartServer)
    }

    /// Makes and removes links, even while an act runs, so that no slice that is closed to new clients has a link. Returns the
    /// links that can't be removed, in words.
    pub(crate) fn link(&self) -> BTreeSet<String> {
        self.admission.link()
    }

    pub(crate) fn check(&self) {
        self.send(Requested::Check, None);
    }

    pub(crate) fn met_xid(&self, xid: u64) {
        tracing::debug!("the control daemon is checked now, since a GPU reported Xid {xid}");
        // The health check finds out which servers the error has hit.
        self.send(Requested::Check, None);
    }

    fn ask(&self, request: Requested) -> oneshot::Receiver<Result<(), Problem>> {
        let (reply, answer) = oneshot::channel();
        self.send(request, Some(reply));
        answer
    }

    /// If too many requests wait, the request is dropped. The channel for its answer is then closed, which the caller notices.
    fn send(&self, request: Requested, reply: Option<Answer>) {
        if let Err(error) = self.requests.try_send((request, reply)) {
            tracing::debug!(
                "the service drops a request for control daemon {id}, which has too many requests or is \
                 no longer supervised: {error}",
                id = self.plan.id
            );
        }
    }
}
