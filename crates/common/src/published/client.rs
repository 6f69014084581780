//! A client of a GPU.

use std::time::SystemTime;

use mps_core::register::KnownClient;

/// A process that uses a GPU, as it is at the moment of asking.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientView {
    /// The process, with the slices that count on this GPU.
    pub client: KnownClient,
    /// True if it uses the GPU without an MPS server of this service.
    pub bypass: bool,
    /// True if it waits for a server, and uses no GPU yet.
    pub waiting: bool,
    /// The path of its program, or the name alone.
    pub command: String,
    /// The UUID of the GPU; empty if it uses none yet.
    pub gpu_uuid: String,
    pub memory_mib: Option<u64>,
    /// When it started.
    pub since: Option<SystemTime>,
}
