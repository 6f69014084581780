//! Reads NVML's lists of the processes on a GPU. Some drivers write longer records than `nvml.h` declares, under the same
//! function name. NVML returns only the number of records and not their length. So the buffer has room for twice as many
//! records as requested, and the content is checked for both lengths.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_uint, c_void};

use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_try};

use crate::function;

/// The length of a record in `nvml.h`: the PID, four bytes of padding, the memory, and two ids of MIG.
pub const RECORD: usize = 24;

/// The length of a record that some drivers write: eight more bytes at its end.
pub const LONG_RECORD: usize = 32;

/// The number of processes that may start on the GPU between the call for their number and the call for the list.
const NEWCOMERS: usize = 16;

/// NVML writes this value if it does not know the memory of a process.
const NOT_KNOWN: u64 = u64::MAX;

/// Limits for a valid record: the largest PID of Linux, and more memory than any GPU has.
const LAST_PID: u32 = 1 << 22;
const TOO_MUCH: u64 = 1 << 50;

/// The memory of each process in bytes, by PID. None if NVML does not know the memory.
pub type Processes = BTreeMap<u32, Option<u64>>;

#[derive(Debug)]
pub enum NotListed {
    Refused(NvmlError),
    /// The bytes that NVML has written can't be records of processes.
    Unreadable,
}

impl From<NvmlError> for NotListed {
    fn from(error: NvmlError) -> Self {
        Self::Refused(error)
    }
}

/// All processes with a context on the GPU. `record` is the expected length of a record with this driver. If the content is not
/// valid with this length, the other length is tried.
///
/// # Errors
/// NVML returns an error, or the list is not valid with either length.
pub fn with_context(device: &Device<'_>, record: usize) -> Result<Processes, NotListed> {
    read(device, c"nvmlDeviceGetComputeRunningProcesses_v3", record)
}

/// The clients of MPS servers on the GPU. `record` is the same as for [`with_context`].
///
/// # Errors
/// The same as for [`with_context`].
pub fn mps_clients(device: &Device<'_>, record: usize) -> Result<Processes, NotListed> {
    read(device, c"nvmlDeviceGetMPSComputeRunningProcesses_v3", record)
}

fn read(device: &Device<'_>, name: &CStr, record: usize) -> Result<Processes, NotListed> {
    type Function = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut c_void) -> c_uint;
    // SAFETY: `Function` is the type of both functions in `nvml.h`. The parameters are the device, the number of records, and
    // the buffer.
    let (function, handle): (Function, _) = unsafe { (function(device, name)?, device.handle().cast()) };
    let mut count: c_uint = 0;
    // SAFETY: the device lives as long as NVML. Without a buffer NVML only counts the records.
    match nvml_try(unsafe { function(handle, &raw mut count, std::ptr::null_mut()) }) {
        Ok(()) | Err(NvmlError::InsufficientSize(_)) => {}
        Err(error) => return Err(error.into()),
    }
    let told = usize::try_from(count).unwrap_or(0).saturating_add(NEWCOMERS);
    count = c_uint::try_from(told).map_err(|_| NvmlError::InsufficientSize(None))?;
    // A buffer of u64 has the alignment of a record.
    let mut room = vec![0_u64; told * 2 * RECORD / size_of::<u64>()];
    // SAFETY: the function and the device are those of the first call above. The buffer has room for twice as many records as
    // NVML may write, and NVML writes only integers.
    nvml_try(unsafe { function(handle, &raw mut count, room.as_mut_ptr().cast()) })?;
    let bytes: Vec<u8> = room.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let count = usize::try_from(count).ok().filter(|count| *count <= told).ok_or(NotListed::Unreadable)?;
    let other = if record == RECORD { LONG_RECORD } else { RECORD };
    let explained = [record, other].into_iter().find_map(|record| explained(&bytes, count, record));
    explained.ok_or(NotListed::Unreadable)
}

/// The processes in records of the length `record`. None if the records are not valid, or if bytes other than zero follow.
fn explained(bytes: &[u8], count: usize, record: usize) -> Option<Processes> {
    let (records, rest) = bytes.split_at_checked(count.checked_mul(record)?)?;
    let process = |bytes: &[u8]| {
        let pid = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?);
        let memory = u64::from_ne_bytes(bytes.get(8..16)?.try_into().ok()?);
        let makes_sense = (1..=LAST_PID).contains(&pid) && (memory == NOT_KNOWN || memory < TOO_MUCH);
        makes_sense.then_some((pid, Some(memory).filter(|bytes| *bytes != NOT_KNOWN)))
    };
    let processes = records.chunks_exact(record).map(process).collect::<Option<_>>()?;
    rest.iter().all(|byte| *byte == 0).then_some(processes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// The bytes that a driver with records of this length writes, followed by zeros.
    fn written(processes: &[(u32, u64)], record: usize) -> Vec<u8> {
        let mut bytes = vec![0; 2 * RECORD * (processes.len() + NEWCOMERS)];
        for (place, (pid, memory)) in processes.iter().enumerate() {
            let mut put = |at: usize, value: &[u8]| {
                let begin = place * record + at;
                bytes[begin..begin + value.len()].copy_from_slice(value);
            };
            put(0, &pid.to_ne_bytes());
            put(8, &memory.to_ne_bytes());
            // Without MIG, the ids of the GPU instance and of the compute instance have all bits set.
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
            let known = |(pid, memory): &(u32, u64)| (*pid, (*memory != NOT_KNOWN).then_some(*memory));
            let expected: Processes = told.iter().map(known).collect();
            for (record, other) in [(RECORD, LONG_RECORD), (LONG_RECORD, RECORD)] {
                let bytes = written(&told, record);
                assert_eq!(explained(&bytes, told.len(), record), Some(expected.clone()), "{record}");
                assert_eq!(explained(&bytes, told.len(), other), None, "{count} of {record} bytes");
            }
        }
    }

    #[test]
    fn a_list_that_makes_no_sense_is_none() {
        assert_eq!(explained(&written(&[], RECORD), 0, RECORD), Some(Processes::new()));
        for nonsense in [(0, MIB), (LAST_PID + 1, MIB), (7, TOO_MUCH)] {
            for record in [RECORD, LONG_RECORD] {
                assert_eq!(explained(&written(&[nonsense], record), 1, record), None, "{nonsense:?}");
            }
        }
        for record in [RECORD, LONG_RECORD] {
            assert_eq!(explained(&written(&processes(3), 40), 4, record), None);
            assert_eq!(explained(&written(&[], RECORD), usize::MAX, record), None);
            assert_eq!(explained(&written(&[], RECORD), 1 << 20, record), None);
        }
    }
}
