//! The configuration: whether it is right, and what a reload of it would change.

pub(super) mod difference;
pub(super) mod report;
