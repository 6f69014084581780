//! The report of `yunion-mpsctl check`: the mistakes of a configuration, and the changes that a reload would make.

use serde_json::{Value, json};

use super::difference::{Difference, differences};
use super::{BAD_CONFIGURATION, Checked, check, words};
use crate::bus::answers::Published;
use crate::bus::proxy::BusError;
use crate::config::Sources;
use crate::plan::{GpuPlan, Plan};

#[derive(Debug)]
pub struct CheckReport {
    checked: Checked,
    changes: Result<Vec<Difference>, String>,
}

impl CheckReport {
    /// Reads the configuration files and the host's GPUs, and asks the service for its published values. If the command line
    /// names no configuration file, the check reads the file that the service reads.
    pub async fn new(Sources { config, sysroot }: Sources) -> Self {
        let published = Published::ask().await;
        let config = config.or_else(|| published.as_ref().ok()?.config(&sysroot));
        let checked = check(&Sources { config, sysroot });
        let changes = match &checked {
            Checked::Right { loaded, plan: Ok(plan), .. } => match published {
                Ok(published) => differences(loaded, plan, &published),
                Err(BusError::NotRunning) => Err("yunion-mps-daemon is not running".to_owned()),
                Err(BusError::Silent) => Err("yunion-mps-daemon does not answer".to_owned()),
                Err(error) => Err(error.to_string()),
            },
            Checked::Right { plan: Err(reason), .. } => Err(reason.to_string()),
            Checked::Refused(_) | Checked::Wrong { .. } => Err("the configuration is wrong".to_owned()),
        };
        Self { checked, changes }
    }

    pub fn exit_status(&self) -> u8 {
        if self.checked.problems().is_empty() { 0 } else { BAD_CONFIGURATION }
    }

    pub fn lines(&self) -> Vec<String> {
        let mut lines = words(&self.checked);
        if matches!(self.checked, Checked::Refused(_) | Checked::Wrong { .. }) {
            return lines;
        }
        lines.push(String::new());
        match self.changes.as_deref() {
            Err(why_not) => lines.push(format!("What a reload would change is unknown: {why_not}")),
            Ok([]) => lines.push("Nothing would change.".to_owned()),
            Ok(changes) => {
                lines.push("With `systemctl reload yunion-mps-daemon`:".to_owned());
                lines.extend(changes.iter().map(|change| format!("  {change}")));
            }
        }
        lines
    }

    pub fn document(&self) -> Value {
        let Self { checked, changes } = self;
        let loaded = checked.loaded();
        let plan = match checked {
            Checked::Right { plan, .. } => Some(plan),
            Checked::Refused(_) | Checked::Wrong { .. } => None,
        };
        let problems = checked.problems();
        json!({
            "right": problems.is_empty(),
            "problems": problems,
            "warnings": checked.all_warnings().collect::<Vec<_>>(),
            "files": loaded.map(|loaded| &loaded.settings.sources),
            "enabled": loaded.map(|loaded| loaded.settings.enabled),
            "plan": plan.and_then(|plan| plan.as_ref().ok()).map(plan_document),
            "no_plan": plan.and_then(|plan| plan.as_ref().err()).map(ToString::to_string),
            "differences": changes.as_ref().ok(),
            "not_compared": changes.as_ref().err(),
        })
    }
}

fn plan_document(plan: &Plan) -> Value {
    let slice = |gpu: &GpuPlan, ordinal| {
        json!({
            "addr": gpu.slice(ordinal).to_string(),
            "mps_memory_limit": gpu.size(ordinal).memory_mib,
            "mps_thread_percentage": gpu.size(ordinal).thread_percentage,
            "max_clients": gpu.max_clients(ordinal),
        })
    };
    let gpu = |gpu: &GpuPlan| {
        json!({
            "addr": gpu.gpu.id().to_string(),
            "device_path": gpu.gpu.uuid(),
            "virtual_num": gpu.slices(),
            "mps_memory_limit": gpu.largest().memory_mib,
            "mps_thread_percentage": gpu.largest().thread_percentage,
            "slices": (0..gpu.slices()).map(|ordinal| slice(gpu, ordinal)).collect::<Vec<_>>(),
            "limits_enforced": gpu.limits_enforced,
            "pipe_directory": gpu.pipe_directory,
            "not_served": gpu.unusable(),
            "warnings": gpu.warnings.iter().map(|warning| &warning.problem.found).collect::<Vec<_>>(),
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
