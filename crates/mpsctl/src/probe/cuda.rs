//! A CUDA context, to see a GPU as a client does. Each measurement needs a new process, since the driver reads a slice's limits
//! from the environment once, and keeps them until the process ends.

use std::ffi::CStr;
use std::io::Write;
use std::sync::Arc;

use cudarc::driver::sys::{CUdevice_attribute, CUresult};
use cudarc::driver::{CudaContext, DriverError};

use super::raw;

const MIB: usize = 1 << 20;

/// The sizes of allocations in MiB. Memory is allocated in pieces of one size until an allocation fails, and after that in pieces
/// of the next smaller size.
const STEPS_MIB: [usize; 5] = [256, 64, 16, 4, 1];

#[derive(Debug, thiserror::Error)]
#[error("{what}: {text} ({code})")]
pub(crate) struct CudaError {
    what: &'static str,
    text: String,
    code: u32,
}

impl CudaError {
    fn new(what: &'static str, error: DriverError) -> Self {
        let text = error.error_string().map(CStr::to_string_lossy);
        let text = text.map_or_else(|_| format!("{:?}", error.0), std::borrow::Cow::into_owned);
        Self { what, text, code: error.0 as u32 }
    }
}

/// Makes the process end with a message if the library or a function in it is missing. In this case the Rust binding of CUDA
/// panics, so this function must be called before all other functions of this module.
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

/// The number of multiprocessors of the first GPU that this process sees, found without a context.
pub(crate) fn multiprocessors_without_context() -> Result<u32, CudaError> {
    let count = CudaContext::device_count().and_then(|_| raw::multiprocessors(0));
    count.map(number).map_err(|error| CudaError::new("finding the GPU", error))
}

/// A context on the first GPU that this process sees.
#[derive(Debug)]
pub(crate) struct GpuContext {
    context: Arc<CudaContext>,
}

impl GpuContext {
    /// Opens the context, which makes this process an MPS client.
    pub(crate) fn open() -> Result<Self, CudaError> {
        let failed = |error| CudaError::new("opening a CUDA context", error);
        let context = CudaContext::new(0).map_err(failed)?;
        Ok(Self { context })
    }

    /// The number of multiprocessors that this process may use.
    pub(crate) fn multiprocessors(&self) -> Result<u32, CudaError> {
        let count = self.context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        count.map(number).map_err(|error| CudaError::new("counting the multiprocessors", error))
    }

    /// The free memory for this process, and the total memory that it sees, in MiB.
    pub(crate) fn memory(&self) -> Result<(u64, u64), CudaError> {
        let memory = self.context.mem_get_info();
        let (free, total) = memory.map_err(|error| CudaError::new("asking for the free memory", error))?;
        Ok(((free / MIB) as u64, (total / MIB) as u64))
    }

    /// Allocates memory until an allocation fails or `most_mib` is reached, frees it, and returns the amount in MiB.
    pub(crate) fn allocate_up_to(&self, most_mib: u64) -> Result<u64, CudaError> {
        let failed = |error| CudaError::new("allocating memory", error);
        let most = usize::try_from(most_mib).unwrap_or(usize::MAX);
        let mut blocks = Vec::new();
        let mut got = 0;
        for step in STEPS_MIB {
            while got + step <= most {
                match raw::Block::new(&self.context, step * MIB) {
                    Ok(block) => blocks.push(block),
                    Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => break,
                    Err(error) => return Err(failed(error)),
                }
                got += step;
            }
        }
        drop(blocks);
        // `check_err` returns an error that was recorded while the memory was freed.
        self.context.check_err().map_err(failed)?;
        Ok(got as u64)
    }
}

fn number(count: i32) -> u32 {
    u32::try_from(count).unwrap_or_default()
}
