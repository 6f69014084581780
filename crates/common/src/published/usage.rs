//! The use of GPUs and of their slices.

pub use mps_core::tenants::budget::InUse;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SliceUse {
    pub clients: u32,
    /// The memory that the clients have allocated, in MiB. None if the driver does not report the memory of some client.
    pub memory_mib: Option<u64>,
    /// The amount by which the use exceeds the slice's budget, in words. Empty if the use fits into the budget.
    pub overuse: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GpuUse {
    /// In the order of the ordinals. Empty before the service has asked NVML about the GPU.
    pub slices: Vec<SliceUse>,
    /// The use by all MPS clients on the GPU, including clients without a known slice. None before the service has asked NVML
    /// about the GPU.
    pub all: Option<InUse>,
}
