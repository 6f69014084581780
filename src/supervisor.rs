//! One state machine per control daemon: from a plan to a process that serves it, and back.
//!
//! `starting` -> `ready` <-> `faulted`; `backoff` after a death or a failed start, `waiting` when something outside
//! must change first, `stopping` at the end. Nothing is reported before it is confirmed.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, sleep_until};

use crate::compute_mode::{ComputeModes, SERVED};
use crate::gpu::ComputeMode;
use crate::mps::control::{Control, ControlError, ServerStatus};
use crate::mps::directories;
use crate::mps::log::{Follower, Line, Meaning, Writer};
use crate::mps::process::{self, Launch, Process, Waiting};
use crate::plan::{ControlDaemonPlan, ServedGpu};
use crate::state::{ControlDaemonState, ControlDaemonView, EVENTS_KEPT, Event};

/// The program, as every driver package installs it.
const PROGRAM: &str = "nvidia-cuda-mps-control";

/// How long a new control daemon may take to answer. Measured: 20 ms.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// How often a new control daemon is asked whether it answers yet.
const ANSWER_PAUSE: Duration = Duration::from_millis(20);

/// How long a server may take to be ready. Measured: 0.15 s for one GPU; it opens them one after the other.
const SERVER_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a ready server may take to write its limits down. Measured: within the same millisecond.
const LIMITS_TIMEOUT: Duration = Duration::from_secs(10);

/// How often a healthy control daemon is checked.
const CHECK_PERIOD: Duration = Duration::from_secs(30);

/// The first pause after a failure; it doubles up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(30);

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
}

/// What is known of a control daemon and its GPUs.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    /// The control daemon.
    pub view: ControlDaemonView,
    /// Its GPUs, by UUID.
    pub gpus: BTreeMap<String, GpuStatus>,
    /// Whether its first start has ended, well or not.
    pub first_pass_ended: bool,
    /// The last things that happened to it, oldest first.
    pub events: VecDeque<Event>,
}

/// What is known of one of its GPUs.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GpuStatus {
    /// The compute mode as last seen.
    pub compute_mode: Option<ComputeMode>,
    /// What is wrong with it; empty when nothing is.
    pub reason: String,
    /// The thread percentage that the control daemon has in force.
    pub thread_percentage: Option<u8>,
    /// The memory limit in MiB that a running server has in force.
    pub memory_limit_mib: Option<u64>,
}

/// A supervised control daemon. Dropped, it is left as it is.
#[derive(Debug)]
pub struct Supervisor {
    order: watch::Sender<Option<Order>>,
    status: watch::Receiver<Status>,
    control: watch::Receiver<Option<Arc<Control>>>,
    task: JoinHandle<()>,
}

impl Supervisor {
    /// Starts to make `order` true. `changed` is notified whenever the status changes.
    pub fn start(order: Order, compute_modes: ComputeModes, changed: Arc<Notify>) -> Self {
        let (status, status_seen) = watch::channel(initial_status(&order.plan));
        let (control, control_seen) = watch::channel(None);
        let (sender, receiver) = watch::channel(Some(order));
        let worker = Worker {
            compute_modes,
            status,
            changed,
            process: None,
            control,
            log: None,
            servers: BTreeMap::new(),
            last_words: VecDeque::new(),
            multiuser_refused: false,
        };
        Self {
            order: sender,
            status: status_seen,
            control: control_seen,
            task: tokio::spawn(run(receiver, worker)),
        }
    }

    /// Replaces the order. The same order again changes nothing.
    pub fn order(&self, order: Order) {
        self.order.send_if_modified(|current| {
            let new = Some(order);
            let modified = *current != new;
            *current = new;
            modified
        });
    }

    /// Asks it to stop the control daemon and to put its GPUs' compute modes back. [`Supervisor::ended`] tells when.
    pub fn stop(&self) {
        self.order.send_replace(None);
    }

    /// Whether it has stopped.
    pub fn ended(&self) -> bool {
        self.task.is_finished()
    }

    /// What is known now.
    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// What is to be made true; None: that it stops.
    pub fn current_order(&self) -> Option<Order> {
        self.order.borrow().clone()
    }

