use std::time::SystemTime;

use mps_core::register::KnownClient;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientView {
    /// The process, without its slices on other GPUs than `gpu_uuid`. All slices are included if the process uses no GPU yet,
    /// or if only its environment names the slices.
    pub client: KnownClient,
    pub bypass: bool,
    /// True if the process waits for an MPS server, and uses no GPU yet.
    pub waiting: bool,
    /// The path of the process's program, or the program's name if the path is not known.
    pub command: String,
    /// Empty if the process uses no GPU yet.
    pub gpu_uuid: String,
    pub memory_mib: Option<u64>,
    pub since: Option<SystemTime>,
}
