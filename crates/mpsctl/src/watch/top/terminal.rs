//! The terminal: its whole screen, without echo and without lines, and back again in every case.

use std::io;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crossterm::terminal::{disable_raw_mode, enable_raw_mode};

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
