//! Scripts: short histories of acts of users and accidents. Nothing else goes wrong in the world of a script. So the test
//! `tests/it/histories.rs` can repeat the script with the real service on a simulated host (`tests/sim`). After each step the
//! world and the simulated host must show the same state.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use mps_core::mps::ServerStatus;
use mps_core::serve::Requested;
use mps_core::view::ControlDaemonState;
use mps_core::{Configured, DaemonId, Demand, Goal, MpsSwitch, Order};

use super::admin::nothing;
use super::mps::{Hit, Mps};
use super::serving::percentage_of;
use super::ways::all_slices;
use super::{Dice, Ending, GpuState, Mode, Mood, World};

/// No GPU of a script is older than Volta, since a server on an older GPU serves only one user.
const GPUS: [&str; 3] = ["A", "B", "D"];

/// The number of scripts that a test tries on a simulated host, and the number of steps of each script.
pub const SCRIPTS: u64 = 24;
pub const DEEDS: u64 = 10;

/// The time that passes after each step of a script. The grace period after a fatal GPU error and the service's health checks
/// fit into this time.
const PAUSE: Duration = Duration::from_secs(60);

/// A script puts at most this many clients on a GPU, so that one more client finds a place there and can cause a fatal GPU
/// error.
const CLIENTS: usize = 2;

/// The payloads of the orders in scripts. A payload is a number from which the world computes the limits of a control daemon.
const PAYLOADS: [u32; 3] = [0, 15, 40];

/// The number of a client in a script. The clients have the numbers 0, 1 and so on, in the order in which they come.
pub type ClientNumber = usize;

/// One step of a script: an act of a user or an accident.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Deed {
    Reload {
        is_shared: bool,
        gpus: Vec<&'static str>,
        thread_percentage: u8,
    },
    Disable,
    /// A client comes through the first slice of its GPU. If a fatal GPU error hits the client, the client ends, unless `stays`
    /// is true.
    Comes {
        client: ClientNumber,
        gpu: &'static str,
        stays: bool,
    },
    Leaves(ClientNumber),
    /// A client comes to a GPU and causes a fatal GPU error there. The error may end the control daemon.
    Fault {
        client: ClientNumber,
        gpu: &'static str,
        ends_control_daemon: bool,
    },
    /// An administrator makes the service carry out by force the changes that wait for the end of clients.
    Force,
    KillServer {
        id: String,
    },
    KillControlDaemon {
        id: String,
    },
    Drain {
        slice: String,
        is_drained: bool,
    },
    KillService,
    StartService,
    StopService,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenDaemon {
    pub gpus: Vec<&'static str>,
    /// The state of the control daemon and the number of its servers, as the service publishes them. `None` if no service runs.
    pub published: Option<(String, usize)>,
}

/// The facts that a test can see of a simulated host, or of the world, when no more events happen.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Seen {
    pub daemons: BTreeMap<String, SeenDaemon>,
    /// The GPUs that the service publishes as served, each with the thread percentage in force.
    pub served: BTreeMap<&'static str, u8>,
    /// The slices with a link in their directory to a running control daemon, each with the id of the control daemon.
    pub ways: BTreeMap<String, String>,
    /// The clients with a running process, each with its GPU. A client that has lost its work to a fatal GPU error counts, too.
    pub clients: BTreeMap<ClientNumber, &'static str>,
    /// The clients that the service has ever reported as hit by a fatal GPU error.
    pub told: BTreeSet<ClientNumber>,
    /// The GPUs in the compute mode that the service sets.
    pub with_our_mode: BTreeSet<&'static str>,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (id, one) in &self.daemons {
            writeln!(f, "  control daemon {id}: {one:?}")?;
        }
        writeln!(f, "  served: {:?}", self.served)?;
        writeln!(f, "  slices lead to: {:?}", self.ways)?;
        writeln!(f, "  clients: {:?}, told as hit: {:?}", self.clients, self.told)?;
        writeln!(f, "  with our compute mode: {:?}", self.with_our_mode)
    }
}

pub fn gpu(name: &str) -> &'static str {
    GPUS.into_iter().find(|gpu| *gpu == name).unwrap()
}

struct Attendant {
    pid: u32,
    gpu: &'static str,
    stays: bool,
}

