//! Checks of NVIDIA's driver, its programs and its device nodes.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::facts::{CONTROL, Facts, variable};
use super::{Check, Outcome, Severity, each, edit_unit, error, finding, info, warning};
use common::host::driver::{NEWEST_TRIED, series};
use common::host::inotify;
use common::host::installation;
use common::host::program::{find_program, find_program_in};
use common::problem::Problem;

pub(super) const CHECKS: &[Check] = &[
    ("the driver", driver),
    ("the age of the driver", untried),
    ("the programs of MPS", programs),
    ("the PATH of the service", service_path),
    ("the version of the programs of MPS", version),
    ("the device nodes", nodes),
    ("the free instances and watches of inotify", inotify),
];

const PROGRAMS: [&str; 2] = [CONTROL, "nvidia-cuda-mps-server"];

/// The PATH that systemd gives a service if its unit sets no PATH.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

fn driver(facts: &Facts) -> Outcome {
    each(facts.inventory.driver.clone().err(), |problem| {
        let problem = problem.or_remedy("see nvidia-smi and dmesg");
        [finding(Severity::Error, "driver-unusable", "NVIDIA driver", problem)]
    })
}

/// Finds a driver that is newer than every driver with which the service was tried. The service then relies on NVIDIA's
/// documentation alone.
fn untried(facts: &Facts) -> Outcome {
    let version = facts.inventory.driver.as_ref().map_err(|_| "there is no driver")?;
    each((series(version) > NEWEST_TRIED).then_some(version), |version| {
        [info(
            "driver-untried",
            "NVIDIA driver",
            format!(
                "{version} is newer than every driver that this version of the service was tried with ({NEWEST_TRIED})"
            ),
            "see docs/bounds.md, Newer drivers, and try `yunion-mpsctl probe` on one GPU before tenants come",
        )]
    })
}

fn programs(facts: &Facts) -> Outcome {
    each(PROGRAMS, |name| {
        let missing = find_program(name).err()?;
        let problem = match installation::operators_program(&facts.sources.sysroot, name) {
            Some(elsewhere) => elsewhere.prefixed(missing.found),
            None => missing,
        };
        Some(finding(Severity::Error, "program-missing", name, problem))
    })
}

fn path_of_service(facts: &Facts) -> Result<String, Problem> {
    if let Some(pid) = facts.published().ok().and_then(|published| published.pid) {
        let path = variable(pid, "PATH")
            .map_err(|problem| problem.prefixed("the PATH of yunion-mps-daemon is not known"))?;
        return Ok(path.unwrap_or_default());
    }
    let unit = facts.unit.as_ref().map_err(Clone::clone)?;
    let environment = unit.get("Environment").and_then(Value::as_array);
    let set = environment.into_iter().flatten().filter_map(Value::as_str);
    let path = set.filter_map(|variable| variable.strip_prefix("PATH=")).next_back();
    Ok(path.unwrap_or(DEFAULT_PATH).to_owned())
}

fn service_path(facts: &Facts) -> Outcome {
    let path = path_of_service(facts)?;
    each(PROGRAMS, |name| {
        // Another check reports a program that is not in the PATH of `doctor` either.
        let found = find_program(name).ok()?;
        find_program_in(name, path.as_ref()).err()?;
        let directory = found.parent().unwrap_or(Path::new("/")).display();
        Some(error(
            "program-not-in-service-path",
            name,
            format!("the program is in {directory}, but the PATH of the service is {path}"),
            edit_unit(&format!("Environment=PATH={path}:{directory}")),
        ))
    })
}

/// Before driver 580, the control daemon's program can't print its CUDA version, so this check is not possible.
fn version(facts: &Facts) -> Outcome {
    let driver = facts.inventory.driver.as_ref().map_err(|_| "there is no driver to compare with")?;
    let program = facts.program_cuda.ok_or("the control daemon's program does not say its version")?;
    let cuda = facts.cuda.ok_or("the driver does not say its version of CUDA")?;
    if program == cuda {
        return Ok(Vec::new());
    }
    // The driver and the program write CUDA 12.8 as 12080.
    let words = |version: u32| format!("{}.{}", version / 1000, version % 1000 / 10);
    Ok(vec![warning(
        "version-skew",
        CONTROL,
        format!(
            "this program belongs to CUDA {program}, but driver {driver} to CUDA {cuda}",
            program = words(program),
            cuda = words(cuda)
        ),
        format!("install the MPS package of driver {driver}; after a driver upgrade, reboot"),
    )])
}

fn nodes(facts: &Facts) -> Outcome {
    facts.inventory.driver.as_ref().map_err(|_| "without a driver there are no device nodes")?;
    let mut wanted = vec![
        (PathBuf::from("/dev/nvidiactl"), "nvidia-modprobe -c 0".to_owned()),
        (PathBuf::from("/dev/nvidia-uvm"), "nvidia-modprobe -u -c 0".to_owned()),
    ];
    for (gpu, facts) in facts.known_gpus() {
        if let Some(minor) = facts.minor {
            wanted
                .push((PathBuf::from(format!("/dev/nvidia{minor}")), format!("nvidia-modprobe -c {minor}")));
        }
        if let Some(node) = &gpu.pci.render_node {
            wanted.push((node.clone(), "modprobe nvidia-drm, then run udevadm trigger".to_owned()));
        }
    }
    each(wanted, |(node, remedy)| {
        let Ok(metadata) = fs::metadata(facts.file(&node)) else {
            return Some(error(
                "device-node-missing",
                node.display(),
                "the device node does not exist",
                remedy,
            ));
        };
        // CUDA programs of every user must be able to open the driver's device nodes. CUDA opens no render node, and render
        // nodes belong to a group of their own. So the modes of render nodes are not checked.
        let open = node.starts_with("/dev/dri") || metadata.mode() & 0o006 == 0o006;
        if open {
            return None;
        }
        let kind = if metadata.file_type().is_char_device() { "" } else { " (and the file is no device)" };
        Some(warning(
            "device-node-permissions",
            node.display(),
            format!(
                "the mode is {:04o}{kind}, so CUDA programs of other users can't open this device node",
                metadata.mode() & 0o7777
            ),
            format!(
                "chmod 666 {node}; to keep this mode, write \
                 `options nvidia NVreg_DeviceFileMode=0666` in \
                 /etc/modprobe.d/nvidia.conf",
                node = node.display()
            ),
        ))
    })
}

/// The kernel counts the inotify instances and watches of each user. The service runs as root, so only the counts of root
/// matter.
fn inotify(facts: &Facts) -> Outcome {
    if !facts.own_processes() {
        return Err("this command does not see the processes of the host".into());
    }
    let shortage = inotify::none_left().filter(|_| rustix::process::geteuid().is_root());
    each(shortage, |Problem { found, remedy }| {
        let effect = "the service may check the logs of control daemons only once a second";
        [warning("inotify-exhausted", "inotify", format!("{found}: {effect}"), remedy)]
    })
}
