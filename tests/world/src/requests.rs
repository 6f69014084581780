//! The beginning, the steps and the end of requests to end GPU work in the world, and the checks of the answers.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use mps_core::tenants::{LeftClient, Target, Termination, TerminationError, WhyLeft};

use super::clients::SimClient;
use super::ending::{Answer, Reached, RequestState, SimEnding, SimOwner, SimProcess};
use super::reader::Waits;
use super::{Dice, World};

pub(crate) async fn carry_out(target: Target, mut shell: SimEnding) -> Answer {
    let mut termination = Termination::new(target);
    let clock = shell.clone();
    let ended = {
        let mut run = pin!(termination.run(&mut shell));
        poll_fn(|context| match run.as_mut().poll(context) {
            Poll::Ready(ended) => Poll::Ready(Some(ended)),
            Poll::Pending if clock.state().is_out_of_time() => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        })
        .await
    };
    let result = ended.unwrap_or_else(|| Err(termination.out_of_time()));
    (termination.had_work(), result)
}

pub(crate) struct SimRequest {
    state: Arc<Mutex<RequestState>>,
    future: Pin<Box<dyn Future<Output = Answer>>>,
}

impl SimRequest {
    pub(crate) fn advance(&self, now: Duration) {
        let mut state = self.state.lock().unwrap();
        (state.now, state.steps) = (now, 0);
    }

    /// The time at which the request goes on even if no event happens.
    pub(crate) fn due(&self) -> Option<Duration> {
        let state = self.state.lock().unwrap();
        match state.waits {
            Waits::Until(at) => Some(at.min(state.deadline())),
            _ => None,
        }
    }

    pub(crate) fn calm_down(&self) {
        self.state.lock().unwrap().is_calm = true;
    }

    fn comes_on(&self) -> bool {
        let state = self.state.lock().unwrap();
        state.is_awake() || state.is_out_of_time()
    }
}

impl World {
    pub(crate) fn begin_request(&mut self, target: &Target, dice: &mut Dice) {
        let bindings = self.bindings.living();
        let Some(service) = &mut self.service else { return };
        let running = self.daemons.iter().filter(|(_, one)| !one.is_paused);
        let is_watched =
            |pid: u32| service.watched.values().any(|watched| watched.mps.lock().unwrap().pid == pid);
        let daemons: Vec<Reached> = running
            .map(|(pid, one)| Reached {
                pid: *pid,
                mps: Arc::clone(&one.mps),
                gpus: is_watched(*pid).then(|| one.gpus.clone()),
            })
            .collect();
        let wanted_pid = match target {
            Target::Process(pid) | Target::ProcessOf { pid, .. } => Some(*pid),
            Target::Slices(_) | Target::Container(_) | Target::Signalled(_) => None,
        };
        let clients: Vec<(u32, SimClient)> = daemons
            .iter()
            .flat_map(|one| {
                let mps = one.mps.lock().unwrap();
                mps.clients.iter().map(|(pid, client)| (*pid, client.clone())).collect::<Vec<_>>()
            })
            .collect();
        let named = clients.iter().find(|(pid, _)| Some(*pid) == wanted_pid);
        let named = named.map(|(_, client)| client.tenant.process);
        let is_wanted = |(pid, client): &&(u32, SimClient)| {
            client.is_at_work() && client.is_meant(*pid, target, named, &bindings)
        };
        let wanted: BTreeSet<SimProcess> = clients
            .iter()
            .filter(is_wanted)
            .map(|(pid, client)| SimProcess { pid: *pid, process: client.tenant.process })
            .collect();
        let dice = Dice::new(dice.below(usize::MAX) as u64);
        let state = RequestState::new(target.clone(), self.now, dice, bindings);
        let (is_calm, wanted_now) = (self.is_calm, wanted.clone());
        let state = Arc::new(Mutex::new(RequestState { is_calm, named, wanted: wanted_now, ..state }));
        let shell = SimEnding { state: Arc::clone(&state), daemons };
        service.requests.push(SimRequest { state, future: Box::pin(carry_out(target.clone(), shell)) });
        let place = service.requests.len() - 1;
        self.add_to_story(|| format!("somebody asks for the end of {target:?}, which means {wanted:?}"));
        self.carry_on_request(place);
    }

