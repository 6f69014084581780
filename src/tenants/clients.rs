//! The processes that use the GPUs at this moment.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::{Duration, SystemTime};

use crate::host::blocking::Blocking;
use crate::host::nvml::GpuProcess;
use crate::host::proc;
use crate::membership::containers::containers_in;
use crate::membership::{MayCommand, Membership, Seen, SliceMounts, Slices};
use crate::mps::control::{Access, CallersControl, Client, ControlError};
use crate::mps::identity::Identity;
use crate::supervisor::bypass::{self, Bypass, CONFIRM_AFTER};
use crate::supervisor::compute_modes::ComputeModes;
use crate::tenants::in_words::Whose;

/// A process that uses a GPU, as it is at the moment of asking.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientView {
    /// Its PID on the host.
    pub pid: u32,
    /// Whether it uses the GPU without an MPS server of this service.
    pub bypass: bool,
    /// Whether it waits for a server, and uses no GPU yet.
    pub waiting: bool,
    /// Its real user id.
    pub uid: Option<u32>,
    /// The name of that user, or the id of a user without a name.
    pub user: Option<String>,
    /// The command that it runs.
    pub command: String,
    /// The UUID of the GPU; empty if it uses none yet.
    pub gpu_uuid: String,
    /// The slices that it has, if known.
    pub slices: Option<Membership>,
    /// How far it can command a control daemon, if known.
    pub may_command: Option<MayCommand>,
    /// The container that it runs in, if it runs in one.
    pub container_id: Option<String>,
    /// The GPU memory that it holds, in MiB.
    pub memory_mib: Option<u64>,
    /// When it started.
    pub since: Option<SystemTime>,
}

/// The host's users. Users that only a directory service knows stay without a name, since such a service can take long
/// to answer.
const USERS: &str = "/etc/passwd";

/// The time for all questions to the kernel about processes. Each takes microseconds.
const VIEW_TIMEOUT: Duration = Duration::from_secs(10);

/// The time in which the end of a control daemon that no longer listens is noticed. It takes milliseconds.
const END_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
pub(crate) struct Serving {
    /// The way to ask it.
    pub control: Access,
    /// The UUIDs of its GPUs.
    pub gpus: Vec<String>,
    /// The PIDs of the servers that it had a moment ago.
    pub servers: Vec<u32>,
    /// The processes that are known to use them without its servers.
    pub bypasses: Vec<Bypass>,
    /// The clients that wait for one of its servers.
    pub waiting: Vec<Identity>,
}

/// The findings of one look at the GPUs of one control daemon.
struct Look {
    clients: Vec<Client>,
    /// The processes on each of its GPUs, by UUID.
    processes: BTreeMap<String, Vec<GpuProcess>>,
    bypasses: Vec<Bypass>,
}

impl Look {
    /// The driver's facts about a process on a GPU.
    fn process(&self, uuid: &str, pid: u32) -> Option<&GpuProcess> {
        self.processes.get(uuid)?.iter().find(|process| process.pid == pid)
    }
}

/// The text of [`USERS`].
pub(super) fn users() -> String {
    String::from_utf8_lossy(&fs::read(USERS).unwrap_or_default()).into_owned()
}

/// The clients of all these control daemons, and the processes that use their GPUs without MPS. A control daemon that
/// does not answer and a process that can't be looked at are errors: a reader would take a list with holes for the
/// truth.
pub(crate) async fn list(
    serving: Vec<Serving>,
    slices: Slices,
    nvml: ComputeModes,
    kernel: &Blocking,
) -> Result<Vec<ClientView>, String> {
    let (serving, looks) = looks(serving, &nvml).await.map_err(|error| error.to_string())?;
    // Not on the loop's thread: a process that is stuck in the driver can hold up anybody who reads its memory.
    let viewed = kernel.ask(VIEW_TIMEOUT, move || {
        let about = About { users: users(), mounts: SliceMounts::look(&slices), slices };
        serving.iter().zip(&looks).flat_map(|(one, look)| views(one, look, &about)).collect()
    });
    viewed.await.ok_or_else(|| {
        format!(
            "a client's process could not be looked at within {} s; it may be stuck in the driver",
            VIEW_TIMEOUT.as_secs()
        )
    })
}

