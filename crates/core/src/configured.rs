//! The GPUs that a configuration names.

use alloc::collections::BTreeSet;

use crate::GpuUuid;

/// The GPUs that a configuration names, as far as their UUIDs are known.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Configured {
    /// The GPUs that the configuration certainly names.
    pub certainly: BTreeSet<GpuUuid>,
    /// Set if the configuration has an entry whose GPU has no known UUID: the GPUs that certainly are not the GPU of that
    /// entry. None if all UUIDs are known.
    pub others: Option<BTreeSet<GpuUuid>>,
}

impl Configured {
    /// True if the configuration names the GPU with this UUID, or may name it.
    pub fn may_have(&self, uuid: &str) -> bool {
        self.certainly.contains(uuid) || self.others.as_ref().is_some_and(|others| !others.contains(uuid))
    }
}
