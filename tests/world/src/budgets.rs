//! The budgets of slices in the simulated world. The service's real code watches the clients of each GPU, and ends clients of
//! slices that exceed their budgets.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use mps_core::tenants::budget::Member;
use mps_core::tenants::{BudgetWatch, Enforcer, OverBudget, SliceBudgets, Victim};
use mps_core::terms::{ProcessId, SliceSize};

use super::bindings::{group_of, seen};
use super::enforcing::{Facts, SimEnforcement, SimHeld};
use super::mps::OLD_GPU;
use super::serving::size_of;
use super::ways::SLICES;
use super::{Dice, GPUS, World};

#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) process: ProcessId,
    /// `None` if the service does not know the slice of the program.
    pub(crate) slice: Option<u32>,
    pub(crate) group: &'static str,
    pub(crate) tenant: usize,
    pub(crate) only_claims: bool,
    pub(crate) mib: u64,
    /// The number of the program's connection to MPS. The program gets another number when it starts its work again.
    pub(crate) connection: u64,
    /// True while a debugger has stopped the program.
    pub(crate) is_held: bool,
}

impl Program {
    pub(crate) fn new(pid: u32, start_time: u64) -> Self {
        let mut dice = Dice::new(start_time ^ u64::from(pid));
        Self {
            process: ProcessId { pid, start_time },
            slice: Some(u32::try_from(dice.below(SLICES)).unwrap()),
            group: group_of(&mut Dice::new(start_time)),
            tenant: usize::from(dice.one_in(12)),
            only_claims: dice.one_in(16),
            mib: 100 * (1 + dice.below(8) as u64),
            connection: 0,
            is_held: dice.one_in(12),
        }
    }

    pub(crate) fn member(&self) -> Member<usize> {
        Member {
            process: self.process,
            memory_mib: Some(self.mib),
            only_claims: self.only_claims,
            tenant: Some(self.tenant),
            stays: false,
        }
    }
}

/// After a new client the service waits this long before it lists the clients of the GPU. So several new clients share one
/// list.
const SHARE: Duration = Duration::from_millis(250);

type SimEnforcer = Enforcer<SimHeld>;

/// A running attempt of the service to end clients of slices that exceed their budgets. The result is the enforcer and the
/// clients that the service has tried to end.
type SimAttempt = Pin<Box<dyn Future<Output = (SimEnforcer, Vec<Victim>)>>>;

pub(crate) struct SimWatch {
    watch: BudgetWatch,
    due: Option<Duration>,
    enforcer: SimEnforcer,
    attempt: Option<SimAttempt>,
    facts: Arc<Mutex<Facts>>,
    over: Arc<Mutex<SimOver>>,
}

type SimOver = Vec<OverBudget<usize>>;

impl SimWatch {
    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.facts.lock().unwrap()
    }

    fn can_come_on(&self, now: Duration) -> bool {
        let waits = |until: Option<Duration>| until.is_some_and(|until| until > now);
        self.due.is_some_and(|due| due <= now) || (self.attempt.is_some() && !waits(self.facts().waits_until))
    }
}

/// Computes the budgets of a GPU's slices from the payload of an order, a number that stands for the configured limits. If
/// `may_terminate` is false, the service ends no client for a budget.
pub(crate) fn budgets_of(payload: u32, may_terminate: bool) -> SliceBudgets {
    let budget = |slice: u32| SliceSize {
        memory_mib: size_of(payload, slice),
        max_clients: 1 + (payload + 1 + slice * (payload % 2)) % 3,
        ..SliceSize::default()
    };
    SliceBudgets {
        budgets: (0..u32::try_from(SLICES).unwrap()).map(budget).collect(),
        terminate: may_terminate && payload % 4 != 3,
    }
}

impl World {
    /// Returns all programs that use a GPU through a control daemon, with the slices that the service finds for them.
    pub(crate) fn programs_on(&self, gpu: &str) -> Vec<Program> {
        let (mut all, living) = (Vec::new(), self.bindings.living());
        for one in self.daemons.values() {
            let mps = one.lock();
            let Some(ordinal) = mps.gpus.iter().position(|one| one == gpu) else { continue };
            let there = mps.clients.values().filter(|client| client.ordinals.contains(&ordinal));
            all.extend(there.map(|client| seen(&living, gpu, &client.program)));
        }
        all
    }

