//! The loop: signals, requests from the bus, the supervisors' news, the regular look at the host, the watchdog. It
//! decides what is to be made true and publishes what is.

pub mod logging;
pub mod newcomers;
pub mod service_manager;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};

use crate::config::{self, Loaded, Problem, Settings, Sources};
use crate::daemon::logging::{Level, last_words};
use crate::dbus::{Request, RequestError, presence};
use crate::host::blocking::Blocking;
use crate::host::gpu::{Gpu, Inventory, PciAddress};
use crate::host::nvml::Driver;
use crate::host::systemd::{self, Stopping};
use crate::mps::control::{Caller, CallersControl, FrontEnds};
use crate::mps::identity::Identity;
use crate::mps::process;
use crate::plan::{self, Configured, Plan, PlanError};
use crate::publish::cdi::{self, CdiError};
use crate::publish::compose::{self, Parts};
use crate::publish::container::ContainerError;
use crate::publish::snapshot::{Named, Snapshot, State};
use crate::supervisor::compute_modes::ComputeModes;
use crate::supervisor::runtime_directory::RuntimeDirectory;
use crate::supervisor::state_file::{Journal, Running};
use crate::supervisor::view::{EVENTS_KEPT, Event};
use crate::supervisor::{self, Goal, Order, Status, Supervisor, Tools};
use crate::tenants::clients::ClientView;
use crate::tenants::clients::{self, Serving};
use crate::tenants::terminate::{self, ContainerId, ReleaseError, Wanted};
use service_manager::ServiceManager;

/// How often the host is looked at while there is no plan, for want of a driver most often.
const SCAN_WITHOUT_PLAN: Duration = Duration::from_secs(5);

/// The first pause between two looks at the host while some GPU can't be served, and the last: it doubles from one to the
/// other, since most of what passes passes soon.
const FIRST_SCAN_FOR_MORE: Duration = Duration::from_secs(1);
const SCAN_FOR_MORE: Duration = Duration::from_secs(30);

/// The time that NVML gets to tell of a GPU that is served, and the pause between two looks: one error is no reason to end
/// a control daemon that has it.
const SCAN_PATIENCE: Duration = Duration::from_secs(5);
const SCAN_PAUSE: Duration = Duration::from_millis(500);

/// The most processes without MPS that are waited for; the regular look finds the end of the others.
const HOLDERS: usize = 64;

/// How long a look at the host may take before it counts as failed. It must stay well below the watchdog's time.
const SCAN_TIMEOUT: Duration = Duration::from_secs(15);

/// How long a caller waits for its reload to be in force. It must stay below the time that the bus gives a request.
const RELOAD_PATIENCE: Duration = Duration::from_secs(50);

/// How many faults may wait to be told, for want of a bus most often; what is more is only in the log.
const FAULTS: usize = 64;

/// How many requests may wait. A caller that finds it full waits too.
const REQUESTS: usize = 16;

/// How many releases may ask the kernel about processes at a time. It takes microseconds.
const RELEASES: usize = 4;

/// How many callers may wait for the next list of clients; more are told to ask later.
const LISTINGS: usize = 256;

/// What the command line says.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where the configuration is.
    pub sources: Sources,
    /// Where the journal is kept.
    pub runtime_directory: PathBuf,
}

/// Why the program ends.
#[derive(Debug)]
pub enum Exit {
    /// It was asked to, and everything is stopped.
    Stopped,
    /// The configuration is wrong; the problems have been logged.
    BadConfiguration,
    /// It was asked to end, but not whether for good: the service manager should start it again.
    Interrupted,
    /// It can't do its work at all.
    Failed(String),
}

/// Runs until it is asked to stop.
pub async fn run(options: Options, level: Level) -> Exit {
    // Before anything else: whoever has it may be serving, and nothing of that is to be touched.
    let directory = match RuntimeDirectory::take(&options.runtime_directory) {
        Ok(directory) => directory,
        Err(error) => return Exit::Failed(error.to_string()),
    };
    let loaded = match config::load(&options.sources) {
        Ok(loaded) => loaded,
        Err(refused) => {
            refused.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
            return bad_configuration(&refused.problems);
        }
    };
    level.set(loaded.settings.log_level);
    say_findings(&loaded);
    let journal = Journal::open(directory);
    let signals = match Signals::new() {
        Ok(signals) => signals,
        Err(error) => return Exit::Failed(format!("signals can't be received: {error}")),
    };
    let (requests, received) = mpsc::channel(REQUESTS);
    let (snapshot, seen) = watch::channel(Arc::new(compose::nothing_yet(&loaded.settings)));
    let changed = Arc::new(Notify::new());
    let (joined, on_the_bus) = watch::channel(false);
    let (faults, faults_seen) = mpsc::channel(FAULTS);
    let bus =
        tokio::spawn(presence::stay_on_the_bus(seen, requests, faults_seen, joined, Arc::clone(&changed)));
    let (xids, xids_seen) = mpsc::channel(FAULTS);
    let (driver, driver_seen) = watch::channel(None);
    let (kept, kept_seen) = watch::channel(Configured::default());
    let journal = Arc::new(Mutex::new(journal));
    let tools = Tools {
        front_ends: FrontEnds::new(supervisor::PROGRAM.into()),
        compute_modes: ComputeModes::new(driver_seen, Arc::clone(&journal), kept_seen),
        journal,
        changed: Arc::clone(&changed),
        faults,
    };
    let listings = ByCaller::new(|| {
        let (listings, asked) = mpsc::channel(LISTINGS);
        tokio::spawn(list_clients(asked, tools.compute_modes.clone()));
        listings
    });
    let mut daemon = Daemon {
        options,
        level,
        settings: loaded.settings,
        driver,
        driver_version: Err("not looked for yet".to_owned()),
        plan: Err("no look at the GPUs yet".to_owned()),
        tools,
        xids,
        supervisors: BTreeMap::new(),
        leaving: Vec::new(),
        kept,
        modes: Vec::new(),
        holders: JoinSet::new(),
        listings,
        looks: Blocking::new(1),
        kernel: Blocking::new(RELEASES),
        pending: Vec::new(),
        changed,
        snapshot,
        on_the_bus,
        events: VecDeque::new(),
        refused: String::new(),
        problem: String::new(),
        cdi_problem: String::new(),
        next_scan: None,
        newcomers_until: None,
        scan_pause: FIRST_SCAN_FOR_MORE,
        stopping: false,
        carry_on: false,
        wanted_back: false,
        service_manager: ServiceManager::new(),
        reloads: 0,
        in_force: watch::Sender::new(0),
    };
    let exit = daemon.run(signals, received, xids_seen).await;
    daemon.service_manager.end().await;
    bus.abort();
    exit
}

