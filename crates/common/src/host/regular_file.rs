//! Reads a file that other users may have replaced. The function accepts only a regular file of limited size, and never blocks.

use std::fs::{self, File, FileType};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{OFlags, PROC_SUPER_MAGIC, fstatfs};

#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    #[error("can't be read: {0}")]
    Failed(#[from] io::Error),
    #[error("is {0}, not a regular file")]
    NotRegular(&'static str),
    #[error("is larger than {0} bytes")]
    TooLarge(u64),
}

/// Reads the whole file. Fails if the file has more than `limit` bytes.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>, Unreadable> {
    // The file type is checked before the file is opened, since opening a device may change its state.
    check(fs::metadata(path)?.file_type())?;
    // With NONBLOCK, a FIFO that has replaced the file after the check does not block.
    let file = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path)?;
    check(file.metadata()?.file_type())?;
    // Some files under /proc block a reader. /proc/kmsg gives each line to one reader only, so other readers would miss the
    // line.
    if fstatfs(&file).map_err(io::Error::from)?.f_type == PROC_SUPER_MAGIC {
        return Err(Unreadable::NotRegular("a file of /proc"));
    }
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).is_ok_and(|length| length <= limit) {
        Ok(bytes)
    } else {
        Err(Unreadable::TooLarge(limit))
    }
}

fn check(kind: FileType) -> Result<(), Unreadable> {
    if kind.is_file() {
        return Ok(());
    }
    Err(Unreadable::NotRegular(match kind {
        _ if kind.is_dir() => "a directory",
        _ if kind.is_fifo() => "a FIFO",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "12345").unwrap();
        assert_eq!(read(&file, 5).unwrap(), b"12345");
        assert!(matches!(read(&file, 4), Err(Unreadable::TooLarge(4))));
        let fifo = directory.path().join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(directory.path().join("socket")).unwrap();
        for (path, kind) in [
            (directory.path().to_owned(), "a directory"),
            (fifo, "a FIFO"),
            (directory.path().join("socket"), "a socket"),
            ("/dev/zero".into(), "a device"),
            ("/proc/self/status".into(), "a file of /proc"),
        ] {
            match read(&path, 5) {
                Err(Unreadable::NotRegular(found)) => assert_eq!(found, kind),
                other => panic!("{}: {other:?}", path.display()),
            }
        }
        assert!(matches!(read(&directory.path().join("none"), 5), Err(Unreadable::Failed(_))));
    }
}
