//! The parts of a simulated host: the cards on its PCI bus and its driver.

use serde::Deserialize;

/// The hardware and the driver of a simulated host, as a file in `boards/` describes them.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Board {
    /// The driver's version, `580.159.04`.
    pub driver: String,
    /// The version of the MPS control daemon: 535, 550, 555 or 580.
    pub mps: u32,
    /// The memory of the host in KiB, as /proc/meminfo has it. None if no GPU of the board shares the memory of the
    /// host, so that its size makes no difference.
    pub host_memory_kib: Option<u64>,
    /// The cards, in PCI order.
    pub cards: Vec<Card>,
    /// Entries of `host_container_device.yml`, the device file of the platform, for PCI addresses at which the board
    /// has no card.
    #[serde(default)]
    pub entries: Vec<Entry>,
}

/// One display device on the PCI bus.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// The card's full PCI address, `0000:00:06.0`.
    pub pci: String,
    /// The numbers of the card's vendor and device, such as `10de:1b38`.
    pub id: String,
    /// The vendor's name in pci.ids.
    pub vendor_name: String,
    /// The device's name in pci.ids, such as `GP102GL [Tesla P40]`.
    pub device_name: String,
    /// The card's NUMA node. -1 if the card has none.
    pub numa_node: i32,
    /// The CPUs near the card, as the kernel lists them: `0-47,96-143`. None if /sys does not list the CPUs.
    pub local_cpus: Option<String>,
    /// The PCI Express generation of the card's link: 3 is 8 GT/s, 5 is 32 GT/s.
    pub link_gen: u32,
    /// The number of lanes of the card's PCI Express link.
    pub link_width: u32,
    /// The card's entry in the platform's device file, without the key for the path of the card.
    pub entry: Entry,
    /// The facts that NVML reports about the card. None if the card is of another vendor.
    pub gpu: Option<GpuFacts>,
}

/// An entry of the platform's device file: its keys `type`, `virtual_number` and `memory`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The type of the virtual devices, such as `NVIDIA_MPS`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The number of virtual devices of the card.
    pub virtual_number: u32,
    /// The memory of each virtual device, such as `20GiB`. None if the entry has no key `memory`.
    pub memory: Option<String>,
}

/// The facts that the driver reports about an NVIDIA GPU.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuFacts {
    /// `GPU-` and 36 characters.
    pub uuid: String,
    /// NVML's name, `NVIDIA H200`.
    pub name: String,
    /// The total memory of the GPU in MiB, including the part that the driver reserves. None if NVML does not report a
    /// total, since the GPU shares the host's memory.
    pub memory_total_mib: Option<u64>,
    /// The part of the GPU's memory that the driver reserves, in KiB.
    pub memory_reserved_kib: u64,
    /// The GPU's compute capability, such as `9.0`.
    pub compute_capability: String,
    /// The number of the GPU's streaming multiprocessors.
    pub sms: u32,
    /// True if MIG mode is enabled. None if the GPU has no MIG mode.
    pub mig: Option<bool>,
}

const BOARDS: [(&str, &str); 6] = [
    ("tesla-p40", include_str!("../boards/tesla-p40.yaml")),
    ("h200", include_str!("../boards/h200.yaml")),
    ("h200x8", include_str!("../boards/h200x8.yaml")),
    ("mixed", include_str!("../boards/mixed.yaml")),
    ("gh200x4", include_str!("../boards/gh200x4.yaml")),
    ("gb10", include_str!("../boards/gb10.yaml")),
];

/// The board with this name, or the board in the file with this path, which has a slash.
///
/// # Errors
/// The board is unknown, and the error lists the known boards. An error is also returned if the file of the board can't
/// be read.
pub fn load(name: &str) -> Result<Board, String> {
    let text = if name.contains('/') {
        std::fs::read_to_string(name).map_err(|error| format!("{name}: {error}"))?
    } else if let Some((_, text)) = BOARDS.iter().find(|(known, _)| *known == name) {
        (*text).to_owned()
    } else {
        let known: Vec<&str> = BOARDS.iter().map(|(known, _)| *known).collect();
        return Err(format!("no board {name}; there are {}", known.join(", ")));
    };
    serde_yaml::from_str(&text).map_err(|error| format!("board {name}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_board_is_readable_and_its_cards_differ() {
        for (name, _) in BOARDS {
            let board = load(name).unwrap();
            let mut addresses: Vec<&str> = board.cards.iter().map(|card| card.pci.as_str()).collect();
            let sorted = addresses.clone();
            addresses.sort_unstable();
            addresses.dedup();
            assert_eq!(addresses, sorted, "{name}: cards in PCI order, none twice");
        }
    }

    #[test]
    fn a_board_is_read_from_a_file_too() {
        let own = concat!(env!("CARGO_MANIFEST_DIR"), "/boards/h200x8.yaml");
        assert_eq!(load(own).unwrap().cards.len(), 8);
        assert!(load("/nowhere.yaml").unwrap_err().starts_with("/nowhere.yaml: "));
    }

    #[test]
    fn an_unknown_board_is_answered_with_the_known_ones() {
        assert_eq!(
            load("p4").unwrap_err(),
            "no board p4; there are tesla-p40, h200, h200x8, mixed, gh200x4, gb10"
        );
    }
}
