//! Makes the CDI spec, which describes the slices as devices of `yunion.io/mps`. Container runtimes with support for the
//! Container Device Interface read the spec. `docs/cdi.md` has the reasons for its content.

use std::fs;
use std::path::Path;

use rustix::io::Errno;
use serde_json::{Value, json};

use crate::directories;
use crate::host::regular_file;
use crate::problem::Problem;
use crate::published::container::{ChosenSlice, Mount, container_config, gives_gpus};
use crate::published::snapshot::{GpuView, Snapshot};
use crate::whole_file;

/// The name of the file with the CDI spec. By CDI's convention, the name consists of the devices' vendor and class.
pub const FILE: &str = "yunion.io-mps.json";

/// The vendor and the class of this service's CDI devices. In a container runtime a device is called `yunion.io/mps=NAME`.
pub const KIND: &str = "yunion.io/mps";

/// The seconds that a container runtime waits for a hook. The hook itself waits at most 25 s for a slice.
const HOOK_SECONDS: u32 = 30;

/// The most bytes of an existing spec that the service reads for a comparison. The specs that the service writes are far
/// smaller.
const MAX_BYTES: u64 = 16 * 1024 * 1024;

/// The earliest version of CDI in which a device's name may begin with a digit. A container runtime refuses a spec with a
/// version of CDI that the runtime does not know, so the spec has no later version.
const VERSION: &str = "0.5.0";

/// The name of the CDI device that only binds a container to a slice. The device plugin for Kubernetes gives this
/// device of each slice to a container with slices of several GPUs, and makes the container's settings for all slices together.
/// The slices' other CDI devices would overwrite each other's settings.
pub fn binding_device(slice: &str) -> String {
    format!("bind-{slice}")
}

/// The CDI spec of all planned slices. The hook of each slice runs yunion-mpsctl, which binds the container's control group to
/// the slice. If the slice is not served, the hook waits for it. If the container can't have the slice, the hook fails with the
/// reason. The spec also has slices that are not served. Otherwise the container engine would not find the device, could not
/// give the reason, and would not start the container again later. None if no slice is planned, since a spec without devices is
/// not valid.
pub fn spec(snapshot: &Snapshot, hooks: &Path) -> Option<String> {
    let devices: Vec<Value> =
        snapshot.slices().flat_map(|(gpu, ordinal)| devices(snapshot, hooks, gpu, ordinal)).collect();
    if devices.is_empty() {
        return None;
    }
    let spec = json!({"cdiVersion": VERSION, "kind": KIND, "devices": devices});
    Some(format!("{spec:#}\n"))
}

fn devices(snapshot: &Snapshot, hooks: &Path, gpu: &GpuView, ordinal: u32) -> [Value; 2] {
    let name = gpu.slice_name(ordinal);
    // A hook without root's rights can't ask the service if the slice is drained. So the spec passes this fact to the hook.
    let is_drained = gpu.drained.contains(&ordinal).then_some("--drained");
    let bind: Vec<&str> = ["bind", "--oci"].into_iter().chain(is_drained).chain([name.as_str()]).collect();
    let hooks = json!([hook(hooks, &bind)]);
    // Without NVML's facts about the GPU there are no container settings. Then the device has only the hook, which fails with
    // the reason.
    let edits = match container_config(snapshot, &[ChosenSlice { gpu, ordinal, name: name.clone() }]) {
        Ok(config) => {
            // A container may have several CDI devices of slices. Each gets its own mount targets, since a runtime makes only
            // one of two mounts with the same target.
            let config = config.at_own_places();
            // The variables that make NVIDIA's hook add GPUs are not set. NVIDIA's own CDI devices add the GPUs, and set
            // `NVIDIA_VISIBLE_DEVICES` to "void" so that NVIDIA's hook does not add them a second time.
            let ours = config.environment.iter().filter(|(name, _)| !gives_gpus(name));
            let environment: Vec<String> = ours.map(|(name, value)| format!("{name}={value}")).collect();
            let mounts: Vec<Value> = config.mounts.iter().map(mount).collect();
            json!({"env": environment, "mounts": mounts, "hooks": hooks})
        }
        Err(_) => json!({"hooks": hooks}),
    };
    [
        json!({"name": name, "containerEdits": edits}),
        json!({"name": binding_device(&name), "containerEdits": {"hooks": hooks}}),
    ]
}

/// The container runtime calls the hook after the container's first process is in its control group, and before the container's
/// program starts. If the hook fails, the container does not start.
fn hook(program: &Path, arguments: &[&str]) -> Value {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    let arguments: Vec<&str> = [&*name].into_iter().chain(arguments.iter().copied()).collect();
    json!({
        "hookName": "createRuntime",
        "path": program.display().to_string(),
        "args": arguments,
        "timeout": HOOK_SECONDS,
    })
}

fn mount(mount: &Mount) -> Value {
    json!({
        "hostPath": mount.host,
        "containerPath": mount.container,
        "options": [if mount.read_only { "ro" } else { "rw" }, "nosuid", "nodev", "bind"],
    })
}

/// Writes the spec into `directory`, unless the file already has this content. A reader never sees half of the spec. After an
/// error the old file is unchanged.
pub fn write(directory: &Path, spec: &str) -> Result<(), Problem> {
    directories::open(directory).map_err(|bad| bad.problem.prefixed(bad.path.display()))?;
    let file = directory.join(FILE);
    if read(&file).is_some_and(|current| current == spec.as_bytes()) {
        return Ok(());
    }
    let written = whole_file::write_durably(&file, spec.as_bytes());
    written.map_err(|error| format!("{}: can't be written: {error}", file.display()).into())
}

