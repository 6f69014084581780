//! Tells when somebody changes a directory in which links are: a container that has it can take its link away.

use std::io;
use std::mem::MaybeUninit;
use std::path::Path;

use rustix::fs::inotify;
use rustix::io::Errno;

use super::readable::Readable;

/// A directory that is watched, and not what a symbolic link in its place leads to.
const CHANGES: inotify::WatchFlags = inotify::WatchFlags::CREATE
    .union(inotify::WatchFlags::DELETE)
    .union(inotify::WatchFlags::DELETE_SELF)
    .union(inotify::WatchFlags::MOVED_FROM)
    .union(inotify::WatchFlags::MOVED_TO)
    .union(inotify::WatchFlags::MOVE_SELF)
    .union(inotify::WatchFlags::ONLYDIR)
    .union(inotify::WatchFlags::DONT_FOLLOW);

/// The most events that are taken at a time. A container can cause them faster than they are read.
const EVENTS: usize = 1024;

/// A number of watched directories.
#[derive(Debug)]
pub(crate) struct LinkWatch(Readable);

impl LinkWatch {
    /// Watches no directory yet.
    pub(crate) fn new() -> io::Result<Self> {
        let queue = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC)?;
        Ok(Self(Readable::new(queue)?))
    }

    /// Watches this directory too. One that is watched already stays watched.
    pub(crate) fn add(&self, directory: &Path) -> io::Result<()> {
        inotify::add_watch(&self.0, directory, CHANGES)?;
        Ok(())
    }

    /// Resolves when one of the directories has changed.
    pub(crate) async fn touched(&self) -> io::Result<()> {
        let emptied = |queue: std::os::fd::BorrowedFd<'_>| {
            let mut buffer = [MaybeUninit::uninit(); 4096];
            let mut events = inotify::Reader::new(queue, &mut buffer);
            let mut any = false;
            for _ in 0..EVENTS {
                match events.next() {
                    Ok(_) => any = true,
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) if any => break,
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(())
        };
        self.0.until(emptied).await
    }
}
