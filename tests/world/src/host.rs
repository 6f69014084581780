//! Simulates the driver and NVML of the host: the lists of GPUs that the service gets from NVML, and GPUs that fall off the
//! bus.

use std::collections::BTreeSet;
use std::time::Duration;

use mps_core::{DriverNews, MpsSwitch};

use super::mps::Mps;
use super::{Dice, GPUS, World};

/// The service lists the GPUs again after this pause while it has no plan or no driver.
const SCAN: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(crate) struct SimNvml {
    /// The number of times that the driver was loaded again. A program that opened the driver before has to open it again.
    loads: u32,
    /// True while NVML does not list the GPUs. NVML still answers questions about each GPU.
    lists_none: bool,
    lost: BTreeSet<String>,
}

impl World {
    pub(crate) fn host_changes(&mut self, dice: &mut Dice) {
        let what = match dice.below(6) {
            0 | 1 => {
                self.nvml.lists_none = !self.nvml.lists_none;
                format!("NVML lists no GPUs: {}", self.nvml.lists_none)
            }
            2 => {
                self.nvml.loads += 1;
                "the driver is loaded anew".to_owned()
            }
            _ => return self.look_again(),
        };
        self.add_to_story(|| what);
        self.tell_of_nvml();
    }

    /// One GPU or all GPUs in `gpus` fall off the bus. A GPU that has already fallen off the bus comes back.
    pub(crate) fn gpus_fall_off(&mut self, gpus: &[String], dice: &mut Dice) {
        let gpus = dice.pick(gpus).filter(|_| dice.one_in(2)).map_or(gpus, std::slice::from_ref);
        for gpu in gpus {
            if !self.nvml.lost.remove(gpu) {
                self.nvml.lost.insert(gpu.clone());
            }
        }
        let lost = self.nvml.lost.clone();
        self.add_to_story(|| format!("these GPUs have fallen off the bus: {lost:?}"));
        self.tell_of_nvml();
    }

    pub(crate) fn nvml_calms_down(&mut self) {
        self.nvml.lists_none = false;
        self.nvml.lost.clear();
        self.look_again();
    }

    pub(crate) fn reaches(&self, gpu: &str) -> bool {
        self.has_driver() && !self.nvml.lost.contains(gpu)
    }

    fn has_driver(&self) -> bool {
        self.service.as_ref().is_some_and(|service| service.driver == Some(self.nvml.loads))
    }

    pub(crate) fn out_of_reach(&self) -> BTreeSet<String> {
        GPUS.iter().filter(|gpu| !self.reaches(gpu)).map(|gpu| (*gpu).to_owned()).collect()
    }

    fn tell_of_nvml(&self) {
        let out_of_reach = self.out_of_reach();
        let tell = |mps: &mut Mps| mps.out_of_reach.clone_from(&out_of_reach);
        self.daemons.values().for_each(|one| tell(&mut one.lock()));
        if let Some(service) = &self.service {
            let watched = service.watched.values().map(|watched| &watched.mps);
            watched.chain(service.starting.values()).for_each(|mps| tell(&mut mps.lock().unwrap()));
        }
    }

    /// The service opens the driver if necessary, and lists the GPUs. Returns true if NVML has listed them. Checks the promise
    /// `a-driver-stays`: a working driver stays in force even if NVML lists no GPUs.
    pub(crate) fn look(&mut self) -> bool {
        let loads = self.nvml.loads;
        let is_listed = loop {
            let Some(service) = &mut self.service else { return false };
            let before = service.driver;
            let news = match before {
                _ if self.nvml.lists_none => DriverNews::Failed,
                Some(before) if before != loads => DriverNews::Unusable,
                _ => DriverNews::Listed(loads),
            };
            let is_another = news.take_effect(&mut service.driver);
            let now = service.driver;
            assert!(
                before != Some(loads) || now == Some(loads),
                "a-driver-stays: a look ({news:?}) has taken the driver from everybody"
            );
            if now.is_some() || !is_another {
                break matches!(news, DriverNews::Listed(_));
            }
        };
        self.add_to_story(|| format!("the service looks at the host, and the GPUs are listed: {is_listed}"));
        self.tell_of_nvml();
        self.plan_next_look();
        is_listed
    }

    fn plan_next_look(&mut self) {
        let next = self.now + SCAN;
        if let Some(service) = self.service.as_mut().filter(|service| service.ending.is_none()) {
            let has_all = service.has_plan && service.driver.is_some();
            service.next_look = (!has_all).then_some(next);
        }
    }

    /// The service lists the GPUs again: regularly while it has no plan or no driver, or at an administrator's request.
    pub(crate) fn look_again(&mut self) {
        let is_ending = self.service.as_ref().is_none_or(|service| service.ending.is_some());
        if !is_ending && self.look() && self.service.as_ref().is_some_and(|service| !service.has_plan) {
            self.begin_to_serve();
        }
    }

    /// A service that has just started lists the GPUs. If MPS is disabled, the service does not wait for a driver.
    pub(crate) fn look_first(&mut self) {
        if self.look() || self.demand.mps != MpsSwitch::On {
            self.begin_to_serve();
        }
    }

    pub(crate) fn look_if_due(&mut self) {
        let due = self.service.as_ref().and_then(|service| service.next_look);
        if due.is_some_and(|due| due <= self.now) {
            self.look_again();
        }
    }
}
