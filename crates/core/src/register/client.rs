//! A client, as it was when it was looked at last.

use alloc::borrow::ToOwned;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

use super::evidence::Membership;
use crate::terms::{DeviceName, GpuId, ProcessId};

/// The most slices of one process that a message names.
const SLICES: usize = 4;

/// The characters of a container's id that are shown: as many as container runtimes show in tables.
pub const SHORT_ID: usize = 12;

/// The user and the container of a process. Only a runtime or root moves a process to another container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// The real user id.
    pub uid: u32,
    /// The id in its control group, or the mount namespace where the control group names no container.
    pub container: String,
}

/// A container of a guest, by its names on the platform. A tenant may have chosen each of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestContainer {
    /// The guest.
    pub guest: String,
    /// The container.
    pub container: String,
    /// Empty if the records do not have it.
    pub project: String,
}

/// A container in the host agent's records that is not bound to a slice of each of its GPUs yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedContainer {
    /// The path of its control group.
    pub group: String,
    /// The container's name for people.
    pub label: String,
    /// The container's slices on these GPUs, or a GPU where the records do not say which slice.
    pub devices: Vec<DeviceName>,
}

impl RecordedContainer {
    /// The container's slice of this GPU, or the GPU where the records do not say which slice.
    pub fn device_on(&self, gpu: GpuId) -> Option<DeviceName> {
        let of_gpu = || self.devices.iter().copied().filter(|device| device.gpu() == gpu);
        of_gpu().find(|device| matches!(device, DeviceName::Slice(_))).or_else(|| of_gpu().next())
    }
}

/// The commands that a control daemon takes from a client; in lower case it is the word on D-Bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MayCommand {
    /// All commands: the client can change all clients' limits and end the control daemon.
    All,
    /// The commands that end the GPU work of others on the same server.
    Neighbours,
    /// No command that changes anything for others.
    Nothing,
}

impl fmt::Display for MayCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::All => "all",
            Self::Neighbours => "neighbours",
            Self::Nothing => "nothing",
        })
    }
}

impl FromStr for MayCommand {
    type Err = ();

    fn from_str(word: &str) -> Result<Self, ()> {
        let all = [Self::All, Self::Neighbours, Self::Nothing];
        all.into_iter().find(|one| one.to_string() == word).ok_or(())
    }
}

/// A client, or a program that uses a GPU without MPS. Its words name it with its owner, and without its command: a tenant
/// chooses the command, and could make it look like another client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownClient {
    pub process: ProcessId,
    /// The name of its user, or the id of a user without a name.
    pub user: Option<String>,
    /// None if it is not known.
    pub tenant: Option<Tenant>,
    /// The client's container, by its names on the platform.
    pub guest: Option<GuestContainer>,
    /// The label of the binding of its control group.
    pub label: Option<String>,
    /// The id of the innermost container around it.
    pub container: Option<String>,
    /// The same container, if it is to be bound yet.
    pub recorded: Option<RecordedContainer>,
    /// The slices that it has.
    pub slices: Option<Membership>,
    /// The commands that the client can give its control daemon.
    pub may_command: Option<MayCommand>,
    /// The name of its program, 15 characters at most.
    pub command: String,
}

impl KnownClient {
    /// Nothing is known but the process.
    pub fn only(process: ProcessId) -> Self {
        Self {
            process,
            user: None,
            tenant: None,
            guest: None,
            label: None,
            container: None,
            recorded: None,
            slices: None,
            may_command: None,
            command: String::new(),
        }
    }

    /// The owner without the slices, as the end of a sentence: a program without MPS has no slice, whatever it claims.
    pub fn owner(&self) -> String {
        let pid = alloc::format!("PID {}", self.process.pid);
        let words = Self { slices: None, ..self.clone() }.to_string();
        words.strip_prefix(&pid).unwrap_or_default().to_owned()
    }
}

impl fmt::Display for KnownClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PID {}", self.process.pid)?;
        // The label of a container that its runtime has bound is the container's id.
        let label = self.label.as_ref().filter(|label| self.container.as_ref() != Some(label));
        // A guest says more than a user of its container, which most often is root.
        match (&self.guest, label, &self.user) {
            (Some(guest), ..) => write!(f, " of guest {}", ChosenName(&guest.guest))?,
            (None, Some(label), _) => write!(f, " of {}", ChosenName(label))?,
            (None, None, Some(user)) => write!(f, " of user {user}")?,
            (None, None, None) => {}
        }
        if let Some(Membership { slices, .. }) = &self.slices {
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

/// A name that a tenant has chosen. A name that could look like more than a name is quoted.
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

#[cfg(test)]
mod tests {
    use super::super::evidence::KnownBy;
    use super::*;

    fn client() -> KnownClient {
        let slices = Membership { slices: ["00:06.0-1".parse().unwrap()].into(), known_by: KnownBy::Mount };
        let process = ProcessId { pid: 7, start_time: 1 };
        KnownClient { user: Some("root".to_owned()), slices: Some(slices), ..KnownClient::only(process) }
    }

    #[test]
    fn a_client_of_a_guest_is_named_by_it() {
        let named = |guest: &str, container: &str| {
            let [guest, container] = [guest, container].map(str::to_owned);
            let guest = GuestContainer { guest, container, project: "vision".to_owned() };
            let container = Some("0123456789abcdef".to_owned());
            KnownClient { guest: Some(guest), container, ..client() }.to_string()
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
            let [label, container] = [label, container].map(|text| Some(text.to_owned()));
            KnownClient { label, container, slices: None, ..client() }.to_string()
        };
        assert_eq!(named("job-17", "0123"), "PID 7 of job-17, container 0123");
        assert_eq!(named("a, PID 8", "0123"), "PID 7 of \"a, PID 8\", container 0123");
        assert_eq!(named("0123", "0123"), "PID 7 of user root, container 0123");
    }

    #[test]
    fn the_words_are_bounded() {
        let slices =
            Membership { slices: alloc::vec!["00:06.0-1".parse().unwrap(); 64], known_by: KnownBy::Bound };
        let words = KnownClient { slices: Some(slices), ..client() }.to_string();
        assert!(words.ends_with(", slices 00:06.0-1,00:06.0-1,00:06.0-1,00:06.0-1,..."), "{words}");
        assert_eq!(client().owner(), " of user root");
    }
}
