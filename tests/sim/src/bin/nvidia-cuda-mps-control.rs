//! The simulated host's program `nvidia-cuda-mps-control`: the MPS control daemon and its front end.

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    nvidia_ml::mps::control::run(&arguments).into()
}
