//! Subcommands that show what the service publishes.

pub(super) mod clients;
pub(super) mod columns;
pub(super) mod env;
pub(super) mod exposition;
mod happened;
pub(super) mod health;
pub(super) mod list;
pub(super) mod metrics;
pub(super) mod status;
pub(super) mod table;
pub(super) mod time;
