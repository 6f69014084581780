//! Makes the Snapshot from the plan and the supervisors' statuses.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::supervisor::Status;
use crate::supervisor::bypass;
use common::config::{Isolation, MayTerminate, Settings};
use common::counted::counted;
use common::drained::Drained;
use common::host::nvml::facts::GpuState;
use common::plan::{GpuPlan, Plan};
use common::published::control_daemon::ControlDaemonState;
use common::published::events::{Event, Events};
use common::published::snapshot::{BoundSlice, GpuView, Snapshot, State};
use common::published::usage::InUse;
use common::published::usage::{GpuUse, SliceUse};
use mps_core::bindings::{Binding, Bindings};
use mps_core::links::Way;
use mps_core::terms::SliceId;
use mps_core::view::{ServedGpuView, Unserved};
use mps_core::{CoreTime, HeldGpus};

/// The Snapshot names at most this many bindings of a slice, since the label of a binding may have hundreds of bytes.
const NAMES: usize = 8;

#[derive(Debug)]
pub(crate) struct Moment {
    pub now: CoreTime,
    pub statuses: Vec<Arc<Status>>,
    pub leaving: Vec<Arc<Status>>,
    /// The GPUs that are planned for one control daemon while another control daemon still has them, by UUID. Each value is the
    /// id of the control daemon that still has the GPU.
    pub held: HeldGpus,
    /// True if a control daemon is about to end, and another control daemon starts, or gets one more GPU, after that end.
    pub starting: bool,
    /// True if each control daemon follows its plan, or the reason is known why it does not.
    pub settled: bool,
}

#[derive(Debug)]
pub(crate) struct Parts<'a> {
    pub settings: &'a Settings,
    pub driver: &'a Result<String, String>,
    pub plan: Result<&'a Plan, &'a str>,
    pub moment: &'a Moment,
    pub drained: &'a Drained,
    pub bindings: &'a Arc<Bindings>,
    /// The GPUs that need a reset, by name. Each value describes the critical error that is the reason.
    pub to_reset: &'a BTreeMap<String, String>,
    /// The slices with a memory limit that the kernel should enforce. Ok: the kernel enforces the limit. Err: the reason why
    /// the kernel does not.
    pub kernel_limits: &'a BTreeMap<SliceId, Result<(), String>>,
    pub uses: &'a BTreeMap<String, GpuUse>,
    pub events: &'a Events,
    /// A problem that does not affect clients, such as a refused configuration. Empty if there is none.
    pub problem: &'a str,
    pub stopping: bool,
}

pub(crate) fn compose(parts: &Parts<'_>, previous: &Snapshot) -> Snapshot {
    let settings = parts.settings;
    let gpus = match (settings.enabled, parts.plan) {
        (false, _) => Some(Vec::new()),
        (true, Ok(plan)) => {
            Some(plan.gpus.iter().map(|gpu| shared(gpu_view(gpu, parts), previous)).collect())
        }
        (true, Err(_)) => None,
    };
    let (state, reason) = state(parts, gpus.as_deref());
    let listed_again = same_listed(gpus.as_deref(), previous.gpus.as_deref());
    Snapshot {
        generation: if listed_again { previous.generation } else { previous.generation + 1 },
        state,
        reason,
        enabled: settings.enabled,
        users_may_terminate: settings.may_terminate == MayTerminate::Owner,
        driver_version: parts.driver.as_ref().cloned().unwrap_or_default(),
        pipe_directory: settings.pipe_directory.clone(),
        log_directory: settings.log_directory.clone(),
        gpus,
        control_daemons: all(parts).map(|status| status.view.clone()).collect(),
        bindings: Arc::clone(parts.bindings),
        events: last_events(parts),
    }
}

pub(crate) fn nothing_yet(settings: &Settings) -> Snapshot {
    Snapshot {
        reason: "the service has not read the GPUs of this host yet".to_owned(),
        enabled: settings.enabled,
        pipe_directory: settings.pipe_directory.clone(),
        log_directory: settings.log_directory.clone(),
        ..Snapshot::default()
    }
}

