//! The kinds of messages about a control daemon that serves.

use crate::GpuUuid;

/// The kind of a message about a control daemon or one of its GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    /// An ordinary event.
    Event,
    /// An administrator may have to act.
    Warning,
    /// NVML can't reach a GPU.
    GpuUnreachable {
        /// The UUID of the GPU.
        gpu: GpuUuid,
    },
    /// A server has met a fatal GPU error.
    ServerFault {
        /// The server's PID.
        server: u32,
    },
    /// A server has ended by itself.
    ServerFailed {
        /// The server's PID.
        server: u32,
    },
}
