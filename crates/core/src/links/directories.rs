//! The facts that links depend on, and the directories in which they are. The service has them in files, the tests' world in
//! memory.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;

use crate::GpuUuid;

/// A socket, by its device and its inode number. Links to it work even if it was removed from its directory.
pub type SocketId = (u64, u64);

/// Why a directory can't be used, or a link can't be made or taken away, in words.
pub type Bad = String;

/// The part of an order that says where links shall be. `D` is a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedLinks<D> {
    /// The pipe directory.
    pub pipe: D,
    /// The directory of the directories of slices, if there are any.
    pub slices_in: Option<D>,
    /// The slices by the names of their directories, each with its GPU.
    pub slices: BTreeMap<String, GpuUuid>,
    /// True if the control daemon takes no new client, since it ends as soon as it has none.
    pub retiring: bool,
}

/// A control daemon that runs, or may run, as far as links depend on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linked<D> {
    pub pipe: D,
    /// The pipe directory has a link: the control daemon makes its socket elsewhere.
    pub has_link: bool,
    /// The directory of the directories of slices that lead to it.
    pub slices_in: Option<D>,
    pub gpus: BTreeSet<GpuUuid>,
}

/// The slices that take no new client: they are drained, or their GPU needs a reset.
pub trait ClosedSlices {
    /// Returns whether all are closed, those of a GPU that comes later too.
    fn is_all(&self) -> bool;

    /// Returns whether the slice with a directory of this name is closed. None: no slice can have such a directory.
    fn closes(&self, directory: &str) -> Option<bool>;
}

/// The directories, as they are. Each call acts at once.
pub trait Directories<D> {
    /// Finds the socket that the control daemon has made, for the links that are made from now on. None if it is not there.
    ///
    /// # Errors
    /// Its directory can't be used.
    fn find_socket(&mut self) -> Result<Option<SocketId>, Bad>;

    /// Finds the waiting socket, for the links that are made from now on, and makes it if need be. A program that connects
    /// there waits, since the socket listens and no process accepts.
    ///
    /// # Errors
    /// It can't be made.
    fn find_waiting_socket(&mut self) -> Result<SocketId, Bad>;

    /// Makes the pipe directory lead to the socket that was found. Returns false if it already did.
    ///
    /// # Errors
    /// The link can't be made.
    fn lead_pipe(&mut self, pipe: &D) -> Result<bool, Bad>;

    /// Takes the link away from the pipe directory if it leads to this socket.
    ///
    /// # Errors
    /// The link can't be removed.
    fn close_pipe(&mut self, pipe: &D, socket: SocketId) -> Result<(), Bad>;

    /// Opens the directory of the directories of slices for the calls below, and makes it if need be. Returns true if it is
    /// there.
    ///
    /// # Errors
    /// It can't be used.
    fn open_slices(&mut self, slices_in: &D, make: bool) -> Result<bool, Bad>;

    /// The names of directories that slices can have, besides these.
    fn other_slices(&self, names: &BTreeSet<String>) -> BTreeSet<String>;

    /// Makes the directory of a slice lead to the socket that was found. Returns false if it already did.
    ///
    /// # Errors
    /// The link can't be made.
    fn lead_slice(&mut self, name: &str) -> Result<bool, Bad>;

    /// Takes the link away from the directory of a slice: any link, or only a link to this socket.
    ///
    /// # Errors
    /// The link can't be removed.
    fn close_slice(&mut self, name: &str, only: Option<SocketId>) -> Result<(), Bad>;

    /// Lets no other user change the pipe directory.
    fn keep_pipe(&mut self, pipe: &D);

    /// Lets no other user change the directories of these slices, which were opened.
    fn keep_slices(&mut self, names: &BTreeSet<String>);

    /// Lets people change and remove a pipe directory and the directories of these slices again.
    fn release(&mut self, pipe: &D, slices_in: Option<&D>, names: &BTreeSet<String>);

    /// The path, for people.
    fn shown(&self, pipe: &D, slice: Option<&str>) -> String;
}
