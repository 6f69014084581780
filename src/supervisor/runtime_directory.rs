//! Locks the runtime directory, so that only one service uses it at a time.
//!
//! Without the lock, a second service that is started by hand would take over the control daemons. When it stopped, it would
//! end them with their clients.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use rustix::fs::{FlockOperation, OFlags, fcntl_lock};
use rustix::io::Errno;
use rustix::process::{Flock, FlockType, fcntl_getlk};

/// The lock file is empty, since the kernel itself reports the PID of the lock's owner.
const FILE: &str = "lock";

/// The longest wait for a former service to end, and the pause between two attempts to get the lock. A killed process may need
/// seconds to free its memory.
const PATIENCE: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(50);

/// The runtime directory, locked for as long as this value exists. The kernel releases the lock when the process ends, in any
/// way. Child processes do not inherit the lock.
#[derive(Debug)]
pub(crate) struct RuntimeDirectory {
    path: PathBuf,
    /// The kernel releases the lock when the process closes any descriptor of the lock file. So the lock file must not be
    /// opened anywhere else.
    lock: File,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Unavailable {
    #[error(
        "another yunion-mps-daemon{} uses {}, and only one can run at a time; stop the other one first \
         (systemctl stop yunion-mps-daemon), or use --check, which may run beside the service",
        .pid.map(|pid| format!(" (PID {pid})")).unwrap_or_default(), .directory.display()
    )]
    InUse {
        directory: PathBuf,
        /// The PID of the process that has the lock. None if that process has just ended, or is in another PID namespace.
        pid: Option<i32>,
    },
    #[error("{}: {error}", .file.display())]
    Failed { file: PathBuf, error: io::Error },
}

impl RuntimeDirectory {
    /// Like [`RuntimeDirectory::take`], but waits for another service that still has the lock. A service that was just killed
    /// has the lock until its process has ended.
    pub(crate) async fn take_soon(path: &Path) -> Result<Self, Unavailable> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match Self::take(path) {
                Err(Unavailable::InUse { .. }) if Instant::now() < deadline => sleep(PAUSE).await,
                taken => return taken,
            }
        }
    }

    pub(crate) fn take(path: &Path) -> Result<Self, Unavailable> {
        let failed = |file: &Path| {
            let file = file.to_owned();
            move |error: io::Error| Unavailable::Failed { file, error }
        };
        fs::create_dir_all(path).map_err(failed(path))?;
        let file = path.join(FILE);
        // Only root may open the lock file, since any process that can open the file can also lock it.
        let lock = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
            .open(&file)
            .map_err(failed(&file))?;
        match fcntl_lock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Self { path: path.to_owned(), lock }),
            Err(Errno::AGAIN | Errno::ACCESS) => {
                Err(Unavailable::InUse { directory: path.to_owned(), pid: holder(&lock) })
            }
            Err(error) => Err(failed(&file)(error.into())),
        }
    }

    pub(crate) fn keep(&mut self) -> Result<(), Unavailable> {
        let there = fs::symlink_metadata(self.path.join(FILE)).ok();
        let ours = self.lock.metadata().ok();
        let inode = |metadata: &fs::Metadata| (metadata.dev(), metadata.ino());
        if there.as_ref().map(inode) != ours.as_ref().map(inode) {
            *self = Self::take(&self.path)?;
        }
        Ok(())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

fn holder(lock: &File) -> Option<i32> {
    let asked = fcntl_getlk(lock, &Flock::from(FlockType::WriteLock)).ok()??;
    asked.pid.map(|pid| pid.as_raw_nonzero().get())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_removed_directory_is_taken_again() {
        let above = tempfile::tempdir().unwrap();
        let mut directory = RuntimeDirectory::take(&above.path().join("run")).unwrap();
        let inode = |directory: &RuntimeDirectory| directory.lock.metadata().unwrap().ino();
        let before = inode(&directory);
        directory.keep().unwrap();
        assert_eq!(inode(&directory), before);
        fs::remove_dir_all(directory.path()).unwrap();
        directory.keep().unwrap();
        let file = fs::metadata(directory.path().join(FILE)).unwrap();
        assert_eq!(file.ino(), inode(&directory));
        assert_eq!(file.permissions().mode() & 0o777, 0o600);
    }
}