    /// The front end of the control daemon, while one serves.
    pub fn control(&self) -> Option<Arc<Control>> {
        self.control.borrow().clone()
    }
}

fn initial_status(plan: &ControlDaemonPlan) -> Status {
    Status {
        view: ControlDaemonView {
            id: plan.id.clone(),
            state: ControlDaemonState::Starting,
            reason: String::new(),
            pid: None,
            servers: Vec::new(),
            pipe_directory: plan.pipe_directory.clone(),
            log_directory: plan.log_directory.clone(),
            multiuser: None,
            starts: 0,
            since: SystemTime::now(),
        },
        gpus: plan.gpus.iter().map(|gpu| (gpu.uuid.clone(), GpuStatus::default())).collect(),
        first_pass_ended: false,
        events: VecDeque::new(),
    }
}

/// Why a control daemon does not serve.
#[derive(Debug)]
enum Failure {
    /// It died or would not start.
    Failed(String),
    /// Something outside must change first.
    Waiting(String),
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Self {
        Self::Failed(error.to_string())
    }
}

async fn run(mut order: watch::Receiver<Option<Order>>, mut worker: Worker) {
    let mut pause = FIRST_PAUSE;
    loop {
        let Some(current) = order.borrow_and_update().clone() else { break };
        let begun = Instant::now();
        let changed = tokio::select! {
            failure = worker.serve(&current) => {
                if begun.elapsed() >= HEALTHY_AGAIN {
                    pause = FIRST_PAUSE;
                }
                worker.stop_control_daemon(&current).await;
                worker.failed(failure, pause);
                let rest = tokio::time::timeout(pause, order.changed()).await;
                pause = (pause * 2).min(LAST_PAUSE);
                let Ok(changed) = rest else { continue };
                changed
            }
            changed = order.changed() => {
                if changed.is_err() {
                    return;
                }
                worker.enter(ControlDaemonState::Stopping, String::new());
                worker.stop_control_daemon(&current).await;
                changed
            }
        };
        if changed.is_err() {
            return;
        }
        let next = order.borrow().clone();
        worker.restore_compute_modes(&current, next.as_ref()).await;
        worker.begin_anew(next.as_ref());
        pause = FIRST_PAUSE;
    }
    worker.changed.notify_one();
}

/// What a server has written of itself.
#[derive(Debug, Clone, PartialEq, Default)]
struct Server {
    ready: bool,
    exit_status: Option<i32>,
    thread_tenths: Option<u32>,
    memory_bytes: BTreeMap<usize, u64>,
}

#[derive(Debug)]
struct Worker {
    compute_modes: ComputeModes,
    status: watch::Sender<Status>,
    changed: Arc<Notify>,
    process: Option<Process>,
    /// There while the control daemon serves.
    control: watch::Sender<Option<Arc<Control>>>,
    log: Option<Follower>,
    servers: BTreeMap<u32, Server>,
    /// The last lines that may explain an end: without a prefix, or a server's.
    last_words: VecDeque<String>,
    /// This driver has refused the multi-user option once; it isn't asked again.
    multiuser_refused: bool,
}

impl Worker {
    /// Serves until it can't any more.
    async fn serve(&mut self, order: &Order) -> Failure {
        match self.start(order).await {
            Ok(()) => self.watch(order).await,
            Err(failure) => failure,
        }
    }

