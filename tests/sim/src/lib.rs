//! A simulated host with NVIDIA GPUs, for developing and testing the daemon on a machine without any.
//!
//! [`host`] makes the host's files from a [`board`]. [`state`] is the present state of its GPUs, with one small file per
//! value. The C ABI of NVML reads and writes that state, the C ABI of CUDA's driver makes a program a client, and [`mps`] has
//! the control daemon, its servers and their clients. `README.md` of this crate says what is simulated, what is not, and
//! which files inject faults.

pub mod board;
mod cuda_abi;
pub mod host;
pub mod memory_limits;
pub mod mps;
mod nvml_abi;
pub mod smi;
pub mod state;
