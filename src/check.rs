//! `--check`: the plan or the errors, and nothing changed.

use std::io::{self, Write};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use crate::config::agent::Trouble;
use crate::config::{self, Loaded, Problem, Refused, Sources};
use crate::host::gpu::Inventory;
use crate::host::nvml::Driver;
use crate::plan::{self, GpuPlan, Missing, Plan, PlanError};

/// How long NVML may take. A GPU that is about to fall off the bus can hold a question for ever.
const NVML_TIMEOUT: Duration = Duration::from_secs(15);

/// What a start would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Checked {
    /// The files are wrong.
    Refused(Refused),
    /// The files are right in themselves, and wrong for this host.
    Wrong {
        /// What is wrong, at least one.
        problems: Vec<Problem>,
        /// What was read.
        loaded: Loaded,
    },
    /// It is right in itself, whether or not this host can serve it now.
    Right {
        /// What was read.
        loaded: Loaded,
        /// The driver's version, or why there is none; None where nobody has asked for it.
        driver: Option<Result<String, String>>,
        /// The plan, or why there can be none now. Without `enable_cuda_mps` it is empty.
        plan: Result<Plan, String>,
        /// The entries for which this host has no GPU now. The service waits for one; who asks may have mistyped.
        missing: Vec<Missing>,
    },
}

impl Checked {
    /// The mistakes: those in the files, and the entries that certainly name no GPU of this host.
    pub fn problems(&self) -> Vec<Problem> {
        match self {
            Self::Refused(Refused { problems, .. }) | Self::Wrong { problems, .. } => problems.clone(),
            Self::Right { missing, .. } => {
                missing.iter().filter(|one| one.certain).map(|one| one.problem.clone()).collect()
            }
        }
    }

    /// What was read, where the files in themselves are right.
    pub fn loaded(&self) -> Option<&Loaded> {
        match self {
            Self::Refused(_) => None,
            Self::Wrong { loaded, .. } | Self::Right { loaded, .. } => Some(loaded),
        }
    }

    /// What an administrator should look at in the files, besides what the host agent makes of them.
    pub fn warnings(&self) -> &[Problem] {
        match self {
            Self::Refused(refused) => &refused.warnings,
            Self::Wrong { loaded, .. } | Self::Right { loaded, .. } => &loaded.warnings,
        }
    }

    /// With what the platform's host agent or its containers fail.
    pub fn agent(&self) -> &[Trouble] {
        self.loaded().map(|loaded| loaded.agent.as_slice()).unwrap_or_default()
    }

    fn verdict(&self) -> Verdict {
        if self.problems().is_empty() { Verdict::Right } else { Verdict::Wrong }
    }
}

/// What the check has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The configuration is right, as far as this host can tell now.
    Right,
    /// It is not, or an entry names no GPU of this host; the problems have been written.
    Wrong,
}

/// Reads the configuration and, where it asks for GPUs, looks at them.
pub fn look(sources: &Sources) -> Checked {
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

/// Asks NVML. The error says that it hangs, and behind the last semicolon what to do.
pub(crate) fn ask_driver<T: Send + 'static>(
    ask: impl FnOnce(Result<&Driver, &str>) -> T + Send + 'static,
) -> Result<T, String> {
    let answer = within(NVML_TIMEOUT, move || {
        let driver = Driver::open();
        ask(driver.as_ref().map_err(String::as_str))
    });
    answer.ok_or_else(|| {
        format!(
            "NVML did not answer within {} s; look for NVRM lines in dmesg: where a GPU hangs nothing but a reboot helps, \
             which ends every job on this host",
            NVML_TIMEOUT.as_secs()
        )
    })
}

/// What there is to see without NVML.
pub(crate) fn without_driver(sysroot: &Path, reason: &str) -> Inventory {
    Inventory::read(sysroot, Err(reason))
}

/// Has something done that may hang, by a thread that is then left behind. None: no end of it in time.
pub(crate) fn within<T: Send + 'static>(
    deadline: Duration,
    what: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (tell, answer) = mpsc::channel();
    std::thread::spawn(move || {
        // Nobody waits any more: too late.
        let _ = tell.send(what());
    });
    answer.recv_timeout(deadline).ok()
}

/// What the configuration comes to with these GPUs.
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
        Err(PlanError::Missing(missing)) => {
            (Err("no entry of the device file has its GPU".to_owned()), missing)
        }
        Err(PlanError::Problems(problems)) => return Checked::Wrong { problems, loaded },
    };
    Checked::Right { loaded, driver, plan, missing }
}

/// Writes what a start would do. The error is that of writing.
pub fn run(sources: &Sources, out: &mut dyn Write) -> io::Result<Verdict> {
    write(&look(sources), out)
}

/// Writes it in words.
pub fn write(checked: &Checked, out: &mut dyn Write) -> io::Result<Verdict> {
    for warning in checked.warnings().iter().chain(checked.agent().iter().map(|trouble| &trouble.problem)) {
        writeln!(out, "warning: {warning}")?;
    }
    if let Some(loaded) = checked.loaded() {
        let none = loaded.settings.sources.is_empty();
        writeln!(
            out,
            "configuration: {}",
            if none { "none, all defaults".to_owned() } else { loaded.files() }
        )?;
    }
    match checked {
        Checked::Refused(Refused { problems, .. }) | Checked::Wrong { problems, .. } => {
            for problem in problems {
                writeln!(out, "error: {problem}")?;
            }
        }
        Checked::Right { loaded, driver, plan, missing } => {
            if !loaded.settings.enabled {
                writeln!(out, "enable_cuda_mps is false: no GPU would be served")?;
                return Ok(checked.verdict());
            }
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
    Ok(checked.verdict())
}

fn write_plan(plan: &Plan, out: &mut dyn Write) -> io::Result<()> {
    if plan.gpus.is_empty() {
        writeln!(out, "no GPU would be served: {}", plan.nothing)?;
    }
    for gpu in &plan.gpus {
        write_gpu(gpu, out)?;
    }
    for control_daemon in &plan.control_daemons {
        let gpus: Vec<String> = control_daemon.gpus.iter().map(|gpu| gpu.pci.short()).collect();
        writeln!(
            out,
            "control daemon {}: GPUs {}; active thread percentage {}; {}; pipe directory {}; log directory {}",
            control_daemon.id,
            gpus.join(", "),
            control_daemon.thread_percentage,
            if control_daemon.multiuser { "one server for all users" } else { "a server per user" },
            control_daemon.pipe_directory.display(),
            control_daemon.log_directory.display(),
        )?;
    }
    Ok(())
}

fn write_gpu(plan: &GpuPlan, out: &mut dyn Write) -> io::Result<()> {
    let name = plan.gpu.pci.address.short();
    let uuid = plan.gpu.nvml.as_ref().map(|facts| facts.uuid.as_str()).unwrap_or("UUID unknown");
    write!(out, "GPU {name} {} ({uuid}): ", plan.gpu.model())?;
    let share = format!(
        "{} MiB and {} % of the threads{}",
        plan.memory_limit_mib,
        plan.thread_percentage,
        if plan.limits_enforced { "" } else { " (not enforced by this GPU)" },
    );
    match &plan.unusable {
        Some(reason) => writeln!(out, "not served: {reason}")?,
        None if plan.slices == 1 => writeln!(out, "1 slice, {name}-0, {share}")?,
        None => writeln!(
            out,
            "{} slices, {name}-0 to {name}-{}, each {share}",
            plan.slices,
            plan.slices.saturating_sub(1),
        )?,
    }
    for warning in &plan.warnings {
        writeln!(out, "  warning: {warning}")?;
    }
    Ok(())
}