    async fn start(&mut self, order: &Order) -> Result<(), Failure> {
        let plan = &order.plan;
        self.enter(ControlDaemonState::Starting, String::new());
        let program = process::find_program(PROGRAM).map_err(Failure::Waiting)?;
        let control = Control::new(program.clone(), plan.pipe_directory.clone());
        free(&control, &plan.pipe_directory).await?;
        directories::open(&plan.pipe_directory).map_err(|error| Failure::Waiting(error.to_string()))?;
        self.take_compute_modes(order).await?;

        let mut multiuser = plan.multiuser && !self.multiuser_refused;
        loop {
            self.spawn(plan, &program, multiuser).await?;
            match self.answers(&control).await {
                Ok(()) => break,
                Err(Failure::Failed(_)) if multiuser && plan.multiuser_optional && self.option_refused() => {
                    self.event(
                        "this driver's control daemon refuses multi-user mode; it runs without".to_owned(),
                    );
                    self.multiuser_refused = true;
                    multiuser = false;
                }
                Err(Failure::Failed(_)) if multiuser && self.option_refused() => {
                    return Err(Failure::Waiting(
                        "this driver's control daemon refuses multi-user mode; set cuda_mps_multiuser to auto".to_owned(),
                    ));
                }
                Err(failure) => return Err(failure),
            }
        }
        self.update(|status| status.view.multiuser = Some(multiuser));
        set_limits(&control, plan).await?;
        self.update(|status| {
            for gpu in status.gpus.values_mut() {
                gpu.thread_percentage = Some(plan.thread_percentage);
            }
        });
        if multiuser && plan.prewarm {
            self.prewarm(&control, plan).await?;
        }
        self.control.send_replace(Some(Arc::new(control)));
        self.event(format!("control daemon {} is ready", plan.id));
        self.enter(ControlDaemonState::Ready, String::new());
        Ok(())
    }

    async fn take_compute_modes(&mut self, order: &Order) -> Result<(), Failure> {
        for gpu in &order.plan.gpus {
            if order.set_compute_mode {
                self.compute_modes
                    .take(&gpu.uuid)
                    .await
                    .map_err(|error| Failure::Failed(format!("GPU {}: {error}", gpu.pci)))?;
            }
            self.look_at_compute_mode(gpu).await.map_err(Failure::Failed)?;
        }
        Ok(())
    }

    async fn look_at_compute_mode(&mut self, gpu: &ServedGpu) -> Result<ComputeMode, String> {
        let found = self.compute_modes.current(&gpu.uuid).await;
        self.update_gpu(&gpu.uuid, |status| match &found {
            Ok(mode) => {
                status.compute_mode = Some(*mode);
                status.reason.clear();
            }
            Err(error) => {
                status.compute_mode = None;
                status.reason.clone_from(error);
            }
        });
        found.map_err(|error| format!("GPU {}: {error}", gpu.pci))
    }

    /// Starts the process and follows its log from where it begins.
    async fn spawn(
        &mut self,
        plan: &ControlDaemonPlan,
        program: &Path,
        multiuser: bool,
    ) -> Result<(), Failure> {
        let failed = |what: &str, error: std::io::Error| Failure::Failed(format!("{what}: {error}"));
        let logs =
            directories::open(&plan.log_directory).map_err(|error| Failure::Waiting(error.to_string()))?;
        let path = plan.log_directory.join("control.log");
        let output = directories::open_log(&logs, "control.log")
            .map_err(|error| failed(&path.display().to_string(), error))?;
        let begin = output.metadata().map_err(|error| failed("control.log", error))?.len();
        self.log =
            Some(Follower::open(&path, begin).map_err(|error| failed(&path.display().to_string(), error))?);
        self.servers.clear();
        self.last_words.clear();

        let visible = plan.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect::<Vec<_>>().join(",");
        let environment = [
            ("CUDA_MPS_PIPE_DIRECTORY", plan.pipe_directory.display().to_string()),
            ("CUDA_MPS_LOG_DIRECTORY", plan.log_directory.display().to_string()),
            ("CUDA_VISIBLE_DEVICES", visible),
        ];
        let arguments: &[&str] = if multiuser { &["-f", "-multiuser-server"] } else { &["-f"] };
        let launch = Launch { program, arguments, environment: &environment, output };
        let waiting =
            Waiting::start(launch).map_err(|error| failed("the control daemon can't be started", error))?;
        let pid = waiting.identity().pid;
        let process =
            waiting.go().await.map_err(|error| failed("the control daemon can't be started", error))?;
        self.process = Some(process);
        self.update(|status| {
            status.view.pid = Some(pid);
            status.view.starts += 1;
        });
        self.event(format!("control daemon {} started as PID {pid}", plan.id));
        Ok(())
    }

