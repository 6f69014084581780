//! Waits until a file descriptor becomes readable, such as a pidfd or an inotify queue.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A descriptor that tokio watches with epoll, so that no task has to check the descriptor again and again.
#[derive(Debug)]
pub struct Readable(AsyncFd<OwnedFd>);

impl Readable {
    /// Registers the descriptor with the caller's tokio runtime.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        // tokio deprecates this function, since the `AsRawFd` of a type may return another descriptor each time, and offers an
        // unsafe function instead. An `OwnedFd` always returns the same descriptor.
        #[expect(deprecated, reason = "sound for OwnedFd")]
        AsyncFd::with_interest(fd, Interest::READABLE).map(Self)
    }

    /// Waits until `read` succeeds. If there is no data yet, `read` has to return `WouldBlock`.
    pub async fn until<T>(&self, mut read: impl FnMut(BorrowedFd<'_>) -> io::Result<T>) -> io::Result<T> {
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|inner| read(inner.as_fd())) {
                Ok(result) => return result,
                Err(_would_block) => {}
            }
        }
    }
}

impl AsFd for Readable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
