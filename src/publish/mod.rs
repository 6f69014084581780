//! Everything that the service tells others, as plain data: the Snapshot, and what is made from it alone.

pub mod cdi;
pub mod compose;
pub mod container;
pub mod snapshot;
