//! The slices of a process, and the sources from which the service knows them.
//!
//! The sources, from the strongest to the weakest: the binding of the process's control group, the mounts of its container, the
//! records that the platform's host agent has of the container, and the environment of the process. `common::membership` reads
//! the sources, and decides how far each source can be trusted.

use alloc::collections::BTreeSet;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::str::FromStr;

use crate::terms::{DeviceName, GpuId, SliceId};

/// The source from which the service knows the slices of a process. On D-Bus, a variant is published as its name in lower case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KnownBy {
    /// The binding of the process's control group, or of an ancestor of the control group.
    Bound,
    Mount,
    /// The host agent's records, which give devices to containers.
    Platform,
    /// The environment of the process, which the process can change at will.
    Environment,
}

impl KnownBy {
    /// True if no program in a container can change this source.
    pub fn is_certain(self) -> bool {
        match self {
            Self::Bound | Self::Mount | Self::Platform => true,
            Self::Environment => false,
        }
    }
}

impl fmt::Display for KnownBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bound => "bound",
            Self::Mount => "mount",
            Self::Platform => "platform",
            Self::Environment => "environment",
        })
    }
}

impl FromStr for KnownBy {
    type Err = ();

    fn from_str(word: &str) -> Result<Self, ()> {
        let all = [Self::Bound, Self::Mount, Self::Platform, Self::Environment];
        all.into_iter().find(|one| one.to_string() == word).ok_or(())
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Membership {
    /// Never empty, and without duplicates. If the source is the host agent's records or the environment, a GPU may stand for
    /// one of its slices.
    pub slices: Vec<DeviceName>,
    pub known_by: KnownBy,
}

impl Membership {
    fn of(slices: impl IntoIterator<Item = DeviceName>, known_by: KnownBy) -> Option<Self> {
        let slices: Vec<DeviceName> = slices.into_iter().collect();
        (!slices.is_empty()).then_some(Self { slices, known_by })
    }

    /// The slices that count for a process on this GPU. If the source is certain ([`KnownBy::is_certain`]), the source also
    /// says on which GPU each slice is, so slices of other GPUs do not count. If only the environment names the slices, all of
    /// them count. None if no slice counts.
    pub fn on(mut self, gpu: GpuId) -> Option<Self> {
        if self.known_by.is_certain() {
            self.slices.retain(|slice| slice.gpu() == gpu);
        }
        (!self.slices.is_empty()).then_some(self)
    }

    /// Returns whether the process has several slices of one GPU. The process uses only one of these slices, and its
    /// environment may say which.
    fn is_ambiguous(&self) -> bool {
        let gpus: BTreeSet<GpuId> = self.slices.iter().map(|one| one.gpu()).collect();
        gpus.len() < self.slices.len()
    }

    /// Keeps only the slices that the process claims in its environment. On a GPU without a claimed slice, all slices of the
    /// process stay.
    fn chosen_by(self, claim: &[DeviceName]) -> Self {
        let is_chosen = |gpu| self.slices.iter().any(|one| one.gpu() == gpu && claim.contains(one));
        let counts = |one: &&DeviceName| claim.contains(one) || !is_chosen(one.gpu());
        let slices = self.slices.iter().filter(counts).copied().collect();
        Self { slices, ..self }
    }

    pub fn names(&self) -> String {
        self.slices.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    }
}

/// The facts from all sources about the slices of a process, except for the environment. The environment is in the memory of
/// the process, and reading this memory can hang.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Evidence {
    /// The slices from the nearest binding of the process's control group. Root or the host agent's records have caused the
    /// binding. None without a binding.
    pub bound: Option<Membership>,
    /// The slices with directories that are mounted in the process's container. The list may be empty. None if the mounts prove
    /// nothing: the process runs on the host, its mounts can't be trusted, or it sees a pipe directory without a slice's
    /// directory.
    pub mounted: Option<Vec<SliceId>>,
    pub recorded: Vec<DeviceName>,
}

impl Evidence {
    /// Returns whether the host agent's records can decide the slices of a process. The service reads the records only in this
    /// case, since reading them costs more than reading the other sources.
    pub fn asks_records(bound: Option<&Membership>, mounted: &[SliceId]) -> bool {
        mounted.is_empty() && bound.is_none_or(|its| its.known_by != KnownBy::Bound)
    }

    /// The slices from the sources that no program in a container can change. None if these sources name no slice.
    fn certain(&self) -> Option<Membership> {
        let slices = self.mounted.iter().flatten().copied();
        let Some(bound) = &self.bound else {
            let mounted = Membership::of(slices.map(DeviceName::Slice), KnownBy::Mount);
            return mounted.or_else(|| Membership::of(self.recorded.iter().copied(), KnownBy::Platform));
        };
        if !Self::asks_records(Some(bound), &slices.collect::<Vec<_>>()) {
            return Some(bound.clone());
        }
        // A container may be bound on one GPU and only recorded on another. A record therefore counts on each GPU on which the
        // container is not bound.
        let has = |device: &&DeviceName| bound.slices.iter().any(|slice| slice.gpu() == device.gpu());
        let more = self.recorded.iter().filter(|device| !has(device));
        Membership::of(bound.slices.iter().chain(more).copied(), bound.known_by)
    }

    pub fn asks_environment(&self) -> bool {
        match self.certain() {
            None => self.mounted.is_none(),
            Some(certain) => certain.is_ambiguous(),
        }
    }

