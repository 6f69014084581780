//! Tests of the whole service on simulated hosts.

// `clippy.toml` allows `unwrap` and the like only in functions marked as tests. Other functions of this program call them too.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    clippy::print_stdout
)]
// These lints ask for code that would make tests harder to read, or that the D-Bus interface does not allow.
#![allow(
    clippy::assigning_clones,
    clippy::float_cmp,
    clippy::items_after_statements,
    clippy::needless_for_each,
    clippy::struct_excessive_bools,
    clippy::unused_self
)]

mod access;
mod arm64;
mod attacks;
mod bad_input;
mod bindings;
mod budgets;
mod cdi;
mod check;
mod clients;
mod cluster;
mod completion;
mod cpus;
mod ctl;
mod dbus;
mod dbus_page;
mod demo;
mod doctor;
mod doors;
mod drain;
mod example;
mod faults;
mod first_steps;
mod golden;
mod guests;
mod histories;
mod host_agent;
mod isolation;
mod journal;
mod json;
mod kernel_limits;
mod kubelet;
mod kubernetes;
mod make_bench;
mod matrix;
mod membership;
mod monitoring;
mod packaging;
mod pods;
mod probe;
mod real_control_daemons;
mod register;
mod release;
mod reload;
mod screens;
mod service_manager;
mod serving;
mod shutdown_report;
mod skips;
mod slices;
mod soak;
mod stops;
mod structure;
mod supervision;
mod support;
mod terminal;
mod top;
mod translations;
mod unit_file;
mod watch;
