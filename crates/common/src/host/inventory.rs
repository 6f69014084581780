//! Makes the list of the host's GPUs from the facts in /sys, in NVML and in pci.ids.

use std::collections::BTreeMap;
use std::path::Path;

use mps_core::terms::PciAddress;

use super::cpus::Cpus;
use super::driver;
use super::gpu::{Gpu, NVIDIA, PciDevice};
use super::nvml::{GpuQuestions, ToldByNvml};
use super::{pci_ids, proc, sysfs};
use crate::problem::Problem;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// The driver's version, such as `580.159.04`, or the reason why NVML can't be used, in words for an administrator.
    pub driver: Result<String, Problem>,
    /// The NVIDIA GPUs that are on the bus or that NVML lists, in the order of their addresses.
    pub gpus: Vec<Gpu>,
    /// The display devices of other vendors. An administrator may name one of them in the device file by mistake, and the error
    /// message about the entry then says that the device is not from NVIDIA.
    pub others: Vec<PciDevice>,
    /// The CPUs of this host. None if the host has more CPUs than [`Cpus`] has room for.
    pub cpus: Option<Cpus>,
    /// The memory of this host in MiB. None if /proc/meminfo can't be read.
    pub memory_mib: Option<u64>,
}

impl Inventory {
    pub fn of_gpus(driver: Result<String, Problem>, gpus: Vec<Gpu>) -> Self {
        Self { driver, gpus, others: Vec::new(), cpus: None, memory_mib: None }
    }

    pub fn series(&self) -> u32 {
        driver::series(self.driver.as_deref().unwrap_or_default())
    }

    pub fn if_not_all(&self, cpus: Cpus) -> Option<Cpus> {
        (!self.cpus.is_some_and(|all| cpus.includes(all))).then_some(cpus)
    }

    /// Reads the GPUs of the host from /sys, NVML and pci.ids. Reading never fails: a fact that can't be read is missing in the
    /// result. `nvml` is an open driver, or the reason why the driver can't be opened.
    pub fn read(sysroot: &Path, nvml: Result<&mut GpuQuestions, &Problem>) -> Self {
        let devices = sysfs::scan(sysroot).unwrap_or_else(|reason| {
            tracing::warn!("{reason}");
            Vec::new()
        });
        let known = |device: &&PciDevice| device.vendor == NVIDIA && device.foreign_driver().is_none();
        let known: Vec<PciAddress> = devices.iter().filter(known).map(|device| device.address).collect();
        let told = nvml.map_err(Clone::clone).and_then(|nvml| nvml.ask(&known));
        let mut inventory = Self { memory_mib: proc::memory_mib(sysroot), ..Self::merged(devices, told) };
        inventory.add_names(sysroot);
        inventory
    }

    fn add_names(&mut self, sysroot: &Path) {
        let id = |device: &PciDevice| (device.vendor, device.device);
        let mut devices: Vec<_> =
            self.gpus.iter_mut().map(|gpu| &mut gpu.pci).chain(&mut self.others).collect();
        let names = pci_ids::names(sysroot, &devices.iter().map(|device| id(device)).collect());
        for device in &mut devices {
            device.pci_ids_name = names.get(&id(device)).cloned();
        }
    }

