//! Sets and reads the memory limit of a control group on a GPU, by NVML's functions `nvmlDeviceSetMemoryLimits_v1` and
//! `nvmlDeviceGetMemoryLimits_v1` of driver 615 (`nvml.h` of CUDA 13.4).
//!
//! Only the hard limit is set. The soft limit would reserve memory, and the ancestors of the control group would keep the
//! reservation after the control group is removed.

use std::ffi::{CStr, CString, c_char, c_uint, c_ulonglong, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_try};

use crate::function;

/// The limit that NVML reports for a control group without a limit.
pub const NO_LIMIT: u64 = u64::MAX;

/// In bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimit {
    pub limit: u64,
    pub reserved: u64,
    pub used: u64,
}

/// The struct `nvmlGetMemoryLimits_v1_t` of `nvml.h`. The struct `nvmlSetMemoryLimits_v1_t` has the same fields except for the
/// last one, so the same struct can be passed to both functions.
#[repr(C)]
struct Limits {
    group: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
    used: c_ulonglong,
}

/// The limit of the control group with this directory. If the control group has no limit of its own, NVML returns the limit of
/// the nearest ancestor.
///
/// # Errors
/// NVML returns an error, or lacks the function.
pub fn read(device: &Device<'_>, group: &Path) -> Result<MemoryLimit, NvmlError> {
    let group = directory(group)?;
    let mut found = Limits { group: group.as_ptr(), soft: 0, hard: NO_LIMIT, used: 0 };
    call(device, c"nvmlDeviceGetMemoryLimits_v1", &mut found)?;
    Ok(MemoryLimit { limit: found.hard, reserved: found.soft, used: found.used })
}

/// Sets the limit of the control group with this directory, in bytes. Only root may set a limit.
///
/// # Errors
/// NVML returns an error, or lacks the function.
pub fn set(device: &Device<'_>, group: &Path, limit: u64) -> Result<(), NvmlError> {
    let group = directory(group)?;
    let mut wanted = Limits { group: group.as_ptr(), soft: 0, hard: limit, used: 0 };
    call(device, c"nvmlDeviceSetMemoryLimits_v1", &mut wanted)
}

fn directory(group: &Path) -> Result<CString, NvmlError> {
    CString::new(group.as_os_str().as_bytes()).map_err(|_| NvmlError::InvalidArg)
}

fn call(device: &Device<'_>, name: &CStr, limits: &mut Limits) -> Result<(), NvmlError> {
    type Function = unsafe extern "C" fn(*mut c_void, *mut Limits) -> c_uint;
    // SAFETY: `Function` is the type of both functions in `nvml.h`. `Limits` is the struct of one function, and begins with the
    // struct of the other function. An `nvmlDevice_t` is a pointer. The struct and the text in it live until the function
    // returns, and NVML does not store pointers to them. The device lives as long as NVML.
    nvml_try(unsafe { function::<Function>(device, name)?(device.handle().cast(), limits) })
}
