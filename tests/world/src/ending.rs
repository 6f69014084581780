//! The simulated shell through which the service's real code for requests to end GPU work acts on the world. Before each answer
//! the code waits for its turn, so that any event can happen between question and answer.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::Duration;

use mps_core::bindings::Bindings;
use mps_core::mps::ServerStatus;
use mps_core::register::Membership;
use mps_core::serve::ClientsOnGpus;
use mps_core::tenants::{
    ClientEnd, ClientShell, DaemonClients, ListAnswer, ListedClient, Reception, RequestNews, Target,
    TerminationError, TerminationShell,
};
use mps_core::terms::SliceId;
use mps_core::{Cause, CoreTime, Permit};

use super::Dice;
use super::bindings::known_slices;
use super::clients::SimClient;
use super::mps::{Mps, OLD_GPU};
use super::reader::Waits;
use super::tenants::{first_reception, gpu_of};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Replaces [`ANSWER_TIMEOUT`] in a request that a container runtime makes before it sends a signal to a container.
const SHORT_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// A control daemon hangs this long if it has to end a client's work while the server handles a fatal GPU error.
const WAITS_FOR_CLIENT: Duration = Duration::from_secs(32);

/// The most questions that a request may ask control daemons while the world's clock stands still. More questions mean an
/// endless loop.
const MOST_IN_A_MOMENT: usize = 400;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimOwner {
    pub(crate) pid: u32,
    pub(crate) process: Option<u32>,
}

impl fmt::Display for SimOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PID {}", self.pid)
    }
}

pub(crate) type Answer = (Vec<SimOwner>, Result<(), TerminationError<SimOwner>>);

/// `process` is a number that no other process ever has, although another process may later have the same PID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SimProcess {
    pub(crate) pid: u32,
    pub(crate) process: u32,
}

/// A request to end GPU work that the service carries out, and the facts with which the world compares the answer.
#[derive(Debug)]
pub(crate) struct RequestState {
    pub(crate) now: Duration,
    pub(crate) begun: Duration,
    pub(crate) waits: Waits,
    pub(crate) dice: Dice,
    pub(crate) is_calm: bool,
    pub(crate) target: Target,
    /// The bindings at the beginning of the request.
    pub(crate) bindings: Bindings,
    /// The [`SimProcess::process`] of the client that had the request's PID when the request began. None if the request names
    /// no PID, or if no client had this PID.
    pub(crate) named: Option<u32>,
    /// The clients that the request means, and that were at work when the request began.
    pub(crate) wanted: BTreeSet<SimProcess>,
    /// The clients in `wanted` that were at work when their control daemon last listed its clients, by the PID of the control
    /// daemon.
    pub(crate) at_work: BTreeMap<u32, BTreeSet<SimProcess>>,
    /// The PIDs of the control daemons that left out a client in their last list of clients.
    pub(crate) has_left_out: BTreeSet<u32>,
    pub(crate) found: BTreeSet<SimProcess>,
    pub(crate) ended: BTreeSet<SimProcess>,
    /// The work of these clients may have ended: the control daemon's answer got lost.
    pub(crate) lost: BTreeSet<SimProcess>,
    /// The number of fatal GPU errors of each control daemon when it last reported a server's status, by the PID of the control
    /// daemon.
    pub(crate) faults: BTreeMap<u32, usize>,
    pub(crate) steps: usize,
}

impl RequestState {
    pub(crate) fn new(target: Target, now: Duration, dice: Dice, bindings: Bindings) -> Self {
        Self {
            now,
            begun: now,
            waits: Waits::Nothing,
            dice,
            is_calm: true,
            target,
            bindings,
            named: None,
            wanted: BTreeSet::new(),
            at_work: BTreeMap::new(),
            has_left_out: BTreeSet::new(),
            found: BTreeSet::new(),
            ended: BTreeSet::new(),
            lost: BTreeSet::new(),
            faults: BTreeMap::new(),
            steps: 0,
        }
    }

    fn goes_wrong(&mut self, most: usize) -> bool {
        !self.is_calm && self.dice.one_in(most)
    }

    pub(crate) fn is_awake(&self) -> bool {
        match self.waits {
            Waits::Until(at) | Waits::Event { until: at, .. } => self.now >= at,
            Waits::Nothing | Waits::Turn(_) => true,
        }
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.begun + self.target.timeout()
    }

    pub(crate) fn is_out_of_time(&self) -> bool {
        self.now >= self.deadline()
    }

    fn means(&self, pid: u32, client: &SimClient) -> bool {
        client.is_meant(pid, &self.target, self.named, &self.bindings)
    }
}

#[derive(Clone)]
pub(crate) struct Reached {
    pub(crate) pid: u32,
    pub(crate) mps: Arc<Mutex<Mps>>,
    /// `None` if the service does not know the GPUs of the control daemon.
    pub(crate) gpus: Option<Vec<String>>,
}

