//! The use of GPUs and of their slices.

pub use mps_core::tenants::budget::InUse;

/// The clients of a slice, all together.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SliceUse {
    /// The number of its clients, each a process.
    pub clients: u32,
    /// The memory that they hold, in MiB. None if the driver does not report it for one of them.
    pub memory_mib: Option<u64>,
    /// In which way that is more than the slice's budget, in words; empty if it is not.
    pub overuse: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GpuUse {
    /// Of each slice. Empty before the first look.
    pub slices: Vec<SliceUse>,
    /// Of all MPS clients on the GPU, also those without a known slice. None before the first look.
    pub all: Option<InUse>,
}
