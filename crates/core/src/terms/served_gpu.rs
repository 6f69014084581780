//! A GPU of a control daemon, and the sizes of its slices.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};

use super::{GpuId, GpuUuid, SliceId};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SliceSize {
    /// The memory of the slice, from its entry in the configuration. Without an entry, it is the GPU's memory divided by the
    /// number of slices, in whole MiB. 0 if the memory of the GPU is not known.
    pub memory_mib: u64,
    /// From 1 to 100.
    pub thread_percentage: u8,
    pub max_clients: u32,
}

impl SliceSize {
    pub fn largest<'s>(sizes: impl IntoIterator<Item = &'s Self>) -> Self {
        sizes.into_iter().fold(Self::default(), |largest, size| Self {
            memory_mib: largest.memory_mib.max(size.memory_mib),
            thread_percentage: largest.thread_percentage.max(size.thread_percentage),
            max_clients: largest.max_clients.max(size.max_clients),
        })
    }
}

/// A GPU of a control daemon. Its position in the list of the control daemon's GPUs is its ordinal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedGpu {
    pub uuid: GpuUuid,
    /// The name under which the service publishes the GPU. None if the plan no longer has the GPU.
    pub id: Option<GpuId>,
    /// The default device pinned memory limit in MiB: the largest limit of the slices that the control daemon serves.
    pub memory_limit_mib: u64,
    /// The sizes of the slices that the control daemon serves, by the slices' ordinals.
    pub sizes: BTreeMap<u32, SliceSize>,
    pub limits_enforced: bool,
    pub capacity: u32,
    /// True if NVML lists the clients of this control daemon. If false, only the control daemon itself lists its clients.
    pub clients_listed: bool,
}

impl ServedGpu {
    pub fn name(&self) -> String {
        self.id.map_or_else(|| self.uuid.clone(), |id| id.to_string())
    }

    pub fn slices(&self) -> impl Iterator<Item = SliceId> {
        self.id.into_iter().flat_map(|id| self.sizes.keys().map(move |ordinal| id.slice(*ordinal)))
    }
}
