//! The C ABI of the simulated CUDA driver, for programs that query their first GPU and allocate memory.

#![allow(unsafe_code, non_snake_case)]

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::mps::client::{self, Context};
use crate::state::{Gpu, Host, visible};

type Answer = Result<(), c_uint>;

const OUT_OF_MEMORY: c_uint = 2;
const INVALID_VALUE: c_uint = 1;
const NO_DEVICE: c_uint = 100;
const INVALID_DEVICE: c_uint = 101;
const INVALID_CONTEXT: c_uint = 201;

/// CUDA's numbers of two device attributes.
const MULTIPROCESSOR_COUNT: c_int = 16;
const MEMORY_POOLS_SUPPORTED: c_int = 115;

const MIB: u64 = 1024 * 1024;

struct Process {
    context: Option<Context>,
    /// The address of each allocated block, with the size of the block in bytes.
    memory: BTreeMap<u64, u64>,
    next_address: u64,
}

static PROCESS: Mutex<Process> =
    Mutex::new(Process { context: None, memory: BTreeMap::new(), next_address: 0x7f00_0000_0000 });

fn process() -> MutexGuard<'static, Process> {
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn finish(answer: Answer) -> c_uint {
    answer.err().unwrap_or(0)
}

/// Writes an answer to the memory that the caller of a CUDA function has given.
///
/// # Safety
/// `place` is null or may be written.
unsafe fn put<T>(place: *mut T, value: T) -> Answer {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the pointer is not null, and the caller guarantees that a pointer other than null may be written.
    unsafe { place.write(value) };
    Ok(())
}

/// Returns the GPUs that `CUDA_VISIBLE_DEVICES` makes visible, or CUDA's error.
fn gpus() -> Result<Vec<Gpu>, c_uint> {
    let host = Host::from_env().map_err(|_| NO_DEVICE)?;
    host.driver().ok_or(NO_DEVICE)?;
    let names = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let gpus: Vec<Gpu> = visible(&host.gpus(), names.as_deref()).into_iter().map_while(|gpu| gpu).collect();
    if gpus.is_empty() { Err(NO_DEVICE) } else { Ok(gpus) }
}

fn first_gpu() -> Result<Gpu, c_uint> {
    gpus()?.into_iter().next().ok_or(NO_DEVICE)
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> c_uint {
    finish(gpus().map(|_| ()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_uint {
    let number = gpus().and_then(|gpus| c_int::try_from(gpus.len()).map_err(|_| INVALID_VALUE));
    // SAFETY: CUDA's caller gives a valid pointer or null.
    finish(number.and_then(|number| unsafe { put(count, number) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_uint {
    let known = gpus().and_then(|gpus| {
        let there = usize::try_from(ordinal).is_ok_and(|ordinal| ordinal < gpus.len());
        if there { Ok(()) } else { Err(INVALID_DEVICE) }
    });
    // SAFETY: CUDA's caller gives a valid pointer or null.
    finish(known.and_then(|()| unsafe { put(device, ordinal) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) -> c_uint {
    let found = match attribute {
        MULTIPROCESSOR_COUNT => {
            let seen = process().context.as_ref().and_then(Context::first_device).map(|(sms, ..)| sms);
            let sms = seen.map_or_else(|| first_gpu().map(|gpu| gpu.sms()), Ok);
            sms.and_then(|sms| c_int::try_from(sms).map_err(|_| INVALID_VALUE))
        }
        MEMORY_POOLS_SUPPORTED => Ok(1),
        _ => Err(INVALID_VALUE),
    };
    // SAFETY: CUDA's caller gives a valid pointer or null.
    finish(found.and_then(|found| unsafe { put(value, found) }))
}

/// The handle of the only CUDA context that the simulated driver makes in a process.
const CONTEXT: *mut c_void = 0x10 as *mut c_void;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> c_uint {
    let open = || {
        if device != 0 {
            return Err(INVALID_DEVICE);
        }
        let host = Host::from_env().map_err(|_| NO_DEVICE)?;
        let mut process = process();
        if process.context.is_none() {
            process.context = Some(Context::open(&host)?);
        }
        // SAFETY: CUDA's caller gives a valid pointer or null.
        unsafe { put(context, CONTEXT) }
    };
    finish(open())
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_uint {
    let context = process().context.take();
    finish(context.map(drop).ok_or(INVALID_CONTEXT))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> c_uint {
    let current = if process().context.is_some() { CONTEXT } else { std::ptr::null_mut() };
    // SAFETY: CUDA's caller gives a valid pointer or null.
    finish(unsafe { put(context, current) })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(_context: *mut c_void) -> c_uint {
    0
}

impl Process {
    /// Returns the free and the total memory that the process sees, in bytes.
    fn free_and_total(&self) -> Result<(u64, u64), c_uint> {
        let (_, free, total) =
            self.context.as_ref().and_then(Context::first_device).ok_or(INVALID_CONTEXT)?;
        let held: u64 = self.memory.values().sum();
        Ok(((free * MIB).saturating_sub(held), total * MIB))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_uint {
    let size = |bytes: u64| usize::try_from(bytes).map_err(|_| INVALID_VALUE);
    let found = process().free_and_total();
    finish(found.and_then(|(now, all)| {
        // SAFETY: CUDA's caller gives valid pointers or null.
        unsafe { put(free, size(now)?).and(put(total, size(all)?)) }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, size: usize) -> c_uint {
    let mut process = process();
    let mut allocate = || {
        let (free, _) = process.free_and_total()?;
        let size = u64::try_from(size).map_err(|_| INVALID_VALUE)?;
        if size == 0 {
            return Err(INVALID_VALUE);
        }
        if size > free {
            return Err(OUT_OF_MEMORY);
        }
        let place = process.next_address;
        process.next_address += size.next_multiple_of(MIB);
        process.memory.insert(place, size);
        if let Some(context) = &process.context {
            context.allocated(size / MIB);
        }
        // SAFETY: CUDA's caller gives a valid pointer or null.
        unsafe { put(address, place) }
    };
    finish(allocate())
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> c_uint {
    let mut process = process();
    let freed = process.memory.remove(&address);
    if let (Some(size), Some(context)) = (freed, &process.context) {
        context.freed(size / MIB);
    }
    finish(freed.map(|_| ()).ok_or(INVALID_VALUE))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(error: c_uint, place: *mut *const c_char) -> c_uint {
    let text = std::ffi::CString::new(client::text(error)).unwrap_or_default();
    // The text is never freed, since the caller may use it for ever. Errors are rare, so these texts take little memory.
    finish(unsafe { put(place, text.into_raw().cast_const()) })
}
