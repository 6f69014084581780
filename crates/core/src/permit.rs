//! Permits to end GPU work. Every function that ends a control daemon, a server or a client takes a [`Permit`], and only this
//! crate can make permits. The functions of this file therefore show every reason for which the service ends GPU work.

use core::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permit {
    cause: Cause,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    Stop,
    Disabled,
    /// An administrator forces a change that would otherwise wait until all clients have ended.
    Forced,
    /// No client is connected to the control daemon or the server, so no work is lost.
    Unused,
    /// A fatal GPU error has ended the work of the server's clients. The server can't recover while these clients stay
    /// connected.
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

    /// The permit to end a control daemon or a server that has no client. `clients` is the number of its clients, or None if
    /// the number is unknown. Returns None unless the number is known to be 0.
    pub fn unused(clients: Option<usize>) -> Option<Self> {
        (clients == Some(0)).then(|| Self::new(Cause::Unused))
    }

    /// The permit to end a control daemon for a change that otherwise waits for the end of clients. Returns None if the change
    /// is not forced and there may be clients. `clients` is None if the number of clients is unknown.
    pub fn for_a_change(is_forced: bool, clients: Option<usize>) -> Option<Self> {
        if is_forced { Some(Self::new(Cause::Forced)) } else { Self::unused(clients) }
    }

    /// The permit to end a client on request. The service has already checked that the requester may end the client.
    pub(crate) fn asked_for() -> Self {
        Self::new(Cause::Asked)
    }

    pub fn cause(self) -> Cause {
        self.cause
    }
}

/// The effect of the permit on clients, as the end of a sentence in a message.
impl fmt::Display for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.cause {
            Cause::Unused => "no client is connected, so no work is lost",
            _ => "any client that is still connected loses its work",
        })
    }
}
