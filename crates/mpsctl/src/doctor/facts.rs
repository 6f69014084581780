//! The facts about the host that the checks of `doctor` judge. The facts are gathered once, before the first check.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use tokio::process::Command;

use super::DEADLINE;
use crate::toolkit::WHERE_CUDA_LOOKS;
use common::bus::answers::Published;
use common::bus::proxy::{BusError, Listed};
use common::bus::rows::ControlDaemon;
use common::check::{self, Checked};
use common::config::{self, Loaded, Refused, Settings, Sources};
use common::host::driver;
use common::host::gpu::Gpu;
use common::host::identity;
use common::host::inventory::Inventory;
use common::host::nvml::Driver;
use common::host::nvml::facts::NvmlFacts;
use common::host::proc;
use common::host::program::find_program;
use common::host::socket::listener;
use common::host::systemd::{self, UnitProperties};
use common::plan::Plan;
use common::problem::{LocatedProblem, Origin, Problem};
use common::state_file::{self, Running};

pub(super) const UNIT: &str = "yunion-mps-daemon.service";

pub(super) const CONTROL: &str = "nvidia-cuda-mps-control";

/// The name that the kernel reports for control daemons and for servers, since the kernel cuts process names after 15 bytes.
const MPS_COMMAND: &str = "nvidia-cuda-mps";

pub(super) struct Facts {
    pub(super) sources: Sources,
    pub(super) checked: Checked,
    pub(super) inventory: Inventory,
    /// The facts that the inventory lacks, for each GPU by its UUID.
    pub(super) gpus: BTreeMap<String, GpuNow>,
    /// The CUDA version of the driver: 13000 means CUDA 13.0.
    pub(super) cuda: Option<u32>,
    /// The CUDA version of the control daemon's program. None before driver 580, since the program can't print its version.
    pub(super) program_cuda: Option<u32>,
    pub(super) bus: Result<Published, BusError>,
    pub(super) unit: Result<UnitProperties, Problem>,
    pub(super) runtime_directory: PathBuf,
    pub(super) state_file: Result<Vec<Running>, Problem>,
    pub(super) control_daemons: Vec<FoundDaemon>,
}

#[derive(Debug, Clone)]
pub(super) struct GpuNow {
    /// True if the driver preserves the state of the GPU while no program uses the GPU. None if the driver did not report the
    /// persistence mode.
    pub(super) persistence: Option<bool>,
    servers: Vec<u32>,
}

/// A control daemon on this host, which the service or another program has started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FoundDaemon {
    pub(super) pid: u32,
    /// The way in which `doctor` found the control daemon, as the beginning of a sentence.
    pub(super) trace: String,
    /// The directory in which the control daemon listens. None if `doctor` may not read the environment of the control daemon.
    pub(super) pipe_directory: Option<PathBuf>,
    /// True if the control daemon is in another mount namespace than `doctor`, as in a container.
    pub(super) elsewhere: bool,
}

impl FoundDaemon {
    fn new(pid: u32, trace: String) -> Self {
        let own = proc::mount_namespace(proc::OWN).ok();
        let elsewhere = proc::mount_namespace(pid).is_ok_and(|its| own != Some(its));
        Self { pid, trace, pipe_directory: pipe_directory(pid), elsewhere }
    }
}

impl Facts {
    pub(super) async fn gather(mut sources: Sources) -> Self {
        let bus = Published::ask().await;
        sources.config = sources.config.or_else(|| bus.as_ref().ok()?.config(&sources.sysroot));
        let (inventory, gpus, cuda) = ask_driver(&sources.sysroot);
        let checked = match load(&sources) {
            Ok(loaded) => check::judge(loaded, Some(&inventory)),
            Err(refused) => Checked::Refused(refused),
        };
        // `RUNTIME_DIRECTORY` is not used: systemd sets this variable to the directory of the unit in which `doctor` runs.
        let runtime_directory = config::below(&sources.sysroot, Path::new("/run/yunion-mps-daemon"));
        let mut facts = Self {
            checked,
            inventory,
            gpus,
            cuda,
            program_cuda: program_cuda().await,
            bus,
            unit: systemd::unit(UNIT).await,
            state_file: state_file::control_daemons(&runtime_directory),
            runtime_directory,
            control_daemons: Vec::new(),
            sources,
        };
        facts.control_daemons = facts.find_control_daemons();
        facts
    }

    pub(super) fn file(&self, path: impl AsRef<Path>) -> PathBuf {
        config::below(&self.sources.sysroot, path.as_ref())
    }

