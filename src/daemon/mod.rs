//! The main loop, which handles signals, requests from the bus, the supervisors' changes, scans of the host, and the watchdog.
//! It makes the plan and publishes the state.

mod bindings;
mod budgets;
mod cdi_spec;
mod critical_errors;
mod drain;
mod findings;
mod fleet;
mod grant;
mod host_look;
mod kernel_limits;
mod logging;
pub(crate) mod program;
mod reload;
mod requests;
mod service_manager;
mod shutdown_report;
mod signals;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::signal::unix::Signal;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until};

use crate::compose::{self, Moment, Parts};
use crate::dbus::{Request, presence};
use crate::mps::control::FrontEnds;
use crate::mps::file_changes::FileChanges;
use crate::register::Clients;
use crate::supervisor::bypass::ToldBypasses;
use crate::supervisor::nvml_worker::NvmlWorker;
use crate::supervisor::runtime_directory::RuntimeDirectory;
use crate::supervisor::state_file::{SharedStateFile, StateFile};
use crate::supervisor::wake_ups::GpuWakeUps;
use crate::supervisor::{self, BusSignal, Tools};
use crate::tenants::budgets::{Budgets, LoopEvent};
use crate::tenants::kernel_limit_keeper::KernelLimitKeeper;
use cdi_spec::CdiSpec;
use common::config::{Settings, Sources};
use common::host::inventory::Inventory;
use common::host::systemd::{self, Stopping};
use common::plan::{self, Plan, PlanError};
use common::problem::LocatedProblem;
use common::published::events::{Event, Events};
use common::published::snapshot::Snapshot;
use findings::{bad_configuration, say_findings, say_what_is_new, why};
use fleet::Fleet;
use host_look::HostLook;
use kernel_limits::kernel_limits;
use logging::{Level, last_words};
use requests::Requests;
use service_manager::ServiceManager;

/// The pause between two scans of the host while there is no plan, usually because there is no driver.
const SCAN_WITHOUT_PLAN: Duration = Duration::from_secs(5);

/// The first and the longest pause between two scans of the host while a GPU can't be served. The pause doubles, since most
/// temporary problems end soon.
const FIRST_SCAN_FOR_MORE: Duration = Duration::from_secs(1);
const SCAN_FOR_MORE: Duration = Duration::from_secs(30);

/// The most D-Bus signals about faults, and the most D-Bus signals about overuse, that wait to be sent, for example while there
/// is no bus. Further signals are dropped, and only the log has their messages.
const FAULTS: usize = 64;

/// The most requests in the service's queue. A further caller waits until the queue has space.
const REQUESTS: usize = 16;

fn failed(reason: &str) -> ExitCode {
    last_words(reason);
    ExitCode::FAILURE
}

pub(crate) async fn run(sources: Sources, runtime_directory: PathBuf, level: Level) -> ExitCode {
    // The runtime directory is locked first. If another service has the lock, that service may serve clients, and this service
    // must not change anything.
    let directory = match RuntimeDirectory::take_soon(&runtime_directory).await {
        Ok(directory) => directory,
        Err(error) => return failed(&error.to_string()),
    };
    let loaded = match findings::load(&sources) {
        Ok(loaded) => loaded,
        Err(problems) => return bad_configuration(&problems),
    };
    logging::set(&level, loaded.settings.log_level);
    say_findings(&loaded);
    let state_file = SharedStateFile::new(StateFile::open(directory));
    let signals = match signals::listen() {
        Ok(signals) => signals,
        Err(error) => return failed(&format!("the service can't receive signals such as SIGTERM: {error}")),
    };
    let (requests, received) = mpsc::channel(REQUESTS);
    let (snapshot, seen) = watch::channel(Arc::new(compose::nothing_yet(&loaded.settings)));
    let changed = Arc::new(Notify::new());
    let on_the_bus = Arc::new(AtomicBool::new(false));
    let (signals_of_bus, signals_seen) = mpsc::channel(2 * FAULTS);
    let (joined, told) = (Arc::clone(&on_the_bus), Arc::clone(&changed));
    let bus = presence::stay_on_the_bus(seen, requests, signals_seen, joined, told);
    if let Err(error) = presence::on_a_thread_of_its_own(bus) {
        return failed(&format!("the thread for D-Bus can't be started: {error}"));
    }
    let (events, happened) = mpsc::channel(FAULTS);
    let nvml = NvmlWorker::new(state_file.clone());
    let tools = tools(nvml, state_file.clone(), Arc::clone(&changed), signals_of_bus.clone());
    let fleet = Fleet::new(tools.clone());
    let mut daemon = Daemon {
        look: HostLook::new(sources.sysroot.clone(), tools.nvml.clone(), events.clone()),
        sources,
        level,
        settings: loaded.settings,
        plan: Err("the service has not read the GPUs of this host yet".to_owned()),
        requests: Requests::new(&tools.nvml, tools.clients.clone()),
        budgets: Budgets::new(&tools, events.clone(), Arc::new(fleet.finds_clients())),
        limit_keeper: KernelLimitKeeper::new(tools.nvml.clone(), Arc::clone(&changed), events),
        signals: signals_of_bus,
        next_look_at_groups: None,
        fleet,
        cdi_spec: CdiSpec::new(state_file.clone()),
        state_file,
        changed,
        snapshot,
        on_the_bus,
        events: Events::default(),
        refused: String::new(),
        problem: String::new(),
        shutdown_report: String::new(),
        next_scan: None,
        scan_pause: FIRST_SCAN_FOR_MORE,
        ending: None,
        service_manager: ServiceManager::new(),
        reloads: 0,
        in_force: watch::Sender::new(0),
    };
    let exit = daemon.run(signals, received, happened).await;
    daemon.service_manager.end().await;
    exit
}

