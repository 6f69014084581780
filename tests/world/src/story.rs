//! Stories: tests with one control daemon on a simulated host. Nothing goes wrong on the host except the troubles that the
//! story names. The service's real code serves the control daemon, and the story records the service's questions, messages and
//! published states.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use mps_core::DaemonId;
use mps_core::bindings::Bindings;
use mps_core::mps::{Meaning, ServerStatus};
use mps_core::serve::{Ended, Failure, GpuReach, Known, Requested, Serving, Wanted};
use mps_core::tenants::Target;
use mps_core::terms::{GpuProcess, ProcessId, ServedGpu};
use mps_core::view::DaemonView;

use super::Dice;
use super::budgets::Program;
use super::clients::SimClient;
pub use super::edge::SimShell;
pub use super::ending::SimOwner;
use super::ending::{Answer, Reached, RequestState, SimEnding};
use super::mps::Mps;
pub use super::mps::Setting;
use super::reader::Waits;
use super::requests::carry_out;
pub use super::tenants::{SliceKnownBy, Tenant, slice_of};
use super::ways::SimAdmission;

pub const PID: u32 = 100;

pub const SERVER: u32 = 200;

/// An event of a story, which changes the simulated control daemon.
type Turn = Box<dyn FnOnce(&mut Mps) + Send>;

/// The troubles that a story prepares for a control daemon and its host, and the record of the service's acts.
// The structure has a bool for each trouble, and no enum, since a story may name several troubles.
#[allow(clippy::struct_excessive_bools)]
#[derive(Default)]
pub struct Stage {
    /// True in stories, and false in random histories. Only stories record the service's questions and acts.
    pub(crate) is_on: bool,
    later: Vec<(Duration, Turn)>,
    /// Events that happen just before the answer to the service's next question with this name.
    during: Vec<(&'static str, Turn)>,
    /// The error of every question of the service to the control daemon. `None` if the questions get true answers.
    pub answers: Option<Failure>,
    /// The errors of single questions of the service, by the name of the question.
    pub answers_to: BTreeMap<&'static str, Failure>,
    pub children_are_unknown: bool,
    /// True if the control daemon and its servers do not end when the service asks them to end.
    pub stays: bool,
    /// True if the control daemon survives the signals that the service sends to end it.
    pub survives: bool,
    pub log_is_unreadable: bool,
    /// For a GPU in this map NVML lists these clients instead of the true clients, or returns this error.
    pub nvml: BTreeMap<String, Result<BTreeSet<u32>, String>>,
    /// The PIDs of the story's processes that have ended.
    pub gone: BTreeSet<u32>,
    /// The GPUs about which NVML can't answer, each with the reason.
    pub lost: BTreeMap<String, String>,
    /// The GPUs for which NVML does not list the processes, each with the reason.
    pub unlisted: BTreeMap<String, String>,
    /// The GPUs for which NVML can't set the compute mode, each with the reason.
    pub refuses: BTreeMap<String, String>,
    /// The processes on each GPU that are neither servers nor clients of the control daemon.
    pub processes: BTreeMap<String, Vec<GpuProcess>>,
    /// True if the control daemon's servers can't open any GPU.
    pub servers_are_kept_out: bool,
    pub holders: String,
    pub misfit: Option<String>,
    pub is_elsewhere: bool,
    pub bad_directories: Vec<String>,
    pub bad_links: Option<String>,
    pub does_not_lead: Option<Failure>,
    /// The time that a question of the service takes, by the name of the question. Other questions take no time.
    pub takes: BTreeMap<&'static str, Duration>,
    /// The number of the control daemon's next answers to `terminate_client` that will get lost.
    pub lost_answers: usize,

    /// The questions and acts of the service, each with its time.
    pub calls: Vec<(Duration, String)>,
    pub steps: Vec<&'static str>,
    pub bypasses: BTreeMap<String, BTreeSet<ProcessId>>,
    pub answered: Vec<Result<(), String>>,
}

impl Stage {
    pub(crate) fn answer_to(&self, question: &str) -> Option<Failure> {
        self.answers.as_ref().or_else(|| self.answers_to.get(question)).cloned()
    }
}

pub(crate) fn spaced(servers: &[u32]) -> String {
    servers.iter().map(|server| format!(" {server}")).collect()
}

impl Mps {
    pub fn note(&mut self, call: fmt::Arguments<'_>) {
        if self.stage.is_on {
            self.stage.calls.push((self.now, call.to_string()));
        }
    }

