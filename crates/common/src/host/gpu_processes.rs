//! Classifies the processes on a GPU: clients of MPS servers, and processes that prevent the start of a server.

use std::collections::{BTreeMap, BTreeSet};

use mps_core::terms::GpuProcess;

/// The kernel cuts the name of a process to 15 characters. So MPS servers (`nvidia-cuda-mps-server`) and control daemons
/// (`nvidia-cuda-mps-control`) both have this name.
const MPS_SERVER: &str = "nvidia-cuda-mps";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Contexts {
    /// All processes with a context on the GPU: the memory of each in MiB, by PID.
    pub(super) compute: BTreeMap<u32, Option<u64>>,
    /// The clients of MPS servers: the memory of each in MiB, by PID. None if NVML has no reliable list, as before Volta.
    pub(super) mps: Option<BTreeMap<u32, Option<u64>>>,
}

impl Contexts {
    /// True if this process is a client of an MPS server. Without a list of clients, every process on a GPU that has a server
    /// counts as a client.
    fn is_client(&self, pid: u32, command: &impl Fn(u32) -> Option<String>) -> bool {
        match &self.mps {
            Some(clients) => clients.contains_key(&pid),
            None => {
                let is_server = |pid: &u32| command(*pid).is_some_and(|command| command == MPS_SERVER);
                !is_server(&pid) && self.compute.keys().any(is_server)
            }
        }
    }

    pub(super) fn clients(&self) -> Option<BTreeSet<u32>> {
        Some(self.mps.as_ref()?.keys().copied().collect())
    }

    pub(super) fn processes(&self, command: impl Fn(u32) -> Option<String>) -> Vec<GpuProcess> {
        // NVML lists `compute` before `mps`, so a client that has just started may be only in `mps`.
        let mut all = self.mps.clone().unwrap_or_default();
        all.extend(&self.compute);
        all.into_iter()
            .map(|(pid, memory_mib)| GpuProcess { pid, memory_mib, via_mps: self.is_client(pid, &command) })
            .collect()
    }

    /// The processes without MPS that prevent the start of a server, with their PIDs and names. Empty if a server already runs.
    /// Processes that have just ended are skipped.
    pub(super) fn foreign(&self, command: impl Fn(u32) -> Option<String>) -> Vec<(u32, String)> {
        let strangers = self.compute.keys().filter(|pid| !self.is_client(**pid, &command));
        let strangers: Vec<_> = strangers.filter_map(|pid| Some((*pid, command(*pid)?))).collect();
        if strangers.iter().any(|(_, command)| command == MPS_SERVER) { Vec::new() } else { strangers }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contexts(compute: &[u32], mps: Option<&[u32]>) -> Contexts {
        let list = |pids: &[u32]| pids.iter().map(|pid| (*pid, Some(u64::from(*pid)))).collect();
        Contexts { compute: list(compute), mps: mps.map(list) }
    }

    /// The names of the processes in these tests: 9 and 10 are servers, and 404 has ended.
    fn names(pid: u32) -> Option<String> {
        match pid {
            9 | 10 => Some("nvidia-cuda-mps".to_owned()),
            404 => None,
            pid => Some(format!("work{pid}")),
        }
    }

    fn foreign(compute: &[u32], mps: Option<&[u32]>) -> Vec<u32> {
        contexts(compute, mps).foreign(names).into_iter().map(|(pid, _)| pid).collect()
    }

    #[test]
    fn no_process_is_foreign_once_a_server_is_there() {
        assert_eq!(foreign(&[9, 21, 30], Some(&[21])), Vec::<u32>::new());
    }

    #[test]
    fn a_process_that_is_neither_server_nor_client_is_foreign() {
        assert_eq!(foreign(&[], Some(&[])), Vec::<u32>::new());
        assert_eq!(foreign(&[9, 21, 22], Some(&[21, 22])), Vec::<u32>::new());
        assert_eq!(foreign(&[21, 30, 404], Some(&[21])), [30]);
        assert_eq!(foreign(&[30, 31], Some(&[])), [30, 31]);
        assert_eq!(contexts(&[30], Some(&[])).foreign(names), [(30, "work30".to_owned())]);
    }

    #[test]
    fn without_a_list_of_clients_a_process_beside_a_server_is_not_foreign() {
        assert_eq!(foreign(&[9, 21, 22], None), Vec::<u32>::new());
        assert_eq!(foreign(&[21, 22], None), [21, 22]);
        assert_eq!(foreign(&[404], None), Vec::<u32>::new());
    }

    #[test]
    fn an_empty_list_of_clients_is_an_answer_and_a_missing_one_is_none() {
        assert_eq!(contexts(&[9, 21, 30], Some(&[21, 23])).clients(), Some(BTreeSet::from([21, 23])));
        assert_eq!(contexts(&[9], Some(&[])).clients(), Some(BTreeSet::new()));
        assert_eq!(contexts(&[9], None).clients(), None);
        assert_eq!(contexts(&[9, 21], None).clients(), None);
    }

    #[test]
    fn processes_are_marked_as_clients_or_not() {
        let seen = |contexts: Contexts| -> Vec<(u32, bool)> {
            contexts.processes(names).iter().map(|process| (process.pid, process.via_mps)).collect()
        };
        let listed = contexts(&[9, 21, 30], Some(&[21, 23]));
        assert_eq!(seen(listed), [(9, false), (21, true), (23, true), (30, false)]);
        assert_eq!(seen(contexts(&[9, 21], None)), [(9, false), (21, true)]);
        assert_eq!(seen(contexts(&[21], None)), [(21, false)]);
        assert_eq!(contexts(&[21], Some(&[21])).processes(names)[0].memory_mib, Some(21));
    }
}
