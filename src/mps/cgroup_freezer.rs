//! Thaws control groups with frozen processes, for example after `docker pause`. No signal continues a frozen process.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use common::host::proc;

/// The mount points of control groups on a host with systemd: of version 2, and of the freezer of version 1.
const UNIFIED: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
const FREEZER: &str = "/sys/fs/cgroup/freezer";

/// The version of a hierarchy of control groups. The two versions have different files for freezing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hierarchy {
    /// Control groups, version 2.
    Unified,
    /// The freezer of control groups, version 1.
    Freezer,
}

impl Hierarchy {
    /// True if the processes of a control group are frozen, by this control group or by one of its ancestors.
    fn is_held(self, group: &Path) -> bool {
        let says = |file: &str| fs::read_to_string(group.join(file)).unwrap_or_default();
        match self {
            Self::Unified => says("cgroup.events").lines().any(|line| line == "frozen 1"),
            Self::Freezer => ["FROZEN", "FREEZING"].contains(&says("freezer.state").trim()),
        }
    }

    /// True if this control group itself, and not only an ancestor, is set to freeze its processes.
    fn holds(self, group: &Path) -> bool {
        let file = match self {
            Self::Unified => "cgroup.freeze",
            Self::Freezer => "freezer.self_freezing",
        };
        fs::read_to_string(group.join(file)).is_ok_and(|text| text.trim() == "1")
    }

    fn set(self, group: &Path, held: bool) -> io::Result<()> {
        let (file, text) = match (self, held) {
            (Self::Unified, true) => ("cgroup.freeze", "1"),
            (Self::Unified, false) => ("cgroup.freeze", "0"),
            (Self::Freezer, true) => ("freezer.state", "FROZEN"),
            (Self::Freezer, false) => ("freezer.state", "THAWED"),
        };
        fs::write(group.join(file), text)
    }
}

/// Thaws a control group, and adds an entry to `thawed`. When this entry is dropped, the control group is frozen again.
pub(super) fn thaw(kind: Hierarchy, group: PathBuf, thawed: &mut Vec<Thawed>) -> io::Result<()> {
    kind.set(&group, false)?;
    // Another program may freeze the control group repeatedly. One entry in `thawed` is enough to freeze the control group
    // again.
    if !thawed.iter().any(|known| (known.kind, &known.group) == (kind, &group)) {
        thawed.push(Thawed { kind, group });
    }
    Ok(())
}

/// The innermost control group that freezes this process, with its hierarchy. None if the process is not frozen.
pub(super) fn holds(pid: u32) -> Option<(Hierarchy, PathBuf)> {
    let own = proc::cgroups(pid).ok()?;
    own.split(|byte| *byte == b'\n').flat_map(groups).find_map(|(kind, root, group)| {
        if !kind.is_held(&group) {
            return None;
        }
        let around = group.ancestors().take_while(|around| around.starts_with(&root) && *around != root);
        let mut holding = around.filter(|around| kind.holds(around));
        holding.next().map(|group| (kind, group.to_owned()))
    })
}

/// The control groups in a line of `/proc/PID/cgroup` that may freeze the process, each after its hierarchy and the mount point
/// of the hierarchy.
fn groups(line: &[u8]) -> Vec<(Hierarchy, PathBuf, PathBuf)> {
    let mut fields = line.splitn(3, |byte| *byte == b':').skip(1);
    let (Some(controllers), Some([b'/', path @ ..])) = (fields.next(), fields.next()) else {
        return Vec::new();
    };
    let path = Path::new(OsStr::from_bytes(path));
    let below = |kind, root: &str| (kind, PathBuf::from(root), Path::new(root).join(path));
    if controllers.is_empty() {
        UNIFIED.iter().map(|root| below(Hierarchy::Unified, root)).collect()
    } else if controllers.split(|byte| *byte == b',').any(|controller| controller == b"freezer") {
        vec![below(Hierarchy::Freezer, FREEZER)]
    } else {
        Vec::new()
    }
}

/// A foreign control group that the service has thawed for a while. When this value is dropped, the control group is frozen
/// again.
#[derive(Debug)]
pub(super) struct Thawed {
    kind: Hierarchy,
    group: PathBuf,
}

impl Drop for Thawed {
    fn drop(&mut self) {
        let group = self.group.display();
        match self.kind.set(&self.group, true) {
            // The program that has frozen the control group may have wanted to thaw it meanwhile. An administrator can then
            // see in the journal why the control group is frozen.
            Ok(()) => {
                tracing::info!("control group {group}, which was thawed to end GPU work, is frozen again");
            }
            Err(error) => tracing::debug!(
                "control group {group}, which was thawed to end GPU work, can't be frozen again: {error}"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_unified_and_the_freezer_hierarchies_freeze() {
        assert_eq!(
            groups(b"7:freezer:/docker/a"),
            [(Hierarchy::Freezer, FREEZER.into(), "/sys/fs/cgroup/freezer/docker/a".into())]
        );
        assert_eq!(groups(b"3:cpu,cpuacct:/docker/a"), []);
        assert_eq!(groups(b"1:name=systemd:/docker/a"), []);
        let unified = groups(b"0::/docker/a:b");
        assert_eq!(unified[0].2, Path::new("/sys/fs/cgroup/docker/a:b"));
        assert_eq!(unified[1].2, Path::new("/sys/fs/cgroup/unified/docker/a:b"));
        let any = groups(b"0::/user.slice/\xff");
        assert_eq!(any[0].2, Path::new(OsStr::from_bytes(b"/sys/fs/cgroup/user.slice/\xff")));
        assert_eq!(groups(b"garbage"), []);
    }

    #[test]
    fn no_group_freezes_a_running_process() {
        assert_eq!(holds(std::process::id()), None);
    }
}
