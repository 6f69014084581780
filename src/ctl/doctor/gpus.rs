//! The GPUs: the reasons why one is not served, and the things that its users will meet.

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

fn planned(facts: &Facts) -> Result<&[GpuPlan], String> {
    facts.enabled()?;
    Ok(&facts.plan()?.gpus)
}

fn names(gpu: &Gpu) -> String {
    match &gpu.nvml {
        Ok(facts) => format!("{} ({})", gpu.pci.address.short(), facts.uuid),
        Err(_) => gpu.pci.address.short(),
    }
}

fn unusable(facts: &Facts) -> Outcome {
    let takes_mode = facts.enabled()?.set_compute_mode;
    let mut findings = Vec::new();
    for GpuPlan { gpu, .. } in planned(facts)? {
        let address = gpu.pci.address;
        let known = match &gpu.nvml {
            Ok(known) => known,
            Err(reason) => {
                let remedy = reason.remedy_or("look for NVRM lines in dmesg");
                findings.push(error("gpu-unreachable", names(gpu), &reason.found, remedy));
                continue;
            }
        };
        if known.mig_enabled {
            findings.push(error(
                "mig-enabled",
                names(gpu),
                "it is in MIG mode, in which it is not served",
                format!(
                    "once nothing runs on it any more, since it would end: nvidia-smi -i {address} -mig 0, and before \
                     Hopper nvidia-smi -i {address} --gpu-reset"
                ),
            ));
        }
        if known.compute_mode == Some(ComputeMode::Prohibited) {
            let found = "compute mode Prohibited lets no process in";
            let remedy = format!("nvidia-smi -i {address} -c DEFAULT");
            findings.push(error("compute-mode-prohibited", names(gpu), found, remedy));
        }
        if known.memory_total_mib.is_none() {
            let found = "NVML does not say how much memory it has, so it can't be divided";
            findings.push(error("memory-unknown", names(gpu), found, "take it out of the device file"));
        }
        let exclusive = [ComputeMode::ExclusiveProcess, ComputeMode::ExclusiveThread];
        let exclusive = known.compute_mode.is_some_and(|mode| exclusive.contains(&mode));
        let processes: Vec<_> =
            known.foreign_processes.iter().map(|(pid, command)| (*pid, command.as_str())).collect();
        if !served(facts, &known.uuid) && !processes.is_empty() && (takes_mode || exclusive) {
            let (who, pids) = who_and_pids(&processes);
            let found = format!("processes without MPS keep it from being served: {who}");
            findings.push(error("gpu-held", names(gpu), found, format!("end them: kill {pids}")));
        }
    }
    Ok(findings)
}

/// Processes for a finding and for its remedy: `7 (python3), 8 (bash)` and `7 8`.
fn who_and_pids(processes: &[(u32, &str)]) -> (String, String) {
    let who: Vec<String> = processes.iter().map(|(pid, command)| format!("{pid} ({command})")).collect();
    let pids: Vec<String> = processes.iter().map(|(pid, _)| pid.to_string()).collect();
    (who.join(", "), pids.join(" "))
}

/// Whether a control daemon of ours that runs has the GPU.
fn served(facts: &Facts, uuid: &str) -> bool {
    let mut running = facts.own_control_daemons().iter().filter(|daemon| daemon.pid.is_some());
    running.any(|daemon| daemon.gpus.iter().any(|gpu| gpu == uuid))
}

