//! Bells for whoever watches over the clients of a GPU. A supervisor rings when a client has come, and with each regular
//! check while there are clients, so that nobody has to look all the time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

/// A bell for each GPU, by UUID. A bell that rings several times before anybody listens has rung once.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bells(Arc<Mutex<BTreeMap<String, Arc<Notify>>>>);

impl Bells {
    /// The bell of a GPU.
    pub(crate) fn of(&self, uuid: &str) -> Arc<Notify> {
        let mut bells = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(bells.entry(uuid.to_owned()).or_default())
    }

    /// Rings for these GPUs. A GPU that nobody watches over has no bell.
    pub(super) fn ring<'u>(&self, uuids: impl IntoIterator<Item = &'u String>) {
        let bells = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for bell in uuids.into_iter().filter_map(|uuid| bells.get(uuid)) {
            bell.notify_one();
        }
    }
}
