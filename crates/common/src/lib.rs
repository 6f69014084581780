//! All code that the service and its tools share: the host, its configuration, the plan, the values that the service publishes,
//! and the access to these values over D-Bus. No code in this crate starts a process or sends a signal to a process. Each
//! module has a floor, and uses only modules on lower floors.
//!
//! | floor | module | its job |
//! |---|---|---|
//! | 7 | `check` | the plan of a configuration, or its mistakes; the changes that a reload would make |
//! | 6 | `bus` | the service on D-Bus: the dictionaries of its answers, and the questions to it |
//! | 5 | `published` | the Snapshot with all published values, and everything that is made from the Snapshot: container settings, CDI spec |
//! | 5 | `state_file` | the content of the state file |
//! | 4 | `membership` | the slices that a process has: by its control group, its mounts, the records of Cloudpods's host agent or its environment |
//! | 4 | `directories` | directories and files that no other user can have replaced |
//! | 3 | `plan` | from configuration and inventory to the plan; pure |
//! | 2 | `config` | the configuration files |
//! | 2 | `bindings` | the control groups that are bound to slices |
//! | 2 | `drained` | the slices that an administrator has taken out of use |
//! | 1 | `host` | the present GPUs, processes and systemd, and the differences between drivers |
//! | 0 | `arguments`, `counted`, `problem`, `text`, `whole_file` | the service's command line; "1 client", "2 clients"; a problem with its remedy and its place; text for a terminal; a file that is written as a whole |

#![forbid(unsafe_code)]
#![allow(missing_docs, clippy::missing_errors_doc, reason = "this workspace alone uses it")]

pub mod arguments;
pub mod bindings;
pub mod bus;
pub mod check;
pub mod config;
pub mod counted;
pub mod directories;
pub mod drained;
pub mod host;
pub mod membership;
pub mod plan;
pub mod problem;
pub mod published;
#[cfg(test)]
#[path = "../../../tests/support/skip.rs"]
mod skip;
pub mod state_file;
pub mod text;
pub mod whole_file;
