//! One state machine per control daemon: from a plan to a process that serves it, and back.
//!
//! `starting` -> `ready` <-> `faulted`; `backoff` after a death or a failed start, `waiting` when something else must
//! happen first, `stopping` at the end. Nothing is reported before it is confirmed, and no client is ended unless
//! somebody asked for it: a control daemon that has clients is left to them until they are done.
//!
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

use tokio::sync::{Notify, mpsc, oneshot, watch as channel};
use tokio::time::Instant;

use crate::mps::changes::FileChanges;
use crate::mps::control::{Control, ControlError, FrontEnds};
use crate::rate_limit::{Rate, RateLimit};
use crate::supervisor::bells::Bells;
use crate::supervisor::compute_modes::ComputeModes;
use crate::supervisor::state_file::SharedStateFile;
use common::config::Supervision;
use common::plan::ControlDaemonPlan;

use admission::SharedAdmission;
use bypasses::Bypasses;
use gpus::LeftOut;
pub(crate) use handle::Supervisor;
use run::Run;
use status::Reporter;
pub(crate) use status::{GpuStatus, Status};

/// The program, as every driver package installs it.
pub(crate) const PROGRAM: &str = "nvidia-cuda-mps-control";

/// The pauses after failures: none after the first failure, then this one, which doubles up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(30);

fn next_pause(pause: Duration) -> Duration {
    (pause * 2).clamp(FIRST_PAUSE, LAST_PAUSE)
}

/// A pause as the end of a sentence.
fn tried_again(pause: Duration) -> String {
    if pause.is_zero() {
        "retrying at once".to_owned()
    } else {
        format!("retrying in {:.1} s", pause.as_secs_f64())
    }
}

/// The longest pause while programs without MPS keep the server out. They may end at any moment.
const HELD_PAUSE: Duration = Duration::from_secs(1);

/// After so long in health, the pauses begin with the first one again.
const HEALTHY_AGAIN: Duration = Duration::from_secs(60);

/// The lines of a control daemon's log that are passed on. A server's start writes 20, a fault 10 for each client; tenants can
/// have lines written as fast as they like.
const LINES: Rate = Rate { most: 500, more: 500, period: Duration::from_secs(10) };

/// The control daemon that is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Order {
    pub plan: ControlDaemonPlan,
    pub supervision: Supervision,
    /// The GPUs of the plan that other control daemons still have, each with the id of that control daemon. The order is
    /// carried out without them until they are free.
    pub held: BTreeMap<String, String>,
}

/// The aim of a supervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Goal {
    Serve,
    /// End once it has no clients, and put the compute modes back.
    Retire,
    /// End now, and put the compute modes back.
    Stop,
    /// Leave it as it is, with its clients: the next service takes it over.
    Leave,
}

/// A request to a supervisor beside its goal. The answers are for people.
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
    /// It has to be told its order again, or an order begins again at once.
    Again,
    /// We have ended it.
    Stopped,
    /// It was to retire, and has.
    Retired,
}

async fn run(
    mut goals: channel::Receiver<(Goal, Order)>,
    mut commands: mpsc::Receiver<SupervisorCommand>,
    mut machine: Machine,
) {
    let mut pause = Duration::ZERO;
    let mut retired = false;
    loop {
        let (goal, order) = goals.borrow_and_update().clone();
        machine.worker.take_order(order);
        match goal {
            // Nothing is left of it, and it was not called back meanwhile.
            Goal::Retire | Goal::Stop if retired => break,
            Goal::Serve | Goal::Retire => {}
            Goal::Stop => {
                machine.end().await;
                retired = true;
                continue;
            }
            Goal::Leave => {
                if let Some(mut serving) = machine.serving() {
                    serving.keep_state_file();
                }
                break;
            }
        }
        retired = false;
        let begun = Instant::now();
        tokio::select! {
            ended = machine.serve(&goal, &mut commands) => match ended {
                Ended::Retired => {
                    machine.end().await;
                    retired = true;
                }
                Ended::Again | Ended::Stopped => {}
                Ended::Failure(failure) => {
                    if begun.elapsed() >= HEALTHY_AGAIN {
                        pause = Duration::ZERO;
                    }
                    let held = machine.failed(failure, pause).await;
                    let rest = if held { pause.min(HELD_PAUSE) } else { pause };
                    let rest = tokio::time::timeout(rest, goals.changed()).await;
                    pause = next_pause(pause);
                    if matches!(rest, Ok(Err(_))) {
                        return;
                    }
                }
            },
            changed = goals.changed() => {
                if changed.is_err() {
                    return;
                }
                pause = Duration::ZERO;
            }
        }
    }
    machine.worker.admission.release();
    // The end changes no status, and the loop has to hear of it.
    machine.worker.tools.changed.notify_one();
}

/// The supervisor of one control daemon: what it shall be, and what is known of it beyond one run.
// Each flag is a fact of its own: none of them excludes another.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug)]
struct Worker {
    order: Order,
    tools: Tools,
    reporter: Reporter,
    /// The front end of the control daemon that runs, for all who ask it something: there once it was found to answer, or
    /// is known to have clients.
    control: channel::Sender<Option<Arc<Control>>>,
    /// Only its clients still need it.
    retiring: bool,
    /// There was a control daemon of ours before: the next one is a restart.
    has_run: bool,
    /// There was a server of ours before: the next one is a restart.
    has_served: bool,
    /// This driver has refused the multi-user option once. It is not tried again.
    multiuser_refused: bool,
    /// The GPUs of the order that a control daemon goes without for now, by UUID.
    left_out: BTreeMap<String, LeftOut>,
    /// The GPUs that control daemons of ours have had. When a GPU leaves, its compute mode is put back.
    former_gpus: BTreeSet<String>,
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

/// The state machine: a worker, and the control daemon that runs, if one does.
#[derive(Debug)]
struct Machine {
    worker: Worker,
    run: Option<Run>,
}

/// A worker with the control daemon that runs. Everything that needs a control daemon is a method of this.
#[derive(Debug)]
struct Serving<'m> {
    worker: &'m mut Worker,
    run: &'m mut Run,
}

impl Machine {
    /// Serves until it can't any more, is to serve something else, or has retired.
    async fn serve(&mut self, goal: &Goal, commands: &mut mpsc::Receiver<SupervisorCommand>) -> Ended {
        self.worker.retiring = *goal == Goal::Retire;
        let ended = self.try_to_serve(commands).await.unwrap_or_else(Ended::Failure);
        match ended {
            Ended::Stopped => {
                self.end_run();
                self.worker.reporter.update(|status| status.settled = false);
                if self.worker.retiring { Ended::Retired } else { Ended::Stopped }
            }
            Ended::Failure(Failure::Ended { .. }) => {
                self.end_run();
                ended
            }
            other => other,
        }
    }

    async fn try_to_serve(
        &mut self,
        commands: &mut mpsc::Receiver<SupervisorCommand>,
    ) -> Result<Ended, Failure> {
        if self.run.is_none() {
            self.take_over().await?;
        }
        if self.run.is_none() && !self.worker.retiring {
            self.start().await?;
        } else {
            self.worker.read_gpus().await;
        }
        let Some(mut serving) = self.serving() else { return Ok(Ended::Retired) };
        serving.configure().await?;
        Ok(serving.watch(commands).await)
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
    fn take_order(&mut self, order: Order) {
        // If the plan is the same, nothing changes for clients.
        self.reporter.update(|status| status.take(&order.plan));
        self.order = order;
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
