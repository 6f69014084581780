//! The GPUs of an order: the GPUs that are out of service for now, and the compute modes while the control daemon has the GPUs.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::mem::discriminant;

use super::Wanted;
use super::bypasses::Bypasses;
use super::news::News;
use crate::terms::{GpuProcess, ProcessId};
use crate::view::{DaemonView, ServedGpuView};
use crate::{CoreTime, DaemonId, GpuUuid, Tenure};

/// The answers of NVML about GPUs, by UUID. An error is NVML's reason why it can't read the GPU.
pub type SeenGpus = BTreeMap<GpuUuid, Result<SeenGpu, String>>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenGpu {
    /// True if the GPU has the compute mode that the service sets.
    pub has_our_mode: bool,
    pub processes: Result<Vec<GpuProcess>, String>,
}

/// The processes on each GPU, by UUID, from NVML's last list.
pub(super) type ProcessesOnGpus = BTreeMap<GpuUuid, Vec<GpuProcess>>;

pub trait GpuShell: Send {
    /// Asks NVML about each of these GPUs. With `together`, one thread asks about all GPUs. Otherwise each GPU has its own
    /// thread, so that a GPU that hangs does not delay the answers about other GPUs. None if the running control daemon has
    /// ended before NVML has answered.
    fn read_gpus(
        &mut self,
        gpus: &[GpuUuid],
        together: bool,
    ) -> impl Future<Output = Option<SeenGpus>> + Send;

    /// Saves the compute mode of a GPU, and sets the compute mode that the order needs. Returns true if the GPU had another
    /// mode.
    fn take_mode(&mut self, gpu: &GpuUuid) -> impl Future<Output = Result<bool, String>> + Send;

    fn process(&self, pid: u32) -> Option<ProcessId>;

    /// Records the processes that use a GPU without a server of the control daemon. Reports new processes, and processes that
    /// have ended.
    fn bypasses_are(&mut self, gpu: &GpuUuid, bypasses: &BTreeSet<ProcessId>);

    fn show(&mut self, change: impl FnOnce(&mut DaemonView));

    fn tell(&mut self, news: News, text: String);

    /// Reports that the service has taken this step of a start or of a reload. Tests can then kill the service at this step.
    fn passed(&self, step: &'static str, text: &str);
}

/// The reason why a GPU of an order is out of service: the control daemon does not serve it for now.
#[derive(Debug, Clone, PartialEq, Eq)]
enum LeftOut {
    Unreachable(String),
    ModeRefused(String),
    InOtherHands(DaemonId),
}

impl LeftOut {
    fn describe(&self) -> String {
        match self {
            Self::Unreachable(error) => error.clone(),
            Self::ModeRefused(error) => format!(
                "the GPU is not served until its compute mode is set: {error}; to serve the GPU in its \
                 present compute mode, set cuda_mps_set_compute_mode: false (programs can then use the GPU \
                 without MPS and without limits)"
            ),
            Self::InOtherHands(id) => format!("control daemon {id} still has the GPU"),
        }
    }
}

/// The facts about the GPUs of an order, from NVML's answers. The facts outlive the control daemon, so that the next control
/// daemon for the order starts with them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuReach {
    left_out: BTreeMap<GpuUuid, LeftOut>,
    with_our_mode: BTreeSet<GpuUuid>,
    /// The GPUs that have had the compute mode of the service. If a GPU in this set has another mode now, another program has
    /// changed the mode.
    had_our_mode: BTreeSet<GpuUuid>,
    processes: ProcessesOnGpus,
    /// NVML did not list the processes of these GPUs at the last reading. The last known processes of these GPUs still count.
    unlisted: BTreeSet<GpuUuid>,
    bypasses: Bypasses,
}

impl GpuReach {
    pub fn is_left_out(&self, gpu: &str) -> bool {
        self.left_out.contains_key(gpu)
    }

    pub(super) fn has_our_mode(&self, gpu: &str) -> bool {
        self.with_our_mode.contains(gpu)
    }

    pub(super) fn gpus(&self, wanted: &Wanted) -> Vec<GpuUuid> {
        let all = wanted.gpus.iter().map(|gpu| gpu.uuid.clone());
        all.filter(|gpu| !self.is_left_out(gpu)).collect()
    }

