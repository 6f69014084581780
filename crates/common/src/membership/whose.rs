//! The owner of a process, in words for people.

use std::fmt;
use std::fs;

use mps_core::terms::DeviceName;

use super::containers::containers_in;
use super::{GuestContainer, ProcessMounts, SliceMounts};
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
    /// Its container, by its names on the platform.
    pub guest: Option<GuestContainer>,
    /// The label of the binding of its control group.
    pub label: Option<String>,
    pub slices: Option<Vec<DeviceName>>,
    pub container: Option<String>,
}

impl Whose {
    /// Nothing is known but the PID.
    pub fn only(pid: u32) -> Self {
        Self { pid, user: None, guest: None, label: None, slices: None, container: None }
    }
}

impl fmt::Display for Whose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PID {}", self.pid)?;
        // The label of a container that its runtime has bound is the container's id.
        let label = self.label.as_ref().filter(|label| self.container.as_ref() != Some(label));
        // A guest says more than a user of its container, which most often is root.
        match (&self.guest, label, &self.user) {
            (Some(guest), ..) => write!(f, " of guest {}", ChosenName(&guest.guest))?,
            (None, Some(label), _) => write!(f, " of {}", ChosenName(label))?,
            (None, None, Some(user)) => write!(f, " of user {user}")?,
            (None, None, None) => {}
        }
        if let Some(slices) = &self.slices {
            let plural = if slices.len() > 1 { "s" } else { "" };
            write!(f, ", slice{plural} {}", shortened(slices))?;
        }
        match (&self.guest, &self.container) {
            (Some(guest), _) => write!(f, ", container {}", ChosenName(&guest.container)),
            (None, Some(container)) => write!(f, ", container {container:.SHORT_ID$}"),
            (None, None) => Ok(()),
        }
    }
}

/// A name that a tenant has chosen. One that could look like more than a name is quoted.
struct ChosenName<'n>(&'n str);

impl fmt::Display for ChosenName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.');
        if !self.0.is_empty() && self.0.chars().all(is_plain) {
            f.write_str(self.0)
        } else {
            write!(f, "{:?}", self.0)
        }
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
    let slices = mounts.see(pid).ok().and_then(ProcessMounts::without_memory).map(|known| known.slices);
    Whose { slices, ..owner(pid, mounts, users) }
}

/// The same without the slices.
pub fn owner(pid: u32, mounts: &SliceMounts, users: &str) -> Whose {
    let uid = proc::status(pid).ok().and_then(|status| status.real_uid());
    let user = uid.map(|uid| user_in(users, uid));
    Whose {
        pid,
        user,
        guest: mounts.guest_of(pid),
        label: mounts.label_of(pid),
        slices: None,
        container: container(pid),
    }
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
    fn a_client_of_a_guest_is_named_by_it() {
        let named = |guest: &str, container: &str| {
            let [guest, container] = [guest, container].map(str::to_owned);
            let guest = GuestContainer { guest, container, project: "vision".to_owned() };
            let slices = Some(vec!["00:06.0-1".parse().unwrap()]);
            let (user, id) = (Some("root".to_owned()), Some("0123456789abcdef".to_owned()));
            Whose { user, guest: Some(guest), slices, container: id, ..Whose::only(7) }.to_string()
        };
        let expected = "PID 7 of guest train-1, slice 00:06.0-1, container main";
        assert_eq!(named("train-1", "main"), expected);
        // A tenant chooses the names, and none of them looks like another client.
        let expected = r#"PID 7 of guest "a, PID 8 of guest b\n", slice 00:06.0-1, container "x y""#;
        assert_eq!(named("a, PID 8 of guest b\n", "x y"), expected);
    }

    #[test]
    fn a_client_of_a_binding_is_named_by_its_label() {
        let named = |label: &str, container: &str| {
            let [user, label, container] = ["root", label, container].map(|text| Some(text.to_owned()));
            Whose { user, label, container, ..Whose::only(7) }.to_string()
        };
        assert_eq!(named("job-17", "0123"), "PID 7 of job-17, container 0123");
        assert_eq!(named("a, PID 8", "0123"), "PID 7 of \"a, PID 8\", container 0123");
        assert_eq!(named("0123", "0123"), "PID 7 of user root, container 0123");
    }

    #[test]
    fn users_have_names_or_numbers() {
        let users = "root:x:0:0:root:/root:/bin/bash\nbad line\nworker:x:1000:1000::/:/bin/sh\n:x:7:7::/:\n";
        for (uid, name) in [(0, "root"), (1000, "worker"), (100, "100"), (7, "7")] {
            assert_eq!(user_in(users, uid), name);
        }
    }
}