    pub(crate) fn keep_budgets(&mut self) {
        // `is_calm` is true in scripts (`scripted.rs`). `tests/it/histories.rs` repeats each script on a simulated host, where
        // the service only reports overuse. So the service of the world must not end clients for a budget in a script, either.
        let may_terminate = !self.is_calm;
        let mut wanted = BTreeMap::new();
        for order in &self.demand.orders {
            for gpu in &order.gpus {
                wanted.insert(gpu.clone(), (budgets_of(order.payload, may_terminate), self.programs_on(gpu)));
            }
        }
        let now = self.now;
        let Some(service) = &mut self.service else { return };
        service.budgets.retain(|gpu, _| wanted.contains_key(gpu));
        for (gpu, (budgets, there)) in wanted {
            let watched = service.budgets.entry(gpu).or_insert_with(|| SimWatch {
                watch: BudgetWatch::new(budgets.clone(), now),
                due: Some(now),
                enforcer: SimEnforcer::default(),
                attempt: None,
                facts: Arc::default(),
                over: Arc::default(),
            });
            watched.facts().is_in_force(&budgets, &there);
            watched.watch.pursue(budgets);
            watched.over.lock().unwrap().clear();
            watched.due = Some(now);
        }
        self.keep_kernel_limits();
    }

    /// Simulates that a control daemon's log names a new client. So the service soon lists the clients of each GPU on which it
    /// watches budgets.
    pub(crate) fn budgets_hear_of_clients(&mut self) {
        let now = self.now;
        for watched in self.service.iter_mut().flat_map(|service| service.budgets.values_mut()) {
            watched.watch.client_has_come(now);
            let soon = now + SHARE;
            watched.due = Some(watched.due.map_or(soon, |due| due.min(soon)));
        }
    }

    pub(crate) fn budgets_come_on(&self) -> bool {
        let mut watched = self.service.iter().flat_map(|service| service.budgets.values());
        watched.any(|watched| watched.can_come_on(self.now))
    }

    pub(crate) fn budgets_are_at_rest(&self) -> bool {
        let mut watched = self.service.iter().flat_map(|service| service.budgets.values());
        watched.all(|watched| watched.due.is_none() && watched.attempt.is_none())
    }

    pub(crate) fn budgets_wait_until(&self) -> Option<Duration> {
        let watched = self.service.iter().flat_map(|service| service.budgets.values());
        let of = |watched: &SimWatch| {
            let waits_until = watched.facts().waits_until.filter(|_| watched.attempt.is_some());
            watched.due.into_iter().chain(waits_until).min()
        };
        watched.filter_map(of).min()
    }

    /// The service continues its watch over the budgets of one GPU: it lists the clients of the GPU, or continues an attempt to
    /// end clients.
    pub(crate) fn carry_on_budgets(&mut self, dice: &mut Dice) {
        let now = self.now;
        let Some(service) = &self.service else { return };
        let ready = service.budgets.iter().filter(|(_, watched)| watched.can_come_on(now));
        let ready: Vec<String> = ready.map(|(gpu, _)| gpu.clone()).collect();
        let Some(gpu) = dice.pick(&ready).cloned() else { return };
        let is_due =
            service.budgets.get(&gpu).is_some_and(|watched| watched.due.is_some_and(|due| due <= now));
        if is_due {
            self.look_at_budgets(&gpu, dice);
        } else {
            self.go_on_with_attempt(&gpu);
        }
    }

