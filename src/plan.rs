//! The plan: the control daemons to run, with their GPUs, slices and limits. It is a pure function of the settings and
//! the host's GPUs.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use crate::config::{DevicePath, MultiUser, Origin, Problem, Settings, ThreadPolicy, Topology};
use crate::host::driver::{self, LIMITS, MULTI_USER, Series};
use crate::host::gpu::{ComputeMode, Gpu, NvmlFacts, PciAddress, PciDevice};
use crate::host::inventory::Inventory;
use crate::reason::Reason;

/// The control daemons, GPUs and slices that should exist, and the reasons why some of them can't. The default is the
/// plan of a configuration without GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Plan {
    /// Every GPU of the configuration, in its order, served or not.
    pub gpus: Vec<GpuPlan>,
    /// The entries of the device file without a GPU on this host now.
    pub missing: Vec<Missing>,
    /// The control daemons that serve the GPUs.
    pub control_daemons: Vec<ControlDaemonPlan>,
    /// The GPUs of the configuration, by UUID.
    pub configured: Configured,
    /// The reason why there is no GPU, in words for an administrator. Empty if there is a GPU, or if none is asked for.
    pub nothing: String,
}

/// An entry of the device file without a GPU on this host now. The GPU may come, or come back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Missing {
    /// The entry, the finding and the remedy.
    pub problem: Problem,
    /// Its path.
    pub path: DevicePath,
    /// Whether this is certain. It is not while a GPU that may be the right one can't be asked.
    pub certain: bool,
}

/// The GPUs that a configuration names, as far as their UUIDs are known.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Configured {
    certainly: BTreeSet<String>,
    /// Set while some entry's GPU has no known UUID: the GPUs that are certainly not that GPU. None if all are known.
    others: Option<BTreeSet<String>>,
}

impl Configured {
    /// Whether the configuration names the GPU with this UUID, or may name it.
    pub(crate) fn may_have(&self, uuid: &str) -> bool {
        self.certainly.contains(uuid) || self.others.as_ref().is_some_and(|others| !others.contains(uuid))
    }

    fn new(gpus: &[GpuPlan], missing: &[Missing], inventory: &Inventory) -> Self {
        let uuid = |gpu: &Gpu| gpu.nvml.as_ref().ok().map(|facts| facts.uuid.clone());
        let certainly: BTreeSet<String> = gpus.iter().filter_map(|plan| uuid(&plan.gpu)).collect();
        let told = missing.is_empty() && gpus.iter().all(|plan| plan.gpu.nvml.is_ok());
        let can_be = |gpu: &Gpu| missing.iter().any(|missing| can_be(&missing.path, gpu));
        let others = inventory.gpus.iter().filter(|gpu| !can_be(gpu)).filter_map(uuid);
        Self { others: (!told).then(|| others.collect()), certainly }
    }
}

/// Whether a path without a GPU may belong to this GPU, since the host does not report the GPU's name of that kind.
fn can_be(path: &DevicePath, gpu: &Gpu) -> bool {
    match path {
        DevicePath::RenderNode(_) => gpu.pci.render_node.is_none(),
        DevicePath::NvidiaMinor(_) => gpu.nvml.as_ref().is_ok_and(|facts| facts.minor.is_none()),
        DevicePath::Pci(_) | DevicePath::ShortPci(_) | DevicePath::Uuid(_) | DevicePath::Other(_) => false,
    }
}

/// One configured GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuPlan {
    /// The facts about it.
    pub gpu: Gpu,
    /// The number of its slices.
    pub slices: u32,
    /// The memory of one slice: the GPU's memory divided by the number of slices, in whole MiB. 0 if the memory is not
    /// known.
    pub memory_limit_mib: u64,
    /// The active thread percentage of one slice, 1 to 100.
    pub thread_percentage: u8,
    /// Whether the GPU enforces the two limits.
    pub limits_enforced: bool,
    /// The reason why it can't be served now, if there is one.
    pub unusable: Option<String>,
    /// Facts that an administrator should know, although the GPU is served.
    pub warnings: Vec<Warning>,
    /// The directory in which its clients connect.
    pub pipe_directory: PathBuf,
}

/// A fact about a GPU that an administrator should know, although the GPU is served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Warning {
    /// Nobody knows whether the GPU enforces limits.
    #[error("NVML does not report its compute capability, so it counts as a GPU that enforces no limits")]
    NoComputeCapability,
    /// The GPU can't hold a client for each slice.
    #[error("{slices} slices, but the GPU can hold {clients} clients at once")]
    MoreSlicesThanClients {
        /// The number of slices.
        slices: u32,
        /// The number of clients that the GPU can hold.
        clients: u32,
    },
    /// The GPU is older than Volta.
    #[error(
        "compute capability {}.{} enforces neither the memory limit nor the thread percentage",
        capability.0, capability.1
    )]
    NotEnforced {
        /// Major and minor.
        capability: (u32, u32),
    },
    /// An entry of another type names the same GPU. That entry's user can't work with the compute mode for MPS.
    #[error("{origin} lists it as {device_type} too")]
    GivenOutTwice {
        /// The other entry.
        origin: Origin,
        /// Its type.
        device_type: String,
    },
    /// The control daemon's default percentage belongs to another GPU, which has larger slices.
    #[error(
        "the shared control daemon's default is {default} %, so only clients that set \
         CUDA_MPS_ACTIVE_THREAD_PERCENTAGE keep to {own} %"
    )]
    LooseThreads {
        /// The control daemon's percentage.
        default: u8,
        /// The percentage of this GPU's slices.
        own: u8,
    },
    /// The control daemon's default memory limit belongs to another GPU, which has larger slices.
    #[error(
        "the shared control daemon's default is {default_mib} MiB, so only clients that set \
         CUDA_MPS_PINNED_DEVICE_MEM_LIMIT keep to {own_mib} MiB"
    )]
    LooseMemory {
        /// The control daemon's limit.
        default_mib: u64,
        /// The limit of this GPU's slices.
        own_mib: u64,
    },
}

/// One control daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ControlDaemonPlan {
    /// `shared`, or the GPU's UUID.
    pub id: String,
    /// `CUDA_MPS_PIPE_DIRECTORY`.
    pub pipe_directory: PathBuf,
    /// `CUDA_MPS_LOG_DIRECTORY`.
    pub log_directory: PathBuf,
    /// The GPUs, in the order of `CUDA_VISIBLE_DEVICES`. They are sorted by address, so ordinals don't depend on the
    /// order of entries.
    pub gpus: Vec<ServedGpu>,
    /// The driver's series.
    pub driver: Series,
    /// The default active thread percentage: the largest percentage of its GPUs.
    pub thread_percentage: u8,
    /// Whether to ask for one server for the clients of every user.
    pub multiuser: bool,
    /// Whether the control daemon is started without that if its driver refuses it.
    pub multiuser_optional: bool,
    /// Whether the server is started before the first client.
    pub prewarm: bool,
}

/// A running control daemon: the properties that only another control daemon can change.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Present<'a> {
    /// Its `CUDA_MPS_PIPE_DIRECTORY`.
    pub pipe_directory: &'a Path,
    /// Its `CUDA_MPS_LOG_DIRECTORY`.
    pub log_directory: &'a Path,
    /// The UUIDs of its GPUs.
    pub gpus: &'a [String],
    /// Whether one server serves every user.
    pub multiuser: bool,
}

impl ControlDaemonPlan {
    /// The GPUs that the control daemon serves as planned only after it has been told more than for `before`.
    pub(crate) fn to_be_set_since<'a>(&'a self, before: &'a Self) -> impl Iterator<Item = &'a str> {
        self.gpus
            .iter()
            .filter(move |gpu| gpu.needs_other_defaults(self, before))
            .map(|gpu| gpu.uuid.as_str())
    }

    /// The part of this plan that a running control daemon can't fulfil, so that another must take its place. A GPU
    /// that is not `reachable` is ignored.
    pub(crate) fn misfit(&self, present: &Present<'_>, reachable: impl Fn(&str) -> bool) -> Option<String> {
        let joins = self.gpus.iter().find(|gpu| reachable(&gpu.uuid) && !present.gpus.contains(&gpu.uuid));
        let leaves = present.gpus.iter().find(|uuid| !self.gpus.iter().any(|gpu| gpu.uuid == **uuid));
        if present.pipe_directory != self.pipe_directory {
            Some(format!("the pipe directory becomes {}", self.pipe_directory.display()))
        } else if present.log_directory != self.log_directory {
            Some(format!("the log directory becomes {}", self.log_directory.display()))
        } else if let Some(gpu) = joins {
            Some(format!("{} joins", gpu.uuid))
        } else if let Some(uuid) = leaves {
            Some(format!("{uuid} leaves"))
        } else if present.multiuser && !self.multiuser {
            Some("multi-user mode is switched off".to_owned())
        } else if !present.multiuser && self.multiuser && !self.multiuser_optional {
            Some("multi-user mode is switched on".to_owned())
        } else {
            None
        }
    }
}

/// A GPU of a control daemon. Its position is its ordinal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServedGpu {
    /// The UUID.
    pub uuid: String,
    /// The address, for messages and the state file.
    pub pci: PciAddress,
    /// The default device pinned memory limit in MiB: the largest limit of the control daemon's slices.
    pub memory_limit_mib: u64,
    /// The memory of one of its slices in MiB.
    pub slice_memory_mib: u64,
    /// The active thread percentage of one of its slices.
    pub slice_thread_percentage: u8,
    /// Whether the GPU enforces limits.
    pub limits_enforced: bool,
    /// The number of clients that it can hold at once.
    pub places: u32,
}

