//! A simulated host in memory, for random histories of the service. The host has GPUs with compute modes, control daemons with
//! clients, a state file, and a shell that carries out the acts of the real core step by step. A test can kill the service
//! between any two steps.

// All code of this crate is for tests, where a panic is a failed test.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::missing_panics_doc,
    missing_docs
)]

mod admin;
mod answers;
mod bindings;
mod budgets;
mod clients;
mod doors;
mod edge;
mod ending;
mod enforcing;
mod host;
mod kernel_limits;
mod memory;
mod mps;
mod nvml;
pub mod overuse;
mod reader;
mod register;
mod requests;
pub mod scripted;
mod serving;
mod shell;
mod starting;
pub mod story;
mod tenants;
mod troubles;
mod truths;
mod ways;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mps_core::serve::Failing;
use mps_core::{
    Act, ActOutcome, Core, CoreEvent, DaemonAct, DaemonId, Demand, Goal, ModeOutcome, Order, programs_wait,
};

use bindings::SimBindings;
use budgets::SimWatch;
use host::SimNvml;
use kernel_limits::{SimKernel, SimKernelLimits};
use mps::Mps;
use reader::Shown;
use requests::SimRequest;
use serving::{Reaches, RunningAct, Watched};
use ways::{SimAdmission, SimDrained, Ways};

const GPUS: [&str; 3] = ["0a:00.0", "0b:00.0", "0c:00.0"];

/// Maps a seed to a pseudo-random number by the method `SplitMix64`.
pub fn mixed(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Random choices that follow from one number. Each step of a history has a number of its own, so the other steps stay valid
/// when a test removes a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(draw: u64) -> Self {
        Self(draw)
    }

    pub(crate) fn below(&mut self, most: usize) -> usize {
        self.0 = mixed(self.0);
        usize::try_from(self.0 % most as u64).unwrap()
    }

    pub(crate) fn one_in(&mut self, most: usize) -> bool {
        self.below(most) == 0
    }

    fn pick<'l, T>(&mut self, list: &'l [T]) -> Option<&'l T> {
        if list.is_empty() { None } else { list.get(self.below(list.len())) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Default,
    Prohibited,
    Exclusive,
}

#[derive(Debug, Clone)]
struct GpuState {
    mode: Mode,
    /// The compute mode that an administrator has last set on the GPU.
    own: Mode,
    /// The compute mode that the service has last set on the GPU. `None` if the service has never set a compute mode there.
    ours: Option<Mode>,
}

#[derive(Clone)]
struct ControlDaemon {
    id: DaemonId,
    gpus: Vec<String>,
    mps: Arc<Mutex<Mps>>,
    sets_modes: bool,
    /// A new process waits for a byte from the service, and then becomes the control daemon. `is_paused` is true during this
    /// wait. If the service ends during the wait, the process ends, too.
    is_paused: bool,
}

#[derive(Debug, Clone)]
struct Written {
    pid: u32,
    gpus: Vec<String>,
}

#[derive(Debug, Clone, Default)]
struct StateFile {
    daemons: BTreeMap<DaemonId, Written>,
    modes: BTreeMap<String, Mode>,
}

/// An act about a control daemon that the core has decided and the service is carrying out.
#[derive(Debug, Clone)]
struct Task {
    order: Order<u32>,
    retiring: bool,
    held: BTreeSet<String>,
    act: DaemonAct,
    step: usize,
    is_interrupted: bool,
    /// True if the act began after the service was asked to end.
    is_for_the_end: bool,
}

struct Service {
    core: Core<u32>,
    /// The value of `SimNvml::loads` at the time when the service opened the driver. `None` while the service has no driver.
    driver: Option<u32>,
    /// True once the service has a plan: NVML has listed the GPUs, or MPS is disabled.
    has_plan: bool,
    next_look: Option<Duration>,
    tasks: BTreeMap<DaemonId, Task>,
    acts: BTreeMap<DaemonId, RunningAct>,
    starting: BTreeMap<DaemonId, Arc<Mutex<Mps>>>,
    watched: BTreeMap<DaemonId, Watched>,
    reaches: Reaches,
    /// The published views of the control daemons that do not run.
    shown: BTreeMap<DaemonId, Shown>,
    /// The failures of control daemons that the service has published only in part. It publishes the rest of a failure when
    /// the pause before the next attempt begins.
    failing: BTreeMap<DaemonId, Failing>,
    admissions: BTreeMap<DaemonId, SimAdmission>,
    budgets: BTreeMap<String, SimWatch>,
    kernel_limits: SimKernelLimits,
    /// The compute modes that are being changed, by GPU. The bool is true if the service sets its own mode, and false if it
    /// restores the former mode. The number counts the finished steps.
    modes: BTreeMap<String, (bool, usize)>,
    requests: Vec<SimRequest>,
    ending: Option<Ending>,
    /// The control daemons that had clients when MPS was disabled, and that run on for these clients.
    spared: BTreeSet<DaemonId>,
    /// The last orders of these control daemons say that the service sets no compute modes.
    without_modes: BTreeSet<DaemonId>,
    /// The control daemons that the service could not end after the service was asked to stop.
    not_ended: BTreeSet<DaemonId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    ForGood,
    ForRestart,
}

