//! Everything that the service publishes, as plain data: the Snapshot, and the data that follows from the Snapshot alone.

pub mod access;
pub mod cdi;
pub mod client;
pub mod container;
pub mod control_daemon;
pub mod events;
pub mod free;
pub mod request_error;
#[cfg(any(test, feature = "samples"))]
pub mod samples;
pub mod slices_of_one_gpu;
pub mod snapshot;
pub mod usage;
