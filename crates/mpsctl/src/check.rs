//! `yunion-mpsctl check`: the mistakes of the configuration, and the changes that a reload would make.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use common::check::report::CheckReport;
use common::config::Sources;

use crate::show::table::hanging;
use crate::{Result, print_json};

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The main configuration file [default: the file that the service reads]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Read the host's files (configuration, /sys, pci.ids) below this directory
    #[arg(long, value_name = "DIR", default_value = "/")]
    sysroot: PathBuf,
    /// Print everything as one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs the command `check`, and returns its exit status.
pub(crate) async fn check(arguments: &Arguments, out: &mut dyn Write) -> Result<u8> {
    let sources = Sources { config: arguments.config.clone(), sysroot: arguments.sysroot.clone() };
    let report = CheckReport::new(sources).await;
    if arguments.json {
        print_json(out, &report.document())?;
    } else {
        for line in report.lines() {
            writeln!(out, "{}", hanging(&line))?;
        }
    }
    Ok(report.exit_status())
}
