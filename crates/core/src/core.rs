//! The decisions about the whole host: which control daemons run, and which control daemon has which GPU.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use crate::lifecycle::{Lifecycle, Next};
use crate::modes::Modes;
use crate::view::DaemonView;
use crate::{
    Act, Cause, CoreEvent, CoreTime, DaemonAct, DaemonId, Demand, Goal, GpuUuid, HeldGpus, MpsSwitch, Order,
    Permit,
};

#[derive(Debug, Clone)]
pub struct Core<P> {
    /// The control daemons that should run, and the control daemons that still have to end. Each has a supervisor, except for a
    /// control daemon that waits for GPUs before its start.
    lifecycles: BTreeMap<DaemonId, Lifecycle<P>>,
    /// The control daemons in the state file that have no supervisor, each with its GPUs. The processes of these control
    /// daemons may have ended.
    left: BTreeMap<DaemonId, Vec<GpuUuid>>,
    modes: Modes,
    /// True once the service is about to exit and leave its control daemons to the next process of the service. From then on,
    /// the core does not change any compute mode.
    leaving: bool,
}

impl<P: Clone + PartialEq> Core<P> {
    /// The state of a service that has just started. `left` has the control daemons in the state file, each with its GPUs. An
    /// earlier process of the service has changed the compute modes of the GPUs in `changed`.
    pub fn new(left: BTreeMap<DaemonId, Vec<GpuUuid>>, changed: BTreeSet<GpuUuid>) -> Self {
        Self { lifecycles: BTreeMap::new(), left, modes: Modes::new(changed), leaving: false }
    }

    pub fn on(&mut self, event: CoreEvent<P>, now: CoreTime) -> Vec<Act<P>> {
        match event {
            CoreEvent::Pursue(demand) => self.pursue(demand),
            CoreEvent::Stop { left } => self.stop(left),
            CoreEvent::Leave => self.leave(),
            CoreEvent::Done { id, written, watched, outcome } => {
                if let Some(one) = self.lifecycles.get_mut(&id) {
                    one.done(written, watched, outcome, now);
                }
            }
            CoreEvent::ModeDone { gpu, outcome } => self.modes.done(&gpu, outcome),
            CoreEvent::Due => {}
        }
        let mut acts = Vec::new();
        loop {
            let before = acts.len();
            self.move_on(now, &mut acts);
            self.see_to_modes(&mut acts);
            if acts.len() == before {
                return acts;
            }
        }
    }

    /// The next moment at which the caller must call [`Self::on`] with [`CoreEvent::Due`]. None if the core only waits for
    /// other events.
    pub fn due(&self) -> Option<CoreTime> {
        self.lifecycles.values().filter_map(Lifecycle::due).min()
    }

    fn pursue(&mut self, demand: Demand<P>) {
        self.modes.pursue(demand.kept, demand.closed);
        // A control daemon that the plan does not need serves its clients until they have ended. If an administrator has just
        // disabled MPS, the control daemon ends at once.
        let end = match demand.mps {
            MpsSwitch::On | MpsSwitch::OffAtStart => Goal::Retire,
            MpsSwitch::TurnedOff => Goal::Stop(Permit::new(Cause::Disabled)),
        };
        let wanted: BTreeSet<&DaemonId> = demand.orders.iter().map(|order| &order.id).collect();
        for (_, one) in self.lifecycles.iter_mut().filter(|(id, _)| !wanted.contains(id)) {
            // A control daemon that already waits for the end of its clients still waits after MPS is disabled. If MPS is
            // enabled again, a control daemon that was to end at once waits for its clients, since the administrator no longer
            // wants to end their work.
            if demand.mps == MpsSwitch::On || one.goal() == Goal::Serve {
                one.pursue(end, None);
            }
        }
        for order in demand.orders {
            match self.lifecycles.get_mut(&order.id) {
                // A control daemon that was about to end serves again. An administrator can thus revert a change of the
                // configuration without waiting for clients to end.
                Some(one) => one.pursue(Goal::Serve, Some(order)),
                None => self.look_after(order, Goal::Serve),
            }
        }
        self.look_after_left(demand.left, end);
    }

    fn stop(&mut self, left: Vec<Order<P>>) {
        self.modes.give_up();
        let goal = Goal::Stop(Permit::new(Cause::Stop));
        self.lifecycles.values_mut().for_each(|one| one.pursue(goal, None));
        self.look_after_left(left, goal);
    }

    fn leave(&mut self) {
        self.leaving = true;
        self.lifecycles.values_mut().for_each(|one| one.pursue(Goal::Leave, None));
    }

    fn look_after_left(&mut self, orders: Vec<Order<P>>, goal: Goal) {
        for order in orders {
            if self.left.contains_key(&order.id) {
                self.look_after(order, goal);
            }
        }
    }

    fn look_after(&mut self, order: Order<P>, goal: Goal) {
        let written = self.left.remove(&order.id);
        self.lifecycles.insert(order.id.clone(), Lifecycle::new(order, goal, written));
    }

