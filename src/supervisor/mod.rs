//! Carries out what the core says about one control daemon: from a plan to a process that serves it, and back.
//!
//! `starting` -> `ready` <-> `faulted`; `backoff` after a death or a failed start, `waiting` when something else must
//! happen first, `stopping` at the end. Nothing is reported before it is confirmed, and no client is ended unless
//! somebody asked for it: a control daemon that has clients is left to them until they are done.
//!
//! The core (`crates/core`) says what is done next, and `run` carries that out.
//! [`start`](self) brings a control daemon up or takes one over, `watch` keeps it well, `heal` mends a server.

pub(crate) mod admission;
pub(crate) mod bells;
mod blocker;
pub(crate) mod bypass;
mod bypasses;
mod capacity;
mod commands;
pub(crate) mod compute_modes;
mod configure;
mod fault;
mod gpus;
mod handle;
mod heal;
mod health_check;
mod known_clients;
mod limits;
mod links;
mod run;
pub(crate) mod runtime_directory;
mod servers;
mod start;
pub(crate) mod state_file;
mod status;
mod stop;
mod waiting_clients;
pub(crate) mod watch;

pub(crate) use common::directories::give_up_private_directory;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mps_core::{ActOutcome, CoreEvent, DaemonAct, Goal, HeldGpus, RunningDaemon};
use tokio::sync::{Notify, mpsc, oneshot, watch as channel};

use crate::mps::changes::FileChanges;
use crate::mps::control::{Control, ControlError, FrontEnds};
use crate::rate_limit::{Rate, RateLimit};
use crate::supervisor::bells::Bells;
use crate::supervisor::compute_modes::ComputeModes;
use crate::supervisor::state_file::SharedStateFile;
use common::config::Supervision;
use common::plan::ControlDaemonPlan;
use common::published::control_daemon::ControlDaemonState;
use common::state_file::Running;

use admission::SharedAdmission;
use bypasses::Bypasses;
use gpus::LeftOut;
pub(crate) use handle::Supervisor;
use run::Run;
use status::Reporter;
pub(crate) use status::{GpuStatus, Status};

/// The program, as every driver package installs it.
pub(crate) const PROGRAM: &str = "nvidia-cuda-mps-control";

/// A pause as the end of a sentence.
fn tried_again(pause: Duration) -> String {
    if pause.is_zero() {
        "retrying at once".to_owned()
    } else {
        format!("retrying in {:.1} s", pause.as_secs_f64())
    }
}

/// The lines of a control daemon's log that are passed on. A server's start writes 20, a fault 10 for each client; tenants can
/// have lines written as fast as they like.
const LINES: Rate = Rate { most: 500, more: 500, period: Duration::from_secs(10) };

/// An order in full. The core knows its id and its GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Instructions {
    pub plan: ControlDaemonPlan,
    pub supervision: Supervision,
}

/// A request to a supervisor beside its acts. The answers are for people.
#[derive(Debug)]
enum SupervisorCommand {
    /// Make a change that waits for clients to end: now if `force`, or if there are none.
    Apply {
        force: bool,
        reply: oneshot::Sender<Result<(), String>>,
    },
    Check,
    /// A GPU met a critical error with this number.
    Xid(u64),
    /// End the server and start another, if it has no clients.
    RestartServer {
        reply: oneshot::Sender<Result<(), String>>,
    },
}

/// A server met a fatal GPU error, and these clients were hit. None of them need be the culprit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ClientFault {
    pub gpu_uuid: String,
    pub pids: Vec<u32>,
    pub reason: String,
}

/// Everything that supervisors share.
#[derive(Debug, Clone)]
pub(crate) struct Tools {
    /// Asks control daemons.
    pub front_ends: FrontEnds,
    /// Sets and restores compute modes.
    pub compute_modes: ComputeModes,
    /// Remembers what was started.
    pub state_file: SharedStateFile,
    /// Notified whenever a status changes.
    pub changed: Arc<Notify>,
    /// Takes every fault.
    pub faults: mpsc::Sender<ClientFault>,
    /// Ring for the clients of a GPU.
    pub bells: Bells,
    /// Tells of changes of files.
    pub changes: FileChanges,
}

