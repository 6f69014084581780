//! The identity of a process.

use std::io;

use serde::{Deserialize, Serialize};

use crate::host::proc;

/// The identity of a process. PIDs are reused, but no two processes have the same PID and start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    /// The PID.
    pub pid: u32,
    /// The start time in clock ticks since boot (field 22 of /proc/PID/stat).
    pub start_time: u64,
}

impl Identity {
    /// The identity of the process that has this PID now. An error if there is none.
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        Ok(Self { pid, start_time: proc::stat(pid)?.start_time })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_identity_is_stable() {
        let pid = std::process::id();
        assert_eq!(Identity::of(pid).unwrap(), Identity::of(pid).unwrap());
        assert!(Identity::of(pid).unwrap().start_time > 0);
    }
}
