//! Carries out the core's decisions about one control daemon: starts the process that serves a plan, and ends it.
//!
//! `starting` -> `ready` <-> `faulted`; `backoff` after a death or a failed start, `waiting` until something else has happened,
//! `stopping` at the end. The supervisor confirms each effect before it reports the effect, and ends no client unless an
//! administrator has asked for the end: a control daemon with clients serves the clients until they end.
//!
//! The core (`crates/core`) decides about the next act, and `run` carries the act out. [`start`](self) starts a control daemon or
//! takes one over. The decisions about serving are in the core too (`crates/core/src/serve`); `shell` carries out the questions
//! and acts of these decisions.

pub(crate) mod admission;
pub(crate) mod bypass;
mod daemon_run;
mod gpu_shell;
mod link_upkeep;
pub(crate) mod nvml_worker;
pub(crate) mod runtime_directory;
mod shell;
mod start;
pub(crate) mod state_file;
mod status;
mod stop;
mod supervisor_handle;
pub(crate) mod wake_ups;

pub(crate) use common::directories::give_up_private_directory;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use mps_core::serve::{Ended, Failing, Failure, GpuReach, Known, Requested, Serving, Wanted};
use mps_core::terms::GpuProcess;
use mps_core::{ActOutcome, CoreEvent, DaemonAct, Goal, HeldGpus, RateLimit};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::yield_now;
use tokio::time::Instant;

use crate::mps::control::{ControlError, FrontEnds};
use crate::mps::file_changes::FileChanges;
use crate::register::Clients;
use crate::supervisor::bypass::ToldBypasses;
use crate::supervisor::nvml_worker::NvmlWorker;
use crate::supervisor::state_file::SharedStateFile;
use crate::supervisor::wake_ups::GpuWakeUps;
use common::host::cpus::Cpus;
use common::plan::ControlDaemonPlan;
use common::problem::Problem;
use common::state_file::Running;

use admission::SharedAdmission;
use daemon_run::DaemonRun;
use shell::RunShell;
use status::Reporter;
pub(crate) use status::Status;
pub(crate) use supervisor_handle::SupervisorHandle;

/// The name of the control daemon's program in every driver package.
pub(crate) const PROGRAM: &str = "nvidia-cuda-mps-control";

/// The limit for lines of a control daemon's log that are passed on. The start of a server writes 20 lines, a fault 10 for each
/// client; tenants can cause any number of lines.
const LINES: RateLimit = RateLimit::new(500, 500, Duration::from_secs(10));

/// The time between two searches for programs without MPS on a GPU whose compute mode does not refuse them.
const GUARD_PERIOD: Duration = Duration::from_secs(2);

/// The channel for the answer to a request. A supervisor gets requests in addition to the acts that the core orders.
type Answer = oneshot::Sender<Result<(), Problem>>;

/// A signal of the service on D-Bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BusSignal {
    /// A server met a fatal GPU error, and the clients in `pids` were hit. The client that caused the error may be none
    /// of the clients that were hit.
    ClientFault { gpu_uuid: String, pids: Vec<u32>, reason: String },
    /// A slice has exceeded its budget, or exceeds other limits than before: the name of the slice, the exceeded
    /// limits, each as one word, and the clients of the slice.
    OverUse { device: String, reasons: Vec<&'static str>, pids: Vec<u32> },
}

/// Everything that supervisors share.
#[derive(Debug, Clone)]
pub(crate) struct Tools {
    /// Makes the front ends with which supervisors ask control daemons.
    pub front_ends: FrontEnds,
    /// Asks NVML, and sets and restores compute modes.
    pub nvml: NvmlWorker,
    /// The state file, which remembers the control daemons that were started.
    pub state_file: SharedStateFile,
    /// Notified whenever the status of a supervisor changes.
    pub changed: Arc<Notify>,
    /// The queue of signals for D-Bus.
    pub signals: mpsc::Sender<BusSignal>,
    /// The processes without MPS that were reported already.
    pub told_bypasses: ToldBypasses,
    /// The notifications that wake the tasks that watch over the clients of each GPU.
    pub wake_ups: GpuWakeUps,
    /// The register of clients.
    pub clients: Clients,
    /// Reports changes of the control daemons' logs.
    pub changes: FileChanges,
    /// The moment from which the core's times are counted.
    pub begun: Instant,
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Self {
        match error {
            ControlError::Silent { .. } | ControlError::Unanswered { .. } => Self::Silent(error.to_string()),
            ControlError::Unexpected { .. } => Self::NotUnderstood(error.to_string()),
            ControlError::NoDaemon { .. } => Self::Unreachable(error.to_string()),
            ControlError::NotRun { .. } | ControlError::Exited { .. } => Self::NotYet(error.to_string()),
        }
    }
}

