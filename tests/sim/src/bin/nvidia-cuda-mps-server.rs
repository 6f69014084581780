//! nvidia-cuda-mps-server of the simulated host, which the control daemon starts.

fn main() -> std::process::ExitCode {
    nvidia_ml::mps::server::run().into()
}
