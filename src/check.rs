//! `--check`: the plan or the errors, and nothing changed.

use std::io::{self, Write};

use crate::config::{self, Problem, Sources};
use crate::gpu::Inventory;
use crate::gpu::nvml::Driver;
use crate::plan::{self, GpuPlan, Plan, PlanError};

/// What the check has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The configuration is right, whether or not this host can serve it now.
    Right,
    /// It is not; the problems have been written.
    Wrong,
}

/// Writes what a start would do. The error is that of writing.
pub fn run(sources: &Sources, out: &mut dyn Write) -> io::Result<Verdict> {
    let loaded = match config::load(sources) {
        Ok(loaded) => loaded,
        Err(problems) => return wrong(&problems, out),
    };
    for warning in &loaded.warnings {
        writeln!(out, "warning: {warning}")?;
    }
    let files: Vec<String> = loaded.settings.sources.iter().map(|file| file.display().to_string()).collect();
    writeln!(
        out,
        "configuration: {}",
        if files.is_empty() { "none, all defaults".to_owned() } else { files.join(", ") }
    )?;
    if !loaded.settings.enabled {
        writeln!(out, "enable_cuda_mps is false: no GPU would be served")?;
        return Ok(Verdict::Right);
    }
    let driver = Driver::open();
    let inventory = Inventory::read(&sources.sysroot, driver.as_ref().map_err(String::as_str));
    match &inventory.driver {
        Ok(version) => writeln!(out, "driver: {version}")?,
        Err(reason) => writeln!(out, "driver: none: {reason}")?,
    }
    match plan::plan(&loaded.settings, &inventory) {
        Ok(plan) => write_plan(&plan, out)?,
        Err(PlanError::Problems(problems)) => return wrong(&problems, out),
        Err(PlanError::NotYet(reason)) => writeln!(out, "no GPU could be served now: {reason}")?,
    }
    Ok(Verdict::Right)
}

fn wrong(problems: &[Problem], out: &mut dyn Write) -> io::Result<Verdict> {
    for problem in problems {
        writeln!(out, "error: {problem}")?;
    }
    Ok(Verdict::Wrong)
}

fn write_plan(plan: &Plan, out: &mut dyn Write) -> io::Result<()> {
    if plan.gpus.is_empty() {
        writeln!(out, "this host has no NVIDIA GPU to serve")?;
    }
    for gpu in &plan.gpus {
        write_gpu(gpu, out)?;
    }
    for control_daemon in &plan.control_daemons {
        let gpus: Vec<String> = control_daemon.gpus.iter().map(|gpu| gpu.pci.short()).collect();
        writeln!(
            out,
            "control daemon {}: GPUs {}; active thread percentage {}; {}; pipe directory {}; log directory {}",
            control_daemon.id,
            gpus.join(", "),
            control_daemon.thread_percentage,
            if control_daemon.multiuser { "one server for all users" } else { "a server per user" },
            control_daemon.pipe_directory.display(),
            control_daemon.log_directory.display(),
        )?;
    }
    Ok(())
}

fn write_gpu(plan: &GpuPlan, out: &mut dyn Write) -> io::Result<()> {
    let name = plan.gpu.pci.address.short();
    let uuid = plan.gpu.nvml.as_ref().map(|facts| facts.uuid.as_str()).unwrap_or("UUID unknown");
    write!(out, "GPU {name} {} ({uuid}): ", plan.gpu.model())?;
    match &plan.unusable {
        Some(reason) => writeln!(out, "not served: {reason}")?,
        None => writeln!(
            out,
            "{} slices, {name}-0 to {name}-{}, each {} MiB and {} % of the threads{}",
            plan.slices,
            plan.slices.saturating_sub(1),
            plan.memory_limit_mib,
            plan.thread_percentage,
            if plan.limits_enforced { "" } else { " (not enforced by this GPU)" },
        )?,
    }
    for warning in &plan.warnings {
        writeln!(out, "  warning: {warning}")?;
    }
    Ok(())
}
