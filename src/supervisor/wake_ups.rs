//! Wakes the watches over the clients of GPUs, which otherwise sleep.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

/// The reasons to wake the watch over one GPU. A reason that occurs several times before the watch wakes counts once.
#[derive(Debug, Default)]
pub(crate) struct WakeUps {
    /// A client has come.
    pub(crate) came: Notify,
    /// The control daemon was checked, and has clients or has just lost the last one.
    pub(crate) checked: Notify,
    /// A caller asks for the clients.
    pub(crate) asked: Notify,
}

/// The wake-ups of all GPUs, by UUID.
#[derive(Debug, Clone, Default)]
pub(crate) struct GpuWakeUps(Arc<Mutex<BTreeMap<String, Arc<WakeUps>>>>);

impl GpuWakeUps {
    pub(crate) fn for_gpu(&self, uuid: &str) -> Arc<WakeUps> {
        let mut wake_ups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(wake_ups.entry(uuid.to_owned()).or_default())
    }

    /// Wakes the watches over these GPUs, for one reason. Not every GPU has a watch.
    pub(super) fn wake(&self, uuids: &[String], which: fn(&WakeUps) -> &Notify) {
        let wake_ups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for wake_ups in uuids.iter().filter_map(|uuid| wake_ups.get(uuid)) {
            which(wake_ups).notify_one();
        }
    }
}
