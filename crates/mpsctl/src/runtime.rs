//! An OCI runtime that wraps another OCI runtime. If this program is called as `yunion-mps-runc`, it executes `runc` with the
//! same arguments. Before `runc` sends a signal that may end the programs of a container, the service ends their GPU work. A
//! signal that ends a program in the middle of a GPU kernel is a fault for every client on that GPU.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::iter::Peekable;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::slice;
use std::time::Duration;

use mps_core::terms::ProcessId;
use serde::Deserialize;

use common::bus::proxy::{BusError, ContainerStop, DaemonProxy};
use common::host::identity;
use common::text::printable;

/// If the name by which this program is called begins with this prefix, this program acts as an OCI runtime.
const PREFIX: &str = "yunion-mps-";

/// The longest wait for the end of GPU work. After this time, the wrapped runtime is executed even if GPU work still runs.
const PATIENCE: Duration = Duration::from_secs(5);

const JOURNAL: &str = "/run/systemd/journal/socket";

const BUS: &str = "/run/dbus/system_bus_socket";

/// The options of runc and crun that precede the command, such as `kill`, and have the next argument as their value.
const WITH_VALUE: [&str; 7] =
    ["--root", "--log", "--log-format", "--log-level", "--criu", "--rootless", "--cgroup-manager"];

/// The options of runc and crun that decide where the runtime finds the state of a container.
const FOR_STATE: [&str; 4] = ["--root", "--rootless", "--cgroup-manager", "--systemd-cgroup"];

/// The signals that are meant to end programs, each with its number. For any other signal, the service ends no GPU work.
const SIGNALS: [(&str, u32); 4] = [("INT", 2), ("QUIT", 3), ("KILL", 9), ("TERM", 15)];

/// The name of the wrapped runtime: `runc` if this program is called as `/usr/bin/yunion-mps-runc`. None if this program is not
/// called as a runtime.
pub fn stands_before(own_name: &OsStr) -> Option<&OsStr> {
    let name = Path::new(own_name).file_name()?.as_bytes().strip_prefix(PREFIX.as_bytes())?;
    (!name.is_empty()).then(|| OsStr::from_bytes(name))
}

/// Executes the wrapped runtime with `arguments`. If the runtime is to send a signal that may end programs, the service first
/// ends their GPU work. If the container has a first process, the runtime then runs as a child process, and the result is the
/// runtime's exit status. In all other cases the runtime replaces this process.
///
/// # Errors
/// The runtime can't be executed.
pub fn execute(runtime: &OsStr, arguments: &[OsString]) -> io::Result<ExitCode> {
    let mut command = Command::new(runtime);
    command.args(arguments);
    let first = match SignalCommand::by(arguments) {
        Some(wanted) if can_ask() => wanted.prepare(runtime),
        _ => None,
    };
    match first {
        Some(first) => signal(command, &first),
        None => Err(command.exec()),
    }
}

/// Runs the runtime's command that sends a signal to a container, and returns its exit status. `first` is the first process of
/// the container. After the GPU work of a program has ended, the program may end by itself before the signal. The runtime then
/// fails, and the container engine would report a failed stop. So the result is success if the first process has ended.
fn signal(mut command: Command, first: &ProcessId) -> io::Result<ExitCode> {
    let done = command.stdin(Stdio::inherit()).output()?;
    if !done.status.success() && !identity::runs(*first) {
        return Ok(ExitCode::SUCCESS);
    }
    // The runtime has already sent the signal, so an error while this process prints the runtime's output is ignored.
    let _ = io::stdout().write_all(&done.stdout).and_then(|()| io::stderr().write_all(&done.stderr));
    let code = done.status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Only root may ask the service to end the GPU work of a container.
fn can_ask() -> bool {
    let has_bus = || std::env::var_os("DBUS_SYSTEM_BUS_ADDRESS").is_some() || Path::new(BUS).exists();
    rustix::process::geteuid().is_root() && has_bus()
}

fn in_time<T>(work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let in_time = async { tokio::time::timeout(PATIENCE, work).await };
    let done = tokio.map_err(|error| error.to_string())?.block_on(in_time);
    done.unwrap_or_else(|_| {
        Err(format!(
            "the end of the GPU work was not confirmed within {seconds} s",
            seconds = PATIENCE.as_secs()
        ))
    })
}

/// A command line with which a container engine makes the runtime send a signal to a container.
#[derive(Debug, PartialEq, Eq)]
struct SignalCommand<'a> {
    /// The options of the command line that are in `FOR_STATE`, with their values.
    options: Vec<&'a OsStr>,
    container: &'a OsStr,
    signal: u32,
    to_all: bool,
}