/// Returns `view`, or the equal view in the last Snapshot, so that both Snapshots share one value.
fn shared(view: GpuView, previous: &Snapshot) -> Arc<GpuView> {
    let same = previous.gpus.iter().flatten().find(|gpu| ***gpu == view);
    same.map_or_else(|| Arc::new(view), Arc::clone)
}

/// True if `ListDevices` and `ListGpus` answer the same for both lists of GPUs. Otherwise the generation of the Snapshot grows.
fn same_listed(new: Option<&[Arc<GpuView>]>, old: Option<&[Arc<GpuView>]>) -> bool {
    let same =
        |(new, old): (&Arc<GpuView>, &Arc<GpuView>)| Arc::ptr_eq(new, old) || listed(new) == listed(old);
    match (new, old) {
        (Some(new), Some(old)) => new.len() == old.len() && new.iter().zip(old).all(same),
        (new, old) => new.is_none() && old.is_none(),
    }
}

/// The part of a GPU's view that `ListDevices` and `ListGpus` show. Clients and their memory are omitted: they change often,
/// and their changes must not increase the Snapshot's generation.
fn listed(gpu: &GpuView) -> GpuView {
    let mut gpu = gpu.clone();
    let overuse = |one: &SliceUse| SliceUse { overuse: one.overuse.clone(), ..SliceUse::default() };
    let known = gpu.uses.iter().any(|one| !one.overuse.is_empty());
    gpu.in_use = None;
    gpu.uses = if known { gpu.uses.iter().map(overuse).collect() } else { Vec::new() };
    if let Ok(facts) = gpu.plan.gpu.nvml.as_mut() {
        // The view has the present compute mode. The plan's compute mode is older, so it is omitted.
        facts.state = GpuState::default();
    }
    gpu
}

fn all<'a>(parts: &Parts<'a>) -> impl Iterator<Item = &'a Status> {
    parts.moment.statuses.iter().chain(&parts.moment.leaving).map(|status| &**status)
}

fn gpu_view(plan: &GpuPlan, parts: &Parts<'_>) -> GpuView {
    let facts = plan.gpu.facts();
    let uuid = facts.map(|facts| facts.uuid.as_str()).unwrap_or_default();
    let serving: Vec<(&Status, &ServedGpuView)> = served(parts, uuid).collect();
    let (trouble, unserved) = trouble(plan, parts, uuid);
    GpuView {
        plan: plan.clone(),
        healthy: trouble.is_none(),
        needs_reset: parts.to_reset.contains_key(&plan.gpu.id().to_string()),
        reason: trouble.unwrap_or_else(|| worth_knowing(plan, &serving)),
        compute_mode: serving
            .iter()
            .find_map(|(status, _)| status.compute_modes.get(uuid).copied())
            .or(facts.and_then(|facts| facts.state.compute_mode)),
        control_daemons: serving.iter().map(|(status, _)| status.view.id.to_string()).collect(),
        confirmed_thread_percentage: of_all(&serving, |gpu| gpu.thread_percentage),
        confirmed_memory_limit_mib: of_all(&serving, |gpu| gpu.memory_limit_mib),
        drained: drained(plan, parts.drained),
        bound: bound(plan, parts.bindings),
        kernel_limits: kernel_limits(plan, parts.kernel_limits),
        full: full_slices(plan, &serving),
        unserved,
        in_use: in_use(parts, uuid, &serving),
        uses: parts.uses.get(uuid).map(|in_use| in_use.slices.clone()).unwrap_or_default(),
    }
}

/// The result of `value`, if it is the same for all control daemons of a GPU. Otherwise None.
fn of_all<T: PartialEq>(
    serving: &[(&Status, &ServedGpuView)],
    value: impl Fn(&ServedGpuView) -> Option<T>,
) -> Option<T> {
    let mut values = serving.iter().map(|(_, gpu)| value(gpu));
    let first = values.next()??;
    values.all(|value| value.as_ref() == Some(&first)).then_some(first)
}

