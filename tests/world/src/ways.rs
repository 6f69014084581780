//! The simulated directories of slices, with the links that lead clients to control daemons, and the slices that an
//! administrator has drained.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use mps_core::links::{Bad, ClosedSlices, Directories, Linked, Links, SocketId, WantedLinks, Way};
use mps_core::{DaemonId, Goal};

use super::mps::Mps;
use super::{Dice, World};

pub(crate) const SLICES: usize = 2;

/// Stands for the path of the parent directory of all slices' directories. A number suffices, since the world has only one
/// parent directory.
const PLACE: u8 = 0;

/// The value in [`Ways`] if a user has put a file in the place of the link to a control daemon.
const OBSTACLE: u32 = 0;

/// The value in [`Ways`] if the link points to the waiting socket, where programs wait for a control daemon.
const WAITING: u32 = u32::MAX;

/// The directories of slices, by the names of the slices. The value is the PID of the control daemon to which the link points,
/// or [`OBSTACLE`], or [`WAITING`].
pub(crate) type Ways = Arc<Mutex<BTreeMap<String, u32>>>;

#[derive(Debug, Clone, Default)]
pub(crate) struct SimDrained(BTreeSet<String>);

impl ClosedSlices for SimDrained {
    fn is_all(&self) -> bool {
        false
    }

    fn closes(&self, directory: &str) -> Option<bool> {
        Some(self.0.contains(directory))
    }
}

/// The links of one control daemon's slices. All parts of the service that change these links share this value.
#[derive(Clone)]
pub(crate) struct SimAdmission {
    id: DaemonId,
    links: Arc<Mutex<Links<u8>>>,
    ways: Ways,
    drained: Arc<Mutex<SimDrained>>,
}

pub(crate) fn slices_of(gpu: &str) -> impl Iterator<Item = String> {
    (0..SLICES).map(move |ordinal| format!("{gpu}-{ordinal}"))
}

pub(crate) fn all_slices(gpus: &[String]) -> impl Iterator<Item = (String, String)> {
    gpus.iter().flat_map(|gpu| slices_of(gpu).map(move |name| (name, gpu.clone())))
}

pub(crate) fn slices(id: &DaemonId, gpus: &[String]) -> impl Iterator<Item = (String, String)> {
    all_slices(gpus).filter(move |(name, _)| id.only_slice().is_none_or(|only| *name == only.to_string()))
}

fn wanted(id: &DaemonId, gpus: &[String], retiring: bool) -> WantedLinks<u8> {
    WantedLinks { pipe: PLACE, slices_in: Some(PLACE), slices: slices(id, gpus).collect(), retiring }
}

fn linked(gpus: &[String]) -> Linked<u8> {
    Linked { pipe: PLACE, has_link: false, slices_in: Some(PLACE), gpus: gpus.iter().cloned().collect() }
}

struct SimDirectories<'w> {
    ways: MutexGuard<'w, BTreeMap<String, u32>>,
    /// The PID of the control daemon, which stands for the socket in the control daemon's directory. `None` if the directory
    /// has no socket.
    socket: Option<u32>,
    /// The socket to which new links point: the last result of `find_socket` or `find_waiting_socket`.
    found: Option<u32>,
    /// True if the service can't list the directories of slices, and so may miss a link to the control daemon.
    is_hidden: bool,
    /// The slice with a link that can't be changed during this pass over the links.
    stuck: Option<String>,
}

impl Directories<u8> for SimDirectories<'_> {
    fn find_socket(&mut self) -> Result<Option<SocketId>, Bad> {
        self.found = self.socket;
        Ok(self.socket.map(|pid| (u64::from(pid), 0)))
    }

    fn find_waiting_socket(&mut self) -> Result<SocketId, Bad> {
        self.found = Some(WAITING);
        Ok((u64::from(WAITING), 0))
    }

    fn lead_pipe(&mut self, _: &u8) -> Result<bool, Bad> {
        Ok(false)
    }

    fn close_pipe(&mut self, _: &u8, _: SocketId) -> Result<(), Bad> {
        Ok(())
    }

    fn open_slices(&mut self, _: &u8, _: bool) -> Result<bool, Bad> {
        Ok(true)
    }

    fn other_slices(&self, names: &BTreeSet<String>) -> (BTreeSet<String>, Option<Bad>) {
        if self.is_hidden {
            return (BTreeSet::new(), Some("the directories can't be listed".to_owned()));
        }
        (self.ways.keys().filter(|name| !names.contains(*name)).cloned().collect(), None)
    }

    fn lead_slice(&mut self, name: &str) -> Result<bool, Bad> {
        if self.stuck.as_deref() == Some(name) {
            return Err(format!("{name} is a file"));
        }
        if self.ways.get(name) == Some(&OBSTACLE) {
            return Err(format!("{name} holds something that is no link"));
        }
        let socket = self.found.expect("nothing is led to nobody");
        Ok(self.ways.insert(name.to_owned(), socket) != Some(socket))
    }

    fn close_slice(&mut self, name: &str, only: Option<SocketId>) -> Result<(), Bad> {
        let leads = self.ways.get(name).copied();
        if leads.is_none_or(|leads| leads == OBSTACLE)
            || only.is_some_and(|only| leads.map(u64::from) != Some(only.0))
        {
            return Ok(());
        }
        if self.stuck.as_deref() == Some(name) {
            return Err(format!("{name} is on a file system that can't be written"));
        }
        self.ways.remove(name);
        Ok(())
    }

    fn keep_pipe(&mut self, _: &u8) {}

    fn keep_slices(&mut self, _: &BTreeSet<String>) {}

    fn release(&mut self, _: &u8, _: Option<&u8>, _: &BTreeSet<String>) {}

    fn shown(&self, _: &u8, slice: Option<&str>) -> String {
        slice.unwrap_or_default().to_owned()
    }
}

