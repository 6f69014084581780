//! A CUDA context, which sees a GPU as a client does. The driver reads the limits of a slice from the environment only once in
//! each process, so each measurement needs a new process.

use std::ffi::CStr;
use std::io::Write;
use std::sync::Arc;

use cudarc::driver::sys::{CUdevice_attribute, CUresult};
use cudarc::driver::{CudaContext, DriverError};

use super::raw;

const MIB: usize = 1 << 20;

/// The sizes of allocations in MiB. Memory is allocated in blocks of one size until an allocation fails, and then in blocks of
/// the next smaller size.
const STEPS_MIB: [usize; 5] = [256, 64, 16, 4, 1];

fn failed(step: &'static str) -> impl Fn(DriverError) -> String {
    move |error| {
        let text = error.error_string().map(CStr::to_string_lossy);
        let text = text.map_or_else(|_| format!("{:?}", error.0), std::borrow::Cow::into_owned);
        format!("{step}: {text} ({code})", code = error.0 as u32)
    }
}

/// Makes this process print a message and exit if the CUDA library, or a function of the library, is missing. The Rust binding
/// of CUDA panics in this case. So this function must be called before all other functions of this module.
pub(crate) fn exit_with_message_on_panic(say: fn(&mut dyn Write, &str)) {
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload().downcast_ref::<String>().map(String::as_str);
        let text = text.unwrap_or("the CUDA driver can't be used");
        let text = if text.contains("Unable to dynamically load") {
            "libcuda.so.1 can't be loaded; is NVIDIA's driver installed, with its CUDA library?"
        } else {
            text
        };
        say(&mut std::io::stdout(), text);
        std::process::exit(1);
    }));
}

pub(super) fn multiprocessors_without_context() -> Result<u32, String> {
    let count = CudaContext::device_count().and_then(|_| raw::multiprocessors(0));
    count.map(number).map_err(failed("finding the GPU"))
}

/// Opens a context on the first GPU that this process sees. The context makes this process an MPS client.
pub(super) fn open() -> Result<Arc<CudaContext>, String> {
    CudaContext::new(0).map_err(failed("opening a CUDA context"))
}

/// The number of multiprocessors that this process may use within its limits.
pub(super) fn multiprocessors(context: &CudaContext) -> Result<u32, String> {
    let count = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    count.map(number).map_err(failed("counting the multiprocessors"))
}

/// The free memory and the total memory that this process sees, in MiB.
pub(super) fn memory(context: &CudaContext) -> Result<(u64, u64), String> {
    let (free, total) = context.mem_get_info().map_err(failed("asking for the free memory"))?;
    Ok(((free / MIB) as u64, (total / MIB) as u64))
}

/// Allocates memory until an allocation fails or `most_mib` is reached. Frees the memory, and returns its amount in MiB.
pub(super) fn allocate_up_to(context: &Arc<CudaContext>, most_mib: u64) -> Result<u64, String> {
    let failed = failed("allocating memory");
    let most = usize::try_from(most_mib).unwrap_or(usize::MAX);
    let mut blocks = Vec::new();
    let mut got = 0;
    for step in STEPS_MIB {
        while got + step <= most {
            match raw::Block::new(context, step * MIB) {
                Ok(block) => blocks.push(block),
                Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => break,
                Err(error) => return Err(failed(error)),
            }
            got += step;
        }
    }
    drop(blocks);
    // If freeing a block fails, the context records the error, and `check_err` returns the error.
    context.check_err().map_err(failed)?;
    Ok(got as u64)
}

fn number(count: i32) -> u32 {
    u32::try_from(count).unwrap_or_default()
}
