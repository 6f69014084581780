//! Gives `top` the whole screen of the terminal, without echo and line mode. The terminal is restored when `top` ends, even
//! after a panic.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use crossterm::cursor::{Hide, Show};
use crossterm::execute;
use crossterm::terminal::{
    DisableLineWrap, EnableLineWrap, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode,
    enable_raw_mode,
};

/// True while the terminal is in the state for `top`.
static ENTERED: AtomicBool = AtomicBool::new(false);

/// The terminal in the state for `top`. Dropping this value restores the terminal. A panic restores the terminal before the
/// message of the panic is printed, so that a user can read the message.
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

    /// Restores the terminal while `stopped` runs, and puts the terminal into the state for `top` again afterwards.
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
    // The terminal must not wrap lines. The terminal may count the columns of a text differently than this program, and a
    // wrapped line would move all lines below.
    execute!(stdout()?, EnterAlternateScreen, Hide, DisableLineWrap)
}

fn leave() {
    if ENTERED.swap(false, Ordering::SeqCst) {
        // An error of the terminal is ignored, since the terminal could not show a message about the error.
        let _ = stdout().and_then(|mut stdout| execute!(stdout, LeaveAlternateScreen, Show, EnableLineWrap));
        let _ = disable_raw_mode();
    }
}

/// Opens standard output without Rust's lock of standard output, since another thread may own the lock.
fn stdout() -> io::Result<File> {
    Ok(rustix::stdio::stdout().try_clone_to_owned()?.into())
}
