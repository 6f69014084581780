//! The servers of one control daemon, according to the lines in the log.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use crate::mps::{Limits, Meaning};

/// The longest time until a new server is ready. Measured: 0.15 s for a server with one GPU. A server opens its GPUs one after
/// the other.
pub(super) const SERVER_TIMEOUT: Duration = Duration::from_secs(60);

/// The longest pause between two questions about the status of a new server. Usually a line in the log says sooner that the
/// server is ready.
pub(super) const SERVER_PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Server {
    /// The number of the server in the order in which servers started.
    number: u64,
    pub(super) ready: bool,
    /// True if the service has learned of the server's end without the log. Until the control daemon notices the end too, the
    /// control daemon lists the server, and does not log its end.
    pub(super) has_ended: bool,
    pub(super) exit_status: Option<i32>,
    /// The user for whom the control daemon has started the server. None if the log has not reported the user.
    uid: Option<u32>,
    thread_tenths: Option<u32>,
    pub(super) memory_bytes: BTreeMap<usize, u64>,
}

/// The servers by PID. A server that has ended stays in this record for a while, since its exit status explains the start of
/// the next server.
#[derive(Debug, Default)]
pub(super) struct Servers {
    known: BTreeMap<u32, Server>,
    came: u64,
}

const KEPT: usize = 8;

impl Servers {
    pub(super) fn get(&self, pid: u32) -> Option<&Server> {
        self.known.get(&pid)
    }

    /// The server with this PID, unless it has ended.
    pub(super) fn running(&self, pid: u32) -> Option<&Server> {
        self.get(pid).filter(|server| server.is_running())
    }

    fn entry(&mut self, pid: u32) -> &mut Server {
        self.known.entry(pid).or_insert_with(|| {
            self.came += 1;
            Server { number: self.came, ..Server::default() }
        })
    }

    /// The servers in the order of their start. Their PIDs can't tell this order, since PIDs wrap around.
    fn in_order(&self) -> Vec<(u32, &Server)> {
        let mut servers: Vec<_> = self.known.iter().map(|(pid, server)| (*pid, server)).collect();
        servers.sort_by_key(|(_, server)| server.number);
        servers
    }

    /// The PIDs of the servers that have not ended, the newest last.
    pub(super) fn alive(&self) -> Vec<u32> {
        let servers = self.in_order().into_iter();
        servers.filter(|(_, server)| server.is_running()).map(|(pid, _)| pid).collect()
    }

    pub(super) fn ready(&self) -> Vec<u32> {
        self.alive().into_iter().filter(|pid| self.get(*pid).is_some_and(|server| server.ready)).collect()
    }

    /// The user for whom the newest running server was started. None if the log has not reported the user.
    pub(super) fn user_served(&self) -> Option<u32> {
        let alive = self.in_order().into_iter().rev().find(|(_, server)| server.is_running());
        alive.and_then(|(_, server)| server.uid)
    }

    /// The newest of the servers that have ended.
    pub(super) fn last_ended(&self) -> Option<(u32, &Server)> {
        self.in_order().into_iter().rev().find(|(_, server)| !server.is_running())
    }

    /// Forgets all servers that are not in `alive`, and adds the servers in `alive` that are not known yet.
    pub(super) fn keep(&mut self, alive: &[u32]) {
        self.known.retain(|pid, _| alive.contains(pid));
        for pid in alive {
            self.entry(*pid);
        }
    }

    /// Forgets the servers whose end the log has reported. For each other ended server, the report is still to come.
    pub(super) fn forget_ended(&mut self) {
        self.known.retain(|_, server| server.exit_status.is_none());
    }

    pub(super) fn keep_running(&mut self) {
        self.known.retain(|_, server| server.is_running());
    }

    fn forget(&mut self, pid: u32) {
        self.known.remove(&pid);
    }

    pub(super) fn has_ended(&mut self, pid: u32) {
        if let Some(server) = self.known.get_mut(&pid) {
            server.has_ended = true;
        }
    }

    /// Forgets the limits that a server has written to the log, since the service is about to set other limits.
    pub(super) fn expect_limits(&mut self, pid: u32) {
        let Some(server) = self.known.get_mut(&pid) else { return };
        server.memory_bytes.clear();
        // A server does not log a thread percentage that is set while it runs. The percentage is unknown until the control
        // daemon confirms it.
        server.thread_tenths = None;
    }

    pub(super) fn thread_percentage_answered(&mut self, pid: u32, percentage: u8) {
        if let Some(server) = self.known.get_mut(&pid) {
            server.thread_tenths = Some(u32::from(percentage) * 10);
        }
    }

