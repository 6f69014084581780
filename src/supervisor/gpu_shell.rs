//! Asks NVML for the processes on a control daemon's GPUs and for their compute modes, and sets the modes.

use std::collections::{BTreeMap, BTreeSet};

use mps_core::serve::{GpuShell, News, SeenGpu, SeenGpus};
use mps_core::terms::{GpuProcess, ProcessId, ServedGpu};
use mps_core::view::DaemonView;
use mps_core::{GpuUuid, Tenure};

use crate::message::{Message, Subject};
use common::host::compute_mode::ComputeMode;
use common::host::identity;
use common::host::proc;

use super::Worker;
use super::bypass::{self, Bypass};

impl GpuShell for Worker {
    async fn read_gpus(&mut self, gpus: &[GpuUuid], together: bool) -> Option<SeenGpus> {
        let served = ComputeMode::while_served(self.plan.tenure());
        // Only GPUs that have left the order are removed here. If NVML does not answer for a GPU, the GPU's processes from the
        // last answer stay.
        self.processes.retain(|gpu, _| gpus.contains(gpu));
        let mut seen = BTreeMap::new();
        for (uuid, look) in self.tools.nvml.read_gpus(gpus.to_vec(), together).await {
            let mode = look.as_ref().ok().map(|(mode, _)| *mode);
            self.reporter.update(|status| {
                status.compute_modes.remove(&uuid);
                status.compute_modes.extend(mode.map(|mode| (uuid.clone(), mode)));
            });
            let look = look.map(|(mode, there)| {
                let processes = there.map(|there| {
                    let there = self.own(there);
                    self.processes.insert(uuid.clone(), there.clone());
                    there
                });
                if let Err(error) = &processes {
                    tracing::debug!(gpu_uuid = uuid, "{error}");
                }
                SeenGpu { has_our_mode: mode == served, processes: processes.map_err(Into::into) }
            });
            seen.insert(uuid, look.map_err(Into::into));
        }
        // These processes use a GPU without MPS. Messages name the owner of each of these processes, so the register of clients
        // reads the owners now.
        let strangers = self.processes.values().flatten().filter(|process| !process.via_mps);
        let strangers: Vec<ProcessId> =
            strangers.filter_map(|process| identity::read(process.pid).ok()).collect();
        self.tools.clients.look_up(&strangers).await;
        Some(seen)
    }

    async fn take_mode(&mut self, gpu: &GpuUuid) -> Result<bool, String> {
        let served = ComputeMode::while_served(self.plan.tenure());
        let was_needed = self.tools.nvml.take(gpu, served).await?;
        self.reporter.update(|status| _ = status.compute_modes.insert(gpu.clone(), served));
        Ok(was_needed)
    }

    fn process(&self, pid: u32) -> Option<ProcessId> {
        identity::read(pid).ok()
    }

    fn bypasses_are(&mut self, gpu: &GpuUuid, bypasses: &BTreeSet<ProcessId>) {
        let memory_of = |pid| {
            let there = self.processes.get(gpu).into_iter().flatten();
            there.filter(|process| process.pid == pid).find_map(|process| process.memory_mib)
        };
        let bypass = |process: &ProcessId| {
            let (process, command) = (*process, proc::name(process.pid)?);
            let memory_mib = memory_of(process.pid);
            let owner = self.tools.clients.get(process).owner();
            Some(Bypass { gpu_uuid: gpu.clone(), process, command, memory_mib, owner })
        };
        let now: Vec<Bypass> = bypasses.iter().filter_map(bypass).collect();
        let before: Vec<Bypass> = self.reporter.status().bypasses_on(gpu).cloned().collect();
        let missing_in = |list: &[Bypass], bypass: &Bypass| !list.iter().any(|one| one.is(bypass));
        let come: Vec<&Bypass> = now.iter().filter(|bypass| missing_in(&before, bypass)).collect();
        let gone: Vec<&Bypass> = before.iter().filter(|bypass| missing_in(&now, bypass)).collect();
        let is_news = !come.is_empty() || !gone.is_empty();
        let told = &self.tools.told_bypasses;
        let (come, gone) = (told.newly_told(come), told.newly_gone(gone));
        let planned = self.plan.gpus.iter().find(|planned| planned.uuid == *gpu);
        let name = planned.map_or_else(|| gpu.clone(), ServedGpu::name);
        if !come.is_empty() {
            let who = bypass::describe(come);
            let text = format!("GPU {name} is used without an MPS server of this service by {who}");
            self.reporter.report(Message::Bypass, Subject::gpu(gpu), text);
        }
        if !gone.is_empty() {
            let who = bypass::describe(gone);
            self.reporter.event(format!(
                "the use of GPU {name} without an MPS server of this service has ended: {who}"
            ));
        }
        // A change of a bypass's memory alone is not published. Otherwise each health check would publish a new status.
        if is_news {
            self.reporter.update(|status| {
                status.bypasses.retain(|bypass| bypass.gpu_uuid != *gpu);
                status.bypasses.extend(now);
            });
        }
    }

    fn show(&mut self, change: impl FnOnce(&mut DaemonView)) {
        self.reporter.show(change);
    }

    fn passed(&self, step: &'static str, text: &str) {
        tracing::debug!(step, "{text}");
    }

    fn tell(&mut self, news: News, text: String) {
        let of_server = |server| Subject { server: Some(server), ..Subject::default() };
        match news {
            News::Event => self.reporter.event(text),
            News::Warning => self.reporter.warning(text),
            News::GpuUnreachable { gpu } => {
                self.reporter.report(Message::GpuUnreachable, Subject::gpu(&gpu), text);
            }
            News::ServerFault { server } => {
                self.reporter.update(|status| status.view.faults += 1);
                self.reporter.report(Message::ServerFault, of_server(server), text);
            }
            News::ServerFailed { server } => {
                self.reporter.report(Message::ServerFailed, of_server(server), text);
            }
        }
    }
}

impl Worker {
    /// Removes the processes of other control daemons from NVML's list. If control daemons take turns on a GPU, NVML does not
    /// say to which control daemon a client belongs. So all MPS clients are removed, and the servers of the other control
    /// daemons.
    fn own(&self, mut there: Vec<GpuProcess>) -> Vec<GpuProcess> {
        if self.plan.tenure() == Tenure::InTurns {
            let others = self.tools.state_file.lock().pids_of_others(&self.plan.id);
            let is_theirs = |pid| proc::stat(pid).is_ok_and(|process| others.contains(&process.parent));
            there.retain(|process| !process.via_mps && !is_theirs(process.pid));
        }
        there
    }
}