    pub(crate) fn turn_during(&mut self, question: &str) {
        if let Some(place) = self.stage.during.iter().position(|(name, _)| *name == question) {
            let (_, turn) = self.stage.during.remove(place);
            turn(self);
        }
    }

    /// Adds an event that happens `millis` milliseconds after the beginning of the story.
    pub fn at(&mut self, millis: u64, turn: impl FnOnce(&mut Self) + Send + 'static) {
        self.stage.later.push((Duration::from_millis(millis), Box::new(turn)));
        self.stage.later.sort_by_key(|(time, _)| *time);
    }

    /// Adds an event that happens just before the answer to the service's next question with this name.
    pub fn during(&mut self, question: &'static str, turn: impl FnOnce(&mut Self) + Send + 'static) {
        self.stage.during.push((question, Box::new(turn)));
    }

    pub fn asks(&mut self, request: Requested) {
        self.reader.requests.push_back((self.now, request));
    }

    /// Adds a line to the control daemon's log. The line may be forged, since tenants can write to the log.
    pub fn says(&mut self, meaning: Meaning) {
        if let Meaning::TornDown { server, client, ordinal } = meaning {
            self.hits.insert((server, ordinal, client));
        }
        self.log.push(meaning);
    }

    /// The service skips the lines that the control daemon's log has now.
    pub fn log_is_skipped(&mut self) {
        self.reader.position = self.log.len();
    }

    pub fn server_comes(&mut self, server: u32) {
        self.add_server(server);
        self.server_is_ready(server);
    }

    pub fn server_ends(&mut self, server: u32, status: i32) {
        self.clients.retain(|_, client| client.server != server);
        self.process_ends(server);
        self.is_noted(server, status);
    }

    pub fn server_is_seen_to_end(&mut self, server: u32) {
        self.reader.watched.remove(&server);
        self.reader.ended.push_back(server);
    }

    pub fn nobody_watches(&mut self) {
        self.reader.watched.clear();
    }

    pub fn is_status(&mut self, server: u32, status: ServerStatus) {
        if let Some(server) = self.servers.get_mut(&server) {
            server.status = status;
        }
    }

    /// A server that the control daemon's log has never named handles a fatal GPU error.
    pub fn unseen_server_faults(&mut self, server: u32) {
        let said = self.log.len();
        self.add_server(server);
        self.log.truncate(said);
        self.is_status(server, ServerStatus::Fault);
    }

    /// Puts a process that does not belong to the control daemon on a GPU.
    pub fn process(&mut self, gpu: &str, process: GpuProcess) {
        self.stage.processes.entry(gpu.to_owned()).or_default().push(process);
    }

    /// A client connects to a GPU through a server. A client that already exists connects to one more GPU.
    pub fn client(&mut self, pid: u32, server: u32, gpu: &str) {
        let ordinal = self.gpus.iter().position(|one| one == gpu).unwrap();
        if let Some(client) = self.clients.get_mut(&pid) {
            client.connections += usize::from(!client.ordinals.insert(ordinal));
            return;
        }
        let tenant = Tenant::new(pid, &self.gpus, ordinal, &mut self.dice);
        let program = Program::new(pid, u64::from(pid));
        let ordinals = [ordinal].into();
        let client = SimClient { server, ordinals, connections: 1, is_hit: false, program, tenant };
        self.clients.insert(pid, client);
    }

    pub fn tenant(&mut self, pid: u32) -> &mut Tenant {
        &mut self.clients.get_mut(&pid).unwrap().tenant
    }

    /// The server handles a fatal GPU error. Meanwhile the control daemon lists none of the server's clients.
    pub fn server_faults(&mut self, server: u32) {
        self.is_status(server, ServerStatus::Fault);
        self.servers.entry(server).and_modify(|server| server.lists = false);
    }

    pub fn server_recovers(&mut self, server: u32) {
        self.is_status(server, ServerStatus::Active);
        self.servers.entry(server).and_modify(|server| server.lists = true);
    }

    /// Ends all clients except for the clients in `stay`. The control daemon's log does not report these ends.
    pub fn only_stay(&mut self, stay: &[u32]) {
        self.clients.retain(|pid, _| stay.contains(pid));
    }
}

pub struct Memory {
    known: Known,
    pub reach: GpuReach,
}

type Act = Pin<Box<dyn Future<Output = Result<Ended, Failure>>>>;

/// A story: one control daemon, the service's knowledge of the control daemon, and the order for it.
pub struct Story {
    shell: SimShell,
    pub memory: Arc<Mutex<Memory>>,
    pub wanted: Wanted,
    act: Option<Act>,
}

pub fn wanted_gpu(uuid: &str) -> ServedGpu {
    ServedGpu {
        uuid: uuid.to_owned(),
        id: Some(slice_of(uuid, 0).gpu),
        sizes: BTreeMap::new(),
        memory_limit_mib: 1024,
        limits_enforced: true,
        capacity: 2,
        clients_listed: true,
    }
}

impl SimShell {
    /// Locks the simulated control daemon. Panics if the story already has the lock, since waiting would never end.
    pub fn host(&self) -> MutexGuard<'_, Mps> {
        self.mps.try_lock().unwrap()
    }

