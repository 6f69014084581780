//! The identity of a process, as the kernel reports it.

use std::io;

use mps_core::terms::ProcessId;
use rustix::io::Errno;

use crate::host::proc;

/// The identity of the process that has this PID now. An error if no process has the PID. A zombie counts as ended: it does not
/// run any more, and its parent may never collect it.
pub fn read(pid: u32) -> io::Result<ProcessId> {
    let stat = proc::stat(pid)?;
    if stat.has_ended() {
        return Err(Errno::SRCH.into());
    }
    Ok(ProcessId { pid, start_time: stat.start_time })
}

/// Returns whether this process still runs. If the kernel does not say whether the process runs, for example because the service
/// has no file descriptors left, the process counts as running.
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
