//! The simulated shell through which the service's real code ends clients for a budget, and the checks of this code.

use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::Duration;

use mps_core::mps::ServerStatus;
use mps_core::tenants::budget::NVML_ERROR_MIB;
use mps_core::tenants::{
    ClientEnd, ClientShell, Connections, DaemonClients, ListAnswer, ListedClient, SliceBudgets,
};
use mps_core::terms::ProcessId;
use mps_core::{Cause, CoreTime, Permit};

use super::answers::listed;
use super::budgets::Program;
use super::mps::Mps;

const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The service chooses a client to end from NVML's list of processes and a control daemon's list of clients. Both lists must
/// not be older than this time.
const FRESH: Duration = Duration::from_secs(2);

/// After a failed attempt to end a client, the service may spare the client for at most this time.
const LEFT_ALONE: Duration = Duration::from_secs(61);

/// The most messages that the service may log in a minute about the overuse of one slice.
const MOST_TOLD: usize = 20;

#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) now: Duration,
    /// The time until which the attempt to end clients waits. `None` if the attempt does not wait.
    pub(crate) waits_until: Option<Duration>,
    budgets: Option<SliceBudgets>,
    /// The clients that ran before the service began, before a budget became smaller, or before the configuration let the
    /// service end clients for budgets. The service must not end these clients for a budget.
    before: BTreeSet<ProcessId>,
    /// True until the service first lists the clients after its start, or after the service has put new clients into `before`.
    /// The service may spare all clients of this first list, since it can't know which clients have just come.
    is_unseen: bool,
    may_be_spared: BTreeSet<ProcessId>,
    seen: Vec<Program>,
    seen_at: Duration,
    seen_budgets: Option<SliceBudgets>,
    /// The clients in the last lists of the control daemons, each with the number of its connection.
    listed: BTreeMap<ProcessId, u64>,
    listed_at: Duration,
    /// The clients that have certainly lost their work, each with the number of its connection at that time.
    ended: BTreeMap<ProcessId, u64>,
    /// The clients that the service has asked a control daemon to end, without getting an answer.
    in_doubt: BTreeSet<ProcessId>,
    /// The clients that the service could not end, each with the time of the attempt.
    refused: BTreeMap<ProcessId, Duration>,
    told: BTreeMap<u32, Vec<Duration>>,
    /// The client that the service has last chosen to end, and the reason why the service must not end it. The reason is `None`
    /// if the service may end the client.
    chosen: Option<(ProcessId, Option<&'static str>)>,
}

impl Default for Facts {
    fn default() -> Self {
        Self {
            now: Duration::ZERO,
            waits_until: None,
            budgets: None,
            before: BTreeSet::new(),
            is_unseen: true,
            may_be_spared: BTreeSet::new(),
            seen: Vec::new(),
            seen_at: Duration::ZERO,
            seen_budgets: None,
            listed: BTreeMap::new(),
            listed_at: Duration::ZERO,
            ended: BTreeMap::new(),
            in_doubt: BTreeSet::new(),
            refused: BTreeMap::new(),
            told: BTreeMap::new(),
            chosen: None,
        }
    }
}

impl Facts {
    /// The service puts the budgets `now` in force. The clients at this moment are in `there`.
    pub(crate) fn is_in_force(&mut self, now: &SliceBudgets, there: &[Program]) {
        let smaller = |before: &SliceBudgets| {
            let mut both = now.budgets.iter().zip(&before.budgets);
            both.any(|(now, before)| {
                now.memory_mib < before.memory_mib || now.max_clients < before.max_clients
            }) || (now.terminate && !before.terminate)
        };
        if self.budgets.as_ref().is_none_or(smaller) {
            self.before.extend(there.iter().map(|program| program.process));
            self.is_unseen = true;
        }
        self.budgets = Some(now.clone());
    }

    /// NVML lists these programs when the service asks for the processes of a GPU.
    pub(crate) fn are_seen(&mut self, programs: &[Program], now: Duration) {
        if std::mem::take(&mut self.is_unseen) {
            self.may_be_spared.extend(programs.iter().map(|program| program.process));
        }
        self.seen = programs.to_vec();
        self.seen_at = now;
        self.seen_budgets.clone_from(&self.budgets);
    }

    /// The service logs a message about the overuse of this slice. Checks the promise `overuse-is-told-in-measure`: the service
    /// logs at most [`MOST_TOLD`] messages about a slice in a minute.
    pub(crate) fn is_told(&mut self, slice: u32, now: Duration) {
        let told = self.told.entry(slice).or_default();
        told.push(now);
        let of_late = told.iter().filter(|at| **at + Duration::from_secs(60) > now).count();
        assert!(
            of_late <= MOST_TOLD,
            "overuse-is-told-in-measure: {of_late} messages about slice {slice} in a minute"
        );
    }

    /// The service has found out that `process` has this PID. `None` if no process has the PID.
    fn is_found(&mut self, pid: u32, process: Option<ProcessId>) {
        self.listed.retain(|one, _| one.pid != pid || process == Some(*one));
    }

