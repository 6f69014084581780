//! The resources of the node, and the devices of each resource with their health. All functions are pure.
//!
//! The kubelet uses the health of a device for two decisions: a pod may get a healthy device, and a pod with a healthy device
//! may go on. At its start, the kubelet ends each pod that has an unhealthy device and an init container that has ended. So a
//! slice of a pod is healthy as long as the slice is served, even if the slice is drained. No other pod can get this drained
//! slice, since the kubelet gives a slice to one pod at a time. A slice with an owner outside of Kubernetes is unhealthy, since
//! the kubelet does not know this owner.

use std::collections::BTreeMap;

use crate::names::Naming;
use crate::slice::NodeSlice;

/// The most resources that the plugin offers, since each resource needs a socket and a registration. No node has this many
/// sizes of slices.
const MOST: usize = 64;

/// The reason for an unhealthy slice if the service has not answered for longer than a restart takes.
const UNWATCHED: &str =
    "yunion-mps-daemon has not answered for a while; see systemctl status yunion-mps-daemon";

/// A device of a resource: a slice, as the kubelet knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Offered {
    pub(crate) name: String,
    pub(crate) numa_node: Option<i64>,
    /// The reason why the device is unhealthy. None if the device is healthy.
    pub(crate) unusable: Option<String>,
}

/// The devices of each resource, by the full name of the resource.
pub(crate) type Offers = BTreeMap<String, Vec<Offered>>;

/// The devices of each resource. `unwatched` is true if the service has not answered for longer than a restart takes.
///
/// `resources` maps the name of each slice to its resource. The last call has filled this map, and each call updates the map.
/// The old resource matters in two cases. A GPU that the driver has lost has no known memory, but its slices must stay in their
/// resource. A slice that a pod has must also stay in its resource: in another resource, the kubelet would count the slice as
/// free.
pub(crate) fn offers(
    resources: &mut BTreeMap<String, String>,
    slices: &[NodeSlice],
    naming: &Naming,
    unwatched: bool,
) -> Offers {
    resources.retain(|name, _| slices.iter().any(|slice| slice.name == *name));
    let mut offers = Offers::new();
    for slice in slices {
        let resource = match (resources.get(&slice.name).cloned(), slice.share) {
            (Some(known), share) if slice.has_pod || share.is_none() => known,
            (_, Some(share)) => naming.name(share),
            (_, None) => continue,
        };
        resources.insert(slice.name.clone(), resource.clone());
        if offers.len() == MOST && !offers.contains_key(&resource) {
            continue;
        }
        offers.entry(resource).or_default().push(Offered {
            name: slice.name.clone(),
            numa_node: slice.numa_node,
            unusable: unusable(slice, unwatched),
        });
    }
    offers
}

/// The reason why a slice is unhealthy for the kubelet. None if the slice is healthy.
fn unusable(slice: &NodeSlice, unwatched: bool) -> Option<String> {
    if slice.has_pod && slice.served {
        None
    } else if unwatched && !slice.has_pod {
        Some(UNWATCHED.to_owned())
    } else {
        refusal(slice)
    }
}

