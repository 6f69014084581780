//! Tests of the whole.

// All of this is tests; clippy's own exception for tests sees only the functions that are marked as such.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    clippy::print_stdout
)]

mod attacks;
mod bad_input;
mod bench;
mod cdi;
mod chaos;
mod check;
mod clients;
mod ctl;
mod dbus;
mod doctor;
mod example;
mod faults;
mod golden;
mod matrix;
mod packaging;
mod probe;
mod real_control_daemons;
mod release;
mod reload;
mod service_manager;
mod serving;
mod skips;
mod soak;
mod structure;
mod supervision;
mod support;
mod terminal;
mod unit_file;
