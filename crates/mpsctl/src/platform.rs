//! Whether the host belongs to the platform, as far as its files say so.

use std::path::Path;

use common::config::{self, Loaded};

/// The directory of the platform's programs.
const PROGRAMS: &str = "/opt/yunion";

/// The directory in which CUDA looks for a control daemon by itself. On a host without the platform nobody gives programs
/// another one. NVIDIA's container runtime mounts it into containers.
pub(super) const WHERE_CUDA_LOOKS: &str = "/tmp/nvidia-mps";

/// The platform's own keys stand in the same file.
pub(super) fn is_here(sysroot: &Path, loaded: &Loaded) -> bool {
    !loaded.unknown_keys.is_empty() || config::below(sysroot, Path::new(PROGRAMS)).exists()
}
