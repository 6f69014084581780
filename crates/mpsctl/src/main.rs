//! yunion-mpsctl: asks yunion-mps-daemon over D-Bus.

use std::process::ExitCode;

fn main() -> ExitCode {
    let (mut out, mut err) = (std::io::stdout().lock(), std::io::stderr());
    ExitCode::from(mpsctl::main(std::env::args_os(), &mut out, &mut err))
}
