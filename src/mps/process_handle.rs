//! A handle of a process: a signal reaches this process or none, even if another process gets its PID. The handle is a pidfd,
//! which Linux has from 5.3 on.
//!
//! The 4.18 and 4.19 kernels of RHEL 8, Debian 10 and openEuler 20.03 have no pidfds. On these kernels the service polls the
//! process, and compares its identity before each signal. The signal reaches another process only if the PID is reused in the
//! microseconds after the comparison.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use mps_core::terms::ProcessId;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use common::host::identity;
use common::host::proc;
use common::host::readable::Readable;

const PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct ProcessHandle<Fd> {
    identity: ProcessId,
    /// None if the kernel has no pidfds.
    pidfd: Option<Fd>,
}

impl ProcessHandle<OwnedFd> {
    /// Opens a handle of the process that has this PID now. The error says that the process has ended (see [`unless_gone`]), or
    /// that the kernel refuses. For example, the service may have no file descriptors for the handle.
    pub(super) fn open(pid: u32) -> io::Result<Self> {
        let pidfd = match pidfd_open(number(pid)?, PidfdFlags::empty()) {
            Ok(pidfd) => Some(pidfd),
            Err(Errno::NOSYS) => None,
            Err(error) => return Err(error.into()),
        };
        // The pidfd is opened before the identity is read. Both then belong to the same process, unless the process has ended
        // meanwhile.
        Ok(Self { identity: identity::read(pid)?, pidfd })
    }

    pub(super) fn watched(self) -> io::Result<ProcessHandle<Readable>> {
        Ok(ProcessHandle { identity: self.identity, pidfd: self.pidfd.map(Readable::new).transpose()? })
    }

    /// A zombie does not count as alive.
    pub(super) fn is_alive(&self) -> bool {
        let Some(pidfd) = &self.pidfd else { return identity::runs(self.identity) };
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            match rustix::event::poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&now)) {
                Ok(readable) => return readable == 0,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }
}

impl ProcessHandle<Readable> {
    pub(super) async fn ended(&self) {
        let Some(pidfd) = &self.pidfd else {
            while identity::runs(self.identity) {
                tokio::time::sleep(PAUSE).await;
            }
            return;
        };
        // A pidfd becomes readable when its process ends, and stays readable. Waiting for the pidfd fails only while the tokio
        // runtime shuts down.
        if pidfd.until(|_| Ok(())).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl<Fd: std::os::fd::AsFd> ProcessHandle<Fd> {
    pub(super) fn identity(&self) -> ProcessId {
        self.identity
    }

    /// Signalling a process that has already ended is no error.
    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        let sent = match &self.pidfd {
            Some(pidfd) => pidfd_send_signal(pidfd, signal),
            None if identity::runs(self.identity) => kill_process(number(self.identity.pid)?, signal),
            None => Ok(()),
        };
        match sent {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Turns the error that there is no such process into None.
pub(super) fn unless_gone<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Err(error) if proc::is_gone(&error) => Ok(None),
        found => found.map(Some),
    }
}

fn number(pid: u32) -> io::Result<Pid> {
    let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
    number.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no such PID"))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn without_pidfd(pid: u32) -> ProcessHandle<OwnedFd> {
        ProcessHandle { identity: identity::read(pid).unwrap(), pidfd: None }
    }

    #[tokio::test]
    async fn a_process_is_held_with_and_without_a_pidfd() {
        for hold in [|pid| ProcessHandle::open(pid).unwrap(), without_pidfd] {
            let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
            let held = hold(child.id());
            assert!(held.is_alive());
            assert_eq!(held.identity(), identity::read(child.id()).unwrap());
            let watched = hold(child.id()).watched().unwrap();
            let waiting = tokio::spawn(async move { watched.ended().await });
            // Each yield lets the runtime poll the task and notice readable descriptors.
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            assert!(!waiting.is_finished(), "it lives");
            held.signal(Signal::TERM).unwrap();
            waiting.await.unwrap();
            assert!(!held.is_alive(), "a zombie");
            assert_eq!(std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap()), Some(15));
            assert!(!held.is_alive());
            held.signal(Signal::KILL).unwrap();
        }
    }

    #[test]
    fn an_ended_process_is_told_from_one_that_can_not_be_held() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let held = without_pidfd(child.id());
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(proc::is_gone(&ProcessHandle::open(child.id()).unwrap_err()));
        assert!(proc::is_gone(&identity::read(child.id()).unwrap_err()));
        assert!([0, u32::MAX].iter().all(|pid| proc::is_gone(&ProcessHandle::open(*pid).unwrap_err())));
        assert!(!held.is_alive());
        assert!(!proc::is_gone(&Errno::MFILE.into()));
    }

    /// Without a pidfd, the handle compares identities. So a signal does not reach a later process with the same PID.
    #[test]
    fn a_later_process_with_the_same_pid_is_left_alone() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let mut held = without_pidfd(child.id());
        held.identity.start_time -= 1;
        assert!(!held.is_alive());
        held.signal(Signal::KILL).unwrap();
        assert_eq!(child.try_wait().unwrap(), None);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
