//! The rotation of a log file, whose contents are copied to `<path>.1` in steps.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use common::directories;

/// The number of bytes per read of a log. At most this number of bytes and the beginning of a line are in memory.
pub(super) const CHUNK_BYTES: usize = 16 << 10;

/// The number of bytes of a log that the service copies before its other tasks have a turn.
const COPIED_AT_A_TIME: u64 = 1 << 20;

/// A rotation of a log that has begun and has not finished.
#[derive(Debug)]
pub(super) struct Rotation {
    /// The file `<path>.1` that gets the contents, or the error that prevents it.
    copy: io::Result<File>,
    copied: u64,
}

impl Rotation {
    /// Begins the rotation of the file at this path.
    pub(super) fn begin(path: &Path) -> Self {
        Self { copy: place_of_copy(path), copied: 0 }
    }

    /// Copies the next bytes of `file`, which has `length` bytes. Returns true if everything is copied, or if copying
    /// is not possible.
    pub(super) fn copy_on(&mut self, file: &File, length: u64) -> bool {
        let Ok(copy) = &mut self.copy else { return true };
        let end = length.min(self.copied + COPIED_AT_A_TIME);
        match copy_between(file, copy, self.copied, end) {
            Ok(()) => self.copied = end,
            Err(error) => self.copy = Err(error),
        }
        self.copy.is_err() || self.copied >= length
    }

    /// The result of the rotation: an error if the contents could not be copied.
    pub(super) fn result(self) -> io::Result<()> {
        self.copy.map(drop)
    }
}

/// Makes a new, empty `<path>.1`. The former copy is removed first, since a full disk may have enough space for only one
/// copy.
fn place_of_copy(path: &Path) -> io::Result<File> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::other("the log is in no directory"));
    };
    let mut old = name.to_owned();
    old.push(".1");
    directories::replace(directory, Path::new(&old)).map_err(io::Error::other)
}

/// Copies the bytes between two offsets, or as many of them as the file has.
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