impl SimAdmission {
    /// Makes the links of a story's control daemon. The host of a story has no other control daemon.
    pub(crate) fn new(id: &DaemonId, gpus: &[String]) -> Self {
        let links = Arc::new(Mutex::new(Links::new(Some(wanted(id, gpus, false)), None)));
        Self { id: id.clone(), links, ways: Arc::default(), drained: Arc::default() }
    }

    /// Makes the links of the slices lead to the control daemon, which now has the limits of its order.
    pub(crate) fn lead(&self, mps: &mut Mps, gpus: &[String]) -> Result<(), Bad> {
        self.links.lock().unwrap().lead(linked(&mps.gpus), &wanted(&self.id, gpus, false));
        self.apply(Some(mps))
    }

    /// Makes and removes links as the service wants them now. `mps` is `None` if the control daemon does not run.
    pub(crate) fn apply(&self, mps: Option<&mut Mps>) -> Result<(), Bad> {
        let mut ways = self.ways.lock().unwrap();
        let (mut socket, mut stuck, mut is_hidden) = (None, None, false);
        if let Some(mps) = mps {
            socket = (mps.is_alive && !mps.has_no_directory).then_some(mps.pid);
            let names: Vec<String> = slices(&self.id, &mps.gpus).map(|(name, _)| name).collect();
            stuck = if mps.goes_wrong(12) { mps.dice.pick(&names).cloned() } else { None };
            // One random choice decides about two troubles: if the link of a GPU's first slice can't be changed, the parent
            // directory can't be listed either.
            is_hidden = stuck.as_ref().is_some_and(|name| name.ends_with("-0"));
            if mps.goes_wrong(20)
                && let Some(name) = mps.dice.pick(&names)
            {
                ways.remove(name);
            }
        }
        let drained = self.drained.lock().unwrap();
        self.links
            .lock()
            .unwrap()
            .apply(&mut SimDirectories { ways, socket, found: None, is_hidden, stuck }, &*drained)
    }

    fn is_stuck(&self) -> bool {
        !self.links.lock().unwrap().stuck().is_empty()
    }

    /// True if the service wants a link for the slice, and the last pass over the links could not make the link.
    pub(crate) fn is_missing(&self, slice: &str) -> bool {
        self.links.lock().unwrap().missing().contains_key(&Way::Slice(slice.to_owned()))
    }

    /// Makes the links point to the waiting socket, so that new programs wait for a server.
    pub(crate) fn keep_waiting(&self, mps: &mut Mps) -> Result<(), Bad> {
        self.links.lock().unwrap().keep_waiting();
        self.apply(Some(mps))?;
        let open: Vec<String> = self.leading_to(mps.pid);
        if open.is_empty() { Ok(()) } else { Err(format!("{open:?} can't be changed")) }
    }

    pub(crate) fn leading_to(&self, pid: u32) -> Vec<String> {
        let ways = self.ways.lock().unwrap();
        ways.iter().filter(|(_, leads)| **leads == pid).map(|(name, _)| name.clone()).collect()
    }

    pub(crate) fn reopen_ways(&self, mps: &mut Mps) {
        self.links.lock().unwrap().reopen_ways();
        let _ = self.apply(Some(mps));
    }

    /// Releases the programs that wait for the next control daemon.
    pub(crate) fn let_go(&self) {
        self.links.lock().unwrap().let_go();
    }

    /// The control daemon has ended. New programs now wait for the next control daemon.
    pub(crate) fn end(&self) {
        {
            let ways = self.ways.lock().unwrap();
            let mut directories =
                SimDirectories { ways, socket: None, found: None, is_hidden: false, stuck: None };
            self.links.lock().unwrap().end(&mut directories);
        }
        let _ = self.apply(None);
    }
}

impl World {
    /// Returns the links that the supervisor of the control daemon manages. A new supervisor makes its links at once.
    pub(crate) fn admission(
        &mut self,
        id: &DaemonId,
        gpus: &[String],
        retiring: bool,
    ) -> Option<SimAdmission> {
        let running = self.state_file.daemons.get(id).map(|running| linked(&running.gpus));
        let (ways, drained) = (Arc::clone(&self.ways), Arc::clone(&self.drained));
        let service = self.service.as_mut()?;
        let new = || {
            let links = Arc::new(Mutex::new(Links::new(Some(wanted(id, gpus, retiring)), running)));
            let admission = SimAdmission { id: id.clone(), links, ways, drained };
            let _ = admission.apply(None);
            admission
        };
        Some(service.admissions.entry(id.clone()).or_insert_with(new).clone())
    }