/// The kind of event that is most frequent in a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mood {
    Everything,
    Faults,
    Orders,
    Tenants,
}

pub struct World {
    mood: Mood,
    now: Duration,
    gpus: BTreeMap<String, GpuState>,
    nvml: SimNvml,
    /// The running control daemons of the service, by PID.
    daemons: BTreeMap<u32, ControlDaemon>,
    next_pid: u32,
    state_file: StateFile,
    /// The drained slices. The state file records them, so they survive the end of the service.
    drained: Arc<Mutex<SimDrained>>,
    /// The slices with links that the service could not remove when an administrator drained the slices. The service has named
    /// these slices in its answer, so the checks allow their links.
    stuck: BTreeSet<String>,
    ways: Ways,
    /// A user has removed or replaced the links of these slices to the control daemon.
    meddled: BTreeSet<String>,
    /// The control groups that are bound to slices. The state file records the bindings, so they survive the end of the
    /// service.
    bindings: SimBindings,
    kernel: SimKernel,
    service: Option<Service>,
    /// The orders that follow from the present configuration.
    demand: Demand<u32>,
    version: u32,
    /// True if the world causes no troubles of its own: at the end of a history, and in scripts (`scripted.rs`).
    is_calm: bool,
    /// True if the driver's control daemons refuse to serve several users at once.
    refuses_multiuser: bool,
    is_disk_full: bool,
    /// The number of acts about each control daemon since time last passed or an event from outside happened.
    in_a_row: BTreeMap<DaemonId, usize>,
    /// The GPUs whose compute mode the service could not restore, or an administrator has changed. The checks of compute modes
    /// skip these GPUs.
    strange: BTreeSet<String>,
    acts: usize,
    /// The text of the history. `None` if the test does not want the text.
    story: Option<String>,
}

impl World {
    pub fn new(mood: Mood, tells: bool) -> Self {
        let mut world = Self::without_service(mood, tells);
        world.demand = world.any_demand(&mut Dice::new(1));
        world.start_service();
        world
    }

    /// Makes a host on which no service has run yet. `tells` is true if the test wants the text of the history.
    fn without_service(mood: Mood, tells: bool) -> Self {
        Self {
            mood,
            now: Duration::from_secs(1),
            gpus: GPUS
                .iter()
                .map(|gpu| {
                    ((*gpu).to_owned(), GpuState { mode: Mode::Default, own: Mode::Default, ours: None })
                })
                .collect(),
            nvml: SimNvml::default(),
            daemons: BTreeMap::new(),
            next_pid: 100,
            state_file: StateFile::default(),
            drained: Arc::default(),
            stuck: BTreeSet::new(),
            ways: Arc::default(),
            meddled: BTreeSet::new(),
            bindings: SimBindings::default(),
            kernel: SimKernel::default(),
            service: None,
            demand: admin::nothing(),
            version: 0,
            is_calm: false,
            refuses_multiuser: false,
            is_disk_full: false,
            in_a_row: BTreeMap::new(),
            strange: BTreeSet::new(),
            acts: 0,
            story: tells.then(String::new),
        }
    }

    /// The facts on which the service's next decisions depend, as text.
    pub fn knowledge(&self) -> String {
        let Some(Service { core, watched, failing, .. }) = &self.service else {
            return "no service".to_owned();
        };
        let views = self.service.as_ref().map(|service| self.views(service));
        format!("{core:#?}\nviews: {views:#?}\nfailures: {failing:#?}\ncontrol daemons: {watched:#?}")
    }

    pub fn story(&self) -> &str {
        self.story.as_deref().unwrap_or_default()
    }

