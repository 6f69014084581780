//! The GPUs that a configuration names.

use alloc::collections::BTreeSet;

use crate::GpuUuid;

/// The GPUs that a configuration names. The service may not know the UUIDs of all these GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Configured {
    /// The named GPUs with known UUIDs.
    pub certainly: BTreeSet<GpuUuid>,
    /// None if the UUID of every named GPU is known. Otherwise the configuration may name any GPU, except for the GPUs in this
    /// set.
    pub others: Option<BTreeSet<GpuUuid>>,
}

impl Configured {
    /// Returns whether the configuration names this GPU, or may name it because the UUID of some named GPU is not known.
    pub fn may_have(&self, uuid: &str) -> bool {
        self.certainly.contains(uuid) || self.others.as_ref().is_some_and(|others| !others.contains(uuid))
    }
}
