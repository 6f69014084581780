//! The GPUs of a control daemon: their processes, and their compute modes from its start to its end.

use std::collections::BTreeMap;
use std::mem::discriminant;

use crate::message::{Message, Subject};
use common::host::compute_mode::SERVED;
use common::host::nvml::GpuProcess;

use super::Worker;

/// Why a control daemon goes without a GPU of its order.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum LeftOut {
    /// NVML can't reach it, and says this.
    Unreachable(String),
    /// Its compute mode can't be set, for this reason.
    ModeRefused(String),
    /// The control daemon with this id still has it.
    InOtherHands(String),
}

impl LeftOut {
    fn describe(&self) -> String {
        match self {
            Self::Unreachable(error) => error.clone(),
            Self::ModeRefused(error) => format!("it is served once its compute mode can be set: {error}"),
            Self::InOtherHands(id) => format!("control daemon {id} still has it"),
        }
    }
}

impl Worker {
    /// Asks NVML for the compute mode and the processes of each GPU. The status of a GPU says why it is left out; the other
    /// GPUs stay served.
    pub(super) async fn read_gpus(&mut self) -> BTreeMap<String, Vec<GpuProcess>> {
        let mut processes = BTreeMap::new();
        let gpus = self.order.plan.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        for (uuid, look) in self.tools.compute_modes.read_gpus(gpus, self.left_out.is_empty()).await {
            let found = look.map(|(mode, there)| {
                processes.insert(uuid.clone(), there);
                mode
            });
            self.reporter.update_gpu(&uuid, |status| status.compute_mode = found.as_ref().ok().copied());
            let why = match (self.held.get(&uuid), found, self.left_out.get(&uuid)) {
                (Some(id), _, _) => Some(LeftOut::InOtherHands(id.clone())),
                (None, Err(error), _) => Some(LeftOut::Unreachable(error)),
                (None, Ok(_), Some(LeftOut::ModeRefused(_))) if !self.is_retiring() => {
                    self.take_compute_mode(&uuid).await.err()
                }
                (None, Ok(_), _) => None,
            };
            self.leave_out(&uuid, why);
        }
        processes
    }

    /// Leaves a GPU out for this reason, or without one takes it in again.
    fn leave_out(&mut self, uuid: &str, why: Option<LeftOut>) {
        self.reporter.update_gpu(uuid, |status| {
            status.left_out = why.as_ref().map(LeftOut::describe).unwrap_or_default();
        });
        let has_changed = self.left_out.get(uuid).map(discriminant) != why.as_ref().map(discriminant);
        let before = match why {
            Some(why) => self.left_out.insert(uuid.to_owned(), why),
            None => self.left_out.remove(uuid),
        };
        if !has_changed {
            return;
        }
        match (before, self.left_out.get(uuid)) {
            (_, Some(why @ LeftOut::Unreachable(_))) => {
                let text = format!("GPU {uuid}: {}", why.describe());
                self.reporter.report(Message::GpuUnreachable, Subject::gpu(uuid), text);
            }
            (_, Some(why @ LeftOut::ModeRefused(_))) => {
                self.reporter.warning(format!("GPU {uuid}: {}", why.describe()));
            }
            (_, Some(why @ LeftOut::InOtherHands(_))) => {
                self.reporter.event(format!("GPU {uuid}: {}", why.describe()));
            }
            (Some(LeftOut::Unreachable(_)), None) => {
                self.reporter.event(format!("GPU {uuid} can be reached again"));
            }
            (Some(LeftOut::ModeRefused(_)), None) => {
                self.reporter.event(format!("the compute mode of GPU {uuid} can be set again"));
            }
            (Some(LeftOut::InOtherHands(id)), None) => {
                self.reporter.event(format!("GPU {uuid} is free: control daemon {id} has released it"));
            }
            (None, None) => {}
        }
    }

    /// The GPUs of the order that are not left out.
    pub(super) fn gpus_in_reach(&self) -> Vec<String> {
        let all = self.order.plan.gpus.iter().map(|gpu| gpu.uuid.clone());
        all.filter(|uuid| !self.left_out.contains_key(uuid)).collect()
    }

    /// Why all GPUs of the order are left out, in words.
    pub(super) fn why_no_gpu(&self) -> String {
        let first = self.left_out.iter().next();
        let why = first.map(|(uuid, why)| format!(": GPU {uuid}: {}", why.describe())).unwrap_or_default();
        format!("none of its GPUs can be served{why}")
    }

    /// Sets the compute mode of each GPU that is not left out. Leaves a GPU out that refuses it.
    pub(super) async fn take_compute_modes(&mut self) {
        for uuid in self.gpus_in_reach() {
            if let Err(refused) = self.take_compute_mode(&uuid).await {
                self.leave_out(&uuid, Some(refused));
            }
        }
    }

    /// Sets the compute mode of a GPU, if that is ours to do.
    async fn take_compute_mode(&self, uuid: &str) -> Result<(), LeftOut> {
        if self.order.supervision.set_compute_mode {
            self.tools.compute_modes.take(uuid).await.map_err(LeftOut::ModeRefused)?;
            self.reporter.update_gpu(uuid, |status| status.compute_mode = Some(SERVED));
        }
        Ok(())
    }

    /// Sets a compute mode again that somebody else has changed on one of these GPUs.
    pub(super) async fn keep_compute_modes(&self, gpus: &[String]) {
        if !self.order.supervision.set_compute_mode {
            return;
        }
        let status = self.reporter.status();
        let is_kept =
            |uuid: &&String| status.gpus.get(*uuid).is_some_and(|gpu| gpu.compute_mode == Some(SERVED));
        let reached = |uuid: &&String| !self.left_out.contains_key(*uuid);
        for uuid in gpus.iter().filter(reached).filter(|uuid| !is_kept(uuid)) {
            match self.tools.compute_modes.take(uuid).await {
                Ok(false) => {}
                Ok(true) => {
                    self.reporter.warning(format!(
                        "compute mode of {uuid} was changed by others; set to {SERVED} again"
                    ));
                    self.reporter.update_gpu(uuid, |status| status.compute_mode = Some(SERVED));
                }
                Err(error) => self.reporter.warning(format!("compute mode of {uuid}: {error}")),
            }
        }
    }
}
