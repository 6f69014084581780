//! A simulated host with NVIDIA GPUs, so that the daemon can be developed and tried where there is none.
//!
//! [`host`] makes the host's files from a [`board`], [`state`] is what its GPUs are at the moment (one small file per
//! value), the C ABI of NVML reads and writes that state, that of CUDA's driver makes a program a client, and [`mps`] has the control daemon, its servers and their
//! clients. `README.md` beside this crate says what is simulated, what is not, and which files inject faults.

pub mod board;
mod cuda_abi;
pub mod host;
pub mod mps;
mod nvml_abi;
pub mod smi;
pub mod state;
