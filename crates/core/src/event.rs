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
    /// The service ends: for good, with all control daemons and their clients, also those that a former service has started.
    Stop {
        /// An order for each control daemon that the state file has. It counts for a control daemon without a supervisor.
        left: Vec<Order<P>>,
    },
    /// The service ends, and the next one takes the control daemons over.
    Leave,
    /// The act about a control daemon has come back.
    Done {
        /// Its id.
        id: DaemonId,
        /// The entry of the state file under this id now.
        written: Option<RunningDaemon>,
        /// True if its process is held, so that its end becomes known.
        watched: bool,
        /// The outcome of the act.
        outcome: ActOutcome,
    },
    /// An act about a compute mode has come back.
    ModeDone {
        /// The GPU's UUID.
        gpu: GpuUuid,
        /// The outcome of the act.
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
    /// It is: a control daemon that is not wanted any more ends once it has no client.
    On,
    /// It was off when the service started. Whatever the service finds ends once it has no client: no administrator has just
    /// said that somebody's work is to end.
    OffAtStart,
    /// An administrator has just turned it off: control daemons end with their clients.
    TurnedOff,
}

/// The order for one control daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order<P> {
    /// Its id. No two orders have the same.
    pub id: DaemonId,
    /// Its GPUs. No two orders have one in common, unless both take turns on it.
    pub gpus: Vec<GpuUuid>,
    /// True if it sets the compute modes of its GPUs.
    pub sets_modes: bool,
    /// The rest, which no decision here depends on, but for whether it is the same as before.
    pub payload: P,
}

/// A control daemon of ours that runs, or has run, as the state file has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningDaemon {
    /// Its process.
    pub process: ProcessId,
    /// The GPUs that it was started with.
    pub gpus: Vec<GpuUuid>,
}

/// The outcome of an act about a control daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActOutcome {
    /// It is done: taken over or found gone, started, left.
    Done,
    /// It served until it was ended since it has to be another one, or has no client and is not wanted.
    Ended,
    /// It has to be told its order again.
    Again,
    /// It did not work.
    Failed(WhyFailed),
    /// Who uses it, as [`crate::DaemonAct::Judge`] has asked.
    Used(RunUse),
    /// It was to be ended, and lives.
    Lives,
    /// The act was broken off, as [`crate::Act::Interrupt`] has asked.
    Interrupted,
}

/// Why an act did not work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhyFailed {
    /// The process has ended.
    Gone,
    /// It does not do what it should, or something outside is in the way.
    Ill,
    /// Something beside it is not ready yet, and soon will be. Another one would wait for it, too.
    NotYet,
    /// It answers in words that are not known. Another one would answer the same.
    NotUnderstood,
}

/// Who uses a control daemon that does not serve as it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunUse {
    /// It has ended meanwhile.
    Gone,
    /// No program.
    Idle,
    /// No client, and programs without MPS keep its server out: without it the next of them would slip in too.
    KeptOut,
    /// It has clients, or the service can't find out.
    Clients,
}

/// The outcome of an act about a compute mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModeOutcome {
    /// It is set to the service's mode, or stays as it is for a reason that was logged.
    Taken,
    /// It is as it was before the service changed it, or others have changed it since.
    PutBack,
    /// It can't be put back now.
    Stays,
}

/// The GPUs of an order that other control daemons have, each with the id of that one.
pub type HeldGpus = BTreeMap<GpuUuid, DaemonId>;
