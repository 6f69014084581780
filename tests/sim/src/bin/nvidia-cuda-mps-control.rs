//! nvidia-cuda-mps-control of the simulated host: control daemon and front end.

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    nvidia_ml::mps::control::run(&arguments).into()
}
