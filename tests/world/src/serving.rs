//! The service's acts about running control daemons in the simulated world. Each act is the service's real code, as a future
//! that the world polls once for each turn.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use mps_core::serve::{Ended, Failure, Judged, Known, Serving, Wanted};
use mps_core::terms::ServedGpu;
use mps_core::view::DaemonView;
use mps_core::{ActOutcome, Cause, DaemonAct, DaemonId, HeldGpus, Order, RunUse, Tenure, WhyFailed};

use super::edge::SimShell;
use super::mps::{CAPACITY, Mps, OLD_GPU, Setting};
use super::reader::{Reader, Waits};
use super::requests::SimRequest;
use super::{ControlDaemon, Dice, Mode, Task, World};

pub(crate) struct Watched {
    pub(crate) mps: Arc<Mutex<Mps>>,
    known: Rc<RefCell<Known>>,
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.known.try_borrow() {
            Ok(known) => write!(f, "{known:?}"),
            Err(_) => write!(f, "the running act changes the facts"),
        }
    }
}

impl Watched {
    /// The control daemon has ended. The service now reports the clients that a fatal GPU error has hit, unless it has already
    /// reported them.
    pub(crate) fn end(self) {
        let hit = self.known.borrow_mut().take_hit();
        if let Some((server, hit)) = hit {
            for (ordinal, clients) in hit {
                self.mps.lock().unwrap().tell_hit(server, ordinal, &clients);
            }
        }
        let mps = self.mps.lock().unwrap();
        let untold = mps.reader.read.difference(&mps.reader.told).next();
        assert!(
            untold.is_none(),
            "who-was-hit-is-told: {untold:?} is not told, and its control daemon has ended"
        );
    }
}

/// A running act about a control daemon, as a future. The result has three parts: the outcome, true if the control daemon has
/// ended, and the failure or the judgement with which the act has ended.
pub(crate) type RunningAct =
    Pin<Box<dyn Future<Output = (ActOutcome, bool, Option<Result<Judged, Failure>>)>>>;

impl ControlDaemon {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Mps> {
        self.mps.lock().unwrap()
    }
}

impl fmt::Debug for ControlDaemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mps = self.lock();
        write!(f, "control daemon {} with {:?} and {} clients", mps.pid, mps.gpus, mps.clients.len())
    }
}

pub(crate) fn percentage_of(payload: u32) -> u8 {
    u8::try_from(10 + payload % 80).unwrap()
}

const LARGEST: u32 = 1;

/// Computes the memory of a slice in MiB from the payload of an order, a number that stands for the configured limits. If the
/// payload is odd, the slices of a GPU differ in size.
pub(crate) fn size_of(payload: u32, slice: u32) -> u64 {
    1024 * u64::from(1 + payload % 7) - 256 * u64::from((LARGEST - slice) * (payload % 2))
}

/// Returns the ordinal of the slice if the control daemon serves a single slice. `None` if the control daemon serves whole
/// GPUs.
pub(crate) fn only_slice(id: &DaemonId) -> Option<u32> {
    Some(id.only_slice()?.ordinal)
}

/// Returns the memory limit in MiB that an order gives to a control daemon: the memory of the largest slice that the control
/// daemon serves.
fn mib_of(order: &Order<u32>) -> u64 {
    size_of(order.payload, only_slice(&order.id).unwrap_or(LARGEST))
}

pub(crate) fn setting_of(order: &Order<u32>, gpus: &[String]) -> Setting {
    let mut setting = Setting { percentage: percentage_of(order.payload), mib: [0; 3] };
    for (mib, gpu) in setting.mib.iter_mut().zip(gpus) {
        if order.gpus.contains(gpu) {
            *mib = mib_of(order);
        }
    }
    setting
}

/// Several control daemons can take turns on a GPU only in compute mode DEFAULT.
pub(crate) fn mode_of(tenure: Tenure) -> Mode {
    match tenure {
        Tenure::Alone => Mode::Exclusive,
        Tenure::InTurns => Mode::Default,
    }
}

