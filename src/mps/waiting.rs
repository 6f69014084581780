//! The waiting socket: a socket of the service that replaces the socket of a control daemon. A CUDA program that connects to it
//! waits, since no process accepts the connection. Measured on an H200: the program waits as long as the waiting socket exists.
//! When the service closes the waiting socket, the program starts without MPS, unless the compute mode refuses it.

use std::fs::{self, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};

use common::directories::BadDirectory;
use common::problem::Problem;

use super::links_on_disk::{Socket, WAITING, remove_waiting};

/// The most programs that wait with an open connection to the waiting socket. A further program waits in `connect()`.
const PROGRAMS: i32 = 4096;

const NAMED: usize = 1024;

#[derive(Debug)]
pub(crate) struct WaitingSocket {
    directory: PathBuf,
    listener: OwnedFd,
}

impl WaitingSocket {
    /// Makes the socket in the directory of the control daemon's own socket. The service makes hard links to both sockets, and
    /// hard links are possible only within one file system.
    pub(crate) fn make(directory: &Path) -> Result<Self, BadDirectory> {
        let path = directory.join(WAITING);
        let made = || -> std::io::Result<OwnedFd> {
            remove_waiting(directory);
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
            bind(&listener, &SocketAddrUnix::new(&path)?)?;
            // A program needs write permission to connect to the socket. A control daemon gives its own socket the same mode.
            fs::set_permissions(&path, Permissions::from_mode(0o666))?;
            listen(&listener, PROGRAMS)?;
            Ok(listener)
        };
        let listener = made().map_err(|error| BadDirectory {
            path: path.clone(),
            problem: Problem::new(
                format!("the socket at which new programs wait for a control daemon can't be made: {error}"),
                "check that the file system has free space and is writable",
            ),
        })?;
        Ok(Self { directory: directory.to_owned(), listener })
    }

    pub(crate) fn is_in(&self, directory: &Path) -> bool {
        self.directory == directory
    }

    /// The socket as a target for hard links. The error says that the socket was removed.
    pub(crate) fn socket(&self) -> Result<Socket, BadDirectory> {
        let found = Socket::find_waiting(&self.directory)?;
        found.ok_or_else(|| BadDirectory {
            path: self.directory.join(WAITING),
            problem: Problem::new(
                "another program removed this socket, at which new programs wait for a control daemon; the \
                 service makes the socket again",
                "stop the program that removes files in this directory",
            ),
        })
    }

    /// Releases the programs that wait at the socket by closing their connections, and returns the PIDs of these programs.
    /// `own` is the PID of the service.
    pub(crate) fn let_go(self, own: u32) -> Vec<u32> {
        let next = || match accept_with(&self.listener, SocketFlags::CLOEXEC) {
            Ok(program) => Ok(socket_peercred(&program).ok()),
            Err(error) => Err(error),
        };
        let mut waited = Vec::new();
        while waited.len() < NAMED {
            match next() {
                Ok(peer) => {
                    let pid = peer.map(|peer| peer.pid.as_raw_nonzero().get().unsigned_abs());
                    // The service also connects to the socket, to find out which process listens there. So the service's own
                    // PID is not that of a waiting program.
                    waited.extend(pid.filter(|pid| *pid != own));
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => break,
            }
        }
        waited
    }
}

impl Drop for WaitingSocket {
    fn drop(&mut self) {
        remove_waiting(&self.directory);
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::connect;

    use super::*;

    fn program(path: &Path) -> rustix::io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(socket)
    }

    #[test]
    fn programs_wait_until_they_are_let_go() {
        let directory = tempfile::tempdir().unwrap();
        let waiting = WaitingSocket::make(directory.path()).unwrap();
        let link = directory.path().join("control");
        fs::hard_link(directory.path().join(WAITING), &link).unwrap();
        let first = program(&link).unwrap();
        let _second = program(&link).unwrap();
        let mut answer = [0];
        let read = || rustix::io::read(&first, &mut [0; 1][..]);
        assert_eq!(read(), Err(Errno::AGAIN), "no process answers");
        assert_eq!(waiting.let_go(0), [std::process::id(); 2]);
        assert_eq!(rustix::io::read(&first, &mut answer[..]), Ok(0), "the connection is closed");
        assert_eq!(program(&link).unwrap_err(), Errno::CONNREFUSED);
        assert!(!directory.path().join(WAITING).exists());
    }

    #[test]
    fn a_socket_that_a_killed_service_has_left_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(WAITING), "").unwrap();
        let waiting = WaitingSocket::make(directory.path()).unwrap();
        assert!(waiting.socket().is_ok() && waiting.is_in(directory.path()));
        fs::remove_file(directory.path().join(WAITING)).unwrap();
        assert!(waiting.socket().is_err(), "nothing can lead there any more");
        assert!(WaitingSocket::make(&directory.path().join("missing")).is_err());
    }
}