async fn looks(
    serving: Vec<Serving>,
    nvml: &ComputeModes,
) -> Result<(Vec<Serving>, Vec<Look>), ControlError> {
    let mut looks = Vec::new();
    for one in &serving {
        looks.push(look(one, nvml).await?);
    }
    let is_new = |one: &Serving, look: &Look| {
        look.bypasses.iter().any(|bypass| !one.bypasses.iter().any(|known| known.is(bypass)))
    };
    if serving.iter().zip(&looks).any(|(one, look)| is_new(one, look)) {
        tokio::time::sleep(CONFIRM_AFTER).await;
        for (one, first) in serving.iter().zip(&mut looks) {
            if is_new(one, first) {
                let mut second = look(one, nvml).await?;
                second.bypasses.retain(|bypass| first.bypasses.iter().any(|before| before.is(bypass)));
                *first = second;
            }
        }
    }
    Ok((serving, looks))
}

async fn look(one: &Serving, nvml: &ComputeModes) -> Result<Look, ControlError> {
    let looks = nvml.look_at(one.gpus.clone(), true).await.into_iter();
    let processes: BTreeMap<_, _> =
        looks.map(|(uuid, look)| (uuid, look.map(|(_, processes)| processes).unwrap_or_default())).collect();
    let Some((servers, clients)) = servers_and_clients(one).await? else {
        return Ok(Look { clients: Vec::new(), processes, bypasses: one.bypasses.clone() });
    };
    let pids: BTreeSet<u32> = clients.iter().map(|client| client.pid).collect();
    let find = |(uuid, processes): (&String, &Vec<_>)| bypass::find(uuid, processes, &servers, &pids);
    let bypasses = processes.iter().flat_map(find).collect();
    Ok(Look { clients, processes, bypasses })
}

/// None while it does not serve.
async fn servers_and_clients(one: &Serving) -> Result<Option<(Vec<u32>, Vec<Client>)>, ControlError> {
    let Some(control) = one.control.now() else { return Ok(None) };
    let asked = async {
        let pids = control.client_pids(&one.servers).await?;
        let clients = control.connections(&pids).await?;
        Ok((pids.into_keys().collect(), clients))
    };
    match asked.await {
        // It may be ending at this moment together with its clients, and the supervisor may not know it yet.
        Err(ControlError::NoDaemon { .. }) if has_gone(one, &control).await => Ok(None),
        answer => answer.map(Some),
    }
}

async fn has_gone(one: &Serving, control: &CallersControl) -> bool {
    tokio::time::timeout(END_TIMEOUT, one.control.replaced(control)).await.is_ok()
}

fn views(one: &Serving, look: &Look, about: &About) -> Vec<ClientView> {
    let pids: BTreeSet<u32> = look.clients.iter().map(|client| client.pid).collect();
    let mut views: Vec<ClientView> = Vec::new();
    for pid in pids {
        for uuid in gpus_of(pid, one, look) {
            let process = look.process(&uuid, pid);
            let memory_mib = process.and_then(|process| process.memory_mib);
            views.push(about.view(pid, proc::program(pid), uuid, memory_mib));
        }
    }
    let bypasses = look.bypasses.iter().map(|bypass| {
        let Bypass { gpu_uuid, process, command, memory_mib } = bypass.clone();
        ClientView { bypass: true, ..about.view(process.pid, command, gpu_uuid, memory_mib) }
    });
    views.extend(bypasses);
    let waiting = one.waiting.iter().filter_map(|process| {
        let command = proc::name(process.pid)?;
        let view = about.view(process.pid, command, String::new(), None);
        // A server may have taken it by now, or it may have ended.
        let waits = !views.iter().any(|served| served.pid == process.pid)
            && Identity::of(process.pid).ok() == Some(*process);
        waits.then_some(ClientView { waiting: true, ..view })
    });
    let waiting: Vec<ClientView> = waiting.collect();
    views.extend(waiting);
    views
}

