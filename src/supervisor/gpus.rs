//! The GPUs of a control daemon: NVML is asked for their processes and compute modes, and sets the modes.

use std::collections::BTreeMap;

use mps_core::GpuUuid;
use mps_core::serve::{GpuNews, GpuShell, SeenGpu, SeenGpus};

use crate::message::{Message, Subject};
use common::host::compute_mode::SERVED;

use super::Worker;

impl GpuShell for Worker {
    async fn read_gpus(&mut self, gpus: &[GpuUuid], together: bool) -> Option<SeenGpus> {
        let mut processes = BTreeMap::new();
        let mut seen = BTreeMap::new();
        for (uuid, look) in self.tools.compute_modes.read_gpus(gpus.to_vec(), together).await {
            let mode = look.as_ref().ok().map(|(mode, _)| *mode);
            self.reporter.update_gpu(&uuid, |status| status.compute_mode = mode);
            let look = look.map(|(mode, there)| {
                let clients = there.iter().filter(|process| process.via_mps).count();
                processes.insert(uuid.clone(), there);
                SeenGpu { has_our_mode: mode == SERVED, clients }
            });
            seen.insert(uuid, look);
        }
        self.processes = processes;
        Some(seen)
    }

    async fn take_mode(&mut self, gpu: &GpuUuid) -> Result<bool, String> {
        let was_needed = self.tools.compute_modes.take(gpu).await?;
        self.reporter.update_gpu(gpu, |status| status.compute_mode = Some(SERVED));
        Ok(was_needed)
    }

    fn show_left_out(&mut self, gpu: &GpuUuid, why: String) {
        self.reporter.update_gpu(gpu, |status| status.left_out = why);
    }

    fn tell_of_gpu(&mut self, gpu: &GpuUuid, news: GpuNews, text: String) {
        match news {
            GpuNews::Event => self.reporter.event(text),
            GpuNews::Warning => self.reporter.warning(text),
            GpuNews::Unreachable => {
                self.reporter.report(Message::GpuUnreachable, Subject::gpu(gpu), text);
            }
        }
    }
}
