//! Reads the display devices in /sys, of any vendor, with or without a loaded driver.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use mps_core::terms::PciAddress;

use super::cpus::Cpus;
use super::gpu::{PciDevice, PcieLink};

const DISPLAY: u32 = 0x03;

/// All display devices on the PCI bus, in the order of addresses. A device that can't be read is skipped.
pub(super) fn scan(sysroot: &Path) -> Result<Vec<PciDevice>, String> {
    let bus = sysroot.join("sys/bus/pci/devices");
    let entries = fs::read_dir(&bus)
        .map_err(|error| format!("{bus}: the PCI devices can't be listed: {error}", bus = bus.display()))?;
    let mut devices: Vec<PciDevice> = entries
        .flatten()
        .filter_map(|entry| {
            let address = entry.file_name().to_str()?.parse().ok()?;
            display_device(&entry.path(), address)
        })
        .collect();
    devices.sort_by_key(|device| device.address);
    Ok(devices)
}

fn display_device(directory: &Path, address: PciAddress) -> Option<PciDevice> {
    if number(&directory.join("class"))? >> 16 != DISPLAY {
        return None;
    }
    let drm = directory.join("drm");
    Some(PciDevice {
        address,
        vendor: u16::try_from(number(&directory.join("vendor"))?).ok()?,
        device: u16::try_from(number(&directory.join("device"))?).ok()?,
        driver: driver(directory),
        render_node: node(&drm, "renderD"),
        card_node: node(&drm, "card"),
        numa_node: text(&directory.join("numa_node")).and_then(|text| text.parse().ok()),
        local_cpus: text(&directory.join("local_cpulist")).and_then(|list| Cpus::parse(&list)),
        link: link(directory),
        pci_ids_name: None,
    })
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn number(path: &Path) -> Option<u32> {
    u32::from_str_radix(text(path)?.strip_prefix("0x")?, 16).ok()
}

fn driver(directory: &Path) -> Option<String> {
    let target = fs::read_link(directory.join("driver")).ok()?;
    Some(target.file_name()?.to_str()?.to_owned())
}

/// The device node in /dev/dri with a name that begins with `prefix`. If several names do, the node with the lowest number.
fn node(drm: &Path, prefix: &str) -> Option<PathBuf> {
    let numbers = fs::read_dir(drm).ok()?.flatten().filter_map(|entry| {
        let name = entry.file_name();
        let digits = name.to_str()?.strip_prefix(prefix)?;
        if digits.bytes().all(|byte| byte.is_ascii_digit()) { digits.parse::<u32>().ok() } else { None }
    });
    numbers.min().map(|number| PathBuf::from(format!("/dev/dri/{prefix}{number}")))
}

/// The PCI Express link of a device as lspci prints it, from the device's registers. If the registers can't be read, the link
/// that the kernel reports.
fn link(directory: &Path) -> Option<PcieLink> {
    match link_in_config(&config(directory)) {
        Ok(link) => link,
        Err(CutShort) => {
            let rate = describe_rate(&text(&directory.join("max_link_speed"))?)?;
            let width = text(&directory.join("max_link_width")).and_then(|text| text.parse().ok());
            // The kernel reports 255 for an unknown width.
            Some(PcieLink { rate, width: width.filter(|lanes| *lanes != 255).unwrap_or(0) })
        }
    }
}

/// The first 256 bytes of the device's configuration space, which contain the PCI Express capability. The kernel gives users
/// other than root only 64 bytes.
fn config(directory: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Ok(file) = File::open(directory.join("config")) {
        // The bytes that were read before an error are valid.
        let _ = file.take(256).read_to_end(&mut bytes);
    }
    bytes
}

/// The registers of the device are incomplete, or the device does not answer and all bits are ones.
#[derive(Debug, PartialEq, Eq)]
struct CutShort;

/// Finds the Link Capabilities register in a device's configuration space, in the same way as lspci. None if the device has no
/// link.
fn link_in_config(config: &[u8]) -> Result<Option<PcieLink>, CutShort> {
    let byte = |at: usize| config.get(at).copied().ok_or(CutShort);
    let word = |at: usize| Ok(u16::from_le_bytes([byte(at)?, byte(at + 1)?]));
    if byte(0x0e)? & 0x7f != 0 {
        return Err(CutShort);
    }
    let has_capabilities = word(0x06)? & 0x10 != 0;
    if !has_capabilities {
        return Ok(None);
    }
    let mut seen = BTreeSet::new();
    let mut at = usize::from(byte(0x34)? & !3);
    while at != 0 {
        let id = byte(at)?;
        let next = usize::from(byte(at + 1)? & !3);
        if !seen.insert(at) || id == 0xff {
            return Ok(None);
        }
        if id == 0x10 {
            // Root complex integrated endpoints and event collectors have no link.
            let integrated = matches!(word(at + 2)? >> 4 & 0xf, 9 | 10);
            if integrated {
                return Ok(None);
            }
            let capabilities = word(at + 0x0c)?;
            let width = u32::from(capabilities >> 4 & 0x3f);
            let rate = RATES.get(usize::from(capabilities & 0xf)).filter(|rate| !rate.is_empty());
            return Ok(rate.map(|rate| PcieLink { rate: format!("{rate}GT/s"), width }));
        }
        at = next;
    }
    Ok(None)
}

/// The rates of links in GT/s. The index is the number in the Link Capabilities register.
const RATES: [&str; 9] = ["", "2.5", "5", "8", "16", "32", "64", "", "128"];

/// Changes the kernel's spelling `8.0 GT/s PCIe` (in older kernels `8 GT/s`) into lspci's `8GT/s`. None for `Unknown`.
fn describe_rate(words: &str) -> Option<String> {
    let (number, _) = words.split_once(" GT/s")?;
    number.parse::<f32>().ok().filter(|rate| rate.is_finite())?;
    Some(format!("{}GT/s", number.strip_suffix(".0").unwrap_or(number)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::symlink;

    /// The registers of a GPU: power management at 0x60, MSI at 0x68, PCI Express at 0x78.
    fn registers(port_type: u8, link_capabilities: u32) -> Vec<u8> {
        let mut bytes = vec![0; 256];
        bytes[0..4].copy_from_slice(&[0xde, 0x10, 0x38, 0x1b]);
        bytes[0x06] = 0x10;
        bytes[0x34] = 0x60;
        bytes[0x60..0x62].copy_from_slice(&[0x01, 0x68]);
        bytes[0x68..0x6a].copy_from_slice(&[0x05, 0x78]);
        bytes[0x78..0x7c].copy_from_slice(&[0x10, 0x00, 0x02 | port_type << 4, 0x00]);
        bytes[0x84..0x88].copy_from_slice(&link_capabilities.to_le_bytes());
        bytes
    }

    fn link(rate: &str, width: u32) -> PcieLink {
        PcieLink { rate: rate.to_owned(), width }
    }

    #[test]
    fn the_link_equals_lspcis() {
        // lspci prints `Port #0, Speed 8GT/s, Width x16, ASPM L0s L1` for this register.
        assert_eq!(link_in_config(&registers(0, 0x0045_7d03)), Ok(Some(link("8GT/s", 16))));
        let rates = ["2.5GT/s", "5GT/s", "8GT/s", "16GT/s", "32GT/s", "64GT/s"];
        for (speed, rate) in (1..).zip(rates) {
            assert_eq!(link_in_config(&registers(1, 0x40 | speed)), Ok(Some(link(rate, 4))));
        }
        assert_eq!(link_in_config(&registers(0, 0x0208)), Ok(Some(link("128GT/s", 32))));
        for unknown in [0, 7, 9, 15] {
            assert_eq!(link_in_config(&registers(0, 0x0100 | unknown)), Ok(None), "speed {unknown}");
        }
        for integrated in [9, 10] {
            assert_eq!(link_in_config(&registers(integrated, 0x0103)), Ok(None));
        }
    }

    #[test]
    fn damaged_registers_end_the_search() {
        let whole = registers(0, 0x0103);
        for length in [0, 1, 0x0e, 0x34, 64, 0x79, 0x84, 0x85] {
            assert_eq!(link_in_config(&whole[..length]), Err(CutShort), "{length} bytes");
        }
        assert_eq!(link_in_config(&[0xff; 256]), Err(CutShort));

        let mut without_list = whole.clone();
        without_list[0x06] = 0;
        assert_eq!(link_in_config(&without_list), Ok(None));
        let mut looped = whole.clone();
        looped[0x69] = 0x60;
        assert_eq!(link_in_config(&looped), Ok(None));
        let mut broken = whole.clone();
        broken[0x68] = 0xff;
        assert_eq!(link_in_config(&broken), Ok(None));
        let mut ended = whole;
        ended[0x69] = 0;
        assert_eq!(link_in_config(&ended), Ok(None));
    }

    #[test]
    fn the_kernels_rate_gets_lspcis_spelling() {
        assert_eq!(describe_rate("2.5 GT/s PCIe").as_deref(), Some("2.5GT/s"));
        assert_eq!(describe_rate("8.0 GT/s PCIe").as_deref(), Some("8GT/s"));
        assert_eq!(describe_rate("8 GT/s").as_deref(), Some("8GT/s"));
        assert_eq!(describe_rate("32.0 GT/s PCIe").as_deref(), Some("32GT/s"));
        for bad in ["Unknown", "Unknown speed", "", " GT/s", "inf GT/s", "nan GT/s"] {
            assert_eq!(describe_rate(bad), None, "{bad}");
        }
    }

    struct Host(tempfile::TempDir);

    impl Host {
        fn new() -> Self {
            let host = Self(tempfile::tempdir().unwrap());
            fs::create_dir_all(host.0.path().join("sys/bus/pci/devices")).unwrap();
            host
        }

        /// As in a real /sys, the bus directory has links to directories elsewhere.
        fn device(&self, address: &str, files: &[(&str, &[u8])]) -> PathBuf {
            let directory = self.0.path().join("sys/devices/pci0000:00").join(address);
            fs::create_dir_all(&directory).unwrap();
            let entry = self.0.path().join("sys/bus/pci/devices").join(address);
            symlink(Path::new("../../../devices/pci0000:00").join(address), entry).unwrap();
            for (name, bytes) in files {
                fs::write(directory.join(name), bytes).unwrap();
            }
            directory
        }

        fn scan(&self) -> Vec<PciDevice> {
            scan(self.0.path()).unwrap()
        }
    }

    const P40: [(&str, &[u8]); 3] =
        [("class", b"0x030200\n"), ("vendor", b"0x10de\n"), ("device", b"0x1b38\n")];

    #[test]
    fn a_whole_device_is_read() {
        let host = Host::new();
        let directory = host.device("0000:00:06.0", &P40);
        fs::write(directory.join("config"), registers(0, 0x0045_7d03)).unwrap();
        fs::write(directory.join("numa_node"), "1\n").unwrap();
        fs::write(directory.join("local_cpulist"), "32-63\n").unwrap();
        for name in ["card1", "card1-DP-1", "renderD129", "renderD128", "renderDx", "controlD64"] {
            fs::create_dir_all(directory.join("drm").join(name)).unwrap();
        }
        symlink("../../../bus/pci/drivers/nvidia", directory.join("driver")).unwrap();
        let expected = PciDevice {
            address: "0000:00:06.0".parse().unwrap(),
            vendor: 0x10de,
            device: 0x1b38,
            driver: Some("nvidia".to_owned()),
            render_node: Some(PathBuf::from("/dev/dri/renderD128")),
            card_node: Some(PathBuf::from("/dev/dri/card1")),
            numa_node: Some(1),
            local_cpus: Cpus::parse("32-63"),
            link: Some(link("8GT/s", 16)),
            pci_ids_name: None,
        };
        assert_eq!(host.scan(), [expected]);
    }

    #[test]
    fn damaged_directories_do_not_hide_the_others() {
        let host = Host::new();
        host.device("0001:1a:00.0", &P40);
        host.device("0000:00:06.0", &P40);
        host.device("0000:00:01.0", &[]);
        host.device("0000:00:02.0", &[("class", b"\xff\xfe"), ("vendor", b"0x10de"), ("device", b"0x1b38")]);
        host.device("0000:00:03.0", &[("class", b"0x030000"), ("vendor", b"0x10de")]);
        host.device("0000:00:04.0", &[("class", b"0x030000"), ("vendor", b"0x110de"), ("device", b"0x1")]);
        host.device("0000:00:05.0", &[("class", b"0x040300"), ("vendor", b"0x10de"), ("device", b"0x10f0")]);
        host.device("nonsense", &P40);
        let directory = host.device("0000:00:07.0", &P40);
        fs::create_dir(directory.join("config")).unwrap();
        fs::write(directory.join("numa_node"), "many").unwrap();
        fs::write(directory.join("local_cpulist"), "\n").unwrap();
        fs::write(directory.join("drm"), "no directory").unwrap();
        symlink("/nowhere", host.0.path().join("sys/bus/pci/devices/0000:00:08.0")).unwrap();

        let devices = host.scan();
        let addresses: Vec<_> = devices.iter().map(|device| device.address.to_string()).collect();
        assert_eq!(addresses, ["0000:00:06.0", "0000:00:07.0", "0001:1a:00.0"]);
        assert_eq!((devices[1].numa_node, devices[1].local_cpus), (None, None));
        assert_eq!((&devices[1].link, &devices[1].render_node, &devices[1].driver), (&None, &None, &None));
    }

    #[test]
    fn without_registers_the_kernels_link_is_used() {
        let host = Host::new();
        let directory = host.device("0000:00:06.0", &P40);
        let whole = registers(0, 0x0103);
        let set = |name: &str, bytes: &[u8]| fs::write(directory.join(name), bytes).unwrap();
        let seen = || host.scan().remove(0).link;

        set("config", &whole[..64]);
        assert_eq!(seen(), None);
        set("max_link_speed", b"16.0 GT/s PCIe\n");
        assert_eq!(seen(), Some(link("16GT/s", 0)));
        set("max_link_width", b"255\n");
        assert_eq!(seen(), Some(link("16GT/s", 0)));
        set("max_link_width", b"8\n");
        assert_eq!(seen(), Some(link("16GT/s", 8)));
        set("max_link_speed", b"Unknown\n");
        assert_eq!(seen(), None);
        set("max_link_speed", b"16.0 GT/s PCIe\n");
        set("config", &whole);
        assert_eq!(seen(), Some(link("8GT/s", 16)));
    }

    #[test]
    fn no_bus_is_an_error_that_names_the_place() {
        let root = tempfile::tempdir().unwrap();
        let error = scan(root.path()).unwrap_err();
        assert!(error.contains("sys/bus/pci/devices"), "{error}");
    }

    proptest! {
        #[test]
        fn no_registers_break_the_parser(mut config in prop::collection::vec(any::<u8>(), 0..=256), list: bool) {
            if list && config.len() > 0x0e {
                config[0x06] |= 0x10;
                config[0x0e] = 0;
            }
            if let Ok(Some(link)) = link_in_config(&config) {
                prop_assert!(link.width < 64);
                prop_assert_ne!(link.version(), "unknown");
            }
        }
    }
}
