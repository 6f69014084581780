//! Lists the processes that use the GPUs at this moment: clients, and programs without MPS.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use mps_core::register::KnownClient;
use mps_core::serve::CONFIRM_AFTER;
use mps_core::terms::{GpuProcess, ProcessId};
use tokio::time::sleep;

use crate::supervisor::bypass::{self, Bypass};
use crate::supervisor::{Status, Tools};
use common::host::identity;
use common::host::proc;
use common::published::client::ClientView;

/// The time that a new client gets to open its GPU before it is listed without a GPU. If a control daemon has several GPUs,
/// only the driver knows which of them the client uses.
const OPENS_AFTER: Duration = Duration::from_millis(200);

/// By the UUID of the GPU. A GPU is missing if NVML does not list its processes.
type ProcessesByGpu = BTreeMap<String, Vec<GpuProcess>>;

/// Lists the clients of the control daemons with these statuses, and the bypasses on their GPUs. No control daemon is asked,
/// since the register has all clients. NVML may list a client before the service has read the client's line in the log. The
/// result has this client too. If the service can't examine a process in time, its last known slice is listed.
pub(crate) async fn list(statuses: &[Arc<Status>], tools: &Tools) -> Vec<ClientView> {
    let (mut processes, mut bypasses) = find_processes(statuses, tools).await;
    let is_told = |bypass: &Bypass| told(statuses).any(|known| known.is(bypass));
    if !bypasses.iter().all(is_told) {
        sleep(CONFIRM_AFTER).await;
        let first = std::mem::take(&mut bypasses);
        (processes, bypasses) = find_processes(statuses, tools).await;
        bypasses.retain(|bypass| first.iter().any(|before| before.is(bypass)));
    }
    let mut clients = clients_on(&processes, &bypasses, tools);
    if clients.iter().any(|(_, uuid)| uuid.is_empty()) {
        sleep(OPENS_AFTER).await;
        processes = find_processes(statuses, tools).await.0;
        clients = clients_on(&processes, &bypasses, tools);
    }
    let waiting = statuses.iter().flat_map(|status| &status.shown.waiting).copied();
    // A process that waited for a server may have a server by now, or may have ended.
    let waits = |process: &ProcessId| {
        !clients.iter().any(|(client, _)| client.pid == process.pid) && identity::runs(*process)
    };
    let waiting: BTreeSet<ProcessId> = waiting.filter(waits).collect();
    let pids = clients.iter().map(|(client, _)| client.pid).chain(waiting.iter().map(|one| one.pid));
    let pids = pids.chain(bypasses.iter().map(|bypass| bypass.process.pid));
    let known = tools.clients.look_up_anew(pids).await;
    let (slices, booted) = (tools.clients.slices(), proc::booted());
    let view = |process: ProcessId, gpu_uuid: String, memory_mib: Option<u64>| {
        let client = known.get(&process.pid).cloned().unwrap_or_else(|| KnownClient::only(process));
        let its = client.slices.clone().and_then(|all| slices.on(&gpu_uuid, all));
        let since = booted.and_then(|booted| booted.checked_add(proc::started(process.pid)?));
        let command = proc::program(process.pid);
        let client = KnownClient { slices: its, ..client };
        ClientView { client, bypass: false, waiting: false, command, gpu_uuid, memory_mib, since }
    };
    let mut views: Vec<ClientView> = Vec::new();
    for (process, uuid) in clients {
        let there = processes.get(&uuid).into_iter().flatten();
        let memory_mib = there.filter(|one| one.pid == process.pid).find_map(|one| one.memory_mib);
        views.push(view(process, uuid, memory_mib));
    }
    views.extend(bypasses.into_iter().map(|Bypass { gpu_uuid, process, command, memory_mib, owner: _ }| {
        ClientView { bypass: true, command, ..view(process, gpu_uuid, memory_mib) }
    }));
    views.extend(waiting.into_iter().filter_map(|process| {
        let command = proc::name(process.pid)?;
        Some(ClientView { waiting: true, command, ..view(process, String::new(), None) })
    }));
    views
}

fn told(statuses: &[Arc<Status>]) -> impl Iterator<Item = &Bypass> {
    statuses.iter().flat_map(|status| &status.bypasses)
}

