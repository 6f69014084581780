//! Runs only the D-Bus part of the service, in the process of the test and on a private bus.

use std::sync::Arc;

use common::published::snapshot::Snapshot;
use tokio::sync::{mpsc, watch};
use yunion_mps::{BusConnection, Request};

use crate::support::bus::PrivateBus;

pub(crate) struct Service {
    pub(crate) bus: PrivateBus,
    pub(crate) served: BusConnection,
    pub(crate) requests: mpsc::Receiver<Request>,
    snapshot: watch::Sender<Arc<Snapshot>>,
}

impl Service {
    pub(crate) async fn start(snapshot: Snapshot) -> Self {
        Self::start_on(PrivateBus::start(), snapshot).await
    }

    pub(crate) async fn start_on(bus: PrivateBus, snapshot: Snapshot) -> Self {
        let (snapshot, seen) = watch::channel(Arc::new(snapshot));
        let (ask, mut asked) = mpsc::channel(4);
        let (others, requests) = mpsc::channel(4);
        tokio::spawn(async move {
            while let Some(request) = asked.recv().await {
                match request {
                    // The test's Snapshot always has the present clients. So `LookAtClients` is answered at once.
                    Request::LookAtClients(reply) => drop(reply.send(Ok(()))),
                    request => drop(others.send(request).await),
                }
            }
        });
        let address = bus.address().as_str().try_into().unwrap();
        let served = BusConnection::connect_to(address, seen, ask).await.unwrap();
        Self { bus, served, requests, snapshot }
    }

    pub(crate) async fn publish(&mut self, new: Snapshot) {
        let new = Arc::new(new);
        self.snapshot.send_replace(Arc::clone(&new));
        self.served.publish(new).await;
    }
}
