//! Makes the files of a simulated host. On a real host the kernel, udev and an administrator make the same files.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::board::{Board, Card, GpuFacts};
use crate::state::{Pci, write};

/// Makes a host with this board in a directory that is empty or does not exist yet. `slices` replaces the number of slices of
/// every GPU. `programs` is the directory with this crate's programs and its library.
///
/// # Errors
/// The directory is not empty, or a file can't be written. The error names the directory or the file.
pub fn create(board: &Board, root: &Path, slices: Option<u32>, programs: &Path) -> Result<(), String> {
    let taken = fs::read_dir(root).is_ok_and(|mut entries| entries.next().is_some());
    if taken {
        return Err(format!("{} is not empty", root.display()));
    }
    let made = || {
        fs::create_dir_all(root)?;
        let root = root.canonicalize()?;
        bus(board, &root.join("sysroot"))?;
        memory(board, &root.join("sysroot/proc"))?;
        configuration(board, &root, slices)?;
        driver(board, &root)?;
        links(&root, programs)
    };
    made().map_err(|error| format!("{}: {error}", root.display()))
}

/// Returns shell commands that set the environment for programs of the host.
pub fn exports(root: &Path) -> String {
    let root = format!("'{}'", root.display().to_string().replace('\'', r"'\''"));
    format!(
        "export YUNION_MPS_SIM={root}\nexport PATH={root}/bin:\"$PATH\"\n\
         export LD_LIBRARY_PATH={root}/lib\"${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\"\n"
    )
}

fn bus(board: &Board, sysroot: &Path) -> io::Result<()> {
    let dev = sysroot.join("dev");
    let by_path = dev.join("dri/by-path");
    for directory in [&by_path, &sysroot.join("sys/bus/pci/devices"), &sysroot.join("sys/class/drm")] {
        fs::create_dir_all(directory)?;
    }
    let mut nvidia = 0;
    for (number, card) in board.cards.iter().enumerate() {
        let (render, node) = (format!("renderD{}", 128 + number), format!("card{number}"));
        let devices = device(card, sysroot, &[&render, &node])?;
        symlink(format!("../../../{devices}"), sysroot.join("sys/bus/pci/devices").join(&card.pci))?;
        for (name, role) in [(&render, "render"), (&node, "card")] {
            let class = sysroot.join("sys/class/drm").join(name);
            symlink(format!("../../{devices}/drm/{name}"), class)?;
            fs::write(dev.join("dri").join(name), "")?;
            symlink(format!("../{name}"), by_path.join(format!("pci-{}-{role}", card.pci)))?;
        }
        if card.gpu.is_some() {
            for_everybody(&dev.join(format!("nvidia{nvidia}")))?;
            nvidia += 1;
        }
    }
    for name in ["nvidiactl", "nvidia-uvm"] {
        for_everybody(&dev.join(name))?;
    }
    let shm = dev.join("shm");
    fs::create_dir(&shm)?;
    fs::set_permissions(&shm, fs::Permissions::from_mode(0o1777))?;
    let hwdata = sysroot.join("usr/share/hwdata");
    fs::create_dir_all(&hwdata)?;
    fs::write(hwdata.join("pci.ids"), pci_ids(board))
}

fn memory(board: &Board, proc: &Path) -> io::Result<()> {
    let Some(kib) = board.host_memory_kib else { return Ok(()) };
    fs::create_dir_all(proc)?;
    fs::write(proc.join("meminfo"), format!("MemTotal:       {kib} kB\n"))
}

/// Makes a file in the place of a device node of NVIDIA's driver. Every user may open the file, like the device node.
fn for_everybody(path: &Path) -> io::Result<()> {
    fs::write(path, "")?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))
}

