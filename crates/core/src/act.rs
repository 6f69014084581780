//! The acts that the core orders. The code that carries the acts out decides nothing.

use core::time::Duration;

use crate::{DaemonId, Goal, GpuUuid, HeldGpus, Order, Permit};

/// An act that the core orders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Act<P> {
    /// An act about one control daemon. At most one act is under way for each control daemon. The result of the act comes back as
    /// [`crate::CoreEvent::Done`], except for [`DaemonAct::Rest`], which has no result.
    Daemon {
        id: DaemonId,
        /// The order for the control daemon when the act begins.
        order: Order<P>,
        /// The aim of the control daemon when the act begins.
        goal: Goal,
        /// The GPUs of the order that other control daemons still have.
        held: HeldGpus,
        act: DaemonAct,
    },
    /// Break off the act that is under way for this id, at once. The result of an act that was broken off comes back as
    /// [`crate::ActOutcome::Interrupted`]; if the act was over before, its own outcome comes back.
    Interrupt { id: DaemonId },
    /// The control daemon with this id needs no supervisor any more.
    Release { id: DaemonId },
    /// Record the compute mode of this GPU, and set the service's compute mode. The result of the act comes back as
    /// [`crate::CoreEvent::ModeDone`].
    TakeMode(GpuUuid),
    /// Restore the recorded compute mode of this GPU, unless another program has changed the mode since, or the service has never
    /// changed it. The result of the act comes back as [`crate::CoreEvent::ModeDone`].
    PutModeBack(GpuUuid),
}

/// An act about one control daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DaemonAct {
    /// Watch the process that the state file has under this id. If the process has ended, remove it from the state file.
    TakeOver,
    /// Start a control daemon with those GPUs of the order that no other control daemon has.
    Start,
    /// Carry out the order with the running control daemon, and watch the control daemon until it ends, fails, or has to end.
    Serve,
    /// Find out if programs use a control daemon that has failed.
    Judge,
    /// End the control daemon, for the cause that the permit has. If the cause is that the control daemon is unused, and a client
    /// comes meanwhile, the control daemon lives on until the client has ended. With any other cause than
    /// [`crate::Cause::Unused`], the clients of the control daemon lose their work.
    End(Permit),
    /// Show the reason why the control daemon does not serve, and that the service tries again after this time.
    Rest(Duration),
    /// Record the facts that the next service needs to take the control daemon over.
    Leave,
}
