//! All that a service knows, shows and reports about one control daemon that it watches. It ends with the service.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::time::Duration;

use mps_core::Order;
use mps_core::serve::{Requested, ShownAs, ShownGpu, ShownState};

use super::mps::{Hit, Mps};
use super::register::SimRegister;

/// The time after which a caller gets the error that there was no answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The most questions and waits in one moment, without an event from outside.
const MOST_IN_A_MOMENT: usize = 400;

/// Why the act under way waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Waits {
    #[default]
    Nothing,
    /// For its turn in the world, since this moment.
    Turn(Duration),
    /// Until this moment.
    Until(Duration),
    /// For any event, at most until this moment.
    Event { until: Duration, takes_requests: bool },
}

#[derive(Debug, Default)]
pub struct Reader {
    /// The lines of the log that were read.
    pub(crate) position: usize,
    /// The lines that an earlier service has recorded.
    pub(crate) quiet_until: usize,
    /// The servers that are watched for their end.
    pub(crate) watched: BTreeSet<u32>,
    pub(crate) ended: VecDeque<u32>,
    /// The requests that wait, each with the moment when it was made.
    pub(crate) requests: VecDeque<(Duration, Requested)>,
    /// The moment of the request that was taken last, until it is answered.
    pub(crate) asked_at: Option<Duration>,
    /// The moment of the decision to end the control daemon with its clients.
    pub(crate) end_begun: Duration,
    /// The request that was taken last was to make a change by force.
    pub(crate) is_forced: bool,
    pub(crate) waits: Waits,
    pub state: Option<ShownState>,
    pub ends_when_idle: bool,
    pub servers: Vec<u32>,
    pub gpus: BTreeMap<String, ShownGpu>,
    /// The thread percentage that is shown as in force.
    pub in_force: Option<u8>,
    /// The order that the service has taken up with it last, by its payload and its GPUs.
    pub(crate) order: Option<(u32, Vec<String>)>,
    /// The GPUs with limits of that order that are not in force yet, as far as it is shown.
    pub(crate) being_set: BTreeSet<String>,
    /// The GPUs that are shown as left out, each with the reason.
    pub left_out: BTreeMap<String, String>,
    /// The number of news that were reported or shown.
    pub(crate) news: usize,
    /// The words that were told.
    pub words: Vec<String>,
    /// The clients that were told as hit: of which server, and on the GPU of which ordinal.
    pub hit: Vec<(u32, usize, Vec<u32>)>,
    /// The clients as they are known.
    pub(crate) clients: SimRegister,
    /// The clients that new lines of the log have named, and the clients that were reported.
    pub(crate) read: BTreeSet<Hit>,
    pub(crate) told: BTreeSet<Hit>,
    /// Those clients whose fault is shown as over.
    over: BTreeSet<Hit>,
    /// The clients that were reported before the state file was written.
    written: BTreeSet<Hit>,
    /// The state file could not be written at some time since clients were reported, since the disk was full.
    pub(crate) disk_was_full: bool,
    /// The questions to the control daemon.
    pub(crate) questions: Vec<&'static str>,
    /// The steps in this moment.
    pub(crate) in_a_moment: usize,
    pub(crate) moment: Duration,
    /// The starts of servers in this act.
    pub(crate) starts: Vec<Duration>,
    /// The halves of setting compute modes that are to be carried out, each with its GPU.
    pub(crate) mode_steps: Vec<(String, usize)>,
}

impl Reader {
    pub(crate) fn new(quiet_until: usize) -> Self {
        Self { quiet_until, ..Self::default() }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.state.as_ref().is_some_and(|state| state.state == ShownAs::Ready && state.serving)
    }

    /// The service takes up an order with it.
    pub(crate) fn takes(&mut self, order: &Order<u32>) {
        let before = self.order.replace((order.payload, order.gpus.clone()));
        let Some((payload, gpus)) = before.filter(|_| self.state.as_ref().is_some_and(|state| state.serving))
        else {
            return;
        };
        let is_new = |gpu: &&String| payload != order.payload || !gpus.contains(*gpu);
        self.being_set.extend(order.gpus.iter().filter(is_new).cloned());
    }

    /// True if a program that comes to a GPU now is served with the limits of this order, as it is shown.
    pub(crate) fn shows_as_served(&self, gpu: &str, order: &Order<u32>) -> bool {
        let has_taken = |(payload, gpus): &(u32, Vec<String>)| {
            *payload == order.payload && gpus.iter().any(|one| one == gpu)
        };
        self.state.as_ref().is_some_and(|state| state.serving)
            && self.order.as_ref().is_some_and(has_taken)
            && !self.being_set.contains(gpu)
            && !self.left_out.contains_key(gpu)
            && self.gpus.get(gpu).is_none_or(|shown| shown.reason.is_empty())
    }
}

impl Mps {
    /// True if the act under way can come on.
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

    /// Who was hit is told: each client once, and no other client.
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

    /// The moment that the act under way waits for.
    pub(crate) fn waits_until(&self) -> Option<Duration> {
        match self.reader.waits {
            Waits::Until(at) | Waits::Event { until: at, .. } => Some(at),
            Waits::Nothing | Waits::Turn(_) => None,
        }
    }

    pub(crate) fn begins_to_end(&mut self) {
        self.reader.end_begun = self.now;
    }

    /// True if the caller of the last request still waits.
    pub(crate) fn is_awaited(&self) -> bool {
        self.reader.asked_at.is_some_and(|asked| self.now < asked + PATIENCE)
    }

    /// The state file is written, if the disk is not full: no other service reports the clients that were hit, so they are
    /// reported before.
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

    /// No fault is shown any more: the next service does not report the clients that were hit, if the state file could be
    /// written.
    pub(crate) fn fault_is_over(&mut self) {
        let new = &self.reader.told - &self.reader.over;
        let can_be_written = !self.reader.disk_was_full;
        self.over.extend(new.iter().filter(|hit| can_be_written || self.reader.written.contains(hit)));
        self.reader.over.extend(new);
    }

    /// Nothing spins: the number of steps in one moment is limited.
    pub(crate) fn count_step(&mut self) {
        let reader = &mut self.reader;
        if reader.moment != self.now {
            (reader.moment, reader.in_a_moment) = (self.now, 0);
        }
        reader.in_a_moment += 1;
        let steps = reader.in_a_moment;
        assert!(steps < MOST_IN_A_MOMENT, "nothing-spins: {} is asked {steps} times in a moment", self.pid);
    }

    /// Nothing spins: there is a pause between two starts of servers that fail.
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
