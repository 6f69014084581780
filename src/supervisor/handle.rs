//! A supervisor in the hands of the loop: its goal, its status, and the commands to it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch as channel};
use tokio::task::JoinHandle;

use crate::mps::control::{Control, FrontEnds};
use crate::rate_limit::RateLimit;
use common::plan::ControlDaemonPlan;

use super::admission::SharedAdmission;
use super::bypasses::Bypasses;
use super::status::{Reporter, Status};
use super::{Goal, LINES, Machine, Order, SupervisorCommand, Tools, Worker, run};

/// A supervised control daemon. Dropped, it is left as it is, with its clients.
#[derive(Debug)]
pub(crate) struct Supervisor {
    goal: channel::Sender<(Goal, Order)>,
    status: channel::Receiver<Status>,
    control: channel::Receiver<Option<Arc<Control>>>,
    front_ends: FrontEnds,
    commands: mpsc::Sender<SupervisorCommand>,
    admission: SharedAdmission,
    task: JoinHandle<()>,
}

impl Supervisor {
    /// Starts to make `order` true, or with another goal than to serve, to end what of it still runs.
    pub(crate) fn start(order: Order, goal: Goal, tools: Tools) -> Self {
        let (reporter, status) = Reporter::new(&order.plan, Arc::clone(&tools.changed));
        let (control_sender, control) = channel::channel(None);
        let front_ends = tools.front_ends.clone();
        let (commands, commands_received) = mpsc::channel(4);
        let (state_file, changed) = (tools.state_file.clone(), Arc::clone(&tools.changed));
        let admission = SharedAdmission::new(&order.plan, goal == Goal::Retire, state_file, changed);
        let worker = Worker {
            order: order.clone(),
            tools,
            reporter,
            control: control_sender,
            retiring: false,
            has_run: false,
            has_served: false,
            multiuser_refused: false,
            left_out: BTreeMap::new(),
            former_gpus: BTreeSet::new(),
            bypasses: Bypasses::default(),
            rate_limit: RateLimit::new(LINES),
            admission: admission.clone(),
            links_stuck: BTreeSet::new(),
            not_beside: None,
        };
        let (goal, goals) = channel::channel((goal, order));
        let machine = Machine { worker, run: None };
        let task = tokio::spawn(run(goals, commands_received, machine));
        Self { goal, status, control, front_ends, commands, admission, task }
    }

    /// Gives it another goal. The same again changes nothing.
    pub(crate) fn pursue(&self, goal: Goal, order: Order) {
        match goal {
            Goal::Serve | Goal::Retire => self.admission.pursue(&order.plan, goal == Goal::Retire),
            // A link to a control daemon that ends harms nobody, and a control daemon that is left needs its links.
            Goal::Stop | Goal::Leave => {}
        }
        self.goal.send_if_modified(|current| {
            let new = (goal, order);
            let modified = *current != new;
            *current = new;
            modified
        });
    }

    /// Gives it another goal with the order that it has.
    pub(crate) fn end(&self, goal: Goal) {
        let order = self.goal.borrow().1.clone();
        self.pursue(goal, order);
    }

    /// Tells it which GPUs of its order other control daemons still have.
    pub(crate) fn go_without(&self, held: impl FnOnce(&ControlDaemonPlan) -> BTreeMap<String, String>) {
        self.goal.send_if_modified(|(_, order)| {
            let held = held(&order.plan);
            let modified = order.held != held;
            order.held = held;
            modified
        });
    }

    /// True if it is to serve. Otherwise it is on the way out.
    pub(crate) fn serves(&self) -> bool {
        self.goal.borrow().0 == Goal::Serve
    }

    /// True if it is to end now, with its clients.
    pub(crate) fn stops(&self) -> bool {
        self.goal.borrow().0 == Goal::Stop
    }

    /// True once it has ended.
    pub(crate) fn ended(&self) -> bool {
        self.task.is_finished()
    }

    /// The status as of this moment. It is about the last order, even if the supervisor has not read that yet.
    pub(crate) fn status(&self) -> Status {
        let mut status = self.status.borrow().clone();
        status.take(&self.goal.borrow().1.plan);
        status.unlinked = self.admission.unlinked();
        status
    }

    /// The way to its control daemon, whether or not it serves as it should. None while no control daemon runs.
    pub(crate) fn control(&self) -> channel::Receiver<Option<Arc<Control>>> {
        self.control.clone()
    }

    /// The same at this moment. If none of ours runs, it leads to the control daemon of somebody else that listens in the
    /// pipe directory, since clients in its containers are clients of that control daemon.
    pub(crate) fn control_in_place(&self) -> Option<Arc<Control>> {
        self.control.borrow().clone().or_else(|| {
            let status = self.status.borrow();
            let directories = [&status.view.control_directory, &status.view.pipe_directory];
            let mut there = directories.into_iter().map(|directory| self.front_ends.control_in(directory));
            there.find(|control| control.daemon_pid().is_some()).map(Arc::new)
        })
    }

    /// Makes a change that waits for clients to end: now if `force` or if there are none. The error says who is in the
    /// way.
    pub(crate) fn apply(&self, force: bool) -> oneshot::Receiver<Result<(), String>> {
        let (reply, answer) = oneshot::channel();
        self.send(SupervisorCommand::Apply { force, reply });
        answer
    }

    /// Ends the server and starts another. The error says who is in the way.
    pub(crate) fn restart_server(&self) -> oneshot::Receiver<Result<(), String>> {
        let (reply, answer) = oneshot::channel();
        self.send(SupervisorCommand::RestartServer { reply });
        answer
    }

    /// Makes and takes away the links to its control daemon, as the state file has slices drained, whatever the supervisor
    /// waits for. Returns the links that can't be taken away, in words.
    pub(crate) fn link(&self) -> BTreeSet<String> {
        if let Err(bad) = self.admission.apply() {
            tracing::debug!("{bad}");
        }
        self.admission.stuck()
    }

    /// Asks for the health check now.
    pub(crate) fn check(&self) {
        self.send(SupervisorCommand::Check);
    }

    /// Tells of a critical error of one of its GPUs.
    pub(crate) fn met_xid(&self, xid: u64) {
        self.send(SupervisorCommand::Xid(xid));
    }

    /// Drops a command if too many wait. The channel of the answer then says so.
    fn send(&self, command: SupervisorCommand) {
        if let Err(error) = self.commands.try_send(command) {
            tracing::debug!("a command is dropped: {error}");
        }
    }
}