fn tools(
    nvml: NvmlWorker,
    state_file: SharedStateFile,
    changed: Arc<Notify>,
    signals: mpsc::Sender<BusSignal>,
) -> Tools {
    let front_ends = FrontEnds::new(supervisor::PROGRAM.into());
    let (wake_ups, changes, begun) = (GpuWakeUps::default(), FileChanges::default(), Instant::now());
    let (told_bypasses, clients) = (ToldBypasses::default(), Clients::new());
    Tools { front_ends, nvml, state_file, changed, signals, told_bypasses, wake_ups, clients, changes, begun }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// Stop: the service ends the control daemons and restores the compute modes.
    ForGood,
    /// Restart: the control daemons go on, and the next service takes them over.
    ForRestart,
    /// A signal ends the service, and systemd has asked neither for a stop nor for a restart. The control daemons go on. The
    /// exit status is a failure, so systemd starts the service again.
    Interrupted,
}

struct Daemon {
    sources: Sources,
    level: Level,
    settings: Settings,
    look: HostLook,
    plan: Result<Plan, String>,
    fleet: Fleet,
    requests: Requests,
    budgets: Budgets,
    limit_keeper: KernelLimitKeeper,
    signals: mpsc::Sender<BusSignal>,
    cdi_spec: CdiSpec,
    state_file: SharedStateFile,
    changed: Arc<Notify>,
    /// The time of the next search for bindings of control groups that have ended. None if no control group is bound.
    next_look_at_groups: Option<Instant>,
    snapshot: watch::Sender<Arc<Snapshot>>,
    on_the_bus: Arc<AtomicBool>,
    events: Events,
    /// The reason why the last new configuration was refused. Empty if it was accepted.
    refused: String,
    /// A problem with the configuration in force, found by the last scan of the host. Empty if there is none.
    problem: String,
    shutdown_report: String,
    next_scan: Option<Instant>,
    scan_pause: Duration,
    ending: Option<Ending>,
    service_manager: ServiceManager,
    reloads: u64,
    /// The number of the last reload that is complete: each control daemon follows its plan, or the reason is known why it does
    /// not. The caller of a reload waits for the number of that reload.
    in_force: watch::Sender<u64>,
}

impl Daemon {
    async fn run(
        &mut self,
        (mut stops, mut hangup): ([Signal; 3], Signal),
        mut requests: mpsc::Receiver<Request>,
        mut happened: mpsc::Receiver<LoopEvent>,
    ) -> ExitCode {
        self.end_bindings();
        if let Err(problems) = self.first_pass().await {
            return bad_configuration(&problems);
        }
        loop {
            let next_watchdog = self.service_manager.watchdog();
            self.settle();
            match self.ending {
                // This exit status makes the service manager start the service again.
                Some(Ending::Interrupted) if self.fleet.has_stopped() => return ExitCode::FAILURE,
                Some(_) if self.fleet.has_stopped() => return ExitCode::SUCCESS,
                _ => {}
            }
            let changed = Arc::clone(&self.changed);
            tokio::select! {
                () = signals::any(&mut stops) => self.stop().await,
                // The sender of SIGHUP gets no answer. The journal has a message about a reload that is refused.
                _ = hangup.recv() => drop(self.reload().await),
                Some(request) = requests.recv() => self.answer(request).await,
                Some(Ok(finished)) = self.requests.beside.join_next() => self.finished(finished),
                Some(_) = self.requests.look.join_next() => self.requests.begin_list(&self.fleet),
                Some(event) = happened.recv() => self.handle(event),
                // Other ready tasks run first, so that the changes of all of them are published together.
                () = changed.notified() => yield_now().await,
                () = sleep_or_never(self.next_look_at_groups) => self.end_bindings(),
                () = sleep_or_never(self.next_scan) => {
                    self.scan_pause = (self.scan_pause * 2).min(SCAN_FOR_MORE);
                    self.look_again().await;
                }
                () = self.look.answered_late(), if self.ending.is_none() => self.look_again().await,
                Some(()) = self.fleet.holder_ended(), if self.ending.is_none() => {
                    self.scan_pause = FIRST_SCAN_FOR_MORE;
                    self.look_again().await;
                }
                () = sleep_or_never(next_watchdog) => {}
            }
        }
    }

