//! Finds a program that this process can start.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use crate::problem::Problem;

pub fn find_program(name: &str) -> Result<PathBuf, Problem> {
    find_program_in(name, &std::env::var_os("PATH").unwrap_or_default())
}

pub fn find_program_in(name: &str, path: &OsStr) -> Result<PathBuf, Problem> {
    let mut unusable = None;
    for directory in std::env::split_paths(path) {
        let candidate = directory.join(name);
        if !candidate.is_file() {
            continue;
        }
        if rustix::fs::access(&candidate, rustix::fs::Access::EXEC_OK).is_ok() {
            return Ok(candidate);
        }
        unusable.get_or_insert(candidate);
    }
    Err(match unusable {
        Some(file) => Problem::new(
            format!("{} is not executable", file.display()),
            "make the file executable (chmod 755) or reinstall its package",
        ),
        None => Problem::new(
            format!("{name} is in no directory of PATH ({path})", path = Path::new(path).display()),
            "install the driver's MPS package (nvidia-cuda-mps, nvidia-compute-utils or xorg-x11-drv-nvidia-cuda)",
        ),
    })
}
