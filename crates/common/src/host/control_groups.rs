//! Control groups as the kernel shows them: the control group of a process, and the existence and use of a control group.
//!
//! On a host with several hierarchies (cgroup v1), only the hierarchy `name=systemd` counts, in which the service manager and
//! every container runtime put processes. A host with cgroup v2 has only one hierarchy.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use mps_core::bindings::{ControlGroup, GroupUse, is_named_by_root, pod_of};

use super::proc;

/// The directory in which the kernel's control groups are mounted: the one hierarchy, or a directory for each hierarchy.
const MOUNT: &str = "/sys/fs/cgroup";

/// A file that exists only with cgroup v2, which has one hierarchy.
const ONE_HIERARCHY: &str = "/sys/fs/cgroup/cgroup.controllers";

/// The most descendants of a control group that are read in a search for processes.
const MOST: usize = 256;

/// The names in `/proc/PID/cgroup` of the one hierarchy of cgroup v2, and of the hierarchy of the service manager.
const UNIFIED: &str = "";
const OF_SERVICE_MANAGER: &str = "name=systemd";

/// The name of the hierarchy that counts for the service on this host.
fn hierarchy() -> &'static str {
    if Path::new(ONE_HIERARCHY).exists() { UNIFIED } else { OF_SERVICE_MANAGER }
}

/// The directory in which a hierarchy is mounted.
fn mount(hierarchy: &str) -> PathBuf {
    match hierarchy {
        // A host with several hierarchies has the unified hierarchy, if any, in this subdirectory.
        UNIFIED if !Path::new(ONE_HIERARCHY).exists() => Path::new(MOUNT).join("unified"),
        UNIFIED => PathBuf::from(MOUNT),
        named => Path::new(MOUNT).join(named.strip_prefix("name=").unwrap_or(named)),
    }
}

/// The path of a process's control group in a hierarchy. `cgroups` is the text of `/proc/PID/cgroup`.
fn path_in<'a>(hierarchy: &str, cgroups: &'a str) -> Option<&'a str> {
    // A line of `/proc/PID/cgroup` has a number, the name of a hierarchy, and a path. A tenant may have chosen names in the path,
    // and the names can have colons.
    cgroups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        (fields.next()? == hierarchy).then(|| fields.next())?
    })
}

/// The path of the control group of a process.
///
/// # Errors
/// The process has ended, or is in no control group of the hierarchy that counts for the service.
pub fn path_of(pid: u32) -> io::Result<String> {
    let cgroups = proc::cgroups_text(pid)?;
    path_in(hierarchy(), &cgroups).map(str::to_owned).ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// The control group at a path.
///
/// # Errors
/// There is no such control group.
pub fn find(path: &str) -> io::Result<ControlGroup> {
    let found = fs::symlink_metadata(directory(path))?;
    if !found.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    Ok(ControlGroup { path: path.to_owned(), inode: found.ino() })
}

/// True if a process is the only one in its control group.
pub fn is_alone(pid: u32) -> bool {
    let pids = path_of(pid).and_then(|path| fs::read_to_string(directory(&path).join("cgroup.procs")));
    pids.is_ok_and(|pids| pids.lines().eq([pid.to_string()]))
}

/// The directory of the control group at a path.
pub fn directory(path: &str) -> PathBuf {
    mount(hierarchy()).join(path.trim_start_matches('/'))
}

/// Returns whether root has named the control group at a path, so that the name can be trusted. `hierarchy` is a name in
/// `/proc/PID/cgroup`.
pub fn is_believed(hierarchy: &str, path: &str) -> bool {
    is_named_by_root(owners(mount(hierarchy), path))
}

/// The owners of a control group and of its ancestors, from the top.
fn owners(mut directory: PathBuf, path: &str) -> impl Iterator<Item = Option<u32>> {
    path.split('/').filter(|name| !name.is_empty()).map(move |name| {
        directory.push(name);
        fs::symlink_metadata(&directory).ok().filter(Metadata::is_dir).map(|found| found.uid())
    })
}

/// The use of a control group at this moment: removed, empty, or with processes.
pub fn use_of(group: &ControlGroup) -> GroupUse {
    match find(&group.path) {
        Ok(found) if found == *group && is_empty(&group.path) => GroupUse::Empty,
        Ok(found) if found == *group => GroupUse::Used,
        Err(error) if error.kind() != io::ErrorKind::NotFound => GroupUse::Used,
        // A process of the pod's own runs until the pod ends, and the kubelet removes the pod's control group some time later. So
        // a pod whose control group has a process still runs.
        Ok(_) | Err(_) => match pod_of(&group.path) {
            Some(pod) if find(pod).is_ok() && !is_empty(pod) => GroupUse::PodGoesOn,
            _ => GroupUse::Gone,
        },
    }
}

/// Returns true if neither the control group at a path nor any of its descendants has a process.
fn is_empty(path: &str) -> bool {
    let directory = directory(path);
    match fs::read_to_string(directory.join("cgroup.events")) {
        Ok(events) => events.lines().any(|line| line == "populated 0"),
        Err(_) => has_no_process(directory),
    }
}

/// Returns whether neither this control group nor any of its descendants is known to have a process.
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

/// The part of `path` that ends with the control group of the container with this id. `path` is the control group of a process in
/// the container, which may be a descendant of the container's control group. The whole path if no name in the path has the id.
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

/// The reason why a control group has no single owner, in words: it has processes of all users, or a user can move any own
/// process into it. None if the control group can have a single owner.
pub fn shared_by(path: &str) -> Option<&'static str> {
    let name = path.rsplit('/').next().unwrap_or_default();
    let is = |prefix: &str, suffix: &str| {
        name.strip_prefix(prefix).is_some_and(|rest| rest.strip_suffix(suffix).is_some())
    };
    if name.is_empty() {
        Some("the root of all control groups")
    } else if is("", ".slice") {
        Some("a slice of the service manager, which groups units")
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
            // A tenant has given a control group a name that looks like another hierarchy.
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
