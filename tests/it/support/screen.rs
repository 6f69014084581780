//! Runs a program on a terminal, and interprets its output as a terminal would show it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::{Arc, Mutex};

use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use super::client::Client;
use super::wait::wait_for;

/// A program on a terminal. The program is killed when this value is dropped.
pub(crate) struct Screen {
    terminal: File,
    program: Client,
    shown: Arc<Mutex<Shown>>,
}

struct Shown {
    parser: vt100::Parser,
    bytes: Vec<u8>,
}

impl Screen {
    pub(crate) fn start(program: &Command, rows: u16, columns: u16) -> Self {
        let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&terminal).unwrap();
        unlockpt(&terminal).unwrap();
        tcsetwinsize(&terminal, size(rows, columns)).unwrap();
        let name = ptsname(&terminal, Vec::new()).unwrap();
        let end = rustix::fs::open(&name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
        let end = File::from(end);
        // `setsid --ctty` makes this terminal the program's controlling terminal. Otherwise the terminal would send no signals
        // to the program.
        let mut command = Command::new("setsid");
        command.arg("--ctty").arg(program.get_program()).args(program.get_args());
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.env("TERM", "xterm-256color").env_remove("COLUMNS").env_remove("LINES");
        command.stdin(end.try_clone().unwrap()).stdout(end.try_clone().unwrap()).stderr(end);
        let program = Client::start(&mut command);
        drop(command);
        let terminal = File::from(terminal);
        let shown =
            Shown { parser: vt100::Parser::new(nonzero(rows), nonzero(columns), 0), bytes: Vec::new() };
        let shown = Arc::new(Mutex::new(shown));
        let (mut reads, sees) = (terminal.try_clone().unwrap(), Arc::clone(&shown));
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // A read returns an error after the last program on the terminal has ended.
            while let Ok(count @ 1..) = reads.read(&mut bytes) {
                let mut shown = sees.lock().unwrap();
                shown.parser.process(&bytes[..count]);
                shown.bytes.extend_from_slice(&bytes[..count]);
            }
        });
        Self { terminal, program, shown }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.program.id()
    }

    pub(crate) fn keys(&mut self, keys: &str) {
        self.terminal.write_all(keys.as_bytes()).unwrap();
    }

    pub(crate) fn resize(&mut self, rows: u16, columns: u16) {
        self.shown.lock().unwrap().parser.screen_mut().set_size(nonzero(rows), nonzero(columns));
        tcsetwinsize(&self.terminal, size(rows, columns)).unwrap();
    }

    pub(crate) fn text(&self) -> String {
        self.shown.lock().unwrap().parser.screen().contents()
    }

    /// Returns all that the program has written to the terminal, with control characters.
    pub(crate) fn written(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap().bytes).into_owned()
    }

    /// Waits until the screen satisfies `check`, and returns its text. A failure names `what`.
    #[track_caller]
    pub(crate) fn wait_until(&self, what: &str, check: impl Fn(&str) -> bool) -> String {
        let mut last = String::new();
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait_for(what, || {
                last = self.text();
                check(&last).then(|| last.clone())
            })
        }));
        found.unwrap_or_else(|_| panic!("never {what}:\n{}", self.text()))
    }

    #[track_caller]
    pub(crate) fn wait_for(&self, text: &str) -> String {
        self.wait_until(text, |screen| screen.contains(text))
    }

    pub(crate) fn ended(&mut self) -> i32 {
        let status = wait_for("the program's end", || self.program.try_wait().unwrap());
        status.code().unwrap_or_else(|| 128 + status.signal().unwrap())
    }

    #[track_caller]
    pub(crate) fn wait_until_restored(&self) {
        wait_for("a restored terminal", || self.is_restored().then_some(()));
    }

    /// True if the terminal echoes and edits lines, shows its main screen, and has a cursor.
    pub(crate) fn is_restored(&self) -> bool {
        let modes = tcgetattr(&self.terminal).unwrap().local_modes;
        let shown = self.shown.lock().unwrap();
        let screen = shown.parser.screen();
        modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
            && !screen.alternate_screen()
            && !screen.hide_cursor()
    }
}

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

fn nonzero(cells: u16) -> std::num::NonZero<u16> {
    std::num::NonZero::new(cells).unwrap()
}