    fn move_on(&mut self, now: CoreTime, acts: &mut Vec<Act<P>>) {
        for id in self.lifecycles.keys().cloned().collect::<Vec<_>>() {
            let held = self.held(&id);
            let Some(one) = self.lifecycles.get_mut(&id) else { continue };
            let modes_change = one.gpus(&held).any(|gpu| self.modes.is_under_way(gpu));
            match one.next(&held, modes_change, now) {
                None => {}
                Some(Next::Interrupt) => acts.push(Act::Interrupt { id }),
                Some(Next::Act(act)) => {
                    let (order, goal) = (one.order().clone(), one.goal());
                    if order.sets_modes && matches!(act, DaemonAct::Start | DaemonAct::Serve) {
                        self.modes.may_be_set(one.gpus(&held).cloned());
                    }
                    acts.push(Act::Daemon { id, order, goal, held, act });
                }
                Some(Next::Wait) => acts.push(Act::Release { id }),
                Some(Next::Release) => {
                    let released = self.lifecycles.remove(&id);
                    if let Some(written) = released.as_ref().and_then(|one| one.written().cloned()) {
                        self.left.insert(id.clone(), written);
                    }
                    acts.push(Act::Release { id });
                }
            }
        }
    }

    fn see_to_modes(&mut self, acts: &mut Vec<Act<P>>) {
        if self.leaving {
            return;
        }
        let to_put_back = self.modes.to_put_back(|gpu| {
            self.lifecycles.values().any(|one| one.keeps_mode(gpu))
                || self.left.values().any(|gpus| gpus.contains(gpu))
        });
        for gpu in to_put_back {
            self.modes.begin(&gpu);
            acts.push(Act::PutModeBack(gpu));
        }
        for gpu in self.modes.to_take() {
            self.modes.begin(&gpu);
            acts.push(Act::TakeMode(gpu));
        }
    }

    /// The GPUs in this control daemon's order that other control daemons still have, each with the id of the other control
    /// daemon.
    pub fn held(&self, id: &DaemonId) -> HeldGpus {
        let Some(order) = self.lifecycles.get(id).map(Lifecycle::order) else { return HeldGpus::new() };
        let first = DaemonId::first_that_keeps_from(order.id.tenure());
        let holder = |gpu: &GpuUuid| {
            let mut others =
                self.lifecycles.range(first.clone()..).filter(|(other, one)| one.has(gpu) && *other != id);
            let is_kept = |(_, gpus): &(&DaemonId, &Vec<GpuUuid>)| gpus.contains(gpu);
            let left = || self.left.range(first.clone()..).find(is_kept).map(|(id, _)| id);
            others.next().map(|(other, _)| other).or_else(left).cloned()
        };
        order.gpus.iter().filter_map(|gpu| Some((gpu.clone(), holder(gpu)?))).collect()
    }

    pub fn goal(&self, id: &DaemonId) -> Option<Goal> {
        self.lifecycles.get(id).map(Lifecycle::goal)
    }

    pub fn order(&self, id: &DaemonId) -> Option<&Order<P>> {
        self.lifecycles.get(id).map(Lifecycle::order)
    }

    /// The orders of control daemons that have not started, since other control daemons still have their GPUs.
    pub fn pending(&self) -> impl Iterator<Item = &Order<P>> {
        self.lifecycles.values().filter(|one| one.is_pending()).map(Lifecycle::order)
    }

    /// All GPUs that a control daemon should serve and that another control daemon still has, each with the id of the other
    /// control daemon.
    pub fn kept(&self) -> HeldGpus {
        self.serving().flat_map(|(id, _)| self.held(id)).collect()
    }

    /// True if a control daemon is about to start or to get one more GPU. A control daemon is about to start if each control
    /// daemon that still has one of its GPUs is about to end. A running control daemon is about to get a GPU if the control
    /// daemon that still has the GPU is about to end. `view` returns the view of a control daemon that has a supervisor.
    pub fn is_starting<'v>(&self, view: impl Fn(&DaemonId) -> Option<&'v DaemonView>) -> bool {
        // A control daemon of the state file that has no supervisor keeps its GPUs at least until the next plan, so it is not
        // about to end now.
        let is_put_off = |id: &DaemonId| view(id).is_none_or(|view| view.put_off);
        self.serving().any(|(id, one)| {
            let held = self.held(id);
            if one.is_pending() { !held.values().any(is_put_off) } else { !held.values().all(is_put_off) }
        })
    }

    /// True if each order is in force, or the reason is known why the order is not in force. Until then, the service does not
    /// report to systemd that it is ready.
    pub fn is_settled<'v>(&self, view: impl Fn(&DaemonId) -> Option<&'v DaemonView>) -> bool {
        self.serving().all(|(id, _)| view(id).is_none_or(|view| view.settled)) && !self.is_starting(&view)
    }

    fn serving(&self) -> impl Iterator<Item = (&DaemonId, &Lifecycle<P>)> {
        self.lifecycles.iter().filter(|(_, one)| one.goal() == Goal::Serve)
    }

    /// Returns whether no control daemon should run or still has to end, and no compute mode is being changed. A service that
    /// is stopped can then exit.
    pub fn is_at_rest(&self) -> bool {
        self.lifecycles.is_empty() && self.modes.is_quiet()
    }
}
