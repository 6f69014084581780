//! The processes of tenants in the world, and requests to end the GPU work of tenants.

use mps_core::bindings::Bindings;
use mps_core::mps::ServerStatus;
use std::collections::BTreeMap;

use mps_core::tenants::{Reception, Stop, Target};
use mps_core::terms::{DeviceName, GpuId, PciAddress, SliceId};

use super::bindings::{group_of, has_one_of, is_in, known_slices};
use super::clients::SimClient;
use super::mps::Mps;
use super::{Dice, GPUS, World};

const SLICES: usize = 2;

const USERS: [u32; 3] = [0, 1, 2];

fn any_user(dice: &mut Dice) -> u32 {
    dice.pick(&USERS).copied().unwrap_or_default()
}

/// Returns the slice of a GPU with this ordinal. Stories name a GPU by a letter instead of a PCI address, and the letter
/// becomes the bus number.
pub fn slice_of(gpu: &str, ordinal: u32) -> SliceId {
    let by_letter = |()| {
        let bus = gpu.bytes().next().map_or(0, |letter| letter - b'A' + 10);
        GpuId(PciAddress { bus, ..PciAddress::default() })
    };
    gpu.parse().unwrap_or_else(by_letter).slice(ordinal)
}

pub(crate) fn gpu_of(slice: SliceId) -> String {
    slice.gpu.to_string()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SliceKnownBy {
    Mount,
    Environment,
    Nothing,
}

/// The process of a client, as the kernel knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// A number that no other process ever has, although another process may later have the same PID.
    pub(crate) process: u32,
    /// The real user of the process, and the other users whose ids give rights to the process.
    pub users: Vec<u32>,
    /// The ids of the containers in which the process runs. The value is true if the host's own container runtime has made the
    /// container.
    pub containers: BTreeMap<String, bool>,
    pub slice: SliceId,
    pub slice_known_by: SliceKnownBy,
    pub(crate) connection: u64,
    /// False after a request has ended the GPU work of the process, until the process starts its work again.
    pub(crate) has_work: bool,
    /// True while a debugger has stopped the process.
    pub(crate) is_held: bool,
    /// True if the process handles the signals that ask a program to end, and so survives them.
    pub handles_signals: bool,
}

/// Processes that are the first processes of their containers, and no clients: the PID of each process, and the effect on the
/// process of a signal that asks a program to end.
const FIRST_PROCESSES: [(u32, Reception); 3] =
    [(1, Reception::Handled), (2, Reception::Ignored), (3, Reception::Fatal)];

/// The signals that a container runtime sends: TERM, KILL and USR1. USR1 does not ask a program to end.
const SIGNALS: [u32; 3] = [15, 9, 10];

/// Returns the effect of TERM on the first process of a container. `None` if the first process is a client.
pub(crate) fn first_reception(pid: u32) -> Option<Reception> {
    FIRST_PROCESSES.iter().find(|(first, _)| *first == pid).map(|(_, reception)| *reception)
}

impl Tenant {
    pub(crate) fn new(process: u32, gpus: &[String], ordinal: usize, dice: &mut Dice) -> Self {
        let user = any_user(dice);
        let slice_known_by = match dice.below(12) {
            0 => SliceKnownBy::Nothing,
            1..4 => SliceKnownBy::Environment,
            _ => SliceKnownBy::Mount,
        };
        Self {
            process,
            users: vec![user, if dice.one_in(4) { any_user(dice) } else { user }],
            containers: [(format!("c{user}"), true)].into(),
            slice: slice_of(&gpus[ordinal], u32::try_from(dice.below(SLICES)).unwrap()),
            slice_known_by,
            connection: u64::from(process),
            has_work: true,
            is_held: false,
            handles_signals: process.is_multiple_of(2),
        }
    }

    pub(crate) fn reception(&self) -> Reception {
        if self.handles_signals { Reception::Handled } else { Reception::Fatal }
    }
}

impl SimClient {
    /// True if a request to end GPU work means this client. The function uses no code of the core, since it checks the core.
    /// `named` is the `SimProcess::process` of the client that had the request's PID when the request began.
    pub(crate) fn is_meant(
        &self,
        pid: u32,
        target: &Target,
        named: Option<u32>,
        bindings: &Bindings,
    ) -> bool {
        let tenant = &self.tenant;
        let is_named = |wanted: u32| wanted == pid && named.is_none_or(|named| named == tenant.process);
        match target {
            Target::Process(wanted) => is_named(*wanted),
            Target::ProcessOf { pid: wanted, user } => {
                let is_theirs = !tenant.users.is_empty() && tenant.users.iter().all(|one| one == user);
                is_named(*wanted) && is_theirs
            }
            Target::Slices(wanted) => has_one_of(bindings, self, wanted),
            Target::Container(id) => tenant.containers.keys().any(|one| one.starts_with(id.as_str())),
            Target::Signalled(stop) => is_in(self.program.group, &stop.group) && self.ends_by(pid, stop),
        }
    }

