//! One resource: its socket, and the answers to the kubelet's calls.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use common::bus::proxy::{BusError, DaemonProxy, SliceWish};
use common::published::container::ContainerConfig;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tokio_stream::{Stream, StreamExt};
use tonic::body::Body;
use tonic::server::Grpc;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tower::service_fn;

use crate::allocation::{by_cdi, by_cdi_of_gpus, slices_for, without_cdi};
use crate::api::{self, ContainerSettings, DevicesOfContainer, ListedDevice, PreferredOfContainer, Repeated};
use crate::codec::Protobuf;
use crate::counters::{ALLOCATIONS, Counters, REFUSALS};
use crate::kubelet::{SocketFile, is_alive, options};
use crate::offers::Offered;
use crate::preference::{Placement, preferred};
use crate::service::{self, NoAnswer, ServiceView};
use crate::slice::NodeSlice;

/// The longest time that a container waits for a service that is restarting. While a container waits, the kubelet admits no
/// other pod.
const PATIENCE: Duration = Duration::from_secs(10);

/// The pause between two attempts to reach the service, and after a connection that could not be accepted.
const RETRY: Duration = Duration::from_millis(200);

/// The most calls on one connection that are answered at the same time.
const AT_ONCE: usize = 16;

/// The kernel's limit for the path of a Unix socket, in bytes.
const LONGEST_PATH: usize = 107;

/// The options that decide how containers get their slices, and the state that all resources share.
#[derive(Debug, Clone)]
pub(crate) struct Manner {
    pub(crate) placement: Placement,
    pub(crate) without_cdi: bool,
    pub(crate) counters: Counters,
    pub(crate) service: watch::Receiver<ServiceView>,
}

/// The state of a resource's registration. The `SocketFile` identifies the start of the kubelet to which the state belongs,
/// since the kubelet makes a new socket at each start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Registration {
    Missing,
    /// The registration was sent, and the task waits for the kubelet's answer.
    Asked(SocketFile, task::Id),
    Failed(SocketFile, Instant),
    /// The kubelet has accepted the registration, but does not read the list of devices yet.
    Accepted(SocketFile, Instant),
    /// The kubelet reads the list of devices.
    Listens(SocketFile),
}

/// Adds a pause after each connection that could not be accepted. If the process has too many open files, for example, an
/// immediate attempt would fail again.
fn with_pauses<T>(connections: impl Stream<Item = io::Result<T>>) -> impl Stream<Item = io::Result<T>> {
    connections.then(|connection| async move {
        if connection.is_err() {
            sleep(RETRY).await;
        }
        connection
    })
}

/// A resource that is served on its socket. Dropping this value removes the socket.
#[derive(Debug)]
pub(crate) struct Resource {
    path: PathBuf,
    file: SocketFile,
    offered: watch::Sender<Vec<Offered>>,
    pub(crate) registration: Registration,
}

