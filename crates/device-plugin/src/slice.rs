//! A slice of this node, as far as Kubernetes is concerned.

use common::bus::rows::Device;

/// The size of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Share {
    pub(crate) memory_mib: u32,
    pub(crate) thread_percentage: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeSlice {
    /// `00:06.0-1`, the kubelet's name for it too.
    pub(crate) name: String,
    /// The address of its GPU.
    pub(crate) gpu: String,
    /// Of its GPU; None while the driver can't say it.
    pub(crate) uuid: Option<String>,
    /// The N of `/dev/nvidiaN`.
    pub(crate) minor: Option<u32>,
    pub(crate) numa_node: Option<i64>,
    /// None while the memory of the GPU is not known.
    pub(crate) share: Option<Share>,
    pub(crate) healthy: bool,
    /// Why it is not healthy.
    pub(crate) reason: String,
    /// The label or the path of the control group that has it; empty where nobody has it.
    pub(crate) bound_to: String,
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
            reason: row.reason.clone(),
            bound_to: row.bound_to.clone(),
        }
    }
}

#[cfg(test)]
pub(crate) mod samples {
    use super::*;

    /// A healthy slice that nobody has: `slice("06-1", 20480, 25)` is of the GPU `06`.
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
            reason: String::new(),
            bound_to: String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
