//! The decisions of the service, without input and output: which control daemon is taken over, started, served, ended or left to
//! the next service; which control daemon has which GPU; and which compute modes are restored.
//!
//! Each event ([`CoreEvent`]) goes to [`Core::on`], which answers with acts ([`Act`]). The code around the core, the shell,
//! carries the acts out and decides nothing; the result of each act is another event. [`Core::due`] is the next moment at which
//! something has to be done though no event comes. One core decides for the whole host, so that a decision about one control
//! daemon takes the others into account.
//!
//! The crate does not use the standard library, so it can't name files, processes, sockets, threads and clocks. Therefore tests
//! can try ten thousand histories of hundreds of events (`tests/histories.rs`) in a world that exists only in memory.
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
//! | `rate_limit.rs` | how often a message is repeated |
//! | `view.rs` | the view of a control daemon, which the service publishes |
//! | `mps.rs` | the words of control daemons |
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

/// A moment, as the time since a fixed moment. It never goes backwards.
pub type CoreTime = ::core::time::Duration;
