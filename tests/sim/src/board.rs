//! The parts of a simulated host: the cards on its PCI bus and its driver.

use serde::Deserialize;

/// The hardware and the driver of a simulated host, as a file in `boards/` describes them.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Board {
    /// For example `580.159.04`.
    pub driver: String,
    /// The driver series of the MPS control daemon, such as 535 or 580.
    pub mps: u32,
    /// The memory of the host in KiB, as `/proc/meminfo` has it. A board needs this value only if a GPU shares the host's
    /// memory.
    pub host_memory_kib: Option<u64>,
    pub cards: Vec<Card>,
    /// Entries of the platform's device file, `host_container_device.yml`, for PCI addresses at which the board has no card.
    #[serde(default)]
    pub entries: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// For example `0000:00:06.0`.
    pub pci: String,
    /// The PCI ids of the vendor and the device, such as `10de:1b38`.
    pub id: String,
    /// The vendor's name in pci.ids.
    pub vendor_name: String,
    /// The device's name in pci.ids, such as `GP102GL [Tesla P40]`.
    pub device_name: String,
    /// -1 if the card has no NUMA node.
    pub numa_node: i32,
    /// The CPUs near the card, as the kernel lists them, such as `0-47,96-143`. `None` if /sys does not list them.
    pub local_cpus: Option<String>,
    /// The generation of the card's PCI Express link: 3 is 8 GT/s, 5 is 32 GT/s.
    pub link_gen: u32,
    pub link_width: u32,
    /// The card's entry in the platform's device file, without the key for the path of the card.
    pub entry: Entry,
    /// `None` if the card is not of NVIDIA.
    pub gpu: Option<GpuFacts>,
}

/// An entry of the platform's device file: its keys `type`, `virtual_number` and `memory`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The type of the virtual devices, such as `NVIDIA_MPS`.
    #[serde(rename = "type")]
    pub kind: String,
    pub virtual_number: u32,
    /// The memory of each virtual device, such as `20GiB`. `None` if the entry has no key `memory`.
    pub memory: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuFacts {
    /// `GPU-` and 36 characters.
    pub uuid: String,
    /// The name that NVML returns, such as `NVIDIA H200`.
    pub name: String,
    /// The total memory of the GPU in MiB, including the part that the driver reserves. `None` if the GPU shares the host's
    /// memory, since NVML then reports no total.
    pub memory_total_mib: Option<u64>,
    pub memory_reserved_kib: u64,
    /// For example `9.0`.
    pub compute_capability: String,
    /// The number of streaming multiprocessors.
    pub sms: u32,
    /// True if MIG mode is enabled. `None` if the GPU has no MIG mode.
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

/// Loads the board with this name, or from the file with this path. A name with a slash is a path.
///
/// # Errors
/// No known board has the name, or the file can't be read. The error lists the known boards.
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