pub struct Script {
    world: World,
    dice: Dice,
    /// The random numbers that decide which work of the service goes on next.
    turns: Dice,
    /// True if the script has clients, fatal GPU errors, and directories of slices.
    has_servers: bool,
    played: usize,
    clients: BTreeMap<ClientNumber, Attendant>,
    /// The number of the next client that comes.
    came: ClientNumber,
    /// The numbers of all clients by their PIDs, even of clients that have ended.
    numbers: BTreeMap<u32, ClientNumber>,
    told: BTreeSet<ClientNumber>,
}

impl Script {
    pub fn new(seed: u64, has_servers: bool) -> Self {
        let mut world = World::without_service(Mood::Everything, true);
        world.is_calm = true;
        let gpu =
            |gpu: &str| (gpu.to_owned(), GpuState { mode: Mode::Default, own: Mode::Default, ours: None });
        world.gpus = GPUS.map(gpu).into();
        Self {
            world,
            dice: Dice::new(seed),
            turns: Dice::new(seed.wrapping_add(1)),
            has_servers,
            played: 0,
            clients: BTreeMap::new(),
            came: 0,
            numbers: BTreeMap::new(),
            told: BTreeSet::new(),
        }
    }

    pub fn story(&self) -> &str {
        self.world.story()
    }

    /// Chooses the next step among the steps that are possible now. The first two steps make a configuration and start the
    /// service.
    pub fn choose(&mut self) -> Deed {
        match self.played {
            0 => return reload(&mut self.dice),
            1 => return Deed::StartService,
            _ => {}
        }
        loop {
            let kind = self.dice.below(if self.world.service.is_some() { 24 } else { 12 });
            if let Some(deed) = self.any_of_kind(kind) {
                return deed;
            }
        }
    }

    fn any_of_kind(&mut self, kind: usize) -> Option<Deed> {
        let is_up = self.world.service.is_some();
        Some(match kind {
            0..3 if !is_up => Deed::StartService,
            0..3 => reload(&mut self.dice),
            3..8 => Deed::Comes { client: self.came, gpu: self.any_open_gpu()?, stays: self.dice.one_in(3) },
            8 | 9 => Deed::Leaves(*self.dice.pick(&self.clients.keys().copied().collect::<Vec<_>>())?),
            10 => Deed::KillControlDaemon { id: self.any_daemon(|_| true)? },
            11 if self.has_servers => Deed::KillServer { id: self.any_daemon(has_well_server)? },
            11 => return None,
            12..16 => Deed::Fault {
                client: self.came,
                gpu: self.any_open_gpu()?,
                ends_control_daemon: self.dice.one_in(4),
            },
            16..19 => self.any_force()?,
            19 | 20 => {
                // The service refuses to drain a slice of a GPU that the configuration does not name.
                let gpus = self.world.demand.orders.iter().flat_map(|order| &order.gpus).cloned();
                let slices: Vec<String> =
                    all_slices(&gpus.collect::<Vec<_>>()).map(|(slice, _)| slice).collect();
                let slice = self.dice.pick(&slices)?.clone();
                let is_drained = !self.world.is_drained(&slice);
                Deed::Drain { slice, is_drained }
            }
            21 => Deed::KillService,
            22 => Deed::StopService,
            _ => Deed::Disable,
        })
    }

