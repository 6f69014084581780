//! `yunion-mpsctl run`: starts a GPU program, and passes signals to the program in a way that does not harm other clients.
//!
//! A signal that ends a program in the middle of a GPU kernel is a fault for every client on that GPU. So no signal may reach
//! the command before its GPU work has ended, not even a signal of the terminal. The terminal signals its foreground process
//! group. To stay out of this group, the command runs in a new session without a controlling terminal. The command can still
//! use the terminal's descriptors that it inherits, even for reading: job control stops only processes that have the terminal
//! as their controlling terminal. This process never changes the settings of the terminal, so it restores none.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::future::Future;
use std::io::{self, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::pin::Pin;
use std::process::{ExitStatus, id};
use std::time::Duration;

use mps_core::terms::{DeviceName, GpuId};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, geteuid, getpid, kill_process, kill_process_group};
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::chosen::{Devices, passes, take, tell_choice, until_served};
use crate::screen::say;
use crate::show::env::{ensure_reachable, host_environment, quoted, warn_of_several};
use crate::signals::CaughtSignals;
use crate::{Error, FAILED, Result};
use common::bus::error::RequestError;
use common::bus::proxy::{BusError, DaemonProxy, GroupOf, SliceWish};
use common::host::{control_groups, proc, systemd};
use common::text::printable;

/// After this time, a signal is passed on even if the GPU work has not ended. In a measurement, GPU work ended 50 ms after the
/// request to end it.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// The most characters of the command's name in the label of a binding.
const NAME: usize = 24;

/// `yunion-mpsctl` starts itself again with this first argument. The new process then executes the command.
const BECOME: &str = "become-command";

/// The signals that this process catches. Without a handler, the first seven would end or stop only this process, and not the
/// command. The terminal sends SIGWINCH only to this process, which passes the signal on to the command.
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

