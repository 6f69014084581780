//! NVIDIA's driver, its programs and its device nodes.

// All checks have one type, with a Result for the checks that may lack a fact.
#![allow(clippy::unnecessary_wraps)]

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::facts::{Facts, program, variable};
use super::{Check, Finding, Outcome, edit_unit, error, warning};

pub(super) const CHECKS: &[Check] = &[
    ("the driver", driver),
    ("the programs of MPS", programs),
    ("the PATH of the service", service_path),
    ("the version of the programs", versions),
    ("the device nodes", nodes),
];

const PROGRAMS: [&str; 2] = ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"];

/// The PATH that systemd gives a service that sets none.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A server has some 100 KiB. A much larger program is no server of NVIDIA's, and not searched.
const LARGEST_SERVER: u64 = 16 << 20;

fn driver(facts: &Facts) -> Outcome {
    let Err(reason) = &facts.inventory.driver else { return Ok(Vec::new()) };
    let remedy = reason.remedy_or("nvidia-smi and dmesg say more");
    Ok(vec![error("driver-unusable", "NVIDIA driver", &reason.found, remedy)])
}

fn programs(_: &Facts) -> Outcome {
    let missing = |name: &&str| {
        let reason = program(name, None).err()?;
        Some(error("program-missing", name, reason.found, reason.remedy))
    };
    Ok(PROGRAMS.iter().filter_map(missing).collect())
}

/// The PATH of the service that runs, or else the PATH that its unit would give it.
fn path_of_service(facts: &Facts) -> Result<String, String> {
    if let Some(pid) = facts.published().ok().and_then(|published| published.pid) {
        return Ok(variable(pid, "PATH")?.unwrap_or_default());
    }
    let unit = facts.unit.as_ref().map_err(Clone::clone)?;
    let environment = unit.get("Environment").and_then(Value::as_array);
    let set = environment.into_iter().flatten().filter_map(Value::as_str);
    let path = set.filter_map(|variable| variable.strip_prefix("PATH=")).next_back();
    Ok(path.unwrap_or(DEFAULT_PATH).to_owned())
}

fn service_path(facts: &Facts) -> Outcome {
    let path = path_of_service(facts)?;
    let hidden = |name: &&str| -> Option<Finding> {
        // A program that is missing everywhere has a finding already.
        let found = program(name, None).ok()?;
        program(name, Some(&path)).err()?;
        let directory = found.parent().unwrap_or(Path::new("/")).display();
        Some(error(
            "program-not-in-service-path",
            name,
            format!("it is in {directory}, and the service looks in {path}"),
            edit_unit(&format!("Environment=PATH={path}:{directory}")),
        ))
    };
    Ok(PROGRAMS.iter().filter_map(hidden).collect())
}

/// A server may contain the version of the driver that it was built with. The program of a newer control daemon prints the
/// version of CUDA.
fn versions(facts: &Facts) -> Outcome {
    let driver = facts.inventory.driver.as_ref().map_err(|_| "there is no driver to compare with")?;
    let server = program("nvidia-cuda-mps-server", None).map_err(|_| "there is no program to compare")?;
    let embedded = embedded_version(&server);
    let (subject, found) = match (&embedded, facts.program_cuda, facts.cuda) {
        (Some(version), _, _) if version != driver => {
            (server.display().to_string(), format!("it is of version {version}, and the driver is {driver}"))
        }
        (None, Some(program), Some(cuda)) if program != cuda => (
            "nvidia-cuda-mps-control".to_owned(),
            format!(
                "it is of CUDA {}, and the driver {driver} of CUDA {}",
                cuda_in_words(program),
                cuda_in_words(cuda)
            ),
        ),
        (Some(_), _, _) | (None, Some(_), Some(_)) => return Ok(Vec::new()),
        _ => return Err("neither MPS program says its version".to_owned()),
    };
    let remedy = format!("install the MPS package of {driver}; after a driver upgrade, reboot");
    Ok(vec![warning("version-skew", subject, found, remedy)])
}

/// 12080 is 12.8.
fn cuda_in_words(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn embedded_version(server: &Path) -> Option<String> {
    let size = fs::metadata(server).ok()?.len();
    if size > LARGEST_SERVER {
        return None;
    }
    version_in(&fs::read(server).ok()?)
}

/// A text that is a version and nothing else: `535.261.03`.
fn version_in(program: &[u8]) -> Option<String> {
    program.split(|byte| *byte == 0).filter_map(|text| std::str::from_utf8(text).ok()).find_map(|text| {
        let parts: Vec<&str> = text.split('.').collect();
        let digits = |part: &&str| part.bytes().all(|byte| byte.is_ascii_digit());
        let shaped = match parts.as_slice() {
            [branch, minor] => branch.len() == 3 && (2..=3).contains(&minor.len()),
            [branch, minor, patch] => branch.len() == 3 && (2..=3).contains(&minor.len()) && patch.len() == 2,
            _ => false,
        };
        (shaped && parts.iter().all(digits)).then(|| text.to_owned())
    })
}

fn nodes(facts: &Facts) -> Outcome {
    facts.inventory.driver.as_ref().map_err(|_| "without a driver there are none")?;
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
            wanted.push((node.clone(), "modprobe nvidia-drm, then udevadm trigger".to_owned()));
        }
    }
    let of = |(node, remedy): (PathBuf, String)| -> Option<Finding> {
        let Ok(metadata) = fs::metadata(facts.file(&node)) else {
            return Some(error("device-node-missing", node.display(), "it does not exist", remedy));
        };
        // Render nodes belong to a group of their own, and CUDA does not open them.
        let open = node.starts_with("/dev/dri") || metadata.mode() & 0o006 == 0o006;
        if open {
            return None;
        }
        let kind = if metadata.file_type().is_char_device() { "" } else { " (and it is no device)" };
        Some(warning(
            "device-node-permissions",
            node.display(),
            format!(
                "its mode is {:04o}{kind}: CUDA programs of other users can't open it",
                metadata.mode() & 0o7777
            ),
            format!(
                "chmod 666 {}; for good: NVreg_DeviceFileMode=0666 in /etc/modprobe.d/nvidia.conf",
                node.display()
            ),
        ))
    };
    Ok(wanted.into_iter().filter_map(of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_stands_alone_between_two_ends() {
        let found = |text: &[u8]| version_in(text);
        assert_eq!(found(b"\x7fELF\x01\x00535.261.03\x00more").as_deref(), Some("535.261.03"));
        assert_eq!(found(b"\x00580.95.05\x00").as_deref(), Some("580.95.05"));
        for no in ["535.261.03 and more", "1.2.3", "", "535.2a1.03", "100"] {
            assert_eq!(found(format!("\x00{no}\x00").as_bytes()), None, "{no}");
        }
    }
}
