//! Functions that several modules of tests use: simulated hosts, buses, clients, containers and Snapshots.

pub(crate) mod bus;
pub(crate) mod bystander;
pub(crate) mod client;
pub(crate) mod container;
pub(crate) mod exposition;
#[path = "../../support/fetched.rs"]
pub(crate) mod fetched;
pub(crate) mod golden;
pub(crate) mod host;
pub(crate) mod listener;
pub(crate) mod mount;
pub(crate) mod neighbours;
pub(crate) mod node;
pub(crate) mod processes;
pub(crate) mod random;
pub(crate) mod schema;
pub(crate) mod screen;
pub(crate) mod service;
pub(crate) mod service_manager;
#[path = "../../support/skip.rs"]
pub(crate) mod skip;
pub(crate) mod slice;
pub(crate) mod snapshot;
pub(crate) mod topology;
#[path = "../../support/wait.rs"]
pub(crate) mod wait;