fn bad_configuration(problems: &[Problem]) -> Exit {
    for problem in problems {
        last_words(&problem.to_string());
    }
    Exit::BadConfiguration
}

fn say_findings(loaded: &Loaded) {
    for warning in loaded.warnings.iter().chain(loaded.agent.iter().map(|trouble| &trouble.problem)) {
        tracing::warn!("{warning}");
    }
    let mut by_file: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (origin, key) in &loaded.unknown_keys {
        by_file.entry(origin.file.display().to_string()).or_default().push(key);
    }
    for (file, keys) in by_file {
        tracing::debug!("{file}: keys of other programs: {}", keys.join(", "));
    }
}

/// What a signal asks for.
enum Wish {
    Stop,
    Reload,
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    quit: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Wish {
        tokio::select! {
            _ = self.terminate.recv() => Wish::Stop,
            _ = self.interrupt.recv() => Wish::Stop,
            _ = self.quit.recv() => Wish::Stop,
            _ = self.hangup.recv() => Wish::Reload,
        }
    }
}

struct Daemon {
    options: Options,
    level: Level,
    settings: Settings,
    /// Open as long as it works.
    driver: watch::Sender<Option<Arc<Driver>>>,
    driver_version: Result<String, String>,
    /// The plan in force, or why there is none yet.
    plan: Result<Plan, String>,
    tools: Tools,
    /// Takes the critical errors that NVML tells of: the GPU's UUID and the Xid number.
    xids: mpsc::Sender<(String, u64)>,
    supervisors: BTreeMap<String, Supervisor>,
    /// Asked to end; a GPU of theirs is free for another when they have.
    leaving: Vec<Supervisor>,
    /// The GPUs whose compute mode is not to be put back.
    kept: watch::Sender<Configured>,
    /// Sets compute modes that no supervisor sees to, or puts them back.
    modes: Vec<JoinHandle<()>>,
    /// Wait for the end of processes that keep a server out.
    holders: JoinSet<()>,
    /// Takes who wants to know the clients.
    listings: ByCaller<mpsc::Sender<Listing>>,
    /// Looks at the host.
    looks: Blocking,
    /// Asks the kernel whose GPU work is to end.
    kernel: Blocking,
    /// To be started when nobody who is leaving has their GPUs any more.
    pending: Vec<Order>,
    changed: Arc<Notify>,
    snapshot: watch::Sender<Arc<Snapshot>>,
    on_the_bus: watch::Receiver<bool>,
    events: VecDeque<Event>,
    /// Why a new configuration was refused, until the next one is granted.
    refused: String,
    /// What the last look at the host found wrong with the configuration in force.
    problem: String,
    /// Why the CDI spec is not as it should be.
    cdi_problem: String,
    next_scan: Option<Instant>,
    /// When it is to be seen whether a program without MPS that has just come to a GPU has gone again.
    newcomers_until: Option<Instant>,
    /// After which time the host is looked at again for a GPU that can't be served.
    scan_pause: Duration,
    stopping: bool,
    /// Whether the control daemons carry on after this end.
    carry_on: bool,
    /// Whether the service manager should start us again after this end.
    wanted_back: bool,
    service_manager: ServiceManager,
    /// How many new configurations were granted.
    reloads: u64,
    /// How many of them are in force, or known not to be and why.
    in_force: watch::Sender<u64>,
}

impl Daemon {
    async fn run(
        &mut self,
        mut signals: Signals,
        mut requests: mpsc::Receiver<Request>,
        mut xids: mpsc::Receiver<(String, u64)>,
    ) -> Exit {
        if let Err(problems) = self.first_pass().await {
            return bad_configuration(&problems);
        }
        loop {
            let next_watchdog = self.service_manager.watchdog();
            self.settle();
            if self.stopping && self.leaving.is_empty() && self.modes.is_empty() {
                return if self.wanted_back { Exit::Interrupted } else { Exit::Stopped };
            }
            let changed = Arc::clone(&self.changed);
            tokio::select! {
                wish = signals.next() => match wish {
                    Wish::Stop => self.stop().await,
                    // Whoever sent the signal reads the journal, where the reason of a failure stands.
                    Wish::Reload => drop(self.reload().await),
                },
                Some(request) = requests.recv() => self.answer(request).await,
                Some((uuid, xid)) = xids.recv() => self.xid(&uuid, xid),
                () = changed.notified() => {}
                () = sleep_or_never(self.next_scan) => {
                    self.scan_pause = (self.scan_pause * 2).min(SCAN_FOR_MORE);
                    self.look_again().await;
                }
                Some(_) = self.holders.join_next(), if !self.stopping => {
                    self.scan_pause = FIRST_SCAN_FOR_MORE;
                    self.look_again().await;
                }
                () = sleep_or_never(next_watchdog) => {}
            }
        }
    }

