//! Reads control groups from the kernel: the control group of a process, and the processes of a control group. On a host with
//! several hierarchies (cgroup v1), only the hierarchy `name=systemd` counts. The service manager and every container runtime
//! put processes into that hierarchy. A host with cgroup v2 has only one hierarchy.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use mps_core::bindings::{ControlGroup, GroupUse, is_named_by_root, pod_of};

use super::proc;

/// With cgroup v2 the mount point of the only hierarchy. With cgroup v1 this directory has a subdirectory for each hierarchy.
const MOUNT: &str = "/sys/fs/cgroup";

const ONE_HIERARCHY: &str = "/sys/fs/cgroup/cgroup.controllers";

/// The largest number of descendants of a control group that are searched for processes. With more descendants, the control
/// group counts as used.
const MOST: usize = 256;

/// The names of hierarchies in `/proc/PID/cgroup`: the only hierarchy of cgroup v2, and the service manager's hierarchy of
/// cgroup v1.
const UNIFIED: &str = "";
const OF_SERVICE_MANAGER: &str = "name=systemd";

fn hierarchy() -> &'static str {
    if Path::new(ONE_HIERARCHY).exists() { UNIFIED } else { OF_SERVICE_MANAGER }
}

fn mount(hierarchy: &str) -> PathBuf {
    match hierarchy {
        // A host with cgroup v1 may also have the unified hierarchy, in this subdirectory.
        UNIFIED if !Path::new(ONE_HIERARCHY).exists() => Path::new(MOUNT).join("unified"),
        UNIFIED => PathBuf::from(MOUNT),
        named => Path::new(MOUNT).join(named.strip_prefix("name=").unwrap_or(named)),
    }
}

/// The path of a process's control group in a hierarchy. `cgroups` is the text of `/proc/PID/cgroup`. None if the process is in
/// no control group of the hierarchy.
fn path_in<'a>(hierarchy: &str, cgroups: &'a str) -> Option<&'a str> {
    // A line of `/proc/PID/cgroup` has a number, the name of a hierarchy, and a path, with colons between them. A tenant may
    // have chosen names in the path, and these names can have colons.
    cgroups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        (fields.next()? == hierarchy).then(|| fields.next())?
    })
}

pub fn path_of(pid: u32) -> io::Result<String> {
    let cgroups = proc::cgroups_text(pid)?;
    path_in(hierarchy(), &cgroups).map(str::to_owned).ok_or_else(|| io::ErrorKind::NotFound.into())
}

pub fn find(path: &str) -> io::Result<ControlGroup> {
    let found = fs::symlink_metadata(directory(path))?;
    if !found.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    Ok(ControlGroup { path: path.to_owned(), inode: found.ino() })
}

pub fn is_alone(pid: u32) -> bool {
    let pids = path_of(pid).and_then(|path| fs::read_to_string(directory(&path).join("cgroup.procs")));
    pids.is_ok_and(|pids| pids.lines().eq([pid.to_string()]))
}

pub fn directory(path: &str) -> PathBuf {
    mount(hierarchy()).join(path.trim_start_matches('/'))
}

/// True if root has made the control group at a path, and all its ancestors. Then a tenant can't have chosen a name in the
/// path. `hierarchy` is a name from `/proc/PID/cgroup`.
pub fn is_believed(hierarchy: &str, path: &str) -> bool {
    is_named_by_root(owners(mount(hierarchy), path))
}

/// The users who own a control group and its ancestors, from the top. None stands for a control group that does not exist.
fn owners(mut directory: PathBuf, path: &str) -> impl Iterator<Item = Option<u32>> {
    path.split('/').filter(|name| !name.is_empty()).map(move |name| {
        directory.push(name);
        fs::symlink_metadata(&directory).ok().filter(Metadata::is_dir).map(|found| found.uid())
    })
}

pub fn use_of(group: &ControlGroup) -> GroupUse {
    match find(&group.path) {
        Ok(found) if found == *group && is_empty(&group.path) => GroupUse::Empty,
        Ok(found) if found == *group => GroupUse::Used,
        Err(error) if error.kind() != io::ErrorKind::NotFound => GroupUse::Used,
        // The container's control group was removed, but its pod may still run, and the kubelet may start the container again.
        // Each pod has a process of its own, which runs until the pod ends. So if a pod's control group has a process, the
        // pod still runs.
        Ok(_) | Err(_) => match pod_of(&group.path) {
            Some(pod) if find(pod).is_ok() && !is_empty(pod) => GroupUse::PodGoesOn,
            _ => GroupUse::Gone,
        },
    }
}

/// True if neither the control group at a path nor any of its descendants has a process.
fn is_empty(path: &str) -> bool {
    let directory = directory(path);
    match fs::read_to_string(directory.join("cgroup.events")) {
        Ok(events) => events.lines().any(|line| line == "populated 0"),
        Err(_) => has_no_process(directory),
    }
}

/// Like [`is_empty`], for a kernel without `cgroup.events`: reads the processes of every descendant. False if a descendant
/// can't be read, or if there are more than [`MOST`] descendants.
fn has_no_process(top: PathBuf) -> bool {
    let mut left = vec![top];
    let mut looked_at = 0;
    while let Some(directory) = left.pop() {
        looked_at += 1;
        let has_none = fs::read(directory.join("cgroup.procs")).is_ok_and(|pids| pids.is_empty());
        let Ok(entries) = fs::read_dir(&directory) else { return false };
        if !has_none || looked_at > MOST {
            return false;
        }
        let entries = entries.filter_map(Result::ok);
        let below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        left.extend(below.map(|entry| entry.path()));
    }
    true
}

