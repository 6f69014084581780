//! A signal to a container. Before the container runtime sends the signal, some clients in the container lose their
//! GPU work.

use alloc::string::String;

/// The numbers of signals on Linux.
const SIGINT: u32 = 2;
const SIGQUIT: u32 = 3;
const SIGKILL: u32 = 9;
const SIGTERM: u32 = 15;

/// A signal that a container runtime is about to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stop {
    /// The path of the container's control group.
    pub group: String,
    /// The first process of the container.
    pub first: u32,
    /// The number of the signal.
    pub signal: u32,
    /// True if every process of the container gets the signal. False if only the first process gets it.
    pub to_all: bool,
}

/// The effect of a signal on a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reception {
    /// The process has a handler for the signal, or blocks the signal and waits for it.
    Handled,
    /// The process ignores the signal. The first process of a PID namespace ignores every signal for which it has no handler.
    Ignored,
    /// The signal ends the process.
    Fatal,
}

/// The effect of a signal on programs that have no handler for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SignalEffect {
    /// Every program ends, even a program with a handler.
    EndsAll,
    /// A program ends unless it handles or ignores the signal.
    AsksToEnd,
    /// No program ends.
    Harmless,
}

impl Stop {
    /// Returns true if a control group is the container's control group, or a descendant of it.
    pub fn has(&self, group: &str) -> bool {
        group.strip_prefix(self.group.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// The effect of the signal on programs that have no handler for it.
    pub(super) fn effect(&self) -> SignalEffect {
        match self.signal {
            SIGKILL => SignalEffect::EndsAll,
            SIGTERM | SIGINT | SIGQUIT => SignalEffect::AsksToEnd,
            _ => SignalEffect::Harmless,
        }
    }

    /// Returns true if a program may end after a signal that asks programs to end. The container's first process gets the
    /// signal. The first process either passes the signal on, or ends, and then all other processes end too. None stands for
    /// a process that has ended.
    pub(super) fn ends(program: Option<Reception>, first: Option<Reception>) -> bool {
        program == Some(Reception::Fatal) && first != Some(Reception::Ignored)
    }
}
