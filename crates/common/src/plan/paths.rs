//! Finds the GPU for a path in an entry of the device file, or the reason why no GPU matches the path.

use std::path::Path;

use mps_core::terms::PciAddress;

use crate::config::{DeviceEntry, DevicePath};
use crate::host::gpu::{Gpu, NVIDIA, PciDevice};
use crate::host::inventory::Inventory;
use crate::host::nvml::facts::NvmlFacts;
use crate::problem::Problem;

pub(super) enum Miss {
    /// The path can never name a GPU.
    Wrong(Problem),
    /// Several GPUs match the path.
    Ambiguous(Problem),
    /// No GPU of this host matches the path. `certain` is false while a GPU that may match does not answer.
    Absent { problem: Problem, certain: bool },
    /// The service can't find the GPU of this path without a driver. The text says why the host has no usable driver.
    NotYet(Problem),
}

pub fn render_node<'a>(path: &DevicePath, inventory: &'a Inventory) -> Option<&'a Path> {
    find(path, inventory).ok()?.pci.render_node.as_deref()
}

pub(super) fn find<'a>(path: &DevicePath, inventory: &'a Inventory) -> Result<&'a Gpu, Miss> {
    let mut devices = devices(inventory);
    let device = match path {
        DevicePath::RenderNode(node) => devices
            .find(|device| device.render_node.as_ref() == Some(node))
            .ok_or_else(|| no_such_node(node, inventory))?,
        DevicePath::Pci(address) => devices
            .find(|device| device.address == *address)
            .ok_or_else(|| absent(inventory, format!("the PCI bus has no display device at {address}")))?,
        DevicePath::ShortPci(address) => {
            return match address.in_any_domain(devices.map(|device| device.address)) {
                Ok(address) => find(&DevicePath::Pci(address), inventory),
                Err(several) => Err(ambiguous(path, &several)),
            };
        }
        DevicePath::Uuid(uuid) => {
            return with_facts(path, inventory, |facts| facts.uuid.eq_ignore_ascii_case(uuid));
        }
        DevicePath::NvidiaMinor(minor) => {
            return with_facts(path, inventory, |facts| facts.minor == Some(*minor));
        }
        DevicePath::Other(text) => return Err(no_path(text, inventory)),
    };
    let gpu = inventory.gpus.iter().find(|gpu| gpu.pci.address == device.address);
    gpu.ok_or_else(|| not_nvidia(path.to_string(), device, inventory))
}

/// True if the path may name this GPU: the path has a kind of name that the host does not report for the GPU.
pub(super) fn can_be(path: &DevicePath, gpu: &Gpu) -> bool {
    match path {
        DevicePath::RenderNode(_) => gpu.pci.render_node.is_none(),
        DevicePath::NvidiaMinor(_) => gpu.nvml.as_ref().is_ok_and(|facts| facts.minor.is_none()),
        DevicePath::Pci(_) | DevicePath::ShortPci(_) | DevicePath::Uuid(_) | DevicePath::Other(_) => false,
    }
}

/// The display device that an entry of another type than `NVIDIA_MPS` names. None if no display device matches. Fails if it is
/// not known yet which device matches.
pub(super) fn claim(path: &DevicePath, inventory: &Inventory) -> Result<Option<PciAddress>, Problem> {
    if let DevicePath::Other(text) = path {
        return Ok(behind(text, inventory).map(|device| device.address));
    }
    match find(path, inventory) {
        Ok(gpu) => Ok(Some(gpu.pci.address)),
        Err(Miss::Wrong(_) | Miss::Absent { certain: true, .. }) => Ok(None),
        Err(Miss::Absent { problem, certain: false } | Miss::Ambiguous(problem) | Miss::NotYet(problem)) => {
            Err(problem)
        }
    }
}

/// The display device that an entry certainly names. None if no display device matches, or if it is not known yet which device
/// matches.
pub(super) fn claimed_by(entry: &DeviceEntry, inventory: &Inventory) -> Option<PciAddress> {
    claim(entry.path.as_ref()?, inventory).ok()?
}

pub(super) fn choices(inventory: &Inventory) -> String {
    let paths: Vec<_> = inventory
        .gpus
        .iter()
        .map(|gpu| match &gpu.pci.render_node {
            Some(node) => format!("{} ({})", node.display(), gpu.pci.address),
            None => gpu.pci.address.to_string(),
        })
        .collect();
    if paths.is_empty() {
        "this host has no NVIDIA GPU".to_owned()
    } else {
        format!("the NVIDIA GPUs of this host are {gpus}", gpus = paths.join(", "))
    }
}