/// Makes the directory of a device below /sys, as the kernel does. Returns its path below /sys.
fn device(card: &Card, sysroot: &Path, nodes: &[&str]) -> io::Result<String> {
    let (bus, _) = card.pci.rsplit_once(':').unwrap_or_default();
    let path = format!("devices/pci{bus}/{}", card.pci);
    let directory = sysroot.join("sys").join(&path);
    let (vendor, model) = card.id.split_once(':').unwrap_or_default();
    let (rate, _) = link_speed(card.link_gen);
    for (name, text) in [
        ("vendor", format!("0x{vendor}")),
        ("device", format!("0x{model}")),
        ("class", "0x030200".to_owned()),
        ("numa_node", card.numa_node.to_string()),
        ("max_link_speed", format!("{rate} GT/s PCIe")),
        ("max_link_width", card.link_width.to_string()),
        ("current_link_speed", format!("{rate} GT/s PCIe")),
        ("current_link_width", card.link_width.to_string()),
    ] {
        fs::create_dir_all(&directory)?;
        fs::write(directory.join(name), format!("{text}\n"))?;
    }
    if let Some(cpus) = &card.local_cpus {
        fs::write(directory.join("local_cpulist"), format!("{cpus}\n"))?;
    }
    fs::write(directory.join("config"), config_space(card))?;
    for node in nodes {
        let drm = directory.join("drm").join(node);
        fs::create_dir_all(&drm)?;
        symlink(format!("../../../{}", card.pci), drm.join("device"))?;
    }
    Ok(path)
}

/// The speed of a PCI Express link in GT/s, as sysfs writes it, and its code in the Link Capabilities register.
fn link_speed(generation: u32) -> (&'static str, u32) {
    match generation {
        1 => ("2.5", 1),
        2 => ("5.0", 2),
        3 => ("8.0", 3),
        4 => ("16.0", 4),
        5 => ("32.0", 5),
        _ => ("64.0", 6),
    }
}

/// Returns the first 256 bytes of a card's PCI configuration space. The list of capabilities has first a power management
/// capability, and then the PCI Express capability with the link's speed and width.
fn config_space(card: &Card) -> Vec<u8> {
    const POWER: u8 = 0x60;
    const EXPRESS: u8 = 0x78;
    let (vendor, model) = card.id.split_once(':').unwrap_or_default();
    let hex = |text: &str| u16::from_str_radix(text, 16).unwrap_or_default().to_le_bytes();
    let (_, speed) = link_speed(card.link_gen);
    let link_capabilities = (speed | card.link_width << 4).to_le_bytes();
    let mut space = vec![0; 256];
    let mut put = |at: u8, bytes: &[u8]| {
        for (place, byte) in space.iter_mut().skip(at.into()).zip(bytes) {
            *place = *byte;
        }
    };
    put(0x00, &hex(vendor));
    put(0x02, &hex(model));
    // Bit 0x10 of the PCI status register says that the device has a list of capabilities.
    put(0x06, &[0x10, 0x00]);
    // The PCI class 0302 means a 3D controller.
    put(0x09, &[0x00, 0x02, 0x03]);
    put(0x34, &[POWER]);
    put(POWER, &[0x01, EXPRESS]);
    // The PCI Express capability has version 2, belongs to a legacy endpoint, and is the last capability in the list.
    put(EXPRESS, &[0x10, 0x00, 0x12, 0x00]);
    put(EXPRESS + 0x0c, &link_capabilities);
    space
}

fn pci_ids(board: &Board) -> String {
    let mut text = "# The lines of pci.ids that this host needs.\n".to_owned();
    let mut vendors: Vec<(&str, &str)> = Vec::new();
    for card in &board.cards {
        let vendor = (card.id.split(':').next().unwrap_or_default(), card.vendor_name.as_str());
        if !vendors.contains(&vendor) {
            vendors.push(vendor);
        }
    }
    vendors.sort_unstable();
    for (vendor, name) in vendors {
        text += &format!("{vendor}  {name}\n");
        let mut devices: Vec<(&str, &str)> = board
            .cards
            .iter()
            .filter_map(|card| {
                Some((card.id.strip_prefix(vendor)?.strip_prefix(':')?, card.device_name.as_str()))
            })
            .collect();
        devices.sort_unstable();
        devices.dedup();
        for (device, name) in devices {
            text += &format!("\t{device}  {name}\n");
        }
    }
    text + "C 03  Display controller\n\t02  3D controller\n"
}