    /// The slices of the process. `claim` has the slices that the environment of the process names. `is_anothers` returns
    /// whether a slice is bound to a control group that does not contain the process. A claim to another tenant's slice does
    /// not count: a tenant can only choose between the tenant's own slices.
    pub fn slices(&self, claim: &[DeviceName], is_anothers: impl Fn(&SliceId) -> bool) -> Option<Membership> {
        match self.certain() {
            None if self.mounted.is_some() => None,
            None => {
                let can_be = |name: &&DeviceName| match name {
                    DeviceName::Slice(slice) => !is_anothers(slice),
                    DeviceName::Gpu(_) => true,
                };
                Membership::of(claim.iter().filter(can_be).copied(), KnownBy::Environment)
            }
            Some(several) if several.is_ambiguous() => Some(several.chosen_by(claim)),
            certain => certain,
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    fn devices(names: &[&str]) -> Vec<DeviceName> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    fn membership(slices: &[&str], known_by: KnownBy) -> Membership {
        Membership { slices: devices(slices), known_by }
    }

    fn slice(name: &str) -> SliceId {
        match name.parse().unwrap() {
            DeviceName::Slice(slice) => slice,
            DeviceName::Gpu(_) => unreachable!("{name}"),
        }
    }

    #[test]
    fn the_strongest_source_counts() {
        use KnownBy::{Bound, Environment, Mount, Platform};
        let (one, two) = ("00:06.0-1", "00:06.0-2");
        let by = |known_by| Some(membership(&[one], known_by));
        let (mounted, nothing) = (Some(vec![slice(two)]), Some(Vec::new()));
        for (bound, mounted, recorded, claim, expected) in [
            (by(Bound), mounted.clone(), &[two][..], &[two][..], by(Bound)),
            (by(Platform), mounted.clone(), &["00:07.0"], &[two], by(Platform)),
            (None, mounted, &[one], &[one], Some(membership(&[two], Mount))),
            (None, nothing.clone(), &[one], &[two], by(Platform)),
            (None, None, &[one], &[two], by(Platform)),
            (None, None, &[], &[one], by(Environment)),
            (None, nothing, &[], &[one], None),
            (None, None, &[], &[], None),
        ] {
            let evidence = Evidence { bound, mounted, recorded: devices(recorded) };
            assert_eq!(evidence.slices(&devices(claim), |_| false), expected, "{evidence:?}");
            let asks = expected.is_none_or(|its| its.known_by == Environment) && evidence.mounted.is_none();
            assert_eq!(evidence.asks_environment(), asks, "{evidence:?}");
        }
    }

    #[test]
    fn a_container_is_bound_to_its_slices_gpu_by_gpu() {
        let recorded = devices(&["00:06.0-3", "00:07.0"]);
        for (by, expected) in
            [(KnownBy::Platform, &["00:06.0-1", "00:07.0"][..]), (KnownBy::Bound, &["00:06.0-1"])]
        {
            let bound = Some(membership(&["00:06.0-1"], by));
            let evidence = Evidence { bound, mounted: None, recorded: recorded.clone() };
            assert_eq!(evidence.slices(&[], |_| false), Some(membership(expected, by)));
        }
    }

    #[test]
    fn a_claim_chooses_between_slices_of_one_gpu() {
        let of = |slices: &[&str]| Evidence {
            bound: Some(membership(slices, KnownBy::Bound)),
            ..Evidence::default()
        };
        let several = of(&["00:06.0-1", "00:06.0-2", "00:07.0-0"]);
        assert!(several.asks_environment() && !of(&["00:06.0-1", "00:07.0-0"]).asks_environment());
        for (claim, expected) in [
            (&["00:06.0-2"][..], &["00:06.0-2", "00:07.0-0"][..]),
            (&["00:07.0-0", "00:06.0-2", "00:06.0-1"], &["00:06.0-1", "00:06.0-2", "00:07.0-0"]),
            (&["00:06.0-3", "00:08.0-0"], &["00:06.0-1", "00:06.0-2", "00:07.0-0"]),
        ] {
            let expected = membership(expected, KnownBy::Bound);
            assert_eq!(several.slices(&devices(claim), |_| true), Some(expected), "{claim:?}");
        }
    }

    #[test]
    fn nobody_claims_a_slice_of_a_control_group() {
        let claim = devices(&["00:06.0-1", "00:06.0", "00:06.0-2"]);
        let taken = slice("00:06.0-1");
        let known = Evidence::default().slices(&claim, |slice| *slice == taken);
        assert_eq!(known, Some(membership(&["00:06.0", "00:06.0-2"], KnownBy::Environment)));
        assert_eq!(Evidence::default().slices(&devices(&["00:06.0-1"]), |_| true), None);
    }

    #[test]
    fn a_mounted_directory_says_nothing_about_another_gpu() {
        let (six, seven) = ("00:06.0".parse().unwrap(), "00:07.0".parse().unwrap());
        let mounted = membership(&["00:06.0-1", "00:06.0-2"], KnownBy::Mount);
        assert_eq!((mounted.clone().on(six), mounted.clone().on(seven)), (Some(mounted), None));
        let claimed = membership(&["00:06.0-1"], KnownBy::Environment);
        assert_eq!(claimed.clone().on(seven), Some(claimed));
    }
}
