//! The clients that a request to end GPU work means.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use super::stop::Stop;
use super::termination_shell::TerminationShell;
use crate::register::Membership;
use crate::terms::{DeviceName, SliceId};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    Process(u32),
    /// The process with this PID, if the process belongs to this user.
    ProcessOf {
        pid: u32,
        user: u32,
    },
    Slices(Vec<SliceId>),
    /// Every process in a container, also in a container inside it. The text is the container's id or the beginning of the id.
    Container(String),
    /// Every process that a signal to a container may end.
    Signalled(Stop),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meant {
    /// The request means the process. If the request names a container, the map has the process's containers with a matching
    /// id, in the form of [`TerminationShell::containers`]. Several containers may match, since a request may have only the
    /// beginning of an id. For other requests the map is empty.
    Yes(BTreeMap<String, bool>),
    No,
    /// The request names slices, and the slices of the process are not known.
    NotKnown,
}

impl Meant {
    fn if_so(is_meant: bool) -> Self {
        if is_meant { Self::Yes(BTreeMap::new()) } else { Self::No }
    }
}

/// The longest time of a request, in which clients have to disconnect. Measured: a program that ends when CUDA returns an error
/// needs 50 ms.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The longest time of a request before a signal to a container. The container runtime waits for the service's answer, and then
/// sends the signal in any case.
const TIMEOUT_BEFORE_A_SIGNAL: Duration = Duration::from_secs(4);

impl Target {
    pub fn timeout(&self) -> Duration {
        if matches!(self, Self::Signalled(_)) { TIMEOUT_BEFORE_A_SIGNAL } else { TIMEOUT }
    }

    /// Decides if the request means a process. Asks the shell only for the facts that this decision needs.
    pub(super) async fn means<T: TerminationShell>(&self, shell: &mut T, pid: u32) -> Result<Meant, String> {
        match self {
            Self::Process(other) => Ok(Meant::if_so(*other == pid)),
            // A process may have several user ids, for example after it has changed its user. All its user ids must be the id
            // of the request's user.
            Self::ProcessOf { pid: other, user } if *other == pid => {
                let users = shell.users(pid).await?;
                Ok(Meant::if_so(!users.is_empty() && users.iter().all(|one| one == user)))
            }
            Self::ProcessOf { .. } => Ok(Meant::No),
            Self::Slices(wanted) => Ok(compare_slices(wanted, shell.slices(pid).await?.as_ref())),
            Self::Container(id) => {
                let mut containers = shell.containers(pid).await?;
                containers.retain(|one, _| one.starts_with(id.as_str()));
                Ok(if containers.is_empty() { Meant::No } else { Meant::Yes(containers) })
            }
            Self::Signalled(stop) => {
                let is_in_it = stop.has(&shell.control_group(pid).await?);
                Ok(Meant::if_so(is_in_it && stop.may_end(shell, pid).await?))
            }
        }
    }
}

/// Compares the known slices of a process with the slices of the request. If the process names a GPU instead of a slice, it may
/// have any slice of the GPU.
fn compare_slices(wanted: &[SliceId], known: Option<&Membership>) -> Meant {
    let Some(Membership { slices, known_by }) = known else { return Meant::NotKnown };
    let has_one = wanted.iter().any(|slice| slices.contains(&DeviceName::Slice(*slice)));
    let is_slice = |name: &DeviceName| matches!(name, DeviceName::Slice(_));
    let is_near = |name: &DeviceName| is_slice(name) && wanted.iter().any(|slice| slice.gpu == name.gpu());
    let is_placed = known_by.is_certain() && slices.iter().all(is_slice) || slices.iter().any(is_near);
    if has_one || is_placed { Meant::if_so(has_one) } else { Meant::NotKnown }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::register::KnownBy;
    use crate::terms::{GpuId, PciAddress};

    fn gpu(bus: u8) -> GpuId {
        GpuId(PciAddress { bus, ..PciAddress::default() })
    }

    fn slice(bus: u8, ordinal: u32) -> DeviceName {
        DeviceName::Slice(gpu(bus).slice(ordinal))
    }

    #[test]
    fn a_process_has_the_wanted_slice_or_another_or_nobody_knows() {
        let found = |slices: &[DeviceName], known_by| {
            compare_slices(&[gpu(6).slice(1)], Some(&Membership { slices: slices.to_vec(), known_by }))
        };
        for known_by in [KnownBy::Platform, KnownBy::Environment] {
            let wanted = Meant::Yes(BTreeMap::new());
            assert_eq!(found(&[slice(7, 3), slice(6, 1)], known_by), wanted);
            assert_eq!(found(&[slice(7, 3), slice(6, 2)], known_by), Meant::No, "another slice of this GPU");
            let any_of_gpu = DeviceName::Gpu(gpu(6));
            assert_eq!(found(&[any_of_gpu], known_by), Meant::NotKnown, "it may have any slice of this GPU");
        }
        assert_eq!(found(&[slice(7, 1)], KnownBy::Bound), Meant::No, "it has no other slice for certain");
        for claimed in [&[][..], &[slice(7, 1)]] {
            assert_eq!(found(claimed, KnownBy::Environment), Meant::NotKnown, "{claimed:?}");
        }
        assert_eq!(compare_slices(&[gpu(6).slice(1)], None), Meant::NotKnown);
    }
}
