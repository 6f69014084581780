//! The calls of the driver for which the binding has no safe form: to launch a kernel, to take memory by plain
//! cuMemAlloc (its safe allocations come from a pool, whose grain hides where a limit is), and to ask a GPU on which there
//! is no context. Nothing else in the product is unsafe.
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

/// What the kernel writes: one `f32` for each thread of a block.
pub(super) const RESULTS_SIZE: usize = THREADS as usize * size_of::<f32>();

/// Memory of a GPU, which nobody reads.
#[derive(Debug)]
pub(super) struct Block {
    context: Arc<CudaContext>,
    address: CUdeviceptr,
    size: usize,
}

impl Block {
    pub(super) fn new(context: &Arc<CudaContext>, size: usize) -> Result<Self, DriverError> {
        context.bind_to_thread()?;
        // SAFETY: a context is bound to this thread. What is in the memory is never read.
        let address = unsafe { result::malloc_sync(size) }?;
        Ok(Self { context: Arc::clone(context), address, size })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let free = || {
            self.context.bind_to_thread()?;
            // SAFETY: the address is this block's, it is freed here alone, and its context is alive and bound. No kernel
            // uses it any more: cuMemFree waits for those that were launched.
            unsafe { result::free_sync(self.address) }
        };
        self.context.record_err(free());
    }
}

/// The multiprocessors of the GPU of that ordinal.
pub(super) fn multiprocessors(ordinal: i32) -> Result<i32, DriverError> {
    let device = result::device::get(ordinal)?;
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    // SAFETY: the device was given by the driver, in the line above.
    unsafe { result::device::get_attribute(device, attribute) }
}

/// Launches `multiply_add` of multiply_add.ptx.
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
    // SAFETY: the kernel is the one text in this binary, and its parameters are a u64 address and a u32, as given here.
    // A thread writes four bytes at four times its index in the block, which is below THREADS whatever the number of
    // blocks: all of it lies in the first RESULTS_SIZE bytes, and the block has them by the check above. It reads no
    // memory and ends after `rounds` rounds. The block outlives the kernel, since its drop waits for it.
    unsafe { arguments.launch(shape) }.map(|_| ())
}
