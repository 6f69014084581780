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
    /// The compute mode of a GPU while control daemons serve it. In `EXCLUSIVE_PROCESS` the server of a single control daemon
    /// can open the GPU, and a program without MPS can't. The servers of several control daemons could not open the GPU either,
    /// so they need `DEFAULT`.
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
