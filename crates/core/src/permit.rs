//! Who may be ended, and why. Whatever ends a control daemon, a server or a client takes a permit, and only this crate makes
//! one: who looks for its makers has found every reason for which work is ended.

use core::fmt;

/// The leave to end somebody.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permit {
    cause: Cause,
}

/// Why somebody is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// An administrator stops the service for good.
    Stop,
    /// An administrator disables MPS.
    Disabled,
    /// An administrator has a change made that waits for clients to end, with them.
    Forced,
    /// It has no client, so no work is lost.
    Unused,
    /// A server has met a fatal GPU error. Its clients have lost their work, and do not let the server go.
    Fault,
    /// Its owner or root has asked for this client's end.
    Asked,
    /// The client is one of the newest of a slice that is over its budget.
    OverBudget,
}

impl Permit {
    pub(crate) fn new(cause: Cause) -> Self {
        Self { cause }
    }

    /// For somebody with so many clients. None: it has some, or that is not known.
    pub fn unused(clients: Option<usize>) -> Option<Self> {
        (clients == Some(0)).then(|| Self::new(Cause::Unused))
    }

    /// For a change that waits for clients to end, where there are so many, or the number is not known.
    pub fn for_a_change(is_forced: bool, clients: Option<usize>) -> Option<Self> {
        if is_forced { Some(Self::new(Cause::Forced)) } else { Self::unused(clients) }
    }

    /// For a client that was named to the service, by somebody who may.
    pub(crate) fn asked_for() -> Self {
        Self::new(Cause::Asked)
    }

    /// Why somebody is ended.
    pub fn cause(self) -> Cause {
        self.cause
    }
}

/// The effect on clients, as the end of a sentence.
impl fmt::Display for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.cause {
            Cause::Unused => "it has no client, so nobody loses work",
            _ => "any client that it still has loses its work",
        })
    }
}
