//! The processes that use the GPUs at this moment.

use common::published::client::ClientView;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use mps_core::terms::{GpuProcess, ProcessId};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::mps::control::{Control, ControlError};
use crate::register::Clients;
use crate::supervisor::bypass::{self, Bypass};
use crate::supervisor::nvml_worker::NvmlWorker;
use common::host::identity;
use common::host::proc;
use common::membership::Slices;
use mps_core::Tenure;
use mps_core::mps::Client;
use mps_core::register::KnownClient;
use mps_core::serve::CONFIRM_AFTER;

/// The time in which the end of a control daemon that no longer listens is noticed. It takes milliseconds.
const END_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
pub(crate) struct ServingDaemon {
    /// Returns whether others have its GPUs too.
    pub tenure: Tenure,
    /// The way to ask it. None while no control daemon runs.
    pub control: watch::Receiver<Option<Arc<Control>>>,
    /// The UUIDs of its GPUs.
    pub gpus: Vec<String>,
    /// The PIDs of the servers that it had a moment ago.
    pub servers: Vec<u32>,
    /// The processes that are known to use them without its servers.
    pub bypasses: Vec<Bypass>,
    /// The clients that wait for one of its servers.
    pub waiting: Vec<ProcessId>,
}

/// The findings of one look at the GPUs of one control daemon.
struct Scan {
    /// The control daemon's servers. None if it does not serve.
    servers: Option<Vec<u32>>,
    clients: Vec<Client>,
    /// The processes on each of its GPUs, by UUID.
    processes: BTreeMap<String, Vec<GpuProcess>>,
    bypasses: Vec<Bypass>,
    /// Why it does not say which clients it has.
    silent: Option<ControlError>,
}

impl Scan {
    /// The driver's facts about a process on a GPU.
    fn process(&self, uuid: &str, pid: u32) -> Option<&GpuProcess> {
        self.processes.get(uuid)?.iter().find(|process| process.pid == pid)
    }
}

/// The clients of all these control daemons, and the processes that use their GPUs without MPS. A control daemon that
/// does not answer is an error: a reader would take a list with holes for the truth. A process that holds up a look at it has
/// the slice that it had before. Where control daemons take turns, NVML fills the hole: its list, without the clients that the
/// others name.
pub(crate) async fn list(
    serving: Vec<ServingDaemon>,
    clients: &Clients,
    nvml: NvmlWorker,
) -> Result<Vec<ClientView>, String> {
    let (serving, looks) = looks(serving, &nvml).await.map_err(|error| error.to_string())?;
    Ok(view_all(&serving, &looks, clients).await)
}

/// The clients of one control daemon. Other users of its GPUs are not asked for.
pub(crate) async fn list_served(
    one: ServingDaemon,
    clients: &Clients,
    nvml: NvmlWorker,
) -> Result<Vec<ClientView>, String> {
    let look = scan(&one, &nvml).await;
    if let Some(error) = look.silent {
        return Err(error.to_string());
    }
    Ok(view_all(&[one], &[look], clients).await)
}

async fn view_all(serving: &[ServingDaemon], looks: &[Scan], clients: &Clients) -> Vec<ClientView> {
    let served = looks.iter().flat_map(|look| &look.clients).map(|client| client.pid);
    let bypasses = looks.iter().flat_map(|look| &look.bypasses).map(|bypass| bypass.process.pid);
    let waiting = serving.iter().flat_map(|one| &one.waiting).map(|process| process.pid);
    let known = clients.look_up_anew(served.chain(bypasses).chain(waiting)).await;
    let (slices, mut listed) = (clients.slices(), BTreeSet::new());
    let views = serving.iter().zip(looks).flat_map(|(one, look)| views(one, look, &known, &slices));
    // A control daemon that waits for another one of ours finds the clients of that one.
    views.filter(|view| listed.insert((view.client.process.pid, view.gpu_uuid.clone()))).collect()
}

