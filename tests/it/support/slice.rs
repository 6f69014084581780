//! Functions for the directories of slices, which containers have as mounts.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::host::Host;

pub(crate) fn directory_of(host: &Host, slice: &str) -> PathBuf {
    let container = host.container_of(slice);
    let mounts = container["mounts"].as_array().unwrap();
    assert_eq!(mounts.len(), 1, "{container}");
    assert_eq!(mounts[0]["container"], container["environment"]["CUDA_MPS_PIPE_DIRECTORY"]);
    assert_eq!(mounts[0]["read_only"], true);
    mounts[0]["host"].as_str().unwrap().into()
}

pub(crate) fn inode(path: &Path) -> Option<u64> {
    fs::symlink_metadata(path).map(|found| found.ino()).ok()
}

/// True if the only file in the slice's directory is `control`, a hard link to the socket in `control_directory`.
pub(crate) fn leads_to(directory: &Path, control_directory: &Path) -> bool {
    files(directory) == ["control"]
        && inode(&directory.join("control")) == inode(&control_directory.join("control"))
}

pub(crate) fn files(directory: &Path) -> Vec<String> {
    let Ok(files) = fs::read_dir(directory) else { return Vec::new() };
    let mut files: Vec<_> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    files.sort();
    files
}
