//! The compute mode of a GPU: who may use it.

use std::fmt;

/// The mode in which only an MPS server can open a GPU, so that no program slips past it.
pub const SERVED: ComputeMode = ComputeMode::ExclusiveProcess;

/// The mode that decides which processes may open a context on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any number of processes may.
    Default,
    /// One thread may. NVIDIA has deprecated this mode.
    ExclusiveThread,
    /// No process may.
    Prohibited,
    /// One process may, such as an MPS server.
    ExclusiveProcess,
}

impl fmt::Display for ComputeMode {
    /// The text that `nvidia-smi --query-gpu=compute_mode` prints.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "Default",
            Self::ExclusiveThread => "Exclusive_Thread",
            Self::Prohibited => "Prohibited",
            Self::ExclusiveProcess => "Exclusive_Process",
        })
    }
}
