//! NVIDIA's MPS control daemon: its process, its front end, its directories and its log.
//!
//! The exit status of the front end has no meaning: it is 0 for unknown commands and for bad values. So the service verifies
//! each setting by reading it back. It reads in the log which limits a server really applies.

mod cgroup_freezer;
pub(crate) mod control;
pub(crate) mod file_changes;
pub(crate) mod launch;
pub(crate) mod links_on_disk;
pub(crate) mod log;
pub(crate) mod process;
mod process_handle;
pub(crate) mod waiting;
