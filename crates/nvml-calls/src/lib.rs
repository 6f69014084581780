//! Functions of NVML that nvml-wrapper does not have yet, or calls with too little room for their answers. They are looked up by
//! their names in the library that nvml-wrapper has loaded. This crate has the only unsafe
//! code of the service.

#![allow(unsafe_code, reason = "the functions of a library in C")]

pub mod memory_limits;
pub mod processes;

use std::ffi::CStr;

use nvml_wrapper::Device;
use nvml_wrapper::error::NvmlError;

/// The function of NVML with this name.
///
/// # Safety
/// `nvml.h` declares it with the type `F`, and it is not called after NVML is closed.
unsafe fn function<F: Copy>(device: &Device<'_>, name: &CStr) -> Result<F, NvmlError> {
    // SAFETY: guaranteed by the caller.
    let found = unsafe { device.nvml().lib().__library.get::<F>(name.to_bytes_with_nul()) };
    found.map(|function| *function).map_err(|error| NvmlError::FailedToLoadSymbol(error.to_string()))
}
