//! The simulated host's program `nvidia-smi`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match nvidia_ml::smi::run(&arguments, &mut std::io::stdout()) {
        Ok(status) => status.into(),
        Err(_) => ExitCode::FAILURE,
    }
}