    pub(super) fn why_none(&self, wanted: &Wanted) -> String {
        let first = self.left_out.iter().next();
        let why = first.map(|(gpu, why)| format!(": GPU {}: {}", wanted.name_of(gpu), why.describe()));
        let why = why.unwrap_or_default();
        format!("no GPU of this control daemon can be served{why}")
    }

    /// Reads each GPU of the order. A GPU that can't be served is taken out of service, and a GPU that can be served again is
    /// taken back into service. The other GPUs stay served. Returns the processes on each GPU. None if the control daemon has
    /// ended during the reading.
    pub(super) async fn look(
        &mut self,
        shell: &mut impl GpuShell,
        wanted: &Wanted,
    ) -> Option<ProcessesOnGpus> {
        let gpus: Vec<GpuUuid> = wanted.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        self.left_out.retain(|gpu, _| gpus.contains(gpu));
        self.with_our_mode.retain(|gpu| gpus.contains(gpu));
        self.had_our_mode.retain(|gpu| wanted.sets_modes && gpus.contains(gpu));
        let looks = shell.read_gpus(&gpus, self.left_out.is_empty()).await?;
        self.processes.retain(|gpu, _| gpus.contains(gpu));
        self.unlisted = gpus.into_iter().collect();
        for (gpu, look) in looks {
            self.with_our_mode.remove(&gpu);
            let look = look.map(|seen| {
                if let Ok(processes) = seen.processes {
                    self.processes.insert(gpu.clone(), processes);
                    self.unlisted.remove(&gpu);
                }
                if seen.has_our_mode {
                    self.note_our_mode(&gpu);
                }
            });
            let why = match (wanted.held.get(&gpu), look, self.left_out.get(&gpu)) {
                (Some(id), _, _) => Some(LeftOut::InOtherHands(id.clone())),
                (None, Err(error), _) => Some(LeftOut::Unreachable(error)),
                (None, Ok(()), Some(LeftOut::ModeRefused(_))) if !wanted.retiring => {
                    self.take_mode(shell, wanted, &gpu).await.err()
                }
                (None, Ok(()), _) => None,
            };
            self.leave_out(shell, wanted, &gpu, why);
        }
        Some(self.processes.clone())
    }

    /// Takes a GPU out of service for the reason `why`, or back into service if `why` is None. Reports a change.
    fn leave_out(&mut self, shell: &mut impl GpuShell, wanted: &Wanted, gpu: &GpuUuid, why: Option<LeftOut>) {
        show_gpu(shell, gpu, |gpu| gpu.left_out = why.as_ref().map(LeftOut::describe).unwrap_or_default());
        let has_changed = self.left_out.get(gpu).map(discriminant) != why.as_ref().map(discriminant);
        let before = match why {
            Some(why) => self.left_out.insert(gpu.clone(), why),
            None => self.left_out.remove(gpu),
        };
        if !has_changed {
            return;
        }
        let name = wanted.name_of(gpu);
        let (news, text) = match (before, self.left_out.get(gpu)) {
            (_, Some(why)) => {
                let news = match why {
                    LeftOut::Unreachable(_) => News::GpuUnreachable { gpu: gpu.clone() },
                    LeftOut::ModeRefused(_) => News::Warning,
                    LeftOut::InOtherHands(_) => News::Event,
                };
                (news, format!("GPU {name}: {}", why.describe()))
            }
            (Some(LeftOut::Unreachable(_)), None) => {
                (News::Event, format!("GPU {name} can be reached again"))
            }
            (Some(LeftOut::ModeRefused(_)), None) => {
                (News::Event, format!("the compute mode of GPU {name} can be set again"))
            }
            (Some(LeftOut::InOtherHands(id)), None) => {
                (News::Event, format!("GPU {name} is free: control daemon {id} has released the GPU"))
            }
            (None, None) => return,
        };
        shell.tell(news, text);
    }

    /// Sets the compute mode of each GPU in service. If the mode of a GPU can't be set, the GPU is taken out of service.
    pub(super) async fn take_modes(&mut self, shell: &mut impl GpuShell, wanted: &Wanted) {
        for gpu in self.gpus(wanted) {
            if let Err(refused) = self.take_mode(shell, wanted, &gpu).await {
                self.leave_out(shell, wanted, &gpu, Some(refused));
            }
        }
    }

