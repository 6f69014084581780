//! NVIDIA's MPS control daemon: how it is started and stopped, asked and listened to.
//!
//! An exit status of its front end says nothing (it is 0 for unknown commands and bad values alike), so every setting
//! is verified by reading it back, and its log is the only exact account of what a server has in force.

pub mod control;
pub mod directories;
mod frozen;
mod hold;
pub mod identity;
pub mod launch;
pub mod log;
pub mod process;
mod readable;
mod turns;