    /// Scans the host for the first time. If this scan shows that the configuration is wrong, the service ends. If a later scan
    /// shows this, the configuration in force stays.
    async fn first_pass(&mut self) -> Result<(), Vec<LocatedProblem>> {
        if !self.settings.enabled {
            tracing::info!("no GPU is served: {reason}", reason = self.settings.why_not_enabled());
            if self.fleet.has_leftovers() {
                // The scan opens the driver, which the service needs to restore compute modes.
                self.look.read().await;
                self.fleet.pursue_nothing(&self.settings);
            }
            self.plan = Ok(Plan::default());
            return Ok(());
        }
        let inventory = self.look_for_gpus().await;
        match plan::plan(&self.settings, &inventory, &[]) {
            Ok(plan) => self.put_in_force(plan),
            Err(PlanError::Problems(problems)) => return Err(problems),
            Err(error) => self.not_yet(why(error)),
        }
        Ok(())
    }

    fn not_yet(&mut self, reason: String) {
        if self.plan.as_ref().err() != Some(&reason) {
            tracing::warn!(
                "no GPU can be served yet: {reason}; checking again every {seconds} s",
                seconds = SCAN_WITHOUT_PLAN.as_secs()
            );
        }
        self.plan = Err(reason);
    }

    /// Scans the host until NVML lists all GPUs that are served, for some seconds at most.
    async fn look_for_gpus(&mut self) -> Inventory {
        let served = match &self.plan {
            Ok(plan) => {
                plan.control_daemons.iter().flat_map(|one| &one.gpus).map(|gpu| gpu.uuid.clone()).collect()
            }
            Err(_) => self.fleet.gpus_left(),
        };
        self.look.look_for(&served).await
    }

    async fn look_again(&mut self) {
        self.next_scan = None;
        if let Some(late) = self.look.unanswered() {
            match &mut self.plan {
                Ok(_) => self.problem = late.into(),
                Err(reason) => *reason = late.into(),
            }
            return;
        }
        if !self.settings.enabled {
            // The scan opens the driver, which is needed even with MPS disabled: the service restores the compute modes that an
            // earlier service has changed.
            return drop(self.look.read().await);
        }
        let inventory = self.look_for_gpus().await;
        let reason = match plan::plan(&self.settings, &inventory, self.planned_gpus()) {
            Ok(plan) => {
                if self.plan.as_ref() != Ok(&plan) {
                    self.put_in_force(plan);
                }
                self.problem.clear();
                return;
            }
            Err(error) => why(error),
        };
        if self.plan.is_err() {
            self.not_yet(reason);
        } else {
            self.problem = reason;
        }
    }

    fn planned_gpus(&self) -> &[plan::GpuPlan] {
        self.plan.as_ref().map(|plan| plan.gpus.as_slice()).unwrap_or_default()
    }

    fn put_in_force(&mut self, plan: Plan) {
        say_what_is_new(self.plan.as_ref().ok(), &plan);
        self.scan_pause = FIRST_SCAN_FOR_MORE;
        self.fleet.pursue(&plan, &self.settings);
        self.keep_limits(&plan);
        self.plan = Ok(plan);
        self.problem.clear();
    }

    async fn stop(&mut self) {
        if self.ending.is_some() {
            return;
        }
        let ending = match systemd::why_stopping().await {
            Stopping::Stop | Stopping::NotUnderSystemd => {
                tracing::info!(
                    "the service stops: it ends its control daemons and restores the compute modes of the GPUs"
                );
                Ending::ForGood
            }
            Stopping::Restart => {
                tracing::info!("the service restarts: its control daemons and their clients keep running");
                Ending::ForRestart
            }
            // If the reason for the stop is unknown, the control daemons go on. An administrator can stop a control daemon
            // later, but a GPU job that was ended is lost.
            Stopping::Unknown(reason) => {
                tracing::warn!(
                    "the service ends, but control daemons and their clients keep running, since systemd \
                     reports no stop of the unit ({reason})"
                );
                Ending::Interrupted
            }
        };
        self.ending = Some(ending);
        self.service_manager.stopping();
        if ending == Ending::ForGood {
            self.settle();
            let doomed = self.fleet.ended_by_stop();
            self.name_clients("the stop", &doomed).await;
        }
        match ending {
            Ending::ForGood => {
                // An administrator can reset a GPU only while the service is stopped, since the service has the GPUs open
                // through NVML. So after a stop no GPU counts as in need of a reset.
                self.forget_resets();
                self.lift_kernel_limits().await;
                self.fleet.stop(&self.settings);
            }
            Ending::ForRestart | Ending::Interrupted => self.fleet.leave(),
        }
    }

