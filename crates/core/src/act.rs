//! The acts that the core orders. The code that carries them out decides nothing.

use core::time::Duration;

use crate::{DaemonId, Goal, GpuUuid, HeldGpus, Order, Permit};

/// An act that the core orders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Act<P> {
    /// An act about one control daemon. At most one such act is under way for an id, and it comes back as
    /// [`crate::CoreEvent::Done`]. Only [`DaemonAct::Rest`] does not come back.
    Daemon {
        id: DaemonId,
        /// The order at this moment.
        order: Order<P>,
        /// The goal at this moment.
        goal: Goal,
        /// The GPUs of the order that the control daemon has to do without.
        held: HeldGpus,
        act: DaemonAct,
    },
    /// Break off the act that is under way for this id, at once. The act then comes back as interrupted, or with its outcome if
    /// it was over before.
    Interrupt { id: DaemonId },
    /// The control daemon with this id needs no supervisor any more.
    Release { id: DaemonId },
    /// Set the compute mode of this GPU to the service's, after recording the former mode. The act comes back as
    /// [`crate::CoreEvent::ModeDone`].
    TakeMode(GpuUuid),
    /// Restore the compute mode of this GPU, unless other programs have changed it since, or the service has never changed it.
    /// The act comes back as [`crate::CoreEvent::ModeDone`].
    PutModeBack(GpuUuid),
}

/// An act about one control daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DaemonAct {
    /// Watch the process that the state file has under this id. If the process has ended, the state file forgets it.
    TakeOver,
    /// Start a control daemon with those GPUs of the order that no other control daemon has.
    Start,
    /// Give the control daemon its order, and watch it until it ends, fails, or has to end.
    Serve,
    /// Find out who uses a control daemon that has failed.
    Judge,
    /// End the control daemon, for the cause of the permit. If the cause is that the control daemon is unused, and a client comes
    /// meanwhile, the control daemon lives on until the client has ended. With any other cause the clients lose their work.
    End(Permit),
    /// Show why the control daemon does not serve, and that the service tries again after this time.
    Rest(Duration),
    /// Record the facts that the next service needs to take the control daemon over.
    Leave,
}
