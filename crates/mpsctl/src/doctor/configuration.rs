//! Checks of the configuration files: mistakes in the files, and differences from the configuration in force.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use super::facts::Facts;
use super::{Check, Finding, Name, Outcome, Severity, each, error, finding, info, warning};
use crate::toolkit::WHERE_CUDA_LOOKS;
use common::check::Checked;
use common::check::difference::{DifferenceKind, differences};
use common::config::{Isolation, Refused, Topology};
use common::plan::Missing;
use common::problem::LocatedProblem;

pub(super) const CHECKS: &[Check] = &[
    ("the configuration", configuration),
    ("keys that are set twice", overridden),
    ("settings with which the platform's host agent fails", agent),
    ("the configuration in force", loaded),
    ("how programs find a slice", programs),
];

fn of_problem(severity: Severity, name: Name, located: &LocatedProblem) -> Finding {
    finding(severity, name, &located.origin, located.with_key())
}

fn configuration(facts: &Facts) -> Outcome {
    let mut findings = Vec::new();
    match &facts.checked {
        Checked::Refused(Refused { problems, .. }) | Checked::Wrong { problems, .. } => {
            let mut files = problems.iter().map(|problem| &problem.origin.file);
            if let Some(file) = files.find(|file| for_root(facts, file)) {
                return Err(format!("only root can read {file}", file = file.display()).into());
            }
            let wrong = |problem| of_problem(Severity::Error, "configuration-wrong", problem);
            findings.extend(problems.iter().map(wrong));
        }
        Checked::Right { plan, missing, .. } => {
            for Missing { problem, certain, .. } in missing {
                let name = if *certain { "configuration-wrong" } else { "no-plan" };
                findings.push(of_problem(Severity::Error, name, problem));
            }
            // Without a driver no plan is possible, and another check reports the missing driver.
            if let (Err(problem), Ok(_), []) = (plan, &facts.inventory.driver, missing.as_slice()) {
                let problem = problem.clone().or_remedy("see yunion-mpsctl check");
                findings.push(finding(Severity::Error, "no-plan", "the GPUs", problem));
            }
        }
    }
    let warned = |problem| of_problem(Severity::Warning, "configuration-warning", problem);
    findings.extend(facts.checked.warnings().iter().map(warned));
    if let Some(loaded) = facts.loaded().ok().filter(|loaded| !loaded.settings.enabled) {
        let switch_on = "write enable_cuda_mps: true, then run systemctl reload yunion-mps-daemon";
        let why = loaded.settings.why_not_enabled().or_remedy(switch_on).prefixed("no GPU is to be served");
        findings.push(finding(Severity::Info, "mps-disabled", loaded.files(), why));
    }
    Ok(findings)
}

/// True if this process can't read the file since the process does not run as root. An unreadable file is then no mistake in
/// the configuration.
fn for_root(facts: &Facts, file: &Path) -> bool {
    let opened = File::open(facts.file(file));
    !rustix::process::geteuid().is_root()
        && opened.is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
}

fn overridden(facts: &Facts) -> Outcome {
    each(&facts.loaded()?.overridden, |(key, earlier, later)| {
        let found = format!("{key} in this file overrides {key} in {earlier}");
        let remedy = format!(
            "if the value in {earlier} is meant, remove {key} from {file}",
            file = later.file.display()
        );
        [info("key-overridden", later, found, remedy)]
    })
}

/// Finds settings that are right for the service, but with which the host agent of Cloudpods, or a container of the host agent,
/// fails. The host agent reads the same files, and may support fewer settings.
fn agent(facts: &Facts) -> Outcome {
    each(&facts.loaded()?.agent, |it| [of_problem(Severity::Warning, it.name, &it.problem)])
}

/// Compares the configuration in force, which the service publishes, with a plan from the present files. A different set of
/// control daemons alone is no finding: a GPU that was added or removed since the last reload may be the reason.
fn loaded(facts: &Facts) -> Outcome {
    let (loaded, published, plan) = (facts.loaded()?, facts.published()?, facts.plan()?);
    let mut findings: Vec<Finding> = Vec::new();
    let mut changes = Vec::new();
    for difference in differences(loaded, plan, published)? {
        match difference.kind {
            DifferenceKind::PipeDirectory => findings.push(error(
                "pipe-directory-differs",
                format!("control daemon {}", difference.subject),
                format!(
                    "the control daemon listens in {from}, but the host agent gives containers the directory \
                     {to}, as host.conf says",
                    from = difference.from,
                    to = difference.to
                ),
                "systemctl reload yunion-mps-daemon; if the change then waits for clients, yunion-mpsctl \
                 apply --force ends these clients",
            )),
            DifferenceKind::ControlDaemon => {}
            DifferenceKind::Enabled
            | DifferenceKind::Devices
            | DifferenceKind::MemoryLimit
            | DifferenceKind::ThreadPercentage
            | DifferenceKind::MaxClients => {
                changes.push(difference.to_string());
            }
        }
    }
    if !changes.is_empty() {
        findings.push(warning(
            "configuration-not-loaded",
            loaded.files(),
            format!("differs from the configuration in force: {changes}", changes = changes.join(" | ")),
            "look at the changes with yunion-mpsctl check, then run systemctl reload yunion-mps-daemon",
        ));
    }
    Ok(findings)
}

/// Reports how the configuration affects CUDA programs that a user starts without a slice. On a host of the platform nothing is
/// reported, since the platform starts each program with a slice.
fn programs(facts: &Facts) -> Outcome {
    let settings = facts.enabled()?;
    let finds_by_itself = facts.directories()?.iter().any(|(pipe, _)| pipe == Path::new(WHERE_CUDA_LOOKS));
    if finds_by_itself || facts.loaded()?.platform {
        return Ok(Vec::new());
    }
    let isolations: Vec<Isolation> = facts.plan()?.gpus.iter().map(|gpu| gpu.isolation).collect();
    // A GPU with isolated slices has compute mode `DEFAULT`, in which the driver lets every program open the GPU.
    let open = "has the whole GPU, without MPS and without limits";
    let closed = "gets CUDA error 46, busy or unavailable";
    let gets = match (isolations.contains(&Isolation::Slice), isolations.contains(&Isolation::Gpu)) {
        (false, _) if !settings.supervision.set_compute_mode => return Ok(Vec::new()),
        (false, _) => closed.to_owned(),
        (true, false) => open.to_owned(),
        (true, true) => format!("{open}, on a GPU with isolation: slice, and {closed}, on the other GPUs"),
    };
    let start = "start programs with yunion-mpsctl run --free -- PROGRAM";
    let remedy = match settings.topology {
        Topology::Shared if isolations.contains(&Isolation::Gpu) => {
            format!("{start}, or set cuda_mps_pipe_directory: {WHERE_CUDA_LOOKS}")
        }
        _ => start.to_owned(),
    };
    let found = format!(
        "CUDA does not look in this directory by itself: a program that was not started with a slice {gets}"
    );
    Ok(vec![info("programs-need-slice", settings.pipe_directory.display(), found, remedy)])
}
