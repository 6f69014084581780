//! Counts the clients on each GPU. A full GPU still serves its clients. Only a further client gets CUDA error 46.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use super::Serving;
use super::gpus::ProcessesOnGpus;
use super::news::News;
use super::shell::{Failure, Shell};
use crate::CoreTime;
use crate::mps::{Client, Meaning};
use crate::terms::ServedGpu;

/// The pause between the end of a client and the next count, since the control daemon still lists an ended client for a moment.
pub(super) const CLIENT_LEFT_PAUSE: Duration = Duration::from_millis(200);

/// The time between two counts of the clients on a full GPU. Usually a line in the log reports the end of a client earlier.
const PERIOD: Duration = Duration::from_secs(5);

/// The last line in the log about a refused client, and if the service still trusts this line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Refusal {
    /// No client was refused since the last end of a client.
    #[default]
    None,
    /// A server has refused a client, since the server already had this number of clients.
    Believed(u32),
    /// The line does not count any more, since a later count has found fewer clients. Clients have ended without a line in the
    /// log, or another program has forged the line.
    Disbelieved,
}

#[derive(Debug, Default)]
pub(super) struct Capacity {
    refusal: Refusal,
    /// The number of clients at the last count. 0 between a refusal and the first count after it.
    counted: usize,
    /// The full GPUs by UUID, each with the number of clients that it can have.
    full: BTreeMap<String, u32>,
    /// NVML does not list the clients of these GPUs. The key is the UUID, and the value is the number of client processes.
    unlisted: BTreeMap<String, u32>,
    pub(super) due: Option<CoreTime>,
}

impl Capacity {
    /// Records a line of the log, and requests a count of the clients if the line makes a count necessary. A line about an
    /// admitted client makes a count necessary only if NVML does not list the clients of some GPU. Returns true if the line
    /// reports a refused client and no client was refused before.
    pub(super) fn observe(&mut self, meaning: &Meaning, gpus: &[ServedGpu], now: CoreTime) -> bool {
        let unlisted = gpus.iter().any(|gpu| !gpu.clients_listed);
        match meaning {
            Meaning::ClientRefused { capacity, .. } if self.refusal == Refusal::None => {
                (self.refusal, self.counted) = (Refusal::Believed(*capacity), 0);
                self.set_due(now);
                true
            }
            Meaning::ClientAdmitted(_) if unlisted => {
                self.set_due(now + CLIENT_LEFT_PAUSE);
                false
            }
            // The clients of a server end with it, without lines of their own in the log.
            Meaning::ClientLeft(_) | Meaning::ServerExited { .. } => {
                self.some_left(gpus, now);
                false
            }
            _ => false,
        }
    }

    pub(super) fn some_left(&mut self, gpus: &[ServedGpu], now: CoreTime) {
        let unlisted = gpus.iter().any(|gpu| !gpu.clients_listed);
        if unlisted || self.refusal != Refusal::None || !self.full.is_empty() {
            self.refusal = Refusal::None;
            self.set_due(now + CLIENT_LEFT_PAUSE);
        }
    }

    fn set_due(&mut self, at: CoreTime) {
        self.due = Some(self.due.map_or(at, |before| before.min(at)));
    }

    /// Requests a count if NVML lists as many clients as a GPU can have, or does not list the clients of a GPU.
    pub(super) fn suspect(&mut self, gpus: &[ServedGpu], there: &ProcessesOnGpus, now: CoreTime) {
        let many = |gpu: &ServedGpu| {
            let there = there.get(&gpu.uuid).into_iter().flatten();
            !gpu.clients_listed || there.filter(|process| process.via_mps).count() >= gpu.capacity as usize
        };
        if gpus.iter().any(many) {
            self.set_due(now);
        }
    }

    pub(super) fn full(&self, uuid: &str) -> String {
        let describe = |most: &u32| {
            format!("full: all {most} places for clients are taken; the next client gets CUDA error 46")
        };
        self.full.get(uuid).map(describe).unwrap_or_default()
    }

    /// The number of clients at the last count, if NVML does not list the clients of this GPU. None before the first count.
    pub(super) fn unlisted(&self, uuid: &str) -> Option<u32> {
        self.unlisted.get(uuid).copied()
    }

    /// Counts the clients on each GPU. Returns the GPUs that have become full, with true, and the GPUs that are no longer full,
    /// with false.
    fn count(&mut self, gpus: &[ServedGpu], clients: &[Client], now: CoreTime) -> Vec<(ServedGpu, bool)> {
        let has_refused = self.refusal != Refusal::None;
        if has_refused && (clients.is_empty() || clients.len() < self.counted) {
            self.refusal = Refusal::Disbelieved;
        }
        self.counted = clients.len();
        // The log does not say on which GPU the server has refused the client. If the control daemon has only one GPU, the GPU
        // is certain.
        let refused_at = match self.refusal {
            Refusal::Believed(capacity) if gpus.len() == 1 => Some(capacity),
            _ => None,
        };
        let mut changed = Vec::new();
        let before = core::mem::take(&mut self.full);
        for gpu in gpus {
            let there = || clients.iter().filter(|client| gpu.uuid.starts_with(&client.gpu_prefix));
            if !gpu.clients_listed {
                let processes: BTreeSet<u32> = there().map(|client| client.pid).collect();
                let count = u32::try_from(processes.len()).unwrap_or(u32::MAX);
                self.unlisted.insert(gpu.uuid.clone(), count);
            }
            let there = there().count();
            if let Some(most) =
                refused_at.or_else(|| (there >= gpu.capacity as usize).then_some(gpu.capacity))
            {
                self.full.insert(gpu.uuid.clone(), most);
            }
            let is_full = self.full.contains_key(&gpu.uuid);
            if is_full != before.contains_key(&gpu.uuid) {
                changed.push((gpu.clone(), is_full));
            }
        }
        self.wait(now);
        changed
    }

