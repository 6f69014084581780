//! `io.yunion.Mps1.Device`, one object per slice, documented in `config/io.yunion.Mps1.Device.xml`.

use std::collections::HashMap;
use std::sync::Arc;

use zbus::{OwnedVariant, interface};

use super::dict::{Dict, value};
use super::{Mirror, ROOT, RequestError, path_element};

/// A slice, as its dictionary in `ListDevices` has it.
pub(super) struct Device(Arc<Dict>);

impl From<Arc<Dict>> for Device {
    fn from(dict: Arc<Dict>) -> Self {
        Self(dict)
    }
}

impl Mirror for Device {
    fn replace(&mut self, dict: Arc<Dict>) {
        self.0 = dict;
    }
}

/// The path of the slice with this name.
pub(super) fn path(name: &str) -> String {
    format!("{ROOT}/devices/{}", path_element(name))
}

#[interface(name = "io.yunion.Mps1.Device", introspection_docs = false)]
impl Device {
    #[zbus(property(emits_changed_signal = "const"))]
    fn addr(&self) -> Result<String, RequestError> {
        value(&self.0, "addr")
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn base_addr(&self) -> Result<String, RequestError> {
        value(&self.0, "base_addr")
    }

    #[zbus(property)]
    fn compute_mode(&self) -> Result<String, RequestError> {
        value(&self.0, "compute_mode")
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn detected_on_host(&self) -> Result<bool, RequestError> {
        value(&self.0, "detected_on_host")
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn dev_type(&self) -> Result<String, RequestError> {
        value(&self.0, "dev_type")
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn device_minor(&self) -> Result<i32, RequestError> {
        value(&self.0, "device_minor")
    }

    #[zbus(property)]
    fn device_path(&self) -> Result<String, RequestError> {
        value(&self.0, "device_path")
    }

    #[zbus(property)]
    fn healthy(&self) -> Result<bool, RequestError> {
        value(&self.0, "healthy")
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn hot_pluggable(&self) -> Result<bool, RequestError> {
        value(&self.0, "hot_pluggable")
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn index(&self) -> Result<i32, RequestError> {
        value(&self.0, "index")
    }

    #[zbus(property)]
    fn limits_enforced(&self) -> Result<bool, RequestError> {
        value(&self.0, "limits_enforced")
    }

    #[zbus(property)]
    fn memory_size(&self) -> Result<i32, RequestError> {
        value(&self.0, "memory_size")
    }

    #[zbus(property)]
    fn model(&self) -> Result<String, RequestError> {
        value(&self.0, "model")
    }

    #[zbus(property)]
    fn mps_memory_limit(&self) -> Result<i32, RequestError> {
        value(&self.0, "mps_memory_limit")
    }

    #[zbus(property)]
    fn mps_memory_total(&self) -> Result<i32, RequestError> {
        value(&self.0, "mps_memory_total")
    }

    #[zbus(property)]
    fn mps_thread_percentage(&self) -> Result<i32, RequestError> {
        value(&self.0, "mps_thread_percentage")
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn name(&self) -> Result<String, RequestError> {
        value(&self.0, "name")
    }

    #[zbus(property)]
    fn numa_node(&self) -> Result<i32, RequestError> {
        value(&self.0, "numa_node")
    }

    #[zbus(property)]
    fn nvidia_index(&self) -> Result<u32, RequestError> {
        value(&self.0, "nvidia_index")
    }

    #[zbus(property)]
    fn nvidia_minor(&self) -> Result<u32, RequestError> {
        value(&self.0, "nvidia_minor")
    }

    #[zbus(property)]
    fn nvidia_name(&self) -> Result<String, RequestError> {
        value(&self.0, "nvidia_name")
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn ordinal(&self) -> Result<u32, RequestError> {
        value(&self.0, "ordinal")
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn pci_bdf(&self) -> Result<String, RequestError> {
        value(&self.0, "pci_bdf")
    }

    #[zbus(property)]
    fn pcie_info(&self) -> Result<HashMap<String, OwnedVariant>, RequestError> {
        value(&self.0, "pcie_info")
    }

    #[zbus(property)]
    fn pipe_directory(&self) -> Result<String, RequestError> {
        value(&self.0, "pipe_directory")
    }

    #[zbus(property)]
    fn reason(&self) -> Result<String, RequestError> {
        value(&self.0, "reason")
    }

    #[zbus(property)]
    fn render_node(&self) -> Result<String, RequestError> {
        value(&self.0, "render_node")
    }

    #[zbus(property)]
    fn servable(&self) -> Result<bool, RequestError> {
        value(&self.0, "servable")
    }

    #[zbus(property)]
    fn vendor_device_id(&self) -> Result<String, RequestError> {
        value(&self.0, "vendor_device_id")
    }
}
