//! The facts that a service knows, publishes and reports about one control daemon. The facts are lost when the service ends.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::time::Duration;

use mps_core::Order;
use mps_core::serve::Requested;
use mps_core::view::{ControlDaemonState, DaemonView};

use super::mps::{Hit, Mps};
use super::register::SimRegister;

/// After this time a caller of the service gets the error that the service has not answered.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The most questions and waits that an act may make while the world's clock stands still. More of them mean an endless loop.
const MOST_IN_A_MOMENT: usize = 400;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Waits {
    #[default]
    Nothing,
    /// The act waits for its turn in the world, since this time.
    Turn(Duration),
    /// The act waits until this time.
    Until(Duration),
    /// The act waits for any event of the control daemon, at most until the time `until`. If `takes_requests` is true, an
    /// administrator's request ends the wait, too.
    Event { until: Duration, takes_requests: bool },
}

/// The view of a control daemon that the service publishes, from the first act about the control daemon until the core's act
/// `Release`.
#[derive(Debug, Clone, Default)]
pub struct Shown {
    pub view: DaemonView,
    /// The payload and the GPUs of the last order.
    order: Option<(u32, Vec<String>)>,
}

impl Shown {
    pub(crate) fn takes(&mut self, order: &Order<u32>) {
        let before = self.order.replace((order.payload, order.gpus.clone()));
        if self.order == before {
            return;
        }
        let (payload, gpus) = before.unwrap_or_default();
        let is_new = |gpu: &&String| payload != order.payload || !gpus.contains(*gpu);
        let to_be_set = order.gpus.iter().filter(is_new).cloned().collect();
        self.view.take_order(order.gpus.iter().cloned(), true, &to_be_set);
    }

    /// True if the service publishes that a program which comes to a GPU now is served with the limits of this order.
    pub(crate) fn serves(&self, gpu: &str, order: &Order<u32>) -> bool {
        self.order.as_ref().is_some_and(|(payload, _)| *payload == order.payload)
            && self.view.unserved(gpu).is_none()
    }
}

#[derive(Debug, Default)]
pub struct Reader {
    /// The number of log lines that this service has read.
    pub(crate) position: usize,
    /// An earlier service has reported the log lines before this index. This service reads these lines again, but does not
    /// report them again.
    pub(crate) quiet_until: usize,
    /// The service waits for the end of the servers with these PIDs.
    pub(crate) watched: BTreeSet<u32>,
    pub(crate) ended: VecDeque<u32>,
    /// The requests of administrators that the service has not taken yet, each with its time.
    pub(crate) requests: VecDeque<(Duration, Requested)>,
    /// The time of the request that the service is carrying out. `None` if the service carries out no request.
    pub(crate) asked_at: Option<Duration>,
    /// The time at which the service decided to end the control daemon together with its clients.
    pub(crate) end_begun: Duration,
    /// True if the last request that the service has taken was to make a change by force.
    pub(crate) is_forced: bool,
    pub(crate) waits: Waits,
    pub shown: Shown,
    /// The number of facts that the service has reported or published.
    pub(crate) news: usize,
    /// The messages that the service has logged.
    pub words: Vec<String>,
    /// The clients that the service has reported as hit by a fatal GPU error: the PID of the server, the ordinal of the GPU,
    /// and the PIDs of the clients.
    pub hit: Vec<(u32, usize, Vec<u32>)>,
    pub(crate) clients: SimRegister,
    /// `read` has the clients that the log has named as hit by a fatal GPU error since this service began. `told` has the hit
    /// clients that this service has reported.
    pub(crate) read: BTreeSet<Hit>,
    pub(crate) told: BTreeSet<Hit>,
    /// The hits of fatal GPU errors that the service has published as over.
    over: BTreeSet<Hit>,
    /// The hits that the service had reported when it last wrote the state file.
    written: BTreeSet<Hit>,
    /// True if the disk was full when the service last reported hit clients, or later. The state file may then lack the report.
    pub(crate) disk_was_full: bool,
    pub(crate) questions: Vec<&'static str>,
    /// The number of questions and waits of the running act at the time `moment`.
    pub(crate) in_a_moment: usize,
    pub(crate) moment: Duration,
    pub(crate) starts: Vec<Duration>,
    /// The steps in changing compute modes that the running act has asked the world to carry out, each with its GPU.
    pub(crate) mode_steps: Vec<(String, usize)>,
}

