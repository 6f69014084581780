//! The rotation of a log: its contents are copied to `<path>.1` in steps.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use common::directories;

pub(super) const CHUNK_BYTES: usize = 16 << 10;

/// The number of bytes that are copied before other tasks of the service have a turn.
const COPIED_AT_A_TIME: u64 = 1 << 20;

#[derive(Debug)]
pub(super) struct Rotation {
    copy: io::Result<File>,
    copied: u64,
}

impl Rotation {
    pub(super) fn begin(path: &Path) -> Self {
        Self { copy: place_of_copy(path), copied: 0 }
    }

    /// Copies the next bytes of `file`, which has `length` bytes. Returns true if all bytes are copied, or if copying has
    /// failed.
    pub(super) fn copy_on(&mut self, file: &File, length: u64) -> bool {
        let Ok(copy) = &mut self.copy else { return true };
        let end = length.min(self.copied + COPIED_AT_A_TIME);
        match copy_between(file, copy, self.copied, end) {
            Ok(()) => self.copied = end,
            Err(error) => self.copy = Err(error),
        }
        self.copy.is_err() || self.copied >= length
    }

    pub(super) fn result(self) -> io::Result<()> {
        self.copy.map(drop)
    }
}

/// Makes a new, empty `<path>.1`. The former copy is removed first, since a full disk may have enough space for only one copy.
fn place_of_copy(path: &Path) -> io::Result<File> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::other("the log is in no directory"));
    };
    let mut old = name.to_owned();
    old.push(".1");
    directories::replace(directory, Path::new(&old)).map_err(io::Error::other)
}

fn copy_between(from: &File, to: &mut File, begin: u64, end: u64) -> io::Result<()> {
    let mut chunk = [0; CHUNK_BYTES];
    let mut at = begin;
    while at < end {
        let count = from.read_at(&mut chunk, at)?;
        let wanted = count.min(usize::try_from(end - at).unwrap_or(usize::MAX));
        let Some(bytes) = chunk.get(..wanted).filter(|bytes| !bytes.is_empty()) else { break };
        to.write_all(bytes)?;
        at += wanted as u64;
    }
    Ok(())
}