    /// Looks at the host for the first time. What is wrong with the configuration is fatal now and only now.
    async fn first_pass(&mut self) -> Result<(), Vec<Problem>> {
        if !self.settings.enabled {
            tracing::info!("enable_cuda_mps is false: no GPU is served");
            if self.has_leftovers() {
                // For the driver, which restores compute modes.
                self.scan().await;
                self.end_leftovers(&Plan::default(), &Goal::Retire);
            }
            self.plan = Ok(Plan::default());
            return Ok(());
        }
        let inventory = self.scan_in_earnest().await;
        match plan::plan(&self.settings, &inventory, &[]) {
            Ok(plan) => self.put_in_force(plan),
            Err(PlanError::Problems(problems)) => return Err(problems),
            Err(PlanError::Missing(missing)) => self.not_yet(join(&plan::problems(&missing))),
            Err(PlanError::NotYet(reason)) => self.not_yet(reason),
        }
        Ok(())
    }

    fn not_yet(&mut self, reason: String) {
        if self.plan.as_ref().err() != Some(&reason) {
            tracing::warn!(
                "no GPU can be served yet: {reason}; looked for again every {} s",
                SCAN_WITHOUT_PLAN.as_secs()
            );
        }
        self.plan = Err(reason);
    }

    /// Looks at the host, as often as it takes to believe that NVML can't tell of a GPU that is served.
    async fn scan_in_earnest(&mut self) -> Inventory {
        let deadline = Instant::now() + SCAN_PATIENCE;
        let mut inventory = self.scan().await;
        while let Some(uuid) = self.untold(&inventory).filter(|_| Instant::now() < deadline) {
            tracing::info!(
                gpu_uuid = uuid,
                step = "looked-again",
                "NVML does not tell of {uuid}, which is served; looked at again"
            );
            tokio::time::sleep(SCAN_PAUSE).await;
            inventory = self.scan().await;
        }
        inventory
    }

    /// A GPU that is in the hands of a control daemon of ours and that NVML does not tell of, while it fails to tell of
    /// some GPU.
    fn untold(&self, inventory: &Inventory) -> Option<String> {
        let silent = |gpu: &Gpu| gpu.nvml.is_err() && gpu.pci.foreign_driver().is_none();
        if inventory.driver.is_err() || !inventory.gpus.iter().any(silent) {
            return None;
        }
        let served: Vec<String> = match &self.plan {
            Ok(plan) => {
                plan.control_daemons.iter().flat_map(|one| &one.gpus).map(|gpu| gpu.uuid.clone()).collect()
            }
            Err(_) => {
                let journal = self.tools.journal.lock().unwrap_or_else(PoisonError::into_inner);
                let ids = journal.control_daemons();
                ids.iter()
                    .filter_map(|id| journal.control_daemon(id))
                    .flat_map(|one| one.gpus.clone())
                    .collect()
            }
        };
        let told = |uuid: &String| {
            inventory.gpus.iter().any(|gpu| gpu.nvml.as_ref().is_ok_and(|facts| facts.uuid == *uuid))
        };
        served.into_iter().find(|uuid| !told(uuid))
    }

    /// Looks at the host. Off the loop's thread, since a GPU that is about to fall off the bus can hold a question.
    async fn scan(&mut self) -> Inventory {
        let driver = self.driver.borrow().clone();
        let sysroot = self.options.sources.sysroot.clone();
        let look = self.looks.ask(SCAN_TIMEOUT, move || {
            let driver = match driver {
                Some(driver) => Ok(driver),
                None => Driver::open().map(Arc::new),
            };
            let inventory = Inventory::read(&sysroot, driver.as_deref().map_err(String::as_str));
            (driver.ok(), inventory)
        });
        let (driver, mut inventory) = look.await.unwrap_or_else(|| {
            let reason = format!("NVML did not answer within {} s", SCAN_TIMEOUT.as_secs());
            (None, Inventory { driver: Err(reason), gpus: Vec::new(), others: Vec::new() })
        });
        let driver = driver.filter(|_| inventory.driver.is_ok());
        if let Some(driver) = driver.as_ref().filter(|_| self.driver.borrow().is_none()) {
            self.watch_xids(Arc::clone(driver));
        }
        self.driver.send_replace(driver);
        self.driver_version.clone_from(&inventory.driver);
        self.newcomers_until = newcomers::pass_over(&mut inventory).map(|left| Instant::now() + left);
        inventory
    }

    /// Has critical errors told as they happen. Waiting for them blocks, so it has a thread of its own, which ends with
    /// the driver or with us.
    fn watch_xids(&self, driver: Arc<Driver>) {
        let told = self.xids.clone();
        std::thread::spawn(move || {
            let tell = |uuid: &str, xid: u64| told.blocking_send((uuid.to_owned(), xid)).is_ok();
            if let Err(reason) = driver.watch_xids(tell) {
                tracing::debug!("critical errors are not told by NVML: {reason}");
            }
        });
    }

    fn xid(&mut self, uuid: &str, xid: u64) {
        tracing::error!(gpu_uuid = uuid, xid, "GPU {uuid} met a critical error, Xid {xid}");
        self.keep_event(format!("GPU {uuid} met a critical error, Xid {xid}"));
        for supervisor in self.supervisors.values() {
            if supervisor.status().gpus.contains_key(uuid) {
                supervisor.check();
            }
        }
    }

    /// The look at the host while something is missing: more of it may be there now.
    async fn look_again(&mut self) {
        self.next_scan = None;
        let inventory = self.scan_in_earnest().await;
        let reason = match plan::plan(&self.settings, &inventory, self.planned_gpus()) {
            Ok(plan) => {
                if self.plan.as_ref() != Ok(&plan) {
                    self.put_in_force(plan);
                }
                self.problem.clear();
                return;
            }
            Err(PlanError::NotYet(reason)) => reason,
            Err(PlanError::Missing(missing)) => join(&plan::problems(&missing)),
            Err(PlanError::Problems(problems)) => join(&problems),
        };
        if self.plan.is_err() {
            self.not_yet(reason);
        } else {
            self.problem = reason;
        }
    }

