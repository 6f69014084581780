//! Everything that is to be done. The code that does it decides nothing.

use core::time::Duration;

use crate::{DaemonId, Goal, GpuUuid, HeldGpus, Order, Permit};

/// Something that is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Act<P> {
    /// About one control daemon. One such act at a time is under way for an id, and comes back as
    /// [`crate::CoreEvent::Done`]; [`DaemonAct::Rest`] alone does not.
    Daemon {
        /// Its id.
        id: DaemonId,
        /// Its order at this moment.
        order: Order<P>,
        /// Its aim at this moment.
        goal: Goal,
        /// The GPUs of the order that it has to do without.
        held: HeldGpus,
        /// The act.
        act: DaemonAct,
    },
    /// Break off the act that is under way for this id, at once. It comes back as interrupted, or as it has just ended.
    Interrupt {
        /// The id.
        id: DaemonId,
    },
    /// The control daemon with this id needs no supervisor any more.
    Release {
        /// The id.
        id: DaemonId,
    },
    /// Set the compute mode of this GPU to the service's, the former one written down before. It comes back as
    /// [`crate::CoreEvent::ModeDone`].
    TakeMode(GpuUuid),
    /// Put the compute mode of this GPU back, unless others have changed it since or it was never changed. It comes back as
    /// [`crate::CoreEvent::ModeDone`].
    PutModeBack(GpuUuid),
}

/// Something that is to be done about one control daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DaemonAct {
    /// Hold the process that the state file has under this id. If it has ended, the state file forgets it.
    TakeOver,
    /// Start one with the GPUs of the order that are not held.
    Start,
    /// Give it its order, and watch it until it ends, fails, or has to end.
    Serve,
    /// Find out who uses it, after it has failed.
    Judge,
    /// End it, for the cause of the permit. Unused, it lives on if a client comes in between, until that one has ended. For any
    /// other cause its clients lose their work.
    End(Permit),
    /// Show why it does not serve, and that it is tried again after this time.
    Rest(Duration),
    /// Write down what the next service needs to take it over.
    Leave,
}