/// The reason why a GPU is not served, and the reasons why single slices of the GPU are not served, by ordinal. If each slice
/// has its own control daemon, a GPU counts as served while one of its slices is served.
fn trouble(plan: &GpuPlan, parts: &Parts<'_>, uuid: &str) -> (Option<String>, BTreeMap<u32, String>) {
    let to_reset = || parts.to_reset.get(&plan.gpu.id().to_string()).map(|error| needs_reset(plan, error));
    if let Some(reason) = plan.unusable().or_else(to_reset).or_else(|| in_the_way(uuid, parts)) {
        return (Some(reason), BTreeMap::new());
    }
    let of_slice = |ordinal| {
        let serves = |status: &&Arc<Status>| {
            let gpu = status.plan.gpus.iter().find(|gpu| gpu.uuid == uuid);
            gpu.is_some_and(|gpu| gpu.sizes.contains_key(&ordinal))
        };
        parts.moment.statuses.iter().find(serves)
    };
    match plan.isolation {
        Isolation::Gpu => match served(parts, uuid).next() {
            Some((status, _)) => (trouble_of(status, uuid), unlinked(plan, status)),
            None => (Some(not_begun(uuid, parts)), BTreeMap::new()),
        },
        Isolation::Slice => {
            let why = |ordinal| {
                let trouble = match of_slice(ordinal) {
                    Some(status) => {
                        trouble_of(status, uuid).or_else(|| unlinked(plan, status).remove(&ordinal))
                    }
                    None => Some(not_begun(uuid, parts)),
                };
                Some((ordinal, trouble?))
            };
            let unserved: BTreeMap<u32, String> = (0..plan.slices()).filter_map(why).collect();
            let is_served = (0..plan.slices()).any(|ordinal| !unserved.contains_key(&ordinal));
            // The reason of the GPU itself is empty, since each slice has its own reason in `unserved`.
            ((!is_served).then(String::new), unserved)
        }
    }
}

fn needs_reset(plan: &GpuPlan, error: &str) -> String {
    format!(
        "the GPU takes no new client before a reset: {error}; when its clients have ended, stop the service \
         (systemctl stop yunion-mps-daemon), reset the GPU (nvidia-smi -i {address} --gpu-reset) and start \
         the service again, or reboot; if the GPU works without a reset: yunion-mpsctl reload",
        address = plan.gpu.pci.address
    )
}

fn trouble_of(status: &Status, uuid: &str) -> Option<String> {
    Some(match status.shown.unserved(uuid)? {
        Unserved::Because(reason) => reason.to_owned(),
        Unserved::ServerKeptOut => format!(
            "{bypassed}; end these programs: no MPS server can start while they run",
            bypassed = used_without_us(status, uuid).unwrap_or_default()
        ),
        Unserved::DaemonServesNone => said_by(status),
        Unserved::BeingSet => "the new limits of the GPU are being set".to_owned(),
    })
}

fn worth_knowing(plan: &GpuPlan, serving: &[(&Status, &ServedGpuView)]) -> String {
    // All control daemons of a GPU report the same bypasses, so the first report is enough.
    let bypassed = serving.iter().find_map(|(status, _)| used_without_us(status, plan.gpu.uuid()?));
    // A GPU without free capacity is not unhealthy, since all its clients are served.
    let full = serving.iter().map(|(_, gpu)| gpu.full.clone());
    let full = full.filter(|full| !full.is_empty() && plan.isolation == Isolation::Gpu);
    let warnings = plan.warnings.iter().map(|warning| warning.problem.found.clone());
    bypassed.into_iter().chain(full).chain(warnings).collect::<Vec<_>>().join("; ")
}

/// The slices without free capacity, if each slice has its own control daemon. Other slices of the GPU may still take clients.
fn full_slices(plan: &GpuPlan, serving: &[(&Status, &ServedGpuView)]) -> BTreeMap<u32, String> {
    let full = serving.iter().filter(|(_, gpu)| plan.isolation == Isolation::Slice && !gpu.full.is_empty());
    let full =
        full.filter_map(|(status, gpu)| Some((status.view.id.only_slice()?.ordinal, gpu.full.clone())));
    full.collect()
}