fn compute_modes(facts: &Facts) -> Outcome {
    let sets_mode = facts.loaded()?.settings.set_compute_mode;
    let of = |(gpu, known): (&Gpu, &NvmlFacts)| {
        let (mode, address) = (known.compute_mode?, gpu.pci.address);
        let serving = served(facts, &known.uuid);
        let open =
            || format!("its compute mode is {mode}, so programs can use it without MPS and without limits");
        if serving && mode != SERVED {
            return Some(if sets_mode {
                let remedy = format!(
                    "systemctl reload yunion-mps-daemon sets it again, as does nvidia-smi -i {address} -c \
                     EXCLUSIVE_PROCESS; find out who changed it"
                );
                error("compute-mode-drift", names(gpu), open(), remedy)
            } else {
                let remedy = "cuda_mps_set_compute_mode: true in host.conf";
                info("compute-mode-left-alone", names(gpu), open(), remedy)
            });
        }
        (mode == SERVED && facts.published().is_err() && facts.control_daemons.is_empty()).then(|| {
            warning(
                "compute-mode-left",
                names(gpu),
                format!(
                    "its compute mode is still {mode}, and nothing serves it: one process alone can use it"
                ),
                format!("systemctl start yunion-mps-daemon, or nvidia-smi -i {address} -c DEFAULT"),
            )
        })
    };
    Ok(facts.known_gpus().filter_map(of).collect())
}

fn bypassing(facts: &Facts) -> Outcome {
    let published = facts.published()?;
    let of = |(gpu, known): (&Gpu, &NvmlFacts)| {
        let on_it = published.clients.iter().flatten().filter(|one| one.bypass && one.gpu == known.uuid);
        let programs: Vec<(u32, &str)> = on_it.map(|one| (one.pid, one.command.as_str())).collect();
        let (who, pids) = who_and_pids(&programs);
        (!programs.is_empty()).then(|| {
            warning(
                "bypassing-program",
                names(gpu),
                format!("it is cut into slices, and used without MPS and without limits by {who}"),
                format!(
                    "end them (kill {pids}) and start them as clients: yunion-mpsctl run {}-0 -- PROGRAM",
                    gpu.pci.address.short()
                ),
            )
        })
    };
    Ok(facts.known_gpus().filter_map(of).collect())
}

fn persistence(facts: &Facts) -> Outcome {
    let of = |plan: &GpuPlan| {
        let uuid = plan.gpu.uuid()?;
        (facts.gpus.get(uuid)?.persistence == Some(false)).then(|| {
            warning(
                "persistence-off",
                names(&plan.gpu),
                "persistence mode is off: whenever no program has the GPU open, the driver forgets its compute mode",
                "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1 after each boot",
            )
        })
    };
    Ok(planned(facts)?.iter().filter_map(of).collect())
}

fn warnings(facts: &Facts) -> Outcome {
    let of_gpu = |plan: &GpuPlan| -> Vec<Finding> {
        plan.warnings.iter().map(|warned| of_warning(names(&plan.gpu), warned)).collect()
    };
    Ok(planned(facts)?.iter().flat_map(of_gpu).collect())
}

fn of_warning(subject: String, warned: &Warning) -> Finding {
    match warned {
        Warning::NoComputeCapability => {
            info("compute-capability-unknown", subject, warned, "nvidia-smi -q and dmesg say more")
        }
        Warning::MoreSlicesThanClients { clients, .. } => {
            let remedy = format!("virtual_number: {clients} or less in the device file");
            warning("more-slices-than-clients", subject, warned, remedy)
        }
        Warning::MoreClientsThanPlaces { clients, .. } => {
            let remedy = format!("max_clients: {clients} or less in the device file");
            warning("more-clients-than-places", subject, warned, remedy)
        }
        Warning::ClientsNotCounted => info(
            "clients-not-counted",
            subject,
            warned,
            "remove max_clients from its entry in the device file",
        ),
        Warning::NotEnforced { .. } => {
            let remedy = "give its slices to tenants who trust each other, or use a GPU from Volta on";
            info("limits-not-enforced", subject, warned, remedy)
        }
        Warning::GivenOutTwice { origin, .. } => {
            warning("given-out-twice", subject, warned, format!("remove one of the entries: {origin}"))
        }
        Warning::LooseThreads { .. } | Warning::LooseMemory { .. } => {
            let remedy = "cut the GPUs into slices of the same memory and thread_percentage, or give clients the \
                          environment that yunion-mpsctl env NAME prints";
            info("default-limits-loose", subject, warned, remedy)
        }
    }
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
