//! The messages and paths of the kubelet's interface `deviceplugin/v1beta1` that this program uses, with the field numbers of
//! Kubernetes. Three messages have no type here, since types of prost have the same encoding: `String` for `CDIDevice`, `i64`
//! for `NUMANode`, and `()` for `Empty`.

use std::collections::HashMap;
use std::fmt::Debug;

pub(crate) const VERSION: &str = "v1beta1";

pub(crate) const REGISTER: &str = "/v1beta1.Registration/Register";
pub(crate) const OPTIONS: &str = "/v1beta1.DevicePlugin/GetDevicePluginOptions";
pub(crate) const LIST_AND_WATCH: &str = "/v1beta1.DevicePlugin/ListAndWatch";
pub(crate) const PREFERRED: &str = "/v1beta1.DevicePlugin/GetPreferredAllocation";
pub(crate) const ALLOCATE: &str = "/v1beta1.DevicePlugin/Allocate";

pub(crate) const HEALTHY: &str = "Healthy";
pub(crate) const UNHEALTHY: &str = "Unhealthy";

/// A message of Kubernetes with a single field. This field has the number 1 and is a list of messages. Examples are the devices
/// of a resource, the NUMA nodes of a device, and the containers of a request.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Repeated<T: Debug + Default + prost::Message> {
    #[prost(message, repeated, tag = "1")]
    pub(crate) all: Vec<T>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct PluginOptions {
    #[prost(bool, tag = "1")]
    pub(crate) pre_start_required: bool,
    #[prost(bool, tag = "2")]
    pub(crate) get_preferred_allocation_available: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct RegisterRequest {
    #[prost(string, tag = "1")]
    pub(crate) version: String,
    /// The file name of the plugin's socket, in the directory of the kubelet's socket.
    #[prost(string, tag = "2")]
    pub(crate) endpoint: String,
    #[prost(string, tag = "3")]
    pub(crate) resource_name: String,
    #[prost(message, optional, tag = "4")]
    pub(crate) options: Option<PluginOptions>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ListedDevice {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
    #[prost(string, tag = "2")]
    pub(crate) health: String,
    #[prost(message, optional, tag = "3")]
    pub(crate) topology: Option<Repeated<i64>>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct PreferredOfContainer {
    #[prost(string, repeated, tag = "1")]
    pub(crate) available: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub(crate) must_include: Vec<String>,
    #[prost(int32, tag = "3")]
    pub(crate) size: i32,
}

/// The devices that the plugin prefers for a container, or that the kubelet gives to a container.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct DevicesOfContainer {
    #[prost(string, repeated, tag = "1")]
    pub(crate) devices: Vec<String>,
}

/// The settings of a container, which the kubelet passes on to the container engine.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ContainerSettings {
    #[prost(map = "string, string", tag = "1")]
    pub(crate) environment: HashMap<String, String>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) mounts: Vec<ContainerMount>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) device_nodes: Vec<ContainerDeviceNode>,
    /// The full names of CDI devices, such as `yunion.io/mps=00:06.0-1`.
    #[prost(message, repeated, tag = "5")]
    pub(crate) cdi_devices: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ContainerMount {
    #[prost(string, tag = "1")]
    pub(crate) in_container: String,
    #[prost(string, tag = "2")]
    pub(crate) on_host: String,
    #[prost(bool, tag = "3")]
    pub(crate) read_only: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ContainerDeviceNode {
    #[prost(string, tag = "1")]
    pub(crate) in_container: String,
    #[prost(string, tag = "2")]
    pub(crate) on_host: String,
    #[prost(string, tag = "3")]
    pub(crate) permissions: String,
}
