//! The messages between the programs of the simulated MPS: packets of JSON over `SOCK_SEQPACKET` sockets. A packet can carry
//! the file descriptor of a client's connection.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The first packet that a program sends to a control daemon.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Hello {
    /// A front end. After the hello the front end sends one command per packet. The control daemon answers each command with
    /// one packet of text.
    FrontEnd,
    Client(ClientHello),
}

/// The settings in the environment of a CUDA program.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ClientHello {
    pub(super) visible_devices: Option<String>,
    pub(super) percentage: Option<String>,
    pub(super) memory_limits: Option<String>,
}

/// A message from the control daemon to a server.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    Start {
        percentage: f64,
        limits: Vec<(usize, u64)>,
    },
    /// Take a client. The connection of the client is attached to the packet.
    Client {
        pid: u32,
        hello: ClientHello,
    },
    SetPercentage(f64),
    SetLimit(usize, Option<u64>),
    /// Report the status. The server answers `Query`, `DeviceQuery`, `Terminate` and `Shutdown` with a [`Report::Status`].
    Query,
    DeviceQuery,
    Terminate(u32),
    /// End the server if it has no client.
    Shutdown,
    /// End the server even if it has clients.
    ForceShutdown,
}

/// A message from a server to the control daemon.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Report {
    Ready,
    /// A client has ended, or the server has refused a client.
    Gone,
    Status(Status),
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Status {
    pub(super) fault: bool,
    pub(super) percentage: f64,
    pub(super) limits: Vec<(usize, u64)>,
    pub(super) clients: Vec<ClientStatus>,
    /// True if the server has carried out [`Order::Terminate`] or [`Order::Shutdown`]. False after any other order.
    pub(super) done: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ClientStatus {
    pub(super) pid: u32,
    /// The client's number on its server.
    pub(super) id: u32,
    /// The ordinal of the client's GPU in the server. The next two fields describe the same GPU.
    pub(super) ordinal: usize,
    pub(super) uuid: String,
    pub(super) name: String,
    pub(super) namespace: String,
    pub(super) command: String,
}

/// A message to a client, from a server or from a control daemon that has no server.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Event {
    Welcome(Vec<Device>),
    /// Asks the client to take part in one step of the end of the client's work. The client answers with
    /// [`Request::TakePart`].
    TakePart,
    /// A CUDA error. The client can do nothing more after the error.
    Error(u32),
}

/// A message from a client to its server.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// The client has allocated this amount of memory.
    Allocate { mib: u64 },
    /// The client has freed this amount of memory.
    Free { mib: u64 },
    /// A long kernel starts (true) or ends (false).
    LongKernel(bool),
    /// The client's kernel has written to a forbidden address.
    Fault,
    /// The answer to [`Event::TakePart`].
    TakePart,
}

/// The properties of a device as a CUDA program sees them, with the limits of MPS applied.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Device {
    pub(super) name: String,
    /// The PCI bus and device number, such as `00:06`.
    pub(super) pci: String,
    pub(super) capability: String,
    pub(super) sms: u32,
    pub(super) free_mib: u64,
    pub(super) total_mib: u64,
}

fn socket() -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?)
}

pub(super) fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Listens on a new socket at this path. Replaces a socket that an earlier control daemon did not remove.
pub(super) fn listen(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket()?;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None)?)
}

pub(super) fn send(socket: impl AsFd, message: &impl Serialize) -> io::Result<()> {
    send_with(socket, message, None)
}

pub(super) fn send_with(
    socket: impl AsFd,
    message: &impl Serialize,
    attached: Option<&OwnedFd>,
) -> io::Result<()> {
    let packet = serde_json::to_vec(message)?;
    let fds: Vec<_> = attached.iter().map(|fd| fd.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(&packet)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives the next packet. `None` if the other end has closed the connection, or the packet can't be read.
pub(super) fn receive<T: DeserializeOwned>(socket: impl AsFd) -> Option<T> {
    Some(receive_with(socket)?.0)
}

pub(super) fn receive_with<T: DeserializeOwned>(socket: impl AsFd) -> Option<(T, Option<OwnedFd>)> {
    let mut packet = vec![0; 256 * 1024];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(&mut packet)];
    let message = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(&socket, &mut slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    });
    let length = message.ok()?.bytes;
    let attached = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let message = serde_json::from_slice(packet.get(..length)?).ok()?;
    Some((message, attached))
}

/// Closes this end of a connection for sending, and waits until the other end has closed the connection, too.
pub(super) fn part(socket: impl AsFd) {
    if rustix::net::shutdown(&socket, rustix::net::Shutdown::Write).is_ok() {
        while receive::<serde_json::Value>(&socket).is_some() {}
    }
}

/// Returns the PID and the user of the process at the other end of a connection.
pub(super) fn peer(socket: impl AsFd) -> Option<(u32, u32)> {
    let credentials = rustix::net::sockopt::socket_peercred(socket).ok()?;
    Some((credentials.pid.as_raw_nonzero().get().try_into().ok()?, credentials.uid.as_raw()))
}
