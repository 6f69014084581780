//! The memory limits that the kernel should enforce for control groups that are bound to slices, and the published result of
//! setting these limits.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Daemon, Ending};
use crate::tenants::kernel_limit_keeper::{KernelLimitKeeper, LimitGoals};
use common::config::MemoryLimit;
use common::plan::Plan;
use mps_core::GpuUuid;
use mps_core::bindings::Bindings;
use mps_core::kernel_limits::{GroupLimits, LimitGoal, LimitOutcome, limited_to, limits, limits_around};
use mps_core::terms::SliceId;

impl Daemon {
    pub(super) fn keep_kernel_limits(&self, plan: &Plan) {
        let wanted = match self.ending {
            Some(Ending::ForGood) => GroupLimits::new(),
            _ => group_limits(plan, self.state_file.lock().bindings()),
        };
        self.limit_keeper.pursue(self.goals(wanted));
    }

    /// Has the kernel enforce the limits after a change of the bindings. For new bindings only their own limits are computed,
    /// since a host may have thousands of bindings.
    pub(super) fn keep_kernel_limits_since(&self, before: &Bindings, plan: &Plan) {
        let bindings = Arc::clone(self.state_file.lock().bindings());
        match bindings.added_to(before) {
            Some(added) if self.ending != Some(Ending::ForGood) => {
                let paths: Vec<&str> = added.map(|one| one.group.path.as_str()).collect();
                let wanted = limits_around(&paths, &bindings, |slice| memory_of(plan, slice));
                self.limit_keeper.add(self.goals(wanted));
            }
            _ => self.keep_kernel_limits(plan),
        }
    }

    fn goals(&self, wanted: GroupLimits) -> LimitGoals {
        let goals = wanted.into_iter().map(|(place, limit)| (place, limit.mib));
        match self.settings.memory_limit {
            MemoryLimit::Auto => goals.map(|(place, mib)| (place, LimitGoal::Hold(mib))).collect(),
            // With the setting `watch`, the service sets no limits in the kernel. The first call after the start of the service
            // removes the limits that an earlier service with the setting `auto` may have set.
            MemoryLimit::Watch if self.limit_keeper.is_new() => {
                goals.map(|(place, mib)| (place, LimitGoal::Lift([mib].into()))).collect()
            }
            MemoryLimit::Watch => LimitGoals::new(),
        }
    }

    pub(super) async fn lift_kernel_limits(&self) {
        self.keep_kernel_limits(&Plan::default());
        self.limit_keeper.tried().await;
    }
}

fn group_limits(plan: &Plan, bindings: &Bindings) -> GroupLimits {
    limits(bindings, |slice| memory_of(plan, slice))
}

/// The GPU of a slice, and the memory of the slice in MiB. None if the plan does not have the slice.
fn memory_of(plan: &Plan, slice: &SliceId) -> Option<(GpuUuid, u64)> {
    let gpu = plan.gpus.iter().find(|gpu| gpu.gpu.id() == slice.gpu)?;
    let is_known = slice.ordinal < gpu.slices();
    is_known.then(|| Some((gpu.gpu.uuid()?.to_owned(), gpu.size(slice.ordinal).memory_mib)))?
}

/// The slices with a single binding, if the kernel should enforce exactly the slice's memory limit for the bound control group.
/// Ok: the kernel enforces the limit. Err: the reason why the kernel does not.
pub(super) fn kernel_limits(
    plan: &Plan,
    bindings: &Bindings,
    keeper: &KernelLimitKeeper,
) -> BTreeMap<SliceId, Result<(), String>> {
    let outcomes = keeper.outcomes();
    if outcomes.values().all(|outcome| *outcome == LimitOutcome::NotOffered) {
        return BTreeMap::new();
    }
    let (wanted, by_slice) = (group_limits(plan, bindings), bindings.by_slice());
    let outcome = |(slice, uuid): (SliceId, &str)| {
        let place = limited_to(&slice, &uuid.to_owned(), &by_slice, &wanted)?;
        match outcomes.get(&place)? {
            LimitOutcome::Reached | LimitOutcome::Replaced(_) => Some((slice, Ok(()))),
            LimitOutcome::Refused(reason) => Some((slice, Err(reason.clone()))),
            LimitOutcome::NotOffered => None,
        }
    };
    let slices = plan.gpus.iter().filter_map(|gpu| Some((gpu, gpu.gpu.uuid()?)));
    let slices = slices.flat_map(|(gpu, uuid)| (0..gpu.slices()).map(move |one| (gpu.slice(one), uuid)));
    slices.filter_map(outcome).collect()
}
