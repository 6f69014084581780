//! Simulated containers without a container runtime: their control groups, and the mounts of a slice's directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use super::host::Host;

/// The reason for a skipped test if this process may not make control groups.
pub(crate) const NO_CONTAINER_GROUP: &str = "no control group can be made here";

/// The beginning of the name of the control group in which a test makes the control groups of a kubelet.
pub(crate) const OF_TEST: &str = "yunion-test-";

/// The control group of a container, as its runtime would make it.
pub(crate) struct ContainerGroup {
    pub(crate) id: String,
    pub(crate) directory: PathBuf,
}

impl ContainerGroup {
    /// Makes the control group of a container. None if this process may not make control groups.
    pub(crate) fn new() -> Option<Self> {
        Self::named(|id| format!("docker-{id}.scope"))
    }

    /// Makes the control group of a container as the platform's host agent does.
    pub(crate) fn of_a_guest() -> Option<Self> {
        Self::named(|id| format!("cloudpods/{id}"))
    }

    /// Makes the control group of a container as a kubelet does, in the control group of a pod. The control group of the
    /// simulated kubelet is inside a control group of the test.
    pub(crate) fn of_a_pod() -> Option<Self> {
        Self::named(|id| format!("{OF_TEST}{}/kubepods/pod/{id}", &id[..12]))
    }

    fn named(name: impl Fn(&str) -> String) -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // The first 12 digits of each container id differ, since commands also accept the first 12 digits as a short id.
        let id = format!("{:08x}{number:04x}{:052x}", std::process::id(), 0xabc);
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mounts = mounts.lines().filter(|line| line.contains(" - cgroup"));
        let mut mounts: Vec<&str> = mounts.map(|line| line.split(' ').nth(4).unwrap()).collect();
        // The container's control group may be in any hierarchy of control groups. The test tries the hierarchies of systemd
        // first, since some other hierarchies accept no process before they are configured.
        mounts.sort_by_key(|mount| !mount.ends_with("systemd") && !mount.ends_with("unified"));
        mounts.into_iter().find_map(|mount| {
            let directory = Path::new(mount).join(name(&id));
            fs::create_dir_all(directory.join("init/deeper")).ok()?;
            Some(Self { id: id.clone(), directory })
        })
    }

    /// Puts a process into the container's control group, or into a descendant of that control group.
    pub(crate) fn take(&self, pid: u32, below: &str) {
        fs::write(self.directory.join(below).join("cgroup.procs"), pid.to_string()).unwrap();
    }

    /// Moves a process out of the container's control group into that of its pod.
    pub(crate) fn let_go(&self, pid: u32) {
        fs::write(self.directory.with_file_name("cgroup.procs"), pid.to_string()).unwrap();
    }

    /// Removes the container's control group after its processes have ended, as a runtime does. The control group of
    /// the pod stays.
    pub(crate) fn remove(&self) {
        for below in ["init/deeper", "init", ""] {
            let _ = fs::remove_dir(self.directory.join(below));
        }
    }
}

impl Drop for ContainerGroup {
    fn drop(&mut self) {
        self.remove();
        if self.directory.to_string_lossy().contains(OF_TEST) {
            self.directory.ancestors().skip(1).take(3).for_each(|above| _ = fs::remove_dir(above));
        }
    }
}

/// The first lines of a shell script in a new mount namespace: they mount the slice's directory, which is the first
/// argument, at the path that it has in a container.
pub(crate) const MOUNT_SLICE: &str = "set -e\n\
    mount --make-rprivate /\n\
    mount --bind \"$0\" /mnt\n\
    mount -t tmpfs tmpfs /run\n\
    mkdir /run/yunion-mps\n\
    mount --bind /mnt /run/yunion-mps\n\
    umount /mnt\n";

/// A command that runs a shell script in a new mount namespace. The script sees the slice's directory read-only at its path
/// in a container, and no pipe directory.
pub(crate) fn contained(host: &Host, slice_directory: &Path, script: &str) -> Command {
    let read_only = "mount -o remount,bind,ro /run/yunion-mps\nmount -t tmpfs tmpfs \"$1\"\n";
    let mut command = host.command("unshare");
    command.args(["--mount", "sh", "-c", &format!("{MOUNT_SLICE}{read_only}{script}")]);
    command.arg(slice_directory).arg(host.path("mps/pipe"));
    command
}