    /// The GPUs of the plan in force.
    fn planned_gpus(&self) -> &[plan::GpuPlan] {
        self.plan.as_ref().map(|plan| plan.gpus.as_slice()).unwrap_or_default()
    }

    /// Makes a plan the one in force, with everything that follows from it.
    fn put_in_force(&mut self, plan: Plan) {
        self.say_what_is_new(&plan);
        let ours = self.settings.enabled && self.settings.set_compute_mode;
        self.kept.send_replace(if ours { plan.configured.clone() } else { Configured::default() });
        self.scan_pause = FIRST_SCAN_FOR_MORE;
        self.pending.clear();
        let mut gone = std::mem::take(&mut self.supervisors);
        for order in self.orders(&plan) {
            match gone.remove(&order.plan.id).or_else(|| self.call_back(&order, &gone)) {
                Some(supervisor) => {
                    supervisor.pursue(Goal::Serve, order.clone());
                    self.supervisors.insert(order.plan.id, supervisor);
                }
                None => self.pending.push(order),
            }
        }
        // Whose GPUs go elsewhere keeps them until its clients are done; without MPS there is nothing to wait for.
        let end = if self.settings.enabled { Goal::Retire } else { Goal::Stop };
        for supervisor in gone.into_values() {
            supervisor.end(end.clone());
            self.leaving.push(supervisor);
        }
        self.end_leftovers(&plan, &end);
        self.close_to_others(&plan);
        self.plan = Ok(plan);
        self.problem.clear();
    }

    /// A GPU that processes without MPS hold is closed to more of them, and served as soon as the last one ends.
    fn close_to_others(&mut self, plan: &Plan) {
        let held = || plan.gpus.iter().filter(|gpu| !gpu.holders().is_empty());
        self.holders = JoinSet::new();
        for (pid, _) in held().flat_map(plan::GpuPlan::holders).take(HOLDERS) {
            self.holders.spawn(process::ended(*pid));
        }
        if !self.settings.set_compute_mode {
            return;
        }
        for uuid in held().filter_map(|gpu| Some(gpu.gpu.nvml.as_ref().ok()?.uuid.clone())) {
            let compute_modes = self.tools.compute_modes.clone();
            self.see_to_mode(async move {
                if let Err(error) = compute_modes.take(&uuid).await {
                    tracing::warn!(gpu_uuid = uuid, "compute mode of {uuid}: {error}");
                }
            });
        }
    }

    /// Has something done about a compute mode beside the loop, which is woken up at its end.
    fn see_to_mode(&mut self, what: impl Future<Output = ()> + Send + 'static) {
        let changed = Arc::clone(&self.changed);
        self.modes.push(tokio::spawn(async move {
            what.await;
            changed.notify_one();
        }));
    }

    /// The one that is on its way out and has what an order wants: a change that is taken back must not have to wait for
    /// clients, who can as well stay. Not while somebody else who leaves has one of its GPUs.
    fn call_back(&mut self, order: &Order, gone: &BTreeMap<String, Supervisor>) -> Option<Supervisor> {
        let has_one = |supervisor: &Supervisor| {
            let status = supervisor.status();
            order.plan.gpus.iter().any(|gpu| status.gpus.contains_key(&gpu.uuid))
        };
        let is_it = |leaving: &Supervisor| !leaving.ended() && leaving.status().view.id == order.plan.id;
        let place = self.leaving.iter().position(is_it)?;
        let mut others = self.leaving.iter().filter(|leaving| !is_it(leaving)).chain(gone.values());
        if others.any(has_one) {
            return None;
        }
        Some(self.leaving.swap_remove(place))
    }

    /// What a later look finds again has been said.
    fn say_what_is_new(&self, plan: &Plan) {
        let known = |gpu: &plan::GpuPlan| {
            let known = self
                .plan
                .as_ref()
                .ok()?
                .gpus
                .iter()
                .find(|known| known.gpu.pci.address == gpu.gpu.pci.address)?;
            Some((known.unusable.clone(), known.warnings.clone()))
        };
        for gpu in &plan.gpus {
            if known(gpu) == Some((gpu.unusable.clone(), gpu.warnings.clone())) {
                continue;
            }
            let name = gpu.gpu.pci.address.short();
            if let Some(reason) = &gpu.unusable {
                tracing::warn!("{name} is not served: {reason}");
            }
            for warning in &gpu.warnings {
                tracing::warn!("{name}: {warning}");
            }
        }
        let known = self.plan.as_ref().map(|plan| plan.missing.as_slice()).unwrap_or_default();
        for missing in plan.missing.iter().filter(|missing| !known.contains(missing)) {
            tracing::warn!("{}", missing.problem);
        }
    }

    fn has_leftovers(&self) -> bool {
        let journal = self.tools.journal.lock().unwrap_or_else(PoisonError::into_inner);
        !journal.control_daemons().is_empty() || !journal.changed_gpus().is_empty()
    }

