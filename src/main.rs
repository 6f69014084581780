//! yunion-mps-daemon: the service.

use std::process::ExitCode;

fn main() -> ExitCode {
    yunion_mps::run_daemon()
}
