//! The executable of yunion-mps-device-plugin, a device plugin of Kubernetes.

use std::process::ExitCode;

fn main() -> ExitCode {
    device_plugin::main()
}