impl ServedGpu {
    /// Whether the clients of its slices get the planned limits only after the control daemon has other defaults than
    /// in `before`. A slice that keeps its own limits waits for nothing, even if the defaults change.
    fn needs_other_defaults(&self, plan: &ControlDaemonPlan, before: &ControlDaemonPlan) -> bool {
        let Some(known) = before.gpus.iter().find(|known| known.uuid == self.uuid) else { return true };
        // A default below the slice's new limit gives its clients too little. If the slice's new limit is also the new
        // default, the old default does not limit its clients to it.
        let memory = known.slice_memory_mib != self.slice_memory_mib
            && known.memory_limit_mib != self.memory_limit_mib
            && (self.slice_memory_mib > known.memory_limit_mib
                || self.slice_memory_mib == self.memory_limit_mib);
        let threads = known.slice_thread_percentage != self.slice_thread_percentage
            && before.thread_percentage != plan.thread_percentage
            && (self.slice_thread_percentage > before.thread_percentage
                || self.slice_thread_percentage == plan.thread_percentage);
        memory || threads
    }
}

/// The reason why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PlanError {
    /// The configuration is wrong until someone corrects it. This has every problem, at least one.
    #[error("{}", Lines(.0))]
    Problems(Vec<Problem>),
    /// The host has none of the configured GPUs. This has their entries, at least one.
    #[error("{}", Lines(&problems(.0)))]
    Missing(Vec<Missing>),
    /// The configuration can't be checked yet, since there is no driver. The reason is in words for an administrator.
    #[error("{0}")]
    NotYet(Reason),
}

/// The problems of these entries.
pub(crate) fn problems(missing: &[Missing]) -> Vec<Problem> {
    missing.iter().map(|missing| missing.problem.clone()).collect()
}

struct Lines<'a>(&'a [Problem]);

impl fmt::Display for Lines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            problem.fmt(f)?;
        }
        Ok(())
    }
}

impl GpuPlan {
    /// Whether the GPU can be served, even if not now. If not, an administrator has to change the GPU first.
    pub fn servable(&self) -> bool {
        match &self.gpu.nvml {
            Ok(facts) => obstacles(&self.gpu, facts).is_empty(),
            Err(_) => self.gpu.pci.foreign_driver().is_none(),
        }
    }

    /// The processes without MPS, if they alone keep the GPU from being served.
    pub fn holders(&self) -> &[(u32, String)] {
        match &self.gpu.nvml {
            Ok(facts) if self.unusable.is_some() && ailments(&self.gpu).is_empty() => {
                &facts.foreign_processes
            }
            _ => &[],
        }
    }
}

/// Makes the plan. A GPU that does not work or is not there is a state of that GPU or of its entry, and no error. A GPU
/// from the plan `before` that has gone keeps its place, so its devices become unhealthy but still exist.
///
/// # Errors
/// The configuration is wrong, or can't be checked yet.
pub(crate) fn plan(
    settings: &Settings,
    inventory: &Inventory,
    before: &[GpuPlan],
) -> Result<Plan, PlanError> {
    let before = Inventory {
        driver: Ok(String::new()),
        gpus: before.iter().map(|plan| plan.gpu.clone()).collect(),
        others: Vec::new(),
    };
    let (wanted, missing) = wanted(settings, inventory, &before)?;
    let mut gpus: Vec<GpuPlan> =
        wanted.into_iter().map(|wanted| gpu_plan(&wanted, settings, inventory)).collect();
    warn_of_other_claims(&mut gpus, settings, inventory);
    let control_daemons = control_daemons(&gpus, settings, inventory);
    warn_of_loose_defaults(&mut gpus, &control_daemons);
    let configured = Configured::new(&gpus, &missing, inventory);
    let nothing = if gpus.is_empty() { why_nothing(settings, inventory) } else { String::new() };
    Ok(Plan { gpus, missing, control_daemons, configured, nothing })
}

/// A GPU that the configuration asks for.
struct Wanted<'a> {
    gpu: &'a Gpu,
    slices: NonZeroU32,
    /// The percentage in the GPU's own entry.
    thread_percentage: Option<u8>,
    /// The reason why the GPU has gone. None if it is there.
    gone: Option<String>,
}

/// The reason why a path leads to no NVIDIA GPU.
enum Miss {
    /// The path never leads to one: the finding and the remedy.
    Wrong { found: String, remedy: String },
    /// The path leads to several: the finding and the remedy.
    Ambiguous { found: String, remedy: String },
    /// The path leads to none now: the finding, the remedy, and whether this is certain.
    Absent { found: String, remedy: String, certain: bool },
    /// Nothing is known without a driver: the reason why there is none.
    NotYet(Reason),
}

/// The configured GPUs in the order of the configuration, and the entries without a GPU.
fn wanted<'a>(
    settings: &Settings,
    inventory: &'a Inventory,
    before: &'a Inventory,
) -> Result<(Vec<Wanted<'a>>, Vec<Missing>), PlanError> {
    let mut problems = Vec::new();
    let mut not_yet = inventory.driver.as_ref().err().cloned();
    let mut wanted = Vec::new();
    let mut missing = Vec::new();
    let mut earlier = Earlier::default();
    for entry in &settings.devices {
        let Some(mps) = &entry.mps else { continue };
        let Some(path) = &entry.path else {
            let found = "an NVIDIA_MPS entry without a path".to_owned();
            problems.push(entry.problem("path", found, choices(inventory)));
            continue;
        };
        let mut gone = None;
        let sought = as_before(path, before);
        let gpu = match find(&sought, inventory) {
            Ok(gpu) => Some(gpu),
            Err(Miss::Wrong { found, remedy } | Miss::Ambiguous { found, remedy }) => {
                problems.push(entry.problem("path", found, remedy));
                continue;
            }
            Err(Miss::Absent { found, remedy, certain }) => {
                let problem = entry.problem("path", found, remedy);
                let known = known_before(&sought, inventory, before);
                if known.is_none_or(|known| known.gone) {
                    gone = Some(problem.to_string());
                }
                if known.is_none() {
                    missing.push(Missing { problem, path: path.clone(), certain });
                }
                known.map(|known| known.gpu)
            }
            Err(Miss::NotYet(reason)) => {
                not_yet.get_or_insert(reason);
                None
            }
        };
        let address = gpu.map(|gpu| gpu.pci.address);
        if let Some((origin, first)) = earlier.insert(&entry.origin, path, address) {
            let which = address.map(|address| format!(" ({address})")).unwrap_or_default();
            let found = format!("{path}{which} is named a second time");
            let remedy = format!("{origin} names it as {first}; keep one");
            problems.push(entry.problem("path", found, remedy));
            continue;
        }
        if let Some(gpu) = gpu {
            if let Some((found, remedy)) = too_many(gpu, mps.slices) {
                problems.push(entry.problem("virtual_number", found, remedy));
            }
            wanted.push(Wanted { gpu, slices: mps.slices, thread_percentage: mps.thread_percentage, gone });
        }
    }
    if settings.devices.iter().all(|entry| entry.mps.is_none()) {
        wanted = unclaimed(settings, inventory, &mut problems, &mut not_yet);
    }
    match not_yet {
        _ if !problems.is_empty() => {
            // The report has these too, so that all problems can be corrected at once.
            let certain = missing.into_iter().filter(|missing| missing.certain);
            problems.extend(certain.map(|missing| missing.problem));
            Err(PlanError::Problems(problems))
        }
        Some(reason) => Err(PlanError::NotYet(reason)),
        None if wanted.is_empty() && !missing.is_empty() => Err(PlanError::Missing(missing)),
        None => Ok((wanted, missing)),
    }
}

/// A GPU of the former plan that an entry still means.
#[derive(Clone, Copy)]
struct Known<'a> {
    gpu: &'a Gpu,
    /// Whether the GPU has gone, so that the facts about it come from the former plan.
    gone: bool,
}

/// An address without a domain keeps its former GPU, so that no other GPU is served in its place after that GPU has
/// gone.
fn as_before(path: &DevicePath, before: &Inventory) -> DevicePath {
    match (path, find(path, before)) {
        (DevicePath::ShortPci(_), Ok(gpu)) => DevicePath::Pci(gpu.pci.address),
        _ => path.clone(),
    }
}

/// The GPU to which the path led in the former plan. None if another GPU has its address now.
fn known_before<'a>(path: &DevicePath, inventory: &'a Inventory, before: &'a Inventory) -> Option<Known<'a>> {
    let known = find(path, before).ok()?;
    let in_place = inventory.gpus.iter().find(|gpu| gpu.pci.address == known.pci.address);
    let uuid = |gpu: &Gpu| gpu.nvml.as_ref().ok().map(|facts| facts.uuid.clone());
    match in_place {
        None => Some(Known { gpu: known, gone: true }),
        Some(gpu) if gpu.nvml.is_err() || uuid(gpu) == uuid(known) => Some(Known { gpu, gone: false }),
        Some(_) => None,
    }
}

/// The earlier entries, for finding two entries of one GPU.
#[derive(Default)]
struct Earlier<'a> {
    /// Without a driver, only the text can show that two entries are equal.
    by_path: HashMap<&'a DevicePath, &'a Origin>,
    by_address: HashMap<PciAddress, (&'a Origin, &'a DevicePath)>,
}

impl<'a> Earlier<'a> {
    /// Adds an entry. If an earlier entry names the same GPU, it returns that entry instead.
    fn insert(
        &mut self,
        origin: &'a Origin,
        path: &'a DevicePath,
        address: Option<PciAddress>,
    ) -> Option<(&'a Origin, &'a DevicePath)> {
        let same_path = self.by_path.get(path).map(|first| (*first, path));
        let same_gpu = address.and_then(|address| self.by_address.get(&address).copied());
        let first = same_path.or(same_gpu);
        if first.is_none() {
            self.by_path.insert(path, origin);
            self.by_address.extend(address.map(|address| (address, (origin, path))));
        }
        first
    }
}

