//! `yunion-mpsctl probe`: compares the limits of a slice with the multiprocessors (SMs) and the memory that a CUDA client gets.

use std::io::{self, Write};

use serde_json::{Value, json};

use self::client::{ContextFacts, CudaRequest, ask, without_limits, without_mps};
use crate::show::env::host_environment;
use crate::show::health;
use crate::show::table::{Shown, prose, table, with_unit};
use crate::{Error, FAILED, Result, print_json};
use common::bus::proxy::{DaemonProxy, Listed};
use common::bus::rows::{ControlDaemon, Device};
use common::counted::counted;

pub(crate) mod client;
mod cuda;
mod raw;

/// GPUs assign multiprocessors in pairs, so a difference of one pair is no mismatch.
const SMS_TOLERANCE: u32 = 2;

/// The most memory of a CUDA context, in MiB, which counts against the limit: a fixed part, and a part for each multiprocessor.
/// A context on an H200 needs 28 MiB, and 3.7 MiB for each multiprocessor.
const CONTEXT_MIB: u64 = 128;
const CONTEXT_MIB_PER_SM: u64 = 6;

pub(crate) async fn probe(
    daemon: &DaemonProxy,
    name: Option<&str>,
    beside_clients: bool,
    json: bool,
    out: &mut dyn Write,
) -> Result<u8> {
    let devices = daemon.devices().await?;
    let chosen: Vec<&Listed<Device>> = match name {
        Some(name) => vec![named(daemon, name, &devices).await?],
        None => first_slices(&devices),
    };
    if chosen.is_empty() {
        return Err(Error::Failed(
            "the service has no slice that can be probed; see yunion-mpsctl status".to_owned(),
        ));
    }
    let clients = daemon.clients().await?;
    let mut reports = Vec::new();
    for device in chosen {
        let others = clients.iter().filter(|other| device.device_path.as_ref() == Some(&other.gpu)).count();
        let mut report = ProbeReport::new(device, &devices, others);
        // An unhealthy slice is probed only if the user has named the slice.
        if name.is_none() && !device.healthy {
            let health = health::describe(device);
            let advice = if device.drained { "" } else { "; name the slice to probe it nevertheless" };
            report.error = Some(format!("{health}{advice}"));
        } else if let Err(error) = report.fill(daemon, beside_clients).await {
            report.error = Some(error.to_string());
        }
        if !json {
            report.print(out)?;
            out.flush()?;
        }
        reports.push(report);
    }
    if json {
        print_json(out, &reports.iter().map(ProbeReport::document).collect::<Vec<_>>())?;
    }
    Ok(if reports.iter().all(ProbeReport::matches) { 0 } else { FAILED })
}

/// Chooses one slice of each size on each GPU: the first slice that is not drained, or the first slice if all are drained.
fn first_slices<'d>(devices: impl IntoIterator<Item = &'d Listed<Device>>) -> Vec<&'d Listed<Device>> {
    let mut first: Vec<&Listed<Device>> = Vec::new();
    for device in devices {
        let is_alike = |one: &&mut &Listed<Device>| {
            one.base_addr == device.base_addr
                && ProbeLimits::for_device(one) == ProbeLimits::for_device(device)
        };
        match first.iter_mut().find(is_alike) {
            Some(one) if one.drained && !device.drained => *one = device,
            Some(_) => {}
            None => first.push(device),
        }
    }
    first
}

/// The slice with this name. The name of a GPU stands for one of its slices, as in other subcommands.
async fn named<'a>(
    daemon: &DaemonProxy,
    name: &str,
    devices: &'a [Listed<Device>],
) -> Result<&'a Listed<Device>> {
    let answer = daemon.container_config(&[name.to_owned()]).await?;
    let slice = answer.environment.iter().find(|(name, _)| name == "YUNION_MPS_DEVICE");
    let slice = slice.map(|(_, slice)| slice.as_str()).unwrap_or_default();
    let meant = devices.iter().filter(|device| device.addr == slice || device.base_addr == slice);
    let device = first_slices(meant).into_iter().next();
    device.ok_or_else(|| Error::Failed(format!("slice {slice} no longer exists")))
}

