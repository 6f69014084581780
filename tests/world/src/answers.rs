//! The answers of a simulated control daemon to the service's questions.

use std::collections::{BTreeMap, BTreeSet};

use mps_core::mps::{ClientPids, Inspection, Limits, Meaning, ServerStatus};
use mps_core::serve::Said;

use super::mps::{Mps, Setting};

pub(crate) fn setting(limits: &Limits) -> Setting {
    let mib = [0, 1, 2].map(|ordinal| limits.memory_mib.get(&ordinal).copied().unwrap_or_default());
    Setting { percentage: limits.thread_percentage, mib }
}

/// Describes how a server's limits differ from the limits that the service wants. `None` means that they agree. Control daemons
/// round memory limits of 1 GiB or more down to whole GiB in their answers, so only the whole GiB of such limits are compared.
pub(crate) fn difference(found: Setting, limits: &Limits) -> Option<String> {
    let read_back = |mib: u64| if mib < 1024 { mib } else { mib >> 10 << 10 };
    let wanted = setting(limits);
    if found.percentage != wanted.percentage {
        return Some(format!("{} instead of {}", found.percentage, wanted.percentage));
    }
    let is_same = found.mib.map(read_back) == wanted.mib.map(read_back);
    (!is_same).then(|| format!("{:?} MiB instead of {:?}", found.mib, wanted.mib))
}

pub(crate) fn read_line(mps: &mut Mps) -> Option<Said> {
    mps.look_at_clients(false);
    let meaning = mps.log.get(mps.reader.position)?.clone();
    let is_news = mps.reader.position >= mps.reader.quiet_until;
    mps.reader.position += 1;
    if let (Meaning::TornDown { server, client, ordinal }, true) = (&meaning, is_news) {
        mps.reader.read.insert((*server, *ordinal, *client));
    }
    mps.note_line(&meaning);
    Some(Said { meaning, is_news })
}

impl Mps {
    /// Returns whether the service has read in the log that this server has ended.
    pub(crate) fn has_read_the_end_of(&self, pid: u32) -> bool {
        let of_server = |line: &&Meaning| match line {
            Meaning::ServerStarting { server, .. } | Meaning::ServerExited { server, .. } => *server == pid,
            _ => false,
        };
        let read = self.log.iter().take(self.reader.position);
        matches!(read.rev().find(of_server), Some(Meaning::ServerExited { .. }))
    }
}

pub(crate) fn inspect(mps: &mut Mps, asked: &[u32], limits: Option<&Limits>) -> Inspection {
    let status = |pid: &u32| {
        let known = mps.servers.get(pid).map_or(ServerStatus::Gone, |one| one.status);
        if mps.is_old { ServerStatus::Unsupported } else { known }
    };
    let statuses = asked.iter().map(|pid| (*pid, status(pid))).collect();
    let mut differences = BTreeMap::new();
    if let Some(limits) = limits {
        let servers = asked.iter().filter_map(|pid| Some((Some(*pid), mps.servers.get(pid)?.setting)));
        for (target, found) in [(None, mps.defaults)].into_iter().chain(servers) {
            differences.extend(difference(found, limits).map(|text| (target, text)));
        }
    }
    Inspection { servers: mps.servers.keys().copied().collect(), statuses, differences }
}

/// Returns the clients of each server, as the control daemon lists them. After a fatal GPU error the control daemon may list no
/// clients of the faulted server.
pub(crate) fn listed(mps: &mut Mps) -> ClientPids {
    let mut pids: ClientPids = mps.servers.keys().map(|pid| (*pid, BTreeSet::new())).collect();
    for (pid, client) in &mps.clients {
        if mps.servers.get(&client.server).is_some_and(|server| server.lists)
            && let Some(there) = pids.get_mut(&client.server)
        {
            there.insert(*pid);
        }
    }
    pids
}
