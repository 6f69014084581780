//! The resources of the node and their devices: which there are, and which of them Kubernetes may give out. Pure.
//!
//! A slice that a container of Kubernetes has stays healthy. The kubelet takes a device that it has given out from the number of
//! free ones itself, and one that is not healthy as well: a node would lose each slice twice. A slice of anybody else is not
//! healthy, since the kubelet knows nothing of that. So it must be told apart who has a slice. The kubelet says which devices
//! it has given to its pods, and that holds for every engine and for every layout of control groups.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::names::Naming;
use crate::slice::{NodeSlice, Share};

/// The most resources. Each is a socket and a registration, and no node has as many sizes.
const MOST: usize = 64;

/// The reason why Kubernetes may not give out a slice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// The service has been away for longer than a restart takes.
    Unwatched,
    /// By the word of the service: drained, not served.
    Unhealthy(String),
    /// The owner is no container of Kubernetes.
    Taken(String),
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unwatched => f.write_str(
                "yunion-mps-daemon has not answered for a while; see systemctl status yunion-mps-daemon",
            ),
            Self::Unhealthy(reason) if reason.is_empty() => {
                f.write_str("not healthy; see yunion-mpsctl status")
            }
            Self::Unhealthy(reason) => f.write_str(reason),
            Self::Taken(by) => write!(f, "taken by {by} outside Kubernetes; see yunion-mpsctl list -o wide"),
        }
    }
}

/// A device of a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Offered {
    pub(crate) name: String,
    pub(crate) numa_node: Option<i64>,
    pub(crate) unusable: Option<Unusable>,
}

/// The devices of each resource, by its full name.
pub(crate) type Offers = BTreeMap<String, Vec<Offered>>;

/// The devices that the kubelet has given to pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GivenToPods {
    Known(BTreeSet<String>),
    /// The kubelet does not say it. Then every owner counts as a container of Kubernetes: if it is not, a pod waits on its slice
    /// with the reason in its events, while the other error would take slices from the node for good.
    Unknown,
}

/// All that is remembered from one look to the next.
#[derive(Debug, Default)]
pub(crate) struct Remembered {
    /// The last known size of each slice: a GPU that the driver lost has no memory, and its resource must not go.
    shares: BTreeMap<String, Share>,
    /// The owners that were found to be containers of Kubernetes, by slice. A pod leaves the kubelet's list before its control
    /// group is gone, and its slice may have been given to the next one.
    owners: BTreeMap<String, String>,
}

impl Remembered {
    /// Whether a slice has an owner who is not known to be a container of Kubernetes: the kubelet has to be asked.
    pub(crate) fn must_ask(&self, slices: &[NodeSlice]) -> bool {
        slices.iter().any(|slice| !slice.bound_to.is_empty() && !self.is_known_owner(slice))
    }

    fn is_known_owner(&self, slice: &NodeSlice) -> bool {
        is_in_pods_group(&slice.bound_to) || self.owners.get(&slice.name) == Some(&slice.bound_to)
    }

    /// The resources for these slices, which are all of the node.
    pub(crate) fn offers(
        &mut self,
        slices: &[NodeSlice],
        naming: &Naming,
        given: &GivenToPods,
        unwatched: bool,
    ) -> Offers {
        self.remember(slices, given);
        let names = naming.names(&self.shares.values().copied().collect());
        let mut offers = Offers::new();
        for slice in slices {
            let Some(name) = self.shares.get(&slice.name).and_then(|share| names.get(share)) else {
                continue;
            };
            if offers.len() == MOST && !offers.contains_key(name) {
                continue;
            }
            let unusable = if unwatched { Some(Unusable::Unwatched) } else { self.unusable(slice) };
            offers.entry(name.clone()).or_default().push(Offered {
                name: slice.name.clone(),
                numa_node: slice.numa_node,
                unusable,
            });
        }
        offers
    }

    fn remember(&mut self, slices: &[NodeSlice], given: &GivenToPods) {
        let is_there = |name: &String| slices.iter().any(|slice| slice.name == *name);
        self.shares.retain(|name, _| is_there(name));
        self.owners
            .retain(|name, owner| slices.iter().any(|one| one.name == *name && one.bound_to == *owner));
        for slice in slices {
            if let Some(share) = slice.share {
                self.shares.insert(slice.name.clone(), share);
            }
            let of_pod = match given {
                GivenToPods::Known(names) => names.contains(&slice.name),
                GivenToPods::Unknown => true,
            };
            if of_pod && !slice.bound_to.is_empty() {
                self.owners.insert(slice.name.clone(), slice.bound_to.clone());
            }
        }
    }

    fn unusable(&self, slice: &NodeSlice) -> Option<Unusable> {
        if !slice.healthy {
            Some(Unusable::Unhealthy(slice.reason.clone()))
        } else if slice.bound_to.is_empty() || self.is_known_owner(slice) {
            None
        } else {
            Some(Unusable::Taken(slice.bound_to.clone()))
        }
    }
}

