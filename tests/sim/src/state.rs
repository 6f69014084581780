//! The state of the simulated host's GPUs: one small file per value below `gpus/<n>/`. A program changes a value by renaming a
//! new file over the old file, so no process ever reads half a value. A test can change a value with `echo`.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, WatchFlags};

pub const ENV: &str = "YUNION_MPS_SIM";

/// The NVML return codes that the simulated NVML library uses.
pub mod code {
    pub const UNINITIALIZED: u32 = 1;
    /// NVML's caller has given a null pointer or a bad handle.
    pub const INVALID_ARGUMENT: u32 = 2;
    pub const NOT_SUPPORTED: u32 = 3;
    pub const NO_PERMISSION: u32 = 4;
    pub const NOT_FOUND: u32 = 6;
    /// No event has happened within the time limit of the call.
    pub const TIMEOUT: u32 = 10;
    pub const INSUFFICIENT_SIZE: u32 = 7;
    pub const DRIVER_NOT_LOADED: u32 = 9;
    pub const FUNCTION_NOT_FOUND: u32 = 13;
    pub const GPU_IS_LOST: u32 = 15;
    /// The operating system has refused a system call of NVML.
    pub const OPERATING_SYSTEM: u32 = 17;
    /// The caller's structure has a version that NVML does not know.
    pub const ARGUMENT_VERSION_MISMATCH: u32 = 25;
    /// Any other error, such as a missing simulated host.
    pub const UNKNOWN: u32 = 999;
}

/// The compute modes in nvidia-smi's spelling, each at the index that is its number in NVML.
pub const COMPUTE_MODES: [&str; 4] = ["Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"];

#[derive(Debug, Clone)]
pub struct Host {
    root: PathBuf,
}

impl Host {
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the simulated host in the directory that the environment variable [`ENV`] names.
    ///
    /// # Errors
    /// [`ENV`] is not set, or names no directory.
    pub fn from_env() -> Result<Self, String> {
        match std::env::var_os(ENV) {
            Some(root) if Path::new(&root).is_dir() => Ok(Self::at(root)),
            Some(root) => Err(format!("{ENV}={} is no directory", root.to_string_lossy())),
            None => Err(format!("{ENV} is not set; yunion-mps-sim create prints it")),
        }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the value in a file of the host, without white space around it. `None` if the file does not exist.
    pub fn text(&self, name: &str) -> Option<String> {
        read(&self.root.join(name))
    }

    /// Returns the version of the driver. `None` if the driver is not loaded.
    pub fn driver(&self) -> Option<String> {
        self.text("driver")
    }

    /// Returns the size in bytes of one process in NVML's list of processes. Drivers 535.43 to 535.86 write 32 bytes, although
    /// the version suffix in the called function's name stands for 24 bytes.
    pub(crate) fn process_record(&self) -> usize {
        let version = self.driver().unwrap_or_default();
        let minor = version.strip_prefix("535.").and_then(|rest| rest.split('.').next()?.parse::<u32>().ok());
        if minor.is_some_and(|minor| (43..=86).contains(&minor)) { 32 } else { 24 }
    }

    pub fn mps_version(&self) -> u32 {
        self.text("mps/version").and_then(|text| text.parse().ok()).unwrap_or(580)
    }

    /// 13000 stands for CUDA 13.0.
    pub fn cuda_version(&self) -> u32 {
        match self.mps_version() {
            535 => 12020,
            550 => 12040,
            555 => 12050,
            _ => 13000,
        }
    }

    /// Returns the contents of the file that injects this fault into MPS. Without the file the fault does not happen, and the
    /// result is `None`.
    pub fn fault(&self, name: &str) -> Option<String> {
        self.text(&format!("mps/fault/{name}"))
    }

    pub fn gpus(&self) -> Vec<Gpu> {
        let numbers = fs::read_dir(self.root.join("gpus")).into_iter().flatten().flatten();
        let mut indices: Vec<u32> =
            numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        indices.sort_unstable();
        indices.into_iter().map(|index| self.gpu(index)).collect()
    }

    /// Returns the GPU with this index, without a check that the GPU exists.
    pub fn gpu(&self, index: u32) -> Gpu {
        Gpu { directory: self.root.join("gpus").join(index.to_string()), index }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    directory: PathBuf,
    /// The index that nvidia-smi shows.
    pub index: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Server,
    Client,
    /// A CUDA program without MPS.
    Compute,
    /// A program that only draws, such as a display server.
    Graphics,
}

impl Kind {
    const WORDS: [(Self, &str); 4] = [
        (Self::Server, "server"),
        (Self::Client, "client"),
        (Self::Compute, "compute"),
        (Self::Graphics, "graphics"),
    ];

    fn word(self) -> &'static str {
        Self::WORDS.iter().find(|(kind, _)| *kind == self).map_or("", |(_, word)| word)
    }
}

impl Gpu {
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Returns the value in a file of the GPU, without white space around it. `None` if the file does not exist.
    pub fn text(&self, name: &str) -> Option<String> {
        read(&self.directory.join(name))
    }