/// The part of the output of `runc state` that this program reads. `pid` is the first process of the container, or 0 if the
/// container has no process.
#[derive(Deserialize)]
struct FirstProcess {
    #[serde(default)]
    pid: u32,
}

type Arguments<'a> = Peekable<slice::Iter<'a, OsString>>;

impl<'a> SignalCommand<'a> {
    /// None if the command line sends no signal that is meant to end programs.
    fn by(arguments: &'a [OsString]) -> Option<Self> {
        let mut arguments = arguments.iter().peekable();
        let options = options_for_state(&mut arguments);
        match arguments.next()?.to_str()? {
            "kill" => Self::by_kill(options, arguments),
            "delete" => Self::by_delete(options, arguments),
            _ => None,
        }
    }

    fn by_kill(options: Vec<&'a OsStr>, arguments: Arguments<'a>) -> Option<Self> {
        let (flags, names) = flags_and_names(arguments);
        let to_all = flags.iter().any(|flag| matches!(flag.as_bytes(), b"--all" | [b'-', b'a']));
        let signal = number(names.get(1).map_or("TERM", |signal| signal.to_str().unwrap_or_default()))?;
        Some(Self { options, container: names.first()?, signal, to_all })
    }

    /// A forced deletion kills the container before it deletes the container. Without force, the runtime sends no signal, and
    /// the result is None.
    fn by_delete(options: Vec<&'a OsStr>, arguments: Arguments<'a>) -> Option<Self> {
        let (flags, names) = flags_and_names(arguments);
        let is_forced = flags.iter().any(|flag| matches!(flag.as_bytes(), b"--force" | [b'-', b'f']));
        let container = names.first()?;
        is_forced.then_some(Self { options, container, signal: 9, to_all: true })
    }

    /// Asks the service to end the GPU work of the programs that get the signal. Returns the first process of the container, or
    /// None if the container has no process or its first process is not known.
    fn prepare(&self, runtime: &OsStr) -> Option<ProcessId> {
        let mut first = None;
        let ended = in_time(async {
            let Some(pid) = self.first_process(runtime).await? else { return Ok(()) };
            first = identity::read(pid).ok();
            let stop = ContainerStop {
                pid,
                container: self.container.to_string_lossy().into_owned(),
                signal: self.signal,
                to_all: self.to_all,
            };
            let asked = async { DaemonProxy::connect().await?.release_group(&stop).await };
            asked.await.map_err(|error: BusError| error.to_string())
        });
        if let Err(why) = ended {
            self.write_to_journal(runtime, &why);
        }
        first
    }

