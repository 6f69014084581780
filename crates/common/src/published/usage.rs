//! The use of GPUs and of their slices.

pub use mps_core::tenants::budget::InUse;

/// The use of a slice by all its clients.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SliceUse {
    /// The number of the slice's clients. Each client is a process.
    pub clients: u32,
    /// The memory that the clients hold, in MiB. None if the driver does not report the memory of one of the clients.
    pub memory_mib: Option<u64>,
    /// The amount by which the use exceeds the slice's budget, in words; empty if the use fits into the budget.
    pub overuse: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GpuUse {
    /// The use of each slice, by the ordinal. Empty before the service has looked at the GPU.
    pub slices: Vec<SliceUse>,
    /// The use by all MPS clients on the GPU, including clients without a known slice. None until the service has looked at
    /// the GPU.
    pub all: Option<InUse>,
}
