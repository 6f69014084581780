//! A client with the facts that the service knows about it.

use alloc::borrow::ToOwned;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

use super::evidence::Membership;
use crate::terms::{DeviceName, GpuId, ProcessId};

/// The most slices of one process in a message.
const SLICES: usize = 4;

/// The number of characters of a container's id in messages, which is the number that container runtimes show in tables.
pub const SHORT_ID: usize = 12;

/// The user and the container of a process. Only a container runtime or root can move a process to another container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// The real user id of the process.
    pub uid: u32,
    /// The id of the container, from the process's control group. If the control group names no container, the text names the
    /// process's mount namespace instead.
    pub container: String,
}

/// A container of a guest, with its names on the platform. The names come from the records of the platform's host agent. A
/// tenant may have chosen each of these names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestContainer {
    pub guest: String,
    /// The name of the container within the guest.
    pub container: String,
    /// The project of the guest. Empty if the host agent's records do not have the project.
    pub project: String,
}

/// A container in the host agent's records. On at least one GPU, the service has not bound the container to a slice yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedContainer {
    /// The path of the container's control group.
    pub group: String,
    pub label: String,
    /// The container's devices, from the host agent's records: slices, or a GPU where the records do not name the slice.
    /// The list omits the devices on GPUs on which the container is already bound to a slice.
    pub devices: Vec<DeviceName>,
}

impl RecordedContainer {
    /// The container's device on this GPU: a slice, or the GPU itself if the host agent's records do not name the slice. None
    /// if `devices` has no device of the GPU.
    pub fn device_on(&self, gpu: GpuId) -> Option<DeviceName> {
        let of_gpu = || self.devices.iter().copied().filter(|device| device.gpu() == gpu);
        of_gpu().find(|device| matches!(device, DeviceName::Slice(_))).or_else(|| of_gpu().next())
    }
}

/// The commands that a control daemon accepts from a client. On D-Bus, a variant is published as its name in lower case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MayCommand {
    /// The control daemon accepts every command. The client can change the limits of all clients and end the control daemon.
    All,
    /// The control daemon accepts commands that end the GPU work of other clients of the same server.
    Neighbours,
    /// The control daemon accepts no command that changes limits or ends the work of another client.
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

/// A client, or a program that uses a GPU without MPS. The `Display` text names the process and its owner. The text omits the
/// name of the program (`command`), since a tenant chooses this name and could imitate the text of another client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownClient {
    pub process: ProcessId,
    /// The name of the process's user, or the user id if the user has no name. None if the user is not known.
    pub user: Option<String>,
    pub tenant: Option<Tenant>,
    /// The process's container, with its names on the platform. None if the host agent's records do not have the container.
    pub guest: Option<GuestContainer>,
    /// The label of the binding that gives the process its slices. None without a binding, or if the label is empty.
    pub label: Option<String>,
    /// The id of the innermost container that contains the process. None if the process runs on the host.
    pub container: Option<String>,
    /// The process's container in the host agent's records, while the service still has to bind it to slices. None otherwise.
    pub recorded: Option<RecordedContainer>,
    pub slices: Option<Membership>,
    pub may_command: Option<MayCommand>,
    /// The name of the process's program, at most 15 characters.
    pub command: String,
}

impl KnownClient {
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

    /// The owner of the process, worded as the end of a sentence. The text omits slices, since a program without MPS has no
    /// slice, even if its environment names one.
    pub fn owner(&self) -> String {
        let pid = alloc::format!("PID {}", self.process.pid);
        let words = Self { slices: None, ..self.clone() }.to_string();
        words.strip_prefix(&pid).unwrap_or_default().to_owned()
    }
}

impl fmt::Display for KnownClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PID {}", self.process.pid)?;
        // If the container runtime has bound the container, the label is only the container's id, which the text has anyway.
        let label = self.label.as_ref().filter(|label| self.container.as_ref() != Some(label));
        // The text prefers the guest to the user, since the user in a container is most often root.
        match (&self.guest, label, &self.user) {
            (Some(guest), ..) => write!(f, " of guest {}", chosen_name(&guest.guest))?,
            (None, Some(label), _) => write!(f, " of {}", chosen_name(label))?,
            (None, None, Some(user)) => write!(f, " of user {user}")?,
            (None, None, None) => {}
        }
        if let Some(Membership { slices, .. }) = &self.slices {
            let plural = if slices.len() > 1 { "s" } else { "" };
            write!(f, ", slice{plural} {}", shortened(slices))?;
        }
        match (&self.guest, &self.container) {
            (Some(guest), _) => write!(f, ", container {}", chosen_name(&guest.container)),
            (None, Some(container)) => write!(f, ", container {container:.SHORT_ID$}"),
            (None, None) => Ok(()),
        }
    }
}

/// The text for a name that a tenant has chosen. A name with unusual characters is quoted, so that it can't imitate other text.
fn chosen_name(name: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.');
    if !name.is_empty() && name.chars().all(is_plain) { name.to_owned() } else { alloc::format!("{name:?}") }
}

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
        // A tenant has chosen these names to imitate another client. The quotes in the text show that they are only names.
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
