//! The decisions of the service, without input and output: which control daemon is taken over, started, served, ended or
//! left, who has which GPU, and which compute modes are put back.
//!
//! Something happens ([`CoreEvent`]), and [`Core::on`] answers with what is to be done ([`Act`]). The shell that carries the
//! acts out decides nothing, and each act comes back as an event. [`Core::due`] is the next moment when time alone is an event.
//! There is one core for the whole host, so that a decision about one control daemon sees the others.
//!
//! The crate has no standard library: files, processes, sockets, threads and clocks can't be named here. So histories of
//! hundreds of events are tried by the ten thousand (`tests/histories.rs`), in a world that lives in memory.
//!
//! | file | its job |
//! |---|---|
//! | `terms/` | the vocabulary: the names of devices and control daemons, a process, a GPU in the hands of a control daemon |
//! | `event.rs` | everything that happens |
//! | `act.rs` | everything that is to be done |
//! | `permit.rs` | the reasons for which work may be ended, and the only way to end it |
//! | `core.rs` | the whole host: orders, and who has which GPU |
//! | `lifecycle.rs` | one control daemon, from its order to its end |
//! | `access.rs` | who may have a slice now |
//! | `bindings.rs` | the slices to which control groups are bound |
//! | `kernel_limits.rs` | the memory limits that the kernel holds for bound control groups |
//! | `links/` | the links by which clients find a control daemon |
//! | `serve/` | serving: limits, servers, faults, the regular look |
//! | `tenants/` | the end of clients' work on request and for a budget |
//! | `register/` | who the clients are, with which slices |
//! | `rate_limit.rs` | how often a message is repeated |
//! | `mps.rs` | the words of control daemons |
//! | `modes.rs` | the compute modes that are put back |
//! | `driver.rs` | the driver in force, after looks at the host that succeed and fail |
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

pub use act::{Act, DaemonAct};
pub use configured::Configured;
pub use core::Core;
pub use driver::{DriverInForce, DriverNews};
pub use event::{
    ActOutcome, CoreEvent, Demand, HeldGpus, ModeOutcome, MpsSwitch, Order, RunUse, RunningDaemon, WhyFailed,
};
pub use lifecycle::{Goal, HEALTHY_AGAIN, next_pause, programs_wait};
pub use permit::{Cause, Permit};
pub use rate_limit::{Rate, RateLimit};
pub use terms::{DaemonId, GpuUuid, Tenure};

/// A moment, as the time since a moment that never changes. It does not go back.
pub type CoreTime = ::core::time::Duration;
