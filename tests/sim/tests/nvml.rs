//! Tests of the simulated NVML library through the crate nvml-wrapper.
//!
//! The simulated NVML library finds the simulated host by an environment variable, so each case of a test needs a process of
//! its own. The test starts this binary again with the name of the case.

// clippy.toml allows `unwrap` and the like only in functions marked as tests. Other functions of this file call `unwrap`, too.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::ComputeMode;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;

const SIM: &str = env!("CARGO_BIN_EXE_yunion-mps-sim");

/// Makes a simulated host with this board, changes the host with `prepare`, and runs a case on the host in a new process.
fn on(board: &str, prepare: impl FnOnce(&Path), case: &str) {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    let made = Command::new(SIM).args(["create", board]).arg(root).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    prepare(root);
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", case])
        .env("YUNION_MPS_SIM", root)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{case}: {text}");
}

fn nvml() -> Result<Nvml, NvmlError> {
    let root = std::env::var("YUNION_MPS_SIM").unwrap();
    Nvml::builder().lib_path(format!("{root}/lib/libnvidia-ml.so.1").as_ref()).init()
}

#[test]
fn a_p40_answers_as_the_real_one() {
    on("tesla-p40", |_| {}, "case_p40");
}

#[test]
#[ignore = "run by a_p40_answers_as_the_real_one"]
fn case_p40() {
    let nvml = nvml().unwrap();
    assert_eq!(nvml.sys_driver_version().unwrap(), "535.261.03");
    assert_eq!(nvml.sys_nvml_version().unwrap(), "12.535.261.03");
    assert_eq!(nvml.sys_cuda_driver_version().unwrap(), 12020);
    assert_eq!(nvml.device_count().unwrap(), 1);
    assert!(matches!(nvml.device_by_index(1), Err(NvmlError::InvalidArg)));
    let uuid = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400";
    let gpu = nvml.device_by_uuid(uuid).unwrap();
    assert_eq!(gpu.uuid().unwrap(), uuid);
    assert_eq!(gpu.name().unwrap(), "Tesla P40");
    assert_eq!((gpu.index().unwrap(), gpu.minor_number().unwrap()), (0, 0));
    let pci = gpu.pci_info().unwrap();
    assert_eq!((pci.bus_id.as_str(), pci.pci_device_id), ("00000000:00:06.0", 0x1b38_10de));
    assert_eq!(gpu.memory_info().unwrap().total / 1024 / 1024, 23040);
    let capability = gpu.cuda_compute_capability().unwrap();
    assert_eq!((capability.major, capability.minor), (6, 1));
    assert_eq!((gpu.max_pcie_link_gen().unwrap(), gpu.max_pcie_link_width().unwrap()), (3, 16));
    assert!(matches!(gpu.mig_mode(), Err(NvmlError::NotSupported)));
    assert_eq!(gpu.compute_mode().unwrap(), ComputeMode::Default);
    assert!(gpu.running_compute_processes().unwrap().is_empty());
}

#[test]
fn a_mixed_host_has_upper_case_addresses_and_mig() {
    on("mixed", |_| {}, "case_mixed");
}

#[test]
#[ignore = "run by a_mixed_host_has_upper_case_addresses_and_mig"]
fn case_mixed() {
    let nvml = nvml().unwrap();
    assert_eq!(nvml.device_count().unwrap(), 3, "the AMD card is not NVML's");
    let gpu = nvml.device_by_pci_bus_id("0001:1a:00.0").unwrap();
    assert_eq!(gpu.pci_info().unwrap().bus_id, "00000001:1A:00.0");
    assert_eq!(gpu.index().unwrap(), 2);
    assert!(nvml.device_by_index(0).unwrap().mig_mode().unwrap().current == 0);
    assert!(nvml.device_by_index(1).unwrap().mig_mode().unwrap().current == 1);
}

#[test]
fn the_compute_mode_persists() {
    on("h200", |_| {}, "case_compute_mode");
}

#[test]
#[ignore = "run by the_compute_mode_persists"]
fn case_compute_mode() {
    let first = nvml().unwrap();
    first.device_by_index(0).unwrap().set_compute_mode(ComputeMode::ExclusiveProcess).unwrap();
    drop(first);
    let again = nvml().unwrap();
    assert_eq!(again.device_by_index(0).unwrap().compute_mode().unwrap(), ComputeMode::ExclusiveProcess);
}

#[test]
fn processes_are_listed_by_kind() {
    on("h200", |_| {}, "case_processes");
}

#[test]
#[ignore = "run by processes_are_listed_by_kind"]
fn case_processes() {
    use nvidia_ml::state::{Host, Kind};
    let (me, parent) = (std::process::id(), std::os::unix::process::parent_id());
    let gpu = Host::from_env().unwrap().gpu(0);
    gpu.enter(parent, Kind::Server, 66);
    gpu.enter(me, Kind::Client, 580);
    let nvml = nvml().unwrap();
    let device = nvml.device_by_index(0).unwrap();
    let list = |found: Vec<nvml_wrapper::struct_wrappers::device::ProcessInfo>| {
        let mut found: Vec<_> = found.into_iter().map(|info| (info.pid, info.used_gpu_memory)).collect();
        found.sort_unstable_by_key(|(pid, _)| *pid != parent);
        found
    };
    let mib = |mib: u64| UsedGpuMemory::Used(mib * 1024 * 1024);
    assert_eq!(list(device.running_compute_processes().unwrap()), [(parent, mib(66)), (me, mib(580))]);
    assert_eq!(list(device.mps_running_compute_processes().unwrap()), [(me, mib(580))]);
    assert!(device.running_graphics_processes().unwrap().is_empty());
    assert_eq!(device.memory_info().unwrap().used, 646 * 1024 * 1024);
}

