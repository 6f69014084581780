//! The acts that the core orders, and that the code outside the core carries out.

use core::time::Duration;

use crate::{DaemonId, Goal, GpuUuid, HeldGpus, Order, Permit};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Act<P> {
    /// An act about one control daemon. At most one act is under way for each control daemon. The result of the act comes back
    /// as [`crate::CoreEvent::Done`]. Only [`DaemonAct::Rest`] has no result.
    Daemon {
        id: DaemonId,
        order: Order<P>,
        goal: Goal,
        /// The GPUs of the order that other control daemons still have, so this control daemon can't use them yet.
        held: HeldGpus,
        act: DaemonAct,
    },
    /// Break off the act that is under way for this id, at once. An act that is broken off comes back with
    /// [`crate::ActOutcome::Interrupted`]. An act that was already finished comes back with its own outcome.
    Interrupt { id: DaemonId },
    /// The core has no more acts for this id, so the supervisor can end.
    Release { id: DaemonId },
    /// Save the present compute mode of this GPU, and set the compute mode that the service needs. The result comes back as
    /// [`crate::CoreEvent::ModeDone`].
    TakeMode(GpuUuid),
    /// Restore the saved compute mode of this GPU. The mode stays as it is if another program has changed it since, or if the
    /// service has never changed it. The result comes back as [`crate::CoreEvent::ModeDone`].
    PutModeBack(GpuUuid),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DaemonAct {
    /// Begin to watch the process that the state file names for this control daemon. If the process has ended, remove it from
    /// the state file.
    TakeOver,
    /// Start the control daemon on the GPUs of its order, except for GPUs that other control daemons still have.
    Start,
    /// Give the running control daemon its order. Then watch the control daemon until it ends, fails, or needs its order again.
    Serve,
    /// Find out if programs still use a control daemon that has failed. The service does not end a failed control daemon that
    /// has clients.
    Judge,
    /// End the control daemon, for the cause in the permit. With [`crate::Cause::Unused`], a client that connects in the
    /// meantime prevents the end until the client has ended. With any other cause, the clients of the control daemon lose their
    /// work.
    End(Permit),
    /// Publish why the control daemon does not serve, and that the service tries again after this pause.
    Rest(Duration),
    /// Save the facts that the next process of the service needs to take over the control daemon.
    Leave,
}
