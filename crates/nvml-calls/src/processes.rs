//! The lists of the processes on a GPU. Some drivers write longer records than `nvml.h` declares, under the same name of the
//! function, and say only how many. So there is room for more than twice as much as was asked for, and what was written has
//! to make sense.

use std::ffi::{CStr, c_uint, c_void};

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_try};

use crate::function;

/// The record of a process in `nvml.h`: its PID, four bytes of nothing, its memory, and two ids of MIG.
pub const RECORD: usize = 24;

/// The record of some drivers: the same with eight bytes more at its end.
pub const LONG_RECORD: usize = 32;

/// The records that may come between the question how many there are and the list itself.
const NEWCOMERS: usize = 16;

/// The memory of a process where NVML does not know it.
const NOT_KNOWN: u64 = u64::MAX;

/// The largest PID that Linux gives, and more memory than any GPU has.
const LAST_PID: u32 = 1 << 22;
const TOO_MUCH: u64 = 1 << 50;

/// A list of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessList {
    /// All with a context on the GPU.
    Compute,
    /// The clients of MPS servers.
    MpsClients,
}

impl ProcessList {
    fn function(self) -> &'static CStr {
        match self {
            Self::Compute => c"nvmlDeviceGetComputeRunningProcesses_v3",
            Self::MpsClients => c"nvmlDeviceGetMPSComputeRunningProcesses_v3",
        }
    }
}

/// A process on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListedProcess {
    pub pid: u32,
    /// The process's memory in bytes, if NVML knows it.
    pub memory: Option<u64>,
}

/// Why there is no list.
#[derive(Debug)]
pub enum NotListed {
    /// NVML says so.
    Refused(NvmlError),
    /// NVML has written something else than records of processes.
    Unreadable,
}

impl From<NvmlError> for NotListed {
    fn from(error: NvmlError) -> Self {
        Self::Refused(error)
    }
}

/// The processes in this list of a GPU. `record` is the length with which this driver is known to write; the other one counts
/// where that makes no sense.
///
/// # Errors
/// NVML's, or that the list makes no sense.
pub fn read(device: &Device<'_>, list: ProcessList, record: usize) -> Result<Vec<ListedProcess>, NotListed> {
    type Function = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut c_void) -> c_uint;
    // SAFETY: nvml.h declares both functions so: with the device, the number of records, and the place for them.
    let (function, handle): (Function, _) =
        unsafe { (function(device, list.function())?, device.handle().cast()) };
    let mut count: c_uint = 0;
    // SAFETY: the device lives as long as NVML. Without room for records NVML only counts them.
    match nvml_try(unsafe { function(handle, &raw mut count, std::ptr::null_mut()) }) {
        Ok(()) | Err(NvmlError::InsufficientSize(_)) => {}
        Err(error) => return Err(error.into()),
    }
    let told = usize::try_from(count).unwrap_or(0).saturating_add(NEWCOMERS);
    count = c_uint::try_from(told).map_err(|_| NvmlError::InsufficientSize(None))?;
    // Of u64, so that it is aligned as a record is.
    let mut room = vec![0_u64; told * 2 * RECORD / size_of::<u64>()];
    // SAFETY: the same; there is room for twice as many records as NVML is told, and it writes integers alone.
    nvml_try(unsafe { function(handle, &raw mut count, room.as_mut_ptr().cast()) })?;
    let bytes: Vec<u8> = room.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let count = usize::try_from(count).ok().filter(|count| *count <= told).ok_or(NotListed::Unreadable)?;
    let other = if record == RECORD { LONG_RECORD } else { RECORD };
    let explained = [record, other].into_iter().find_map(|record| explained(&bytes, count, record));
    explained.ok_or(NotListed::Unreadable)
}

/// The processes in records of this length. None if they make no sense, or if something is behind them.
fn explained(bytes: &[u8], count: usize, record: usize) -> Option<Vec<ListedProcess>> {
    let (records, rest) = bytes.split_at_checked(count.checked_mul(record)?)?;
    let process = |bytes: &[u8]| {
        let pid = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?);
        let memory = u64::from_ne_bytes(bytes.get(8..16)?.try_into().ok()?);
        let makes_sense = (1..=LAST_PID).contains(&pid) && (memory == NOT_KNOWN || memory < TOO_MUCH);
        makes_sense.then_some(ListedProcess { pid, memory: Some(memory).filter(|bytes| *bytes != NOT_KNOWN) })
    };
    let processes = records.chunks_exact(record).map(process).collect::<Option<Vec<_>>>()?;
    rest.iter().all(|byte| *byte == 0).then_some(processes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// The bytes that a driver with records of this length writes, in a place with zeros behind them.
    fn written(processes: &[(u32, u64)], record: usize) -> Vec<u8> {
        let mut bytes = vec![0; 2 * RECORD * (processes.len() + NEWCOMERS)];
        for (place, (pid, memory)) in processes.iter().enumerate() {
            let mut put = |at: usize, value: &[u8]| {
                let begin = place * record + at;
                bytes[begin..begin + value.len()].copy_from_slice(value);
            };
            put(0, &pid.to_ne_bytes());
            put(8, &memory.to_ne_bytes());
            // Without MIG both ids are the largest number.
            put(16, &[0xff; 8]);
        }
        bytes
    }

    fn processes(count: u32) -> Vec<(u32, u64)> {
        let one = |number: u32| (4711 + number, u64::from(number) * 580 * MIB);
        (1..=count).map(one).chain([(9, NOT_KNOWN)]).collect()
    }

    #[test]
    fn records_of_either_length_are_read_as_what_they_are_alone() {
        for count in 1..40 {
            let told = processes(count);
            let expected: Vec<ListedProcess> = told
                .iter()
                .map(|(pid, memory)| ListedProcess {
                    pid: *pid,
                    memory: (*memory != NOT_KNOWN).then_some(*memory),
                })
                .collect();
            for (record, other) in [(RECORD, LONG_RECORD), (LONG_RECORD, RECORD)] {
                let bytes = written(&told, record);
                assert_eq!(explained(&bytes, told.len(), record), Some(expected.clone()), "{record}");
                assert_eq!(explained(&bytes, told.len(), other), None, "{count} of {record} bytes");
            }
        }
    }

    #[test]
    fn a_list_that_makes_no_sense_is_none() {
        assert_eq!(explained(&written(&[], RECORD), 0, RECORD), Some(Vec::new()));
        for nonsense in [(0, MIB), (LAST_PID + 1, MIB), (7, TOO_MUCH)] {
            for record in [RECORD, LONG_RECORD] {
                assert_eq!(explained(&written(&[nonsense], record), 1, record), None, "{nonsense:?}");
            }
        }
        // Records of 40 bytes, and more records than there is room for.
        for record in [RECORD, LONG_RECORD] {
            assert_eq!(explained(&written(&processes(3), 40), 4, record), None);
            assert_eq!(explained(&written(&[], RECORD), usize::MAX, record), None);
            assert_eq!(explained(&written(&[], RECORD), 1 << 20, record), None);
        }
    }
}
