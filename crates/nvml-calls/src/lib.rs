//! Functions of NVML that nvml-wrapper lacks, or that it calls with buffers that are too small. The functions are found by name
//! in the library that nvml-wrapper has loaded. The service has no other unsafe code.

#![allow(unsafe_code, reason = "this crate calls functions of NVML, which is a library in C")]

pub mod memory_limits;
pub mod processes;

use std::ffi::CStr;

use nvml_wrapper::Device;
use nvml_wrapper::error::NvmlError;

/// The function of NVML with this name.
///
/// # Safety
/// `nvml.h` must declare the function with the type `F`. The caller must not use the function after NVML is closed.
unsafe fn function<F: Copy>(device: &Device<'_>, name: &CStr) -> Result<F, NvmlError> {
    // SAFETY: the caller guarantees that `nvml.h` declares the function with this type.
    let found = unsafe { device.nvml().lib().__library.get::<F>(name.to_bytes_with_nul()) };
    found.map(|function| *function).map_err(|error| NvmlError::FailedToLoadSymbol(error.to_string()))
}