    /// The supervisors take the service's new plan, and at once remove the links that the plan does not need.
    pub(crate) fn follow(&mut self) {
        let Some(service) = &self.service else { return };
        for (id, admission) in &service.admissions {
            let (Some(order), Some(goal)) = (service.core.order(id), service.core.goal(id)) else { continue };
            let follows = matches!(goal, Goal::Serve | Goal::Retire);
            let links = || admission.links.lock().unwrap();
            if follows && links().pursue(wanted(id, &order.gpus, goal == Goal::Retire)) {
                let _ = self.apply_links(id, admission);
            }
        }
    }

    pub(crate) fn is_drained(&self, slice: &str) -> bool {
        self.drained.lock().unwrap().0.contains(slice)
    }

    /// Returns the PID of the control daemon to which the link of a slice points. `None` if the link points to no running
    /// control daemon.
    pub(crate) fn leads_to(&self, slice: &str) -> Option<u32> {
        let pid = self.ways.lock().unwrap().get(slice).copied();
        pid.filter(|pid| self.daemons.contains_key(pid))
    }

    fn apply_links(&self, id: &DaemonId, admission: &SimAdmission) -> Result<(), Bad> {
        match self.living(id) {
            Some((_, one)) => admission.apply(Some(&mut one.lock())),
            None => admission.apply(None),
        }
    }

    /// An administrator drains a slice, or opens it again. After the service's answer a drained slice has no link to a control
    /// daemon, unless the answer says that the link can't be removed.
    pub(crate) fn drain(&mut self, dice: &mut Dice) {
        let all: Vec<String> = all_slices(&super::GPUS.map(str::to_owned)).map(|(name, _)| name).collect();
        if dice.one_in(4) {
            return self.put_obstacle(dice.pick(&all).unwrap());
        }
        if let Some(name) = dice.pick(&all).filter(|_| self.service.is_some() && !self.is_disk_full) {
            self.drain_or_give_back(name);
        }
    }

    fn put_obstacle(&mut self, name: &str) {
        let mut ways = self.ways.lock().unwrap();
        let was_there = ways.remove(name) == Some(OBSTACLE);
        if !was_there {
            ways.insert(name.to_owned(), OBSTACLE);
        }
        drop(ways);
        self.meddled.insert(name.to_owned());
        self.add_to_story(|| format!("in the directory of {name} is an obstacle: {}", !was_there));
    }

    pub(crate) fn remove_obstacles(&mut self) {
        self.ways.lock().unwrap().retain(|_, leads| *leads != OBSTACLE);
        self.meddled.clear();
    }

    pub(crate) fn drain_or_give_back(&mut self, name: &str) {
        let is_drained = {
            let drained = &mut self.drained.lock().unwrap().0;
            drained.insert(name.to_owned()) || !drained.remove(name)
        };
        self.add_to_story(|| format!("{name} is drained: {is_drained}"));
        let mut stuck = false;
        let Some(service) = &self.service else { return };
        for (id, admission) in &service.admissions {
            admission.links.lock().unwrap().search();
            let _ = self.apply_links(id, admission);
            stuck |= admission.is_stuck();
        }
        for (id, running) in &self.state_file.daemons {
            if !service.admissions.contains_key(id) {
                let links = Arc::new(Mutex::new(Links::new(None, Some(linked(&running.gpus)))));
                let (ways, drained) = (Arc::clone(&self.ways), Arc::clone(&self.drained));
                let admission = SimAdmission { id: id.clone(), links, ways, drained };
                let _ = self.apply_links(id, &admission);
                stuck |= admission.is_stuck();
            }
        }
        if stuck {
            self.stuck.insert(name.to_owned());
        } else {
            self.stuck.remove(name);
        }
    }

    /// Checks two promises. `drained-takes-none`: no drained slice has a link to a control daemon. `a-slice-leads-home`: a
    /// program that connects through a slice's link finds the control daemon that has the slice's GPU.
    pub(crate) fn check_ways(&self) {
        let drained = self.drained.lock().unwrap();
        for (name, pid) in &*self.ways.lock().unwrap() {
            let Some(one) = self.daemons.get(pid) else { continue };
            assert!(
                !drained.0.contains(name) || self.stuck.contains(name),
                "drained-takes-none: {name} leads to {pid}"
            );
            let is_its = slices(&one.id, &one.gpus).any(|(its, _)| its == *name);
            assert!(is_its, "a-slice-leads-home: {name} leads to {pid}, which has {:?}", one.gpus);
        }
    }

    /// True if the link of each slice of these GPUs that is not drained points to this control daemon.
    pub(crate) fn lead_here(&self, pid: u32, gpus: &[String]) -> bool {
        let Some(one) = self.daemons.get(&pid) else { return false };
        let (drained, ways) = (self.drained.lock().unwrap(), self.ways.lock().unwrap());
        slices(&one.id, gpus).all(|(name, _)| drained.0.contains(&name) || ways.get(&name) == Some(&pid))
    }
}
