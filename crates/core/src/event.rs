//! The events that the core reacts to.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::{Configured, DaemonId, GpuUuid};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CoreEvent<P> {
    Pursue(Demand<P>),
    /// An administrator stops the service for good, so every control daemon ends together with its clients. Control daemons
    /// that an earlier process of the service has started end too.
    Stop {
        /// An order for each control daemon in the state file. The core uses these orders to end the control daemons that have
        /// no supervisor yet.
        left: Vec<Order<P>>,
    },
    /// The process of the service ends, and leaves its control daemons running. The next process of the service takes over the
    /// control daemons.
    Leave,
    Done {
        id: DaemonId,
        /// The GPUs of the control daemon in the state file after the act. None if the state file does not name the control
        /// daemon.
        written: Option<Vec<GpuUuid>>,
        /// True if the service watches the process of the control daemon, and therefore notices its end.
        watched: bool,
        outcome: ActOutcome,
    },
    ModeDone {
        /// The act was about the compute mode of this GPU.
        gpu: GpuUuid,
        outcome: ModeOutcome,
    },
    /// The moment that [`crate::Core::due`] has returned has come.
    Due,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand<P> {
    pub orders: Vec<Order<P>>,
    /// An order for each control daemon that the state file names and that `orders` does not name. The core uses these orders
    /// to end the control daemons that have no supervisor yet.
    pub left: Vec<Order<P>>,
    pub mps: MpsSwitch,
    /// The service does not restore the former compute modes of these GPUs, even while no control daemon serves them, since the
    /// configuration names them. Empty if the service does not set compute modes.
    pub kept: Configured,
    /// GPUs that the service does not serve yet, since programs without MPS use them. The service sets the compute mode of
    /// these GPUs, so that no more programs without MPS can start on them.
    pub closed: Vec<GpuUuid>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MpsSwitch {
    /// MPS is enabled. A control daemon that the plan no longer needs ends after its last client has ended.
    On,
    /// MPS was already disabled when the service started. A running control daemon ends only after its last client has ended,
    /// since no administrator has just asked for the end of GPU work.
    OffAtStart,
    /// An administrator has disabled MPS while the service runs. Control daemons end at once, together with their clients.
    TurnedOff,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order<P> {
    /// No two orders of a [`Demand`] have the same id.
    pub id: DaemonId,
    /// The GPUs that the control daemon should serve. Two orders name the same GPU only if both control daemons have the tenure
    /// [`crate::Tenure::InTurns`].
    pub gpus: Vec<GpuUuid>,
    pub sets_modes: bool,
    /// The rest of the order. The core does not read the payload, and only compares it with the payload of another order.
    pub payload: P,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActOutcome {
    /// The act has succeeded. After [`crate::DaemonAct::TakeOver`], the control daemon may have ended.
    Done,
    /// The service has ended the control daemon, since its order has changed or no program uses it.
    Ended,
    /// The control daemon answers again. It may have missed commands while it did not answer, so it must get its order again.
    Again,
    Failed(WhyFailed),
    /// The answer to [`crate::DaemonAct::Judge`].
    Used(RunUse),
    /// The control daemon still runs, though the service has tried everything to end it.
    Lives,
    Interrupted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhyFailed {
    Gone,
    /// The control daemon does not work, or a fault outside of it makes it unusable. The core ends the control daemon if it has
    /// no client.
    Ill,
    /// Something that the control daemon needs is not ready yet, for example the fabric manager. The core does not replace the
    /// control daemon, since a new control daemon would have to wait for the same thing.
    NotYet,
    /// The service can't parse the control daemon's answers. The core does not replace the control daemon, since a new control
    /// daemon would give the same answers.
    NotUnderstood,
}

/// The result of [`crate::DaemonAct::Judge`]: which programs use a control daemon that has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunUse {
    Gone,
    Idle,
    /// The control daemon has no client, but programs without MPS prevent the start of its server. The core does not end the
    /// control daemon: a program that finds no control daemon runs without MPS, so even more programs would run without MPS.
    KeptOut,
    /// The control daemon has clients, or the service can't find out if it has clients.
    Clients,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModeOutcome {
    /// The GPU has the compute mode of the service, or the service has logged the reason why the GPU has another mode.
    Taken,
    /// The GPU has its saved compute mode again, or a mode that another program has set since.
    PutBack,
    /// The saved compute mode can't be restored now. The core tries again with the next plan.
    Stays,
}

/// The GPUs of an order that other control daemons still have, each with the id of the other control daemon.
pub type HeldGpus = BTreeMap<GpuUuid, DaemonId>;
