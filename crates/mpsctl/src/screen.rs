//! Texts on a terminal that replace earlier ones, and messages besides the output.

use std::fmt::Write as _;
use std::io::{self, Write};

use common::counted::counted;
use common::text::printable;

/// The number of columns and rows of the terminal.
pub(super) fn size() -> (u16, u16) {
    let size = rustix::termios::tcgetwinsize(rustix::stdio::stdout()).ok();
    let columns = size.map(|size| size.ws_col).filter(|columns| *columns > 0);
    (columns.unwrap_or(80), rows().unwrap_or(24))
}

/// The number of rows of the terminal. None if there is no terminal, or if it does not report its size.
pub(super) fn rows() -> Option<u16> {
    let size = rustix::termios::tcgetwinsize(rustix::stdio::stdout()).ok();
    size.map(|size| size.ws_row).filter(|rows| *rows > 0)
}

/// The first lines of a status, as many as fit into this number of rows. The last line says how many lines are left
/// out.
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

/// The whole screen, which is drawn again at each change.
#[derive(Debug, Default)]
pub(super) struct Screen {
    size: (u16, u16),
    lines: Vec<String>,
}

impl Screen {
    /// Draws exactly these lines, and leaves the cursor after the last one. Unchanged lines are not written again: a serial line
    /// needs a second for a whole screen.
    pub(super) fn draw(&mut self, lines: Vec<String>, out: &mut dyn Write) -> io::Result<()> {
        let size = size();
        // The terminal must not wrap lines: if it counts the columns of a text differently, a wrapped line would move all
        // lines below it.
        let mut text = "\u{1b}[?7l".to_owned();
        if self.size != size {
            *self = Self { size, lines: Vec::new() };
            text.push_str("\u{1b}[2J");
        }
        for (place, line) in lines.iter().enumerate() {
            let row = place + 1;
            // The line is cleared before its text is written: if the line were cleared after a text as wide as the terminal, the
            // last character would be removed.
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

/// Draws a text below everything else on the screen, in the place of the text that was drawn there before.
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

/// Prints a message to standard error. An error of this write is ignored.
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
