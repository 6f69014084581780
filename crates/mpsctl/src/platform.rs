//! Other software of the host, as far as files say that it is there: the platform, and NVIDIA's container toolkit.

use std::path::Path;

use common::config::{Loaded, below};

/// The directory of the platform's programs.
const PROGRAMS: &str = "/opt/yunion";

/// Files of the toolkit.
const TOOLKIT: [&str; 5] = [
    "/usr/bin/nvidia-container-runtime",
    "/usr/bin/nvidia-container-runtime-hook",
    "/usr/bin/nvidia-container-cli",
    "/usr/bin/nvidia-ctk",
    "/etc/nvidia-container-runtime/config.toml",
];

/// The directory in which CUDA looks for a control daemon by itself. On a host without the platform nobody gives programs
/// another one. The toolkit mounts it into every container with a GPU, whenever it exists.
pub(super) const WHERE_CUDA_LOOKS: &str = "/tmp/nvidia-mps";

/// Whether the host belongs to the platform. The platform's own keys stand in the same file.
pub(super) fn is_here(sysroot: &Path, loaded: &Loaded) -> bool {
    !loaded.unknown_keys.is_empty() || below(sysroot, Path::new(PROGRAMS)).exists()
}

/// A file of the toolkit, if it is installed.
pub(super) fn toolkit(sysroot: &Path) -> Option<&'static str> {
    TOOLKIT.into_iter().find(|file| below(sysroot, Path::new(file)).exists())
}
