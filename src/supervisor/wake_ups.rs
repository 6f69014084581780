//! Wakes the tasks that watch over the clients of GPUs. Each task sleeps until it is woken.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

/// The reasons to wake the task that watches over the clients of one GPU. A reason that occurs several times before
/// the task wakes counts once.
#[derive(Debug, Default)]
pub(crate) struct WakeUps {
    /// Notified when a client has come to the GPU.
    pub(crate) came: Notify,
    /// Notified when a caller asks for the clients, and after a health check, if the control daemon has clients or has just
    /// lost its last client.
    pub(crate) look: Notify,
}

/// The wake-ups of all GPUs, by UUID.
#[derive(Debug, Clone, Default)]
pub(crate) struct GpuWakeUps(Arc<Mutex<BTreeMap<String, Arc<WakeUps>>>>);

impl GpuWakeUps {
    pub(crate) fn for_gpu(&self, uuid: &str) -> Arc<WakeUps> {
        let mut wake_ups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(wake_ups.entry(uuid.to_owned()).or_default())
    }

    /// Wakes the tasks that watch over these GPUs, for one reason. A GPU may have no task that watches over its
    /// clients.
    pub(super) fn wake(&self, uuids: &[String], which: fn(&WakeUps) -> &Notify) {
        let wake_ups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for wake_ups in uuids.iter().filter_map(|uuid| wake_ups.get(uuid)) {
            which(wake_ups).notify_one();
        }
    }
}
