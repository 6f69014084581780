//! What the files say, to us and to the host agent, and whether it is in force.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use super::facts::Facts;
use super::{Check, Finding, Outcome, error, info, warning};
use crate::check::Checked;
use crate::config::{DevicePath, Topology};
use crate::ctl::difference::{Kind, differences};

pub(super) const CHECKS: &[Check] = &[
    ("the configuration", configuration),
    ("keys that are set twice", overridden),
    ("what an agent can read", agent),
    ("whether the configuration is loaded", loaded),
];

/// Types of entries that the host agent knows; any other makes it end.
const AGENT_TYPES: [&str; 13] = [
    "NVIDIA_MPS",
    "NVIDIA_GPU_SHARE",
    "NVIDIA_GPU",
    "NVIDIA_HAMI",
    "CPH_AMD_GPU",
    "CPH_AOSP_BINDER",
    "VASTAITECH_GPU",
    "NETINT_CA_ASIC",
    "NETINT_CA_QUADRA",
    "ASCEND_NPU",
    "ASCEND_NPU_HAMI",
    "HYGON_DCU",
    "HYGON_DCU_HAMI",
];

fn configuration(facts: &Facts) -> Outcome {
    let of = |problem: &crate::config::Problem| {
        let key = if problem.key.is_empty() { String::new() } else { format!("{}: ", problem.key) };
        (problem.origin.to_string(), format!("{key}{}", problem.found), problem.remedy.clone())
    };
    let mut findings = Vec::new();
    let loaded = match &facts.checked {
        Checked::Wrong { problems, loaded } => {
            if let Some(file) =
                problems.iter().map(|problem| &problem.origin.file).find(|file| for_root(facts, file))
            {
                return Err(format!("only root can read {}", file.display()));
            }
            for problem in problems {
                let (origin, found, remedy) = of(problem);
                findings.push(error("configuration-wrong", origin, found, remedy));
            }
            loaded.as_ref()
        }
        Checked::Right { loaded, plan, missing, .. } => {
            for one in missing {
                let (origin, found, remedy) = of(&one.problem);
                let id = if one.certain { "configuration-wrong" } else { "no-plan" };
                findings.push(error(id, origin, found, remedy));
            }
            // Without a driver that is what is wrong, and has a check of its own.
            if let (Err(reason), Ok(_), []) = (plan, &facts.inventory.driver, missing.as_slice()) {
                let (found, remedy) = super::told_apart(reason, "yunion-mpsctl check says more");
                findings.push(error("no-plan", "the GPUs", found, remedy));
            }
            Some(loaded)
        }
    };
    for problem in loaded.iter().flat_map(|loaded| &loaded.warnings) {
        let (origin, found, remedy) = of(problem);
        findings.push(warning("configuration-warning", origin, found, remedy));
    }
    if let Some(settings) = loaded.map(|loaded| &loaded.settings).filter(|settings| !settings.enabled) {
        let file = settings.sources.first().map(|file| file.display().to_string());
        findings.push(info(
            "mps-disabled",
            file.unwrap_or_else(|| "/etc/yunion/host.conf".to_owned()),
            "enable_cuda_mps is false: no GPU is to be served",
            "write enable_cuda_mps: true, then systemctl reload yunion-mps-daemon",
        ));
    }
    Ok(findings)
}

/// Whether somebody who is not root can't look into a file, which says nothing against it.
fn for_root(facts: &Facts, file: &Path) -> bool {
    let opened = File::open(facts.file(file));
    !rustix::process::geteuid().is_root()
        && opened.is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
}

fn overridden(facts: &Facts) -> Outcome {
    let (Checked::Right { loaded, .. } | Checked::Wrong { loaded: Some(loaded), .. }) = &facts.checked else {
        return Err("the configuration can't be read".to_owned());
    };
    let of = |(key, earlier, later): &(&str, crate::config::Origin, crate::config::Origin)| {
        let found = format!("{key} here counts, and that in {earlier} does not");
        let remedy = format!("if that is not meant, remove {key} from {}", later.file.display());
        info("key-overridden", later, found, remedy)
    };
    Ok(loaded.overridden.iter().map(of).collect())
}

/// The host agent reads the same files, and knows less.
fn agent(facts: &Facts) -> Outcome {
    let settings = facts.enabled()?;
    let mut findings = Vec::new();
    for entry in &settings.devices {
        if !AGENT_TYPES.contains(&entry.device_type.as_str()) {
            findings.push(warning(
                "agent-unknown-type",
                &entry.origin,
                format!("type {:?}, with which the host agent does not start", entry.device_type),
                "correct its spelling or remove the entry",
            ));
        }
        let by_other_name =
            matches!(entry.path, Some(DevicePath::Pci(_) | DevicePath::Uuid(_) | DevicePath::NvidiaMinor(_)));
        if entry.mps.is_some() && by_other_name {
            findings.push(info(
                "agent-needs-render-node",
                &entry.origin,
                "only a host agent that reads D-Bus finds a GPU by this path",
                "for others write its render node, /dev/dri/renderDN; yunion-mpsctl list --gpus --json has it as \
                 render_node",
            ));
        }
    }
    if settings.topology == Topology::PerGpu {
        findings.push(info(
            "agent-needs-shared",
            "cuda_mps_topology",
            format!(
                "per_gpu: a host agent that does not read D-Bus gives containers {}, where no control daemon listens",
                settings.pipe_directory.display()
            ),
            "with such an agent write cuda_mps_topology: shared",
        ));
    }
    Ok(findings)
}

/// What is published beside what would be planned now. A GPU that can be used since, or no more, is no business of the
/// files.
fn loaded(facts: &Facts) -> Outcome {
    let (loaded, published) = (facts.loaded().ok_or("the configuration can't be read")?, facts.published()?);
    let plan = facts.plan().ok_or("there is no plan now")?;
    if published.devices.is_none() {
        return Err("the service does not know its GPUs yet".to_owned());
    }
    let mut findings: Vec<Finding> = Vec::new();
    let mut changes = Vec::new();
    for difference in differences(loaded, plan, published) {
        match difference.kind {
            Kind::PipeDirectory => findings.push(error(
                "pipe-directory-differs",
                format!("control daemon {}", difference.subject),
                format!(
                    "it listens in {}, and the host agent gives containers {}, as host.conf says",
                    difference.from, difference.to
                ),
                "systemctl reload yunion-mps-daemon; if it then waits for clients: yunion-mpsctl apply --force ends \
                 them",
            )),
            Kind::ControlDaemon => {}
            Kind::Enabled | Kind::Devices | Kind::MemoryLimit | Kind::ThreadPercentage => {
                changes.push(difference.to_string());
            }
        }
    }
    if !changes.is_empty() {
        findings.push(warning(
            "configuration-not-loaded",
            loaded
                .settings
                .sources
                .iter()
                .map(|file| file.display().to_string())
                .collect::<Vec<_>>()
                .join(", "),
            format!("not what the service has in force: {}", changes.join(" | ")),
            "look with yunion-mpsctl check, then systemctl reload yunion-mps-daemon",
        ));
    }
    Ok(findings)
}
