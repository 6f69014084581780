//! Finds processes that use the GPUs of a control daemon without its servers. No limit applies to these processes.

use alloc::collections::{BTreeMap, BTreeSet};
use core::time::Duration;

use crate::terms::ProcessId;
use crate::{CoreTime, GpuUuid};

/// The shortest time between the two scans that confirm a bypass. One scan is not enough: NVML and the control daemon learn of
/// a client's start and end at different moments. NVML also lists an ended process until the driver has freed its memory.
pub const CONFIRM_AFTER: Duration = Duration::from_secs(1);

/// The processes that the last scan has found on each GPU. The value has the time of the first scan that has found the process,
/// and true if a second scan has confirmed the process. The record stays when the control daemon is replaced.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Bypasses(BTreeMap<(GpuUuid, ProcessId), (CoreTime, bool)>);

impl Bypasses {
    /// Records the processes that a scan has found. Returns the moment from which another scan can confirm a process. None if
    /// every process is confirmed.
    pub(super) fn confirm(
        &mut self,
        found: BTreeSet<(GpuUuid, ProcessId)>,
        now: CoreTime,
    ) -> Option<CoreTime> {
        let known = core::mem::take(&mut self.0);
        let seen = found.into_iter().map(|bypass| {
            let before = known.get(&bypass).map(|(since, _)| *since);
            let confirmed = before.is_some_and(|since| now >= since + CONFIRM_AFTER);
            (bypass, (before.unwrap_or(now), confirmed))
        });
        self.0 = seen.collect();
        let unconfirmed = self.0.values().filter(|(_, confirmed)| !confirmed);
        unconfirmed.map(|(since, _)| *since + CONFIRM_AFTER).min()
    }

    pub(super) fn confirmed(&self, gpu: &str) -> BTreeSet<ProcessId> {
        let confirmed = self.0.iter().filter(|((on, _), (_, confirmed))| on == gpu && *confirmed);
        confirmed.map(|((_, process), _)| *process).collect()
    }
}

#[cfg(test)]
mod tests {
    use alloc::borrow::ToOwned;
    use alloc::vec::Vec;

    use super::*;

    fn bypasses(pids: &[u32]) -> BTreeSet<(GpuUuid, ProcessId)> {
        pids.iter().map(|pid| ("GPU-1".to_owned(), ProcessId { pid: *pid, start_time: 7 })).collect()
    }

    fn confirmed(bypasses: &Bypasses) -> Vec<u32> {
        bypasses.confirmed("GPU-1").into_iter().map(|process| process.pid).collect()
    }

    #[test]
    fn it_takes_two_looks_with_time_between() {
        let mut found = Bypasses::default();
        let start = CoreTime::from_secs(7);
        let soon = start + CONFIRM_AFTER / 2;
        let later = start + CONFIRM_AFTER;
        assert_eq!(found.confirm(bypasses(&[1, 2]), start), Some(later));
        // Process 1 has ended, process 2 is known for too short a time, and process 3 is new.
        assert_eq!(found.confirm(bypasses(&[2, 3]), soon), Some(later));
        assert_eq!(confirmed(&found), []);
        assert_eq!(found.confirm(bypasses(&[2, 3]), later), Some(soon + CONFIRM_AFTER));
        assert_eq!(confirmed(&found), [2]);
        let end = later + Duration::from_secs(30);
        assert_eq!(found.confirm(bypasses(&[2, 3]), end), None, "no process is sought where none is new");
        assert_eq!(confirmed(&found), [2, 3]);
        assert_eq!(found.confirm(bypasses(&[]), end), None);
        assert_eq!(confirmed(&found), []);
    }

    #[test]
    fn the_next_process_with_the_same_pid_is_another() {
        let mut found = Bypasses::default();
        let start = CoreTime::from_secs(7);
        found.confirm(bypasses(&[1]), start);
        found.confirm(
            [("GPU-1".to_owned(), ProcessId { pid: 1, start_time: 8 })].into(),
            start + CONFIRM_AFTER,
        );
        assert_eq!(confirmed(&found), []);
    }
}
