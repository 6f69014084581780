//! Subcommands that put the service to the test with CUDA clients of their own.

pub(super) mod bench;
mod bench_report;
pub(super) mod cuda_client;
pub(super) mod probe;
