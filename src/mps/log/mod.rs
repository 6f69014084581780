//! The control daemon's log: the service follows, parses and passes on its lines.
//!
//! A control daemon in the foreground and its servers write to one file. Only the log says which limits a server applies, when
//! a server is ready, and which faults a server met. [`follower`] reads the log and splits it into lines, [`meaning`] parses a
//! line, and [`journal`] passes it on. [`rotation`] limits the size of the file.

mod follower;
mod journal;
mod meaning;
mod rotation;

pub(crate) use follower::Follower;
pub(crate) use meaning::Line;
