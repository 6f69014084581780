//! The GPUs of a control daemon: their processes, and their compute modes from its start to its end.

use std::collections::BTreeMap;

use crate::host::nvml::GpuProcess;
use crate::message::{About, Message};
use crate::supervisor::compute_modes::SERVED;

use super::{Failure, Serving, Worker};

impl Worker {
    /// Asks NVML for the compute mode and the processes of each GPU. The status of a GPU says if it can't be reached;
    /// the other GPUs stay served.
    pub(super) async fn look_at_gpus(&mut self) -> BTreeMap<String, Vec<GpuProcess>> {
        let mut processes = BTreeMap::new();
        let gpus = self.order.plan.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        for (uuid, look) in self.tools.compute_modes.look_at(gpus, self.unreachable.is_empty()).await {
            let found = look.map(|(mode, there)| {
                processes.insert(uuid.clone(), there);
                mode
            });
            self.reporter.update_gpu(&uuid, |status| match &found {
                Ok(mode) => {
                    status.compute_mode = Some(*mode);
                    status.unreachable.clear();
                }
                Err(error) => {
                    status.compute_mode = None;
                    status.unreachable.clone_from(error);
                }
            });
            let changed = match &found {
                Ok(_) => self.unreachable.remove(&uuid),
                Err(_) => self.unreachable.insert(uuid.clone()),
            };
            match found {
                Err(error) if changed => {
                    let text = format!("GPU {uuid}: {error}");
                    self.reporter.tell(Message::GpuUnreachable, About::gpu(&uuid), text);
                }
                Ok(_) if changed => self.reporter.event(format!("GPU {uuid} can be reached again")),
                _ => {}
            }
        }
        processes
    }

    /// Sets the compute mode of each GPU, if that is ours to do.
    pub(super) async fn take_compute_modes(&mut self, gpus: &[String]) -> Result<(), Failure> {
        if !self.order.set_compute_mode {
            return Ok(());
        }
        for uuid in gpus {
            let taken = self.tools.compute_modes.take(uuid).await;
            taken.map_err(|error| Failure::Failed(format!("compute mode of {uuid}: {error}")))?;
            self.reporter.update_gpu(uuid, |status| status.compute_mode = Some(SERVED));
        }
        Ok(())
    }

    pub(super) async fn restore_compute_mode(&mut self, uuid: &str) {
        if let Err(error) = self.tools.compute_modes.restore(uuid).await {
            let text = format!("compute mode of {uuid} is not put back: {error}");
            self.reporter.tell(Message::ComputeModeStays, About::gpu(uuid), text);
        }
    }
}

impl Serving<'_> {
    /// Sets a compute mode again that somebody else has changed.
    pub(super) async fn keep_compute_modes(&mut self) {
        if !self.worker.order.set_compute_mode {
            return;
        }
        let status = self.worker.reporter.status();
        let is_kept =
            |uuid: &&String| status.gpus.get(*uuid).is_some_and(|gpu| gpu.compute_mode == Some(SERVED));
        let reached = |uuid: &&String| !self.worker.unreachable.contains(*uuid);
        for uuid in self.run.running.gpus.iter().filter(reached).filter(|uuid| !is_kept(uuid)) {
            match self.worker.tools.compute_modes.take(uuid).await {
                Ok(false) => {}
                Ok(true) => {
                    self.worker.reporter.warning(format!(
                        "compute mode of {uuid} was changed by others; set to {SERVED} again"
                    ));
                    self.worker.reporter.update_gpu(uuid, |status| status.compute_mode = Some(SERVED));
                }
                Err(error) => self.worker.reporter.warning(format!("compute mode of {uuid}: {error}")),
            }
        }
    }

    /// Puts back the compute modes of GPUs that neither the control daemon nor the order has any more.
    pub(super) async fn give_back_gpus(&mut self) {
        let (worker, present) = (&mut *self.worker, &self.run.running.gpus);
        let wanted = |uuid: &String| worker.order.plan.gpus.iter().any(|gpu| gpu.uuid == *uuid);
        let former = worker.former_gpus.iter().filter(|uuid| !wanted(uuid) && !present.contains(uuid));
        for uuid in former.cloned().collect::<Vec<_>>() {
            worker.restore_compute_mode(&uuid).await;
            worker.former_gpus.remove(&uuid);
        }
        worker.former_gpus.extend(present.iter().cloned());
    }
}
