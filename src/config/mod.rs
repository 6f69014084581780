//! Settings: what the administrator wrote, checked, with every problem named at once.
//!
//! `host.conf` is overlaid by `host_local.conf`, which names the device file. All three are read on each load; nothing
//! is remembered between loads.

use std::fmt;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

/// Everything the two configuration files say, checked and with defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// `enable_cuda_mps`: false publishes no device.
    pub enabled: bool,
    /// `cuda_mps_pipe_directory`: where clients find the control daemon.
    pub pipe_directory: PathBuf,
    /// `cuda_mps_log_directory`: where control.log is written.
    pub log_directory: PathBuf,
    /// `cuda_mps_replicas`: slices of a GPU that no entry of the device file names.
    pub replicas: NonZeroU32,
    /// `log_level`.
    pub log_level: LogLevel,
    /// `cuda_mps_topology`.
    pub topology: Topology,
    /// `cuda_mps_thread_percentage`.
    pub thread_policy: ThreadPolicy,
    /// `cuda_mps_multiuser`.
    pub multiuser: MultiUser,
    /// `cuda_mps_prewarm`: start the server before the first client comes.
    pub prewarm: bool,
    /// `cuda_mps_set_compute_mode`: false leaves the compute mode alone.
    pub set_compute_mode: bool,
    /// `cuda_mps_quit_timeout`: what `quit` gets before SIGTERM.
    pub quit_timeout: Duration,
    /// `cuda_mps_fault_grace`: what the clients of a faulted server get before they are terminated.
    pub fault_grace: Duration,
    /// `cuda_mps_log_max_size`, in bytes (the key is in MiB).
    pub log_max_bytes: u64,
    /// `cuda_mps_cdi_directory`.
    pub cdi_directory: Option<PathBuf>,
    /// What the device file says; empty when `container_device_config_file` is not set.
    pub devices: Vec<DeviceEntry>,
    /// The files that were read, in the order in which they were layered.
    pub sources: Vec<PathBuf>,
}

/// One entry of the device file, of whatever type: the other types' entries claim GPUs that are then not ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceEntry {
    /// Where it stands, for messages.
    pub origin: Origin,
    /// `type`, verbatim.
    pub device_type: String,
    /// `path`, classified; None where the entry has none (some other types don't).
    pub path: Option<DevicePath>,
    /// Present on `NVIDIA_MPS` entries only.
    pub mps: Option<MpsEntry>,
}

/// What only an `NVIDIA_MPS` entry has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsEntry {
    /// `virtual_number`: how many slices the GPU is cut into.
    pub slices: NonZeroU32,
    /// `thread_percentage`, 1 to 100, if the entry overrides the policy.
    pub thread_percentage: Option<u8>,
}

/// How an entry's `path` names its GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DevicePath {
    /// `/dev/dri/renderDN`.
    RenderNode(PathBuf),
    /// A PCI address, with or without the domain.
    Pci(crate::gpu::PciAddress),
    /// A GPU UUID, `GPU-` and 36 characters, lower case.
    Uuid(String),
    /// `/dev/nvidiaN`, by its N.
    NvidiaMinor(u32),
    /// Anything else, verbatim: for an `NVIDIA_MPS` entry an error that the plan words, since it knows the GPUs and
    /// can name the right path.
    Other(String),
}

/// A place in a file.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Origin {
    /// The file, as it was opened.
    pub file: PathBuf,
    /// The line, from 1; None where the problem is the file itself.
    pub line: Option<usize>,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}", self.file.display()),
            None => write!(f, "{}", self.file.display()),
        }
    }
}

/// Something wrong with the configuration: where, what was found and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The file and line.
    pub origin: Origin,
    /// The key or the entry, as a user would name it: `cuda_mps_replicas`, `devices[2].virtual_number`.
    pub key: String,
    /// What was found there.
    pub found: String,
    /// What is allowed, or what to do.
    pub remedy: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        write!(f, "{}; {}", self.found, self.remedy)
    }
}

/// `log_level`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogLevel {
    /// `debug`.
    Debug,
    /// `info`.
    #[default]
    Info,
    /// `warn`.
    Warn,
    /// `error`.
    Error,
}

/// `cuda_mps_topology`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Topology {
    /// One control daemon in the pipe directory, for all GPUs.
    #[default]
    Shared,
    /// One control daemon per GPU, in `<pipe directory>/<GPU UUID>`.
    PerGpu,
}

/// `cuda_mps_thread_percentage`: what share of a GPU's threads one of N slices may have active.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ThreadPolicy {
    /// 100/N.
    #[default]
    Equal,
    /// min(100, 200/N).
    Balanced,
    /// 100.
    Unlimited,
    /// This many percent, 1 to 100.
    Fixed(u8),
}

/// `cuda_mps_multiuser`: one root server for the clients of every user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MultiUser {
    /// Where every GPU of the control daemon allows it and the driver knows the option.
    #[default]
    Auto,
    /// Always; a driver that refuses it is an error.
    On,
    /// Never.
    Off,
}