    /// Sees to what an earlier service of ours has left: control daemons that the plan has no use for, and compute
    /// modes of GPUs that nobody serves any more.
    fn end_leftovers(&mut self, plan: &Plan, end: &Goal) {
        let (ids, gpus) = {
            let journal = self.tools.journal.lock().unwrap_or_else(PoisonError::into_inner);
            let running = journal.control_daemons().into_iter();
            let running: Vec<_> =
                running.filter_map(|id| Some((journal.control_daemon(&id)?.clone(), id))).collect();
            (running, journal.changed_gpus())
        };
        let mut held: Vec<String> =
            plan.control_daemons.iter().flat_map(|one| &one.gpus).map(|gpu| gpu.uuid.clone()).collect();
        held.extend(self.leaving.iter().flat_map(|leaving| leaving.status().gpus.into_keys()));
        for (running, id) in ids {
            held.extend(running.gpus.iter().cloned());
            let known = plan.control_daemons.iter().any(|one| one.id == id)
                || self.leaving.iter().any(|leaving| leaving.status().view.id == id);
            if !known {
                let order = self.order(leftover(&id, &running, plan));
                self.leaving.push(Supervisor::start(order, end.clone(), self.tools.clone()));
            }
        }
        for uuid in gpus.into_iter().filter(|uuid| !held.contains(uuid)) {
            let compute_modes = self.tools.compute_modes.clone();
            self.see_to_mode(async move {
                if let Err(error) = compute_modes.restore(&uuid).await {
                    tracing::warn!(gpu_uuid = uuid, "compute mode of {uuid} is not put back: {error}");
                }
            });
        }
    }

    fn orders(&self, plan: &Plan) -> Vec<Order> {
        plan.control_daemons.iter().map(|control_daemon| self.order(control_daemon.clone())).collect()
    }

    fn order(&self, plan: plan::ControlDaemonPlan) -> Order {
        Order {
            plan,
            set_compute_mode: self.settings.set_compute_mode,
            quit_timeout: self.settings.quit_timeout,
            fault_grace: self.settings.fault_grace,
            log_max_bytes: self.settings.log_max_bytes,
        }
    }

    /// Reads the configuration again and puts it in force, or leaves everything as it is.
    async fn reload(&mut self) -> Result<(), RequestError> {
        if self.stopping {
            return Err(RequestError::Busy("the service is stopping".to_owned()));
        }
        self.service_manager.reloading();
        let result = self.replace_configuration().await;
        match &result {
            Ok(()) => {
                self.refused.clear();
                self.reloads += 1;
                // Who reloads has most often changed something, and not only the files: nobody should have to wait
                // for the regular look.
                self.supervisors.values().chain(&self.leaving).for_each(Supervisor::check);
                self.event("configuration reloaded".to_owned());
            }
            Err(error) => {
                self.refused = format!("the new configuration was refused: {error}");
                tracing::error!("{}; the old one stays in force", self.refused);
            }
        }
        self.settle();
        result
    }

    /// The same for a caller on the bus, who gets the answer when the new configuration is in force.
    async fn reload_and_tell(&mut self, reply: oneshot::Sender<Result<u64, RequestError>>) {
        if let Err(error) = self.reload().await {
            return drop(reply.send(Err(error)));
        }
        let (reloads, mut in_force) = (self.reloads, self.in_force.subscribe());
        let snapshot = self.snapshot.subscribe();
        tokio::spawn(async move {
            let waited = timeout(RELOAD_PATIENCE, in_force.wait_for(|settled| *settled >= reloads)).await;
            let _ = reply.send(match waited {
                Ok(Ok(_)) => Ok(snapshot.borrow().generation),
                Ok(Err(_)) => Err(RequestError::Busy("the service is stopping".to_owned())),
                Err(_) => Err(RequestError::Busy(format!(
                    "the new configuration was taken and is not in force after {} s; State says when it is",
                    RELOAD_PATIENCE.as_secs()
                ))),
            });
        });
    }

    async fn replace_configuration(&mut self) -> Result<(), RequestError> {
        let invalid = |problems: &[Problem]| RequestError::InvalidConfig(join(problems));
        let loaded = config::load(&self.options.sources).map_err(|refused| {
            refused.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
            invalid(&refused.problems)
        })?;
        say_findings(&loaded);
        if let Some(problem) = loaded.silent_end().filter(|_| self.settings.enabled) {
            return Err(invalid(&[problem]));
        }
        let plan = if loaded.settings.enabled {
            let inventory = self.scan_in_earnest().await;
            let planned = plan::plan(&loaded.settings, &inventory, self.planned_gpus());
            if let Ok(Plan { missing, .. }) | Err(PlanError::Missing(missing)) = &planned {
                let slips = self.new_and_missing(missing);
                if !slips.is_empty() {
                    return Err(invalid(&slips));
                }
            }
            let reason = match planned {
                Ok(plan) => Ok(plan),
                Err(PlanError::Problems(problems)) => return Err(invalid(&problems)),
                Err(PlanError::Missing(missing)) => Err(join(&plan::problems(&missing))),
                Err(PlanError::NotYet(reason)) => Err(reason),
            };
            match reason {
                Err(reason) if self.plan.is_ok() && self.settings.enabled => {
                    return Err(RequestError::NotReady(reason));
                }
                planned => planned,
            }
        } else {
            Ok(Plan::default())
        };
        tracing::debug!(step = "granted", "the new configuration is right");
        self.level.set(loaded.settings.log_level);
        self.settings = loaded.settings;
        match plan {
            Ok(plan) => self.put_in_force(plan),
            Err(reason) => self.not_yet(reason),
        }
        Ok(())
    }

    /// The entries without a GPU that the configuration in force does not have: slips, of which whoever reloads is told.
    /// A GPU that has failed since is none, and keeps nobody from changing something else.
    fn new_and_missing(&self, missing: &[plan::Missing]) -> Vec<Problem> {
        let ours = || self.settings.devices.iter().filter(|entry| entry.mps.is_some());
        let known = |path| ours().any(|entry| entry.path.as_ref() == Some(path));
        let new = missing.iter().filter(|missing| missing.certain && !known(&missing.path));
        new.map(|missing| missing.problem.clone()).collect()
    }

