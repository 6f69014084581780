//! The compute mode of a GPU: who may use it.

use mps_core::Tenure;

/// The mode that decides which processes may open a context on a GPU. The text of the mode is that of `nvidia-smi
/// --query-gpu=compute_mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, strum::EnumString)]
pub enum ComputeMode {
    /// Any number of processes may use the GPU.
    Default,
    /// One thread may use the GPU. NVIDIA has deprecated this mode.
    #[strum(to_string = "Exclusive_Thread")]
    ExclusiveThread,
    /// No process may use the GPU.
    Prohibited,
    /// One process may use the GPU, such as an MPS server.
    #[strum(to_string = "Exclusive_Process")]
    ExclusiveProcess,
}

impl ComputeMode {
    /// The compute mode of a GPU that is served. `EXCLUSIVE_PROCESS` is for a GPU with one control daemon: the server can open
    /// the GPU, and a program without MPS can't. Several control daemons can't share a GPU in the mode `EXCLUSIVE_PROCESS`.
    pub fn while_served(tenure: Tenure) -> Self {
        match tenure {
            Tenure::Alone => Self::ExclusiveProcess,
            Tenure::InTurns => Self::Default,
        }
    }

    /// True if at most one process may use the GPU.
    pub fn is_exclusive(self) -> bool {
        matches!(self, Self::ExclusiveProcess | Self::ExclusiveThread)
    }
}
