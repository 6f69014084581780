//! A control daemon, its servers and its GPUs in memory, which do as a story says: whatever it does not name is well.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use mps_core::mps::{Client, Inspection, Limits, Meaning, ServerStatus};
use mps_core::serve::{Failure, Occurrence, ProcessId, Requested, Said, SeenProcess, ShownGpu, ShownState};

/// The PID of the control daemon.
pub(crate) const PID: u32 = 100;

/// The most calls in one moment: a story must not go on for ever in it.
const MOST_IN_A_MOMENT: usize = 500;

/// Something that happens in a story.
pub(crate) type Turn = Box<dyn FnOnce(&mut Host) + Send>;

#[derive(Debug, Clone, Default)]
pub(crate) struct HostServer {
    /// None: it is well.
    pub(crate) status: Option<ServerStatus>,
    pub(crate) percentage: u8,
    /// In MiB, by ordinal.
    pub(crate) memory: BTreeMap<usize, u64>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct HostGpu {
    /// Why it can't be reached.
    pub(crate) lost: Option<String>,
    pub(crate) has_our_mode: bool,
    /// Why its compute mode can't be set.
    pub(crate) refuses: Option<String>,
    pub(crate) processes: Vec<SeenProcess>,
}

// Each flag is a trouble of its own, which a story names.
#[allow(clippy::struct_excessive_bools)]
#[derive(Default)]
pub(crate) struct Host {
    pub(crate) now: Duration,
    pub(super) story_ends: Duration,
    /// Whatever happens later, each at its time.
    later: Vec<(Duration, Turn)>,
    /// Whatever happens just before the answer to the next question of this name.
    during: Vec<(&'static str, Turn)>,
    in_this_moment: usize,

    pub(crate) is_dead: bool,
    pub(crate) refuses_multiuser: bool,
    /// The answer to each question, instead of the true one.
    pub(crate) answers: Option<Failure>,
    /// The answer to all questions of these names.
    pub(crate) answers_to: BTreeMap<&'static str, Failure>,
    /// Another process that listens in its directory.
    pub(crate) taken_by: Option<u32>,
    pub(crate) is_nobody: bool,
    /// It can't say how its servers are.
    pub(crate) is_old: bool,
    pub(crate) has_children: Option<bool>,
    pub(crate) servers: BTreeMap<u32, HostServer>,
    pub(crate) clients: Vec<Client>,
    /// The processes that have ended.
    pub(crate) gone: BTreeSet<u32>,
    /// The clients that NVML lists on a GPU, or why it does not.
    pub(crate) nvml: BTreeMap<String, Result<BTreeSet<u32>, String>>,
    pub(crate) default_limits: HostServer,
    /// Servers write no lines.
    pub(crate) is_mute: bool,
    /// A server that is started takes so long; never, if it is None.
    pub(crate) start_takes: Option<Duration>,
    pub(crate) gpus: BTreeMap<String, HostGpu>,
    pub(crate) holders: String,
    pub(crate) misfit: Option<String>,
    pub(crate) is_elsewhere: bool,
    pub(crate) bad_directories: Vec<String>,
    pub(crate) bad_links: Option<String>,
    pub(crate) does_not_lead: Option<Failure>,
    pub(crate) is_log_lost: bool,
    /// It does not end when it is asked to.
    pub(crate) stays: bool,
    /// It does not even end by a signal.
    pub(crate) survives: bool,

    pub(crate) log: VecDeque<Said>,
    pub(crate) requests: VecDeque<Requested>,
    /// The servers that have ended, and are watched.
    pub(crate) ended: VecDeque<u32>,
    pub(crate) watched: BTreeSet<u32>,
    next_server: u32,

    /// The questions and acts, each with its time.
    pub(crate) calls: Vec<(Duration, String)>,
    pub(crate) told: Vec<String>,
    pub(crate) steps: Vec<&'static str>,
    pub(crate) shown: Option<ShownState>,
    pub(crate) ends_when_idle: bool,
    pub(crate) alive: Vec<u32>,
    pub(crate) shown_gpus: BTreeMap<String, ShownGpu>,
    pub(crate) in_force: Option<u8>,
    pub(crate) waiting: Vec<u32>,
    pub(crate) left_out: BTreeMap<String, String>,
    /// Shown for each GPU, and whether a server is kept out.
    pub(crate) bypasses: BTreeMap<String, (BTreeSet<ProcessId>, bool)>,
    /// The clients that were told as hit: of which server, and on the GPU of which ordinal.
    pub(crate) hit: Vec<(u32, usize, Vec<u32>)>,
    pub(crate) answered: Vec<Result<(), String>>,
}

impl Host {
    /// A host on which the control daemon was just started.
    pub(crate) fn new(gpus: &[&str]) -> Self {
        let gpu = HostGpu { has_our_mode: true, ..HostGpu::default() };
        Self {
            gpus: gpus.iter().map(|uuid| ((*uuid).to_owned(), gpu.clone())).collect(),
            start_takes: Some(Duration::from_millis(150)),
            next_server: 200,
            ..Self::default()
        }
    }

