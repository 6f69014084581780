//! A GPU of a control daemon, and the sizes of its slices.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};

use super::{GpuId, GpuUuid, SliceId};

/// The size of a slice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SliceSize {
    /// The memory of the slice: the memory in the configuration's entry for the slice, or the GPU's memory divided by the number
    /// of slices, in whole MiB. 0 if the memory of the GPU is not known.
    pub memory_mib: u64,
    /// The active thread percentage, 1 to 100.
    pub thread_percentage: u8,
    /// The most clients that the slice may have at the same time.
    pub max_clients: u32,
}

impl SliceSize {
    /// The largest memory, the largest percentage and the largest number of clients of these sizes.
    pub fn largest<'s>(sizes: impl IntoIterator<Item = &'s Self>) -> Self {
        sizes.into_iter().fold(Self::default(), |largest, size| Self {
            memory_mib: largest.memory_mib.max(size.memory_mib),
            thread_percentage: largest.thread_percentage.max(size.thread_percentage),
            max_clients: largest.max_clients.max(size.max_clients),
        })
    }
}

/// A GPU of a control daemon. The position of the GPU in the list of the control daemon's GPUs is its ordinal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedGpu {
    pub uuid: GpuUuid,
    /// The published GPU. None if the plan does not have the GPU any more.
    pub id: Option<GpuId>,
    /// The default device pinned memory limit in MiB: the largest limit of the control daemon's slices.
    pub memory_limit_mib: u64,
    /// The slices of the GPU that the control daemon serves, by their ordinals.
    pub sizes: BTreeMap<u32, SliceSize>,
    /// True if the GPU enforces the limits.
    pub limits_enforced: bool,
    /// The number of clients that the GPU can have at the same time.
    pub capacity: u32,
    /// True if NVML lists the clients of this control daemon. False if only the control daemon itself lists them.
    pub clients_listed: bool,
}

impl ServedGpu {
    /// The GPU's name, for people.
    pub fn name(&self) -> String {
        self.id.map_or_else(|| self.uuid.clone(), |id| id.to_string())
    }

    /// The slices of the GPU that the control daemon serves.
    pub fn slices(&self) -> impl Iterator<Item = SliceId> {
        self.id.into_iter().flat_map(|id| self.sizes.keys().map(move |ordinal| id.slice(*ordinal)))
    }
}