    fn any_open_gpu(&mut self) -> Option<&'static str> {
        let mut gpus = GPUS.to_vec();
        gpus.retain(|gpu| self.takes_a_client(gpu).is_some());
        self.dice.pick(&gpus).copied()
    }

    fn any_force(&self) -> Option<Deed> {
        let waits = |mps: &Mps| mps.reader.shown.view.state == ControlDaemonState::Waiting;
        self.world.daemons.values().any(|one| waits(&one.lock())).then_some(Deed::Force)
    }

    /// Returns the PID of the control daemon that would take a new client of this GPU now.
    fn takes_a_client(&self, gpu: &str) -> Option<u32> {
        let there = self.clients.values().filter(|one| one.gpu == gpu).count();
        if !self.has_servers || there >= CLIENTS {
            return None;
        }
        let pid = self.world.leads_to(&format!("{gpu}-0"))?;
        has_well_server(&self.world.daemons.get(&pid)?.lock()).then_some(pid)
    }

    fn any_daemon(&mut self, is_one: fn(&Mps) -> bool) -> Option<String> {
        let ids = self.world.state_file.daemons.keys();
        let living = ids.filter(|id| self.world.living(id).is_some_and(|(_, one)| is_one(&one.lock())));
        let living: Vec<String> = living.map(DaemonId::to_string).collect();
        self.dice.pick(&living).cloned()
    }

    pub fn play(&mut self, deed: &Deed) {
        self.world.add_to_story(|| format!("--- {deed:?}"));
        // When a control daemon ends, the world forgets the service's reports about the control daemon, too. So this function
        // remembers the control daemons that run before the step.
        let before: Vec<Arc<Mutex<Mps>>> =
            self.world.daemons.values().map(|one| Arc::clone(&one.mps)).collect();
        self.played += 1;
        self.begin(deed);
        self.wait();
        let here = self.world.daemons.values().map(|one| Arc::clone(&one.mps));
        let all: Vec<Arc<Mutex<Mps>>> = before.into_iter().chain(here).collect();
        for mps in &all {
            let told: Vec<Hit> = mps.lock().unwrap().reader.told.iter().copied().collect();
            self.told.extend(told.iter().filter_map(|(_, _, pid)| self.numbers.get(pid)));
        }
        let world = &self.world;
        self.clients.retain(|_, one| world.has_client(one.pid));
    }

    fn begin(&mut self, deed: &Deed) {
        match deed {
            Deed::Reload { .. } | Deed::Disable => {
                self.world.demand = demand(deed);
                self.world.pursue();
            }
            Deed::Comes { client, gpu, stays } => _ = self.comes(*client, gpu, *stays),
            Deed::Leaves(client) => {
                let pid = self.clients[client].pid;
                self.leaves(pid);
            }
            Deed::Fault { client, gpu, ends_control_daemon } => {
                self.fault(*client, gpu, *ends_control_daemon);
            }
            Deed::Force => {
                for watched in self.world.service.iter().flat_map(|service| service.watched.values()) {
                    let request = Requested::Apply { force: true };
                    let mut mps = watched.mps.lock().unwrap();
                    let asked = (mps.now, request);
                    mps.reader.requests.push_back(asked);
                }
            }
            Deed::KillServer { id } => {
                let mut mps = self.world.living(&id.as_str().into()).unwrap().1.lock();
                let server = *mps.servers.keys().next().unwrap();
                mps.end_server(server, true, None);
            }
            Deed::KillControlDaemon { id } => {
                let pid = self.world.living(&id.as_str().into()).unwrap().0;
                self.world.daemons.remove(&pid).unwrap().lock().end(None);
            }
            Deed::Drain { slice, .. } => self.world.drain_or_give_back(slice),
            Deed::KillService => self.world.kill_service(),
            Deed::StartService => self.world.start_service(),
            Deed::StopService => self.world.end_service_for(Ending::ForGood),
        }
    }

    fn comes(&mut self, client: ClientNumber, gpu: &'static str, stays: bool) -> u32 {
        let daemon = &self.world.daemons[&self.takes_a_client(gpu).unwrap()];
        let ordinal = daemon.gpus.iter().position(|one| one == gpu).unwrap();
        let pid = daemon.lock().client_comes([ordinal].into()).expect("a client that is taken");
        self.came = client + 1;
        self.clients.insert(client, Attendant { pid, gpu, stays });
        self.numbers.insert(pid, client);
        pid
    }

    fn leaves(&mut self, pid: u32) {
        if let Some(daemon) = self.world.daemons.values().find(|one| one.lock().clients.contains_key(&pid)) {
            daemon.lock().client_leaves(pid);
        }
        self.world.bury();
    }

    /// A client causes a fatal GPU error. The clients that the error has hit end, except for the clients with `stays`.
    fn fault(&mut self, client: ClientNumber, gpu: &'static str, ends_control_daemon: bool) {
        let culprit = self.comes(client, gpu, false);
        let pid = self.world.leads_to(&format!("{gpu}-0")).unwrap();
        let mps = Arc::clone(&self.world.daemons[&pid].mps);
        let mut mps = mps.lock().unwrap();
        mps.fault(culprit);
        mps.servers.values_mut().for_each(|server| server.lists = true);
        if ends_control_daemon {
            mps.say_who_was_hit();
            mps.end(None);
        }
        let is_hit = |one: &&Attendant| !one.stays && mps.clients.get(&one.pid).is_some_and(|one| one.is_hit);
        let hit: Vec<u32> = self.clients.values().filter(is_hit).map(|one| one.pid).collect();
        for pid in hit {
            mps.client_leaves(pid);
        }
        drop(mps);
        self.world.bury();
    }

    fn wait(&mut self) {
        let until = self.world.now + PAUSE;
        while self.world.now < until {
            // On the simulated host every control daemon can report the status of its servers. So the control daemons of this
            // world must do the same.
            for mps in self.world.service.iter().flat_map(|service| service.starting.values()) {
                mps.lock().unwrap().is_old = false;
            }
            if self.world.comes_on() {
                self.world.carry_on(&mut self.turns);
            } else {
                self.world.sleep();
            }
            self.world.check();
        }
    }

    pub fn seen(&self) -> Seen {
        let mut seen = self.world.seen();
        seen.clients = self.clients.iter().map(|(client, one)| (*client, one.gpu)).collect();
        seen.told.clone_from(&self.told);
        if !self.has_servers {
            seen.ways.clear();
            seen.daemons.values_mut().filter_map(|one| one.published.as_mut()).for_each(|one| one.1 = 0);
        }
        seen
    }
}

