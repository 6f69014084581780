//! One simulated MPS control daemon with its servers, their clients, and its log. The simulation follows recordings of real
//! control daemons on hardware.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mps_core::Cause;
use mps_core::mps::{Meaning, ServerStatus};
use mps_core::terms::ProcessId;

use super::Dice;
use super::clients::SimClient;
use super::reader::{PATIENCE, Reader};
use super::starting::Spawning;
use super::story::Stage;
use super::ways::Ways;

const SERVER_COMES: Duration = Duration::from_millis(150);

/// The most clients that one GPU of the world can have at a time.
pub(crate) const CAPACITY: usize = 3;

/// A GPU older than Volta: MPS enforces no memory limits on it, and NVML lists none of its clients.
pub(crate) const OLD_GPU: &str = "0c:00.0";

/// The limits of a server: the thread percentage, and the memory limit in MiB of each GPU, by the position of the GPU in the
/// control daemon's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    pub percentage: u8,
    pub mib: [u64; 3],
}

/// The limits of a control daemon to which the service has given no limits yet.
pub(crate) const NO_LIMITS: Setting = Setting { percentage: 100, mib: [0; 3] };

// The structure has a bool for each fact, and no enum, since several of the facts can be true at once.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug)]
pub struct SimServer {
    pub status: ServerStatus,
    pub setting: Setting,
    /// True once the server's process has ended or is about to end.
    pub(crate) is_ending: bool,
    pub(crate) has_ended: bool,
    /// True if the control daemon lists the server's clients. After a fatal GPU error the control daemon may list none of them.
    pub(crate) lists: bool,
    /// True while SIGSTOP has stopped the server. A stopped server takes no client.
    pub(crate) is_stopped: bool,
    /// The index of the log line that reports the server's fatal GPU error. `None` if no line reports a fatal GPU error of the
    /// server.
    pub(crate) fault_line: Option<usize>,
}

/// A client that a fatal GPU error has hit: the PID of its server, the ordinal of the GPU, and the PID of the client.
pub(crate) type Hit = (u32, usize, u32);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Later {
    Comes(u32),
    /// The control daemon admits a client that has connected. The client uses the GPUs with these ordinals.
    IsAdmitted(BTreeSet<usize>),
    /// The process of a client ends after the client has lost its work.
    Leaves(ProcessId),
    StartFails(u32),
    Says(Meaning),
    IsWell(u32),
    Ends(u32),
    /// The control daemon notices that the server with this PID has ended. The second value is the exit status.
    IsNoted(u32, i32),
}

/// A client after the service has ended its work, with the facts that show if the service was allowed to end the work.
#[derive(Debug)]
pub(crate) struct Hurt {
    pub(crate) is_hit: bool,
    pub(crate) cause: Cause,
    /// True if `apply --force` was the last request of an administrator that the service has taken.
    pub(crate) is_forced: bool,
    /// True if the service decided to end the work only after the administrator's request had timed out without an answer.
    pub(crate) is_given_up: bool,
}

