//! The published state of a control daemon.

use std::path::PathBuf;
use std::time::SystemTime;

use mps_core::terms::DaemonId;
pub use mps_core::view::ControlDaemonState;

use crate::host::cpus::Cpus;

#[derive(Debug, Clone, PartialEq)]
pub struct ControlDaemonView {
    pub id: DaemonId,
    pub state: ControlDaemonState,
    /// The reason for the state. Empty if the control daemon is ready.
    pub reason: String,
    pub pid: Option<u32>,
    pub servers: Vec<u32>,
    pub pipe_directory: PathBuf,
    /// The directory of the control daemon's sockets. To use NVIDIA's front end `nvidia-cuda-mps-control`, root sets
    /// `CUDA_MPS_PIPE_DIRECTORY` to this directory.
    pub control_directory: PathBuf,
    pub log_directory: PathBuf,
    /// True if one server serves every user. False if each user has a server, and the users take turns. None if the service
    /// does not know yet.
    pub multiuser: Option<bool>,
    /// The CPUs on which the control daemon may run: a list, or `all`. None if the control daemon does not run.
    pub cpus: Option<String>,
    /// The CPUs to which the control daemon should be bound. None if the control daemon should not be bound.
    pub wanted_cpus: Option<Cpus>,
    /// The number of times that the service has started this control daemon since the start of the service.
    pub starts: u32,
    /// The number of times that a new process has replaced the control daemon's process since the start of the service.
    pub restarts: u32,
    /// The number of times that a new server has replaced a server of this control daemon since the start of the service.
    pub server_restarts: u32,
    /// The number of fatal GPU errors of the control daemon's servers since the start of the service.
    pub faults: u32,
    pub since: SystemTime,
}
