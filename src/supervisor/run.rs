//! One run of a control daemon, from its start or its take-over to its end, and what is learnt of it meanwhile.

use std::collections::{BTreeSet, VecDeque};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tracing::level_filters::LevelFilter;

use crate::message::{Message, Subject};
use crate::mps::control::{Control, Limits};
use crate::mps::log::{Follower, Line, Meaning};
use crate::mps::process::Process;
use common::counted::counted;
use common::host::driver;
use common::membership::Slices;
use common::state_file::Running;

use super::blocker::Blockers;
use super::capacity::Capacity;
use super::fault::Revival;
use super::known_clients::KnownClients;
use super::servers::Servers;
use super::waiting_clients::WaitingClients;
use super::{Failure, Instructions, Serving};

/// The longest part of a line that is kept as last words, in characters.
const WORDS_MAX: usize = 200;

/// The number of lines that are kept as last words.
const LAST_WORDS: usize = 3;

/// The next thing that happens to a control daemon.
#[derive(Debug)]
pub(super) enum Occurrence {
    /// It or a server writes a line to the log.
    Line(Line),
    /// It ends.
    Ended(Option<ExitStatus>),
    /// One of its servers ends.
    ServerEnded(u32),
    /// Nothing happens until the deadline.
    Nothing,
}

/// Everything that belongs to one run of a control daemon, and ends with it.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) process: Process,
    /// Its entry in the state file. The order may want something else.
    pub(super) running: Running,
    pub(super) control: Arc<Control>,
    pub(super) log: Follower,
    /// The service that ran before has passed on the lines before this offset.
    quiet_until: u64,
    /// The trouble with the log, as it was last told.
    pub(super) log_trouble: Option<&'static str>,
    /// The last lines that may explain an end. None of them is older than the newest server.
    last_words: VecDeque<String>,
    pub(super) servers: Servers,
    /// The servers that are watched: `server_ends` tells of their end.
    pub(super) watched_servers: BTreeSet<u32>,
    pub(super) server_ended: mpsc::Sender<u32>,
    server_ends: mpsc::Receiver<u32>,
    pub(super) check_at: Instant,
    /// The time of the next count of the clients, for a control daemon that is to end.
    pub(super) count_at: Instant,
    /// It has been made to serve.
    pub(super) configured: bool,
    /// It has clients, or had some a moment ago.
    pub(super) in_use: bool,
    /// A client has left: it may have been the last.
    pub(super) client_left: bool,
    /// Why its clients were not known when it was to end without any.
    pub(super) clients_unknown: Option<String>,
    /// All that keeps it from serving the order.
    pub(super) blockers: Blockers,
    /// When its next server may come, if this one ends.
    pub(super) revival: Revival,
    pub(super) known_clients: KnownClients,
    pub(super) capacity: Capacity,
    pub(super) waiting_clients: WaitingClients,
}

impl Run {
    pub(super) fn new(
        process: Process,
        running: Running,
        control: Arc<Control>,
        log: Follower,
        quiet_until: u64,
    ) -> Self {
        let (server_ended, server_ends) = mpsc::channel(16);
        let now = Instant::now();
        Self {
            process,
            running,
            control,
            log,
            quiet_until,
            log_trouble: None,
            last_words: VecDeque::new(),
            servers: Servers::default(),
            watched_servers: BTreeSet::new(),
            server_ended,
            server_ends,
            check_at: now,
            count_at: now,
            configured: false,
            in_use: false,
            client_left: false,
            clients_unknown: None,
            blockers: Blockers::default(),
            revival: Revival::default(),
            known_clients: KnownClients::default(),
            capacity: Capacity::default(),
            waiting_clients: WaitingClients::default(),
        }
    }

    /// Waits for what happens next, until `deadline`.
    async fn next(&mut self, deadline: Instant) -> Result<Occurrence, Failure> {
        tokio::select! {
            biased;
            line = self.log.next() => match line {
                Ok(line) => Ok(Occurrence::Line(line)),
                Err(error) => Err(Failure::Failed(format!("{}: {error}", self.log.path().display()))),
            },
            status = self.process.exited() => Ok(Occurrence::Ended(status)),
            Some(server) = self.server_ends.recv() => Ok(Occurrence::ServerEnded(server)),
            () = sleep_until(deadline) => Ok(Occurrence::Nothing),
        }
    }

    /// The limits that the order has for its GPUs, by their ordinals.
    pub(super) fn limits(&self, order: &Instructions) -> Limits {
        let planned = |uuid: &String| order.plan.gpus.iter().find(|gpu| gpu.uuid == *uuid);
        let ordinals = self.running.gpus.iter().enumerate();
        let held: Vec<_> = ordinals.filter_map(|(ordinal, uuid)| Some((ordinal, planned(uuid)?))).collect();
        let enforced = held.iter().filter(|(_, gpu)| gpu.limits_enforced);
        Limits {
            thread_percentage: order.plan.thread_percentage,
            memory_mib: held.iter().map(|(ordinal, gpu)| (*ordinal, gpu.memory_limit_mib)).collect(),
            enforced: enforced.map(|(ordinal, _)| *ordinal).collect(),
        }
    }

