//! Critical errors (Xid) of GPUs. The service reports them, and a GPU that needs a reset takes no new client until it was
//! reset.

use mps_core::terms::GpuId;

use super::Daemon;
use crate::message::{Message, Subject};
use common::host::xid::CriticalError;

impl Daemon {
    pub(super) fn met(&mut self, uuid: &str, error: CriticalError) {
        let planned = self.planned_gpus().iter().find(|gpu| gpu.gpu.uuid() == Some(uuid));
        let gpu = planned.map(|gpu| gpu.gpu.id());
        let name = gpu.map_or_else(|| uuid.to_owned(), |gpu| gpu.to_string());
        let mut text = format!("GPU {name} met a critical error, {error}");
        if let Some(gpu) = gpu.filter(|_| error.needs_reset()) {
            self.close(gpu, &error);
            text += "; the GPU takes no new client before a reset";
        }
        Message::CriticalError.log(Subject { xid: Some(error.xid), ..Subject::gpu(uuid) }, &text);
        self.events.push(Message::CriticalError.event(text));
        self.fleet.met_xid(uuid, error.xid);
    }

    fn close(&mut self, gpu: GpuId, error: &CriticalError) {
        let written = self.state_file.lock().remember_reset(gpu, &error.to_string());
        if let Err(error) = written {
            tracing::warn!(
                "the state file can't record that GPU {gpu} needs a reset, so the GPU still takes new \
                 clients: {error}"
            );
        }
        if let Err(stuck) = self.fleet.link() {
            tracing::warn!("new programs can still use GPU {gpu}, which needs a reset: {stuck}");
        }
    }

    /// Lets all GPUs that needed a reset take clients again. By a reload, an administrator says that these GPUs work. Returns
    /// true if a GPU needed a reset and takes clients again.
    pub(super) fn forget_resets(&mut self) -> bool {
        let names: Vec<String> = self.state_file.lock().to_reset().keys().cloned().collect();
        if names.is_empty() {
            return false;
        }
        if let Err(error) = self.state_file.lock().forget_resets() {
            tracing::warn!(
                "GPUs that needed a reset still take no new client, since the state file can't be written: \
                 {error}; run yunion-mpsctl reload again"
            );
            return false;
        }
        for name in names {
            self.event(format!(
                "GPU {name} takes new clients again: after a reload, the service assumes that the GPU does not \
                 need a reset any more"
            ));
        }
        true
    }
}