/// Every NVIDIA GPU that no entry claims, in PCI order. A GPU that another kernel driver holds is left out.
fn unclaimed<'a>(
    settings: &Settings,
    inventory: &'a Inventory,
    problems: &mut Vec<Problem>,
    not_yet: &mut Option<Reason>,
) -> Vec<Wanted<'a>> {
    let mut claimed = Vec::new();
    for path in settings.devices.iter().filter_map(|entry| entry.path.as_ref()) {
        match claim(path, inventory) {
            Ok(address) => claimed.extend(address),
            // If the GPU of the claim is unknown, serving any GPU might take it from its user.
            Err(reason) => {
                not_yet.get_or_insert(reason);
            }
        }
    }
    let mut wanted: Vec<_> = inventory
        .gpus
        .iter()
        .filter(|gpu| !claimed.contains(&gpu.pci.address) && gpu.pci.foreign_driver().is_none())
        .map(|gpu| Wanted { gpu, slices: settings.replicas, thread_percentage: None, gone: None })
        .collect();
    wanted.sort_by_key(|wanted| wanted.gpu.pci.address);
    for one in &wanted {
        if let Some((found, remedy)) = too_many(one.gpu, one.slices) {
            let file = settings.sources.last().cloned().unwrap_or_default();
            problems.push(Problem::new(Origin::whole(&file), "cuda_mps_replicas", found, remedy));
        }
    }
    wanted
}

/// The use of each GPU, if none is left to serve.
fn why_nothing(settings: &Settings, inventory: &Inventory) -> String {
    let claims = |gpu: &Gpu| {
        settings.devices.iter().find(|entry| {
            let path = entry.path.as_ref();
            path.is_some_and(|path| claim(path, inventory) == Ok(Some(gpu.pci.address)))
        })
    };
    let mut others = Vec::new();
    let mut remedy = "";
    for gpu in &inventory.gpus {
        let address = gpu.pci.address;
        if let Some(entry) = claims(gpu) {
            others.push(format!("{address} is {} in {}", entry.device_type, entry.origin));
            remedy = "; write type: NVIDIA_MPS in the entry of a GPU that is to be served";
        } else if let Some(driver) = gpu.pci.foreign_driver() {
            others.push(format!("{address} is held by the kernel driver {driver}"));
        }
    }
    if others.is_empty() {
        return "this host has no NVIDIA GPU to serve".to_owned();
    }
    format!("every NVIDIA GPU of this host has another use: {}{remedy}", others.join(", "))
}

/// Each slice needs at least 1 MiB.
fn too_many(gpu: &Gpu, slices: NonZeroU32) -> Option<(String, String)> {
    let total = gpu.nvml.as_ref().ok()?.memory_total_mib?;
    if slice_of(total, slices) > 0 {
        return None;
    }
    let found = format!("{slices} slices of {}, which has {total} MiB", gpu.pci.address);
    Some((found, "give each slice 1 MiB or more".to_owned()))
}

fn slice_of(total_mib: u64, slices: NonZeroU32) -> u64 {
    total_mib / u64::from(slices.get())
}

/// The render node of the GPU that a path names.
pub(crate) fn render_node<'a>(path: &DevicePath, inventory: &'a Inventory) -> Option<&'a Path> {
    find(path, inventory).ok()?.pci.render_node.as_deref()
}

/// The GPU that a path names.
fn find<'a>(path: &DevicePath, inventory: &'a Inventory) -> Result<&'a Gpu, Miss> {
    match path {
        DevicePath::RenderNode(node) => {
            match with_device(inventory, |device| device.render_node.as_ref() == Some(node)) {
                Some(Device::Nvidia(gpu)) => Ok(gpu),
                Some(Device::Other(device)) => Err(not_nvidia(path.to_string(), device, inventory)),
                None => Err(no_such_node(node, inventory)),
            }
        }
        DevicePath::Pci(address) => match with_device(inventory, |device| device.address == *address) {
            Some(Device::Nvidia(gpu)) => Ok(gpu),
            Some(Device::Other(device)) => Err(not_nvidia(path.to_string(), device, inventory)),
            None => Err(known_missing(inventory, format!("the PCI bus has no display device at {address}"))),
        },
        DevicePath::ShortPci(address) => {
            let devices = inventory.gpus.iter().map(|gpu| &gpu.pci).chain(&inventory.others);
            match address.in_any_domain(devices.map(|device| device.address)) {
                Ok(address) => find(&DevicePath::Pci(address), inventory),
                Err(several) => Err(Miss::Ambiguous {
                    found: format!("{path} may be {}", list(&several)),
                    remedy: "write the address with its domain".to_owned(),
                }),
            }
        }
        DevicePath::Uuid(uuid) => with_facts(path, inventory, |facts| facts.uuid.eq_ignore_ascii_case(uuid)),
        DevicePath::NvidiaMinor(minor) => with_facts(path, inventory, |facts| facts.minor == Some(*minor)),
        DevicePath::Other(text) => Err(no_path(text, inventory)),
    }
}

fn list(addresses: &[PciAddress]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ")
}

/// A display device, found by its path.
enum Device<'a> {
    Nvidia(&'a Gpu),
    Other(&'a PciDevice),
}

impl<'a> Device<'a> {
    fn pci(&self) -> &'a PciDevice {
        match self {
            Self::Nvidia(gpu) => &gpu.pci,
            Self::Other(device) => device,
        }
    }
}

fn with_device(inventory: &Inventory, is_it: impl Fn(&PciDevice) -> bool) -> Option<Device<'_>> {
    let gpu = inventory.gpus.iter().find(|gpu| is_it(&gpu.pci)).map(Device::Nvidia);
    gpu.or_else(|| inventory.others.iter().find(|device| is_it(device)).map(Device::Other))
}

/// Finds a GPU by a fact that only NVML knows. A GPU that NVML can't ask may be the right one.
fn with_facts<'a>(
    path: &DevicePath,
    inventory: &'a Inventory,
    is_it: impl Fn(&NvmlFacts) -> bool,
) -> Result<&'a Gpu, Miss> {
    if let Some(gpu) = inventory.gpus.iter().find(|gpu| gpu.nvml.as_ref().is_ok_and(&is_it)) {
        return Ok(gpu);
    }
    let silent = inventory.gpus.iter().find_map(|gpu| {
        let reason = gpu.nvml.as_ref().err()?;
        if gpu.pci.foreign_driver().is_some() { None } else { Some((gpu.pci.address, reason)) }
    });
    match silent {
        Some((address, reason)) if inventory.driver.is_ok() => Err(Miss::Absent {
            found: format!("{path} may be the GPU at {address}, which can't be asked: {reason}"),
            remedy: "it is served once that GPU answers".to_owned(),
            certain: false,
        }),
        _ => Err(known_missing(inventory, format!("this host has no GPU {path}"))),
    }
}

/// The GPU is not there if the driver works. Otherwise nothing is known yet.
fn known_missing(inventory: &Inventory, found: String) -> Miss {
    match &inventory.driver {
        Ok(_) => Miss::Absent { found, remedy: choices(inventory), certain: true },
        Err(reason) => Miss::NotYet(reason.clone()),
    }
}

fn no_such_node(node: &Path, inventory: &Inventory) -> Miss {
    let nodeless =
        inventory.gpus.iter().find(|gpu| gpu.pci.render_node.is_none() && gpu.pci.foreign_driver().is_none());
    match nodeless {
        Some(gpu) if inventory.driver.is_ok() => Miss::Absent {
            found: format!(
                "{} does not exist, and {} has no render node yet",
                node.display(),
                gpu.pci.address
            ),
            remedy: "load nvidia-drm (modprobe nvidia-drm)".to_owned(),
            certain: false,
        },
        _ => known_missing(inventory, format!("{} does not exist", node.display())),
    }
}

fn not_nvidia(path: String, device: &PciDevice, inventory: &Inventory) -> Miss {
    let maker = match device.vendor {
        0x1002 => " (AMD)",
        0x1a03 => " (ASPEED)",
        0x19e5 => " (Huawei)",
        0x8086 => " (Intel)",
        _ => "",
    };
    let at = device.address.to_string();
    let which = if path == at { path } else { format!("{path} ({at})") };
    Miss::Wrong {
        found: format!("{which} is made by PCI vendor {:04x}{maker}, not by NVIDIA", device.vendor),
        remedy: choices(inventory),
    }
}

/// A path of none of the accepted kinds.
fn no_path(text: &str, inventory: &Inventory) -> Miss {
    let quoted = format!("{text:?}");
    let kind = if is_card_node(text) {
        "a card node"
    } else if by_path_address(text).is_some() {
        "a link to a device node"
    } else {
        let found = format!("{quoted} is not the path of a GPU");
        return Miss::Wrong { found, remedy: choices(inventory) };
    };
    match behind(text, inventory) {
        Some(Device::Other(device)) => not_nvidia(quoted, device, inventory),
        Some(Device::Nvidia(gpu)) => Miss::Wrong {
            found: format!("{quoted} is {kind} of {}", gpu.pci.address),
            remedy: match &gpu.pci.render_node {
                Some(node) => format!("write its render node, {}", node.display()),
                None => "write its render node, /dev/dri/renderDN, once nvidia-drm is loaded".to_owned(),
            },
        },
        None => Miss::Wrong { found: format!("{quoted} is {kind}"), remedy: choices(inventory) },
    }
}

/// The device behind a card node or a link. Neither is accepted, but the message can name the right path.
fn behind<'a>(text: &str, inventory: &'a Inventory) -> Option<Device<'a>> {
    let address = by_path_address(text);
    with_device(inventory, |device| {
        Some(device.address) == address || device.card_node.as_deref() == Some(Path::new(text))
    })
}

