//! Plays the part of systemd that receives the service's notifications.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::time::Instant;

use super::host::Host;
use super::wait::DEADLINE;

/// The receiving end of the notification socket.
pub(crate) struct ServiceManager {
    socket: UnixDatagram,
    /// Received notifications that no call has returned yet.
    waiting: VecDeque<String>,
}

impl ServiceManager {
    pub(crate) fn of(host: &mut Host) -> Self {
        let path = host.path("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        host.set("NOTIFY_SOCKET", path.to_str().unwrap());
        Self { socket, waiting: VecDeque::new() }
    }

    fn datagram(&mut self) -> Vec<String> {
        let mut bytes = vec![0; 65536];
        self.socket.set_read_timeout(Some(DEADLINE)).unwrap();
        let length = loop {
            match self.socket.recv(&mut bytes) {
                // SIGCHLD can interrupt `recv` when a child of any test ends.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                received => break received.expect("a message of the daemon's"),
            }
        };
        let text = String::from_utf8(bytes[..length].to_vec()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    pub(crate) fn next(&mut self) -> String {
        self.until(|message| message != "WATCHDOG=1").pop().unwrap()
    }

    /// Returns the notifications up to the first that satisfies `wanted`.
    pub(crate) fn until(&mut self, wanted: impl Fn(&str) -> bool) -> Vec<String> {
        let deadline = Instant::now() + DEADLINE;
        let mut heard = Vec::new();
        loop {
            while let Some(message) = self.waiting.pop_front() {
                let found = wanted(&message);
                heard.push(message);
                if found {
                    return heard;
                }
            }
            assert!(Instant::now() < deadline, "only heard {heard:?}");
            self.waiting = self.datagram().into();
        }
    }
}
