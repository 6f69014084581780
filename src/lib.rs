//! yunion-mps-daemon serves NVIDIA GPUs through MPS and exposes their slices as virtual devices on D-Bus.
//!
//! The way of the data, one direction only:
//!
//! ```text
//! host.conf, host_local.conf, host_container_device.yml         host: NVML, /sys, pci.ids
//!                  |                                                     |
//!               config::Settings                                host::inventory::Inventory
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
//! | 10 | `daemon` | the service |
//! | 9 | `ctl` | yunion-mpsctl, on the other side of the bus; `check` is `--check` of the service too |
//! | 8 | `dbus` | shows the Snapshot on the bus and passes requests on; decides nothing |
//! | 7 | `publish` | the Snapshot, and everything that is made from it: container settings, CDI spec |
//! | 6 | `tenants` | the clients: the list of them, the end of their GPU work, and the budgets of their slices |
//! | 5 | `supervisor` | one state machine per control daemon, compute modes, the state file |
//! | 4 | `mps` | one control daemon: its process, front end, log and directories; it alone starts and signals one |
//! | 4 | `membership` | the slices that a process has, by its mounts or its environment |
//! | 4 | `check`, `arguments` | the plan of a configuration, or its mistakes; the service's command line |
//! | 3 | `plan` | from configuration and inventory to the plan; pure |
//! | 2 | `config` | the configuration files |
//! | 1 | `host` | GPUs, processes and systemd as they are, and what differs by driver |
//! | 0 | `counted`, `cuda`, `message` | "1 client", "2 clients"; the CUDA driver for `probe` and `bench`; the messages with an id |

mod arguments;
mod check;
mod config;
mod counted;
mod ctl;
mod cuda;
mod daemon;
mod dbus;
mod host;
mod membership;
mod message;
mod mps;
mod plan;
mod publish;
mod reason;
#[cfg(test)]
#[path = "../tests/support/skip.rs"]
mod skip;
mod supervisor;
mod tenants;

// All that is used from outside the library, so that the compiler finds what nobody uses.
// The programs and their manual pages:
pub use arguments::command as daemon_command;
pub use ctl::{command as ctl_command, main as run_ctl};
pub use daemon::program::main as run_daemon;
// The tests of the bus and of systemd:
pub use dbus::{Bus, Reply, Request, RequestError};
pub use host::cpus::Cpus;
pub use host::gpu::{ComputeMode, Gpu, NvmlFacts, PciDevice, PcieLink};
pub use host::systemd::{move_to_scope, runs_us, why_stopping};
pub use membership::{KnownBy, MayCommand, Membership};
pub use plan::GpuPlan;
pub use publish::snapshot::{GpuView, Snapshot, State};
pub use supervisor::view::{ControlDaemonState, ControlDaemonView, Event};
pub use tenants::budgets::SliceUse;
pub use tenants::clients::ClientView;
