//! The questions and acts that end clients' work. The service carries them out with NVIDIA's front end, the kernel and NVML.
//! The tests carry them out in memory.

use alloc::borrow::ToOwned;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use crate::mps::{Client, ServerStatus};
use crate::{CoreTime, GpuUuid, Permit};

/// The connections of a client to a server, by the numbers that the control daemon gives them. None stands for a connection
/// without a number.
pub type Connections = BTreeSet<Option<u64>>;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListedClient {
    /// The start time of the process that had the client's PID when the list was read. None if no process had the PID.
    pub started: Option<u64>,
    pub connections: Connections,
    /// The first characters of the UUIDs of the client's GPUs. An empty text stands for an unknown GPU.
    pub gpus: BTreeSet<String>,
}

impl ListedClient {
    /// Returns whether the client may use one of these GPUs. An unknown GPU may be any of them.
    pub fn may_be_on(&self, gpus: &[GpuUuid]) -> bool {
        self.gpus.iter().any(|prefix| gpus.iter().any(|uuid| uuid.starts_with(prefix.as_str())))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DaemonClients {
    /// None if this service has not started the control daemon, and therefore does not know its GPUs.
    pub gpus: Option<Vec<GpuUuid>>,
    /// The key has the PIDs of the server and of the client.
    pub clients: BTreeMap<(u32, u32), ListedClient>,
    /// The servers that handled a fatal GPU error when the list was made. The list may then lack clients.
    pub faulted: BTreeSet<u32>,
    /// True if another control daemon has listened in the control daemon's directory before or after the question, and may have
    /// answered the question.
    pub place_is_taken: bool,
}

/// The answer of a control daemon, or the reason, in words, why it has not listed its clients. None if the control daemon has
/// ended or has no server, and therefore has no client.
pub type ListAnswer = Result<Option<DaemonClients>, String>;

/// Groups connections by server and client, since a client of two GPUs has two connections. `started` returns the start time of
/// the process with a PID.
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

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientEnd {
    /// The client's GPU work has ended, and the program gets CUDA error 810. The client's connections stay listed until its
    /// next CUDA call, but are useless.
    Done,
    /// The server or the client does not exist any more, or the client has not connected to the server yet.
    NotThere,
    /// The server handles a fatal GPU error, so the service has done nothing.
    Faulted,
    /// The client is stopped and can't be continued, for this reason. The service has done nothing else.
    StaysStopped(String),
    /// The control daemon has not reported the status of the server, for this reason, so the service has done nothing.
    NotAsked(String),
    /// The control daemon has not answered, for this reason. The client's work may or may not have ended.
    NotKnown(String),
}

/// The clients of the control daemons that have answered. The second value is the first reason why clients may be missing.
pub fn known_clients<C>(listed: Vec<(C, ListAnswer)>) -> (Vec<(C, DaemonClients)>, Option<String>) {
    let (mut known, mut missing) = (Vec::new(), None);
    for (control, clients) in listed {
        match clients {
            Ok(Some(clients)) if clients.place_is_taken => {
                let why = "another control daemon listens in the pipe directory of a control daemon of this service";
                missing.get_or_insert_with(|| why.to_owned());
            }
            Ok(Some(clients)) => known.push((control, clients)),
            Ok(None) => {}
            Err(why) => _ = missing.get_or_insert(why),
        }
    }
    (known, missing)
}

/// The questions and acts that end clients' work. Each call has its own deadline, so no call waits forever. Errors are texts
/// for messages.
pub trait ClientShell: Send {
    /// Identifies one control daemon, to which questions and requests can be sent.
    type Control: Clone + Send + Sync;

    /// A handle of a process. The handle never refers to a later process with the same PID.
    type Held: Clone + Send + Sync;

    /// While this value exists, the service continues the process each time that a signal stops it.
    type GoingOn: Send;

    fn now(&self) -> CoreTime;

    fn pause(&mut self, duration: Duration) -> impl Future<Output = ()> + Send;

    /// Asks all control daemons for their clients at the same time. A hung control daemon thus does not use up the time of the
    /// other control daemons.
    fn list(&mut self) -> impl Future<Output = Vec<(Self::Control, ListAnswer)>> + Send;

    /// Returns a handle of the process that has this PID now. None if no process has the PID.
    ///
    /// # Errors
    /// The kernel does not give the handle.
    fn hold(&mut self, pid: u32) -> Result<Option<Self::Held>, String>;

    /// Returns whether the process lives. A zombie does not live.
    fn is_alive(&self, held: &Self::Held) -> bool;

    fn server_status(
        &mut self,
        control: &Self::Control,
        server: u32,
    ) -> impl Future<Output = Result<ServerStatus, String>> + Send;

    /// Continues a process that a signal has stopped or a control group has frozen.
    fn go_on(&mut self, held: &Self::Held) -> impl Future<Output = Result<Self::GoingOn, String>> + Send;

    /// Ends the GPU work of one client of a server; the server's other clients go on. The control daemon waits until the
    /// client's work has ended, and answers no other request meanwhile. The work of a stopped client would not end, so the
    /// caller gives the value `client`, which continues the client each time that a signal stops it.
    fn terminate_client(
        &mut self,
        control: &Self::Control,
        server: u32,
        client: Self::GoingOn,
        may_end: Permit,
    ) -> impl Future<Output = ClientEnd> + Send;
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
