//! The tenants' processes on the GPUs: the list of them, and the end of their GPU work.

pub(crate) mod clients;
pub(crate) mod in_words;
pub(crate) mod terminate;