    fn add_to_story(&mut self, text: impl FnOnce() -> String) {
        let now = self.now.as_secs_f64();
        if let Some(story) = &mut self.story {
            writeln!(story, "{now:9.1} s  {}", text()).unwrap();
        }
    }

    /// Makes one step of a history. The number `draw` decides which step the world makes.
    pub fn step(&mut self, draw: u64) {
        let mut dice = Dice::new(draw);
        let kind = dice.below(61);
        let is_of_orders = (27..37).contains(&kind) || (54..57).contains(&kind);
        let kind = match self.mood {
            Mood::Faults if is_of_orders && !dice.one_in(8) => *dice.pick(&[19, 20, 20, 42, 38, 38]).unwrap(),
            Mood::Orders if (42..50).contains(&kind) => 19,
            Mood::Tenants if kind > 19 && !dice.one_in(3) => *dice.pick(&[20, 38, 42, 61, 61, 62]).unwrap(),
            _ => kind,
        };
        if kind > 19 {
            self.in_a_row.clear();
        }
        match kind {
            0..19 => (0..=dice.below(24)).for_each(|_| self.carry_on(&mut dice)),
            19 => (0..60).for_each(|_| self.carry_on(&mut dice)),
            42..50 => self.trouble(&mut dice),
            50..54 => self.request(&mut dice),
            54..57 => self.drain(&mut dice),
            57 => self.tenant_comes_and_goes(&mut dice),
            58 if dice.one_in(4) => self.kernel_limits_change(&mut dice),
            58 => self.bindings_change(&mut dice),
            59..61 => self.program_changes(&mut dice),
            61 => self.ask_to_terminate(&mut dice),
            62 => self.tenant_acts(&mut dice),
            40 => self.disk_is_full(true),
            41 => self.disk_is_full(false),
            20..23 => self.client_comes(&mut dice),
            23 => self.program_asks(&mut dice),
            24..27 => self.client_leaves(&mut dice),
            27..30 => self.reload(&mut dice),
            30 => self.daemon_dies(&mut dice),
            31 if dice.one_in(2) => self.host_changes(&mut dice),
            31 => self.mode_is_changed(&mut dice),
            32 => {
                self.kill_service();
                if dice.one_in(3) {
                    self.driver_is_replaced();
                }
            }
            33 => self.end_service(&mut dice),
            34..37 => self.start_service(),
            _ => self.time_passes(&mut dice),
        }
    }

    fn time_passes(&mut self, dice: &mut Dice) {
        let wait = [0, 1, 50, 1000, 20_000, 100_000].map(Duration::from_millis);
        let now = match self.next_moment() {
            Some(next) if !dice.one_in(3) => next.max(self.now),
            _ => self.now + *dice.pick(&wait).unwrap(),
        };
        self.advance(now);
        if self.service.as_ref().and_then(|service| service.core.due()).is_some_and(|due| due <= now) {
            self.on(CoreEvent::Due);
        }
        self.look_if_due();
    }

    fn on(&mut self, event: CoreEvent<u32>) {
        let now = self.now;
        let is_answer = matches!(event, CoreEvent::Done { .. } | CoreEvent::ModeDone { .. } | CoreEvent::Due);
        let Some(service) = &mut self.service else { return };
        let acts = service.core.on(event, now);
        let due = service.core.due();
        assert!(due.is_none_or(|due| due > now), "nothing-spins: at {now:?} the core is due at {due:?}");
        self.acts += acts.len();
        if !is_answer {
            self.follow();
        }
        for act in acts {
            self.begin(act);
        }
        let Some(service) = &self.service else { return };
        if service.ending.is_some() && service.core.is_at_rest() {
            assert!(
                service.tasks.is_empty() && service.modes.is_empty(),
                "it is at rest, and acts are under way"
            );
            self.add_to_story(|| "the service has ended".to_owned());
            self.limits_are_left();
            if let Some(service) = self.service.take().filter(|one| one.ending == Some(Ending::ForGood)) {
                self.check_stopped(&service.not_ended);
            }
        }
    }

