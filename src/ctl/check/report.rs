//! `yunion-mpsctl check`: the mistakes of the configuration, and the changes that a reload would make.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use crate::check::{self, BAD_CONFIGURATION, Checked};
use crate::config::{Problem, Sources};
use crate::ctl::check::difference::{Difference, differences};
use crate::ctl::published::Bus;
use crate::ctl::show::table::hanging;
use crate::ctl::{Error, print_json};
use crate::plan::{GpuPlan, Plan};

#[derive(Debug, Args)]
pub(in crate::ctl) struct Arguments {
    /// The main configuration file [default: the file that the service reads]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Read the host's files (configuration, /sys, pci.ids) below this directory
    #[arg(long, value_name = "DIR", default_value = "/")]
    sysroot: PathBuf,
    /// Print everything as one JSON object
    #[arg(long)]
    json: bool,
}

impl Arguments {
    pub(in crate::ctl) fn new(sources: Sources, json: bool) -> Self {
        Self { config: sources.config, sysroot: sources.sysroot, json }
    }
}

/// Returns the exit status.
pub(in crate::ctl) async fn check(arguments: &Arguments, out: &mut dyn Write) -> Result<u8, Error> {
    let (bus, sysroot) = (Bus::ask().await, arguments.sysroot.clone());
    let config = arguments.config.clone().or_else(|| bus.config(&sysroot));
    let checked = check::look(&Sources { config, sysroot });
    let changes = match &checked {
        Checked::Right { loaded, plan: Ok(plan), .. } => match bus {
            Bus::Answers(published) => differences(loaded, plan, &published),
            Bus::NotRunning => Err("yunion-mps-daemon is not running".to_owned()),
            Bus::Silent => Err("yunion-mps-daemon does not answer".to_owned()),
            Bus::Unreachable(reason) | Bus::Denied(reason) | Bus::Refuses(reason) => Err(reason),
        },
        Checked::Right { plan: Err(reason), .. } => Err(reason.to_string()),
        Checked::Refused(_) | Checked::Wrong { .. } => Err("the configuration is wrong".to_owned()),
    };
    let status = if checked.problems().is_empty() { 0 } else { BAD_CONFIGURATION };
    if arguments.json {
        print_json(out, &document(&checked, &changes))?;
        return Ok(status);
    }
    let mut words = Vec::new();
    check::write(&checked, &mut words)?;
    for line in String::from_utf8_lossy(&words).lines() {
        writeln!(out, "{}", hanging(line))?;
    }
    if matches!(checked, Checked::Refused(_) | Checked::Wrong { .. }) {
        return Ok(status);
    }
    match changes.as_deref() {
        Err(why_not) => writeln!(out, "\n{}", hanging(&format!("Nothing to compare with: {why_not}")))?,
        Ok([]) => writeln!(out, "\nNothing would change.")?,
        Ok(changes) => {
            writeln!(out, "\nWith `systemctl reload yunion-mps-daemon`:")?;
            for change in changes {
                writeln!(out, "{}", hanging(&format!("  {change}")))?;
            }
        }
    }
    Ok(status)
}

fn document(checked: &Checked, changes: &Result<Vec<Difference>, String>) -> Value {
    let loaded = checked.loaded();
    let plan = match checked {
        Checked::Right { plan, .. } => Some(plan),
        Checked::Refused(_) | Checked::Wrong { .. } => None,
    };
    let problems = checked.problems();
    let warnings = checked.warnings().iter().chain(checked.agent().iter().map(|trouble| &trouble.problem));
    json!({
        "right": problems.is_empty(),
        "problems": problems.iter().map(problem).collect::<Vec<_>>(),
        "warnings": warnings.map(problem).collect::<Vec<_>>(),
        "files": loaded.map(|loaded| &loaded.settings.sources),
        "enabled": loaded.map(|loaded| loaded.settings.enabled),
        "plan": plan.and_then(|plan| plan.as_ref().ok()).map(plan_document),
        "no_plan": plan.and_then(|plan| plan.as_ref().err()).map(ToString::to_string),
        "differences": changes.as_ref().ok(),
        "not_compared": changes.as_ref().err(),
    })
}

fn problem(problem: &Problem) -> Value {
    json!({
        "file": problem.origin.file,
        "line": problem.origin.line,
        "key": problem.key,
        "found": problem.found,
        "remedy": problem.remedy,
    })
}

fn plan_document(plan: &Plan) -> Value {
    let gpu = |gpu: &GpuPlan| {
        json!({
            "addr": gpu.gpu.pci.address.short(),
            "device_path": gpu.gpu.uuid(),
            "virtual_num": gpu.slices,
            "mps_memory_limit": gpu.memory_limit_mib,
            "mps_thread_percentage": gpu.thread_percentage,
            "limits_enforced": gpu.limits_enforced,
            "pipe_directory": gpu.pipe_directory,
            "not_served": gpu.unusable,
            "warnings": gpu.warnings.iter().map(ToString::to_string).collect::<Vec<_>>(),
        })
    };
    let control_daemons: Vec<Value> = plan
        .control_daemons
        .iter()
        .map(|daemon| {
            json!({
                "id": daemon.id,
                "gpus": daemon.gpus.iter().map(|gpu| &gpu.uuid).collect::<Vec<_>>(),
                "thread_percentage": daemon.thread_percentage,
                "multiuser": daemon.multiuser,
                "cpus": daemon.cpus.map(|cpus| cpus.to_string()),
                "pipe_directory": daemon.pipe_directory,
                "log_directory": daemon.log_directory,
            })
        })
        .collect();
    json!({ "gpus": plan.gpus.iter().map(gpu).collect::<Vec<_>>(), "control_daemons": control_daemons })
}