/// The core's view of a control daemon in the state file.
pub(crate) fn written(running: &Running) -> RunningDaemon {
    let process = (running.process.pid, running.process.start_time);
    RunningDaemon { process, gpus: running.gpus.clone() }
}

/// Why a control daemon does not serve.
#[derive(Debug)]
enum Failure {
    /// It does not do what it should.
    Failed(String),
    /// Its process has ended, perhaps since it does not know the multi-user option.
    Ended {
        text: String,
        refuses_multiuser: bool,
    },
    /// Something outside must change first.
    Waiting(String),
    Silent(String),
    /// It answers in words that are not known, as a newer driver's may. Another one would answer the same.
    NotUnderstood(String),
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Self {
        match error {
            ControlError::Silent { .. } | ControlError::Unanswered { .. } => Self::Silent(error.to_string()),
            ControlError::Unexpected { .. } => Self::NotUnderstood(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

impl Failure {
    fn into_text(self) -> String {
        match self {
            Self::Failed(text)
            | Self::Ended { text, .. }
            | Self::Waiting(text)
            | Self::Silent(text)
            | Self::NotUnderstood(text) => text,
        }
    }
}

/// The way in which serving ended.
#[derive(Debug)]
enum Ended {
    Failure(Failure),
    /// It has to be told its order again.
    Again,
    /// We have ended it.
    Stopped,
}

/// Why a control daemon does not serve, for people.
#[derive(Debug)]
struct Failing {
    state: ControlDaemonState,
    reason: String,
}

/// An act, as the core wants it carried out.
#[derive(Debug)]
struct Assignment {
    order: Instructions,
    goal: Goal,
    held: HeldGpus,
    act: DaemonAct,
    /// Breaks the act off.
    interrupt: oneshot::Receiver<()>,
}

/// Carries acts out, one after the other, and tells the core what comes of each.
async fn run(
    mut assignments: mpsc::UnboundedReceiver<Assignment>,
    mut commands: mpsc::Receiver<SupervisorCommand>,
    mut machine: Machine,
    events: mpsc::UnboundedSender<CoreEvent<Instructions>>,
) {
    while let Some(Assignment { order, goal, held, act, interrupt }) = assignments.recv().await {
        machine.worker.take_order(order, goal, held);
        let outcome = tokio::select! {
            biased;
            Ok(()) = interrupt => ActOutcome::Interrupted,
            outcome = machine.carry_out(act, &mut commands) => outcome,
        };
        if !matches!(act, DaemonAct::Rest(_)) {
            // An error means that the service ends.
            let _ = events.send(machine.done(outcome));
        }
    }
}

/// The supervisor of one control daemon: what it shall be, and what is known of it beyond one run.
// Each flag is a fact of its own: none of them excludes another.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug)]
struct Worker {
    order: Instructions,
    goal: Goal,
    held: HeldGpus,
    tools: Tools,
    reporter: Reporter,
    /// The front end of the control daemon that runs, for all who ask it something: there once it was found to answer, or
    /// is known to have clients.
    control: channel::Sender<Option<Arc<Control>>>,
    /// There was a control daemon of ours before: the next one is a restart.
    has_run: bool,
    /// There was a server of ours before: the next one is a restart.
    has_served: bool,
    /// This driver has refused the multi-user option once. It is not tried again.
    multiuser_refused: bool,
    /// The GPUs of the order that a control daemon goes without for now, by UUID.
    left_out: BTreeMap<String, LeftOut>,
    /// The processes that use its GPUs without its servers. They outlive it.
    bypasses: Bypasses,
    /// The number of log lines that may still be passed on.
    rate_limit: RateLimit,
    /// The directories that lead clients to its control daemons.
    admission: SharedAdmission,
    /// The links that could not be taken away, as they were last told.
    links_stuck: BTreeSet<String>,
    /// The private directory that is told to be on another mount than the pipe directory.
    not_beside: Option<PathBuf>,
}

/// A worker, and the control daemon that runs, if one does.
#[derive(Debug)]
struct Machine {
    worker: Worker,
    run: Option<Run>,
    /// The GPUs were looked at for the start that has just succeeded.
    has_just_started: bool,
    /// The last failure, until it is shown.
    failing: Option<Failing>,
}

/// A worker with the control daemon that runs. Everything that needs a control daemon is a method of this.
#[derive(Debug)]
struct Serving<'m> {
    worker: &'m mut Worker,
    run: &'m mut Run,
}

impl Machine {
    async fn carry_out(
        &mut self,
        act: DaemonAct,
        commands: &mut mpsc::Receiver<SupervisorCommand>,
    ) -> ActOutcome {
        let done = match act {
            DaemonAct::TakeOver => self.take_over().await.map(|()| ActOutcome::Done),
            DaemonAct::Start => self.start().await.map(|()| ActOutcome::Done),
            DaemonAct::Serve => self.serve(commands).await,
            DaemonAct::Judge => Ok(ActOutcome::Used(self.judge().await)),
            DaemonAct::End(may_end) => Ok(self.end(may_end).await),
            DaemonAct::Rest(pause) => {
                self.rest(pause);
                Ok(ActOutcome::Done)
            }
            DaemonAct::Leave => {
                if let Some(mut serving) = self.serving() {
                    serving.keep_state_file();
                }
                Ok(ActOutcome::Done)
            }
        };
        done.unwrap_or_else(|failure| ActOutcome::Failed(self.failed(failure)))
    }

    /// The news for the core after an act.
    fn done(&self, outcome: ActOutcome) -> CoreEvent<Instructions> {
        let id = self.worker.order.plan.id.clone();
        let written = self.worker.tools.state_file.lock().control_daemon(&id).map(written);
        CoreEvent::Done { id, written, watched: self.run.is_some(), outcome }
    }

    /// Gives the control daemon that runs its order, and watches it until something else has to be done.
    async fn serve(
        &mut self,
        commands: &mut mpsc::Receiver<SupervisorCommand>,
    ) -> Result<ActOutcome, Failure> {
        if !std::mem::take(&mut self.has_just_started) {
            self.worker.read_gpus().await;
        }
        let Some(mut serving) = self.serving() else { return Ok(ActOutcome::Ended) };
        serving.configure().await?;
        match serving.watch(commands).await {
            Ended::Failure(failure) => Err(failure),
            Ended::Again => Ok(ActOutcome::Again),
            Ended::Stopped => {
                self.end_run();
                self.worker.reporter.update(|status| status.settled = false);
                Ok(ActOutcome::Ended)
            }
        }
    }

    /// The control daemon that runs.
    fn serving(&mut self) -> Option<Serving<'_>> {
        Some(Serving { worker: &mut self.worker, run: self.run.as_mut()? })
    }

    /// From now on, this one runs.
    fn hold(&mut self, run: Run) -> Serving<'_> {
        Serving { worker: &mut self.worker, run: self.run.insert(run) }
    }
}

impl Worker {
    /// Whether only its clients still need the control daemon.
    fn is_retiring(&self) -> bool {
        self.goal == Goal::Retire
    }

    fn take_order(&mut self, order: Instructions, goal: Goal, held: HeldGpus) {
        // If the plan is the same, nothing changes for clients.
        self.reporter.update(|status| status.take(&order.plan));
        (self.order, self.goal, self.held) = (order, goal, held);
        let plan = &mut self.order.plan;
        let Some(private) = give_up_private_directory(plan) else { return };
        if self.not_beside.as_ref() == Some(&private) {
            return;
        }
        self.reporter.warning(format!(
            "{} is a mount of its own, so no private directory is beside it: whoever has the pipe directory and is root \
             of the host, in a container too, can command the control daemon",
            plan.pipe_directory.display()
        ));
        self.not_beside = Some(private);
    }
}
