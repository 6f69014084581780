//! The start of a control daemon in the world, by the service's real code.

use std::rc::Rc;
use std::sync::{Arc, Mutex};

use mps_core::serve::{Failure, GpuReach, StartPlace, Starter, Stranger, WantedUsers, start};
use mps_core::{ActOutcome, Cause, CoreTime, DaemonId, Permit};

use super::edge::SimShell;
use super::mps::Mps;
use super::serving::{failed, setting_of, wanted};
use super::{ControlDaemon, Dice, Task, World, Written};

/// A step for which the code that starts a control daemon asks the world. The world carries out the step before the next turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Spawning {
    /// Record the new process and these GPUs in the state file. The new process then waits for a byte from the service.
    WriteDown(Vec<String>),
    /// Send the byte for which the new process waits, so that the process becomes the control daemon.
    Go,
}

struct SimStarter {
    shell: SimShell,
    /// The number of clients of a foreign control daemon that prevents the start. `None` if no foreign control daemon prevents
    /// the start, or if its clients are not known.
    in_the_way: Option<usize>,
}

impl Starter for SimStarter {
    type Gpus = SimShell;

    fn gpus(&mut self) -> &mut SimShell {
        &mut self.shell
    }

    fn now(&self) -> CoreTime {
        self.shell.lock().now
    }

    fn find_program(&mut self) -> Result<(), Failure> {
        if self.shell.lock().goes_wrong(40) { Err(Failure::Waiting("no program".to_owned())) } else { Ok(()) }
    }

    async fn stranger(&mut self, _: StartPlace) -> Result<Option<Stranger>, Failure> {
        self.shell.turn().await;
        let mut mps = self.shell.lock();
        if !mps.goes_wrong(12) {
            return Ok(None);
        }
        self.in_the_way = if mps.dice.one_in(3) { None } else { Some(mps.dice.below(3)) };
        let clients = self.in_the_way.ok_or_else(|| "it does not answer".to_owned());
        Ok(Some(Stranger { pid: Some(7), directory: String::new(), end_it: String::new(), clients }))
    }

    /// Checks the promise `work-is-safe`: the service ends a foreign control daemon only if the control daemon has no clients.
    async fn end_stranger(&mut self, _: StartPlace, _: u32, may_end: Permit) -> Result<bool, Failure> {
        assert_eq!(self.in_the_way, Some(0), "work-is-safe: a stranger is ended with its clients");
        assert_eq!(may_end.cause(), Cause::Unused, "work-is-safe: a stranger is ended");
        self.shell.turn().await;
        Ok(!self.shell.lock().goes_wrong(4))
    }

    fn open_directories(&mut self) -> Result<bool, Failure> {
        let mut mps = self.shell.lock();
        if mps.goes_wrong(30) {
            Err(Failure::Waiting("no directory".to_owned()))
        } else {
            Ok(mps.dice.one_in(2))
        }
    }

    async fn spawn(&mut self, gpus: &[String], multiuser: bool) -> Result<(), Failure> {
        self.shell.lock().serves_one_user = !multiuser;
        for step in [Spawning::WriteDown(gpus.to_vec()), Spawning::Go] {
            if self.shell.lock().goes_wrong(16) {
                return Err(Failure::Failed("no memory".to_owned()));
            }
            self.shell.lock().spawning = Some(step);
            self.shell.turn().await;
            let mut mps = self.shell.lock();
            if std::mem::take(&mut mps.can_not_spawn) || !mps.is_alive {
                return Err(Failure::Failed("it can't be written down".to_owned()));
            }
        }
        Ok(())
    }

    async fn comes_up(&mut self, _: &mut GpuReach) -> Result<(), Failure> {
        self.shell.turn().await;
        let mut mps = self.shell.lock();
        if !mps.is_alive {
            return Err(Failure::Ended { text: String::new(), refuses_multiuser: false });
        }
        if mps.refuses_multiuser && !mps.serves_one_user {
            mps.end(None);
            return Err(Failure::Ended { text: String::new(), refuses_multiuser: true });
        }
        if mps.goes_wrong(12) { Err(Failure::Failed("it does not listen".to_owned())) } else { Ok(()) }
    }

    fn has_ended(&mut self) {}
}

impl World {
    /// The service begins to start a control daemon. The process of the control daemon does not exist yet.
    pub(crate) fn begin_start(&mut self, id: &DaemonId, task: &Task, dice: &mut Dice) {
        let Some(admission) = self.admission(id, &task.order.gpus, false) else { return };
        self.next_pid += 1;
        let mut mps = Mps::new(self.next_pid, Vec::new(), dice.one_in(3), self.now);
        mps.is_calm = self.is_calm;
        mps.refuses_multiuser = self.refuses_multiuser;
        mps.ways = Some(Arc::clone(&self.ways));
        mps.reader.shown = self.shown(id);
        mps.reader.shown.takes(&task.order);
        let mps = Arc::new(Mutex::new(mps));
        let gpus = task.order.gpus.clone();
        let setting = setting_of(&mps_core::Order { gpus: gpus.clone(), ..task.order.clone() }, &gpus);
        let shell = SimShell { mps: Arc::clone(&mps), id: id.clone(), gpus, setting, admission };
        let Some(service) = &mut self.service else { return };
        service.starting.insert(id.clone(), mps);
        let (reach, wanted) = (Rc::clone(service.reaches.entry(id.clone()).or_default()), wanted(task));
        let users = WantedUsers { multiuser: true, is_optional: true, without: "off" };
        // The future keeps a `RefCell` borrowed across `await`. No other code borrows it meanwhile, since a control daemon has
        // only one act at a time.
        #[allow(clippy::await_holding_refcell_ref)]
        let under_way = async move {
            let mut starter = SimStarter { shell, in_the_way: None };
            let started = start(&mut starter, &mut reach.borrow_mut(), &wanted, users).await;
            started.map_or_else(failed, |_| (ActOutcome::Done, false, None))
        };
        service.acts.insert(id.clone(), Box::pin(under_way));
    }

    pub(crate) fn spawn(&mut self, id: &DaemonId, task: &Task) {
        let Some(mps) = self.service.as_ref().and_then(|service| service.starting.get(id)).cloned() else {
            return;
        };
        let (pid, spawning) = {
            let mut mps = mps.lock().unwrap();
            let spawning = mps.spawning.take();
            if matches!(spawning, Some(Spawning::WriteDown(_))) && !mps.is_alive {
                // The process that this start made has ended by itself. A new process replaces it in the state file.
                self.next_pid += 1;
                mps.is_another(self.next_pid, self.now);
            }
            (mps.pid, spawning)
        };
        match spawning {
            None => {}
            Some(Spawning::WriteDown(_)) if self.is_disk_full => mps.lock().unwrap().can_not_spawn = true,
            Some(Spawning::WriteDown(gpus)) => {
                self.add_to_story(|| format!("     control daemon {pid} is written down for {id}"));
                mps.lock().unwrap().gpus.clone_from(&gpus);
                self.state_file.daemons.insert(id.clone(), Written { pid, gpus: gpus.clone() });
                let sets_modes = task.order.sets_modes;
                self.daemons
                    .insert(pid, ControlDaemon { id: id.clone(), gpus, mps, sets_modes, is_paused: true });
            }
            Some(Spawning::Go) => match self.daemons.get_mut(&pid) {
                None => mps.lock().unwrap().is_alive = false,
                Some(one) => {
                    one.is_paused = false;
                    one.lock().listens_at = self.now;
                    self.watch(id, pid, true);
                }
            },
        }
    }
}
