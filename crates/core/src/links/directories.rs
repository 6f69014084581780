//! The facts that decide the links to a control daemon, and the trait for the directories that contain the links. In tests, the
//! directories are in memory.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;

use crate::GpuUuid;

/// A socket, as its device and its inode number. The links to a socket are hard links, so they work even after the socket was
/// removed from its own directory.
pub type SocketId = (u64, u64);

/// The reason, in words, why a directory can't be used, or a link can't be made or removed.
pub type Bad = String;

/// The links that an order asks for. `D` is the path of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedLinks<D> {
    pub pipe: D,
    /// The directory that contains the slices' directories. None if slices have no directories.
    pub slices_in: Option<D>,
    /// The slices that the control daemon should serve. The key is the name of the slice's directory, and the value is the
    /// slice's GPU.
    pub slices: BTreeMap<String, GpuUuid>,
    /// True if the control daemon takes no new client, and ends once its last client has ended.
    pub retiring: bool,
}

/// The facts about a control daemon that decide its links. The control daemon runs, or may run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linked<D> {
    pub pipe: D,
    /// True if the control daemon makes its socket in another directory, and the pipe directory has a link to the socket. False
    /// if the socket itself is in the pipe directory.
    pub has_link: bool,
    /// The directory that contains the slices' directories. The links in the slices' directories point to the control daemon.
    /// None if slices have no directories.
    pub slices_in: Option<D>,
    pub gpus: BTreeSet<GpuUuid>,
}

/// The slices that take no new client: drained slices, and slices of a GPU that needs a reset.
pub trait ClosedSlices {
    /// Returns true if all slices are closed, including slices of a GPU that is added later.
    fn is_all(&self) -> bool;

    /// Returns whether the slice with a directory of this name is closed. None if no slice can have a directory of this name.
    fn closes(&self, directory: &str) -> Option<bool>;
}

/// The directories on the host. Each call takes effect at once.
pub trait Directories<D> {
    /// Finds the socket that the control daemon has made. None if the socket does not exist. [`Self::lead_pipe`] and
    /// [`Self::lead_slice`] then make links to this socket.
    ///
    /// # Errors
    /// The directory of the socket can't be used.
    fn find_socket(&mut self) -> Result<Option<SocketId>, Bad>;

    /// Finds the waiting socket, or makes it. The waiting socket listens, but no process accepts connections, so a program that
    /// connects to it waits. [`Self::lead_pipe`] and [`Self::lead_slice`] then make links to this socket.
    ///
    /// # Errors
    /// The socket can't be made.
    fn find_waiting_socket(&mut self) -> Result<SocketId, Bad>;

    /// Makes the link in the pipe directory point to the socket that was found last. Returns false if the link already pointed
    /// there.
    ///
    /// # Errors
    /// The link can't be made.
    fn lead_pipe(&mut self, pipe: &D) -> Result<bool, Bad>;

    /// Removes the link from the pipe directory if it points to this socket.
    ///
    /// # Errors
    /// The link can't be removed.
    fn close_pipe(&mut self, pipe: &D, socket: SocketId) -> Result<(), Bad>;

    /// Opens the directory that contains the slices' directories, for the later calls that name a slice. With `make`, a missing
    /// directory is made. Returns true if the directory exists.
    ///
    /// # Errors
    /// The directory can't be used.
    fn open_slices(&mut self, slices_in: &D, make: bool) -> Result<bool, Bad>;

    /// The names of the existing directories that can belong to slices, without the names in `names`. If there may be more such
    /// directories, the reason says why.
    fn other_slices(&self, names: &BTreeSet<String>) -> (BTreeSet<String>, Option<Bad>);

    /// Makes the link in the directory of a slice point to the socket that was found last. Returns false if the link already
    /// pointed there.
    ///
    /// # Errors
    /// The link can't be made.
    fn lead_slice(&mut self, name: &str) -> Result<bool, Bad>;

    /// Removes the link from the directory of a slice. With `only`, the link is removed only if it points to the socket `only`.
    ///
    /// # Errors
    /// The link can't be removed.
    fn close_slice(&mut self, name: &str, only: Option<SocketId>) -> Result<(), Bad>;

    /// Protects the pipe directory, so that only the service can change it until [`Self::release`].
    fn keep_pipe(&mut self, pipe: &D);

    /// Protects the directories of these slices, so that only the service can change them until [`Self::release`].
    /// [`Self::open_slices`] must have opened the directory that contains them.
    fn keep_slices(&mut self, names: &BTreeSet<String>);

    /// Ends the protection of the pipe directory and of the directories of these slices. Every user with write permission can
    /// then change and remove them.
    fn release(&mut self, pipe: &D, slices_in: Option<&D>, names: &BTreeSet<String>);

    /// The path of the pipe directory, or of a slice's directory, for messages.
    fn shown(&self, pipe: &D, slice: Option<&str>) -> String;
}
