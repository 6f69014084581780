//! The changes that a reload would make: a comparison of the new plan with the published values.

use std::fmt;
use std::path::Path;

use mps_core::terms::{DaemonId, SliceSize};
use serde::Serialize;

use crate::bus::answers::Published;
use crate::bus::proxy::Listed;
use crate::bus::rows::{self, Gpu};
use crate::config::Loaded;
use crate::counted::counted;
use crate::directories::give_up_private_directory;
use crate::plan::{ControlDaemonPlan, GpuPlan, Plan, Present};

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Difference {
    pub kind: DifferenceKind,
    pub subject: String,
    /// The value that the service publishes now. Empty if the reload adds `subject`.
    pub from: String,
    /// The value after the reload. Empty if the reload removes `subject`.
    pub to: String,
    pub effect: Effect,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DifferenceKind {
    Enabled,
    Devices,
    MemoryLimit,
    ThreadPercentage,
    MaxClients,
    PipeDirectory,
    ControlDaemon,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "when", rename_all = "kebab-case")]
pub enum Effect {
    /// The change takes effect at once, for clients that start after the reload.
    Live,
    /// The change takes effect after the clients of the present control daemon have ended. Then the service ends this control
    /// daemon, and starts the control daemons of the new plan that need its GPUs.
    Waits {
        /// The number of clients of the present control daemon. None (null in JSON) if the number is unknown.
        clients: Option<usize>,
        reason: String,
        /// True if new clients find no control daemon while the change waits.
        out_meanwhile: bool,
    },
    /// The change takes effect at once, and ends the GPU work of all clients.
    Ends {
        /// The number of clients that lose their work. None (null in JSON) if the number is unknown.
        clients: Option<usize>,
    },
    /// The service refuses the reload, so the change does not take effect.
    Refused { reason: String },
}

impl fmt::Display for Effect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let describe = |clients: &Option<usize>| match clients {
            Some(count) => counted(*count, "client"),
            None => "an unknown number of clients".to_owned(),
        };
        match self {
            Self::Live => f.write_str("at once, for new clients"),
            Self::Waits { clients: Some(0), reason, .. } => {
                write!(f, "at once ({reason}); the present control daemon has no clients")
            }
            Self::Waits { clients, reason, out_meanwhile } => {
                let have = if *clients == Some(1) { "has" } else { "have" };
                let out = if *out_meanwhile { " (until then NO NEW CLIENT is served)" } else { "" };
                write!(f, "after {clients} {have} ended{out}: {reason}", clients = describe(clients))
            }
            Self::Ends { clients: Some(0) } => f.write_str("at once; no GPU has clients"),
            Self::Refused { reason } => write!(f, "refused: {reason}"),
            Self::Ends { clients } => {
                write!(
                    f,
                    "at once, and ENDS the GPU work of {clients} (CUDA error 806)",
                    clients = describe(clients)
                )
            }
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, subject, from, to, effect } = self;
        let change = match (kind, from.as_str(), to.as_str()) {
            (DifferenceKind::Enabled, _, "false") => "MPS is switched off".to_owned(),
            (DifferenceKind::Enabled, ..) => "MPS is switched on".to_owned(),
            (DifferenceKind::Devices, "", to) => format!("{subject} gets new slices, {to}"),
            (DifferenceKind::Devices, from, _) => format!("{subject} loses slices, {from}"),
            (DifferenceKind::MemoryLimit, ..) => format!("{subject}: memory limit {from} MiB -> {to} MiB"),
            (DifferenceKind::ThreadPercentage, ..) => format!("{subject}: threads {from} % -> {to} %"),
            (DifferenceKind::MaxClients, ..) => {
                format!("{subject}: largest number of clients of a slice {from} -> {to}")
            }
            (DifferenceKind::PipeDirectory, ..) => {
                format!("control daemon {subject}: pipe directory {from} -> {to}")
            }
            (DifferenceKind::ControlDaemon, "", _) => format!("control daemon {subject} starts"),
            (DifferenceKind::ControlDaemon, _, "") => format!("control daemon {subject} ends"),
            (DifferenceKind::ControlDaemon, ..) => format!("control daemon {subject} is replaced"),
        };
        write!(f, "{change}: {effect}")
    }
}