fn devices(inventory: &Inventory) -> impl Iterator<Item = &PciDevice> {
    inventory.gpus.iter().map(|gpu| &gpu.pci).chain(&inventory.others)
}

/// Finds a GPU by a name that only NVML knows. A GPU that NVML can't read may be the GPU with this name.
fn with_facts<'a>(
    path: &DevicePath,
    inventory: &'a Inventory,
    is_it: impl Fn(&NvmlFacts) -> bool,
) -> Result<&'a Gpu, Miss> {
    if let Some(gpu) = inventory.gpus.iter().find(|gpu| gpu.nvml.as_ref().is_ok_and(&is_it)) {
        return Ok(gpu);
    }
    let mut ours = inventory.gpus.iter().filter(|gpu| gpu.pci.foreign_driver().is_none());
    let silent = ours.find_map(|gpu| Some((gpu.pci.address, gpu.nvml.as_ref().err()?)));
    match silent {
        Some((address, reason)) if inventory.driver.is_ok() => {
            let found = format!("{path} may be the GPU at {address}, which does not answer: {reason}");
            let problem = Problem::new(
                found,
                "look for NVRM lines in dmesg; the service serves the GPU when the GPU answers again",
            );
            Err(Miss::Absent { problem, certain: false })
        }
        _ => Err(absent(inventory, format!("this host has no GPU {path}"))),
    }
}

/// The [`Miss`] for a path that no GPU has. With a working driver, the host certainly has no such GPU. Without a driver, the
/// answer is not known yet.
fn absent(inventory: &Inventory, found: String) -> Miss {
    match &inventory.driver {
        Ok(_) => Miss::Absent { problem: Problem::new(found, choices(inventory)), certain: true },
        Err(reason) => Miss::NotYet(reason.clone()),
    }
}

fn no_such_node(node: &Path, inventory: &Inventory) -> Miss {
    let node = node.display();
    let nodeless =
        inventory.gpus.iter().find(|gpu| gpu.pci.render_node.is_none() && gpu.pci.foreign_driver().is_none());
    match nodeless {
        Some(gpu) if inventory.driver.is_ok() => {
            let found = format!(
                "{node} does not exist, and GPU {address} has no render node yet",
                address = gpu.pci.address
            );
            let problem = Problem::new(found, "load nvidia-drm (modprobe nvidia-drm)");
            Miss::Absent { problem, certain: false }
        }
        _ => absent(inventory, format!("{node} does not exist")),
    }
}

fn ambiguous(path: &DevicePath, several: &[PciAddress]) -> Miss {
    let several: Vec<String> = several.iter().map(ToString::to_string).collect();
    let found = format!("{path} may be GPU {gpus}", gpus = several.join(" or "));
    Miss::Ambiguous(Problem::new(found, "write the PCI address with its domain"))
}

fn not_nvidia(path: String, device: &PciDevice, inventory: &Inventory) -> Miss {
    let maker = match device.vendor {
        0x1002 => " (AMD)",
        0x1a03 => " (ASPEED)",
        0x19e5 => " (Huawei)",
        0x8086 => " (Intel)",
        _ => "",
    };
    let at = device.address.to_string();
    let which = if path == at { path } else { format!("{path} ({at})") };
    let found = format!("{which} is made by PCI vendor {:04x}{maker}, not by NVIDIA", device.vendor);
    Miss::Wrong(Problem::new(found, choices(inventory)))
}

fn no_path(text: &str, inventory: &Inventory) -> Miss {
    let quoted = format!("{text:?}");
    let kind = if is_card_node(text) {
        "a card node"
    } else if by_path_address(text).is_some() {
        "a link to a device node"
    } else {
        return Miss::Wrong(Problem::new(format!("{quoted} is not the path of a GPU"), choices(inventory)));
    };
    let (found, remedy) = match behind(text, inventory) {
        None => (format!("{quoted} is {kind}"), choices(inventory)),
        Some(device) if device.vendor != NVIDIA => return not_nvidia(quoted, device, inventory),
        Some(PciDevice { address, render_node, .. }) => {
            let remedy = match render_node {
                Some(node) => format!("write the GPU's render node, {node}", node = node.display()),
                None => {
                    "write the GPU's render node, /dev/dri/renderDN, once nvidia-drm is loaded".to_owned()
                }
            };
            (format!("{quoted} is {kind} of {address}"), remedy)
        }
    };
    Miss::Wrong(Problem { found, remedy })
}