/// Shortens `path` so that it ends with the control group of the container `id`. `path` is the control group of a process in
/// the container, which may be a descendant of the container's control group. Returns the whole `path` if no name in it has the
/// id.
pub fn of_container<'a>(path: &'a str, id: &str) -> &'a str {
    let is_its = |name: &str| {
        let name = name.strip_suffix(".scope").unwrap_or(name);
        name.strip_suffix(id).is_some_and(|before| before.is_empty() || before.ends_with(['-', ':']))
    };
    if id.is_empty() {
        return path;
    }
    let ends = path.match_indices('/').skip(1).map(|(end, _)| end).chain([path.len()]);
    let mut above = ends.filter_map(|end| path.get(..end));
    above.find(|path| path.rsplit('/').next().is_some_and(is_its)).unwrap_or(path)
}

/// The reason, in words, why a control group can't have a single owner: the control group has processes of all users, or any
/// user can move processes into the control group. None if the control group can have a single owner.
pub fn shared_by(path: &str) -> Option<&'static str> {
    let name = path.rsplit('/').next().unwrap_or_default();
    let is = |prefix: &str, suffix: &str| {
        name.strip_prefix(prefix).is_some_and(|rest| rest.strip_suffix(suffix).is_some())
    };
    if name.is_empty() {
        Some("the root of all control groups")
    } else if is("", ".slice") {
        Some("a .slice unit of systemd, which groups units")
    } else if name == "init.scope" {
        Some("the control group of the service manager")
    } else if is("session-", ".scope") {
        Some("the session of a user")
    } else if is("user@", ".service") {
        Some("the service manager of a user")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_has_the_control_group_with_its_id() {
        let id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        for (path, container) in [
            (format!("/docker/{id}"), 0),
            (format!("/machine.slice/libpod-{id}.scope/container"), 1),
            (format!("/system.slice/docker-{id}.scope/init.scope/x"), 2),
            (format!("/kubepods/burstable/pod7/{id}"), 0),
            (format!("/kubepods-pod7.slice:cri-containerd:{id}"), 0),
            (format!("/other/{id}x"), 0),
            ("/default/j1".to_owned(), 0),
        ] {
            let expected: Vec<&str> = path.rsplitn(container + 1, '/').collect();
            let id = if path.ends_with("j1") { "j1" } else { id };
            assert_eq!(Some(&of_container(&path, id)), expected.last(), "{path}");
        }
        for id in ["j1", ""] {
            assert_eq!(of_container("/jobs/xj1/y-", id), "/jobs/xj1/y-");
        }
    }

    #[test]
    fn the_path_is_in_the_hierarchy_of_the_host() {
        let both = "12:cpu,cpuacct:/other\n1:name=systemd:/docker/a:b\n0::/unified";
        for (hierarchy, text, expected) in [
            (OF_SERVICE_MANAGER, both, Some("/docker/a:b")),
            (UNIFIED, both, Some("/unified")),
            (UNIFIED, "0::/a/xname=systemd:/b", Some("/a/xname=systemd:/b")),
            (OF_SERVICE_MANAGER, "0::/a", None),
            // A tenant has named a control group `x:name=systemd:`, as if the line were about another hierarchy.
            (OF_SERVICE_MANAGER, "2:cpu:/own/x:name=systemd:/victim\n1:name=systemd:/own", Some("/own")),
            (UNIFIED, "", None),
        ] {
            assert_eq!(path_in(hierarchy, text), expected, "{text}");
        }
    }

    #[test]
    fn control_groups_of_many_are_nobodys() {
        for path in [
            "/",
            "/user.slice/user-0.slice",
            "/user.slice/user-0.slice/session-3.scope",
            "/user.slice/user-1000.slice/user@1000.service",
            "/init.scope",
        ] {
            assert!(shared_by(path).is_some(), "{path}");
        }
        for path in
            ["/system.slice/docker-0123.scope", "/a", "/user.slice/run-r1.scope", "/system.slice/x.service"]
        {
            assert_eq!(shared_by(path), None, "{path}");
        }
    }

    #[test]
    fn the_users_of_a_control_group_are_those_of_each_one_above_it() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let mount = tempfile::tempdir().unwrap();
        let directory = |path: &str| mount.path().join(path);
        fs::create_dir_all(directory("docker/own")).unwrap();
        fs::create_dir_all(directory("job.service/delegated/forged")).unwrap();
        let [uid, gid] = [65534; 2].map(Some);
        std::os::unix::fs::chown(directory("job.service/delegated"), uid, gid).unwrap();
        std::os::unix::fs::symlink("own", directory("docker/link")).unwrap();
        for (path, expected) in [
            ("/", vec![]),
            ("/docker/own", vec![Some(0), Some(0)]),
            ("/job.service/delegated", vec![Some(0), Some(65534)]),
            ("/job.service/delegated/forged", vec![Some(0), Some(65534), Some(0)]),
            ("/docker/link", vec![Some(0), None]),
            ("/docker/none", vec![Some(0), None]),
        ] {
            assert_eq!(owners(mount.path().to_owned(), path).collect::<Vec<_>>(), expected, "{path}");
        }
        assert!(!is_believed("name=no-such-hierarchy", "/docker"), "it is not there");
    }

    #[test]
    fn what_is_not_there_is_gone() {
        let group = ControlGroup { path: "/no such control group".to_owned(), inode: 7 };
        assert_eq!(use_of(&group), GroupUse::Gone);
        assert!(path_of(std::process::id()).is_ok_and(|path| path.starts_with('/')));
        assert!(path_of(u32::MAX).is_err());
    }
}
