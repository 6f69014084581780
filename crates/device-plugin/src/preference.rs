//! Chooses the best free slices for a container. All functions are pure.
//!
//! Slices of one GPU can't be combined, so a container with several slices gets them from different GPUs. After a pod is
//! deleted by force, the kubelet counts its slice as free at once, although a container of the pod may still use the slice. So
//! a slice with an owner is chosen last.

use std::collections::{BTreeMap, BTreeSet};

/// The GPU that a container is put on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Placement {
    /// The GPU with the fewest free slices: so other GPUs stay free for jobs that want a whole GPU
    Pack,
    /// The GPU with the most free slices: so a container shares its GPU with as few others as possible
    Spread,
}

/// The names of the best `number` slices, including all slices in `must`. The result has fewer names if not enough slices are
/// available.
pub(crate) fn preferred(
    available: &[String],
    must: &[String],
    number: usize,
    placement: Placement,
    has_owner: impl Fn(&str) -> bool,
) -> Vec<String> {
    let mut chosen: Vec<String> = must.to_vec();
    let mut free: BTreeSet<&str> = available.iter().map(String::as_str).collect();
    free.retain(|name| !must.iter().any(|taken| taken == name));
    // The free slices of each GPU are counted before the choice, so that the first chosen slice does not change the order of
    // the GPUs.
    let mut left: BTreeMap<&str, usize> = BTreeMap::new();
    for name in &free {
        *left.entry(gpu(name)).or_default() += 1;
    }
    while chosen.len() < number {
        let best = free.iter().copied().min_by_key(|name| {
            let has = chosen.iter().filter(|other| gpu(other) == gpu(name)).count();
            let left = left.get(gpu(name)).copied().unwrap_or_default();
            let order = match placement {
                Placement::Pack => left,
                Placement::Spread => usize::MAX - left,
            };
            (has, has_owner(name), order, *name)
        });
        let Some(best) = best else { break };
        free.remove(best);
        chosen.push(best.to_owned());
    }
    chosen
}

/// The name of a slice's GPU: `00:06.0` for the slice `00:06.0-1`.
pub(crate) fn gpu(slice: &str) -> &str {
    slice.rsplit_once('-').map_or(slice, |(gpu, _)| gpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn preferred(available: &[String], must: &[String], number: usize, placement: Placement) -> Vec<String> {
        super::preferred(available, must, number, placement, |_| false)
    }

    const FREE: [&str; 5] = ["06-1", "06-2", "06-3", "07-2", "07-3"];

    #[test]
    fn pack_fills_the_fullest_gpu_and_spread_the_emptiest() {
        assert_eq!(preferred(&names(&FREE), &[], 1, Placement::Pack), ["07-2"]);
        assert_eq!(preferred(&names(&FREE), &[], 1, Placement::Spread), ["06-1"]);
    }

    #[test]
    fn several_slices_are_of_several_gpus_as_far_as_there_are_some() {
        assert_eq!(preferred(&names(&FREE), &[], 2, Placement::Pack), ["07-2", "06-1"]);
        assert_eq!(preferred(&names(&FREE), &[], 3, Placement::Spread), ["06-1", "07-2", "06-2"]);
    }

    #[test]
    fn a_slice_that_must_be_in_it_is_and_counts_for_its_gpu() {
        assert_eq!(preferred(&names(&FREE), &names(&["07-3"]), 2, Placement::Pack), ["07-3", "06-1"]);
        // The kubelet's list of free slices may lack the slice that must be in the answer.
        assert_eq!(preferred(&names(&["06-1"]), &names(&["07-3"]), 2, Placement::Pack), ["07-3", "06-1"]);
    }

    #[test]
    fn a_slice_with_an_owner_comes_last() {
        let owned = |name: &str| name.starts_with("07") || name == "06-1";
        let preferred = |number| super::preferred(&names(&FREE), &[], number, Placement::Pack, owned);
        assert_eq!(preferred(1), ["06-2"]);
        // Slices of one GPU can't be combined, so the second slice belongs to the other GPU.
        assert_eq!(preferred(3), ["06-2", "07-2", "06-3"]);
    }

    #[test]
    fn where_there_are_too_few_the_answer_has_all() {
        assert_eq!(preferred(&names(&["06-1"]), &[], 3, Placement::Pack), ["06-1"]);
        assert_eq!(preferred(&[], &[], 1, Placement::Pack), [""; 0]);
    }

    #[test]
    fn the_gpu_of_a_slice_is_in_its_name() {
        assert_eq!(gpu("0001:1a:00.0-12"), "0001:1a:00.0");
        assert_eq!(gpu("strange"), "strange");
    }
}
