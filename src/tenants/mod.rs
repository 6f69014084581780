//! The tenants' processes on the GPUs: the list of them, the end of their GPU work, and the budgets of their slices.

pub(crate) mod budget;
pub(crate) mod budgets;
pub(crate) mod clients;
mod cut_back;
pub(crate) mod in_words;
mod members;
mod overuse;
pub(crate) mod terminate;
