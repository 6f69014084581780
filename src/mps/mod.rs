//! NVIDIA's MPS control daemon: its process, its front end, its directories and its log.
//!
//! The front end exits with 0 even after an unknown command or a bad value. So the service reads each setting back. Only the
//! log says which limits a server really applies.

mod cgroup_freezer;
pub(crate) mod control;
pub(crate) mod file_changes;
pub(crate) mod launch;
pub(crate) mod links_on_disk;
pub(crate) mod log;
pub(crate) mod process;
mod process_handle;
pub(crate) mod waiting;
