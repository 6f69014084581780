//! Chooses slices for callers and their programs. All methods that hand out slices use the same rules.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mps_core::access::Asker;
use mps_core::bindings::BoundBy;
use mps_core::terms::SliceId;
use tokio::sync::{mpsc, watch};
use zbus::Connection;
use zbus::message::Header;

use super::request::{Callers, Request, Result, WantedSlices, ask};
use common::bus::error::RequestError;
use common::bus::proxy::SliceWish;
use common::published::access::choose;
use common::published::client::ClientView;
use common::published::container::{ChosenSlice, ContainerConfig, container_config};
use common::published::free;
use common::published::snapshot::Snapshot;

/// A slice counts as used for this time after it was given to a program, since the program may not be a client yet.
const REMEMBERED: Duration = Duration::from_secs(60);

/// The most given slices that the service remembers. For each further slice, it forgets the oldest given slice.
const MOST: usize = 1024;

#[derive(Clone)]
pub(super) struct SliceDesk {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    requests: mpsc::Sender<Request>,
    callers: Callers,
    given: Arc<Mutex<VecDeque<(Instant, SliceId)>>>,
}

impl SliceDesk {
    pub(super) fn new(
        snapshot: watch::Receiver<Arc<Snapshot>>,
        requests: mpsc::Sender<Request>,
        callers: Callers,
    ) -> Self {
        Self { snapshot, requests, callers, given: Arc::default() }
    }

    /// The names of the slices that the caller may have now, and the settings for a program that uses them.
    pub(super) async fn settings(
        &self,
        wish: &SliceWish,
        bus: &Connection,
        call: &Header<'_>,
    ) -> Result<(Vec<String>, ContainerConfig)> {
        let clients = self.clients_for(wish).await?;
        // The caller may have a slice that is bound to the caller's own control group.
        let is_anything_bound = self.snapshot.borrow().bindings.iter().next().is_some();
        let group = if is_anything_bound { self.callers.control_group_of(bus, call).await } else { None };
        let asker = Asker { control_group: group.as_deref(), by: BoundBy::Platform, shares: wish.share };
        let snapshot = Arc::clone(&self.snapshot.borrow());
        let chosen = if wish.free {
            self.choose_free(&snapshot, wish, &clients, asker)?
        } else {
            choose(&snapshot, &wish.names, &snapshot.bindings, asker)?
        };
        let config = container_config(&snapshot, &chosen)?;
        Ok((chosen.into_iter().map(|one| one.name).collect(), config))
    }

    fn choose_free<'s>(
        &self,
        snapshot: &'s Snapshot,
        wish: &SliceWish,
        clients: &[ClientView],
        asker: Asker<'_>,
    ) -> Result<Vec<ChosenSlice<'s>>> {
        // The lock lasts until the choice is recorded, so that a concurrent caller gets another slice.
        let mut given = self.lock();
        let candidates = free::candidates(snapshot, &wish.names, clients, &recent(&given))?;
        let chosen = free::choose(snapshot, &candidates, &snapshot.bindings, asker)?;
        given.push_back((Instant::now(), chosen.slice()));
        Ok(vec![chosen])
    }

    /// The slices to which a control group should be bound: either all named slices, or candidates of which the main loop takes
    /// the first free one.
    pub(super) async fn to_bind(&self, wish: SliceWish) -> Result<WantedSlices> {
        let clients = self.clients_for(&wish).await?;
        if !wish.free {
            return Ok(WantedSlices::All(wish.names));
        }
        let recent = recent(&self.lock());
        let candidates = free::candidates(&self.snapshot.borrow(), &wish.names, &clients, &recent)?;
        Ok(WantedSlices::OneOf(candidates))
    }

    /// The clients that count for the choice of a free slice. If the clients can't be listed, the choice is made as if there
    /// were none, since the caller may then still get a slice.
    async fn clients_for(&self, wish: &SliceWish) -> Result<Vec<ClientView>> {
        if !wish.free {
            return Ok(Vec::new());
        }
        match ask(&self.requests, Request::Clients).await {
            Err(RequestError::Failed(_)) => Ok(Vec::new()),
            listed => listed,
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(Instant, SliceId)>> {
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        while given.len() >= MOST || given.front().is_some_and(|(at, _)| at.elapsed() >= REMEMBERED) {
            given.pop_front();
        }
        given
    }
}

fn recent(given: &VecDeque<(Instant, SliceId)>) -> Vec<SliceId> {
    given.iter().map(|(_, slice)| *slice).collect()
}
