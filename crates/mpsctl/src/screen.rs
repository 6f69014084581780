//! Texts on a terminal that take the place of earlier ones, and words beside the output.

use std::fmt::Write as _;
use std::io::{self, Write};

use common::counted::counted;
use common::text::printable;

/// The columns and rows of the terminal.
pub(super) fn size() -> (u16, u16) {
    let size = rustix::termios::tcgetwinsize(rustix::stdio::stdout()).ok();
    let columns = size.map(|size| size.ws_col).filter(|columns| *columns > 0);
    (columns.unwrap_or(80), rows().unwrap_or(24))
}

/// The rows of the terminal. None: no terminal, or a terminal that doesn't know.
pub(super) fn rows() -> Option<u16> {
    let size = rustix::termios::tcgetwinsize(rustix::stdio::stdout()).ok();
    size.map(|size| size.ws_row).filter(|rows| *rows > 0)
}

/// The lines of a status that have room in so many rows. The last line counts the others.
pub(super) fn fitted(mut lines: Vec<String>, rows: usize) -> Vec<String> {
    if lines.len() > rows {
        let more = lines.len() - rows.saturating_sub(1);
        lines.truncate(rows.saturating_sub(1));
        lines.push(format!("({} more; yunion-mpsctl status -o wide shows all)", counted(more, "line")));
    }
    lines
}

/// The whole screen, which is drawn again and again.
#[derive(Debug, Default)]
pub(super) struct Screen {
    size: (u16, u16),
    lines: Vec<String>,
}

impl Screen {
    /// Draws these lines and nothing else. The cursor is then behind the last one. Lines that stand there already are not
    /// written: a serial line takes a second for a screen.
    pub(super) fn draw(&mut self, lines: Vec<String>, out: &mut dyn Write) -> io::Result<()> {
        let size = size();
        // A terminal that counts the columns of a text in another way must not wrap it, which would move the lines below.
        let mut text = "\u{1b}[?7l".to_owned();
        if self.size != size {
            *self = Self { size, lines: Vec::new() };
            text.push_str("\u{1b}[2J");
        }
        for (place, line) in lines.iter().enumerate() {
            let row = place + 1;
            // Cleared first: behind a text as wide as the terminal, its last character would be cleared.
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

/// A text on the screen that makes room for the next one, below everything that stands there.
#[derive(Debug, Default)]
pub(super) struct Passing(String);

impl Passing {
    pub(super) fn draw(&mut self, text: &str, out: &mut dyn Write) -> io::Result<()> {
        if self.0 == text {
            return Ok(());
        }
        let lines = self.0.lines().count();
        if lines > 0 {
            write!(out, "\u{1b}[{lines}A\u{1b}[J")?;
        }
        if !text.is_empty() {
            writeln!(out, "{text}")?;
        }
        text.clone_into(&mut self.0);
        out.flush()
    }
}

/// Says something beside the output. An error of the output is ignored.
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