/// Counts the clients of a GPU. If NVML does not list them, the control daemon gives only their number.
fn in_use(parts: &Parts<'_>, uuid: &str, serving: &[(&Status, &ServedGpuView)]) -> Option<InUse> {
    let listed = parts.uses.get(uuid).and_then(|in_use| in_use.all);
    listed.or_else(|| {
        let [(status, gpu)] = serving else { return None };
        let clients = gpu.unlisted_clients.filter(|_| status.view.pid.is_some())?;
        Some(InUse { clients, memory_mib: (clients == 0).then_some(0) })
    })
}

fn drained(plan: &GpuPlan, drained: &Drained) -> BTreeSet<u32> {
    (0..plan.slices()).filter(|ordinal| drained.has(plan.slice(*ordinal))).collect()
}

fn bound(plan: &GpuPlan, bindings: &Bindings) -> BTreeMap<u32, BoundSlice> {
    let mut all: BTreeMap<u32, Vec<&Binding>> = BTreeMap::new();
    for one in bindings.iter() {
        let is_of_gpu = |slice: &&SliceId| slice.gpu == plan.gpu.id() && slice.ordinal < plan.slices();
        for slice in one.slices.iter().filter(is_of_gpu) {
            all.entry(slice.ordinal).or_default().push(one);
        }
    }
    let shown = |bindings: Vec<&Binding>| BoundSlice {
        by: first_of(&bindings.iter().map(|one| one.name()).collect::<Vec<_>>()),
        groups: bindings.iter().take(NAMES).map(|one| one.group.path.clone()).collect(),
    };
    all.into_iter().map(|(ordinal, bindings)| (ordinal, shown(bindings))).collect()
}

fn first_of(names: &[&str]) -> String {
    let (first, others) = names.split_at(names.len().min(NAMES));
    let others = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
    first.join(", ") + &others
}

fn kernel_limits(
    plan: &GpuPlan,
    all: &BTreeMap<SliceId, Result<(), String>>,
) -> BTreeMap<u32, Result<(), String>> {
    let of_slice = |ordinal| Some((ordinal, all.get(&plan.slice(ordinal))?.clone()));
    (0..plan.slices()).filter_map(of_slice).collect()
}

fn unlinked(plan: &GpuPlan, status: &Status) -> BTreeMap<u32, String> {
    let why = |ordinal| {
        let way = Way::Slice(plan.slice(ordinal).directory_name());
        Some((ordinal, status.missing_links.get(&way)?.clone()))
    };
    (0..plan.slices()).filter_map(why).collect()
}

/// True while a supervisor sets the limits of a GPU. The GPU is then not served for some milliseconds, which is no problem to
/// report.
fn being_set(parts: &Parts<'_>, gpu: &GpuView) -> bool {
    let is_being_set =
        |(status, _): (&Status, _)| status.shown.unserved(gpu.uuid()) == Some(Unserved::BeingSet);
    served(parts, gpu.uuid()).any(is_being_set) && gpu.plan.obstacles.is_empty()
}

/// Names the first slice that is not served, or the first pipe directory without a link to its control daemon, with the reason.
fn astray(parts: &Parts<'_>, gpus: &[Arc<GpuView>]) -> Option<String> {
    let pipe = |status: &Status| {
        Some(format!(
            "clients can't connect in the pipe directory: {reason}",
            reason = status.missing_links.get(&Way::Pipe)?
        ))
    };
    let mut set = gpus.iter().filter(|gpu| !being_set(parts, gpu));
    set.find_map(|gpu| gpu.unserved())
        .or_else(|| parts.moment.statuses.iter().find_map(|status| pipe(status)))
}

fn served<'a>(parts: &Parts<'a>, uuid: &str) -> impl Iterator<Item = (&'a Status, &'a ServedGpuView)> {
    parts.moment.statuses.iter().filter_map(move |status| Some((&**status, status.shown.gpus.get(uuid)?)))
}

fn used_without_us(status: &Status, uuid: &str) -> Option<String> {
    let mut bypasses = status.bypasses_on(uuid).peekable();
    bypasses.peek()?;
    Some(format!(
        "used without an MPS server of this service by {bypasses}",
        bypasses = bypass::describe(bypasses)
    ))
}