impl Reader {
    pub(crate) fn new(quiet_until: usize) -> Self {
        Self { quiet_until, ..Self::default() }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.shown.view.state == ControlDaemonState::Ready && self.shown.view.serving
    }
}

impl Mps {
    pub(crate) fn is_awake(&self) -> bool {
        match self.reader.waits {
            Waits::Nothing | Waits::Turn(_) => true,
            Waits::Until(at) => self.now >= at,
            Waits::Event { until, takes_requests } => {
                self.now >= until
                    || self.reader.position < self.log.len()
                    || !self.is_alive
                    || !self.reader.ended.is_empty()
                    || (takes_requests && !self.reader.requests.is_empty())
            }
        }
    }

    /// Checks the promise `who-was-hit-is-told`: the service reports each client that a fatal GPU error has hit once, and no
    /// other client.
    pub(crate) fn tell_hit(&mut self, server: u32, ordinal: usize, clients: &[u32]) {
        self.reader.disk_was_full = self.disk_is_full;
        for client in clients {
            let hit = (server, ordinal, *client);
            assert!(self.hits.contains(&hit), "who-was-hit-is-told: {hit:?} was not hit");
            assert!(self.reader.told.insert(hit), "who-was-hit-is-told: {hit:?} is told twice");
            assert!(!self.over.contains(&hit), "who-was-hit-is-told: {hit:?} was told by the service before");
            self.check_everybody_is_known(*client);
        }
        self.reader.hit.push((server, ordinal, clients.to_vec()));
    }

    pub(crate) fn tell(&mut self, kind: fmt::Arguments<'_>, text: &str) {
        self.reader.news += 1;
        self.reader.words.push(format!("{kind}{text}"));
    }

    pub(crate) fn waits_until(&self) -> Option<Duration> {
        match self.reader.waits {
            Waits::Until(at) | Waits::Event { until: at, .. } => Some(at),
            Waits::Nothing | Waits::Turn(_) => None,
        }
    }

    pub(crate) fn begins_to_end(&mut self) {
        self.reader.end_begun = self.now;
    }

    pub(crate) fn is_awaited(&self) -> bool {
        self.reader.asked_at.is_some_and(|asked| self.now < asked + PATIENCE)
    }

    /// The service writes the state file, unless the disk is full. The next service reports no hit from before the state file
    /// was written, so this service must have reported all hits.
    pub(crate) fn keep_state_file(&mut self) {
        let untold = self.reader.read.difference(&self.reader.told).next();
        assert!(
            untold.is_none(),
            "who-was-hit-is-told: {untold:?} is written down as read, and was not told"
        );
        if !self.disk_is_full {
            self.read_until = self.reader.position.max(self.reader.quiet_until);
            self.reader.written.clone_from(&self.reader.told);
        }
    }

    /// The service publishes that a fatal GPU error is over. If the state file could be written, the next service must not
    /// report the hit clients again.
    pub(crate) fn fault_is_over(&mut self) {
        let new = &self.reader.told - &self.reader.over;
        let can_be_written = !self.reader.disk_was_full;
        self.over.extend(new.iter().filter(|hit| can_be_written || self.reader.written.contains(hit)));
        self.reader.over.extend(new);
    }

    /// Checks the promise `nothing-spins`: an act makes a limited number of questions and waits while the world's clock stands
    /// still.
    pub(crate) fn count_step(&mut self) {
        let reader = &mut self.reader;
        if reader.moment != self.now {
            (reader.moment, reader.in_a_moment) = (self.now, 0);
        }
        reader.in_a_moment += 1;
        let steps = reader.in_a_moment;
        assert!(steps < MOST_IN_A_MOMENT, "nothing-spins: {} is asked {steps} times in a moment", self.pid);
    }

    /// Checks the promise `nothing-spins`: the service does not start 8 servers within 3 s if the servers fail.
    pub(crate) fn count_start(&mut self) {
        let starts = &mut self.reader.starts;
        starts.push(self.now);
        if let Some(before) = starts.len().checked_sub(8).and_then(|first| starts.get(first)) {
            let within = self.now.saturating_sub(*before);
            let pid = self.pid;
            assert!(
                within >= Duration::from_secs(3),
                "nothing-spins: {pid} starts 8 servers within {within:?}"
            );
        }
    }
}
