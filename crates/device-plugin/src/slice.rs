//! A slice of this node, with the facts that Kubernetes needs.

use common::bindings::pod_of;
use common::bus::rows::Device;

/// The size of a slice: its memory and its threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Share {
    pub(crate) memory_mib: u32,
    pub(crate) thread_percentage: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeSlice {
    /// The service's name of the slice, such as `00:06.0-1`. The kubelet uses the same name for its device.
    pub(crate) name: String,
    /// The PCI address of the slice's GPU.
    pub(crate) gpu: String,
    /// The UUID of the slice's GPU. None while the driver does not report the UUID.
    pub(crate) uuid: Option<String>,
    /// The number N of `/dev/nvidiaN`, the device node of the slice's GPU.
    pub(crate) minor: Option<u32>,
    pub(crate) numa_node: Option<i64>,
    /// None while the memory of the GPU is unknown.
    pub(crate) share: Option<Share>,
    pub(crate) healthy: bool,
    /// True if the service serves the clients of the slice. `served` is true for a drained slice too, but `healthy` is not.
    pub(crate) served: bool,
    /// Empty if the slice is healthy.
    pub(crate) reason: String,
    /// The owners of the slice, in words for people: the labels or the paths of the control groups that are bound to the slice.
    /// Empty if the slice is not bound.
    pub(crate) bound_to: String,
    /// True if a container of Kubernetes is bound to the slice.
    pub(crate) has_pod: bool,
}

impl NodeSlice {
    /// True if the slice is bound, but not to a container of Kubernetes. The kubelet does not know this owner.
    pub(crate) fn has_stranger(&self) -> bool {
        !self.bound_to.is_empty() && !self.has_pod
    }
}

impl From<&Device> for NodeSlice {
    fn from(row: &Device) -> Self {
        let number = |value: i32| u32::try_from(value).ok();
        let share = row.mps_memory_limit.and_then(number).zip(number(row.mps_thread_percentage));
        Self {
            name: row.name.clone(),
            gpu: row.base_addr.clone(),
            uuid: row.device_path.clone(),
            minor: row.nvidia_minor,
            numa_node: u32::try_from(row.numa_node).ok().map(i64::from),
            share: share.map(|(memory_mib, thread_percentage)| Share { memory_mib, thread_percentage }),
            healthy: row.healthy,
            served: row.served,
            reason: row.reason.clone(),
            bound_to: row.bound_to.clone(),
            has_pod: row.bound_groups.iter().any(|group| pod_of(group).is_some()),
        }
    }
}

#[cfg(test)]
pub(crate) mod samples {
    use super::*;

    /// A healthy slice without an owner: `slice("06-1", 20480, 25)` is a slice of the GPU `06`.
    pub(crate) fn slice(name: &str, memory_mib: u32, thread_percentage: u32) -> NodeSlice {
        let gpu = name.rsplit_once('-').unwrap().0.to_owned();
        NodeSlice {
            name: name.to_owned(),
            uuid: Some(format!("GPU-{gpu}")),
            gpu,
            minor: Some(0),
            numa_node: None,
            share: Some(Share { memory_mib, thread_percentage }),
            healthy: true,
            served: true,
            reason: String::new(),
            bound_to: String::new(),
            has_pod: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_known_by_the_kubelets_control_group_above_it() {
        let slice = |groups: &[&str]| {
            let bound_groups = groups.iter().map(|group| (*group).to_owned()).collect();
            NodeSlice::from(&Device { bound_to: "x".to_owned(), bound_groups, ..Device::default() })
        };
        let pods = "/kubepods/burstable/pod1/4f1c";
        assert!(slice(&[pods]).has_pod && !slice(&["/docker/4f1c", pods]).has_stranger());
        assert!(slice(&["/docker/4f1c"]).has_stranger());
        assert!(!NodeSlice::from(&Device::default()).has_stranger());
    }

    #[test]
    fn a_row_without_a_value_is_a_slice_without_it() {
        let row = Device { name: "00:06.0-1".to_owned(), numa_node: -1, ..Device::default() };
        let slice = NodeSlice::from(&row);
        assert_eq!((slice.share, slice.numa_node, slice.uuid), (None, None, None));
        let row = Device {
            mps_memory_limit: Some(5760),
            mps_thread_percentage: 25,
            numa_node: 1,
            ..Device::default()
        };
        let slice = NodeSlice::from(&row);
        assert_eq!(slice.share, Some(Share { memory_mib: 5760, thread_percentage: 25 }));
        assert_eq!(slice.numa_node, Some(1));
    }
}