impl Resource {
    pub(crate) fn serve(name: &str, path: &Path, offered: Vec<Offered>, manner: Manner) -> io::Result<Self> {
        let bytes = path.as_os_str().len();
        if bytes > LONGEST_PATH {
            let complaint = format!(
                "the path of the socket has {bytes} bytes, at most {LONGEST_PATH} are possible; choose a \
                 shorter name for the resource (--resource NAME=SIZE)"
            );
            return Err(io::Error::other(complaint));
        }
        // Only a socket at this path is removed. Any other file stays, and the new socket can't be bound.
        if SocketFile::at(path).is_some() {
            if is_alive(path) {
                let complaint = "another device plugin serves this socket; run the unit or the DaemonSet on \
                                 this node, and not both";
                return Err(io::Error::new(io::ErrorKind::AddrInUse, complaint));
            }
            std::fs::remove_file(path)?;
        }
        let listener = UnixListener::bind(path)?;
        let file = SocketFile::at(path).ok_or_else(|| {
            io::Error::other("another program removed the socket right after the device plugin had made it")
        })?;
        let (sender, receiver) = watch::channel(offered);
        // Each connection clones the closure below. A clone of the receiver itself would count as a kubelet in `has_listener`,
        // so all clones share one receiver.
        let (resource, offered) = (name.to_owned(), Arc::new(receiver));
        let name = resource.clone();
        let mut until_dropped = sender.subscribe();
        let answer = service_fn(move |request| {
            let (name, manner, offered) = (name.clone(), manner.clone(), Arc::clone(&offered));
            async move { Ok::<_, Infallible>(answer(&name, &manner, &offered, request).await) }
        });
        tokio::spawn(async move {
            let server = Server::builder()
                .concurrency_limit_per_connection(AT_ONCE)
                .max_concurrent_streams(u32::try_from(AT_ONCE).ok())
                .serve_with_incoming_shutdown(
                    answer,
                    with_pauses(UnixListenerStream::new(listener)),
                    async { while until_dropped.changed().await.is_ok() {} },
                );
            if let Err(error) = server.await {
                tracing::error!(
                    "{resource}: the device plugin no longer serves the socket of this resource: {error}; \
                     restart the device plugin"
                );
            }
        });
        Ok(Self { path: path.to_owned(), file, offered: sender, registration: Registration::Missing })
    }

    /// False after the start of a kubelet, which removes all sockets.
    pub(crate) fn is_there(&self) -> bool {
        SocketFile::at(&self.path) == Some(self.file)
    }

    pub(crate) fn has_listener(&self) -> bool {
        // The plugin itself has two receivers of `offered`: one to answer the kubelet, and one to end the server. Each further
        // receiver belongs to a kubelet that reads the list of devices.
        self.offered.receiver_count() > 2
    }

    pub(crate) fn offer(&self, offered: Vec<Offered>) -> bool {
        self.offered.send_if_modified(|known| {
            let changed = *known != offered;
            *known = offered;
            changed
        })
    }
}

