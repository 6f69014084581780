//! The facts that NVML reports about a GPU.

use nvml_calls::processes::{NotListed, with_context};
use nvml_wrapper::Device;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::CudaComputeCapability;

use super::{MIB, contexts, is_gone, list, ours, why_not_listed, words};
use crate::host::compute_mode::ComputeMode;
use crate::host::proc;
use crate::problem::Problem;

/// A fact that NVML can't read is None, and does not prevent the reading of other facts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmlFacts {
    pub uuid: String,
    pub name: String,
    pub index: u32,
    /// The number N in the name `/dev/nvidiaN` of the GPU's device.
    pub minor: Option<u32>,
    /// Includes the part that the driver reserves. None if NVML does not report the memory, as on GPUs with unified memory.
    pub memory_total_mib: Option<u64>,
    pub compute_capability: Option<(u32, u32)>,
    pub state: GpuState,
}

/// The state of a GPU when NVML was asked. Only the plan uses this state. The service does not publish the state, since it is
/// soon outdated.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GpuState {
    pub compute_mode: Option<ComputeMode>,
    pub mig_enabled: bool,
    /// The PIDs and names of the processes without MPS that prevent the start of an MPS server. Empty if a server already runs.
    pub foreign_processes: Vec<(u32, String)>,
}

impl NvmlFacts {
    pub(super) fn read(device: &Device<'_>, index: u32, process_record: usize) -> Result<Self, Problem> {
        let uuid = device.uuid().map_err(|error| match error {
            error if is_gone(&error) => words(&error),
            error => words(&error).prefixed("the UUID of the GPU can't be read"),
        })?;
        let compute_capability = known("compute capability", device.cuda_compute_capability())?;
        Ok(Self {
            uuid,
            name: known("name", device.name())?.unwrap_or_default(),
            index,
            minor: known("minor number", device.minor_number())?,
            memory_total_mib: known("memory", device.memory_info())?.map(|memory| memory.total / MIB),
            compute_capability: compute_capability.as_ref().and_then(numbers),
            state: GpuState {
                compute_mode: known("compute mode", device.compute_mode())?.map(ours),
                mig_enabled: known("MIG mode", device.mig_mode())?.is_some_and(|mode| mode.current == 1),
                foreign_processes: foreign_processes(device, process_record)?,
            },
        })
    }
}

pub(super) fn numbers(capability: &CudaComputeCapability) -> Option<(u32, u32)> {
    Some((u32::try_from(capability.major).ok()?, u32::try_from(capability.minor).ok()?))
}

/// None if NVML can't read this value. Fails if the GPU is lost. `what` names the value in the log.
fn known<T>(what: &str, value: Result<T, NvmlError>) -> Result<Option<T>, Problem> {
    match value {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_gone(&error) => Err(words(&error)),
        Err(error) => {
            tracing::debug!("NVML does not report the {what}: {error}");
            Ok(None)
        }
    }
}

/// The processes without MPS that prevent the start of an MPS server. Empty if NVML does not list the processes: a server that
/// can't start reports the reason itself.
fn foreign_processes(device: &Device<'_>, process_record: usize) -> Result<Vec<(u32, String)>, Problem> {
    let foreign = || {
        let mut foreign = contexts(device, process_record)?.foreign(proc::name);
        if !foreign.is_empty() {
            // NVML lists all processes first, and the clients afterwards. A client that ends between these two calls is only in
            // the first list, and seems to be a process without MPS. So NVML is asked again, and only processes that still run
            // count.
            let still = list(|| with_context(device, process_record))?;
            foreign.retain(|(pid, _)| still.contains_key(pid));
        }
        Ok(foreign)
    };
    match foreign() {
        Err(NotListed::Refused(error)) if is_gone(&error) => Err(words(&error)),
        Err(why) => {
            tracing::debug!("NVML does not list the processes of the GPU: {why}", why = why_not_listed(&why));
            Ok(Vec::new())
        }
        Ok(foreign) => Ok(foreign),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_fails_alone_and_a_lost_gpu_as_a_whole() {
        assert_eq!(known("name", Ok(1)), Ok(Some(1)));
        assert_eq!(known::<u32>("memory", Err(NvmlError::NotSupported)), Ok(None));
        assert_eq!(known::<u32>("memory", Err(NvmlError::FailedToLoadSymbol("x".to_owned()))), Ok(None));
        assert!(known::<u32>("memory", Err(NvmlError::GpuLost)).unwrap_err().remedy.contains("reboot"));
        assert!(
            known::<u32>("memory", Err(NvmlError::ResetRequired)).unwrap_err().found.contains("gpu-reset")
        );
    }
}
