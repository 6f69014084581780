//! Hosts and settings for the tests of the planner, and the tests of a plan as a whole.

use std::num::NonZeroU32;
use std::sync::Arc;

use mps_core::terms::{DaemonId, ServedGpu, SliceSize};

use crate::config::{DeviceEntry, DevicePath, MpsEntry, Settings};
use crate::host::compute_mode::ComputeMode;
use crate::host::cpus::Cpus;
use crate::host::gpu::{Gpu, PciDevice};
use crate::host::inventory::Inventory;
use crate::host::nvml::facts::{GpuState, NvmlFacts};
use crate::plan::{Configured, ControlDaemonPlan, GpuPlan, Plan, PlanError, warnings};
use crate::problem::Origin;

pub(super) const P40: &str = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400";

pub(super) fn plan(settings: &Settings, inventory: &Inventory) -> Result<Plan, PlanError> {
    crate::plan::plan(settings, inventory, &[])
}

pub(super) fn no_entries() -> Settings {
    Settings { enabled: true, sources: vec!["/etc/yunion/host.conf".into()], ..Settings::default() }
}

/// Settings with these entries in the device file, one on each line from line 2 on. An entry is a path and a number of slices.
pub(super) fn with(entries: Vec<(DevicePath, u32)>) -> Settings {
    let mut settings = no_entries();
    for (line, (path, slices)) in (2..).zip(entries) {
        settings.devices.push(DeviceEntry {
            name: format!("devices[{}]", line - 2),
            origin: Origin { file: "devices.yml".into(), line: Some(line) },
            device_type: "NVIDIA_MPS".to_owned(),
            path: Some(path),
            mps: Some(MpsEntry::with_slices(NonZeroU32::new(slices).unwrap())),
        });
    }
    settings
}

/// Adds an entry of another type than `NVIDIA_MPS`, on line 90 of the device file.
pub(super) fn and_other(mut settings: Settings, path: Option<DevicePath>) -> Settings {
    settings.devices.push(DeviceEntry {
        name: "devices[88]".to_owned(),
        origin: Origin { file: "devices.yml".into(), line: Some(90) },
        device_type: "NVIDIA_GPU_SHARE".to_owned(),
        path,
        mps: None,
    });
    settings
}

pub(super) fn node(number: u32) -> DevicePath {
    DevicePath::RenderNode(format!("/dev/dri/renderD{number}").into())
}

pub(super) fn other(text: &str) -> DevicePath {
    DevicePath::Other(text.to_owned())
}

pub(super) fn pci(address: &str) -> DevicePath {
    DevicePath::Pci(address.parse().unwrap())
}

pub(super) fn short(address: &str) -> DevicePath {
    DevicePath::ShortPci(address.parse().unwrap())
}

pub(super) fn device(address: &str, vendor: u16, node: u32) -> PciDevice {
    PciDevice {
        address: address.parse().unwrap(),
        vendor,
        device: 0x1b38,
        driver: None,
        render_node: Some(format!("/dev/dri/renderD{node}").into()),
        card_node: Some(format!("/dev/dri/card{}", node - 128).into()),
        numa_node: None,
        local_cpus: None,
        link: None,
        pci_ids_name: None,
    }
}

pub(super) fn gpu(address: &str, node: u32, uuid: &str, memory: u64, capability: (u32, u32)) -> Gpu {
    Gpu {
        pci: device(address, 0x10de, node),
        nvml: Ok(NvmlFacts {
            uuid: uuid.to_owned(),
            name: "a GPU".to_owned(),
            index: node - 128,
            minor: Some(node - 128),
            memory_total_mib: Some(memory),
            compute_capability: Some(capability),
            state: GpuState { compute_mode: Some(ComputeMode::Default), ..GpuState::default() },
        }),
    }
}

pub(super) fn host(gpus: Vec<Gpu>) -> Inventory {
    let host = Inventory::of_gpus(Ok("580.159.04".to_owned()), gpus);
    Inventory { cpus: Cpus::parse("0-63"), memory_mib: Some(131_072), ..host }
}

pub(super) fn p40() -> Inventory {
    host(vec![gpu("00:06.0", 128, P40, 23040, (6, 1))])
}

/// A host with four GPUs: GPU-0 to GPU-3 at 0000:1a:00.0 to 0000:1d:00.0, with the render nodes 128 to 131. Each GPU has 120
/// GiB, which the numbers of slices in the tests divide without a remainder.
pub(super) fn h200s() -> Inventory {
    let at = ["1a:00.0", "1b:00.0", "1c:00.0", "1d:00.0"];
    let gpus =
        (0..).zip(at).map(|(index, at)| gpu(at, 128 + index, &format!("GPU-{index}"), 122_880, (9, 0)));
    host(gpus.collect())
}

pub(super) fn facts(inventory: &mut Inventory, index: usize) -> &mut NvmlFacts {
    inventory.gpus[index].nvml.as_mut().unwrap()
}

