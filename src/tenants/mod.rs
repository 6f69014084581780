//! The tenants' processes on the GPUs: the list of them, the end of their GPU work, and the budgets of their slices.

pub(crate) mod budgets;
pub(crate) mod clients;
pub(crate) mod describe;
pub(crate) mod ending;
pub(crate) mod limit_keeper;
mod members;
pub(crate) mod terminate;
