//! The compute modes that the service has changed: kept while a GPU is ours, put back afterwards, and only then.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::{Configured, GpuUuid, ModeOutcome};

/// The state of compute modes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Modes {
    /// The GPUs that keep our mode, served or not.
    kept: Configured,
    /// The GPUs with a mode that may have to be put back.
    touched: BTreeSet<GpuUuid>,
    /// The GPUs with a mode that is just being set or put back.
    under_way: BTreeSet<GpuUuid>,
    /// The GPUs with a mode that could not be put back. It is tried again with the next plan.
    stuck: BTreeSet<GpuUuid>,
    /// The GPUs with a mode that is to be set, though they are not served.
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

    /// Goes by a new plan, and tries again whatever could not be put back.
    pub(crate) fn pursue(&mut self, kept: Configured, closed: Vec<GpuUuid>) {
        self.kept = kept;
        self.to_close = closed.into_iter().collect();
        self.stuck.clear();
    }

    /// Keeps no mode any longer than a control daemon of ours has the GPU.
    pub(crate) fn give_up(&mut self) {
        self.pursue(Configured::default(), Vec::new());
    }

    /// The modes of these GPUs are set for a control daemon.
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

    /// True if no other task may set the mode of this GPU at this moment.
    pub(crate) fn is_under_way(&self, gpu: &GpuUuid) -> bool {
        self.under_way.contains(gpu)
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.under_way.is_empty()
    }

    /// The GPUs with a mode that is to be put back now: no control daemon of ours keeps it, as `is_used` says, and the
    /// configuration does not name them. Earlier, any program would get in, with no limit.
    pub(crate) fn to_put_back(&self, is_used: impl Fn(&GpuUuid) -> bool) -> Vec<GpuUuid> {
        let left = self.touched.difference(&self.under_way).filter(|gpu| !self.stuck.contains(*gpu));
        left.filter(|gpu| !self.kept.may_have(gpu) && !is_used(gpu)).cloned().collect()
    }

    /// The GPUs with a mode that is to be set now, though they are not served.
    pub(crate) fn to_take(&self) -> Vec<GpuUuid> {
        self.to_close.difference(&self.under_way).cloned().collect()
    }
}
