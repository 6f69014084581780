//! Stories of serving: a simulated host behaves as the story says, and the service's real code works on the host. The stories
//! test messages, questions and their order, which the random histories in `histories.rs` do not test.

// clippy.toml allows calls such as `unwrap` only in functions with `#[test]`. Other functions of this file make such calls too.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, clippy::unnecessary_wraps)]

mod capacity;
mod check;
mod doors;
mod ends;
mod faults;
mod gpus;
mod limits;
mod servers;
mod start;

use core_world::story::{PID, SERVER, Setting, SimShell, Story, wanted_gpu};