fn bypassed(parts: &Parts<'_>, gpus: &[Arc<GpuView>]) -> Option<String> {
    gpus.iter().find_map(|view| {
        let used = served(parts, view.uuid()).find_map(|(status, _)| used_without_us(status, view.uuid()))?;
        Some(format!("GPU {} is {used}", view.plan.gpu.id()))
    })
}

fn said_by(status: &Status) -> String {
    let view = &status.view;
    let reason = match view.reason.as_str() {
        "" => String::new(),
        reason => format!(": {reason}"),
    };
    // The text says "is in backoff", since "is backoff" is no English. The other states are adjectives, such as "is ready".
    let within = if view.state == ControlDaemonState::Backoff { "in " } else { "" };
    format!("control daemon {id} is {within}{state}{reason}", id = view.id, state = view.state)
}

/// Names the control daemon that still has a GPU which another control daemon should serve.
fn in_the_way(uuid: &str, parts: &Parts<'_>) -> Option<String> {
    let id = parts.moment.held.get(uuid)?;
    let status = all(parts).find(|status| status.view.id == *id)?;
    let reason = match status.view.reason.as_str() {
        "" => "the control daemon is ending".to_owned(),
        reason => reason.to_owned(),
    };
    Some(format!("control daemon {id} still has the GPU: {reason}"))
}

fn not_begun(uuid: &str, parts: &Parts<'_>) -> String {
    let plans = parts.plan.map(|plan| plan.control_daemons.as_slice()).unwrap_or_default();
    let its_plan = plans.iter().find(|one| one.gpus.iter().any(|gpu| gpu.uuid == uuid));
    let waits = its_plan.and_then(|one| {
        one.gpus.iter().find_map(|other| {
            let why = in_the_way(&other.uuid, parts)?;
            Some(format!(
                "the control daemon of the GPU also needs GPU {uuid}, and starts when that GPU is free: \
                 {why}",
                uuid = other.uuid
            ))
        })
    });
    waits.unwrap_or_else(|| "no control daemon has started for the GPU yet".to_owned())
}

fn missing(parts: &Parts<'_>) -> Option<String> {
    let missing = parts.plan.ok()?.missing.as_slice();
    let first = missing.first()?;
    let more = match missing.len() {
        1 => String::new(),
        all => format!("; and {} more", all.saturating_sub(1)),
    };
    Some(format!("{}{more}", first.problem))
}

/// The state of the service, and the reason for it. Drained slices do not make the state worse: the drain is intended, and
/// their present clients are served.
fn state(parts: &Parts<'_>, gpus: Option<&[Arc<GpuView>]>) -> (State, String) {
    if parts.stopping {
        return (State::Stopping, String::new());
    }
    if !parts.settings.enabled {
        let reason = parts.settings.why_not_enabled();
        let staying =
            parts.moment.leaving.iter().find(|status| status.view.state == ControlDaemonState::Waiting);
        let staying = staying.map(|status| format!("; {}", said_by(status))).unwrap_or_default();
        return (State::Disabled, format!("{reason}{staying}"));
    }
    let Some(gpus) = gpus else {
        return (State::Failed, parts.plan.err().unwrap_or_default().to_owned());
    };
    if gpus.is_empty() {
        return (State::Failed, parts.plan.map(|plan| plan.nothing.clone()).unwrap_or_default());
    }
    let unserved = |gpu: &&Arc<GpuView>| !gpu.healthy && !being_set(parts, gpu);
    let bad = gpus.iter().filter(unserved).count();
    if bad == 0 {
        let unready =
            parts.moment.statuses.iter().find(|status| status.view.state != ControlDaemonState::Ready);
        return match (parts.problem, unready) {
            ("", None) => {
                match missing(parts).or_else(|| astray(parts, gpus)).or_else(|| bypassed(parts, gpus)) {
                    None => (State::Ready, String::new()),
                    Some(reason) => (State::Degraded, reason),
                }
            }
            ("", Some(status)) if !status.shown.settled && !status.shown.serving => {
                (State::Starting, said_by(status))
            }
            ("", Some(status)) => (State::Degraded, said_by(status)),
            (problem, _) => (State::Degraded, problem.to_owned()),
        };
    }
    // A server that can't open one of its GPUs serves none of them. So the reason for the state names the GPU that can't be
    // opened, and not the other GPUs of the server.
    let keeps_server_out =
        |gpu: &&Arc<GpuView>| served(parts, gpu.uuid()).any(|(_, gpu)| gpu.server_kept_out);
    let mut unhealthy = gpus.iter().filter(unserved);
    let first = unhealthy.clone().find(keeps_server_out).or_else(|| unhealthy.next());
    let why = |gpu: &Arc<GpuView>| gpu.unserved().filter(|_| gpu.reason.is_empty());
    let why = |gpu: &Arc<GpuView>| why(gpu).unwrap_or_else(|| gpu.reason.clone());
    let first = first.map(|gpu| format!("{}: {}", gpu.plan.gpu.id(), why(gpu))).unwrap_or_default();
    let missing = missing(parts).map(|missing| format!("; {missing}")).unwrap_or_default();
    let reason = format!("{bad} of {all} GPUs not served; {first}{missing}", all = gpus.len());
    if parts.moment.starting
        || parts.moment.statuses.iter().any(|status| !status.shown.settled && !status.shown.serving)
    {
        (State::Starting, reason)
    } else if bad < gpus.len() || gpus.iter().all(|gpu| goes_on_as_planned(parts, gpu.uuid())) {
        (State::Degraded, reason)
    } else {
        (State::Failed, reason)
    }
}

