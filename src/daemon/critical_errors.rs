//! Critical errors of GPUs: they are told, and a GPU that needs a reset takes no client until it has had one.

use super::Daemon;
use crate::message::{Message, Subject};
use common::host::xid::{CriticalError, FollowUp};

impl Daemon {
    /// A GPU has met a critical error.
    pub(super) fn met(&mut self, uuid: &str, error: CriticalError) {
        let name = self.name_of(uuid);
        let text = match error.follow_up() {
            FollowUp::Reset => {
                let written = self.state_file.lock().remember_reset(uuid, &error.to_string());
                if let Err(error) = written {
                    tracing::warn!("it can't be written down that GPU {name} needs a reset: {error}");
                }
                format!("GPU {name} met a critical error, {error}; it takes no new client before a reset")
            }
            FollowUp::Application | FollowUp::Look => format!("GPU {name} met a critical error, {error}"),
        };
        Message::CriticalError.log(Subject { xid: Some(error.xid), ..Subject::gpu(uuid) }, &text);
        self.keep_event(text);
        self.fleet.met_xid(uuid, error.xid);
    }

    /// The GPUs take clients again, by the word of an administrator.
    pub(super) fn forget_resets(&mut self) {
        let uuids: Vec<String> = self.state_file.lock().to_reset().keys().cloned().collect();
        if uuids.is_empty() {
            return;
        }
        if let Err(error) = self.state_file.lock().forget_resets() {
            return tracing::warn!("that GPUs need no reset any more can't be written down: {error}");
        }
        for uuid in uuids {
            let name = self.name_of(&uuid);
            self.event(format!("GPU {name} no longer counts as in need of a reset"));
        }
    }

    /// The GPU as everything else names it.
    fn name_of(&self, uuid: &str) -> String {
        let planned = self.planned_gpus().iter().find(|gpu| gpu.gpu.uuid() == Some(uuid));
        planned.map_or_else(|| uuid.to_owned(), |gpu| gpu.gpu.id().to_string())
    }
}
