//! Calls of the CUDA driver that need unsafe code: `cuMemAlloc`, and reading an attribute of a GPU without a context. The safe
//! allocations of the Rust binding come from a memory pool. The pool allocates large pieces, and so hides the exact memory
//! limit.
#![expect(
    unsafe_code,
    reason = "the Rust binding of CUDA has no safe form of these calls; a comment at each \
              unsafe block says why it is sound"
)]

use std::sync::Arc;

use cudarc::driver::sys::{CUdevice_attribute, CUdeviceptr};
use cudarc::driver::{CudaContext, DriverError, result};

/// A block of GPU memory. Its content is never read.
#[derive(Debug)]
pub(super) struct Block {
    context: Arc<CudaContext>,
    address: CUdeviceptr,
}

impl Block {
    pub(super) fn new(context: &Arc<CudaContext>, size: usize) -> Result<Self, DriverError> {
        context.bind_to_thread()?;
        // SAFETY: a context is bound to this thread. The new memory is never read.
        let address = unsafe { result::malloc_sync(size) }?;
        Ok(Self { context: Arc::clone(context), address })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let free = || {
            self.context.bind_to_thread()?;
            // SAFETY: only this block frees the address, and the context of the address is alive and bound to this thread.
            unsafe { result::free_sync(self.address) }
        };
        self.context.record_err(free());
    }
}

pub(super) fn multiprocessors(ordinal: i32) -> Result<i32, DriverError> {
    let device = result::device::get(ordinal)?;
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    // SAFETY: the driver has returned `device` above, so the device exists.
    unsafe { result::device::get_attribute(device, attribute) }
}
