//! One state machine per control daemon: from a plan to a process that serves it, and back.
//!
//! `starting` -> `ready` <-> `faulted`; `backoff` after a death or a failed start, `waiting` when something else must
//! happen first, `stopping` at the end. Nothing is reported before it is confirmed, and no client is ended unless
//! somebody asked for it: a control daemon that has clients is left to them until they are done.
//!
//! [`start`](self) brings a control daemon up or takes one over, `watch` keeps it well, `heal` mends a server.

pub mod bypass;
mod bypasses;
pub mod compute_modes;
mod heal;
mod hindrance;
mod limits;
mod pass_on;
mod pending;
mod places;
mod run;
pub mod runtime_directory;
mod servers;
mod start;
pub mod state_file;
mod status;
mod stop;
pub mod view;
mod watch;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch as channel};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::mps::control::{Access, Caller, CallersControl, Control, ControlError, FrontEnds};
use crate::plan::ControlDaemonPlan;
use crate::supervisor::compute_modes::ComputeModes;
use crate::supervisor::state_file::Journal;

use bypasses::Bypasses;
use pass_on::Allowance;
use run::Run;
use status::Reporter;
pub use status::{GpuStatus, Status};

/// The program, as every driver package installs it.
pub(crate) const PROGRAM: &str = "nvidia-cuda-mps-control";

/// The first pause after a failure; it doubles up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(30);

/// The longest pause while programs without MPS keep the server out: they end when they like.
const HELD_PAUSE: Duration = Duration::from_secs(1);

/// How long it must have been healthy for the pauses to start anew.
const HEALTHY_AGAIN: Duration = Duration::from_secs(60);

/// What a control daemon shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// Its GPUs, directories and limits.
    pub plan: ControlDaemonPlan,
    /// Whether its GPUs' compute mode is ours to set.
    pub set_compute_mode: bool,
    /// What `quit` gets before SIGTERM.
    pub quit_timeout: Duration,
    /// What the clients of a faulted server get before it is ended with them.
    pub fault_grace: Duration,
    /// How large its log may grow before it is started anew.
    pub log_max_bytes: u64,
}

/// What is to become of a control daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Goal {
    /// Serve this.
    Serve,
    /// End once it has no clients, and put the compute modes back.
    Retire,
    /// End now, and put the compute modes back.
    Stop,
    /// Be left as it is, with its clients, for the next of us to take over.
    Leave,
}

/// What is asked of a control daemon beside its goal. The answers are for people.
#[derive(Debug)]
enum Command {
    /// Make a change that waits for clients to end: now if `force`, or if there are none.
    Apply { force: bool, reply: oneshot::Sender<Result<(), String>> },
    /// Make the regular check now.
    Check,
    /// End the server and start another, if it has no clients.
    RestartServer { reply: oneshot::Sender<Result<(), String>> },
}

/// A server met a fatal GPU error, and these clients were hit. None of them need be the culprit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientFault {
    /// The GPU.
    pub gpu_uuid: String,
    /// The clients' PIDs.
    pub pids: Vec<u32>,
    /// In words.
    pub reason: String,
}

/// What every supervisor works with.
#[derive(Debug, Clone)]
pub struct Tools {
    /// Asks control daemons.
    pub front_ends: FrontEnds,
    /// Sets and restores compute modes.
    pub compute_modes: ComputeModes,
    /// Remembers what was started.
    pub journal: Arc<Mutex<Journal>>,
    /// Notified whenever a status changes.
    pub changed: Arc<Notify>,
    /// Takes every fault.
    pub faults: mpsc::Sender<ClientFault>,
}

/// A supervised control daemon. Dropped, it is left as it is, with its clients.
#[derive(Debug)]
pub struct Supervisor {
    goal: channel::Sender<(Goal, Order)>,
    status: channel::Receiver<Status>,
    control: channel::Receiver<Option<Arc<Control>>>,
    front_ends: FrontEnds,
    commands: mpsc::Sender<Command>,
    task: JoinHandle<()>,
}

