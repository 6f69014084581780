//! Makes the plan: the control daemons to run, with their GPUs, slices and limits. The plan is a pure function of the settings,
//! the host's GPUs and the GPUs of the former plan.
//!
//! * `entries` finds the GPUs that the configuration asks for.
//! * `paths` finds the GPU of each path in the configuration.
//! * `gpus` plans each GPU. `limits` computes the limits of its slices, and `warnings` its warnings.
//! * `control_daemons` divides the usable GPUs among control daemons.

mod control_daemons;
mod entries;
mod gpu_plan;
mod gpus;
mod limits;
mod paths;
mod warnings;

pub use control_daemons::{ControlDaemonPlan, Present};
pub use gpu_plan::{GpuPlan, HELD};
pub use limits::{context_mib, memory_for_slices};
pub use mps_core::Configured;
pub use paths::render_node;
pub use warnings::WORTH_KNOWING;

use crate::config::{DevicePath, Settings};
use crate::host::gpu::Gpu;
use crate::host::inventory::Inventory;
use crate::problem::{LocatedProblem, Problem};

/// The control daemons, GPUs and slices that should exist, and the reasons why some of them can't. The default is the plan of a
/// configuration without GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// The GPUs of the configuration, in its order, including the GPUs that can't be served at present.
    pub gpus: Vec<GpuPlan>,
    pub missing: Vec<Missing>,
    pub control_daemons: Vec<ControlDaemonPlan>,
    pub configured: Configured,
    /// The reason why the plan has no GPU, in words for an administrator. Empty if the plan has a GPU, or if the configuration
    /// asks for no GPU.
    pub nothing: String,
}

/// An entry of the device file that matches no GPU of this host. The GPU may be added later, or come back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    pub problem: LocatedProblem,
    pub path: DevicePath,
    /// True if the host certainly does not have the entry's GPU. False while a GPU that may be the entry's GPU does not answer.
    pub certain: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlanError {
    /// An administrator has to correct the configuration. These are all problems of the configuration, at least one.
    Problems(Vec<LocatedProblem>),
    /// The host has none of the configured GPUs. These are their entries in the device file, at least one.
    Missing(Vec<Missing>),
    /// The service can't check the configuration yet, since the host has no usable driver. The reason is in words for an
    /// administrator.
    NotYet(Problem),
}

pub fn problems(missing: &[Missing]) -> Vec<LocatedProblem> {
    missing.iter().map(|missing| missing.problem.clone()).collect()
}

/// Makes the plan. A GPU that does not work or is missing is no error: the plan has the GPU's problem. `before` has the GPUs of
/// the former plan. If one of these is missing now, it stays in the plan, so that its slices become unhealthy but still exist.
pub fn plan(settings: &Settings, inventory: &Inventory, before: &[GpuPlan]) -> Result<Plan, PlanError> {
    let gpus = before.iter().map(|plan| plan.gpu.clone()).collect();
    let before = Inventory::of_gpus(Ok(String::new()), gpus);
    let (wanted, missing) = entries::wanted(settings, inventory, &before)?;
    let mut gpus: Vec<GpuPlan> =
        wanted.into_iter().map(|wanted| gpus::gpu_plan(&wanted, settings, inventory)).collect();
    gpus::warn_of_other_claims(&mut gpus, settings, inventory);
    let control_daemons = control_daemons::control_daemons(&mut gpus, settings, inventory);
    control_daemons::each_writes_a_log(&control_daemons, settings)?;
    control_daemons::warn_of_loose_defaults(&mut gpus, &control_daemons);
    let configured = configured(&gpus, &missing, inventory);
    let nothing = if gpus.is_empty() { entries::why_nothing(settings, inventory) } else { String::new() };
    Ok(Plan { gpus, missing, control_daemons, configured, nothing })
}

/// The UUIDs of the GPUs that the configuration names. If the UUID of a named GPU is unknown, `others` has the UUIDs of the
/// GPUs that certainly are not that GPU.
fn configured(gpus: &[GpuPlan], missing: &[Missing], inventory: &Inventory) -> Configured {
    let uuid = |gpu: &Gpu| gpu.uuid().map(str::to_owned);
    let certainly = gpus.iter().filter_map(|plan| uuid(&plan.gpu)).collect();
    let told = missing.is_empty() && gpus.iter().all(|plan| plan.gpu.nvml.is_ok());
    let can_be = |gpu: &Gpu| missing.iter().any(|missing| paths::can_be(&missing.path, gpu));
    let others = inventory.gpus.iter().filter(|gpu| !can_be(gpu)).filter_map(uuid);
    Configured { others: (!told).then(|| others.collect()), certainly }
}

#[cfg(test)]
mod tests;