pub fn differences(loaded: &Loaded, plan: &Plan, published: &Published) -> Result<Vec<Difference>, String> {
    if published.devices.is_none() {
        return Err("the service does not know the GPUs of this host yet".to_owned());
    }
    // The service removes unusable private directories from a plan before it compares the plan with the running control
    // daemons. The check does the same, so that both find the same changes.
    let mut plan = plan.clone();
    for daemon in &mut plan.control_daemons {
        give_up_private_directory(daemon);
    }
    let mut comparison = Comparison { plan: &plan, published, differences: Vec::new() };
    let (before, after) = (published.service.enabled, loaded.settings.enabled);
    if before != after {
        let all = published.control_daemons.iter().flat_map(|daemon| daemon.gpus.clone());
        let effect = match loaded.silent_end() {
            _ if after => Effect::Live,
            Some(problem) => Effect::Refused { reason: problem.to_string() },
            None => Effect::Ends { clients: published.clients_on(&all.collect::<Vec<_>>()) },
        };
        comparison.add(DifferenceKind::Enabled, "enable_cuda_mps", [&before, &after], effect);
        return Ok(comparison.differences);
    }
    comparison.control_daemons();
    for gpu in &plan.gpus {
        comparison.gpu(gpu);
    }
    for gpu in &published.gpus {
        if !plan.gpus.iter().any(|planned| planned.gpu.id().to_string() == gpu.addr) {
            let effect = comparison.effect_for(gpu.device_path.as_deref().unwrap_or_default());
            comparison.add(
                DifferenceKind::Devices,
                &gpu.addr,
                [&slices(&gpu.addr, 0, count(gpu)), &""],
                effect,
            );
        }
    }
    Ok(comparison.differences)
}

struct Comparison<'a> {
    plan: &'a Plan,
    published: &'a Published,
    differences: Vec<Difference>,
}

impl Comparison<'_> {
    fn add(&mut self, kind: DifferenceKind, subject: &str, [from, to]: [&dyn ToString; 2], effect: Effect) {
        let (subject, from, to) = (subject.to_owned(), from.to_string(), to.to_string());
        self.differences.push(Difference { kind, subject, from, to, effect });
    }

    fn control_daemons(&mut self) {
        let Self { plan, published, .. } = *self;
        for planned in &plan.control_daemons {
            let known = published.control_daemons.iter().any(|daemon| *daemon.id == *planned.id.to_string());
            if !known && !ordered(planned, published) {
                let uuid = planned.gpus.first().map(|gpu| gpu.uuid.as_str()).unwrap_or_default();
                self.add(
                    DifferenceKind::ControlDaemon,
                    &planned.id.to_string(),
                    [&"", &"new"],
                    self.effect_for(uuid),
                );
            }
        }
        for daemon in &published.control_daemons {
            let id = daemon.id.as_str();
            let clients = published.clients_on(&daemon.gpus);
            let Some(planned) = plan.control_daemons.iter().find(|planned| planned.id == DaemonId::from(id))
            else {
                // If no published GPU has this control daemon, the control daemon is about to end even without a reload. So its
                // end is no change that the reload makes.
                if published.served_by(id).next().is_some() {
                    let reason = "this control daemon is no longer needed".to_owned();
                    let effect = Effect::Waits { clients, reason, out_meanwhile: false };
                    self.add(DifferenceKind::ControlDaemon, id, [&"present", &""], effect);
                }
                continue;
            };
            // A control daemon that is about to end is published without GPUs. If the planned GPUs are already published with
            // the planned pipe directory, the service starts the planned control daemon even without a reload. So this start is
            // no change that the reload makes.
            if daemon.gpus.is_empty() && ordered(planned, published) {
                continue;
            }
            let Some(reason) = misfit(planned, daemon) else { continue };
            let effect = Effect::Waits { clients, reason, out_meanwhile: moves(planned, daemon) };
            let (from, to) = (daemon.pipe_directory.as_str(), planned.pipe_directory.display().to_string());
            if from == to {
                self.add(DifferenceKind::ControlDaemon, id, [&"present", &"new"], effect);
            } else {
                self.add(DifferenceKind::PipeDirectory, id, [&from, &to], effect);
            }
        }
    }

    fn gpu(&mut self, gpu: &GpuPlan) {
        let name = gpu.gpu.id().to_string();
        let uuid = gpu.gpu.uuid().unwrap_or_default();
        let now = self.published.gpus.iter().find(|now| now.addr == name);
        let before = now.map_or(0, |now| count(now));
        let after = u64::from(gpu.slices());
        if before < after {
            let come = slices(&name, before, after);
            self.add(DifferenceKind::Devices, &name, [&"", &come], self.effect_for(uuid));
        } else if after < before {
            let go = slices(&name, after, before);
            self.add(DifferenceKind::Devices, &name, [&go, &""], self.effect_for(uuid));
        }
        let Some(now) = now else { return };
        if now.equal_slices && gpu.equal_slices() {
            self.size(&name, uuid, [now.mps_memory_limit, Some(now.mps_thread_percentage)], gpu.size(0));
            let mut devices = self.published.devices.iter().flatten();
            let first = devices.find(|device| device.base_addr == name);
            self.most_clients(&name, first.and_then(|device| device.max_clients), gpu.max_clients(0));
            return;
        }
        for device in self.published.devices.iter().flatten().filter(|device| device.base_addr == name) {
            if device.ordinal < gpu.slices() {
                let now = [device.mps_memory_limit, Some(device.mps_thread_percentage)];
                self.size(&device.addr, uuid, now, gpu.size(device.ordinal));
                self.most_clients(&device.addr, device.max_clients, gpu.max_clients(device.ordinal));
            }
        }
    }

    /// Compares the published memory limit and thread percentage with the planned values. `name` is a slice, or a GPU with
    /// equal slices.
    fn size(&mut self, name: &str, uuid: &str, [memory, threads]: [Option<i32>; 2], to: SliceSize) {
        for (kind, from, to) in [
            (DifferenceKind::MemoryLimit, memory, to.memory_mib),
            (DifferenceKind::ThreadPercentage, threads, to.thread_percentage.into()),
        ] {
            // In the plan, a memory limit of 0 means that the limit is unknown.
            if let Some(from) = from.filter(|from| to > 0 && u64::try_from(*from) != Ok(to)) {
                self.add(kind, name, [&from, &to], self.effect_for(uuid));
            }
        }
    }

    fn most_clients(&mut self, name: &str, from: Option<u32>, to: Option<u32>) {
        if let (Some(from), Some(to)) = (from, to)
            && from != to
        {
            // The service itself enforces the limit on clients, so the service need not replace a control daemon.
            self.add(DifferenceKind::MaxClients, name, [&from, &to], Effect::Live);
        }
    }

    fn effect_for(&self, uuid: &str) -> Effect {
        let Self { plan, published, .. } = self;
        let planned = plan.control_daemons.iter().find(|one| one.gpus.iter().any(|gpu| gpu.uuid == uuid));
        let holder = published.control_daemons.iter().find(|one| one.gpus.iter().any(|gpu| gpu == uuid));
        let same = planned.and_then(|planned| {
            let daemon =
                published.control_daemons.iter().find(|daemon| *daemon.id == *planned.id.to_string())?;
            Some((planned, daemon))
        });
        // With a control daemon for each slice, several control daemons use a GPU in turns. A control daemon for a slice starts
        // beside the control daemons of other slices, and waits only for a control daemon that uses the GPU alone.
        let keeps = |holder: &Listed<rows::ControlDaemon>| {
            planned.is_none_or(|one| DaemonId::from(holder.id.as_str()).tenure().keeps_from(one.tenure()))
        };
        let holder = holder.filter(|holder| keeps(holder));
        let (daemon, reason, out_meanwhile) = match (same, holder) {
            (Some((planned, daemon)), _) => match misfit(planned, daemon) {
                Some(reason) => (daemon, reason, moves(planned, daemon)),
                None => return Effect::Live,
            },
            (None, Some(holder)) => {
                (holder, format!("control daemon {id} holds the GPU", id = holder.id), planned.is_some())
            }
            (None, None) => return Effect::Live,
        };
        // A control daemon that is about to end is published without GPUs, but its clients are on this GPU.
        let own = [uuid.to_owned()];
        let gpus = if daemon.gpus.is_empty() { &own } else { daemon.gpus.as_slice() };
        Effect::Waits { clients: published.clients_on(gpus), reason, out_meanwhile }
    }
}