    async fn take_mode(
        &mut self,
        shell: &mut impl GpuShell,
        wanted: &Wanted,
        gpu: &GpuUuid,
    ) -> Result<(), LeftOut> {
        if wanted.sets_modes {
            shell.take_mode(gpu).await.map_err(LeftOut::ModeRefused)?;
            self.note_our_mode(gpu);
        }
        Ok(())
    }

    fn note_our_mode(&mut self, gpu: &GpuUuid) {
        self.with_our_mode.insert(gpu.clone());
        self.had_our_mode.insert(gpu.clone());
    }

    /// Sets the compute mode again on the GPUs where another program has changed it.
    pub(super) async fn keep_modes(&mut self, shell: &mut impl GpuShell, wanted: &Wanted, gpus: &[GpuUuid]) {
        let changed = |gpu: &&GpuUuid| !self.is_left_out(gpu) && !self.with_our_mode.contains(*gpu);
        let changed: Vec<GpuUuid> =
            gpus.iter().filter(|_| wanted.sets_modes).filter(changed).cloned().collect();
        for gpu in changed {
            match shell.take_mode(&gpu).await {
                Ok(false) => {}
                Ok(true) => {
                    if self.had_our_mode.contains(&gpu) {
                        let (mode, name) = (wanted.id.tenure().compute_mode(), wanted.name_of(&gpu));
                        let text = format!(
                            "another program changed the compute mode of GPU {name}; the service has set {mode} again"
                        );
                        shell.tell(News::Warning, text);
                    }
                    self.note_our_mode(&gpu);
                }
                Err(error) => {
                    let text = format!(
                        "the service can't correct the compute mode of GPU {name}: {error}",
                        name = wanted.name_of(&gpu)
                    );
                    shell.tell(News::Warning, text);
                }
            }
        }
    }

    /// Searches these processes for bypasses: processes that are neither servers nor clients of the control daemon. If NVML
    /// does not list the processes of a GPU, the confirmed bypasses of the last search stay on this GPU. Returns the moment
    /// from which the next search can confirm a bypass.
    pub(super) fn find_bypasses(
        &mut self,
        shell: &mut impl GpuShell,
        wanted: &Wanted,
        there: &ProcessesOnGpus,
        (servers, clients): (&BTreeSet<u32>, &BTreeSet<u32>),
        now: CoreTime,
    ) -> Option<CoreTime> {
        let is_stranger = |pid: &u32| !servers.contains(pid) && !clients.contains(pid);
        let listed = there.iter().filter(|(gpu, _)| !self.unlisted.contains(*gpu));
        let on_gpus = listed.flat_map(|(gpu, there)| there.iter().map(move |one| (gpu, one.pid)));
        let strangers = on_gpus.filter(|(_, pid)| is_stranger(pid));
        let found = strangers.filter_map(|(gpu, pid)| Some((gpu.clone(), shell.process(pid)?)));
        let kept = self
            .unlisted
            .iter()
            .flat_map(|gpu| self.bypasses.confirmed(gpu).into_iter().map(|process| (gpu.clone(), process)));
        let found = found.chain(kept).collect();
        let due = self.bypasses.confirm(found, now);
        for gpu in wanted.gpus.iter().filter(|gpu| !self.unlisted.contains(&gpu.uuid)) {
            let confirmed = self.bypasses.confirmed(&gpu.uuid);
            let mut here = there.get(&gpu.uuid).into_iter().flatten();
            let server_is_there = here.any(|process| servers.contains(&process.pid));
            // In compute mode `DEFAULT` a program that has the GPU open does not prevent the start of a server.
            let server_is_kept_out = wanted.id.tenure() == Tenure::Alone
                && !confirmed.is_empty()
                && !server_is_there
                && self.has_our_mode(&gpu.uuid);
            shell.bypasses_are(&gpu.uuid, &confirmed);
            show_gpu(shell, &gpu.uuid, |gpu| gpu.server_kept_out = server_is_kept_out);
        }
        due
    }
}

fn show_gpu(shell: &mut impl GpuShell, gpu: &str, change: impl FnOnce(&mut ServedGpuView)) {
    shell.show(|view| {
        if let Some(gpu) = view.gpus.get_mut(gpu) {
            change(gpu);
        }
    });
}

pub(super) fn clients_among(there: &ProcessesOnGpus) -> BTreeSet<u32> {
    there.values().flatten().filter(|process| process.via_mps).map(|process| process.pid).collect()
}
