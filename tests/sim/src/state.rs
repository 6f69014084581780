//! What the host's GPUs are at the moment: one small file per value below `gpus/<n>/`, replaced by rename, so that
//! every process of the simulated host sees the same and a test can change any of it with `echo`.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, WatchFlags};

/// The environment variable that says where the simulated host is.
pub const ENV: &str = "YUNION_MPS_SIM";

/// NVML's return codes, those that are given here.
pub mod code {
    /// Not initialised.
    pub const UNINITIALIZED: u32 = 1;
    /// A null pointer, a bad handle.
    pub const INVALID_ARGUMENT: u32 = 2;
    /// The GPU can't do that.
    pub const NOT_SUPPORTED: u32 = 3;
    /// Only root may.
    pub const NO_PERMISSION: u32 = 4;
    /// No such GPU.
    pub const NOT_FOUND: u32 = 6;
    /// Nothing came in the time that there was.
    pub const TIMEOUT: u32 = 10;
    /// The buffer is too small.
    pub const INSUFFICIENT_SIZE: u32 = 7;
    /// The kernel module isn't there.
    pub const DRIVER_NOT_LOADED: u32 = 9;
    /// The GPU fell off the bus.
    pub const GPU_IS_LOST: u32 = 15;
    /// A structure of another version.
    pub const ARGUMENT_VERSION_MISMATCH: u32 = 25;
    /// Anything else, such as a simulated host that isn't there.
    pub const UNKNOWN: u32 = 999;
}

/// The compute modes by NVML's number, as nvidia-smi prints them.
pub const COMPUTE_MODES: [&str; 4] = ["Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"];

/// A simulated host.
#[derive(Debug, Clone)]
pub struct Host {
    root: PathBuf,
}

impl Host {
    /// The host below that directory.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The host that the environment names.
    ///
    /// # Errors
    /// Says which variable to set when there is none.
    pub fn from_env() -> Result<Self, String> {
        match std::env::var_os(ENV) {
            Some(root) if Path::new(&root).is_dir() => Ok(Self::at(root)),
            Some(root) => Err(format!("{ENV}={} is no directory", root.to_string_lossy())),
            None => Err(format!("{ENV} is not set; yunion-mps-sim create prints it")),
        }
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A value of the whole host, trimmed.
    pub fn text(&self, name: &str) -> Option<String> {
        read(&self.root.join(name))
    }

    /// The driver's version; none: not loaded.
    pub fn driver(&self) -> Option<String> {
        self.text("driver")
    }

    /// The version of the MPS control daemon in force.
    pub fn mps_version(&self) -> u32 {
        self.text("mps/version").and_then(|text| text.parse().ok()).unwrap_or(580)
    }

    /// The CUDA version that belongs to the driver, 13000 for 13.0.
    pub fn cuda_version(&self) -> u32 {
        match self.mps_version() {
            535 => 12020,
            550 => 12040,
            555 => 12050,
            _ => 13000,
        }
    }

    /// What an injected fault of the control daemon says; empty text where its file is empty.
    pub fn fault(&self, name: &str) -> Option<String> {
        self.text(&format!("mps/fault/{name}"))
    }

    /// The NVIDIA GPUs by index.
    pub fn gpus(&self) -> Vec<Gpu> {
        let numbers = fs::read_dir(self.root.join("gpus")).into_iter().flatten().flatten();
        let mut indices: Vec<u32> =
            numbers.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        indices.sort_unstable();
        indices.into_iter().map(|index| self.gpu(index)).collect()
    }

    /// The GPU of that index, there or not.
    pub fn gpu(&self, index: u32) -> Gpu {
        Gpu { directory: self.root.join("gpus").join(index.to_string()), index }
    }
}

/// One GPU of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    directory: PathBuf,
    /// The index that nvidia-smi shows.
    pub index: u32,
}

