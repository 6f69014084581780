//! Loads the settings from the configuration files, checks them, and reports every problem at once. `host.conf` is read first.
//! `host_local.conf` overrides values of `host.conf`. A key in these two files names the device file, which lists the GPUs to
//! serve.

pub mod agent;
mod device_file;
mod host_conf;
mod yaml;

use std::fmt;
use std::io;
use std::num::{NonZeroU32, NonZeroU64};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mps_core::terms::PciAddress;
use strum::{EnumString, VariantNames};
use tracing::Level;

use crate::host::regular_file::{self, Unreadable};
use crate::problem::{LocatedProblem, Origin, Problem};
pub(crate) use host_conf::LOG_KEY;
use host_conf::{DEVICE_FILE_KEY, Draft, ENABLE_KEY, REPLICAS_KEY, TOPOLOGY_KEY};
pub use host_conf::{LOG_BESIDE_PIPE, has_room_for_sockets};
use yaml::Value;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The key `enable_cuda_mps`. If false, the service publishes no slice.
    pub enabled: bool,
    /// True if a file sets `enable_cuda_mps`. If no file sets the key, `enabled` is false by default.
    pub says_enabled: bool,
    pub pipe_directory: PathBuf,
    pub log_directory: PathBuf,
    /// The place of the configuration line that puts the log directory into the pipe directory, where control daemons make
    /// their own files. None if the log directory is elsewhere.
    pub log_in_pipe: Option<Origin>,
    /// `cuda_mps_replicas`: the number of slices of each GPU if the device file has no entry of the type `NVIDIA_MPS`.
    pub replicas: NonZeroU32,
    pub log_level: Level,
    pub topology: Topology,
    pub thread_policy: ThreadPolicy,
    pub multiuser: MultiUser,
    /// `cuda_mps_prewarm`: if true, a server starts before the first client comes.
    pub prewarm: bool,
    pub cpu_affinity: CpuAffinity,
    pub supervision: Supervision,
    pub memory_limit: MemoryLimit,
    pub on_overuse: OnOveruse,
    pub may_terminate: MayTerminate,
    /// `cuda_mps_cdi_directory`: the directory for the CDI spec. None if the service writes no CDI spec.
    pub cdi_directory: Option<PathBuf>,
    /// The entries of the device file. Empty if `container_device_config_file` is not set.
    pub devices: Vec<DeviceEntry>,
    /// The configuration files that were read. A later file overrides an earlier file.
    pub sources: Vec<PathBuf>,
    pub absent: Vec<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            enabled: false,
            says_enabled: false,
            pipe_directory: PathBuf::from("/tmp/nvidia-mps/pipe"),
            log_directory: PathBuf::from("/tmp/nvidia-mps/log"),
            log_in_pipe: None,
            replicas: NonZeroU32::MIN.saturating_add(9),
            log_level: Level::INFO,
            topology: Topology::default(),
            thread_policy: ThreadPolicy::default(),
            multiuser: MultiUser::default(),
            prewarm: true,
            cpu_affinity: CpuAffinity::default(),
            supervision: Supervision::default(),
            memory_limit: MemoryLimit::default(),
            on_overuse: OnOveruse::default(),
            may_terminate: MayTerminate::default(),
            cdi_directory: None,
            devices: Vec::new(),
            sources: Vec::new(),
            absent: Vec::new(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Supervision {
    pub set_compute_mode: bool,
    /// `cuda_mps_quit_timeout`: the time that a control daemon has to end after the command `quit`, before the service sends
    /// SIGTERM.
    pub quit_timeout: Duration,
    /// `cuda_mps_fault_grace`: the time that clients have to end after a fault of their server. Then the service ends the
    /// server, which ends the clients too.
    pub fault_grace: Duration,
    /// `cuda_mps_log_max_size` in bytes (the key is in MiB). A log of this size is renamed, and a new log begins.
    pub log_max_bytes: u64,
    /// `servers_path`: the directory in which the host agent stores the records of its guests.
    pub servers_path: PathBuf,
}

impl Default for Supervision {
    fn default() -> Self {
        Self {
            set_compute_mode: true,
            quit_timeout: Duration::from_secs(10),
            fault_grace: Duration::from_secs(30),
            log_max_bytes: 16 * 1024 * 1024,
            servers_path: PathBuf::from("/opt/cloud/workspace/servers"),
        }
    }
}

/// An entry of the device file, of any type. The service does not use the GPU of an entry unless the type is `NVIDIA_MPS`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceEntry {
    pub name: String,
    pub origin: Origin,
    pub device_type: String,
    /// None if the entry has no key `path`, which some types other than `NVIDIA_MPS` do not need.
    pub path: Option<DevicePath>,
    /// None if the entry has another type than `NVIDIA_MPS`.
    pub mps: Option<MpsEntry>,
}

