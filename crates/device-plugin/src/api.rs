//! The messages of the kubelet's interface `deviceplugin/v1beta1` that this program uses, and the paths of the interface's
//! calls. The names and numbers of the messages' fields are those of Kubernetes.

use std::collections::HashMap;

pub(crate) const VERSION: &str = "v1beta1";

pub(crate) const REGISTER: &str = "/v1beta1.Registration/Register";
pub(crate) const OPTIONS: &str = "/v1beta1.DevicePlugin/GetDevicePluginOptions";
pub(crate) const LIST_AND_WATCH: &str = "/v1beta1.DevicePlugin/ListAndWatch";
pub(crate) const PREFERRED: &str = "/v1beta1.DevicePlugin/GetPreferredAllocation";
pub(crate) const ALLOCATE: &str = "/v1beta1.DevicePlugin/Allocate";

pub(crate) const HEALTHY: &str = "Healthy";
pub(crate) const UNHEALTHY: &str = "Unhealthy";

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Nothing {}

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
pub(crate) struct ResourceList {
    #[prost(message, repeated, tag = "1")]
    pub(crate) devices: Vec<ListedDevice>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ListedDevice {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
    #[prost(string, tag = "2")]
    pub(crate) health: String,
    #[prost(message, optional, tag = "3")]
    pub(crate) topology: Option<NumaNodes>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NumaNodes {
    #[prost(message, repeated, tag = "1")]
    pub(crate) nodes: Vec<NumaNode>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NumaNode {
    #[prost(int64, tag = "1")]
    pub(crate) id: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct PreferredRequest {
    #[prost(message, repeated, tag = "1")]
    pub(crate) containers: Vec<PreferredOfContainer>,
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

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct PreferredAnswer {
    #[prost(message, repeated, tag = "1")]
    pub(crate) containers: Vec<ChosenForContainer>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ChosenForContainer {
    #[prost(string, repeated, tag = "1")]
    pub(crate) devices: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct AllocateRequest {
    #[prost(message, repeated, tag = "1")]
    pub(crate) containers: Vec<AllocateOfContainer>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct AllocateOfContainer {
    #[prost(string, repeated, tag = "1")]
    pub(crate) devices: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct AllocateAnswer {
    #[prost(message, repeated, tag = "1")]
    pub(crate) containers: Vec<ContainerSettings>,
}

/// The settings that the kubelet gives the engine for a container.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ContainerSettings {
    #[prost(map = "string, string", tag = "1")]
    pub(crate) environment: HashMap<String, String>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) mounts: Vec<ContainerMount>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) device_nodes: Vec<ContainerDeviceNode>,
    #[prost(message, repeated, tag = "5")]
    pub(crate) cdi_devices: Vec<CdiDevice>,
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

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct CdiDevice {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
}
