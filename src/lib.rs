//! yunion-mps-daemon serves NVIDIA GPUs through MPS and exposes their slices as virtual devices on D-Bus.
//!
//! Data flows in one direction only:
//!
//! ```text
//! host.conf, host_local.conf, host_container_device.yml         host: NVML, /sys, pci.ids
//!                  |                                                     |
//!               config::Settings                                host::inventory::Inventory
//!                  \________________  plan::plan()  (pure)  _____________/
//!                                          |
//!                    Plan: control daemons, their GPUs, slices and limits
//!                                          |
//!                                 mps_core (pure): which act comes next
//!                                          |
//!    state file <-> supervisor: compute mode, start, limits, health, stop   (one per control daemon)
//!                                          |
//!              compose -> common::published::Snapshot (plain data, a generation number)
//!                                          |
//!                      D-Bus objects and signals, the unit's status line, CDI spec
//! ```
//!
//! The crate `common` has the configuration, the host and the plan, and everything else that yunion-mpsctl needs too. The crate
//! `mps_core` makes the decisions, and can't use any code that acts on the host. Each module has a floor, and uses only modules
//! on lower floors. `tests/it/structure.rs` checks this rule in all crates, and a second rule: names such as `zbus`,
//! `nvml_wrapper` or `/proc/` occur only in the few files that the test lists for each name.
//!
//! | floor | module | its job |
//! |---|---|---|
//! | 6 | `daemon` | the service: its loop, and the requests that it carries out |
//! | 5 | `dbus` | shows the Snapshot on the bus and passes requests on; decides nothing |
//! | 4 | `compose` | makes the Snapshot from the plan and the state of supervisors and tenants |
//! | 3 | `tenants` | the clients: the list of them, the end of their GPU work, and the budgets of their slices |
//! | 2 | `supervisor` | carries out the acts about a control daemon; compute modes, the state file |
//! | 1 | `mps` | one control daemon: its process, front end, log and links; no other module starts or signals one |
//! | 1 | `register` | the clients: looks at them, and remembers for all other modules what is known about them |
//! | 0 | `message` | the messages with an id |

#![forbid(unsafe_code)]

mod compose;
mod daemon;
mod dbus;
mod message;
mod mps;
mod register;
#[cfg(test)]
#[path = "../tests/support/skip.rs"]
#[allow(dead_code, reason = "the unit tests need only a part of this module")]
mod skip;
mod supervisor;
mod tenants;

// The library exports only what the program and the tests use, so that the compiler finds unused code. The program uses this
// function:
pub use daemon::program::main as run_daemon;
// The tests of the bus use these types:
pub use dbus::{BusConnection, Reply, Request, WantedBinding};