    fn settle(&mut self) {
        if self.ending.is_none() && !self.fleet.is_ending_one() {
            self.shutdown_report.clear();
        }
        self.fleet.clients().pursue(self.fleet.slices());
        let moment = self.fleet.at_this_moment();
        let snapshot = self.compose(&moment);
        self.keep_cdi_spec(&snapshot);
        self.plan_next_scan(&snapshot);
        // An equal Snapshot is not replaced, since the bus prepares its answers once for each Snapshot.
        self.snapshot.send_if_modified(|current| {
            let modified = **current != snapshot;
            if modified {
                *current = Arc::new(snapshot);
            }
            modified
        });
        self.tell_service_manager(moment.settled);
        let newest = |reloads: &mut u64| std::mem::replace(reloads, self.reloads) != self.reloads;
        if moment.settled && self.in_force.send_if_modified(newest) {
            // An administrator usually reloads the service after a change of the configuration or of the host. So all control
            // daemons get a health check now.
            self.fleet.check_all();
        }
    }

    fn plan_next_scan(&mut self, snapshot: &Snapshot) {
        let ended = self.ending.is_some() || !self.settings.enabled;
        let unserved = snapshot.gpus.iter().flatten().any(|gpu| !gpu.plan.obstacles.is_empty());
        let missing = self.plan.as_ref().is_ok_and(|plan| !plan.missing.is_empty());
        let trouble = unserved
            || missing
            || !self.look.has_driver()
            || !self.problem.is_empty()
            || !self.cdi_spec.problem.is_empty();
        let period = match &self.plan {
            _ if ended => None,
            // A late answer of NVML wakes the main loop. Until then, a scan after each `TIMEOUT` only repeats the message about
            // the delay.
            _ if self.look.unanswered().is_some() => Some(host_look::TIMEOUT),
            Err(_) => Some(SCAN_WITHOUT_PLAN),
            Ok(_) => trouble.then_some(self.scan_pause),
        };
        let regular = period.map(|period| Instant::now() + period);
        let newcomers = self.look.newcomers_until.filter(|_| !ended);
        let latest = [regular, newcomers].into_iter().flatten().min();
        // A planned scan is never postponed. Otherwise frequent events could postpone it for ever.
        self.next_scan = latest.map(|latest| self.next_scan.map_or(latest, |due| due.min(latest)));
    }

    fn compose(&self, moment: &Moment) -> Snapshot {
        let problems = [&self.refused, &self.problem, &self.cdi_spec.problem];
        let problem = problems.into_iter().find(|problem| !problem.is_empty());
        let (drained, bindings, to_reset) = {
            let state_file = self.state_file.lock();
            let (drained, bindings) = (state_file.drained().clone(), state_file.bindings().clone());
            (drained, bindings, state_file.to_reset().clone())
        };
        let kernel_limits = self.plan.as_ref().map(|plan| kernel_limits(plan, &bindings, &self.limit_keeper));
        let parts = Parts {
            settings: &self.settings,
            driver: &self.look.driver_version,
            plan: self.plan.as_ref().map_err(String::as_str),
            moment,
            drained: &drained,
            bindings: &bindings,
            to_reset: &to_reset,
            kernel_limits: &kernel_limits.unwrap_or_default(),
            uses: &self.budgets.uses(),
            events: &self.events,
            problem: problem.map_or("", String::as_str),
            stopping: self.ending.is_some(),
        };
        compose::compose(&parts, &self.snapshot.borrow())
    }

    /// Updates the CDI spec from the Snapshot. If a problem with the spec begins or ends, the main loop publishes another
    /// Snapshot at once.
    fn keep_cdi_spec(&mut self, snapshot: &Snapshot) {
        match self.cdi_spec.keep(snapshot, self.settings.cdi_directory.as_deref(), self.ending) {
            None => return,
            Some(Ok(good)) => self.event(good),
            Some(Err(problem)) => {
                tracing::warn!("{problem}");
                self.events.push(Event::now(problem));
            }
        }
        self.changed.notify_one();
    }

    fn tell_service_manager(&mut self, settled: bool) {
        let snapshot = Arc::clone(&self.snapshot.borrow());
        self.service_manager.status(snapshot.state, &compose::status_line(&snapshot), &self.shutdown_report);
        if settled && self.on_the_bus.load(Ordering::Relaxed) && self.ending.is_none() {
            self.service_manager.ready();
        }
    }

    fn event(&mut self, text: String) {
        tracing::info!("{text}");
        self.events.push(Event::now(text));
    }
}

async fn sleep_or_never(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
