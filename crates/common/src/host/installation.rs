//! Detects drivers that are only partly on the host: the kernel module is loaded, but the library or the programs are missing.

use std::fs;
use std::path::Path;

use crate::problem::Problem;

const MODULE: &str = "proc/driver/nvidia/version";

/// The directory at which NVIDIA's GPU operator mounts the file system of its driver container.
const OPERATORS: &str = "run/nvidia/driver";

const ON_THE_HOST: &str = "install the same driver with its MPS programs on the host, and keep the operator \
                           from installing a driver (driver.enabled=false)";

/// The problem that the driver's kernel module is loaded, but the driver's library is not on the host. None if no module is
/// loaded.
pub(super) fn without_library(sysroot: &Path) -> Option<Problem> {
    let module = fs::read_to_string(sysroot.join(MODULE)).ok()?;
    let loaded = format!(
        "NVIDIA's kernel module {version} is loaded, but its libraries are",
        version = version(&module)
    );
    Some(match operators_program(sysroot, "nvidia-smi") {
        Some(problem) => {
            Problem::new(format!("{loaded} not on the host: {why}", why = problem.found), problem.remedy)
        }
        None => Problem::new(format!("{loaded} not installed"), "install the libraries of the same version"),
    })
}

/// The problem that a program of the driver is in the driver container of NVIDIA's GPU operator, but not on the host. None if
/// that container does not have the program.
pub fn operators_program(sysroot: &Path, program: &str) -> Option<Problem> {
    let operators = sysroot.join(OPERATORS);
    operators.join("usr/bin").join(program).exists().then(|| {
        let found = format!("NVIDIA's GPU operator has the driver in a container of its own (/{OPERATORS})");
        Problem::new(found, ON_THE_HOST)
    })
}

fn version(module: &str) -> &str {
    let mut words = module.split_whitespace();
    words
        .find(|word| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit()))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_without_library_is_told_with_its_version() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(without_library(root.path()), None);
        let plant = |file: &str, text: &str| {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        plant(
            MODULE,
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version:  gcc 13.3.0\n",
        );
        assert_eq!(
            without_library(root.path()).unwrap().to_string(),
            "NVIDIA's kernel module 580.95.05 is loaded, but its libraries are not installed; install the \
             libraries of the same version"
        );
        plant("run/nvidia/driver/usr/bin/nvidia-smi", "");
        assert_eq!(
            without_library(root.path()).unwrap().to_string(),
            "NVIDIA's kernel module 580.95.05 is loaded, but its libraries are not on the host: NVIDIA's \
             GPU operator has the driver in a container of its own (/run/nvidia/driver); install the same \
             driver with its MPS programs on the host, and keep the operator from installing a driver \
             (driver.enabled=false)"
        );
        assert_eq!(operators_program(root.path(), "nvidia-cuda-mps-control"), None);
        assert_eq!(
            version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.86.10  Wed Jul 26"),
            "535.86.10"
        );
        assert_eq!(version(""), "");
    }
}
