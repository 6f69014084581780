//! A CUDA context, for the subcommands of yunion-mpsctl that look at a GPU as a client does. It belongs into a process
//! of its own: what the driver hands out depends on that process's environment, and it can't be undone there.

mod raw;

use std::ffi::CStr;
use std::io::Write;
use std::sync::Arc;

use cudarc::driver::sys::{CUdevice_attribute, CUresult};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError};
use cudarc::nvrtc::Ptx;

/// The kernel's text. It is for the oldest GPUs that drivers still serve; every driver compiles it for the GPU it has.
const MULTIPLY_ADD: &str = include_str!("multiply_add.ptx");

/// The threads of one block of the kernel: four warps, one for each scheduler of a multiprocessor.
pub const THREADS: u32 = 128;

const MIB: usize = 1 << 20;

/// What is allocated at a time, first this much and then smaller pieces until the last one fits.
const STEPS_MIB: [usize; 5] = [256, 64, 16, 4, 1];

/// What the driver said.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {text} ({code})")]
pub struct Error {
    what: &'static str,
    text: String,
    code: u32,
}

impl Error {
    fn new(what: &'static str, error: DriverError) -> Self {
        let text = error.error_string().map(CStr::to_string_lossy);
        let text = text.map_or_else(|_| format!("{:?}", error.0), std::borrow::Cow::into_owned);
        Self { what, text, code: error.0 as u32 }
    }
}

/// The binding panics where the driver's library, or a function in it, isn't there. That is a message here, and the end
/// of this process: call it before anything else.
pub fn exit_with_message_on_panic(say: fn(&mut dyn Write, &str)) {
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

/// The multiprocessors of the first GPU that this process sees, without a context on it.
///
/// # Errors
/// What the driver said.
pub fn multiprocessors_without_context() -> Result<u32, Error> {
    let count = CudaContext::device_count().and_then(|_| raw::multiprocessors(0));
    count.map(number).map_err(|error| Error::new("finding the GPU", error))
}

/// A context on the first GPU that this process sees.
#[derive(Debug)]
pub struct Gpu {
    context: Arc<CudaContext>,
}

/// Memory in MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// What is left for this process.
    pub free_mib: u64,
    /// What the GPU has.
    pub total_mib: u64,
}

impl Gpu {
    /// Makes the context: from now on this process is a client.
    ///
    /// # Errors
    /// What the driver said.
    pub fn open() -> Result<Self, Error> {
        let failed = |error| Error::new("opening a CUDA context", error);
        let context = CudaContext::new(0).map_err(failed)?;
        // Waiting for a kernel must not cost the host a processor.
        context.set_blocking_synchronize().map_err(failed)?;
        Ok(Self { context })
    }

    /// The multiprocessors that this process may use.
    ///
    /// # Errors
    /// What the driver said.
    pub fn multiprocessors(&self) -> Result<u32, Error> {
        let count = self.context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        count.map(number).map_err(|error| Error::new("counting the multiprocessors", error))
    }

    /// The memory that this process sees.
    ///
    /// # Errors
    /// What the driver said.
    pub fn memory(&self) -> Result<Memory, Error> {
        let (free, total) =
            self.context.mem_get_info().map_err(|error| Error::new("asking for the free memory", error))?;
        Ok(Memory { free_mib: (free / MIB) as u64, total_mib: (total / MIB) as u64 })
    }

    /// Allocates until the driver refuses or `most_mib` is reached, gives everything back, and says how much it was.
    ///
    /// # Errors
    /// What the driver said, unless that memory ran out.
    pub fn allocate_up_to(&self, most_mib: u64) -> Result<u64, Error> {
        let failed = |error| Error::new("allocating memory", error);
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
        // What could not be given back shows here.
        self.context.check_err().map_err(failed)?;
        Ok(got as u64)
    }

    /// Loads the kernel.
    ///
    /// # Errors
    /// What the driver said.
    pub fn kernel(&self) -> Result<Kernel, Error> {
        let failed = |error| Error::new("loading the kernel", error);
        let module = self.context.load_module(Ptx::from_src(MULTIPLY_ADD)).map_err(failed)?;
        let function = module.load_function("multiply_add").map_err(failed)?;
        let results = raw::Block::new(&self.context, raw::RESULTS_SIZE).map_err(failed)?;
        Ok(Kernel { function, stream: self.context.default_stream(), results })
    }
}

/// A kernel that does nothing but multiply and add, and needs no memory to speak of.
#[derive(Debug)]
pub struct Kernel {
    function: CudaFunction,
    stream: Arc<CudaStream>,
    results: raw::Block,
}

impl Kernel {
    /// Runs it once, and waits for its end.
    ///
    /// # Errors
    /// What the driver said.
    pub fn run(&self, blocks: u32, rounds: u32) -> Result<(), Error> {
        raw::launch(&self.stream, &self.function, &self.results, blocks, rounds)
            .and_then(|()| self.stream.synchronize())
            .map_err(|error| Error::new("running a kernel", error))
    }
}

fn number(count: i32) -> u32 {
    u32::try_from(count).unwrap_or_default()
}
