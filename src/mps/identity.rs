//! What a process is told apart by.

use std::io;

use serde::{Deserialize, Serialize};

use crate::host::proc;

/// Which process, beyond doubt: PIDs are used again, a PID and a start time are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The PID.
    pub pid: u32,
    /// When it started, in clock ticks since boot (field 22 of /proc/PID/stat).
    pub start_time: u64,
}

impl Identity {
    /// The identity of the process that has this PID now; an error when there is none.
    pub fn of(pid: u32) -> io::Result<Self> {
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
