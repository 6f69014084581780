//! From bytes to lines.

/// The length at which a line is cut. A file that is no log must not fill the memory.
pub(super) const LINE_MAX_BYTES: usize = 16 << 10;

/// The number of bytes per read. At most this and the beginning of a line are held in memory.
pub(super) const CHUNK_BYTES: usize = 16 << 10;

/// Bytes that were read. They are handed out as lines.
#[derive(Debug, Default)]
pub(super) struct Lines {
    pub(super) bytes: Vec<u8>,
    handed_out: usize,
}

impl Lines {
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.handed_out);
        self.handed_out = 0;
        self.bytes.extend(bytes);
    }

    /// The bytes that are not handed out yet.
    pub(super) fn held(&self) -> &[u8] {
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