/// True if a GPU that is not served needs no administrator. The service then waits for the clients of another control daemon,
/// or for something that starts late, such as the fabric manager. Or a server recovers from a fatal GPU error.
fn goes_on_as_planned(parts: &Parts<'_>, uuid: &str) -> bool {
    parts.moment.held.contains_key(uuid)
        || served(parts, uuid).any(|(status, _)| status.shown.goes_on_as_planned(parts.moment.now))
}

fn last_events(parts: &Parts<'_>) -> Events {
    let theirs = all(parts).flat_map(|status| &status.events);
    let mut events: Vec<&Event> = parts.events.iter().chain(theirs).collect();
    events.sort_by_key(|event| event.seen);
    events.into_iter().cloned().collect()
}

/// The line that `systemctl status` shows for the service.
pub(crate) fn status_line(snapshot: &Snapshot) -> String {
    let gpus = snapshot.gpus.as_deref().unwrap_or_default();
    let slices = snapshot.slices().filter(|(gpu, ordinal)| gpu.slice_healthy(*ordinal)).count();
    let drained: usize = gpus.iter().map(|gpu| gpu.drained.len()).sum();
    let healthy = gpus.iter().filter(|gpu| gpu.healthy).count();
    let mut line = snapshot.state.to_string();
    if !gpus.is_empty() {
        line.push_str(&format!(
            ": {served} on {healthy} of {all} GPUs",
            served = counted(slices, "slice"),
            all = gpus.len()
        ));
        if drained > 0 {
            line.push_str(&format!(", {drained} drained"));
        }
    }
    if !snapshot.reason.is_empty() {
        line.push_str("; ");
        line.push_str(&snapshot.reason);
    }
    // systemd accepts only one line as the status of a service.
    line.replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use common::published::samples::gpu;

    #[test]
    fn clients_change_no_generation_and_overuse_does() {
        let listed_with = |uses: &[SliceUse]| {
            let mut view = gpu("00:06.0", "GPU-1");
            view.uses = uses.to_vec();
            listed(&view)
        };
        let used = |clients| SliceUse { clients, memory_mib: Some(600), overuse: String::new() };
        let over =
            |clients| SliceUse { overuse: "the slice has more than 2 clients".to_owned(), ..used(clients) };
        assert_eq!(listed_with(&[]), listed_with(&[used(0), used(1)]));
        assert_eq!(listed_with(&[used(1), used(0)]), listed_with(&[used(0), used(1)]));
        assert_ne!(listed_with(&[used(3), used(0)]), listed_with(&[over(3), used(0)]));
        assert_ne!(listed_with(&[used(0), over(3)]), listed_with(&[over(3), used(0)]));
        assert_eq!(listed_with(&[over(3), used(0)]), listed_with(&[over(4), used(1)]));
    }
}
