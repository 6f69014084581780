//! Bells for the watches over the clients of a GPU, which need not look all the time.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

/// The bells of a GPU. A bell that rings several times before anybody listens has rung once.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    /// A client has come.
    pub(crate) came: Notify,
    /// The control daemon was checked, and has clients or has just lost the last one.
    pub(crate) checked: Notify,
    /// Somebody wants to know the clients.
    pub(crate) asked: Notify,
}

/// The bells of all GPUs, by UUID.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bells(Arc<Mutex<BTreeMap<String, Arc<Bell>>>>);

impl Bells {
    pub(crate) fn for_gpu(&self, uuid: &str) -> Arc<Bell> {
        let mut bells = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(bells.entry(uuid.to_owned()).or_default())
    }

    /// Rings for each of these GPUs. A GPU without a watch has no bell.
    pub(super) fn ring(&self, uuids: &[String], which: fn(&Bell) -> &Notify) {
        let bells = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for bell in uuids.iter().filter_map(|uuid| bells.get(uuid)) {
            which(bell).notify_one();
        }
    }
}