/// The supervisor of one control daemon: its order, and the facts that it keeps beyond one run of the control daemon.
// Each fact has a bool of its own, since no fact excludes another fact.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug)]
struct Worker {
    plan: ControlDaemonPlan,
    goal: Goal,
    held: HeldGpus,
    tools: Tools,
    reporter: Reporter,
    /// True if a control daemon has run before, so that the next start counts as a restart.
    has_run: bool,
    /// True if a server has run before, so that the next server counts as a restart.
    has_served: bool,
    /// True if this driver's control daemon has refused the multi-user option. The service does not try the option
    /// again.
    multiuser_refused: bool,
    /// The processes on the GPUs of the control daemon, by UUID, when they were last read.
    processes: BTreeMap<String, Vec<GpuProcess>>,
    /// The limit for log lines that are passed on.
    rate_limit: RateLimit,
    /// The directories with links to the control daemon.
    admission: SharedAdmission,
    /// The links that the last report named as links that could not be removed.
    links_stuck: BTreeSet<String>,
    /// The private directory that was reported because it is on another mount than the pipe directory. None: nothing
    /// was reported.
    not_beside: Option<PathBuf>,
}

/// A worker, and the control daemon that it supervises, if the control daemon runs.
#[derive(Debug)]
struct Machine {
    worker: Worker,
    reach: GpuReach,
    /// The running control daemon, and all facts on which decisions about it depend. None if no control daemon runs.
    run: Option<(DaemonRun, Known)>,
    /// The last failure, until the status shows it.
    failing: Option<Failing>,
    /// The requests, each with the channel for its answer. None if the request has no answer.
    requests: mpsc::Receiver<(Requested, Option<Answer>)>,
}

impl Machine {
    /// Carries out an act that the core has ordered, and returns the event that gives the core the outcome. The event is None
    /// if the core does not wait for the outcome.
    async fn act(
        &mut self,
        plan: ControlDaemonPlan,
        goal: Goal,
        held: HeldGpus,
        act: DaemonAct,
        interrupt: oneshot::Receiver<()>,
    ) -> Option<CoreEvent<ControlDaemonPlan>> {
        // `Rest` only publishes the result of the last act, and belongs to the order of that act. So the worker takes no
        // new order for `Rest`.
        let is_rest = matches!(act, DaemonAct::Rest(_));
        if !is_rest {
            self.worker.take_order(plan, goal, held);
        }
        let outcome = tokio::select! {
            biased;
            Ok(()) = interrupt => ActOutcome::Interrupted,
            outcome = self.carry_out(act) => outcome,
        };
        if is_rest {
            // Other tasks get the chance to publish the state before the next act, which may begin at once.
            yield_now().await;
            return None;
        }
        Some(self.done(outcome))
    }

    async fn carry_out(&mut self, act: DaemonAct) -> ActOutcome {
        let done = match act {
            DaemonAct::TakeOver => self.take_over().await.map(|()| ActOutcome::Done),
            DaemonAct::Start => self.start().await.map(|()| ActOutcome::Done),
            DaemonAct::Serve => self.serve().await,
            DaemonAct::Judge => Ok(ActOutcome::Used(self.judge().await)),
            DaemonAct::End(may_end) => Ok(self.end(may_end).await),
            DaemonAct::Rest(pause) => {
                self.rest(pause);
                Ok(ActOutcome::Done)
            }
            DaemonAct::Leave => {
                if let Some(mut serving) = self.serving() {
                    serving.leave();
                }
                Ok(ActOutcome::Done)
            }
        };
        done.unwrap_or_else(|failure| ActOutcome::Failed(self.failed(failure)))
    }

    /// The event that gives the core the outcome of an act.
    fn done(&self, outcome: ActOutcome) -> CoreEvent<ControlDaemonPlan> {
        let id = &self.worker.plan.id;
        let state_file = self.worker.tools.state_file.lock();
        let written = state_file.control_daemon(id).map(|running| running.gpus.clone());
        CoreEvent::Done { id: id.clone(), written, watched: self.run.is_some(), outcome }
    }

