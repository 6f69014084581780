//! The kinds of messages about a control daemon that serves.

use crate::GpuUuid;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum News {
    Event,
    /// An administrator may have to act.
    Warning,
    GpuUnreachable {
        gpu: GpuUuid,
    },
    ServerFault {
        server: u32,
    },
    /// A server has ended by itself.
    ServerFailed {
        server: u32,
    },
}
