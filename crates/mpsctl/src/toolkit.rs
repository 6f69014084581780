//! Finds NVIDIA's container toolkit by its files.

use std::path::Path;

use common::config::below;

/// The toolkit is installed if one of these files exists.
const FILES: [&str; 5] = [
    "/usr/bin/nvidia-container-runtime",
    "/usr/bin/nvidia-container-runtime-hook",
    "/usr/bin/nvidia-container-cli",
    "/usr/bin/nvidia-ctk",
    "/etc/nvidia-container-runtime/config.toml",
];

/// The directory in which CUDA looks for a control daemon by default. If this directory exists on the host, NVIDIA's container
/// toolkit mounts it into every container with a GPU.
pub(super) const WHERE_CUDA_LOOKS: &str = "/tmp/nvidia-mps";

pub(super) fn installed(sysroot: &Path) -> Option<&'static str> {
    FILES.into_iter().find(|file| below(sysroot, Path::new(file)).exists())
}
