//! The simulated shell of the service. The shell carries out acts step by step, and any trouble can happen between two steps.

use mps_core::serve::{Failing, Failure, Judged};
use mps_core::view::DaemonView;
use mps_core::{ActOutcome, DaemonAct, DaemonId, ModeOutcome, WhyFailed};

use super::reader::Shown;
use super::{Dice, Mode, Task, World};

impl World {
    pub(crate) fn carry_on(&mut self, dice: &mut Dice) {
        let Some(service) = &self.service else { return };
        let can_come_on = |(id, _): &(&DaemonId, &Task)| self.can_come_on(id);
        let tasks: Vec<(&DaemonId, &Task)> = service.tasks.iter().filter(can_come_on).collect();
        let modes: Vec<(&String, &(bool, usize))> = service.modes.iter().collect();
        if self.budgets_come_on() && ((tasks.is_empty() && modes.is_empty()) || dice.one_in(3)) {
            return self.carry_on_budgets(dice);
        }
        if self.kernel_limits_come_on() && ((tasks.is_empty() && modes.is_empty()) || dice.one_in(3)) {
            return self.carry_on_kernel_limits(dice);
        }
        let requests = self.requests_that_come_on();
        if !requests.is_empty() && (tasks.is_empty() && modes.is_empty() || dice.one_in(3)) {
            return self.carry_on_request(*dice.pick(&requests).unwrap());
        }
        if !modes.is_empty() && (tasks.is_empty() || dice.one_in(3)) {
            let (gpu, (takes, step)) = dice.pick(&modes).map(|(gpu, mode)| ((*gpu).clone(), **mode)).unwrap();
            if takes {
                self.take_mode_by_itself(&gpu, step);
            } else {
                self.put_mode_back(&gpu, step, dice);
            }
            return;
        }
        let picked = dice.pick(&tasks).map(|(id, task)| ((*id).clone(), (*task).clone()));
        let Some((id, task)) = picked else { return };
        // An act that the core wants to interrupt may end by itself before the interruption.
        if task.is_interrupted && !dice.one_in(4) {
            return self.finish(&id, ActOutcome::Interrupted);
        }
        if let Some(outcome) = self.step_of(&id, &task, dice) {
            self.finish(&id, outcome);
        } else if let Some(task) = self.service.as_mut().and_then(|service| service.tasks.get_mut(&id)) {
            task.step += 1;
        }
    }

    fn step_of(&mut self, id: &DaemonId, task: &Task, dice: &mut Dice) -> Option<ActOutcome> {
        match task.act {
            DaemonAct::Leave | DaemonAct::Rest(_) => Some(ActOutcome::Done),
            _ => self.drive(id, task, dice),
        }
    }

    pub(crate) fn goes_wrong(&self, dice: &mut Dice) -> bool {
        !self.is_calm && dice.one_in(8)
    }

    /// Records the failure with which an act about a control daemon has ended. If a later act finds programs that prevent the
    /// end of the failed control daemon, the function adds these programs to the recorded failure.
    pub(crate) fn has_failed(&mut self, id: &DaemonId, why: Option<Result<Judged, Failure>>) {
        let (view, now) = (self.shown(id).view, self.now);
        let Some(service) = &mut self.service else { return };
        let failure = match why {
            None => return,
            Some(Ok(Judged::Ended(failure)) | Err(failure)) => failure,
            Some(Ok(judged)) => {
                if let Some(failing) = service.failing.get_mut(id) {
                    failing.add(&judged);
                }
                return;
            }
        };
        let is_gone = failure.why() == WhyFailed::Gone;
        let failing = Failing::new(failure, &view, now);
        service.failing.insert(id.clone(), failing.clone());
        if is_gone {
            self.change_view(id, |view| failing.end(view));
        }
    }

    pub(crate) fn shown(&self, id: &DaemonId) -> Shown {
        let of_run = self.mps_of(id).map(|mps| mps.lock().unwrap().reader.shown.clone());
        let kept = || self.service.as_ref().and_then(|service| service.shown.get(id).cloned());
        of_run.or_else(kept).unwrap_or_default()
    }

    pub(crate) fn change_view(&mut self, id: &DaemonId, change: impl FnOnce(&mut DaemonView)) {
        let mut shown = self.shown(id);
        change(&mut shown.view);
        if let Some(mps) = self.mps_of(id) {
            mps.lock().unwrap().reader.shown.clone_from(&shown);
        }
        if let Some(service) = &mut self.service {
            service.shown.insert(id.clone(), shown);
        }
    }

    pub(crate) fn forget(&mut self, id: &DaemonId) {
        if let Some(service) = &mut self.service {
            if let Some(watched) = service.watched.remove(id) {
                watched.end();
            }
            if let Some(admission) = service.admissions.get(id) {
                admission.end();
            }
        }
        if !self.is_disk_full {
            self.state_file.daemons.remove(id);
        }
    }

    /// Does one half of a change of a compute mode. Half 0 records the former mode in the state file, and half 1 sets the
    /// service's mode.
    pub(crate) fn take_mode(&mut self, gpu: &str, ours: Mode, half: usize) {
        let Some(state) = self.gpus.get_mut(gpu).filter(|state| state.mode != ours) else { return };
        if half == 1 && self.state_file.modes.contains_key(gpu) {
            (state.mode, state.ours) = (ours, Some(ours));
        } else if half == 0 && !self.is_disk_full {
            self.state_file.modes.entry(gpu.to_owned()).or_insert(state.mode);
        }
    }

    fn take_mode_by_itself(&mut self, gpu: &str, step: usize) {
        if self.reaches(gpu) {
            self.take_mode(gpu, Mode::Exclusive, step);
        }
        self.mode_step(gpu, step, ModeOutcome::Taken);
    }

    /// Does one step of restoring a compute mode. Step 0 sets the former mode, and step 1 removes the former mode from the
    /// state file.
    fn put_mode_back(&mut self, gpu: &str, step: usize, dice: &mut Dice) {
        let Some(before) = self.state_file.modes.get(gpu).copied() else {
            return self.mode_done(gpu, ModeOutcome::PutBack);
        };
        if self.goes_wrong(dice) || !self.reaches(gpu) {
            self.strange.insert(gpu.to_owned());
            return self.mode_done(gpu, ModeOutcome::Stays);
        }
        if step > 0 && self.is_disk_full {
            self.strange.insert(gpu.to_owned());
            return self.mode_done(gpu, ModeOutcome::Stays);
        } else if step > 0 {
            self.state_file.modes.remove(gpu);
        } else if let Some(state) = self.gpus.get_mut(gpu).filter(|state| Some(state.mode) == state.ours) {
            state.mode = before;
        }
        self.mode_step(gpu, step, ModeOutcome::PutBack);
    }

    fn mode_step(&mut self, gpu: &str, step: usize, outcome: ModeOutcome) {
        if step > 0 {
            return self.mode_done(gpu, outcome);
        }
        if let Some(mode) = self.service.as_mut().and_then(|service| service.modes.get_mut(gpu)) {
            mode.1 += 1;
        }
    }
}