impl DeviceEntry {
    pub fn problem(&self, key: &str, problem: Problem) -> LocatedProblem {
        problem.at(self.origin.clone(), format!("{}.{key}", self.name))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsEntry {
    /// The number of slices of the GPU: the length of the list `slices`, or the key `virtual_number`.
    pub slices: NonZeroU32,
    /// The keys of the entry that apply to each slice without a key of its own.
    pub each: SliceKeys,
    /// The key `slices`: for the first slice, the second slice and so on, the keys that override `each`. Empty if all slices
    /// are equal.
    pub own: Vec<SliceKeys>,
    /// None if the entry does not override the topology.
    pub isolation: Option<Isolation>,
    /// True if the slices together may have more memory than the GPU.
    pub overcommit: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SliceKeys {
    /// In MiB. Without this key, a slice has its share of the GPU's memory.
    pub memory_mib: Option<NonZeroU64>,
    /// From 1 to 100. Without this key, the policy `cuda_mps_thread_percentage` applies.
    pub thread_percentage: Option<u8>,
    /// Without this key, a slice has its share of the number of clients that the GPU can have.
    pub max_clients: Option<NonZeroU32>,
}

impl MpsEntry {
    pub fn with_slices(slices: NonZeroU32) -> Self {
        Self { slices, each: SliceKeys::default(), own: Vec::new(), isolation: None, overcommit: false }
    }

    pub fn sizes(&self) -> impl Iterator<Item = SliceKeys> {
        (0..self.slices.get() as usize).map(|ordinal| {
            let own = self.own.get(ordinal).copied().unwrap_or_default();
            SliceKeys {
                memory_mib: own.memory_mib.or(self.each.memory_mib),
                thread_percentage: own.thread_percentage.or(self.each.thread_percentage),
                max_clients: own.max_clients.or(self.each.max_clients),
            }
        })
    }
}

/// The value of an entry's key `path`, which names a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DevicePath {
    RenderNode(PathBuf),
    Pci(PciAddress),
    /// A PCI address without a domain: the GPU in domain 0000, or else the only GPU with this address in any domain.
    ShortPci(PciAddress),
    /// `GPU-` and 36 characters, in lower case.
    Uuid(String),
    /// The number N of `/dev/nvidiaN`.
    NvidiaMinor(u32),
    /// Any other text, unchanged. In an `NVIDIA_MPS` entry such a path is an error. `plan` reports the error, since `plan`
    /// knows the GPUs of the host and can name the right path.
    Other(String),
}

impl fmt::Display for DevicePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RenderNode(node) => write!(f, "{}", node.display()),
            Self::Pci(address) => write!(f, "{address}"),
            Self::ShortPci(address) => f.write_str(&address.short()),
            Self::Uuid(uuid) => f.write_str(uuid),
            Self::NvidiaMinor(minor) => write!(f, "/dev/nvidia{minor}"),
            Self::Other(text) => write!(f, "{text:?}"),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum Topology {
    /// One control daemon in the pipe directory, for all GPUs.
    #[default]
    Shared,
    /// One control daemon per GPU, in `<pipe directory>/<GPU UUID>`.
    PerGpu,
    /// One control daemon per slice, in `<pipe directory>/<name of the slice>`.
    PerSlice,
}

/// `isolation`: how far a fault of one client spreads to other clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumString, strum::Display)]
#[strum(serialize_all = "snake_case")]
pub enum Isolation {
    /// The slices of a GPU share a control daemon and compute at the same time. A fault in one slice ends the work in all
    /// slices of the GPU.
    Gpu,
    /// Each slice has its own control daemon, and the slices take turns on the GPU. A fault ends the work in one slice only.
    Slice,
}

impl Settings {
    pub fn isolation(&self, keys: &MpsEntry) -> Isolation {
        keys.isolation.unwrap_or(match self.topology {
            Topology::Shared | Topology::PerGpu => Isolation::Gpu,
            Topology::PerSlice => Isolation::Slice,
        })
    }

    /// The reason why no GPU is served while MPS is off. The reason names the configuration files that do not exist, so that an
    /// administrator notices a misspelt path.
    pub fn why_not_enabled(&self) -> Problem {
        if self.says_enabled {
            return format!("{ENABLE_KEY} is false").into();
        }
        let absent = match self.absent.as_slice() {
            [] => String::new(),
            absent => format!("; files that do not exist: {absent}", absent = listed(absent)),
        };
        let found = match self.sources.as_slice() {
            [] => format!("there is no configuration{absent}"),
            read => format!(
                "no file sets {ENABLE_KEY}; files that were read: {read}{absent}",
                read = listed(read)
            ),
        };
        let remedy =
            "yunion-mpsctl setup writes the configuration, or says which lines belong in the existing files";
        Problem::new(found, remedy)
    }
}

/// `cuda_mps_thread_percentage`: the share of a GPU's threads that each of N slices may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ThreadPolicy {
    /// Each slice gets 100/N percent.
    #[default]
    Equal,
    /// Each slice gets min(100, 200/N) percent.
    Balanced,
    Unlimited,
    /// Each slice gets this percentage, from 1 to 100.
    Fixed(u8),
}

/// `cuda_mps_multiuser`: if on, one server, which runs as root, serves the clients of every user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MultiUser {
    /// On if every GPU of the control daemon allows multi-user mode and the driver's control daemon has an option for
    /// multi-user mode. Off otherwise.
    #[default]
    Auto,
    /// A driver without multi-user mode is an error.
    On,
    Off,
}

/// `cuda_mps_cpu_affinity`: the CPUs to which a control daemon is bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum CpuAffinity {
    /// The CPUs near the GPUs of the control daemon.
    Auto,
    #[default]
    None,
}

/// `cuda_mps_memory_limit`: who ensures that the clients of a slice together do not exceed its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum MemoryLimit {
    /// The kernel, if it can, limits the memory of a slice's clients. The service watches their memory too.
    #[default]
    Auto,
    /// The service alone watches the memory of a slice's clients.
    Watch,
}

/// `cuda_mps_overuse`: the service's reaction when the clients of a slice exceed its budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum OnOveruse {
    /// The service only writes a message.
    #[default]
    Report,
    /// The service writes a message, and ends the GPU work of the slice's newest clients until the other clients fit into the
    /// budget.
    Terminate,
}