fn has_well_server(mps: &Mps) -> bool {
    !mps.servers.is_empty() && mps.servers.values().all(|server| server.status == ServerStatus::Active)
}

fn reload(dice: &mut Dice) -> Deed {
    let set = 1 + dice.below(7);
    let gpus = GPUS.into_iter().enumerate().filter(|(place, _)| set >> place & 1 == 1);
    let gpus = gpus.map(|(_, gpu)| gpu).collect();
    let payload = *dice.pick(&PAYLOADS).unwrap();
    Deed::Reload { is_shared: dice.one_in(2), gpus, thread_percentage: percentage_of(payload) }
}

fn demand(deed: &Deed) -> Demand<u32> {
    let Deed::Reload { is_shared, gpus, thread_percentage } = deed else { return nothing() };
    let order = |id: &str, gpus: &[&str]| Order {
        id: id.into(),
        gpus: gpus.iter().map(|gpu| (*gpu).to_owned()).collect(),
        sets_modes: true,
        payload: u32::from(*thread_percentage - percentage_of(0)),
    };
    let orders = if *is_shared {
        vec![order("shared", gpus)]
    } else {
        gpus.iter().map(|gpu| order(gpu, &[gpu])).collect()
    };
    let certainly = gpus.iter().map(|gpu| (*gpu).to_owned()).collect();
    let kept = Configured { certainly, others: None };
    Demand { orders, left: Vec::new(), mps: MpsSwitch::On, kept, closed: Vec::new() }
}

impl World {
    fn has_client(&self, pid: u32) -> bool {
        self.daemons.values().any(|one| one.lock().clients.contains_key(&pid))
    }

    fn seen(&self) -> Seen {
        let mut seen = Seen::default();
        let mut ids = BTreeMap::new();
        for id in self.state_file.daemons.keys() {
            let Some((pid, one)) = self.living(id) else { continue };
            ids.insert(pid, id.to_string());
            let gpus = one.gpus.iter().map(|name| gpu(name)).collect();
            let mps = one.lock();
            let view = self.service.as_ref().map(|_| &mps.reader.shown.view);
            let published = view.map(|view| (format!("{:?}", view.state).to_lowercase(), view.servers.len()));
            seen.daemons.insert(id.to_string(), SeenDaemon { gpus, published });
            let is_to_serve = self.service.as_ref().is_some_and(|one| one.core.goal(id) == Some(Goal::Serve));
            if view.is_some_and(|view| view.serving) && is_to_serve {
                seen.served.extend(self.served_by(id, &mps));
            }
        }
        let ways = self.ways.lock().unwrap();
        let ways = ways.iter().filter_map(|(slice, pid)| Some((slice.clone(), ids.get(pid)?.clone())));
        seen.ways = ways.collect();
        let exclusive = self.gpus.iter().filter(|(_, gpu)| gpu.mode == Mode::Exclusive);
        seen.with_our_mode = exclusive.map(|(name, _)| gpu(name)).collect();
        seen
    }

    /// Returns the GPUs that the service publishes as served by this control daemon, each with the thread percentage in force.
    fn served_by(&self, id: &DaemonId, mps: &Mps) -> Vec<(&'static str, u8)> {
        let order = self.service.as_ref().and_then(|service| service.core.order(id));
        let view = &mps.reader.shown.view;
        let served = order.into_iter().flat_map(|order| &order.gpus);
        let served = served.filter(|gpu| view.unserved(gpu).is_none());
        served.filter_map(|name| Some((gpu(name), view.gpus.get(name)?.thread_percentage?))).collect()
    }
}