pub(crate) fn wanted(task: &Task) -> Wanted {
    let payload = task.order.payload;
    let gpu = |uuid: &String| ServedGpu {
        uuid: uuid.clone(),
        id: None,
        sizes: BTreeMap::new(),
        memory_limit_mib: mib_of(&task.order),
        limits_enforced: uuid != OLD_GPU,
        capacity: u32::try_from(CAPACITY).unwrap(),
        // If several control daemons take turns on a GPU, NVML lists the clients of all of them, and does not say which client
        // belongs to which control daemon.
        clients_listed: uuid != OLD_GPU && task.order.id.tenure() == Tenure::Alone,
    };
    Wanted {
        id: task.order.id.clone(),
        gpus: task.order.gpus.iter().map(gpu).collect(),
        thread_percentage: percentage_of(payload),
        prewarm: true,
        retiring: task.retiring,
        guard_period: (only_slice(&task.order.id) == Some(0)).then_some(Duration::from_secs(2)),
        held: task.held.iter().map(|gpu| (gpu.clone(), DaemonId::from("another"))).collect::<HeldGpus>(),
        sets_modes: task.order.sets_modes,
        fault_grace: Duration::from_secs(5),
    }
}

pub(crate) fn failed(failure: Failure) -> (ActOutcome, bool, Option<Result<Judged, Failure>>) {
    let why = failure.why();
    (ActOutcome::Failed(why), why == WhyFailed::Gone, Some(Err(failure)))
}

/// Carries out an act about a control daemon as the service's supervisor does. [`RunningAct`] explains the result.
async fn carry_out(
    act: DaemonAct,
    mut serving: Serving<'_, SimShell>,
) -> (ActOutcome, bool, Option<Result<Judged, Failure>>) {
    let (outcome, has_ended) = match act {
        DaemonAct::TakeOver => match serving.take_over().await {
            Ok(runs) => (ActOutcome::Done, !runs),
            Err(failure) => return failed(failure),
        },
        DaemonAct::Serve => match serving.serve().await {
            Ok(Ended::Again) => (ActOutcome::Again, false),
            Ok(Ended::Stopped) => (ActOutcome::Ended, true),
            Err(failure) => return failed(failure),
        },
        DaemonAct::Judge => {
            let judged = serving.judge().await;
            let run_use = judged.run_use();
            return (ActOutcome::Used(run_use), run_use == RunUse::Gone, Some(Ok(judged)));
        }
        DaemonAct::End(permit) if serving.end(permit).await.is_ok() => (ActOutcome::Ended, true),
        DaemonAct::End(_) => (ActOutcome::Lives, false),
        DaemonAct::Start | DaemonAct::Rest(_) | DaemonAct::Leave => (ActOutcome::Done, false),
    };
    (outcome, has_ended, None)
}

impl World {
    /// A supervisor begins to watch a control daemon's process. `has_just_started` is false if an earlier service has started
    /// the process.
    pub(crate) fn watch(&mut self, id: &DaemonId, pid: u32, has_just_started: bool) {
        let (Some(one), Some(service)) = (self.daemons.get(&pid), &mut self.service) else { return };
        let mps = Arc::clone(&one.mps);
        let (gpus, multiuser) = {
            let mut mps = mps.lock().unwrap();
            let new = Reader::new(mps.read_until);
            let before = std::mem::replace(&mut mps.reader, new);
            mps.reader.shown = if has_just_started {
                before.shown
            } else {
                service.shown.get(id).cloned().unwrap_or_default()
            };
            (mps.gpus.clone(), !mps.serves_one_user)
        };
        let known = Rc::new(RefCell::new(Known::new(gpus, multiuser, has_just_started, self.now)));
        service.watched.insert(id.clone(), Watched { mps, known });
    }