    pub(crate) fn requests_that_come_on(&self) -> Vec<usize> {
        let requests = self.service.iter().flat_map(|service| service.requests.iter().enumerate());
        requests.filter(|(_, request)| request.comes_on()).map(|(place, _)| place).collect()
    }

    pub(crate) fn carry_on_request(&mut self, place: usize) {
        let Some(service) = &mut self.service else { return };
        let request = &mut service.requests[place];
        let polled = request.future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        if let Poll::Ready((had_work, answer)) = polled {
            let request = service.requests.remove(place);
            self.add_to_story(|| format!("the answer is {answer:?}; of {had_work:?} the work was ended"));
            self.check_answer(&request.state.lock().unwrap(), &had_work, &answer);
        }
        self.bury();
    }

    /// Checks the promise `a-request-tells-the-truth`: after a request has succeeded, none of the clients that the request
    /// means is at work. Otherwise the answer names the clients that may still be at work.
    fn check_answer(
        &self,
        request: &RequestState,
        had_work: &[SimOwner],
        answer: &Result<(), TerminationError<SimOwner>>,
    ) {
        let target = &request.target;
        for ended in &request.ended {
            let is_named = had_work.iter().any(|owner| owner.pid == ended.pid);
            assert!(
                is_named,
                "a-request-tells-the-truth: {ended:?} was ended for {target:?}, and is not named"
            );
        }
        match answer {
            Ok(()) | Err(TerminationError::NoSuchClient(_) | TerminationError::NotTheirs { .. }) => {
                let at_work = request.at_work.values().flatten().find(|one| self.is_at_work(**one));
                let promise = match target {
                    Target::Signalled(_) => "a-stop-harms-no-neighbour",
                    _ => "a-request-tells-the-truth",
                };
                assert!(at_work.is_none(), "{promise}: {target:?} is done, and {at_work:?} was at work");
            }
            Err(TerminationError::OutOfTime { left, .. } | TerminationError::Silent { left, .. }) => {
                self.check_left(request, left);
            }
            Err(
                TerminationError::SeveralContainers { .. }
                | TerminationError::Unreadable { .. }
                | TerminationError::Unplaced(_),
            ) => {}
        }
    }

    fn is_at_work(&self, one: SimProcess) -> bool {
        self.daemons.values().any(|daemon| {
            let mps = daemon.lock();
            let client = mps.clients.get(&one.pid).filter(|client| client.tenant.process == one.process);
            client.is_some_and(SimClient::is_at_work)
        })
    }

    /// Checks an answer that names clients which may still be at work. The answer must name each client that the request has
    /// found and that is still at work. The answer may call a client unharmed only if the control daemon has said so.
    fn check_left(&self, request: &RequestState, left: &[LeftClient<SimOwner>]) {
        let target = &request.target;
        for found in request.found.iter().filter(|one| self.is_at_work(**one)) {
            let is_named = left.iter().any(|one| one.pid == found.pid);
            assert!(
                is_named,
                "a-request-tells-the-truth: {found:?} is at work for {target:?}, and not named"
            );
        }
        for lost in &request.lost {
            // The check compares only PIDs, since another process may have got the client's PID just before the control daemon
            // ended the work.
            let is_open =
                |one: &LeftClient<SimOwner>| one.pid == lost.pid && one.why == WhyLeft::MayHaveEnded;
            assert!(
                left.iter().any(is_open),
                "a-request-tells-the-truth: {lost:?} may have ended for {target:?}, and {left:?} does not say so"
            );
        }
    }
}
