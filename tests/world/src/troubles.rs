//! Troubles of MPS in the world: fatal GPU errors, servers and control daemons that end or hang, and other programs that change
//! limits, modes and files of the service.

use std::time::Duration;

use mps_core::mps::ServerStatus;
use mps_core::serve::Requested;
use mps_core::{DaemonId, Order};

use super::reader::Waits;
use super::requests::SimRequest;
use super::{Dice, World};

impl World {
    pub(crate) fn trouble(&mut self, dice: &mut Dice) {
        let running: Vec<u32> =
            self.daemons.iter().filter(|(_, one)| !one.is_paused).map(|(pid, _)| *pid).collect();
        let Some(pid) = dice.pick(&running).copied() else { return };
        let kind = dice.below(21);
        if (16..19).contains(&kind) {
            return self.others_come_after_a_fault(pid, dice);
        }
        if kind >= 19 {
            return self.somebody_stops(pid, dice);
        }
        let Some(one) = self.daemons.get(&pid) else { return };
        if kind == 15 {
            let gpus = one.gpus.clone();
            return self.gpus_fall_off(&gpus, dice);
        }
        let mut mps = one.lock();
        let now = mps.now;
        let servers: Vec<u32> = mps.servers.keys().copied().collect();
        let server = dice.pick(&servers).copied();
        let what = match kind {
            0..5 => {
                let clients: Vec<u32> = mps.clients.keys().copied().collect();
                let Some(client) = dice.pick(&clients).copied() else { return };
                mps.log_is_lost |= dice.one_in(4);
                mps.fault(client);
                format!(
                    "client {client} of {pid} meets a fatal GPU error; its log is lost: {}",
                    mps.log_is_lost
                )
            }
            5 | 6 => {
                let Some(server) = server else { return };
                mps.end_server(server, dice.one_in(2), None);
                format!("server {server} of {pid} ends")
            }
            7 => {
                let duration = Duration::from_secs(1 << dice.below(7));
                mps.hangs_until = now + duration;
                format!("{pid} hangs for {duration:?}")
            }
            8 => {
                mps.has_no_directory = true;
                format!("the directory of {pid} is removed")
            }
            9 => {
                mps.taken_by = if mps.taken_by.is_some() { None } else { Some(7) };
                // Another program's control daemon listens in the directory of the service's control daemon. So commands of the
                // service, such as limits, reach the other control daemon.
                mps.foreign.insert(None);
                mps.foreign.extend(servers.iter().map(|server| Some(*server)));
                format!("in the directory of {pid} listens {:?}", mps.taken_by)
            }
            10..13 => {
                let server = server.filter(|_| dice.one_in(2));
                mps.is_changed_by_others(server, 5, 1024);
                format!("others change the limits of {server:?} of {pid}")
            }
            13 => {
                mps.starts_fail = !mps.starts_fail;
                format!("starts of servers of {pid} fail: {}", mps.starts_fail)
            }
            _ => {
                mps.log_is_lost = !mps.log_is_lost;
                format!("the log of {pid} is lost: {}", mps.log_is_lost)
            }
        };
        drop(mps);
        self.bury();
        self.add_to_story(|| what);
    }

    fn somebody_stops(&mut self, pid: u32, dice: &mut Dice) {
        let Some(one) = self.daemons.get(&pid) else { return };
        let mut mps = one.lock();
        let servers: Vec<u32> = mps.servers.keys().copied().collect();
        let server = dice.pick(&servers).copied().filter(|_| dice.one_in(2));
        match server.and_then(|server| mps.servers.get_mut(&server)) {
            Some(server) => server.is_stopped = true,
            None => mps.is_stopped = true,
        }
        drop(mps);
        self.add_to_story(|| format!("somebody stops server {server:?} of {pid}, or {pid} itself"));
    }