impl Supervisor {
    /// Starts to make `order` true, or with another goal than to serve, to end what of it still runs.
    pub fn start(order: Order, goal: Goal, tools: Tools) -> Self {
        let (reporter, status) = Reporter::new(&order.plan, Arc::clone(&tools.changed));
        let (control_sender, control) = channel::channel(None);
        let front_ends = tools.front_ends.clone();
        let (commands, commands_received) = mpsc::channel(4);
        let worker = Worker {
            order: order.clone(),
            tools,
            reporter,
            control: control_sender,
            run: None,
            retiring: false,
            has_run: false,
            has_served: false,
            multiuser_refused: false,
            unreachable: BTreeSet::new(),
            former_gpus: BTreeSet::new(),
            bypasses: Bypasses::default(),
            allowance: Allowance::default(),
        };
        let (goal, goals) = channel::channel((goal, order));
        let task = tokio::spawn(run(goals, commands_received, worker));
        Self { goal, status, control, front_ends, commands, task }
    }

    /// Gives it another goal. The same again changes nothing.
    pub fn pursue(&self, goal: Goal, order: Order) {
        self.goal.send_if_modified(|current| {
            let new = (goal, order);
            let modified = *current != new;
            *current = new;
            modified
        });
    }

    /// Gives it another goal with the order that it has.
    pub fn end(&self, goal: Goal) {
        let order = self.goal.borrow().1.clone();
        self.pursue(goal, order);
    }

    /// Whether it has ended, its control daemon with it.
    pub fn ended(&self) -> bool {
        self.task.is_finished()
    }

    /// What is known now of what it was last told to serve, even if it has not heard of that yet.
    pub fn status(&self) -> Status {
        let mut status = self.status.borrow().clone();
        status.take(&self.goal.borrow().1.plan);
        status
    }

    /// The way to its control daemon for a caller on the bus, whether or not it serves as it should.
    pub fn access(&self, caller: Caller) -> Access {
        Access::new(self.control.clone(), caller)
    }

    /// The same for root, or that of another's control daemon which has its pipe directory: clients in its containers are
    /// that one's.
    pub fn control_in_place(&self) -> Option<CallersControl> {
        self.access(Caller::Root).now().or_else(|| {
            let control = self.front_ends.of(&self.status.borrow().view.pipe_directory);
            control.daemon_pid().map(|_| control.on_behalf(Caller::Root))
        })
    }

    /// Makes a change that waits for clients to end: now if `force` or if there are none. The error says who is in the
    /// way.
    pub fn apply(&self, force: bool) -> oneshot::Receiver<Result<(), String>> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Apply { force, reply });
        answer
    }

    /// Ends the server and starts another. The error says who is in the way.
    pub fn restart_server(&self) -> oneshot::Receiver<Result<(), String>> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::RestartServer { reply });
        answer
    }

    /// Asks for the regular check now.
    pub fn check(&self) {
        self.send(Command::Check);
    }

    /// A command that finds no place is dropped; whoever waits for its answer learns that from the channel.
    fn send(&self, command: Command) {
        if let Err(error) = self.commands.try_send(command) {
            tracing::debug!("a command is dropped: {error}");
        }
    }
}

