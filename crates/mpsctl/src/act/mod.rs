//! Subcommands that change something.

pub(super) mod apply;
pub(super) mod bind;
pub(super) mod drain;
pub(super) mod run;
pub(super) mod terminate;