// The structure has a bool for each trouble, and no enum, since a control daemon may have all troubles at once.
#[allow(clippy::struct_excessive_bools)]
pub struct Mps {
    pub(crate) pid: u32,
    /// The control daemon's child processes get the PIDs that follow this PID.
    pub(crate) before_children: u32,
    pub(crate) gpus: Vec<String>,
    pub now: Duration,
    pub(crate) dice: Dice,
    pub(crate) is_calm: bool,
    pub(crate) is_alive: bool,
    pub(crate) listens_at: Duration,
    pub(crate) hangs_until: Duration,
    pub(crate) is_stopped: bool,
    pub has_no_directory: bool,
    pub taken_by: Option<u32>,
    pub log_is_lost: bool,
    /// True if lines of the log were lost or the service has skipped lines. The service then can't know all clients from the
    /// log.
    pub(crate) lines_are_missing: bool,
    /// The control daemon delays all log lines until this time, and then writes them in their order.
    lines_wait_until: Duration,
    pub starts_fail: bool,
    pub server_comes_in: Duration,
    /// The GPUs of the host about which the service can't ask NVML.
    pub(crate) out_of_reach: BTreeSet<String>,
    /// The GPUs of the host in the compute mode that this control daemon needs.
    pub with_our_mode: BTreeSet<String>,
    /// True if the driver does not report the status of servers.
    pub is_old: bool,
    /// True if the control daemon ends at its start when the service asks it to serve several users at once.
    pub refuses_multiuser: bool,
    pub(crate) serves_one_user: bool,
    /// True if the service has asked the control daemon to end and the control daemon still has a client. The client works on
    /// to its end, but the control daemon answers no program any more.
    pub(crate) quits_when_idle: bool,
    /// True if the service wanted to make new programs wait, but could not change a slice's link to the control daemon.
    pub(crate) door_is_stuck: bool,
    /// The links in the directories of slices. `None` if every client finds the control daemon without a link.
    pub(crate) ways: Option<Ways>,
    pub(crate) disk_is_full: bool,
    pub defaults: Setting,
    pub servers: BTreeMap<u32, SimServer>,
    pub(crate) clients: BTreeMap<u32, SimClient>,
    pub(crate) log: Vec<Meaning>,
    /// The number of log lines that the service has read, according to the state file.
    pub(crate) read_until: usize,
    pub(crate) hits: BTreeSet<Hit>,
    pub(crate) hit_processes: BTreeMap<u32, ProcessId>,
    /// The hits by fatal GPU errors that are over. A service has reported these hits, and no later service may report them
    /// again.
    pub(crate) over: BTreeSet<Hit>,
    later: Vec<(Duration, Later)>,
    pub(crate) came: u32,
    /// The PID of a client that has ended. The next client may get this PID.
    pub(crate) free_pid: Option<u32>,
    pub(crate) faults: usize,
    pub(crate) hurt: Vec<Hurt>,
    /// The limits that another program has changed since the service last checked the limits. Each item is the PID of a server,
    /// or `None` for the limits of servers that start later.
    pub(crate) foreign: BTreeSet<Option<u32>>,
    pub reader: Reader,
    /// The next step of this control daemon's start that needs the world, such as a record in the state file. The code of the
    /// start only asks for the step, since it has no access to the world. The world carries out the step.
    pub(crate) spawning: Option<Spawning>,
    pub(crate) can_not_spawn: bool,
    /// The troubles and events that a story prepares for this control daemon, and the record of the service's acts.
    pub stage: Stage,
}

impl Mps {
    pub(crate) fn new(pid: u32, gpus: Vec<String>, is_old: bool, now: Duration) -> Self {
        Self {
            pid,
            before_children: pid * 1000,
            gpus,
            now,
            dice: Dice::new(u64::from(pid)),
            is_calm: false,
            is_alive: true,
            listens_at: Duration::MAX,
            hangs_until: Duration::ZERO,
            is_stopped: false,
            has_no_directory: false,
            taken_by: None,
            log_is_lost: false,
            lines_are_missing: false,
            lines_wait_until: Duration::ZERO,
            starts_fail: false,
            server_comes_in: SERVER_COMES,
            out_of_reach: BTreeSet::new(),
            with_our_mode: BTreeSet::new(),
            is_old,
            refuses_multiuser: false,
            serves_one_user: false,
            quits_when_idle: false,
            door_is_stuck: false,
            ways: None,
            disk_is_full: false,
            defaults: NO_LIMITS,
            servers: BTreeMap::new(),
            clients: BTreeMap::new(),
            log: Vec::new(),
            read_until: 0,
            hits: BTreeSet::new(),
            hit_processes: BTreeMap::new(),
            over: BTreeSet::new(),
            later: Vec::new(),
            came: 0,
            free_pid: None,
            faults: 0,
            hurt: Vec::new(),
            foreign: BTreeSet::new(),
            reader: Reader::default(),
            spawning: None,
            can_not_spawn: false,
            stage: Stage::default(),
        }
    }

