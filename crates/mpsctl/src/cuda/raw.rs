//! The driver's calls that have no safe form in the binding: launching a kernel, allocating memory with plain
//! cuMemAlloc, and asking about a GPU without a context. The binding's safe allocations come from a pool, which
//! allocates large pieces and so hides where a limit is. Only this module contains unsafe code.
#![expect(
    unsafe_code,
    reason = "a kernel can't be launched in any other way; each block says why it is sound"
)]

use std::sync::Arc;

use cudarc::driver::sys::{CUdevice_attribute, CUdeviceptr};
use cudarc::driver::{
    CudaContext, CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg, result,
};

use super::THREADS;

/// The size of the kernel's results: one `f32` for each thread of a block.
pub(super) const RESULTS_SIZE: usize = THREADS as usize * size_of::<f32>();

/// Memory of a GPU. Nobody reads its contents.
#[derive(Debug)]
pub(super) struct Block {
    context: Arc<CudaContext>,
    address: CUdeviceptr,
    size: usize,
}

impl Block {
    pub(super) fn new(context: &Arc<CudaContext>, size: usize) -> Result<Self, DriverError> {
        context.bind_to_thread()?;
        // SAFETY: a context is bound to this thread. Nobody reads the memory.
        let address = unsafe { result::malloc_sync(size) }?;
        Ok(Self { context: Arc::clone(context), address, size })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let free = || {
            self.context.bind_to_thread()?;
            // SAFETY: the address belongs to this block, only this code frees it, and its context is alive and bound.
            // No kernel still uses it, since cuMemFree waits for launched kernels.
            unsafe { result::free_sync(self.address) }
        };
        self.context.record_err(free());
    }
}

/// The number of multiprocessors of the GPU with this ordinal.
pub(super) fn multiprocessors(ordinal: i32) -> Result<i32, DriverError> {
    let device = result::device::get(ordinal)?;
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    // SAFETY: the driver returned the device in the line above.
    unsafe { result::device::get_attribute(device, attribute) }
}

/// Launches `multiply_add` of `multiply_add.ptx`.
pub(super) fn launch(
    stream: &CudaStream,
    multiply_add: &CudaFunction,
    results: &Block,
    blocks: u32,
    rounds: u32,
) -> Result<(), DriverError> {
    if results.size < RESULTS_SIZE {
        return Err(DriverError(cudarc::driver::sys::CUresult::CUDA_ERROR_INVALID_VALUE));
    }
    let shape = LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
    let mut arguments = stream.launch_builder(multiply_add);
    arguments.arg(&results.address).arg(&rounds);
    // SAFETY: the kernel is the only one in this binary, and its parameters are a u64 address and a u32, as passed
    // here. Each thread writes four bytes at four times its index in the block. The index is below THREADS for any
    // number of blocks, so all writes are within the first RESULTS_SIZE bytes, and the check above ensures that the
    // block has them. The kernel reads no memory and ends after `rounds` rounds. The block outlives the kernel, since
    // dropping it waits for the kernel.
    unsafe { arguments.launch(shape) }.map(|_| ())
}