/// `cuda_mps_may_terminate`: the users who may end the GPU work of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum MayTerminate {
    #[default]
    Root,
    /// Root, and the user who has started the process.
    Owner,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sources {
    /// The main configuration file on the command line. None if the command line has no `--config`. Then the main file is the
    /// first file of `main_files` that exists.
    pub config: Option<PathBuf>,
    /// The directory below which every path is opened, including the paths in the configuration files. The directory is `/` on
    /// a real host.
    pub sysroot: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    pub settings: Settings,
    /// Problems that an administrator should fix, although they do not prevent the service from serving GPUs.
    pub warnings: Vec<LocatedProblem>,
    /// True if the host belongs to the platform (Cloudpods), and so has a host agent.
    pub platform: bool,
    /// Settings that are correct for this service, but with which the platform's host agent or its containers fail.
    pub agent: Vec<agent::Trouble>,
    /// The keys that this service does not know, with their places. Most belong to the host agent, and some may be misspelt.
    pub unknown_keys: Vec<(Origin, String)>,
    /// The keys that a later file overrides. The first place has the overridden value, and the second place has the value that
    /// counts.
    pub overridden: Vec<(&'static str, Origin, Origin)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// Every problem of every configuration file, in the order of the files and their lines. Never empty.
    pub problems: Vec<LocatedProblem>,
    pub warnings: Vec<LocatedProblem>,
}

pub fn load(sources: &Sources) -> Result<Loaded, Refused> {
    let mut draft = Draft::new();
    read_main_file(sources, &mut draft);
    if let Some(file) = draft.local_file.clone() {
        // A missing local file is no problem, even if the key `local_config_file` names the file.
        match draft.checked(read_text(&sources.sysroot, &file)) {
            Some(Some(text)) => draft.overlay(&file, &text),
            Some(None) => draft.settings.absent.push(file),
            None => {}
        }
    }
    draft.check_together();
    read_device_file(sources, &mut draft);
    if !draft.problems.is_empty() {
        return Err(Refused { problems: draft.problems, warnings: draft.warnings });
    }
    draft.settings.says_enabled = draft.origin(ENABLE_KEY).is_some();
    let platform = agent::is_here(&sources.sysroot, &draft.unknown_keys);
    let agent = platform.then(|| agent::troubles(&draft.settings, draft.origin(TOPOLOGY_KEY), &draft.empty));
    let agent = agent.unwrap_or_default();
    let Draft { settings, warnings, unknown_keys, overridden, .. } = draft;
    Ok(Loaded { settings, warnings, platform, agent, unknown_keys, overridden })
}

/// The default path of the main file. Messages name this path if the host has no main file.
pub const MAIN_FILE: &str = "/etc/yunion/host.conf";

/// The path at which the main file is searched for first. Cloudpods's programs read ./etc/host.conf and run in /opt/yunion/bin.
/// This service can't read ./etc/host.conf: its working directory under systemd is /, and /etc/host.conf belongs to the C
/// library.
const PLATFORM_FILE: &str = "/opt/yunion/bin/etc/host.conf";

impl Loaded {
    pub fn files(&self) -> String {
        match self.settings.sources.as_slice() {
            [] => MAIN_FILE.to_owned(),
            read => listed(read),
        }
    }

    /// Returns a problem if this configuration turns MPS off although no file has `enable_cuda_mps: false`. The usual cause is
    /// that an administrator is just writing host.conf, or has removed the file. A reload of such a configuration would end the
    /// work of all tenants, so the service refuses the reload.
    pub fn silent_end(&self) -> Option<LocatedProblem> {
        (!self.settings.enabled && !self.settings.says_enabled).then(|| {
            let file = self.settings.sources.first().map_or(Path::new(MAIN_FILE), PathBuf::as_path);
            let remedy = format!(
                "write {ENABLE_KEY}: true to keep the GPUs served, or {ENABLE_KEY}: false to end all GPU work"
            );
            let found = "the key is no longer set, although GPUs are served";
            LocatedProblem::new(Origin::whole(file), ENABLE_KEY, found, remedy)
        })
    }
}

fn listed(files: &[PathBuf]) -> String {
    files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ")
}

impl Sources {
    pub fn main_files(&self) -> Vec<&Path> {
        match &self.config {
            Some(file) => vec![file],
            None => vec![Path::new(PLATFORM_FILE), Path::new(MAIN_FILE)],
        }
    }
}

fn read_main_file(sources: &Sources, draft: &mut Draft) {
    for file in sources.main_files() {
        match draft.checked(read_text(&sources.sysroot, file)) {
            Some(Some(text)) => return draft.overlay(file, &text),
            Some(None) => draft.settings.absent.push(file.to_owned()),
            None => return,
        }
    }
    let (file, list, remedy) = match &sources.config {
        Some(file) => {
            (file.as_path(), &mut draft.problems, "create the file or correct the path on the command line")
        }
        None => {
            let remedy = "every key has its default; yunion-mpsctl setup writes the file";
            (Path::new(MAIN_FILE), &mut draft.warnings, remedy)
        }
    };
    list.push(LocatedProblem::new(Origin::whole(file), "", "no such file", remedy));
}

fn read_device_file(sources: &Sources, draft: &mut Draft) {
    let before = draft.problems.len();
    match (&draft.device_file, draft.nearly_device_file.take()) {
        // Without a device file the service serves every GPU. A misspelt `container_device_config_file` must not cause that, so
        // the misspelt key is a problem.
        (None, problem) => draft.problems.extend(problem),
        (Some(_), problem) => draft.warnings.extend(problem),
    }
    if let Some(file) = draft.device_file.clone() {
        match draft.checked(read_text(&sources.sysroot, &file)) {
            Some(Some(text)) => {
                draft.settings.devices = device_file::parse(&file, &text, draft);
                if draft.problems.is_empty() {
                    let warning = without_entry(&file, draft);
                    draft.warnings.extend(warning);
                }
                draft.settings.sources.push(file);
            }
            Some(None) => {
                let origin = draft.origin(DEVICE_FILE_KEY).cloned().unwrap_or_else(|| Origin::whole(&file));
                let found = format!("no such file: {}", file.display());
                let remedy = "create the file or correct the path";
                draft.problems.push(LocatedProblem::new(origin, DEVICE_FILE_KEY, found, remedy));
            }
            None => {}
        }
    }
    // A host without MPS may have an outdated device file, or use the file for devices of other types. So with MPS off,
    // problems of the device file become warnings. But if another file has a problem, MPS may be off by mistake, and the
    // problems of the device file stay problems.
    if !draft.settings.enabled && before == 0 {
        draft.warnings.extend(draft.problems.drain(before..));
    }
}

/// The warning that the device file has no entry of the type `NVIDIA_MPS`, so that the service serves every GPU. There is no
/// warning if a file sets `cuda_mps_replicas`: an administrator who sets this key wants GPUs without an entry to be served.
fn without_entry(file: &Path, draft: &Draft) -> Option<LocatedProblem> {
    let Settings { enabled, devices, replicas, .. } = &draft.settings;
    let is_wanted = draft.origin(REPLICAS_KEY).is_some() || devices.iter().any(|entry| entry.mps.is_some());
    (*enabled && !is_wanted).then(|| {
        let found = format!(
            "this file has no entry of type NVIDIA_MPS, so each NVIDIA GPU that no entry names is cut \
             into {replicas} slices"
        );
        let remedy = format!(
            "write type: NVIDIA_MPS in the entry of each GPU that is to be served; if every GPU is meant, \
             write {REPLICAS_KEY}: {replicas} in host.conf"
        );
        LocatedProblem::new(Origin::whole(file), "devices", found, remedy)
    })
}

const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// None if the file does not exist.
fn read_text(sysroot: &Path, file: &Path) -> Result<Option<String>, LocatedProblem> {
    let (found, remedy) = match regular_file::read(&below(sysroot, file), MAX_FILE_BYTES) {
        Ok(bytes) => return text_of(file, &bytes).map(Some),
        Err(Unreadable::Failed(error))
            if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            return Ok(None);
        }
        Err(Unreadable::TooLarge(_)) => {
            ("larger than 1 MiB".to_owned(), "no configuration is so large: check the path")
        }
        Err(error @ Unreadable::Failed(_)) => (error.to_string(), "make the file readable"),
        Err(error @ Unreadable::NotRegular(_)) => (error.to_string(), "put a regular file at this path"),
    };
    Err(LocatedProblem::new(Origin::whole(file), "", found, remedy))
}

