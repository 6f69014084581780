//! The terminal: its whole screen, without echo and without lines, and back again in every case.

use std::fmt::Write as _;
use std::io::{self, BufWriter, Write};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crossterm::terminal::{disable_raw_mode, enable_raw_mode};
use ratatui::Terminal;
use ratatui::backend::{Backend, ClearType, WindowSize};
use ratatui::buffer::Cell;
use ratatui::layout::{Position, Size};
use ratatui::style::{Color, Modifier};

/// The other screen, without a cursor; and back, with the terminal's own colours.
const ENTER: &str = "\u{1b}[?1049h\u{1b}[?25l\u{1b}[2J";
const LEAVE: &str = "\u{1b}[0m\u{1b}[2J\u{1b}[?1049l\u{1b}[?25h";

/// Whether the terminal is ours now.
static ENTERED: AtomicBool = AtomicBool::new(false);
static HOOK: Once = Once::new();

/// The terminal is given back when this value ends. A panic gives it back first, so that its message can be read.
#[derive(Debug)]
pub(super) struct Entered(());

impl Entered {
    pub(super) fn enter() -> io::Result<Self> {
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                leave();
                before(panic);
            }));
        });
        take()?;
        Ok(Self(()))
    }

    /// Gives the terminal back while `stopped` runs.
    pub(super) fn interrupt(stopped: impl FnOnce()) -> io::Result<()> {
        leave();
        stopped();
        take()
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        leave();
    }
}

fn take() -> io::Result<()> {
    ENTERED.store(true, Ordering::SeqCst);
    enable_raw_mode()?;
    write(ENTER)
}

fn leave() {
    if ENTERED.swap(false, Ordering::SeqCst) {
        // There is nobody to tell.
        let _ = write(LEAVE);
        let _ = disable_raw_mode();
    }
}

/// Past the lock of the standard output, which another thread may have.
fn write(text: &str) -> io::Result<()> {
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::write(rustix::stdio::stdout(), rest))?;
        rest = rest.get(written..).unwrap_or_default();
    }
    Ok(())
}

/// A screen to draw on.
pub(super) fn screen(out: &mut dyn Write) -> io::Result<Terminal<Ansi<'_>>> {
    Terminal::new(Ansi(BufWriter::with_capacity(64 * 1024, out)))
}

/// Draws with the escape sequences that every terminal knows. Colours are those of the theme: crossterm's are numbers of
/// the palette of 256.
pub(super) struct Ansi<'o>(BufWriter<&'o mut dyn Write>);

impl Backend for Ansi<'_> {
    type Error = io::Error;

    fn draw<'a, I: Iterator<Item = (u16, u16, &'a Cell)>>(&mut self, content: I) -> io::Result<()> {
        let mut text = String::new();
        let mut place = None;
        let mut look = None;
        for (column, row, cell) in content {
            if place != Some((column, row)) {
                text.push_str(&format!("\u{1b}[{};{}H", u32::from(row) + 1, u32::from(column) + 1));
            }
            if look != Some((cell.fg, cell.modifier)) {
                look = Some((cell.fg, cell.modifier));
                text.push_str(&sequence(cell.fg, cell.modifier));
            }
            text.push_str(cell.symbol());
            // Behind a wide character the place is another one, and is said.
            place = column.checked_add(1).map(|next| (next, row));
        }
        text.push_str("\u{1b}[0m");
        self.0.write_all(text.as_bytes())
    }

    fn hide_cursor(&mut self) -> io::Result<()> {
        self.0.write_all(b"\x1b[?25l")
    }

    fn show_cursor(&mut self) -> io::Result<()> {
        self.0.write_all(b"\x1b[?25h")
    }

    /// The cursor is hidden. The terminal would have to be asked for it, and its answer stands among the keys.
    fn get_cursor_position(&mut self) -> io::Result<Position> {
        Ok(Position::ORIGIN)
    }

    fn set_cursor_position<P: Into<Position>>(&mut self, _: P) -> io::Result<()> {
        Ok(())
    }

    fn clear(&mut self) -> io::Result<()> {
        self.0.write_all(b"\x1b[2J")
    }

    fn clear_region(&mut self, _: ClearType) -> io::Result<()> {
        self.clear()
    }

    fn size(&self) -> io::Result<Size> {
        let size = rustix::termios::tcgetwinsize(rustix::stdio::stdout())?;
        let known = |cells, otherwise| if cells > 0 { cells } else { otherwise };
        Ok(Size::new(known(size.ws_col, 80), known(size.ws_row, 24)))
    }

    fn window_size(&mut self) -> io::Result<WindowSize> {
        Ok(WindowSize { columns_rows: self.size()?, pixels: Size::default() })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// The escape sequence of a look: `ESC [ 0 ; 1 ; 31 m`.
fn sequence(colour: Color, modifier: Modifier) -> String {
    let mut sequence = "\u{1b}[0".to_owned();
    for (one, code) in [(Modifier::BOLD, 1), (Modifier::UNDERLINED, 4), (Modifier::REVERSED, 7)] {
        if modifier.contains(one) {
            let _ = write!(sequence, ";{code}");
        }
    }
    let code = match colour {
        Color::Red => ";31",
        Color::Green => ";32",
        Color::Yellow => ";33",
        _ => "",
    };
    sequence + code + "m"
}

#[cfg(test)]
mod tests {
    use ratatui::style::Style;

    use super::*;

    #[test]
    fn colours_are_the_themes() {
        let mut cells = [Cell::new("a"), Cell::new("b"), Cell::new("模")];
        cells[1].set_style(Style::new().red().bold());
        cells[2].set_style(Style::new().red().bold());
        let mut out = Vec::new();
        let mut ansi = Ansi(BufWriter::new(&mut out));
        ansi.draw(cells.iter().zip(3..).map(|(cell, column)| (column, 1, cell))).unwrap();
        ansi.flush().unwrap();
        drop(ansi);
        assert_eq!(String::from_utf8(out).unwrap(), "\u{1b}[2;4H\u{1b}[0ma\u{1b}[0;1;31mb模\u{1b}[0m");
    }
}
