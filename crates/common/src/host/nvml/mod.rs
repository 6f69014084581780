//! Asks NVIDIA's driver through NVML. Only the modules in this folder use the crate `nvml_wrapper`. Every error is in words for
//! an administrator.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::Path;
use std::{fmt, fs};

use mps_core::terms::{GpuProcess, PciAddress};
use nvml_calls::processes::{NotListed, Processes, mps_clients, with_context};
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::ComputeMode as NvmlComputeMode;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
use nvml_wrapper::{Device, EventSet, Nvml};
use rustix::io::Errno;
use rustix::process::Resource;

use super::compute_mode::ComputeMode;
use super::driver::{self, NVML_LISTS_CLIENTS};
use super::gpu::{Gpu, PciDevice};
use super::gpu_processes::Contexts;
use super::installation;
use super::xid::CriticalError;
use crate::host::proc;
use crate::problem::Problem;

pub mod facts;
mod memory_limits;
mod told;

use facts::{NvmlFacts, numbers};

pub use told::GpuQuestions;
pub(super) use told::ToldByNvml;

/// The library's name in every driver package. Only development packages have the name without the number.
const LIBRARY: &str = "libnvidia-ml.so.1";

const MIB: u64 = 1 << 20;

const TRIES: u32 = 5;

/// The longest time of one NVML call that waits for critical errors. These calls run on a thread of their own, so nothing else
/// waits for them.
const XID_WAIT_MS: u32 = 60_000;

/// NVIDIA's driver, with NVML's loaded library. After a reload of the driver, the library has to be opened again.
#[derive(Debug)]
pub struct Driver {
    nvml: Nvml,
    /// In bytes: the length of a process's record in the lists that NVML writes.
    process_record: usize,
}

impl Driver {
    /// Loads the library of this host's driver. If the library is missing, the files below `sysroot` may give the reason.
    pub fn open(sysroot: &Path) -> Result<Self, Problem> {
        let nvml = Nvml::builder().lib_path(OsStr::new(LIBRARY)).init();
        let nvml = nvml.map_err(|error| why_not_open(&error, sysroot))?;
        if nvml.lib().nvmlShutdown.is_err() {
            // Dropping `nvml` would call the missing function `nvmlShutdown`, and the wrapper would panic.
            std::mem::forget(nvml);
            let found = format!("{LIBRARY} is not NVIDIA's library: the function nvmlShutdown is missing");
            return Err(Problem::new(found, "reinstall the driver"));
        }
        // If the driver's version is unknown, `process_record` returns the usual length.
        let version = nvml.sys_driver_version().unwrap_or_default();
        Ok(Self { nvml, process_record: driver::process_record(&version) })
    }

    pub fn version(&self) -> Result<String, Problem> {
        read("the driver's version", self.nvml.sys_driver_version())
    }

    /// The CUDA version of the driver as a number, such as 13000 for 13.0.
    pub fn cuda_version(&self) -> Result<u32, Problem> {
        let version = read("the CUDA version", self.nvml.sys_cuda_driver_version())?;
        u32::try_from(version)
            .map_err(|_| format!("NVML reports the impossible CUDA version {version}").into())
    }

    /// The number of GPUs that NVML lists. Lost GPUs count too.
    pub(super) fn count(&self) -> Result<u32, Problem> {
        self.nvml.device_count().map_err(|error| words(&error).prefixed("the driver can't list its GPUs"))
    }

    /// True if NVML reports that the driver does not work any more, so that the library has to be opened again.
    pub fn is_unusable(&self) -> bool {
        matches!(
            self.nvml.device_count(),
            Err(NvmlError::Uninitialized | NvmlError::DriverNotLoaded | NvmlError::LibRmVersionMismatch)
        )
    }

