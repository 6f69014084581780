//! yunion-mps-daemon serves NVIDIA GPUs through MPS and exposes their slices as virtual devices on D-Bus.
//!
//! The way of the data, one direction only:
//!
//! ```text
//! host.conf, host_local.conf, host_container_device.yml          NVML, /sys, pci.ids
//!                  |                                                     |
//!               config::Settings                                  gpu::Inventory
//!                  \________________  plan::plan()  (pure)  _____________/
//!                                          |
//!                    Plan: control daemons, their GPUs, slices and limits
//!                                          |
//!       journal <-> supervisor: compute mode, start, limits, health, stop   (one per control daemon)
//!                                          |
//!                        compose -> state::Snapshot (plain data, a generation number)
//!                                          |
//!                      D-Bus objects and signals, the unit's status line, CDI spec
//! ```
//!
//! A lower part never calls an upper one. `config`, `gpu` and `plan` supervise nothing; `dbus` decides nothing, it
//! mirrors a Snapshot and passes requests on; `systemd` asks the host's service manager. Only `gpu::nvml` names
//! `nvml_wrapper`, only `dbus` and `systemd` name zbus interfaces, only `config` names `serde_yaml`, and only
//! `mps::process` starts, signals or takes over a control daemon. Only `cuda` names cudarc, and only
//! `proc` reads what /proc says of processes. `daemon` is the loop that ties
//! them together and `arguments` its command line; `ctl` is yunion-mpsctl, on the other side of the bus.

pub mod arguments;
pub mod blocking;
pub mod bypass;
pub mod cdi;
pub mod check;
pub mod clients;
pub mod compose;
pub mod compute_mode;
pub mod config;
pub mod container;
pub mod counted;
pub mod ctl;
pub mod cuda;
pub mod daemon;
pub mod dbus;
pub mod gpu;
pub mod journal;
pub mod logging;
pub mod mps;
pub mod newcomers;
pub mod oom;
pub mod plan;
pub mod proc;
pub mod regular_file;
pub mod release;
pub mod runtime_directory;
pub mod service_manager;
#[cfg(test)]
#[path = "../tests/support/skip.rs"]
mod skip;
pub mod state;
pub mod supervisor;
pub mod systemd;