    /// Lets the act about this control daemon go on by one turn. Returns the outcome when the act has finished.
    pub(crate) fn drive(&mut self, id: &DaemonId, task: &Task, dice: &mut Dice) -> Option<ActOutcome> {
        let is_under_way = self.service.as_ref()?.acts.contains_key(id);
        if !is_under_way && task.act == DaemonAct::Start {
            self.begin_start(id, task, dice);
        } else if !is_under_way && task.act == DaemonAct::TakeOver {
            let adopted = self.adopt(id, dice);
            if adopted.is_some() {
                return adopted;
            }
        }
        let has_begun = is_under_way || task.act == DaemonAct::Start || self.begin_act(id, task);
        if !has_begun {
            return Some(match task.act {
                DaemonAct::Judge => ActOutcome::Used(RunUse::Gone),
                DaemonAct::TakeOver => ActOutcome::Done,
                _ => ActOutcome::Ended,
            });
        }
        self.spawn(id, task);
        self.give_turn(id);
        let mut act = self.service.as_mut()?.acts.remove(id)?;
        let polled = act.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        self.check_who_was_hurt(id);
        self.bury();
        match polled {
            Poll::Pending => {
                self.service.as_mut()?.acts.insert(id.clone(), act);
                None
            }
            Poll::Ready((outcome, has_ended, why)) => {
                self.has_failed(id, why);
                if has_ended {
                    self.change_view(id, DaemonView::has_ended);
                    self.forget(id);
                }
                Some(outcome)
            }
        }
    }

    /// A supervisor begins to take over the process that the state file records. Returns the outcome if the act is already
    /// over, and `None` if the act goes on.
    fn adopt(&mut self, id: &DaemonId, dice: &mut Dice) -> Option<ActOutcome> {
        let living = self.living(id).map(|(pid, _)| pid);
        let Some(pid) = living else {
            self.forget(id);
            return Some(ActOutcome::Done);
        };
        if self.goes_wrong(dice) {
            let no_descriptor = Failure::Failed("the service has no free file descriptor".to_owned());
            self.has_failed(id, Some(Err(no_descriptor)));
            return Some(ActOutcome::Failed(WhyFailed::Ill));
        }
        self.watch(id, pid, false);
        None
    }

    fn begin_act(&mut self, id: &DaemonId, task: &Task) -> bool {
        let Some(admission) = self.admission(id, &task.order.gpus, task.retiring) else { return false };
        let Some(service) = &mut self.service else { return false };
        let Some(watched) = service.watched.get(id) else { return false };
        let reach = Rc::clone(service.reaches.entry(id.clone()).or_default());
        let gpus = {
            let mut mps = watched.mps.lock().unwrap();
            mps.reader.shown.takes(&task.order);
            mps.gpus.clone()
        };
        let shell = SimShell {
            mps: Arc::clone(&watched.mps),
            id: id.clone(),
            gpus: task.order.gpus.clone(),
            setting: setting_of(&task.order, &gpus),
            admission,
        };
        let (known, wanted, act) = (Rc::clone(&watched.known), wanted(task), task.act);
        // The future keeps two `RefCell`s borrowed across `await`. No other code borrows them meanwhile, since a control daemon
        // has only one act at a time.
        #[allow(clippy::await_holding_refcell_ref)]
        let under_way = async move {
            let (mut known, mut reach) = (known.borrow_mut(), reach.borrow_mut());
            carry_out(act, Serving::new(shell, &mut known, &mut reach, wanted)).await
        };
        service.acts.insert(id.clone(), Box::pin(under_way));
        true
    }

    pub(crate) fn mps_of(&self, id: &DaemonId) -> Option<Arc<Mutex<Mps>>> {
        let service = self.service.as_ref()?;
        let watched = || service.watched.get(id).map(|watched| &watched.mps);
        service.starting.get(id).or_else(watched).cloned()
    }

    pub(crate) fn change_modes(&mut self, id: &DaemonId) {
        let Some(mps) = self.mps_of(id) else { return };
        let steps = std::mem::take(&mut mps.lock().unwrap().reader.mode_steps);
        for (gpu, half) in steps {
            self.take_mode(&gpu, mode_of(id.tenure()), half);
        }
    }

