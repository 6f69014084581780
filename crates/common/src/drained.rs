//! The part of the host that an administrator has taken out of use for new clients.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// The GPUs that there are: their published names, and the number of slices of each.
pub type Cut = BTreeMap<String, u32>;

/// The drained slices and GPUs, by published names: `00:06.0` is a GPU with all its slices, `00:06.0-1` is one slice. A
/// name stays, though nothing has it any more: the next reload may bring its slice back.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Drained {
    /// Everything, also a GPU that comes later.
    all: bool,
    names: BTreeSet<String>,
}

impl Drained {
    /// Whether this slice is drained.
    pub fn has(&self, gpu: &str, slice: &str) -> bool {
        self.all || self.names.contains(gpu) || self.names.contains(slice)
    }

    /// Whether everything is drained, whatever there is.
    pub fn is_all(&self) -> bool {
        self.all
    }

    /// Whether this very name was drained, though there may be nothing of that name any more.
    pub fn names(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Drains these GPUs and slices; without names everything.
    pub fn drain(&mut self, names: &[String]) {
        self.all |= names.is_empty();
        self.names.extend(names.iter().cloned());
    }

    /// Takes these GPUs and slices back; without names everything. The rest of a whole that was drained stays drained:
    /// the other slices of the GPU, the other GPUs of the host. `there` has the GPUs of today: with a name, one that comes
    /// later is not drained.
    pub fn undrain(&mut self, names: &[String], there: &Cut) {
        if names.is_empty() {
            *self = Self::default();
            return;
        }
        if std::mem::take(&mut self.all) {
            self.names.extend(there.keys().cloned());
        }
        for name in names {
            self.names.remove(name);
            let slices = |gpu: &str| {
                let number = there.get(gpu).copied().unwrap_or_default();
                (0..number).map(|ordinal| format!("{gpu}-{ordinal}")).collect::<Vec<_>>()
            };
            match name.split_once('-') {
                None => self.names.retain(|kept| !kept.starts_with(&format!("{name}-"))),
                Some((gpu, _)) if self.names.remove(gpu) => {
                    self.names.extend(slices(gpu).into_iter().filter(|slice| slice != name));
                }
                Some(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there() -> Cut {
        Cut::from([("00:06.0".to_owned(), 3), ("0001:1a:00.0".to_owned(), 2)])
    }

    fn of(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// The slices that are drained.
    fn slices(drained: &Drained) -> Vec<String> {
        let all = there().into_iter().flat_map(|(gpu, number)| (0..number).map(move |n| (gpu.clone(), n)));
        let named = all.map(|(gpu, ordinal)| (format!("{gpu}-{ordinal}"), gpu));
        named.filter(|(slice, gpu)| drained.has(gpu, slice)).map(|(slice, _)| slice).collect()
    }

    #[test]
    fn a_gpu_is_all_its_slices() {
        let mut drained = Drained::default();
        drained.drain(&of(&["00:06.0-1", "0001:1a:00.0"]));
        assert_eq!(slices(&drained), ["0001:1a:00.0-0", "0001:1a:00.0-1", "00:06.0-1"]);
        drained.undrain(&of(&["00:06.0", "0001:1a:00.0"]), &there());
        assert_eq!(drained, Drained::default());
    }

    #[test]
    fn a_part_of_a_whole_leaves_the_rest_drained() {
        let mut drained = Drained::default();
        drained.drain(&[]);
        assert!(drained.has("00:07.0", "00:07.0-0"), "it may come later");
        drained.undrain(&of(&["00:06.0-1"]), &there());
        assert_eq!(slices(&drained), ["0001:1a:00.0-0", "0001:1a:00.0-1", "00:06.0-0", "00:06.0-2"]);
        assert!(!drained.has("00:07.0", "00:07.0-0"));
        drained.undrain(&of(&["00:06.0"]), &there());
        assert_eq!(slices(&drained), ["0001:1a:00.0-0", "0001:1a:00.0-1"]);
        drained.drain(&[]);
        drained.undrain(&[], &there());
        assert_eq!(drained, Drained::default());
    }

    #[test]
    fn a_name_that_nothing_has_is_kept_until_it_is_undrained() {
        let mut drained = Drained::default();
        drained.drain(&of(&["00:09.0", "00:09.0-7", "00:06.0-9"]));
        assert!(drained.names("00:09.0") && slices(&drained).is_empty());
        drained.undrain(&of(&["00:09.0-7", "00:06.0-9"]), &there());
        assert_eq!(drained, Drained::default());
    }
}