/// Whether this is the path of a control group of pods. The kubelet has this name above all of them, in each of its layouts.
fn is_in_pods_group(owner: &str) -> bool {
    owner.split('/').any(|part| part == "kubepods" || part == "kubepods.slice")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slice::samples::slice;

    fn naming() -> Naming {
        Naming { domain: "yunion.io".to_owned(), named: Vec::new() }
    }

    fn given(names: &[&str]) -> GivenToPods {
        GivenToPods::Known(names.iter().map(|name| (*name).to_owned()).collect())
    }

    fn bound(name: &str, owner: &str) -> NodeSlice {
        NodeSlice { bound_to: owner.to_owned(), ..slice(name, 20480, 25) }
    }

    /// The only device, and why it is not usable.
    fn only(offers: &Offers) -> Option<Unusable> {
        let [offered] = &offers["yunion.io/mps-20gib"][..] else { panic!("{offers:?}") };
        offered.unusable.clone()
    }

    #[test]
    fn each_size_is_a_resource_with_its_slices() {
        let slices = [slice("06-0", 20480, 25), slice("06-1", 61440, 75), slice("07-0", 20480, 25)];
        let offers = Remembered::default().offers(&slices, &naming(), &given(&[]), false);
        let names: Vec<(&str, Vec<&str>)> = offers
            .iter()
            .map(|(name, devices)| {
                (name.as_str(), devices.iter().map(|device| device.name.as_str()).collect())
            })
            .collect();
        assert_eq!(
            names,
            [("yunion.io/mps-20gib", vec!["06-0", "07-0"]), ("yunion.io/mps-60gib", vec!["06-1"])]
        );
        assert!(offers.values().flatten().all(|device| device.unusable.is_none()));
    }

    #[test]
    fn a_slice_that_is_not_healthy_says_why() {
        let sick = NodeSlice { healthy: false, reason: "drained".to_owned(), ..slice("06-0", 20480, 25) };
        let offers = Remembered::default().offers(&[sick], &naming(), &given(&[]), false);
        assert_eq!(only(&offers), Some(Unusable::Unhealthy("drained".to_owned())));
    }

    #[test]
    fn a_slice_of_a_pod_stays_healthy_and_that_of_a_stranger_does_not() {
        let mut remembered = Remembered::default();
        let slices = [bound("06-0", "4f1c")];
        assert!(remembered.must_ask(&slices));
        let taken = remembered.offers(&slices, &naming(), &given(&["06-1"]), false);
        assert_eq!(only(&taken), Some(Unusable::Taken("4f1c".to_owned())));
        assert!(remembered.must_ask(&slices), "a stranger may turn out to be a pod");
        let of_pod = remembered.offers(&slices, &naming(), &given(&["06-0"]), false);
        assert_eq!(only(&of_pod), None);
        assert!(!remembered.must_ask(&slices));
    }

    #[test]
    fn a_pod_that_has_left_the_kubelet_keeps_its_slice_healthy_until_its_control_group_is_gone() {
        let mut remembered = Remembered::default();
        remembered.offers(&[bound("06-0", "4f1c")], &naming(), &given(&["06-0"]), false);
        let leaves = remembered.offers(&[bound("06-0", "4f1c")], &naming(), &given(&[]), false);
        assert_eq!(only(&leaves), None);
        let next = remembered.offers(&[bound("06-0", "77aa")], &naming(), &given(&[]), false);
        assert_eq!(only(&next), Some(Unusable::Taken("77aa".to_owned())));
    }

    #[test]
    fn a_control_group_of_pods_tells_itself() {
        for group in ["/kubepods.slice/kubepods-pod1.slice/cri-1.scope", "/kubepods/burstable/pod1/4f1c"] {
            let slices = [bound("06-0", group)];
            let mut remembered = Remembered::default();
            assert!(!remembered.must_ask(&slices));
            assert_eq!(only(&remembered.offers(&slices, &naming(), &given(&[]), false)), None);
        }
        assert!(Remembered::default().must_ask(&[bound("06-0", "my-kubepods")]));
    }

    #[test]
    fn where_the_kubelet_says_nothing_every_owner_counts_as_a_pod() {
        let slices = [bound("06-0", "4f1c")];
        assert_eq!(
            only(&Remembered::default().offers(&slices, &naming(), &GivenToPods::Unknown, false)),
            None
        );
    }

    #[test]
    fn without_the_service_nothing_is_given_out_and_nothing_goes() {
        let slices = [slice("06-0", 20480, 25)];
        let offers = Remembered::default().offers(&slices, &naming(), &given(&[]), true);
        assert_eq!(only(&offers), Some(Unusable::Unwatched));
    }

    #[test]
    fn a_gpu_that_the_driver_has_lost_keeps_its_resource() {
        let mut remembered = Remembered::default();
        let unknown = NodeSlice { share: None, healthy: false, ..slice("06-0", 20480, 25) };
        let unknown = [unknown];
        assert!(remembered.offers(&unknown, &naming(), &given(&[]), false).is_empty(), "never known");
        remembered.offers(&[slice("06-0", 20480, 25)], &naming(), &given(&[]), false);
        let lost = remembered.offers(&unknown, &naming(), &given(&[]), false);
        assert!(matches!(only(&lost), Some(Unusable::Unhealthy(_))), "{lost:?}");
        assert!(remembered.offers(&[], &naming(), &given(&[]), false).is_empty());
        assert!(remembered.offers(&unknown, &naming(), &given(&[]), false).is_empty(), "forgotten");
    }

    #[test]
    fn there_are_not_more_resources_than_a_node_can_have() {
        let slices: Vec<NodeSlice> =
            (1..=100).map(|gib| slice(&format!("06-{gib}"), gib * 1024, 1)).collect();
        let offers = Remembered::default().offers(&slices, &naming(), &given(&[]), false);
        assert_eq!(offers.len(), MOST);
    }
}
