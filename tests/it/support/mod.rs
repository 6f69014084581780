//! The set-up that the tests share: simulated hosts, buses, clients and snapshots.

pub(crate) mod bus;
pub(crate) mod client;
pub(crate) mod host;
pub(crate) mod listener;
pub(crate) mod schema;
pub(crate) mod screen;
pub(crate) mod service;
#[path = "../../support/skip.rs"]
pub(crate) mod skip;
pub(crate) mod snapshot;
#[path = "../../support/wait.rs"]
pub(crate) mod wait;
