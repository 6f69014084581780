//! NVML's C ABI on top of the files with the state of the GPUs: the functions that nvml-wrapper calls, with NVIDIA's structure
//! layouts.

#![allow(unsafe_code, non_snake_case)]

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags};

use crate::memory_limits;
use crate::state::{COMPUTE_MODES, Gpu, Host, Kind, Pci, code, injected};

type Return = c_uint;
/// The handle of a GPU is its index plus one, so that no handle is null.
type Device = *mut c_void;
type Answer = Result<(), Return>;

/// The number of calls of nvmlInit that no call of nvmlShutdown has undone yet.
static USERS: AtomicU32 = AtomicU32::new(0);

/// The indices of the GPUs that are awake. NVML wakes a GPU when a program asks for the handle of the GPU. All GPUs fall asleep
/// at the last call of nvmlShutdown. NVML never wakes two GPUs at the same time.
static AWAKE: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

#[repr(C)]
struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    pci_device_id: c_uint,
    pci_sub_system_id: c_uint,
    bus_id: [c_char; 32],
}

#[repr(C)]
struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

#[repr(C)]
struct MemoryV2 {
    version: c_uint,
    total: c_ulonglong,
    reserved: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

#[repr(C)]
struct ProcessInfo {
    pid: c_uint,
    used_gpu_memory: c_ulonglong,
    gpu_instance_id: c_uint,
    compute_instance_id: c_uint,
}

#[repr(C)]
struct FieldValue {
    field: c_uint,
    scope: c_uint,
    timestamp: i64,
    latency: i64,
    kind: c_uint,
    result: Return,
    value: c_ulonglong,
}

#[repr(C)]
struct EventData {
    device: Device,
    kind: c_ulonglong,
    data: c_ulonglong,
    gpu_instance_id: c_uint,
    compute_instance_id: c_uint,
}

#[repr(C)]
struct WantedLimits {
    name_space: *const c_char,
    soft_limit: c_ulonglong,
    hard_limit: c_ulonglong,
}

#[repr(C)]
struct FoundLimits {
    name_space: *const c_char,
    soft_limit: c_ulonglong,
    hard_limit: c_ulonglong,
    current_used: c_ulonglong,
}

/// A set of NVML events, as nvmlEventSetCreate makes it. Only one thread at a time uses the set.
struct EventSet {
    /// An inotify queue, which becomes readable when a file of one of the set's GPUs changes.
    changes: OwnedFd,
    /// The GPUs of the set, each with the number of its critical errors that NVML has already reported.
    gpus: Vec<(Gpu, usize)>,
}

/// NVML's event type of critical errors. No other event type is simulated.
const XID: c_ulonglong = 8;

const MIB: u64 = 1024 * 1024;

fn finish(answer: Answer) -> Return {
    answer.err().unwrap_or(0)
}

fn host(function: &str) -> Result<Host, Return> {
    let host = Host::from_env().map_err(|_| code::UNKNOWN)?;
    if USERS.load(Ordering::Relaxed) == 0 {
        return Err(code::UNINITIALIZED);
    }
    injected(host.root(), function).map_or(Ok(host), Err)
}

/// Answers a call of an NVML function about one GPU, unless [`check`] returns an error.
fn ask(function: &str, device: Device, answer: impl FnOnce(&Gpu) -> Answer) -> Return {
    let gpu = || {
        let index = device.addr().checked_sub(1).and_then(|index| u32::try_from(index).ok());
        let gpu = host(function)?.gpu(index.ok_or(code::INVALID_ARGUMENT)?);
        check(function, &gpu)?;
        Ok(gpu)
    };
    finish(gpu().and_then(|gpu| answer(&gpu)))
}

/// Simulates the faults of a GPU: the NVML function hangs, fails with the error in a fault file, or finds the GPU lost.
fn check(function: &str, gpu: &Gpu) -> Answer {
    gpu.hang(function);
    if let Some(code) = gpu.injected(function) {
        return Err(code);
    }
    if gpu.lost() { Err(code::GPU_IS_LOST) } else { Ok(()) }
}

/// Wakes a GPU up, which takes the milliseconds in the file `wake-ms`. Without the file the GPU is always awake, as
/// nvidia-persistenced ensures on a real host.
fn wake(host: &Host, gpu: &Gpu) {
    let Some(time) = host.text("wake-ms").and_then(|text| text.parse().ok()) else { return };
    let mut awake = AWAKE.lock().unwrap_or_else(PoisonError::into_inner);
    if !awake.contains(&gpu.index) {
        std::thread::sleep(Duration::from_millis(time));
        awake.insert(gpu.index);
    }
}

/// # Safety
/// `out` is null or may be written.
unsafe fn put<T>(out: *mut T, value: T) -> Answer {
    if out.is_null() {
        return Err(code::INVALID_ARGUMENT);
    }
    // SAFETY: the pointer is not null, and the caller guarantees that a pointer other than null is valid.
    unsafe { out.write(value) };
    Ok(())
}

/// # Safety
/// `out` is null or has room for `room` characters.
unsafe fn put_text(out: *mut c_char, room: c_uint, text: &str) -> Answer {
    if out.is_null() {
        return Err(code::INVALID_ARGUMENT);
    }
    if usize::try_from(room).is_ok_and(|room| room <= text.len()) {
        return Err(code::INSUFFICIENT_SIZE);
    }
    // SAFETY: `out` has room for the text and a NUL byte, and the text does not overlap with `out`.
    unsafe {
        out.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
        out.add(text.len()).write(0);
    }
    Ok(())
}

/// # Safety
/// `text` is null or a C string.
unsafe fn text<'a>(text: *const c_char) -> Result<&'a str, Return> {
    if text.is_null() {
        return Err(code::INVALID_ARGUMENT);
    }
    // SAFETY: the pointer is not null, and the caller guarantees that the string ends.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| code::INVALID_ARGUMENT)
}

/// # Safety
/// `device` is null or may be written.
unsafe fn put_handle(
    function: &str,
    device: *mut Device,
    wanted: impl Fn(&Gpu) -> bool,
    none: Return,
) -> Return {
    let find = || {
        let host = host(function)?;
        let gpu = host.gpus().into_iter().find(wanted).ok_or(none)?;
        wake(&host, &gpu);
        check(function, &gpu)?;
        let handle = usize::try_from(gpu.index).map_err(|_| code::UNKNOWN)? + 1;
        // SAFETY: the caller guarantees that the pointer is null or valid.
        unsafe { put(device, std::ptr::without_provenance_mut(handle)) }
    };
    finish(find())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> Return {
    let Ok(host) = Host::from_env() else { return code::UNKNOWN };
    if let Some(code) = injected(host.root(), "nvmlInit_v2") {
        return code;
    }
    if host.driver().is_none() {
        return code::DRIVER_NOT_LOADED;
    }
    USERS.fetch_add(1, Ordering::Relaxed);
    0
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> Return {
    nvmlInit_v2()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> Return {
    let before = USERS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |users| users.checked_sub(1));
    if before == Ok(1) {
        AWAKE.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
    before.map_or(code::UNINITIALIZED, |_| 0)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: Return) -> *const c_char {
    let text = match result {
        0 => c"The operation was successful",
        code::UNINITIALIZED => c"Uninitialized",
        code::INVALID_ARGUMENT => c"Invalid Argument",
        code::NOT_SUPPORTED => c"Not Supported",
        code::NO_PERMISSION => c"Insufficient Permissions",
        code::TIMEOUT => c"Timeout",
        code::NOT_FOUND => c"Not Found",
        code::INSUFFICIENT_SIZE => c"Insufficient Size",
        code::DRIVER_NOT_LOADED => c"Driver Not Loaded",
        code::FUNCTION_NOT_FOUND => c"Function Not Found",
        code::GPU_IS_LOST => c"GPU is lost",
        code::OPERATING_SYSTEM => c"Operating System Call Failed",
        code::ARGUMENT_VERSION_MISMATCH => c"Argument Version Mismatch",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) -> Return {
    let answer = host("nvmlSystemGetDriverVersion").and_then(|host| {
        let driver = host.driver().ok_or(code::DRIVER_NOT_LOADED)?;
        // SAFETY: NVML's caller provides room for `length` characters, or null.
        unsafe { put_text(version, length, &driver) }
    });
    finish(answer)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: c_uint) -> Return {
    let answer = host("nvmlSystemGetNVMLVersion").and_then(|host| {
        let driver = host.driver().ok_or(code::DRIVER_NOT_LOADED)?;
        let text = format!("{}.{driver}", host.cuda_version() / 1000);
        // SAFETY: NVML's caller provides room for `length` characters, or null.
        unsafe { put_text(version, length, &text) }
    });
    finish(answer)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) -> Return {
    let answer = host("nvmlSystemGetCudaDriverVersion_v2").and_then(|host| {
        let cuda = c_int::try_from(host.cuda_version()).map_err(|_| code::UNKNOWN)?;
        // SAFETY: NVML's caller passes a valid pointer or null.
        unsafe { put(version, cuda) }
    });
    finish(answer)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion(version: *mut c_int) -> Return {
    // SAFETY: the caller keeps the rules of nvmlSystemGetCudaDriverVersion_v2, since both functions have the same rules.
    unsafe { nvmlSystemGetCudaDriverVersion_v2(version) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetProcessName(pid: c_uint, name: *mut c_char, length: c_uint) -> Return {
    let answer = host("nvmlSystemGetProcessName").and_then(|_| {
        let command = crate::mps::command_of(pid).ok_or(code::NOT_FOUND)?;
        // SAFETY: NVML's caller provides room for `length` characters, or null.
        unsafe { put_text(name, length, &command) }
    });
    finish(answer)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> Return {
    let answer = host("nvmlDeviceGetCount_v2").and_then(|host| {
        let gpus = c_uint::try_from(host.gpus().len()).map_err(|_| code::UNKNOWN)?;
        // SAFETY: NVML's caller gives a valid pointer or null.
        unsafe { put(count, gpus) }
    });
    finish(answer)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut Device) -> Return {
    let wanted = |gpu: &Gpu| gpu.index == index;
    // SAFETY: NVML's caller gives a valid pointer or null.
    unsafe { put_handle("nvmlDeviceGetHandleByIndex_v2", device, wanted, code::INVALID_ARGUMENT) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut Device) -> Return {
    // SAFETY: NVML's caller gives a C string or null.
    let uuid = match unsafe { text(uuid) } {
        Ok(uuid) => uuid,
        Err(code) => return code,
    };
    // SAFETY: NVML's caller gives a valid pointer or null.
    unsafe { put_handle("nvmlDeviceGetHandleByUUID", device, |gpu| gpu.uuid() == uuid, code::NOT_FOUND) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: *const c_char, device: *mut Device) -> Return {
    // SAFETY: NVML's caller gives a C string or null.
    let address = match unsafe { text(bus_id) }.map(Pci::parse) {
        Ok(Some(address)) => address,
        Ok(None) => return code::INVALID_ARGUMENT,
        Err(code) => return code,
    };
    let wanted = |gpu: &Gpu| gpu.pci() == address;
    // SAFETY: NVML's caller gives a valid pointer or null.
    unsafe { put_handle("nvmlDeviceGetHandleByPciBusId_v2", device, wanted, code::NOT_FOUND) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUUID(device: Device, uuid: *mut c_char, length: c_uint) -> Return {
    // SAFETY: NVML's caller provides room for `length` characters, or null.
    ask("nvmlDeviceGetUUID", device, |gpu| unsafe { put_text(uuid, length, &gpu.uuid()) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetName(device: Device, name: *mut c_char, length: c_uint) -> Return {
    // SAFETY: NVML's caller provides room for `length` characters, or null.
    ask("nvmlDeviceGetName", device, |gpu| unsafe { put_text(name, length, &gpu.name()) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetIndex(device: Device, index: *mut c_uint) -> Return {
    // SAFETY: NVML's caller gives a valid pointer or null.
    ask("nvmlDeviceGetIndex", device, |gpu| unsafe { put(index, gpu.index) })
}

/// Answers a call of an NVML function that returns one number: the value in the GPU's file `file`.
///
/// # Safety
/// `out` is null or may be written.
unsafe fn put_number(function: &str, device: Device, file: &str, out: *mut c_uint) -> Return {
    ask(function, device, |gpu| {
        let number = gpu.number(file).ok_or(code::NOT_SUPPORTED)?;
        // SAFETY: the caller guarantees that the pointer is null or valid.
        unsafe { put(out, c_uint::try_from(number).map_err(|_| code::UNKNOWN)?) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMinorNumber(device: Device, minor: *mut c_uint) -> Return {
    // SAFETY: NVML's caller gives a valid pointer or null.
    unsafe { put_number("nvmlDeviceGetMinorNumber", device, "minor", minor) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMaxPcieLinkGeneration(device: Device, generation: *mut c_uint) -> Return {
    // SAFETY: NVML's caller gives a valid pointer or null.
    unsafe { put_number("nvmlDeviceGetMaxPcieLinkGeneration", device, "link_gen", generation) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMaxPcieLinkWidth(device: Device, width: *mut c_uint) -> Return {
    // SAFETY: NVML's caller gives a valid pointer or null.
    unsafe { put_number("nvmlDeviceGetMaxPcieLinkWidth", device, "link_width", width) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCurrPcieLinkGeneration(device: Device, generation: *mut c_uint) -> Return {
    // SAFETY: NVML's caller gives a valid pointer or null.
    unsafe { put_number("nvmlDeviceGetCurrPcieLinkGeneration", device, "link_gen", generation) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCurrPcieLinkWidth(device: Device, width: *mut c_uint) -> Return {
    // SAFETY: NVML's caller gives a valid pointer or null.
    unsafe { put_number("nvmlDeviceGetCurrPcieLinkWidth", device, "link_width", width) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPersistenceMode(device: Device, mode: *mut c_uint) -> Return {
    ask("nvmlDeviceGetPersistenceMode", device, |gpu| {
        let enabled = gpu.text("persistence_mode").is_some_and(|text| text == "Enabled");
        // SAFETY: NVML's caller gives a valid pointer or null.
        unsafe { put(mode, enabled.into()) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(device: Device, info: *mut PciInfo) -> Return {
    ask("nvmlDeviceGetPciInfo_v3", device, |gpu| {
        let pci = gpu.pci();
        let id = gpu.text("id").unwrap_or_default();
        let (vendor, model) = id.split_once(':').unwrap_or_default();
        let hex = |text: &str| u32::from_str_radix(text, 16).unwrap_or_default();
        let id = hex(model) << 16 | hex(vendor);
        let legacy = format!("{:04X}:{:02X}:{:02X}.{:X}", pci.domain, pci.bus, pci.device, pci.function);
        let info_now = PciInfo {
            bus_id_legacy: characters(&legacy),
            domain: pci.domain,
            bus: pci.bus,
            device: pci.device,
            pci_device_id: id,
            pci_sub_system_id: 0x18bf_10de,
            bus_id: characters(&pci.nvml()),
        };
        // SAFETY: NVML's caller gives a valid pointer or null.
        unsafe { put(info, info_now) }
    })
}

/// Copies a text into a field of fixed size, with a NUL byte at the end. A text that is too long is cut.
fn characters<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    for (place, byte) in field.iter_mut().take(N - 1).zip(text.bytes()) {
        *place = c_char::from_ne_bytes([byte]);
    }
    field
}

/// Returns the total, the reserved and the used memory of a GPU, in bytes.
fn memory(gpu: &Gpu) -> Result<(u64, u64, u64), Return> {
    let total = gpu.number("memory_total_mib").ok_or(code::NOT_SUPPORTED)? * MIB;
    let reserved = gpu.number("memory_reserved_kib").unwrap_or_default() * 1024;
    let used: u64 = gpu.processes().values().map(|(_, mib)| mib * MIB).sum();
    Ok((total, reserved, used.min(total.saturating_sub(reserved))))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: Device, info: *mut Memory) -> Return {
    ask("nvmlDeviceGetMemoryInfo", device, |gpu| {
        let (total, reserved, used) = memory(gpu)?;
        // Version 1 of the structure has no field for reserved memory, and counts it as used.
        let used = used + reserved;
        // SAFETY: NVML's caller gives a valid pointer or null.
        unsafe { put(info, Memory { total, free: total - used, used }) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Device, info: *mut MemoryV2) -> Return {
    ask("nvmlDeviceGetMemoryInfo_v2", device, |gpu| {
        let version = c_uint::try_from(size_of::<MemoryV2>()).map_err(|_| code::UNKNOWN)? | 2 << 24;
        // SAFETY: NVML's caller passes null or a structure with its version set.
        if info.is_null() || unsafe { (*info).version } != version {
            return Err(code::ARGUMENT_VERSION_MISMATCH);
        }
        let (total, reserved, used) = memory(gpu)?;
        // SAFETY: the pointer is not null, and NVML's caller gives a valid structure.
        unsafe { put(info, MemoryV2 { version, total, reserved, free: total - reserved - used, used }) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceSetMemoryLimits_v1(device: Device, limits: *mut WantedLimits) -> Return {
    let function = "nvmlDeviceSetMemoryLimits_v1";
    ask(function, device, |gpu| {
        if limits.is_null() {
            return Err(code::INVALID_ARGUMENT);
        }
        // SAFETY: the pointer is not null, and NVML's caller gives a structure with a C string.
        let (limits, group) = unsafe { (&*limits, text((*limits).name_space)?) };
        memory_limits::check(&host(function)?, gpu, group)?;
        memory_limits::set(gpu, group, (limits.soft_limit, limits.hard_limit))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryLimits_v1(device: Device, limits: *mut FoundLimits) -> Return {
    let function = "nvmlDeviceGetMemoryLimits_v1";
    ask(function, device, |gpu| {
        if limits.is_null() {
            return Err(code::INVALID_ARGUMENT);
        }
        // SAFETY: the pointer is not null, and NVML's caller gives a structure with a C string.
        let (limits, group) = unsafe { (&mut *limits, text((*limits).name_space)?) };
        memory_limits::check(&host(function)?, gpu, group)?;
        (limits.soft_limit, limits.hard_limit) = memory_limits::limits(gpu, group);
        let uncounted = gpu.number("memory_uncounted_mib").unwrap_or_default() * MIB;
        limits.current_used = memory_limits::used_bytes(gpu, group).saturating_sub(uncounted);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: Device,
    major: *mut c_int,
    minor: *mut c_int,
) -> Return {
    ask("nvmlDeviceGetCudaComputeCapability", device, |gpu| {
        let (high, low) = gpu.compute_capability();
        let number = |value: u32| c_int::try_from(value).map_err(|_| code::UNKNOWN);
        // SAFETY: NVML's caller gives valid pointers or null.
        unsafe { put(major, number(high)?).and(put(minor, number(low)?)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeMode(device: Device, mode: *mut c_uint) -> Return {
    ask("nvmlDeviceGetComputeMode", device, |gpu| {
        let now = gpu.compute_mode();
        let number = COMPUTE_MODES.iter().position(|known| *known == now);
        let number = number.and_then(|number| c_uint::try_from(number).ok()).ok_or(code::UNKNOWN)?;
        // SAFETY: NVML's caller gives a valid pointer or null.
        unsafe { put(mode, number) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceSetComputeMode(device: Device, mode: c_uint) -> Return {
    ask("nvmlDeviceSetComputeMode", device, |gpu| {
        let text = usize::try_from(mode).ok().and_then(|mode| COMPUTE_MODES.get(mode));
        crate::smi::set_compute_mode(gpu, text.ok_or(code::INVALID_ARGUMENT)?)
    })
}

/// NVML's number of the field with the recovery action that the driver asks for, and the type of the field's value. No other
/// field is simulated.
const RECOVERY_ACTION: c_uint = 230;
const UNSIGNED_INT: c_uint = 1;

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetFieldValues(
    device: Device,
    count: c_int,
    values: *mut FieldValue,
) -> Return {
    ask("nvmlDeviceGetFieldValues", device, |gpu| {
        for place in 0..usize::try_from(count).map_err(|_| code::INVALID_ARGUMENT)? {
            // SAFETY: NVML's caller gives an array of `count` values, or null.
            let value = unsafe { values.wrapping_add(place).as_mut() }.ok_or(code::INVALID_ARGUMENT)?;
            let action = gpu.number("recovery_action").filter(|_| value.field == RECOVERY_ACTION);
            (value.value, value.kind) = (action.unwrap_or_default(), UNSIGNED_INT);
            value.result = if action.is_some() { 0 } else { code::NOT_SUPPORTED };
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMigMode(
    device: Device,
    current: *mut c_uint,
    pending: *mut c_uint,
) -> Return {
    ask("nvmlDeviceGetMigMode", device, |gpu| {
        let on = gpu.mig().ok_or(code::NOT_SUPPORTED)?;
        // SAFETY: NVML's caller gives valid pointers or null.
        unsafe { put(current, on.into()).and(put(pending, on.into())) }
    })
}

/// # Safety
/// `count` is null or may be read and written; `infos` is null or has room for `*count` entries.
unsafe fn put_processes(
    function: &str,
    device: Device,
    count: *mut c_uint,
    infos: *mut ProcessInfo,
    kinds: &[Kind],
) -> Return {
    ask(function, device, |gpu| {
        let record = host(function)?.process_record();
        let all = gpu.processes_in_nvml();
        let wanted: Vec<_> = all.iter().filter(|(_, (kind, _))| kinds.contains(kind)).collect();
        if count.is_null() {
            return Err(code::INVALID_ARGUMENT);
        }
        // SAFETY: the pointer is not null, and the caller guarantees that a pointer other than null is valid.
        let room = unsafe { count.replace(c_uint::try_from(wanted.len()).unwrap_or(c_uint::MAX)) };
        if usize::try_from(room).is_ok_and(|room| room < wanted.len()) {
            return Err(code::INSUFFICIENT_SIZE);
        }
        for (place, (pid, (_, mib))) in wanted.into_iter().enumerate() {
            let info = ProcessInfo {
                pid: *pid,
                used_gpu_memory: mib * MIB,
                gpu_instance_id: c_uint::MAX,
                compute_instance_id: c_uint::MAX,
            };
            // SAFETY: the check above ensures that the caller's array has room for all entries.
            unsafe { put(infos.wrapping_byte_add(place * record), info)? };
            if record > size_of::<ProcessInfo>() {
                // SAFETY: none on purpose. A real driver with longer records writes beyond the end of its caller's
                // array, and the simulated driver does the same.
                unsafe {
                    put(infos.wrapping_byte_add(place * record + size_of::<ProcessInfo>()).cast::<u64>(), 0)?;
                }
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: Device,
    count: *mut c_uint,
    infos: *mut ProcessInfo,
) -> Return {
    let kinds = [Kind::Server, Kind::Client, Kind::Compute];
    // SAFETY: NVML's caller provides room for the stated number of entries.
    unsafe { put_processes("nvmlDeviceGetComputeRunningProcesses_v3", device, count, infos, &kinds) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
    device: Device,
    count: *mut c_uint,
    infos: *mut ProcessInfo,
) -> Return {
    // SAFETY: NVML's caller provides room for the stated number of entries.
    unsafe {
        put_processes("nvmlDeviceGetMPSComputeRunningProcesses_v3", device, count, infos, &[Kind::Client])
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    device: Device,
    count: *mut c_uint,
    infos: *mut ProcessInfo,
) -> Return {
    // SAFETY: NVML's caller provides room for the stated number of entries.
    unsafe {
        put_processes("nvmlDeviceGetGraphicsRunningProcesses_v3", device, count, infos, &[Kind::Graphics])
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlEventSetCreate(set: *mut *mut EventSet) -> Return {
    let answer = host("nvmlEventSetCreate").and_then(|_| {
        if set.is_null() {
            return Err(code::INVALID_ARGUMENT);
        }
        let changes = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC);
        let made = EventSet { changes: changes.map_err(|_| code::UNKNOWN)?, gpus: Vec::new() };
        // SAFETY: NVML's caller passes a valid pointer or null. nvmlEventSetFree frees the set.
        unsafe { put(set, Box::into_raw(Box::new(made))) }
    });
    finish(answer)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlEventSetFree(set: *mut EventSet) -> Return {
    if set.is_null() {
        return code::INVALID_ARGUMENT;
    }
    // SAFETY: nvmlEventSetCreate has made the set, and NVML's caller frees the set once.
    drop(unsafe { Box::from_raw(set) });
    0
}

/// # Safety
/// `set` is null, or was made by nvmlEventSetCreate and not freed, and no other thread uses it.
unsafe fn event_set<'a>(set: *mut EventSet) -> Result<&'a mut EventSet, Return> {
    // SAFETY: the caller guarantees that the pointer is null or valid.
    unsafe { set.as_mut() }.ok_or(code::INVALID_ARGUMENT)
}

/// Registers a GPU with a set of events. NVML reports only the errors of the GPU that happen after its registration.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceRegisterEvents(
    device: Device,
    kinds: c_ulonglong,
    set: *mut EventSet,
) -> Return {
    ask("nvmlDeviceRegisterEvents", device, |gpu| {
        // SAFETY: NVML's caller gives a set that nvmlEventSetCreate has made, or null.
        let set = unsafe { event_set(set) }?;
        if kinds != XID {
            return Err(code::NOT_SUPPORTED);
        }
        gpu.watch(&set.changes).map_err(|_| code::UNKNOWN)?;
        set.gpus.push((gpu.clone(), gpu.xids().len()));
        Ok(())
    })
}

/// Returns the first event of the set's GPUs that NVML has not reported yet. `None` if NVML has reported all events.
fn next_event(set: &mut EventSet) -> Result<Option<EventData>, Return> {
    let next = set.gpus.iter_mut().find_map(|(gpu, told)| {
        let xid = *gpu.xids().get(*told)?;
        *told += 1;
        Some((gpu.index, xid))
    });
    let Some((index, xid)) = next else { return Ok(None) };
    let handle = usize::try_from(index).map_err(|_| code::UNKNOWN)? + 1;
    Ok(Some(EventData {
        device: std::ptr::without_provenance_mut(handle),
        kind: XID,
        data: xid,
        gpu_instance_id: c_uint::MAX,
        compute_instance_id: c_uint::MAX,
    }))
}

/// Waits until a file of a GPU in the set has changed, but not longer than `longest`.
fn wait_for_change(changes: &OwnedFd, longest: Duration) -> Answer {
    let longest = Timespec::try_from(longest).map_err(|_| code::INVALID_ARGUMENT)?;
    // A call of `poll` that a signal interrupts counts as a change.
    _ = poll(&mut [PollFd::new(changes, PollFlags::IN)], Some(&longest));
    let mut buffer = [MaybeUninit::uninit(); 1024];
    let mut queue = inotify::Reader::new(changes, &mut buffer);
    while queue.next().is_ok() {}
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlEventSetWait_v2(
    set: *mut EventSet,
    data: *mut EventData,
    timeout_ms: c_uint,
) -> Return {
    let deadline = Instant::now() + Duration::from_millis(timeout_ms.into());
    let wait = || {
        // SAFETY: NVML's caller gives a set that nvmlEventSetCreate has made, or null.
        let set = unsafe { event_set(set) }?;
        loop {
            host("nvmlEventSetWait_v2")?;
            if let Some(event) = next_event(set)? {
                // SAFETY: NVML's caller gives a valid pointer or null.
                return unsafe { put(data, event) };
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(code::TIMEOUT);
            }
            wait_for_change(&set.changes, left)?;
        }
    };
    finish(wait())
}
