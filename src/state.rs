//! The Snapshot: what this service publishes, as plain data. D-Bus and the unit's status line are made from it alone.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::SystemTime;

use crate::gpu::ComputeMode;
use crate::plan::GpuPlan;

/// The service's state in one word. A reader treats an unknown word as `degraded`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// `enable_cuda_mps` is false: nothing is served, nothing is wrong.
    Disabled,
    /// The first pass over the GPUs has not ended.
    Starting,
    /// Every configured GPU is served.
    Ready,
    /// Some are, or something needs an administrator's eye.
    Degraded,
    /// None is.
    Failed,
    /// On the way down.
    Stopping,
}

impl State {
    /// The word on D-Bus.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Disabled => "disabled",
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Degraded => "degraded",
            Self::Failed => "failed",
            Self::Stopping => "stopping",
        }
    }
}

/// The state of one control daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlDaemonState {
    /// Being started and configured.
    Starting,
    /// Serves clients, with its limits confirmed as far as they can be.
    Ready,
    /// Its server has met a fatal GPU error.
    Faulted,
    /// Died or would not start; tried again after a pause.
    Backoff,
    /// Something outside must change first; the reason says what.
    Waiting,
    /// On the way down.
    Stopping,
}

impl ControlDaemonState {
    /// The word on D-Bus.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Faulted => "faulted",
            Self::Backoff => "backoff",
            Self::Waiting => "waiting",
            Self::Stopping => "stopping",
        }
    }
}

/// Everything published, at one generation.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Grows by one with every change of what `ListDevices` or `ListGpus` returns.
    pub generation: u64,
    /// The service's state.
    pub state: State,
    /// Why, in one line; empty when ready.
    pub reason: String,
    /// `enable_cuda_mps`.
    pub enabled: bool,
    /// The driver's version; empty when there is none.
    pub driver_version: String,
    /// `cuda_mps_pipe_directory`.
    pub pipe_directory: PathBuf,
    /// `cuda_mps_log_directory`.
    pub log_directory: PathBuf,
    /// The configured GPUs in configuration order, with their slices; None before the first plan exists.
    pub gpus: Option<Vec<GpuView>>,
    /// The control daemons.
    pub control_daemons: Vec<ControlDaemonView>,
    /// The last things that happened, oldest first.
    pub events: VecDeque<Event>,
}

/// One configured GPU as it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuView {
    /// What was planned for it.
    pub plan: GpuPlan,
    /// Whether a client that starts now is served with the planned limits.
    pub healthy: bool,
    /// Why not, or what to know though it is; empty when there is nothing to say.
    pub reason: String,
    /// The compute mode as last seen.
    pub compute_mode: Option<ComputeMode>,
    /// The control daemon that serves it, by its id; empty when none does.
    pub control_daemon: String,
    /// The thread percentage that the control daemon has confirmed.
    pub confirmed_thread_percentage: Option<u8>,
    /// The memory limit that a running server has confirmed, in MiB.
    pub confirmed_memory_limit_mib: Option<u64>,
}

/// One control daemon as it stands.
#[derive(Debug, Clone, PartialEq)]
pub struct ControlDaemonView {
    /// `shared`, or the GPU's UUID.
    pub id: String,
    /// Its state.
    pub state: ControlDaemonState,
    /// Why; empty when ready.
    pub reason: String,
    /// Its PID; None when none runs.
    pub pid: Option<u32>,
    /// The PIDs of its servers.
    pub servers: Vec<u32>,
    /// CUDA_MPS_PIPE_DIRECTORY.
    pub pipe_directory: PathBuf,
    /// CUDA_MPS_LOG_DIRECTORY.
    pub log_directory: PathBuf,
    /// Whether one server serves every user; None before that is known.
    pub multiuser: Option<bool>,
    /// How often it was started since this service started.
    pub starts: u32,
    /// Since when it is in this state.
    pub since: SystemTime,
}

/// Something that happened and that an administrator would want to know.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// When.
    pub at: SystemTime,
    /// What.
    pub text: String,
}

/// How many events are kept.
pub const EVENTS_KEPT: usize = 32;

impl Snapshot {
    /// Every slice in configuration order, ordinals ascending: the GPU and the slice's ordinal on it.
    pub fn slices(&self) -> impl Iterator<Item = (&GpuView, u32)> {
        self.gpus.iter().flatten().flat_map(|gpu| (0..gpu.plan.slices).map(move |ordinal| (gpu, ordinal)))
    }
}

impl GpuView {
    /// The name of the slice with this ordinal: `00:06.0-1`.
    pub fn slice_name(&self, ordinal: u32) -> String {
        format!("{}-{ordinal}", self.plan.gpu.pci.address.short())
    }

    /// The GPU's UUID; empty where NVML can't say.
    pub fn uuid(&self) -> &str {
        self.plan.gpu.nvml.as_ref().map(|facts| facts.uuid.as_str()).unwrap_or_default()
    }
}