#[test]
fn faults_are_injected_by_files() {
    let prepare = |root: &Path| {
        let gpus = root.join("gpus");
        fs::write(gpus.join("0/lost"), "").unwrap();
        fs::write(gpus.join("1/memory_total_mib"), "N/A\n").unwrap();
        fs::write(gpus.join("2/no-permission"), "").unwrap();
        fs::write(gpus.join("3/error/nvmlDeviceGetMigMode"), "13").unwrap();
        fs::write(gpus.join("3/error/nvmlDeviceGetMemoryInfo"), "999").unwrap();
    };
    on("h200x8", prepare, "case_faults");
}

#[test]
#[ignore = "run by faults_are_injected_by_files"]
fn case_faults() {
    let nvml = nvml().unwrap();
    assert_eq!(nvml.device_count().unwrap(), 8);
    assert!(matches!(nvml.device_by_index(0), Err(NvmlError::GpuLost)));
    assert!(matches!(nvml.device_by_index(1).unwrap().memory_info(), Err(NvmlError::NotSupported)));
    let mut denied = nvml.device_by_index(2).unwrap();
    let refused = denied.set_compute_mode(ComputeMode::ExclusiveProcess);
    assert!(matches!(refused, Err(NvmlError::NoPermission)));
    assert_eq!(denied.compute_mode().unwrap(), ComputeMode::Default);
    let odd = nvml.device_by_index(3).unwrap();
    assert!(matches!(odd.mig_mode(), Err(NvmlError::FunctionNotFound)));
    assert!(matches!(odd.memory_info(), Err(NvmlError::Unknown)));
    assert_eq!(odd.name().unwrap(), "NVIDIA H200");
}

/// NVML reports every critical error that happens after the registration of a GPU, and no earlier error. One set of events can
/// watch several GPUs.
#[test]
fn critical_errors_are_reported_as_they_happen() {
    on("h200x8", |root| fs::write(root.join("gpus/1/xids"), "13\n").unwrap(), "case_xids");
}

#[test]
#[ignore = "run by critical_errors_are_reported_as_they_happen"]
fn case_xids() {
    let nvml = nvml().unwrap();
    let mut events = nvml.create_event_set().unwrap();
    for index in 0..2 {
        let gpu = nvml.device_by_index(index).unwrap();
        events = gpu.register_events(EventTypes::CRITICAL_XID_ERROR, events).unwrap();
    }
    assert!(matches!(events.wait(1), Err(NvmlError::Timeout)));
    let happens = |gpu: u32, text: &str| {
        let file = format!("{}/gpus/{gpu}/xids", std::env::var("YUNION_MPS_SIM").unwrap());
        fs::File::options().create(true).append(true).open(file).unwrap().write_all(text.as_bytes()).unwrap();
    };
    let next = || {
        let event = events.wait(30_000).unwrap();
        assert_eq!(event.event_type, EventTypes::CRITICAL_XID_ERROR);
        (event.device.index().unwrap(), event.event_data.unwrap())
    };
    happens(1, "31\n79\n");
    assert_eq!((next(), next()), ((1, XidError::Value(31)), (1, XidError::Value(79))));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            happens(0, "4");
            happens(0, "8\n");
        });
        assert_eq!(next(), (0, XidError::Value(48)));
    });
    happens(2, "31\n");
    assert!(matches!(events.wait(1), Err(NvmlError::Timeout)), "nobody has asked for that GPU's");
    let gpu = nvml.device_by_index(2).unwrap();
    let refused = gpu.register_events(EventTypes::CLOCK_CHANGE, nvml.create_event_set().unwrap());
    assert!(matches!(refused.unwrap_err().error, NvmlError::NotSupported));
}

#[test]
fn without_a_driver_nvml_can_not_be_opened() {
    on("h200", |root| fs::remove_file(root.join("driver")).unwrap(), "case_no_driver");
}

#[test]
#[ignore = "run by without_a_driver_nvml_can_not_be_opened"]
fn case_no_driver() {
    assert!(matches!(nvml(), Err(NvmlError::DriverNotLoaded)));
}

#[test]
fn a_function_can_be_missing_from_the_library() {
    let function = "nvmlDeviceGetMPSComputeRunningProcesses_v3";
    let drop_function = |root: &Path| {
        let done = Command::new(SIM).arg("drop-function").arg(root).arg(function).status().unwrap();
        assert!(done.success());
    };
    on("h200", drop_function, "case_missing_function");
}

#[test]
#[ignore = "run by a_function_can_be_missing_from_the_library"]
fn case_missing_function() {
    let nvml = nvml().unwrap();
    let gpu = nvml.device_by_index(0).unwrap();
    assert!(matches!(gpu.mps_running_compute_processes(), Err(NvmlError::FailedToLoadSymbol(_))));
    assert!(gpu.running_compute_processes().unwrap().is_empty());
}
