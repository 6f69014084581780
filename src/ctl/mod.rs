//! yunion-mpsctl: what its subcommands do. They show what the bus says and compute nothing a second time.

use std::ffi::OsString;
use std::io::{self, Write};

use clap::{Parser, Subcommand};

use crate::dbus::proxy::{Client, ClientError};

mod apply;
mod env;
mod list;
mod run;
mod status;
mod table;
mod terminate;

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
    after_help = "Exit status: 0, 1 (it failed), 2 (wrong usage), 3 (yunion-mps-daemon is not running).\n\n\
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
    List(list::Arguments),
    /// Shows the service, its control daemons, the GPUs with their limits, and what happened last
    #[command(after_help = "Examples:\n  \
        yunion-mpsctl status\n  \
        yunion-mpsctl status --json | jq .service.state")]
    Status(status::Arguments),
    /// Prints what a container, or a process on this host, needs to use devices
    #[command(after_help = "Examples:\n  \
        eval \"$(yunion-mpsctl env 00:06.0-1)\"\n  \
        docker run --rm $(yunion-mpsctl env 00:06.0-1 --format docker) IMAGE\n  \
        yunion-mpsctl env 00:06.0-1 00:07.0-0 --format json")]
    Env(env::Arguments),
    /// Runs a command on this host as a client of devices, and stops it without hurting its neighbours
    #[command(
        after_help = "Ctrl-C, SIGTERM, SIGHUP and SIGQUIT first end the GPU work of the command and of all that it \
        has started (CUDA error 810), then they are passed on to it; a second one is passed on at once. A signal \
        alone, in the middle of a kernel, would be a fault for every client on that GPU. So stop it in this way \
        and not by a signal to the command itself. The command runs in a session of its own: it can use the \
        terminal, but not /dev/tty.\n\n\
        The exit status is the command's, or 128 and the number of the signal that ended it; 126 and 127 mean \
        that it could not be started.\n\n\
        Examples:\n  \
        yunion-mpsctl run 00:06.0-1 -- python3 train.py\n  \
        yunion-mpsctl run 00:06.0-1 00:07.0-1 -- ./two-gpus --verbose"
    )]
    Run(run::Arguments),
    /// Ends the GPU work of processes without hurting their neighbours
    #[command(
        after_help = "Those processes get CUDA error 810; no signal is sent to them. It returns when none of them \
        is a client any more, and fails after 30 seconds.\n\n\
        Examples:\n  \
        yunion-mpsctl terminate 1153 && kill 1153\n  \
        yunion-mpsctl terminate --device 00:06.0-1\n  \
        yunion-mpsctl terminate --container 4f1c2d3e5a6b && docker stop 4f1c2d3e5a6b"
    )]
    Terminate(terminate::Arguments),
    /// Has the configuration read again, as systemctl reload does
    #[command(after_help = "A wrong configuration is refused, and the one before stays in force.\n\n\
        Examples:\n  \
        yunion-mps-daemon --check && yunion-mpsctl reload")]
    Reload,
    /// Carries out the changes of the configuration that wait for clients to leave
    #[command(after_help = "Examples:\n  \
        yunion-mpsctl apply\n  \
        yunion-mpsctl apply --force")]
    Apply(apply::Arguments),
}

/// Why a subcommand could not do what it was asked.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Client(#[from] ClientError),
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
}

impl Error {
    fn exit_status(&self) -> u8 {
        match self {
            Self::Client(ClientError::NotRunning) => NOT_RUNNING,
            Self::Client(_)
            | Self::Runtime(_)
            | Self::Output(_)
            | Self::Json(_)
            | Self::Signals(_)
            | Self::Start(_)
            | Self::Wait(_) => FAILED,
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

/// Does what the arguments ask (the first one is the program's name), and returns the exit status.
pub fn main(arguments: impl IntoIterator<Item = OsString>, out: &mut dyn Write, err: &mut dyn Write) -> u8 {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    if let Some(status) = run::become_command(&arguments, err) {
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
            // Where nobody listens, the exit status says it too.
            let _ = writeln!(err, "yunion-mpsctl: {}", table::printable(&e.to_string()));
            e.exit_status()
        }
    }
}

fn run_command(command: Command, out: &mut dyn Write) -> Result<u8, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(Error::Runtime)?.block_on(execute(command, out))
}

async fn execute(command: Command, out: &mut dyn Write) -> Result<u8, Error> {
    let client = Client::connect().await?;
    match command {
        Command::List(arguments) => list::list(&client, &arguments, out).await?,
        Command::Status(arguments) => status::status(&client, &arguments, out).await?,
        Command::Env(arguments) => env::env(&client, &arguments, out).await?,
        Command::Terminate(arguments) => terminate::terminate(&client, &arguments, out).await?,
        Command::Reload => apply::reload(&client, out).await?,
        Command::Apply(arguments) => apply::apply(&client, &arguments, out).await?,
        Command::Run(arguments) => return run::run(client, &arguments).await,
    }
    out.flush()?;
    Ok(0)
}

/// Prints a JSON document, one value a line.
fn print_json(out: &mut dyn Write, value: &impl serde::Serialize) -> Result<(), Error> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)?;
    Ok(())
}