fn configuration(board: &Board, root: &Path, slices: Option<u32>) -> io::Result<()> {
    let yunion = root.join("sysroot/etc/yunion");
    fs::create_dir_all(&yunion)?;
    let file = "host_container_device.yml";
    let host_conf = format!(
        "access_address: 192.168.100.10\nallow_switch_vms: true\nbridge_driver: openvswitch\n\
         container_device_config_file: /etc/yunion/{file}\ncuda_mps_log_directory: {root}/mps/log\n\
         cuda_mps_pipe_directory: {root}/mps/pipe\nenable_cuda_mps: true\nhost_type: container\n\
         local_image_path:\n- /opt/cloud/workspace/disks\nlog_level: info\nmanage_ntp_configuration: false\n\
         networks:\n- eth0/br0/192.168.100.10\nregion: region0\nservers_path: /opt/cloud/workspace/servers\n\
         zone: zone0\n",
        root = root.display(),
    );
    fs::write(yunion.join("host.conf"), host_conf)?;
    let mut devices = "devices:\n".to_owned();
    for (number, card) in board.cards.iter().enumerate() {
        let number_of_slices = match slices {
            Some(slices) if card.gpu.is_some() => slices,
            _ => card.entry.virtual_number,
        };
        devices += &format!(
            "- path: \"/dev/dri/renderD{}\"\n  type: \"{}\"\n  virtual_number: {number_of_slices}\n",
            128 + number,
            card.entry.kind
        );
        if let Some(memory) = &card.entry.memory {
            devices += &format!("  memory: {memory}\n");
        }
    }
    for entry in &board.entries {
        devices += &format!("- type: \"{}\"\n  virtual_number: {}\n", entry.kind, entry.virtual_number);
    }
    fs::write(yunion.join(file), devices)
}

fn driver(board: &Board, root: &Path) -> io::Result<()> {
    write(&root.join("driver"), &board.driver)?;
    fs::create_dir_all(root.join("mps/fault"))?;
    write(&root.join("mps/version"), &board.mps.to_string())?;
    let gpus = board.cards.iter().filter_map(|card| Some((card, card.gpu.as_ref()?)));
    for (index, (card, facts)) in gpus.enumerate() {
        let directory = root.join("gpus").join(index.to_string());
        let processes = directory.join("processes");
        fs::create_dir_all(&processes)?;
        fs::create_dir_all(directory.join("error"))?;
        // CUDA programs of all users write files into a GPU's directory `processes`.
        fs::set_permissions(&processes, fs::Permissions::from_mode(0o1777))?;
        for (name, text) in values(index, card, facts, board) {
            write(&directory.join(name), &text)?;
        }
    }
    Ok(())
}

fn values(index: usize, card: &Card, facts: &GpuFacts, board: &Board) -> Vec<(&'static str, String)> {
    let mut values = vec![
        ("uuid", facts.uuid.clone()),
        ("name", facts.name.clone()),
        ("pci", Pci::parse(&card.pci).unwrap_or_default().nvml()),
        ("id", card.id.clone()),
        ("minor", index.to_string()),
        ("compute_mode", "Default".to_owned()),
        ("memory_total_mib", facts.memory_total_mib.map_or_else(|| "N/A".to_owned(), |mib| mib.to_string())),
        ("memory_reserved_kib", facts.memory_reserved_kib.to_string()),
        ("compute_capability", facts.compute_capability.clone()),
        ("sms", facts.sms.to_string()),
        ("link_gen", card.link_gen.to_string()),
        ("link_width", card.link_width.to_string()),
        ("persistence_mode", "Enabled".to_owned()),
    ];
    values.extend(board.host_memory_kib.map(|kib| ("host_memory_mib", (kib / 1024).to_string())));
    values.extend(facts.mig.map(|on| ("mig", if on { "Enabled" } else { "Disabled" }.to_owned())));
    values
}

/// Makes links to the simulated programs and libraries, with the names that they have on a real host.
fn links(root: &Path, programs: &Path) -> io::Result<()> {
    let (bin, lib) = (root.join("bin"), root.join("lib"));
    fs::create_dir_all(&bin)?;
    fs::create_dir_all(&lib)?;
    for name in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-smi", "cuda-client"] {
        symlink(programs.join(name), bin.join(name))?;
    }
    // The simulated library has the functions of NVML and of CUDA, so two links point to it.
    ["libnvidia-ml.so.1", "libcuda.so.1"]
        .into_iter()
        .try_for_each(|name| symlink(library(programs), lib.join(name)))
}

