//! Texts on a terminal that replace earlier texts, and messages on standard error.

use std::fmt::Write as _;
use std::io::{self, Write};

use common::counted::counted;
use common::text::printable;

/// The columns and rows of the terminal. A terminal that does not report its size counts as 80 columns and 24 rows.
pub(super) fn size() -> (u16, u16) {
    let size = rustix::termios::tcgetwinsize(rustix::stdio::stdout()).ok();
    let columns = size.map(|size| size.ws_col).filter(|columns| *columns > 0);
    (columns.unwrap_or(80), rows().unwrap_or(24))
}

pub(super) fn rows() -> Option<u16> {
    let size = rustix::termios::tcgetwinsize(rustix::stdio::stdout()).ok();
    size.map(|size| size.ws_row).filter(|rows| *rows > 0)
}

/// The first lines of a status, at most `rows`. If lines are omitted, the last line says how many.
pub(super) fn fitted(mut lines: Vec<String>, rows: usize) -> Vec<String> {
    if lines.len() > rows {
        let more = lines.len() - rows.saturating_sub(1);
        lines.truncate(rows.saturating_sub(1));
        lines.push(format!(
            "({lines} more; yunion-mpsctl status -o wide shows all)",
            lines = counted(more, "line")
        ));
    }
    lines
}

#[derive(Debug, Default)]
pub(super) struct Screen {
    size: (u16, u16),
    lines: Vec<String>,
}

impl Screen {
    /// Shows exactly these lines, and puts the cursor behind the last line. Unchanged lines are not written again, since a
    /// serial console needs a second for a whole screen.
    pub(super) fn draw(&mut self, lines: Vec<String>, out: &mut dyn Write) -> io::Result<()> {
        let size = size();
        // The terminal must not wrap lines. The terminal may count the columns of a text differently than this program, and a
        // wrapped line would move all lines below.
        let mut text = "\u{1b}[?7l".to_owned();
        if self.size != size {
            *self = Self { size, lines: Vec::new() };
            text.push_str("\u{1b}[2J");
        }
        for (place, line) in lines.iter().enumerate() {
            let row = place + 1;
            // The line is cleared before its text is written. After a text as wide as the terminal, clearing would remove the
            // last character.
            if row == lines.len() {
                let _ = write!(text, "\u{1b}[{row}H\u{1b}[J{line}");
            } else if self.lines.get(place) != Some(line) {
                let _ = write!(text, "\u{1b}[{row}H\u{1b}[K{line}");
            }
        }
        self.lines = lines;
        out.write_all((text + "\u{1b}[?7h").as_bytes())?;
        out.flush()
    }
}

/// Replaces the text `drawn`, which is the last output on the terminal, by `text`.
pub(super) fn replace(drawn: &mut String, text: &str, out: &mut dyn Write) -> io::Result<()> {
    if drawn == text {
        return Ok(());
    }
    let lines = drawn.lines().count();
    if lines > 0 {
        write!(out, "\u{1b}[{lines}A\u{1b}[J")?;
    }
    if !text.is_empty() {
        writeln!(out, "{text}")?;
    }
    text.clone_into(drawn);
    out.flush()
}

/// Prints a message to standard error. An error of this write is ignored, since the message has no other place.
pub(super) fn say(words: &str) {
    let _ = writeln!(io::stderr(), "yunion-mpsctl: {}", printable(words));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_written_when_it_changes() {
        let mut screen = Screen::default();
        let mut draw = |lines: &[&str]| {
            let mut out = Vec::new();
            screen.draw(lines.iter().map(|line| (*line).to_owned()).collect(), &mut out).unwrap();
            let written = String::from_utf8(out).unwrap();
            written.strip_prefix("\u{1b}[?7l").unwrap().strip_suffix("\u{1b}[?7h").unwrap().to_owned()
        };
        assert_eq!(draw(&["a", "b", "c"]), "\u{1b}[2J\u{1b}[1H\u{1b}[Ka\u{1b}[2H\u{1b}[Kb\u{1b}[3H\u{1b}[Jc");
        assert_eq!(draw(&["a", "x", "c"]), "\u{1b}[2H\u{1b}[Kx\u{1b}[3H\u{1b}[Jc");
        assert_eq!(draw(&["a"]), "\u{1b}[1H\u{1b}[Ja");
        assert_eq!(draw(&["a", "x"]), "\u{1b}[2H\u{1b}[Jx");
    }
}