    /// Applies the order to the running control daemon, and watches the control daemon until it ends or the order has
    /// to be applied again.
    async fn serve(&mut self) -> Result<ActOutcome, Failure> {
        self.show_places();
        let Some((run, known)) = &mut self.run else { return Ok(ActOutcome::Ended) };
        let mut serving = self.worker.serving(run, known, &mut self.reach, Some(&mut self.requests));
        match serving.serve().await? {
            Ended::Again => Ok(ActOutcome::Again),
            Ended::Stopped => {
                self.worker.end_run(&mut self.run, None);
                Ok(ActOutcome::Ended)
            }
        }
    }

    /// Shows the directories of the running control daemon, which may differ from the directories of the order, in the
    /// status.
    fn show_places(&self) {
        let Some((DaemonRun { running, .. }, _)) = &self.run else { return };
        let cpus = Cpus::allowed_for(running.process.pid).map(Cpus::describe);
        self.worker.reporter.update(|status| {
            status.view.pipe_directory.clone_from(&running.pipe_directory);
            running.control_directory().clone_into(&mut status.view.control_directory);
            status.view.log_directory.clone_from(&running.log_directory);
            status.view.cpus = cpus;
        });
    }

    /// The core's [`Serving`] for the control daemon that runs, with the shell that carries out its acts. None if no
    /// control daemon runs.
    fn serving(&mut self) -> Option<Serving<'_, RunShell<'_>>> {
        let (run, known) = self.run.as_mut()?;
        Some(self.worker.serving(run, known, &mut self.reach, None))
    }

    /// Takes note that the control daemon of `run` runs, and returns the core's [`Serving`] for it.
    fn hold(&mut self, run: DaemonRun) -> Serving<'_, RunShell<'_>> {
        let known = self.worker.knows_of(&run, false);
        let (run, known) = self.run.insert((run, known));
        self.worker.serving(run, known, &mut self.reach, None)
    }
}

impl Worker {
    fn serving<'m>(
        &'m mut self,
        run: &'m mut DaemonRun,
        known: &'m mut Known,
        reach: &'m mut GpuReach,
        requests: Option<&'m mut mpsc::Receiver<(Requested, Option<Answer>)>>,
    ) -> Serving<'m, RunShell<'m>> {
        let wanted = self.wanted();
        Serving::new(RunShell { worker: self, run, requests, reply: None }, known, reach, wanted)
    }

    /// The facts that are known about a control daemon that was just started or taken over.
    fn knows_of(&self, run: &DaemonRun, has_just_started: bool) -> Known {
        let Running { gpus, multiuser, .. } = &run.running;
        Known::new(gpus.clone(), *multiuser, has_just_started, self.tools.begun.elapsed())
    }

    /// The part of the order on which serving depends.
    fn wanted(&self) -> Wanted {
        let plan = &self.plan;
        Wanted {
            id: plan.id.clone(),
            gpus: plan.gpus.clone(),
            thread_percentage: plan.thread_percentage,
            prewarm: plan.prewarm,
            retiring: self.is_retiring(),
            guard_period: plan.stands_guard().then_some(GUARD_PERIOD),
            held: self.held.clone(),
            sets_modes: plan.supervision.set_compute_mode,
            fault_grace: plan.supervision.fault_grace,
        }
    }

    /// True if the control daemon is needed only by its present clients.
    fn is_retiring(&self) -> bool {
        self.goal == Goal::Retire
    }

    fn take_order(&mut self, plan: ControlDaemonPlan, goal: Goal, held: HeldGpus) {
        // If the new order has the same plan, the status stays as it is: nothing changes for clients.
        self.reporter.update(|status| status.take(&plan, SystemTime::now()));
        (self.plan, self.goal, self.held) = (plan, goal, held);
        let plan = &mut self.plan;
        let Some(private) = give_up_private_directory(plan) else { return };
        if self.not_beside.as_ref() == Some(&private) {
            return;
        }
        self.reporter.warning(format!(
            "{pipe_directory} is a mount of its own, so the control daemon has no private directory beside \
             it: a program that has the pipe directory and is root of the host, in a container too, can \
             command the control daemon",
            pipe_directory = plan.pipe_directory.display()
        ));
        self.not_beside = Some(private);
    }
}
