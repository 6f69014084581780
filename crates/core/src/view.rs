//! The view of a control daemon: the facts about a control daemon that the core decides and the service publishes. The supervisors
//! keep the view and decide nothing about it.

use alloc::borrow::ToOwned;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use crate::terms::ProcessId;
use crate::{CoreTime, GpuUuid};

/// The time for which a control daemon may wait for something that is not ready before the wait counts as a failure: the
/// fabric manager of a host with `NVSwitch` needs a minute or two after a boot.
const PATIENCE: Duration = Duration::from_secs(180);

/// The state of one control daemon. The variant's name in lower case is the word for the state on D-Bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "words", derive(strum::Display, strum::EnumString, strum::VariantNames))]
#[cfg_attr(feature = "words", strum(serialize_all = "snake_case"))]
pub enum ControlDaemonState {
    /// The control daemon is being started and configured.
    #[default]
    Starting,
    /// The control daemon serves clients. The limits of the control daemon are confirmed as far as the driver allows.
    Ready,
    /// A server of the control daemon has met a fatal GPU error, from which the server has not recovered yet.
    Faulted,
    /// The control daemon or its server has ended, or could not be started. The service tries again after a pause.
    Backoff,
    /// Something outside of the control daemon must change before the control daemon can serve. The published reason names the
    /// thing that must change.
    Waiting,
    /// The service ends the control daemon.
    Stopping,
}

/// A wait of a control daemon that ends without an action of an administrator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlannedWait {
    /// A control daemon that the service has not started is in its place, and serves its clients until they end.
    ForOthers,
    /// Something that the control daemon needs, such as the fabric manager, has not been ready since this moment.
    NotReady(CoreTime),
}

/// The view of one control daemon and its GPUs.
// Each fact has a bool of its own, since no fact excludes another fact.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DaemonView {
    /// The state of the control daemon.
    pub state: ControlDaemonState,
    /// The reason why the control daemon is in this state, in words; empty if it is ready.
    pub reason: String,
    /// True if a client that starts now is served with the planned limits. The client may be served even in the state
    /// `waiting`, if the control daemon waits for the end of clients before a change.
    pub serving: bool,
    /// True once the order is in force, or the reason is known why it is not.
    pub settled: bool,
    /// True if the next step of the supervisor waits for the end of clients, or follows after a failure. The next step
    /// may then come days later.
    pub put_off: bool,
    /// The wait because of which the control daemon does not serve. None if the control daemon serves, or an administrator
    /// has to do something.
    pub waits: Option<PlannedWait>,
    /// True if only its present clients need the control daemon. A control daemon that retires gets no new limits.
    pub retiring: bool,
    /// True if the control daemon runs, and ends as soon as it has no client.
    pub ends_when_idle: bool,
    /// True if one server serves every user, false if the users take turns. None if the service does not know yet if the users
    /// take turns.
    pub multiuser: Option<bool>,
    /// The PIDs of the servers, the newest last.
    pub servers: Vec<u32>,
    /// The clients that have waited long for a server.
    pub waiting: Vec<ProcessId>,
    /// The GPUs of the order.
    pub gpus: BTreeMap<GpuUuid, ServedGpuView>,
}

/// The view of one GPU of a control daemon.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ServedGpuView {
    /// The reason why the control daemon serves without the GPU for now; empty if the GPU is not left out.
    pub left_out: String,
    /// True if processes without MPS prevent a server from opening the GPU.
    pub server_kept_out: bool,
    /// True while the limits of the present order are being set.
    pub being_set: bool,
    /// The reason why the GPU is not served as planned though it is not left out; empty if it is served as planned.
    pub reason: String,
    /// The reason why the GPU takes no more clients; empty while it takes clients.
    pub full: String,
    /// The number of clients on the GPU, from the control daemon. None if NVML lists the clients, or the control daemon was not
    /// asked.
    pub unlisted_clients: Option<u32>,
    /// The thread percentage that the control daemon has in force for its clients. None if the percentage is not known.
    pub thread_percentage: Option<u8>,
    /// The memory limit in MiB that a running server has in force. None if the limit is not known.
    pub memory_limit_mib: Option<u64>,
}

