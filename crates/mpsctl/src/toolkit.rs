//! NVIDIA's container toolkit, as far as files show that it is installed.

use std::path::Path;

use common::config::below;

/// Files that show that the toolkit is installed.
const FILES: [&str; 5] = [
    "/usr/bin/nvidia-container-runtime",
    "/usr/bin/nvidia-container-runtime-hook",
    "/usr/bin/nvidia-container-cli",
    "/usr/bin/nvidia-ctk",
    "/etc/nvidia-container-runtime/config.toml",
];

/// The directory in which CUDA looks for a control daemon by default. On a host without the platform, no setting makes CUDA look
/// for control daemons in another directory by default. If `/tmp/nvidia-mps` exists, NVIDIA's container toolkit mounts it into
/// every container with a GPU.
pub(super) const WHERE_CUDA_LOOKS: &str = "/tmp/nvidia-mps";

/// The first file of the toolkit that exists. None if the toolkit is not installed.
pub(super) fn installed(sysroot: &Path) -> Option<&'static str> {
    FILES.into_iter().find(|file| below(sysroot, Path::new(file)).exists())
}
