//! Serving: the configuration, the watch and the repair of a running control daemon, each with the smallest step that is enough.
//!
//! The order of the code is the order in which the decisions are made. Each `await` in this module is a question to the
//! host, or an act on the host. Everything that can happen during an `await` is an [`Occurrence`], or the control daemon
//! ends and serving ends with it.
//!
//! | file | its job |
//! |---|---|
//! | `shell.rs` | all questions and acts |
//! | `news.rs` | the kinds of messages |
//! | `failing.rs` | the reason why the control daemon does not serve, until the pause after the failure |
//! | `start.rs` | the start of the control daemon, after a foreign control daemon in its directory has ended |
//! | `gpus.rs` | the GPUs that are left out, and compute modes |
//! | `take_over.rs` | the take-over of a control daemon that runs |
//! | `bypasses.rs` | processes that use the GPUs without the control daemon's servers |
//! | `configure.rs` | puts the order in force: limits, links, the first server |
//! | `watch.rs` | waits for the next event or the next task |
//! | `check.rs` | the health check |
//! | `limits.rs` | sets the limits and keeps them in force |
//! | `heal.rs`, `fault.rs` | a server that met a fatal GPU error, and a server that has ended |
//! | `requests.rs` | the requests of administrators |
//! | `end.rs` | who uses the control daemon, and its end |
//! | `door.rs` | the links through which programs reach the control daemon: present (open) or removed (closed) |
//! | `blocker.rs` | everything that prevents the control daemon from serving, and the state that is shown |
//! | `servers.rs`, `capacity.rs` | the servers, and the number of clients that GPUs still take |
//! | `waiting_clients.rs` | clients that wait for a server |

mod blocker;
mod bypasses;
mod capacity;
mod check;
mod configure;
mod door;
mod end;
mod failing;
pub mod fault;
mod gpus;
mod heal;
mod limits;
mod news;
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

pub use bypasses::CONFIRM_AFTER;
pub use end::Judged;
pub use failing::Failing;
pub use gpus::{GpuReach, GpuShell, SeenGpu, SeenGpus};
pub(crate) use heal::clients_counted;
pub use news::News;
pub use shell::{ClientsOnGpus, Failure, Occurrence, Requested, Said, Shell};

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

/// The part of the order for a control daemon on which serving depends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The id of the control daemon.
    pub id: DaemonId,
    /// The GPUs that the order gives to the control daemon.
    pub gpus: Vec<ServedGpu>,
    /// The default active thread percentage of the control daemon.
    pub thread_percentage: u8,
    /// True if a server should run before its first client comes.
    pub prewarm: bool,
    /// True if only the present clients need the control daemon. A retiring control daemon ends after its last
    /// client.
    pub retiring: bool,
    /// The time between two looks for programs without MPS. None if the service does not look for programs without MPS on the
    /// GPUs of this control daemon. If several control daemons take turns on a GPU, no compute mode refuses programs without
    /// MPS, so one of these control daemons has a period.
    pub guard_period: Option<Duration>,
    /// The GPUs in the control daemon's order that other control daemons have.
    pub held: HeldGpus,
    /// True if the control daemon sets the compute modes of its GPUs.
    pub sets_modes: bool,
    /// The time that clients have to end by themselves after a fatal GPU error.
    pub fault_grace: Duration,
}

impl Wanted {
    /// The name of a GPU, for people: the UUID for a GPU that is not in the order.
    fn name_of(&self, gpu: &str) -> String {
        self.gpus.iter().find(|wanted| wanted.uuid == gpu).map_or_else(|| gpu.into(), ServedGpu::name)
    }
}

/// The facts that the service has learned about a control daemon while it runs.
// A bool for each fact, and no enum: none of the facts excludes another.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug)]
pub struct Known {
    gpus: Vec<GpuUuid>,
    multiuser: bool,
    servers: Servers,
    /// The servers that the service watches: an occurrence reports the end of such a server.
    watched_servers: BTreeSet<u32>,
    /// The watched server that has ended last. None if the log has reported the end of that server.
    last_gone: Option<u32>,
    check_at: CoreTime,
    /// The time of the next count of the clients, for a control daemon that should end.
    count_at: CoreTime,
    bypasses_at: Option<CoreTime>,
    /// True if the service has just started the control daemon, and has read the state of the GPUs for the start.
    has_just_started: bool,
    /// True once the control daemon has its limits and a server.
    configured: bool,
    /// True if the control daemon has clients, or had clients at the last count.
    in_use: bool,
    /// True if a client has left since the last count, so that the last client may have left.
    client_left: bool,
    /// The last moment at which the control daemon is known to have had a client.
    quiet_since: CoreTime,
    door: Door,
    /// The reason why the service did not know if the control daemon had clients, when it had to end the control daemon
    /// without clients. None if the service knew if the control daemon had clients.
    clients_unknown: Option<String>,
    /// The reasons that prevent the control daemon from serving the order.
    blockers: Blockers,
    /// The pause between the end of a server and the start of the next server.
    revival: Revival,
    capacity: Capacity,
    waiting_clients: WaitingClients,
}

impl Known {
    /// The facts at the moment when a control daemon has just been started with these GPUs, or was just taken over.
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

    /// The clients that a fatal GPU error of a server has hit and that were not reported yet: the server, and the PIDs by the
    /// GPU's ordinal. None if every client that a fatal GPU error has hit was reported.
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

    /// The limits that the order asks for on the control daemon's GPUs, by the GPUs' ordinals.
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

/// The end of serving, unless serving has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The control daemon lives, and has to be given its order again.
    Again,
    /// The service has ended the control daemon.
    Stopped,
}

/// A running control daemon, its order, and the shell that carries out questions and acts.
#[derive(Debug)]
pub struct Serving<'s, S> {
    /// Carries out the questions and acts about the control daemon.
    pub shell: S,
    run: &'s mut Known,
    reach: &'s mut GpuReach,
    wanted: Wanted,
}

impl<'s, S: Shell> Serving<'s, S> {
    /// Begins serving. `run` and `reach` outlive this value, so that serving can begin again with them.
    pub fn new(shell: S, run: &'s mut Known, reach: &'s mut GpuReach, wanted: Wanted) -> Self {
        Self { shell, run, reach, wanted }
    }

    /// Carries out the order, and watches the control daemon until it ends or has to be given its order again.
    ///
    /// # Errors
    /// The control daemon can't be made to serve, or does not serve any more.
    pub async fn serve(&mut self) -> Result<Ended, Failure> {
        let served = self.serve_its_order().await;
        // After a failure of serving the control daemon counts as not configured, so the failure, and not a blocker, decides
        // which state is shown.
        self.run.configured &= served.is_ok();
        if served == Ok(Ended::Stopped) {
            self.shell.show(|view| {
                view.has_ended();
                view.settled = false;
            });
        }
        served
    }

    async fn serve_its_order(&mut self) -> Result<Ended, Failure> {
        if !core::mem::take(&mut self.run.has_just_started) {
            self.read_gpus().await?;
        }
        match self.configure().await {
            // The control daemon can't be reached but lives, so the service watches it. The service ends the control daemon
            // once it has no client, or by force, like a control daemon whose directory is removed while it serves.
            Err(Failure::Unreachable(error)) => self.is_unreachable(error),
            done => done?,
        }
        self.watch().await
    }
}
