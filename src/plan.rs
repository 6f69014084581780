//! The plan: which control daemons run, with which GPUs, slices and limits. A pure function of what the administrator
//! wrote and what the host has.

use std::path::PathBuf;

use crate::gpu::Gpu;

/// What shall be, and why some of it can't.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Every GPU that the configuration names, in its order, served or not.
    pub gpus: Vec<GpuPlan>,
    /// The control daemons that serve them.
    pub control_daemons: Vec<ControlDaemonPlan>,
}

/// One configured GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuPlan {
    /// What is known of it.
    pub gpu: Gpu,
    /// How many slices it is cut into.
    pub slices: u32,
    /// The memory of one slice in MiB: the total divided, whole MiB. 0 where the total is not known.
    pub memory_limit_mib: u64,
    /// The active thread percentage of one slice, 1 to 100.
    pub thread_percentage: u8,
    /// Whether the GPU enforces the two limits: from compute capability 7.0 on.
    pub limits_enforced: bool,
    /// Why it can't be served now; None: it can.
    pub unusable: Option<String>,
    /// What an administrator should know, though it is served.
    pub warnings: Vec<String>,
    /// Where its clients connect.
    pub pipe_directory: PathBuf,
}

/// One control daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlDaemonPlan {
    /// `shared`, or the GPU's UUID.
    pub id: String,
    /// CUDA_MPS_PIPE_DIRECTORY.
    pub pipe_directory: PathBuf,
    /// CUDA_MPS_LOG_DIRECTORY.
    pub log_directory: PathBuf,
    /// CUDA_VISIBLE_DEVICES: the GPUs in PCI order, so that ordinals don't depend on the order of entries.
    pub gpus: Vec<ServedGpu>,
    /// The default active thread percentage: the largest of its GPUs'.
    pub thread_percentage: u8,
    /// Whether to ask for one server for the clients of every user.
    pub multiuser: bool,
    /// Whether a driver that refuses that is asked again without it.
    pub multiuser_optional: bool,
    /// Whether the server is started before the first client.
    pub prewarm: bool,
}

/// A GPU in a control daemon's hands; its position is its ordinal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedGpu {
    /// The UUID.
    pub uuid: String,
    /// The address, for messages and journals.
    pub pci: crate::gpu::PciAddress,
    /// The default device pinned memory limit in MiB.
    pub memory_limit_mib: u64,
    /// Whether the GPU enforces limits.
    pub limits_enforced: bool,
}