/// The reason why a client that comes now is not served as planned on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unserved<'v> {
    /// These words have the reason.
    Because(&'v str),
    /// Processes without MPS prevent a server from opening the GPU.
    ServerKeptOut,
    /// The control daemon does not serve. Its state and its reason say why.
    DaemonServesNone,
    /// The limits of a new order are being set.
    BeingSet,
}

impl DaemonView {
    /// The view of a control daemon that has an order with these GPUs, and has not started yet.
    pub fn new(gpus: impl IntoIterator<Item = GpuUuid>) -> Self {
        let gpus = gpus.into_iter().map(|gpu| (gpu, ServedGpuView::default()));
        Self { gpus: gpus.collect(), ..Self::default() }
    }

    /// Takes note of a new order with these GPUs. If the running control daemon can serve the order (`goes_on`), it goes on, and
    /// only the GPUs in `to_be_set`, which need other limits, are not served as planned until the limits are in force.
    pub fn take_order(
        &mut self,
        gpus: impl IntoIterator<Item = GpuUuid>,
        goes_on: bool,
        to_be_set: &BTreeSet<GpuUuid>,
    ) {
        let known = |gpu: GpuUuid| {
            let view = self.gpus.remove(&gpu).unwrap_or_default();
            (gpu, view)
        };
        self.gpus = gpus.into_iter().map(known).collect();
        (self.settled, self.put_off) = (false, false);
        for (_, gpu) in self.gpus.iter_mut().filter(|(uuid, _)| to_be_set.contains(*uuid)) {
            gpu.being_set = true;
        }
        if !self.serving || !goes_on {
            (self.state, self.serving) = (ControlDaemonState::Starting, false);
        }
    }

    /// Takes note of a state in which the control daemon stays until the next event.
    pub fn enter(&mut self, state: ControlDaemonState, serving: bool, reason: &str) {
        self.pass_through(state, serving, reason);
        if state != ControlDaemonState::Starting {
            self.settle();
        }
    }

    /// Takes note of a state through which the control daemon passes on the way to its order.
    pub fn pass_through(&mut self, state: ControlDaemonState, serving: bool, reason: &str) {
        (self.state, self.serving) = (state, serving);
        self.put_off &= !matches!(state, ControlDaemonState::Starting | ControlDaemonState::Ready);
        if state != ControlDaemonState::Starting {
            self.waits = None;
        }
        // During a new start the reason of the last failure stays in the view, until the start has succeeded.
        if state != ControlDaemonState::Starting || !reason.is_empty() {
            reason.clone_into(&mut self.reason);
        }
    }

    /// Takes note that the control daemon does not serve. The next attempt follows after a pause or an event, which may take
    /// days.
    pub fn enter_failing(&mut self, state: ControlDaemonState, reason: &str, waits: Option<PlannedWait>) {
        let before = self.waits;
        self.pass_through(state, false, reason);
        self.waits = match (waits, before) {
            // A wait for the same thing has begun with the first failure.
            (Some(PlannedWait::NotReady(_)), Some(PlannedWait::NotReady(_))) => before,
            _ => waits,
        };
        self.put_off();
    }

    /// Takes note that the supervisor's next step waits for the end of clients.
    pub fn put_off(&mut self) {
        self.put_off = true;
        self.settle();
    }

    /// Takes note that the supervisor has no change for the order under way. No GPU waits for its limits any more: the limits are
    /// in force, or the view of the GPU has the reason why they are not. Only the GPUs of a control daemon that does not serve, or
    /// that retires, still wait: the control daemon gets their limits when it serves the order.
    fn settle(&mut self) {
        self.settled = true;
        for gpu in self.gpus.values_mut() {
            gpu.being_set &= self.retiring || !self.serving;
        }
    }

    /// Takes note that the control daemon has ended.
    pub fn has_ended(&mut self) {
        self.servers.clear();
        self.waiting.clear();
        (self.serving, self.ends_when_idle) = (false, false);
        for gpu in self.gpus.values_mut() {
            (gpu.thread_percentage, gpu.memory_limit_mib) = (None, None);
        }
    }

