//! The check of a configuration. The check shows the plan or the errors, and changes nothing.

pub mod difference;
pub mod report;

use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use mps_core::Tenure;
use mps_core::terms::ServedGpu;

use crate::config::{self, Isolation, Loaded, Refused, Sources};
use crate::host::inventory::Inventory;
use crate::host::nvml::{Driver, GpuQuestions};
use crate::plan::{self, GpuPlan, Missing, Plan, PlanError};
use crate::problem::{LocatedProblem, Problem};

/// The exit status for a wrong configuration (`EX_CONFIG`). The unit file tells systemd not to restart the service after this
/// status.
pub const BAD_CONFIGURATION: u8 = 78;

/// The time that the check waits for NVML. A GPU that has fallen off the PCI bus can make an NVML call hang for ever.
const NVML_TIMEOUT: Duration = Duration::from_secs(15);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Checked {
    Refused(Refused),
    /// The configuration files are correct in themselves, but do not fit this host.
    Wrong {
        problems: Vec<LocatedProblem>,
        loaded: Loaded,
    },
    /// The configuration is correct. This host may still be unable to serve its GPUs now.
    Right {
        loaded: Loaded,
        /// The driver's version, or the reason why the host has no usable driver. None if the check did not ask the driver.
        driver: Option<Result<String, Problem>>,
        /// The error says why the service can't make a plan yet. With `enable_cuda_mps: false` the plan is empty.
        plan: Result<Plan, Problem>,
        /// The entries of the device file that match no GPU of this host. The GPU of such an entry may appear later, or the
        /// path in the entry is mistyped.
        missing: Vec<Missing>,
    },
}

impl Checked {
    /// The mistakes of an administrator: problems in the files, and entries for GPUs that this host certainly does not have.
    pub fn problems(&self) -> Vec<LocatedProblem> {
        match self {
            Self::Refused(Refused { problems, .. }) | Self::Wrong { problems, .. } => problems.clone(),
            Self::Right { missing, .. } => {
                missing.iter().filter(|one| one.certain).map(|one| one.problem.clone()).collect()
            }
        }
    }

    pub fn loaded(&self) -> Option<&Loaded> {
        match self {
            Self::Refused(_) => None,
            Self::Wrong { loaded, .. } | Self::Right { loaded, .. } => Some(loaded),
        }
    }

    /// The warnings about the configuration files that concern this service. [`Self::all_warnings`] adds those for the host
    /// agent.
    pub fn warnings(&self) -> &[LocatedProblem] {
        match self {
            Self::Refused(refused) => &refused.warnings,
            Self::Wrong { loaded, .. } | Self::Right { loaded, .. } => &loaded.warnings,
        }
    }

    pub fn all_warnings(&self) -> impl Iterator<Item = &LocatedProblem> {
        let troubles = self.loaded().into_iter().flat_map(|loaded| &loaded.agent);
        self.warnings().iter().chain(troubles.map(|trouble| &trouble.problem))
    }
}

pub fn check(sources: &Sources) -> Checked {
    match config::load(sources) {
        Err(refused) => Checked::Refused(refused),
        Ok(loaded) if !loaded.settings.enabled => judge(loaded, None),
        Ok(loaded) => {
            let root = sources.sysroot.clone();
            let inventory = ask_driver(&sources.sysroot, move |nvml| Inventory::read(&root, nvml));
            let without_driver = |reason| Inventory::read(&sources.sysroot, Err(&reason));
            judge(loaded, Some(&inventory.unwrap_or_else(without_driver)))
        }
    }
}

/// Asks NVML a question on a new thread. The error says that NVML did not answer in time, or why there is no usable driver.
pub fn ask_driver<T: Send + 'static>(
    sysroot: &Path,
    ask: impl FnOnce(Result<&mut GpuQuestions, &Problem>) -> T + Send + 'static,
) -> Result<T, Problem> {
    let sysroot = sysroot.to_owned();
    let answer = within(NVML_TIMEOUT, move || {
        let mut driver = Driver::open(&sysroot).map(|driver| GpuQuestions::new(Arc::new(driver)));
        ask(driver.as_mut().map_err(|reason| &*reason))
    });
    answer.ok_or_else(|| {
        Problem::new(
            format!("NVML did not answer within {seconds} s", seconds = NVML_TIMEOUT.as_secs()),
            "look for NVRM lines in dmesg: a GPU that hangs needs a reboot of this host, which ends every \
             job",
        )
    })
}

/// Runs a function that may hang, on a new thread. None if the function does not return before the deadline. In that case the
/// thread goes on in the background.
pub fn within<T: Send + 'static>(deadline: Duration, what: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (tell, answer) = mpsc::channel();
    std::thread::spawn(move || {
        let _ = tell.send(what());
    });
    answer.recv_timeout(deadline).ok()
}