/// Fails if the probe would have to wait for clients of another user. A control daemon without multi-user mode serves one user
/// until the last client of that user has ended, which can take weeks.
async fn refuse_to_queue(daemon: &DaemonProxy, device: &Device) -> Result<()> {
    let daemons = daemon.control_daemons().await?;
    let serves = |daemon: &&Listed<ControlDaemon>| {
        daemon.gpus.iter().any(|gpu| device.device_path.as_ref() == Some(gpu))
    };
    let Some(control_daemon) = daemons.iter().find(serves) else { return Ok(()) };
    if control_daemon.multiuser != Some(false) {
        return Ok(());
    }
    let us = rustix::process::geteuid().as_raw();
    let clients = daemon.clients().await?;
    let other = clients.iter().find(|one| {
        !one.bypass && control_daemon.gpus.contains(&one.gpu) && one.uid.is_some_and(|uid| uid != us)
    });
    let Some(other) = other else { return Ok(()) };
    let (user, pid) = (other.user.shown(), other.pid);
    Err(Error::Failed(format!(
        "the control daemon serves one user at a time, and now serves user {user} (with the client PID \
         {pid}): try again when the clients of this user have ended, or run the probe as user {user}"
    )))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProbeLimits {
    thread_percentage: u32,
    /// The memory limit in MiB. None if the service could not read the GPU's memory.
    memory: Option<u64>,
}

impl ProbeLimits {
    fn for_device(device: &Device) -> Self {
        Self {
            thread_percentage: u32::try_from(device.mps_thread_percentage).unwrap_or(100),
            memory: device.mps_memory_limit.and_then(|limit| limit.try_into().ok()),
        }
    }

    /// The number of multiprocessors for the thread percentage, in whole pairs. `all` is the number of multiprocessors of the
    /// GPU.
    fn sms(self, all: u32) -> u32 {
        (all * self.thread_percentage / 100 / 2 * 2).max(2)
    }
}

struct ProbeReport<'a> {
    device: &'a Device,
    slice: ProbeLimits,
    /// The limits of the control daemon, which are those of its largest slice.
    control_daemon: ProbeLimits,
    clients: usize,
    all_sms: Option<u32>,
    /// The results of two clients: the first client has the limits of the slice, and the second client has no limits of its
    /// own. None if a measurement has failed.
    found: Option<[ContextFacts; 2]>,
    mismatches: Vec<String>,
    /// The reason why the probe is incomplete.
    error: Option<String>,
}

impl<'a> ProbeReport<'a> {
    fn new(device: &'a Device, devices: &[Listed<Device>], clients: usize) -> Self {
        let slice = ProbeLimits::for_device(device);
        let together = devices.iter().filter(|other| other.pipe_directory == device.pipe_directory);
        let limits = together.map(|other| ProbeLimits::for_device(other));
        let control_daemon = limits.fold(slice, |largest, other| ProbeLimits {
            thread_percentage: largest.thread_percentage.max(other.thread_percentage),
            memory: largest.memory.max(other.memory),
        });
        Self {
            device,
            slice,
            control_daemon,
            clients,
            all_sms: None,
            found: None,
            mismatches: Vec::new(),
            error: None,
        }
    }

    async fn fill(&mut self, daemon: &DaemonProxy, beside_clients: bool) -> Result<()> {
        refuse_to_queue(daemon, self.device).await?;
        let enforced = self.device.limits_enforced;
        let answer = daemon.container_config(std::slice::from_ref(&self.device.addr)).await?;
        let environment = host_environment(&answer);
        let all = ask(&without_mps(&environment), CudaRequest::Count).await?;
        self.all_sms = Some(all);
        let allocate = enforced && (self.clients == 0 || beside_clients);
        let look = |limits: ProbeLimits| CudaRequest::Look { allocate: limits.memory.filter(|_| allocate) };
        let as_slice = ask(&environment, look(self.slice)).await?;
        // A client gets the lower of two limits: the limit in its environment and the limit of the control daemon. So only a
        // client without limits in its environment shows if the limits of the control daemon are too high.
        let without_limits = ask(&without_limits(&environment), look(self.control_daemon)).await?;
        self.found = Some([as_slice, without_limits]);
        if enforced {
            self.mismatches.extend(differences("a client of this slice", self.slice, as_slice, all));
            let who = "a client that brings no limits of its own";
            self.mismatches.extend(differences(who, self.control_daemon, without_limits, all));
        }
        Ok(())
    }

    fn matches(&self) -> bool {
        self.mismatches.is_empty() && self.error.is_none()
    }

    fn document(&self) -> Value {
        let limits = |limits: ProbeLimits| {
            json!({
                "thread_percentage": limits.thread_percentage,
                "sms": self.all_sms.map(|all| limits.sms(all)),
                "memory_limit": limits.memory,
            })
        };
        json!({
            "addr": self.device.addr,
            "device_path": self.device.device_path,
            "model": self.device.model,
            "limits_enforced": self.device.limits_enforced,
            "sms": self.all_sms,
            "clients": self.clients,
            "slice": {"promised": limits(self.slice), "found": self.found.map(|[as_slice, _]| as_slice)},
            "control_daemon": {"promised": limits(self.control_daemon), "found": self.found.map(|[_, without]| without)},
            "mismatches": self.mismatches,
            "error": self.error,
            "matches": self.matches(),
        })
    }

    fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        let Device { addr, model, device_path, limits_enforced, .. } = self.device;
        writeln!(out, "{} on {} {}", addr.shown(), model.shown(), device_path.shown())?;
        if let (Some(all), Some([as_slice, without_limits])) = (self.all_sms, self.found) {
            let mut table = table(&["CLIENT", "LIMITS", "SMS"], &["MEMORY", "FREE", "TOTAL"]);
            let mib = |mib: Option<u64>| with_unit(mib, "MiB");
            for (client, limits, seen) in [
                ("with this slice's limits", self.slice, as_slice),
                ("without limits of its own", self.control_daemon, without_limits),
            ] {
                let sms = format!("{} of {all}", limits.sms(all));
                table.add_row([client, "promised", &sms, &mib(limits.memory), "-", "-"]);
                let [free, total] = [seen.memory_free, seen.memory_total].map(|memory| mib(Some(memory)));
                let (sms, allocated) = (seen.sms.to_string(), mib(seen.allocated));
                table.add_row(["", "found", &sms, &allocated, &free, &total]);
            }
            writeln!(out, "{table}")?;
            if !limits_enforced {
                let said = "The service takes this GPU for a GPU that enforces no limits (older than Volta, or of \
                            an unknown compute capability), so nothing is compared.";
                writeln!(out, "{}", prose(said))?;
            } else if as_slice.allocated.is_none() && self.slice.memory.is_some() {
                let clients = counted(self.clients, "other client");
                let said = format!("Nothing was allocated: the GPU has {clients} (see --beside-clients).");
                writeln!(out, "{}", prose(&said))?;
            }
        }
        for mismatch in &self.mismatches {
            writeln!(out, "{}", prose(&format!("MISMATCH: {mismatch}")))?;
        }
        if let Some(error) = &self.error {
            writeln!(out, "{}", prose(&format!("NOT PROBED: {error}")))?;
        } else if self.matches() && *limits_enforced {
            writeln!(out, "A client gets the memory and the threads that the service publishes.")?;
        }
        writeln!(out)
    }
}

/// Compares the limits with the resources that a client got on a GPU with `all` multiprocessors, and describes each difference.
fn differences(who: &str, limits: ProbeLimits, seen: ContextFacts, all: u32) -> Vec<String> {
    let mut differences = Vec::new();
    let (sms, percentage) = (limits.sms(all), limits.thread_percentage);
    if seen.sms.abs_diff(sms) > SMS_TOLERANCE {
        let found = seen.sms;
        differences.push(format!("{who} has {found} SMs instead of {sms} ({percentage} % of {all})"));
    }
    // A limit above the memory of the GPU has no effect, so there is nothing to compare.
    let Some(limit) = limits.memory.filter(|limit| *limit < seen.memory_total) else { return differences };
    let context = CONTEXT_MIB + CONTEXT_MIB_PER_SM * u64::from(seen.sms);
    let least = limit.saturating_sub(context);
    // The memory of the context counts against the limit. So if a client can allocate as much memory as the limit, the limit is
    // not in force.
    if seen.memory_free >= limit || seen.allocated.is_some_and(|allocated| allocated >= limit) {
        let free = seen.memory_free;
        differences.push(format!(
            "{who} has {free} MiB of memory free: the limit of {limit} MiB is not in force, or a larger \
             limit is"
        ));
    } else if let Some(got) = [Some(seen.memory_free), seen.allocated].into_iter().flatten().min()
        && got < least
    {
        differences.push(format!(
            "{who} gets {got} MiB of memory under a limit of {limit} MiB, but should get at least {least} \
             MiB: a lower limit is in force, or other programs hold the memory"
        ));
    }
    differences
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUARTER: ProbeLimits = ProbeLimits { thread_percentage: 25, memory: Some(35942) };
    const MEASURED: ContextFacts =
        ContextFacts { sms: 32, memory_free: 35797, memory_total: 143_155, allocated: Some(35796) };

    #[test]
    fn percentages_are_worth_whole_pairs() {
        let sms = |thread_percentage, all| ProbeLimits { thread_percentage, memory: None }.sms(all);
        assert_eq!([10, 25, 50, 100].map(|percentage| sms(percentage, 132)), [12, 32, 66, 132]);
        assert_eq!(sms(1, 132), 2);
    }

    #[test]
    fn what_was_measured_is_what_is_promised() {
        assert_eq!(differences("it", QUARTER, MEASURED, 132), [""; 0]);
        assert_eq!(differences("it", QUARTER, ContextFacts { allocated: None, ..MEASURED }, 132), [""; 0]);
        // If a slice is the whole GPU, its limit comes from NVML, which reports a little more memory than CUDA. Such a limit is
        // not compared.
        let whole = ProbeLimits { thread_percentage: 100, memory: Some(143_771) };
        let seen = ContextFacts { sms: 132, memory_free: 142_629, allocated: Some(142_629), ..MEASURED };
        assert_eq!(differences("it", whole, seen, 132), [""; 0]);
    }

    #[test]
    fn another_limit_is_a_difference() {
        for (seen, expected) in [
            (ContextFacts { sms: 66, ..MEASURED }, "it has 66 SMs instead of 32 (25 % of 132)"),
            (ContextFacts { sms: 12, ..MEASURED }, "it has 12 SMs instead of 32 (25 % of 132)"),
            (
                ContextFacts { memory_free: 71614, allocated: Some(35942), ..MEASURED },
                "it has 71614 MiB of memory free: the limit of 35942 MiB is not in force, or a larger limit \
                 is",
            ),
            (
                ContextFacts { allocated: Some(20000), ..MEASURED },
                "it gets 20000 MiB of memory under a limit of 35942 MiB, but should get at least 35622 MiB: \
                 a lower limit is in force, or other programs hold the memory",
            ),
        ] {
            assert_eq!(differences("it", QUARTER, seen, 132), [expected]);
        }
    }
}
