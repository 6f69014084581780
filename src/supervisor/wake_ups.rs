//! Wakes the tasks that watch the clients of GPUs. Each task sleeps until it is woken.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

/// The reasons to wake the task that watches the clients of one GPU. Several notifications before the task runs count as one.
#[derive(Debug, Default)]
pub(crate) struct WakeUps {
    pub(crate) came: Notify,
    /// A caller asks for the clients, or a health check is done. A health check wakes the task only if the control daemon has
    /// clients or has just lost its last client.
    pub(crate) look: Notify,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct GpuWakeUps(Arc<Mutex<BTreeMap<String, Arc<WakeUps>>>>);

impl GpuWakeUps {
    pub(crate) fn for_gpu(&self, uuid: &str) -> Arc<WakeUps> {
        let mut wake_ups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(wake_ups.entry(uuid.to_owned()).or_default())
    }

    /// Wakes the tasks for these GPUs, for the reason that `which` returns. A GPU without a task is skipped.
    pub(super) fn wake(&self, uuids: &[String], which: fn(&WakeUps) -> &Notify) {
        let wake_ups = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for wake_ups in uuids.iter().filter_map(|uuid| wake_ups.get(uuid)) {
            which(wake_ups).notify_one();
        }
    }
}
