//! Reads the new lines of a file to which other processes append.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::meaning::Line;
use super::rotation::{CHUNK_BYTES, Rotation};
use crate::mps::file_changes::{FileChanges, FileWatch, LOOK_PERIOD};

/// Longer lines of a log are cut, since a file without line ends must not fill the memory.
const LINE_MAX_BYTES: usize = 16 << 10;

/// The number of bytes at the end of a log in which the service searches for the reason of a control daemon's end.
const END_BYTES: u64 = 256 << 10;

/// The number of lines of a log that a task reads before other tasks have a turn. A tenant can make the control daemon write
/// thousands of log lines per second.
const LINES_AT_A_TIME: u32 = 256;

#[derive(Debug)]
pub(crate) struct Follower {
    path: PathBuf,
    /// The log is never opened again by its path, since another user may have put another file there.
    file: File,
    /// The offset up to which the file was read, in bytes.
    read: u64,
    lines: Lines,
    lines_since_pause: u32,
    rotation: Option<Rotation>,
    rotated: Option<io::Result<()>>,
    watch: FileWatch,
    watched: bool,
}

impl Follower {
    /// Follows `file`, which is or was at `path`, from `offset` in bytes. Only a file that is also open for writing can be
    /// rotated.
    pub(crate) fn new(file: File, path: &Path, offset: u64, changes: &FileChanges) -> Self {
        Self {
            path: path.to_owned(),
            file,
            read: offset,
            lines: Lines::default(),
            lines_since_pause: 0,
            rotation: None,
            rotated: None,
            watch: changes.watch(),
            watched: false,
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The offset after the last line that was returned, in bytes.
    pub(crate) fn offset(&self) -> u64 {
        self.read.saturating_sub(self.lines.held().len() as u64)
    }

    pub(crate) fn length(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Skips the lines that were not returned yet, except those in the last [`END_BYTES`] of the file.
    pub(crate) fn skip_to_end(&mut self) -> io::Result<()> {
        let end = self.length()?.saturating_sub(END_BYTES);
        if self.offset() < end {
            self.read = end;
            self.lines = Lines::default();
        }
        Ok(())
    }

    pub(crate) fn is_in_place(&self) -> bool {
        let (Ok(ours), Ok(there)) = (self.file.metadata(), std::fs::symlink_metadata(&self.path)) else {
            return false;
        };
        (ours.dev(), ours.ino()) == (there.dev(), there.ino())
    }

    /// The reason why log lines get lost: the file was removed, or its file system is full.
    pub(crate) fn trouble(&self) -> Option<&'static str> {
        if !self.is_in_place() {
            return Some(
                "another program removed this log, so the control daemon writes to the removed file until its \
                 next restart",
            );
        }
        // A ramfs reports 0 blocks for its size, and is never full.
        let is_full = |system: rustix::fs::StatVfs| system.f_blocks > 0 && system.f_bfree == 0;
        let full = rustix::fs::fstatvfs(&self.file).is_ok_and(is_full);
        full.then_some(
            "the file system of the log is full; until there is room, the control daemon and its servers \
             can't log",
        )
    }

    /// Begins a rotation if the file is longer than `max_bytes`: the contents of the file replace `<path>.1`. The file is
    /// copied and truncated, since the processes that write to it can't be made to use another file. The copy is made in steps
    /// while callers wait for lines. [`Follower::rotated`] reports its end.
    pub(crate) fn rotate(&mut self, max_bytes: u64) {
        let writable = || rustix::fs::fcntl_getfl(&self.file).is_ok_and(|flags| flags.contains(OFlags::RDWR));
        let due = || self.length().is_ok_and(|length| length > max_bytes) && writable();
        if self.rotation.is_none() && due() && self.is_in_place() {
            self.rotation = Some(Rotation::begin(&self.path));
        }
    }

    /// The result of a rotation that has finished since the last call. None if no rotation has finished. The inner error says
    /// why the contents could not be copied.
    pub(crate) fn rotated(&mut self) -> Option<io::Result<()>> {
        self.rotated.take()
    }

    fn copy_on(&mut self) -> io::Result<()> {
        let Some(rotation) = &mut self.rotation else { return Ok(()) };
        let length = self.file.metadata()?.len();
        let copied = rotation.copy_on(&self.file, length);
        // Truncating the file would destroy lines that were not read. So the file is truncated only if few bytes are unread,
        // and these bytes are read first.
        if !copied || length.saturating_sub(self.read) > CHUNK_BYTES as u64 {
            return Ok(());
        }
        while self.fill()? {}
        rustix::fs::ftruncate(&self.file, 0)?;
        self.read = 0;
        self.rotated = self.rotation.take().map(Rotation::result);
        Ok(())
    }

    fn fill(&mut self) -> io::Result<bool> {
        let mut chunk = [0; CHUNK_BYTES];
        let mut count = self.file.read_at(&mut chunk, self.read)?;
        if count == 0 && self.file.metadata()?.len() < self.read {
            // The file is shorter than before, since another program has truncated it. So the file is read from the beginning.
            (self.read, self.lines, self.rotation) = (0, Lines::default(), None);
            count = self.file.read_at(&mut chunk, 0)?;
        }
        self.read += count as u64;
        self.lines.add(chunk.get(..count).unwrap_or_default());
        Ok(count > 0)
    }

    fn try_next(&mut self) -> io::Result<Option<Line>> {
        loop {
            if let Some(line) = self.lines.next() {
                return Ok(Some(Line::parse(&line)));
            }
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    /// Returns None if the file has no further complete line. The call lets other tasks of the service run from time to time. A
    /// cancelled call loses no line.
    pub(crate) async fn next_there(&mut self) -> io::Result<Option<Line>> {
        if self.lines_since_pause >= LINES_AT_A_TIME {
            self.pause().await?;
        }
        self.lines_since_pause += 1;
        self.try_next()
    }

    async fn pause(&mut self) -> io::Result<()> {
        self.lines_since_pause = 0;
        self.copy_on()?;
        tokio::task::yield_now().await;
        Ok(())
    }

    /// Waits for the next line. A cancelled call loses no line.
    pub(crate) async fn next(&mut self) -> io::Result<Line> {
        loop {
            if let Some(line) = self.next_there().await? {
                return Ok(line);
            }
            if self.rotation.is_some() {
                self.pause().await?;
            } else {
                self.changed().await;
            }
        }
    }

    /// Waits until the file may have changed. A cancelled call loses no change.
    async fn changed(&mut self) {
        if self.watched {
            self.watch.changed().await;
            self.watched = false;
        } else {
            // The file may have changed before the watch began, so the caller reads the file once more.
            self.watched = self.watch.add_file(&self.file);
            if !self.watched {
                tokio::time::sleep(LOOK_PERIOD).await;
            }
        }
    }
}

#[derive(Debug, Default)]
struct Lines {
    bytes: Vec<u8>,
    handed_out: usize,
}

impl Lines {
    fn add(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.handed_out);
        self.handed_out = 0;
        self.bytes.extend(bytes);
    }

    /// The bytes that were read, and were not returned as a line yet.
    fn held(&self) -> &[u8] {
        self.bytes.get(self.handed_out..).unwrap_or_default()
    }
}

impl Iterator for Lines {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        let held = self.held();
        let end = held.iter().take(LINE_MAX_BYTES).position(|byte| *byte == b'\n');
        let end = end.map(|end| end + 1).or((held.len() >= LINE_MAX_BYTES).then_some(LINE_MAX_BYTES))?;
        let line = String::from_utf8_lossy(held.get(..end)?).trim_end().to_owned();
        self.handed_out += end;
        Some(line)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::meaning::Writer;
    use super::*;

    fn open(path: &Path) -> File {
        File::options().read(true).write(true).open(path).unwrap()
    }

    #[tokio::test]
    async fn follows_appends_cut_lines_and_truncation() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.log");
        std::fs::write(&path, "old\n[d t Control 7] first\n").unwrap();
        let mut follower = Follower::new(open(&path), &path, 4, &FileChanges::default());
        let mut writer = File::options().append(true).open(&path).unwrap();
        assert_eq!(follower.next().await.unwrap().text, "first");
        assert_eq!(follower.try_next().unwrap(), None);

        writer.write_all(b"[d t Server 8] half").unwrap();
        assert_eq!(follower.try_next().unwrap(), None);
        let (line, ()) = tokio::join!(follower.next(), async {
            tokio::task::yield_now().await;
            writer.write_all(b" and half\n").unwrap();
        });
        let line = line.unwrap();
        assert_eq!((line.writer, line.text.as_str()), (Some(Writer::Server(8)), "half and half"));

        writer.set_len(0).unwrap();
        let (line, ()) = tokio::join!(follower.next(), async {
            tokio::task::yield_now().await;
            writer.write_all(b"again\n").unwrap();
        });
        assert_eq!(line.unwrap().text, "again");
    }

    #[tokio::test]
    async fn rotation_keeps_one_old_file_and_loses_no_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.log");
        std::fs::write(&path, "").unwrap();
        let mut writer = File::options().append(true).open(&path).unwrap();
        let mut follower = Follower::new(open(&path), &path, 0, &FileChanges::default());
        for round in 0..3 {
            let line = format!("line of round {round}");
            writer.write_all(format!("{line}\n").as_bytes()).unwrap();
            follower.rotate(10);
            assert_eq!(follower.next().await.unwrap().text, line);
            let kept = loop {
                assert_eq!(follower.next_there().await.unwrap(), None);
                follower.pause().await.unwrap();
                if let Some(kept) = follower.rotated() {
                    break kept;
                }
            };
            kept.unwrap();
            writer.write_all(b"after\n").unwrap();
            assert_eq!(follower.next().await.unwrap().text, "after");
            let old = std::fs::read_to_string(directory.path().join("control.log.1")).unwrap();
            assert!(old.ends_with(&format!("{line}\n")), "{old}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "after\n");
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
        assert!(follower.is_in_place());
        std::fs::remove_file(&path).unwrap();
        assert!(!follower.is_in_place());
        follower.rotate(0);
        assert!(follower.rotation.is_none());
    }

    /// During the copy, another user replaces the log by a link to another file. That file must not change.
    #[tokio::test]
    async fn rotation_follows_no_link_that_takes_the_place_of_the_file() {
        for _ in 0..5 {
            let directory = tempfile::tempdir().unwrap();
            let [path, elsewhere] = ["control.log", "elsewhere"].map(|name| directory.path().join(name));
            let line = format!("{}\n", "x".repeat(1000));
            std::fs::write(&path, line.repeat(16 << 10)).unwrap();
            std::fs::write(&elsewhere, "not a log\n").unwrap();
            let length = path.metadata().unwrap().len();
            let mut follower = Follower::new(open(&path), &path, length, &FileChanges::default());
            follower.rotate(1);
            follower.pause().await.unwrap();
            assert!(follower.rotated().is_none(), "it is copied in steps");
            std::fs::remove_file(&path).unwrap();
            std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
            while follower.rotated().is_none() {
                follower.pause().await.unwrap();
            }
            assert_eq!(std::fs::read_to_string(&elsewhere).unwrap(), "not a log\n");
            assert_eq!(follower.length().unwrap(), 0);
            assert_eq!(directory.path().join("control.log.1").metadata().unwrap().len(), length);
        }
    }

    #[tokio::test]
    async fn a_burst_is_read_and_kept_in_steps() {
        const LINES: usize = 100_000;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.log");
        std::fs::write(&path, "[d t Server 8] some words of a line\n".repeat(LINES)).unwrap();
        let mut follower = Follower::new(open(&path), &path, 0, &FileChanges::default());
        let turns = std::rc::Rc::new(std::cell::Cell::new(0));
        let counting = std::rc::Rc::clone(&turns);
        let others = tokio::task::LocalSet::new();
        others.spawn_local(async move {
            loop {
                counting.set(counting.get() + 1);
                tokio::task::yield_now().await;
            }
        });
        others
            .run_until(async {
                follower.rotate(1);
                for _ in 0..LINES {
                    assert_eq!(follower.next().await.unwrap().text, "some words of a line");
                    assert!(
                        follower.lines.bytes.capacity() <= 4 * CHUNK_BYTES,
                        "{}",
                        follower.lines.bytes.capacity()
                    );
                }
                while follower.rotated().is_none() {
                    follower.pause().await.unwrap();
                }
            })
            .await;
        assert!(turns.get() >= LINES / LINES_AT_A_TIME as usize, "{} turns", turns.get());
        assert_eq!((follower.offset(), follower.length().unwrap()), (0, 0));
    }

    #[tokio::test]
    async fn an_endless_line_is_cut() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.log");
        std::fs::write(&path, vec![b'x'; 10 * LINE_MAX_BYTES]).unwrap();
        let mut follower = Follower::new(open(&path), &path, 0, &FileChanges::default());
        let mut lines = 0;
        while let Some(line) = follower.try_next().unwrap() {
            assert!(line.text.len() <= LINE_MAX_BYTES);
            lines += 1;
        }
        assert_eq!(lines, 10);
    }
}
