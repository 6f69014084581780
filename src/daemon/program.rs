//! The program yunion-mps-daemon: its command line, logging, runtime and exit status.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use super::{failed, logging};
use crate::mps::launch;
use common::arguments::Arguments;
use common::check::report::CheckReport;
use common::config::Sources;
use common::host::oom;
use common::text::{json, printable};

pub fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    if words.next().is_some_and(|word| word == launch::ARGUMENT) {
        return match launch::become_program(words) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => fail(&format!("the control daemon can't be started: {error}")),
        };
    }
    let arguments = Arguments::parse();
    let sources = Sources { config: arguments.config, sysroot: arguments.sysroot };
    if arguments.check {
        return check(sources, arguments.json);
    }
    let runtime_directory = std::env::var_os("RUNTIME_DIRECTORY")
        .map_or_else(|| sources.sysroot.join("run/yunion-mps-daemon"), PathBuf::from);
    let level = logging::init();
    if let Err(error) = oom::adjust(oom::OWN) {
        tracing::debug!(
            "the OOM score of this service can't be set, so the OOM killer treats the service like its \
             control daemons: {error}"
        );
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("the event loop of this program can't be started: {error}")),
    };
    // The runtime runs its tasks in the order in which they were woken. If the main loop were not a task, `block_on` would run
    // the main loop only after many other tasks, and these tasks could act on a new state before it is published.
    let exit = runtime.block_on(runtime.spawn(super::run(sources, runtime_directory, level)));
    // A call of NVML may hang for ever on its thread. The program ends without waiting for this thread.
    runtime.shutdown_background();
    exit.unwrap_or_else(|error| failed(&error.to_string()))
}

/// Prints what a start or a reload of the service would do. The exit status says the result too, for callers that do not read
/// the output.
fn check(sources: Sources, as_json: bool) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("the event loop of this program can't be started: {error}")),
    };
    let report = runtime.block_on(CheckReport::new(sources));
    let text = if as_json {
        json(&report.document()).unwrap_or_else(|error| error.to_string())
    } else {
        report.lines().iter().map(|line| printable(line)).collect::<Vec<_>>().join("\n")
    };
    let _ = writeln!(io::stdout(), "{text}");
    ExitCode::from(report.exit_status())
}

fn fail(reason: &str) -> ExitCode {
    let _ = writeln!(io::stderr(), "yunion-mps-daemon: {reason}");
    ExitCode::FAILURE
}
