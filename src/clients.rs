//! Who uses the GPUs through MPS at this moment.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::gpu::nvml::Driver;
use crate::mps::control::{Control, ControlError};
use crate::mps::process::Identity;
use crate::state::ClientView;

/// The variable by which a container says which slices it was given.
const DEVICE_VARIABLE: &str = "YUNION_MPS_DEVICE";

/// A control daemon that serves, with the UUIDs of its GPUs.
#[derive(Debug, Clone)]
pub struct Serving {
    /// Its front end.
    pub control: Arc<Control>,
    /// Its GPUs.
    pub gpus: Vec<String>,
}

/// The clients of all these control daemons. A control daemon that doesn't answer is an error: a list with holes would
/// pass for the truth.
pub async fn list(
    serving: Vec<Serving>,
    driver: Option<Arc<Driver>>,
) -> Result<Vec<ClientView>, ControlError> {
    let mut clients = Vec::new();
    for Serving { control, gpus } in serving {
        let listed = control.clients().await?;
        if listed.is_empty() {
            continue;
        }
        let memory = match driver.clone() {
            Some(driver) => {
                let asked = gpus.clone();
                tokio::task::spawn_blocking(move || memory(&driver, &asked)).await.unwrap_or_default()
            }
            None => BTreeMap::new(),
        };
        for client in listed {
            let uuid =
                gpus.iter().find(|uuid| uuid.starts_with(&client.gpu_prefix)).cloned().unwrap_or_default();
            clients.push(ClientView {
                pid: client.pid,
                command: client.command,
                device: device(client.pid),
                container_id: container(client.pid),
                memory_mib: memory.get(&(uuid.clone(), client.pid)).copied(),
                since: started(client.pid),
                gpu_uuid: uuid,
            });
        }
    }
    Ok(clients)
}

/// GPU memory in MiB by GPU and process.
fn memory(driver: &Driver, gpus: &[String]) -> BTreeMap<(String, u32), u64> {
    let of_gpu = |uuid: &String| {
        let processes = driver.processes(uuid).unwrap_or_default();
        let uuid = uuid.clone();
        processes
            .into_iter()
            .filter_map(move |process| Some(((uuid.clone(), process.pid), process.memory_mib?)))
    };
    gpus.iter().flat_map(of_gpu).collect()
}

fn device(pid: u32) -> Option<String> {
    device_in(&std::fs::read(format!("/proc/{pid}/environ")).ok()?)
}

/// The value of [`DEVICE_VARIABLE`] in a process's environment: the names of slices, with commas.
pub(crate) fn device_in(environment: &[u8]) -> Option<String> {
    let variable = environment.split(|byte| *byte == 0).find_map(|variable| {
        let variable = std::str::from_utf8(variable).ok()?;
        variable.strip_prefix(DEVICE_VARIABLE)?.strip_prefix('=')
    })?;
    (!variable.is_empty()).then(|| variable.to_owned())
}

fn container(pid: u32) -> Option<String> {
    container_in(&std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?)
}

/// The container's id in the cgroup paths of a process: every runtime puts the 64 hexadecimal digits of it there, in
/// one form of name or another, and the innermost one is the process's own.
fn container_in(cgroups: &str) -> Option<String> {
    containers_in(cgroups).next().map(str::to_owned)
}

/// The same of every container that the process is in, one inside the other, those of one hierarchy innermost first.
pub(crate) fn containers_in(cgroups: &str) -> impl Iterator<Item = &str> {
    let paths = cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let names = paths.flat_map(|path| path.rsplit('/'));
    names.filter_map(|name| name.split(|c: char| !c.is_ascii_hexdigit()).find(|run| run.len() == 64))
}

/// When a process started.
fn started(pid: u32) -> Option<SystemTime> {
    let ticks = Identity::of(pid).ok()?.start_time;
    let boot = std::fs::read_to_string("/proc/stat").ok()?;
    let boot: u64 = boot.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    let per_second = rustix::param::clock_ticks_per_second();
    let since_boot = Duration::from_secs(ticks.checked_div(per_second)?);
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(boot) + since_boot)
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
        ] {
            assert_eq!(container_in(&path).as_deref(), Some(id.as_str()), "{path}");
        }
        assert_eq!(container_in("0::/user.slice/user-0.slice/session-1.scope"), None);
        assert_eq!(container_in("garbage"), None);
    }

    #[test]
    fn a_container_in_a_container_is_in_both() {
        let (outer, inner) = ("a".repeat(64), "b".repeat(64));
        let path = format!("0::/docker/{outer}/system.slice/docker-{inner}.scope/init");
        assert_eq!(containers_in(&path).collect::<Vec<_>>(), [inner, outer]);
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
    fn own_start_lies_in_the_past() {
        let started = started(std::process::id()).unwrap();
        assert!(started <= SystemTime::now() + Duration::from_secs(2));
        assert!(started > SystemTime::now() - Duration::from_secs(86400));
    }
}