async fn looks(
    serving: Vec<ServingDaemon>,
    nvml: &NvmlWorker,
) -> Result<(Vec<ServingDaemon>, Vec<Scan>), ControlError> {
    let mut looks = scan_all(&serving, nvml).await?;
    let is_new = |one: &ServingDaemon, look: &Scan| {
        look.bypasses.iter().any(|bypass| !one.bypasses.iter().any(|known| known.is(bypass)))
    };
    if serving.iter().zip(&looks).any(|(one, look)| is_new(one, look)) {
        sleep(CONFIRM_AFTER).await;
        let again = scan_all(&serving, nvml).await?;
        for ((one, first), mut second) in serving.iter().zip(&mut looks).zip(again) {
            if is_new(one, first) {
                second.bypasses.retain(|bypass| first.bypasses.iter().any(|before| before.is(bypass)));
                *first = second;
            }
        }
    }
    Ok((serving, looks))
}

/// Looks at all control daemons. Some may have a GPU in common, so the servers and clients of one are strangers to none.
async fn scan_all(serving: &[ServingDaemon], nvml: &NvmlWorker) -> Result<Vec<Scan>, ControlError> {
    let mut asked = JoinSet::new();
    for (place, one) in serving.iter().cloned().enumerate() {
        let nvml = nvml.clone();
        asked.spawn(async move { (place, scan(&one, &nvml).await) });
    }
    let mut answers = asked.join_all().await;
    answers.sort_by_key(|(place, _)| *place);
    let mut scans: Vec<Scan> = answers.into_iter().map(|(_, scan)| scan).collect();
    fill_holes(&mut scans, serving, nvml).await?;
    let known = serving.iter().flat_map(|one| &one.servers);
    let servers: Vec<u32> =
        scans.iter().flat_map(|scan| scan.servers.iter().flatten()).chain(known).copied().collect();
    let clients: BTreeSet<u32> =
        scans.iter().flat_map(|scan| &scan.clients).map(|client| client.pid).collect();
    for (scan, one) in scans.iter_mut().zip(serving) {
        scan.bypasses = match scan.servers {
            Some(_) => {
                let find =
                    |(uuid, processes): (&String, &Vec<_>)| bypass::find(uuid, processes, &servers, &clients);
                // Of a GPU without a list, the last one counts.
                let unlisted =
                    one.bypasses.iter().filter(|bypass| !scan.processes.contains_key(&bypass.gpu_uuid));
                scan.processes.iter().flat_map(find).chain(unlisted.cloned()).collect()
            }
            None => one.bypasses.clone(),
        };
    }
    Ok(scans)
}

/// Gives a control daemon that does not answer the clients that no other control daemon has, where NVML lists them.
async fn fill_holes(
    scans: &mut [Scan],
    serving: &[ServingDaemon],
    nvml: &NvmlWorker,
) -> Result<(), ControlError> {
    let named: BTreeSet<u32> = scans.iter().flat_map(|scan| &scan.clients).map(|client| client.pid).collect();
    for (scan, one) in scans.iter_mut().zip(serving) {
        let Some(error) = scan.silent.take() else { continue };
        if one.tenure == Tenure::Alone {
            return Err(error);
        }
        for (uuid, there) in nvml.mps_clients(&one.gpus).await {
            let Ok(there) = there else { return Err(error) };
            let of_nobody = there.difference(&named);
            scan.clients.extend(of_nobody.map(|pid| client_of_nvml(*pid, &uuid)));
        }
    }
    Ok(())
}

async fn scan(one: &ServingDaemon, nvml: &NvmlWorker) -> Scan {
    let looks = nvml.read_gpus(one.gpus.clone(), true).await.into_iter();
    let processes: BTreeMap<_, _> =
        looks.filter_map(|(uuid, look)| Some((uuid, look.ok()?.1.ok()?))).collect();
    let mut silent = None;
    let (servers, clients) = match servers_and_clients(one).await {
        Ok(Some((servers, clients))) => (Some(servers), clients),
        Ok(None) if one.control.borrow().is_none() => (None, of_whichever(&processes)),
        Ok(None) => (None, Vec::new()),
        Err(error) => {
            silent = Some(error);
            (Some(one.servers.clone()), Vec::new())
        }
    };
    Scan { servers, clients, processes, bypasses: Vec::new(), silent }
}

/// A client of which nothing but its GPU is known.
fn client_of_nvml(pid: u32, uuid: &str) -> Client {
    Client { pid, id: None, server: 0, gpu_prefix: uuid.to_owned() }
}

