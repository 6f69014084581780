//! The clients that a request is about.

use alloc::collections::BTreeSet;
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use super::stop::{SignalEffect, Stop};
use super::termination_shell::{EnclosingContainer, KnownSlices, TerminationShell};

use crate::terms::SliceId;

/// The clients whose GPU work a request ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// The process with this PID.
    Process(u32),
    /// The process with this PID, if it belongs to this user.
    ProcessOf {
        pid: u32,
        /// The user to whom the process must belong.
        user: u32,
    },
    /// Every process that has one of these slices.
    Slices(Vec<SliceId>),
    /// Every process in a container, or in a container inside it. The text is the container's id or the beginning of it.
    Container(String),
    /// Every process that may end because of a signal to a container.
    Signalled(Stop),
}

/// The answer to the question if a request means a process.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meant {
    /// The request means the process. The set has the containers of the request that contain the process: the beginning of an id
    /// may name several containers.
    Yes(BTreeSet<EnclosingContainer>),
    No,
    /// The request names slices, and the slice of the process is not known.
    NotKnown,
}

impl Meant {
    fn if_so(is_meant: bool) -> Self {
        if is_meant { Self::Yes(BTreeSet::new()) } else { Self::No }
    }
}

/// The time that a request gives clients to disconnect. Measured: a program that ends when CUDA returns an error
/// needs 50 ms.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The time that clients have to disconnect before a container runtime sends a signal. The container runtime waits for the
/// service's answer, and then sends the signal in any case.
const TIMEOUT_BEFORE_A_SIGNAL: Duration = Duration::from_secs(4);

impl Target {
    /// The time that a request with this target may take.
    pub fn timeout(&self) -> Duration {
        if matches!(self, Self::Signalled(_)) { TIMEOUT_BEFORE_A_SIGNAL } else { TIMEOUT }
    }

    /// Decides if the request means a process. Asks the shell only for the facts on which the decision depends.
    ///
    /// # Errors
    /// The facts about the process can't be read.
    pub(super) async fn means<T: TerminationShell>(&self, shell: &mut T, pid: u32) -> Result<Meant, String> {
        match self {
            Self::Process(other) => Ok(Meant::if_so(*other == pid)),
            // A process may have several user ids, for example after it has changed its user. All user ids of the process
            // must be the id of the request's user.
            Self::ProcessOf { pid: other, user } if *other == pid => {
                let users = shell.users(pid).await?;
                Ok(Meant::if_so(!users.is_empty() && users.iter().all(|one| one == user)))
            }
            Self::ProcessOf { .. } => Ok(Meant::No),
            Self::Slices(wanted) => Ok(compare_slices(wanted, shell.slices(pid).await?)),
            Self::Container(id) => {
                let around = shell.containers(pid).await?.into_iter();
                let containers: BTreeSet<_> = around.filter(|one| one.id.starts_with(id.as_str())).collect();
                Ok(if containers.is_empty() { Meant::No } else { Meant::Yes(containers) })
            }
            Self::Signalled(stop) => {
                if !stop.has(&shell.control_group(pid).await?) {
                    return Ok(Meant::No);
                }
                Ok(Meant::if_so(match stop.effect() {
                    SignalEffect::EndsAll => true,
                    SignalEffect::Harmless => false,
                    SignalEffect::AsksToEnd => {
                        let program = shell.reception(pid, stop.signal).await?;
                        let is_first = stop.to_all || pid == stop.first;
                        let first =
                            if is_first { program } else { shell.reception(stop.first, stop.signal).await? };
                        Stop::ends(program, first)
                    }
                }))
            }
        }
    }
}

/// Compares the known slices of a process with the slices of the request.
fn compare_slices(wanted: &[SliceId], known: Option<KnownSlices>) -> Meant {
    let Some(KnownSlices { slices, is_certain }) = known else { return Meant::NotKnown };
    let is_near = |slice: &SliceId| wanted.iter().any(|wanted| wanted.gpu == slice.gpu);
    let is_placed = is_certain || slices.iter().any(is_near);
    let has_one = slices.iter().any(|slice| wanted.contains(slice));
    if has_one || is_placed { Meant::if_so(has_one) } else { Meant::NotKnown }
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::terms::{GpuId, PciAddress};

    fn slice(bus: u8, ordinal: u32) -> SliceId {
        GpuId(PciAddress { bus, ..PciAddress::default() }).slice(ordinal)
    }

    #[test]
    fn a_process_has_the_wanted_slice_or_another_or_nobody_knows() {
        let found = |slices: &[SliceId], is_certain| {
            compare_slices(&[slice(6, 1)], Some(KnownSlices { slices: slices.to_vec(), is_certain }))
        };
        for is_certain in [true, false] {
            let wanted = Meant::Yes(BTreeSet::new());
            assert_eq!(found(&[slice(7, 3), slice(6, 1)], is_certain), wanted);
            assert_eq!(
                found(&[slice(7, 3), slice(6, 2)], is_certain),
                Meant::No,
                "another slice of this GPU"
            );
        }
        assert_eq!(found(&[slice(7, 1)], true), Meant::No, "it has no other slice for certain");
        for claimed in [&[][..], &[slice(7, 1)]] {
            assert_eq!(found(claimed, false), Meant::NotKnown, "{claimed:?}");
        }
        assert_eq!(compare_slices(&[slice(6, 1)], None), Meant::NotKnown);
    }
}
