//! Sample values of published types, for tests.

#![allow(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a test ends with a panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use mps_core::terms::SliceSize;

use super::snapshot::{GpuView, Snapshot, State};
use crate::host::compute_mode::ComputeMode;
use crate::host::gpu::{Gpu, PciDevice};
use crate::host::nvml::facts::{GpuState, NvmlFacts};
use crate::plan::GpuPlan;

/// A GPU with four slices. Each slice has 5760 MiB of memory and 25 % of the threads.
pub fn gpu(address: &str, uuid: &str) -> GpuView {
    let nvml = NvmlFacts {
        uuid: uuid.to_owned(),
        name: "Tesla P40".to_owned(),
        index: 0,
        minor: Some(0),
        memory_total_mib: Some(23040),
        compute_capability: Some((6, 1)),
        state: GpuState { compute_mode: Some(ComputeMode::ExclusiveProcess), ..GpuState::default() },
    };
    let pci = PciDevice {
        address: address.parse().unwrap(),
        vendor: 0x10de,
        device: 0x1b38,
        ..PciDevice::default()
    };
    GpuView {
        plan: GpuPlan {
            gpu: Gpu { pci, nvml: Ok(nvml) },
            sizes: vec![SliceSize { memory_mib: 5760, thread_percentage: 25, max_clients: 4 }; 4],
            places: 16,
            clients_counted: false,
            limits_enforced: false,
            obstacles: Vec::new(),
            warnings: Vec::new(),
            pipe_directory: PathBuf::from("/tmp/nvidia-mps/pipe"),
            slice_directories: None,
            isolation: crate::config::Isolation::Gpu,
            cpus: None,
        },
        needs_reset: false,
        healthy: true,
        reason: String::new(),
        compute_mode: Some(ComputeMode::ExclusiveProcess),
        control_daemons: vec!["shared".to_owned()],
        confirmed_thread_percentage: None,
        confirmed_memory_limit_mib: None,
        drained: BTreeSet::new(),
        bound: BTreeMap::new(),
        kernel_limits: BTreeMap::new(),
        full: BTreeMap::new(),
        unserved: BTreeMap::new(),
        in_use: None,
        uses: Vec::new(),
    }
}

pub fn snapshot(gpus: Option<Vec<GpuView>>) -> Snapshot {
    Snapshot {
        generation: 1,
        state: State::Ready,
        enabled: true,
        pipe_directory: PathBuf::from("/tmp/nvidia-mps/pipe"),
        log_directory: PathBuf::from("/tmp/nvidia-mps/log"),
        gpus: gpus.map(|gpus| gpus.into_iter().map(Arc::new).collect()),
        ..Snapshot::default()
    }
}