    fn remember_words(&mut self, line: &Line) {
        if let Meaning::ServerStarting { .. } = line.meaning {
            self.last_words.clear();
        }
        if line.may_explain_an_end() {
            self.last_words.push_back(line.text.chars().take(WORDS_MAX).collect());
            if self.last_words.len() > LAST_WORDS {
                self.last_words.pop_front();
            }
        }
    }

    /// The last words of the log, as the end of a sentence.
    pub(super) fn words(&self) -> String {
        if self.last_words.is_empty() {
            return String::new();
        }
        format!("; its log ends: {}", self.last_words.iter().cloned().collect::<Vec<_>>().join(" | "))
    }

    pub(super) fn too_much_is_written(&self, left_out: usize) -> String {
        let lines = counted(left_out, "line");
        format!("too much is written to {}: {lines} not passed on; they are there", self.log.path().display())
    }

    /// Whether the process did not know the multi-user option.
    fn refuses_multiuser(&self) -> bool {
        self.last_words.iter().any(|line| driver::refuses_an_option(line))
    }
}

impl Serving<'_> {
    /// Waits for what happens next, until `deadline`.
    pub(super) async fn next(&mut self, deadline: Instant) -> Result<Occurrence, Failure> {
        let occurrence = self.run.next(deadline).await?;
        if let Occurrence::Line(line) = &occurrence {
            self.observe(line);
        }
        Ok(occurrence)
    }

    /// Lets time pass, and watches the log and the process meanwhile. False once `deadline` is reached.
    pub(super) async fn step(&mut self, deadline: Instant) -> Result<bool, Failure> {
        match self.next(deadline).await? {
            Occurrence::Line(_) => Ok(true),
            Occurrence::ServerEnded(server) => {
                self.forget_server(server).await;
                Ok(true)
            }
            Occurrence::Ended(status) => Err(self.ended(status).await),
            Occurrence::Nothing => Ok(false),
        }
    }

    /// Waits until something happens, `duration` at most, and says when that is.
    pub(super) async fn wait(&mut self, duration: Duration) -> Result<Instant, Failure> {
        self.step(Instant::now() + duration).await?;
        Ok(Instant::now())
    }

    /// Says how the control daemon has ended.
    pub(super) async fn ended(&mut self, status: Option<ExitStatus>) -> Failure {
        // Its last lines explain its end. The next one does not wait for the rest.
        if let Err(error) = self.run.log.skip_to_end() {
            tracing::debug!("the end of the log can't be found: {error}");
        }
        self.read_on().await;
        // A stopped server does not notice that its control daemon has ended, and would keep the GPU from the next one.
        self.continue_if_stopped();
        let how = status.map(|status| format!(" ({status})")).unwrap_or_default();
        let text = format!("the control daemon ended{how}{}", self.run.words());
        Failure::Ended { text, refuses_multiuser: self.run.refuses_multiuser() }
    }

    /// Reads all that stands in the log at this moment.
    pub(super) async fn read_on(&mut self) {
        let Ok(end) = self.run.log.length() else { return };
        while self.run.log.offset() < end
            && let Ok(Some(line)) = self.run.log.next_there().await
        {
            self.observe(&line);
        }
    }

    fn observe(&mut self, line: &Line) {
        let run = &mut *self.run;
        run.servers.observe(&line.meaning);
        run.waiting_clients.observe(&line.meaning);
        if run.log.offset() <= run.quiet_until {
            return;
        }
        run.quiet_until = 0;
        run.remember_words(line);
        let first_refusal = run.capacity.observe(&line.meaning, &self.worker.order.plan.gpus);
        self.pass_on(line);
        match line.meaning {
            Meaning::ServerReady(server) => {
                self.worker.reporter.event(format!("server {server} is ready"));
                // The process that kept it out has gone.
                self.worker.bypasses.due = Some(Instant::now());
            }
            Meaning::ServerExited { server, status: 0 } => {
                self.worker.reporter.event(format!("server {server} exited with status 0"));
            }
            Meaning::ServerExited { server, status } => {
                let about = Subject { server: Some(server), ..Subject::default() };
                let text = format!("server {server} exited with status {status}{}", self.run.words());
                self.worker.reporter.report(Message::ServerFailed, about, text);
            }
            Meaning::FaultHandling { server } => self.fault_seen(server),
            Meaning::TornDown { server, client, ordinal } => self.client_hit(server, client, ordinal),
            Meaning::ClientAdmitted(client) => {
                self.run.in_use = true;
                self.run.known_clients.came(client, || Slices::from_plans([&self.worker.order.plan]));
                self.worker.tools.bells.ring(&self.run.running.gpus, |bell| &bell.came);
            }
            Meaning::ClientLeft(_) => self.run.client_left = true,
            Meaning::ClientRefused { server, capacity } if first_refusal => self
                .worker
                .reporter
                .warning(format!("server {server} refused a client: its limit is {capacity} clients")),
            _ => {}
        }
    }

    /// Passes a line on to our own log, as long as there are not too many.
    fn pass_on(&mut self, line: &Line) {
        self.tell_left_out();
        if line.level() <= LevelFilter::current() && self.worker.rate_limit.take(1, Instant::now()) {
            line.trace(&self.worker.reporter.id());
        }
    }

    pub(super) fn tell_left_out(&mut self) {
        if let Some(count) = self.worker.rate_limit.suppressed_before(Instant::now()) {
            self.worker.reporter.warning(self.run.too_much_is_written(count));
        }
    }
}
