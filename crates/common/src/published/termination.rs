//! The end of GPU work: the clients that a caller can name.

use std::fmt;

use mps_core::tenants::Stop;
use mps_core::terms::SliceId;

use crate::membership::whose::shortened;

/// The digits of the shortest spelling of a container's id, and of the whole id.
const SHORTEST_ID: usize = 12;
const ID: usize = 64;

/// The processes with GPU work that is to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TerminationTarget {
    Process(u32),
    /// A process, if it is this user's.
    ProcessOf {
        pid: u32,
        user: u32,
    },
    /// Every process that has one of these slices.
    Slices(Vec<SliceId>),
    /// Every process in a container, or in a container inside it.
    Container(ContainerId),
    /// Every process that may end because of a signal to a container.
    Signalled(Stop),
}

impl TerminationTarget {
    /// Returns whether the end of the work is an event. Containers are stopped all the time.
    pub fn is_told(&self) -> bool {
        !matches!(self, Self::Signalled(_))
    }

    /// The PID, the container or the slices, as a caller names them.
    pub fn names(&self) -> Vec<String> {
        match self {
            Self::Process(pid) | Self::ProcessOf { pid, .. } => vec![pid.to_string()],
            Self::Slices(slices) => slices.iter().map(ToString::to_string).collect(),
            Self::Container(id) => vec![id.to_string()],
            Self::Signalled(stop) => vec![stop.group.clone()],
        }
    }
}

impl fmt::Display for TerminationTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(pid) | Self::ProcessOf { pid, .. } => write!(f, "process {pid}"),
            Self::Slices(slices) => f.write_str(&shortened(slices)),
            Self::Container(id) => write!(f, "container {id}"),
            Self::Signalled(stop) => write!(f, "control group {}", stop.group),
        }
    }
}

/// The id of a container, or its beginning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerId(String);

impl fmt::Display for ContainerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl ContainerId {
    /// Whether this is the id, in lower case, or its beginning.
    pub fn begins(&self, id: &str) -> bool {
        id.starts_with(&self.0)
    }

    /// Takes the 64 hexadecimal digits of a container, or at least the first 12 of them.
    pub fn new(text: &str) -> Result<Self, BadContainerId> {
        let is_id = (SHORTEST_ID..=ID).contains(&text.len()) && text.bytes().all(|c| c.is_ascii_hexdigit());
        if is_id { Ok(Self(text.to_ascii_lowercase())) } else { Err(BadContainerId(text.to_owned())) }
    }
}

#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} is no container id; give its 64 hexadecimal digits, or at least the first {SHORTEST_ID} of them: `docker inspect \
     --format '{{{{.Id}}}}' NAME`, `podman inspect --format '{{{{.Id}}}}' NAME` or `crictl ps --name NAME` says the id of a name"
)]
pub struct BadContainerId(String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_hexadecimal_and_long_enough() {
        let full = "0123456789ABCDEF".repeat(4);
        assert_eq!(ContainerId::new(&full).unwrap(), ContainerId(full.to_lowercase()));
        assert!(ContainerId::new("0123456789ab").is_ok());
        for text in ["", "0123456789a", "0123456789xy", &format!("{full}0"), "0123456789a\u{e9}"] {
            let error = ContainerId::new(text).unwrap_err().to_string();
            assert!(error.contains("at least the first 12"), "{error}");
        }
    }
}
