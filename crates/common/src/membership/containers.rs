//! Finds the containers of a process in the names of its control groups.

use crate::host::control_groups;

/// The ids of all containers that a process is in, from the text of its /proc/PID/cgroup. In each hierarchy the innermost
/// container comes first. Every container runtime names a container's control group with the 64 hexadecimal digits of the
/// container's id, and with different prefixes and suffixes.
pub fn containers_in(cgroups: &str) -> impl Iterator<Item = &str> {
    paths_in(cgroups).flat_map(|path| path.rsplit('/')).filter_map(container_in_name)
}

fn paths_in(cgroups: &str) -> impl Iterator<Item = &str> {
    cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2))
}

/// The container that the host's own runtime has made for the process with these control groups: the outermost container in a
/// path, if root has made its control group and all ancestors. Then no other user can have chosen the container's id in the
/// path.
pub fn of_the_hosts(cgroups: &str) -> Option<&str> {
    made_by(cgroups, control_groups::is_believed)
}

/// Like [`of_the_hosts`]. `is_believed` takes a hierarchy and a path in it, and returns true if root has made the control
/// group.
fn made_by(cgroups: &str, is_believed: impl Fn(&str, &str) -> bool) -> Option<&str> {
    cgroups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (hierarchy, path) = (fields.next()?, fields.next()?);
        let id = path.split('/').find_map(container_in_name)?;
        is_believed(hierarchy, &up_to_container(path, id)?).then_some(id)
    })
}

/// The container's id in the name of a control group. conmon, which monitors a container of podman or CRI-O from outside, has a
/// control group with the container's id too (`libpod-conmon-ID.scope`). conmon is not in the container, so the result for its
/// control group is None.
fn container_in_name(name: &str) -> Option<&str> {
    if name.contains("conmon") {
        return None;
    }
    name.split(|c: char| !c.is_ascii_hexdigit()).find(|run| run.len() == 64)
}

/// The path of the control group of the container `id`. `path` is the path of this control group or of a descendant. None if no
/// name in `path` has the id.
pub(super) fn up_to_container(path: &str, id: &str) -> Option<String> {
    let mut above = String::new();
    for name in path.split('/').skip(1) {
        above = format!("{above}/{name}");
        if container_in_name(name) == Some(id) {
            return Some(above);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn container_ids_of_every_runtime() {
        let id = "0123456789abcdef".repeat(4);
        for path in [
            format!("0::/system.slice/docker-{id}.scope"),
            format!("12:devices:/docker/{id}"),
            format!("0::/kubepods.slice/kubepods-pod12345678_1234.slice/cri-containerd-{id}.scope"),
            format!("0::/kubepods/besteffort/pod1b2c/{id}"),
            format!("0::/machine.slice/libpod-{id}.scope/container"),
            format!("0::/system.slice/crio-{id}.scope"),
            format!("3:cpu:/\n0::/default/{id}"),
            // Cloudpods (the platform) makes its control groups below its own parent, in every hierarchy.
            format!("5:cpuset:/cloudpods/{id}\n0::/"),
            format!("0::/cloudpods/{id}"),
            format!("0::/cloudpods.slice/cri-containerd-{id}.scope"),
        ] {
            assert_eq!(containers_in(&path).next(), Some(id.as_str()), "{path}");
        }
        assert_eq!(containers_in("0::/user.slice/user-0.slice/session-1.scope").next(), None);
        assert_eq!(containers_in("garbage").next(), None);
        for path in
            [format!("0::/machine.slice/libpod-conmon-{id}.scope"), format!("0::/crio-conmon-{id}.scope")]
        {
            assert_eq!(containers_in(&path).next(), None, "{path}");
        }
    }

    #[test]
    fn a_container_in_a_container_is_in_both() {
        let (outer, inner) = ("a".repeat(64), "b".repeat(64));
        let path = format!("0::/docker/{outer}/system.slice/docker-{inner}.scope/init");
        assert_eq!(containers_in(&path).collect::<Vec<_>>(), [inner, outer]);
    }

    #[test]
    fn a_control_group_below_a_container_is_in_it() {
        let (id, other) = ("a".repeat(64), "b".repeat(64));
        let expected = format!("/cloudpods/{id}");
        for path in [expected.clone(), format!("{expected}/init/{other}")] {
            assert_eq!(up_to_container(&path, &id), Some(expected.clone()), "{path}");
        }
        assert_eq!(up_to_container(&format!("/cloudpods/{other}"), &id), None);
        assert_eq!(up_to_container("/", &id), None);
    }

    #[test]
    fn who_may_name_control_groups_makes_no_container_of_the_hosts() {
        let (own, other) = ("a".repeat(64), "b".repeat(64));
        // The user of each of these two units owns the unit's control group, and can make other control groups in it.
        let is_believed = |_: &str, path: &str| {
            !["/hz-job.service/", "/user@1000.service/"].iter().any(|one| path.contains(one))
        };
        for (path, expected) in [
            (format!("0::/system.slice/docker-{own}.scope"), Some(&own)),
            (format!("0::/system.slice/docker-{own}.scope/docker-{other}.scope"), Some(&own)),
            (format!("1:name=systemd:/user.slice\n7:freezer:/docker/{own}"), Some(&own)),
            (format!("0::/user.slice/user-1000.slice/user@1000.service/app.slice/docker-{own}.scope"), None),
            (format!("0::/hz-job.service/{own}"), None),
            (format!("1:name=systemd:/hz-job.service/{own}\n0::/"), None),
        ] {
            assert_eq!(made_by(&path, is_believed), expected.map(String::as_str), "{path}");
        }
    }
}