    /// A new process with this PID replaces the control daemon's process, which has ended during its start.
    pub(crate) fn is_another(&mut self, pid: u32, now: Duration) {
        let next = Self::new(pid, Vec::new(), self.is_old, now);
        let (is_calm, refuses_multiuser) = (self.is_calm, self.refuses_multiuser);
        let ways = self.ways.take();
        *self = Self { is_calm, refuses_multiuser, ways, serves_one_user: true, ..next };
    }

    pub(crate) fn goes_wrong(&mut self, most: usize) -> bool {
        !self.is_calm && self.dice.one_in(most)
    }

    pub(crate) fn is_hung(&self) -> bool {
        self.is_stopped || self.hangs_until > self.now
    }

    pub(crate) fn answers(&self) -> bool {
        !self.is_hung() && !self.quits_when_idle
    }

    /// Returns the PID of the process that listens in the control daemon's directory.
    pub(crate) fn listener(&self) -> Option<u32> {
        if self.taken_by.is_some() {
            return self.taken_by;
        }
        (self.is_alive && self.now >= self.listens_at && !self.has_no_directory).then_some(self.pid)
    }

    pub(crate) fn due(&self) -> Option<Duration> {
        self.later.iter().map(|(at, _)| *at).min()
    }

    /// Programs that have connected end before the control daemon admits them.
    pub(crate) fn newcomers_end(&mut self) {
        self.later.retain(|(_, what)| !matches!(what, Later::IsAdmitted(_)));
    }

    pub(crate) fn advance(&mut self, now: Duration) {
        self.look_at_clients(false);
        while let Some(due) = self.due().filter(|due| *due <= now) {
            self.now = self.now.max(due);
            let next = self.later.iter().position(|(at, _)| *at == due).unwrap_or_default();
            let (_, what) = self.later.remove(next);
            if self.is_alive {
                self.happens(what);
            }
        }
        self.now = now;
    }

    pub(crate) fn after(&mut self, pause: Duration, what: Later) {
        self.later.push((self.now.saturating_add(pause), what));
    }

    fn happens(&mut self, what: Later) {
        match what {
            Later::Comes(pid) => self.server_is_ready(pid),
            Later::IsAdmitted(ordinals) => _ = self.client_is_admitted(ordinals, None),
            Later::Leaves(process) => {
                if self.clients.get(&process.pid).is_some_and(|client| client.program.process == process) {
                    self.client_leaves(process.pid);
                }
            }
            Later::StartFails(pid) => {
                self.clients.retain(|_, client| client.server != pid);
                self.process_ends(pid);
                self.is_noted(pid, 1);
            }
            Later::Says(meaning) => self.say(meaning),
            Later::IsWell(pid) => {
                let still_hit = self.clients.values().any(|client| client.server == pid && client.is_hit);
                if let Some(server) = self.servers.get_mut(&pid).filter(|one| !one.is_ending && !still_hit) {
                    server.status = ServerStatus::Active;
                    server.lists = true;
                }
            }
            Later::Ends(pid) => {
                self.process_ends(pid);
                self.is_noted(pid, 0);
            }
            Later::IsNoted(pid, status) => self.is_noted(pid, status),
        }
    }

    pub(crate) fn say(&mut self, meaning: Meaning) {
        if self.now < self.lines_wait_until {
            self.later.push((self.lines_wait_until, Later::Says(meaning)));
        } else if self.log_is_lost {
            self.lines_are_missing = true;
        } else {
            self.log.push(meaning);
        }
    }

    pub(crate) fn is_enforced(&self, ordinal: usize) -> bool {
        self.gpus.get(ordinal).is_some_and(|gpu| gpu != OLD_GPU)
    }

