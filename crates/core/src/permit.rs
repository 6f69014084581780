//! Permits to end GPU work. Every function that ends a control daemon, a server or a client takes a permit, and only this crate
//! makes permits. The functions of this file thus show every reason for which GPU work is ended.

use core::fmt;

/// The permit to end a control daemon, a server or a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permit {
    cause: Cause,
}

/// The reason why work may be ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// An administrator stops the service for good.
    Stop,
    /// An administrator disables MPS.
    Disabled,
    /// An administrator forces a change that otherwise waits for clients.
    Forced,
    /// The control daemon or the server has no client, so no work is lost.
    Unused,
    /// A server has met a fatal GPU error. The clients of the server have lost their work, and the server can't recover
    /// before they have ended.
    Fault,
    /// The owner of the client, or root, has asked for the client's end.
    Asked,
    /// The client is one of the newest clients of a slice that is over its budget.
    OverBudget,
}

impl Permit {
    pub(crate) fn new(cause: Cause) -> Self {
        Self { cause }
    }

    /// The permit to end a control daemon or a server with this number of clients. None unless the number is 0. `clients` is
    /// None if the number is unknown.
    pub fn unused(clients: Option<usize>) -> Option<Self> {
        (clients == Some(0)).then(|| Self::new(Cause::Unused))
    }

    /// The permit to end a control daemon for a change that otherwise waits for the end of clients. None if the change is not
    /// forced and there may be clients. `clients` is None if their number is unknown.
    pub fn for_a_change(is_forced: bool, clients: Option<usize>) -> Option<Self> {
        if is_forced { Some(Self::new(Cause::Forced)) } else { Self::unused(clients) }
    }

    /// The permit to end a client at the request of a caller who has the right to end the client.
    pub(crate) fn asked_for() -> Self {
        Self::new(Cause::Asked)
    }

    /// The reason why work may be ended.
    pub fn cause(self) -> Cause {
        self.cause
    }
}

/// Writes the effect that an end with this permit has on clients, as the end of a sentence.
impl fmt::Display for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.cause {
            Cause::Unused => "no client is connected, so no work is lost",
            _ => "any client that is still connected loses its work",
        })
    }
}