pub(super) fn without_driver(mut inventory: Inventory) -> Inventory {
    inventory.driver = Err("no driver".into());
    for gpu in &mut inventory.gpus {
        gpu.nvml = Err("no driver".into());
        gpu.pci.render_node = None;
    }
    inventory
}

/// The entries with missing GPUs, if the host has none of the configured GPUs. For each entry: true if the host certainly
/// lacks the GPU, and the text of the problem.
pub(super) fn missing(settings: &Settings, inventory: &Inventory) -> Vec<(bool, String)> {
    match plan(settings, inventory) {
        Err(PlanError::Missing(missing)) => {
            missing.iter().map(|one| (one.certain, one.problem.to_string())).collect()
        }
        other => panic!("{other:?}"),
    }
}

pub(super) fn problems(settings: &Settings, inventory: &Inventory) -> Vec<String> {
    match plan(settings, inventory) {
        Err(PlanError::Problems(problems)) => problems.iter().map(ToString::to_string).collect(),
        other => panic!("{other:?}"),
    }
}

pub(super) fn not_yet(settings: &Settings, inventory: &Inventory) -> String {
    match plan(settings, inventory) {
        Err(PlanError::NotYet(reason)) => reason.into(),
        other => panic!("{other:?}"),
    }
}

pub(super) fn limits(plan: &Plan) -> Vec<(u64, u8)> {
    plan.gpus.iter().map(|gpu| (gpu.size(0).memory_mib, gpu.size(0).thread_percentage)).collect()
}

#[test]
fn the_p40_of_the_platforms_documentation() {
    let inventory = p40();
    let plan = plan(&with(vec![(node(128), 4)]), &inventory).unwrap();
    let expected = Plan {
        missing: Vec::new(),
        configured: plan.configured.clone(),
        gpus: vec![GpuPlan {
            gpu: inventory.gpus[0].clone(),
            sizes: vec![SliceSize { memory_mib: 5760, thread_percentage: 25, max_clients: 4 }; 4],
            isolation: crate::config::Isolation::Gpu,
            places: 16,
            clients_counted: false,
            limits_enforced: false,
            obstacles: Vec::new(),
            warnings: vec![warnings::not_enforced((6, 1))],
            pipe_directory: "/tmp/nvidia-mps/pipe".into(),
            slice_directories: None,
            cpus: None,
        }],
        control_daemons: vec![ControlDaemonPlan {
            id: DaemonId::Shared,
            pipe_directory: "/tmp/nvidia-mps/pipe".into(),
            log_directory: "/tmp/nvidia-mps/log".into(),
            private_directory: None,
            slice_directories: None,
            gpus: vec![ServedGpu {
                uuid: P40.to_owned(),
                id: Some("00:06.0".parse().unwrap()),
                memory_limit_mib: 5760,
                sizes: (0..4)
                    .map(|ordinal| {
                        (ordinal, SliceSize { memory_mib: 5760, thread_percentage: 25, max_clients: 4 })
                    })
                    .collect(),
                limits_enforced: false,
                capacity: 16,
                clients_listed: false,
            }],
            thread_percentage: 25,
            multiuser: false,
            multiuser_optional: false,
            prewarm: false,
            cpus: None,
            supervision: Arc::default(),
        }],
        nothing: String::new(),
    };
    assert_eq!(plan, expected);
    assert!(plan.configured.may_have(P40) && !plan.configured.may_have("GPU-x"));
}

#[test]
fn a_gpu_with_an_unknown_uuid_may_be_configured() {
    let settings = with(vec![(node(128), 4), (node(129), 4)]);
    let mut inventory = h200s();
    let named = plan(&settings, &inventory).unwrap().configured;
    let told = |named: &Configured| ["GPU-0", "GPU-1", "GPU-2", "GPU-x"].map(|uuid| named.may_have(uuid));
    assert_eq!(told(&named), [true, true, false, false]);
    // The UUID of GPU 1 is unknown, so GPU 1 may have any UUID that is not known to belong to another GPU.
    inventory.gpus[1].nvml = Err("an error".into());
    assert_eq!(told(&plan(&settings, &inventory).unwrap().configured), [true, true, false, true]);
    // A GPU that programs use without MPS counts as configured too, although it can't be served.
    let mut inventory = h200s();
    facts(&mut inventory, 1).state.foreign_processes = vec![(7, "x".to_owned())];
    let held = plan(&settings, &inventory).unwrap();
    assert_eq!(told(&held.configured), [true, true, false, false]);
    assert_eq!((held.gpus[0].holders().len(), held.gpus[1].holders().len()), (0, 1));
    assert_eq!(told(&Configured::default()), [false; 4]);
    // The minor number of GPU 1 is unknown, so the entry for `/dev/nvidia1` may mean GPU 1.
    let settings = with(vec![(node(128), 4), (DevicePath::NvidiaMinor(1), 4)]);
    let mut inventory = h200s();
    facts(&mut inventory, 1).minor = None;
    assert_eq!(told(&plan(&settings, &inventory).unwrap().configured), [true, true, false, true]);
}