pub fn below(sysroot: &Path, file: &Path) -> PathBuf {
    if sysroot == Path::new("/") {
        file.to_owned()
    } else {
        sysroot.join(file.strip_prefix("/").unwrap_or(file))
    }
}

/// Decodes the bytes of a file as UTF-8 text. The error gives the line of the first NUL byte or invalid byte.
fn text_of(file: &Path, bytes: &[u8]) -> Result<String, LocatedProblem> {
    let damaged = |at: usize, found, remedy| {
        let line = Some(bytes.iter().take(at).filter(|byte| **byte == b'\n').count() + 1);
        LocatedProblem::new(Origin { file: file.to_owned(), line }, "", found, remedy)
    };
    if let Some(at) = bytes.iter().position(|byte| *byte == 0) {
        let remedy = "the file is binary or damaged: check the path, or write the file again";
        return Err(damaged(at, "a NUL byte", remedy));
    }
    match std::str::from_utf8(bytes) {
        // Some editors write a byte order mark at the beginning of a file.
        Ok(text) => Ok(text.strip_prefix('\u{feff}').unwrap_or(text).to_owned()),
        Err(error) => Err(damaged(error.valid_up_to(), "bytes that are not UTF-8", "save the file as UTF-8")),
    }
}

fn whole<T>(value: &Value<'_>, range: RangeInclusive<T>, unit: &str) -> Result<T, Problem>
where
    T: TryFrom<i128> + PartialOrd + fmt::Display,
{
    let number = value.as_integer().and_then(|number| T::try_from(number).ok());
    number.filter(|number| range.contains(number)).ok_or_else(|| {
        let (first, last) = (range.start(), range.end());
        value.wrong(format!("write a whole number of {unit} from {first} to {last}"))
    })
}

/// Reads a number of slices. The column `addr` in Cloudpods's database has room for 16 characters, the length of
/// `0001:1a:00.0-999`. So a slice's ordinal has at most three digits.
fn slices(value: &Value<'_>) -> Result<NonZeroU32, Problem> {
    whole(value, 1..=999, "slices").map(|count| NonZeroU32::new(count).unwrap_or(NonZeroU32::MIN))
}

/// Reads a number of clients. The limit is larger than the number of clients that any GPU can have.
fn most_clients(value: &Value<'_>) -> Result<NonZeroU32, Problem> {
    whole(value, 1..=999, "clients").map(|count| NonZeroU32::new(count).unwrap_or(NonZeroU32::MIN))
}

/// 16 TiB, in MiB.
const MOST_MEMORY_MIB: u64 = 16 << 20;

fn memory(value: &Value<'_>) -> Result<NonZeroU64, Problem> {
    let text = value.text();
    let (number, unit) = match (text.strip_suffix("GiB"), text.strip_suffix("MiB")) {
        (Some(number), _) => (number, 1024),
        (None, Some(number)) => (number, 1),
        (None, None) => (&*text, 1),
    };
    let number = number.trim_end_matches(' ');
    let is_plain = number.bytes().all(|byte| byte.is_ascii_digit()) && !number.starts_with('0');
    let mib = number.parse::<u64>().ok().filter(|_| is_plain).and_then(|number| number.checked_mul(unit));
    mib.filter(|mib| *mib <= MOST_MEMORY_MIB).and_then(NonZeroU64::new).ok_or_else(|| {
        value.wrong(format!(
            "write a whole number of MiB from 1 to {MOST_MEMORY_MIB}, or a size such as 20GiB"
        ))
    })
}

fn percentage(value: &Value<'_>) -> Result<u8, Problem> {
    whole(value, 1..=100, "percent")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    const LOCAL_FILE: &str = "/etc/yunion/host_local.conf";
    const DEVICE_FILE: &str = "/etc/yunion/host_container_device.yml";
    const ONE_GPU: &[u8] = b"devices:\n- {path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 2}\n";

    fn sysroot(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (file, content) in files {
            let path = below(root.path(), Path::new(file));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    fn load_below(root: &tempfile::TempDir) -> Result<Loaded, Vec<LocatedProblem>> {
        load(&Sources { config: None, sysroot: root.path().to_owned() }).map_err(|refused| refused.problems)
    }

    fn load_files(files: &[(&str, &[u8])]) -> Result<Loaded, Vec<LocatedProblem>> {
        load_below(&sysroot(files))
    }

    fn texts(problems: &[LocatedProblem]) -> Vec<String> {
        problems.iter().map(ToString::to_string).collect()
    }

    fn paths(names: &[&str]) -> Vec<PathBuf> {
        names.iter().map(PathBuf::from).collect()
    }

    #[test]
    fn without_any_file_the_defaults_apply() {
        let loaded = load_files(&[]).unwrap();
        let absent = paths(&[PLATFORM_FILE, MAIN_FILE, LOCAL_FILE]);
        assert_eq!(loaded.settings, Settings { absent, ..Settings::default() });
        assert_eq!(
            texts(&loaded.warnings),
            ["/etc/yunion/host.conf: no such file; every key has its default; yunion-mpsctl setup writes \
                 the file"]
        );
    }

    #[test]
    fn the_reason_for_no_mps_names_the_files_that_were_looked_for() {
        let why = |files: &[(&str, &[u8])]| {
            let settings = load_files(files).unwrap().settings;
            assert!(!settings.enabled);
            settings.why_not_enabled().found
        };
        let misspelt = ("/etc/yunin/host.conf", b"enable_cuda_mps: true\n".as_slice());
        assert_eq!(
            why(&[misspelt]),
            "there is no configuration; files that do not exist: /opt/yunion/bin/etc/host.conf, \
             /etc/yunion/host.conf, /etc/yunion/host_local.conf"
        );
        assert_eq!(
            why(&[misspelt, (MAIN_FILE, b"hostname: host1\n")]),
            "no file sets enable_cuda_mps; files that were read: /etc/yunion/host.conf; files that do not \
             exist: /opt/yunion/bin/etc/host.conf, /etc/yunion/host_local.conf"
        );
        assert_eq!(
            why(&[(PLATFORM_FILE, b"a: b\n"), (LOCAL_FILE, b"enable_cuda_mps:\n")]),
            "no file sets enable_cuda_mps; files that were read: /opt/yunion/bin/etc/host.conf, \
             /etc/yunion/host_local.conf"
        );
        assert_eq!(why(&[(MAIN_FILE, b"enable_cuda_mps: false\n")]), "enable_cuda_mps is false");
    }

    #[test]
    fn three_files_become_one_configuration() {
        let loaded = load_files(&[
            (
                MAIN_FILE,
                b"enable_cuda_mps: yes\ncuda_mps_replicas: 4\nlog_level: warn\ncontainer_device_config_file: /etc/devices.yml\nrack:\n",
            ),
            (LOCAL_FILE, b"cuda-mps-replicas: 6\nlog_level:\n"),
            ("/etc/devices.yml", b"devices:\n- {path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 2}\n"),
        ])
        .unwrap();
        let settings = loaded.settings;
        assert!(settings.enabled);
        assert_eq!(settings.replicas.get(), 6);
        assert_eq!(settings.log_level, Level::WARN);
        assert_eq!(settings.devices.len(), 1);
        assert_eq!(settings.devices[0].origin.to_string(), "/etc/devices.yml:2");
        assert_eq!(settings.sources, paths(&[MAIN_FILE, LOCAL_FILE, "/etc/devices.yml"]));
        assert_eq!(loaded.warnings, []);
        let origin = Origin { file: MAIN_FILE.into(), line: Some(5) };
        assert_eq!(loaded.unknown_keys, [(origin, "rack".to_owned())]);
    }

    #[test]
    fn the_local_file_may_be_elsewhere_and_needs_no_main_file() {
        let loaded = load_files(&[(LOCAL_FILE, b"enable_cuda_mps: true\n")]).unwrap();
        assert!(loaded.settings.enabled);
        assert_eq!(loaded.settings.sources, paths(&[LOCAL_FILE]));
        let main = b"local_config_file: /opt/local.conf\n".as_slice();
        let loaded = load_files(&[
            (MAIN_FILE, main),
            ("/opt/local.conf", b"enable_cuda_mps = 1\n"),
            (LOCAL_FILE, b"a\n"),
        ]);
        assert!(loaded.unwrap().settings.enabled);
        assert!(!load_files(&[(MAIN_FILE, main)]).unwrap().settings.enabled);
    }

    #[test]
    fn the_platforms_own_file_comes_first_and_the_c_librarys_is_never_read() {
        let files: [(&str, &[u8]); 3] = [
            ("/etc/host.conf", b"multi on\n"),
            (MAIN_FILE, b"cuda_mps_replicas: 3\n"),
            (PLATFORM_FILE, b"cuda_mps_replicas: 7\n"),
        ];
        let replicas = |count: usize| load_files(&files[..count]).unwrap().settings.replicas.get();
        assert_eq!([replicas(1), replicas(2), replicas(3)], [10, 3, 7]);
    }

    #[test]
    fn a_file_named_on_the_command_line_must_be_there() {
        let root =
            sysroot(&[(MAIN_FILE, b"cuda_mps_replicas: 3\n"), ("/opt/x.conf", b"cuda_mps_replicas: 7\n")]);
        let named =
            |name: &str| load(&Sources { config: Some(name.into()), sysroot: root.path().to_owned() });
        let loaded = named("/opt/x.conf").unwrap();
        assert_eq!((loaded.settings.replicas.get(), loaded.settings.sources), (7, paths(&["/opt/x.conf"])));
        let refused = named("/opt/y.conf").unwrap_err();
        assert_eq!(
            texts(&refused.problems),
            ["/opt/y.conf: no such file; create the file or correct the path on the command line"]
        );
        assert_eq!(below(Path::new("/"), Path::new("etc/host.conf")), Path::new("etc/host.conf"));
        let absolute = root.path().join("opt/x.conf");
        assert!(load(&Sources { config: Some(absolute), sysroot: "/".into() }).is_ok());
    }

    #[test]
    fn every_problem_of_every_file_is_reported_in_order() {
        let problems = load_files(&[
            (
                MAIN_FILE,
                b"cuda_mps_replicas: 0\nenable_cuda_mps: true\ncontainer_device_config_file: /etc/yunion/host_container_device.yml\n",
            ),
            (LOCAL_FILE, b"log_level: loud\n"),
            (DEVICE_FILE, b"devices:\n- path: /dev/dri/renderD128\n  type: NVIDIA_MPS\n  virtual_number: -1\n"),
        ])
        .unwrap_err();
        let starts = [
            "/etc/yunion/host.conf:1: cuda_mps_replicas: found 0; ",
            "/etc/yunion/host_local.conf:1: log_level: found \"loud\"; ",
            "/etc/yunion/host_container_device.yml:4: devices[0].virtual_number: found -1; ",
        ];
        let found = texts(&problems);
        assert_eq!(found.len(), starts.len(), "{found:?}");
        for (text, start) in found.iter().zip(starts) {
            assert!(text.starts_with(start), "{text}");
        }
    }

    /// A problem is often caused by a misspelt key, and only a warning names the misspelt key.
    #[test]
    fn problems_hide_no_warning() {
        let main = b"enable_cuda_mps: true\ncuda_mps_replica: 4\ncuda_mps_replicas: 0\n".as_slice();
        let refused =
            load(&Sources { config: None, sysroot: sysroot(&[(MAIN_FILE, main)]).path().to_owned() });
        let Refused { problems, warnings } = refused.unwrap_err();
        assert_eq!(problems.len(), 1);
        assert_eq!(
            texts(&warnings),
            ["/etc/yunion/host.conf:2: cuda_mps_replica: the service knows no such key and ignores it; \
              correct the spelling or remove the key"]
        );
    }

    #[test]
    fn settings_that_the_host_agent_does_not_know_are_reported() {
        let told = |main: &str, devices: &str| -> Vec<String> {
            let main = format!("{main}\n{DEVICE_FILE_KEY}: {DEVICE_FILE}\n");
            let files = [(MAIN_FILE, main.as_bytes()), (DEVICE_FILE, devices.as_bytes())];
            // Without a key of the platform, the host has no host agent, so there is no trouble with the host agent.
            assert_eq!(load_files(&files).unwrap().agent, []);
            let platforms = format!("{main}hostname: host1\n");
            let loaded = load_files(&[(MAIN_FILE, platforms.as_bytes()), files[1]]).unwrap();
            assert_eq!(loaded.warnings, []);
            loaded.agent.iter().map(|trouble| trouble.problem.to_string()).collect()
        };
        let devices = |path: &str| {
            format!(
                "devices:\n- path: /dev/dri/renderD130\n  type: NVIDIA_GPU_SHARE\n- path: {path}\n  type: NVIDIA_MPS\n  virtual_number: 4\n"
            )
        };
        let uuid = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400";
        for (path, known) in
            [("/dev/dri/renderD128", true), ("0000:00:06.0", false), (uuid, false), ("/dev/nvidia0", false)]
        {
            let warned = format!(
                "{DEVICE_FILE}:4: devices[1].path: the platform's host agent rejects the path {path} and \
                 does not start, unless the agent reads D-Bus; name the GPU by its render node, \
                 /dev/dri/renderDN, as `ls -l /dev/dri/by-path` shows it"
            );
            let warned = if known { Vec::new() } else { vec![warned] };
            assert_eq!(told("enable_cuda_mps: true", &devices(path)), warned);
            assert!(told("enable_cuda_mps: false", &devices(path)).is_empty());
        }
        let good = devices("/dev/dri/renderD128");
        assert_eq!(
            told("enable_cuda_mps: true\ncuda_mps_topology: per_gpu", &good),
            ["/etc/yunion/host.conf:2: cuda_mps_topology: with the topology per_gpu every container fails, \
              unless the platform's host agent reads D-Bus: an older agent gives containers the directory \
              /tmp/nvidia-mps/pipe, where no control daemon listens; write cuda_mps_topology: shared"]
        );
        assert_eq!(
            told("enable_cuda_mps: true", &good.replace("NVIDIA_GPU_SHARE", "NVIDIA_MIG")),
            ["/etc/yunion/host_container_device.yml:2: devices[0].type: the platform's host agent rejects \
              the type \"NVIDIA_MIG\" and does not start; correct the spelling of the type or remove the \
              entry"]
        );
    }

    #[test]
    fn a_device_file_without_an_entry_of_ours_is_a_warning() {
        let warned = |main: &str, devices: &[u8]| {
            let main = format!("{main}\n{DEVICE_FILE_KEY}: {DEVICE_FILE}\n");
            texts(&load_files(&[(MAIN_FILE, main.as_bytes()), (DEVICE_FILE, devices)]).unwrap().warnings)
        };
        let of_others = b"devices:\n- {path: /dev/dri/renderD128, type: NVIDIA_GPU_SHARE}\n".as_slice();
        for devices in [of_others, b"devices: []\n", b""] {
            assert_eq!(
                warned("enable_cuda_mps: true", devices),
                ["/etc/yunion/host_container_device.yml: devices: this file has no entry of type \
                  NVIDIA_MPS, so each NVIDIA GPU that no entry names is cut into 10 slices; write type: \
                  NVIDIA_MPS in the entry of each GPU that is to be served; if every GPU is meant, write \
                  cuda_mps_replicas: 10 in host.conf"]
            );
            assert!(warned("enable_cuda_mps: true\ncuda_mps_replicas: 10", devices).is_empty());
            assert!(warned("enable_cuda_mps: false", devices).is_empty());
        }
        assert!(warned("enable_cuda_mps: true", ONE_GPU).is_empty());
    }

    #[test]
    fn a_missing_device_file_is_reported_at_its_key() {
        let main = b"enable_cuda_mps: true\n\ncontainer_device_config_file: /etc/none.yml\n".as_slice();
        let problems = load_files(&[(MAIN_FILE, main)]).unwrap_err();
        assert_eq!(
            texts(&problems),
            ["/etc/yunion/host.conf:3: container_device_config_file: no such file: /etc/none.yml; create \
              the file or correct the path"]
        );
    }

    #[test]
    fn while_mps_is_off_a_missing_device_file_is_a_warning() {
        let main = b"container_device_config_file: /etc/none.yml\n".as_slice();
        let loaded = load_files(&[(MAIN_FILE, main)]).unwrap();
        assert_eq!(loaded.warnings.len(), 1);
        assert_eq!(loaded.warnings[0].key, DEVICE_FILE_KEY);
        // With `maybe` MPS is not certainly off, so the problems do not become warnings.
        let main = b"enable_cuda_mps: maybe\ncontainer_device_config_file: /etc/none.yml\n".as_slice();
        assert_eq!(load_files(&[(MAIN_FILE, main)]).unwrap_err().len(), 2);
    }

    #[test]
    fn a_misspelt_device_file_key_is_reported() {
        for slip in
            ["container_device_config_fil", "Container-Device-Config-File", "containers_device_conf_file"]
        {
            let main = format!("enable_cuda_mps: true\n{slip}: {DEVICE_FILE}\n");
            let problems = load_files(&[(MAIN_FILE, main.as_bytes())]).unwrap_err();
            let [problem] = problems.as_slice() else { panic!("{problems:?}") };
            assert_eq!((problem.origin.line, problem.key.as_str()), (Some(2), slip));
            assert!(problem.problem.remedy.contains(DEVICE_FILE_KEY), "{problem}");
            // The misspelt key does no harm if the file also has the correct key, or if MPS is off.
            let named = format!("{main}{DEVICE_FILE_KEY}: {DEVICE_FILE}\n");
            let loaded = load_files(&[(MAIN_FILE, named.as_bytes()), (DEVICE_FILE, ONE_GPU)]).unwrap();
            assert_eq!(loaded.warnings, problems);
            let off = main.replace("true", "false");
            assert_eq!(load_files(&[(MAIN_FILE, off.as_bytes())]).unwrap().warnings, problems);
        }
    }

    #[test]
    fn content_that_is_no_text_is_reported() {
        let long = b"# a comment\n".repeat(1024 * 1024);
        let cases: [(&[u8], Option<usize>, &str); 5] = [
            (b"\x7fELF\0\0\n", Some(1), "NUL"),
            (b"enable_cuda_mps: true\n# \xff\xfe\n", Some(2), "UTF-8"),
            (b"a: 1\nb: \"\x00\"\n", Some(2), "NUL"),
            (b"a: \"\x07\"\n", Some(1), "control characters"),
            (&long, None, "1 MiB"),
        ];
        assert!(long.len() > 10 * 1024 * 1024);
        for (content, line, word) in cases {
            let [problem] =
                <[LocatedProblem; 1]>::try_from(load_files(&[(MAIN_FILE, content)]).unwrap_err()).unwrap();
            assert_eq!(problem.origin, Origin { file: MAIN_FILE.into(), line }, "{problem}");
            assert!(problem.problem.found.contains(word), "{problem}");
            let main = b"enable_cuda_mps: true\ncontainer_device_config_file: /etc/yunion/host_container_device.yml\n";
            let problems = load_files(&[(MAIN_FILE, main), (DEVICE_FILE, content)]).unwrap_err();
            let [problem] = <[LocatedProblem; 1]>::try_from(problems).unwrap();
            assert_eq!(problem.origin, Origin { file: DEVICE_FILE.into(), line }, "{problem}");
        }
        // Each text is repeated up to the size limit of a file. Without its own limits on brackets, line lengths and aliases,
        // the parser would take very long for these files.
        for unit in ["[", "- ", "a: ", "a\n", "- a\n", "? ", "&a ", "! ", "'", "\u{e9}"] {
            let mut content = unit.repeat(1024 * 1024 / unit.len()).into_bytes();
            content.truncate(1024 * 1024);
            let loaded = load_files(&[(LOCAL_FILE, &content)]).map(|loaded| loaded.settings);
            let nothing = Settings {
                sources: paths(&[LOCAL_FILE]),
                absent: paths(&[PLATFORM_FILE, MAIN_FILE]),
                ..Settings::default()
            };
            assert!(
                loaded.as_ref().is_ok_and(|settings| *settings == nothing) || loaded.is_err(),
                "{unit:?}"
            );
        }
    }

    #[test]
    fn a_byte_order_mark_is_skipped() {
        for content in ["\u{feff}enable_cuda_mps: true\n", "\u{feff}enable_cuda_mps = true\n"] {
            assert!(load_files(&[(MAIN_FILE, content.as_bytes())]).unwrap().settings.enabled);
        }
    }

    #[test]
    fn an_unreadable_file_is_reported() {
        let root = sysroot(&[(LOCAL_FILE, b"")]);
        let main = below(root.path(), Path::new(MAIN_FILE));
        fs::create_dir(&main).unwrap();
        let [problem] = <[LocatedProblem; 1]>::try_from(load_below(&root).unwrap_err()).unwrap();
        assert_eq!(
            problem.to_string(),
            "/etc/yunion/host.conf: is a directory, not a regular file; put a regular file at this path"
        );
        // Root can read a file with any permissions, so the test makes the file unreadable by a loop of symbolic links.
        fs::remove_dir(&main).unwrap();
        symlink("host.conf", &main).unwrap();
        let [problem] = <[LocatedProblem; 1]>::try_from(load_below(&root).unwrap_err()).unwrap();
        assert_eq!(problem.origin, Origin { file: MAIN_FILE.into(), line: None });
        assert!(problem.problem.found.starts_with("can't be read: "), "{problem}");
        // Reading a device would never end, and opening a FIFO would block.
        fs::remove_file(&main).unwrap();
        symlink("/dev/zero", &main).unwrap();
        let [problem] = <[LocatedProblem; 1]>::try_from(load_below(&root).unwrap_err()).unwrap();
        assert_eq!(problem.problem.found, "is a device, not a regular file");
    }

    fn uncommented(example: &str) -> String {
        let line = |line: &str| match line.strip_prefix('#') {
            Some(rest) if rest.starts_with(|c: char| !c.is_whitespace()) || rest.starts_with("  type:") => {
                rest.to_owned()
            }
            Some(rest)
                if [
                    "  virtual_number: ",
                    "  thread_percentage: ",
                    "  max_clients: ",
                    "  memory: ",
                    "  slices: ",
                ]
                .iter()
                .any(|key| rest.starts_with(key)) =>
            {
                rest.to_owned()
            }
            _ => line.to_owned(),
        };
        example.lines().map(|text| line(text) + "\n").collect()
    }

    #[test]
    fn the_examples_change_nothing_until_they_are_uncommented() {
        let main = include_str!("../../../../config/host.conf");
        let devices = include_str!("../../../../config/host_container_device.yml");
        let on =
            "enable_cuda_mps: true\ncontainer_device_config_file: /etc/yunion/host_container_device.yml\n";

        let loaded = load_files(&[(MAIN_FILE, main.as_bytes())]).unwrap();
        let absent = paths(&[PLATFORM_FILE, LOCAL_FILE]);
        let untouched =
            Settings { sources: paths(&[MAIN_FILE]), absent: absent.clone(), ..Settings::default() };
        assert_eq!(loaded.settings, untouched);
        assert_eq!(loaded.warnings, []);
        let loaded = load_files(&[(MAIN_FILE, on.as_bytes()), (DEVICE_FILE, devices.as_bytes())]).unwrap();
        assert_eq!(loaded.settings.devices, []);

        let (main, devices) = (uncommented(main), uncommented(devices));
        let loaded = load_files(&[(MAIN_FILE, main.as_bytes()), (DEVICE_FILE, devices.as_bytes())]).unwrap();
        assert_eq!((loaded.warnings, loaded.unknown_keys), (Vec::new(), Vec::new()));
        let expected = Settings {
            cdi_directory: Some("/var/run/cdi".into()),
            devices: loaded.settings.devices.clone(),
            says_enabled: true,
            sources: paths(&[MAIN_FILE, DEVICE_FILE]),
            absent,
            ..Settings::default()
        };
        assert_eq!(loaded.settings, expected);
        let slices: Vec<_> =
            expected.devices.iter().map(|entry| entry.mps.as_ref().map(|mps| mps.slices.get())).collect();
        assert_eq!(slices, [Some(4), Some(10), Some(2), Some(1), Some(3), None]);
        assert_eq!(expected.devices[1].mps.as_ref().unwrap().each.thread_percentage, Some(20));
        assert_eq!(expected.devices[1].mps.as_ref().unwrap().each.max_clients.map(NonZeroU32::get), Some(2));
        assert_eq!(
            expected.devices[2].mps.as_ref().unwrap().each.memory_mib.map(NonZeroU64::get),
            Some(40960)
        );
        assert!(
            !expected.devices.iter().any(|entry| matches!(entry.path, None | Some(DevicePath::Other(_))))
        );
    }
}
