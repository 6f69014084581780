//! The events on which the decisions of the core depend.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::{Configured, DaemonId, GpuUuid};

/// An event, after which the core may order acts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CoreEvent<P> {
    /// A new plan has come into force.
    Pursue(Demand<P>),
    /// An administrator stops the service for good. Every control daemon ends with its clients, including control daemons that
    /// an earlier service has started.
    Stop {
        /// An order for each control daemon in the state file. The order is used if the control daemon has no supervisor.
        left: Vec<Order<P>>,
    },
    /// The service ends, and leaves the control daemons to the next service.
    Leave,
    /// The service has carried out an act about a control daemon.
    Done {
        id: DaemonId,
        /// The GPUs that the state file names for the control daemon after the act. None if the state file does not have the
        /// control daemon.
        written: Option<Vec<GpuUuid>>,
        /// True if the service watches the process, and so learns when it ends.
        watched: bool,
        outcome: ActOutcome,
    },
    /// The service has carried out an act about a compute mode.
    ModeDone {
        /// The UUID of the GPU whose compute mode was changed.
        gpu: GpuUuid,
        outcome: ModeOutcome,
    },
    /// The moment that [`crate::Core::due`] has returned has come.
    Due,
}

/// The orders and the compute modes that a plan asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand<P> {
    /// The control daemons that should run.
    pub orders: Vec<Order<P>>,
    /// An order for each control daemon in the state file that has no order in `orders`. The order is used if the control daemon
    /// has no supervisor.
    pub left: Vec<Order<P>>,
    /// The state of the switch `enable_cuda_mps`.
    pub mps: MpsSwitch,
    /// The GPUs that keep the service's compute mode, even if they are not served at the moment. None if the service does not set
    /// compute modes.
    pub kept: Configured,
    /// The GPUs that programs without MPS use. The service sets the compute mode of GPUs that programs without MPS use, though it
    /// does not serve these GPUs, so that no further programs without MPS can use them.
    pub closed: Vec<GpuUuid>,
}

/// The switch `enable_cuda_mps`, and how it was turned off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MpsSwitch {
    /// The switch is on: a control daemon that is no longer needed ends once it has no client.
    On,
    /// The switch was off when the service started. A control daemon that runs already ends once it has no client, since no
    /// administrator has just asked for the end of GPU work.
    OffAtStart,
    /// An administrator has just turned the switch off: control daemons end with their clients.
    TurnedOff,
}

/// The order for one control daemon: the GPUs that it should serve, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order<P> {
    /// The id of the control daemon. No two orders have the same id.
    pub id: DaemonId,
    /// The GPUs of the control daemon. Two orders share a GPU only if the tenure of both is [`crate::Tenure::InTurns`].
    pub gpus: Vec<GpuUuid>,
    /// True if the control daemon sets the compute modes of its GPUs.
    pub sets_modes: bool,
    /// The part of the order that the core only compares and does not read.
    pub payload: P,
}

/// The outcome of an act about a control daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActOutcome {
    /// The act has succeeded. The process of the control daemon may have ended if the act was [`crate::DaemonAct::TakeOver`].
    Done,
    /// The service has ended the control daemon, since the order has changed or the control daemon is unused.
    Ended,
    /// The control daemon lives, and has to be given its order again.
    Again,
    /// The act has failed for this reason.
    Failed(WhyFailed),
    /// The answer to [`crate::DaemonAct::Judge`]: the use of the control daemon.
    Used(RunUse),
    /// The control daemon still lives after every attempt to end it.
    Lives,
    /// The act was broken off by [`crate::Act::Interrupt`].
    Interrupted,
}

/// The reason why an act has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhyFailed {
    /// The process of the control daemon has ended.
    Gone,
    /// The control daemon does not work properly, or a fault outside of it prevents the service from using it.
    Ill,
    /// Something outside of the control daemon is not ready yet, and soon will be. A new control daemon would have to wait for
    /// the same thing.
    NotYet,
    /// The service does not understand the control daemon's answers. A new control daemon would answer the same.
    NotUnderstood,
}

/// The use of a control daemon that does not work properly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunUse {
    /// The control daemon has ended meanwhile.
    Gone,
    /// No program uses the control daemon.
    Idle,
    /// The control daemon has no client, but programs without MPS prevent the start of a server. If the control daemon ended,
    /// more programs without MPS could start.
    KeptOut,
    /// The control daemon has clients, or the service can't find out if it has clients.
    Clients,
}

/// The outcome of an act about a compute mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModeOutcome {
    /// The GPU has the service's compute mode, or keeps another mode for a reason that was logged.
    Taken,
    /// The GPU has its recorded compute mode again, or a mode that another program has set since.
    PutBack,
    /// The service can't restore the compute mode now.
    Stays,
}

/// The GPUs in an order that other control daemons still have, each with the id of that control daemon.
pub type HeldGpus = BTreeMap<GpuUuid, DaemonId>;
