//! Random acts of administrators and tenants, and random accidents, on the simulated host.

use std::collections::{BTreeMap, BTreeSet};

use mps_core::{Configured, Core, CoreEvent, DaemonId, Demand, Goal, MpsSwitch, Order};

use super::kernel_limits::SimKernelLimits;
use super::mps::OLD_GPU;
use super::ways::slices_of;
use super::{Dice, Ending, GPUS, Mode, Mood, Service, World, Written};

pub(crate) fn nothing() -> Demand<u32> {
    Demand {
        orders: Vec::new(),
        left: Vec::new(),
        mps: MpsSwitch::TurnedOff,
        kept: Configured::default(),
        closed: Vec::new(),
    }
}

fn left_order((id, one): (&DaemonId, &Written)) -> Order<u32> {
    Order { id: id.clone(), gpus: one.gpus.clone(), sets_modes: true, payload: 0 }
}

impl World {
    pub(crate) fn any_demand(&mut self, dice: &mut Dice) -> Demand<u32> {
        self.version += 1;
        let sets_modes = !dice.one_in(8);
        if dice.one_in(12) {
            return nothing();
        }
        let mut chosen: Vec<String> = GPUS.iter().map(|gpu| (*gpu).to_owned()).collect();
        chosen.retain(|_| !dice.one_in(3));
        // NVML lists no clients of `OLD_GPU`, so the service can decide little about a fatal GPU error on `OLD_GPU`. Histories
        // about faults therefore choose `OLD_GPU` less often.
        let is_of_faults = self.mood == Mood::Faults;
        chosen.retain(|gpu| gpu != OLD_GPU || !is_of_faults || dice.one_in(3));
        // No control daemon can serve the GPUs in `closed` yet, since programs without MPS use them.
        let mut closed: Vec<String> = chosen.pop_if(|_| dice.one_in(8)).into_iter().collect();
        let payload = if dice.one_in(3) { self.version } else { 0 };
        let order =
            |id: &str, gpus: &[String]| Order { id: id.into(), gpus: gpus.to_vec(), sets_modes, payload };
        let orders = if chosen.is_empty() {
            Vec::new()
        } else if dice.one_in(2) || (is_of_faults && dice.one_in(2)) {
            vec![order("shared", &chosen)]
        } else {
            let mut orders = Vec::new();
            for gpu in &chosen {
                let of_gpu = std::slice::from_ref(gpu);
                if dice.one_in(3) {
                    orders.extend(slices_of(gpu).map(|slice| order(&slice, of_gpu)));
                } else {
                    orders.push(order(gpu, of_gpu));
                }
            }
            orders
        };
        closed.retain(|_| sets_modes);
        let certainly =
            if sets_modes { chosen.iter().chain(&closed).cloned().collect() } else { BTreeSet::new() };
        // Sometimes the service does not know which GPU an entry of the configuration names. The unknown GPU may be any GPU
        // except those in `others`.
        let others = GPUS.iter().filter(|_| sets_modes).map(|gpu| (*gpu).to_owned());
        let others = dice.one_in(6).then(|| others.filter(|_| dice.one_in(2)).collect());
        let kept = Configured { certainly, others: others.filter(|_| sets_modes) };
        Demand { orders, left: Vec::new(), mps: MpsSwitch::On, kept, closed }
    }

    pub(crate) fn reload(&mut self, dice: &mut Dice) {
        let is_ending = self.service.as_ref().is_some_and(|service| service.ending.is_some());
        if is_ending {
            return;
        }
        let demand = self.any_demand(dice);
        // If NVML does not list the GPUs, the service makes no new plan, and the former plan stays in force.
        if self.service.is_none() || self.look() || demand.mps != MpsSwitch::On {
            self.demand = demand;
            self.pursue();
        }
    }