    /// Something happens so many milliseconds after the beginning.
    pub(crate) fn at(&mut self, millis: u64, turn: impl FnOnce(&mut Self) + Send + 'static) {
        self.add(Duration::from_millis(millis), turn);
    }

    fn add(&mut self, time: Duration, turn: impl FnOnce(&mut Self) + Send + 'static) {
        self.later.push((time, Box::new(turn)));
        self.later.sort_by_key(|(time, _)| *time);
    }

    /// Something happens just before the answer to the next question of this name.
    pub(crate) fn during(&mut self, question: &'static str, turn: impl FnOnce(&mut Self) + Send + 'static) {
        self.during.push((question, Box::new(turn)));
    }

    pub(crate) fn says(&mut self, meaning: Meaning) {
        self.log.push_back(Said { meaning, is_news: true });
    }

    /// A server comes, and is ready.
    pub(crate) fn server_comes(&mut self, server: u32) {
        self.servers.insert(server, self.default_limits.clone());
        if self.is_mute {
            return;
        }
        self.says(Meaning::ServerStarting { server, uid: 0 });
        self.write_limits(server, true);
        self.says(Meaning::ServerReady(server));
    }

    fn write_limits(&mut self, server: u32, with_percentage: bool) {
        let Some(HostServer { percentage, memory, .. }) = self.servers.get(&server).cloned() else { return };
        if self.is_mute {
            return;
        }
        if with_percentage {
            self.says(Meaning::ThreadPercentage { server, tenths: u32::from(percentage) * 10 });
        }
        for (ordinal, mib) in memory {
            self.says(Meaning::MemoryLimit { server, ordinal, bytes: mib << 20 });
        }
    }

    /// A server ends, with its clients.
    pub(crate) fn server_ends(&mut self, server: u32, status: i32) {
        self.servers.remove(&server);
        self.clients.retain(|client| client.server != server);
        if !self.is_mute {
            self.says(Meaning::ServerExited { server, status });
        }
        if self.watched.remove(&server) {
            self.ended.push_back(server);
        }
    }

    pub(crate) fn client(&mut self, pid: u32, server: u32, gpu: &str) {
        let id = Some(u64::from(pid));
        self.clients.push(Client { pid, id, server, gpu_prefix: gpu.to_owned() });
    }

    /// Time passes, and the story goes on.
    pub(super) fn pass(&mut self, until: Duration) {
        while let Some((time, _)) = self.later.first()
            && *time <= until
        {
            let (time, turn) = self.later.remove(0);
            self.now = self.now.max(time);
            turn(self);
        }
        if until > self.now {
            (self.now, self.in_this_moment) = (until, 0);
        }
    }

    /// Takes note of a question or an act.
    pub(super) fn note(&mut self, call: impl Into<String>) {
        self.in_this_moment += 1;
        assert!(self.in_this_moment < MOST_IN_A_MOMENT, "it goes on for ever");
        self.calls.push((self.now, call.into()));
    }

