//! The compute modes that the service has changed, and has to restore once it no longer needs the GPUs.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::{Configured, GpuUuid, ModeOutcome};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Modes {
    /// The former compute modes of these GPUs are not restored even while no control daemon serves them, since the
    /// configuration names them.
    kept: Configured,
    /// The compute modes of these GPUs may have to be restored, since the service has changed them.
    touched: BTreeSet<GpuUuid>,
    under_way: BTreeSet<GpuUuid>,
    /// The service could not restore the compute modes of these GPUs. The next plan causes another attempt.
    stuck: BTreeSet<GpuUuid>,
    /// The compute modes of these GPUs should be set though no control daemon serves them, so that no more programs without MPS
    /// start on them.
    to_close: BTreeSet<GpuUuid>,
}

impl Modes {
    pub(crate) fn new(touched: BTreeSet<GpuUuid>) -> Self {
        Self {
            kept: Configured::default(),
            touched,
            under_way: BTreeSet::new(),
            stuck: BTreeSet::new(),
            to_close: BTreeSet::new(),
        }
    }

    /// Sets the GPUs of a new plan. The service tries again to restore the compute modes that it could not restore before.
    pub(crate) fn pursue(&mut self, kept: Configured, closed: Vec<GpuUuid>) {
        self.kept = kept;
        self.to_close = closed.into_iter().collect();
        self.stuck.clear();
    }

    /// Drops the plan. From now on, a GPU has the service's compute mode only while a control daemon has the GPU.
    pub(crate) fn give_up(&mut self) {
        self.pursue(Configured::default(), Vec::new());
    }

    /// Records that a control daemon may change the compute modes of these GPUs, so that the modes are restored later.
    pub(crate) fn may_be_set(&mut self, gpus: impl Iterator<Item = GpuUuid>) {
        self.touched.extend(gpus);
    }

    pub(crate) fn begin(&mut self, gpu: &GpuUuid) {
        self.touched.insert(gpu.clone());
        self.under_way.insert(gpu.clone());
        self.to_close.remove(gpu);
    }

    pub(crate) fn done(&mut self, gpu: &GpuUuid, outcome: ModeOutcome) {
        self.under_way.remove(gpu);
        match outcome {
            ModeOutcome::Taken => {}
            ModeOutcome::PutBack => _ = self.touched.remove(gpu),
            ModeOutcome::Stays => _ = self.stuck.insert(gpu.clone()),
        }
    }

    /// Returns whether the compute mode of this GPU is being changed. No other part of the code may set the mode until the
    /// change is done.
    pub(crate) fn is_under_way(&self, gpu: &GpuUuid) -> bool {
        self.under_way.contains(gpu)
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.under_way.is_empty()
    }

    /// The service restores the compute modes of these GPUs now. No control daemon needs these GPUs (`is_used`), and the
    /// configuration does not name these GPUs. If a mode were restored earlier, programs without MPS could use the GPU without
    /// limits.
    pub(crate) fn to_put_back(&self, is_used: impl Fn(&GpuUuid) -> bool) -> Vec<GpuUuid> {
        let left = self.touched.difference(&self.under_way).filter(|gpu| !self.stuck.contains(*gpu));
        left.filter(|gpu| !self.kept.may_have(gpu) && !is_used(gpu)).cloned().collect()
    }

    pub(crate) fn to_take(&self) -> Vec<GpuUuid> {
        self.to_close.difference(&self.under_way).cloned().collect()
    }
}
