//! The compute mode of a GPU: who may use it.

/// The mode in which only an MPS server can open a GPU, so that no program slips past it.
pub const SERVED: ComputeMode = ComputeMode::ExclusiveProcess;

/// The mode that decides which processes may open a context on a GPU. Its text is that of
/// `nvidia-smi --query-gpu=compute_mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display)]
pub enum ComputeMode {
    /// Any number of processes may.
    Default,
    /// One thread may. NVIDIA has deprecated this mode.
    #[strum(to_string = "Exclusive_Thread")]
    ExclusiveThread,
    /// No process may.
    Prohibited,
    /// One process may, such as an MPS server.
    #[strum(to_string = "Exclusive_Process")]
    ExclusiveProcess,
}
