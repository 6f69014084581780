//! Everything that the end of clients' work asks of the outside. The service carries it out with front ends, the kernel and
//! NVML; the tests' world carries it out in memory.

use alloc::borrow::ToOwned;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use crate::mps::{Client, ServerStatus};
use crate::{CoreTime, GpuUuid, Permit};

/// The connections of a client, by the numbers that its control daemon gives them.
pub type Connections = BTreeSet<Option<u64>>;

/// A client as its control daemon lists it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListedClient {
    /// When the process was started that had its PID as soon as it was listed. None: it had ended.
    pub started: Option<u64>,
    pub connections: Connections,
    /// The beginnings of the UUIDs of its GPUs. An empty one stands for a GPU that is not known.
    pub gpus: BTreeSet<String>,
}

impl ListedClient {
    /// True if it may use one of these GPUs.
    pub fn may_be_on(&self, gpus: &[GpuUuid]) -> bool {
        self.gpus.iter().any(|prefix| gpus.iter().any(|uuid| uuid.starts_with(prefix.as_str())))
    }
}

/// The clients of a control daemon at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DaemonClients {
    /// The GPUs of the control daemon. None: they are not known, since it is not ours.
    pub gpus: Option<Vec<GpuUuid>>,
    /// The clients, by server and PID.
    pub clients: BTreeMap<(u32, u32), ListedClient>,
    /// The servers that handled a fatal GPU error when the list was made. The list may name no client then.
    pub faulted: BTreeSet<u32>,
    /// Another control daemon has listened in its place, before or after, and may have answered.
    pub place_is_taken: bool,
}

/// Why a control daemon has not said which clients it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownClients {
    /// The reason.
    pub why: String,
    /// True if the control daemon has ended, or has no server, so it has no client.
    pub has_no_server: bool,
}

/// Groups connections by server and PID. A client of two GPUs has two lines. `started` gives the start time of the process with
/// a PID.
pub fn by_client(
    connections: Vec<Client>,
    started: impl Fn(u32) -> Option<u64>,
) -> BTreeMap<(u32, u32), ListedClient> {
    let mut clients: BTreeMap<_, ListedClient> = BTreeMap::new();
    for Client { pid, id, server, gpu_prefix } in connections {
        let new = || ListedClient { started: started(pid), ..ListedClient::default() };
        let one = clients.entry((server, pid)).or_insert_with(new);
        one.connections.insert(id);
        one.gpus.insert(gpu_prefix);
    }
    clients
}

/// The answer of a control daemon that was asked to end a client's GPU work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TerminateAnswer {
    /// The client's GPU work has ended. The program gets CUDA error 810.
    Done,
    /// The control daemon has no such client.
    NoSuchClient,
    /// The control daemon has no such server.
    NoSuchServer,
}

/// The clients that control daemons have listed, each behind its control daemon, and the first reason why some may be missing.
pub fn known_clients<C>(
    listed: Vec<(C, Result<DaemonClients, UnknownClients>)>,
) -> (Vec<(C, DaemonClients)>, Option<String>) {
    let (mut known, mut missing) = (Vec::new(), None);
    for (control, clients) in listed {
        match clients {
            Ok(clients) if clients.place_is_taken => {
                let why = "another control daemon listens in the pipe directory of one of ours";
                missing.get_or_insert_with(|| why.to_owned());
            }
            Ok(clients) => known.push((control, clients)),
            Err(UnknownClients { has_no_server: true, .. }) => {}
            Err(UnknownClients { why, .. }) => _ = missing.get_or_insert(why),
        }
    }
    (known, missing)
}

/// Carries out all that the end of clients' work takes. Each call comes back: it has a deadline of its own. Errors are words.
pub trait ClientShell: Send {
    /// The way to a control daemon.
    type Control: Clone + Send + Sync;

    /// A hold on a process: it stays this process, whatever becomes of its PID.
    type Held: Clone + Send + Sync;

    /// A process that was continued, and is continued each time that something stops it until this value is dropped.
    type GoingOn: Send;

    /// The present moment.
    fn now(&self) -> CoreTime;

    /// Waits.
    fn pause(&mut self, duration: Duration) -> impl Future<Output = ()> + Send;

    /// The clients of every control daemon. All are asked at once: a control daemon that hangs must not use up the time of the
    /// others.
    fn list(
        &mut self,
    ) -> impl Future<Output = Vec<(Self::Control, Result<DaemonClients, UnknownClients>)>> + Send;

    /// Holds the process that has this PID now. None if there is none.
    ///
    /// # Errors
    /// The kernel refuses.
    fn hold(&mut self, pid: u32) -> Result<Option<Self::Held>, String>;

    /// True if the process lives. A zombie does not.
    fn is_alive(&self, held: &Self::Held) -> bool;

    /// The status of a server.
    fn server_status(
        &mut self,
        control: &Self::Control,
        server: u32,
    ) -> impl Future<Output = Result<ServerStatus, String>> + Send;

    /// Continues a process if a signal or a control group stops it.
    ///
    /// # Errors
    /// It stays stopped.
    fn go_on(&mut self, held: &Self::Held) -> impl Future<Output = Result<Self::GoingOn, String>> + Send;

    /// Ends the GPU work of one client of a server and leaves the server's other clients alone. The control daemon waits for
    /// the client meanwhile, and all callers wait for the control daemon. So this takes a client that goes on.
    ///
    /// # Errors
    /// There is no answer: the client's work may have ended or not.
    fn terminate_client(
        &mut self,
        control: &Self::Control,
        server: u32,
        client: Self::GoingOn,
        may_end: Permit,
    ) -> impl Future<Output = Result<TerminateAnswer, String>> + Send;
}

#[cfg(test)]
mod tests {
    use alloc::borrow::ToOwned;
    use alloc::vec;

    use super::*;

    #[test]
    fn a_client_is_listed_once_with_all_its_connections() {
        let line =
            |pid, id, server, gpu: &str| Client { pid, id: Some(id), server, gpu_prefix: gpu.to_owned() };
        let lines = vec![line(1, 10, 7, "A"), line(1, 11, 7, "B"), line(1, 12, 8, "A"), line(2, 13, 7, "A")];
        let one = |pid: u32, ids: &[u64], gpus: &[&str]| ListedClient {
            started: Some(u64::from(pid) * 100),
            connections: ids.iter().map(|id| Some(*id)).collect(),
            gpus: gpus.iter().map(|gpu| (*gpu).to_owned()).collect(),
        };
        let listed = [
            ((7, 1), one(1, &[10, 11], &["A", "B"])),
            ((7, 2), one(2, &[13], &["A"])),
            ((8, 1), one(1, &[12], &["A"])),
        ];
        assert_eq!(by_client(lines, |pid| Some(u64::from(pid) * 100)), listed.into());
    }
}