    /// Polls an act of the service until this time after the beginning of the story. All events up to this time happen.
    pub fn act<T>(
        &self,
        mut act: Pin<&mut (impl Future<Output = T> + ?Sized)>,
        until: Duration,
    ) -> Option<T> {
        loop {
            if let Poll::Ready(done) = act.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                return Some(done);
            }
            let mut mps = self.lock();
            for (gpu, _) in std::mem::take(&mut mps.reader.mode_steps) {
                mps.with_our_mode.insert(gpu);
            }
            if let Waits::Turn(_) = mps.reader.waits {
                mps.reader.waits = Waits::Nothing;
                continue;
            }
            pass(&mut mps);
            if mps.is_awake() {
                continue;
            }
            let waits_until = mps.waits_until().unwrap_or(Duration::MAX);
            if !go_on(&mut mps, until.min(waits_until)) && waits_until > until {
                return None;
            }
        }
    }
}

/// Lets the next event of the story happen, unless the event is later than `until`. Returns true if an event has happened.
fn go_on(mps: &mut Mps, until: Duration) -> bool {
    let turn = mps.stage.later.first().map(|(time, _)| *time);
    let next = mps.due().into_iter().chain(turn).min().filter(|next| *next <= until);
    let now = next.unwrap_or(until).max(mps.now);
    mps.advance(now);
    pass(mps);
    next.is_some()
}

fn pass(mps: &mut Mps) {
    while mps.stage.later.first().is_some_and(|(time, _)| *time <= mps.now) {
        let (_, turn) = mps.stage.later.remove(0);
        turn(mps);
    }
}

impl Story {
    /// A story with a control daemon for these GPUs that has just started in multi-user mode. In multi-user mode the service
    /// starts a server before the first client comes.
    pub fn with_gpus(gpus: &[&str]) -> Self {
        Self::with(gpus, true)
    }

    /// A story with a control daemon without multi-user mode: a server starts only with the first client.
    pub fn with_one_user(gpus: &[&str]) -> Self {
        Self::with(gpus, false)
    }

    fn with(gpus: &[&str], multiuser: bool) -> Self {
        let wanted = Wanted {
            id: DaemonId::Shared,
            gpus: gpus.iter().map(|uuid| wanted_gpu(uuid)).collect(),
            thread_percentage: 50,
            prewarm: true,
            retiring: false,
            guard_period: None,
            held: [].into(),
            sets_modes: true,
            fault_grace: Duration::from_secs(30),
        };
        let gpus: Vec<String> = gpus.iter().map(|uuid| (*uuid).to_owned()).collect();
        let known = Known::new(gpus.clone(), multiuser, true, Duration::ZERO);
        let mut mps = Mps::new(PID, gpus.clone(), false, Duration::ZERO);
        mps.with_our_mode = gpus.iter().cloned().collect();
        (mps.is_calm, mps.listens_at, mps.before_children) = (true, Duration::ZERO, SERVER - 1);
        mps.stage.is_on = true;
        mps.reader.shown.view = DaemonView::new(gpus.iter().cloned());
        let admission = SimAdmission::new(&DaemonId::Shared, &gpus);
        let (mps, id, setting) = (Arc::new(Mutex::new(mps)), DaemonId::Shared, setting(&wanted, &gpus));
        let shell = SimShell { mps, id, gpus, setting, admission };
        let memory = Arc::new(Mutex::new(Memory { known, reach: GpuReach::default() }));
        Self { shell, memory, wanted, act: None }
    }

