//! The texts of the configuration files that setup writes.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

use super::gpus::HostGpus;
use crate::toolkit::WHERE_CUDA_LOOKS;
use common::config::{Loaded, MAIN_FILE};
use common::host::gpu::Gpu;
use common::text::printable;

const DEVICE_FILE: &str = "/etc/yunion/host_container_device.yml";

pub(super) struct Answers {
    /// True if the host belongs to a Cloudpods platform. The platform's host agent reads the same files.
    pub(super) platform: bool,
    /// True if CUDA programs on the host should find the control daemon without any setting.
    by_itself: bool,
    isolates_slices: bool,
    /// The number of slices of every GPU, also of a GPU that is added later. None if each GPU needs an entry in the device
    /// file.
    of_every: Option<u32>,
    /// The GPUs that get slices: the GPU, the number of its slices, and the memory of each slice in MiB. The memory is None if
    /// the service divides the memory of the GPU itself.
    gpus: Vec<(Gpu, u32, Option<NonZeroU64>)>,
}

impl Answers {
    /// `slices` has the number of slices for each group of GPUs. A group with 0 gets no slices.
    ///
    /// Without a device file, the service serves a new GPU at once. A device file names GPUs by their render nodes, and the
    /// numbers of render nodes may change at a boot. So setup writes a device file only if it must. The platform reads its GPUs
    /// from the device file, so a host of the platform needs the file.
    pub(super) fn new(found: &HostGpus, slices: &[u32], platform: bool, by_itself: bool) -> Self {
        let mut gpus = Vec::new();
        for (group, slices) in found.groups.iter().zip(slices).filter(|(_, slices)| **slices > 0) {
            let entry = |gpu: &Gpu| (gpu.clone(), *slices, found.written_memory(gpu, *slices));
            gpus.extend(group.gpus.iter().map(entry));
        }
        gpus.sort_by_key(|(gpu, ..)| gpu.pci.address);
        let first = slices.first().copied().filter(|first| slices.iter().all(|one| one == first));
        let needs_entries = platform || gpus.iter().any(|(_, _, memory)| memory.is_some());
        let of_every = first.filter(|_| !needs_entries && !found.would_serve_more());
        Self { platform, by_itself, isolates_slices: false, of_every, gpus }
    }

    pub(super) fn isolating_slices(self, isolates_slices: bool) -> Self {
        Self { isolates_slices, ..self }
    }
}

pub(super) struct File {
    pub(super) path: PathBuf,
    pub(super) text: String,
    /// The text of the file without its comments.
    pub(super) lines: String,
    /// The instruction for an administrator if the file exists already, such as `Set these keys in`. The path of the file
    /// follows.
    pub(super) change: &'static str,
}

/// The new configuration files, in the order in which they have to be written. `loaded` is the present configuration.
pub(super) fn compose(answers: &Answers, loaded: &Loaded) -> Vec<File> {
    let settings = &loaded.settings;
    let (mut files, mut keys) = (Vec::new(), Vec::new());
    keys.push(("This host serves its GPUs through MPS.", "enable_cuda_mps: true".to_owned()));
    match answers.of_every {
        Some(slices) => {
            keys.push(("Every NVIDIA GPU has this many slices.", format!("cuda_mps_replicas: {slices}")));
        }
        None => {
            let there = settings.devices.first().map(|entry| entry.origin.file.as_path());
            let path = there.unwrap_or(Path::new(DEVICE_FILE));
            if settings.devices.iter().all(|entry| entry.mps.is_none()) {
                files.push(device_file(path, &answers.gpus));
            }
            if there.is_none() {
                let line = format!("container_device_config_file: {}", path.display());
                keys.push(("The GPUs to serve, with their numbers of slices, are in this file.", line));
            }
        }
    }
    if answers.isolates_slices {
        keys.push((
            "Each slice has a control daemon of its own: a fault stays in its slice, and the slices take turns on the GPU.",
            "cuda_mps_topology: per_slice".to_owned(),
        ));
    }
    if answers.by_itself {
        keys.push((
            "CUDA looks in this directory by itself: every CUDA program of this host is a client of a \
             slice, without any setting.",
            format!("cuda_mps_pipe_directory: {WHERE_CUDA_LOOKS}"),
        ));
    }
    let mut text = "# The settings of yunion-mps-daemon, written by `yunion-mpsctl setup`. `man 5 yunion-mps-host.conf` has \
                    all keys.\n# Check a change with `yunion-mps-daemon --check`, then apply it with `systemctl reload \
                    yunion-mps-daemon`.\n"
        .to_owned();
    for (comment, line) in &keys {
        text.push_str(&format!("\n# {comment}\n{line}\n"));
    }
    let main = settings.sources.first().map_or(Path::new(MAIN_FILE), PathBuf::as_path);
    let lines = keys.iter().map(|(_, line)| format!("{line}\n")).collect();
    files.push(File { path: main.to_owned(), text, lines, change: "Set these keys in" });
    files
}

fn device_file(path: &Path, gpus: &[(Gpu, u32, Option<NonZeroU64>)]) -> File {
    let mut lines = "devices:\n".to_owned();
    for (gpu, slices, memory) in gpus {
        let (address, uuid) = (gpu.pci.address, gpu.uuid().unwrap_or("UUID unknown"));
        lines.push_str(&format!("# {}, {}, {}\n", address.short(), printable(&gpu.model()), printable(uuid)));
        let path = match &gpu.pci.render_node {
            Some(node) => node.display().to_string(),
            // The address is in quotes, since some YAML parsers read digits with colons as a number.
            None => format!("\"{address}\""),
        };
        lines.push_str(&format!("- path: {path}\n  type: NVIDIA_MPS\n  virtual_number: {slices}\n"));
        if let Some(mib) = memory {
            lines.push_str(&format!("  memory: {mib}\n"));
        }
    }
    let text = format!(
        "# The GPUs that yunion-mps-daemon serves, written by `yunion-mpsctl setup`. virtual_number is the number of \
         slices.\n# `man 5 yunion-mps-host_container_device.yml` has all keys. Check a change with `yunion-mps-daemon \
         --check`.\n\n{lines}"
    );
    let change = "Give each of these GPUs the entry below, and no other entry, in";
    File { path: path.to_owned(), text, lines, change }
}