    pub fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }

    /// Replaces a value of the GPU.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn write(&self, name: &str, text: &str) -> io::Result<()> {
        write(&self.directory.join(name), text)
    }

    /// Returns the Xid numbers of the GPU's critical errors so far, in the order of the errors.
    pub fn xids(&self) -> Vec<u64> {
        let text = fs::read_to_string(self.directory.join("xids")).unwrap_or_default();
        // A line without a line feed is not complete: another process is still writing the line.
        let lines = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        lines.filter_map(|line| line.trim().parse().ok()).collect()
    }

    /// Makes the inotify queue `changes` report changes of the GPU's values.
    pub(crate) fn watch(&self, changes: &OwnedFd) -> io::Result<()> {
        inotify::add_watch(changes, &self.directory, WatchFlags::MODIFY | WatchFlags::MOVED_TO)?;
        Ok(())
    }

    /// Returns the value in a file that every GPU has. The value is empty if a test has removed the file.
    fn fixed(&self, name: &str) -> String {
        self.text(name).unwrap_or_default()
    }

    /// Returns the UUID in NVML's format: `GPU-` and 36 characters.
    pub fn uuid(&self) -> String {
        self.fixed("uuid")
    }

    pub fn name(&self) -> String {
        self.fixed("name")
    }

    pub fn pci(&self) -> Pci {
        Pci::parse(&self.fixed("pci")).unwrap_or_default()
    }

    pub fn compute_capability(&self) -> (u32, u32) {
        let text = self.fixed("compute_capability");
        let (major, minor) = text.split_once('.').unwrap_or((text.as_str(), "0"));
        (major.parse().unwrap_or_default(), minor.parse().unwrap_or_default())
    }

    /// MPS enforces limits only on GPUs from Volta on.
    pub fn enforces_limits(&self) -> bool {
        self.compute_capability() >= (7, 0)
    }

    pub fn sms(&self) -> u32 {
        self.number("sms").and_then(|sms| sms.try_into().ok()).unwrap_or_default()
    }

    /// Returns the memory in MiB that a program can see: the total without the part that the driver reserves.
    pub fn usable_mib(&self) -> u64 {
        let total = self.memory_mib() * 1024;
        total.saturating_sub(self.number("memory_reserved_kib").unwrap_or_default()) / 1024
    }

    /// Returns the memory of the GPU in MiB. For a GPU that shares the host's memory, the result is the host's memory.
    pub fn memory_mib(&self) -> u64 {
        ["memory_total_mib", "host_memory_mib"]
            .into_iter()
            .find_map(|name| self.number(name))
            .unwrap_or_default()
    }

    pub fn compute_mode(&self) -> String {
        self.text("compute_mode").unwrap_or_else(|| "Default".to_owned())
    }

    /// True if the GPU has fallen off the bus.
    pub fn lost(&self) -> bool {
        self.directory.join("lost").exists()
    }

    /// True if MIG mode is enabled. `None` if the GPU has no MIG mode.
    pub fn mig(&self) -> Option<bool> {
        self.text("mig").map(|text| text == "Enabled")
    }

    /// True if no program can open a CUDA context on the GPU.
    pub fn unusable(&self) -> bool {
        self.lost()
            || !self.directory.is_dir()
            || self.mig() == Some(true)
            || self.compute_mode() == "Prohibited"
    }

    /// Makes an NVML function hang while the GPU's directory has the file `hangs`. If the file contains the name of a function,
    /// only this function hangs. The file `hung` shows a test that a function hangs.
    pub fn hang(&self, function: &str) {
        let hangs = || fs::read_to_string(self.directory.join("hangs"));
        while hangs().is_ok_and(|only| only.is_empty() || only == function) {
            _ = fs::write(self.directory.join("hung"), "");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// Returns the NVML return code that a fault file of the GPU sets for this function. The file is `error/<function>`, with
    /// or without the function's version suffix.
    pub fn injected(&self, function: &str) -> Option<u32> {
        injected(&self.directory, function)
    }

    /// Returns the living processes on the GPU by PID, each with its kind and its memory in MiB.
    pub fn processes(&self) -> BTreeMap<u32, (Kind, u64)> {
        let entries = fs::read_dir(self.directory.join("processes")).into_iter().flatten().flatten();
        let living = entries.filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            let text = fs::read_to_string(entry.path()).ok()?;
            let mut words = text.split_whitespace();
            let word = words.next()?;
            let kind = Kind::WORDS.iter().find(|(_, known)| *known == word)?.0;
            let mib = words.next()?.parse().ok()?;
            (start_time(pid)? == words.next()?).then_some((pid, (kind, mib)))
        });
        living.collect()
    }

    /// Returns the processes on the GPU as NVML lists them. On a GPU older than Volta the MPS server does the work of its
    /// clients. NVML then lists only the server, with the memory of all clients.
    pub fn processes_in_nvml(&self) -> BTreeMap<u32, (Kind, u64)> {
        let mut processes = self.processes();
        if self.compute_capability() < (7, 0) {
            let of_clients: u64 =
                processes.values().filter(|(kind, _)| *kind == Kind::Client).map(|(_, mib)| mib).sum();
            processes.retain(|_, (kind, _)| *kind != Kind::Client);
            if let Some((_, mib)) = processes.values_mut().find(|(kind, _)| *kind == Kind::Server) {
                *mib += of_clients;
            }
        }
        processes
    }

    /// True if a process computes on the GPU. In the compute mode `Exclusive_Process` no second process can compute there.
    pub fn computes(&self) -> bool {
        self.processes().values().any(|(kind, _)| *kind != Kind::Graphics)
    }

    pub fn enter(&self, pid: u32, kind: Kind, mib: u64) {
        let text = format!("{} {mib} {}", kind.word(), start_time(pid).unwrap_or_default());
        // If the file can't be written, only NVML's list of processes lacks the process.
        _ = write(&self.directory.join("processes").join(pid.to_string()), &text);
    }

    pub fn leave(&self, pid: u32) {
        _ = fs::remove_file(self.directory.join("processes").join(pid.to_string()));
    }
}

