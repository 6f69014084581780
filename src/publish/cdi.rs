//! The CDI spec: the slices as devices of `yunion.io/mps`, for container runtimes that know the Container Device
//! Interface. `docs/cdi.md` gives the reasons.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::mps::directories;
use crate::publish::container::{Mount, container_config};
use crate::publish::snapshot::Snapshot;

/// The spec's name in its directory. The convention is the vendor and the class.
pub(crate) const FILE: &str = "yunion.io-mps.json";

/// The vendor and the class of every device. A runtime takes `yunion.io/mps=NAME`.
pub(crate) const KIND: &str = "yunion.io/mps";

/// The spec while it is written. Runtimes read every file with a name in .json or .yaml.
const NEW_FILE: &str = ".yunion.io-mps.new";

/// The earliest version in which a device's name may begin with a digit. A runtime refuses a later one than its own.
const VERSION: &str = "0.5.0";

/// The spec of all slices that a new client can use now. None if there are none: a spec without devices is not valid.
pub(crate) fn spec(snapshot: &Snapshot) -> Option<String> {
    let healthy = snapshot.slices().filter(|(gpu, ordinal)| gpu.slice_healthy(*ordinal));
    let devices: Vec<Value> =
        healthy.filter_map(|(gpu, ordinal)| device(snapshot, &gpu.slice_name(ordinal))).collect();
    if devices.is_empty() {
        return None;
    }
    let spec = json!({"cdiVersion": VERSION, "kind": KIND, "devices": devices});
    Some(format!("{spec:#}\n"))
}

fn device(snapshot: &Snapshot, name: &str) -> Option<Value> {
    // A container may have several devices, and a runtime makes one mount of two at the same place.
    let config = container_config(snapshot, [name]).ok()?.at_own_places();
    // NVIDIA's own spec says "void" there, so that NVIDIA's hook does not give the container a GPU a second time.
    let ours = config.environment.iter().filter(|(name, _)| !name.starts_with("NVIDIA_"));
    let environment: Vec<String> = ours.map(|(name, value)| format!("{name}={value}")).collect();
    let mounts: Vec<Value> = config.mounts.iter().map(mount).collect();
    Some(json!({"name": name, "containerEdits": {"env": environment, "mounts": mounts}}))
}

fn mount(mount: &Mount) -> Value {
    json!({
        "hostPath": mount.host.display().to_string(),
        "containerPath": mount.container.display().to_string(),
        "options": [if mount.read_only { "ro" } else { "rw" }, "nosuid", "nodev", "bind"],
    })
}

/// The reason why there is no spec, or not the right one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CdiError {
    /// The directory can't be used.
    #[error(transparent)]
    Directory(#[from] directories::BadDirectory),
    /// The file can't be written or removed.
    #[error("{file}: can't be {what}: {error}")]
    File { file: String, what: &'static str, error: io::Error },
}

/// Writes the spec into `directory`, unless it is there already. A reader never sees half of it. After an error the
/// file is as it was.
pub(crate) fn write(directory: &Path, spec: &str) -> Result<(), CdiError> {
    let opened = directories::open(directory)?;
    if read(&opened).is_ok_and(|current| current == spec.as_bytes()) {
        return Ok(());
    }
    replace(&opened, spec).map_err(|error| CdiError::File {
        file: directory.join(FILE).display().to_string(),
        what: "written",
        error,
    })
}

fn read(directory: &OwnedFd) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::openat(directory, FILE, flags, Mode::empty())?);
    let mut bytes = Vec::new();
    // The service's spec is far smaller; a file of somebody else need not be read to its end.
    file.take(16 * 1024 * 1024).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn replace(directory: &OwnedFd, spec: &str) -> io::Result<()> {
    // A crash may have left one.
    let _ = rustix::fs::unlinkat(directory, NEW_FILE, AtFlags::empty());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(directory, NEW_FILE, flags, Mode::from_raw_mode(0o644))?);
    let written = rustix::fs::fchmod(&file, Mode::from_raw_mode(0o644))
        .map_err(io::Error::from)
        .and_then(|()| file.write_all(spec.as_bytes()))
        .and_then(|()| file.sync_all())
        .and_then(|()| Ok(rustix::fs::renameat(directory, NEW_FILE, directory, FILE)?));
    if written.is_err() {
        let _ = rustix::fs::unlinkat(directory, NEW_FILE, AtFlags::empty());
    }
    written
}

