//! Reads the identity of a process from the kernel.

use std::io;

use mps_core::terms::ProcessId;
use rustix::io::Errno;

use crate::host::proc;

/// The identity of the process that has this PID now. Fails if no process has the PID. A zombie counts as ended, since it does
/// not run any more and its parent may never collect its exit status.
pub fn read(pid: u32) -> io::Result<ProcessId> {
    let stat = proc::stat(pid)?;
    if stat.has_ended() {
        return Err(Errno::SRCH.into());
    }
    Ok(ProcessId { pid, start_time: stat.start_time })
}

/// True if this process still runs. Also true if the kernel does not give an answer, for example because the service has no
/// free file descriptor.
pub fn runs(process: ProcessId) -> bool {
    match read(process.pid) {
        Ok(now) => now == process,
        Err(error) => !proc::is_gone(&error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_identity_is_stable() {
        let pid = std::process::id();
        assert_eq!(read(pid).unwrap(), read(pid).unwrap());
        assert!(read(pid).unwrap().start_time > 0);
        assert!(runs(read(pid).unwrap()));
    }

    #[test]
    fn a_zombie_runs_no_more() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let identity = read(child.id()).unwrap();
        assert!(runs(identity));
        assert!(!runs(ProcessId { start_time: identity.start_time - 1, ..identity }));
        drop(child.stdin.take());
        while !proc::stat(child.id()).unwrap().has_ended() {
            std::thread::yield_now();
        }
        assert!(proc::is_gone(&read(child.id()).unwrap_err()) && !runs(identity));
        child.wait().unwrap();
        assert!(!runs(identity));
    }
}
