//! The clients of tenants: the list of them, the end of their GPU work, and the budgets of their slices.

pub(crate) mod budgets;
pub(crate) mod clients;
pub(crate) mod describe;
pub(crate) mod ending_shell;
pub(crate) mod kernel_limit_keeper;
mod slice_members;
pub(crate) mod terminate;