/// The display device behind a card node or a link. An entry can't name a GPU by a card node or a link, but the error message
/// can say which path to write.
fn behind<'a>(text: &str, inventory: &'a Inventory) -> Option<&'a PciDevice> {
    let address = by_path_address(text);
    devices(inventory).find(|device| {
        Some(device.address) == address || device.card_node.as_deref() == Some(Path::new(text))
    })
}

fn is_card_node(text: &str) -> bool {
    let number = text.strip_prefix("/dev/dri/card");
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The PCI address in a path such as `/dev/dri/by-path/pci-0000:00:06.0-render`.
fn by_path_address(text: &str) -> Option<PciAddress> {
    let (address, _) = text.strip_prefix("/dev/dri/by-path/pci-")?.split_once('-')?;
    address.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::plan as plan_after;
    use crate::plan::tests::{
        and_other, device, gpu, h200s, host, missing, no_entries, node, not_yet, other, pci, plan, problems,
        short, with, without_driver,
    };
    use crate::plan::{Plan, PlanError};

    #[test]
    fn every_spelling_finds_the_gpu() {
        let inventory = h200s();
        let spellings =
            [node(129), pci("1B:00.0"), DevicePath::Uuid("gpu-1".to_owned()), DevicePath::NvidiaMinor(1)];
        for path in spellings {
            let plan = plan(&with(vec![(path.clone(), 4)]), &inventory).unwrap();
            assert_eq!(plan.gpus[0].gpu, inventory.gpus[1], "{path:?}");
        }
    }

    #[test]
    fn wrong_paths_are_problems_that_name_the_right_one() {
        let mut inventory = h200s();
        inventory.gpus.truncate(2);
        inventory.others.push(device("03:00.0", 0x1002, 132));
        inventory.others.push(device("04:00.0", 0xabcd, 133));
        let all = "the NVIDIA GPUs of this host are /dev/dri/renderD128 (0000:1a:00.0), \
                   /dev/dri/renderD129 (0000:1b:00.0)";
        let amd = "is made by PCI vendor 1002 (AMD), not by NVIDIA";
        let golden = [
            (node(132), format!("/dev/dri/renderD132 (0000:03:00.0) {amd}"), all),
            (pci("03:00.0"), format!("0000:03:00.0 {amd}"), all),
            (pci("04:00.0"), "0000:04:00.0 is made by PCI vendor abcd, not by NVIDIA".to_owned(), all),
            (other("/dev/dri/card4"), format!("\"/dev/dri/card4\" (0000:03:00.0) {amd}"), all),
            (
                other("/dev/dri/card1"),
                "\"/dev/dri/card1\" is a card node of 0000:1b:00.0".to_owned(),
                "write the GPU's render node, /dev/dri/renderD129",
            ),
            (other("/dev/dri/card77"), "\"/dev/dri/card77\" is a card node".to_owned(), all),
            (
                other("/dev/dri/by-path/pci-0000:1b:00.0-render"),
                "\"/dev/dri/by-path/pci-0000:1b:00.0-render\" is a link to a device node of 0000:1b:00.0"
                    .to_owned(),
                "write the GPU's render node, /dev/dri/renderD129",
            ),
            (other("/dev/null"), "\"/dev/null\" is not the path of a GPU".to_owned(), all),
            (other("a\nb"), "\"a\\nb\" is not the path of a GPU".to_owned(), all),
        ];
        for (path, found, remedy) in golden {
            let expected = format!("devices.yml:2: devices[0].path: {found}; {remedy}");
            assert_eq!(problems(&with(vec![(path, 4)]), &inventory), [expected]);
        }
    }

    /// Cloudpods itself writes a GPU's address without the domain.
    #[test]
    fn an_address_without_a_domain_finds_the_only_gpu_in_any_domain() {
        let one = gpu("0001:1a:00.0", 128, "GPU-1", 122_880, (9, 0));
        let settings = with(vec![(short("1a:00.0"), 4)]);
        let alone = host(vec![one.clone()]);
        let served =
            |plan: &Plan| plan.gpus.iter().map(|gpu| gpu.gpu.pci.address.to_string()).collect::<Vec<_>>();
        let before = plan(&settings, &alone).unwrap();
        assert_eq!(served(&before), ["0001:1a:00.0"]);
        assert_eq!(missing(&with(vec![(pci("1a:00.0"), 4)]), &alone).len(), 1);
        // An address without a domain means the GPU in domain 0000, if there is such a GPU.
        let both = host(vec![gpu("0000:1a:00.0", 129, "GPU-0", 122_880, (9, 0)), one.clone()]);
        assert_eq!(served(&plan(&settings, &both).unwrap()), ["0000:1a:00.0"]);
        let several = host(vec![one, gpu("0002:1a:00.0", 129, "GPU-2", 122_880, (9, 0))]);
        assert_eq!(
            problems(&settings, &several),
            ["devices.yml:2: devices[0].path: 1a:00.0 may be GPU 0001:1a:00.0 or 0002:1a:00.0; write the \
              PCI address with its domain"]
        );
        // The entry of another type may name either GPU, so no GPU is served.
        let claimed = and_other(no_entries(), Some(short("1a:00.0")));
        assert!(not_yet(&claimed, &several).contains("1a:00.0 may be"));
        assert_eq!(served(&plan(&claimed, &both).unwrap()), ["0001:1a:00.0"]);
        // If the GPU with this address is removed, a GPU in another domain does not replace it.
        let other = host(vec![gpu("0002:1a:00.0", 129, "GPU-2", 122_880, (9, 0))]);
        let after = plan_after(&settings, &other, &before.gpus).unwrap();
        assert_eq!(served(&after), ["0001:1a:00.0"]);
        assert!(!after.gpus[0].obstacles.is_empty() && after.control_daemons.is_empty());
        let after = plan_after(&settings, &several, &before.gpus).unwrap();
        assert_eq!((served(&after), after.gpus[0].unusable()), (vec!["0001:1a:00.0".to_owned()], None));
    }

    #[test]
    fn without_a_driver_the_facts_from_the_bus_are_checked() {
        let mut inventory = without_driver(h200s());
        inventory.others.push(device("03:00.0", 0x1002, 132));
        for path in [node(128), pci("1a:00.0"), pci("00:06.0"), DevicePath::Uuid("GPU-0".to_owned())] {
            assert_eq!(not_yet(&with(vec![(path, 4)]), &inventory), "no driver");
        }
        assert_eq!(not_yet(&no_entries(), &inventory), "no driver");
        for path in [node(132), other("/dev/dri/card1"), other("/dev/null")] {
            let settings = with(vec![(node(128), 4), (path, 4)]);
            assert_eq!(problems(&settings, &inventory).len(), 1);
        }
        let twice = with(vec![(node(128), 4), (node(128), 4)]);
        assert!(problems(&twice, &inventory)[0].contains("already has an entry"));
    }

    #[test]
    fn an_entry_waits_for_a_gpu_that_can_not_be_asked() {
        let mut inventory = h200s();
        inventory.gpus[2].nvml = Err("GPU is lost".into());
        let alone = |path: DevicePath, inventory: &Inventory| {
            let [(certain, reason)] =
                <[(bool, String); 1]>::try_from(missing(&with(vec![(path, 4)]), inventory)).unwrap();
            (certain, reason)
        };
        for path in [DevicePath::Uuid("GPU-2".to_owned()), DevicePath::NvidiaMinor(2)] {
            let (certain, reason) = alone(path.clone(), &inventory);
            assert!(
                !certain && reason.contains("0000:1c:00.0") && reason.contains("GPU is lost"),
                "{reason}"
            );
            let both = plan(&with(vec![(node(128), 4), (path, 4)]), &inventory).unwrap();
            assert_eq!((both.gpus.len(), both.missing.len(), both.control_daemons.len()), (1, 1, 1));
        }
        inventory.gpus[2].pci.render_node = None;
        let (certain, reason) = alone(node(130), &inventory);
        assert!(!certain && reason.contains("modprobe nvidia-drm"), "{reason}");
        // A GPU that is passed through to a virtual machine has no render node on the host.
        inventory.gpus[2].pci.driver = Some("vfio-pci".to_owned());
        assert!(alone(node(130), &inventory).0);
    }

    proptest! {
        #[test]
        fn any_other_text_is_a_problem(text: String, slices in 1u32..) {
            for text in [text.clone(), format!("/dev/dri/card{text}"), format!("/dev/dri/by-path/pci-{text}")] {
                let settings = with(vec![(other(&text), slices)]);
                prop_assert!(matches!(plan(&settings, &h200s()), Err(PlanError::Problems(_))));
            }
        }
    }
}