    /// Waits until the new control daemon answers its front end.
    async fn answers(&mut self, control: &Control) -> Result<(), Failure> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            let Err(error) = control.servers().await else { return Ok(()) };
            if Instant::now() >= deadline {
                return Err(Failure::Failed(format!(
                    "no answer within {} s of its start: {error}{}",
                    ANSWER_TIMEOUT.as_secs(),
                    self.words()
                )));
            }
            self.pause(ANSWER_PAUSE).await?;
        }
    }

    /// Whether the process that has just ended did not know the multi-user option: it then takes itself for a front
    /// end and finds nobody to talk to.
    fn option_refused(&self) -> bool {
        self.process.is_none()
            && self.last_words.iter().any(|line| {
                line.contains("Cannot find MPS control daemon") || line.contains("Unrecognized option")
            })
    }

    /// Starts the server before the first client comes, and waits until it is ready with the planned limits.
    async fn prewarm(&mut self, control: &Control, plan: &ControlDaemonPlan) -> Result<(), Failure> {
        control.start_server(0).await?;
        let deadline = Instant::now() + SERVER_TIMEOUT;
        let server = self
            .until("a server that is ready", deadline, |servers| {
                let exited = servers.iter().find_map(|(pid, server)| Some((*pid, server.exit_status?)));
                let ready = servers.iter().find(|(_, server)| server.ready && server.exit_status.is_none());
                match (ready, exited) {
                    (Some((pid, _)), _) => Some(Ok(*pid)),
                    (None, Some((pid, status))) => {
                        Some(Err(format!("server {pid} exited with status {status} before it was ready")))
                    }
                    (None, None) => None,
                }
            })
            .await?
            .map_err(|what| Failure::Failed(format!("{what}{}", self.words())))?;
        loop {
            match control.server_status(server).await? {
                ServerStatus::Active | ServerStatus::Unsupported => break,
                ServerStatus::Initializing if Instant::now() < deadline => self.pause(ANSWER_PAUSE).await?,
                other => return Err(Failure::Failed(format!("server {server} is {other:?}, not active"))),
            }
        }
        let deadline = Instant::now() + LIMITS_TIMEOUT;
        self.until("the server's limits in its log", deadline, |servers| {
            servers.get(&server).is_some_and(|server| server.has_written_limits(plan)).then_some(())
        })
        .await?;
        match self.servers.get(&server).and_then(|server| server.differs_from(plan)) {
            Some(difference) => Err(Failure::Failed(format!("server {server}: {difference}"))),
            None => Ok(()),
        }
    }

    /// Watches a control daemon that serves, until it ends.
    async fn watch(&mut self, order: &Order) -> Failure {
        let mut check = tokio::time::interval_at(Instant::now() + CHECK_PERIOD, CHECK_PERIOD);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                step = self.step() => match step {
                    Ok(()) => self.compare_servers(&order.plan),
                    Err(failure) => return failure,
                },
                _ = check.tick() => if let Err(failure) = self.check(order).await {
                    return failure;
                },
            }
        }
    }

    /// The regular look: does it answer, are its servers well, is the compute mode still ours.
    async fn check(&mut self, order: &Order) -> Result<(), Failure> {
        let Some(control) = self.control.borrow().clone() else { return Ok(()) };
        match health(&control).await {
            Ok(Health { servers, faulted: None }) => {
                self.update(|status| status.view.servers = servers);
                self.enter(ControlDaemonState::Ready, String::new());
            }
            Ok(Health { servers, faulted: Some(server) }) => {
                self.update(|status| status.view.servers = servers);
                let reason = format!(
                    "server {server} met a fatal GPU error and takes no client until its present ones end"
                );
                self.enter(ControlDaemonState::Faulted, reason);
            }
            // Running clients carry on under a control daemon that hangs, and end with it: it is left alone.
            Err(error @ ControlError::Silent { .. }) => {
                self.enter(ControlDaemonState::Waiting, error.to_string());
            }
            Err(error) => return Err(error.into()),
        }
        for gpu in &order.plan.gpus {
            // An unreachable GPU is said in its status; the others are served on.
            let Ok(mode) = self.look_at_compute_mode(gpu).await else { continue };
            if order.set_compute_mode && mode != SERVED {
                self.event(format!("compute mode of {} was changed to {mode} by others; set back", gpu.pci));
                if let Err(error) = self.compute_modes.take(&gpu.uuid).await {
                    self.update_gpu(&gpu.uuid, |status| status.reason.clone_from(&error));
                } else {
                    let _ = self.look_at_compute_mode(gpu).await;
                }
            }
        }
        Ok(())
    }

    /// Puts what the servers have written of their limits beside the plan.
    fn compare_servers(&mut self, plan: &ControlDaemonPlan) {
        let newest = self.servers.iter().rfind(|(_, server)| server.ready && server.exit_status.is_none());
        let servers =
            self.servers.iter().filter(|(_, server)| server.exit_status.is_none()).map(|(pid, _)| *pid);
        let servers: Vec<u32> = servers.collect();
        let difference = newest
            .filter(|(_, server)| server.has_written_limits(plan))
            .and_then(|(pid, server)| Some(format!("server {pid}: {}", server.differs_from(plan)?)));
        let confirmed = newest.map(|(_, server)| server.memory_bytes.clone()).unwrap_or_default();
        let planned = plan.gpus.iter().enumerate();
        let confirmed: Vec<_> = planned
            .map(|(ordinal, gpu)| (gpu.uuid.clone(), confirmed.get(&ordinal).map(|bytes| bytes >> 20)))
            .collect();
        self.update(|status| {
            status.view.servers = servers;
            for (uuid, limit) in confirmed {
                if let Some(gpu) = status.gpus.get_mut(&uuid) {
                    gpu.memory_limit_mib = limit;
                    gpu.reason = difference.clone().unwrap_or_default();
                }
            }
        });
    }

    /// Takes in the log's next line, or the control daemon's end.
    async fn step(&mut self) -> Result<(), Failure> {
        let (Some(log), Some(process)) = (&mut self.log, &mut self.process) else {
            return Err(Failure::Failed("the control daemon does not run".to_owned()));
        };
        let status = tokio::select! {
            biased;
            line = log.next() => {
                let line = line.map_err(|error| Failure::Failed(format!("{}: {error}", log.path().display())))?;
                self.take_in(&line);
                return Ok(());
            }
            status = process.exited() => status,
        };
        // What it wrote last explains its end.
        while let Some(Ok(Some(line))) = self.log.as_mut().map(Follower::try_next) {
            self.take_in(&line);
        }
        self.process = None;
        let how = status.map(|status| format!(" ({status})")).unwrap_or_default();
        Err(Failure::Failed(format!("the control daemon ended{how}{}", self.words())))
    }

    /// Lets time pass, with an eye on the log and the process.
    async fn pause(&mut self, duration: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + duration;
        loop {
            tokio::select! {
                () = sleep_until(deadline) => return Ok(()),
                step = self.step() => step?,
            }
        }
    }

    /// Waits until what the servers have written satisfies `check`.
    async fn until<T>(
        &mut self,
        what: &str,
        deadline: Instant,
        mut check: impl FnMut(&BTreeMap<u32, Server>) -> Option<T>,
    ) -> Result<T, Failure> {
        loop {
            if let Some(found) = check(&self.servers) {
                return Ok(found);
            }
            tokio::select! {
                () = sleep_until(deadline) => {
                    return Err(Failure::Failed(format!("waited in vain for {what}{}", self.words())));
                }
                step = self.step() => step?,
            }
        }
    }

    fn take_in(&mut self, line: &Line) {
        let id = self.status.borrow().view.id.clone();
        line.trace(&id);
        if !matches!(line.writer, Some(Writer::Control(_))) && !line.text.trim().is_empty() {
            self.last_words.push_back(line.text.clone());
            if self.last_words.len() > 3 {
                self.last_words.pop_front();
            }
        }
        match line.meaning {
            Meaning::ServerStarting { server, .. } => {
                self.servers.insert(server, Server::default());
            }
            Meaning::ServerReady(server) => {
                self.servers.entry(server).or_default().ready = true;
                self.event(format!("server {server} is ready"));
            }
            Meaning::ServerExited { server, status } => {
                self.servers.entry(server).or_default().exit_status = Some(status);
                self.event(format!("server {server} exited with status {status}"));
            }
            Meaning::ThreadPercentage { server, tenths } => {
                self.servers.entry(server).or_default().thread_tenths = Some(tenths);
            }
            Meaning::MemoryLimit { server, ordinal, bytes } => {
                self.servers.entry(server).or_default().memory_bytes.insert(ordinal, bytes);
            }
            Meaning::FaultHandling { server } => {
                self.event(format!("server {server} met a fatal GPU error"));
            }
            Meaning::TornDown { server, client, ordinal } => {
                self.event(format!(
                    "server {server} ended client {client} on device {ordinal} for a fatal GPU error"
                ));
            }
            Meaning::Ordinary
            | Meaning::Noise
            | Meaning::Fault { .. }
            | Meaning::ClientPending { .. }
            | Meaning::ClientRefused { .. } => {}
        }
        // Servers that are gone are of interest until the next one is there.
        while self.servers.len() > 8 {
            self.servers.pop_first();
        }
    }

    /// The last words of the log, as the end of a sentence.
    fn words(&self) -> String {
        if self.last_words.is_empty() {
            return String::new();
        }
        format!("; its log ends: {}", self.last_words.iter().cloned().collect::<Vec<_>>().join(" | "))
    }

    /// Ends the control daemon if one runs.
    async fn stop_control_daemon(&mut self, order: &Order) {
        if let Some(mut running) = self.process.take() {
            let pid = running.identity().pid;
            let program = process::find_program(PROGRAM).unwrap_or_else(|_| PathBuf::from(PROGRAM));
            let control = Control::new(program, order.plan.pipe_directory.clone());
            match process::stop(&mut running, &control, order.quit_timeout).await {
                Ok(how) => {
                    self.event(format!("control daemon {} (PID {pid}) stopped: {how:?}", order.plan.id));
                }
                Err(error) => self
                    .event(format!("control daemon {} (PID {pid}) can't be stopped: {error}", order.plan.id)),
            }
        }
        self.control.send_replace(None);
        self.log = None;
        self.servers.clear();
        self.update(|status| {
            status.view.pid = None;
            status.view.servers.clear();
            for gpu in status.gpus.values_mut() {
                gpu.thread_percentage = None;
                gpu.memory_limit_mib = None;
            }
        });
    }

    /// Puts back the compute modes of the GPUs that `next` doesn't serve. Each stands alone.
    async fn restore_compute_modes(&mut self, order: &Order, next: Option<&Order>) {
        for gpu in &order.plan.gpus {
            let still_ours = next.is_some_and(|next| {
                next.set_compute_mode && next.plan.gpus.iter().any(|served| served.uuid == gpu.uuid)
            });
            if still_ours {
                continue;
            }
            if let Err(error) = self.compute_modes.restore(&gpu.uuid).await {
                self.event(format!("compute mode of {} is not put back: {error}", gpu.pci));
            }
        }
    }

    /// Forgets the GPUs of the old plan, for the new one.
    fn begin_anew(&mut self, next: Option<&Order>) {
        if let Some(order) = next {
            let anew = initial_status(&order.plan);
            self.update(|status| {
                let (starts, events) = (status.view.starts, std::mem::take(&mut status.events));
                *status = Status { first_pass_ended: true, events, ..anew };
                status.view.starts = starts;
            });
        }
    }

    fn failed(&mut self, failure: Failure, pause: Duration) {
        let (state, reason) = match failure {
            Failure::Failed(reason) => (ControlDaemonState::Backoff, reason),
            Failure::Waiting(reason) => (ControlDaemonState::Waiting, reason),
        };
        let known = self.status.borrow().view.reason == reason;
        if !known {
            self.event(format!("{reason}; tried again in {:.1} s", pause.as_secs_f64()));
        }
        self.enter(state, reason);
    }

    fn enter(&mut self, state: ControlDaemonState, reason: String) {
        self.update(|status| {
            if status.view.state != state {
                status.view.since = SystemTime::now();
            }
            status.view.state = state;
            // The reason of the last failure stays to be read while the next start is under way.
            if state != ControlDaemonState::Starting {
                status.view.reason = reason;
                status.first_pass_ended = true;
            }
        });
    }

    fn event(&mut self, text: String) {
        let id = self.status.borrow().view.id.clone();
        tracing::info!(mps_control = id, "{text}");
        self.update(|status| {
            if status.events.len() >= EVENTS_KEPT {
                status.events.pop_front();
            }
            status.events.push_back(Event { at: SystemTime::now(), text });
        });
    }

    fn update_gpu(&mut self, uuid: &str, change: impl FnOnce(&mut GpuStatus)) {
        self.update(|status| {
            if let Some(gpu) = status.gpus.get_mut(uuid) {
                change(gpu);
            }
        });
    }

    fn update(&mut self, change: impl FnOnce(&mut Status)) {
        let modified = self.status.send_if_modified(|status| {
            let before = status.clone();
            change(status);
            *status != before
        });
        if modified {
            self.changed.notify_one();
        }
    }
}

