//! The GPUs that a configuration names, by UUID, even if some of them can't be told yet.

use std::collections::BTreeSet;

use super::gpus::GpuPlan;
use super::{Missing, paths};
use crate::host::gpu::Gpu;
use crate::host::inventory::Inventory;

/// The GPUs that a configuration names, as far as their UUIDs are known.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Configured {
    certainly: BTreeSet<String>,
    /// Set while some entry's GPU has no known UUID: the GPUs that are certainly not that GPU. None if all are known.
    others: Option<BTreeSet<String>>,
}

impl Configured {
    /// Whether the configuration names the GPU with this UUID, or may name it.
    pub(crate) fn may_have(&self, uuid: &str) -> bool {
        self.certainly.contains(uuid) || self.others.as_ref().is_some_and(|others| !others.contains(uuid))
    }

    pub(super) fn new(gpus: &[GpuPlan], missing: &[Missing], inventory: &Inventory) -> Self {
        let uuid = |gpu: &Gpu| gpu.uuid().map(str::to_owned);
        let certainly: BTreeSet<String> = gpus.iter().filter_map(|plan| uuid(&plan.gpu)).collect();
        let told = missing.is_empty() && gpus.iter().all(|plan| plan.gpu.nvml.is_ok());
        let can_be = |gpu: &Gpu| missing.iter().any(|missing| paths::can_be(&missing.path, gpu));
        let others = inventory.gpus.iter().filter(|gpu| !can_be(gpu)).filter_map(uuid);
        Self { others: (!told).then(|| others.collect()), certainly }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::DevicePath;
    use crate::plan::tests::{facts, h200s, node, plan, with};

    #[test]
    fn a_gpu_with_an_unknown_uuid_may_be_configured() {
        let settings = with(vec![(node(128), 4), (node(129), 4)]);
        let mut inventory = h200s();
        let named = plan(&settings, &inventory).unwrap().configured;
        let told = |named: &Configured| ["GPU-0", "GPU-1", "GPU-2", "GPU-x"].map(|uuid| named.may_have(uuid));
        assert_eq!(told(&named), [true, true, false, false]);
        // A GPU without a known UUID may be any GPU except the GPUs that are known.
        inventory.gpus[1].nvml = Err("an error".into());
        assert_eq!(told(&plan(&settings, &inventory).unwrap().configured), [true, true, false, true]);
        // A GPU that foreign processes hold is named as well.
        let mut inventory = h200s();
        facts(&mut inventory, 1).foreign_processes = vec![(7, "x".to_owned())];
        let held = plan(&settings, &inventory).unwrap();
        assert_eq!(told(&held.configured), [true, true, false, false]);
        assert_eq!((held.gpus[0].holders().len(), held.gpus[1].holders().len()), (0, 1));
        assert_eq!(told(&Configured::default()), [false; 4]);
        // The GPU with an unknown minor number may be the right one.
        let settings = with(vec![(node(128), 4), (DevicePath::NvidiaMinor(1), 4)]);
        let mut inventory = h200s();
        facts(&mut inventory, 1).minor = None;
        assert_eq!(told(&plan(&settings, &inventory).unwrap().configured), [true, true, false, true]);
    }
}