/// Removes the spec at `file`. A missing file is no error.
pub(crate) fn remove(file: &Path) -> Result<(), CdiError> {
    match rustix::fs::unlink(file) {
        Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => Ok(()),
        Err(error) => {
            Err(CdiError::File { file: file.display().to_string(), what: "removed", error: error.into() })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;
    use crate::publish::snapshot::tests::{gpu, snapshot};

    #[test]
    fn a_device_has_what_a_container_needs() {
        let spec: Value =
            serde_json::from_str(&spec(&snapshot(Some(vec![gpu("00:06.0", "GPU-1")]))).unwrap()).unwrap();
        let names: Vec<&Value> =
            spec["devices"].as_array().unwrap().iter().map(|device| &device["name"]).collect();
        assert_eq!(names, ["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"]);
        assert_eq!(
            spec["devices"][1]["containerEdits"],
            json!({
                "env": [
                    "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps/pipe",
                    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
                    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=5760M",
                    "YUNION_MPS_DEVICE=00:06.0-1",
                ],
                "mounts": [
                    {
                        "hostPath": "/dev/shm",
                        "containerPath": "/dev/shm",
                        "options": ["rw", "nosuid", "nodev", "bind"],
                    },
                    {
                        "hostPath": "/tmp/nvidia-mps/pipe",
                        "containerPath": "/tmp/nvidia-mps/pipe",
                        "options": ["rw", "nosuid", "nodev", "bind"],
                    },
                ],
            })
        );
    }

    #[test]
    fn what_cannot_be_used_is_left_out() {
        let mut ill = gpu("00:07.0", "GPU-2");
        ill.healthy = false;
        let both = spec(&snapshot(Some(vec![ill.clone(), gpu("00:06.0", "GPU-1")]))).unwrap();
        assert!(both.contains("00:06.0-3") && !both.contains("00:07.0"), "{both}");
        for nothing in [None, Some(Vec::new()), Some(vec![ill])] {
            assert_eq!(spec(&snapshot(nothing)), None);
        }
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_and_only_when_it_has_to() {
        let base = tempfile::tempdir().unwrap();
        let directory = base.path().join("run/cdi");
        let file = directory.join(FILE);
        write(&directory, "one").unwrap();
        let before = file.metadata().unwrap();
        assert_eq!((before.mode() & 0o777, std::fs::read_to_string(&file).unwrap()), (0o644, "one".into()));
        write(&directory, "one").unwrap();
        assert_eq!(file.metadata().unwrap().ino(), before.ino());
        let open = File::open(&file).unwrap();
        write(&directory, "two").unwrap();
        assert_eq!(io::read_to_string(open).unwrap(), "one");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "two");
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1);
        remove(&file).unwrap();
        remove(&file).unwrap();
        remove(&base.path().join("nowhere").join(FILE)).unwrap();
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
    }

    #[test]
    fn no_link_is_followed() {
        let base = tempfile::tempdir().unwrap();
        let elsewhere = base.path().join("elsewhere");
        std::fs::write(&elsewhere, "theirs").unwrap();
        let directory = base.path().join("cdi");
        std::fs::create_dir(&directory).unwrap();
        symlink(&elsewhere, directory.join(FILE)).unwrap();
        symlink(&elsewhere, directory.join(NEW_FILE)).unwrap();
        write(&directory, "ours").unwrap();
        assert_eq!(std::fs::read_to_string(&elsewhere).unwrap(), "theirs");
        assert!(directory.join(FILE).symlink_metadata().unwrap().is_file());
    }

    #[test]
    fn what_is_in_the_way_is_named() {
        let base = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(base.path().join(FILE).join("full")).unwrap();
        let error = write(base.path(), "ours").unwrap_err().to_string();
        assert!(error.contains("yunion.io-mps.json: can't be written: "), "{error}");
        assert!(!base.path().join(NEW_FILE).exists());
        let error = remove(&base.path().join(FILE)).unwrap_err().to_string();
        assert!(error.contains("yunion.io-mps.json: can't be removed: "), "{error}");
    }
}
