//! The host: its GPUs, as the PCI bus and NVIDIA's driver report them, its processes and its service manager.

pub(crate) mod blocking;
pub(crate) mod cpus;
pub(crate) mod driver;
pub(crate) mod gpu;
mod gpu_processes;
pub(crate) mod inventory;
pub(crate) mod mounts;
pub(crate) mod nvml;
pub(crate) mod oom;
mod pci_ids;
pub(crate) mod proc;
pub(crate) mod regular_file;
mod sysfs;
pub(crate) mod systemd;
pub(crate) mod variant;