fn is_card_node(text: &str) -> bool {
    let number = text.strip_prefix("/dev/dri/card");
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The address in `/dev/dri/by-path/pci-0000:00:06.0-render`.
fn by_path_address(text: &str) -> Option<PciAddress> {
    let (address, _) = text.strip_prefix("/dev/dri/by-path/pci-")?.split_once('-')?;
    address.parse().ok()
}

/// The NVIDIA GPU that an entry of another type claims. None if it claims none.
fn claim(path: &DevicePath, inventory: &Inventory) -> Result<Option<PciAddress>, Reason> {
    if let DevicePath::Other(text) = path {
        return Ok(behind(text, inventory).map(|device| device.pci().address));
    }
    match find(path, inventory) {
        Ok(gpu) => Ok(Some(gpu.pci.address)),
        Err(Miss::Wrong { .. } | Miss::Absent { certain: true, .. }) => Ok(None),
        Err(Miss::Absent { found, remedy, certain: false } | Miss::Ambiguous { found, remedy }) => {
            Err(Reason { found, remedy })
        }
        Err(Miss::NotYet(reason)) => Err(reason),
    }
}

/// The paths that would be right on this host.
fn choices(inventory: &Inventory) -> String {
    let paths: Vec<_> = inventory
        .gpus
        .iter()
        .map(|gpu| match &gpu.pci.render_node {
            Some(node) => format!("{} ({})", node.display(), gpu.pci.address),
            None => gpu.pci.address.to_string(),
        })
        .collect();
    if paths.is_empty() {
        "this host has no NVIDIA GPU".to_owned()
    } else {
        format!("the NVIDIA GPUs of this host are {}", paths.join(", "))
    }
}

fn gpu_plan(wanted: &Wanted<'_>, settings: &Settings, inventory: &Inventory) -> GpuPlan {
    let Wanted { gpu, slices, thread_percentage, gone } = wanted;
    let facts = gpu.nvml.as_ref().ok();
    let total = facts.and_then(|facts| facts.memory_total_mib);
    let warnings = facts.map(|facts| warnings(facts, slices.get(), inventory)).unwrap_or_default();
    let limits_enforced = LIMITS.holds(inventory.series(), facts.and_then(|facts| facts.compute_capability));
    let pipe_directory = match (settings.topology, facts) {
        (Topology::PerGpu, Some(facts)) => settings.pipe_directory.join(&facts.uuid),
        _ => settings.pipe_directory.clone(),
    };
    let mut gpu = (*gpu).clone();
    let unusable = match gone {
        Some(reason) => {
            // The processes that used the GPU must not be ended any more.
            gpu.nvml.as_mut().into_iter().for_each(|facts| facts.foreign_processes.clear());
            Some(reason.clone())
        }
        None => why_unusable(&gpu, settings),
    };
    GpuPlan {
        slices: slices.get(),
        memory_limit_mib: total.map_or(0, |total| slice_of(total, *slices)),
        thread_percentage: thread_percentage.unwrap_or_else(|| share(settings.thread_policy, *slices)),
        limits_enforced,
        unusable,
        warnings,
        pipe_directory,
        gpu,
    }
}

/// The active thread percentage of one of N slices.
fn share(policy: ThreadPolicy, slices: NonZeroU32) -> u8 {
    let percent = match policy {
        ThreadPolicy::Equal => 100 / slices.get(),
        ThreadPolicy::Balanced => 200 / slices.get(),
        ThreadPolicy::Unlimited => 100,
        ThreadPolicy::Fixed(percent) => u32::from(percent),
    };
    u8::try_from(percent.clamp(1, 100)).unwrap_or(100)
}

/// The reasons why the GPU can't be served, except for processes that hold it. It gives all of them at once, so that
/// nobody corrects one only to meet the next.
fn ailments(gpu: &Gpu) -> Vec<String> {
    match &gpu.nvml {
        Ok(facts) => obstacles(gpu, facts),
        Err(reason) => vec![reason.to_string()],
    }
}

/// The settings and properties of a GPU that keep it from being served until somebody changes them.
fn obstacles(gpu: &Gpu, facts: &NvmlFacts) -> Vec<String> {
    let mut reasons = Vec::new();
    if facts.mig_enabled {
        reasons.push(format!("MIG is on; turn it off with nvidia-smi -i {} -mig 0", gpu.pci.address));
    }
    if facts.compute_mode == Some(ComputeMode::Prohibited) {
        reasons.push(format!(
            "compute mode Prohibited lets no process in; change it with nvidia-smi -i {} -c DEFAULT",
            gpu.pci.address
        ));
    }
    if facts.memory_total_mib.is_none() {
        reasons.push("NVML does not say how much memory it has, so it can't be divided".to_owned());
    }
    reasons
}

/// All reasons why the GPU can't be served, in one text.
fn why_unusable(gpu: &Gpu, settings: &Settings) -> Option<String> {
    let mut reasons = ailments(gpu);
    reasons.extend(gpu.nvml.as_ref().ok().and_then(|facts| held(facts, settings)));
    if reasons.is_empty() { None } else { Some(reasons.join("; ")) }
}

/// The reason if processes would keep an MPS server from starting.
fn held(facts: &NvmlFacts, settings: &Settings) -> Option<String> {
    let exclusive =
        matches!(facts.compute_mode, Some(ComputeMode::ExclusiveProcess | ComputeMode::ExclusiveThread));
    if facts.foreign_processes.is_empty() || !(settings.set_compute_mode || exclusive) {
        return None;
    }
    let holders: Vec<_> =
        facts.foreign_processes.iter().map(|(pid, command)| format!("{pid} ({command})")).collect();
    Some(format!("held by processes that do not go through MPS: {}; end them", holders.join(", ")))
}

fn warnings(facts: &NvmlFacts, slices: u32, inventory: &Inventory) -> Vec<Warning> {
    let mut warnings = Vec::new();
    let Some((major, minor)) = facts.compute_capability else {
        warnings.push(Warning::NoComputeCapability);
        return warnings;
    };
    let clients = driver::most_clients(inventory.series(), facts.compute_capability);
    if slices > clients {
        warnings.push(Warning::MoreSlicesThanClients { slices, clients });
    }
    if !LIMITS.holds(inventory.series(), facts.compute_capability) {
        warnings.push(Warning::NotEnforced { capability: (major, minor) });
    }
    warnings
}

/// Warns of entries of another type for a GPU that is served. Their users can't work with its compute mode.
fn warn_of_other_claims(gpus: &mut [GpuPlan], settings: &Settings, inventory: &Inventory) {
    for entry in settings.devices.iter().filter(|entry| entry.mps.is_none()) {
        let claimed = entry.path.as_ref().and_then(|path| claim(path, inventory).ok().flatten());
        for gpu in gpus.iter_mut().filter(|gpu| Some(gpu.gpu.pci.address) == claimed) {
            let (origin, device_type) = (entry.origin.clone(), entry.device_type.clone());
            gpu.warnings.push(Warning::GivenOutTwice { origin, device_type });
        }
    }
}

fn control_daemons(gpus: &[GpuPlan], settings: &Settings, inventory: &Inventory) -> Vec<ControlDaemonPlan> {
    // The GPUs are sorted by address, so ordinals don't depend on the order of entries.
    let usable: BTreeMap<PciAddress, (&GpuPlan, &NvmlFacts)> = gpus
        .iter()
        .filter(|gpu| gpu.unusable.is_none())
        .filter_map(|gpu| Some((gpu.gpu.pci.address, (gpu, gpu.gpu.nvml.as_ref().ok()?))))
        .collect();
    let usable: Vec<_> = usable.into_values().collect();
    match settings.topology {
        Topology::Shared if usable.is_empty() => Vec::new(),
        Topology::Shared => {
            let directories = (settings.pipe_directory.clone(), settings.log_directory.clone());
            vec![control_daemon("shared", directories, &usable, settings, inventory)]
        }
        Topology::PerGpu => usable
            .iter()
            .map(|one| {
                let (plan, facts) = one;
                let directories = (plan.pipe_directory.clone(), settings.log_directory.join(&facts.uuid));
                control_daemon(&facts.uuid, directories, std::slice::from_ref(one), settings, inventory)
            })
            .collect(),
    }
}

fn control_daemon(
    id: &str,
    (pipe_directory, log_directory): (PathBuf, PathBuf),
    gpus: &[(&GpuPlan, &NvmlFacts)],
    settings: &Settings,
    inventory: &Inventory,
) -> ControlDaemonPlan {
    let (multiuser, multiuser_optional) = match settings.multiuser {
        MultiUser::On => (true, false),
        MultiUser::Auto => {
            let all = gpus.iter().all(|(_, facts)| MULTI_USER.holds_on(facts.compute_capability));
            (all, all)
        }
        MultiUser::Off => (false, false),
    };
    // The client counts the ordinals of limits. In a container that sees one GPU, the default of ordinal 0 applies to
    // that GPU, whichever GPU it is. A client's own limit can only be lower than the default, so no default may be
    // below the limit of any slice.
    let memory_limit_mib = gpus.iter().map(|(gpu, _)| gpu.memory_limit_mib).max().unwrap_or(0);
    ControlDaemonPlan {
        id: id.to_owned(),
        pipe_directory,
        log_directory,
        gpus: gpus
            .iter()
            .map(|(gpu, facts)| ServedGpu {
                uuid: facts.uuid.clone(),
                pci: gpu.gpu.pci.address,
                memory_limit_mib,
                slice_memory_mib: gpu.memory_limit_mib,
                slice_thread_percentage: gpu.thread_percentage,
                limits_enforced: gpu.limits_enforced,
                places: driver::most_clients(inventory.series(), facts.compute_capability),
            })
            .collect(),
        driver: inventory.series(),
        thread_percentage: gpus.iter().map(|(gpu, _)| gpu.thread_percentage).max().unwrap_or(100),
        multiuser,
        multiuser_optional,
        prewarm: settings.prewarm && multiuser,
    }
}

/// Warns of slices for which the control daemon's defaults, which fit its largest slice, are too large.
fn warn_of_loose_defaults(gpus: &mut [GpuPlan], control_daemons: &[ControlDaemonPlan]) {
    for control_daemon in control_daemons {
        let percentage = control_daemon.thread_percentage;
        for served in control_daemon.gpus.iter().filter(|served| served.limits_enforced) {
            let Some(gpu) = gpus.iter_mut().find(|gpu| gpu.gpu.pci.address == served.pci) else { continue };
            if gpu.thread_percentage < percentage {
                gpu.warnings.push(Warning::LooseThreads { default: percentage, own: gpu.thread_percentage });
            }
            if gpu.memory_limit_mib < served.memory_limit_mib {
                let (default_mib, own_mib) = (served.memory_limit_mib, gpu.memory_limit_mib);
                gpu.warnings.push(Warning::LooseMemory { default_mib, own_mib });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{DeviceEntry, MpsEntry};
    use proptest::prelude::*;

    const P40: &str = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400";

    /// Makes a first plan.
    fn plan(settings: &Settings, inventory: &Inventory) -> Result<Plan, PlanError> {
        super::plan(settings, inventory, &[])
    }

    fn text(warning: &Warning) -> String {
        warning.to_string()
    }

    fn settings() -> Settings {
        Settings { enabled: true, sources: vec!["/etc/yunion/host.conf".into()], ..Settings::default() }
    }

    /// Settings with these entries in the device file, one per line from line 2 on.
    fn with(entries: Vec<(DevicePath, u32)>) -> Settings {
        let mut settings = settings();
        for (line, (path, slices)) in (2..).zip(entries) {
            settings.devices.push(DeviceEntry {
                name: format!("devices[{}]", line - 2),
                origin: Origin { file: "devices.yml".into(), line: Some(line) },
                device_type: "NVIDIA_MPS".to_owned(),
                path: Some(path),
                mps: Some(MpsEntry { slices: NonZeroU32::new(slices).unwrap(), thread_percentage: None }),
            });
        }
        settings
    }

    /// Adds an entry of another type, on line 90.
    fn and_other(mut settings: Settings, path: Option<DevicePath>) -> Settings {
        settings.devices.push(DeviceEntry {
            name: "devices[88]".to_owned(),
            origin: Origin { file: "devices.yml".into(), line: Some(90) },
            device_type: "NVIDIA_GPU_SHARE".to_owned(),
            path,
            mps: None,
        });
        settings
    }

    fn node(number: u32) -> DevicePath {
        DevicePath::RenderNode(format!("/dev/dri/renderD{number}").into())
    }

    fn other(text: &str) -> DevicePath {
        DevicePath::Other(text.to_owned())
    }

    fn pci(address: &str) -> DevicePath {
        DevicePath::Pci(address.parse().unwrap())
    }

    fn device(address: &str, vendor: u16, node: u32) -> PciDevice {
        PciDevice {
            address: address.parse().unwrap(),
            vendor,
            device: 0x1b38,
            driver: None,
            render_node: Some(format!("/dev/dri/renderD{node}").into()),
            card_node: Some(format!("/dev/dri/card{}", node - 128).into()),
            numa_node: -1,
            link: None,
            pci_ids_name: None,
        }
    }

    fn gpu(address: &str, node: u32, uuid: &str, memory: u64, capability: (u32, u32)) -> Gpu {
        Gpu {
            pci: device(address, 0x10de, node),
            nvml: Ok(NvmlFacts {
                uuid: uuid.to_owned(),
                name: "a GPU".to_owned(),
                index: node - 128,
                minor: Some(node - 128),
                memory_total_mib: Some(memory),
                compute_capability: Some(capability),
                compute_mode: Some(ComputeMode::Default),
                mig_enabled: false,
                foreign_processes: Vec::new(),
            }),
        }
    }

    fn inventory(gpus: Vec<Gpu>) -> Inventory {
        Inventory { driver: Ok("580.159.04".to_owned()), gpus, others: Vec::new() }
    }

    fn p40() -> Inventory {
        inventory(vec![gpu("00:06.0", 128, P40, 23040, (6, 1))])
    }

    /// GPU-0 to GPU-3 at 0000:1a:00.0 to 0000:1d:00.0, render nodes 128 to 131.
    fn h200s() -> Inventory {
        let at = ["1a:00.0", "1b:00.0", "1c:00.0", "1d:00.0"];
        let gpus =
            (0..).zip(at).map(|(index, at)| gpu(at, 128 + index, &format!("GPU-{index}"), 143_771, (9, 0)));
        inventory(gpus.collect())
    }

    fn facts(inventory: &mut Inventory, index: usize) -> &mut NvmlFacts {
        inventory.gpus[index].nvml.as_mut().unwrap()
    }

    fn without_driver(mut inventory: Inventory) -> Inventory {
        inventory.driver = Err("no driver".into());
        for gpu in &mut inventory.gpus {
            gpu.nvml = Err("no driver".into());
            gpu.pci.render_node = None;
        }
        inventory
    }

    /// The missing entries of a plan without any GPU: whether each is certain, and its text.
    fn missing(settings: &Settings, inventory: &Inventory) -> Vec<(bool, String)> {
        match plan(settings, inventory) {
            Err(PlanError::Missing(missing)) => {
                missing.iter().map(|one| (one.certain, one.problem.to_string())).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    fn problems(settings: &Settings, inventory: &Inventory) -> Vec<String> {
        match plan(settings, inventory) {
            Err(PlanError::Problems(problems)) => problems.iter().map(ToString::to_string).collect(),
            other => panic!("{other:?}"),
        }
    }

    fn not_yet(settings: &Settings, inventory: &Inventory) -> String {
        match plan(settings, inventory) {
            Err(PlanError::NotYet(reason)) => reason.into(),
            other => panic!("{other:?}"),
        }
    }

    /// The memory limit and the thread percentage of each GPU.
    fn limits(plan: &Plan) -> Vec<(u64, u8)> {
        plan.gpus.iter().map(|gpu| (gpu.memory_limit_mib, gpu.thread_percentage)).collect()
    }

    /// A slice waits for the control daemon only if its own limits change, and with them the default that it needs.
    #[test]
    fn a_slice_with_unchanged_limits_waits_for_nothing() {
        let plan_of = |slices: [(u64, u8); 3]| {
            let gpus = slices.iter().enumerate().map(|(n, (memory, threads))| ServedGpu {
                uuid: format!("GPU-{n}"),
                pci: "00:06.0".parse().unwrap(),
                memory_limit_mib: slices.iter().map(|(memory, _)| *memory).max().unwrap(),
                slice_memory_mib: *memory,
                slice_thread_percentage: *threads,
                limits_enforced: true,
                places: 48,
            });
            ControlDaemonPlan {
                id: "shared".to_owned(),
                pipe_directory: "/tmp/nvidia-mps/pipe".into(),
                log_directory: "/tmp/nvidia-mps/log".into(),
                gpus: gpus.collect(),
                driver: Series::default(),
                thread_percentage: slices.iter().map(|(_, threads)| *threads).max().unwrap(),
                multiuser: true,
                multiuser_optional: true,
                prewarm: true,
            }
        };
        let (half, quarter, eighth) = ((8000, 50), (4000, 25), (2000, 12));
        for (before, after, expected) in [
            ([quarter; 3], [quarter; 3], &[][..]),
            // The default is larger than the new limits before and after the change.
            ([quarter; 3], [quarter, eighth, quarter], &[]),
            ([quarter; 3], [eighth; 3], &["GPU-0", "GPU-1", "GPU-2"]),
            // The default grows, but the other slices keep their own limits.
            ([quarter; 3], [half, quarter, quarter], &["GPU-0"]),
            // The default was smaller than the second slice's new limit.
            ([eighth; 3], [half, quarter, eighth], &["GPU-0", "GPU-1"]),
            // The default shrinks.
            ([half, quarter, eighth], [quarter, quarter, eighth], &["GPU-0"]),
            ([quarter; 3], [(4000, 12), quarter, quarter], &[]),
            ([quarter; 3], [(4000, 30), quarter, quarter], &["GPU-0"]),
        ] {
            let (before, after) = (plan_of(before), plan_of(after));
            assert_eq!(after.to_be_set_since(&before).collect::<Vec<_>>(), expected, "{before:?} {after:?}");
        }
        let mut fewer = plan_of([quarter; 3]);
        fewer.gpus.truncate(2);
        assert_eq!(plan_of([quarter; 3]).to_be_set_since(&fewer).collect::<Vec<_>>(), ["GPU-2"]);
    }

    #[test]
    fn the_p40_of_the_platforms_documentation() {
        let inventory = p40();
        let plan = plan(&with(vec![(node(128), 4)]), &inventory).unwrap();
        let expected = Plan {
            missing: Vec::new(),
            configured: Configured { certainly: BTreeSet::from([P40.to_owned()]), others: None },
            gpus: vec![GpuPlan {
                gpu: inventory.gpus[0].clone(),
                slices: 4,
                memory_limit_mib: 5760,
                thread_percentage: 25,
                limits_enforced: false,
                unusable: None,
                warnings: vec![Warning::NotEnforced { capability: (6, 1) }],
                pipe_directory: "/tmp/nvidia-mps/pipe".into(),
            }],
            control_daemons: vec![ControlDaemonPlan {
                id: "shared".to_owned(),
                pipe_directory: "/tmp/nvidia-mps/pipe".into(),
                log_directory: "/tmp/nvidia-mps/log".into(),
                gpus: vec![ServedGpu {
                    uuid: P40.to_owned(),
                    pci: "00:06.0".parse().unwrap(),
                    memory_limit_mib: 5760,
                    slice_memory_mib: 5760,
                    slice_thread_percentage: 25,
                    limits_enforced: false,
                    places: 16,
                }],
                driver: Series::of("580.159.04"),
                thread_percentage: 25,
                multiuser: false,
                multiuser_optional: false,
                prewarm: false,
            }],
            nothing: String::new(),
        };
        assert_eq!(plan, expected);
    }

    #[test]
    fn shares_are_whole_and_at_least_one_percent() {
        let one = |policy, slices| share(policy, NonZeroU32::new(slices).unwrap());
        let golden = [
            (ThreadPolicy::Equal, [(1, 100), (3, 33), (4, 25), (100, 1), (101, 1), (u32::MAX, 1)]),
            (ThreadPolicy::Balanced, [(1, 100), (3, 66), (4, 50), (100, 2), (201, 1), (u32::MAX, 1)]),
            (
                ThreadPolicy::Unlimited,
                [(1, 100), (3, 100), (4, 100), (100, 100), (101, 100), (u32::MAX, 100)],
            ),
            (ThreadPolicy::Fixed(7), [(1, 7), (3, 7), (4, 7), (100, 7), (101, 7), (u32::MAX, 7)]),
        ];
        for (policy, cases) in golden {
            for (slices, percent) in cases {
                assert_eq!(one(policy, slices), percent, "{policy:?} {slices}");
            }
        }
    }

    #[test]
    fn an_entrys_own_percentage_overrides_the_policy() {
        let mut settings = with(vec![(node(128), 3), (node(129), 3)]);
        settings.devices[0].mps.as_mut().unwrap().thread_percentage = Some(80);
        let plan = plan(&settings, &h200s()).unwrap();
        assert_eq!(limits(&plan), [(47923, 80), (47923, 33)]);
        assert_eq!(plan.control_daemons[0].thread_percentage, 80);
    }

    #[test]
    fn a_shared_control_daemon_serves_in_pci_order_with_the_largest_percentage() {
        let inventory = h200s();
        let plan = plan(&with(vec![(node(130), 4), (node(128), 10), (node(129), 2)]), &inventory).unwrap();
        let configured: Vec<_> = plan.gpus.iter().map(|gpu| gpu.gpu.pci.address.bus).collect();
        assert_eq!(configured, [0x1c, 0x1a, 0x1b]);
        assert_eq!(limits(&plan), [(35942, 25), (14377, 10), (71885, 50)]);
        let [daemon] = plan.control_daemons.as_slice() else { panic!("{plan:?}") };
        let served: Vec<_> =
            daemon.gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu.memory_limit_mib)).collect();
        assert_eq!(served, [("GPU-0", 71885), ("GPU-1", 71885), ("GPU-2", 71885)]);
        assert_eq!(daemon.thread_percentage, 50);
        assert_eq!((daemon.multiuser, daemon.multiuser_optional, daemon.prewarm), (true, true, true));
        assert!(text(&plan.gpus[0].warnings[0]).contains("default is 50 %"), "{:?}", plan.gpus[0].warnings);
        assert!(text(&plan.gpus[1].warnings[0]).contains("keep to 10 %"), "{:?}", plan.gpus[1].warnings);
        assert!(text(&plan.gpus[1].warnings[1]).contains("keep to 14377 MiB"), "{:?}", plan.gpus[1].warnings);
        assert_eq!(plan.gpus[2].warnings, []);
    }

    #[test]
    fn each_gpu_can_have_a_control_daemon_of_its_own() {
        let mut settings = with(vec![(node(131), 4), (node(128), 10)]);
        settings.topology = Topology::PerGpu;
        let mut inventory = h200s();
        facts(&mut inventory, 0).compute_capability = Some((6, 1));
        let plan = plan(&settings, &inventory).unwrap();
        let daemons: Vec<_> = plan
            .control_daemons
            .iter()
            .map(|daemon| {
                let pipe = daemon.pipe_directory.to_str().unwrap();
                (daemon.id.as_str(), pipe, daemon.gpus.len(), daemon.thread_percentage, daemon.multiuser)
            })
            .collect();
        assert_eq!(
            daemons,
            [
                ("GPU-0", "/tmp/nvidia-mps/pipe/GPU-0", 1, 10, false),
                ("GPU-3", "/tmp/nvidia-mps/pipe/GPU-3", 1, 25, true),
            ]
        );
        assert_eq!(plan.control_daemons[0].log_directory, Path::new("/tmp/nvidia-mps/log/GPU-0"));
        assert_eq!(plan.gpus[0].pipe_directory, Path::new("/tmp/nvidia-mps/pipe/GPU-3"));
        // With one GPU each, the defaults are the limits of its slices.
        assert_eq!(plan.gpus[0].warnings, []);
    }

    #[test]
    fn multiuser_follows_the_setting_and_the_weakest_gpu() {
        let mut settings = with(vec![(node(128), 4), (node(129), 4)]);
        let mut mixed = h200s();
        facts(&mut mixed, 1).compute_capability = Some((6, 1));
        let mut seen = |setting, prewarm, inventory: &Inventory| {
            settings.multiuser = setting;
            settings.prewarm = prewarm;
            let daemon = plan(&settings, inventory).unwrap().control_daemons.remove(0);
            (daemon.multiuser, daemon.multiuser_optional, daemon.prewarm)
        };
        assert_eq!(seen(MultiUser::Auto, true, &h200s()), (true, true, true));
        assert_eq!(seen(MultiUser::Auto, false, &h200s()), (true, true, false));
        assert_eq!(seen(MultiUser::Auto, true, &mixed), (false, false, false));
        assert_eq!(seen(MultiUser::On, true, &mixed), (true, false, true));
        assert_eq!(seen(MultiUser::Off, true, &h200s()), (false, false, false));
    }

    #[test]
    fn every_spelling_finds_the_gpu() {
        let inventory = h200s();
        let spellings =
            [node(129), pci("1B:00.0"), DevicePath::Uuid("gpu-1".to_owned()), DevicePath::NvidiaMinor(1)];
        for path in spellings {
            let plan = plan(&with(vec![(path.clone(), 4)]), &inventory).unwrap();
            assert_eq!(plan.gpus[0].gpu, inventory.gpus[1], "{path:?}");
        }
    }

    #[test]
    fn without_an_entry_every_unclaimed_gpu_is_served() {
        let mut inventory = h200s();
        inventory.gpus[3].pci.driver = Some("vfio-pci".to_owned());
        let served = |settings: &Settings| -> Vec<_> {
            let plan = plan(settings, &inventory).unwrap();
            plan.gpus.iter().map(|gpu| (gpu.gpu.pci.address.bus, gpu.slices, gpu.memory_limit_mib)).collect()
        };
        assert_eq!(served(&settings()), [(0x1a, 10, 14377), (0x1b, 10, 14377), (0x1c, 10, 14377)]);
        let claims = [
            node(129),
            pci("1b:00.0"),
            other("/dev/dri/card1"),
            other("/dev/dri/by-path/pci-0000:1b:00.0-render"),
        ];
        for claim in claims {
            let settings = and_other(settings(), Some(claim));
            assert_eq!(served(&settings), [(0x1a, 10, 14377), (0x1c, 10, 14377)]);
        }
        let nothing_of_ours = [None, Some(other("/dev/null")), Some(node(200))];
        for claim in nothing_of_ours {
            assert_eq!(served(&and_other(settings(), claim)).len(), 3);
        }
        let none = plan(&settings(), &self::inventory(Vec::new())).unwrap();
        assert_eq!(
            none,
            Plan { nothing: "this host has no NVIDIA GPU to serve".to_owned(), ..Plan::default() }
        );
    }

    /// The service then serves nothing, and the reason shows a mistyped type.
    #[test]
    fn if_all_gpus_have_another_use_each_use_is_named() {
        let settings = and_other(settings(), Some(pci("1a:00.0")));
        let mut all = h200s();
        for gpu in &mut all.gpus[1..] {
            gpu.pci.driver = Some("vfio-pci".to_owned());
        }
        all.gpus.truncate(2);
        let plan = plan(&settings, &all).unwrap();
        assert_eq!(plan.gpus, []);
        assert_eq!(
            plan.nothing,
            "every NVIDIA GPU of this host has another use: 0000:1a:00.0 is NVIDIA_GPU_SHARE in devices.yml:90, \
             0000:1b:00.0 is held by the kernel driver vfio-pci; write type: NVIDIA_MPS in the entry of a GPU that is to \
             be served"
        );
    }

    #[test]
    fn a_claim_that_can_not_be_resolved_yet_waits() {
        let mut inventory = h200s();
        inventory.gpus[0].pci.render_node = None;
        let reason = not_yet(&and_other(settings(), Some(node(140))), &inventory);
        assert!(reason.contains("modprobe nvidia-drm"), "{reason}");
    }

    #[test]
    fn wrong_paths_are_problems_that_name_the_right_one() {
        let mut inventory = h200s();
        inventory.gpus.truncate(2);
        inventory.others.push(device("03:00.0", 0x1002, 132));
        inventory.others.push(device("04:00.0", 0xabcd, 133));
        let all = "the NVIDIA GPUs of this host are /dev/dri/renderD128 (0000:1a:00.0), \
                   /dev/dri/renderD129 (0000:1b:00.0)";
        let amd = "is made by PCI vendor 1002 (AMD), not by NVIDIA";
        let golden = [
            (node(132), format!("/dev/dri/renderD132 (0000:03:00.0) {amd}"), all),
            (pci("03:00.0"), format!("0000:03:00.0 {amd}"), all),
            (pci("04:00.0"), "0000:04:00.0 is made by PCI vendor abcd, not by NVIDIA".to_owned(), all),
            (other("/dev/dri/card4"), format!("\"/dev/dri/card4\" (0000:03:00.0) {amd}"), all),
            (
                other("/dev/dri/card1"),
                "\"/dev/dri/card1\" is a card node of 0000:1b:00.0".to_owned(),
                "write its render node, /dev/dri/renderD129",
            ),
            (other("/dev/dri/card77"), "\"/dev/dri/card77\" is a card node".to_owned(), all),
            (
                other("/dev/dri/by-path/pci-0000:1b:00.0-render"),
                "\"/dev/dri/by-path/pci-0000:1b:00.0-render\" is a link to a device node of 0000:1b:00.0"
                    .to_owned(),
                "write its render node, /dev/dri/renderD129",
            ),
            (other("/dev/null"), "\"/dev/null\" is not the path of a GPU".to_owned(), all),
            (other("a\nb"), "\"a\\nb\" is not the path of a GPU".to_owned(), all),
        ];
        for (path, found, remedy) in golden {
            let expected = format!("devices.yml:2: devices[0].path: {found}; {remedy}");
            assert_eq!(problems(&with(vec![(path, 4)]), &inventory), [expected]);
        }
    }

    #[test]
    fn a_missing_gpu_is_a_state_of_its_entry() {
        let all = "the NVIDIA GPUs of this host are /dev/dri/renderD128 (0000:1a:00.0), \
                   /dev/dri/renderD129 (0000:1b:00.0)";
        let mut inventory = h200s();
        inventory.gpus.truncate(2);
        let golden = [
            (node(140), "/dev/dri/renderD140 does not exist"),
            (pci("00:06.1"), "the PCI bus has no display device at 0000:00:06.1"),
            (DevicePath::Uuid("GPU-x".to_owned()), "this host has no GPU GPU-x"),
            (DevicePath::NvidiaMinor(9), "this host has no GPU /dev/nvidia9"),
        ];
        for (path, found) in golden {
            let expected = format!("devices.yml:2: devices[0].path: {found}; {all}");
            assert_eq!(missing(&with(vec![(path.clone(), 4)]), &inventory), [(true, expected)]);
            // The other GPUs are served.
            let plan = plan(&with(vec![(node(128), 4), (path.clone(), 4)]), &inventory).unwrap();
            assert_eq!((plan.gpus.len(), plan.gpus[0].unusable.clone()), (1, None));
            let [missing] = plan.missing.as_slice() else { panic!("{:?}", plan.missing) };
            assert_eq!(missing.path, path);
            assert_eq!(
                missing.problem.to_string(),
                format!("devices.yml:3: devices[1].path: {found}; {all}")
            );
            assert_eq!(plan.control_daemons[0].gpus.len(), 1);
            // An entry counts as NVIDIA_MPS even if its GPU is not there, so the other GPU is not served instead.
            assert!(plan.configured.may_have("GPU-0") && plan.configured.may_have("GPU-x"));
            assert!(!plan.configured.may_have("GPU-1"));
        }
        let bare = self::inventory(Vec::new());
        let expected =
            "devices.yml:2: devices[0].path: /dev/dri/renderD128 does not exist; this host has no NVIDIA GPU";
        assert_eq!(missing(&with(vec![(node(128), 4)]), &bare), [(true, expected.to_owned())]);
    }

    #[test]
    fn a_gpu_that_has_gone_keeps_its_devices() {
        let settings = with(vec![(node(128), 4), (node(129), 2)]);
        let whole = h200s();
        let before = plan(&settings, &whole).unwrap();
        let mut without = h200s();
        without.gpus.remove(1);
        let after = super::plan(&settings, &without, &before.gpus).unwrap();
        assert_eq!((after.gpus.len(), after.missing.len()), (2, 0));
        let reason = after.gpus[1].unusable.as_deref().unwrap();
        assert!(
            reason.starts_with("devices.yml:3: devices[1].path: /dev/dri/renderD129 does not exist"),
            "{reason}"
        );
        assert_eq!((after.gpus[1].slices, after.gpus[1].memory_limit_mib), (2, 71885));
        assert_eq!(after.control_daemons[0].gpus.len(), 1);
        assert!(after.configured.may_have("GPU-1") && !after.configured.may_have("GPU-2"));
        // The plan stays the same if it is made again, and it is as before when the GPU is back.
        assert_eq!(super::plan(&settings, &without, &after.gpus).unwrap(), after);
        assert_eq!(super::plan(&settings, &whole, &after.gpus).unwrap(), before);
        // A different GPU at its address does not take its place.
        let mut other = without;
        other.gpus.push(gpu("1b:00.0", 140, "GPU-9", 143_771, (9, 0)));
        let after = super::plan(&settings, &other, &before.gpus).unwrap();
        assert_eq!((after.gpus.len(), after.missing.len()), (1, 1));
        // The same GPU under another name keeps its place.
        let mut renamed = h200s();
        renamed.gpus[1].pci.render_node = None;
        let after = super::plan(&settings, &renamed, &before.gpus).unwrap();
        assert_eq!((after.gpus.len(), after.missing.len(), after.gpus[1].unusable.clone()), (2, 0, None));
    }

    #[test]
    fn a_gpu_with_an_unknown_uuid_may_be_configured() {
        let settings = with(vec![(node(128), 4), (node(129), 4)]);
        let mut inventory = h200s();
        let named = plan(&settings, &inventory).unwrap().configured;
        let told = |named: &Configured| ["GPU-0", "GPU-1", "GPU-2", "GPU-x"].map(|uuid| named.may_have(uuid));
        assert_eq!(told(&named), [true, true, false, false]);
        // A GPU without a known UUID may be any GPU except the GPUs that are known.
        inventory.gpus[1].nvml = Err("an error".into());
        assert_eq!(told(&plan(&settings, &inventory).unwrap().configured), [true, true, false, true]);
        // A GPU that foreign processes hold is named as well.
        let mut inventory = h200s();
        facts(&mut inventory, 1).foreign_processes = vec![(7, "x".to_owned())];
        let held = plan(&settings, &inventory).unwrap();
        assert_eq!(told(&held.configured), [true, true, false, false]);
        assert_eq!((held.gpus[0].holders().len(), held.gpus[1].holders().len()), (0, 1));
        assert_eq!(told(&Configured::default()), [false; 4]);
        // The GPU with an unknown minor number may be the right one.
        let settings = with(vec![(node(128), 4), (DevicePath::NvidiaMinor(1), 4)]);
        let mut inventory = h200s();
        facts(&mut inventory, 1).minor = None;
        assert_eq!(told(&plan(&settings, &inventory).unwrap().configured), [true, true, false, true]);
    }

    fn short(address: &str) -> DevicePath {
        DevicePath::ShortPci(address.parse().unwrap())
    }

    /// The platform itself leaves out the domain of a GPU's address.
    #[test]
    fn an_address_without_a_domain_finds_the_only_gpu_in_any_domain() {
        let one = gpu("0001:1a:00.0", 128, "GPU-1", 143_771, (9, 0));
        let settings = with(vec![(short("1a:00.0"), 4)]);
        let alone = inventory(vec![one.clone()]);
        let served =
            |plan: &Plan| plan.gpus.iter().map(|gpu| gpu.gpu.pci.address.to_string()).collect::<Vec<_>>();
        let before = plan(&settings, &alone).unwrap();
        assert_eq!(served(&before), ["0001:1a:00.0"]);
        // An address with a domain does not match another domain.
        assert_eq!(missing(&with(vec![(pci("1a:00.0"), 4)]), &alone).len(), 1);
        // An address without a domain means domain 0000 if there is such a GPU.
        let both = inventory(vec![gpu("0000:1a:00.0", 129, "GPU-0", 143_771, (9, 0)), one.clone()]);
        assert_eq!(served(&plan(&settings, &both).unwrap()), ["0000:1a:00.0"]);
        let several = inventory(vec![one, gpu("0002:1a:00.0", 129, "GPU-2", 143_771, (9, 0))]);
        assert_eq!(
            problems(&settings, &several),
            [
                "devices.yml:2: devices[0].path: 1a:00.0 may be 0001:1a:00.0 or 0002:1a:00.0; write the address with its domain"
            ]
        );
        // If the GPU of another entry's claim is ambiguous, no GPU is served.
        let claimed = and_other(self::settings(), Some(short("1a:00.0")));
        assert!(not_yet(&claimed, &several).contains("1a:00.0 may be"));
        assert_eq!(served(&plan(&claimed, &both).unwrap()), ["0001:1a:00.0"]);
        // When the GPU goes, no other GPU takes its place.
        let other = inventory(vec![gpu("0002:1a:00.0", 129, "GPU-2", 143_771, (9, 0))]);
        let after = super::plan(&settings, &other, &before.gpus).unwrap();
        assert_eq!(served(&after), ["0001:1a:00.0"]);
        assert!(after.gpus[0].unusable.is_some() && after.control_daemons.is_empty());
        let after = super::plan(&settings, &several, &before.gpus).unwrap();
        assert_eq!((served(&after), after.gpus[0].unusable.clone()), (vec!["0001:1a:00.0".to_owned()], None));
    }

    #[test]
    fn a_gpu_named_twice_is_a_problem_in_every_spelling() {
        for second in
            [node(128), pci("1a:00.0"), DevicePath::Uuid("GPU-0".to_owned()), DevicePath::NvidiaMinor(0)]
        {
            let settings = with(vec![(node(128), 4), (node(129), 4), (second.clone(), 4)]);
            let problems = problems(&settings, &h200s());
            let expected = format!(
                "devices.yml:4: devices[2].path: {second} (0000:1a:00.0) is named a second time; \
                 devices.yml:2 names it as /dev/dri/renderD128; keep one"
            );
            assert_eq!(problems, [expected]);
        }
    }

    /// The time for sixteen times as many entries is about sixteen times as long, not 256 times.
    #[test]
    fn the_time_grows_with_the_number_of_entries_and_not_with_its_square() {
        let inventory = without_driver(h200s());
        let settings = |entries: u32| with((0..entries).map(|number| (node(128 + number), 1)).collect());
        let fastest = |entries| {
            let settings = settings(entries);
            let once = |_| {
                let begun = std::time::Instant::now();
                plan(&settings, &inventory).unwrap_err();
                begun.elapsed()
            };
            (0..5).map(once).min().unwrap()
        };
        let (few, many) = (fastest(1_000), fastest(16_000));
        println!("1,000 entries: {few:?}; 16,000 entries: {many:?}");
        assert!(many < few * 100, "{few:?}, {many:?}");
    }

    #[test]
    fn all_problems_come_at_once() {
        let mut settings =
            with(vec![(node(140), 4), (node(128), 4), (node(128), 4), (node(129), 143_772), (node(141), 4)]);
        settings.devices[0].path = None;
        let error = plan(&settings, &h200s()).unwrap_err();
        let lines: Vec<_> = error.to_string().lines().map(str::to_owned).collect();
        assert_eq!(lines.len(), 4, "{lines:?}");
        assert!(lines[0].starts_with("devices.yml:2: devices[0].path: an NVIDIA_MPS entry without a path"));
        assert!(lines[1].starts_with("devices.yml:4: devices[2].path: "));
        assert_eq!(
            lines[2],
            "devices.yml:5: devices[3].virtual_number: 143772 slices of 0000:1b:00.0, which has 143771 MiB; \
             give each slice 1 MiB or more"
        );
        assert!(lines[3].starts_with("devices.yml:6: devices[4].path: /dev/dri/renderD141 does not exist"));
    }

    #[test]
    fn a_slice_has_some_memory() {
        let plan = plan(&with(vec![(node(128), 23040)]), &p40()).unwrap();
        assert_eq!(limits(&plan), [(1, 1)]);
        let mut settings = settings();
        settings.replicas = NonZeroU32::new(u32::MAX).unwrap();
        let problems = problems(&settings, &p40());
        assert!(problems[0].starts_with("/etc/yunion/host.conf: cuda_mps_replicas: 4294967295 slices"));
    }

    #[test]
    fn without_a_driver_the_facts_from_the_bus_are_checked() {
        let mut inventory = without_driver(h200s());
        inventory.others.push(device("03:00.0", 0x1002, 132));
        for path in [node(128), pci("1a:00.0"), pci("00:06.0"), DevicePath::Uuid("GPU-0".to_owned())] {
            assert_eq!(not_yet(&with(vec![(path, 4)]), &inventory), "no driver");
        }
        assert_eq!(not_yet(&settings(), &inventory), "no driver");
        for path in [node(132), other("/dev/dri/card1"), other("/dev/null")] {
            let settings = with(vec![(node(128), 4), (path, 4)]);
            assert_eq!(problems(&settings, &inventory).len(), 1);
        }
        let twice = with(vec![(node(128), 4), (node(128), 4)]);
        assert!(problems(&twice, &inventory)[0].contains("a second time"));
    }

    #[test]
    fn an_entry_waits_for_a_gpu_that_can_not_be_asked() {
        let mut inventory = h200s();
        inventory.gpus[2].nvml = Err("GPU is lost".into());
        let alone = |path: DevicePath, inventory: &Inventory| {
            let [(certain, reason)] =
                <[(bool, String); 1]>::try_from(missing(&with(vec![(path, 4)]), inventory)).unwrap();
            (certain, reason)
        };
        for path in [DevicePath::Uuid("GPU-2".to_owned()), DevicePath::NvidiaMinor(2)] {
            let (certain, reason) = alone(path.clone(), &inventory);
            assert!(
                !certain && reason.contains("0000:1c:00.0") && reason.contains("GPU is lost"),
                "{reason}"
            );
            // The other GPU is served.
            let both = plan(&with(vec![(node(128), 4), (path, 4)]), &inventory).unwrap();
            assert_eq!((both.gpus.len(), both.missing.len(), both.control_daemons.len()), (1, 1, 1));
        }
        inventory.gpus[2].pci.render_node = None;
        let (certain, reason) = alone(node(130), &inventory);
        assert!(!certain && reason.contains("modprobe nvidia-drm"), "{reason}");
        // A GPU in a virtual machine never gets a render node on the host.
        inventory.gpus[2].pci.driver = Some("vfio-pci".to_owned());
        assert!(alone(node(130), &inventory).0);
    }

    type Ailment = fn(&mut Inventory);

    #[test]
    fn an_unusable_gpu_does_not_stop_the_others() {
        let entries = || with(vec![(node(128), 4), (node(129), 2)]);
        let ailments: [(Ailment, &str); 5] = [
            (|all| all.gpus[1].nvml = Err("GPU is lost".into()), "GPU is lost"),
            (
                |all| facts(all, 1).mig_enabled = true,
                "MIG is on; turn it off with nvidia-smi -i 0000:1b:00.0 -mig 0",
            ),
            (
                |all| facts(all, 1).compute_mode = Some(ComputeMode::Prohibited),
                "compute mode Prohibited lets no process in; change it with nvidia-smi -i 0000:1b:00.0 -c DEFAULT",
            ),
            (
                |all| {
                    facts(all, 1).foreign_processes =
                        vec![(4711, "python3".to_owned()), (12, "x".to_owned())];
                },
                "held by processes that do not go through MPS: 4711 (python3), 12 (x); end them",
            ),
            (
                |all| facts(all, 1).memory_total_mib = None,
                "NVML does not say how much memory it has, so it can't be divided",
            ),
        ];
        for (ail, reason) in ailments {
            let mut inventory = h200s();
            ail(&mut inventory);
            let plan = plan(&entries(), &inventory).unwrap();
            assert_eq!(plan.gpus[0].unusable, None);
            assert_eq!(plan.gpus[1].unusable.as_deref(), Some(reason));
            assert_eq!(plan.gpus[1].slices, 2);
            let [daemon] = plan.control_daemons.as_slice() else { panic!("{plan:?}") };
            assert_eq!(daemon.gpus.len(), 1);
            // The percentage of a GPU that is left out does not count.
            assert_eq!(daemon.thread_percentage, 25);
            assert_eq!(plan.gpus[0].warnings, []);
        }
        let mut dead = h200s();
        for gpu in &mut dead.gpus {
            gpu.nvml = Err("GPU is lost".into());
        }
        for topology in [Topology::Shared, Topology::PerGpu] {
            let mut settings = entries();
            settings.topology = topology;
            let plan = plan(&settings, &dead).unwrap();
            assert_eq!(plan.control_daemons, []);
            assert_eq!(limits(&plan), [(0, 25), (0, 50)]);
        }
    }

    #[test]
    fn all_reasons_of_an_unusable_gpu_are_given_at_once() {
        let mut inventory = p40();
        facts(&mut inventory, 0).mig_enabled = true;
        facts(&mut inventory, 0).memory_total_mib = None;
        let plan = plan(&with(vec![(node(128), 4)]), &inventory).unwrap();
        let reason = plan.gpus[0].unusable.clone().unwrap();
        assert!(reason.contains("MIG is on") && reason.contains("how much memory"), "{reason}");
    }

    #[test]
    fn foreign_processes_matter_if_the_mode_is_or_becomes_exclusive() {
        let mut settings = with(vec![(node(128), 4)]);
        let mut inventory = p40();
        facts(&mut inventory, 0).foreign_processes = vec![(4711, "python3".to_owned())];
        let mut unusable = |set, mode| {
            settings.set_compute_mode = set;
            facts(&mut inventory, 0).compute_mode = mode;
            plan(&settings, &inventory).unwrap().gpus[0].unusable.is_some()
        };
        assert!(unusable(true, Some(ComputeMode::Default)));
        assert!(unusable(false, Some(ComputeMode::ExclusiveProcess)));
        assert!(!unusable(false, Some(ComputeMode::Default)));
        assert!(!unusable(false, None));
    }

    #[test]
    fn more_slices_than_clients_is_a_warning() {
        let warned = |slices, capability, driver: &str| {
            let mut inventory = h200s();
            inventory.driver = Ok(driver.to_owned());
            facts(&mut inventory, 0).compute_capability = Some(capability);
            let plan = plan(&with(vec![(node(128), slices)]), &inventory).unwrap();
            plan.gpus[0].warnings.iter().any(|warning| text(warning).contains("clients at once"))
        };
        let golden = [
            (16, (6, 1), "580.1"),
            (48, (7, 0), "580.159.04"),
            (60, (9, 0), "590.44.01"),
            (48, (9, 0), "unknown"),
        ];
        for (most, capability, driver) in golden {
            assert!(!warned(most, capability, driver), "{most} {driver}");
            assert!(warned(most + 1, capability, driver), "{most} {driver}");
        }
    }

    #[test]
    fn an_unknown_compute_capability_counts_as_an_old_one() {
        let mut inventory = h200s();
        facts(&mut inventory, 0).compute_capability = None;
        let plan = plan(&with(vec![(node(128), 4)]), &inventory).unwrap();
        assert!(!plan.gpus[0].limits_enforced);
        assert_eq!(plan.gpus[0].warnings, [Warning::NoComputeCapability]);
        assert!(!plan.control_daemons[0].multiuser);
    }

    #[test]
    fn an_entry_of_another_type_for_the_same_gpu_is_a_warning() {
        let settings = and_other(with(vec![(node(128), 4), (node(129), 4)]), Some(pci("1b:00.0")));
        let plan = plan(&settings, &h200s()).unwrap();
        assert_eq!(plan.gpus[0].warnings, []);
        let [twice] = plan.gpus[1].warnings.as_slice() else { panic!("{:?}", plan.gpus[1].warnings) };
        assert_eq!(text(twice), "devices.yml:90 lists it as NVIDIA_GPU_SHARE too");
    }

    proptest! {
        #[test]
        fn the_order_of_entries_changes_nothing_but_the_order(
            entries in Just(vec![(0u32, 4u32), (1, 10), (2, 3), (3, 7)]).prop_shuffle(),
            kept in 1usize..=4,
            per_gpu: bool,
        ) {
            let mut shuffled: Vec<_> = entries.into_iter().take(kept).collect();
            let make = |entries: &[(u32, u32)]| {
                let mut settings = with(entries.iter().map(|(gpu, slices)| (node(128 + gpu), *slices)).collect());
                settings.topology = if per_gpu { Topology::PerGpu } else { Topology::Shared };
                plan(&settings, &h200s()).unwrap()
            };
            let one = make(&shuffled);
            let in_order: Vec<_> = one.gpus.iter().map(|gpu| gpu.gpu.pci.address.bus - 0x1a).collect();
            let written: Vec<_> = shuffled.iter().map(|(gpu, _)| u8::try_from(*gpu).unwrap()).collect();
            prop_assert_eq!(in_order, written);
            shuffled.sort_unstable();
            let sorted = make(&shuffled);
            prop_assert_eq!(&one.control_daemons, &sorted.control_daemons);
            for gpu in &one.gpus {
                prop_assert!(sorted.gpus.contains(gpu));
            }
        }

        #[test]
        fn any_other_text_is_a_problem(text: String, slices in 1u32..) {
            for text in [text.clone(), format!("/dev/dri/card{text}"), format!("/dev/dri/by-path/pci-{text}")] {
                let settings = with(vec![(other(&text), slices)]);
                prop_assert!(matches!(plan(&settings, &h200s()), Err(PlanError::Problems(_))));
            }
        }

        #[test]
        fn slices_never_add_up_to_more_than_the_memory(total in 1u64..1 << 40, slices: u32) {
            let slices = NonZeroU32::new(slices).unwrap_or(NonZeroU32::MIN);
            let slice = slice_of(total, slices);
            prop_assert!(slice * u64::from(slices.get()) <= total);
            prop_assert!((slice + 1) * u64::from(slices.get()) > total);
        }
    }
}
