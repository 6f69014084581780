//! The vocabulary: names and values that all other modules use. It decides nothing.

mod names;
mod pci_address;
mod served_gpu;

use alloc::string::String;

pub use names::{DIRECTORIES, DaemonId, DeviceName, GpuId, SliceId, is_of_service};
pub use pci_address::PciAddress;
pub use served_gpu::{ServedGpu, SliceSize};

/// The UUID of a GPU, which consists of `GPU-` and 36 characters.
pub type GpuUuid = String;

/// A process. The kernel uses a PID again, but no two processes have the same PID and start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ProcessId {
    pub pid: u32,
    /// The start time in clock ticks since boot (field 22 of /proc/PID/stat).
    pub start_time: u64,
}

impl ProcessId {
    /// A value that orders processes by age: a newer process has the greater value.
    pub fn age(self) -> (u64, u32) {
        (self.start_time, self.pid)
    }
}

/// A process on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuProcess {
    /// The PID on the host.
    pub pid: u32,
    /// The GPU memory that the process holds, in MiB. None if the driver does not report the memory of the process.
    pub memory_mib: Option<u64>,
    /// True if the process is a client of an MPS server. False for a server itself, and for a program without MPS.
    pub via_mps: bool,
}

/// The way in which a control daemon has its GPUs: alone, or in turns with other control daemons.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tenure {
    /// No other control daemon of the service has the GPUs. The compute mode `EXCLUSIVE_PROCESS` refuses every other server.
    Alone,
    /// The compute mode is `DEFAULT`, so other control daemons of the service may have the GPUs too: their servers take turns on
    /// each GPU.
    InTurns,
}

impl Tenure {
    /// Returns whether a control daemon of this tenure prevents a control daemon of the tenure `other` from getting the same
    /// GPU.
    pub fn keeps_from(self, other: Self) -> bool {
        self == Self::Alone || other == Self::Alone
    }

    /// The compute mode of the GPUs, as nvidia-smi takes it.
    pub fn compute_mode(self) -> &'static str {
        match self {
            Self::Alone => "EXCLUSIVE_PROCESS",
            Self::InTurns => "DEFAULT",
        }
    }
}
