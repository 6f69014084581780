//! The health of a slice or a GPU, in one word.

use common::bus::rows::{Device, Gpu, Service};
use common::text::printable;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Health {
    /// A client that starts now is served, and held to its limits.
    Served,
    /// A client that starts now is served. The GPU holds it to no limits.
    NotEnforced,
    /// An administrator keeps new clients out.
    Drained,
    /// No client is served, for the reason that is published beside it.
    NotServed,
}

impl Health {
    pub(crate) fn of_slice(device: &Device) -> Self {
        if device.drained { Self::Drained } else { Self::new(device.healthy, device.limits_enforced) }
    }

    /// Drained slices change nothing here: the others of the same GPU are served.
    pub(crate) fn of_gpu(gpu: &Gpu) -> Self {
        Self::new(gpu.healthy, gpu.limits_enforced)
    }

    fn new(healthy: bool, enforced: bool) -> Self {
        match (healthy, enforced) {
            (true, true) => Self::Served,
            (true, false) => Self::NotEnforced,
            (false, _) => Self::NotServed,
        }
    }

    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Served => "served",
            Self::NotEnforced => "not enforced",
            Self::Drained => "drained",
            Self::NotServed => "not served",
        }
    }
}

/// The word for a slice, and the reason or a note.
pub(crate) fn describe(device: &Device) -> String {
    said(Health::of_slice(device).word(), &device.reason)
}

/// The words of the platform's tables, with the reason or a note.
pub(crate) fn for_the_platform(healthy: bool, reason: &str) -> String {
    said(if healthy { "healthy" } else { "not healthy" }, reason)
}

fn said(word: &str, reason: &str) -> String {
    if reason.is_empty() { word.to_owned() } else { format!("{word}: {}", printable(reason)) }
}

/// The state of the service, for a list that it leaves empty.
pub(crate) fn describe_state(service: &Service) -> String {
    match (printable(&service.state), printable(&service.state_reason)) {
        (state, reason) if reason.is_empty() => format!("the service is {state}."),
        (state, reason) => format!("the service is {state}: {reason}"),
    }
}
