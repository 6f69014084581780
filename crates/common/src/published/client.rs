use std::time::SystemTime;

use mps_core::register::KnownClient;

/// A process that uses a GPU, at the moment of the question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientView {
    /// The process, with those of its slices that are on this GPU.
    pub client: KnownClient,
    /// True if it uses the GPU without an MPS server of this service.
    pub bypass: bool,
    /// True if the process waits for a server, and uses no GPU yet.
    pub waiting: bool,
    /// The path of its program, or the name alone.
    pub command: String,
    /// The UUID of the GPU; empty if the process uses none yet.
    pub gpu_uuid: String,
    pub memory_mib: Option<u64>,
    /// The start of the process.
    pub since: Option<SystemTime>,
}
