//! yunion-mpsctl: what its subcommands do. They show what the bus says and compute nothing a second time; `check` and
//! `doctor` hold it against what the host itself says, `probe` and `bench` put it to the test by CUDA clients of their own.

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
    /// Shows the service, its control daemons, the GPUs with their limits, and what happened last
    #[command(after_help = "Examples:\n  \
        yunion-mpsctl status\n  \
        yunion-mpsctl status --json | jq .service.state")]
    Status {
        /// Everything, as one JSON object
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
        /// Everything the daemon publishes, as a JSON array
        #[arg(long)]
        json: bool,
    },
    /// Prints metrics of the service, its devices and their clients as `OpenMetrics` text
    #[command(
        after_help = "Where yunion-mps-daemon is not running the only metric is yunion_mps_up 0, and the exit \
        status is 0 all the same: a collector is to take that in. It is 1 where the bus can't be asked.\n\n\
        Examples:\n  \
        yunion-mpsctl metrics\n  \
        yunion-mpsctl metrics | grep '^yunion_mps_device_memory_used_bytes'"
    )]
    Metrics,
    /// Says whether the configuration is right, what it comes to, and what a reload would change
    #[command(
        after_help = "Needs no root, no GPU and no running daemon; what each of them would tell is then missing. \
        Timeouts and the size of logs are not published, and so not compared.\n\n\
        Exit status: 0 right, whether or not something would change; 1 wrong.\n\n\
        Examples:\n  \
        yunion-mpsctl check && yunion-mpsctl reload\n  \
        yunion-mpsctl check /root/host.conf.new\n  \
        yunion-mpsctl check --json | jq '.differences[] | select(.effect.when != \"live\")'"
    )]
    Check(check::report::Arguments),
    /// Looks for everything that can be wrong on this host, and names the remedy of each
    #[command(
        after_help = "Runs without the daemon too. What only root may see is not checked for others, and said so.\n\n\
        Exit status: 0 nothing is wrong (there may be things to know), 4 warnings, 5 errors.\n\n\
        Examples:\n  \
        yunion-mpsctl doctor\n  \
        yunion-mpsctl doctor --json | jq -r '.findings[] | select(.severity == \"error\") | .remedy'"
    )]
    Doctor(doctor::Arguments),
    /// Prints what a container, or a process on this host, needs to use devices
    #[command(after_help = "Examples:\n  \
        eval \"$(yunion-mpsctl env 00:06.0-1)\"\n  \
        docker run --rm $(yunion-mpsctl env 00:06.0-1 --format docker) IMAGE\n  \
        yunion-mpsctl env 00:06.0-1 00:07.0-0 --format json")]
    Env(show::env::Arguments),
    /// Runs a command on this host as a client of devices, and stops it without hurting its neighbours
    #[command(
        after_help = "Ctrl-C, SIGTERM, SIGHUP and SIGQUIT first end the GPU work of the command and of all that it \
        has started (CUDA error 810), then they are passed on to it; a second one is passed on at once. SIGUSR1 and \
        SIGUSR2 go to a command that has a use for them, and otherwise count as one that ends it. A signal \
        alone, in the middle of a kernel, would be a fault for every client on that GPU. So stop it in this way \
        and not by a signal to the command itself. Only root can have GPU work ended: for everybody else a signal \
        is passed on at once, with a warning. The command runs in a session of its own: it can use the \
        terminal, but not /dev/tty.\n\n\
        The exit status is the command's, or 128 and the number of the signal that ended it; 126 and 127 mean \
        that it could not be started.\n\n\
        Examples:\n  \
        yunion-mpsctl run 00:06.0-1 -- python3 train.py\n  \
        yunion-mpsctl run 00:06.0-1 00:07.0-1 -- ./two-gpus --verbose"
    )]
    Run(act::run::Arguments),
    /// Ends the GPU work of processes without hurting their neighbours
    #[command(
        after_help = "Those processes get CUDA error 810; no signal is sent to them. It returns when none of them \
        is a client any more, and fails after 30 seconds.\n\n\
        Examples:\n  \
        yunion-mpsctl terminate 1153 && kill 1153\n  \
        yunion-mpsctl terminate --device 00:06.0-1\n  \
        yunion-mpsctl terminate --container 4f1c2d3e5a6b && docker stop 4f1c2d3e5a6b"
    )]
    Terminate(act::terminate::Arguments),
    /// Has the configuration read again, as systemctl reload does
    #[command(after_help = "A wrong configuration is refused, and the one before stays in force.\n\n\
        Examples:\n  \
        yunion-mps-daemon --check && yunion-mpsctl reload")]
    Reload {
        /// The generation and the state that are published now, as a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Carries out the changes of the configuration that wait for clients to leave
    #[command(after_help = "Examples:\n  \
        yunion-mpsctl apply\n  \
        yunion-mpsctl apply --force")]
    Apply {
        /// Don't wait for clients: they lose their GPU (CUDA error 806)
        #[arg(long)]
        force: bool,
        /// What was done, as a JSON object
        #[arg(long)]
        json: bool,
    },
    /// Opens a CUDA context as a virtual device and says which SMs and how much memory it really gets
    #[command(
        after_help = "A process with the device's environment looks first, then one without the limits in it: what \
        that one gets is what the control daemon itself enforces, also if somebody has changed it behind our back. \
        SMs may differ by one pair, in which GPUs hand them out; memory by what a context takes of it (128 MiB and \
        6 MiB for each SM at most). GPUs before Volta enforce no limits, and nothing is compared there.\n\n\
        For a moment each process allocates as much as the device promises. Where other programs hold more than \
        their share, a neighbour's allocation can fail in that moment; so nothing is allocated on a GPU that has \
        clients, unless --beside-clients is given.\n\n\
        Exit status: 1 if anything differs, or could not be found out.\n\n\
        Examples:\n  \
        yunion-mpsctl probe\n  \
        yunion-mpsctl probe 00:06.0-1\n  \
        yunion-mpsctl probe --json | jq '.[] | select(.matches | not)'"
    )]
    Probe(measure::probe::Arguments),
    /// Measures what MPS is worth on a GPU: CUDA processes side by side, with MPS and without
    #[command(
        after_help = "Two kernels are run by 1, 2, 4, ... processes at once: a narrow one, which leaves most of the \
        GPU idle, and a wide one, which fills it. It takes about a minute, in which the GPU is under full load; it \
        refuses to start beside other clients, unless --beside-clients is given. Without MPS it can only be \
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
            Self::Bus(_)
            | Self::Runtime(_)
            | Self::Output(_)
            | Self::Json(_)
            | Self::Signals(_)
            | Self::Start(_)
            | Self::Wait(_)
            | Self::Failed(_) => FAILED,
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
    // `check` and `doctor` have something to say without the daemon too, and look for it themselves.
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

/// The same JSON document without anything that could command a terminal: what of that is left unescaped stands in strings.
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