impl Drop for Resource {
    fn drop(&mut self) {
        if self.is_there() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

async fn answer(
    name: &str,
    manner: &Manner,
    offered: &watch::Receiver<Vec<Offered>>,
    request: http::Request<Body>,
) -> http::Response<Body> {
    match request.uri().path() {
        api::OPTIONS => {
            let options = service_fn(|_: Request<()>| async { Ok::<_, Status>(Response::new(options())) });
            Grpc::new(Protobuf::default()).unary(options, request).await
        }
        api::LIST_AND_WATCH => {
            let list = service_fn(|_: Request<()>| {
                let lists = WatchStream::new(offered.clone());
                async { Ok::<_, Status>(Response::new(lists.map(|offered| Ok::<_, Status>(list(&offered))))) }
            });
            Grpc::new(Protobuf::default()).server_streaming(list, request).await
        }
        api::PREFERRED => {
            let choose = service_fn(|request: Request<_>| {
                let answer = choose(request.into_inner(), manner);
                async { Ok::<_, Status>(Response::new(answer)) }
            });
            Grpc::new(Protobuf::default()).unary(choose, request).await
        }
        api::ALLOCATE => {
            let allocate = service_fn(async |request: Request<_>| {
                allocate(name, manner, offered, request.into_inner()).await.map(Response::new)
            });
            Grpc::new(Protobuf::default()).unary(allocate, request).await
        }
        path => Status::unimplemented(format!("the device plugin does not know the call {path}")).into_http(),
    }
}

fn list(offered: &[Offered]) -> Repeated<ListedDevice> {
    let device = |device: &Offered| ListedDevice {
        id: device.name.clone(),
        health: if device.unusable.is_none() { api::HEALTHY } else { api::UNHEALTHY }.to_owned(),
        topology: device.numa_node.map(|node| Repeated { all: vec![node] }),
    };
    Repeated { all: offered.iter().map(device).collect() }
}

fn choose(request: Repeated<PreferredOfContainer>, manner: &Manner) -> Repeated<DevicesOfContainer> {
    let owned: BTreeSet<String> = {
        let service = manner.service.borrow();
        let owned = service.slices.iter().flatten().filter(|slice| !slice.bound_to.is_empty());
        owned.map(|slice| slice.name.clone()).collect()
    };
    let containers = request.all.into_iter().map(|asked| {
        let number = usize::try_from(asked.size).unwrap_or_default();
        let has_owner = |name: &str| owned.contains(name);
        let devices = preferred(&asked.available, &asked.must_include, number, manner.placement, has_owner);
        DevicesOfContainer { devices }
    });
    Repeated { all: containers.collect() }
}

async fn allocate(
    resource: &str,
    manner: &Manner,
    offered: &watch::Receiver<Vec<Offered>>,
    request: Repeated<DevicesOfContainer>,
) -> Result<Repeated<ContainerSettings>, Status> {
    let mut containers = Vec::new();
    for asked in request.all {
        let names = asked.devices.join(", ");
        match settings(resource, manner, offered, &asked.devices).await {
            Ok(settings) => {
                tracing::info!("{resource}: gave {names} to a container");
                manner.counters.count(resource, ALLOCATIONS);
                containers.push(settings);
            }
            Err(refused) => {
                tracing::warn!(
                    "{resource}: refused {names} to a container: {message}",
                    message = refused.message()
                );
                manner.counters.count(resource, REFUSALS);
                return Err(refused);
            }
        }
    }
    Ok(Repeated { all: containers })
}

async fn settings(
    resource: &str,
    manner: &Manner,
    offered: &watch::Receiver<Vec<Offered>>,
    names: &[String],
) -> Result<ContainerSettings, Status> {
    let (service, now) = ask_service(names).await?;
    let slices = slices_for(resource, names, &offered.borrow(), &now)?;
    let config = async || -> Result<ContainerConfig, Status> {
        // The kubelet decides which pod has a slice. `share` lets a new pod have the slice while a container of the former pod
        // is still ending.
        let wish = SliceWish { names: names.to_vec(), free: false, share: true };
        let taken = service.take(&wish).await.map_err(|error| no_answer(names, &error))?;
        Ok(taken.1)
    };
    match &slices[..] {
        slices if manner.without_cdi => Ok(without_cdi(slices, config().await?)),
        [slice] => by_cdi(slice),
        slices => by_cdi_of_gpus(slices, config().await?),
    }
}

/// Connects to the service, and asks for all slices. Waits for a service that is just restarting, at most for [`PATIENCE`].
async fn ask_service(names: &[String]) -> Result<(DaemonProxy, Vec<NodeSlice>), Status> {
    let until = Instant::now() + PATIENCE;
    let mut last = NoAnswer::from(BusError::Silent);
    loop {
        let asked = async {
            let service = DaemonProxy::connect().await?;
            let slices = service::slices(&service).await?;
            Ok::<_, NoAnswer>((service, slices))
        };
        match timeout_at(until, asked).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => last = error,
            // The time ran out during this attempt, so the function reports the error of the last complete attempt.
            Err(_late) => {}
        }
        if Instant::now() + RETRY >= until {
            return Err(no_answer(names, &last));
        }
        sleep(RETRY).await;
    }
}

fn no_answer(names: &[String], error: &dyn Display) -> Status {
    Status::unavailable(format!("{}: {error}", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_that_fails_is_followed_by_a_pause() {
        let failed = || Err(io::Error::other("too many open files"));
        let mut connections = std::pin::pin!(with_pauses(tokio_stream::iter([Ok(1), failed(), Ok(2)])));
        let begun = Instant::now();
        assert_eq!(connections.next().await.unwrap().unwrap(), 1);
        assert!(connections.next().await.unwrap().is_err());
        assert!(begun.elapsed() >= RETRY);
        assert_eq!(connections.next().await.unwrap().unwrap(), 2);
        assert!(connections.next().await.is_none());
    }
}
