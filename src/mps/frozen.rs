//! Control groups whose processes the kernel holds still, as `docker pause` has it do: no signal lets those go on.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::host::proc;

/// Where each kind of hierarchy is, on every host with systemd.
const UNIFIED: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
const FREEZER: &str = "/sys/fs/cgroup/freezer";

/// The files of a kind of hierarchy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Control groups, version 2.
    Unified,
    /// The freezer of version 1.
    Freezer,
}

impl Kind {
    /// Whether the processes of a group are held, by that group or by one around it.
    fn is_held(self, group: &Path) -> bool {
        let says = |file: &str| fs::read_to_string(group.join(file)).unwrap_or_default();
        match self {
            Self::Unified => says("cgroup.events").lines().any(|line| line == "frozen 1"),
            Self::Freezer => ["FROZEN", "FREEZING"].contains(&says("freezer.state").trim()),
        }
    }

    /// Whether it is this group that holds them.
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

/// A control group that holds its processes still.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frozen {
    kind: Kind,
    group: PathBuf,
}

impl Frozen {
    /// Lets its processes go on, for as long as it is among `thawed`.
    ///
    /// # Errors
    /// What the kernel says: the hierarchy may be mounted read-only.
    pub(super) fn thaw(self, thawed: &mut Vec<Thawed>) -> io::Result<()> {
        self.kind.set(&self.group, false)?;
        // Somebody may freeze it again and again.
        if !thawed.iter().any(|known| known.0 == self) {
            thawed.push(Thawed(self));
        }
        Ok(())
    }
}

/// The innermost control group that holds a process still, if one does.
pub(super) fn holds(pid: u32) -> Option<Frozen> {
    let own = proc::cgroups(pid).ok()?;
    own.split(|byte| *byte == b'\n').flat_map(groups).find_map(|(kind, root, group)| {
        if !kind.is_held(&group) {
            return None;
        }
        let around = group.ancestors().take_while(|around| around.starts_with(&root) && *around != root);
        let mut holding = around.filter(|around| kind.holds(around));
        holding.next().map(|group| Frozen { kind, group: group.to_owned() })
    })
}

/// The control groups in a line of /proc/PID/cgroup that may hold the process, each behind its hierarchy's root.
fn groups(line: &[u8]) -> Vec<(Kind, PathBuf, PathBuf)> {
    let mut fields = line.splitn(3, |byte| *byte == b':').skip(1);
    let (Some(controllers), Some([b'/', path @ ..])) = (fields.next(), fields.next()) else {
        return Vec::new();
    };
    let path = Path::new(OsStr::from_bytes(path));
    let below = |kind, root: &str| (kind, PathBuf::from(root), Path::new(root).join(path));
    if controllers.is_empty() {
        UNIFIED.iter().map(|root| below(Kind::Unified, root)).collect()
    } else if controllers.split(|byte| *byte == b',').any(|controller| controller == b"freezer") {
        vec![below(Kind::Freezer, FREEZER)]
    } else {
        Vec::new()
    }
}

/// A control group that was let go on for a while: it is as it was again when this is dropped, since whoever froze it
/// wants that.
#[derive(Debug)]
pub(super) struct Thawed(Frozen);

impl Drop for Thawed {
    fn drop(&mut self) {
        if let Err(error) = self.0.kind.set(&self.0.group, true) {
            tracing::debug!("{} is not frozen again: {error}", self.0.group.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_some_hierarchies_freeze() {
        assert_eq!(
            groups(b"7:freezer:/docker/a"),
            [(Kind::Freezer, FREEZER.into(), "/sys/fs/cgroup/freezer/docker/a".into())]
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
    fn a_process_that_runs_is_held_by_none() {
        assert_eq!(holds(std::process::id()), None);
    }
}
