//! The names of resources, which follow from the sizes of slices. All functions are pure. docs/kubernetes.md explains the rule.
//!
//! `mps-20gib` stands for slices with 20 GiB of memory, rounded down. `mps-512mib` stands for slices with 512 MiB: below 1 GiB,
//! the name has the exact memory in MiB. A memory of 1 GiB or more is rounded, since an equal share of a GPU is seldom a whole
//! number of GiB, and the number of MiB differs between drivers. The name depends on one slice alone. If the name depended on
//! other slices, the name could change while a pod has the slice.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::slice::Share;

/// The most characters of a name, without its domain, that Kubernetes accepts.
const LONGEST: usize = 63;

/// A name that the administrator has given to a size of slices, for example with `small=20GiB` or `fast=20GiB:50`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedSize {
    name: String,
    memory_mib: RangeInclusive<u64>,
    thread_percentage: Option<u32>,
}

impl NamedSize {
    fn means(&self, share: Share) -> bool {
        self.memory_mib.contains(&share.memory_mib.into())
            && self.thread_percentage.is_none_or(|percentage| percentage == share.thread_percentage)
    }
}

impl FromStr for NamedSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, size) = text.split_once('=').ok_or("write NAME=SIZE, such as small=20GiB")?;
        is_name(name)?;
        if name.strip_prefix("mps-").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit())) {
            return Err(format!(
                "{name:?} could be the name of another size, since the device plugin itself names sizes \
                 mps-20gib or mps-512mib; choose a name without a number after mps-"
            ));
        }
        let (memory, percentage) = match size.split_once(':') {
            Some((memory, percentage)) => (memory, Some(percentage)),
            None => (size, None),
        };
        let whole = |digits: &str| digits.parse::<u32>().ok().filter(|number| *number > 0);
        // `20GiB` means every amount of memory that is 20 GiB when rounded down.
        let sizes =
            |unit: u64| move |number: u32| (u64::from(number) * unit)..=(u64::from(number) * unit + unit - 1);
        let memory = match (memory.strip_suffix("GiB"), memory.strip_suffix("MiB")) {
            (Some(gib), _) => whole(gib).map(sizes(1024)),
            (None, Some(mib)) => whole(mib).map(sizes(1)),
            (None, None) => None,
        };
        let memory_mib = memory.ok_or_else(|| {
            format!("{size:?} is no size; write 20GiB, 20480MiB, or 20GiB:25 for 25 % of the threads")
        })?;
        let percentage = percentage.map(|percentage| {
            whole(percentage).filter(|percentage| *percentage <= 100).ok_or_else(|| {
                format!("{percentage:?} is no percentage of threads; write a number from 1 to 100")
            })
        });
        Ok(Self { name: name.to_owned(), memory_mib, thread_percentage: percentage.transpose()? })
    }
}

/// Checks the part of a resource's name after the domain by the rules of Kubernetes.
fn is_name(name: &str) -> Result<(), String> {
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let fits = name.len() <= LONGEST && ends(name.chars().next()) && ends(name.chars().next_back());
    if fits && name.chars().all(inner) {
        return Ok(());
    }
    Err(format!(
        "{name:?} is no name of a resource; use letters and digits, with - . _ between them, at most \
         {LONGEST} characters"
    ))
}

/// Checks the domain of a resource's name by the rules of Kubernetes.
pub(crate) fn domain(text: &str) -> Result<String, String> {
    let label = |label: &str| {
        let inner = label.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
        inner && !label.is_empty() && !label.starts_with('-') && !label.ends_with('-')
    };
    // Kubernetes reserves these domains, and no device plugin may register a resource in them.
    let reserved = text == "kubernetes.io" || text.ends_with(".kubernetes.io");
    if text.len() <= 200 && text.contains('.') && text.split('.').all(label) && !reserved {
        return Ok(text.to_owned());
    }
    Err(format!(
        "{text:?} is no domain for resources; write a domain such as yunion.io, and not kubernetes.io"
    ))
}

/// The rules by which sizes of slices get their names.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Naming {
    /// The domain of the resources' names
    #[arg(long, value_name = "DOMAIN", default_value = "yunion.io", value_parser = domain)]
    pub(crate) domain: String,
    /// Give the slices of a size a name of their own: small=20GiB (the size in GiB, rounded down), small=20480MiB (the exact
    /// size), small=20GiB:25 (only slices with this active thread percentage). --resource can be given several times; the
    /// first name that fits a slice counts
    #[arg(long = "resource", value_name = "NAME=SIZE")]
    pub(crate) named: Vec<NamedSize>,
}

impl Naming {
    pub(crate) fn name(&self, share: Share) -> String {
        let name = self.given(share).map_or_else(|| by_rule(share), |given| given.name.clone());
        format!("{}/{name}", self.domain)
    }