    /// While a GPU is full, plans the next count after [`PERIOD`].
    fn wait(&mut self, now: CoreTime) {
        self.due = (!self.full.is_empty()).then(|| now + PERIOD);
    }
}

impl<S: Shell> Serving<'_, S> {
    /// Counts the clients on each GPU. If the control daemon answers but can't list its clients, this function ignores the
    /// failure, and the health check handles it.
    pub(super) async fn check_capacity(&mut self) -> Result<(), Failure> {
        // The time of the next count is set before the control daemon is asked, since the control daemon may not answer.
        self.run.capacity.wait(self.shell.now());
        let clients = match self.shell.clients(&self.run.servers.alive()).await {
            Ok(clients) => clients,
            Err(silence @ Failure::Silent(_)) => return Err(silence),
            Err(_) => return Ok(()),
        };
        if !self.list_is(&clients) {
            self.run.capacity.due = Some(self.shell.now() + PERIOD);
            return Ok(());
        }
        for (gpu, is_full) in self.run.capacity.count(&self.wanted.gpus, &clients, self.shell.now()) {
            let name = gpu.name();
            let text = if is_full {
                format!("GPU {name} is {}", self.run.capacity.full(&gpu.uuid))
            } else {
                format!("GPU {name} is no longer full: new clients can connect")
            };
            self.shell.tell(News::Event, text);
        }
        self.compare_servers();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use alloc::borrow::ToOwned;

    use super::*;

    const NOW: CoreTime = CoreTime::ZERO;

    fn gpu(uuid: &str, capacity: u32) -> ServedGpu {
        ServedGpu {
            uuid: uuid.to_owned(),
            id: None,
            sizes: BTreeMap::new(),
            memory_limit_mib: 0,
            limits_enforced: true,
            capacity,
            clients_listed: true,
        }
    }

    fn clients(on: &[(&str, usize)]) -> Vec<Client> {
        let client = |gpu: &str| Client { pid: 7, id: Some(1), server: 9, gpu_prefix: gpu.to_owned() };
        on.iter().flat_map(|(gpu, count)| core::iter::repeat_n(client(gpu), *count)).collect()
    }

    fn changed(changed: Vec<(ServedGpu, bool)>) -> Vec<(String, bool)> {
        changed.into_iter().map(|(gpu, is_full)| (gpu.uuid, is_full)).collect()
    }

    #[test]
    fn each_gpu_has_its_own_places() {
        let gpus = [gpu("GPU-1", 3), gpu("GPU-2", 2)];
        let mut capacity = Capacity::default();
        assert_eq!(changed(capacity.count(&gpus, &clients(&[("GPU-1", 2), ("GPU-2", 1)]), NOW)), []);
        assert_eq!(capacity.due, None);
        let two_full = [("GPU-2".to_owned(), true)];
        assert_eq!(changed(capacity.count(&gpus, &clients(&[("GPU-1", 2), ("GPU-2", 2)]), NOW)), two_full);
        assert!(capacity.full("GPU-2").starts_with("full: all 2 places") && capacity.due.is_some());
        assert_eq!(
            changed(capacity.count(&gpus, &clients(&[("GPU-1", 2), ("GPU-2", 3)]), NOW)),
            [],
            "no news"
        );
        let no_more = [("GPU-2".to_owned(), false)];
        assert_eq!(changed(capacity.count(&gpus, &clients(&[("GPU-2", 1)]), NOW)), no_more);
        assert_eq!(capacity.full("GPU-2"), "");
    }

    #[test]
    fn a_client_that_was_turned_away_is_believed_until_another_has_left() {
        let gpus = [gpu("GPU-1", 60)];
        let mut capacity = Capacity::default();
        assert!(!capacity.observe(&Meaning::ClientLeft(7), &gpus, NOW) && capacity.due.is_none());
        let refused = Meaning::ClientRefused { server: 9, capacity: 48 };
        assert!(capacity.observe(&refused, &gpus, NOW));
        assert!(!capacity.observe(&refused, &gpus, NOW), "once is enough");
        capacity.count(&gpus, &clients(&[("GPU-1", 47)]), NOW);
        assert!(capacity.full("GPU-1").starts_with("full: all 48 places"));
        capacity.observe(&Meaning::ClientLeft(7), &gpus, NOW);
        capacity.count(&gpus, &clients(&[("GPU-1", 46)]), NOW);
        assert_eq!(capacity.full("GPU-1"), "");
    }

    #[test]
    fn the_control_daemon_counts_where_nvml_lists_no_clients() {
        let gpus = [ServedGpu { clients_listed: false, ..gpu("GPU-1", 16) }, gpu("GPU-2", 48)];
        let mut capacity = Capacity::default();
        assert!(!capacity.observe(&Meaning::ClientAdmitted(7), &gpus[1..], NOW) && capacity.due.is_none());
        assert!(!capacity.observe(&Meaning::ClientAdmitted(7), &gpus, NOW) && capacity.due.is_some());
        assert_eq!(capacity.unlisted("GPU-1"), None, "not counted yet");
        capacity.count(&gpus, &clients(&[("GPU-1", 2), ("GPU-2", 1)]), NOW);
        assert_eq!(capacity.unlisted("GPU-1"), Some(1), "two contexts of one process");
        assert_eq!(capacity.unlisted("GPU-2"), None, "NVML lists them");
        assert_eq!(capacity.due, None);
        capacity.suspect(&gpus, &BTreeMap::new(), NOW);
        assert!(capacity.due.is_some());
        capacity.count(&gpus, &[], NOW);
        assert_eq!(capacity.unlisted("GPU-1"), Some(0));
    }
}
