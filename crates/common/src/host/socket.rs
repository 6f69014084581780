//! Finds the process that listens on a control daemon's socket.

use std::path::Path;

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// The PID of the control daemon that listens in a pipe directory, as the kernel reports it. None if no process listens.
pub fn listener(pipe_directory: &Path) -> Option<u32> {
    connect(pipe_directory).ok()
}

pub fn connect(pipe_directory: &Path) -> Result<u32, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    net::connect(&socket, &SocketAddrUnix::new(pipe_directory.join("control"))?)?;
    let peer = net::sockopt::socket_peercred(&socket)?;
    u32::try_from(peer.pid.as_raw_nonzero().get()).map_err(|_| Errno::SRCH)
}
