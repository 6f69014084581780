//! The host: its GPUs, as the PCI bus and NVIDIA's driver report them, its processes and its service manager.

pub mod blocking;
pub mod compute_mode;
pub mod control_groups;
pub mod cpus;
pub mod driver;
pub mod gpu;
mod gpu_processes;
pub mod identity;
pub mod inotify;
pub mod installation;
pub mod inventory;
pub mod mounts;
pub mod nvml;
pub mod oom;
mod pci_ids;
pub mod proc;
pub mod program;
mod questions;
pub mod readable;
pub mod regular_file;
pub mod socket;
pub mod standard_error;
mod sysfs;
pub mod systemd;
pub mod variant;
pub mod xid;
