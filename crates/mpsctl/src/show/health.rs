//! The health of a slice or a GPU, in one word.

use crate::show::table::{Shown, Tone};
use common::bus::rows::{ControlDaemon, Device, Gpu, Service};
use common::bus::word::Word;
use common::published::control_daemon::ControlDaemonState;
use common::published::snapshot::State;
use common::text::printable;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Health {
    /// A client that starts now is served with the limits of the slice.
    Served,
    /// A client that starts now is served, but the GPU can't enforce the limits of the slice.
    NotEnforced,
    Drained,
    /// No client is served. The published reason says why.
    NotServed,
}

impl Health {
    pub(crate) fn of_slice(device: &Device) -> Self {
        if device.drained { Self::Drained } else { Self::new(device.healthy, device.limits_enforced) }
    }

    /// A drained slice does not change the health of its GPU, which is still served.
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

    pub(crate) fn tone(self) -> Tone {
        match self {
            Self::Served => Tone::Well,
            Self::NotEnforced | Self::Drained => Tone::Between,
            Self::NotServed => Tone::Bad,
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

pub(crate) fn tone_of_service(state: &Word<State>) -> Option<Tone> {
    match state.known()? {
        State::Ready => Some(Tone::Well),
        State::Failed => Some(Tone::Bad),
        State::Degraded | State::Starting | State::Stopping => Some(Tone::Between),
        State::Disabled => None,
    }
}

pub(crate) fn tone_of_daemon(daemon: &ControlDaemon) -> Option<Tone> {
    Some(match daemon.state.known()? {
        ControlDaemonState::Ready => Tone::Well,
        ControlDaemonState::Faulted => Tone::Bad,
        ControlDaemonState::Starting
        | ControlDaemonState::Backoff
        | ControlDaemonState::Waiting
        | ControlDaemonState::Stopping => Tone::Between,
    })
}

pub(crate) fn describe(device: &Device) -> String {
    said(Health::of_slice(device).word(), &device.reason)
}

/// The health in the words of the platform's tables. The reason follows if there is a reason.
pub(crate) fn for_the_platform(healthy: bool, reason: &str) -> String {
    said(if healthy { "healthy" } else { "not healthy" }, reason)
}

fn said(word: &str, reason: &str) -> String {
    if reason.is_empty() { word.to_owned() } else { format!("{word}: {}", printable(reason)) }
}

pub(crate) fn describe_state(service: &Service) -> String {
    match (service.state.shown(), printable(&service.state_reason)) {
        (state, reason) if reason.is_empty() => format!("the service is {state}."),
        (state, reason) => format!("the service is {state}: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_have_tones_and_a_word_of_a_newer_service_has_none() {
        for (state, tone) in [
            (Word::Known(State::Ready), Some(Tone::Well)),
            (Word::Known(State::Degraded), Some(Tone::Between)),
            (Word::Known(State::Disabled), None),
            (Word::Unknown("resting".to_owned()), None),
        ] {
            assert_eq!(tone_of_service(&state), tone, "{state}");
        }
        let daemon = |state| ControlDaemon { state, ..ControlDaemon::default() };
        assert_eq!(tone_of_daemon(&daemon(ControlDaemonState::Faulted.into())), Some(Tone::Bad));
        assert_eq!(tone_of_daemon(&daemon(Word::Unknown("resting".to_owned()))), None);
    }
}