    pub(super) fn observe(&mut self, meaning: &Meaning) {
        match meaning {
            Meaning::ServerStarting { server, uid } => {
                self.forget(*server);
                self.entry(*server).uid = Some(*uid);
            }
            Meaning::ServerReady(server) => self.entry(*server).ready = true,
            Meaning::ServerExited { server, status } => self.entry(*server).exit_status = Some(*status),
            Meaning::ThreadPercentage { server, tenths } => self.entry(*server).thread_tenths = Some(*tenths),
            Meaning::MemoryLimit { server, ordinal, bytes } => {
                self.entry(*server).memory_bytes.insert(*ordinal, *bytes);
            }
            _ => {}
        }
        while self.known.len() > KEPT
            && let Some((oldest, _)) = self.in_order().first().copied()
        {
            self.forget(oldest);
        }
    }
}

impl Server {
    pub(super) fn is_running(&self) -> bool {
        !self.has_ended && self.exit_status.is_none()
    }

    /// Returns whether the log has a value for each of these limits. The logged values may differ from `limits`.
    pub(super) fn has_written(&self, limits: &Limits) -> bool {
        self.thread_tenths.is_some() && limits.enforced.iter().all(|gpu| self.memory_bytes.contains_key(gpu))
    }

    /// The first limit in the server's log lines that differs from `limits`, in words. None if no limit differs.
    pub(super) fn differs_from(&self, limits: &Limits) -> Option<String> {
        let percentage = limits.thread_percentage;
        if let Some(tenths) = self.thread_tenths.filter(|tenths| *tenths != u32::from(percentage) * 10) {
            let (whole, tenth) = (tenths / 10, tenths % 10);
            return Some(format!(
                "active thread percentage {whole}.{tenth} is in force instead of {percentage}"
            ));
        }
        limits.memory_mib.iter().filter(|(ordinal, _)| limits.enforced.contains(ordinal)).find_map(
            |(ordinal, mib)| {
                let bytes = *self.memory_bytes.get(ordinal)?;
                (bytes != mib << 20).then(|| {
                format!(
                    "device pinned memory limit {found_mib} MiB is in force on device {ordinal} instead of \
                     {mib} MiB", found_mib = bytes >> 20)
            })
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Meaning::{MemoryLimit, ServerExited, ServerReady, ServerStarting, ThreadPercentage};

    fn servers(lines: &[Meaning]) -> Servers {
        let mut servers = Servers::default();
        for line in lines {
            servers.observe(line);
        }
        servers
    }

    fn limits() -> Limits {
        Limits { thread_percentage: 25, memory_mib: [(0, 35942)].into(), enforced: [0].into() }
    }

    #[test]
    fn limits_count_once_all_are_written_and_exact() {
        let mut servers = servers(&[
            ServerStarting { server: 9, uid: 0 },
            ServerReady(9),
            ThreadPercentage { server: 9, tenths: 250 },
        ]);
        assert!(!servers.get(9).unwrap().has_written(&limits()));
        servers.observe(&MemoryLimit { server: 9, ordinal: 0, bytes: 35942 << 20 });
        assert!(servers.get(9).unwrap().has_written(&limits()));
        assert_eq!(servers.get(9).unwrap().differs_from(&limits()), None);
        servers.observe(&MemoryLimit { server: 9, ordinal: 0, bytes: 35 << 30 });
        let difference = servers.get(9).unwrap().differs_from(&limits()).unwrap();
        assert!(difference.contains("35840 MiB is in force"), "{difference}");
    }

    #[test]
    fn the_newest_need_not_have_the_highest_pid() {
        let servers = servers(&[
            ServerReady(4_194_300),
            ServerReady(310),
            ServerReady(300),
            ServerExited { server: 4_194_300, status: 1 },
            ServerExited { server: 310, status: 0 },
        ]);
        assert_eq!(servers.alive(), [300]);
        assert_eq!(servers.last_ended().map(|(pid, server)| (pid, server.exit_status)), Some((310, Some(0))));
    }

    #[test]
    fn the_oldest_are_forgotten_first() {
        let mut servers = servers(&[]);
        for pid in (100..).take(KEPT).chain([7]) {
            servers.observe(&ServerReady(pid));
        }
        assert_eq!(servers.alive().len(), KEPT);
        assert_eq!((servers.alive().first(), servers.alive().last()), (Some(&101), Some(&7)));
    }

    #[test]
    fn the_gone_are_told_from_the_living() {
        let servers = servers(&[ServerReady(9), ServerExited { server: 9, status: 1 }, ServerReady(12)]);
        assert_eq!(servers.alive(), [12]);
        assert_eq!(servers.user_served(), None, "it was not seen to start");
        assert_eq!(servers.last_ended().map(|(pid, server)| (pid, server.exit_status)), Some((9, Some(1))));
    }
}