    fn begin(&mut self, act: Act<u32>) {
        self.add_to_story(|| format!("  -> {}", describe(&act)));
        self.check_act(&act);
        if let Act::Daemon { id, order, goal, .. } = &act {
            self.admission(id, &order.gpus, *goal == Goal::Retire);
        }
        let Some(service) = &mut self.service else { return };
        match act {
            Act::Daemon { id, act: DaemonAct::Rest(pause), .. } => {
                if let Some(admission) = service.admissions.get(&id).filter(|_| !programs_wait(pause)) {
                    admission.let_go();
                }
                if let Some(failing) = service.failing.remove(&id) {
                    self.change_view(&id, |view| failing.rest(view));
                }
            }
            Act::Daemon { id, order, goal, held, act } => {
                let retiring = goal == Goal::Retire;
                if let Some(run) = self.state_file.daemons.get(&id)
                    && let Some(one) = self.daemons.get_mut(&run.pid)
                    && act == DaemonAct::Serve
                {
                    one.sets_modes = order.sets_modes;
                }
                let task = Task {
                    order,
                    retiring,
                    held: held.into_keys().collect(),
                    act,
                    step: 0,
                    is_interrupted: false,
                    is_for_the_end: service.ending.is_some(),
                };
                let other = service.tasks.insert(id, task);
                assert!(other.is_none(), "two acts at a time: {other:?}");
            }
            Act::Interrupt { id } => {
                let task = service.tasks.get_mut(&id).expect("nothing is there to be broken off");
                let breaks_off =
                    matches!(task.act, DaemonAct::TakeOver | DaemonAct::Start | DaemonAct::Serve);
                assert!(breaks_off && !task.is_interrupted, "{:?} is broken off", task.act);
                task.is_interrupted = true;
            }
            Act::Release { id } => {
                assert!(!service.tasks.contains_key(&id), "{id} is released while something is under way");
                service.watched.remove(&id);
                service.reaches.remove(&id);
                service.shown.remove(&id);
                service.failing.remove(&id);
                service.admissions.remove(&id);
            }
            Act::TakeMode(gpu) => _ = service.modes.insert(gpu, (true, 0)),
            Act::PutModeBack(gpu) => _ = service.modes.insert(gpu, (false, 0)),
        }
    }

    fn finish(&mut self, id: &DaemonId, outcome: ActOutcome) {
        self.add_to_story(|| format!("  <- {id}: {outcome:?}"));
        // The ended act may have asked for changes of compute modes that the world has not carried out yet. The world carries
        // them out before the next act changes the compute modes of the same GPUs.
        self.change_modes(id);
        let written = self.state_file.daemons.get(id).cloned();
        self.change_view(id, |_| {});
        let Some(service) = &mut self.service else { return };
        service.acts.remove(id);
        service.starting.remove(id);
        self.check_nothing_grows(id);
        let Some(service) = &mut self.service else { return };
        let task = service.tasks.remove(id).expect("no act is under way");
        if task.act == DaemonAct::Start
            && let Some(pid) = written.as_ref().map(|written| written.pid)
            && self.daemons.get(&pid).is_some_and(|one| one.is_paused)
        {
            self.daemons.remove(&pid);
        }
        if task.is_for_the_end && matches!(outcome, ActOutcome::Lives | ActOutcome::Failed(_)) {
            service.not_ended.insert(id.clone());
        }
        let watched = service.watched.contains_key(id);
        let written = written.map(|written| written.gpus);
        self.on(CoreEvent::Done { id: id.clone(), written, watched, outcome });
    }

    fn mode_done(&mut self, gpu: &str, outcome: ModeOutcome) {
        self.add_to_story(|| format!("  <- compute mode of {gpu}: {outcome:?}"));
        if let Some(service) = &mut self.service {
            service.modes.remove(gpu);
        }
        self.on(CoreEvent::ModeDone { gpu: gpu.to_owned(), outcome });
    }

    /// Returns the running control daemon with this id, and its PID. `None` if the state file does not record the control
    /// daemon, or its process has ended.
    fn living(&self, id: &DaemonId) -> Option<(u32, &ControlDaemon)> {
        let pid = self.state_file.daemons.get(id)?.pid;
        Some((pid, self.daemons.get(&pid)?))
    }
}

fn describe(act: &Act<u32>) -> String {
    match act {
        Act::Daemon { id, order, goal, held, act } => {
            let held = if held.is_empty() { String::new() } else { format!(" without {held:?}") };
            let retiring = if *goal == Goal::Retire { ", retiring" } else { "" };
            format!("{id}: {act:?} {:?}{held} (order {}{retiring})", order.gpus, order.payload)
        }
        other => format!("{other:?}"),
    }
}