    fn ends_by(&self, pid: u32, stop: &Stop) -> bool {
        let gets_it = stop.to_all
            || pid == stop.first
            || first_reception(stop.first).is_none_or(|first| first != Reception::Ignored);
        stop.signal == 9 || stop.signal == 15 && gets_it && !self.tenant.handles_signals
    }
}

impl Mps {
    /// A program that has lost its work starts its work again with another connection.
    fn starts_over(&mut self, pid: u32) {
        let connection = u64::from(self.next_pid());
        let Some(client) = self.clients.get_mut(&pid) else { return };
        let is_well =
            |server: &super::mps::SimServer| server.status == ServerStatus::Active && !server.is_ending;
        if !client.tenant.has_work && self.servers.get(&client.server).is_some_and(is_well) {
            client.tenant.has_work = true;
            client.tenant.connection = connection;
        }
    }
}

impl World {
    pub(crate) fn tenant_acts(&mut self, dice: &mut Dice) {
        let Some((daemon, pid)) = self.any_client(dice) else { return };
        let Some(one) = self.daemons.get(&daemon) else { return };
        let mut mps = one.lock();
        let kind = dice.below(9);
        if kind < 3 {
            mps.is_succeeded(pid);
            drop(mps);
            self.bury();
            self.add_to_story(|| format!("client {pid} leaves, and the next one gets its PID"));
        } else if kind < 5 {
            let Some(client) = mps.clients.get_mut(&pid) else { return };
            client.tenant.is_held = !client.tenant.is_held;
            let is_held = client.tenant.is_held;
            drop(mps);
            self.add_to_story(|| format!("a debugger holds client {pid}: {is_held}"));
        } else {
            let ended: Vec<u32> =
                mps.clients.iter().filter(|(_, one)| !one.tenant.has_work).map(|(pid, _)| *pid).collect();
            for pid in &ended {
                mps.starts_over(*pid);
            }
            drop(mps);
            self.add_to_story(|| format!("clients {ended:?} start over"));
        }
    }

    fn any_client(&self, dice: &mut Dice) -> Option<(u32, u32)> {
        let clients = |(daemon, one): (&u32, &super::ControlDaemon)| {
            one.lock().clients.keys().map(|client| (*daemon, *client)).collect::<Vec<_>>()
        };
        let clients: Vec<(u32, u32)> = self.daemons.iter().flat_map(clients).collect();
        dice.pick(&clients).copied()
    }

    /// Chooses a client that is at work although its server handles a fatal GPU error. `None` if no client fits, and sometimes
    /// at random.
    fn client_at_a_fault(&self, dice: &mut Dice) -> Option<u32> {
        let mut clients = Vec::new();
        for one in self.daemons.values() {
            let mps = one.lock();
            let is_faulted =
                |server| mps.servers.get(server).is_some_and(|one| one.status == ServerStatus::Fault);
            let there =
                mps.clients.iter().filter(|(_, client)| client.is_at_work() && is_faulted(&client.server));
            clients.extend(there.map(|(pid, _)| *pid));
        }
        dice.pick(&clients).copied().filter(|_| !dice.one_in(4))
    }

    /// Makes up the stop of a container by its runtime. Sometimes `client` is the first process of the container.
    fn any_stop(client: u32, dice: &mut Dice) -> Stop {
        let (first, _) = dice.pick(&FIRST_PROCESSES).copied().unwrap_or((client, Reception::Fatal));
        let first = if dice.one_in(3) { client } else { first };
        let signal = dice.pick(&SIGNALS).copied().unwrap_or_default();
        Stop { group: group_of(dice).to_owned(), first, signal, to_all: dice.one_in(4) }
    }

    pub(crate) fn ask_to_terminate(&mut self, dice: &mut Dice) {
        let is_busy = self.service.as_ref().is_none_or(|service| service.requests.len() >= 3);
        if is_busy || self.is_calm {
            return;
        }
        let pid = self.client_at_a_fault(dice).or_else(|| Some(self.any_client(dice)?.1)).unwrap_or(7);
        let target = match dice.below(10) {
            0 | 1 => Target::Process(pid),
            2 | 3 => Target::ProcessOf { pid, user: any_user(dice) },
            4 => Target::Container(format!("c{}", any_user(dice))),
            5 => {
                let gpu = (*dice.pick(&GPUS).unwrap()).to_owned();
                Target::Slices(vec![slice_of(&gpu, u32::try_from(dice.below(SLICES)).unwrap())])
            }
            6 | 7 => Target::Signalled(Self::any_stop(pid, dice)),
            _ => {
                let bindings = self.bindings.living();
                let its = |one: &super::ControlDaemon| {
                    let mps = one.lock();
                    let client = mps.clients.get(&pid)?;
                    let slice = |name: DeviceName| match name {
                        DeviceName::Slice(slice) => Some(slice),
                        DeviceName::Gpu(_) => None,
                    };
                    let known = known_slices(&bindings, client);
                    let slices = known.map(|known| known.slices.into_iter().filter_map(slice).collect());
                    Some(slices.unwrap_or_else(|| vec![client.tenant.slice]))
                };
                Target::Slices(self.daemons.values().find_map(its).unwrap_or_default())
            }
        };
        self.begin_request(&target, dice);
    }
}
