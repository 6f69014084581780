//! A GPU as plain data.

use std::path::PathBuf;

use mps_core::terms::{GpuId, PciAddress};

use super::cpus::Cpus;
use super::nvml::facts::NvmlFacts;
use crate::problem::Problem;

pub const NVIDIA: u16 = 0x10de;

/// The fastest PCI Express link that a GPU can have. The present link may be slower.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PcieLink {
    /// The rate of one lane in lspci's spelling, such as `8GT/s`.
    pub rate: String,
    /// The number of lanes. 0 if the number is not known.
    pub width: u32,
}

impl PcieLink {
    /// The PCI Express version with this rate, in Cloudpods's spelling, such as `3.0` or `unknown`.
    pub fn version(&self) -> &'static str {
        self.version_and_lane().0
    }

    /// The throughput of all lanes together, in Cloudpods's spelling, such as `15.76 GB/s`.
    pub fn throughput(&self) -> String {
        format!("{:.2} GB/s", self.version_and_lane().1 * f64::from(self.width))
    }

    /// The PCI Express version, and the throughput of one lane in GB/s. Cloudpods compares the published strings with its own.
    /// So the numbers are rounded as Cloudpods rounds them, and an unknown rate gives -1 as in Cloudpods.
    fn version_and_lane(&self) -> (&'static str, f64) {
        match self.rate.as_str() {
            "2.5GT/s" => ("1.0", 0.25),
            "5GT/s" | "5.0GT/s" => ("2.0", 0.5),
            "8GT/s" | "8.0GT/s" => ("3.0", 0.985),
            "16GT/s" | "16.0GT/s" => ("4.0", 1.969),
            "32GT/s" | "32.0GT/s" => ("5.0", 3.938),
            "64GT/s" | "64.0GT/s" => ("6.0", 7.563),
            "128GT/s" | "128.0GT/s" => ("7.0", 15.125),
            _ => ("unknown", -1.0),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PciDevice {
    pub address: PciAddress,
    pub vendor: u16,
    pub device: u16,
    /// The kernel driver that is bound to the device, such as `nvidia` or `vfio-pci`. None if no driver is bound, or if /sys
    /// does not name the driver.
    pub driver: Option<String>,
    pub render_node: Option<PathBuf>,
    pub card_node: Option<PathBuf>,
    pub numa_node: Option<i32>,
    pub local_cpus: Option<Cpus>,
    pub link: Option<PcieLink>,
    /// The marketing name from pci.ids: the text in square brackets, such as `Tesla P40`.
    pub pci_ids_name: Option<String>,
}

impl PciDevice {
    /// The kernel driver of the device, if it is not NVIDIA's. A GPU that is passed through to a virtual machine has
    /// `vfio-pci`.
    pub fn foreign_driver(&self) -> Option<&str> {
        self.driver.as_deref().filter(|driver| *driver != "nvidia")
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    pub pci: PciDevice,
    /// The facts from NVML, or the reason why NVML does not report any, in words for an administrator (`GPU is lost ...`).
    pub nvml: Result<NvmlFacts, Problem>,
}

impl Gpu {
    pub fn id(&self) -> GpuId {
        GpuId(self.pci.address)
    }

    pub fn facts(&self) -> Option<&NvmlFacts> {
        self.nvml.as_ref().ok()
    }

    pub fn uuid(&self) -> Option<&str> {
        self.facts().map(|facts| facts.uuid.as_str())
    }

    /// The model that the service publishes: the name from pci.ids, otherwise NVML's name. Cloudpods takes its GPU names
    /// from pci.ids too, by lspci, so both show the same name.
    pub fn model(&self) -> String {
        let nvml = self.facts().map(|facts| &facts.name);
        self.pci.pci_ids_name.as_ref().or(nvml).cloned().unwrap_or_default()
    }

    pub fn vendor_device_id(&self) -> String {
        format!("{:04x}:{:04x}", self.pci.vendor, self.pci.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_about_a_link_equal_the_platforms() {
        let golden = [
            ("2.5GT/s", "1.0", ["0.25", "0.50", "1.00", "2.00", "4.00"]),
            ("5GT/s", "2.0", ["0.50", "1.00", "2.00", "4.00", "8.00"]),
            ("5.0GT/s", "2.0", ["0.50", "1.00", "2.00", "4.00", "8.00"]),
            ("8GT/s", "3.0", ["0.98", "1.97", "3.94", "7.88", "15.76"]),
            ("8.0GT/s", "3.0", ["0.98", "1.97", "3.94", "7.88", "15.76"]),
            ("16GT/s", "4.0", ["1.97", "3.94", "7.88", "15.75", "31.50"]),
            ("16.0GT/s", "4.0", ["1.97", "3.94", "7.88", "15.75", "31.50"]),
            ("32GT/s", "5.0", ["3.94", "7.88", "15.75", "31.50", "63.01"]),
            ("32.0GT/s", "5.0", ["3.94", "7.88", "15.75", "31.50", "63.01"]),
            ("64GT/s", "6.0", ["7.56", "15.13", "30.25", "60.50", "121.01"]),
            ("64.0GT/s", "6.0", ["7.56", "15.13", "30.25", "60.50", "121.01"]),
            ("128GT/s", "7.0", ["15.12", "30.25", "60.50", "121.00", "242.00"]),
            ("128.0GT/s", "7.0", ["15.12", "30.25", "60.50", "121.00", "242.00"]),
            ("2.6GT/s", "unknown", ["-1.00", "-2.00", "-4.00", "-8.00", "-16.00"]),
        ];
        for (rate, version, throughputs) in golden {
            for (width, throughput) in [1, 2, 4, 8, 16].into_iter().zip(throughputs) {
                let link = PcieLink { rate: rate.to_owned(), width };
                assert_eq!(link.version(), version, "{rate}");
                assert_eq!(link.throughput(), format!("{throughput} GB/s"), "{rate} x{width}");
            }
        }
        let wide = [
            ("8GT/s", "11.82", "31.52"),
            ("16GT/s", "23.63", "63.01"),
            ("32GT/s", "47.26", "126.02"),
            ("64GT/s", "90.76", "242.02"),
            ("128GT/s", "181.50", "484.00"),
        ];
        for (rate, x12, x32) in wide {
            for (width, throughput) in [(12, x12), (32, x32)] {
                let link = PcieLink { rate: rate.to_owned(), width };
                assert_eq!(link.throughput(), format!("{throughput} GB/s"), "{rate} x{width}");
            }
        }
        assert_eq!(PcieLink { rate: "8GT/s".to_owned(), width: 0 }.throughput(), "0.00 GB/s");
    }
}
