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
mod limits;
mod pass_on;
mod pending;
mod places;
pub mod runtime_directory;
mod servers;
mod start;
pub mod state_file;
mod status;
pub mod view;
mod watch;

use std::collections::{BTreeSet, VecDeque};
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch as channel};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tracing::level_filters::LevelFilter;

use crate::counted::counted;
use crate::mps::control::{Access, Caller, CallersControl, Control, ControlError, FrontEnds};
use crate::mps::log::{Follower, Line, Meaning};
use crate::mps::process::{self, Process};
use crate::plan::ControlDaemonPlan;
use crate::supervisor::bypass::{Bypass, find, in_words};
use crate::supervisor::compute_modes::ComputeModes;
use crate::supervisor::state_file::{Journal, Running};
use crate::supervisor::view::ControlDaemonState;

use bypasses::Bypasses;
use heal::{Fault, Revival};
use pass_on::Allowance;
use pending::Pending;
use places::Places;
use servers::Servers;
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

/// As much as is kept of a line that may explain an end, in characters.
const WORDS_MAX: usize = 200;

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
        let (server_ended, server_ends) = mpsc::channel(16);
        let worker = Worker {
            order: order.clone(),
            tools,
            reporter,
            control: control_sender,
            configured: false,
            process: None,
            running: None,
            log: None,
            quiet_until: 0,
            log_trouble: None,
            servers: Servers::default(),
            watched_servers: BTreeSet::new(),
            has_run: false,
            has_served: false,
            bypasses: Bypasses::default(),
            server_ended,
            server_ends,
            last_words: VecDeque::new(),
            allowance: Allowance::default(),
            multiuser_refused: false,
            unreachable: BTreeSet::new(),
            former_gpus: BTreeSet::new(),
            retiring: false,
            misfit: None,
            stuck: None,
            silence: None,
            in_use: false,
            places: Places::default(),
            pending: Pending::default(),
            fault: None,
            revival: Revival::default(),
            look_at_clients: false,
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
    fn into_text(self) -> String {
        match self {
            Self::Failed(text) | Self::Waiting(text) | Self::Silent(text) => text,
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

/// A control daemon that lives and does not answer.
#[derive(Debug)]
struct Silence {
    /// How many looks in a row have ended without an answer.
    looks: u32,
    /// How the last one ended.
    error: String,
}

impl Silence {
    /// It has just been noticed.
    fn first(error: String) -> Self {
        Self { looks: 1, error }
    }
}

/// What happens to a control daemon next.
#[derive(Debug)]
enum Occurrence {
    /// A line in its log.
    Line(Line),
    /// Its end.
    Ended(Option<ExitStatus>),
    /// The end of one of its servers.
    ServerEnded(u32),
    /// Nothing until the deadline.
    Nothing,
}

#[derive(Debug)]
struct Worker {
    order: Order,
    tools: Tools,
    reporter: Reporter,
    /// There while a control daemon of ours runs and is known to answer, or did.
    control: channel::Sender<Option<Arc<Control>>>,
    /// It has been made to serve.
    configured: bool,
    process: Option<Process>,
    /// What runs, as the journal has it; it may not be what the order wants.
    running: Option<Running>,
    log: Option<Follower>,
    /// Lines before this offset were passed on by the service that ran before.
    quiet_until: u64,
    /// What is wrong with it, as it was said.
    log_trouble: Option<&'static str>,
    servers: Servers,
    /// The servers whose end will be told through `server_ends`.
    watched_servers: BTreeSet<u32>,
    /// There was a control daemon of ours before: the next one is a restart.
    has_run: bool,
    /// The same of servers.
    has_served: bool,
    bypasses: Bypasses,
    server_ended: mpsc::Sender<u32>,
    server_ends: mpsc::Receiver<u32>,
    /// The last lines that may explain an end, none of them older than the newest server.
    last_words: VecDeque<String>,
    /// How much more of the log is passed on at present.
    allowance: Allowance,
    /// This driver has refused the multi-user option once; it isn't asked again.
    multiuser_refused: bool,
    /// The GPUs of the order that NVML can't reach.
    unreachable: BTreeSet<String>,
    /// The GPUs that control daemons of ours have had; their compute modes are to be put back when they leave.
    former_gpus: BTreeSet<String>,
    /// Nobody needs it any more, but its clients.
    retiring: bool,
    /// What of the order needs another control daemon than the one that runs.
    misfit: Option<String>,
    /// Why the control daemon can't take clients though it lives.
    stuck: Option<String>,
    /// There while it does not answer.
    silence: Option<Silence>,
    /// It has clients, or had some a moment ago.
    in_use: bool,
    places: Places,
    pending: Pending,
    fault: Option<Fault>,
    revival: Revival,
    /// A client has gone: it may have been the last.
    look_at_clients: bool,
}

impl Worker {
    /// Serves until it can't any more, is to serve something else, or has retired.
    async fn serve(&mut self, goal: &Goal, commands: &mut mpsc::Receiver<Command>) -> Ended {
        self.retiring = *goal == Goal::Retire;
        let ready = async {
            if self.process.is_none() {
                self.take_over().await?;
            }
            if self.process.is_none() {
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

    /// Waits for what happens next, until `deadline`.
    async fn next(&mut self, deadline: Instant) -> Result<Occurrence, Failure> {
        let (Some(log), Some(process)) = (&mut self.log, &mut self.process) else {
            return Err(Failure::Failed("the control daemon does not run".to_owned()));
        };
        let occurrence = tokio::select! {
            biased;
            line = log.next() => {
                Occurrence::Line(line.map_err(|error| Failure::Failed(format!("{}: {error}", log.path().display())))?)
            }
            status = process.exited() => Occurrence::Ended(status),
            Some(server) = self.server_ends.recv() => Occurrence::ServerEnded(server),
            () = sleep_until(deadline) => Occurrence::Nothing,
        };
        if let Occurrence::Line(line) = &occurrence {
            self.take_in(line);
        }
        Ok(occurrence)
    }

    /// Lets time pass, with an eye on the log and the process. False once `deadline` is reached.
    async fn step(&mut self, deadline: Instant) -> Result<bool, Failure> {
        match self.next(deadline).await? {
            Occurrence::Line(_) => Ok(true),
            Occurrence::ServerEnded(server) => {
                self.forget_server(server).await;
                Ok(true)
            }
            Occurrence::Ended(status) => Err(self.control_daemon_ended(status).await),
            Occurrence::Nothing => Ok(false),
        }
    }

    async fn pause(&mut self, duration: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + duration;
        while self.step(deadline).await? {}
        Ok(())
    }

    /// Takes note of the control daemon's end, and says how it was.
    async fn control_daemon_ended(&mut self, status: Option<ExitStatus>) -> Failure {
        // What it wrote last explains its end. Whoever waits for the next one does not wait for the rest.
        if let Some(Err(error)) = self.log.as_mut().map(Follower::skip_to_end) {
            tracing::debug!("the end of the log can't be found: {error}");
        }
        self.read_on().await;
        let how = status.map(|status| format!(" ({status})")).unwrap_or_default();
        let failure = Failure::Failed(format!("the control daemon ended{how}{}", self.words()));
        self.forget_process();
        failure
    }

    /// Takes in what the log has at this moment.
    async fn read_on(&mut self) {
        let Some(end) = self.log.as_ref().and_then(|log| log.length().ok()) else { return };
        while let Some(log) = self.log.as_mut().filter(|log| log.offset() < end)
            && let Ok(Some(line)) = log.next_there().await
        {
            self.take_in(&line);
        }
    }

    fn take_in(&mut self, line: &Line) {
        let old = self.log.as_ref().is_some_and(|log| log.offset() <= self.quiet_until);
        self.servers.take_in(&line.meaning);
        self.pending.take_in(&line.meaning);
        if old {
            return;
        }
        self.quiet_until = 0;
        self.pass_on(line);
        if let Meaning::ServerStarting { .. } = line.meaning {
            self.last_words.clear();
        }
        if line.may_explain_an_end() {
            self.last_words.push_back(line.text.chars().take(WORDS_MAX).collect());
            if self.last_words.len() > 3 {
                self.last_words.pop_front();
            }
        }
        match line.meaning {
            Meaning::ServerReady(server) => {
                self.reporter.event(format!("server {server} is ready"));
                // Whoever kept it out has gone.
                self.bypasses.look_at = Some(Instant::now());
            }
            Meaning::ServerExited { server, status: 0 } => {
                self.reporter.event(format!("server {server} exited with status 0"));
            }
            Meaning::ServerExited { server, status } => {
                self.reporter.warning(format!("server {server} exited with status {status}{}", self.words()));
            }
            Meaning::FaultHandling { server } => self.fault_seen(server),
            Meaning::TornDown { server, client, ordinal } => self.client_hit(server, client, ordinal),
            Meaning::ClientAdmitted(_) => self.in_use = true,
            Meaning::ClientLeft(_) => self.look_at_clients = true,
            _ => {}
        }
        let news = self.places.take_in(&line.meaning);
        if let Meaning::ClientRefused { server, capacity } = line.meaning
            && news
        {
            self.reporter
                .warning(format!("server {server} turned a client away: it holds {capacity}, no more"));
        }
    }

    /// Passes a line on to our own log, as long as there are not too many.
    fn pass_on(&mut self, line: &Line) {
        self.tell_left_out();
        if line.level() <= LevelFilter::current() && self.allowance.one_more() {
            line.trace(&self.reporter.id());
        }
    }

    fn tell_left_out(&mut self) {
        if let Some(count) = self.allowance.left_out(Instant::now()) {
            let path = self.log.as_ref().map(|log| log.path().display().to_string()).unwrap_or_default();
            let lines = counted(usize::try_from(count).unwrap_or(usize::MAX), "line");
            self.reporter
                .warning(format!("too much is written to {path}: {lines} not passed on; they are there"));
        }
    }

    /// The last words of the log, as the end of a sentence.
    fn words(&self) -> String {
        if self.last_words.is_empty() {
            return String::new();
        }
        format!("; its log ends: {}", self.last_words.iter().cloned().collect::<Vec<_>>().join(" | "))
    }

    /// Takes note that no control daemon of ours runs.
    fn forget_process(&mut self) {
        // Nobody will ask any more how the server is that met one.
        self.tell_fault();
        self.process = None;
        self.running = None;
        self.control.send_replace(None);
        self.configured = false;
        self.log = None;
        self.servers = Servers::default();
        self.watched_servers.clear();
        self.misfit = None;
        self.stuck = None;
        self.silence = None;
        self.in_use = false;
        self.places = Places::default();
        self.pending = Pending::default();
        self.fault = None;
        self.revival = Revival::default();
        let id = self.reporter.id();
        if let Err(error) = self.with_journal(|journal| journal.forget_control_daemon(&id)) {
            self.reporter.warning(format!("the journal can't be written: {error}"));
        }
        tracing::debug!(step = "forgotten", "no control daemon is written down for {id}");
        self.reporter.update(|status| {
            status.view.pid = None;
            status.view.servers.clear();
            status.waiting.clear();
            status.serving = false;
            for gpu in status.gpus.values_mut() {
                gpu.thread_percentage = None;
                gpu.memory_limit_mib = None;
            }
        });
    }

    /// Takes note of a failure. A control daemon that nobody uses is ended, to be started again; one that has clients is
    /// left to them. Whether programs without MPS keep its server out.
    async fn failed(&mut self, failure: Failure, pause: Duration) -> bool {
        let waiting = matches!(failure, Failure::Waiting(_));
        let mut state = if waiting { ControlDaemonState::Waiting } else { ControlDaemonState::Backoff };
        let mut reason = failure.into_text();
        let mut held = false;
        if self.process.is_some() {
            match self.in_use().await {
                Ok(0) => match self.holders().await {
                    holders if holders.is_empty() => _ = self.end_idle().await,
                    // Without a control daemon the next program would slip in, too.
                    holders => {
                        held = true;
                        reason = format!(
                            "its server is kept out, until they end, by programs without MPS: {}; {reason}",
                            in_words(&holders)
                        );
                    }
                },
                Ok(clients) => {
                    state = ControlDaemonState::Waiting;
                    reason = format!("{reason}; left to its {}", counted(clients, "client"));
                }
                Err(error) => {
                    state = ControlDaemonState::Waiting;
                    reason = format!("{reason}; left alone, since its clients are not known: {error}");
                }
            }
        }
        self.reporter.put_off();
        if self.reporter.reason() != reason {
            self.reporter.warning(format!("{reason}; tried again in {:.1} s", pause.as_secs_f64()));
        }
        self.reporter.enter(state, false, &reason);
        held
    }

    /// The processes on its GPUs that are neither servers nor clients.
    async fn holders(&self) -> Vec<Bypass> {
        let Some(running) = &self.running else { return Vec::new() };
        let servers = self.servers.alive();
        let mut holders = Vec::new();
        for uuid in &running.gpus {
            let mut there = self.tools.compute_modes.processes(uuid).await.unwrap_or_default();
            there.retain(|process| !process.via_mps);
            holders.extend(find(uuid, &there, &servers, &BTreeSet::new()));
        }
        holders
    }

    /// How many clients the control daemon has. NVML is asked where it doesn't answer itself, or another answers in its
    /// place.
    async fn in_use(&self) -> Result<usize, String> {
        let Some(running) = &self.running else { return Ok(0) };
        let control = self.tools.front_ends.of(&running.pipe_directory);
        let mut why = "it does not listen in its pipe directory any more".to_owned();
        if control.daemon_pid() == Some(running.process.pid) {
            match control.client_pids().await {
                Ok(clients) => return Ok(clients.values().flatten().count()),
                Err(error) => why = error.to_string(),
            }
        }
        let mut clients = BTreeSet::new();
        for uuid in &running.gpus {
            let asked = self.tools.compute_modes.mps_clients(uuid).await;
            clients.extend(asked.map_err(|nvml| format!("{why}; {nvml}"))?);
        }
        Ok(clients.len())
    }

    /// Ends the control daemon if one runs.
    async fn stop_control_daemon(&mut self) {
        self.continue_if_stopped();
        let (Some(process), Some(running)) = (&mut self.process, &self.running) else { return };
        let pid = process.identity().pid;
        let control = self.tools.front_ends.of(&running.pipe_directory);
        tracing::debug!(step = "quit", "control daemon {pid} is asked to end");
        match process::stop(process, &control, self.order.quit_timeout).await {
            Ok(how) => {
                tracing::debug!(step = "ended", "control daemon {pid} has ended and is still written down");
                self.reporter
                    .event(format!("control daemon {} (PID {pid}) ended by {how}", self.reporter.id()));
                self.forget_process();
            }
            Err(error) => {
                self.reporter.warning(format!(
                    "control daemon {} (PID {pid}) can't be stopped: {error}",
                    self.reporter.id()
                ));
            }
        }
    }

    /// The end of it all: the control daemon, then the compute modes.
    async fn end(&mut self) {
        self.reporter.enter(ControlDaemonState::Stopping, false, "");
        if self.process.is_none() {
            // One of ours that was not taken over yet is ours to end all the same.
            if let Err(failure) = self.take_over().await {
                self.reporter.warning(failure.into_text());
            }
        }
        let mut gpus: BTreeSet<String> = self.order.plan.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        gpus.extend(self.running.iter().flat_map(|running| running.gpus.clone()));
        // Those that the order has given up, and that no control daemon came up without.
        gpus.append(&mut self.former_gpus);
        self.stop_control_daemon().await;
        if self.process.is_none() {
            for uuid in gpus {
                self.restore_compute_mode(&uuid).await;
            }
        }
    }

    async fn restore_compute_mode(&mut self, uuid: &str) {
        if let Err(error) = self.tools.compute_modes.restore(uuid).await {
            self.reporter.warning(format!("compute mode of {uuid} is not put back: {error}"));
        }
    }

    fn with_journal<T>(&self, use_it: impl FnOnce(&mut Journal) -> T) -> T {
        // A journal is whole after every call, whatever happened to the thread that made it.
        use_it(&mut self.tools.journal.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The limits of the GPUs in a control daemon's hands, by its ordinals, as the order wants them.
fn limits(order: &Order, running: &Running) -> servers::Limits {
    let planned = |uuid: &String| order.plan.gpus.iter().find(|gpu| gpu.uuid == *uuid);
    let held: Vec<_> =
        running.gpus.iter().map(planned).enumerate().filter_map(|(n, gpu)| Some((n, gpu?))).collect();
    servers::Limits {
        thread_percentage: order.plan.thread_percentage,
        memory_mib: held.iter().map(|(ordinal, gpu)| (*ordinal, gpu.memory_limit_mib)).collect(),
        enforced: held.iter().filter(|(_, gpu)| gpu.limits_enforced).map(|(ordinal, _)| *ordinal).collect(),
    }
}
