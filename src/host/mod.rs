//! The host: its GPUs, as the PCI bus and NVIDIA's driver report them, its processes and its service manager.

pub mod blocking;
pub mod driver;
pub mod gpu;
pub mod nvml;
pub mod oom;
mod pci_ids;
pub mod proc;
pub mod regular_file;
pub mod sysfs;
pub mod systemd;
pub mod variant;