impl Server {
    /// Whether everything that this server writes of its limits is there.
    fn has_written_limits(&self, plan: &ControlDaemonPlan) -> bool {
        self.thread_tenths.is_some()
            && plan
                .gpus
                .iter()
                .enumerate()
                .all(|(ordinal, gpu)| !gpu.limits_enforced || self.memory_bytes.contains_key(&ordinal))
    }

    /// What it has in force that is not as planned.
    fn differs_from(&self, plan: &ControlDaemonPlan) -> Option<String> {
        if let Some(tenths) =
            self.thread_tenths.filter(|tenths| *tenths != u32::from(plan.thread_percentage) * 10)
        {
            let (whole, tenth) = (tenths / 10, tenths % 10);
            return Some(format!(
                "active thread percentage {whole}.{tenth} is in force instead of {}",
                plan.thread_percentage
            ));
        }
        plan.gpus.iter().enumerate().filter(|(_, gpu)| gpu.limits_enforced).find_map(|(ordinal, gpu)| {
            let bytes = *self.memory_bytes.get(&ordinal)?;
            (bytes != gpu.memory_limit_mib << 20).then(|| {
                format!(
                    "device pinned memory limit {} MiB is in force on {} instead of {} MiB",
                    bytes >> 20,
                    gpu.pci,
                    gpu.memory_limit_mib
                )
            })
        })
    }
}

