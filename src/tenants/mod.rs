//! The tenants' processes on the GPUs: the list of them, and the end of their GPU work.

pub mod clients;
pub mod terminate;
