//! Serving: configures, watches and repairs a running control daemon, each time with the smallest step that is enough.
//!
//! Each `await` in this module is a question to the host, or an act on the host. An event that happens during an `await` comes
//! later as an [`Occurrence`]. If the control daemon ends during an `await`, serving ends.
//!
//! | file | its job |
//! |---|---|
//! | `shell.rs` | all questions to the host, and all acts on the host |
//! | `news.rs` | the kinds of messages |
//! | `failing.rs` | the reason why the control daemon does not serve, until the pause after the failure |
//! | `start.rs` | the start of the control daemon, after a foreign control daemon in its directory has ended |
//! | `gpus.rs` | the GPUs that are out of service, and compute modes |
//! | `take_over.rs` | takes over a control daemon that runs already |
//! | `bypasses.rs` | processes that use the GPUs without the control daemon's servers |
//! | `configure.rs` | puts the order in force: limits, links, the first server |
//! | `watch.rs` | waits for the next event or the next task |
//! | `check.rs` | the health check |
//! | `limits.rs` | sets the limits and keeps them in force |
//! | `heal.rs`, `fault.rs` | a server that met a fatal GPU error, and a server that has ended |
//! | `requests.rs` | the requests of administrators |
//! | `end.rs` | which programs use the control daemon, and its end |
//! | `door.rs` | the links through which programs reach the control daemon, and their change to the waiting socket |
//! | `blocker.rs` | everything that prevents the control daemon from serving, and the published state |
//! | `servers.rs`, `capacity.rs` | the servers, and the number of clients that GPUs still take |
//! | `waiting_clients.rs` | clients that wait for a server |

mod blocker;
mod bypasses;
mod capacity;
mod check;
mod configure;
mod door;
mod effect;
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
pub use effect::RunEffect;
pub use end::Judged;
pub use failing::Failing;
pub use gpus::{GpuReach, GpuShell, SeenGpu, SeenGpus};
pub(crate) use heal::clients_counted;
pub use heal::tried_again;
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

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    pub id: DaemonId,
    /// All GPUs of the order, including the GPUs in `held`.
    pub gpus: Vec<ServedGpu>,
    pub thread_percentage: u8,
    /// True if a server should start before the first client comes.
    pub prewarm: bool,
    /// True if only the present clients need the control daemon, which ends after its last client.
    pub retiring: bool,
    /// The time between two regular searches for programs without MPS. None if this control daemon has its GPUs alone, or if
    /// the supervisor of another control daemon on the GPU searches. If several control daemons take turns on a GPU, no compute
    /// mode refuses programs without MPS, so one of the supervisors searches regularly.
    pub guard_period: Option<Duration>,
    /// The GPUs of the order that other control daemons still have.
    pub held: HeldGpus,
    pub sets_modes: bool,
    /// The time that clients have to end by themselves after a fatal GPU error.
    pub fault_grace: Duration,
}

impl Wanted {
    fn name_of(&self, gpu: &str) -> String {
        self.gpus.iter().find(|wanted| wanted.uuid == gpu).map_or_else(|| gpu.into(), ServedGpu::name)
    }
}

// Each bool is an independent fact, so an enum can't replace the bools.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug)]
pub struct Known {
    gpus: Vec<GpuUuid>,
    multiuser: bool,
    servers: Servers,
    /// The shell reports the end of these servers as an [`Occurrence`].
    watched_servers: BTreeSet<u32>,
    check_at: CoreTime,
    /// The time of the next count of the clients, if the control daemon should end.
    count_at: CoreTime,
    bypasses_at: Option<CoreTime>,
    /// True if the service has just started the control daemon. The service has then read the state of the GPUs for the start,
    /// and does not read the state again before it configures the control daemon.
    has_just_started: bool,
    /// True once the control daemon has its limits and a server.
    configured: bool,
    /// True if the control daemon had clients at the last count, or if a client has connected since.
    in_use: bool,
    /// True if a client has ended since the last count. The control daemon may then have no client any more.
    client_left: bool,
    /// The last moment at which the control daemon is known to have had a client.
    quiet_since: CoreTime,
    door: Door,
    /// The reason why the last count of the clients has failed, for a control daemon that should end once it has no client.
    /// None if the count has succeeded.
    clients_unknown: Option<String>,
    blockers: Blockers,
    revival: Revival,
    capacity: Capacity,
    waiting_clients: WaitingClients,
}

impl Known {
    pub fn new(gpus: Vec<GpuUuid>, multiuser: bool, has_just_started: bool, now: CoreTime) -> Self {
        Self {
            gpus,
            multiuser,
            servers: Servers::default(),
            watched_servers: BTreeSet::new(),
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

    /// The clients that a fatal GPU error of a server has hit and that were not reported yet: the server, and the clients' PIDs
    /// by the GPU's ordinal. None if no server handles a fatal GPU error.
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

    /// The limits that the order asks for, by the GPUs' positions in the control daemon's list of GPUs.
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The control daemon answers again. It may have missed commands while it did not answer, so it must get its order again.
    Again,
    Stopped,
}

/// A running control daemon with its order, and the shell, which carries out questions and acts.
#[derive(Debug)]
pub struct Serving<'s, S> {
    pub shell: S,
    run: &'s mut Known,
    reach: &'s mut GpuReach,
    wanted: Wanted,
}

impl<'s, S: Shell> Serving<'s, S> {
    /// `run` and `reach` outlive this value, so that the next `Serving` of the same control daemon continues with their facts.
    pub fn new(shell: S, run: &'s mut Known, reach: &'s mut GpuReach, wanted: Wanted) -> Self {
        Self { shell, run, reach, wanted }
    }

    /// Gives the control daemon its order, and watches it until it ends or needs its order again.
    ///
    /// # Errors
    /// The control daemon can't serve, or does not serve any more.
    pub async fn serve(&mut self) -> Result<Ended, Failure> {
        let served = self.serve_its_order().await;
        // After a failure the control daemon counts as not configured. The published state then comes from the failure and not
        // from a blocker.
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
            // The control daemon can't be reached but runs, so the service watches it. The service ends the control daemon once
            // it has no client, or for `apply --force`.
            Err(Failure::Unreachable(error)) => self.is_unreachable(error),
            done => done?,
        }
        self.watch().await
    }
}