    fn is_refused(&mut self, process: ProcessId) {
        self.refused.insert(process, self.now);
    }

    /// Returns the reason why the service must not end this client now. `None` if the service may end the client.
    fn forbids(&self, victim: ProcessId) -> Option<&'static str> {
        let Some(SliceBudgets { budgets, terminate }) = &self.seen_budgets else {
            return Some("no budget");
        };
        let Some(program) = self.seen.iter().find(|one| one.process == victim) else {
            return Some("it was not found there");
        };
        let budget = program.slice.and_then(|slice| budgets.get(slice as usize));
        let Some(budget) = budget else { return Some("nobody knows its slice") };
        let of_slice: Vec<&Program> = self.seen.iter().filter(|one| one.slice == program.slice).collect();
        let has_work = |one: &&Program| {
            let connection = self.listed.get(&one.process);
            connection.is_some() && self.ended.get(&one.process) != connection
        };
        let rest: Vec<&Program> = of_slice.iter().copied().filter(has_work).collect();
        let mib: u64 = rest.iter().map(|one| one.mib).sum();
        let allowed_mib = budget.memory_mib + NVML_ERROR_MIB * rest.len() as u64;
        let is_over = rest.len() > 1 && (mib > allowed_mib || rest.len() > budget.max_clients as usize);
        let is_doubted = |one: &Program| self.in_doubt.contains(&one.process);
        let is_newer = |one: &Program| {
            let was_refused = self.refused.get(&one.process).is_some_and(|at| *at + LEFT_ALONE > self.now);
            one.process.age() > victim.age() && !self.may_be_spared.contains(&one.process) && !was_refused
        };
        let has_other =
            |is_it: &dyn Fn(&Program) -> bool| rest.iter().any(|one| one.process != victim && is_it(one));
        let reasons = [
            (!terminate, "overuse is to be told alone"),
            (self.before.contains(&victim), "it was there before"),
            (of_slice.iter().any(|one| one.tenant != program.tenant), "the slice has several tenants"),
            (of_slice.iter().any(|one| one.only_claims), "a member only claims the slice"),
            (self.now > self.listed_at.min(self.seen_at) + FRESH, "nobody has looked for long"),
            (!is_over, "the rest fits"),
            (!is_doubted(program) && has_other(&is_doubted), "another one may have lost its work"),
            (!is_doubted(program) && has_other(&is_newer), "a newer one is there"),
        ];
        reasons.into_iter().find_map(|(is_so, why)| is_so.then_some(why))
    }
}

/// A handle of a client's process, which never refers to a later process with the same PID.
#[derive(Clone)]
pub(crate) struct SimHeld {
    mps: Arc<Mutex<Mps>>,
    process: ProcessId,
}

#[derive(Clone)]
pub(crate) struct SimEnforcement {
    pub(crate) daemons: Vec<Arc<Mutex<Mps>>>,
    pub(crate) facts: Arc<Mutex<Facts>>,
}

fn lock(mps: &Mutex<Mps>) -> MutexGuard<'_, Mps> {
    mps.lock().unwrap()
}

impl SimEnforcement {
    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap()
    }

    /// True if the process still runs. A later process with the same PID does not count.
    pub(crate) fn runs(&self, process: ProcessId) -> bool {
        let runs = self.daemons.iter().any(|daemon| {
            lock(daemon).clients.get(&process.pid).is_some_and(|one| one.program.process == process)
        });
        if !runs {
            self.facts().listed.remove(&process);
        }
        runs
    }

    async fn wait_until(&self, until: Duration) {
        let mut has_begun = false;
        poll_fn(|_| {
            let mut facts = self.facts();
            if std::mem::replace(&mut has_begun, true) && facts.now >= until {
                facts.waits_until = None;
                return Poll::Ready(());
            }
            facts.waits_until = Some(until);
            Poll::Pending
        })
        .await;
    }

    /// Simulates a question to a control daemon, with the time that the answer takes. The result is an error if the control
    /// daemon does not answer in time.
    async fn reach(&self, question: &str, mps: &Mutex<Mps>) -> Result<(), String> {
        let begun = self.facts().now;
        let takes = lock(mps).stage.takes.get(question).copied().unwrap_or_default();
        self.wait_until(begun + takes).await;
        lock(mps).turn_during(question);
        let is_late = self.facts().now > begun + ANSWER_TIMEOUT;
        if !lock(mps).answers() || is_late {
            self.wait_until(begun + ANSWER_TIMEOUT).await;
            return Err("has not answered for 5 s".to_owned());
        }
        let mut mps = lock(mps);
        if mps.listener() != Some(mps.pid) || mps.goes_wrong(40) {
            return Err("nobody answers".to_owned());
        }
        Ok(())
    }
}

impl ClientShell for SimEnforcement {
    type Control = Arc<Mutex<Mps>>;
    type Held = SimHeld;
    type GoingOn = ProcessId;

    fn now(&self) -> CoreTime {
        self.facts().now
    }

