//! Stories of serving: a simulated host behaves as the story says, and the service's real code works on the host. The stories
//! test messages, questions and their order, which no promise of the histories covers.

// clippy.toml allows `unwrap` and the like only in functions marked as tests. The helper functions of this file are not
// marked as tests, and call `unwrap` too.
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
