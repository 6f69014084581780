//! The facts on which links depend, and the directories that contain the links. In the service the directories are on the disk;
//! in the tests they are in memory.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;

use crate::GpuUuid;

/// A socket, by its device and its inode number. A link to a socket works even after the socket was removed from its directory.
pub type SocketId = (u64, u64);

/// The reason, in words, why a directory can't be used, or a link can't be made or removed.
pub type Bad = String;

/// The part of an order that says where links to the control daemon should be. `D` is a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedLinks<D> {
    /// The pipe directory.
    pub pipe: D,
    /// The directory that contains the slices' directories, if slices have directories.
    pub slices_in: Option<D>,
    /// The slices that the control daemon should serve, by the names of their directories, each with its GPU.
    pub slices: BTreeMap<String, GpuUuid>,
    /// True if the control daemon takes no new client, since it ends once its last client has ended.
    pub retiring: bool,
}

/// The facts about a control daemon that runs, or may run, on which its links depend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linked<D> {
    pub pipe: D,
    /// True if the pipe directory contains a link, since the control daemon makes its socket in another directory. False if the
    /// socket itself is in the pipe directory.
    pub has_link: bool,
    /// The directory that contains a directory for each slice. The links in the directories of slices lead to the control daemon.
    pub slices_in: Option<D>,
    pub gpus: BTreeSet<GpuUuid>,
}

/// The slices that take no new client, since they are drained or their GPU needs a reset.
pub trait ClosedSlices {
    /// Returns true if all slices are closed, including those of a GPU that is added later.
    fn is_all(&self) -> bool;

    /// Returns whether the slice with a directory of this name is closed. None if no slice can have a directory of this name.
    fn closes(&self, directory: &str) -> Option<bool>;
}

/// The directories on the host. Each call changes or reads the directories at once.
pub trait Directories<D> {
    /// Finds the socket that the control daemon has made. Later calls make links to the socket that was found last. None if the
    /// socket does not exist.
    ///
    /// # Errors
    /// The directory of the socket can't be used.
    fn find_socket(&mut self) -> Result<Option<SocketId>, Bad>;

    /// Finds the waiting socket, and makes it if it does not exist. Later calls make links to the socket that was found last. A
    /// program that connects to the waiting socket waits, since the socket listens and no process accepts the connection.
    ///
    /// # Errors
    /// The socket can't be made.
    fn find_waiting_socket(&mut self) -> Result<SocketId, Bad>;

    /// Makes the link in the pipe directory point to the socket that was found last. Returns false if the link already pointed to
    /// this socket.
    ///
    /// # Errors
    /// The link can't be made.
    fn lead_pipe(&mut self, pipe: &D) -> Result<bool, Bad>;

    /// Removes the link from the pipe directory if it points to this socket.
    ///
    /// # Errors
    /// The link can't be removed.
    fn close_pipe(&mut self, pipe: &D, socket: SocketId) -> Result<(), Bad>;

    /// Opens the directory that contains the slices' directories, for the later calls about directories of slices. With `make`, a
    /// missing directory is made. Returns true if the directory exists.
    ///
    /// # Errors
    /// The directory can't be used.
    fn open_slices(&mut self, slices_in: &D, make: bool) -> Result<bool, Bad>;

    /// The names of the existing directories that can belong to slices, except those in `names`.
    fn other_slices(&self, names: &BTreeSet<String>) -> BTreeSet<String>;

    /// Makes the link in the directory of a slice point to the socket that was found last. Returns false if the link already
    /// pointed to this socket.
    ///
    /// # Errors
    /// The link can't be made.
    fn lead_slice(&mut self, name: &str) -> Result<bool, Bad>;

    /// Removes the link from the directory of a slice. With `only`, the link is removed only if it points to the socket `only`.
    ///
    /// # Errors
    /// The link can't be removed.
    fn close_slice(&mut self, name: &str, only: Option<SocketId>) -> Result<(), Bad>;

    /// Stops all programs except the service from changing the pipe directory.
    fn keep_pipe(&mut self, pipe: &D);

    /// Stops all programs except the service from changing the directories of these slices, which [`Self::open_slices`] has
    /// opened.
    fn keep_slices(&mut self, names: &BTreeSet<String>);

    /// Lets all users with the right to write change and remove a pipe directory and the directories of these slices again.
    fn release(&mut self, pipe: &D, slices_in: Option<&D>, names: &BTreeSet<String>);

    /// The path of the pipe directory or of a slice's directory, for messages.
    fn shown(&self, pipe: &D, slice: Option<&str>) -> String;
}
