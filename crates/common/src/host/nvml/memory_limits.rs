//! Sets and removes the memory limits of control groups on GPUs. The service removes only limits that it has set itself.

use mps_core::bindings::ControlGroup;
use mps_core::kernel_limits::{LimitGoal, LimitOutcome};
use nvml_calls::memory_limits::{self, MemoryLimit, NO_LIMIT};
use nvml_wrapper::error::NvmlError;

use super::{Driver, MIB, words};
use crate::host::control_groups;

impl Driver {
    pub fn pursue_memory_limit(&self, uuid: &str, group: &ControlGroup, goal: &LimitGoal) -> LimitOutcome {
        if control_groups::find(&group.path).ok().as_ref() != Some(group) {
            // The kernel removes the limit of a control group together with the control group.
            return match goal {
                LimitGoal::Hold(_) => {
                    LimitOutcome::Refused("the control group does not exist any more".to_owned())
                }
                LimitGoal::Lift(_) => LimitOutcome::Reached,
            };
        }
        let changed = match goal {
            LimitGoal::Hold(mib) => self.hold(uuid, group, *mib),
            LimitGoal::Lift(ours) => self
                .lift(uuid, group, |bytes| ours.iter().any(|mib| mib * MIB == bytes))
                .map(|()| LimitOutcome::Reached),
        };
        match changed {
            Ok(outcome) => outcome,
            Err(NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => LimitOutcome::NotOffered,
            Err(error) => LimitOutcome::Refused(why_refused(&error)),
        }
    }

    /// Sets a control group's memory limit. The limit is set even if NVML already reports the same value: for a control group
    /// without its own limit, NVML reports the limit of the nearest ancestor.
    fn hold(&self, uuid: &str, group: &ControlGroup, mib: u64) -> Result<LimitOutcome, NvmlError> {
        let (device, directory) = (self.nvml.device_by_uuid(uuid)?, control_groups::directory(&group.path));
        let wanted = mib.saturating_mul(MIB);
        let before = memory_limits::read(&device, &directory)?;
        memory_limits::set(&device, &directory, wanted)?;
        let now = memory_limits::read(&device, &directory)?;
        if now.limit != wanted {
            return Ok(LimitOutcome::Refused(format!(
                "the driver has accepted the memory limit of {mib} MiB, but reports this limit: {reported}",
                reported = limit_in_words(now)
            )));
        }
        Ok(match self.uncounted(uuid, group, now.used) {
            Some(why) => LimitOutcome::Refused(why),
            None if before.limit == wanted && before.reserved == 0 => LimitOutcome::Reached,
            None => LimitOutcome::Replaced(limit_in_words(before)),
        })
    }

    /// The reason, in words, why the limit does not cover all memory of the processes in a control group. Without the kernel's
    /// dmem controller, the driver does not count memory that a process allocated before the limit was set. None if the limit
    /// covers all memory.
    fn uncounted(&self, uuid: &str, group: &ControlGroup, counted: u64) -> Option<String> {
        if control_groups::directory(&group.path).join("dmem.max").exists() {
            return None;
        }
        let is_inside = |pid| control_groups::path_of(pid).is_ok_and(|path| group.has(&path));
        let processes = match self.processes(uuid) {
            Ok(processes) => processes,
            Err(error) => return Some(error.into()),
        };
        let inside = processes.iter().filter(|process| is_inside(process.pid));
        let has: u64 = inside.filter_map(|process| process.memory_mib).sum();
        let counted = counted.div_ceil(MIB);
        (has > counted).then(|| {
            format!(
                "the programs in the control group have {has} MiB of GPU memory, but the driver counts only \
                 {counted} MiB: memory that a program had before the limit was set is counted only after a \
                 restart of the program"
            )
        })
    }

    fn lift(&self, uuid: &str, group: &ControlGroup, is_ours: impl Fn(u64) -> bool) -> Result<(), NvmlError> {
        let (device, directory) = (self.nvml.device_by_uuid(uuid)?, control_groups::directory(&group.path));
        if is_ours(memory_limits::read(&device, &directory)?.limit) {
            memory_limits::set(&device, &directory, NO_LIMIT)?;
        }
        Ok(())
    }
}

fn limit_in_words(MemoryLimit { limit, reserved, .. }: MemoryLimit) -> String {
    let limit = if limit == NO_LIMIT { "no limit".to_owned() } else { format!("{} MiB", limit / MIB) };
    if reserved == 0 { limit } else { format!("{limit}, with {mib} MiB reserved", mib = reserved / MIB) }
}

fn why_refused(error: &NvmlError) -> String {
    match error {
        NvmlError::NotSupported => {
            "the driver enforces no memory limit on this host: a limit needs cgroup v2, a GPU without MIG, \
             and the controller dmem of kernel 6.14 or the driver's own accounting (RmMemacctMode)"
                .to_owned()
        }
        NvmlError::NotFound => {
            "the control group has no file dmem.max, since its parent control groups do not turn on the \
             controller dmem (cgroup.subtree_control)"
                .to_owned()
        }
        NvmlError::InvalidArg | NvmlError::InUse => {
            "the driver refuses the memory limit: the programs in the control group have more GPU memory \
             than the limit, or the GPU has less memory than the limit"
                .to_owned()
        }
        error => words(error).to_string(),
    }
}
