//! NVIDIA's container toolkit, as far as files show that it is installed.

use std::path::Path;

use common::config::below;

/// Files of the toolkit.
const FILES: [&str; 5] = [
    "/usr/bin/nvidia-container-runtime",
    "/usr/bin/nvidia-container-runtime-hook",
    "/usr/bin/nvidia-container-cli",
    "/usr/bin/nvidia-ctk",
    "/etc/nvidia-container-runtime/config.toml",
];

/// The directory in which CUDA looks for a control daemon by default. On a host without the platform nothing gives programs
/// another directory. The toolkit mounts it into every container with a GPU if it exists.
pub(super) const WHERE_CUDA_LOOKS: &str = "/tmp/nvidia-mps";

/// A file of the toolkit, if it is installed.
pub(super) fn installed(sysroot: &Path) -> Option<&'static str> {
    FILES.into_iter().find(|file| below(sysroot, Path::new(file)).exists())
}
