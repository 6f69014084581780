//! The clients that never lose their work for the budget of their slice. Neither a restart of the service nor a reload ends the
//! work of clients: the clients that are on the GPU at the moment of the restart or of the reload are spared, and only clients
//! that come later can be ended.

use alloc::vec::Vec;

use crate::terms::ProcessId;

/// The clients on a GPU that never lose their work for a budget.
#[derive(Debug)]
pub(super) struct Spared {
    /// True if the service will spare the clients that its next look finds.
    spares_next: bool,
    processes: Vec<ProcessId>,
}

impl Spared {
    /// A state that spares the clients that were on the GPU before the service started.
    pub(super) fn new() -> Self {
        Self { spares_next: true, processes: Vec::new() }
    }

    /// Spares the clients that are on the GPU now, since a change of the configuration has made them exceed the budget.
    pub(super) fn spare_all(&mut self) {
        self.spares_next = true;
    }

    /// Records the clients that a look has found, with or without a known slice. A client stays spared until its process has
    /// ended, since the driver may leave a client out of its list for a moment.
    pub(super) fn observe(&mut self, found: &[ProcessId], runs: impl Fn(ProcessId) -> bool) {
        self.processes.retain(|process| runs(*process));
        if core::mem::take(&mut self.spares_next) {
            let new = found.iter().filter(|process| !self.processes.contains(process));
            let new: Vec<ProcessId> = new.copied().collect();
            self.processes.extend(new);
        }
    }

    /// Returns whether this client is spared.
    pub(super) fn has(&self, process: ProcessId) -> bool {
        self.processes.contains(&process)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_is_spared_stays_so_until_it_has_gone() {
        let process = |pid, start_time| ProcessId { pid, start_time };
        let (old, new) = (process(1, 1), process(2, 2));
        let mut spared = Spared::new();
        spared.observe(&[old], |_| true);
        assert!(spared.has(old) && !spared.has(new));
        // The driver may leave a client out of its list for a moment. A client that still runs stays spared.
        spared.observe(&[new], |_| true);
        assert!(spared.has(old) && !spared.has(new));
        spared.observe(&[], |one| one != old);
        // A process with the PID of a spared client and another start time is another client, which is not spared.
        spared.observe(&[old, process(1, 3)], |_| true);
        assert!(!spared.has(old) && !spared.has(process(1, 3)));
        spared.spare_all();
        assert!(!spared.has(new), "no client has been found yet");
        spared.observe(&[new, old], |_| true);
        assert!(spared.has(new) && spared.has(old));
    }
}
