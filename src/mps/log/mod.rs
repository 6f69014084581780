//! The control daemon's log: it is followed while it is written, parsed, and passed on.
//!
//! A control daemon in the foreground and its servers write to one file. Only this file says which limits a server
//! applies, that a server is ready, and which faults it met. [`follower`] reads its bytes and splits them,
//! [`meaning`] parses a line, and [`journal`] passes it on. [`rotation`] keeps the file short.

mod follower;
mod journal;
mod meaning;
mod rotation;

pub(crate) use follower::Follower;
pub(crate) use meaning::Line;