/// The reason why a container must not get a slice now. None if a container may get the slice.
pub(crate) fn refusal(slice: &NodeSlice) -> Option<String> {
    if !slice.healthy {
        let reason = &slice.reason;
        Some(
            if reason.is_empty() { "the slice is not served; see yunion-mpsctl status" } else { reason }
                .to_owned(),
        )
    } else if slice.has_stranger() {
        Some(format!("taken by {} outside Kubernetes; see yunion-mpsctl list -o wide", slice.bound_to))
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slice::samples::slice;

    fn naming() -> Naming {
        Naming { domain: "yunion.io".to_owned(), named: Vec::new() }
    }

    fn bound(name: &str, owner: &str) -> NodeSlice {
        NodeSlice { bound_to: owner.to_owned(), ..slice(name, 20480, 25) }
    }

    fn of_pod(name: &str) -> NodeSlice {
        NodeSlice { has_pod: true, ..bound(name, "ml/train-0/main") }
    }

    fn drained(slice: NodeSlice) -> NodeSlice {
        NodeSlice { healthy: false, reason: "drained".to_owned(), ..slice }
    }

    fn only(offers: &Offers) -> Option<String> {
        let [offered] = &offers["yunion.io/mps-20gib"][..] else { panic!("{offers:?}") };
        offered.unusable.clone()
    }

    #[test]
    fn each_size_is_a_resource_with_its_slices() {
        let slices = [slice("06-0", 20480, 25), slice("06-1", 61440, 75), slice("07-0", 20480, 25)];
        let found = offers(&mut BTreeMap::new(), &slices, &naming(), false);
        let names: Vec<(&str, Vec<&str>)> = found
            .iter()
            .map(|(name, devices)| {
                (name.as_str(), devices.iter().map(|device| device.name.as_str()).collect())
            })
            .collect();
        assert_eq!(
            names,
            [("yunion.io/mps-20gib", vec!["06-0", "07-0"]), ("yunion.io/mps-60gib", vec!["06-1"])]
        );
        assert!(found.values().flatten().all(|device| device.unusable.is_none()));
    }

    #[test]
    fn a_slice_of_a_pod_is_healthy_while_it_is_served_and_another_one_while_a_container_may_have_it() {
        let unhealthy = || Some("drained".to_owned());
        let taken = || Some("taken by 4f1c outside Kubernetes; see yunion-mpsctl list -o wide".to_owned());
        let unwatched = || Some(UNWATCHED.to_owned());
        let lost = |slice| NodeSlice { served: false, ..drained(slice) };
        let (free, pods, strangers) = (slice("06-0", 20480, 25), of_pod("06-0"), bound("06-0", "4f1c"));
        for (slice, healthy, while_away) in [
            (free.clone(), None, unwatched()),
            (drained(free.clone()), unhealthy(), unwatched()),
            (lost(free), unhealthy(), unwatched()),
            (pods.clone(), None, None),
            (drained(pods.clone()), None, None),
            (lost(pods), unhealthy(), unhealthy()),
            (strangers.clone(), taken(), unwatched()),
            (drained(strangers), unhealthy(), unwatched()),
        ] {
            for (away, expected) in [(false, healthy), (true, while_away)] {
                let found = offers(&mut BTreeMap::new(), std::slice::from_ref(&slice), &naming(), away);
                assert_eq!(only(&found), expected, "{slice:?} {away}");
            }
        }
    }

    #[test]
    fn a_new_container_gets_a_healthy_slice_that_no_stranger_has() {
        assert_eq!(refusal(&slice("06-0", 20480, 25)), None);
        assert_eq!(refusal(&of_pod("06-0")), None, "its hook waits for the end of the other pod");
        assert_eq!(refusal(&drained(of_pod("06-0"))), Some("drained".to_owned()));
        assert!(refusal(&bound("06-0", "4f1c")).is_some_and(|why| why.starts_with("taken by 4f1c outside")));
    }

    #[test]
    fn a_pod_keeps_the_name_under_which_its_slice_was_given() {
        let mut remembered = BTreeMap::new();
        offers(&mut remembered, &[of_pod("06-0"), slice("06-1", 20480, 25)], &naming(), false);
        let smaller = slice("06-2", 20479, 25).share;
        let cut = |slice: NodeSlice| NodeSlice { share: smaller, ..slice };
        let after = [cut(of_pod("06-0")), cut(slice("06-1", 20480, 25))];
        let found = offers(&mut remembered, &after, &naming(), false);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["yunion.io/mps-19gib", "yunion.io/mps-20gib"]);
        let found =
            offers(&mut remembered, &[cut(slice("06-0", 20480, 25)), after[1].clone()], &naming(), false);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["yunion.io/mps-19gib"]);
    }

    #[test]
    fn a_gpu_that_the_driver_has_lost_keeps_its_resource() {
        let mut remembered = BTreeMap::new();
        let unknown = NodeSlice { share: None, healthy: false, served: false, ..slice("06-0", 20480, 25) };
        let unknown = [unknown];
        assert!(offers(&mut remembered, &unknown, &naming(), false).is_empty(), "never known");
        offers(&mut remembered, &[slice("06-0", 20480, 25)], &naming(), false);
        let lost = offers(&mut remembered, &unknown, &naming(), false);
        assert_eq!(only(&lost), Some("the slice is not served; see yunion-mpsctl status".to_owned()));
        assert!(offers(&mut remembered, &[], &naming(), false).is_empty());
        assert!(offers(&mut remembered, &unknown, &naming(), false).is_empty(), "forgotten");
    }

    #[test]
    fn there_are_not_more_resources_than_a_node_can_have() {
        let slices: Vec<NodeSlice> =
            (1..=100).map(|gib| slice(&format!("06-{gib}"), gib * 1024, 1)).collect();
        let found = offers(&mut BTreeMap::new(), &slices, &naming(), false);
        assert_eq!(found.len(), MOST);
    }
}