    /// False if `doctor` checks the files of another host below a sysroot. The processes of this machine are then not those of
    /// that host.
    pub(super) fn own_processes(&self) -> bool {
        self.sources.sysroot == Path::new("/")
    }

    pub(super) fn loaded(&self) -> Result<&Loaded, Problem> {
        self.checked.loaded().ok_or_else(|| "the configuration can't be read".into())
    }

    pub(super) fn enabled(&self) -> Result<&Settings, Problem> {
        let settings = &self.loaded()?.settings;
        if settings.enabled { Ok(settings) } else { Err("MPS is not enabled".into()) }
    }

    pub(super) fn plan(&self) -> Result<&Plan, Problem> {
        match &self.checked {
            Checked::Right { plan: Ok(plan), .. } => Ok(plan),
            _ => Err("the service could not choose the GPUs to serve".into()),
        }
    }

    pub(super) fn published(&self) -> Result<&Published, Problem> {
        self.bus.as_ref().map_err(|_| "yunion-mps-daemon does not answer on the bus".into())
    }

    pub(super) fn own_control_daemons(&self) -> &[Listed<ControlDaemon>] {
        self.bus.as_ref().map(|published| published.control_daemons.as_slice()).unwrap_or_default()
    }

    pub(super) fn known_gpus(&self) -> impl Iterator<Item = (&Gpu, &NvmlFacts)> {
        self.inventory.gpus.iter().filter_map(|gpu| Some((gpu, gpu.facts()?)))
    }

    /// The pipe directory and the log directory of each planned control daemon. Without a plan, the result is the directories
    /// in the settings.
    pub(super) fn directories(&self) -> Result<Vec<(PathBuf, PathBuf)>, Problem> {
        let settings = self.enabled()?;
        let planned = self.plan().map(|plan| plan.control_daemons.as_slice()).unwrap_or_default();
        if planned.is_empty() {
            return Ok(vec![(settings.pipe_directory.clone(), settings.log_directory.clone())]);
        }
        Ok(planned.iter().map(|one| (one.pipe_directory.clone(), one.log_directory.clone())).collect())
    }

    /// The directories with the control daemons' own sockets. A control daemon without a private directory has its own sockets
    /// in the pipe directory, and is omitted.
    pub(super) fn private_directories(&self) -> impl Iterator<Item = PathBuf> {
        let private = |daemon: &&Listed<ControlDaemon>| daemon.control_directory != daemon.pipe_directory;
        self.own_control_daemons()
            .iter()
            .filter(private)
            .map(|daemon| PathBuf::from(&daemon.control_directory))
    }

    pub(super) fn all_directories(&self) -> Result<impl Iterator<Item = PathBuf>, String> {
        let directories = self.directories()?.into_iter().flat_map(|(pipe, log)| [pipe, log]);
        Ok(directories.chain(self.private_directories()))
    }

    /// True if the service has started the control daemon. The state file names the control daemons of a service that does not
    /// run now.
    pub(super) fn is_ours(&self, daemon: u32) -> bool {
        let written = self.state_file.as_deref().unwrap_or_default();
        self.own_control_daemons().iter().any(|published| published.pid == Some(daemon))
            || written.iter().any(|running| identity::read(daemon).is_ok_and(|now| now == running.process))
    }

    /// Finds control daemons in three ways: by the sockets in the pipe directories, by the servers on the GPUs, and by the
    /// names of processes. Each control daemon is listed once.
    fn find_control_daemons(&self) -> Vec<FoundDaemon> {
        let mut found: Vec<FoundDaemon> = Vec::new();
        let mut add = |daemon: FoundDaemon| {
            if !found.iter().any(|known| known.pid == daemon.pid) {
                found.push(daemon);
            }
        };
        let default = self.file(WHERE_CUDA_LOOKS);
        let configured = self.directories().unwrap_or_default().into_iter().map(|(pipe, _)| pipe);
        for directory in configured.chain([default]) {
            if let Some(pid) = listener(&directory) {
                let trace =
                    format!("the control daemon listens in {directory}", directory = directory.display());
                add(FoundDaemon { pid, trace, pipe_directory: Some(directory), elsewhere: false });
            }
        }
        for (uuid, gpu) in &self.gpus {
            for server in &gpu.servers {
                let parent = proc::stat(*server).ok().map(|stat| stat.parent);
                let Some(pid) = parent.filter(|pid| is_mps(*pid)) else { continue };
                add(FoundDaemon::new(pid, format!("server {server} of the control daemon uses GPU {uuid}")));
            }
        }
        if self.own_processes() {
            for pid in proc::pids().into_iter().filter(|pid| is_control_daemon(*pid)) {
                add(FoundDaemon::new(pid, "the control daemon runs".to_owned()));
            }
        }
        found
    }
}