    /// The GPU with this index in NVML's list. Fails if NVML does not report the GPU's address. Then the caller asks
    /// [`Driver::facts_at`] about each GPU on the bus that NVML did not list, and gets the reason by address.
    fn listed(&self, index: u32) -> Result<Gpu, Problem> {
        let device = self.nvml.device_by_index(index).map_err(|error| words(&error));
        let listed = device.and_then(|device| listed_as(&device, index, self.process_record));
        listed.inspect_err(|reason| tracing::debug!(index, "NVML does not list the GPU: {reason}"))
    }

    fn facts_at(&self, address: PciAddress) -> Result<NvmlFacts, Problem> {
        let device = self.nvml.device_by_pci_bus_id(address.to_string()).map_err(|error| match error {
            NvmlError::NotFound | NvmlError::InvalidArg => {
                Problem::new("the NVIDIA driver does not know this GPU", "look for NVRM lines in dmesg")
            }
            error => words(&error),
        })?;
        let index =
            device.index().map_err(|error| words(&error).prefixed("the index of the GPU can't be read"))?;
        NvmlFacts::read(&device, index, self.process_record)
    }

    pub fn compute_mode(&self, uuid: &str) -> Result<ComputeMode, Problem> {
        read("the compute mode", self.device(uuid)?.compute_mode()).map(ours)
    }

    /// True if the driver preserves the GPU's state, including its compute mode, while no program uses the GPU.
    pub fn persistence_mode(&self, uuid: &str) -> Result<bool, Problem> {
        read("the persistence mode", self.device(uuid)?.is_in_persistent_mode())
    }

    pub fn set_compute_mode(&self, uuid: &str, mode: ComputeMode) -> Result<(), Problem> {
        self.device(uuid)?.set_compute_mode(nvmls(mode)).map_err(|error| match error {
            NvmlError::NoPermission => {
                format!("the compute mode can't be set to {mode}: only root with CAP_SYS_ADMIN may set it")
                    .into()
            }
            error => words(&error).prefixed(format_args!("the compute mode can't be set to {mode}")),
        })?;
        let now = self.compute_mode(uuid)?;
        if now == mode {
            Ok(())
        } else {
            let found = format!("the compute mode was set to {mode} but reads {now}");
            Err(Problem::new(found, "find out which other program sets the compute mode"))
        }
    }

    /// The processes with a context on the GPU with this UUID. MPS servers and clients are included.
    pub fn processes(&self, uuid: &str) -> Result<Vec<GpuProcess>, Problem> {
        Ok(self.contexts(uuid)?.processes(proc::name))
    }

    /// The PIDs of the MPS clients on the GPU with this UUID. Fails if NVML does not list the clients, as before Volta: an
    /// empty set would mean that there are no clients.
    pub fn mps_clients(&self, uuid: &str) -> Result<BTreeSet<u32>, Problem> {
        let unlisted = || format!("NVML does not list the clients of GPU {uuid}").into();
        self.contexts(uuid)?.clients().ok_or_else(unlisted)
    }

    fn contexts(&self, uuid: &str) -> Result<Contexts, Problem> {
        contexts(&self.device(uuid)?, self.process_record)
            .map_err(|why| why_not_listed(&why).prefixed("the GPU's processes can't be listed"))
    }

    /// Waits for critical errors of the GPUs, and calls `seen` for each error with the GPU's UUID. Returns when `seen` returns
    /// false. Fails if no GPU can report critical errors, or if NVML can't wait for errors any longer.
    pub fn watch_xids(&self, mut seen: impl FnMut(&str, CriticalError) -> bool) -> Result<(), Problem> {
        let (events, uuids) = self.xid_events()?;
        loop {
            let event = match events.wait(XID_WAIT_MS) {
                Ok(event) => event,
                Err(NvmlError::Timeout) => continue,
                Err(error) => return Err(words(&error)),
            };
            let xid = match event.event_data {
                Some(XidError::Value(xid)) => xid,
                Some(XidError::Unknown) => 999,
                None => continue,
            };
            // NVML may not know the UUID of a GPU that has fallen off the bus. An error without a UUID is reported for every
            // GPU that does not answer.
            let met = event.device.uuid().map_or_else(
                |_| uuids.iter().filter(|uuid| self.device(uuid).is_err()).cloned().collect(),
                |uuid| vec![uuid],
            );
            let error = CriticalError { xid, asks_reset: asks_reset(&event.device) };
            if !met.iter().all(|uuid| seen(uuid, error)) {
                return Ok(());
            }
        }
    }