    /// Asks the runtime for the PID of the container's first process. None if the container has no process or does not exist.
    async fn first_process(&self, runtime: &OsStr) -> Result<Option<u32>, String> {
        let mut command = tokio::process::Command::new(runtime);
        command.args(&self.options).arg("state").arg(self.container);
        command.stdin(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
        let asked = command.output().await.map_err(|error| error.to_string())?;
        // If the container does not exist, the runtime itself reports the missing container when it has to send the signal.
        if !asked.status.success() {
            return Ok(None);
        }
        let state: FirstProcess = serde_json::from_slice(&asked.stdout)
            .map_err(|error| format!("{} state: {error}", runtime.display()))?;
        Ok(Some(state.pid).filter(|pid| *pid != 0))
    }

    fn write_to_journal(&self, runtime: &OsStr, why: &str) {
        let (container, name) = (self.container.to_string_lossy(), runtime.to_string_lossy());
        let line = printable(&format!(
            "container {container} gets signal {signal} although the container's GPU work may not have ended \
             yet, so the signal can cause a fault for other clients of the GPU: {why}",
            signal = self.signal
        ));
        let entry = format!("PRIORITY=4\nSYSLOG_IDENTIFIER={PREFIX}{}\nMESSAGE={line}\n", printable(&name));
        // The host may have no journal, so errors are ignored. A full journal must not block the container engine, so the
        // socket does not block.
        let _ = UnixDatagram::unbound().and_then(|socket| {
            socket.set_nonblocking(true)?;
            socket.send_to(entry.as_bytes(), JOURNAL)
        });
    }
}

/// Reads the options that precede the runtime's command. Returns the options in `FOR_STATE` with their values, and stops at the
/// command.
fn options_for_state<'a>(arguments: &mut Arguments<'a>) -> Vec<&'a OsStr> {
    let mut options = Vec::new();
    while let Some(option) = arguments.next_if(|argument| argument.as_bytes().starts_with(b"-")) {
        let text = option.to_str().unwrap_or_default();
        let name = text.split('=').next().unwrap_or_default();
        let value = if WITH_VALUE.contains(&text) { arguments.next() } else { None };
        if FOR_STATE.contains(&name) {
            options.push(option.as_os_str());
            options.extend(value.map(OsString::as_os_str));
        }
    }
    options
}

fn flags_and_names(arguments: Arguments<'_>) -> (Vec<&OsStr>, Vec<&OsStr>) {
    let all = arguments.map(OsString::as_os_str).filter(|argument| *argument != "--");
    all.partition(|argument| argument.as_bytes().starts_with(b"-"))
}

/// None if the signal is not meant to end programs. Runtimes accept the forms `9`, `KILL` and `SIGKILL`.
fn number(text: &str) -> Option<u32> {
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let is_it = |(its, number): &&(&str, u32)| name == *its || text.parse() == Ok(*number);
    SIGNALS.iter().find(is_it).map(|(_, number)| *number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    fn wanted<T>(line: &str, then: impl FnOnce(Option<SignalCommand<'_>>) -> T) -> T {
        then(SignalCommand::by(&words(line)))
    }

    #[test]
    fn the_name_tells_the_runtime() {
        let before = |name| stands_before(OsStr::new(name)).map(|name| name.to_str().unwrap());
        assert_eq!(before("/usr/bin/yunion-mps-runc"), Some("runc"));
        assert_eq!(before("yunion-mps-nvidia-container-runtime"), Some("nvidia-container-runtime"));
        for own in ["yunion-mpsctl", "/usr/bin/yunion-mps-", "", "/", "runc"] {
            assert_eq!(before(own), None);
        }
    }

    #[test]
    fn signals_that_may_end_programs_are_found() {
        for (line, options, container, signal, to_all) in [
            ("kill abc 15", "", "abc", 15, false),
            ("kill abc", "", "abc", 15, false),
            ("--root /r --log /l --log-format json kill --all j1 9", "--root /r", "j1", 9, true),
            ("--systemd-cgroup --root=/r kill -a j1 SIGTERM", "--systemd-cgroup --root=/r", "j1", 15, true),
            ("--log-level debug kill kill kill", "", "kill", 9, false),
            ("delete --force j1", "", "j1", 9, true),
            ("--debug delete -f j1", "", "j1", 9, true),
        ] {
            wanted(line, |wanted| {
                let wanted = wanted.unwrap_or_else(|| panic!("{line}"));
                let expected: Vec<&str> = options.split_terminator(' ').collect();
                assert_eq!(wanted.options, expected, "{line}");
                assert_eq!(
                    (wanted.container, wanted.signal, wanted.to_all),
                    (OsStr::new(container), signal, to_all),
                    "{line}"
                );
            });
        }
    }

    #[test]
    fn nothing_else_is_asked_about() {
        for line in [
            "create --bundle /kill kill",
            "--log kill state j1",
            "kill j1 USR1",
            "kill j1 0",
            "kill",
            "delete j1",
            "delete --force",
            "--root",
            "",
            "exec j1 kill 9",
        ] {
            wanted(line, |wanted| assert_eq!(wanted, None, "{line}"));
        }
    }
}