/// The present content of the file. None if the file can't be read, or is no regular file.
fn read(file: &Path) -> Option<Vec<u8>> {
    fs::symlink_metadata(file).ok().filter(fs::Metadata::is_file)?;
    regular_file::read(file, MAX_BYTES).ok()
}

pub fn remove(file: &Path) -> Result<(), Problem> {
    match rustix::fs::unlink(file) {
        Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => Ok(()),
        Err(error) => Err(format!("{}: can't be removed: {error}", file.display()).into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;
    use crate::published::samples::{gpu, snapshot};
    use crate::published::snapshot::BoundSlice;

    const HOOKS: &str = "/usr/bin/yunion-mpsctl";

    #[test]
    fn a_device_has_what_a_container_needs() {
        let snapshot = snapshot(Some(vec![gpu("00:06.0", "GPU-1")]));
        let spec: Value = serde_json::from_str(&spec(&snapshot, Path::new(HOOKS)).unwrap()).unwrap();
        let devices = spec["devices"].as_array().unwrap().iter();
        let names: Vec<&str> = devices.map(|device| device["name"].as_str().unwrap()).collect();
        let ours = ["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"];
        assert_eq!(names, ours.map(|name| [name.to_owned(), format!("bind-{name}")]).concat());
        let edits = |number: usize| &spec["devices"][number]["containerEdits"];
        assert_eq!(*edits(3), json!({"hooks": edits(2)["hooks"]}));
        assert_eq!(
            *edits(2),
            json!({
                "env": [
                    "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps/pipe",
                    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
                    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=5760M",
                    "NVIDIA_GPU_MEMORY_LIMIT=5760",
                    "NVIDIA_GPU_MEMORY_REQUEST=",
                    "YUNION_MPS_MEMORY_FRACTION=0.241",
                    "YUNION_MPS_MEMORY_MIB=5553",
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
                "hooks": [{
                    "hookName": "createRuntime",
                    "path": "/usr/bin/yunion-mpsctl",
                    "args": ["yunion-mpsctl", "bind", "--oci", "00:06.0-1"],
                    "timeout": 30,
                }],
            })
        );
    }

    #[test]
    fn a_device_is_there_whatever_happens_to_its_slice() {
        let text = |change: &dyn Fn(&mut GpuView)| {
            let mut one = gpu("00:06.0", "GPU-1");
            change(&mut one);
            spec(&snapshot(Some(vec![one])), Path::new(HOOKS)).unwrap()
        };
        let healthy = text(&|_| ());
        let drained: Value = serde_json::from_str(&text(&|gpu| _ = gpu.drained.insert(1))).unwrap();
        let words = &drained["devices"][2]["containerEdits"]["hooks"][0]["args"];
        assert_eq!(*words, json!(["yunion-mpsctl", "bind", "--oci", "--drained", "00:06.0-1"]));
        assert_eq!(text(&|gpu| gpu.healthy = false), healthy);
        assert_eq!(text(&|gpu| gpu.needs_reset = true), healthy);
        assert_eq!(text(&|gpu| _ = gpu.bound.insert(1, BoundSlice::default())), healthy);
        let lost: Value =
            serde_json::from_str(&text(&|gpu| gpu.plan.gpu.nvml = Err("GPU is lost".into()))).unwrap();
        let healthy: Value = serde_json::from_str(&healthy).unwrap();
        assert_eq!(lost["devices"][2]["name"], "00:06.0-1");
        let edits = |spec: &Value| spec["devices"][2]["containerEdits"].clone();
        assert_eq!(edits(&lost), json!({"hooks": edits(&healthy)["hooks"]}));
        for nothing in [None, Some(Vec::new())] {
            assert_eq!(spec(&snapshot(nothing), Path::new(HOOKS)), None);
        }
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_and_only_when_it_has_to() {
        let base = tempfile::tempdir().unwrap();
        let directory = base.path().join("run/cdi");
        let file = directory.join(FILE);
        write(&directory, "one").unwrap();
        let before = file.metadata().unwrap();
        assert_eq!((before.mode() & 0o777, fs::read_to_string(&file).unwrap()), (0o644, "one".into()));
        write(&directory, "one").unwrap();
        assert_eq!(file.metadata().unwrap().ino(), before.ino());
        let open = fs::File::open(&file).unwrap();
        write(&directory, "two").unwrap();
        assert_eq!(std::io::read_to_string(open).unwrap(), "one");
        assert_eq!(fs::read_to_string(&file).unwrap(), "two");
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
        remove(&file).unwrap();
        remove(&file).unwrap();
        remove(&base.path().join("nowhere").join(FILE)).unwrap();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
    }

    #[test]
    fn no_link_is_followed() {
        let base = tempfile::tempdir().unwrap();
        let elsewhere = base.path().join("elsewhere");
        fs::write(&elsewhere, "theirs").unwrap();
        let directory = base.path().join("cdi");
        fs::create_dir(&directory).unwrap();
        symlink(&elsewhere, directory.join(FILE)).unwrap();
        write(&directory, "ours").unwrap();
        assert_eq!(fs::read_to_string(&elsewhere).unwrap(), "theirs");
        assert!(directory.join(FILE).symlink_metadata().unwrap().is_file());
    }

    #[test]
    fn what_is_in_the_way_is_named() {
        let base = tempfile::tempdir().unwrap();
        fs::create_dir_all(base.path().join(FILE).join("full")).unwrap();
        let error = write(base.path(), "ours").unwrap_err().to_string();
        assert!(error.contains("yunion.io-mps.json: can't be written: "), "{error}");
        assert_eq!(fs::read_dir(base.path()).unwrap().count(), 1);
        let error = remove(&base.path().join(FILE)).unwrap_err().to_string();
        assert!(error.contains("yunion.io-mps.json: can't be removed: "), "{error}");
    }
}
