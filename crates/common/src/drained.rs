//! The slices and GPUs that an administrator has closed for new clients.

use std::collections::{BTreeMap, BTreeSet};

use mps_core::terms::{DeviceName, GpuId, SliceId};
use serde::{Deserialize, Deserializer, Serialize};

pub type SliceCounts = BTreeMap<GpuId, u32>;

/// The drained slices and GPUs. The name of a GPU stands for all slices of the GPU. A name stays even if the host has no such
/// slice any more, since the next reload may bring the slice back.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Drained {
    /// True if an administrator has drained the whole host. Then a GPU that is added later is drained too.
    all: bool,
    #[serde(deserialize_with = "readable")]
    names: BTreeSet<DeviceName>,
}

/// Reads the drained names from the state file. A name that can't be parsed is dropped. An error would make the whole state
/// file unusable, and the service would lose track of its control daemons.
fn readable<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeSet<DeviceName>, D::Error> {
    let names = BTreeSet::<String>::deserialize(deserializer)?;
    Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
}

impl Drained {
    pub fn has(&self, slice: SliceId) -> bool {
        self.all || self.names(DeviceName::Gpu(slice.gpu)) || self.names(DeviceName::Slice(slice))
    }

    /// True if an administrator drained exactly this name. The host may have no slice or GPU with this name any more.
    pub fn names(&self, name: DeviceName) -> bool {
        self.names.contains(&name)
    }

    /// An empty list drains the whole host.
    pub fn drain(&mut self, names: &[DeviceName]) {
        self.all |= names.is_empty();
        self.names.extend(names);
    }

    /// Makes these GPUs and slices take clients again. An empty list stands for every GPU and slice. If a GPU was drained and
    /// `names` has only one of its slices, the other slices stay drained. If the whole host was drained, the other GPUs in
    /// `there` stay drained by name. `there` has only the present GPUs, so a GPU that is added later is not drained.
    pub fn undrain(&mut self, names: &[DeviceName], there: &SliceCounts) {
        if names.is_empty() {
            *self = Self::default();
            return;
        }
        if std::mem::take(&mut self.all) {
            self.names.extend(there.keys().copied().map(DeviceName::Gpu));
        }
        for name in names {
            match name {
                DeviceName::Gpu(gpu) => self.names.retain(|kept| kept.gpu() != *gpu),
                DeviceName::Slice(slice) => {
                    if self.names.remove(&DeviceName::Gpu(slice.gpu)) {
                        let slices = there.get(&slice.gpu).copied().unwrap_or_default();
                        self.names.extend(slice.gpu.slices(slices).map(DeviceName::Slice));
                    }
                    self.names.remove(name);
                }
            }
        }
    }
}

#[derive(Debug, Clone)]
pub struct ClosedDevices {
    pub drained: Drained,
    pub to_reset: BTreeMap<String, String>,
}

impl mps_core::links::ClosedSlices for ClosedDevices {
    fn is_all(&self) -> bool {
        self.drained.all
    }

    fn closes(&self, directory: &str) -> Option<bool> {
        let slice = SliceId::with_directory_name(directory)?;
        Some(self.drained.has(slice) || self.to_reset.contains_key(&slice.gpu.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there() -> SliceCounts {
        SliceCounts::from([("00:06.0".parse().unwrap(), 3), ("0001:1a:00.0".parse().unwrap(), 2)])
    }

    fn names(names: &[&str]) -> Vec<DeviceName> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    fn has(drained: &Drained, slice: &str) -> bool {
        matches!(slice.parse(), Ok(DeviceName::Slice(slice)) if drained.has(slice))
    }

    fn slices(drained: &Drained) -> Vec<String> {
        let all = there().into_iter().flat_map(|(gpu, number)| gpu.slices(number));
        all.filter(|slice| drained.has(*slice)).map(|slice| slice.to_string()).collect()
    }

    #[test]
    fn a_name_that_cannot_be_read_costs_no_other() {
        let text = r#"{"all":false,"names":["00:06.0-1","mine","00:06.0-99999","0001:1a:00.0"]}"#;
        let mut expected = Drained::default();
        expected.drain(&names(&["00:06.0-1", "0001:1a:00.0"]));
        assert_eq!(serde_json::from_str::<Drained>(text).unwrap(), expected);
    }

    #[test]
    fn a_gpu_is_all_its_slices() {
        let mut drained = Drained::default();
        drained.drain(&names(&["00:06.0-1", "0001:1a:00.0"]));
        assert_eq!(slices(&drained), ["00:06.0-1", "0001:1a:00.0-0", "0001:1a:00.0-1"]);
        drained.undrain(&names(&["00:06.0", "0001:1a:00.0"]), &there());
        assert_eq!(drained, Drained::default());
    }

    #[test]
    fn a_part_of_a_whole_leaves_the_rest_drained() {
        let mut drained = Drained::default();
        drained.drain(&[]);
        assert!(has(&drained, "00:07.0-0"), "it may come later");
        drained.undrain(&names(&["00:06.0-1"]), &there());
        assert_eq!(slices(&drained), ["00:06.0-0", "00:06.0-2", "0001:1a:00.0-0", "0001:1a:00.0-1"]);
        assert!(!has(&drained, "00:07.0-0"));
        drained.undrain(&names(&["00:06.0"]), &there());
        assert_eq!(slices(&drained), ["0001:1a:00.0-0", "0001:1a:00.0-1"]);
        drained.drain(&[]);
        drained.undrain(&[], &there());
        assert_eq!(drained, Drained::default());
    }

    #[test]
    fn a_gpu_that_needs_a_reset_closes_its_own_slices_alone() {
        use mps_core::links::ClosedSlices as _;
        let mut drained = Drained::default();
        drained.drain(&names(&["0001:1a:00.0-1"]));
        let to_reset = BTreeMap::from([("00:06.0".to_owned(), "Xid 95".to_owned())]);
        let closed = ClosedDevices { drained, to_reset };
        let table = [
            ("00_06.0-0", Some(true)),
            ("0001_1a_00.0-1", Some(true)),
            ("0001_1a_00.0-0", Some(false)),
            ("GPU-1", None),
        ];
        for (directory, expected) in table {
            assert_eq!(closed.closes(directory), expected, "{directory}");
        }
    }

    #[test]
    fn a_name_that_nothing_has_is_kept_until_it_is_undrained() {
        let mut drained = Drained::default();
        drained.drain(&names(&["00:09.0", "00:09.0-7", "00:06.0-9"]));
        assert!(drained.names(names(&["00:09.0"])[0]) && slices(&drained).is_empty());
        drained.undrain(&names(&["00:09.0-7", "00:06.0-9"]), &there());
        assert_eq!(drained, Drained::default());
    }
}
