//! The use of GPUs and of their slices.

pub use mps_core::tenants::budget::InUse;

/// The use of a slice by all its clients.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SliceUse {
    /// The number of its clients, each a process.
    pub clients: u32,
    /// The memory that they hold, in MiB. None if the driver does not report the memory of one of them.
    pub memory_mib: Option<u64>,
    /// How that exceeds the slice's budget, in words; empty if it does not.
    pub overuse: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GpuUse {
    /// The use of each slice. Empty before the first look.
    pub slices: Vec<SliceUse>,
    /// The use of all MPS clients on the GPU, including those without a known slice. None before the first look.
    pub all: Option<InUse>,
}
