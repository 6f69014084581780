//! Serving: the orders, the watch and the repair of a running control daemon, each with the smallest step that helps.
//!
//! The decisions are written in the order in which they are made, and each `await` is a question to the outside or an act:
//! everything that can happen in between is an [`Occurrence`], or the end of the whole.
//!
//! | file | its job |
//! |---|---|
//! | `shell.rs` | everything that is asked of the outside |
//! | `start.rs` | the start of the process, and who makes way for it |
//! | `gpus.rs` | the GPUs that it goes without, and compute modes |
//! | `take_over.rs` | the take-over of a control daemon that runs |
//! | `bypasses.rs` | processes that use the GPUs without its servers |
//! | `configure.rs` | the way to the order: limits, links, the first server |
//! | `watch.rs` | waits for the next thing to happen or to do |
//! | `check.rs` | the regular look |
//! | `limits.rs` | limits, set and kept |
//! | `heal.rs`, `fault.rs` | a server that met a fatal GPU error, and a server that has ended |
//! | `requests.rs` | the requests of administrators |
//! | `end.rs` | its end, and who uses it |
//! | `door.rs` | the ways by which programs come to it, open or closed |
//! | `blocker.rs` | everything that keeps it from serving, and the state that is shown |
//! | `servers.rs`, `capacity.rs` | the servers, and the places on GPUs |
//! | `waiting_clients.rs` | clients that wait for a server |

mod blocker;
mod bypasses;
mod capacity;
mod check;
mod configure;
mod door;
mod end;
pub mod fault;
mod gpus;
mod heal;
mod limits;
mod observe;
mod requests;
mod servers;
mod shell;
mod start;
mod take_over;
mod waiting_clients;
mod watch;

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

pub use blocker::{ShownAs, ShownState};
pub use bypasses::CONFIRM_AFTER;
pub use end::Judged;
pub use gpus::{GpuNews, GpuReach, GpuShell, SeenGpu, SeenGpus};
pub(crate) use heal::clients_counted;
pub use heal::tried_again;
pub use shell::{ClientsOnGpus, Failure, News, Occurrence, Requested, Said, Shell, Showing, ShownGpu};

pub use start::{StartPlace, Starter, Stranger, WantedUsers, start};

use crate::mps::Limits;
use crate::terms::ServedGpu;
use crate::{CoreTime, DaemonId, GpuUuid, HeldGpus};
use blocker::Blockers;
use capacity::Capacity;
use door::Door;
use heal::Revival;
use servers::Servers;
use waiting_clients::WaitingClients;

/// The order for a control daemon that runs, as far as serving depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The id of the control daemon.
    pub id: DaemonId,
    /// The GPUs of the order.
    pub gpus: Vec<ServedGpu>,
    /// The active thread percentage.
    pub thread_percentage: u8,
    /// A server runs ahead of its first client.
    pub prewarm: bool,
    /// Only its clients still need it.
    pub retiring: bool,
    /// The time between two looks for programs without MPS, if it looks for them for all that take turns on its GPUs:
    /// nothing keeps these programs out.
    pub guard_period: Option<Duration>,
    /// The GPUs of the order that other control daemons have.
    pub held: HeldGpus,
    /// True if the control daemon sets the compute modes of its GPUs.
    pub sets_modes: bool,
    /// The time that clients have to end by themselves after a fatal GPU error.
    pub fault_grace: Duration,
}

impl Wanted {
    /// The name of a GPU, for people: its UUID, if it is none of the order.
    fn name_of(&self, gpu: &str) -> String {
        self.gpus.iter().find(|wanted| wanted.uuid == gpu).map_or_else(|| gpu.into(), ServedGpu::name)
    }
}