    async fn pause(&mut self, duration: Duration) {
        let now = self.facts().now;
        self.wait_until(now + duration).await;
    }

    async fn list(&mut self) -> Vec<(Self::Control, ListAnswer)> {
        let mut answers = Vec::new();
        let mut connections = BTreeMap::new();
        for daemon in &self.daemons {
            let answer = self.reach("list", daemon).await.map(|()| {
                let mut mps = lock(daemon);
                let mut clients = BTreeMap::new();
                for (server, pids) in listed(&mut mps) {
                    for pid in pids {
                        let Some(client) = mps.clients.get(&pid) else { continue };
                        let connection = client.program.connection;
                        connections.insert(client.program.process, connection);
                        let on = client.ordinals.iter();
                        let gpus = on.filter_map(|ordinal| mps.gpus.get(*ordinal).cloned()).collect();
                        let connections = Connections::from([Some(connection)]);
                        let started = Some(client.program.process.start_time);
                        clients.insert((server, pid), ListedClient { started, connections, gpus });
                    }
                }
                Some(DaemonClients { gpus: Some(mps.gpus.clone()), clients, ..DaemonClients::default() })
            });
            answers.push((Arc::clone(daemon), answer));
        }
        let mut facts = self.facts();
        (facts.listed, facts.listed_at) = (connections, facts.now);
        drop(facts);
        answers
    }

    fn hold(&mut self, pid: u32) -> Result<Option<SimHeld>, String> {
        for daemon in &self.daemons {
            let mut mps = lock(daemon);
            mps.turn_during("hold");
            let Some(process) = mps.clients.get(&pid).map(|client| client.program.process) else { continue };
            let mut facts = self.facts();
            facts.is_found(pid, Some(process));
            facts.chosen = Some((process, facts.forbids(process)));
            if mps.goes_wrong(40) {
                facts.is_refused(process);
                return Err("no file descriptor is left".to_owned());
            }
            return Ok(Some(SimHeld { mps: Arc::clone(daemon), process }));
        }
        self.facts().is_found(pid, None);
        Ok(None)
    }

    fn is_alive(&self, held: &SimHeld) -> bool {
        self.runs(held.process)
    }

    async fn server_status(&mut self, control: &Self::Control, server: u32) -> Result<ServerStatus, String> {
        self.reach("server status", control).await?;
        let mps = lock(control);
        let status = mps.servers.get(&server).map_or(ServerStatus::Gone, |one| one.status);
        Ok(if mps.is_old { ServerStatus::Unsupported } else { status })
    }

    async fn go_on(&mut self, held: &SimHeld) -> Result<ProcessId, String> {
        lock(&held.mps).turn_during("go on");
        let client = lock(&held.mps).clients.get(&held.process.pid).cloned();
        if client.is_some_and(|client| client.program.is_held) {
            self.facts().is_refused(held.process);
            return Err("it stays stopped".to_owned());
        }
        Ok(held.process)
    }

    /// Checks the promise `work-is-safe`: `forbids` has found no reason to spare the client when the service chose the client,
    /// and the client's server handles no fatal GPU error.
    async fn terminate_client(
        &mut self,
        control: &Self::Control,
        server: u32,
        client: ProcessId,
        may_end: Permit,
    ) -> ClientEnd {
        let is_faulted =
            lock(control).servers.get(&server).is_some_and(|one| one.status == ServerStatus::Fault);
        let why = if is_faulted && !lock(control).is_old { Some("its server handles a fault") } else { None };
        let chosen = self.facts().chosen.filter(|(chosen, _)| *chosen == client);
        let why = why.or_else(|| chosen.map_or(Some("nobody has chosen it"), |(_, why)| why));
        let cause = may_end.cause();
        assert!(
            why.is_none() && cause == Cause::OverBudget,
            "work-is-safe: {client:?} is ended ({cause:?}), and {why:?}"
        );
        lock(control).note(format_args!("end the work of {}", client.pid));
        let answer = self.reach("end the work", control).await;
        let (is_late, is_lost) = {
            let mut mps = lock(control);
            // A control daemon that does not answer in time may still carry out the command later.
            let is_late = answer.is_err() && mps.goes_wrong(2);
            let is_lost = mps.goes_wrong(5) || mps.stage.lost_answers > 0;
            mps.stage.lost_answers = mps.stage.lost_answers.saturating_sub(1);
            (is_late, is_lost)
        };
        let mut has_client = false;
        if answer.is_ok() || is_late {
            has_client = lock(control).loses_work(client);
        }
        let mut facts = self.facts();
        if is_lost || answer.is_err() {
            facts.in_doubt.insert(client);
            return ClientEnd::NotKnown("an answer got lost".to_owned());
        }
        if !has_client {
            facts.is_found(client.pid, None);
            return ClientEnd::NotThere;
        }
        let connection = facts.listed.get(&client).copied().unwrap_or_default();
        facts.ended.insert(client, connection);
        facts.in_doubt.remove(&client);
        ClientEnd::Done
    }
}