    pub(crate) fn pursue(&mut self) {
        let demand = Demand { left: self.left(), ..self.demand.clone() };
        let Some(service) = &mut self.service else { return };
        let waits = |id: &&DaemonId| service.core.goal(id) == Some(Goal::Retire);
        let waiting = self.state_file.daemons.keys().filter(waits).cloned();
        service.spared = if demand.mps == MpsSwitch::On { BTreeSet::new() } else { waiting.collect() };
        self.demand_of_service(demand);
    }

    fn demand_of_service(&mut self, demand: Demand<u32>) {
        self.add_to_story(|| {
            let orders: Vec<String> =
                demand.orders.iter().map(|one| format!("{} {:?}", one.id, one.gpus)).collect();
            let sets = demand.orders.iter().all(|order| order.sets_modes);
            let modes = if sets { "" } else { ", without compute modes" };
            let mps = if demand.mps == MpsSwitch::On { "" } else { "MPS is off " };
            format!("reload: {mps}{}{modes}; held by others: {:?}", orders.join(", "), demand.closed)
        });
        if let Some(service) = &mut self.service {
            (service.has_plan, service.next_look) = (true, None);
            for order in &demand.orders {
                service.without_modes.remove(&order.id);
                service.without_modes.extend((!order.sets_modes).then(|| order.id.clone()));
            }
        }
        self.on(CoreEvent::Pursue(demand));
        self.keep_budgets();
    }

    /// Returns an order for each control daemon that the state file records and the configuration does not name.
    fn left(&self) -> Vec<Order<u32>> {
        let written = self.state_file.daemons.iter();
        let left = written.filter(|(id, _)| !self.demand.orders.iter().any(|order| order.id == **id));
        left.map(left_order).collect()
    }

    /// An administrator installs another driver. The control daemons of some drivers refuse to serve several users at once.
    pub(crate) fn driver_is_replaced(&mut self) {
        self.refuses_multiuser = !self.refuses_multiuser;
        let refuses = self.refuses_multiuser;
        self.add_to_story(|| format!("the driver refuses multi-user mode: {refuses}"));
    }

    pub(crate) fn kill_service(&mut self) {
        let Some(service) = self.service.take() else { return };
        self.add_to_story(|| "the service is killed".to_owned());
        self.limits_are_left();
        drop(service);
        self.daemons.retain(|_, one| !one.is_paused);
    }

    pub(crate) fn start_service(&mut self) {
        if self.service.is_some() {
            return;
        }
        self.add_to_story(|| "the service starts".to_owned());
        self.read_state_file();
        let changed = self.state_file.modes.keys().cloned().collect();
        let left =
            self.state_file.daemons.iter().map(|(id, written)| (id.clone(), written.gpus.clone())).collect();
        let is_on = self.demand.mps == MpsSwitch::On;
        let found = self.state_file.daemons.keys().filter(|_| !is_on);
        self.service = Some(Service {
            core: Core::new(left, changed),
            driver: None,
            has_plan: false,
            next_look: None,
            tasks: BTreeMap::new(),
            acts: BTreeMap::new(),
            starting: BTreeMap::new(),
            shown: BTreeMap::new(),
            failing: BTreeMap::new(),
            watched: BTreeMap::new(),
            reaches: BTreeMap::new(),
            admissions: BTreeMap::new(),
            budgets: BTreeMap::new(),
            kernel_limits: SimKernelLimits::default(),
            modes: BTreeMap::new(),
            requests: Vec::new(),
            ending: None,
            spared: found.cloned().collect(),
            without_modes: BTreeSet::new(),
            not_ended: BTreeSet::new(),
        });
        self.look_first();
    }

    pub(crate) fn begin_to_serve(&mut self) {
        let is_on = self.demand.mps == MpsSwitch::On;
        let mps = if is_on { MpsSwitch::On } else { MpsSwitch::OffAtStart };
        self.demand_of_service(Demand { mps, left: self.left(), ..self.demand.clone() });
    }

