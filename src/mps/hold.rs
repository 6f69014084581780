//! A process that is held: whoever has its PID, signals reach it or nobody. By a pidfd, which Linux has from 5.3 on; the
//! 4.18 and 4.19 of RHEL 8, Debian 10 and openEuler 20.03 have none. There it is looked at again and again, and its
//! identity is compared before each signal, which leaves another process that got its PID microseconds to be hit.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use super::identity::Identity;
use super::readable::Readable;
use crate::host::proc;

/// How often a process without a pidfd is looked at.
const PAUSE: Duration = Duration::from_millis(100);

/// A hold on a process.
#[derive(Debug)]
pub(super) struct Hold<Fd> {
    identity: Identity,
    /// None where the kernel has none.
    pidfd: Option<Fd>,
}

impl Hold<OwnedFd> {
    /// Holds the process that has this PID now.
    ///
    /// # Errors
    /// It has ended, as [`is_gone`] tells, or what the kernel says: it may be out of file descriptors.
    pub(super) fn of(pid: u32) -> io::Result<Self> {
        let pidfd = match pidfd_open(number(pid)?, PidfdFlags::empty()) {
            Ok(pidfd) => Some(pidfd),
            Err(Errno::NOSYS) => None,
            Err(error) => return Err(error.into()),
        };
        // In this order: the identity read last is that of the process the pidfd holds, unless that has gone.
        Ok(Self { identity: Identity::of(pid)?, pidfd })
    }

    /// The same, to be waited for on the running runtime.
    pub(super) fn watched(self) -> io::Result<Hold<Readable>> {
        Ok(Hold { identity: self.identity, pidfd: self.pidfd.map(Readable::new).transpose()? })
    }

    /// Whether it lives; a zombie doesn't.
    pub(super) fn is_alive(&self) -> bool {
        let Some(pidfd) = &self.pidfd else { return is_alive(self.identity) };
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

impl Hold<Readable> {
    /// Waits until it has ended.
    pub(super) async fn ended(&self) {
        let Some(pidfd) = &self.pidfd else {
            while is_alive(self.identity) {
                tokio::time::sleep(PAUSE).await;
            }
            return;
        };
        // A pidfd turns readable when its process ends, and stays so. Only a runtime on its way down says otherwise.
        if pidfd.until(|_| Ok(())).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl<Fd: std::os::fd::AsFd> Hold<Fd> {
    /// Which process this is.
    pub(super) fn identity(&self) -> Identity {
        self.identity
    }

    /// Sends it a signal. A process that has ended already is no error.
    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        let sent = match &self.pidfd {
            Some(pidfd) => pidfd_send_signal(pidfd, signal),
            None if is_alive(self.identity) => kill_process(number(self.identity.pid)?, signal),
            None => Ok(()),
        };
        match sent {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Whether this is how it is told that there is no such process, and not that there may be one.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

fn is_alive(identity: Identity) -> bool {
    match proc::stat(identity.pid) {
        Ok(now) => now.start_time == identity.start_time && !now.has_ended(),
        // Out of file descriptors, for one: nothing is known, and it was there.
        Err(error) => !is_gone(&error),
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

    /// A hold as an old kernel lets one have it.
    fn without_pidfd(pid: u32) -> Hold<OwnedFd> {
        Hold { identity: Identity::of(pid).unwrap(), pidfd: None }
    }

    #[tokio::test]
    async fn a_process_is_held_with_and_without_a_pidfd() {
        for hold in [|pid| Hold::of(pid).unwrap(), without_pidfd] {
            let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
            let held = hold(child.id());
            assert!(held.is_alive());
            assert_eq!(held.identity(), Identity::of(child.id()).unwrap());
            let watched = hold(child.id()).watched().unwrap();
            let waiting = tokio::spawn(async move { watched.ended().await });
            // With each turn it is asked again, and the runtime looks for what has become readable.
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
    fn who_has_gone_is_told_from_who_can_not_be_held() {
        let mut child = Command::new("true").spawn().unwrap();
        let held = without_pidfd(child.id());
        child.wait().unwrap();
        assert!(is_gone(&Hold::of(child.id()).unwrap_err()));
        assert!(is_gone(&Identity::of(child.id()).unwrap_err()));
        assert!([0, u32::MAX].iter().all(|pid| is_gone(&Hold::of(*pid).unwrap_err())));
        assert!(!held.is_alive());
        assert!(!is_gone(&Errno::MFILE.into()));
    }

    /// Without a pidfd, who got the PID later is not taken for it.
    #[test]
    fn another_process_of_that_pid_is_left_alone() {
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