    /// Makes an event set for the critical errors of all GPUs that can report them, and returns it with the UUIDs of these
    /// GPUs. If NVML refuses a GPU, the wrapper destroys the event set. So the loop makes a new set without that GPU.
    fn xid_events(&self) -> Result<(EventSet<'_>, Vec<String>), Problem> {
        let mut gpus: Vec<u32> = (0..self.nvml.device_count().map_err(|error| words(&error))?).collect();
        'without_refused: loop {
            if gpus.is_empty() {
                return Err("no GPU can report critical errors".into());
            }
            let mut events = self.nvml.create_event_set().map_err(|error| words(&error))?;
            let mut uuids = Vec::new();
            for (place, index) in gpus.iter().enumerate() {
                let device = self.nvml.device_by_index(*index);
                let registered = device.and_then(|device| {
                    uuids.push(device.uuid()?);
                    device
                        .register_events(EventTypes::CRITICAL_XID_ERROR, events)
                        .map_err(|refused| refused.error)
                });
                match registered {
                    Ok(registered) => events = registered,
                    Err(_) => {
                        gpus.remove(place);
                        continue 'without_refused;
                    }
                }
            }
            return Ok((events, uuids));
        }
    }

    fn device(&self, uuid: &str) -> Result<Device<'_>, Problem> {
        self.nvml.device_by_uuid(uuid).map_err(|error| match error {
            NvmlError::NotFound | NvmlError::InvalidArg => {
                format!("the NVIDIA driver knows no GPU {uuid}").into()
            }
            error => words(&error),
        })
    }
}

fn asks_reset(device: &Device<'_>) -> Option<bool> {
    let values = device.field_values_for(&[FieldId(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)]).ok()?;
    match values.into_iter().next()?.ok()?.value.ok()? {
        // 1 is a reset of the GPU, 2 a reboot of the host, and 4 a reset after the programs on the GPU have ended.
        SampleValue::U32(1 | 2 | 4) => Some(true),
        // 0 is no action, and 3 is the end of the programs that use several GPUs together.
        SampleValue::U32(0 | 3) => Some(false),
        _ => None,
    }
}

fn listed_as(device: &Device<'_>, index: u32, process_record: usize) -> Result<Gpu, Problem> {
    let pci = device.pci_info().map_err(|error| words(&error))?;
    let bad = |()| format!("{:?}: not a PCI address like 0000:00:06.0 or 00:06.0", pci.bus_id);
    let address = pci.bus_id.parse().map_err(bad)?;
    let [vendor_low, vendor_high, device_low, device_high] = pci.pci_device_id.to_le_bytes();
    let vendor = u16::from_le_bytes([vendor_low, vendor_high]);
    let number = u16::from_le_bytes([device_low, device_high]);
    let pci = PciDevice { address, vendor, device: number, ..PciDevice::default() };
    Ok(Gpu { pci, nvml: NvmlFacts::read(device, index, process_record) })
}

fn read<T>(what: &str, value: Result<T, NvmlError>) -> Result<T, Problem> {
    value.map_err(|error| words(&error).prefixed(format_args!("{what} can't be read")))
}

fn is_gone(error: &NvmlError) -> bool {
    matches!(error, NvmlError::GpuLost | NvmlError::ResetRequired)
}

fn contexts(device: &Device<'_>, process_record: usize) -> Result<Contexts, NotListed> {
    let compute = list(|| with_context(device, process_record))?;
    let capability = device.cuda_compute_capability().ok().and_then(|known| numbers(&known));
    // Without the property `NVML_LISTS_CLIENTS`, NVML's list of clients is always empty. `None` says that the clients are
    // unknown: an empty list would mean that the GPU has no clients.
    if !NVML_LISTS_CLIENTS.holds_on(capability) {
        return Ok(Contexts { compute, mps: None });
    }
    let mps = match list(|| mps_clients(device, process_record)) {
        Ok(clients) => Some(clients),
        Err(NotListed::Refused(error)) if is_gone(&error) => return Err(error.into()),
        Err(_) => None,
    };
    Ok(Contexts { compute, mps })
}

