//! A control daemon as others see it.

use std::path::PathBuf;
use std::time::SystemTime;

use mps_core::terms::DaemonId;

use crate::host::cpus::Cpus;

/// The state of one control daemon; in lower case it is the word on D-Bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum ControlDaemonState {
    /// Being started and configured.
    Starting,
    /// Serves clients, with its limits confirmed as far as they can be.
    Ready,
    /// The server has met a fatal GPU error.
    Faulted,
    /// Died or would not start; tried again after a pause.
    Backoff,
    /// Something outside must change first; the reason says what.
    Waiting,
    Stopping,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ControlDaemonView {
    pub id: DaemonId,
    pub state: ControlDaemonState,
    /// Why; empty when ready.
    pub reason: String,
    /// The PID; None when no control daemon runs.
    pub pid: Option<u32>,
    pub servers: Vec<u32>,
    pub pipe_directory: PathBuf,
    /// The directory in which it makes its sockets, and in which root finds it with NVIDIA's front end.
    pub control_directory: PathBuf,
    pub log_directory: PathBuf,
    /// True if one server serves every user; None before that is known.
    pub multiuser: Option<bool>,
    /// The CPUs on which it may run: a list, or `all`. None while none runs.
    pub cpus: Option<String>,
    /// The CPUs to which it is to be bound. None if it is not to be bound.
    pub wanted_cpus: Option<Cpus>,
    /// The number of starts since this service started.
    pub starts: u32,
    /// The number of times since then that a control daemon has followed an earlier control daemon.
    pub restarts: u32,
    /// The number of times since then that a server has followed an earlier server.
    pub server_restarts: u32,
    /// The number of fatal GPU errors of its servers since then.
    pub faults: u32,
    /// Since when it is in this state.
    pub since: SystemTime,
}
