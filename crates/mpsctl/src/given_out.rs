//! The slices that `--free` has given out in the last minute. A command is a client only once it has started CUDA, so the
//! service does not count it before, and the next `--free` would take the same slice.
//!
//! Each user has a file of their own, in a directory that belongs to them alone: nobody else can write there, or keep the
//! lock.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::OFlags;
use tokio::time::{Instant, sleep};

/// The time in which a command becomes a client, as a rule.
const REMEMBERED: Duration = Duration::from_secs(60);

/// Of more slices in one minute, the earlier ones are forgotten.
const MOST: usize = 1024;

/// The file never has more.
const MAX_BYTES: u64 = 128 * 1024;

/// The time that another command may have the lock. It asks the service meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

const FILE: &str = "yunion-mpsctl-given-out";

/// The record, which no other command of this user can have at the same time.
pub(super) struct GivenOut {
    file: File,
    /// When, in seconds since 1970, and which slice; the oldest first.
    slices: Vec<(u64, String)>,
}

impl GivenOut {
    /// Opens the record and waits for its lock. The error says why there is none.
    pub(super) async fn open() -> Result<Self, String> {
        Self::open_in(&own_directory()?, PATIENCE).await
    }

    async fn open_in(directory: &Path, patience: Duration) -> Result<Self, String> {
        let path = directory.join(FILE);
        let failed = |error: std::io::Error| format!("{}: {error}", path.display());
        let found =
            fs::symlink_metadata(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() || found.mode() & 0o022 != 0
        {
            return Err(format!(
                "{} is not a directory that this user alone can write to",
                directory.display()
            ));
        }
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(flags);
        let file = options.open(&path).map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(format!("{} is no regular file", path.display()));
        }
        lock(&file, patience).await.map_err(|why| format!("{}: {why}", path.display()))?;
        let mut bytes = Vec::new();
        (&file).take(MAX_BYTES).read_to_end(&mut bytes).map_err(failed)?;
        let slices = remembered(&String::from_utf8_lossy(&bytes), now());
        Ok(Self { file, slices })
    }

    /// The slices, each as many times as it was given out.
    pub(super) fn slices(&self) -> Vec<&str> {
        self.slices.iter().map(|(_, slice)| slice.as_str()).collect()
    }

    /// Writes down that a slice is given out, and lets the next command have the record.
    pub(super) fn add(mut self, slice: &str) -> Result<(), String> {
        self.slices.push((now(), slice.to_owned()));
        let surplus = self.slices.len().saturating_sub(MOST);
        let lines = self.slices.iter().skip(surplus).map(|(at, slice)| format!("{at} {slice}\n"));
        let text: String = lines.collect();
        // Nobody reads it before the lock is free, and half a line after a crash is no line.
        let written = self.file.set_len(0).and_then(|()| self.file.rewind());
        written
            .and_then(|()| self.file.write_all(text.as_bytes()))
            .map_err(|error| format!("{FILE}: {error}"))
    }
}

/// The directory that belongs to this user alone.
fn own_directory() -> Result<PathBuf, String> {
    if rustix::process::geteuid().is_root() {
        let directory = std::env::var_os("RUNTIME_DIRECTORY");
        return Ok(directory.map_or_else(|| "/run/yunion-mps-daemon".into(), PathBuf::from));
    }
    let directory = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    directory
        .filter(|directory| directory.is_absolute())
        .ok_or_else(|| "XDG_RUNTIME_DIR is not set".to_owned())
}

async fn lock(file: &File, patience: Duration) -> Result<(), String> {
    let deadline = Instant::now() + patience;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(error.to_string()),
            Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                return Err(format!("another command has held it for {} s", patience.as_secs()));
            }
            Err(TryLockError::WouldBlock) => sleep(PAUSE).await,
        }
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The lines that count at this time. A time to come is of a clock that was wrong.
fn remembered(text: &str, now: u64) -> Vec<(u64, String)> {
    let read = |line: &str| {
        let (at, slice) = line.split_once(' ')?;
        let at: u64 = at.parse().ok()?;
        (at <= now && now - at < REMEMBERED.as_secs()).then(|| (at, slice.to_owned()))
    };
    text.lines().filter_map(read).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_minute_counts_and_nothing_else_does() {
        let text = "940 old\n941 00:06.0-0\n1000 00:06.0-1\n1001 to-come\nx 00:06.0-2\n1000\n\n";
        let slices: Vec<String> = remembered(text, 1000).into_iter().map(|(_, slice)| slice).collect();
        assert_eq!(slices, ["00:06.0-0", "00:06.0-1"]);
    }

    #[tokio::test]
    async fn one_command_at_a_time_has_the_record() {
        let directory = tempfile::tempdir().unwrap();
        let open = || GivenOut::open_in(directory.path(), Duration::ZERO);
        let first = open().await.unwrap();
        let second = open().await.err().unwrap();
        assert!(second.ends_with("another command has held it for 0 s"), "{second}");
        first.add("00:06.0-1").unwrap();
        let second = open().await.unwrap();
        assert_eq!(second.slices(), ["00:06.0-1"]);
        second.add("00:06.0-1").unwrap();
        let mut last = open().await.unwrap();
        assert_eq!(last.slices(), ["00:06.0-1"; 2]);
        last.slices = vec![(now(), "x".repeat(16)); 5000];
        last.add("00:06.0-3").unwrap();
        let bounded = open().await.unwrap();
        assert_eq!((bounded.slices().len(), *bounded.slices().last().unwrap()), (MOST, "00:06.0-3"));
        let file = directory.path().join(FILE).metadata().unwrap();
        assert_eq!(file.mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn a_directory_of_strangers_is_not_trusted() {
        let base = tempfile::tempdir().unwrap();
        let refused =
            async |directory: &Path| GivenOut::open_in(directory, Duration::ZERO).await.err().unwrap();
        fs::set_permissions(base.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(refused(base.path()).await.ends_with("is not a directory that this user alone can write to"));
        fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let own = base.path().join("own");
        fs::create_dir(&own).unwrap();
        symlink(&own, base.path().join("link")).unwrap();
        assert!(refused(&base.path().join("link")).await.contains("is not a directory"));
        assert!(refused(&base.path().join("missing")).await.contains("No such file"));
        symlink("/dev/null", own.join(FILE)).unwrap();
        assert!(refused(&own).await.contains(FILE));
    }
}