    /// The answer to a question.
    pub(super) fn ask<T>(
        &mut self,
        question: &'static str,
        details: &str,
        answer: impl FnOnce(&mut Self) -> T,
    ) -> Result<T, Failure> {
        self.note(format!("{question}{details}"));
        self.turn_during(question);
        if self.is_dead {
            return Err(self.how_it_ended());
        }
        match self.answers.as_ref().or_else(|| self.answers_to.get(question)) {
            Some(failure) => Err(failure.clone()),
            None => Ok(answer(self)),
        }
    }

    pub(super) fn turn_during(&mut self, question: &'static str) {
        if let Some(place) = self.during.iter().position(|(name, _)| *name == question) {
            let (_, turn) = self.during.remove(place);
            turn(self);
        }
    }

    pub(super) fn how_it_ended(&self) -> Failure {
        let refuses_multiuser = self.refuses_multiuser;
        Failure::Ended { text: "the control daemon ended".to_owned(), refuses_multiuser }
    }

    /// The next thing that happens. None: the story has come to its end.
    pub(super) fn next(
        &mut self,
        until: Duration,
        takes_requests: bool,
    ) -> Option<Result<Occurrence, Failure>> {
        loop {
            self.pass(self.now);
            if self.is_log_lost {
                return Some(Err(Failure::Failed("the log can't be read".to_owned())));
            }
            let request = |host: &mut Self| takes_requests.then(|| host.requests.pop_front()).flatten();
            if let Some(said) = self.log.pop_front() {
                return Some(Ok(Occurrence::Said(said)));
            } else if self.is_dead {
                return Some(Ok(Occurrence::Ended));
            } else if let Some(server) = self.ended.pop_front() {
                return Some(Ok(Occurrence::ServerEnded(server)));
            } else if let Some(request) = request(self) {
                return Some(Ok(Occurrence::Asked(request)));
            } else if self.now >= until {
                return Some(Ok(Occurrence::Nothing));
            }
            let next = self.later.first().map_or(until, |(time, _)| until.min(*time));
            if next > self.story_ends {
                self.pass(self.story_ends);
                return None;
            }
            self.pass(next);
        }
    }

    pub(super) fn inspect(&self, servers: &[u32], limits: Option<&Limits>) -> Inspection {
        let status = |server: &u32| match self.servers.get(server) {
            _ if self.is_old => ServerStatus::Unsupported,
            Some(known) => known.status.unwrap_or(ServerStatus::Active),
            None => ServerStatus::Gone,
        };
        let statuses = servers.iter().map(|server| (*server, status(server))).collect();
        let targets = servers.iter().filter_map(|server| Some((Some(*server), self.servers.get(server)?)));
        let differs = |found: &HostServer, limits: &Limits| {
            (found.percentage != limits.thread_percentage)
                .then(|| format!("{} instead of {}", found.percentage, limits.thread_percentage))
        };
        let found = targets.chain([(None, &self.default_limits)]);
        let differences = limits.map(|limits| {
            found.filter_map(|(target, found)| Some((target, differs(found, limits)?))).collect()
        });
        let differences = differences.unwrap_or_default();
        Inspection { servers: self.servers.keys().copied().collect(), statuses, differences }
    }

    pub(super) fn set_limits(&mut self, server: Option<u32>, limits: &Limits) -> Vec<u32> {
        let memory = limits.memory_mib.iter().filter(|(ordinal, _)| limits.enforced.contains(ordinal));
        let memory = memory.map(|(ordinal, mib)| (*ordinal, *mib)).collect();
        let (status, percentage) = (None, limits.thread_percentage);
        match server {
            None => self.default_limits = HostServer { status, percentage, memory },
            Some(server) => {
                if let Some(known) = self.servers.get_mut(&server) {
                    (known.percentage, known.memory) = (percentage, memory);
                    self.write_limits(server, false);
                }
            }
        }
        self.servers.keys().copied().collect()
    }

    pub(super) fn start_server(&mut self) {
        let Some(takes) = self.start_takes.filter(|_| self.servers.is_empty()) else { return };
        let server = self.next_server;
        self.next_server += 1;
        self.add(self.now + takes, move |host| host.server_comes(server));
    }

    /// Ends it, unless it stays. Whether it has ended.
    pub(super) fn quit(&mut self, how: String, stays: bool) -> bool {
        self.note(how);
        self.is_dead |= !stays;
        self.is_dead
    }
}