/// What a process does on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// An MPS server.
    Server,
    /// A client of an MPS server.
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
    /// Something of the GPU's that processes can take in turn.
    pub(crate) fn open(&self) -> io::Result<fs::File> {
        fs::File::open(&self.directory)
    }

    /// A value, trimmed.
    pub fn text(&self, name: &str) -> Option<String> {
        read(&self.directory.join(name))
    }

    /// A value that is a number.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }

    /// Replaces a value.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn write(&self, name: &str, text: &str) -> io::Result<()> {
        write(&self.directory.join(name), text)
    }

    /// The numbers of the critical errors that it has told so far, in their order.
    pub fn xids(&self) -> Vec<u64> {
        let text = fs::read_to_string(self.directory.join("xids")).unwrap_or_default();
        // A line that has no end yet is still being written.
        let lines = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        lines.filter_map(|line| line.trim().parse().ok()).collect()
    }

    /// Has an inotify queue told when one of its values changes.
    pub(crate) fn watch(&self, changes: &OwnedFd) -> io::Result<()> {
        inotify::add_watch(changes, &self.directory, WatchFlags::MODIFY | WatchFlags::MOVED_TO)?;
        Ok(())
    }

    /// A text that is always there; empty if someone removed it.
    fn fixed(&self, name: &str) -> String {
        self.text(name).unwrap_or_default()
    }

    /// `GPU-` and 36 characters.
    pub fn uuid(&self) -> String {
        self.fixed("uuid")
    }

    /// `NVIDIA H200`.
    pub fn name(&self) -> String {
        self.fixed("name")
    }

    /// Its address.
    pub fn pci(&self) -> Pci {
        Pci::parse(&self.fixed("pci")).unwrap_or_default()
    }

    /// Major and minor.
    pub fn compute_capability(&self) -> (u32, u32) {
        let text = self.fixed("compute_capability");
        let (major, minor) = text.split_once('.').unwrap_or((text.as_str(), "0"));
        (major.parse().unwrap_or_default(), minor.parse().unwrap_or_default())
    }

    /// Whether MPS enforces limits on it: from Volta on.
    pub fn enforces_limits(&self) -> bool {
        self.compute_capability() >= (7, 0)
    }

    /// Streaming multiprocessors.
    pub fn sms(&self) -> u32 {
        self.number("sms").and_then(|sms| sms.try_into().ok()).unwrap_or_default()
    }

    /// The memory a program can see, in MiB: the total without the reserved part.
    pub fn usable_mib(&self) -> u64 {
        let total = self.number("memory_total_mib").unwrap_or_default() * 1024;
        total.saturating_sub(self.number("memory_reserved_kib").unwrap_or_default()) / 1024
    }

    /// The compute mode, as nvidia-smi prints it.
    pub fn compute_mode(&self) -> String {
        self.text("compute_mode").unwrap_or_else(|| "Default".to_owned())
    }

    /// Whether it fell off the bus.
    pub fn lost(&self) -> bool {
        self.directory.join("lost").exists()
    }

    /// Whether MIG is on; none where it can't be.
    pub fn mig(&self) -> Option<bool> {
        self.text("mig").map(|text| text == "Enabled")
    }

    /// Why no CUDA context can be opened on it.
    pub fn unusable(&self) -> bool {
        self.lost()
            || !self.directory.is_dir()
            || self.mig() == Some(true)
            || self.compute_mode() == "Prohibited"
    }

    /// The return code that a fault file asks for in that NVML function: `error/<function>`, with or without the
    /// function's version suffix.
    pub fn injected(&self, function: &str) -> Option<u32> {
        injected(&self.directory, function)
    }

    /// The living processes on it by PID: what they do and how many MiB they hold.
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

    /// Whether a process computes on it: in exclusive mode there can be no second one.
    pub fn computes(&self) -> bool {
        self.processes().values().any(|(kind, _)| *kind != Kind::Graphics)
    }

    /// Enters a process, or changes how much memory it holds.
    pub fn enter(&self, pid: u32, kind: Kind, mib: u64) {
        let text = format!("{} {mib} {}", kind.word(), start_time(pid).unwrap_or_default());
        // A process that can't be entered is one that NVML doesn't show; nothing else depends on it.
        _ = write(&self.directory.join("processes").join(pid.to_string()), &text);
    }

    /// Takes a process out.
    pub fn leave(&self, pid: u32) {
        _ = fs::remove_file(self.directory.join("processes").join(pid.to_string()));
    }
}

/// What a CUDA_VISIBLE_DEVICES names, in its order: indices into `gpus` or UUIDs, which may be cut; None for a name that
/// fits no GPU. All of them when there is no such variable.
pub fn visible(gpus: &[Gpu], names: Option<&str>) -> Vec<Option<Gpu>> {
    let Some(names) = names else { return gpus.iter().cloned().map(Some).collect() };
    let find = |name: &str| match name.parse::<usize>() {
        Ok(place) => gpus.get(place),
        Err(_) => gpus.iter().find(|gpu| name.starts_with("GPU-") && gpu.uuid().starts_with(name)),
    };
    names.split(',').map(|name| find(name.trim()).cloned()).collect()
}

/// A PCI address.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pci {
    /// The domain.
    pub domain: u32,
    /// The bus.
    pub bus: u32,
    /// The device.
    pub device: u32,
    /// The function.
    pub function: u32,
}

impl Pci {
    /// From `0000:00:06.0` or `00000000:00:06.0`, whatever the case.
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

    /// As NVML and nvidia-smi print it: eight digits of domain, upper case.
    pub fn nvml(&self) -> String {
        format!("{:08X}:{:02X}:{:02X}.{:X}", self.domain, self.bus, self.device, self.function)
    }
}

/// The code that `error/<function>` below a directory asks for.
pub(crate) fn injected(directory: &Path, function: &str) -> Option<u32> {
    let plain = function.rsplit_once("_v").map_or(function, |(plain, _)| plain);
    let file = |name: &str| read(&directory.join("error").join(name));
    file(function).or_else(|| file(plain))?.parse().ok()
}

/// When a living process started, in ticks since boot: its PID alone may have been another's.
fn start_time(pid: u32) -> Option<String> {
    let fields = behind_name(pid)?;
    let mut fields = fields.split_whitespace();
    let dead = matches!(fields.next(), Some("Z" | "X"));
    if dead { None } else { fields.nth(18).map(str::to_owned) }
}

/// What stands in /proc/PID/stat behind the name, which need be no text.
pub(crate) fn behind_name(pid: u32) -> Option<String> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let name_ends = stat.iter().rposition(|byte| *byte == b')')?;
    String::from_utf8(stat.get(name_ends + 1..)?.to_vec()).ok()
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Writes beside the file and renames, so that no reader sees half a value.
pub(crate) fn write(path: &Path, text: &str) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let new = path.with_file_name(format!(".{name}.{}", std::process::id()));
    fs::write(&new, format!("{text}\n"))?;
    // A server that runs as another user enters its clients as well.
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
}
