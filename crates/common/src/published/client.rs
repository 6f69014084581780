use std::time::SystemTime;

use mps_core::register::KnownClient;

/// A process that uses a GPU, as the service published it at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientView {
    /// The process. Its list of slices has only the slices on the GPU with the UUID `gpu_uuid`.
    pub client: KnownClient,
    /// True if the process uses the GPU without an MPS server of this service.
    pub bypass: bool,
    /// True if the process waits for an MPS server, and uses no GPU yet.
    pub waiting: bool,
    /// The path of the process's program, or the program's name if the path is not known.
    pub command: String,
    /// The UUID of the GPU; empty if the process uses no GPU yet.
    pub gpu_uuid: String,
    pub memory_mib: Option<u64>,
    /// The start time of the process. None if the start time is not known.
    pub since: Option<SystemTime>,
}
