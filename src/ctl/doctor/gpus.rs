//! The GPUs: what keeps one from being served, and what its users will meet.

use super::facts::Facts;
use super::{Check, Finding, Outcome, error, info, warning};
use crate::host::gpu::{ComputeMode, Gpu, NvmlFacts};
use crate::plan::{GpuPlan, Warning};
use crate::supervisor::compute_modes::SERVED;

pub(super) const CHECKS: &[Check] = &[
    ("GPUs that can't be served", unusable),
    ("the compute modes", compute_modes),
    ("programs that bypass MPS", bypassing),
    ("persistence mode", persistence),
    ("what the plan warns of", warnings),
    ("the sum of thread percentages", oversubscription),
];

/// The planned GPUs.
fn planned(facts: &Facts) -> Result<&[GpuPlan], String> {
    facts.enabled()?;
    facts.plan().map(|plan| plan.gpus.as_slice()).ok_or_else(|| "there is no plan now".to_owned())
}

fn names(gpu: &Gpu) -> String {
    match &gpu.nvml {
        Ok(facts) => format!("{} ({})", gpu.pci.address.short(), facts.uuid),
        Err(_) => gpu.pci.address.short(),
    }
}

fn unusable(facts: &Facts) -> Outcome {
    let exclusive = |known: &NvmlFacts| {
        matches!(known.compute_mode, Some(ComputeMode::ExclusiveProcess | ComputeMode::ExclusiveThread))
    };
    let takes_mode = facts.enabled()?.set_compute_mode;
    let mut findings = Vec::new();
    for plan in planned(facts)? {
        let gpu = &plan.gpu;
        let address = gpu.pci.address;
        let known = match &gpu.nvml {
            Ok(known) => known,
            Err(reason) => {
                let remedy = reason.remedy_or("look for NVRM lines in dmesg");
                findings.push(error("gpu-unreachable", names(gpu), &reason.found, remedy));
                continue;
            }
        };
        let mut add = |name, found: String, remedy: String| {
            findings.push(error(name, names(gpu), found, remedy));
        };
        if known.mig_enabled {
            let found = "it is in MIG mode, in which it is not served".to_owned();
            add(
                "mig-enabled",
                found,
                format!(
                    "once nothing runs on it any more, since it would end: nvidia-smi -i {address} -mig 0, and before \
                     Hopper nvidia-smi -i {address} --gpu-reset"
                ),
            );
        }
        if known.compute_mode == Some(ComputeMode::Prohibited) {
            let found = "compute mode Prohibited lets no process in".to_owned();
            add("compute-mode-prohibited", found, format!("nvidia-smi -i {address} -c DEFAULT"));
        }
        if known.memory_total_mib.is_none() {
            let found = "NVML does not say how much memory it has, so it can't be divided".to_owned();
            add("memory-unknown", found, "take it out of the device file".to_owned());
        }
        if !served(facts, &known.uuid)
            && !known.foreign_processes.is_empty()
            && (takes_mode || exclusive(known))
        {
            let found = format!("processes without MPS keep it from being served: {}", who(known));
            add("gpu-held", found, format!("end them: kill {}", pids(known)));
        }
    }
    Ok(findings)
}

