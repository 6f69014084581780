//! The memory limits of control groups on a GPU, as NVIDIA's documentation describes them for driver 615. NVML names a control
//! group by its directory. For each control group NVML adds up the memory of all processes in the control group and below it,
//! and refuses a limit that is smaller than the sum.

use std::fs;
use std::path::{Path, PathBuf};

use crate::state::{Gpu, Host, code};

/// NVML returns this value as the hard limit of a control group without a limit.
pub const NO_LIMIT: u64 = u64::MAX;

const MIB: u64 = 1 << 20;

/// The first series of NVIDIA's driver with memory limits for control groups.
const FIRST_SERIES: u32 = 615;

/// The soft and the hard memory limit of a control group, in bytes.
pub type Limits = (u64, u64);

/// Checks that NVML can read and set memory limits of this control group on this GPU. The driver must have the functions, the
/// GPU must not be in MIG mode and must account for memory (its file `memory_accounting` exists), and the control group must
/// exist.
///
/// # Errors
/// The error is NVML's return code.
pub fn check(host: &Host, gpu: &Gpu, group: &str) -> Result<(), u32> {
    let series = host.driver().and_then(|driver| driver.split('.').next()?.parse().ok()).unwrap_or(0);
    if series < FIRST_SERIES {
        return Err(code::FUNCTION_NOT_FOUND);
    }
    if gpu.mig() == Some(true) || gpu.text("memory_accounting").is_none() {
        return Err(code::NOT_SUPPORTED);
    }
    if fs::metadata(group).is_ok_and(|found| found.is_dir()) { Ok(()) } else { Err(code::OPERATING_SYSTEM) }
}

/// Returns the memory limits of a control group on a GPU. A control group without limits of its own has the limits of the
/// nearest control group above it.
pub fn limits(gpu: &Gpu, group: &str) -> Limits {
    let own = |group: &Path| {
        let text = gpu.text(&file(group.to_str()?))?;
        let (soft, hard) = text.split_once(' ')?;
        Some((soft.parse().ok()?, hard.parse().ok()?))
    };
    Path::new(group).ancestors().find_map(own).unwrap_or((0, NO_LIMIT))
}

/// Sets the memory limits of a control group on a GPU.
///
/// # Errors
/// The error is NVML's return code.
pub fn set(gpu: &Gpu, group: &str, (soft, hard): Limits) -> Result<(), u32> {
    let total = gpu.memory_mib() * MIB;
    if soft > hard || (hard != NO_LIMIT && (hard > total || hard < used_bytes(gpu, group))) {
        return Err(code::INVALID_ARGUMENT);
    }
    let written = fs::create_dir_all(gpu.path("memory_limits"))
        .and_then(|()| gpu.write(&file(group), &format!("{soft} {hard}")));
    written.map_err(|_| code::UNKNOWN)
}

/// Returns the GPU memory of all processes in a control group and below it, in bytes.
pub fn used_bytes(gpu: &Gpu, group: &str) -> u64 {
    let processes = gpu.processes();
    let inside = processes.iter().filter(|(pid, _)| is_in(**pid, group));
    inside.map(|(_, (_, mib))| mib * MIB).sum()
}

/// Returns the memory in MiB that a process can still allocate on a GPU by the limits of its control groups. `None` if no
/// control group of the process has a limit.
pub fn room_mib(gpu: &Gpu, pid: u32) -> Option<u64> {
    let files = fs::read_dir(gpu.path("memory_limits")).into_iter().flatten().flatten();
    let groups = files.filter_map(|file| Some(file.file_name().to_str()?.replace('%', "/")));
    let limited = groups.filter(|group| is_in(pid, group)).map(|group| (limits(gpu, &group).1, group));
    let rooms = limited.filter(|(hard, _)| *hard != NO_LIMIT);
    rooms.map(|(hard, group)| hard.saturating_sub(used_bytes(gpu, &group)) / MIB).min()
}

fn file(group: &str) -> String {
    PathBuf::from("memory_limits").join(group.replace('/', "%")).display().to_string()
}

fn is_in(pid: u32, group: &str) -> bool {
    let mounts = ["/sys/fs/cgroup/systemd", "/sys/fs/cgroup"];
    let Some(path) = mounts.iter().find_map(|mount| group.strip_prefix(mount)) else { return false };
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let mut its = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    its.any(|its| its.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
}