    fn look_at_budgets(&mut self, gpu: &str, dice: &mut Dice) {
        let is_blind = self.goes_wrong(dice);
        let programs = if gpu == OLD_GPU { Vec::new() } else { self.programs_on(gpu) };
        let now = self.now;
        let Some(service) = &mut self.service else { return };
        let daemons: Vec<_> = service.watched.values().map(|one| Arc::clone(&one.mps)).collect();
        let Some(watched) = service.budgets.get_mut(gpu) else { return };
        if is_blind {
            watched.due = watched.watch.is_blind(now);
            watched.over.lock().unwrap().clear();
            return;
        }
        let found: Vec<ProcessId> = programs.iter().map(|program| program.process).collect();
        let mut members: BTreeMap<u32, Vec<Member<usize>>> = BTreeMap::new();
        for program in &programs {
            if let Some(slice) = program.slice {
                members.entry(slice).or_default().push(program.member());
            }
        }
        watched.facts().are_seen(&programs, now);
        let look = watched.watch.decide(&found, members, |process| found.contains(&process), now);
        watched.due = look.due;
        for news in &look.news {
            watched.facts().is_told(news.slice, now);
        }
        let (mut story, attempts) = (Vec::new(), look.begins_attempt);
        *watched.over.lock().unwrap() = look.over;
        story.extend(look.news.iter().map(|news| news.text(&format!("{gpu}-{}", news.slice), "them")));
        if attempts {
            let mut enforcer = std::mem::take(&mut watched.enforcer);
            let mut shell = SimEnforcement { daemons, facts: Arc::clone(&watched.facts) };
            let over = Arc::clone(&watched.over);
            watched.attempt = Some(Box::pin(async move {
                let host = shell.clone();
                let over = || over.lock().unwrap().clone();
                let (victims, _) = enforcer.enforce(&mut shell, over, |process| host.runs(process)).await;
                (enforcer, victims)
            }));
        }
        self.add_to_story(|| format!("look at the clients of {gpu}: {found:?} {story:?} {attempts}"));
        self.bind_recorded(gpu);
    }

    fn go_on_with_attempt(&mut self, gpu: &str) {
        let now = self.now;
        let Some(watched) = self.service.as_mut().and_then(|service| service.budgets.get_mut(gpu)) else {
            return;
        };
        watched.facts().now = now;
        let Some(attempt) = &mut watched.attempt else { return };
        let Poll::Ready((enforcer, victims)) = attempt.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        else {
            return;
        };
        (watched.enforcer, watched.attempt) = (enforcer, None);
        watched.watch.has_attempted(Some(victims.clone()), now);
        self.add_to_story(|| format!("attempt on {gpu}: {victims:?}"));
        self.bury();
    }

    pub(crate) fn program_changes(&mut self, dice: &mut Dice) {
        let daemons: Vec<u32> = self.daemons.keys().copied().collect();
        let Some(one) = dice.pick(&daemons).and_then(|pid| self.daemons.get(pid)) else { return };
        let mut mps = one.lock();
        let clients: Vec<u32> = mps.clients.keys().copied().collect();
        let Some(program) =
            dice.pick(&clients).and_then(|pid| mps.clients.get_mut(pid)).map(|client| &mut client.program)
        else {
            return;
        };
        match dice.below(4) {
            0 => program.is_held = !program.is_held,
            1 => program.connection += 1,
            _ => {
                drop(mps);
                return self.program_takes(dice);
            }
        }
        let program = program.clone();
        drop(mps);
        self.add_to_story(|| format!("{program:?}"));
        self.budgets_hear_of_clients();
    }

    /// The memory of all programs grows and shrinks many times. A service that reported overuse each time would break the
    /// promise `overuse-is-told-in-measure`.
    pub(crate) fn tenant_comes_and_goes(&mut self, dice: &mut Dice) {
        let gpu = *dice.pick(&GPUS).unwrap();
        for round in 0..32 {
            let mib = if round % 2 == 0 { 100_000 } else { 1 };
            for one in self.daemons.values() {
                for client in one.lock().clients.values_mut() {
                    client.program.mib = mib;
                }
            }
            self.look_at_budgets(gpu, dice);
            self.advance(self.now + Duration::from_millis(if mib == 1 { 3100 } else { 100 }));
            if mib == 1 {
                self.look_at_budgets(gpu, dice);
            }
        }
    }
}