/// Reads the configuration with a time limit, since a file system may hang.
fn load(sources: &Sources) -> Result<Loaded, Refused> {
    let all = sources.clone();
    check::within(DEADLINE, move || config::load(&all)).unwrap_or_else(|| {
        let file = sources.main_files().first().map(|file| file.to_path_buf()).unwrap_or_default();
        let found = format!(
            "this file, or a file that is read after this one, can't be read within {seconds} s",
            seconds = DEADLINE.as_secs()
        );
        let remedy = "find out if a file system hangs: findmnt -T FILE, dmesg";
        let problem = LocatedProblem::new(Origin::whole(&file), "", found, remedy);
        Err(Refused { problems: vec![problem], warnings: Vec::new() })
    })
}

fn ask_driver(sysroot: &Path) -> (Inventory, BTreeMap<String, GpuNow>, Option<u32>) {
    let root = sysroot.to_owned();
    let answer = check::ask_driver(sysroot, move |mut nvml| {
        let inventory = Inventory::read(&root, nvml.as_deref_mut().map_err(|reason| *reason));
        let driver = nvml.map(|nvml| Arc::clone(nvml.driver()));
        let uuids = inventory.gpus.iter().filter_map(|gpu| gpu.uuid().map(str::to_owned));
        let gpus =
            driver.iter().flat_map(|driver| uuids.clone().map(|uuid| (uuid.clone(), now(driver, &uuid))));
        let gpus = gpus.collect();
        let cuda = driver.as_ref().ok().and_then(|driver| driver.cuda_version().ok());
        (inventory, gpus, cuda)
    });
    answer.unwrap_or_else(|reason| (Inventory::read(sysroot, Err(&reason)), BTreeMap::new(), None))
}

/// Returns the CUDA version that the control daemon's program prints. Before driver 580 the program does not know the option
/// for its version, and acts as a front end instead. The pipe directory `/dev/null` ensures that this front end finds no
/// control daemon.
async fn program_cuda() -> Option<u32> {
    let mut command = Command::new(find_program(CONTROL).ok()?);
    command
        .arg(driver::VERSION_OPTION)
        .env("CUDA_MPS_PIPE_DIRECTORY", "/dev/null")
        .env(driver::PROTOCOL.0, driver::PROTOCOL.1)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let answer = tokio::time::timeout(DEADLINE, command.output()).await.ok()?.ok()?;
    let text = String::from_utf8_lossy(&answer.stdout).into_owned();
    text.split_once("Binary version: ")?.1.split_whitespace().next()?.parse().ok()
}

fn now(driver: &Driver, uuid: &str) -> GpuNow {
    let processes = driver.processes(uuid).unwrap_or_default();
    let direct = processes.into_iter().filter(|process| !process.via_mps).map(|process| process.pid);
    GpuNow {
        persistence: driver.persistence_mode(uuid).ok(),
        servers: direct.filter(|pid| is_mps(*pid)).collect(),
    }
}

fn is_mps(pid: u32) -> bool {
    proc::name(pid).is_some_and(|name| name == MPS_COMMAND)
}

/// The kernel reports the same short name for control daemons and servers, so the arguments decide. The arguments are in the
/// memory of the process, and reading them hangs if the process hangs. So the short name is read first, and the arguments of
/// processes with any other name are not read.
fn is_control_daemon(pid: u32) -> bool {
    if !is_mps(pid) {
        return false;
    }
    let arguments = proc::arguments(pid);
    arguments.first().is_some_and(|program| Path::new(program).ends_with(CONTROL))
        && driver::starts_control_daemon(&arguments)
}

pub(super) fn variable(pid: u32, name: &str) -> Result<Option<String>, Problem> {
    let environment = proc::environment(pid)
        .map_err(|error| format!("the environment of PID {pid} can't be read: {error}"))?;
    Ok(proc::variable(&environment, name).map(|value| String::from_utf8_lossy(value).into_owned()))
}

fn pipe_directory(pid: u32) -> Option<PathBuf> {
    let value = variable(pid, "CUDA_MPS_PIPE_DIRECTORY").ok()?;
    Some(value.map_or_else(|| PathBuf::from(WHERE_CUDA_LOOKS), PathBuf::from))
}
