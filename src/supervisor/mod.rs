//! Carries out the core's acts for one control daemon: takes it over or starts it, sets its limits, supervises it, and ends it.
//! The core (`crates/core`) decides which act comes next. A control daemon with clients is ended only for a stop of the
//! service, for MPS disabled, or for `apply --force`.

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

/// NVIDIA's program, which is the control daemon and also its front end.
pub(crate) const PROGRAM: &str = "nvidia-cuda-mps-control";

/// The limit for the lines of a control daemon's log that the service passes on to the journal. Tenants can make the control
/// daemon write any number of lines. The start of a server writes 20 lines, and a fatal GPU error 10 lines for each client.
const LINES: RateLimit = RateLimit::new(500, 500, Duration::from_secs(10));

/// The time between two searches for programs that use a GPU without MPS. The service searches only on a GPU with a compute
/// mode that does not refuse these programs.
const GUARD_PERIOD: Duration = Duration::from_secs(2);

type Answer = oneshot::Sender<Result<(), Problem>>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BusSignal {
    /// A server met a fatal GPU error. `pids` are the clients that were hit. The client that caused the error need not be among
    /// them.
    ClientFault { gpu_uuid: String, pids: Vec<u32>, reason: String },
    /// A slice exceeds its budget, or now exceeds other limits than before. Each reason is a word for an exceeded limit, such
    /// as `memory`.
    OverUse { device: String, reasons: Vec<&'static str>, pids: Vec<u32> },
}

#[derive(Debug, Clone)]
pub(crate) struct Tools {
    pub front_ends: FrontEnds,
    pub nvml: NvmlWorker,
    pub state_file: SharedStateFile,
    /// Wakes the main loop when the status of a supervisor has changed.
    pub changed: Arc<Notify>,
    pub signals: mpsc::Sender<BusSignal>,
    pub told_bypasses: ToldBypasses,
    pub wake_ups: GpuWakeUps,
    pub clients: Clients,
    pub changes: FileChanges,
    /// The core's times count from this moment.
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

/// The supervisor's order, and the facts that outlive one run of the control daemon.
// The bools are independent facts, so no enum can replace them.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug)]
struct Worker {
    plan: ControlDaemonPlan,
    goal: Goal,
    held: HeldGpus,
    tools: Tools,
    reporter: Reporter,
    /// If true, the next start of the control daemon counts as a restart.
    has_run: bool,
    /// If true, the next start of a server counts as a restart.
    has_served: bool,
    /// True if this driver's control daemon has refused the multi-user option. Further starts omit the option.
    multiuser_refused: bool,
    /// NVML's last list of the processes on each GPU, by the GPU's UUID.
    processes: BTreeMap<String, Vec<GpuProcess>>,
    rate_limit: RateLimit,
    admission: SharedAdmission,
    links_stuck: BTreeSet<String>,
    /// The private directory that was last given up, since hard links between it and the pipe directory are impossible: they
    /// are on different mounts. The service logs a warning only if this directory changes. None if no directory was given up.
    not_beside: Option<PathBuf>,
}

#[derive(Debug)]
struct Machine {
    worker: Worker,
    reach: GpuReach,
    /// The control daemon, and the facts on which the core's decisions about it depend. None if no control daemon runs.
    run: Option<(DaemonRun, Known)>,
    failing: Option<Failing>,
    requests: mpsc::Receiver<(Requested, Option<Answer>)>,
}

impl Machine {
    /// Carries out an act of the core, and returns the outcome as an event for the core. Returns None for `DaemonAct::Rest`,
    /// since the core does not wait for its outcome.
    async fn act(
        &mut self,
        plan: ControlDaemonPlan,
        goal: Goal,
        held: HeldGpus,
        act: DaemonAct,
        interrupt: oneshot::Receiver<()>,
    ) -> Option<CoreEvent<ControlDaemonPlan>> {
        // `Rest` only publishes the outcome of the act before it, and brings no new order.
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
            // The yield lets the main loop publish the state before the next act begins.
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

    fn done(&self, outcome: ActOutcome) -> CoreEvent<ControlDaemonPlan> {
        let id = &self.worker.plan.id;
        let state_file = self.worker.tools.state_file.lock();
        let written = state_file.control_daemon(id).map(|running| running.gpus.clone());
        CoreEvent::Done { id: id.clone(), written, watched: self.run.is_some(), outcome }
    }

    /// Applies the order to the running control daemon and supervises it. Returns when the control daemon has ended, or when
    /// the order has to be applied again.
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

    /// Publishes the directories of the running control daemon. After a reload they may differ from the directories of the
    /// order.
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

    fn serving(&mut self) -> Option<Serving<'_, RunShell<'_>>> {
        let (run, known) = self.run.as_mut()?;
        Some(self.worker.serving(run, known, &mut self.reach, None))
    }

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

    fn knows_of(&self, run: &DaemonRun, has_just_started: bool) -> Known {
        let Running { gpus, multiuser, .. } = &run.running;
        Known::new(gpus.clone(), *multiuser, has_just_started, self.tools.begun.elapsed())
    }

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

    /// True if the configuration does not need the control daemon any more. It then serves only its present clients.
    fn is_retiring(&self) -> bool {
        self.goal == Goal::Retire
    }

    fn take_order(&mut self, plan: ControlDaemonPlan, goal: Goal, held: HeldGpus) {
        self.reporter.update(|status| status.take(&plan, SystemTime::now()));
        (self.plan, self.goal, self.held) = (plan, goal, held);
        let plan = &mut self.plan;
        let Some(private) = give_up_private_directory(plan) else { return };
        if self.not_beside.as_ref() == Some(&private) {
            return;
        }
        self.reporter.warning(format!(
            "{pipe_directory} is a mount of its own, so the control daemon has no private directory beside \
             it: a program that runs as the host's root and has the pipe directory, even in a container, \
             can command the control daemon; set cuda_mps_pipe_directory to a directory that is not a \
             mount point",
            pipe_directory = plan.pipe_directory.display()
        ));
        self.not_beside = Some(private);
    }
}