/// Returns the GPUs that a program sees, in the program's order. `names` is the value of `CUDA_VISIBLE_DEVICES`: indices into
/// `gpus`, or UUIDs or beginnings of UUIDs. `None` in the result stands for a name that fits no GPU. Without the variable all
/// GPUs are visible.
pub fn visible(gpus: &[Gpu], names: Option<&str>) -> Vec<Option<Gpu>> {
    let Some(names) = names else { return gpus.iter().cloned().map(Some).collect() };
    let find = |name: &str| match name.parse::<usize>() {
        Ok(place) => gpus.get(place),
        Err(_) => gpus.iter().find(|gpu| name.starts_with("GPU-") && gpu.uuid().starts_with(name)),
    };
    names.split(',').map(|name| find(name.trim()).cloned()).collect()
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pci {
    pub domain: u32,
    pub bus: u32,
    pub device: u32,
    pub function: u32,
}

impl Pci {
    /// Parses a PCI address such as `0000:00:06.0` or `00000000:00:06.0`, in upper or lower case.
    pub fn parse(text: &str) -> Option<Self> {
        let (slot, function) = text.split_once('.')?;
        let mut numbers = slot.split(':').map(|part| u32::from_str_radix(part, 16).ok());
        let address = Self {
            domain: numbers.next()??,
            bus: numbers.next()??,
            device: numbers.next()??,
            function: u32::from_str_radix(function, 16).ok()?,
        };
        numbers.next().is_none().then_some(address)
    }

    /// Formats the PCI address as NVML and nvidia-smi do: eight digits for the domain, and upper case.
    pub fn nvml(&self) -> String {
        format!("{:08X}:{:02X}:{:02X}.{:X}", self.domain, self.bus, self.device, self.function)
    }
}

pub(crate) fn injected(directory: &Path, function: &str) -> Option<u32> {
    let plain = function.rsplit_once("_v").map_or(function, |(plain, _)| plain);
    let file = |name: &str| read(&directory.join("error").join(name));
    file(function).or_else(|| file(plain))?.parse().ok()
}

/// Returns the start time of a living process in ticks since boot. The start time distinguishes the process from an earlier
/// process with the same PID.
fn start_time(pid: u32) -> Option<String> {
    let fields = behind_name(pid)?;
    let mut fields = fields.split_whitespace();
    let dead = matches!(fields.next(), Some("Z" | "X"));
    if dead { None } else { fields.nth(18).map(str::to_owned) }
}

/// Returns the part of `/proc/PID/stat` after the name of the process, since the name need not be valid text.
pub(crate) fn behind_name(pid: u32) -> Option<String> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let name_ends = stat.iter().rposition(|byte| *byte == b')')?;
    String::from_utf8(stat.get(name_ends + 1..)?.to_vec()).ok()
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Writes a file by renaming a new file over it, so that no reader sees half a value.
pub(crate) fn write(path: &Path, text: &str) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let new = path.with_file_name(format!(".{name}.{}", std::process::id()));
    fs::write(&new, format!("{text}\n"))?;
    // Every user may write the new file, since an MPS server of another user writes there, too.
    fs::set_permissions(&new, fs::Permissions::from_mode(0o666))?;
    fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pci_address_reads_in_both_lengths_and_prints_as_nvml_does() {
        let address = Pci::parse("0001:1a:00.0").unwrap();
        assert_eq!(address, Pci { domain: 1, bus: 0x1a, device: 0, function: 0 });
        assert_eq!(address.nvml(), "00000001:1A:00.0");
        assert_eq!(Pci::parse(&address.nvml()), Some(address));
        assert_eq!(Pci::parse("1a:00.0"), None);
    }

    #[test]
    fn only_living_processes_are_on_a_gpu() {
        let host = tempfile::tempdir().unwrap();
        fs::create_dir_all(host.path().join("gpus/0/processes")).unwrap();
        let gpu = Host::at(host.path()).gpu(0);
        gpu.enter(std::process::id(), Kind::Compute, 519);
        write(&host.path().join("gpus/0/processes/1"), "client 580 18446744073709551615").unwrap();
        assert_eq!(gpu.processes(), BTreeMap::from([(std::process::id(), (Kind::Compute, 519))]));
        gpu.leave(std::process::id());
        assert!(gpu.processes().is_empty());
    }

    #[test]
    fn nvml_lists_clients_from_volta_on() {
        let host = tempfile::tempdir().unwrap();
        fs::create_dir_all(host.path().join("gpus/0/processes")).unwrap();
        let gpu = Host::at(host.path()).gpu(0);
        let (server, client) = (std::os::unix::process::parent_id(), std::process::id());
        gpu.enter(server, Kind::Server, 30);
        gpu.enter(client, Kind::Client, 519);
        for (capability, listed) in [
            ("7.0", BTreeMap::from([(server, (Kind::Server, 30)), (client, (Kind::Client, 519))])),
            ("6.1", BTreeMap::from([(server, (Kind::Server, 549))])),
        ] {
            gpu.write("compute_capability", capability).unwrap();
            assert_eq!(gpu.processes_in_nvml(), listed, "{capability}");
        }
    }
}
