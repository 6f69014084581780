//! Finds programs that use a served GPU without a server of the service. MPS limits do not apply to these programs.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mps_core::terms::{GpuProcess, ProcessId};

use common::host::identity;
use common::host::proc;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bypass {
    pub gpu_uuid: String,
    pub process: ProcessId,
    /// The kernel cuts the name of a process at 15 characters.
    pub command: String,
    /// The owner in words that end a sentence, such as ` of user alice`. Empty until the supervisor prepares its message about
    /// the process.
    pub owner: String,
    pub memory_mib: Option<u64>,
}

impl Bypass {
    /// True if both are the same process on the same GPU. The other fields may differ.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.gpu_uuid == other.gpu_uuid && self.process == other.process
    }
}

/// The bypasses that were reported. All control daemons that take turns on a GPU find the same bypasses, and only one of them
/// reports each.
#[derive(Debug, Clone, Default)]
pub(crate) struct ToldBypasses(Arc<Mutex<BTreeSet<(String, ProcessId)>>>);

impl ToldBypasses {
    /// Returns the bypasses in `come` that were not reported yet, and records them as reported.
    pub(super) fn newly_told<'b>(&self, come: Vec<&'b Bypass>) -> Vec<&'b Bypass> {
        let mut told = self.lock();
        come.into_iter().filter(|bypass| told.insert(key(bypass))).collect()
    }

    /// Returns the bypasses in `gone` that were reported before, and forgets them. So the end of each bypass is reported once.
    pub(super) fn newly_gone<'b>(&self, gone: Vec<&'b Bypass>) -> Vec<&'b Bypass> {
        let mut told = self.lock();
        gone.into_iter().filter(|bypass| told.remove(&key(bypass))).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<(String, ProcessId)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key(bypass: &Bypass) -> (String, ProcessId) {
    (bypass.gpu_uuid.clone(), bypass.process)
}

/// Describes processes in words such as `PID 1234 (python3) of user alice, PID 1235 (python3)`.
pub(crate) fn describe<'a>(processes: impl IntoIterator<Item = &'a Bypass>) -> String {
    let words: Vec<String> = processes
        .into_iter()
        .map(|Bypass { process, command, owner, .. }| format!("PID {} ({command}){owner}", process.pid))
        .collect();
    words.join(", ")
}

pub(crate) fn find(
    gpu_uuid: &str,
    processes: &[GpuProcess],
    servers: &[u32],
    clients: &BTreeSet<u32>,
) -> Vec<Bypass> {
    let strangers =
        processes.iter().filter(|process| !servers.contains(&process.pid) && !clients.contains(&process.pid));
    strangers
        .filter_map(|process| {
            Some(Bypass {
                gpu_uuid: gpu_uuid.to_owned(),
                process: identity::read(process.pid).ok()?,
                command: proc::name(process.pid)?,
                memory_mib: process.memory_mib,
                owner: String::new(),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_neither_server_nor_client_bypasses() {
        let own = std::process::id();
        let process = |pid| GpuProcess { pid, memory_mib: Some(526), via_mps: false };
        let processes = [process(own), process(u32::MAX)];
        let found = find("GPU-1", &processes, &[], &BTreeSet::new());
        assert_eq!(found.len(), 1, "a process that has ended is no bypass: {found:?}");
        assert_eq!((found[0].process.pid, found[0].memory_mib), (own, Some(526)));
        assert_eq!(describe(&found), format!("PID {own} ({})", found[0].command));
        assert!(find("GPU-1", &processes, &[own], &BTreeSet::new()).is_empty());
        assert!(find("GPU-1", &processes, &[], &BTreeSet::from([own])).is_empty());
    }
}