/// Refuses a pipe directory in which a control daemon listens: it isn't ours, and its clients are somebody's.
async fn free(control: &Control, pipe_directory: &Path) -> Result<(), Failure> {
    let there = match control.servers().await {
        Err(ControlError::NoDaemon { .. }) => return Ok(()),
        Err(error @ ControlError::NotRun { .. }) => return Err(error.into()),
        Ok(_) => "another control daemon serves",
        // Nobody listens there: it is the front end that is no good.
        Err(error) if control.daemon_pid().is_none() => return Err(error.into()),
        Err(_) => "another control daemon holds, and does not answer in,",
    };
    let pid = control.daemon_pid().map_or("unknown".to_owned(), |pid| pid.to_string());
    Err(Failure::Waiting(format!(
        "{there} {} (PID {pid}); end it with `echo quit | CUDA_MPS_PIPE_DIRECTORY={0} {PROGRAM}` once its clients are done",
        pipe_directory.display()
    )))
}

/// Sets the limits of the servers to come; each is read back.
async fn set_limits(control: &Control, plan: &ControlDaemonPlan) -> Result<(), ControlError> {
    control.set_default_thread_percentage(plan.thread_percentage).await?;
    for (ordinal, gpu) in plan.gpus.iter().enumerate() {
        control.set_default_memory_limit(ordinal, gpu.memory_limit_mib).await?;
    }
    Ok(())
}

struct Health {
    servers: Vec<u32>,
    faulted: Option<u32>,
}

async fn health(control: &Control) -> Result<Health, ControlError> {
    let servers = control.servers().await?;
    let mut faulted = None;
    for server in &servers {
        if control.server_status(*server).await? == ServerStatus::Fault {
            faulted = Some(*server);
        }
    }
    Ok(Health { servers, faulted })
}
