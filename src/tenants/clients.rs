//! The processes that use the GPUs at this moment.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, SystemTime};

use crate::host::blocking::Blocking;
use crate::host::gpu::PciAddress;
use crate::host::nvml::GpuProcess;
use crate::host::proc;
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
    /// The name of the slice that it uses, if known.
    pub device: Option<String>,
    /// The container that it runs in, if it runs in one.
    pub container_id: Option<String>,
    /// The GPU memory that it holds, in MiB.
    pub memory_mib: Option<u64>,
    /// When it started.
    pub since: Option<SystemTime>,
}

/// The environment variable that names the devices of a container.
pub(crate) const DEVICE_VARIABLE: &str = "YUNION_MPS_DEVICE";

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
    /// The processes that are known to use them without its servers.
    pub bypasses: Vec<Bypass>,
    /// The clients that wait for one of its servers.
    pub waiting: Vec<Identity>,
}

/// The findings of one look at the GPUs of one control daemon.
struct Look {
    clients: Vec<Client>,
    processes: Vec<(String, Vec<GpuProcess>)>,
    bypasses: Vec<Bypass>,
}

impl Look {
    /// The driver's facts about a process on a GPU.
    fn process(&self, uuid: &str, pid: u32) -> Option<&GpuProcess> {
        let (_, processes) = self.processes.iter().find(|(gpu, _)| gpu == uuid)?;
        processes.iter().find(|process| process.pid == pid)
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
    nvml: ComputeModes,
    kernel: &Blocking,
) -> Result<Vec<ClientView>, String> {
    let (serving, looks) = looks(serving, &nvml).await.map_err(|error| error.to_string())?;
    // Not on the loop's thread: a process that is stuck in the driver can hold up anybody who reads its memory.
    let viewed = kernel.ask(VIEW_TIMEOUT, move || {
        let users = users();
        serving.iter().zip(&looks).flat_map(|(one, look)| views(one, look, &users)).collect()
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
    let processes = bypass::processes(nvml, &one.gpus).await;
    let Some((servers, clients)) = servers_and_clients(one).await? else {
        return Ok(Look { clients: Vec::new(), processes, bypasses: one.bypasses.clone() });
    };
    let pids: BTreeSet<u32> = clients.iter().map(|client| client.pid).collect();
    let bypasses =
        processes.iter().flat_map(|(uuid, processes)| bypass::find(uuid, processes, &servers, &pids));
    let bypasses = bypasses.collect();
    Ok(Look { clients, processes, bypasses })
}

/// None while it does not serve.
async fn servers_and_clients(one: &Serving) -> Result<Option<(Vec<u32>, Vec<Client>)>, ControlError> {
    let Some(control) = one.control.now() else { return Ok(None) };
    let asked = async {
        let pids = control.client_pids().await?;
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

fn views(one: &Serving, look: &Look, users: &str) -> Vec<ClientView> {
    let pids: BTreeSet<u32> = look.clients.iter().map(|client| client.pid).collect();
    let mut views: Vec<ClientView> = Vec::new();
    for pid in pids {
        for uuid in gpus_of(pid, one, look) {
            let process = look.process(&uuid, pid);
            let memory_mib = process.and_then(|process| process.memory_mib);
            views.push(view(pid, proc::program(pid), uuid, memory_mib, users));
        }
    }
    let bypasses = look.bypasses.iter().map(|bypass| {
        let Bypass { gpu_uuid, process, command, memory_mib } = bypass.clone();
        ClientView { bypass: true, ..view(process.pid, command, gpu_uuid, memory_mib, users) }
    });
    views.extend(bypasses);
    let waiting = one.waiting.iter().filter_map(|process| {
        let command = proc::name(process.pid)?;
        let view = view(process.pid, command, String::new(), None, users);
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

fn view(pid: u32, command: String, gpu_uuid: String, memory_mib: Option<u64>, users: &str) -> ClientView {
    let uid = uid(pid);
    ClientView {
        pid,
        bypass: false,
        waiting: false,
        uid,
        user: uid.map(|uid| user_in(users, uid)),
        command,
        gpu_uuid,
        device: device(pid),
        container_id: container(pid),
        memory_mib,
        since: started(pid),
    }
}

fn uid(pid: u32) -> Option<u32> {
    proc::status(pid).ok()?.real_uid()
}

/// The facts about a process that can be read without its memory, which may hang.
pub(super) fn whose(pid: u32, users: &str) -> Whose {
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

/// The slices or GPUs that a process claims to have. Text that holds anything but names is left out, since everybody
/// can read the list.
fn device(pid: u32) -> Option<String> {
    device_in(&proc::environment(pid).ok()?).filter(|names| names.split(',').all(is_name))
}

fn is_name(name: &str) -> bool {
    let (address, ordinal) = name.split_once('-').unwrap_or((name, "0"));
    address.parse::<PciAddress>().is_ok() && ordinal.len() <= 3 && ordinal.parse::<u32>().is_ok()
}

/// The value of [`DEVICE_VARIABLE`] in a process's environment: the names of slices, with commas.
pub(crate) fn device_in(environment: &[u8]) -> Option<String> {
    let variable = std::str::from_utf8(proc::variable(environment, DEVICE_VARIABLE)?).ok()?;
    (!variable.is_empty()).then(|| variable.to_owned())
}

/// The id of the innermost container around a process.
fn container(pid: u32) -> Option<String> {
    containers_in(&proc::cgroups_text(pid).ok()?).next().map(str::to_owned)
}

/// The ids of all containers around a process, from its cgroup paths, the innermost of each hierarchy first. Every
/// runtime puts the 64 hexadecimal digits of the id there, in one form of name or another.
pub(crate) fn containers_in(cgroups: &str) -> impl Iterator<Item = &str> {
    paths_in(cgroups).flat_map(|path| path.rsplit('/')).filter_map(container_in_name)
}

fn paths_in(cgroups: &str) -> impl Iterator<Item = &str> {
    cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2))
}

/// Whether the host's own runtime has made a container, as far as these cgroup paths tell: the container is the
/// outermost of its path, and not in the part of the tree where a user's own service manager lets that user choose
/// names.
pub(crate) fn is_the_hosts(cgroups: &str, id: &str) -> bool {
    paths_in(cgroups).filter(|path| !path.contains("/user@")).any(|path| {
        let mut names = path.split('/').filter_map(container_in_name);
        names.next() == Some(id)
    })
}

/// The container's id in the name of a control group.
fn container_in_name(name: &str) -> Option<&str> {
    name.split(|c: char| !c.is_ascii_hexdigit()).find(|run| run.len() == 64)
}

fn started(pid: u32) -> Option<SystemTime> {
    proc::booted()?.checked_add(proc::started(pid)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_ids_of_every_runtime() {
        let id = "0123456789abcdef".repeat(4);
        for path in [
            format!("0::/system.slice/docker-{id}.scope"),
            format!("12:devices:/docker/{id}"),
            format!("0::/kubepods.slice/kubepods-pod12345678_1234.slice/cri-containerd-{id}.scope"),
            format!("0::/kubepods/besteffort/pod1b2c/{id}"),
            format!("0::/machine.slice/libpod-{id}.scope/container"),
            format!("0::/system.slice/crio-{id}.scope"),
            format!("3:cpu:/\n0::/default/{id}"),
            // Cloudpods: below its own parent, in every hierarchy there is.
            format!("5:cpuset:/cloudpods/{id}\n0::/"),
            format!("0::/cloudpods/{id}"),
            format!("0::/cloudpods.slice/cri-containerd-{id}.scope"),
        ] {
            assert_eq!(containers_in(&path).next(), Some(id.as_str()), "{path}");
        }
        assert_eq!(containers_in("0::/user.slice/user-0.slice/session-1.scope").next(), None);
        assert_eq!(containers_in("garbage").next(), None);
    }

    #[test]
    fn a_container_in_a_container_is_in_both() {
        let (outer, inner) = ("a".repeat(64), "b".repeat(64));
        let path = format!("0::/docker/{outer}/system.slice/docker-{inner}.scope/init");
        assert_eq!(containers_in(&path).collect::<Vec<_>>(), [inner, outer]);
    }

    #[test]
    fn who_may_name_control_groups_makes_no_container_of_the_hosts() {
        let (own, other) = ("a".repeat(64), "b".repeat(64));
        for path in [
            format!("0::/system.slice/docker-{own}.scope/docker-{other}.scope"),
            format!("1:name=systemd:/user.slice\n7:freezer:/docker/{own}"),
        ] {
            assert!(is_the_hosts(&path, &own) && !is_the_hosts(&path, &other), "{path}");
        }
        let path = format!("0::/user.slice/user-1000.slice/user@1000.service/app.slice/docker-{own}.scope");
        assert!(!is_the_hosts(&path, &own));
    }

    #[test]
    fn devices_stand_in_the_environment() {
        assert_eq!(
            device_in(b"A=1\0YUNION_MPS_DEVICE=00:06.0-1,00:07.0-0\0").as_deref(),
            Some("00:06.0-1,00:07.0-0")
        );
        assert_eq!(device_in(b"XYUNION_MPS_DEVICE=00:06.0-1\0YUNION_MPS_DEVICE=\0\xff"), None);
    }

    #[test]
    fn only_names_are_taken_for_names() {
        for name in ["00:06.0-1", "0001:1a:00.0-12", "00:06.0"] {
            assert!(is_name(name), "{name}");
        }
        for other in
            ["", "mine", "00:06.0-", "00:06.0--1", "00:06.0-1234", "00:06.0-1\u{1b}[2J", "00:06.0-1 "]
        {
            assert!(!is_name(other), "{other}");
        }
    }

    #[test]
    fn users_have_names_or_numbers() {
        let users = "root:x:0:0:root:/root:/bin/bash\nbad line\nworker:x:1000:1000::/:/bin/sh\n:x:7:7::/:\n";
        for (uid, name) in [(0, "root"), (1000, "worker"), (100, "100"), (7, "7")] {
            assert_eq!(user_in(users, uid), name);
        }
    }
}