    pub fn host(&self) -> MutexGuard<'_, Mps> {
        self.shell.host()
    }

    pub fn shell(&self) -> SimShell {
        let setting = setting(&self.wanted, &self.shell.gpus);
        SimShell { setting, ..self.shell.clone() }
    }

    /// The service serves the control daemon until this time in milliseconds after the beginning of the story, unless the act
    /// ends earlier. The next call of this function continues the act.
    // The act keeps `memory` locked across `await`. Every other act of the story first drops this act, so no act waits for the
    // lock for ever.
    #[allow(clippy::await_holding_lock)]
    pub fn serve(&mut self, until: u64) -> Option<Result<Ended, Failure>> {
        let (shell, memory, wanted) = (self.shell(), Arc::clone(&self.memory), self.wanted.clone());
        let act = self.act.get_or_insert_with(|| {
            Box::pin(async move {
                let Memory { known, reach } = &mut *memory.lock().unwrap();
                Serving::new(shell, known, reach, wanted).serve().await
            })
        });
        let ended = self.shell.act(act.as_mut(), Duration::from_millis(until));
        if ended.is_some() {
            self.act = None;
        }
        ended
    }

    /// Interrupts the act that serves the control daemon, and changes the order.
    pub fn break_off(&mut self, change: impl FnOnce(&mut Wanted)) {
        self.act = None;
        let before = self.wanted.thread_percentage;
        change(&mut self.wanted);
        let gpus: BTreeSet<String> = self.wanted.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        let to_be_set = if self.wanted.thread_percentage == before { BTreeSet::new() } else { gpus.clone() };
        self.host().reader.shown.view.take_order(gpus, true, &to_be_set);
    }

    #[allow(clippy::await_holding_lock)]
    pub fn once<T>(&mut self, act: impl AsyncFnOnce(&mut Serving<'_, SimShell>) -> T) -> T {
        self.act = None;
        let Memory { known, reach } = &mut *self.memory.lock().unwrap();
        let mut serving = Serving::new(self.shell(), known, reach, self.wanted.clone());
        self.shell.act(pin!(act(&mut serving)), Duration::MAX).unwrap()
    }

    /// The service serves the control daemon until this time in milliseconds after the beginning of the story. The act must not
    /// end earlier.
    pub fn served(&mut self, until: u64) {
        let ended = self.serve(until);
        assert!(ended.is_none(), "{ended:?}");
    }

    /// A caller asks the service to end GPU work. Returns the service's answer.
    pub fn ends(&self, target: Target) -> Answer {
        let (mps, gpus, now) = (Arc::clone(&self.shell.mps), Some(self.shell.gpus.clone()), self.host().now);
        let state = RequestState::new(target.clone(), now, Dice::new(1), Bindings::default());
        let state = Arc::new(Mutex::new(state));
        let shell = SimEnding { state: Arc::clone(&state), daemons: vec![Reached { pid: PID, mps, gpus }] };
        let mut request = pin!(carry_out(target, shell));
        loop {
            if let Poll::Ready(answer) = request.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                return answer;
            }
            let (mut mps, mut state) = (self.host(), state.lock().unwrap());
            if let (false, Waits::Until(until)) = (state.is_awake(), state.waits) {
                go_on(&mut mps, until);
                (state.now, state.steps) = (mps.now, 0);
            }
        }
    }

    pub fn shown(&self) -> String {
        let host = self.host();
        let DaemonView { state, serving, reason, .. } = &host.reader.shown.view;
        let serves = if *serving { "serving" } else { "not serving" };
        format!("{state:?}, {serves}: {reason}").trim_end_matches(": ").to_owned()
    }

    /// Counts the service's questions and acts with a name that begins with `name`, since the last call of `forget`.
    pub fn calls(&self, name: &str) -> usize {
        self.times(name).len()
    }

    /// Returns the times in milliseconds of the service's questions and acts with a name that begins with `name`.
    pub fn times(&self, name: &str) -> Vec<u128> {
        let host = self.host();
        let calls = host.stage.calls.iter().filter(|(_, call)| call.starts_with(name));
        calls.map(|(at, _)| at.as_millis()).collect()
    }

    pub fn forget(&self) {
        let mut host = self.host();
        host.stage.calls.clear();
        host.stage.steps.clear();
        host.reader.words.clear();
    }

    pub fn has_told(&self, text: &str) -> bool {
        self.host().reader.words.iter().any(|told| told.contains(text))
    }

    pub fn has_done(&self, call: &str) -> bool {
        self.host().stage.calls.iter().any(|(_, done)| done == call)
    }
}

fn setting(wanted: &Wanted, gpus: &[String]) -> Setting {
    let mib = |ordinal: usize| {
        let gpu = gpus.get(ordinal).and_then(|gpu| wanted.gpus.iter().find(|wanted| wanted.uuid == *gpu));
        gpu.map_or(0, |gpu| gpu.memory_limit_mib)
    };
    Setting { percentage: wanted.thread_percentage, mib: [0, 1, 2].map(mib) }
}
