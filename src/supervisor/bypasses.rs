//! Watches for processes that use the GPUs of a control daemon without its servers.

use std::collections::BTreeSet;

use tokio::time::Instant;

use crate::message::{Message, Subject};
use crate::supervisor::bypass::{self, Bypass, CONFIRM_AFTER};
use common::host::compute_mode::SERVED;
use common::membership::Slices;

use super::Worker;
use super::run::Run;

/// The bypasses of the last look.
#[derive(Debug, Default)]
pub(super) struct Bypasses {
    seen: Vec<SeenBypass>,
    /// The time of the second look.
    pub(super) due: Option<Instant>,
}

#[derive(Debug)]
struct SeenBypass {
    bypass: Bypass,
    since: Instant,
    confirmed: bool,
}

impl Bypasses {
    /// Records the bypasses that were found, and returns the ones that are confirmed now.
    fn confirm(&mut self, found: Vec<Bypass>, now: Instant) -> Vec<Bypass> {
        let known = std::mem::take(&mut self.seen);
        self.seen = found
            .into_iter()
            .map(|bypass| {
                let before = known.iter().find(|seen| seen.bypass.is(&bypass));
                let since = before.map_or(now, |seen| seen.since);
                SeenBypass { bypass, since, confirmed: before.is_some() && now >= since + CONFIRM_AFTER }
            })
            .collect();
        let unconfirmed = self.seen.iter().filter(|seen| !seen.confirmed);
        self.due = unconfirmed.map(|seen| seen.since + CONFIRM_AFTER).min();
        let confirmed = self.seen.iter().filter(|seen| seen.confirmed);
        confirmed.map(|seen| seen.bypass.clone()).collect()
    }
}

impl Worker {
    /// Looks for bypasses among the processes that were last read, on the GPUs of the control daemon alone: a GPU that it goes
    /// without may be another's, with servers and clients of its own. The control daemon is asked only if there are processes
    /// besides the known servers. If it does not name its clients, the last result is kept. Without a control daemon,
    /// processes that NVML lists as clients are no bypasses.
    pub(super) async fn find_bypasses(&mut self, run: Option<(&Run, &[u32])>, has: impl Fn(&String) -> bool) {
        let mut processes = std::mem::take(&mut self.processes);
        processes.retain(|uuid, _| has(uuid));
        let all = || processes.values().flatten();
        let mut servers = run.map(|(_, servers)| servers.to_vec()).unwrap_or_default();
        let mut clients: BTreeSet<u32> =
            all().filter(|process| process.via_mps).map(|process| process.pid).collect();
        if let Some((run, _)) = run {
            run.known_clients.remember(clients.iter().copied(), || Slices::from_plans([&self.order.plan]));
        }
        let others = all().any(|process| !servers.contains(&process.pid));
        if let Some((run, _)) = run.filter(|_| others) {
            match bypass::ours(&run.control, &servers).await {
                Ok(ours) => (servers, clients) = ours,
                Err(error) => return tracing::debug!("not known who bypasses the control daemon: {error}"),
            }
        }
        let found =
            processes.iter().flat_map(|(uuid, processes)| bypass::find(uuid, processes, &servers, &clients));
        let confirmed = self.bypasses.confirm(found.collect(), Instant::now());
        let status = self.reporter.status();
        for gpu in &self.order.plan.gpus {
            let (uuid, name) = (&gpu.uuid, gpu.name());
            let now: Vec<Bypass> =
                confirmed.iter().filter(|bypass| bypass.gpu_uuid == *uuid).cloned().collect();
            let there = processes.get(uuid).map(Vec::as_slice).unwrap_or_default();
            let server_there = there.iter().any(|process| servers.contains(&process.pid));
            let Some(known) = status.gpus.get(uuid) else { continue };
            let before = &known.bypasses;
            let missing_in = |list: &[Bypass], bypass: &Bypass| !list.iter().any(|one| one.is(bypass));
            let come: Vec<&Bypass> = now.iter().filter(|bypass| missing_in(before, bypass)).collect();
            let gone: Vec<&Bypass> = before.iter().filter(|bypass| missing_in(&now, bypass)).collect();
            if !come.is_empty() {
                let who = bypass::describe(come);
                let text = format!("GPU {name} is used without our MPS server by {who}");
                self.reporter.report(Message::Bypass, Subject::gpu(uuid), text);
            }
            if !gone.is_empty() {
                let who = bypass::describe(gone);
                self.reporter.event(format!("GPU {name} is no longer used without our MPS server by {who}"));
            }
            self.reporter.update_gpu(uuid, |gpu| {
                gpu.server_kept_out = !now.is_empty() && !server_there && known.compute_mode == Some(SERVED);
                // Memory comes and goes; who it is has not changed by that.
                if gpu.bypasses.len() != now.len() || now.iter().any(|one| missing_in(&gpu.bypasses, one)) {
                    gpu.bypasses = now;
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use common::host::identity::Identity;

    fn bypass(pid: u32) -> Bypass {
        Bypass {
            gpu_uuid: "GPU-1".to_owned(),
            process: Identity { pid, start_time: 7 },
            command: "work".to_owned(),
            memory_mib: None,
        }
    }

    #[test]
    fn it_takes_two_looks_with_time_between() {
        let mut bypasses = Bypasses::default();
        let start = Instant::now();
        let soon = start + CONFIRM_AFTER / 2;
        let later = start + CONFIRM_AFTER;
        assert_eq!(bypasses.confirm(vec![bypass(1), bypass(2)], start), []);
        assert_eq!(bypasses.due, Some(later));
        // One is gone again at once; the other is still too new, and a third one comes.
        assert_eq!(bypasses.confirm(vec![bypass(2), bypass(3)], soon), []);
        assert_eq!(bypasses.due, Some(later));
        assert_eq!(bypasses.confirm(vec![bypass(2), bypass(3)], later), [bypass(2)]);
        assert_eq!(bypasses.due, Some(soon + CONFIRM_AFTER));
        let end = later + Duration::from_secs(30);
        assert_eq!(bypasses.confirm(vec![bypass(2), bypass(3)], end), [bypass(2), bypass(3)]);
        assert_eq!(bypasses.due, None, "nobody is looked for where nobody is new");
        assert_eq!(bypasses.confirm(Vec::new(), end), []);
    }

    #[test]
    fn the_next_process_with_the_same_pid_is_another() {
        let mut bypasses = Bypasses::default();
        let start = Instant::now();
        bypasses.confirm(vec![bypass(1)], start);
        let mut other = bypass(1);
        other.process.start_time += 1;
        assert_eq!(bypasses.confirm(vec![other], start + CONFIRM_AFTER), []);
    }
}