    /// The reason why a client that comes to a GPU of the order now is not served as planned. None if the client is served.
    pub fn unserved(&self, gpu: &str) -> Option<Unserved<'_>> {
        let Some(gpu) = self.gpus.get(gpu) else { return Some(Unserved::DaemonServesNone) };
        if !gpu.left_out.is_empty() {
            Some(Unserved::Because(&gpu.left_out))
        } else if gpu.server_kept_out {
            Some(Unserved::ServerKeptOut)
        } else if !self.serving {
            Some(Unserved::DaemonServesNone)
        } else if gpu.being_set {
            Some(Unserved::BeingSet)
        } else {
            (!gpu.reason.is_empty()).then_some(Unserved::Because(&gpu.reason))
        }
    }

    /// Returns true if the control daemon does not serve, but no administrator has to do anything about it.
    pub fn goes_on_as_planned(&self, now: CoreTime) -> bool {
        let waits = match self.waits {
            None => false,
            Some(PlannedWait::ForOthers) => true,
            Some(PlannedWait::NotReady(since)) => now.saturating_sub(since) < PATIENCE,
        };
        waits || self.state == ControlDaemonState::Faulted
    }
}

#[cfg(test)]
mod tests {
    use super::ControlDaemonState::{Ready, Starting, Waiting};
    use super::*;

    fn serving() -> DaemonView {
        let mut view = DaemonView::new(["A".to_owned(), "B".to_owned()]);
        view.enter(Ready, true, "");
        view
    }

    fn take(view: &mut DaemonView, goes_on: bool, to_be_set: &[&str]) {
        let to_be_set = to_be_set.iter().map(|gpu| (*gpu).to_owned()).collect();
        view.take_order(["A".to_owned(), "B".to_owned()], goes_on, &to_be_set);
    }

    /// A new order must not be published as served before the supervisor has put the order in force.
    #[test]
    fn an_order_is_served_only_once_it_is_in_force() {
        let mut view = serving();
        assert!(view.settled && view.unserved("A").is_none());
        take(&mut view, true, &["B"]);
        assert!(!view.settled && view.unserved("A").is_none());
        assert_eq!(view.unserved("B"), Some(Unserved::BeingSet));
        view.enter(Ready, true, "");
        assert!(view.settled && view.unserved("B").is_none());
        take(&mut view, false, &[]);
        assert_eq!((view.state, view.serving, view.settled), (Starting, false, false));
        assert_eq!(view.unserved("A"), Some(Unserved::DaemonServesNone));
    }

    #[test]
    fn the_first_reason_counts() {
        let mut view = serving();
        assert_eq!(view.unserved("C"), Some(Unserved::DaemonServesNone), "the order has no such GPU");
        let gpu = view.gpus.get_mut("A").unwrap();
        gpu.reason = "other limits".to_owned();
        assert_eq!(view.unserved("A"), Some(Unserved::Because("other limits")));
        view.gpus.get_mut("A").unwrap().server_kept_out = true;
        assert_eq!(view.unserved("A"), Some(Unserved::ServerKeptOut));
        view.gpus.get_mut("A").unwrap().left_out = "lost".to_owned();
        assert_eq!(view.unserved("A"), Some(Unserved::Because("lost")));
        assert_eq!(view.unserved("B"), None);
    }

    #[test]
    fn a_wait_is_planned_for_minutes_and_begins_anew_after_anything_else() {
        let (now, long_ago) = (PATIENCE * 2, PATIENCE);
        let mut view = DaemonView::default();
        let not_ready = |since| Some(PlannedWait::NotReady(since));
        view.enter_failing(Waiting, "not ready", not_ready(now));
        assert!(view.goes_on_as_planned(now));
        view.enter(Ready, true, "");
        view.enter_failing(Waiting, "not ready", not_ready(long_ago));
        view.enter(Starting, false, "");
        assert_eq!(view.reason, "not ready", "a new start keeps the reason of the failure");
        view.enter_failing(Waiting, "not ready", not_ready(now));
        assert!(!view.goes_on_as_planned(now), "it has lasted for minutes");
        view.enter_failing(Waiting, "in the way", None);
        assert!(!view.goes_on_as_planned(now));
        view.enter_failing(Waiting, "not ready", not_ready(now));
        assert!(view.goes_on_as_planned(now), "it is another wait");
        view.enter_failing(Waiting, "in use", Some(PlannedWait::ForOthers));
        assert!(view.goes_on_as_planned(now));
    }
}