    async fn answer(&mut self, request: Request) {
        match request {
            // A caller that has gone is no reason for anything.
            Request::Reload { reply } => self.reload_and_tell(reply).await,
            Request::Clients { uid, reply } => self.list_clients(Caller::of(uid), reply),
            Request::Terminate { pid, reply } => self.release(Ok(Wanted::Process(pid)), reply),
            Request::ReleaseDevices { devices, reply } => self.release(self.slices(devices), reply),
            Request::ReleaseContainer { id, reply } => {
                let id = ContainerId::new(&id).map_err(RequestError::from);
                self.release(id.map(Wanted::Container), reply);
            }
            Request::Apply { force, reply } => self.apply(force, reply),
            Request::RestartServer { gpu, reply } => self.restart_server(&gpu, reply),
        }
    }

    /// Has the control daemons asked beside the loop: they may take their time.
    fn list_clients(&self, caller: Caller, reply: oneshot::Sender<Result<Vec<ClientView>, RequestError>>) {
        // Those on their way out wait for theirs.
        let serving = self.supervisors.values().chain(&self.leaving).map(|supervisor| {
            let Status { gpus, waiting, .. } = supervisor.status();
            let bypasses = gpus.values().flat_map(|gpu| gpu.bypasses.clone()).collect();
            let control = supervisor.access(caller);
            Serving { control, gpus: gpus.into_keys().collect(), bypasses, waiting }
        });
        if let Err(TrySendError::Full((_, reply)) | TrySendError::Closed((_, reply))) =
            self.listings.of(caller).try_send((serving.collect(), reply))
        {
            let _ = reply.send(Err(RequestError::Busy("too many ask for the clients at once".to_owned())));
        }
    }

    /// The slices that a caller names.
    fn slices(&self, names: Vec<String>) -> Result<Wanted, RequestError> {
        let snapshot = self.snapshot.borrow();
        if snapshot.gpus.is_none() {
            return Err(ContainerError::NotReady.into());
        }
        let slice = |name: String| match snapshot.find(&name) {
            Some(found @ Named::Slice(..)) => Ok(found.name()),
            Some(found @ Named::Gpu(_)) => Err(RequestError::Failed(format!(
                "{} is a whole GPU, whose clients may be of several tenants; name its slices, or release containers",
                found.name()
            ))),
            None => Err(ContainerError::NoSuchDevice(name).into()),
        };
        names.into_iter().map(slice).collect::<Result<_, _>>().map(Wanted::Slices)
    }

    /// Ends GPU work beside the loop: it takes as long as the control daemons and the clients take.
    fn release(
        &self,
        wanted: Result<Wanted, RequestError>,
        reply: oneshot::Sender<Result<(), RequestError>>,
    ) {
        let wanted = match wanted {
            Ok(wanted) => wanted,
            Err(error) => return drop(reply.send(Err(error))),
        };
        let all = self.supervisors.values().chain(&self.leaving);
        // One that was never taken over, for want of a plan, has clients all the same.
        let unsupervised = if self.plan.is_err() { self.unsupervised() } else { Vec::new() };
        let controls = all.filter_map(Supervisor::control_in_place).chain(unsupervised);
        let controls = controls.map(Arc::new).collect();
        let kernel = self.kernel.clone();
        tokio::spawn(async move {
            let released = terminate::release(controls, wanted, kernel).await;
            let _ = reply.send(released.map_err(RequestError::from));
        });
    }

    /// The control daemons of ours that the journal has and that live.
    fn unsupervised(&self) -> Vec<CallersControl> {
        let journal = self.tools.journal.lock().unwrap_or_else(PoisonError::into_inner);
        let ids = journal.control_daemons();
        let running = ids.iter().filter_map(|id| journal.control_daemon(id));
        let alive = running.filter(|running| Identity::of(running.process.pid).ok() == Some(running.process));
        let front_end = |running: &Running| self.tools.front_ends.of(&running.pipe_directory);
        alive.map(|running| front_end(running).on_behalf(Caller::Root)).collect()
    }

    /// Carries out the changes that wait for clients to end. Beside the loop: the control daemons take their time.
    fn apply(&self, force: bool, reply: oneshot::Sender<Result<(), RequestError>>) {
        // Where nothing runs, nothing waits.
        let running =
            self.supervisors.values().chain(&self.leaving).filter(|one| one.status().view.pid.is_some());
        let asked: Vec<_> =
            running.map(|supervisor| (supervisor.status().view.id, supervisor.apply(force))).collect();
        tokio::spawn(async move {
            let mut in_the_way = Vec::new();
            for (id, answer) in asked {
                match answer.await {
                    Ok(Ok(())) => {}
                    Ok(Err(reason)) => in_the_way.push(format!("control daemon {id}: {reason}")),
                    Err(_) => {
                        in_the_way.push(format!("control daemon {id} has other things to do; ask again"));
                    }
                }
            }
            let done =
                if in_the_way.is_empty() { Ok(()) } else { Err(RequestError::Busy(in_the_way.join("; "))) };
            let _ = reply.send(done);
        });
    }

    /// Replaces the server that a GPU's clients share.
    fn restart_server(&self, gpu: &str, reply: oneshot::Sender<Result<(), RequestError>>) {
        let id = match self.snapshot.borrow().find(gpu) {
            Some(Named::Gpu(gpu) | Named::Slice(gpu, _)) => gpu.control_daemon.clone(),
            None => return drop(reply.send(Err(ContainerError::NoSuchDevice(gpu.to_owned()).into()))),
        };
        let Some(supervisor) = self.supervisors.get(&id) else {
            return drop(reply.send(Err(RequestError::Busy(format!("no control daemon serves {gpu}")))));
        };
        let answer = supervisor.restart_server();
        tokio::spawn(async move {
            let done = match answer.await {
                Ok(done) => done.map_err(RequestError::Busy),
                Err(_) => {
                    Err(RequestError::Busy(format!("control daemon {id} has other things to do; ask again")))
                }
            };
            let _ = reply.send(done);
        });
    }

