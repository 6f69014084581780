//! Reports the problems and warnings of a configuration and of a plan.

use std::collections::BTreeMap;
use std::process::ExitCode;

use super::logging::last_words;
use crate::message::{Message, Subject};
use common::check::BAD_CONFIGURATION;
use common::config::{self, Loaded, Sources};
use common::plan::{self, GpuPlan, Plan, PlanError};
use common::problem::LocatedProblem;

pub(super) fn bad_configuration(problems: &[LocatedProblem]) -> ExitCode {
    for problem in problems {
        last_words(&problem.to_string());
    }
    ExitCode::from(BAD_CONFIGURATION)
}

/// If the configuration is refused, this function logs its warnings, and the caller gets its problems.
pub(super) fn load(sources: &Sources) -> Result<Loaded, Vec<LocatedProblem>> {
    config::load(sources).map_err(|refused| {
        refused.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        refused.problems
    })
}

pub(super) fn say_findings(loaded: &Loaded) {
    for warning in loaded.warnings.iter().chain(loaded.agent.iter().map(|trouble| &trouble.problem)) {
        tracing::warn!("{warning}");
    }
    let mut by_file: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (origin, key) in &loaded.unknown_keys {
        by_file.entry(origin.file.display().to_string()).or_default().push(key);
    }
    for (file, keys) in by_file {
        tracing::debug!("{file} has keys that this service does not use: {keys}", keys = keys.join(", "));
    }
}

/// Logs the problems and warnings of a plan. Problems and warnings of a GPU are omitted if the plan `before` has the same ones
/// for this GPU, since each scan of the host finds them again. The same holds for missing GPUs.
pub(super) fn say_what_is_new(before: Option<&Plan>, plan: &Plan) {
    let known = |gpu: &GpuPlan| {
        let known = before?.gpus.iter().find(|known| known.gpu.id() == gpu.gpu.id())?;
        Some((&known.obstacles, &known.warnings))
    };
    for gpu in &plan.gpus {
        if known(gpu) == Some((&gpu.obstacles, &gpu.warnings)) {
            continue;
        }
        let name = gpu.gpu.id();
        if let Some(reason) = gpu.unusable() {
            let about = Subject { gpu: gpu.gpu.uuid(), ..Subject::default() };
            Message::GpuNotServed.log(about, format_args!("GPU {name} is not served: {reason}"));
        }
        for warning in &gpu.warnings {
            tracing::warn!("GPU {name}: {}", warning.problem.found);
        }
    }
    let known = before.map(|before| before.missing.as_slice()).unwrap_or_default();
    for missing in plan.missing.iter().filter(|missing| !known.contains(missing)) {
        Message::GpuNotServed.log(Subject::default(), &missing.problem);
    }
}

pub(super) fn why(error: PlanError) -> String {
    match error {
        PlanError::Problems(problems) => join(&problems),
        PlanError::Missing(missing) => join(&plan::problems(&missing)),
        PlanError::NotYet(reason) => reason.into(),
    }
}

/// The most problems that a message names. `--check` names all problems.
const NAMED_PROBLEMS: usize = 16;

pub(super) fn join(problems: &[LocatedProblem]) -> String {
    let mut lines: Vec<String> = problems.iter().take(NAMED_PROBLEMS).map(ToString::to_string).collect();
    if let Some(more) = problems.len().checked_sub(NAMED_PROBLEMS).filter(|more| *more > 0) {
        lines.push(format!("and {more} more problems; yunion-mps-daemon --check names all"));
    }
    lines.join("\n")
}
