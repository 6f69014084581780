//! Names and values that all other modules use.

mod names;
mod pci_address;
mod served_gpu;

use alloc::string::String;

pub use names::{DIRECTORIES, DaemonId, DeviceName, GpuId, SliceId, is_of_service};
pub use pci_address::PciAddress;
pub use served_gpu::{ServedGpu, SliceSize};

/// The UUID of a GPU: `GPU-` and 36 more characters.
pub type GpuUuid = String;

/// A process. The kernel reuses PIDs, so only the PID together with the start time identifies a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ProcessId {
    pub pid: u32,
    /// In clock ticks since boot (field 22 of `/proc/PID/stat`).
    pub start_time: u64,
}

impl ProcessId {
    /// A sort key: a newer process has the greater value.
    pub fn age(self) -> (u64, u32) {
        (self.start_time, self.pid)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuProcess {
    /// The PID in the host's PID namespace.
    pub pid: u32,
    /// None if the driver does not report the memory of the process.
    pub memory_mib: Option<u64>,
    /// True for a client of an MPS server. False for a server itself, and for a program without MPS.
    pub via_mps: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tenure {
    /// The control daemon has its GPUs alone: the compute mode `EXCLUSIVE_PROCESS` refuses any other server.
    Alone,
    /// Other control daemons of the service may have the same GPUs, since the compute mode is `DEFAULT`. Their servers take
    /// turns on each GPU.
    InTurns,
}

impl Tenure {
    /// Returns whether control daemons with these tenures exclude each other from a GPU.
    pub fn keeps_from(self, other: Self) -> bool {
        self == Self::Alone || other == Self::Alone
    }

    /// The compute mode of the GPUs, as an argument of `nvidia-smi`.
    pub fn compute_mode(self) -> &'static str {
        match self {
            Self::Alone => "EXCLUSIVE_PROCESS",
            Self::InTurns => "DEFAULT",
        }
    }
}
