//! `yunion-mpsctl run`: the parent of a GPU program that takes care of its neighbours.
//!
//! A signal that ends a program in the middle of a kernel is a fault for every client on its GPU. So no signal may reach
//! the command before its GPU work has been ended, not even the terminal's own. The terminal signals its foreground
//! process group, and that stays ours: the command runs in a session of its own, which no terminal controls. There the
//! descriptors of the terminal that it inherits still work, for reading as well: job control stops only processes that
//! have it as their controlling terminal. The terminal is never changed by us, so there is nothing to put back.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::future::Future;
use std::io::{self, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::pin::Pin;
use std::process::ExitStatus;
use std::time::Duration;

use clap::Args;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpid, kill_process, kill_process_group};
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::ctl::show::env::{host_environment, warn_of_several};
use crate::ctl::show::table::printable;
use crate::ctl::signals::Signals;
use crate::ctl::{Error, FAILED};
use crate::dbus::proxy::{BusError, DaemonProxy};
use crate::host::proc;

/// The time that the GPU work may take to end before the signal is passed on nevertheless. Measured: 50 ms.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// The first argument of the process that becomes the command.
const BECOME: &str = "become-command";

/// The signals that would end or stop us alone, and SIGWINCH, which the terminal sends to nobody but us.
const CAUGHT: [Signal; 8] = [
    Signal::INT,
    Signal::QUIT,
    Signal::TERM,
    Signal::HUP,
    Signal::USR1,
    Signal::USR2,
    Signal::TSTP,
    Signal::WINCH,
];

#[derive(Debug, Args)]
pub(in crate::ctl) struct Arguments {
    /// Names as `list` shows them: 00:06.0-1; a GPU's address or UUID stands for one slice of it
    #[arg(required = true, value_name = "DEVICE")]
    devices: Vec<String>,
    /// The command, and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
}

pub(in crate::ctl) async fn run(daemon: DaemonProxy, arguments: &Arguments) -> Result<u8, Error> {
    let answer = daemon.container_config(&arguments.devices).await?;
    warn_of_several(&answer);
    // The command may run for weeks; by the time of a signal this connection could be one to a bus that is gone.
    drop(daemon);
    // Caught first: a signal that arrives while the command starts must not end us alone.
    let mut signals = Signals::catch(&CAUGHT)?;
    let mut child = Command::new(proc::OWN_PROGRAM)
        .arg(BECOME)
        .args(&arguments.command)
        .envs(host_environment(&answer))
        .spawn()
        .map_err(Error::Start)?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    let Some(command) = pid.map(Group) else { return Ok(FAILED) };
    let mut first = true;
    let mut waiting: Option<(Signal, Release)> = None;
    loop {
        tokio::select! {
            ended = child.wait() => return Ok(exit_status(ended.map_err(Error::Wait)?)),
            signal = signals.next() => match signal {
                Signal::TSTP => command.suspend(),
                Signal::WINCH => command.send(signal),
                Signal::USR1 | Signal::USR2 if command.handles(signal) => command.tell(signal),
                _ if std::mem::take(&mut first) => waiting = Some((signal, Box::pin(release(command)))),
                _ => {
                    if let Some((first, _)) = waiting.take() {
                        command.send(first);
                    }
                    command.send(signal);
                }
            },
            signal = released(&mut waiting) => command.send(signal),
        }
    }
}

/// If the arguments (the first one is the program's name) ask for it, this process leaves its session and becomes the
/// command that they name. If that fails, returns the exit status that a shell has for a command that it does not find or
/// can't execute.
pub(in crate::ctl) fn become_command(arguments: &[OsString], err: &mut dyn Write) -> Option<u8> {
    let [_, ask, command, rest @ ..] = arguments else { return None };
    if ask != BECOME {
        return None;
    }
    let error = match rustix::process::setsid() {
        Ok(_) => std::process::Command::new(command).args(rest).exec(),
        Err(error) => error.into(),
    };
    let _ = writeln!(err, "yunion-mpsctl: can't run {}: {error}", printable(&command.to_string_lossy()));
    Some(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
}

/// The process group of the command.
#[derive(Debug, Clone, Copy)]
struct Group(Pid);

impl Group {
    fn send(self, signal: Signal) {
        // Before it has left our session it is only a process. It may also have ended in this moment.
        if kill_process_group(self.0, signal) == Err(Errno::SRCH) {
            let _ = kill_process(self.0, signal);
        }
    }

    /// Whether a signal would not end the command.
    fn handles(self, signal: Signal) -> bool {
        let signal = signal.as_raw();
        proc::status(self.0).is_ok_and(|command| command.catches(signal) || command.ignores(signal))
    }

    /// Signals the command itself, and not its child processes: they may not handle the signal.
    fn tell(self, signal: Signal) {
        let _ = kill_process(self.0, signal);
    }

    /// Stops with the command, as job control has it, until somebody continues us. SIGTSTP would do nothing: job control
    /// protects process groups that no shell looks after.
    fn suspend(self) {
        self.send(Signal::STOP);
        let _ = kill_process(getpid(), Signal::STOP);
        self.send(Signal::CONT);
    }
}

type Release = Pin<Box<dyn Future<Output = ()>>>;

/// Waits for the release that a signal waits for, and gives that signal.
async fn released(waiting: &mut Option<(Signal, Release)>) -> Signal {
    match waiting {
        Some((signal, release)) => {
            release.await;
            let signal = *signal;
            *waiting = None;
            signal
        }
        None => std::future::pending().await,
    }
}

/// Ends the GPU work of the command and of every process that it has started, as far as possible in a few seconds.
async fn release(command: Group) {
    let seconds = RELEASE_TIMEOUT.as_secs();
    let trouble = match timeout(RELEASE_TIMEOUT, terminate_clients(command)).await {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no end of it within {seconds} s"),
    };
    let _ = writeln!(
        io::stderr(),
        "yunion-mpsctl: the GPU work was not ended first, neighbours may suffer: {}",
        printable(&trouble)
    );
}

async fn terminate_clients(command: Group) -> Result<(), BusError> {
    let daemon = DaemonProxy::connect().await?;
    let root = u32::try_from(command.0.as_raw_nonzero().get()).unwrap_or_default();
    let listed = daemon.clients().await?;
    let mut terminations = JoinSet::new();
    // One process may be listed for several GPUs.
    for pid in listed.iter().map(|client| client.pid).collect::<BTreeSet<u32>>() {
        if descends(pid, root) {
            let daemon = daemon.clone();
            terminations.spawn(async move { daemon.terminate_client(pid).await });
        }
    }
    let mut result = Ok(());
    while let Some(ended) = terminations.join_next().await {
        match ended {
            // It had gone by itself in the meantime.
            Ok(Err(error)) if error.is("NoSuchClient") => {}
            Ok(Err(error)) => result = Err(error),
            Ok(Ok(())) | Err(_) => {}
        }
    }
    result
}

/// Whether a process is `root`, descends from it, or is in the session that it leads: an orphan descends from nobody, but
/// stays in its session.
fn descends(mut pid: u32, root: u32) -> bool {
    // Parents can't form a ring, but they are read one after the other and may change in between.
    for _ in 0..1000 {
        if pid == root {
            return true;
        }
        let Ok(stat) = proc::stat(pid) else { return false };
        if stat.session == Some(root) {
            return true;
        }
        pid = stat.parent;
    }
    false
}

/// The command's exit status, as a shell shows it.
fn exit_status(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(FAILED)
}