fn who(known: &NvmlFacts) -> String {
    let one = |(pid, command): &(u32, String)| format!("{pid} ({command})");
    known.foreign_processes.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn pids(known: &NvmlFacts) -> String {
    known.foreign_processes.iter().map(|(pid, _)| pid.to_string()).collect::<Vec<_>>().join(" ")
}

/// Whether a control daemon of ours that runs has the GPU.
fn served(facts: &Facts, uuid: &str) -> bool {
    let Some(published) = facts.bus.published() else { return false };
    let runs =
        |id: &str| published.control_daemons.iter().any(|daemon| daemon.id == id && daemon.pid.is_some());
    published.gpus.iter().any(|gpu| gpu.device_path.as_deref() == Some(uuid) && runs(&gpu.control_daemon))
}

fn compute_modes(facts: &Facts) -> Outcome {
    let settings = facts.settings().ok_or("the configuration can't be read")?;
    let mut findings: Vec<Finding> = Vec::new();
    for (gpu, known) in facts.known_gpus() {
        let Some(mode) = known.compute_mode else { continue };
        let address = gpu.pci.address;
        let exclusive = mode == SERVED;
        let serving = served(facts, &known.uuid);
        if serving && settings.set_compute_mode && !exclusive {
            findings.push(error(
                "compute-mode-drift",
                names(gpu),
                format!("its compute mode is {mode}, so programs can use it without MPS and without limits"),
                format!("systemctl reload yunion-mps-daemon sets it again, as does nvidia-smi -i {address} -c EXCLUSIVE_PROCESS; find out who changed it"),
            ));
        } else if serving && !exclusive {
            findings.push(info(
                "compute-mode-left-alone",
                names(gpu),
                format!("its compute mode is {mode}, so programs can use it without MPS and without limits"),
                "cuda_mps_set_compute_mode: true in host.conf",
            ));
        } else if exclusive && facts.published().is_err() && facts.control_daemons.is_empty() {
            findings.push(warning(
                "compute-mode-left",
                names(gpu),
                format!(
                    "its compute mode is still {mode}, and nothing serves it: one process alone can use it"
                ),
                format!("systemctl start yunion-mps-daemon, or nvidia-smi -i {address} -c DEFAULT"),
            ));
        }
    }
    Ok(findings)
}

fn bypassing(facts: &Facts) -> Outcome {
    let published = facts.published()?;
    let mut findings = Vec::new();
    for (gpu, known) in facts.known_gpus() {
        let clients = published.clients.iter().flatten();
        let on_it = clients.filter(|one| one.bypass && one.gpu == known.uuid);
        let programs: Vec<(u32, &str)> = on_it.map(|one| (one.pid, one.command.as_str())).collect();
        if programs.is_empty() {
            continue;
        }
        let who: Vec<String> = programs.iter().map(|(pid, command)| format!("{pid} ({command})")).collect();
        let pids: Vec<String> = programs.iter().map(|(pid, _)| pid.to_string()).collect();
        findings.push(warning(
            "bypassing-program",
            names(gpu),
            format!("it is cut into slices, and used without MPS and without limits by {}", who.join(", ")),
            format!(
                "end them (kill {}) and start them as clients: yunion-mpsctl run {}-0 -- PROGRAM",
                pids.join(" "),
                gpu.pci.address.short()
            ),
        ));
    }
    Ok(findings)
}

fn persistence(facts: &Facts) -> Outcome {
    let mut findings = Vec::new();
    for plan in planned(facts)? {
        let Ok(known) = &plan.gpu.nvml else { continue };
        if facts.gpus.get(&known.uuid).and_then(|now| now.persistence) == Some(false) {
            findings.push(warning(
                "persistence-off",
                names(&plan.gpu),
                "persistence mode is off: whenever no program has the GPU open, the driver forgets its compute mode",
                "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1 after each boot",
            ));
        }
    }
    Ok(findings)
}

fn warnings(facts: &Facts) -> Outcome {
    let mut findings = Vec::new();
    for plan in planned(facts)? {
        for warned in &plan.warnings {
            let (subject, found) = (names(&plan.gpu), warned.to_string());
            findings.push(match warned {
                Warning::NoComputeCapability => {
                    info("compute-capability-unknown", subject, found, "nvidia-smi -q and dmesg say more")
                }
                Warning::MoreSlicesThanClients { clients, .. } => warning(
                    "more-slices-than-clients",
                    subject,
                    found,
                    format!("virtual_number: {clients} or less in the device file"),
                ),
                Warning::NotEnforced { .. } => info(
                    "limits-not-enforced",
                    subject,
                    found,
                    "give its slices to tenants who trust each other, or use a GPU from Volta on",
                ),
                Warning::GivenOutTwice { origin, .. } => {
                    warning("given-out-twice", subject, found, format!("remove one of the entries: {origin}"))
                }
                Warning::LooseThreads { .. } | Warning::LooseMemory { .. } => info(
                    "default-limits-loose",
                    subject,
                    found,
                    "cut the GPUs into slices of the same memory and thread_percentage, or give clients the environment \
                     that yunion-mpsctl env NAME prints",
                ),
            });
        }
    }
    Ok(findings)
}

fn oversubscription(facts: &Facts) -> Outcome {
    let of = |plan: &GpuPlan| {
        let sum = u32::from(plan.thread_percentage) * plan.slices;
        (sum > 100 && plan.limits_enforced).then(|| {
            info(
                "threads-oversubscribed",
                names(&plan.gpu),
                format!("{} slices of {} % add up to {sum} %", plan.slices, plan.thread_percentage),
                "nothing, if that is meant; cuda_mps_thread_percentage: equal gives each its own share",
            )
        })
    };
    Ok(planned(facts)?.iter().filter_map(of).collect())
}
