//! The check of a configuration: shows the plan or the errors, and changes nothing.

pub mod difference;
pub mod report;

use std::io::{self, Write};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use crate::config::agent::Trouble;
use crate::config::{self, Loaded, Refused, Sources};
use crate::host::inventory::Inventory;
use crate::host::nvml::Driver;
use crate::plan::ServedGpu;
use crate::plan::{self, GpuPlan, Missing, Plan, PlanError};
use crate::problem::{LocatedProblem, Problem};

/// The exit status of a wrong configuration (`EX_CONFIG`), after which the unit is not restarted.
pub const BAD_CONFIGURATION: u8 = 78;

/// The time limit for NVML. A GPU that falls off the bus can make a question hang for ever.
const NVML_TIMEOUT: Duration = Duration::from_secs(15);

/// The result of the check: what a start would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Checked {
    /// The files have mistakes.
    Refused(Refused),
    /// The files have no mistakes in themselves, but don't fit this host.
    Wrong { problems: Vec<LocatedProblem>, loaded: Loaded },
    /// The configuration is right, whether or not this host can serve its GPUs now.
    Right {
        loaded: Loaded,
        /// The driver's version, or the reason why there is none. None if the driver was not asked.
        driver: Option<Result<String, Problem>>,
        /// The plan, or the reason why there is none now. Without `enable_cuda_mps` it is empty.
        plan: Result<Plan, Problem>,
        /// The entries without a GPU on this host now. The service waits for such a GPU, but the path may also be
        /// mistyped.
        missing: Vec<Missing>,
    },
}

impl Checked {
    /// The mistakes: problems of the files, and entries that certainly name no GPU of this host.
    pub fn problems(&self) -> Vec<LocatedProblem> {
        match self {
            Self::Refused(Refused { problems, .. }) | Self::Wrong { problems, .. } => problems.clone(),
            Self::Right { missing, .. } => {
                missing.iter().filter(|one| one.certain).map(|one| one.problem.clone()).collect()
            }
        }
    }

    /// The settings, if the files have no mistakes in themselves.
    pub fn loaded(&self) -> Option<&Loaded> {
        match self {
            Self::Refused(_) => None,
            Self::Wrong { loaded, .. } | Self::Right { loaded, .. } => Some(loaded),
        }
    }

    /// The warnings about the files, without the troubles of the host agent.
    pub fn warnings(&self) -> &[LocatedProblem] {
        match self {
            Self::Refused(refused) => &refused.warnings,
            Self::Wrong { loaded, .. } | Self::Right { loaded, .. } => &loaded.warnings,
        }
    }

    /// The settings with which the platform's host agent or its containers fail.
    pub fn agent(&self) -> &[Trouble] {
        self.loaded().map(|loaded| loaded.agent.as_slice()).unwrap_or_default()
    }
}

/// Reads the configuration, and asks the driver if the configuration asks for GPUs.
pub fn check(sources: &Sources) -> Checked {
    match config::load(sources) {
        Err(refused) => Checked::Refused(refused),
        Ok(loaded) if !loaded.settings.enabled => judge(loaded, None),
        Ok(loaded) => {
            let root = sources.sysroot.clone();
            let inventory = ask_driver(move |driver| Inventory::read(&root, driver));
            judge(loaded, Some(&inventory.unwrap_or_else(|reason| without_driver(&sources.sysroot, &reason))))
        }
    }
}

/// Asks NVML. If NVML hangs, the error says so.
pub fn ask_driver<T: Send + 'static>(
    ask: impl FnOnce(Result<&Driver, &Problem>) -> T + Send + 'static,
) -> Result<T, Problem> {
    let answer = within(NVML_TIMEOUT, move || {
        let driver = Driver::open();
        ask(driver.as_ref())
    });
    answer.ok_or_else(|| {
        Problem::new(
            format!("NVML did not answer within {} s", NVML_TIMEOUT.as_secs()),
            "look for NVRM lines in dmesg: where a GPU hangs nothing but a reboot helps, which ends every job on this \
             host",
        )
    })
}

/// The facts about the GPUs that are known without NVML.
pub fn without_driver(sysroot: &Path, reason: &Problem) -> Inventory {
    Inventory::read(sysroot, Err(reason))
}

/// Runs something that may hang, on a thread of its own. None if it does not end in time. The thread is then left
/// behind.
pub fn within<T: Send + 'static>(deadline: Duration, what: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (tell, answer) = mpsc::channel();
    std::thread::spawn(move || {
        // This fails if the caller no longer waits.
        let _ = tell.send(what());
    });
    answer.recv_timeout(deadline).ok()
}

