//! The command line of yunion-mps-daemon. The command line is in the library, since the build of the manual page needs it too.

use std::path::PathBuf;

use clap::{CommandFactory, Parser};

/// Serves NVIDIA GPUs through MPS as virtual devices on D-Bus.
#[derive(Debug, Parser)]
#[command(name = "yunion-mps-daemon", version)]
#[command(
    after_help = "Exit status: 0 (stopped), 1 (failed), 2 (wrong usage), 78 (the configuration is wrong)."
)]
pub struct Arguments {
    /// The main configuration file [default: /opt/yunion/bin/etc/host.conf if there, else /etc/yunion/host.conf]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Read configuration, /sys and pci.ids below this directory instead of /
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub sysroot: PathBuf,
    /// Check the configuration and change nothing: print the slices that the service would serve, and what a reload would
    /// change, or the errors; yunion-mpsctl check does the same
    #[arg(long)]
    pub check: bool,
    /// Print the answer of --check as one JSON object
    #[arg(long, requires = "check")]
    pub json: bool,
}

/// The parser of the command line, from which the build makes the manual page and the shell completions.
pub fn command() -> clap::Command {
    Arguments::command()
}
