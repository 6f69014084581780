//! The vocabulary: names and values that all other modules use. It decides nothing.

mod names;
mod pci_address;
mod served_gpu;

use alloc::string::String;

pub use names::{BadName, DIRECTORIES, DaemonId, DeviceName, GpuId, SliceId, is_of_service};
pub use pci_address::{BadPciAddress, PciAddress};
pub use served_gpu::{ServedGpu, SliceSize};

/// The UUID of a GPU.
pub type GpuUuid = String;

/// A process. PIDs are used again, but no two processes have the same PID and start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ProcessId {
    pub pid: u32,
    /// The start time in clock ticks since boot (field 22 of /proc/PID/stat).
    pub start_time: u64,
}

impl ProcessId {
    /// Orders processes by age: a newer process has the greater value.
    pub fn age(self) -> (u64, u32) {
        (self.start_time, self.pid)
    }
}

/// A process on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuProcess {
    /// The PID on the host.
    pub pid: u32,
    /// The GPU memory that it holds, in MiB. None if the driver does not report it.
    pub memory_mib: Option<u64>,
    /// True if it is a client of an MPS server. A server itself is not.
    pub via_mps: bool,
}

/// How a control daemon has its GPUs: alone or in turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tenure {
    /// No other control daemon of the service has the GPUs. The compute mode `EXCLUSIVE_PROCESS` refuses every other server.
    Alone,
    /// The compute mode is `DEFAULT`, so other control daemons of the service may have the GPUs too: their servers take turns on
    /// each GPU.
    InTurns,
}

impl Tenure {
    /// True if a control daemon of the tenure `other` can't have a GPU that a control daemon of this tenure has.
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
