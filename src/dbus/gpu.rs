//! `io.yunion.Mps1.Gpu`, one object per GPU, documented in `config/io.yunion.Mps1.Gpu.xml`.

use std::collections::HashMap;
use std::sync::Arc;

use zbus::{OwnedVariant, interface};

use super::dict::{Dict, value};
use super::{Mirror, ROOT, RequestError, path_element};
use crate::publish::snapshot::GpuView;

/// A GPU, as its dictionary in `ListGpus` has it.
pub(super) struct Gpu(Arc<Dict>);

impl From<Arc<Dict>> for Gpu {
    fn from(dict: Arc<Dict>) -> Self {
        Self(dict)
    }
}

impl Mirror for Gpu {
    fn replace(&mut self, dict: Arc<Dict>) {
        self.0 = dict;
    }
}

/// The path of a GPU: by its UUID, which follows the board, or by its address while the driver can't say the UUID.
pub(super) fn path(gpu: &GpuView) -> String {
    let uuid = gpu.uuid();
    let element =
        if uuid.is_empty() { path_element(&gpu.plan.gpu.pci.address.short()) } else { path_element(uuid) };
    format!("{ROOT}/gpus/{element}")
}

#[interface(name = "io.yunion.Mps1.Gpu", introspection_docs = false)]
impl Gpu {
    #[zbus(property)]
    fn addr(&self) -> Result<String, RequestError> {
        value(&self.0, "addr")
    }

    #[zbus(property)]
    fn base_addr(&self) -> Result<String, RequestError> {
        value(&self.0, "base_addr")
    }

    #[zbus(property)]
    fn compute_mode(&self) -> Result<String, RequestError> {
        value(&self.0, "compute_mode")
    }

    #[zbus(property)]
    fn confirmed_memory_limit(&self) -> Result<i32, RequestError> {
        value(&self.0, "confirmed_memory_limit")
    }

    #[zbus(property)]
    fn confirmed_thread_percentage(&self) -> Result<i32, RequestError> {
        value(&self.0, "confirmed_thread_percentage")
    }

    #[zbus(property)]
    fn control_daemon(&self) -> Result<String, RequestError> {
        value(&self.0, "control_daemon")
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn detected_on_host(&self) -> Result<bool, RequestError> {
        value(&self.0, "detected_on_host")
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn dev_type(&self) -> Result<String, RequestError> {
        value(&self.0, "dev_type")
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

    #[zbus(property)]
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

    #[zbus(property)]
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

    #[zbus(property(emits_changed_signal = "const"))]
    fn sharing_mode(&self) -> Result<String, RequestError> {
        value(&self.0, "sharing_mode")
    }

    #[zbus(property)]
    fn vendor_device_id(&self) -> Result<String, RequestError> {
        value(&self.0, "vendor_device_id")
    }

    #[zbus(property)]
    fn virtual_num(&self) -> Result<i32, RequestError> {
        value(&self.0, "virtual_num")
    }
}
