//! yunion-mps-daemon serves NVIDIA GPUs through MPS and exposes their slices as virtual devices on D-Bus.
//!
//! The way of the data, one direction only:
//!
//! ```text
//! host.conf, host_local.conf, host_container_device.yml         host: NVML, /sys, pci.ids
//!                  |                                                     |
//!               config::Settings                                host::gpu::Inventory
//!                  \________________  plan::plan()  (pure)  _____________/
//!                                          |
//!                    Plan: control daemons, their GPUs, slices and limits
//!                                          |
//!    state file <-> supervisor: compute mode, start, limits, health, stop   (one per control daemon)
//!                                          |
//!              publish::compose -> publish::Snapshot (plain data, a generation number)
//!                                          |
//!                      D-Bus objects and signals, the unit's status line, CDI spec
//! ```
//!
//! The modules stand on floors, and a module uses only modules below it. `tests/it/structure.rs` holds this rule, and the
//! one that says which module alone names a library or reads /proc.
//!
//! | floor | module | its job |
//! |---|---|---|
//! | 9 | `daemon`, `ctl` | the service's loop; yunion-mpsctl, on the other side of the bus |
//! | 8 | `dbus` | shows the Snapshot on the bus and passes requests on; decides nothing |
//! | 7 | `publish` | the Snapshot, and everything that is made from it: container settings, CDI spec |
//! | 6 | `tenants` | the clients: the list of them, and the end of their GPU work |
//! | 5 | `supervisor` | one state machine per control daemon, compute modes, the state file |
//! | 4 | `mps` | one control daemon: its process, front end, log and directories; it alone starts and signals one |
//! | 4 | `check`, `arguments` | `yunion-mps-daemon --check`, and the service's command line |
//! | 3 | `plan` | from configuration and inventory to the plan; pure |
//! | 2 | `config` | the configuration files |
//! | 1 | `host` | GPUs, processes and systemd as they are, and what differs by driver |
//! | 0 | `counted`, `cuda` | "1 client", "2 clients"; the CUDA driver for `probe` and `bench` |

pub mod arguments;
pub mod check;
pub mod config;
pub mod counted;
pub mod ctl;
pub mod cuda;
pub mod daemon;
pub mod dbus;
pub mod host;
pub mod mps;
pub mod plan;
pub mod publish;
pub mod reason;
#[cfg(test)]
#[path = "../tests/support/skip.rs"]
mod skip;
pub mod supervisor;
pub mod tenants;
