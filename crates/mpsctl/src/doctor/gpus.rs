//! Checks of the GPUs: the reasons why a GPU is not served, and limitations that users will notice.

use mps_core::terms::DaemonId;

use super::facts::Facts;
use super::serving::{gpu_name, named, unless_served};
use super::{Check, Outcome, Severity, each, error, finding, info, warning};
use common::config::Isolation;
use common::host::compute_mode::ComputeMode;
use common::host::gpu::Gpu;
use common::plan::{GpuPlan, HELD, WORTH_KNOWING};
use common::problem::{NamedProblem, Problem};

pub(super) const CHECKS: &[Check] = &[
    ("GPUs that can't be served", unusable),
    ("the compute modes", compute_modes),
    ("programs that bypass MPS", bypassing),
    ("persistence mode", persistence),
    ("the warnings about the GPUs", warnings),
    ("the sum of thread percentages", oversubscription),
];

fn planned(facts: &Facts) -> Result<&[GpuPlan], Problem> {
    facts.enabled()?;
    Ok(&facts.plan()?.gpus)
}

fn names(gpu: &Gpu) -> String {
    gpu_name(&gpu.id(), gpu.uuid())
}

fn unusable(facts: &Facts) -> Outcome {
    each(planned(facts)?, |plan| {
        let gpu = &plan.gpu;
        // Processes that use the GPU without MPS are the obstacle `HELD`. They prevent the service from starting to serve the
        // GPU, but are no obstacle once the GPU is served.
        let served = gpu.uuid().is_some_and(|uuid| served(facts, uuid));
        let obstacles = plan.obstacles.iter().filter(move |obstacle| obstacle.name != HELD || !served);
        obstacles.map(|NamedProblem { name, problem }| {
            let problem = problem.clone().or_remedy("look for NVRM lines in dmesg");
            finding(Severity::Error, name, names(gpu), problem)
        })
    })
}

fn served(facts: &Facts, uuid: &str) -> bool {
    mode_while_served(facts, uuid).is_some()
}

/// The compute mode that the GPU should have. None if no running control daemon of the service has the GPU.
fn mode_while_served(facts: &Facts, uuid: &str) -> Option<ComputeMode> {
    let mut running = facts.own_control_daemons().iter().filter(|daemon| daemon.pid.is_some());
    let serving = running.find(|daemon| daemon.gpus.iter().any(|gpu| gpu == uuid))?;
    Some(ComputeMode::while_served(DaemonId::from(serving.id.as_str()).tenure()))
}

fn compute_modes(facts: &Facts) -> Outcome {
    let sets_mode = facts.loaded()?.settings.supervision.set_compute_mode;
    each(facts.known_gpus(), |(gpu, known)| {
        let (mode, address) = (known.state.compute_mode?, gpu.pci.address);
        let wanted = mode_while_served(facts, &known.uuid);
        let open = || match wanted {
            Some(ComputeMode::Default) => {
                format!(
                    "the compute mode of the GPU is {mode}, so the server of only one slice can use the GPU"
                )
            }
            _ => format!(
                "the compute mode of the GPU is {mode}, so programs can use the GPU without MPS and without \
                 limits"
            ),
        };
        if let Some(wanted) = wanted.filter(|wanted| *wanted != mode) {
            return Some(if sets_mode {
                let word = wanted.to_string().to_uppercase();
                let remedy = format!(
                    "systemctl reload yunion-mps-daemon sets the compute mode again, as does nvidia-smi -i \
                     {address} -c {word}; find out which program changed the mode"
                );
                error("compute-mode-drift", names(gpu), open(), remedy)
            } else {
                let remedy = "write cuda_mps_set_compute_mode: true in host.conf";
                info("compute-mode-left-alone", names(gpu), open(), remedy)
            });
        }
        (mode == ComputeMode::ExclusiveProcess
            && facts.published().is_err()
            && facts.control_daemons.is_empty())
        .then(|| {
            warning(
                "compute-mode-left",
                names(gpu),
                format!(
                    "the compute mode of the GPU is still {mode}, but yunion-mps-daemon does not run: only \
                     one process at a time can use the GPU"
                ),
                format!("systemctl start yunion-mps-daemon, or nvidia-smi -i {address} -c DEFAULT"),
            )
        })
    })
}

fn bypassing(facts: &Facts) -> Outcome {
    let published = facts.published()?;
    each(facts.known_gpus(), |(gpu, known)| {
        let on_it = published.clients.iter().flatten().filter(|one| one.bypass && one.gpu == known.uuid);
        let (who, pids): (Vec<_>, Vec<_>) = on_it.map(|one| (named(one), one.pid.to_string())).unzip();
        let is_served =
            published.gpus.iter().any(|one| one.device_path.as_ref() == Some(&known.uuid) && one.healthy);
        let found = format!(
            "the GPU is cut into slices, but is used without MPS and without limits by {who}",
            who = who.join(", ")
        );
        let remedy = format!(
            "end these programs (kill {pids}) and start them as clients: yunion-mpsctl run {id}-0 -- PROGRAM",
            pids = pids.join(" "),
            id = gpu.id()
        );
        (!who.is_empty()).then(|| {
            finding(unless_served(is_served), "bypassing-program", names(gpu), Problem::new(found, remedy))
        })
    })
}

fn persistence(facts: &Facts) -> Outcome {
    each(planned(facts)?, |plan| {
        let uuid = plan.gpu.uuid()?;
        (facts.gpus.get(uuid)?.persistence == Some(false)).then(|| {
            warning(
                "persistence-off",
                names(&plan.gpu),
                "persistence mode is off: the driver forgets the compute mode whenever no program has the \
                 GPU open",
                "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1 after each boot",
            )
        })
    })
}

fn warnings(facts: &Facts) -> Outcome {
    each(planned(facts)?, |plan| {
        plan.warnings.iter().map(|NamedProblem { name, problem }| {
            let severity = if WORTH_KNOWING.contains(name) { Severity::Info } else { Severity::Warning };
            finding(severity, name, names(&plan.gpu), problem.clone())
        })
    })
}

/// Finds GPUs with slices that together may use more threads than the GPU has. If each slice has its own control daemon, the
/// slices take turns on the GPU, and the sum does not matter.
fn oversubscription(facts: &Facts) -> Outcome {
    each(planned(facts)?, |plan| {
        let sum: u32 = plan.sizes.iter().map(|size| u32::from(size.thread_percentage)).sum();
        let each = if plan.equal_slices() {
            format!(
                "{slices} slices of {percentage} %",
                slices = plan.slices(),
                percentage = plan.size(0).thread_percentage
            )
        } else {
            format!("the percentages of {slices} slices", slices = plan.slices())
        };
        let at_once = plan.isolation == Isolation::Gpu;
        (sum > 100 && plan.limits_enforced && at_once).then(|| {
            info(
                "threads-oversubscribed",
                names(&plan.gpu),
                format!("{each} add up to {sum} % of the threads of the GPU"),
                "change nothing if slices may compete for threads; otherwise write \
                 cuda_mps_thread_percentage: equal in host.conf, which divides the threads among the slices",
            )
        })
    })
}
