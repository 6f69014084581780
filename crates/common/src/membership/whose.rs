//! The owner of a process, in words for people.

use std::fmt;
use std::fs;

use super::containers::containers_in;
use super::{ProcessMounts, SliceMounts};
use crate::host::device_name::DeviceName;
use crate::host::proc;

/// The most slices of one process that are named.
const SLICES: usize = 4;

/// As much of a container's id as its runtime shows in tables.
pub const SHORT_ID: usize = 12;

/// The host's users. Users that only a directory service knows stay without a name, since such a service can take long
/// to answer.
const USERS: &str = "/etc/passwd";

/// The facts that tell the owner of a client. The name of its program is not among them: a tenant chooses that name, and
/// could make it look like another client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Whose {
    pub pid: u32,
    pub user: Option<String>,
    pub slices: Option<Vec<DeviceName>>,
    pub container: Option<String>,
}

impl fmt::Display for Whose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PID {}", self.pid)?;
        if let Some(user) = &self.user {
            write!(f, " of user {user}")?;
        }
        if let Some(slices) = &self.slices {
            let plural = if slices.len() > 1 { "s" } else { "" };
            write!(f, ", slice{plural} {}", shortened(slices))?;
        }
        if let Some(container) = &self.container {
            write!(f, ", container {container:.SHORT_ID$}")?;
        }
        Ok(())
    }
}

/// The first of these names, with commas.
pub fn shortened(slices: &[impl ToString]) -> String {
    let mut names: Vec<String> = slices.iter().take(SLICES).map(ToString::to_string).collect();
    if slices.len() > SLICES {
        names.push("...".to_owned());
    }
    names.join(",")
}

pub fn users() -> String {
    String::from_utf8_lossy(&fs::read(USERS).unwrap_or_default()).into_owned()
}

/// The facts about a process that can be read without its memory, which may hang.
pub fn whose(pid: u32, mounts: &SliceMounts, users: &str) -> Whose {
    let slices = mounts.see(pid).ok().and_then(ProcessMounts::mounted).map(|mounted| mounted.slices);
    Whose { slices, ..owner(pid, users) }
}

/// The same without the slices.
pub fn owner(pid: u32, users: &str) -> Whose {
    let uid = proc::status(pid).ok().and_then(|status| status.real_uid());
    Whose { pid, user: uid.map(|uid| user_in(users, uid)), slices: None, container: container(pid) }
}

/// The name of a user in the text of /etc/passwd, or the number of a user without a name.
pub fn user_in(users: &str, uid: u32) -> String {
    let number = uid.to_string();
    let named = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == number && !name.is_empty()).then(|| name.to_owned())
    });
    named.unwrap_or(number)
}

/// The id of the innermost container around a process.
pub fn container(pid: u32) -> Option<String> {
    containers_in(&proc::cgroups_text(pid).ok()?).next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_names_or_numbers() {
        let users = "root:x:0:0:root:/root:/bin/bash\nbad line\nworker:x:1000:1000::/:/bin/sh\n:x:7:7::/:\n";
        for (uid, name) in [(0, "root"), (1000, "worker"), (100, "100"), (7, "7")] {
            assert_eq!(user_in(users, uid), name);
        }
    }
}
