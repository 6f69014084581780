//! The identity of a process.

use std::io;

use mps_core::tenants::budget::MemberProcess;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::host::proc;

/// The identity of a process. PIDs are reused, but no two processes have the same PID and start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub pid: u32,
    /// The start time in clock ticks since boot (field 22 of /proc/PID/stat).
    pub start_time: u64,
}

impl Identity {
    /// The identity of the process that runs with this PID now. An error if there is none. A zombie does not run any more,
    /// and nobody may ever collect it.
    pub fn read(pid: u32) -> io::Result<Self> {
        let stat = proc::stat(pid)?;
        if stat.has_ended() {
            return Err(Errno::SRCH.into());
        }
        Ok(Self { pid, start_time: stat.start_time })
    }

    /// Whether this process still runs. If nothing can be learnt of it, for example because the service has no file
    /// descriptors left, it counts as running.
    pub fn runs(self) -> bool {
        match Self::read(self.pid) {
            Ok(now) => now == self,
            Err(error) => !proc::is_gone(&error),
        }
    }
}

impl MemberProcess for Identity {
    fn pid(self) -> u32 {
        self.pid
    }

    fn start_time(self) -> u64 {
        self.start_time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_identity_is_stable() {
        let pid = std::process::id();
        assert_eq!(Identity::read(pid).unwrap(), Identity::read(pid).unwrap());
        assert!(Identity::read(pid).unwrap().start_time > 0);
        assert!(Identity::read(pid).unwrap().runs());
    }

    #[test]
    fn a_zombie_runs_no_more() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let identity = Identity::read(child.id()).unwrap();
        assert!(identity.runs());
        assert!(!Identity { start_time: identity.start_time - 1, ..identity }.runs());
        drop(child.stdin.take());
        while !proc::stat(child.id()).unwrap().has_ended() {
            std::thread::yield_now();
        }
        assert!(proc::is_gone(&Identity::read(child.id()).unwrap_err()) && !identity.runs());
        child.wait().unwrap();
        assert!(!identity.runs());
    }
}