/// True if the service already plans this control daemon, and starts it once other control daemons have released its GPUs.
fn ordered(planned: &ControlDaemonPlan, published: &Published) -> bool {
    planned.gpus.iter().all(|served| {
        published.gpus.iter().any(|gpu| {
            gpu.device_path.as_ref() == Some(&served.uuid)
                && gpu.control_daemon.is_empty()
                && Path::new(&gpu.pipe_directory) == planned.pipe_directory
        })
    })
}

/// True if the planned control daemon has another pipe directory than the running control daemon. Then new clients find no
/// control daemon until the clients of the running control daemon have ended.
fn moves(planned: &ControlDaemonPlan, daemon: &rows::ControlDaemon) -> bool {
    planned.pipe_directory != Path::new(&daemon.pipe_directory)
}

fn misfit(planned: &ControlDaemonPlan, daemon: &rows::ControlDaemon) -> Option<String> {
    let present = Present {
        pipe_directory: Path::new(&daemon.pipe_directory),
        control_directory: Path::new(&daemon.control_directory),
        log_directory: Path::new(&daemon.log_directory),
        gpus: &daemon.gpus,
        // A control daemon that has not started yet has no published value of `multiuser`. The check assumes the planned value,
        // so that `multiuser` is no reason for a replacement.
        multiuser: daemon.multiuser.unwrap_or(planned.multiuser),
        near_cpus: daemon.wanted_cpus.is_some(),
    };
    planned.misfit(&present, |_| true)
}

fn count(gpu: &Gpu) -> u64 {
    u64::try_from(gpu.virtual_num).unwrap_or_default()
}

/// The names of the slices from `from` to `to` - 1, such as `00:06.0-4 to 00:06.0-7`, or `00:06.0-4` for a single slice.
fn slices(gpu: &str, from: u64, to: u64) -> String {
    match to.saturating_sub(1) {
        last if last <= from => format!("{gpu}-{from}"),
        last => format!("{gpu}-{from} to {gpu}-{last}"),
    }
}