pub(crate) async fn run(daemon: DaemonProxy, devices: &Devices, words: &[OsString]) -> Result<u8> {
    let mut wish = devices.wish()?;
    if takes_control_group(words).await {
        let (label, group) = (label(words), GroupOf::Process(id()));
        let bound = until_served(async || daemon.bind(&wish, &group, &label).await, passes).await?;
        if wish.free {
            tell_choice(&daemon, &bound).await?;
        }
        wish = SliceWish { names: bound, free: false, ..wish };
    }
    let answer = take(&daemon, &wish).await?;
    ensure_reachable(&answer)?;
    warn_of_several(&answer);
    // The connection to the bus is closed while the command runs, possibly for weeks: the bus may restart meanwhile. A signal
    // makes this process connect again.
    drop(daemon);
    // The signals are caught before the command starts. Otherwise a signal during the start would end this process, and the
    // command would run on.
    let mut signals = CaughtSignals::catch(&CAUGHT)?;
    let mut child = Command::new(proc::OWN_PROGRAM)
        .arg(BECOME)
        .args(words)
        .envs(host_environment(&answer))
        .spawn()
        .map_err(|error| Error::System("start a process", error))?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
    let Some(command) = pid.map(ProcessGroup) else { return Ok(FAILED) };
    let mut first = true;
    let mut waiting: Option<(Signal, Release)> = None;
    loop {
        tokio::select! {
            ended = child.wait() => {
                let learnt = ended.map_err(|error| Error::System("learn how the command ended", error));
                return learnt.map(exit_status);
            }
            signal = signals.next() => match signal {
                Signal::TSTP => command.suspend(),
                Signal::WINCH => command.send(signal),
                Signal::USR1 | Signal::USR2 if command.handles(signal) => command.signal(signal),
                // Slurm may send its signal twice within milliseconds, so a second signal does not mean that the user wants
                // to stop waiting for the GPU work. If the command does not end, Slurm sends SIGKILL.
                _ if waiting.is_some() && devices.are_from_slurm() => {}
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

/// Tries to get a control group for this process alone, and returns true on success. The control group can then be bound to
/// slices, and the environment of the command no longer decides about its slices. Only root can bind slices. A command of a
/// login shell or of a desktop's terminal moves into a systemd scope. A command in a unit with other processes stays in the
/// unit, since systemd has to end the command together with the unit. A command of Slurm stays in its control group, since
/// Slurm has to end the command together with the job.
async fn takes_control_group(command: &[OsString]) -> bool {
    if !geteuid().is_root() || !systemd::runs_host() {
        return false;
    }
    let Ok(own) = control_groups::path_of(id()) else { return false };
    let is_a_users = control_groups::shared_by(&own).is_some() || own.contains("/user@");
    if !is_a_users {
        return control_groups::is_alone(id());
    }
    let moved = systemd::move_self_to_scope(&format!("yunion-mpsctl run: {}", label(command))).await;
    if let Err(why) = &moved {
        say(&format!(
            "note: the command could not be moved to a systemd scope and bound to its slice, so the service \
             knows the slice only by the environment of the command: {why}"
        ));
    }
    moved.is_ok()
}

fn label(command: &[OsString]) -> String {
    let program = command.first().map(Path::new).and_then(Path::file_name).unwrap_or_default();
    // The service limits the length of a label.
    let program: String = program.to_string_lossy().chars().take(NAME).collect();
    format!("{} (PID {})", printable(&program), id())
}

/// If the first argument after the program's name is [`BECOME`], this process starts a new session and executes the command in
/// the other arguments. The function then returns only on a failure, with the exit status that a shell uses: 127 if the command
/// is not found, otherwise 126. None for any other first argument.
pub(crate) fn become_command(arguments: &[OsString], err: &mut dyn Write) -> Option<u8> {
    let [_, ask, command, rest @ ..] = arguments else { return None };
    if ask != BECOME {
        return None;
    }
    let error = match rustix::process::setsid() {
        Ok(_) => std::process::Command::new(command).args(rest).exec(),
        Err(error) => error.into(),
    };
    let _ = writeln!(
        err,
        "yunion-mpsctl: can't run {command}: {error}",
        command = printable(&command.to_string_lossy())
    );
    Some(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 })
}

/// The message for a command line of `run` in which the command follows the slices without `--`. None for any other command
/// line.
pub(crate) fn without_dashes(arguments: &[OsString]) -> Option<String> {
    let [_, subcommand, words @ ..] = arguments else { return None };
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    if subcommand != "run" || words.iter().any(|word| ["--", "--help", "-h"].contains(&word.as_ref())) {
        return None;
    }
    let devices = words.iter().take_while(|word| word.starts_with('-') || is_device(word)).count();
    let (devices, command) = words.split_at_checked(devices)?;
    if command.is_empty() {
        return None;
    }
    // With `--free`, a word may be the name of a model or the beginning of the command. So the message does not guess which
    // words are the command.
    let is_free = words.iter().any(|word| word == "--free");
    let meant = if is_free {
        "yunion-mpsctl run --free [GPU or model] -- CMD".to_owned()
    } else {
        let quoted =
            |words: &[Cow<'_, str>]| words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ");
        let devices = if devices.is_empty() { "SLICE".to_owned() } else { quoted(devices) };
        format!("yunion-mpsctl run {devices} -- {command}", command = quoted(command))
    };
    Some(format!("write the command behind `--`; did you mean: {meant}", meant = printable(&meant)))
}

/// True if a word can be the name of a slice or a GPU, such as `00:06.0-1` or `GPU-76aef7ff-...`.
fn is_device(word: &str) -> bool {
    DeviceName::parts(word).0.parse::<GpuId>().is_ok() || word.starts_with("GPU-")
}

#[derive(Debug, Clone, Copy)]
struct ProcessGroup(Pid);

impl ProcessGroup {
    fn send(self, signal: Signal) {
        // The process group of the command does not exist until the command has started its new session. Until then, the signal
        // goes to the process itself.
        if kill_process_group(self.0, signal) == Err(Errno::SRCH) {
            let _ = kill_process(self.0, signal);
        }
    }

    /// True if the signal does not end the command: the command has a handler for the signal, or ignores the signal.
    fn handles(self, signal: Signal) -> bool {
        let signal = signal.as_raw();
        proc::status(self.0).is_ok_and(|command| command.catches(signal) || command.ignores(signal))
    }

    /// Sends a signal only to the command itself, since its child processes may not handle the signal.
    fn signal(self, signal: Signal) {
        let _ = kill_process(self.0, signal);
    }

    /// Stops the command and this process, as job control in a shell does. When the shell continues this process, this process
    /// continues the command. The command gets SIGSTOP, since the kernel discards SIGTSTP in an orphaned process group, such as
    /// that of the command.
    fn suspend(self) {
        self.send(Signal::STOP);
        let _ = kill_process(getpid(), Signal::STOP);
        self.send(Signal::CONT);
    }
}

type Release = Pin<Box<dyn Future<Output = ()>>>;

/// Waits for the end of the GPU work that the signal in `waiting` would interrupt, and returns the signal. Without a signal in
/// `waiting`, this function never returns.
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

/// Ends the GPU work of the command and of all processes that the command has started. Gives up after [`RELEASE_TIMEOUT`].
async fn release(command: ProcessGroup) {
    let seconds = RELEASE_TIMEOUT.as_secs();
    let trouble = match timeout(RELEASE_TIMEOUT, terminate_clients(command)).await {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("the GPU work did not end within {seconds} s"),
    };
    say(&format!(
        "the command gets the signal while its GPU work may go on, which can cause a fault in other clients \
         of the GPU: {trouble}"
    ));
}

async fn terminate_clients(command: ProcessGroup) -> Result<(), BusError> {
    let daemon = DaemonProxy::connect().await?;
    let root = u32::try_from(command.0.as_raw_nonzero().get()).unwrap_or_default();
    let listed = daemon.clients().await?;
    let mut terminations = JoinSet::new();
    // The service lists a process on several GPUs once for each GPU.
    for pid in listed.iter().map(|client| client.pid).collect::<BTreeSet<u32>>() {
        if descends(pid, root) {
            let daemon = daemon.clone();
            terminations.spawn(async move { daemon.terminate_client(pid).await });
        }
    }
    let mut result = Ok(());
    while let Some(ended) = terminations.join_next().await {
        match ended {
            // The service no longer knows this client, so the client has ended by itself.
            Ok(Ok(()) | Err(BusError::Refused(RequestError::NoSuchClient(_)))) | Err(_) => {}
            Ok(Err(error)) => result = Err(error),
        }
    }
    result
}

/// True if the process with the PID `pid` is the process with the PID `root`, a descendant of that process, or in its session.
/// After the parent of a process has ended, the process is no descendant any more, but is still in the session.
fn descends(mut pid: u32, root: u32) -> bool {
    // This loop reads the parents one after the other, and parents may change meanwhile. So the chain of parents may be a ring,
    // and the loop ends after 1000 steps.
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

/// The exit status of this process in the form of shells: 128 plus the number of the signal if a signal ended the command.
fn exit_status(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_without_dashes_is_shown_with_them() {
        let meant = |line: &str| {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let text = without_dashes(&words)?;
            Some(
                text.strip_prefix("write the command behind `--`; did you mean: yunion-mpsctl ")
                    .unwrap()
                    .to_owned(),
            )
        };
        for (line, expected) in [
            (
                "y run 00:06.0-1 python3 train.py --epochs 3",
                Some("run 00:06.0-1 -- python3 train.py --epochs 3"),
            ),
            ("y run GPU-76aef7ff 0001:1a:00.0-2 ls -l", Some("run GPU-76aef7ff 0001:1a:00.0-2 -- ls -l")),
            ("y run 00:06.0-1 a;b \u{1b}", Some("run 00:06.0-1 -- 'a;b' '\u{fffd}'")),
            ("y run ./program", Some("run SLICE -- ./program")),
            ("y run --free ./program", Some("run --free [GPU or model] -- CMD")),
            ("y run h200 --free ./program", Some("run --free [GPU or model] -- CMD")),
            ("y run 00:06.0-1", None),
            ("y run --free 00:06.0", None),
            ("y run 00:06.0-1 --help", None),
            ("y run 00:06.0-1 --colour -- ls", None),
            ("y list 00:06.0-1 ls", None),
            ("y", None),
        ] {
            assert_eq!(meant(line).as_deref(), expected, "{line}");
        }
    }
}