/// Everything that is learnt of a control daemon while it runs.
// Each flag is a fact of its own: none of them excludes another.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug)]
pub struct Known {
    gpus: Vec<GpuUuid>,
    multiuser: bool,
    servers: Servers,
    /// The servers that are watched: an occurrence reports their end.
    watched_servers: BTreeSet<u32>,
    /// The watched server that has ended last, before the log reported that.
    last_gone: Option<u32>,
    check_at: CoreTime,
    /// The time of the next count of the clients, for a control daemon that is to end.
    count_at: CoreTime,
    bypasses_at: Option<CoreTime>,
    /// The GPUs were looked at for its start, which is just over.
    has_just_started: bool,
    /// True once the control daemon has its limits and a server.
    configured: bool,
    /// True if the control daemon has clients, or had some a moment ago.
    in_use: bool,
    /// A client has left: it may have been the last.
    client_left: bool,
    /// The last moment at which the control daemon is known to have had a client.
    quiet_since: CoreTime,
    door: Door,
    /// Why its clients were not known when it was to end without any.
    clients_unknown: Option<String>,
    /// All that keeps it from serving the order.
    blockers: Blockers,
    /// When its next server may come, if this one ends.
    revival: Revival,
    capacity: Capacity,
    waiting_clients: WaitingClients,
}

impl Known {
    /// A control daemon that has these GPUs, at this moment.
    pub fn new(gpus: Vec<GpuUuid>, multiuser: bool, has_just_started: bool, now: CoreTime) -> Self {
        Self {
            gpus,
            multiuser,
            servers: Servers::default(),
            watched_servers: BTreeSet::new(),
            last_gone: None,
            check_at: now,
            count_at: now,
            bypasses_at: None,
            has_just_started,
            configured: false,
            in_use: false,
            client_left: false,
            quiet_since: now,
            door: if has_just_started { Door::Closed } else { Door::Open },
            clients_unknown: None,
            blockers: Blockers::default(),
            revival: Revival::new(now),
            capacity: Capacity::default(),
            waiting_clients: WaitingClients::default(),
        }
    }

    /// The clients that were hit by the fatal GPU error of this server and were not reported yet, by the number of their GPU.
    pub fn take_hit(&mut self) -> Option<(u32, BTreeMap<usize, Vec<u32>>)> {
        let fault = self.blockers.fault_mut()?;
        let new = &fault.clients - &fault.told;
        fault.told.clone_from(&fault.clients);
        let mut hit: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
        for (ordinal, client) in new {
            hit.entry(ordinal).or_default().push(client);
        }
        Some((fault.server, hit))
    }

    /// The limits that the order has for its GPUs, by their ordinals.
    fn limits(&self, wanted: &Wanted) -> Limits {
        let planned = |uuid: &String| wanted.gpus.iter().find(|gpu| gpu.uuid == *uuid);
        let ordinals = self.gpus.iter().enumerate();
        let held: Vec<_> = ordinals.filter_map(|(ordinal, uuid)| Some((ordinal, planned(uuid)?))).collect();
        let enforced = held.iter().filter(|(_, gpu)| gpu.limits_enforced);
        Limits {
            thread_percentage: wanted.thread_percentage,
            enforced: enforced.map(|(ordinal, _)| *ordinal).collect(),
            memory_mib: held.iter().map(|(ordinal, gpu)| (*ordinal, gpu.memory_limit_mib)).collect(),
        }
    }
}

/// The way in which serving ended, unless it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The control daemon needs its order again.
    Again,
    /// We have ended it.
    Stopped,
}

/// A control daemon that runs, its order, and the outside.
#[derive(Debug)]
pub struct Serving<'s, S> {
    /// Carries out everything.
    pub shell: S,
    run: &'s mut Known,
    reach: &'s mut GpuReach,
    wanted: Wanted,
}

impl<'s, S: Shell> Serving<'s, S> {
    /// All that it takes to serve.
    pub fn new(shell: S, run: &'s mut Known, reach: &'s mut GpuReach, wanted: Wanted) -> Self {
        Self { shell, run, reach, wanted }
    }

    /// Gives the control daemon its order, and watches it until something else has to be done.
    ///
    /// # Errors
    /// It can't be made to serve, or does not any more.
    pub async fn serve(&mut self) -> Result<Ended, Failure> {
        let served = self.serve_its_order().await;
        // The shown state is the failure's from now on.
        self.run.configured &= served.is_ok();
        served
    }

    async fn serve_its_order(&mut self) -> Result<Ended, Failure> {
        if !core::mem::take(&mut self.run.has_just_started) {
            self.read_gpus().await?;
        }
        match self.configure().await {
            // The control daemon lives, so it is watched like a control daemon that loses its directory later: it ends when it
            // has no client, or by force.
            Err(Failure::Unreachable(error)) => self.is_unreachable(error),
            done => done?,
        }
        self.watch().await
    }
}