    /// The clients that a fatal GPU error has hit end just while the service checks which of them still run. Their server
    /// recovers, and other clients come to the server at once.
    fn others_come_after_a_fault(&mut self, pid: u32, dice: &mut Dice) {
        self.advance(self.now + Duration::from_secs(6));
        (0..dice.below(8)).for_each(|_| self.carry_on(dice));
        let Some(one) = self.daemons.get(&pid) else { return };
        let hit: Vec<u32> = {
            let mps = one.lock();
            mps.clients.iter().filter(|(_, client)| client.is_hit).map(|(client, _)| *client).collect()
        };
        if hit.is_empty() {
            return;
        }
        for client in &hit {
            one.lock().client_leaves(*client);
        }
        self.add_to_story(|| format!("whoever was hit of {pid} leaves: {hit:?}"));
        self.bury();
        self.advance(self.now + Duration::from_millis(250));
        let Some(one) = self.daemons.get(&pid) else { return };
        let came = one.lock().client_comes([dice.below(one.gpus.len())].into());
        self.add_to_story(|| format!("a client comes: {came:?}"));
    }

    pub(crate) fn request(&mut self, dice: &mut Dice) {
        let requests = [
            Requested::Apply { force: false },
            Requested::Apply { force: true },
            Requested::Check,
            Requested::RestartServer,
        ];
        let (Some(service), Some(request)) = (&self.service, dice.pick(&requests).copied()) else { return };
        let ids: Vec<&DaemonId> = service.watched.keys().collect();
        let Some(id) = dice.pick(&ids).map(|id| (*id).clone()) else { return };
        if let Some(watched) = service.watched.get(&id) {
            let mut mps = watched.mps.lock().unwrap();
            let asked = (mps.now, request);
            if mps.reader.requests.len() < 4 {
                mps.reader.requests.push_back(asked);
            }
        }
        self.add_to_story(|| format!("somebody asks {id} for {request:?}"));
    }

    /// An administrator makes a change by force, if the service has answered that the change needs force because the service
    /// does not know the clients.
    pub(crate) fn force_if_clients_are_unknown(&mut self) {
        for watched in self.service.iter().flat_map(|service| service.watched.values()) {
            let mps = &mut *watched.mps.lock().unwrap();
            let (now, reader) = (mps.now, &mut mps.reader);
            let is_asked_for = reader.shown.view.reason.contains("apply --force");
            if is_asked_for && reader.shown.view.ends_when_idle && reader.requests.is_empty() {
                reader.requests.push_back((now, Requested::Apply { force: true }));
            }
        }
    }

    pub(crate) fn troubles_end(&mut self) {
        let starting = self.service.iter().flat_map(|service| service.starting.values());
        for mps in self.daemons.values().map(|one| &one.mps).chain(starting) {
            let mut mps = mps.lock().unwrap();
            mps.is_calm = true;
            mps.hangs_until = mps.now;
            mps.taken_by = None;
            (mps.log_is_lost, mps.starts_fail) = (false, false);
            mps.newcomers_end();
            let clients: Vec<u32> = mps.clients.keys().copied().collect();
            for client in clients {
                mps.client_leaves(client);
            }
        }
        self.service.iter().flat_map(|service| &service.requests).for_each(SimRequest::calm_down);
        self.remove_obstacles();
        self.bury();
    }

    /// True if the control daemon takes clients with the limits of this order, and the service publishes the same.
    pub(crate) fn serves(&self, pid: u32, order: &Order<u32>) -> bool {
        let gpus = order.gpus.as_slice();
        self.lead_here(pid, gpus)
            && self.daemons.get(&pid).is_some_and(|one| {
                let mps = one.lock();
                let setting = super::serving::setting_of(order, &mps.gpus);
                let is_well = |server: &super::mps::SimServer| {
                    server.status == ServerStatus::Active && !server.is_stopped
                };
                let waits_for_news = matches!(mps.reader.waits, Waits::Event { takes_requests: true, .. });
                mps.reader.is_ready()
                    && waits_for_news
                    && !mps.is_awake()
                    && !mps.is_stopped
                    && mps.due().is_none()
                    && mps.listener() == Some(mps.pid)
                    && mps.differing(setting, true).is_none()
                    && (mps.serves_one_user || !mps.servers.is_empty())
                    && mps.servers.values().all(is_well)
                    && gpus.iter().all(|gpu| mps.reader.shown.serves(gpu, order))
            })
    }
}