#[derive(Clone)]
pub(crate) struct SimEnding {
    pub(crate) state: Arc<Mutex<RequestState>>,
    pub(crate) daemons: Vec<Reached>,
}

/// A stopped process that the service lets run again, since the control daemon can't end the work of a stopped process.
pub(crate) struct SimGoingOn(SimProcess);

fn faulted(one: &Reached) -> BTreeSet<u32> {
    let mps = one.mps.lock().unwrap();
    let faulted = mps.servers.iter().filter(|(_, one)| one.status == ServerStatus::Fault && !mps.is_old);
    faulted.map(|(pid, _)| *pid).collect()
}

impl SimEnding {
    pub(crate) fn state(&self) -> MutexGuard<'_, RequestState> {
        self.state.lock().unwrap()
    }

    async fn wait(&self, waits: Waits) {
        let mut has_begun = false;
        poll_fn(|_| {
            let mut state = self.state();
            if has_begun && state.is_awake() {
                state.waits = Waits::Nothing;
                return Poll::Ready(());
            }
            if !has_begun {
                state.steps += 1;
                assert!(state.steps < MOST_IN_A_MOMENT, "nothing-spins: a request asks too often");
                (state.waits, has_begun) = (waits, true);
            }
            Poll::Pending
        })
        .await;
    }

    async fn turn(&self) {
        let now = self.state().now;
        self.wait(Waits::Turn(now)).await;
    }

    /// Behaves like a control daemon that does not answer: waits until the timeout of the question, and returns the error.
    async fn is_silent(&self) -> String {
        let is_short = matches!(self.state().target, Target::Signalled(_));
        let until = self.state().now + if is_short { SHORT_ANSWER_TIMEOUT } else { ANSWER_TIMEOUT };
        self.wait(Waits::Until(until)).await;
        "the control daemon has not answered for 5 s".to_owned()
    }

    fn look<T>(&self, pid: u32, look: impl Fn(&SimClient) -> T) -> Option<T> {
        self.daemons.iter().find_map(|one| one.mps.lock().unwrap().clients.get(&pid).map(&look))
    }

    /// Asks the kernel about the client with this PID. The service asks the kernel on another thread, so any event can happen
    /// before the answer.
    async fn ask<T>(&self, pid: u32, look: impl Fn(&SimClient) -> T) -> Result<T, String> {
        self.turn().await;
        if self.state().goes_wrong(60) {
            return Err("the kernel does not answer".to_owned());
        }
        self.look(pid, look).ok_or_else(|| "no such process".to_owned())
    }

    fn take_list(&self, one: &Reached) -> ListAnswer {
        let (mut mps, mut state) = (one.mps.lock().unwrap(), self.state());
        let has_no_server = !mps.is_alive || mps.servers.is_empty();
        if mps.listener().is_none() {
            if !has_no_server {
                return Err("nobody listens".to_owned());
            }
            state.at_work.remove(&one.pid);
            return Ok(None);
        }
        if mps.listener() != Some(mps.pid) {
            let gpus = one.gpus.clone();
            return Ok(Some(DaemonClients { gpus, place_is_taken: true, ..Default::default() }));
        }
        if state.goes_wrong(60) {
            return Err("it has dropped a question".to_owned());
        }
        let listed = super::answers::listed(&mut mps);
        let mut clients = BTreeMap::new();
        for (server, pid) in
            listed.into_iter().flat_map(|(server, pids)| pids.into_iter().map(move |pid| (server, pid)))
        {
            let Some(client) = mps.clients.get(&pid) else { continue };
            let connection = (!state.goes_wrong(30)).then_some(client.tenant.connection);
            let gpus = client.ordinals.iter().map(|ordinal| mps.gpus[*ordinal].clone()).collect();
            clients.insert(
                (server, pid),
                ListedClient { started: None, connections: [connection].into(), gpus },
            );
        }
        let is_faulted = mps.servers.values().any(|one| one.status == ServerStatus::Fault);
        if (mps.gpus.len() > 1 || is_faulted) && !state.has_left_out.remove(&one.pid) && state.goes_wrong(6) {
            let keys: Vec<_> = clients.keys().copied().collect();
            if let Some(key) = state.dice.pick(&keys) {
                clients.remove(key);
                state.has_left_out.insert(one.pid);
            }
        }
        let is_at_work = |one: &SimProcess| {
            let client = mps.clients.get(&one.pid).filter(|client| client.tenant.process == one.process);
            client.is_some_and(SimClient::is_at_work)
        };
        let mut at_work: BTreeSet<SimProcess> = state.wanted.iter().copied().filter(is_at_work).collect();
        // The control daemon's list may lack one client. The service can't know this client if its work began after the
        // previous list. So `at_work` keeps only clients that were already at work at the time of the previous list.
        if state.has_left_out.contains(&one.pid)
            && let Some(before) = state.at_work.get(&one.pid)
        {
            at_work.retain(|client| before.contains(client));
        }
        state.at_work.insert(one.pid, at_work);
        Ok(Some(DaemonClients { gpus: one.gpus.clone(), clients, ..Default::default() }))
    }

    fn find(&self, control: u32) -> &Reached {
        self.daemons.iter().find(|one| one.pid == control).unwrap()
    }

    /// The control daemon ends the client's work. The control daemon's answer may get lost afterwards.
    fn end(&self, one: &Reached, server: u32, client: SimProcess) -> ClientEnd {
        let mut mps = one.mps.lock().unwrap();
        mps.note(format_args!("end the work of {}", client.pid));
        if !mps.servers.contains_key(&server) {
            return ClientEnd::NotThere;
        }
        let mut state = self.state();
        match mps.clients.get_mut(&client.pid) {
            Some(there) if there.server == server && there.tenant.process == client.process => {
                let (target, tenant) = (&state.target, &there.tenant);
                assert!(
                    state.means(client.pid, there),
                    "only-the-wanted-are-ended: {tenant:?} with PID {} is ended for {target:?}",
                    client.pid
                );
                there.tenant.has_work = false;
                state.found.remove(&client);
                ClientEnd::Done
            }
            _ => ClientEnd::NotThere,
        }
    }
}