/// Asks NVML for one of its two lists of processes. If the list has grown during the call, asks again, up to [`TRIES`] times.
/// Returns the memory of each process in MiB, by PID.
fn list(
    mut ask: impl FnMut() -> Result<Processes, NotListed>,
) -> Result<BTreeMap<u32, Option<u64>>, NotListed> {
    let mut answer = ask();
    for _ in 1..TRIES {
        if !matches!(answer, Err(NotListed::Refused(NvmlError::InsufficientSize(_)))) {
            break;
        }
        answer = ask();
    }
    Ok(answer?.into_iter().map(|(pid, memory)| (pid, memory.map(|bytes| bytes / MIB))).collect())
}

fn why_not_listed(why: &NotListed) -> Problem {
    match why {
        NotListed::Refused(error) => words(error),
        NotListed::Unreadable => Problem::new(
            "this driver lists the GPU's processes in a form that this service does not know",
            "install another driver",
        ),
    }
}

fn ours(mode: NvmlComputeMode) -> ComputeMode {
    match mode {
        NvmlComputeMode::Default => ComputeMode::Default,
        NvmlComputeMode::ExclusiveThread => ComputeMode::ExclusiveThread,
        NvmlComputeMode::Prohibited => ComputeMode::Prohibited,
        NvmlComputeMode::ExclusiveProcess => ComputeMode::ExclusiveProcess,
    }
}

fn nvmls(mode: ComputeMode) -> NvmlComputeMode {
    match mode {
        ComputeMode::Default => NvmlComputeMode::Default,
        ComputeMode::ExclusiveThread => NvmlComputeMode::ExclusiveThread,
        ComputeMode::Prohibited => NvmlComputeMode::Prohibited,
        ComputeMode::ExclusiveProcess => NvmlComputeMode::ExclusiveProcess,
    }
}

fn why_not_open(error: &NvmlError, sysroot: &Path) -> Problem {
    // NVML has no error code for a lack of file descriptors, and returns another code.
    if let Some(reason) = no_descriptors() {
        return reason;
    }
    match error {
        NvmlError::LibloadingError(error) => why_not_loaded(error, sysroot),
        NvmlError::LibraryNotFound => {
            Problem::new(format!("{LIBRARY} needs a library that is missing"), "reinstall the NVIDIA driver")
        }
        NvmlError::DriverNotLoaded => Problem::new(
            "the NVIDIA driver is not loaded",
            "load the driver (modprobe nvidia), and see dmesg if that fails",
        ),
        NvmlError::LibRmVersionMismatch => Problem::new(
            "the NVIDIA driver in the kernel and its libraries are of different versions, as after an upgrade",
            "reboot, or unload the nvidia modules and load them again",
        ),
        NvmlError::NoPermission => Problem::new(
            "no permission to talk to the NVIDIA driver",
            "run as root, and check the mode of /dev/nvidiactl",
        ),
        NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound => {
            Problem::new(format!("{LIBRARY} lacks a basic function of NVML"), "reinstall the NVIDIA driver")
        }
        error => words(error).prefixed("NVML can't be used"),
    }
}

fn no_descriptors() -> Option<Problem> {
    let error = fs::File::open("/dev/null").err()?;
    match Errno::from_io_error(&error)? {
        Errno::MFILE => {
            let most = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
            Some(Problem::new(
                format!("this process has reached its limit of {most} open files, so NVML can't be used"),
                "raise the limit (LimitNOFILE= in systemctl edit yunion-mps-daemon, or ulimit -n)",
            ))
        }
        Errno::NFILE => Some(Problem::new(
            "this host has reached its limit of open files, so NVML can't be used",
            "raise the sysctl fs.file-max",
        )),
        _ => None,
    }
}