    /// Shows the act the present state of the world, and lets the act go on if it waits for a turn.
    fn give_turn(&mut self, id: &DaemonId) {
        self.change_modes(id);
        let Some(mps) = self.mps_of(id) else { return };
        let mut mps = mps.lock().unwrap();
        mps.out_of_reach = self.out_of_reach();
        let ours = self.gpus.iter().filter(|(_, gpu)| gpu.mode == mode_of(id.tenure()));
        mps.with_our_mode = ours.map(|(gpu, _)| gpu.clone()).collect();
        mps.disk_is_full = self.is_disk_full;
        mps.reader.disk_was_full |= self.is_disk_full;
        if let Waits::Turn(_) = mps.reader.waits {
            mps.reader.waits = Waits::Nothing;
        }
    }

    /// Checks the promise `work-is-safe` when clients lose their work: the service ends a client only for a stop, for disabled
    /// MPS, by an administrator's force, or after a fatal GPU error has hit the client.
    fn check_who_was_hurt(&mut self, id: &DaemonId) {
        let Some(watched) = self.service.as_ref().and_then(|service| service.watched.get(id)) else { return };
        let mut mps = watched.mps.lock().unwrap();
        for hurt in std::mem::take(&mut mps.hurt) {
            let is_forced = hurt.cause == Cause::Forced;
            assert!(!is_forced || !hurt.is_given_up, "given-up-is-not-done: {hurt:?} of {id}");
            let is_asked_for = match hurt.cause {
                // `check_work_is_safe` has already checked these two causes when the act began.
                Cause::Stop | Cause::Disabled => true,
                Cause::Forced => hurt.is_forced,
                _ => hurt.is_hit,
            };
            assert!(is_asked_for, "work-is-safe: {hurt:?} of {id}, and nobody has asked for it");
        }
    }

    pub(crate) fn bury(&mut self) {
        self.daemons.retain(|_, one| one.lock().is_alive);
    }

    pub(crate) fn advance(&mut self, now: Duration) {
        self.now = now;
        for one in self.daemons.values() {
            one.lock().advance(now);
        }
        // An act may still run for a control daemon that is not in `daemons`: the control daemon has ended or is starting.
        if let Some(service) = &self.service {
            let watched = service.watched.values().map(|watched| &watched.mps);
            watched.chain(service.starting.values()).for_each(|mps| mps.lock().unwrap().advance(now));
            service.requests.iter().for_each(|request| request.advance(now));
        }
        self.bury();
    }

    pub(crate) fn next_moment(&self) -> Option<Duration> {
        let of_core = self.service.as_ref().and_then(|service| service.core.due());
        let of_daemons = self.daemons.values().filter_map(|one| one.lock().due());
        let watched = self.service.iter().flat_map(|service| service.watched.values());
        let of_acts = watched.filter_map(|watched| watched.mps.lock().unwrap().waits_until());
        let next_look = self.service.as_ref().and_then(|service| service.next_look);
        let requests = self.service.iter().flat_map(|service| &service.requests);
        let of_requests = requests.filter_map(SimRequest::due);
        of_core
            .into_iter()
            .chain(next_look)
            .chain(of_daemons)
            .chain(of_acts)
            .chain(of_requests)
            .chain(self.budgets_wait_until())
            .chain(self.kernel_limits_wait_until())
            .min()
    }

    pub(crate) fn can_come_on(&self, id: &DaemonId) -> bool {
        let Some(service) = &self.service else { return false };
        let waits = |watched: &Watched| !watched.mps.lock().unwrap().is_awake();
        let is_interrupted = service.tasks.get(id).is_some_and(|task| task.is_interrupted);
        let starts = service.starting.contains_key(id);
        is_interrupted
            || starts
            || !(service.acts.contains_key(id) && service.watched.get(id).is_some_and(waits))
    }
}

pub(crate) type Reaches = BTreeMap<DaemonId, Rc<RefCell<mps_core::serve::GpuReach>>>;