/// The MPS clients that the driver lists, by GPU: those of another control daemon, while ours waits for its end.
fn of_whichever(processes: &BTreeMap<String, Vec<GpuProcess>>) -> Vec<Client> {
    let on = |(uuid, processes): (&String, &Vec<GpuProcess>)| -> Vec<Client> {
        let clients = processes.iter().filter(|process| process.via_mps);
        clients.map(|process| client_of_nvml(process.pid, uuid)).collect()
    };
    processes.iter().flat_map(on).collect()
}

/// None while it does not serve.
async fn servers_and_clients(one: &ServingDaemon) -> Result<Option<(Vec<u32>, Vec<Client>)>, ControlError> {
    let Some(control) = one.control.borrow().clone() else { return Ok(None) };
    let asked = async {
        let pids = control.client_pids(&one.servers).await?;
        let clients = control.connections(&pids).await?;
        Ok((pids.into_keys().collect(), clients))
    };
    match asked.await {
        // The control daemon may be ending at this moment together with its clients, and the supervisor may not know it yet.
        Err(ControlError::NoDaemon { .. }) if has_gone(one, &control).await => Ok(None),
        answer => answer.map(Some),
    }
}

/// True if this control daemon runs no longer, by the word of its supervisor, which may have ended as well.
async fn has_gone(one: &ServingDaemon, asked: &Arc<Control>) -> bool {
    let mut control = one.control.clone();
    let another_runs =
        control.wait_for(|now| !now.as_ref().is_some_and(|running| Arc::ptr_eq(running, asked)));
    timeout(END_TIMEOUT, another_runs).await.is_ok()
}

fn views(
    one: &ServingDaemon,
    look: &Scan,
    known: &BTreeMap<u32, KnownClient>,
    slices: &Slices,
) -> Vec<ClientView> {
    let view = |pid: u32, command: String, gpu_uuid: String, memory_mib: Option<u64>| {
        let client = known.get(&pid).cloned();
        let client = client.unwrap_or_else(|| KnownClient::only(ProcessId { pid, start_time: 0 }));
        let its = client.slices.clone().and_then(|all| slices.on(&gpu_uuid, all));
        let client = KnownClient { slices: its, ..client };
        let since = started(pid);
        ClientView { client, bypass: false, waiting: false, command, gpu_uuid, memory_mib, since }
    };
    let pids: BTreeSet<u32> = look.clients.iter().map(|client| client.pid).collect();
    let mut views: Vec<ClientView> = Vec::new();
    for pid in pids {
        for uuid in gpus_of(pid, one, look) {
            let process = look.process(&uuid, pid);
            let memory_mib = process.and_then(|process| process.memory_mib);
            views.push(view(pid, proc::program(pid), uuid, memory_mib));
        }
    }
    let bypasses = look.bypasses.iter().map(|bypass| {
        let Bypass { gpu_uuid, process, command, memory_mib, owner: _ } = bypass.clone();
        ClientView { bypass: true, ..view(process.pid, command, gpu_uuid, memory_mib) }
    });
    views.extend(bypasses);
    let waiting = one.waiting.iter().filter_map(|process| {
        let view = view(process.pid, proc::name(process.pid)?, String::new(), None);
        // A server may have taken it by now, or it may have ended.
        let waits = !views.iter().any(|served| served.client.process.pid == process.pid)
            && identity::read(process.pid).ok() == Some(*process);
        waits.then_some(ClientView { waiting: true, ..view })
    });
    let waiting: Vec<ClientView> = waiting.collect();
    views.extend(waiting);
    views
}

/// The GPUs of a client, each once. The control daemon and the driver must both name the GPU, since a program can
/// choose a name that adds rows to the control daemon's list. The control daemon knows a client before the driver does.
fn gpus_of(pid: u32, one: &ServingDaemon, look: &Scan) -> BTreeSet<String> {
    let connections = look.clients.iter().filter(|client| client.pid == pid);
    let said: Vec<&String> =
        connections.filter_map(|client| one.gpus.iter().find(|uuid| client.is_on(uuid))).collect();
    let known = |uuid: &&String| look.process(uuid, pid).is_some();
    let both: BTreeSet<String> = said.iter().copied().filter(known).cloned().collect();
    if !both.is_empty() {
        return both;
    }
    let either = said.first().copied().or_else(|| one.gpus.iter().find(known));
    BTreeSet::from([either.cloned().unwrap_or_default()])
}

fn started(pid: u32) -> Option<SystemTime> {
    proc::booted()?.checked_add(proc::started(pid)?)
}
