//! `yunion-mpsctl run`.

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use clap::Args;
use rustix::process::{Pid, Signal, getpgrp, kill_process};
use rustix::termios::tcgetpgrp;
use tokio::process::{Child, Command};
use tokio::signal::unix::{self, SignalKind};

use super::env::host_environment;
use super::{Error, FAILED};
use crate::dbus::proxy::Client;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Names as `list` shows them: 00:06.0-1; a GPU's address or UUID stands for one slice of it
    #[arg(required = true, value_name = "DEVICE")]
    devices: Vec<String>,
    /// The command, and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// The signals that end a command, caught so that we outlive it and can tell how it ended.
struct Signals {
    interrupt: unix::Signal,
    terminate: unix::Signal,
    hangup: unix::Signal,
}

impl Signals {
    fn catch() -> Result<Self, Error> {
        let catch = |kind| unix::signal(kind).map_err(Error::Signals);
        Ok(Self {
            interrupt: catch(SignalKind::interrupt())?,
            terminate: catch(SignalKind::terminate())?,
            hangup: catch(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.interrupt.recv() => Signal::INT,
            _ = self.terminate.recv() => Signal::TERM,
            _ = self.hangup.recv() => Signal::HUP,
        }
    }
}

pub(super) async fn run(client: &Client, arguments: &Arguments) -> Result<u8, Error> {
    let answer = client.container_config(&arguments.devices).await?;
    let Some((program, rest)) = arguments.command.split_first() else {
        return Ok(FAILED);
    };
    // Caught first: a signal that arrives while the command starts must not end us alone.
    let mut signals = Signals::catch()?;
    let mut child = Command::new(program)
        .args(rest)
        .envs(host_environment(&answer))
        .spawn()
        .map_err(|source| Error::Start { command: program.to_string_lossy().into_owned(), source })?;
    loop {
        tokio::select! {
            ended = child.wait() => return Ok(exit_status(ended.map_err(Error::Wait)?)),
            signal = signals.next() => pass_on(signal, &child),
        }
    }
}

/// Passes a signal on, unless the terminal has given it to the command already: Ctrl-C goes to the whole foreground
/// process group, and many programs take a second one for "now, without cleaning up".
fn pass_on(signal: Signal, child: &Child) {
    let in_foreground = || tcgetpgrp(std::io::stdin()).is_ok_and(|group| group == getpgrp());
    if signal == Signal::INT && in_foreground() {
        return;
    }
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    if let Some(pid) = pid {
        // It may have ended in this moment; then there is nobody left to tell.
        let _ = kill_process(pid, signal);
    }
}

/// The command's exit status, as a shell shows it.
fn exit_status(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(FAILED)
}