/// Makes the plan and finds the mistakes of a configuration on a host with the GPUs of `inventory`. `inventory` is None if the
/// check did not read the host's GPUs.
pub fn judge(mut loaded: Loaded, inventory: Option<&Inventory>) -> Checked {
    let Some(inventory) = inventory.filter(|_| loaded.settings.enabled) else {
        return Checked::Right { loaded, driver: None, plan: Ok(Plan::default()), missing: Vec::new() };
    };
    for trouble in &mut loaded.agent {
        if let Some(node) = trouble.path.as_ref().and_then(|path| plan::render_node(path, inventory)) {
            trouble.problem.problem.remedy =
                format!("name the GPU by its render node, {node}", node = node.display());
        }
    }
    let driver = Some(inventory.driver.clone());
    let (plan, missing) = match plan::plan(&loaded.settings, inventory, &[]) {
        Ok(plan) => (Ok(plan.clone()), plan.missing),
        Err(PlanError::NotYet(reason)) => (Err(reason), Vec::new()),
        Err(PlanError::Missing(missing)) => {
            (Err("this host has none of the GPUs that host_container_device.yml names".into()), missing)
        }
        Err(PlanError::Problems(problems)) => return Checked::Wrong { problems, loaded },
    };
    Checked::Right { loaded, driver, plan, missing }
}

pub fn words(checked: &Checked) -> Vec<String> {
    let mut lines: Vec<String> =
        checked.all_warnings().map(|warning| format!("warning: {warning}")).collect();
    if let Some(loaded) = checked.loaded() {
        let none = loaded.settings.sources.is_empty();
        let files = if none { "none, all defaults".to_owned() } else { loaded.files() };
        lines.push(format!("configuration: {files}"));
    }
    match checked {
        Checked::Refused(Refused { problems, .. }) | Checked::Wrong { problems, .. } => {
            lines.extend(problems.iter().map(|problem| format!("error: {problem}")));
        }
        Checked::Right { loaded, .. } if !loaded.settings.enabled => {
            let reason = loaded.settings.why_not_enabled();
            lines.push(format!("no GPU would be served: {reason}"));
        }
        Checked::Right { driver, plan, missing, .. } => {
            lines.extend(driver.iter().map(|driver| match driver {
                Ok(version) => format!("driver: {version}"),
                Err(reason) => format!("driver: none: {reason}"),
            }));
            match plan {
                Ok(plan) => describe_plan(plan, &mut lines),
                Err(reason) => lines.push(format!("no GPU could be served now: {reason}")),
            }
            lines.extend(missing.iter().map(|Missing { problem, certain, .. }| {
                format!("{}: {problem}", if *certain { "error" } else { "not served" })
            }));
        }
    }
    lines
}

fn describe_plan(plan: &Plan, lines: &mut Vec<String>) {
    if plan.gpus.is_empty() {
        let reason = &plan.nothing;
        lines.push(format!("no GPU would be served: {reason}"));
    }
    for gpu in &plan.gpus {
        lines.push(describe_gpu(gpu));
        lines.extend(gpu.warnings.iter().map(|warning| format!("  warning: {}", warning.problem.found)));
    }
    lines.extend(plan.control_daemons.iter().map(|control_daemon| {
        let gpus: Vec<String> = control_daemon.gpus.iter().map(ServedGpu::name).collect();
        let serves = match control_daemon.tenure() {
            Tenure::Alone => format!("GPUs {}", gpus.join(", ")),
            Tenure::InTurns => format!("slice {}", control_daemon.id),
        };
        format!(
            "control daemon {id}: {serves}; active thread percentage {thread_percentage}; {users}; \
             {cpus}pipe directory {pipe_directory}; log directory {log_directory}",
            id = control_daemon.id,
            thread_percentage = control_daemon.thread_percentage,
            users = if control_daemon.multiuser { "one server for all users" } else { "a server per user" },
            cpus = control_daemon.cpus.map(|cpus| format!("bound to CPUs {cpus}; ")).unwrap_or_default(),
            pipe_directory = control_daemon.pipe_directory.display(),
            log_directory = control_daemon.log_directory.display(),
        )
    }));
}

fn describe_gpu(plan: &GpuPlan) -> String {
    let name = plan.gpu.id().to_string();
    let share = |ordinal| {
        let size = plan.size(ordinal);
        format!(
            "{memory_mib} MiB and {thread_percentage} % of the threads{in_turns}{not_enforced}{most_clients}",
            memory_mib = size.memory_mib,
            thread_percentage = size.thread_percentage,
            in_turns = if plan.isolation == Isolation::Slice { ", one slice at a time" } else { "" },
            not_enforced = if plan.limits_enforced { "" } else { " (not enforced by this GPU)" },
            most_clients = plan
                .max_clients(ordinal)
                .map(|most| format!(", for {most} clients at most"))
                .unwrap_or_default(),
        )
    };
    let slices = match (plan.unusable(), plan.slices()) {
        (Some(reason), _) => format!("not served: {reason}"),
        (None, 1) => format!("1 slice, {name}-0, {}", share(0)),
        (None, slices) if plan.equal_slices() => {
            format!(
                "{slices} slices, {name}-0 to {name}-{last}, each {share}",
                last = slices.saturating_sub(1),
                share = share(0)
            )
        }
        (None, slices) => {
            let each = (0..slices).map(|ordinal| format!("{} {}", plan.slice(ordinal), share(ordinal)));
            format!("{slices} slices: {}", each.collect::<Vec<_>>().join("; "))
        }
    };
    let uuid = plan.gpu.uuid().unwrap_or("UUID unknown");
    format!("GPU {name} {model} ({uuid}): {slices}", model = plan.gpu.model())
}