/// The reason why the dynamic linker could not load NVML's library. The linker's error has only a text and no number.
fn why_not_loaded(error: &impl fmt::Display, sysroot: &Path) -> Problem {
    let text = error.to_string();
    if text.contains("Too many open files") {
        let remedy = "raise the limit of open files: for the service, add [Service] and LimitNOFILE=500000 with \
                      systemctl edit yunion-mps-daemon, then run systemctl restart yunion-mps-daemon; for a \
                      command, run ulimit -n 500000 before it";
        Problem::new(format!("{LIBRARY} can't be loaded ({text})"), remedy)
    } else if text.contains("No such file") {
        let installed = installation::without_library(sysroot).map(|half| half.prefixed(&text));
        installed.unwrap_or_else(|| {
            Problem::new(
                format!("no NVIDIA driver: {LIBRARY} is not installed ({text})"),
                "install the driver",
            )
        })
    } else {
        Problem::new(format!("{LIBRARY} can't be loaded ({text})"), "reinstall the NVIDIA driver")
    }
}

fn words(error: &NvmlError) -> Problem {
    match error {
        NvmlError::GpuLost => Problem::new(
            "GPU is lost: the GPU has fallen off the bus or no longer answers",
            "look for Xid lines in dmesg and reboot the host",
        ),
        NvmlError::ResetRequired => {
            "GPU needs a reset before it can be used again: stop this service and nvidia-persistenced, \
             which hold the GPU, and run nvidia-smi -i ADDRESS --gpu-reset with the GPU's PCI address as \
             ADDRESS; or reboot the host"
                .into()
        }
        NvmlError::NoPermission => Problem::new("no permission", "run as root"),
        NvmlError::InsufficientPower => "GPU lacks power: check its power cables".into(),
        NvmlError::IrqIssue => Problem::new("GPU's interrupts do not arrive", "look for NVRM lines in dmesg"),
        NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound => Problem::new(
            format!("{LIBRARY} lacks a function of NVML that the service calls"),
            "install a newer driver: this service does not support the present one",
        ),
        NvmlError::UnexpectedVariant(code) => format!("NVML answered with the unknown code {code}").into(),
        NvmlError::Unknown => {
            Problem::new("NVML reports an internal driver error", "look for NVRM lines in dmesg")
        }
        error => error.to_string().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_grew_is_asked_for_again() {
        fn grown() -> Result<Processes, NotListed> {
            Err(NotListed::Refused(NvmlError::InsufficientSize(None)))
        }
        let mut asked = 0;
        let answer = list(|| {
            asked += 1;
            if asked < 3 { grown() } else { Ok([(7, Some(2 * MIB)), (8, None)].into()) }
        });
        assert_eq!(answer.unwrap(), [(7, Some(2)), (8, None)].into());
        assert!(list(grown).is_err());
    }

    #[test]
    fn every_reason_comes_with_its_remedy() {
        let cases = [
            (NvmlError::DriverNotLoaded, "modprobe nvidia"),
            (NvmlError::LibRmVersionMismatch, "reboot"),
            (NvmlError::NoPermission, "run as root"),
            (NvmlError::FailedToLoadSymbol("nvmlInit_v2".to_owned()), "reinstall"),
            (NvmlError::Unknown, "dmesg"),
        ];
        let root = tempfile::tempdir().unwrap();
        for (error, remedy) in cases {
            let reason = why_not_open(&error, root.path());
            assert!(reason.remedy.contains(remedy), "{reason}");
        }
        let missing = "libnvidia-ml.so.1: cannot open shared object file: No such file or directory";
        let remedy = |text: &str| why_not_loaded(&text, root.path()).remedy;
        assert_eq!(remedy(missing), "install the driver");
        assert_eq!(remedy("libnvidia-ml.so.1: file too short"), "reinstall the NVIDIA driver");
    }
}
