//! The subcommands of yunion-mpsctl. They show the values on the bus and compute nothing a second time. `check` and
//! `doctor` compare these values with the host itself, `probe` and `bench` test them with CUDA clients of their own.

use std::ffi::OsString;
use std::io::{self, Write};

use clap::{CommandFactory, Parser, Subcommand};

use crate::dbus::proxy::{BusError, DaemonProxy};

mod act;
mod check;
mod doctor;
mod measure;
mod published;
mod show;
mod signals;

/// The exit status of a command that could not be carried out.
const FAILED: u8 = 1;
/// The exit status of a command line that makes no sense.
const USAGE: u8 = 2;
/// The exit status that means: the daemon is not running.
const NOT_RUNNING: u8 = 3;

/// Shows and uses the virtual GPU devices of yunion-mps-daemon.
#[derive(Debug, Parser)]
#[command(name = "yunion-mpsctl", version, arg_required_else_help = true)]
#[command(
    after_help = "Exit status: 0, 1 (it failed), 2 (wrong usage), 3 (yunion-mps-daemon is not running); doctor: 4 and 5.\n\n\
    Examples:\n  \
    yunion-mpsctl list\n  \
    yunion-mpsctl status\n  \
    yunion-mpsctl run 00:06.0-1 -- python3 train.py"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Lists the virtual devices, or the GPUs that they are slices of
    #[command(after_help = "Examples:\n  \
        yunion-mpsctl list\n  \
        yunion-mpsctl list --gpus\n  \
        yunion-mpsctl list --json | jq -r '.[] | select(.healthy) | .addr'")]
    List(show::list::Arguments),
    /// Shows the service, its control daemons, the GPUs with their limits, and the last events
    #[command(after_help = "Examples:\n  \
        yunion-mpsctl status\n  \
        yunion-mpsctl status --json | jq .service.state")]
    Status {
        /// Print everything as one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Lists the processes that use the GPUs, and marks those that bypass MPS
    #[command(after_help = "A container's id is shown with its first 12 digits; JSON has all of it.\n\n\
        Examples:\n  \
        yunion-mpsctl clients\n  \
        yunion-mpsctl clients --json | jq -r '.[] | select(.bypass) | .pid'\n  \
        yunion-mpsctl clients --json | jq 'group_by(.device) | map({(.[0].device // \"?\"): length}) | add'")]
    Clients {
        /// Print everything that the daemon publishes as a JSON array
        #[arg(long)]
        json: bool,
    },
    /// Prints metrics of the service, its devices and their clients as `OpenMetrics` text
    #[command(
        after_help = "If yunion-mps-daemon is not running, the only metric is yunion_mps_up 0 and the exit status is \
        0, so that a collector gets this finding. The exit status is 1 if the system bus can't be reached.\n\n\
        Examples:\n  \
        yunion-mpsctl metrics\n  \
        yunion-mpsctl metrics | grep '^yunion_mps_device_memory_used_bytes'"
    )]
    Metrics,
    /// Checks the configuration, and shows its plan and the changes that a reload would make
    #[command(
        after_help = "Works without root, without a GPU and without the service, and leaves out the parts that need \
        them. Timeouts and the size of logs are not published, and so not compared.\n\n\
        Exit status: 0 right, whether or not something would change; 1 wrong.\n\n\
        Examples:\n  \
        yunion-mpsctl check && yunion-mpsctl reload\n  \
        yunion-mpsctl check /root/host.conf.new\n  \
        yunion-mpsctl check --json | jq '.differences[] | select(.effect.when != \"live\")'"
    )]
    Check(check::report::Arguments),
    /// Looks for problems on this host, and names a remedy for each
    #[command(
        after_help = "Works without the service too. Some checks need root; for other users, doctor names the checks \
        that it has left out.\n\n\
        Exit status: 0 neither errors nor warnings, 4 warnings, 5 errors.\n\n\
        Examples:\n  \
        yunion-mpsctl doctor\n  \
        yunion-mpsctl doctor --json | jq -r '.findings[] | select(.severity == \"error\") | .remedy'"
    )]
    Doctor(doctor::Arguments),
    /// Prints the settings with which a container, or a process on this host, uses devices
    #[command(
        after_help = "Slices of one GPU can't be joined: with several of them the settings are those of one slice, and a \
        warning on standard error says so. run warns too.\n\n\
        Examples:\n  \
        eval \"$(yunion-mpsctl env 00:06.0-1)\"\n  \
        docker run --rm $(yunion-mpsctl env 00:06.0-1 --format docker) IMAGE\n  \
        yunion-mpsctl env 00:06.0-1 00:07.0-0 --format json"
    )]
    Env(show::env::Arguments),
    /// Runs a command on this host as a client of devices, and stops it without hurting its neighbours
    #[command(
        after_help = "Ctrl-C, SIGTERM, SIGHUP and SIGQUIT first end the GPU work of the command and of every process \
        that it has started (CUDA error 810). Then the command gets the signal. A second signal is passed on at once. A \
        command that handles SIGUSR1 or SIGUSR2 gets that signal alone; otherwise the signal counts as one that ends \
        the command. A signal in the middle of a kernel would be a fault for every client on that GPU, so signal \
        yunion-mpsctl and not the command itself. Only root can end GPU work: for other users a signal is passed on \
        at once, with a warning. The command runs in a session of its own: it can use the terminal, but not \
        /dev/tty.\n\n\
        The exit status is the command's, or 128 plus the number of the signal that ended it; 126 and 127 mean that \
        it could not be started.\n\n\
        Examples:\n  \
        yunion-mpsctl run 00:06.0-1 -- python3 train.py\n  \
        yunion-mpsctl run 00:06.0-1 00:07.0-1 -- ./two-gpus --verbose"
    )]
    Run(act::run::Arguments),
    /// Ends the GPU work of processes without hurting their neighbours
    #[command(
        after_help = "The processes get CUDA error 810, and no signal. The command returns when none of them is a \
        client any more, names them by PID, user and container, and fails after 30 seconds.\n\n\
        Examples:\n  \
        yunion-mpsctl terminate 1153 && kill 1153\n  \
        yunion-mpsctl terminate --device 00:06.0-1\n  \
        yunion-mpsctl terminate --container 4f1c2d3e5a6b && docker stop 4f1c2d3e5a6b"
    )]
    Terminate(act::terminate::Arguments),
    /// Takes slices, GPUs or the whole host out of use for new clients, while the present clients finish
    #[command(
        after_help = "A drained slice is not healthy, GetContainerConfig and the commands env and run refuse it, and the \
        CDI spec leaves it out. The drain lasts until undrain or the next boot: not even systemctl stop ends it. A \
        container that an agent gives the pipe directory by itself can start new clients until every slice of its control \
        daemon is drained, and with drivers before 580 nothing keeps such a container out. --wait waits for these clients \
        too.\n\n\
        --wait waits for every client of a GPU that is drained as a whole, and for every client that does not say which \
        slice it has. Ctrl-C ends the waiting, and the drain stays.\n\n\
        Exit status: 0 with --wait only if no client is left.\n\n\
        Examples:\n  \
        yunion-mpsctl drain 00:06.0-1\n  \
        yunion-mpsctl drain 00:06.0 --wait\n  \
        yunion-mpsctl drain --all --wait && systemctl stop yunion-mps-daemon"
    )]
    Drain(act::drain::Arguments),
    /// Lets new clients have drained slices again
    #[command(
        after_help = "A slice of a drained GPU can be taken back alone, and a GPU of a drained host: the rest stays \
        drained.\n\n\
        Examples:\n  \
        yunion-mpsctl undrain 00:06.0-1\n  \
        yunion-mpsctl undrain --all"
    )]
    Undrain(act::drain::What),
    /// Makes the service read its configuration again, as systemctl reload does
    #[command(after_help = "The service refuses a wrong configuration, and keeps the old one.\n\n\
        Examples:\n  \
        yunion-mps-daemon --check && yunion-mpsctl reload")]
    Reload {
        /// Print the published generation and state as a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Applies the changes of the configuration that wait for clients to leave
    #[command(after_help = "With --force the journal names the clients before they end.\n\n\
        Examples:\n  \
        yunion-mpsctl apply\n  \
        yunion-mpsctl apply --force")]
    Apply {
        /// Don't wait for clients: they lose their GPU (CUDA error 806)
        #[arg(long)]
        force: bool,
        /// Print the result as a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Opens a CUDA context on a virtual device, and compares its SMs and its memory with the published limits
    #[command(
        after_help = "The first process has the environment of the device. The second process has the same \
        environment without the limits, and so gets the limits that the control daemon itself enforces, even if \
        somebody else has changed them. SMs may differ by one pair, since GPUs hand out pairs. Memory may differ by \
        the part that a context takes (128 MiB and 6 MiB for each SM at most). GPUs before Volta enforce no limits, \
        so nothing is compared there.\n\n\
        For a moment each process allocates as much memory as the device promises. If other programs hold more than \
        their share, an allocation of a neighbour can fail in that moment. So nothing is allocated on a GPU that has \
        clients, unless --beside-clients is given.\n\n\
        Exit status: 1 if anything differs, or could not be found out.\n\n\
        Examples:\n  \
        yunion-mpsctl probe\n  \
        yunion-mpsctl probe 00:06.0-1\n  \
        yunion-mpsctl probe --json | jq '.[] | select(.matches | not)'"
    )]
    Probe(measure::probe::Arguments),
    /// Measures the speed of CUDA processes side by side on a GPU, with MPS and without
    #[command(
        after_help = "1, 2, 4, ... processes at once run two kernels: a narrow one, which leaves most of the GPU \
        idle, and a wide one, which fills it. The measurement takes about a minute, with the GPU under full load. It \
        does not start beside other clients, unless --beside-clients is given. Processes without MPS can only be \
        measured in compute mode DEFAULT. Ctrl-C ends the processes between two kernels.\n\n\
        Examples:\n  \
        yunion-mpsctl bench\n  \
        yunion-mpsctl bench -n 16 --device 00:06.0\n  \
        yunion-mpsctl bench -n 4 --device 00:06.0-0 --device 00:06.0-1 --json"
    )]
    Bench(measure::bench::Arguments),
}

