//! The simulated host's program `nvidia-cuda-mps-server`, which the simulated control daemon starts.

fn main() -> std::process::ExitCode {
    nvidia_ml::mps::server::run().into()
}