    fn given(&self, share: Share) -> Option<&NamedSize> {
        self.named.iter().find(|named| named.means(share))
    }

    /// A warning if slices with different percentages of threads have the same name. None if there are no such slices.
    pub(crate) fn joined(&self, shares: impl IntoIterator<Item = Share>) -> Option<String> {
        let mut percentages: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
        for share in shares.into_iter().filter(|share| self.given(*share).is_none()) {
            percentages.entry(self.name(share)).or_default().insert(share.thread_percentage);
        }
        let (name, differ) = percentages.into_iter().find(|(_, differ)| differ.len() > 1)?;
        let differ: Vec<String> = differ.iter().map(|percentage| format!("{percentage} %")).collect();
        Some(format!(
            "{name}: slices with {percentages} of the threads have this name; to give some of \
             these slices another name, start the device plugin with --resource NAME=SIZE:PERCENTAGE",
            percentages = differ.join(", ")
        ))
    }
}

fn by_rule(share: Share) -> String {
    match share.memory_mib {
        mib @ 0..1024 => format!("mps-{mib}mib"),
        mib => format!("mps-{}gib", mib / 1024),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn share(memory_mib: u32, thread_percentage: u32) -> Share {
        Share { memory_mib, thread_percentage }
    }

    fn naming(named: &[&str]) -> Naming {
        let named = named.iter().map(|text| text.parse().unwrap()).collect();
        Naming { domain: "yunion.io".to_owned(), named }
    }

    fn names(named: &[&str], shares: &[(u32, u32)]) -> Vec<String> {
        let naming = naming(named);
        shares.iter().map(|(mib, percentage)| naming.name(share(*mib, *percentage))).collect()
    }

    #[test]
    fn a_name_is_the_memory_in_whole_gib() {
        assert_eq!(names(&[], &[(35942, 25)]), ["yunion.io/mps-35gib"]);
        assert_eq!(names(&[], &[(20480, 25), (61440, 75)]), ["yunion.io/mps-20gib", "yunion.io/mps-60gib"]);
        assert_eq!(names(&[], &[(512, 5), (1024, 5)]), ["yunion.io/mps-512mib", "yunion.io/mps-1gib"]);
    }

    #[test]
    fn slices_of_one_name_that_differ_in_their_threads_are_told() {
        let joined = |named: &[&str], shares: &[(u32, u32)]| {
            naming(named).joined(shares.iter().map(|(mib, percentage)| share(*mib, *percentage)))
        };
        assert_eq!(joined(&[], &[(20480, 25), (20500, 25), (10240, 50)]), None);
        let told = joined(&[], &[(20480, 25), (20480, 50), (10240, 50)]).unwrap();
        assert!(told.starts_with("yunion.io/mps-20gib: slices with 25 %, 50 % of the threads"), "{told}");
        assert_eq!(joined(&["fast=20GiB:50"], &[(20480, 25), (20480, 50)]), None);
        assert_eq!(joined(&["all=20GiB"], &[(20480, 25), (20480, 50)]), None, "on purpose");
    }

    #[test]
    fn a_given_name_goes_first() {
        assert_eq!(
            names(&["fast=20GiB:50", "tiny=512MiB"], &[(20480, 25), (20480, 50), (512, 5), (600, 5)]),
            ["yunion.io/mps-20gib", "yunion.io/fast", "yunion.io/tiny", "yunion.io/mps-600mib"]
        );
    }

    #[test]
    fn a_wrong_name_or_size_is_refused_with_what_to_write() {
        for (text, complaint) in [
            ("small", "write NAME=SIZE"),
            ("=20GiB", "is no name"),
            ("-a=20GiB", "is no name"),
            ("a b=20GiB", "is no name"),
            ("mps-10gib=20GiB", "could be the name of another size"),
            ("small=20", "is no size"),
            ("small=0GiB", "is no size"),
            ("small=20GiB:0", "is no percentage"),
            ("small=20GiB:101", "is no percentage"),
        ] {
            let error = text.parse::<NamedSize>().unwrap_err();
            assert!(error.contains(complaint), "{text}: {error}");
        }
        assert!(format!("{}=1GiB", "a".repeat(64)).parse::<NamedSize>().is_err());
        assert_eq!(domain("gpu.example.com").unwrap(), "gpu.example.com");
        for text in ["", "yunion", "Yunion.io", "a..b", "-a.b", "kubernetes.io", "x.kubernetes.io", "a/b.c"] {
            domain(text).unwrap_err();
        }
    }

    proptest! {
        #[test]
        fn a_name_is_one_that_kubernetes_takes(memory in any::<u32>(), percentage in 1_u32..=100) {
            let name = names(&[], &[(memory, percentage)]).remove(0);
            prop_assert_eq!(is_name(name.strip_prefix("yunion.io/").unwrap()), Ok(()));
        }
    }
}