async fn find_processes(statuses: &[Arc<Status>], tools: &Tools) -> (ProcessesByGpu, Vec<Bypass>) {
    let (mut searched, mut gpus) = (BTreeSet::new(), BTreeSet::new());
    let mut daemons = BTreeSet::new();
    {
        let state_file = tools.state_file.lock();
        for running in state_file.control_daemons().values() {
            daemons.insert(running.process.pid);
            gpus.extend(running.gpus.iter().cloned());
        }
        for status in statuses {
            let own = state_file.control_daemon(&status.view.id).map(|running| running.gpus.clone());
            // The service searches for bypasses only while its own control daemon runs. Otherwise a foreign control daemon may
            // serve the GPUs, and its clients are no bypasses.
            if status.view.pid.is_some() {
                searched.extend(status.shown.gpus.keys().cloned().chain(own.unwrap_or_default()));
            }
            gpus.extend(status.shown.gpus.keys().cloned());
        }
    }
    // NVML may never answer for a GPU that is left out. One thread that asks about all GPUs would wait for this GPU in vain,
    // before each GPU is asked about by a thread of its own.
    let together = statuses.iter().flat_map(|one| one.shown.gpus.values()).all(|gpu| gpu.left_out.is_empty());
    let looks = tools.nvml.read_gpus(gpus.into_iter().collect(), together).await.into_iter();
    let processes: ProcessesByGpu =
        looks.filter_map(|(uuid, look)| Some((uuid, look.ok()?.1.ok()?))).collect();
    // The register is read after NVML, since the log of a control daemon has a client before the client opens the GPU. While
    // the service has not read this line of the log, the client may be found as a bypass here. So `list` confirms each
    // new bypass by a second search.
    let clients: BTreeSet<u32> = tools.clients.served().iter().map(|(_, process, _)| process.pid).collect();
    let is_told = |uuid: &str, pid: u32| {
        told(statuses).any(|bypass| bypass.gpu_uuid == uuid && bypass.process.pid == pid)
    };
    let mut bypasses = Vec::new();
    for (uuid, there) in processes.iter().filter(|(uuid, _)| searched.contains(*uuid)) {
        let mut strangers = there.clone();
        strangers.retain(|process| !process.via_mps || is_told(uuid, process.pid));
        // The parent of each MPS server is its control daemon. So a child of a control daemon is a server and no bypass.
        strangers.retain(|one| !proc::stat(one.pid).is_ok_and(|stat| daemons.contains(&stat.parent)));
        bypasses.extend(bypass::find(uuid, &strangers, &[], &clients));
    }
    // If NVML does not list the processes of a GPU, the bypasses of the last health check are listed.
    for bypass in told(statuses) {
        let is_listed = searched.contains(&bypass.gpu_uuid) && processes.contains_key(&bypass.gpu_uuid);
        if !is_listed && !bypasses.iter().any(|known: &Bypass| known.is(bypass)) {
            bypasses.push(bypass.clone());
        }
    }
    (processes, bypasses)
}

/// Returns each client once for each of its GPUs. The UUID is empty if the GPU of a client is not known yet.
fn clients_on(
    processes: &ProcessesByGpu,
    bypasses: &[Bypass],
    tools: &Tools,
) -> BTreeSet<(ProcessId, String)> {
    let mut clients = BTreeSet::new();
    for (uuid, process) in processes.iter().flat_map(|(uuid, there)| there.iter().map(move |one| (uuid, one)))
    {
        let is_bypass = bypasses.iter().any(|one| one.gpu_uuid == *uuid && one.process.pid == process.pid);
        if process.via_mps
            && !is_bypass
            && let Ok(process) = identity::read(process.pid)
        {
            clients.insert((process, uuid.clone()));
        }
    }
    // A control daemon knows a client before the driver does, and before Volta the driver lists no clients. So the clients
    // that only the register has are added to those of the driver.
    let driver_knows: BTreeSet<ProcessId> = clients.iter().map(|(process, _)| *process).collect();
    for (id, process, named) in tools.clients.served() {
        if driver_knows.contains(&process) || !identity::runs(process) {
            continue;
        }
        let its = tools.state_file.lock().control_daemon(&id).map(|running| running.gpus.clone());
        let gpus = match its.as_deref() {
            Some([only]) => BTreeSet::from([only.clone()]),
            _ if named.is_empty() => BTreeSet::from([String::new()]),
            _ => named,
        };
        clients.extend(gpus.into_iter().map(|uuid| (process, uuid)));
    }
    clients
}
