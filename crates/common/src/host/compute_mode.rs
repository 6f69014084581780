//! The compute mode of a GPU, which decides how many processes may use the GPU.

use mps_core::Tenure;

/// The variants have the names that `nvidia-smi --query-gpu=compute_mode` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, strum::EnumString)]
pub enum ComputeMode {
    Default,
    /// One thread may use the GPU. NVIDIA has deprecated this mode.
    #[strum(to_string = "Exclusive_Thread")]
    ExclusiveThread,
    Prohibited,
    /// One process may use the GPU, such as an MPS server.
    #[strum(to_string = "Exclusive_Process")]
    ExclusiveProcess,
}

impl ComputeMode {
    /// The compute mode of a GPU while control daemons serve it. In `EXCLUSIVE_PROCESS` only one server can open the GPU, and a
    /// program without MPS can't. Several control daemons on one GPU need `DEFAULT`, since each of them has its own server.
    pub fn while_served(tenure: Tenure) -> Self {
        match tenure {
            Tenure::Alone => Self::ExclusiveProcess,
            Tenure::InTurns => Self::Default,
        }
    }

    pub fn is_exclusive(self) -> bool {
        matches!(self, Self::ExclusiveProcess | Self::ExclusiveThread)
    }
}
