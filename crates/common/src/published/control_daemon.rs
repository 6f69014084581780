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
    /// The reason why the control daemon is in this state; empty if it is ready.
    pub reason: String,
    /// The PID of the control daemon; None if it does not run.
    pub pid: Option<u32>,
    pub servers: Vec<u32>,
    pub pipe_directory: PathBuf,
    /// The directory of the control daemon's sockets. To reach the control daemon with NVIDIA's front end
    /// `nvidia-cuda-mps-control`, root sets `CUDA_MPS_PIPE_DIRECTORY` to this directory.
    pub control_directory: PathBuf,
    pub log_directory: PathBuf,
    /// True if one server serves every user, false if the users take turns. None if the service does not know yet if the users
    /// take turns.
    pub multiuser: Option<bool>,
    /// The CPUs on which the control daemon may run: a list, or `all`. None if the control daemon does not run.
    pub cpus: Option<String>,
    /// The CPUs to which the control daemon should be bound. None if the control daemon should not be bound.
    pub wanted_cpus: Option<Cpus>,
    /// The number of times that the service has started this control daemon since the service itself started.
    pub starts: u32,
    /// The number of times that a new process has replaced the process of the control daemon since the service started.
    pub restarts: u32,
    /// The number of times since the service started that a new server has replaced a server of the control daemon.
    pub server_restarts: u32,
    /// The number of fatal GPU errors of the control daemon's servers since the service started.
    pub faults: u32,
    /// The time at which the control daemon got into its present state.
    pub since: SystemTime,
}
