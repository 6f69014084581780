//! The GPUs of this host, as plain data.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// A PCI address: numbers, never text, so that `1A` and `1a` are one and `0000:` and nothing too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// The domain; above 0xffff behind some host bridges.
    pub domain: u32,
    /// The bus.
    pub bus: u8,
    /// The device, 0 to 31.
    pub device: u8,
    /// The function, 0 to 7.
    pub function: u8,
}

impl PciAddress {
    /// The platform's name: the domain left out when it is 0000, lower case. Never contains `-`.
    pub fn short(&self) -> String {
        if self.domain == 0 {
            format!("{:02x}:{:02x}.{:x}", self.bus, self.device, self.function)
        } else {
            self.to_string()
        }
    }
}

impl fmt::Display for PciAddress {
    /// The full form, `0000:00:06.0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

/// Text that is no PCI address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a PCI address like 0000:00:06.0 or 00:06.0")]
pub struct BadPciAddress;

impl FromStr for PciAddress {
    type Err = BadPciAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let hex = |part: &str, widths: std::ops::RangeInclusive<usize>| {
            let plain = widths.contains(&part.len()) && part.bytes().all(|b| b.is_ascii_hexdigit());
            if plain { u32::from_str_radix(part, 16).map_err(|_| BadPciAddress) } else { Err(BadPciAddress) }
        };
        let (slot, function) = text.rsplit_once('.').ok_or(BadPciAddress)?;
        let (bus, device) = slot.rsplit_once(':').ok_or(BadPciAddress)?;
        let (domain, bus) = match bus.rsplit_once(':') {
            Some((domain, bus)) => (hex(domain, 4..=8)?, bus),
            None => (0, bus),
        };
        let address = Self {
            domain,
            bus: u8::try_from(hex(bus, 2..=2)?).map_err(|_| BadPciAddress)?,
            device: u8::try_from(hex(device, 2..=2)?).map_err(|_| BadPciAddress)?,
            function: u8::try_from(hex(function, 1..=1)?).map_err(|_| BadPciAddress)?,
        };
        if address.device > 0x1f || address.function > 7 { Err(BadPciAddress) } else { Ok(address) }
    }
}

/// What decides who may open a context on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any number of processes.
    Default,
    /// Deprecated by NVIDIA: one thread.
    ExclusiveThread,
    /// No process at all.
    Prohibited,
    /// One process, such as an MPS server.
    ExclusiveProcess,
}

impl fmt::Display for ComputeMode {
    /// As `nvidia-smi --query-gpu=compute_mode` prints it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "Default",
            Self::ExclusiveThread => "Exclusive_Thread",
            Self::Prohibited => "Prohibited",
            Self::ExclusiveProcess => "Exclusive_Process",
        })
    }
}

/// What the PCI Express link of a GPU can do (its capability, not its state of the moment).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PcieLink {
    /// `8GT/s`, as lspci writes it.
    pub rate: String,
    /// Lanes; 0 where unknown.
    pub width: u32,
}

impl PcieLink {
    /// The PCI Express version that goes with the rate, `3.0`; `unknown` for a rate that has none.
    pub fn version(&self) -> &'static str {
        self.generation().0
    }

    /// What the link carries each way, `15.76 GB/s`; negative for an unknown rate, as the platform has it.
    pub fn throughput(&self) -> String {
        format!("{:.2} GB/s", self.generation().1 * f64::from(self.width))
    }

    /// The version and the GB/s of one lane.
    fn generation(&self) -> (&'static str, f64) {
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

/// A display device that the PCI bus lists, whoever made it. Known without any driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciDevice {
    /// Its address.
    pub address: PciAddress,
    /// The vendor, 0x10de for NVIDIA.
    pub vendor: u16,
    /// The device.
    pub device: u16,
    /// `/dev/dri/renderDN`.
    pub render_node: Option<PathBuf>,
    /// `/dev/dri/cardN`.
    pub card_node: Option<PathBuf>,
    /// The NUMA node; -1 where there is none.
    pub numa_node: i32,
    /// The link's capability; None where the device shows none.
    pub link: Option<PcieLink>,
    /// The marketing name of pci.ids, the text in its square brackets: `Tesla P40`.
    pub pci_ids_name: Option<String>,
}

/// What NVML says of a GPU. Each value stands alone: one that failed doesn't hide the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmlFacts {
    /// The GPU's UUID, `GPU-` and 36 characters.
    pub uuid: String,
    /// NVML's name: `NVIDIA H200`.
    pub name: String,
    /// The index that nvidia-smi shows.
    pub index: u32,
    /// The N of `/dev/nvidiaN`.
    pub minor: Option<u32>,
    /// The memory in MiB, the part that is reserved included. None: `[N/A]`, as on GPUs with unified memory.
    pub memory_total_mib: Option<u64>,
    /// Major and minor.
    pub compute_capability: Option<(u32, u32)>,
    /// The compute mode at the time of the query.
    pub compute_mode: Option<ComputeMode>,
    /// Whether MIG is on.
    pub mig_enabled: bool,
    /// Processes with a context on it that are neither MPS servers nor clients of one: PID and command.
    pub foreign_processes: Vec<(u32, String)>,
}

/// One NVIDIA GPU: what the bus says and what the driver says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// The bus's view.
    pub pci: PciDevice,
    /// The driver's view, or why there is none, in words for an administrator (`GPU is lost ...`).
    pub nvml: Result<NvmlFacts, String>,
}

impl Gpu {
    /// The published model: the name in pci.ids first, NVML's otherwise (as the platform has it from lspci).
    pub fn model(&self) -> String {
        let nvml = self.nvml.as_ref().map(|facts| facts.name.as_str());
        match &self.pci.pci_ids_name {
            Some(name) => name.clone(),
            None => nvml.unwrap_or_default().to_owned(),
        }
    }

    /// `10de:1b38`.
    pub fn vendor_device_id(&self) -> String {
        format!("{:04x}:{:04x}", self.pci.vendor, self.pci.device)
    }
}

/// Everything known of this host's GPUs at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// The driver's version, `580.159.04`, or why NVML can't be used, in words for an administrator.
    pub driver: Result<String, String>,
    /// The NVIDIA GPUs in PCI order: those on the bus and those that NVML knows.
    pub gpus: Vec<Gpu>,
    /// Display devices of other makers, so that an entry naming one gets a true answer.
    pub others: Vec<PciDevice>,
}