    pub(crate) fn disk_is_full(&mut self, is_full: bool) {
        self.add_to_story(|| {
            format!("the disk of the state file {} full", if is_full { "is" } else { "is not" })
        });
        self.is_disk_full = is_full;
    }

    /// An administrator runs `systemctl stop` (`ForGood`) or `systemctl restart` (`ForRestart`).
    pub(crate) fn end_service(&mut self, dice: &mut Dice) {
        let ending = if dice.one_in(2) { Ending::ForGood } else { Ending::ForRestart };
        self.end_service_for(ending);
    }

    pub(crate) fn end_service_for(&mut self, ending: Ending) {
        let Some(service) = self.service.as_mut().filter(|service| service.ending.is_none()) else { return };
        service.ending = Some(ending);
        self.add_to_story(|| format!("the service ends {ending:?}"));
        let left = self.left_at_stop();
        self.on(match ending {
            Ending::ForGood => CoreEvent::Stop { left },
            Ending::ForRestart => CoreEvent::Leave,
        });
        self.keep_kernel_limits();
    }

    fn left_at_stop(&self) -> Vec<Order<u32>> {
        let written = self.state_file.daemons.iter();
        written.map(left_order).collect()
    }

    pub(crate) fn client_comes(&mut self, dice: &mut Dice) {
        let running: Vec<u32> =
            self.daemons.iter().filter(|(_, one)| !one.is_paused).map(|(pid, _)| *pid).collect();
        let Some(one) = dice.pick(&running).and_then(|pid| self.daemons.get(pid)) else { return };
        let came: Vec<Option<u32>> = (0..=dice.below(4))
            .map(|_| {
                let ordinals = (0..=usize::from(dice.one_in(3))).map(|_| dice.below(one.gpus.len()));
                one.lock().client_comes(ordinals.collect())
            })
            .collect();
        self.add_to_story(|| format!("clients come: {came:?}"));
        self.budgets_hear_of_clients();
    }

    pub(crate) fn client_leaves(&mut self, dice: &mut Dice) {
        let clients = |(pid, one): (&u32, &super::ControlDaemon)| {
            one.lock().clients.keys().map(|client| (*pid, *client)).collect::<Vec<_>>()
        };
        let clients: Vec<(u32, u32)> = self.daemons.iter().flat_map(clients).collect();
        let Some((pid, client)) = dice.pick(&clients).copied() else { return };
        self.add_to_story(|| format!("client {client} of {pid} leaves"));
        if let Some(one) = self.daemons.get(&pid) {
            one.lock().client_leaves(client);
        }
        self.bury();
    }

    pub(crate) fn daemon_dies(&mut self, dice: &mut Dice) {
        let pids: Vec<u32> = self.daemons.keys().copied().collect();
        let Some(pid) = dice.pick(&pids).copied() else { return };
        self.add_to_story(|| format!("control daemon {pid} dies"));
        if let Some(one) = self.daemons.remove(&pid) {
            one.lock().end(None);
        }
    }

    /// An administrator sets the compute mode of a GPU. If the service needs another compute mode there, its next health check
    /// sets the needed mode again.
    pub(crate) fn mode_is_changed(&mut self, dice: &mut Dice) {
        let gpu = (*dice.pick(&GPUS).unwrap()).to_owned();
        let mode = if dice.one_in(2) { Mode::Default } else { Mode::Prohibited };
        self.add_to_story(|| format!("an administrator sets the compute mode of {gpu} to {mode:?}"));
        let is_written = self.state_file.modes.contains_key(&gpu);
        let Some(state) = self.gpus.get_mut(&gpu) else { return };
        state.mode = mode;
        if is_written {
            // The state file already records an earlier compute mode of the GPU. The service may later restore the earlier mode
            // or the administrator's mode. Both are correct, so the checks of compute modes skip this GPU.
            self.strange.insert(gpu);
        } else {
            state.own = mode;
        }
    }
}
