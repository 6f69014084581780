//! A simulated host with NVIDIA GPUs, for developing and testing yunion-mps-daemon on a machine without any GPU.
//!
//! [`host`] makes the host's files from a [`board`]. [`state`] reads and writes the state of the GPUs, with one small file per
//! value. The simulated C ABI of NVML works on this state, and the simulated C ABI of CUDA makes a program a client of MPS.
//! [`mps`] has the control daemon, its servers and their clients. `README.md` of this crate says what is simulated, and which
//! files inject faults.

pub mod board;
mod cuda_abi;
pub mod host;
pub mod memory_limits;
pub mod mps;
mod nvml_abi;
pub mod smi;
pub mod state;