    /// SIGTERM: a stop ends the control daemons, a restart leaves them to the next of us.
    async fn stop(&mut self) {
        if self.stopping {
            return;
        }
        let goal = match systemd::why_stopping().await {
            Stopping::Stop | Stopping::NotUnderSystemd => {
                tracing::info!("stopping: the control daemons end, the compute modes are put back");
                Goal::Stop
            }
            Stopping::Restart => {
                tracing::info!("restarting: the control daemons and their clients carry on");
                Goal::Leave
            }
            // A control daemon can still be stopped later; a job that was ended is lost.
            Stopping::Unknown(reason) => {
                tracing::warn!(
                    "ending, though nobody said for good ({reason}): the control daemons and their clients carry on"
                );
                self.wanted_back = true;
                Goal::Leave
            }
        };
        self.stopping = true;
        self.carry_on = goal == Goal::Leave;
        self.pending.clear();
        self.holders = JoinSet::new();
        self.service_manager.stopping();
        self.leaving.extend(std::mem::take(&mut self.supervisors).into_values());
        self.kept.send_replace(Configured::default());
        // One that is just being set would not be found to put back.
        for mode in std::mem::take(&mut self.modes) {
            let _ = mode.await;
        }
        for supervisor in &self.leaving {
            supervisor.end(goal.clone());
        }
        if goal == Goal::Stop {
            // Without a plan nobody has taken them over.
            self.end_leftovers(&Plan::default(), &goal);
        }
    }

    /// What follows from what has happened: the next ones start, and the new state is published.
    fn settle(&mut self) {
        self.leaving.retain(|supervisor| !supervisor.ended());
        self.modes.retain(|mode| !mode.is_finished());
        for order in std::mem::take(&mut self.pending) {
            if self.in_the_way(&order).next().is_some() {
                self.pending.push(order);
            } else {
                let supervisor = Supervisor::start(order.clone(), Goal::Serve, self.tools.clone());
                self.supervisors.insert(order.plan.id, supervisor);
            }
        }
        let settled = self.settled();
        let mut snapshot = self.compose();
        if self.keep_cdi_spec(&snapshot) {
            snapshot = self.compose();
        }
        let unserved =
            snapshot.gpus.as_ref().is_some_and(|gpus| gpus.iter().any(|gpu| gpu.plan.unusable.is_some()));
        let missing = self.plan.as_ref().is_ok_and(|plan| !plan.missing.is_empty());
        let trouble = unserved || missing || !self.problem.is_empty() || !self.cdi_problem.is_empty();
        let period = match &self.plan {
            _ if self.stopping || !self.settings.enabled => None,
            Err(_) => Some(SCAN_WITHOUT_PLAN),
            Ok(_) => trouble.then_some(self.scan_pause),
        };
        let regular = period.map(|period| Instant::now() + period);
        let newcomers = self.newcomers_until.filter(|_| !self.stopping && self.settings.enabled);
        // A look that is due stays due: news that come in faster than the period must not put it off for ever.
        self.next_scan = [regular, newcomers]
            .into_iter()
            .flatten()
            .min()
            .map(|latest| self.next_scan.map_or(latest, |due| due.min(latest)));
        // The same one stays: answers are made once for each.
        self.snapshot.send_if_modified(|current| {
            let modified = **current != snapshot;
            if modified {
                *current = Arc::new(snapshot);
            }
            modified
        });
        self.tell_service_manager(settled);
        if settled {
            self.in_force
                .send_if_modified(|reloads| std::mem::replace(reloads, self.reloads) != self.reloads);
        }
    }

    /// Whether every plan is in force, or whatever keeps it from that is known and said.
    fn settled(&self) -> bool {
        !self.starting() && self.supervisors.values().all(|supervisor| supervisor.status().settled)
    }

    /// Whether a control daemon is to be started as soon as another, which does so now, has left its GPUs.
    fn starting(&self) -> bool {
        self.pending.iter().any(|order| !self.in_the_way(order).any(|one| one.put_off))
    }

    /// Those on the way out that have GPUs of an order.
    fn in_the_way(&self, order: &Order) -> impl Iterator<Item = Status> {
        let has_one = |status: &Status| order.plan.gpus.iter().any(|gpu| status.gpus.contains_key(&gpu.uuid));
        self.leaving.iter().map(Supervisor::status).filter(has_one)
    }

    fn compose(&self) -> Snapshot {
        let statuses: Vec<Status> = self.supervisors.values().map(Supervisor::status).collect();
        let leaving: Vec<Status> = self.leaving.iter().map(Supervisor::status).collect();
        let problems = [&self.refused, &self.problem, &self.cdi_problem];
        let problem = problems.into_iter().find(|problem| !problem.is_empty());
        let parts = Parts {
            settings: &self.settings,
            driver: &self.driver_version,
            plan: self.plan.as_ref().map_err(String::as_str),
            statuses: &statuses,
            leaving: &leaving,
            starting: self.starting(),
            events: &self.events,
            problem: problem.map_or("", String::as_str),
            stopping: self.stopping,
        };
        compose::compose(&parts, &self.snapshot.borrow())
    }

    /// Has the CDI spec say what the Snapshot says; gives whether something new is to be said about that.
    fn keep_cdi_spec(&mut self, snapshot: &Snapshot) -> bool {
        let problem = match self.write_cdi_spec(snapshot) {
            Ok(()) => String::new(),
            Err(error) => format!("CDI spec: {error}"),
        };
        if problem == self.cdi_problem {
            return false;
        }
        if problem.is_empty() {
            self.event("CDI spec: is as it should be again".to_owned());
        } else {
            tracing::warn!("{problem}");
            self.keep_event(problem.clone());
        }
        self.cdi_problem = problem;
        true
    }