/// The GPUs of a client, each once. The control daemon and the driver must both name the GPU, since a program can
/// choose a name that adds rows to the control daemon's list. The control daemon knows a client before the driver does.
fn gpus_of(pid: u32, one: &Serving, look: &Look) -> BTreeSet<String> {
    let connections = look.clients.iter().filter(|client| client.pid == pid);
    let said: Vec<&String> = connections
        .filter_map(|client| one.gpus.iter().find(|uuid| client.is_on(std::iter::once(*uuid))))
        .collect();
    let known = |uuid: &&String| look.process(uuid, pid).is_some();
    let both: BTreeSet<String> = said.iter().copied().filter(known).cloned().collect();
    if !both.is_empty() {
        return both;
    }
    let either = said.first().copied().or_else(|| one.gpus.iter().find(known));
    BTreeSet::from([either.cloned().unwrap_or_default()])
}

/// All that is the same for every process of one list.
struct About {
    /// The text of [`USERS`].
    users: String,
    mounts: SliceMounts,
    slices: Slices,
}

impl About {
    fn view(&self, pid: u32, command: String, gpu_uuid: String, memory_mib: Option<u64>) -> ClientView {
        let status = proc::status(pid).ok();
        let uid = status.as_ref().and_then(proc::Status::real_uid);
        let seen = self.mounts.see(pid).ok();
        let effective = status.as_ref().and_then(proc::Status::effective_uid);
        let may_command = seen.as_ref().zip(effective).map(|(seen, effective)| seen.may_command(effective));
        let slices = seen.and_then(|seen| seen.slices(pid).ok().flatten());
        let slices = slices.and_then(|all| self.slices.on(&gpu_uuid, all));
        ClientView {
            pid,
            bypass: false,
            waiting: false,
            uid,
            user: uid.map(|uid| user_in(&self.users, uid)),
            command,
            gpu_uuid,
            slices,
            may_command,
            container_id: container(pid),
            memory_mib,
            since: started(pid),
        }
    }
}

fn uid(pid: u32) -> Option<u32> {
    proc::status(pid).ok()?.real_uid()
}

/// The facts about a process that can be read without its memory, which may hang.
pub(super) fn whose(pid: u32, mounts: &SliceMounts, users: &str) -> Whose {
    let slices = mounts.see(pid).ok().and_then(Seen::mounted).map(|mounted| mounted.slices);
    Whose { slices, ..owner(pid, users) }
}

/// The same without the slices.
pub(super) fn owner(pid: u32, users: &str) -> Whose {
    Whose { pid, user: uid(pid).map(|uid| user_in(users, uid)), slices: None, container: container(pid) }
}

/// The name of a user in the text of /etc/passwd, or the number of a user without a name.
fn user_in(users: &str, uid: u32) -> String {
    let number = uid.to_string();
    let named = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == number && !name.is_empty()).then(|| name.to_owned())
    });
    named.unwrap_or(number)
}

/// The id of the innermost container around a process.
fn container(pid: u32) -> Option<String> {
    containers_in(&proc::cgroups_text(pid).ok()?).next().map(str::to_owned)
}

fn started(pid: u32) -> Option<SystemTime> {
    proc::booted()?.checked_add(proc::started(pid)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_names_or_numbers() {
        let users = "root:x:0:0:root:/root:/bin/bash\nbad line\nworker:x:1000:1000::/:/bin/sh\n:x:7:7::/:\n";
        for (uid, name) in [(0, "root"), (1000, "worker"), (100, "100"), (7, "7")] {
            assert_eq!(user_in(users, uid), name);
        }
    }
}
