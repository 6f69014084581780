//! NVIDIA's container toolkit, as far as it concerns the pipe directory: it mounts the directory in which CUDA looks by itself
//! into every container with a GPU, whenever that directory exists.

use std::path::Path;

use common::config;

/// Files of the toolkit.
const FILES: [&str; 5] = [
    "/usr/bin/nvidia-container-runtime",
    "/usr/bin/nvidia-container-runtime-hook",
    "/usr/bin/nvidia-container-cli",
    "/usr/bin/nvidia-ctk",
    "/etc/nvidia-container-runtime/config.toml",
];

/// A file of the toolkit, if it is installed.
pub(super) fn installed(sysroot: &Path) -> Option<&'static str> {
    FILES.into_iter().find(|file| config::below(sysroot, Path::new(file)).exists())
}
