//! The containers around a process, by its control groups.

/// The ids of all containers around a process, from its cgroup paths, the innermost of each hierarchy first. Every
/// runtime puts the 64 hexadecimal digits of the id there, in one form of name or another.
pub fn containers_in(cgroups: &str) -> impl Iterator<Item = &str> {
    paths_in(cgroups).flat_map(|path| path.rsplit('/')).filter_map(container_in_name)
}

fn paths_in(cgroups: &str) -> impl Iterator<Item = &str> {
    cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2))
}

/// Whether the host's own runtime has made a container, as far as these cgroup paths tell: the container is the
/// outermost of its path, and not in the part of the tree where a user's own service manager lets that user choose
/// names.
pub fn is_the_hosts(cgroups: &str, id: &str) -> bool {
    paths_in(cgroups).filter(|path| !path.contains("/user@")).any(|path| {
        let mut names = path.split('/').filter_map(container_in_name);
        names.next() == Some(id)
    })
}

/// The container's id in the name of a control group. conmon, which looks after a container of podman or CRI-O from outside, has
/// a group with the container's id too (`libpod-conmon-ID.scope`), and is not in that container.
fn container_in_name(name: &str) -> Option<&str> {
    if name.contains("conmon") {
        return None;
    }
    name.split(|c: char| !c.is_ascii_hexdigit()).find(|run| run.len() == 64)
}

/// The container that the host's own runtime has made for the process with these cgroup paths.
pub(super) fn of_the_hosts(cgroups: &str) -> Option<&str> {
    containers_in(cgroups).find(|id| is_the_hosts(cgroups, id))
}

/// The part of the path of a control group that ends with this container.
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
            // Cloudpods: below its own parent, in every hierarchy there is.
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
        for path in [
            format!("0::/system.slice/docker-{own}.scope/docker-{other}.scope"),
            format!("1:name=systemd:/user.slice\n7:freezer:/docker/{own}"),
        ] {
            assert!(is_the_hosts(&path, &own) && !is_the_hosts(&path, &other), "{path}");
        }
        let path = format!("0::/user.slice/user-1000.slice/user@1000.service/app.slice/docker-{own}.scope");
        assert!(!is_the_hosts(&path, &own));
        assert_eq!(of_the_hosts(&path), None);
        let path = format!("0::/system.slice/docker-{own}.scope/docker-{other}.scope");
        assert_eq!(of_the_hosts(&path), Some(own.as_str()), "and not the container inside");
    }
}
