//! A file descriptor that turns readable some day: a pidfd, an inotify queue.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Waits on the runtime's own poll, so that nothing wakes up before there is a reason to.
#[derive(Debug)]
pub(super) struct Readable(AsyncFd<OwnedFd>);

impl Readable {
    /// Registers the descriptor with the running runtime.
    pub(super) fn new(fd: OwnedFd) -> io::Result<Self> {
        // tokio deprecates this for types whose AsRawFd may lie and offers an unsafe function in its place. An
        // OwnedFd can't lie.
        #[expect(deprecated, reason = "sound for OwnedFd")]
        AsyncFd::with_interest(fd, Interest::READABLE).map(Self)
    }

    /// Waits until it is readable, and for as long as `read` finds nothing to read after all.
    pub(super) async fn until<T>(
        &self,
        mut read: impl FnMut(BorrowedFd<'_>) -> io::Result<T>,
    ) -> io::Result<T> {
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