/// The result of this configuration on a host with these GPUs.
pub fn judge(mut loaded: Loaded, inventory: Option<&Inventory>) -> Checked {
    let Some(inventory) = inventory.filter(|_| loaded.settings.enabled) else {
        return Checked::Right { loaded, driver: None, plan: Ok(Plan::default()), missing: Vec::new() };
    };
    for trouble in &mut loaded.agent {
        if let Some(node) = trouble.path.as_ref().and_then(|path| plan::render_node(path, inventory)) {
            trouble.name_render_node(node);
        }
    }
    let driver = Some(inventory.driver.clone());
    let (plan, missing) = match plan::plan(&loaded.settings, inventory, &[]) {
        Ok(plan) => (Ok(plan.clone()), plan.missing),
        Err(PlanError::NotYet(reason)) => (Err(reason), Vec::new()),
        Err(PlanError::Missing(missing)) => (Err("no entry of the device file has its GPU".into()), missing),
        Err(PlanError::Problems(problems)) => return Checked::Wrong { problems, loaded },
    };
    Checked::Right { loaded, driver, plan, missing }
}

/// The result in words.
pub fn words(checked: &Checked) -> String {
    let mut words = Vec::new();
    // Nothing can go wrong here: it is written to memory.
    let _ = write(checked, &mut words);
    String::from_utf8_lossy(&words).into_owned()
}

fn write(checked: &Checked, out: &mut dyn Write) -> io::Result<()> {
    for warning in checked.warnings().iter().chain(checked.agent().iter().map(|trouble| &trouble.problem)) {
        writeln!(out, "warning: {warning}")?;
    }
    if let Some(loaded) = checked.loaded() {
        let none = loaded.settings.sources.is_empty();
        let files = if none { "none, all defaults".to_owned() } else { loaded.files() };
        writeln!(out, "configuration: {files}")?;
    }
    match checked {
        Checked::Refused(Refused { problems, .. }) | Checked::Wrong { problems, .. } => {
            for problem in problems {
                writeln!(out, "error: {problem}")?;
            }
        }
        Checked::Right { loaded, .. } if !loaded.settings.enabled => {
            writeln!(out, "enable_cuda_mps is false: no GPU would be served")?;
        }
        Checked::Right { driver, plan, missing, .. } => {
            match driver {
                Some(Ok(version)) => writeln!(out, "driver: {version}")?,
                Some(Err(reason)) => writeln!(out, "driver: none: {reason}")?,
                None => {}
            }
            match plan {
                Ok(plan) => write_plan(plan, out)?,
                Err(reason) => writeln!(out, "no GPU could be served now: {reason}")?,
            }
            for Missing { problem, certain, .. } in missing {
                let word = if *certain { "error" } else { "not served" };
                writeln!(out, "{word}: {problem}")?;
            }
        }
    }
    Ok(())
}

fn write_plan(plan: &Plan, out: &mut dyn Write) -> io::Result<()> {
    if plan.gpus.is_empty() {
        writeln!(out, "no GPU would be served: {}", plan.nothing)?;
    }
    for gpu in &plan.gpus {
        write_gpu(gpu, out)?;
    }
    for control_daemon in &plan.control_daemons {
        let gpus: Vec<String> = control_daemon.gpus.iter().map(ServedGpu::name).collect();
        writeln!(
            out,
            "control daemon {}: GPUs {}; active thread percentage {}; {}; {}pipe directory {}; log directory {}",
            control_daemon.id,
            gpus.join(", "),
            control_daemon.thread_percentage,
            if control_daemon.multiuser { "one server for all users" } else { "a server per user" },
            control_daemon.cpus.map(|cpus| format!("bound to CPUs {cpus}; ")).unwrap_or_default(),
            control_daemon.pipe_directory.display(),
            control_daemon.log_directory.display(),
        )?;
    }
    Ok(())
}

fn write_gpu(plan: &GpuPlan, out: &mut dyn Write) -> io::Result<()> {
    let name = plan.gpu.id().to_string();
    let uuid = plan.gpu.uuid().unwrap_or("UUID unknown");
    write!(out, "GPU {name} {} ({uuid}): ", plan.gpu.model())?;
    let share = format!(
        "{} MiB and {} % of the threads{}{}",
        plan.memory_limit_mib,
        plan.thread_percentage,
        if plan.limits_enforced { "" } else { " (not enforced by this GPU)" },
        plan.max_clients.map(|most| format!(", for {most} clients at most")).unwrap_or_default(),
    );
    match plan.unusable() {
        Some(reason) => writeln!(out, "not served: {reason}")?,
        None if plan.slices == 1 => writeln!(out, "1 slice, {name}-0, {share}")?,
        None => {
            let (slices, last) = (plan.slices, plan.slices.saturating_sub(1));
            writeln!(out, "{slices} slices, {name}-0 to {name}-{last}, each {share}")?;
        }
    }
    for warning in &plan.warnings {
        writeln!(out, "  warning: {}", warning.problem.found)?;
    }
    Ok(())
}
