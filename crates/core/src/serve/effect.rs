//! The effects of serving: acts without a result.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

use crate::GpuUuid;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunEffect {
    /// Continue the control daemon and these servers if a signal has stopped them, and write a message about it to the journal.
    ContinueIfStopped(Vec<u32>),
    /// Make the links point to the control daemon again, and not to the waiting socket.
    ReopenWays,
    /// Let the programs go on that wait at the waiting socket. Each of these programs starts without MPS, unless the driver
    /// refuses it since a server has the GPU.
    LetGo,
    /// Update the state file and the published facts about the process.
    KeepStateFile {
        /// True if the running control daemon can serve the order, so that it is not about to be replaced. The service then
        /// also reports if the control daemon's log can't be written.
        stays: bool,
    },
    RotateLog,
    /// Report the clients that a fatal GPU error of a server has hit on one GPU.
    TellHit {
        server: u32,
        /// The position of the GPU in the control daemon's list of GPUs.
        ordinal: usize,
        clients: Vec<u32>,
    },
    ClientCame(u32),
    /// Find out the owners of these clients, so that a later message can name the owners.
    RememberClients(BTreeSet<u32>),
    /// Record the clients that the control daemon lists, each with the GPUs that it is known to use.
    ClientsAre(BTreeMap<u32, BTreeSet<GpuUuid>>),
    /// Make the tasks that watch the budgets of slices look at the clients on the GPUs. A check has found clients, or has found
    /// that the last client has ended.
    CheckedInUse,
    /// From now on, an [`super::Occurrence::ServerEnded`] reports the end of this server.
    WatchServer(u32),
    /// Answer the last request.
    Answer(Result<(), String>),
}
