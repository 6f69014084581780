//! Everything that the service tells others, as plain data: the Snapshot, and what is made from it alone.

pub(crate) mod cdi;
pub(crate) mod compose;
pub(crate) mod container;
pub(crate) mod one_slice;
pub(crate) mod snapshot;
