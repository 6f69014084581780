//! Containers without a container runtime: their control groups, and the mount of a slice's directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use super::host::Host;

pub(crate) const NO_CONTAINER_GROUP: &str = "no control group can be made here";

/// The first part of the name of a test's control group, which contains the control groups of the test's pods.
pub(crate) const OF_TEST: &str = "yunion-test-";

/// The control group of a container, as a container runtime makes it.
pub(crate) struct ContainerGroup {
    pub(crate) id: String,
    pub(crate) directory: PathBuf,
}

impl ContainerGroup {
    /// Makes the control group of a container. Returns None if this process may not make control groups.
    pub(crate) fn new() -> Option<Self> {
        Self::named(|id| format!("docker-{id}.scope"))
    }

    /// Makes the control group of a container of a guest, as the host agent of the platform Cloudpods does.
    pub(crate) fn of_a_guest() -> Option<Self> {
        Self::named(|id| format!("cloudpods/{id}"))
    }

    /// Makes the control group of a container in that of a pod, as a kubelet does. Both are in a control group of the test.
    pub(crate) fn of_a_pod() -> Option<Self> {
        Self::named(|id| format!("{OF_TEST}{}/kubepods/pod/{id}", &id[..12]))
    }

    fn named(name: impl Fn(&str) -> String) -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // Commands also accept the first 12 digits of a container id as a short id. So these digits must be unique.
        let id = format!("{:08x}{number:04x}{:052x}", std::process::id(), 0xabc);
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mounts = mounts.lines().filter(|line| line.contains(" - cgroup"));
        let mut mounts: Vec<&str> = mounts.map(|line| line.split(' ').nth(4).unwrap()).collect();
        // Any hierarchy is good enough for the control group. systemd's hierarchies come first, since some other hierarchies
        // accept no process before they are configured.
        mounts.sort_by_key(|mount| !mount.ends_with("systemd") && !mount.ends_with("unified"));
        mounts.into_iter().find_map(|mount| {
            let directory = Path::new(mount).join(name(&id));
            fs::create_dir_all(directory.join("init/deeper")).ok()?;
            Some(Self { id: id.clone(), directory })
        })
    }

    /// Moves a process into the control group, or into the control group `below` in it.
    pub(crate) fn take(&self, pid: u32, below: &str) {
        fs::write(self.directory.join(below).join("cgroup.procs"), pid.to_string()).unwrap();
    }

    /// Moves a process from the control group of the container into that of its pod.
    pub(crate) fn let_go(&self, pid: u32) {
        fs::write(self.directory.with_file_name("cgroup.procs"), pid.to_string()).unwrap();
    }

    /// Removes the control group after its processes have ended, as a container runtime does. The control group of the pod
    /// stays.
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

/// The first lines of a script in a new mount namespace. They mount the slice's directory, `$0`, at its path in a container.
pub(crate) const MOUNT_SLICE: &str = "set -e\n\
    mount --make-rprivate /\n\
    mount --bind \"$0\" /mnt\n\
    mount -t tmpfs tmpfs /run\n\
    mkdir /run/yunion-mps\n\
    mount --bind /mnt /run/yunion-mps\n\
    umount /mnt\n";

/// Makes a command that runs a script in a new mount namespace. The script sees the slice's directory read-only at its path in
/// a container, and no pipe directory.
pub(crate) fn contained(host: &Host, slice_directory: &Path, script: &str) -> Command {
    let read_only = "mount -o remount,bind,ro /run/yunion-mps\nmount -t tmpfs tmpfs \"$1\"\n";
    let mut command = host.command("unshare");
    command.args(["--mount", "sh", "-c", &format!("{MOUNT_SLICE}{read_only}{script}")]);
    command.arg(slice_directory).arg(host.path("mps/pipe"));
    command
}
