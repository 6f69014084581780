//! The memory limits of control groups on a GPU, by NVML's functions `nvmlDeviceSetMemoryLimits_v1` and
//! `nvmlDeviceGetMemoryLimits_v1` of driver 615 (`nvml.h` of CUDA 13.4). nvml-wrapper does not have them yet, so they are
//! looked up by their names in the library that it has loaded. This crate has the only unsafe code of the service.

#![allow(unsafe_code, reason = "the functions of a library in C")]

use std::ffi::{CString, c_char, c_uint, c_ulonglong};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_try};

/// The hard limit of a control group without one.
pub const NO_HARD_LIMIT: u64 = u64::MAX;

/// The limits of a control group on a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimits {
    /// The memory that it can count on.
    pub soft: u64,
    /// The most memory that it can have.
    pub hard: u64,
}

/// The limits of a control group, and its use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoundLimits {
    /// Its limits.
    pub limits: MemoryLimits,
    /// The memory that counts against them, in bytes.
    pub used: u64,
}

/// `nvmlSetMemoryLimits_v1_t`.
#[repr(C)]
struct Wanted {
    group: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
}

/// `nvmlGetMemoryLimits_v1_t`.
#[repr(C)]
struct Found {
    group: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
    used: c_ulonglong,
}

impl MemoryLimits {
    /// Of the control group with this directory.
    ///
    /// # Errors
    /// NVML's, or that it lacks the function.
    pub fn read(device: &Device<'_>, group: &Path) -> Result<FoundLimits, NvmlError> {
        let group = directory(group)?;
        let mut found = Found { group: group.as_ptr(), soft: 0, hard: NO_HARD_LIMIT, used: 0 };
        call(device, c"nvmlDeviceGetMemoryLimits_v1", &mut found)?;
        let limits = Self { soft: found.soft, hard: found.hard };
        Ok(FoundLimits { limits, used: found.used })
    }

    /// Sets them for the control group with this directory. Only root may.
    ///
    /// # Errors
    /// NVML's, or that it lacks the function.
    pub fn set(self, device: &Device<'_>, group: &Path) -> Result<(), NvmlError> {
        let group = directory(group)?;
        let mut wanted = Wanted { group: group.as_ptr(), soft: self.soft, hard: self.hard };
        call(device, c"nvmlDeviceSetMemoryLimits_v1", &mut wanted)
    }
}

fn directory(group: &Path) -> Result<CString, NvmlError> {
    CString::new(group.as_os_str().as_bytes()).map_err(|_| NvmlError::InvalidArg)
}

/// Calls a function that takes a GPU and a struct of the type `T`.
fn call<T>(device: &Device<'_>, name: &std::ffi::CStr, argument: &mut T) -> Result<(), NvmlError> {
    type Function<T> = unsafe extern "C" fn(*mut std::ffi::c_void, *mut T) -> c_uint;
    let library = &device.nvml().lib().__library;
    // SAFETY: nvml.h declares both functions so, each with the struct that is passed here. A `nvmlDevice_t` is a pointer. The
    // struct and the text in it live until the function returns, and NVML keeps neither. The device lives as long as NVML.
    let code = unsafe {
        let function = library.get::<Function<T>>(name.to_bytes_with_nul());
        let function = function.map_err(|error| NvmlError::FailedToLoadSymbol(error.to_string()))?;
        function(device.handle().cast(), argument)
    };
    nvml_try(code)
}
