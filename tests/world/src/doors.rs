//! The parts of the service that give slices to programs and control groups. Each part asks the core if a slice may be given
//! now.

use std::sync::Arc;

use mps_core::access::{self, Asker, Obstacle, Standing};
use mps_core::bindings::BoundBy;
use mps_core::terms::SliceId;
use mps_core::{DaemonAct, DaemonId, Order};

use super::bindings::group_of;
use super::mps::Setting;
use super::serving::{only_slice, setting_of};
use super::tenants::{gpu_of, slice_of};
use super::ways::{all_slices, slices};
use super::{Dice, GPUS, World};

impl World {
    /// Returns the service's answer to a program that asks for a slice. All parts of the service must give this answer.
    pub(crate) fn may_have(&self, slice: &SliceId, asker: Asker<'_>) -> Result<(), Obstacle> {
        let taker = asker.kept_out_by(slice, self.bindings.registry(), self.now.as_secs(), self.use_of());
        access::may_have(Standing {
            unusable: None,
            drained: self.is_drained(&slice.to_string()),
            taken_by: taker.map(|one| one.name().to_owned()),
            unserved: (!self.shows_as_served(slice)).then(String::new),
        })
    }

    pub(crate) fn any_slice(&self, dice: &mut Dice) -> SliceId {
        let of_orders = || self.demand.orders.iter().flat_map(|order| slices(&order.id, &order.gpus));
        let all: Vec<(String, String)> = if dice.one_in(8) {
            all_slices(&GPUS.map(str::to_owned)).collect()
        } else {
            of_orders().collect()
        };
        let (name, gpu) =
            dice.pick(&all).cloned().unwrap_or_else(|| ("0a:00.0-0".to_owned(), "0a:00.0".to_owned()));
        slice_of(&gpu, only_slice(&DaemonId::from(name.as_str())).unwrap())
    }

    fn order_of(&self, slice: &SliceId) -> Option<&Order<u32>> {
        let has =
            |order: &&Order<u32>| slices(&order.id, &order.gpus).any(|(name, _)| name == slice.to_string());
        self.demand.orders.iter().find(has)
    }

    /// True if the service publishes that a new program of the slice gets a server with the limits of the slice.
    fn shows_as_served(&self, slice: &SliceId) -> bool {
        let (Some(service), Some(order)) = (&self.service, self.order_of(slice)) else { return false };
        let serves =
            service.tasks.get(&order.id).is_some_and(|task| task.act == DaemonAct::Serve && !task.retiring);
        let is_missing = |id: &DaemonId| {
            service.admissions.get(id).is_some_and(|admission| admission.is_missing(&slice.to_string()))
        };
        let is_shown = |watched: &super::serving::Watched| {
            watched.mps.lock().unwrap().reader.shown.serves(&gpu_of(*slice), order)
        };
        service.has_plan
            && service.ending.is_none()
            && serves
            && !is_missing(&order.id)
            && service.watched.get(&order.id).is_some_and(is_shown)
    }

    /// Checks the promise `one-answer`: a program that may have a slice, and starts at once, reaches a control daemon with the
    /// limits of the slice. The check is skipped if an event has happened that the service can't know yet.
    pub(crate) fn check_is_served(&self, slice: &SliceId) {
        let name = slice.to_string();
        assert!(!self.is_drained(&name), "one-answer: {name} is drained, and given");
        let order = self.order_of(slice);
        let order = order.unwrap_or_else(|| panic!("one-answer: {name} is of no order, and given"));
        let watched = self.service.as_ref().and_then(|service| service.watched.get(&order.id));
        let watched = watched.unwrap_or_else(|| panic!("one-answer: nobody serves {name}, and it is given"));
        let mps = watched.mps.lock().unwrap();
        if mps.has_news() || self.meddled.contains(&name) {
            return;
        }
        let leads = self.leads_to(&name);
        assert!(leads == Some(mps.pid), "one-answer: {name} leads to {leads:?} and not to {}", mps.pid);
        let gpu = gpu_of(*slice);
        let ordinal = mps.gpus.iter().position(|one| *one == gpu);
        let ordinal = ordinal.unwrap_or_else(|| panic!("one-answer: {} has no {gpu}", mps.pid));
        let of_slice = |one: Setting| (one.percentage, one.mib[ordinal]);
        let differing = mps.differing_in(of_slice, setting_of(order, &mps.gpus), false);
        assert!(differing.is_none(), "one-answer: {name} is given, and {differing:?}");
    }

    /// A program asks for a slice, or root asks to bind a control group to a slice. If the service agrees, a program starts in
    /// the slice at once.
    pub(crate) fn program_asks(&mut self, dice: &mut Dice) {
        if self.service.as_ref().is_none_or(|service| service.ending.is_some()) {
            return;
        }
        let (slice, group, shares) = (self.any_slice(dice), group_of(dice), dice.one_in(4));
        let may_begin = if dice.one_in(2) {
            self.bind(group, &slice, BoundBy::Root, shares)
        } else {
            self.takes(&slice, group, shares, dice)
        };
        if may_begin {
            self.begins(&slice, group);
        }
    }

    fn takes(&mut self, slice: &SliceId, group: &'static str, shares: bool, dice: &mut Dice) -> bool {
        let control_group = Some(group).filter(|_| !dice.one_in(3));
        let answer = self.may_have(slice, Asker { control_group, by: BoundBy::Platform, shares });
        self.add_to_story(|| format!("a program of {control_group:?} asks for {slice:?}: {answer:?}"));
        if answer.is_ok() {
            self.check_is_served(slice);
        }
        answer.is_ok()
    }

    fn begins(&mut self, slice: &SliceId, group: &'static str) {
        let name = slice.to_string();
        let Some(one) = self.leads_to(&name).and_then(|pid| self.daemons.get(&pid)) else { return };
        let mps = Arc::clone(&one.mps);
        let came = mps.lock().unwrap().program_comes(&gpu_of(*slice), slice.ordinal, group);
        self.add_to_story(|| format!("a client comes to {name}: {came:?}"));
        self.check_slices_follow_bindings();
        self.budgets_hear_of_clients();
    }

    /// Checks that at the end of a history the service gives each served slice that is not drained to a program that accepts to
    /// share the slice.
    pub(crate) fn check_slices_are_given(&self) {
        let asker = Asker { control_group: None, by: BoundBy::Platform, shares: true };
        for order in &self.demand.orders {
            for (name, gpu) in slices(&order.id, &order.gpus).filter(|(name, _)| !self.is_drained(name)) {
                let slice = slice_of(&gpu, only_slice(&DaemonId::from(name.as_str())).unwrap());
                let answer = self.may_have(&slice, asker);
                assert!(answer.is_ok(), "one-answer: {name} is served, and refused: {answer:?}");
                self.check_is_served(&slice);
            }
        }
    }
}
