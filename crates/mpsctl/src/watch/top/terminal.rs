//! The terminal: its whole screen, without echo and without lines, and back again in every case.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use crossterm::cursor::{Hide, Show};
use crossterm::execute;
use crossterm::terminal::{
    DisableLineWrap, EnableLineWrap, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode,
    enable_raw_mode,
};

/// True while the terminal is ours.
static ENTERED: AtomicBool = AtomicBool::new(false);

/// The terminal is given back when this value ends. A panic gives it back first, so that its message can be read.
#[derive(Debug)]
pub(super) struct Entered(());

impl Entered {
    pub(super) fn enter() -> io::Result<Self> {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            leave();
            before(panic);
        }));
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
    // A terminal that counts the columns of a text in another way must not wrap it.
    execute!(stdout()?, EnterAlternateScreen, Hide, DisableLineWrap)
}

fn leave() {
    if ENTERED.swap(false, Ordering::SeqCst) {
        // The error has no reader.
        let _ = stdout().and_then(|mut stdout| execute!(stdout, LeaveAlternateScreen, Show, EnableLineWrap));
        let _ = disable_raw_mode();
    }
}

/// Past the lock of the standard output, which another thread may have.
fn stdout() -> io::Result<File> {
    Ok(rustix::stdio::stdout().try_clone_to_owned()?.into())
}
