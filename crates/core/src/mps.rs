//! The answers of control daemons, and the meanings of the lines in their logs.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

/// The meaning of a line in the log of a control daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Meaning {
    /// The line changes nothing that the service knows.
    Ordinary,
    /// The line reports a failure that has no variant of its own.
    Trouble,
    /// The line appears in normal operation, for example whenever a client comes or goes.
    Noise,
    /// The control daemon starts a server for a user.
    ServerStarting { server: u32, uid: u32 },
    /// A server is ready for clients.
    ServerReady(u32),
    /// A server has ended.
    ServerExited { server: u32, status: i32 },
    /// The server that wrote the line limits its clients to this active thread percentage.
    ThreadPercentage {
        server: u32,
        /// Tenths of a percent: `25.0` is 250.
        tenths: u32,
    },
    /// The server that wrote the line limits its clients to this much memory of one GPU.
    MemoryLimit {
        server: u32,
        /// The number of the GPU in the control daemon's list of GPUs.
        ordinal: usize,
        /// The limit, in bytes.
        bytes: u64,
    },
    /// A client met a fatal GPU error. The client did not necessarily cause the error, which hits every client on the GPU.
    Fault {
        /// The server's PID.
        server: u32,
        client: u32,
    },
    /// A server ends every client on the GPUs with the error. The server recovers after the clients on the GPUs with the error
    /// have ended.
    FaultHandling { server: u32 },
    /// A client loses its work because of a fault.
    TornDown {
        /// The server's PID.
        server: u32,
        client: u32,
        /// The number of the GPU in the control daemon's list of GPUs.
        ordinal: usize,
    },
    /// A client process has ended.
    ClientLeft(u32),
    /// A client waits, most often until the server of another user is idle.
    ClientPending { client: u32, uid: u32 },
    /// The control daemon assigns a client to a server.
    ClientAdmitted(u32),
    /// A server has refused a client, since the server has as many clients as it can hold.
    ClientRefused {
        /// The server's PID.
        server: u32,
        /// The number of clients that the server can hold.
        capacity: u32,
    },
}

impl Meaning {
    /// Returns whether the line reports that a server starts, is ready or ends, or reports the limits of a server.
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

/// The status of a server, as its control daemon reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerStatus {
    /// The server is starting, and takes no clients yet.
    Initializing,
    /// The server takes clients.
    Active,
    /// The server met a fatal GPU error. The server takes no client until its present clients have ended.
    Fault,
    /// The server has ended.
    Gone,
    /// The control daemon does not know the command that asks for the status.
    Unsupported,
}

/// Servers, each with the PIDs of its clients.
pub type ClientPids = BTreeMap<u32, BTreeSet<u32>>;

/// A connection of a client to a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client {
    /// The client's PID on the host.
    pub pid: u32,
    /// The number that distinguishes the client's connections: a process that connects again gets another number. None if the
    /// control daemon does not give a number.
    pub id: Option<u64>,
    /// The server's PID.
    pub server: u32,
    /// The beginning of the GPU's UUID. Empty if the control daemon does not give the UUID.
    pub gpu_prefix: String,
}

impl Client {
    /// Returns whether the client uses the GPU with this UUID.
    pub fn is_on(&self, uuid: &str) -> bool {
        !self.gpu_prefix.is_empty() && uuid.starts_with(&self.gpu_prefix)
    }
}

/// The limits for the clients of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// The active thread percentage.
    pub thread_percentage: u8,
    /// The memory limit of each GPU in MiB, by the GPU's ordinal.
    pub memory_mib: BTreeMap<usize, u64>,
    /// The ordinals of the GPUs that enforce limits. The servers' logs name only these GPUs.
    pub enforced: BTreeSet<usize>,
}

/// The state of a control daemon and its servers at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inspection {
    /// The PIDs of all servers.
    pub servers: Vec<u32>,
    /// The statuses of the servers that the service asked about, by PID.
    pub statuses: BTreeMap<u32, ServerStatus>,
    /// The limits in force that differ from the expected limits, in words. The key is the PID of a server that the service asked
    /// about, or None for the defaults, which are the limits of servers that are started later.
    pub differences: BTreeMap<Option<u32>, String>,
}

impl Inspection {
    /// The status of a server that the service asked about. For a control daemon that can't report statuses, the returned status
    /// says only if the server exists.
    pub fn status(&self, server: u32) -> ServerStatus {
        match self.statuses.get(&server) {
            Some(ServerStatus::Unsupported) if !self.servers.contains(&server) => ServerStatus::Gone,
            Some(status) => *status,
            None => ServerStatus::Gone,
        }
    }

    /// The servers that have one of these statuses.
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