/// Returns the path of the simulated library. `cargo build` writes the library to `deps/` and to the directory of the programs.
/// `cargo test` writes the library only to `deps/`, so the file in `deps/` is never the older one.
fn library(programs: &Path) -> PathBuf {
    let [deps, beside] = ["deps/libnvidia_ml.so", "libnvidia_ml.so"].map(|name| programs.join(name));
    if deps.exists() { deps } else { beside }
}

/// Replaces the NVML library of the simulated host with a copy that lacks a function, as if the driver was too old for the
/// function.
///
/// # Errors
/// The library has no function with this name, or a file can't be read or written.
pub fn without_function(root: &Path, function: &str) -> Result<(), String> {
    let library = root.join("lib/libnvidia-ml.so.1");
    let failed = |error: io::Error| format!("{}: {error}", library.display());
    let mut bytes = fs::read(&library).map_err(failed)?;
    // The dynamic linker looks a function up by the hash of its name, and then compares the name. With another text in the
    // place of the name, the linker does not find the function.
    let name = [b"\0", function.as_bytes(), b"\0"].concat();
    let places: Vec<usize> =
        bytes.windows(name.len()).enumerate().filter(|(_, text)| *text == name).map(|(at, _)| at).collect();
    if places.is_empty() {
        return Err(format!("{} has no function {function}", library.display()));
    }
    for at in places {
        if let Some(byte) = bytes.get_mut(at + 1) {
            *byte = b'-';
        }
    }
    fs::remove_file(&library).map_err(failed)?;
    fs::write(&library, bytes).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::board;

    #[test]
    fn the_config_space_has_the_link_in_its_express_capability() {
        let board = board::load("tesla-p40").unwrap();
        let space = config_space(&board.cards[0]);
        assert_eq!(space[..4], [0xde, 0x10, 0x38, 0x1b]);
        let mut at = usize::from(space[0x34]);
        while space[at] != 0x10 {
            at = usize::from(space[at + 1]);
        }
        let link = u32::from_le_bytes(space[at + 0xc..at + 0x10].try_into().unwrap());
        assert_eq!((link & 0xf, link >> 4 & 0x3f), (3, 16));
    }

    #[test]
    fn pci_ids_names_every_model_once() {
        let board = board::load("mixed").unwrap();
        assert_eq!(
            pci_ids(&board),
            "# The lines of pci.ids that this host needs.\n\
             1002  Advanced Micro Devices, Inc. [AMD/ATI]\n\
             \t73bf  Navi 21 [Radeon RX 6800/6800 XT / 6900 XT]\n\
             10de  NVIDIA Corporation\n\
             \t20b5  GA100 [A100 PCIe 80GB]\n\
             \t2335  GH100 [H200 SXM 141GB]\n\
             C 03  Display controller\n\t02  3D controller\n"
        );
    }

    #[test]
    fn the_sysroot_reads_as_a_real_one() {
        let root = tempfile::tempdir().unwrap();
        create(&board::load("mixed").unwrap(), root.path(), Some(2), Path::new("/nowhere")).unwrap();
        let sysroot = root.path().join("sysroot");
        let device = sysroot.join("sys/class/drm/renderD131/device").canonicalize().unwrap();
        assert_eq!(device.file_name().unwrap(), "0001:1a:00.0");
        let on_bus = sysroot.join("sys/bus/pci/devices/0001:1a:00.0");
        assert_eq!(on_bus.canonicalize().unwrap(), device);
        assert_eq!(fs::read_to_string(on_bus.join("max_link_speed")).unwrap(), "32.0 GT/s PCIe\n");
        let by_path = sysroot.join("dev/dri/by-path/pci-0001:1a:00.0-render");
        assert_eq!(fs::read_link(by_path).unwrap(), Path::new("../renderD131"));
        let file = fs::read_to_string(sysroot.join("etc/yunion/host_container_device.yml")).unwrap();
        let kinds: Vec<&str> =
            file.lines().filter_map(|line| line.trim().strip_prefix("virtual_number: ")).collect();
        assert_eq!(kinds, ["2", "2", "10", "2", "140"]);
        let error = create(&board::load("h200").unwrap(), root.path(), None, Path::new("/nowhere"));
        assert_eq!(error.unwrap_err(), format!("{} is not empty", root.path().display()));
    }
}