/// Why a subcommand could not do what it was asked.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Bus(#[from] BusError),
    #[error("can't start: {0}")]
    Runtime(#[source] io::Error),
    #[error("can't write the output: {0}")]
    Output(#[from] io::Error),
    #[error("can't write JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("can't watch for signals: {0}")]
    Signals(#[source] io::Error),
    #[error("can't learn how the command ended: {0}")]
    Wait(#[source] io::Error),
    #[error("can't start a process: {0}")]
    Start(#[source] io::Error),
    #[error("{0}")]
    Failed(String),
}

impl Error {
    fn exit_status(&self) -> u8 {
        match self {
            Self::Bus(BusError::NotRunning) => NOT_RUNNING,
            _ => FAILED,
        }
    }

    /// Whether the reader of our output has gone, as `head` does: nothing to complain about.
    fn is_closed_pipe(&self) -> bool {
        match self {
            Self::Output(e) => e.kind() == io::ErrorKind::BrokenPipe,
            Self::Json(e) => e.io_error_kind() == Some(io::ErrorKind::BrokenPipe),
            _ => false,
        }
    }
}

/// The command line as data, for its manual page and completions.
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Does what the arguments ask (the first one is the program's name), and returns the exit status.
pub fn main(arguments: impl IntoIterator<Item = OsString>, out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    if let Some(status) = act::run::become_command(&arguments, err) {
        return status;
    }
    if let Some(status) = measure::cuda_client::become_cuda_client(&arguments, out) {
        return status;
    }
    let done = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => run_command(arguments.command, out),
        Err(e) if e.use_stderr() => {
            let _ = write!(err, "{}", e.render());
            Ok(USAGE)
        }
        Err(help) => {
            write!(out, "{}", help.render()).and_then(|()| out.flush()).map(|()| 0).map_err(Error::Output)
        }
    };
    match done {
        Ok(status) => status,
        Err(e) if e.is_closed_pipe() => 0,
        Err(e) => {
            // The exit status says it too, in case nobody listens.
            let _ = writeln!(err, "yunion-mpsctl: {}", show::table::printable(&e.to_string()));
            e.exit_status()
        }
    }
}

fn run_command(command: Command, out: &mut dyn Write) -> Result<u8, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(Error::Runtime)?.block_on(execute(command, out))
}

async fn execute(command: Command, out: &mut dyn Write) -> Result<u8, Error> {
    // `check` and `doctor` work without the daemon too, and look for it themselves.
    let daemon = DaemonProxy::connect;
    let mut status = 0;
    match command {
        Command::List(arguments) => show::list::list(&daemon().await?, &arguments, out).await?,
        Command::Status { json } => show::status::status(&daemon().await?, json, out).await?,
        Command::Clients { json } => show::clients::clients(&daemon().await?, json, out).await?,
        Command::Metrics => show::metrics::metrics(&daemon().await?, out).await?,
        Command::Check(arguments) => status = check::report::check(&arguments, out).await?,
        Command::Doctor(arguments) => status = doctor::doctor(&arguments, out).await?,
        Command::Env(arguments) => show::env::env(&daemon().await?, &arguments, out).await?,
        Command::Run(arguments) => status = act::run::run(daemon().await?, &arguments).await?,
        Command::Terminate(arguments) => act::terminate::terminate(&daemon().await?, &arguments, out).await?,
        Command::Drain(arguments) => status = act::drain::drain(&daemon().await?, &arguments, out).await?,
        Command::Undrain(what) => act::drain::undrain(&daemon().await?, &what, out).await?,
        Command::Reload { json } => act::apply::reload(&daemon().await?, json, out).await?,
        Command::Apply { force, json } => act::apply::apply(&daemon().await?, force, json, out).await?,
        Command::Probe(arguments) => {
            status = measure::probe::probe(&daemon().await?, &arguments, out).await?;
        }
        Command::Bench(arguments) => {
            status = measure::bench::bench(&daemon().await?, &arguments, out).await?;
        }
    }
    out.flush()?;
    Ok(status)
}

/// Prints a JSON document, one value a line.
fn print_json(out: &mut dyn Write, value: &impl serde::Serialize) -> Result<(), Error> {
    writeln!(out, "{}", escaped(&serde_json::to_string_pretty(value)?))?;
    Ok(())
}

/// The same JSON document without anything that could command a terminal. Only strings can contain such characters.
fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        if c == '\n' || !show::table::is_unprintable(c) {
            text.push(c);
        } else {
            text.extend(c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_cannot_command_the_terminal() {
        let value = serde_json::json!({"command": "a\u{9b}2J\u{7f}\u{202e}b\u{e0041}\n", "n": [1, 2]});
        let mut out = Vec::new();
        print_json(&mut out, &value).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains(r#""a\u009b2J\u007f\u202eb\udb40\udc41\n""#), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }
}