    fn write_cdi_spec(&self, snapshot: &Snapshot) -> Result<(), CdiError> {
        let directory = self.settings.cdi_directory.as_deref();
        let file = directory.map(|directory| directory.join(cdi::FILE));
        let mut journal = self.tools.journal.lock().unwrap_or_else(PoisonError::into_inner);
        let known = journal.cdi_spec().map(Path::to_owned);
        // What can't be written down is only not found again by the next of us, should the directory be another then.
        let mut remember = |file: Option<PathBuf>| {
            if let Err(error) = journal.remember_cdi_spec(file) {
                tracing::debug!("where the CDI spec is can't be written down: {error}");
            }
        };
        if let Some(old) = known.as_ref().filter(|known| file.as_ref() != Some(known)) {
            cdi::remove(old)?;
            remember(None);
        }
        let (Some(directory), Some(file)) = (directory, file) else { return Ok(()) };
        // What an earlier service of ours has said holds until more is known, and after us if the slices do.
        let holds = if self.stopping { self.carry_on } else { snapshot.state == State::Starting };
        if holds && known.as_ref() == Some(&file) {
            return Ok(());
        }
        match cdi::spec(snapshot).filter(|_| !self.stopping) {
            Some(spec) => {
                remember(Some(file));
                cdi::write(directory, &spec)
            }
            None => {
                cdi::remove(&file)?;
                remember(None);
                Ok(())
            }
        }
    }

    fn tell_service_manager(&mut self, settled: bool) {
        let (line, state) = {
            let snapshot = self.snapshot.borrow();
            (compose::status_line(&snapshot), snapshot.state)
        };
        self.service_manager.status(state, line);
        if settled && *self.on_the_bus.borrow() && !self.stopping {
            self.service_manager.ready();
        }
    }

    fn event(&mut self, text: String) {
        tracing::info!("{text}");
        self.keep_event(text);
    }

    fn keep_event(&mut self, text: String) {
        if self.events.len() >= EVENTS_KEPT {
            self.events.pop_front();
        }
        self.events.push_back(Event::now(text));
    }
}

/// What a control daemon of ours that no plan has a place for is known to be.
fn leftover(id: &str, running: &Running, plan: &Plan) -> plan::ControlDaemonPlan {
    let address = |uuid: &str| {
        let facts = plan.gpus.iter().find(|gpu| gpu.gpu.nvml.as_ref().is_ok_and(|facts| facts.uuid == uuid));
        facts.map_or(PciAddress { domain: 0, bus: 0, device: 0, function: 0 }, |gpu| gpu.gpu.pci.address)
    };
    let gpus = running.gpus.iter().map(|uuid| plan::ServedGpu {
        uuid: uuid.clone(),
        pci: address(uuid),
        memory_limit_mib: 0,
        slice_memory_mib: 0,
        slice_thread_percentage: 100,
        limits_enforced: false,
        // It takes no client of ours.
        places: u32::MAX,
    });
    plan::ControlDaemonPlan {
        id: id.to_owned(),
        pipe_directory: running.pipe_directory.clone(),
        log_directory: running.log_directory.clone(),
        gpus: gpus.collect(),
        thread_percentage: 100,
        multiuser: running.multiuser,
        multiuser_optional: true,
        prewarm: false,
    }
}

impl From<ReleaseError> for RequestError {
    fn from(error: ReleaseError) -> Self {
        let text = error.to_string();
        match error {
            ReleaseError::NoSuchClient(_) => Self::NoSuchClient(text),
            ReleaseError::NoId(_)
            | ReleaseError::SeveralContainers { .. }
            | ReleaseError::Unreadable { .. }
            | ReleaseError::Control(_)
            | ReleaseError::StillThere(_)
            | ReleaseError::NotKnown => Self::Failed(text),
        }
    }
}

/// One for root's requests and one for all other users', so that root never waits behind them.
#[derive(Debug)]
struct ByCaller<T> {
    root: T,
    users: T,
}

impl<T> ByCaller<T> {
    fn new(make: impl Fn() -> T) -> Self {
        Self { root: make(), users: make() }
    }

    fn of(&self, caller: Caller) -> &T {
        match caller {
            Caller::Root => &self.root,
            Caller::User => &self.users,
        }
    }
}

/// Who wants to know the clients, and whom to ask for them.
type Listing = (Vec<Serving>, oneshot::Sender<Result<Vec<ClientView>, RequestError>>);

/// Lists the clients for all who have asked since the last list was begun. Everybody may ask, as often as he likes, and
/// the supervisors must not have to stand in line behind that at the control daemons.
async fn list_clients(mut asked: mpsc::Receiver<Listing>, nvml: ComputeModes) {
    let mut waiting: Vec<Listing> = Vec::new();
    let kernel = Blocking::new(1);
    while asked.recv_many(&mut waiting, LISTINGS).await > 0 {
        let Some((serving, _)) = waiting.last() else { continue };
        let listed =
            clients::list(serving.clone(), nvml.clone(), &kernel).await.map_err(RequestError::Failed);
        for (_, reply) in waiting.drain(..) {
            let _ = reply.send(listed.clone());
        }
    }
}

async fn sleep_or_never(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// The most problems that a message names. `--check` names them all.
const NAMED_PROBLEMS: usize = 16;

fn join(problems: &[Problem]) -> String {
    let mut lines: Vec<String> = problems.iter().take(NAMED_PROBLEMS).map(ToString::to_string).collect();
    if let Some(more) = problems.len().checked_sub(NAMED_PROBLEMS).filter(|more| *more > 0) {
        lines.push(format!("and {more} more; yunion-mps-daemon --check names them all"));
    }
    lines.join("\n")
}