    pub(crate) fn say_memory(&mut self, server: u32, setting: Setting) {
        if self.goes_wrong(8) {
            self.lines_wait_until = self.now + Duration::from_millis(500);
        }
        for (ordinal, mib) in setting.mib.into_iter().enumerate() {
            if self.is_enforced(ordinal) {
                self.say(Meaning::MemoryLimit { server, ordinal, bytes: mib << 20 });
            }
        }
    }

    pub(crate) fn next_pid(&mut self) -> u32 {
        self.came += 1;
        self.before_children + self.came
    }

    pub(crate) fn start_server(&mut self) -> u32 {
        if let Some(server) = self.servers.keys().next_back() {
            return *server;
        }
        let pid = self.next_pid();
        self.add_server(pid);
        if self.starts_fail || self.goes_wrong(24) {
            self.after(Duration::from_millis(50), Later::StartFails(pid));
            if !self.starts_fail && pid.is_multiple_of(2) {
                // Some servers that fail at their start are active for a moment before they end. The log then lacks the
                // limits of the server.
                self.after(Duration::from_millis(25), Later::IsWell(pid));
            }
        } else {
            let pause = if self.goes_wrong(10) { SERVER_COMES * 20 } else { self.server_comes_in };
            self.after(pause, Later::Comes(pid));
        }
        pid
    }

    pub(crate) fn add_server(&mut self, pid: u32) {
        let (status, setting) = (ServerStatus::Initializing, self.defaults);
        self.servers.insert(
            pid,
            SimServer {
                status,
                setting,
                is_ending: false,
                has_ended: false,
                lists: true,
                is_stopped: false,
                fault_line: None,
            },
        );
        if self.foreign.contains(&None) {
            self.foreign.insert(Some(pid));
        }
        self.say(Meaning::ServerStarting { server: pid, uid: 0 });
    }

    pub(crate) fn server_is_ready(&mut self, pid: u32) {
        let Some(server) = self.servers.get_mut(&pid).filter(|one| !one.is_ending) else { return };
        server.status = ServerStatus::Active;
        let setting = server.setting;
        self.say(Meaning::ServerReady(pid));
        self.say(Meaning::ThreadPercentage { server: pid, tenths: u32::from(setting.percentage) * 10 });
        self.say_memory(pid, setting);
    }

    pub(crate) fn process_ends(&mut self, pid: u32) {
        if let Some(server) = self.servers.get_mut(&pid) {
            (server.is_ending, server.has_ended) = (true, true);
        }
        if self.reader.watched.remove(&pid) {
            self.reader.ended.push_back(pid);
        }
    }

    pub(crate) fn is_noted(&mut self, pid: u32, status: i32) {
        self.servers.remove(&pid);
        self.say(Meaning::ServerExited { server: pid, status });
        self.ends_if_idle();
    }

    /// The server with this PID ends, together with its clients. `is_killed` is false if the server ends regularly.
    pub(crate) fn end_server(&mut self, pid: u32, is_killed: bool, cause: Option<Cause>) {
        let Some(server) = self.servers.get_mut(&pid).filter(|one| !one.is_ending) else { return };
        server.is_ending = true;
        if is_killed {
            server.status = ServerStatus::Fault;
        }
        self.lose_clients(cause, |client| client.server == pid);
        let pause = Duration::from_millis(70 << self.dice.below(4));
        if is_killed {
            self.process_ends(pid);
            self.after(pause, Later::IsNoted(pid, 9));
        } else {
            self.after(pause, Later::Ends(pid));
        }
    }

    fn lose_clients(&mut self, cause: Option<Cause>, is_one: impl Fn(&SimClient) -> bool) {
        let begun = self.reader.end_begun;
        let is_given_up = self.reader.asked_at.is_some_and(|asked| begun >= asked + PATIENCE);
        let (hurt, is_forced) = (&mut self.hurt, self.reader.is_forced);
        self.clients.retain(|_, client| {
            let is_lost = is_one(client);
            if let Some(cause) = cause.filter(|_| is_lost) {
                hurt.push(Hurt { is_hit: client.is_hit, cause, is_forced, is_given_up });
            }
            !is_lost
        });
    }

