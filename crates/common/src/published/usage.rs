//! The use of GPUs and of their slices.

/// All that the clients of a slice or of a GPU have together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InUse {
    /// The number of the clients, each a process.
    pub clients: u32,
    /// The memory that they hold, in MiB. None if the driver does not report it for one of them.
    pub memory_mib: Option<u64>,
}

impl InUse {
    /// Of clients that hold this memory each.
    pub fn sum(clients: impl IntoIterator<Item = Option<u64>>) -> Self {
        let nothing = Self { clients: 0, memory_mib: Some(0) };
        clients.into_iter().fold(nothing, |all, memory_mib| Self {
            clients: all.clients.saturating_add(1),
            memory_mib: all.memory_mib.and_then(|memory| memory.checked_add(memory_mib?)),
        })
    }
}

/// The clients of a slice, all together.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SliceUse {
    /// The number of its clients, each a process.
    pub clients: u32,
    /// The memory that they hold, in MiB. None if the driver does not report it for one of them.
    pub memory_mib: Option<u64>,
    /// In which way that is more than the slice's budget, in words; empty if it is not.
    pub overuse: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GpuUse {
    /// Of each slice. Empty before the first look.
    pub slices: Vec<SliceUse>,
    /// Of all MPS clients on the GPU, also those without a known slice. None before the first look.
    pub all: Option<InUse>,
}
