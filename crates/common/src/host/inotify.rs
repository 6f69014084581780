//! Finds out if another inotify instance can be made, and otherwise why not.

use std::fs::File;
use std::io;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;

use crate::problem::Problem;

pub fn new_instance() -> io::Result<std::os::fd::OwnedFd> {
    Ok(inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?)
}

/// True if this error means that the kernel or the process has used up a resource. Any other error is about one file.
pub fn is_shortage(errno: Errno) -> bool {
    matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOSPC | Errno::NOMEM)
}

/// True if the service can't open another file. The kernel returns `EMFILE` both for too many inotify instances and for too
/// many open files, and the answer of this function tells the two apart.
pub fn no_files() -> bool {
    File::open("/dev/null").is_err()
}

pub fn shortage(errno: Errno, no_files: bool) -> Problem {
    match errno {
        Errno::NOSPC => Problem::new(
            "this user has no inotify watch left (sysctl fs.inotify.max_user_watches)",
            "raise the limit: `sysctl fs.inotify.max_user_watches=1048576`, and the same setting in \
             /etc/sysctl.d",
        ),
        Errno::MFILE if !no_files => Problem::new(
            "this user has no inotify instance left (sysctl fs.inotify.max_user_instances)",
            "raise the limit: `sysctl fs.inotify.max_user_instances=8192`, and the same setting in \
             /etc/sysctl.d",
        ),
        Errno::MFILE => Problem::new(
            "this process can open no more files, so it has no inotify instance",
            "raise its limit of open files (LimitNOFILE=)",
        ),
        errno => {
            Problem::new(format!("inotify can't be used ({errno})"), "free memory, or raise fs.file-max")
        }
    }
}

/// The reason why the service's user can't watch another file. None if the user can.
pub fn none_left() -> Option<Problem> {
    let watched = new_instance().and_then(|queue| Ok(inotify::add_watch(&queue, "/", WatchFlags::CREATE)?));
    let errno = Errno::from_io_error(&watched.err()?)?;
    Some(shortage(errno, no_files()))
}
