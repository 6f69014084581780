//! Everything that happens, as far as decisions depend on it.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::terms::ProcessId;
use crate::{Configured, DaemonId, GpuUuid};

/// Something that has happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CoreEvent<P> {
    /// A plan is to be in force from now on.
    Pursue(Demand<P>),
    /// The service ends for good. Every control daemon ends with its clients, also a control daemon of a former service.
    Stop {
        /// An order for each control daemon that the state file has. It counts for a control daemon without a supervisor.
        left: Vec<Order<P>>,
    },
    /// The service ends, and the next one takes the control daemons over.
    Leave,
    /// The act about a control daemon has come back.
    Done {
        id: DaemonId,
        /// The entry of the state file under this id now.
        written: Option<RunningDaemon>,
        /// True if the service watches the process, so the end becomes known.
        watched: bool,
        outcome: ActOutcome,
    },
    /// An act about a compute mode has come back.
    ModeDone {
        /// The GPU's UUID.
        gpu: GpuUuid,
        outcome: ModeOutcome,
    },
    /// The moment that [`crate::Core::due`] named has come.
    Due,
}

/// All that a plan asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand<P> {
    /// The control daemons that shall run.
    pub orders: Vec<Order<P>>,
    /// An order for each other control daemon that the state file has. It counts for a control daemon without a supervisor.
    pub left: Vec<Order<P>>,
    /// The state of the switch `enable_cuda_mps`.
    pub mps: MpsSwitch,
    /// The GPUs that keep the service's compute mode, served at the moment or not. None, if compute modes are not ours to set.
    pub kept: Configured,
    /// GPUs in use by programs without MPS: their compute mode is set, so that no more of them come.
    pub closed: Vec<GpuUuid>,
}

/// The switch `enable_cuda_mps`, and how it came to be off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MpsSwitch {
    /// The switch is on: a control daemon that is not wanted any more ends once it has no client.
    On,
    /// The switch was off when the service started. Control daemons that the service finds end once they have no client: no
    /// administrator has just asked to end GPU work.
    OffAtStart,
    /// An administrator has just turned the switch off: control daemons end with their clients.
    TurnedOff,
}

/// The order for one control daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order<P> {
    /// Each order has another id.
    pub id: DaemonId,
    /// Two orders have a GPU in common only if both take turns on the GPU.
    pub gpus: Vec<GpuUuid>,
    /// True if the control daemon sets the compute modes of its GPUs.
    pub sets_modes: bool,
    /// The rest of the order. Decisions here only depend on a change of the rest.
    pub payload: P,
}

/// A control daemon of ours that runs, or has run, as the state file has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningDaemon {
    pub process: ProcessId,
    /// The GPUs that the control daemon was started with.
    pub gpus: Vec<GpuUuid>,
}

/// The outcome of an act about a control daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActOutcome {
    /// The act has succeeded. After a takeover the process may have ended.
    Done,
    /// The service has ended the control daemon, for a change of the order or as unused.
    Ended,
    /// The control daemon needs its order again.
    Again,
    /// The act has failed.
    Failed(WhyFailed),
    /// The use of the control daemon, the answer to [`crate::DaemonAct::Judge`].
    Used(RunUse),
    /// The control daemon outlives every attempt to end it.
    Lives,
    /// The act was broken off, as [`crate::Act::Interrupt`] has asked.
    Interrupted,
}

/// The reason why an act has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhyFailed {
    /// The process has ended.
    Gone,
    /// The control daemon does not work as it should, or a fault outside of it prevents that.
    Ill,
    /// Something outside of the control daemon is not ready yet, and soon will be. A new control daemon would wait too.
    NotYet,
    /// The service does not understand the control daemon's answers. A new control daemon would answer the same.
    NotUnderstood,
}

/// The use of a control daemon that does not work as it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunUse {
    /// The control daemon has ended meanwhile.
    Gone,
    /// No program.
    Idle,
    /// No client. Programs without MPS keep the server from starting; without the control daemon more of them would get in.
    KeptOut,
    /// The control daemon has clients, or the service can't ask.
    Clients,
}

/// The outcome of an act about a compute mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModeOutcome {
    /// The GPU has the service's compute mode, or keeps another for a reason that was logged.
    Taken,
    /// The GPU has the compute mode of before, or a mode that others have set since.
    PutBack,
    /// The compute mode can't be restored now.
    Stays,
}

/// The GPUs of an order that other control daemons have, each with the id of that one.
pub type HeldGpus = BTreeMap<GpuUuid, DaemonId>;