impl ClientShell for SimEnding {
    type Control = u32;
    type Held = SimProcess;
    type GoingOn = SimGoingOn;

    fn now(&self) -> CoreTime {
        self.state().now
    }

    async fn pause(&mut self, duration: Duration) {
        let until = self.state().now + duration;
        self.wait(Waits::Until(until)).await;
    }

    async fn list(&mut self) -> Vec<(u32, ListAnswer)> {
        self.turn().await;
        let faulted_before: Vec<BTreeSet<u32>> = self.daemons.iter().map(faulted).collect();
        let mut listed = Vec::new();
        let mut hangs = false;
        for one in &self.daemons {
            let takes_long = self.state().dice.one_in(3);
            if takes_long {
                self.turn().await;
            }
            let is_hung = {
                let mps = one.mps.lock().unwrap();
                !mps.answers() && mps.listener() == Some(mps.pid)
            };
            hangs |= is_hung;
            let why = "the control daemon has not answered for 5 s".to_owned();
            listed.push((one.pid, if is_hung { Err(why) } else { self.take_list(one) }));
        }
        if hangs {
            self.is_silent().await;
        } else {
            self.turn().await;
        }
        for (((_, known), one), before) in listed.iter_mut().zip(&self.daemons).zip(faulted_before) {
            let Ok(Some(known)) = known else { continue };
            known.faulted = &before | &faulted(one);
            let mps = one.mps.lock().unwrap();
            known.place_is_taken |= mps.listener() != Some(mps.pid);
        }
        listed
    }

    fn hold(&mut self, pid: u32) -> Result<Option<SimProcess>, String> {
        if self.state().goes_wrong(100) {
            return Err("no file descriptor is left".to_owned());
        }
        Ok(self.look(pid, |client| SimProcess { pid, process: client.tenant.process }))
    }

    fn is_alive(&self, held: &SimProcess) -> bool {
        self.look(held.pid, |client| client.tenant.process) == Some(held.process)
    }

    async fn server_status(&mut self, control: &u32, server: u32) -> Result<ServerStatus, String> {
        self.turn().await;
        let one = self.find(*control).clone();
        one.mps.lock().unwrap().turn_during("server status");
        let is_hung = !one.mps.lock().unwrap().answers();
        if is_hung {
            return Err(self.is_silent().await);
        }
        let mps = one.mps.lock().unwrap();
        let mut state = self.state();
        if mps.listener() != Some(mps.pid) || state.goes_wrong(60) {
            return Err("another control daemon answers".to_owned());
        }
        state.faults.insert(one.pid, mps.faults);
        let known = mps.servers.get(&server).map_or(ServerStatus::Gone, |one| one.status);
        Ok(if mps.is_old { ServerStatus::Unsupported } else { known })
    }

    async fn go_on(&mut self, held: &SimProcess) -> Result<SimGoingOn, String> {
        self.turn().await;
        let is_held = self.look(held.pid, |client| client.tenant.is_held);
        if is_held == Some(true) { Err("a debugger holds it".to_owned()) } else { Ok(SimGoingOn(*held)) }
    }