    /// The control daemon ends, with all its servers. `cause` is `None` if the end is an accident.
    ///
    /// If the service ends the control daemon because it has no client (`Cause::Unused`), no link of a slice may lead there any
    /// more. Otherwise a program can connect just before the end, and lose the control daemon.
    pub fn end(&mut self, cause: Option<Cause>) {
        let has_connected = |(_, what): &(Duration, Later)| matches!(what, Later::IsAdmitted(_));
        let is_reached = !self.is_hung() && self.listener() == Some(self.pid);
        assert!(
            cause != Some(Cause::Unused)
                || !is_reached
                || self.door_is_stuck
                || !self.later.iter().any(has_connected),
            "the-door-is-closed-first: {} is ended when a program has just connected",
            self.pid
        );
        self.lose_clients(cause, |_| true);
        self.servers.clear();
        self.later.clear();
        self.is_alive = false;
    }

    pub(crate) fn ends_if_idle(&mut self) {
        if self.quits_when_idle && !self.is_hung() && self.clients.is_empty() {
            self.end(None);
        }
    }

    /// Lets the control daemon and the servers in `servers` run again if SIGSTOP has stopped them.
    pub(crate) fn go_on(&mut self, servers: &[u32]) {
        for server in servers {
            if let Some(server) = self.servers.get_mut(server) {
                server.is_stopped = false;
            }
        }
        if std::mem::take(&mut self.is_stopped) {
            self.ends_if_idle();
        }
    }

    /// Writes the delayed log lines that name the clients hit by a fatal GPU error.
    pub(crate) fn say_who_was_hit(&mut self) {
        let is_late = |what: &Later| matches!(what, Later::Says(Meaning::TornDown { .. }));
        let late = self.later.extract_if(.., |(_, what)| is_late(what)).map(|(_, what)| what);
        for what in late.collect::<Vec<_>>() {
            self.happens(what);
        }
    }

    /// Another program changes the limits of a server. If `server` is `None`, it changes the limits of servers that start
    /// later.
    pub fn is_changed_by_others(&mut self, server: Option<u32>, percentage: u8, more_mib: u64) {
        let setting = match server.map(|pid| self.servers.get_mut(&pid)) {
            None => &mut self.defaults,
            Some(Some(one)) if one.status == ServerStatus::Active && !one.is_ending => &mut one.setting,
            Some(_) => return,
        };
        setting.percentage = percentage;
        setting.mib.iter_mut().for_each(|mib| *mib += more_mib);
        let setting = *setting;
        self.foreign.insert(server);
        if let Some(pid) = server {
            self.say_memory(pid, setting);
        }
    }

    /// Describes the first difference between `setting` and the limits of a server, or of servers that start later. If
    /// `with_foreign` is false, limits that another program has changed since the service last checked do not count.
    pub(crate) fn differing(&self, setting: Setting, with_foreign: bool) -> Option<String> {
        self.differing_in(|one| one, setting, with_foreign)
    }

    pub(crate) fn differing_in<P: PartialEq>(
        &self,
        part: impl Fn(Setting) -> P,
        setting: Setting,
        with_foreign: bool,
    ) -> Option<String> {
        let is_excused = |target: &Option<u32>| !with_foreign && self.foreign.contains(target);
        let differs = |one: Setting| part(one) != part(setting);
        if differs(self.defaults) && !is_excused(&None) {
            return Some(format!("servers to come have {:?} instead of {setting:?}", self.defaults));
        }
        let active = |one: &SimServer| one.status == ServerStatus::Active && !one.is_ending;
        let mut servers = self.servers.iter().filter(|(_, one)| active(one) && differs(one.setting));
        let (pid, one) = servers.find(|(pid, _)| !is_excused(&Some(**pid)))?;
        Some(format!("server {pid} has {:?} instead of {setting:?}", one.setting))
    }
}
