//! Calls of the driver for which the Rust binding of CUDA has no safe form: allocating memory with cuMemAlloc, and asking about a
//! GPU without a context. The safe allocations of the Rust binding come from a memory pool, which allocates large pieces and so
//! hides the exact memory limit. Only this module contains unsafe code.
#![expect(
    unsafe_code,
    reason = "the binding has no safe form of these calls; each block says why it is sound"
)]

use std::sync::Arc;

use cudarc::driver::sys::{CUdevice_attribute, CUdeviceptr};
use cudarc::driver::{CudaContext, DriverError, result};

/// A block of memory of a GPU. The content of the block is never read.
#[derive(Debug)]
pub(super) struct Block {
    context: Arc<CudaContext>,
    address: CUdeviceptr,
}

impl Block {
    pub(super) fn new(context: &Arc<CudaContext>, size: usize) -> Result<Self, DriverError> {
        context.bind_to_thread()?;
        // SAFETY: a context is bound to this thread. The memory is never read.
        let address = unsafe { result::malloc_sync(size) }?;
        Ok(Self { context: Arc::clone(context), address })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let free = || {
            self.context.bind_to_thread()?;
            // SAFETY: the address belongs to this block, only this code frees it, and its context is alive and bound.
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
