//! The configuration: its mistakes, and the changes that a reload of it would make.

pub(super) mod difference;
pub(super) mod report;
