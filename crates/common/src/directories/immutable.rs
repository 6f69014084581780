//! The immutable flag of a directory, which `chattr +i` sets. In an immutable directory no process can make, remove or rename a
//! file. No process can remove the directory or change its mode. Only a process with `CAP_LINUX_IMMUTABLE`, which root in a
//! container does not have, can remove the flag. Clients can still connect to sockets in an immutable directory.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{IFlags, Mode, OFlags};
use rustix::io::{Errno, Result};

/// Fails if the file system has no immutable flag.
pub fn is_set(directory: impl AsFd) -> Result<bool> {
    Ok(rustix::fs::ioctl_getflags(readable(directory)?)?.contains(IFlags::IMMUTABLE))
}

/// Sets or removes the immutable flag. Fails if the service lacks `CAP_LINUX_IMMUTABLE`, or if the file system has no immutable
/// flag.
pub fn set(directory: impl AsFd, immutable: bool) -> Result<()> {
    let directory = readable(directory)?;
    let before = rustix::fs::ioctl_getflags(&directory)?;
    let mut flags = before;
    flags.set(IFlags::IMMUTABLE, immutable);
    if flags == before { Ok(()) } else { rustix::fs::ioctl_setflags(&directory, flags) }
}

/// Makes a change in a directory of the service. If the immutable flag prevents the change, removes the flag and tries again.
pub fn change<T>(directory: impl AsFd, change: impl Fn() -> Result<T>) -> Result<T> {
    match change() {
        Err(Errno::PERM) if set(directory, false).is_ok() => change(),
        done => done,
    }
}

/// The kernel reads and sets the flags of a file only through a descriptor that is open for reading, and not through an
/// `O_PATH` descriptor.
fn readable(directory: impl AsFd) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(directory, ".", flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::skip::skip;

    #[test]
    fn nobody_changes_a_directory_with_the_flag_but_us() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("kept");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("control"), "").unwrap();
        let directory = fs::File::open(&path).unwrap();
        if let Err(error) = set(&directory, true) {
            assert_ne!(is_set(&directory), Ok(true));
            return skip("the immutable flag", &error.to_string());
        }
        assert_eq!(set(&directory, true), Ok(()), "it has it already");
        let refused = [
            fs::remove_file(path.join("control")),
            fs::create_dir(path.join("new")),
            fs::rename(&path, base.path().join("moved")),
            fs::set_permissions(&path, fs::metadata(&path).unwrap().permissions()),
        ];
        for (row, refused) in refused.into_iter().enumerate() {
            assert_eq!(refused.unwrap_err().raw_os_error(), Some(Errno::PERM.raw_os_error()), "{row}");
        }
        let make = || rustix::fs::mkdirat(&directory, "new", Mode::from_raw_mode(0o755));
        assert_eq!((change(&directory, make), is_set(&directory)), (Ok(()), Ok(false)));
        assert_eq!(change(&directory, make), Err(Errno::EXIST));
        let never = || Err::<(), _>(Errno::PERM);
        assert_eq!(change(&directory, never), Err(Errno::PERM), "something else is in the way");
    }
}
