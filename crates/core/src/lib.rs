//! The decisions of the service, without input and output: which control daemon is started, taken over, or ended; which control
//! daemon gets which GPU; and which compute modes are restored.
//!
//! An event ([`CoreEvent`]) goes to [`Core::on`], which returns acts ([`Act`]). The code outside this crate, called the shell,
//! carries out the acts. The shell decides nothing, and sends the result of each act back to the core as another event.
//! [`Core::due`] returns the next moment at which the shell must call the core even if no event comes. One core decides for the
//! whole host, so a decision about one control daemon can take all other control daemons into account.
//!
//! The crate does not use the standard library, so it can't open files, start processes or read a clock. Tests can therefore
//! run thousands of histories of events (`tests/histories.rs`) on a host that exists only in memory.
//!
//! | file | its job |
//! |---|---|
//! | `terms/` | the vocabulary: the names of devices and control daemons, a process, a GPU of a control daemon |
//! | `event.rs` | everything that happens |
//! | `act.rs` | everything that is to be done |
//! | `permit.rs` | the reasons for which GPU work may be ended, and the permits without which nothing is ended |
//! | `core.rs` | the whole host: the orders, and which control daemon has which GPU |
//! | `lifecycle.rs` | one control daemon, from its order to its end |
//! | `access.rs` | who may have a slice now |
//! | `bindings.rs` | the slices to which control groups are bound |
//! | `kernel_limits.rs` | the memory limits that the kernel holds for bound control groups |
//! | `links/` | the links through which clients find a control daemon |
//! | `serve/` | serving: limits, servers, faults, the health check |
//! | `tenants/` | the end of clients' work on request and for a budget |
//! | `register/` | who the clients are, with which slices |
//! | `rate_limit.rs` | how many log messages may be written in a period |
//! | `view.rs` | the view of a control daemon, which the service publishes |
//! | `mps.rs` | the answers of control daemons, and the lines in their logs |
//! | `modes.rs` | the compute modes that are put back |
//! | `driver.rs` | the driver in force, and how readings of the host change it |
//! | `configured.rs` | the GPUs that a configuration names |

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod access;
mod act;
pub mod bindings;
mod configured;
mod core;
mod driver;
mod event;
pub mod kernel_limits;
mod lifecycle;
pub mod links;
mod modes;
pub mod mps;
mod permit;
mod rate_limit;
pub mod register;
pub mod serve;
pub mod tenants;
pub mod terms;
pub mod view;

pub use act::{Act, DaemonAct};
pub use configured::Configured;
pub use core::Core;
pub use driver::DriverNews;
pub use event::{ActOutcome, CoreEvent, Demand, HeldGpus, ModeOutcome, MpsSwitch, Order, RunUse, WhyFailed};
pub use lifecycle::{Goal, HEALTHY_AGAIN, next_pause, programs_wait};
pub use permit::{Cause, Permit};
pub use rate_limit::RateLimit;
pub use terms::{DaemonId, GpuUuid, Tenure};

/// A point in time, as the time that has passed since a fixed moment. The value never decreases.
pub type CoreTime = ::core::time::Duration;