    fn merged(devices: Vec<PciDevice>, told: Result<ToldByNvml, Problem>) -> Self {
        let (driver, listed, mut unlisted) = match told {
            Ok(told) => (Ok(told.version), told.listed, told.unlisted),
            Err(reason) => (Err(reason), Vec::new(), BTreeMap::new()),
        };
        let mut listed: BTreeMap<PciAddress, Gpu> =
            listed.into_iter().map(|gpu| (gpu.pci.address, gpu)).collect();
        let (ours, others): (Vec<_>, Vec<_>) =
            devices.into_iter().partition(|device| device.vendor == NVIDIA);
        let mut gpus = Vec::new();
        for pci in ours {
            let nvml = match (listed.remove(&pci.address), pci.foreign_driver(), &driver) {
                (Some(gpu), ..) => gpu.nvml,
                (None, Some(other), _) => Err(Problem::new(
                    format!("the kernel driver {other} holds the GPU"),
                    "bind the GPU to the kernel driver nvidia, or remove the GPU's entry from \
                     host_container_device.yml",
                )),
                (None, None, Err(reason)) => Err(reason.clone()),
                (None, None, Ok(_)) => unlisted
                    .remove(&pci.address)
                    .unwrap_or_else(|| Err("NVML was not asked about this GPU".into())),
            };
            gpus.push(Gpu { pci, nvml });
        }
        // The GPUs that are still in `listed` are missing in /sys, for example in a container that hides /sys.
        gpus.extend(listed.into_values());
        gpus.sort_by_key(|gpu| gpu.pci.address);
        Self { others, cpus: Cpus::of_host(), ..Self::of_gpus(driver, gpus) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::compute_mode::ComputeMode;
    use crate::host::nvml::facts::{GpuState, NvmlFacts};

    fn address(text: &str) -> PciAddress {
        text.parse().unwrap()
    }

    fn facts(index: u32) -> NvmlFacts {
        NvmlFacts {
            uuid: format!("GPU-{index:08}-372d-2432-b4b4-beca4d8d3400"),
            name: "Tesla P40".to_owned(),
            index,
            minor: Some(index),
            memory_total_mib: Some(23040),
            compute_capability: Some((6, 1)),
            state: GpuState { compute_mode: Some(ComputeMode::Default), ..GpuState::default() },
        }
    }

    fn on_bus(at: &str, vendor: u16, driver: Option<&str>) -> PciDevice {
        PciDevice {
            address: address(at),
            vendor,
            device: 0x1b38,
            driver: driver.map(str::to_owned),
            render_node: None,
            card_node: None,
            numa_node: None,
            local_cpus: None,
            link: None,
            pci_ids_name: None,
        }
    }

    fn listed(at: &str, index: u32) -> Gpu {
        let pci = PciDevice { address: address(at), vendor: NVIDIA, device: 0x1b38, ..PciDevice::default() };
        Gpu { pci, nvml: Ok(facts(index)) }
    }

    #[test]
    fn the_name_in_pci_ids_comes_first() {
        let mut gpu = Gpu { pci: on_bus("00:06.0", NVIDIA, None), nvml: Ok(facts(0)) };
        assert_eq!(gpu.vendor_device_id(), "10de:1b38");
        gpu.pci.pci_ids_name = Some("H200 SXM 141GB".to_owned());
        assert_eq!(gpu.model(), "H200 SXM 141GB");
        gpu.pci.pci_ids_name = None;
        assert_eq!(gpu.model(), "Tesla P40");
        gpu.nvml = Err("lost".into());
        assert_eq!(gpu.model(), "");
    }

    #[test]
    fn bus_and_driver_are_merged_by_address() {
        let devices = vec![
            on_bus("00:06.0", NVIDIA, Some("nvidia")),
            on_bus("00:07.0", NVIDIA, Some("vfio-pci")),
            on_bus("00:08.0", NVIDIA, Some("nvidia")),
            on_bus("03:00.0", 0x1002, Some("amdgpu")),
        ];
        // NVML lists the GPUs in another order than /sys, and 0001:1a:00.0 is missing in /sys.
        let known = vec![listed("0001:1A:00.0", 0), listed("00000000:00:06.0", 1)];
        let lost = address("00:08.0");
        let told = ToldByNvml {
            version: "580.159.04".to_owned(),
            listed: known,
            unlisted: BTreeMap::from([(lost, Err(format!("{lost} is lost").into()))]),
        };
        let inventory = Inventory::merged(devices, Ok(told));
        assert_eq!(inventory.driver, Ok("580.159.04".to_owned()));
        let seen: Vec<_> =
            inventory.gpus.iter().map(|gpu| (gpu.pci.address.to_string(), gpu.nvml.clone())).collect();
        assert_eq!(seen[0], ("0000:00:06.0".to_owned(), Ok(facts(1))));
        assert_eq!(seen[1].0, "0000:00:07.0");
        assert!(seen[1].1.as_ref().unwrap_err().found.contains("vfio-pci holds the GPU"));
        assert_eq!(seen[2], ("0000:00:08.0".to_owned(), Err("0000:00:08.0 is lost".into())));
        assert_eq!(seen[3], ("0001:1a:00.0".to_owned(), Ok(facts(0))));
        assert_eq!(seen.len(), 4);
        let others: Vec<_> = inventory.others.iter().map(|device| device.address).collect();
        assert_eq!(others, [address("03:00.0")]);
    }

    #[test]
    fn without_a_driver_the_bus_is_still_known() {
        let root = tempfile::tempdir().unwrap();
        let device = root.path().join("sys/bus/pci/devices/0000:00:06.0");
        std::fs::create_dir_all(&device).unwrap();
        for (name, text) in [("class", "0x030200\n"), ("vendor", "0x10de\n"), ("device", "0x1b38\n")] {
            std::fs::write(device.join(name), text).unwrap();
        }
        let names = root.path().join("usr/share/misc");
        std::fs::create_dir_all(&names).unwrap();
        std::fs::write(names.join("pci.ids"), "10de  NVIDIA\n\t1b38  GP102GL [Tesla P40]\n").unwrap();
        std::fs::create_dir_all(root.path().join("proc")).unwrap();
        std::fs::write(root.path().join("proc/meminfo"), "MemTotal:       127600748 kB\nMemFree: 1 kB\n")
            .unwrap();
        let inventory = Inventory::read(root.path(), Err(&"no driver".into()));
        assert_eq!(inventory.memory_mib, Some(124_610));
        assert_eq!(inventory.driver, Err("no driver".into()));
        assert_eq!(inventory.gpus.len(), 1);
        assert_eq!(inventory.gpus[0].pci.address, address("00:06.0"));
        assert_eq!(inventory.gpus[0].nvml, Err("no driver".into()));
        assert_eq!(inventory.gpus[0].model(), "Tesla P40");

        let empty = Inventory::read(&root.path().join("nowhere"), Err(&"no driver".into()));
        assert_eq!((empty.gpus, empty.memory_mib), (Vec::new(), None));
    }
}
