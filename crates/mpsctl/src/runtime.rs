//! An OCI runtime that wraps another OCI runtime. Called as yunion-mps-NAME, this program executes NAME with the same
//! arguments. Before NAME sends a signal that may end a container's programs, the service ends their GPU work: a signal in
//! the middle of a kernel is a fault for every client on that GPU.

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

/// The prefix of the names under which this program is called as a runtime.
const PREFIX: &str = "yunion-mps-";

/// The longest time for ending GPU work. After this time the wrapped runtime is executed even if GPU work still runs.
const PATIENCE: Duration = Duration::from_secs(5);

/// The journal's socket for messages.
const JOURNAL: &str = "/run/systemd/journal/socket";

/// The socket of the system bus, unless an environment variable names another socket.
const BUS: &str = "/run/dbus/system_bus_socket";

/// The options of runc and crun that take a value and stand before the runtime's command.
const WITH_VALUE: [&str; 7] =
    ["--root", "--log", "--log-format", "--log-level", "--criu", "--rootless", "--cgroup-manager"];

/// The options with which a runtime finds the state of a container.
const FOR_STATE: [&str; 4] = ["--root", "--rootless", "--cgroup-manager", "--systemd-cgroup"];

/// The signals that end a program which does not handle them, each with its number.
const SIGNALS: [(&str, u32); 4] = [("INT", 2), ("QUIT", 3), ("KILL", 9), ("TERM", 15)];

/// Returns the name of the wrapped runtime, from the name with which this program was called.
pub fn stands_before(own_name: &OsStr) -> Option<&OsStr> {
    let name = Path::new(own_name).file_name()?.as_bytes().strip_prefix(PREFIX.as_bytes())?;
    (!name.is_empty()).then(|| OsStr::from_bytes(name))
}

/// Has the service end the GPU work of the processes that a signal of the container runtime would kill, and then executes the
/// container runtime. With arguments that send no signal, the container runtime is executed at once. Returns only if this
/// process has to report the result: the exit status of the runtime, or an error if the runtime can't be executed.
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

/// Has the runtime send its signal to a container, whose first process is `first`. A program whose GPU work has ended may end by
/// itself before the signal. If the first process has ended before the signal, the runtime reports an error, which the container
/// engine would treat as a failed stop. So the result in this case is success.
fn signal(mut command: Command, first: &ProcessId) -> io::Result<ExitCode> {
    let done = command.stdin(Stdio::inherit()).output()?;
    if !done.status.success() && !identity::runs(*first) {
        return Ok(ExitCode::SUCCESS);
    }
    // The runtime has already sent the signal, so an error while its output is passed on is ignored.
    let _ = io::stdout().write_all(&done.stdout).and_then(|()| io::stderr().write_all(&done.stderr));
    let code = done.status.code().and_then(|code| u8::try_from(code).ok());
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Returns true if this process may ask the service to end GPU work. Only root may end the GPU work of a container.
fn can_ask() -> bool {
    let has_bus = || std::env::var_os("DBUS_SYSTEM_BUS_ADDRESS").is_some() || Path::new(BUS).exists();
    rustix::process::geteuid().is_root() && has_bus()
}

/// Waits for a result, but at most for [`PATIENCE`].
fn in_time<T>(work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let in_time = async { tokio::time::timeout(PATIENCE, work).await };
    let done = tokio.map_err(|error| error.to_string())?.block_on(in_time);
    done.unwrap_or_else(|_| Err(format!("no answer within {seconds} s", seconds = PATIENCE.as_secs())))
}

/// A command line of a runtime that sends a signal to a container's processes.
#[derive(Debug, PartialEq, Eq)]
struct SignalCommand<'a> {
    /// The options with which the runtime finds the state of the container.
    options: Vec<&'a OsStr>,
    container: &'a OsStr,
    signal: u32,
    to_all: bool,
}

/// The state of a container with its first process, as runtimes print it.
#[derive(Deserialize)]
struct FirstProcess {
    #[serde(default)]
    pid: u32,
}

type Arguments<'a> = Peekable<slice::Iter<'a, OsString>>;

impl<'a> SignalCommand<'a> {
    /// The signal that a command line sends, if the signal may end a program.
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

    /// Returns the signal of a command that deletes a container by force, which kills the container first. None if the command
    /// does not delete the container by force.
    fn by_delete(options: Vec<&'a OsStr>, arguments: Arguments<'a>) -> Option<Self> {
        let (flags, names) = flags_and_names(arguments);
        let is_forced = flags.iter().any(|flag| matches!(flag.as_bytes(), b"--force" | [b'-', b'f']));
        let container = names.first()?;
        is_forced.then_some(Self { options, container, signal: 9, to_all: true })
    }

    /// Ends the GPU work of the programs that the signal may end, and returns the first process of the container. None if no
    /// process of the container runs, as far as is known.
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

    /// The first process of the container, as the runtime reports it. None if no process of the container runs.
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

    /// Writes to the journal why GPU work may still run when the signal comes.
    fn write_to_journal(&self, runtime: &OsStr, why: &str) {
        let (container, name) = (self.container.to_string_lossy(), runtime.to_string_lossy());
        let line = printable(&format!(
            "container {container} gets signal {signal} while its GPU work may go on, which can be a fault \
             for other clients of the GPU: {why}",
            signal = self.signal
        ));
        let entry = format!("PRIORITY=4\nSYSLOG_IDENTIFIER={PREFIX}{}\nMESSAGE={line}\n", printable(&name));
        // The host may have no journal, and a full journal must not block the engine. So errors of the journal are ignored.
        let _ = UnixDatagram::unbound().and_then(|socket| {
            socket.set_nonblocking(true)?;
            socket.send_to(entry.as_bytes(), JOURNAL)
        });
    }
}

/// The options before the command with which a runtime finds the state of a container.
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

/// The flags and the other arguments after a command.
fn flags_and_names(arguments: Arguments<'_>) -> (Vec<&OsStr>, Vec<&OsStr>) {
    let all = arguments.map(OsString::as_os_str).filter(|argument| *argument != "--");
    all.partition(|argument| argument.as_bytes().starts_with(b"-"))
}

/// The number of a signal, if it may end a program. Runtimes accept a signal as a number or as a name.
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
