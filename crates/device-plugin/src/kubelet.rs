//! The kubelet: its sockets, the detection of its restart, and the calls to the kubelet.

use std::future::pending;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use common::host::inotify::{is_shortage, new_instance, no_files, shortage};
use common::host::readable::Readable;
use http::uri::PathAndQuery;
use rustix::fs::inotify::{self, ReadFlags, WatchFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use tokio::time::timeout;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

use crate::api::{self, PluginOptions, RegisterRequest};
use crate::codec::Protobuf;

/// The longest time for one call to the kubelet. The kubelet first connects to the plugin and then answers a registration, so
/// the answer takes a while.
const DEADLINE: Duration = Duration::from_secs(5);

/// The identity of a socket's file. A new socket has another identity than the former socket, even if the file system reuses
/// the inode number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SocketFile {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

/// True if a program listens on the socket. The file of a socket stays after its program has ended.
pub(crate) fn is_alive(path: &Path) -> bool {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let connected = SocketAddrUnix::new(path).and_then(|address| {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &address)
    });
    !matches!(connected, Err(Errno::CONNREFUSED | Errno::NOENT))
}

impl SocketFile {
    pub(crate) fn at(path: &Path) -> Option<Self> {
        let found = path.symlink_metadata().ok().filter(|found| found.file_type().is_socket())?;
        let changed = (found.ctime(), found.ctime_nsec());
        Some(Self { device: found.dev(), inode: found.ino(), changed })
    }
}

pub(crate) fn kubelet_socket(directory: &Path) -> PathBuf {
    directory.join("kubelet.sock")
}

/// Registers a resource with the kubelet. `socket` is the kubelet's socket, and `endpoint` is the file name of the resource's
/// socket in the same directory.
pub(crate) async fn register(socket: PathBuf, resource_name: String, endpoint: String) -> Result<(), String> {
    let version = api::VERSION.to_owned();
    let request = RegisterRequest { version, endpoint, resource_name, options: Some(options()) };
    call(&socket, api::REGISTER, request).await.map_err(|status| status.message().to_owned())
}

/// The optional calls that the kubelet should make to this plugin.
pub(crate) fn options() -> PluginOptions {
    PluginOptions { pre_start_required: false, get_preferred_allocation_available: true }
}

/// Calls a method of the kubelet on its socket. An error names the socket.
async fn call<Q, A>(socket: &Path, path: &'static str, question: Q) -> Result<A, Status>
where
    Q: prost::Message + Send + Sync + 'static,
    A: prost::Message + Default + Send + Sync + 'static,
{
    let place = socket.display();
    let asked = async {
        let endpoint = Endpoint::from_shared(format!("unix://{place}"));
        let channel: Channel = endpoint
            .map_err(|error| unreachable(&error))?
            .connect()
            .await
            .map_err(|error| unreachable(&error))?;
        let mut grpc = Grpc::new(channel);
        grpc.ready().await.map_err(|error| unreachable(&error))?;
        let codec = Protobuf::<Q, A>::default();
        grpc.unary(Request::new(question), PathAndQuery::from_static(path), codec).await
    };
    let silent = |_| {
        Status::deadline_exceeded(format!(
            "the kubelet did not answer within {seconds} s",
            seconds = DEADLINE.as_secs()
        ))
    };
    let answer = timeout(DEADLINE, asked).await.map_err(silent).and_then(|answer| answer);
    answer
        .map(tonic::Response::into_inner)
        .map_err(|status| Status::new(status.code(), format!("{place}: {}", status.message())))
}

fn unreachable(error: &tonic::transport::Error) -> Status {
    // tonic's error says only "transport error", so the message contains the source of this error.
    let cause = std::error::Error::source(error).map(ToString::to_string);
    Status::unavailable(cause.unwrap_or_else(|| error.to_string()))
}

/// Watches the directory of device plugins for sockets that are made or removed. Fails if the directory does not exist.
pub(crate) fn watch(directory: &Path) -> io::Result<Readable> {
    let queue = new_instance().map_err(|error| match Errno::from_io_error(&error) {
        Some(errno) if is_shortage(errno) => io::Error::other(shortage(errno, no_files()).to_string()),
        _ => error,
    })?;
    let flags = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVED_TO | WatchFlags::DELETE_SELF;
    inotify::add_watch(&queue, directory, flags | WatchFlags::ONLYDIR)?;
    Readable::new(queue)
}

/// Returns after a change in the watched directory. After the removal of the directory itself, `watched` is None. With None
/// this function never returns, and the plugin notices a change at the next pass of its loop.
pub(crate) async fn next_change(watched: &mut Option<Readable>) {
    let Some(queue) = watched else { return pending().await };
    if !queue.until(is_still_there).await.unwrap_or(false) {
        *watched = None;
    }
}

/// Reads all events of the inotify queue. Returns false if the directory was removed.
fn is_still_there(queue: std::os::fd::BorrowedFd<'_>) -> io::Result<bool> {
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(queue, &mut buffer);
    let mut any = false;
    loop {
        match reader.next() {
            Ok(event) => {
                any = true;
                if event.events().intersects(ReadFlags::DELETE_SELF | ReadFlags::IGNORED) {
                    return Ok(false);
                }
            }
            // `AGAIN` means that all events were read.
            Err(Errno::AGAIN) if any => return Ok(true),
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_socket_that_is_made_again_is_another_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("kubelet.sock");
        assert_eq!(SocketFile::at(&path), None);
        std::fs::write(&path, "").unwrap();
        assert_eq!(SocketFile::at(&path), None, "a file is no socket");
        std::fs::remove_file(&path).unwrap();
        let first = UnixListener::bind(&path).unwrap();
        let before = SocketFile::at(&path).unwrap();
        assert_eq!(SocketFile::at(&path), Some(before));
        assert!(is_alive(&path));
        drop(first);
        assert!(!is_alive(&path));
        std::fs::remove_file(&path).unwrap();
        assert!(!is_alive(&path));
        let _second = UnixListener::bind(&path).unwrap();
        assert_ne!(SocketFile::at(&path), Some(before));
    }

    #[tokio::test]
    async fn a_kubelet_that_is_not_there_is_named_by_its_socket() {
        let directory = tempfile::tempdir().unwrap();
        let socket = kubelet_socket(directory.path());
        let refused =
            register(socket, "yunion.io/mps-1gib".to_owned(), "x.sock".to_owned()).await.unwrap_err();
        let named = refused.contains("/kubelet.sock: ");
        assert!(named && !refused.contains("transport"), "{refused}");
    }

    #[tokio::test]
    async fn the_directory_tells_of_sockets_and_of_its_own_end() {
        let directory = tempfile::tempdir().unwrap();
        let below = directory.path().join("device-plugins");
        watch(&below).unwrap_err();
        std::fs::create_dir(&below).unwrap();
        let mut watched = Some(watch(&below).unwrap());
        std::fs::write(below.join("kubelet.sock"), "").unwrap();
        next_change(&mut watched).await;
        assert!(watched.is_some());
        std::fs::remove_dir_all(&below).unwrap();
        while watched.is_some() {
            next_change(&mut watched).await;
        }
    }
}
