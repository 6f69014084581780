//! The answers of control daemons, and the meanings of the lines in their logs.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Meaning {
    /// The line changes nothing for the service.
    Ordinary,
    /// The line reports a failure that has no variant of its own.
    Trouble,
    /// The line appears often in normal operation, for example whenever a client connects or disconnects.
    Noise,
    /// The control daemon starts a server for the user `uid`. `server` is the server's PID.
    ServerStarting { server: u32, uid: u32 },
    /// The server with this PID is ready for clients.
    ServerReady(u32),
    /// The server with this PID has ended.
    ServerExited { server: u32, status: i32 },
    /// The server that wrote the line limits its clients to this active thread percentage.
    ThreadPercentage {
        server: u32,
        /// In tenths of a percent: 250 for `25.0`.
        tenths: u32,
    },
    /// The server that wrote the line limits its clients to this much memory of one GPU.
    MemoryLimit {
        server: u32,
        /// The position of the GPU in the control daemon's list of GPUs, from 0.
        ordinal: usize,
        bytes: u64,
    },
    /// A fatal GPU error has hit this client. The client has not necessarily caused the error, since the error hits every
    /// client on the GPU.
    Fault {
        /// The server's PID.
        server: u32,
        client: u32,
    },
    /// After a fatal GPU error, the server ends every client on the GPUs with the error. The server recovers once these clients
    /// have ended.
    FaultHandling { server: u32 },
    /// The client loses its work because of a fatal GPU error of its server.
    TornDown {
        server: u32,
        client: u32,
        /// The position of the GPU in the control daemon's list of GPUs, from 0.
        ordinal: usize,
    },
    /// The client process with this PID has ended.
    ClientLeft(u32),
    /// A client waits for a server, most often until the server of another user is idle.
    ClientPending { client: u32, uid: u32 },
    /// The control daemon has assigned the client with this PID to a server.
    ClientAdmitted(u32),
    /// A server has refused a client, since the server already has as many clients as its capacity.
    ClientRefused {
        server: u32,
        /// The number of clients that the server can hold.
        capacity: u32,
    },
}

impl Meaning {
    pub fn is_of_servers(&self) -> bool {
        matches!(
            self,
            Self::ServerStarting { .. }
                | Self::ServerReady(_)
                | Self::ServerExited { .. }
                | Self::ThreadPercentage { .. }
                | Self::MemoryLimit { .. }
        )
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerStatus {
    Initializing,
    Active,
    /// A fatal GPU error has hit the server. The server takes no client until its present clients have ended.
    Fault,
    Gone,
    /// The control daemon does not know the command that asks for a server's status.
    Unsupported,
}

/// The PIDs of each server's clients. The key is the server's PID.
pub type ClientPids = BTreeMap<u32, BTreeSet<u32>>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client {
    /// The PID in the host's PID namespace.
    pub pid: u32,
    /// A number that the control daemon gives each connection: a process that connects again gets another number. None if the
    /// control daemon does not report the number.
    pub id: Option<u64>,
    pub server: u32,
    /// The first characters of the GPU's UUID. Empty if the control daemon does not report the GPU.
    pub gpu_prefix: String,
}

impl Client {
    pub fn is_on(&self, uuid: &str) -> bool {
        !self.gpu_prefix.is_empty() && uuid.starts_with(&self.gpu_prefix)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    pub thread_percentage: u8,
    /// The memory limits in MiB, by the GPU's position in the control daemon's list of GPUs.
    pub memory_mib: BTreeMap<usize, u64>,
    /// The positions of the GPUs on which MPS enforces limits. Servers write limits to the log only for these GPUs.
    pub enforced: BTreeSet<usize>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inspection {
    pub servers: Vec<u32>,
    /// The statuses of the servers that the service asked about, by PID.
    pub statuses: BTreeMap<u32, ServerStatus>,
    /// The limits in force that differ from the expected limits, in words. The key is a server's PID. The key None stands for
    /// the defaults, which are the limits of servers that start later.
    pub differences: BTreeMap<Option<u32>, String>,
}

impl Inspection {
    /// The status of a server that the service asked about. A control daemon that can't report statuses still lists its
    /// servers, so the result is [`ServerStatus::Gone`] for a server that is not in the list.
    pub fn status(&self, server: u32) -> ServerStatus {
        match self.statuses.get(&server) {
            Some(ServerStatus::Unsupported) if !self.servers.contains(&server) => ServerStatus::Gone,
            Some(status) => *status,
            None => ServerStatus::Gone,
        }
    }

    pub fn with(&self, wanted: &[ServerStatus]) -> impl Iterator<Item = u32> {
        self.statuses.keys().copied().filter(|server| wanted.contains(&self.status(*server)))
    }
}

#[cfg(test)]
mod tests {
    use alloc::borrow::ToOwned;

    use super::*;

    #[test]
    fn a_client_is_on_the_gpu_that_begins_like_its_own() {
        let on = |gpu_prefix: &str| {
            let gpu_prefix = gpu_prefix.to_owned();
            Client { pid: 1, id: None, server: 2, gpu_prefix }.is_on("GPU-76aef7ff-372d")
        };
        assert_eq!(["GPU-76aef7", "GPU-76aef8", ""].map(on), [true, false, false]);
    }

    #[test]
    fn only_lines_about_servers_and_their_limits_are_of_servers() {
        let of_servers = [
            Meaning::ServerStarting { server: 1, uid: 0 },
            Meaning::ServerReady(1),
            Meaning::ServerExited { server: 1, status: 0 },
            Meaning::ThreadPercentage { server: 1, tenths: 250 },
            Meaning::MemoryLimit { server: 1, ordinal: 0, bytes: 1 },
        ];
        assert!(of_servers.iter().all(Meaning::is_of_servers));
        let others = [Meaning::Ordinary, Meaning::Noise, Meaning::Trouble, Meaning::ClientAdmitted(1)];
        assert!(!others.iter().any(Meaning::is_of_servers));
    }
}
