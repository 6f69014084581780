//! The program `cuda-client`: a CUDA program for tests on the simulated host.

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    nvidia_ml::mps::client::run(&arguments).into()
}