    async fn terminate_client(
        &mut self,
        control: &u32,
        server: u32,
        client: SimGoingOn,
        may_end: Permit,
    ) -> ClientEnd {
        assert_eq!(may_end.cause(), Cause::Asked);
        let one = self.find(*control).clone();
        let pid = client.0.pid;
        // The command names the client only by its PID, so it is about the process that has the PID now. A process that gets
        // the PID during the command keeps its work, since a real kernel does not reuse a PID so soon.
        let Some(process) = self.look(pid, |client| client.tenant.process) else {
            return ClientEnd::NotThere;
        };
        let client = SimProcess { pid, process };
        {
            let mps = one.mps.lock().unwrap();
            let is_faulted = mps.servers.get(&server).is_some_and(|one| one.status == ServerStatus::Fault);
            let was_known = self.state().faults.get(&one.pid) == Some(&mps.faults);
            assert!(
                mps.is_old || !is_faulted || !was_known,
                "a-request-holds-up-nobody: {client:?} is ended at server {server}, which handles a fault"
            );
        }
        self.turn().await;
        let (is_hung, is_there) = {
            let mut mps = one.mps.lock().unwrap();
            let is_faulted = mps.servers.get(&server).is_some_and(|one| one.status == ServerStatus::Fault);
            if is_faulted && mps.answers() && mps.clients.contains_key(&pid) {
                mps.hangs_until = mps.now + WAITS_FOR_CLIENT;
            }
            (!mps.answers(), mps.listener() == Some(mps.pid))
        };
        if is_hung {
            self.state().lost.insert(client);
            let is_done_later = self.state().dice.one_in(2);
            let error = self.is_silent().await;
            if is_done_later && is_there {
                self.end(&one, server, client);
            }
            return ClientEnd::NotKnown(error);
        }
        if !is_there {
            self.state().lost.insert(client);
            return ClientEnd::NotKnown("another control daemon answers".to_owned());
        }
        let answer = self.end(&one, server, client);
        if self.state().goes_wrong(12) {
            self.state().lost.insert(client);
            return ClientEnd::NotKnown("an answer got lost".to_owned());
        }
        if answer == ClientEnd::Done {
            self.state().ended.insert(client);
        }
        answer
    }
}

impl TerminationShell for SimEnding {
    type Owner = SimOwner;

    fn begin_look(&mut self) {}

    async fn users(&mut self, pid: u32) -> Result<Vec<u32>, String> {
        self.ask(pid, |one| one.tenant.users.clone()).await
    }

    async fn slices(&mut self, pid: u32) -> Result<Option<Membership>, String> {
        let bindings = self.state().bindings.clone();
        self.ask(pid, |one| known_slices(&bindings, one)).await
    }

    async fn containers(&mut self, pid: u32) -> Result<BTreeMap<String, bool>, String> {
        self.ask(pid, |one| one.tenant.containers.clone()).await
    }

    async fn control_group(&mut self, pid: u32) -> Result<String, String> {
        self.ask(pid, |one| one.program.group.to_owned()).await
    }

    async fn reception(&mut self, pid: u32, _: u32) -> Result<Option<Reception>, String> {
        match first_reception(pid) {
            Some(first) => Ok(Some(first)),
            None => self.ask(pid, |one| Some(one.tenant.reception())).await,
        }
    }

    async fn owner(&mut self, pid: u32) -> SimOwner {
        let process = self.look(pid, |client| client.tenant.process);
        let is_at_work = self.look(pid, SimClient::is_at_work);
        if let (Some(process), Some(true)) = (process, is_at_work) {
            self.state().found.insert(SimProcess { pid, process });
        }
        SimOwner { pid, process }
    }

    async fn program(&mut self, _: u32) -> String {
        "program".to_owned()
    }

    fn gpus_of(&self, slices: &[SliceId]) -> Vec<String> {
        slices.iter().map(|slice| gpu_of(*slice)).collect()
    }

    async fn clients_on(&mut self, gpus: &[String]) -> ClientsOnGpus {
        self.turn().await;
        let on = |gpu: &String| {
            let mut pids = BTreeSet::new();
            for one in &self.daemons {
                let mut mps = one.mps.lock().unwrap();
                mps.note(format_args!("clients on GPUs"));
                if let Some(listed) = mps.stage.nvml.get(gpu) {
                    return listed.clone();
                }
                if gpu == OLD_GPU || mps.out_of_reach.contains(gpu) {
                    return Err("NVML does not list them".to_owned());
                }
                let there = mps
                    .clients
                    .iter()
                    .filter(|(_, client)| client.ordinals.iter().any(|one| mps.gpus[*one] == *gpu));
                pids.extend(there.map(|(pid, _)| *pid));
            }
            Ok(pids)
        };
        gpus.iter().map(|gpu| (gpu.clone(), on(gpu))).collect()
    }

    fn tell_of_request(&mut self, _: RequestNews, _: u32, _: u32, _: &SimOwner) {}
}