/// Why a control daemon does not serve.
#[derive(Debug)]
enum Failure {
    /// It died or would not start.
    Failed(String),
    /// It ended since it does not know the multi-user option.
    RefusesMultiuser(String),
    /// Something outside must change first.
    Waiting(String),
    /// The control daemon does not answer.
    Silent(String),
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Self {
        match error {
            ControlError::Silent { .. } | ControlError::Unanswered { .. } => Self::Silent(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

impl Failure {
    fn not_running() -> Self {
        Self::Failed("the control daemon does not run".to_owned())
    }

    fn into_text(self) -> String {
        match self {
            Self::Failed(text) | Self::RefusesMultiuser(text) | Self::Waiting(text) | Self::Silent(text) => {
                text
            }
        }
    }
}

/// How serving ended.
#[derive(Debug)]
enum Ended {
    /// Against our will.
    Failure(Failure),
    /// To be gone through again at once, with what has changed.
    Anew,
    /// For good: it was to retire and has.
    Retired,
}

async fn run(
    mut goals: channel::Receiver<(Goal, Order)>,
    mut commands: mpsc::Receiver<Command>,
    mut worker: Worker,
) {
    let mut pause = FIRST_PAUSE;
    let mut retired = false;
    loop {
        let (goal, order) = goals.borrow_and_update().clone();
        worker.take_order(order);
        match goal {
            // Nothing is left of it, and it was not called back meanwhile.
            Goal::Retire | Goal::Stop if retired => break,
            Goal::Serve | Goal::Retire => {}
            Goal::Stop => {
                worker.end().await;
                retired = true;
                continue;
            }
            Goal::Leave => {
                worker.keep_journal();
                break;
            }
        }
        retired = false;
        let begun = Instant::now();
        tokio::select! {
            ended = worker.serve(&goal, &mut commands) => match ended {
                Ended::Retired => {
                    worker.end().await;
                    retired = true;
                }
                Ended::Anew => {}
                Ended::Failure(failure) => {
                    if begun.elapsed() >= HEALTHY_AGAIN {
                        pause = FIRST_PAUSE;
                    }
                    let held = worker.failed(failure, pause).await;
                    let rest = if held { pause.min(HELD_PAUSE) } else { pause };
                    let rest = tokio::time::timeout(rest, goals.changed()).await;
                    pause = (pause * 2).min(LAST_PAUSE);
                    if matches!(rest, Ok(Err(_))) {
                        return;
                    }
                }
            },
            changed = goals.changed() => {
                if changed.is_err() {
                    return;
                }
                pause = FIRST_PAUSE;
            }
        }
    }
    worker.reporter.wake();
}

/// One control daemon's supervisor: what it shall be, and what is known of it beyond one run.
#[derive(Debug)]
struct Worker {
    order: Order,
    tools: Tools,
    reporter: Reporter,
    /// The front end of the control daemon that runs, for all who ask it something: there once it was found to answer, or
    /// is known to have clients.
    control: channel::Sender<Option<Arc<Control>>>,
    /// Everything that is known of the control daemon that runs. None while none runs.
    run: Option<Run>,
    /// Only its clients need it still.
    retiring: bool,
    /// There was a control daemon of ours before: the next one is a restart.
    has_run: bool,
    /// The same of servers.
    has_served: bool,
    /// This driver has refused the multi-user option once; it isn't asked again.
    multiuser_refused: bool,
    /// The GPUs of the order that NVML can't reach.
    unreachable: BTreeSet<String>,
    /// The GPUs that control daemons of ours have had; their compute modes are to be put back when they leave.
    former_gpus: BTreeSet<String>,
    /// The processes that use its GPUs without its servers. They outlive it.
    bypasses: Bypasses,
    /// How much more of the log is passed on at present.
    allowance: Allowance,
}

impl Worker {
    /// Serves until it can't any more, is to serve something else, or has retired.
    async fn serve(&mut self, goal: &Goal, commands: &mut mpsc::Receiver<Command>) -> Ended {
        self.retiring = *goal == Goal::Retire;
        let ready = async {
            if self.run.is_none() {
                self.take_over().await?;
            }
            if self.run.is_none() {
                if self.retiring {
                    return Ok(false);
                }
                self.start().await?;
            }
            self.configure().await.map(|()| true)
        };
        match ready.await {
            Ok(true) => self.watch(goal, commands).await,
            Ok(false) => Ended::Retired,
            Err(failure) => Ended::Failure(failure),
        }
    }

    fn take_order(&mut self, order: Order) {
        // Nothing happens where it is the same plan, with another patience perhaps: who is served stays served.
        self.reporter.plan(&order.plan);
        self.order = order;
    }

    fn with_journal<T>(&self, use_it: impl FnOnce(&mut Journal) -> T) -> T {
        // A journal is whole after every call, whatever happened to the thread that made it.
        use_it(&mut self.tools.journal.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
