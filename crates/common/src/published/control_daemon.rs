//! The published state of a control daemon.

use std::path::PathBuf;
use std::time::SystemTime;

use mps_core::terms::DaemonId;

use crate::host::cpus::Cpus;

/// The state of one control daemon; in lower case it is the word on D-Bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum ControlDaemonState {
    /// The control daemon is being started and configured.
    Starting,
    /// The control daemon serves clients. Its limits are confirmed as far as the driver allows.
    Ready,
    /// The server has met a fatal GPU error.
    Faulted,
    /// The control daemon has died or could not be started. The service tries again after a pause.
    Backoff,
    /// Something outside must change first. The reason says which.
    Waiting,
    Stopping,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ControlDaemonView {
    pub id: DaemonId,
    pub state: ControlDaemonState,
    /// Why the control daemon is in this state; empty if it is ready.
    pub reason: String,
    /// The PID; None when no control daemon runs.
    pub pid: Option<u32>,
    pub servers: Vec<u32>,
    pub pipe_directory: PathBuf,
    /// The directory of its sockets. Root reaches it there with NVIDIA's front end.
    pub control_directory: PathBuf,
    pub log_directory: PathBuf,
    /// True if one server serves every user; None before that is known.
    pub multiuser: Option<bool>,
    /// The CPUs on which it may run: a list, or `all`. None if it does not run.
    pub cpus: Option<String>,
    /// The CPUs to which it should be bound. None if it should not be bound.
    pub wanted_cpus: Option<Cpus>,
    /// The number of starts since this service started.
    pub starts: u32,
    /// The number of times since then that a control daemon was replaced by a new one.
    pub restarts: u32,
    /// The number of times since then that a server was replaced by a new one.
    pub server_restarts: u32,
    /// The number of fatal GPU errors of its servers since then.
    pub faults: u32,
    /// The time since when it is in this state.
    pub since: SystemTime,
}
