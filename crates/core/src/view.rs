//! The view of a control daemon: its state, as the service publishes it. The core decides the content of the view, and the
//! supervisors only store it.

use alloc::borrow::ToOwned;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use crate::terms::ProcessId;
use crate::{CoreTime, GpuUuid};

/// A control daemon that waits longer than this for something that is not ready needs an administrator. The fabric manager of a
/// host with `NVSwitch` becomes ready only a minute or two after a boot.
const PATIENCE: Duration = Duration::from_secs(180);

/// The state of one control daemon. On D-Bus, the state is the variant's name in lower case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "words", derive(strum::Display, strum::EnumString, strum::VariantNames))]
#[cfg_attr(feature = "words", strum(serialize_all = "snake_case"))]
pub enum ControlDaemonState {
    #[default]
    Starting,
    /// The control daemon serves clients. The service has confirmed its limits, as far as the driver allows.
    Ready,
    /// A fatal GPU error has hit a server of the control daemon, and the server has not recovered yet.
    Faulted,
    /// The control daemon or its server has ended, or could not be started. The service tries again after a pause.
    Backoff,
    /// The control daemon can't serve until something outside of it changes. The published reason names the necessary change.
    Waiting,
    Stopping,
}

/// The reason why a control daemon waits, if the wait ends without an administrator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlannedWait {
    /// A control daemon that the service has not started listens in this control daemon's directory, and still has clients.
    ForOthers,
    /// Since this moment, something that the control daemon needs is not ready, such as the fabric manager.
    NotReady(CoreTime),
}

// Each bool is an independent fact, so an enum can't replace the bools.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DaemonView {
    pub state: ControlDaemonState,
    /// The reason for the state, in words. Empty in the state `ready`.
    pub reason: String,
    /// True if a client that starts now gets the planned limits. The value can be true even in the state `waiting`: before a
    /// change, the control daemon serves on until its clients have ended.
    pub serving: bool,
    /// True once the order is in force, or the view has the reason why it is not.
    pub settled: bool,
    /// True if days may pass before the supervisor's next successful step: the step waits for the end of clients, or the last
    /// attempt has failed and the next attempts may fail too.
    pub put_off: bool,
    /// The planned wait that keeps the control daemon from serving. None if the control daemon serves, or if an administrator
    /// has to act.
    pub waits: Option<PlannedWait>,
    /// True if the plan no longer needs the control daemon, and only its present clients do. The control daemon gets no new
    /// limits.
    pub retiring: bool,
    pub ends_when_idle: bool,
    /// True if one server serves all users at the same time. False if the users take turns. None if the service does not know
    /// yet.
    pub multiuser: Option<bool>,
    /// The PIDs of the servers. The newest server is the last.
    pub servers: Vec<u32>,
    /// The clients that have waited for a server for several seconds.
    pub waiting: Vec<ProcessId>,
    pub gpus: BTreeMap<GpuUuid, ServedGpuView>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ServedGpuView {
    /// The reason why the control daemon serves without this GPU for now. Empty if the control daemon serves the GPU.
    pub left_out: String,
    /// True if programs without MPS use the GPU, so that no server can open it.
    pub server_kept_out: bool,
    pub being_set: bool,
    /// The reason why the control daemon serves the GPU otherwise than planned. Empty if the GPU is served as planned.
    pub reason: String,
    /// The reason why the GPU takes no more clients. Empty while the GPU takes clients.
    pub full: String,
    /// The number of clients on the GPU, from the control daemon's list. None if NVML lists the clients, or if the service has
    /// not asked for the list.
    pub unlisted_clients: Option<u32>,
    /// The active thread percentage in force. None if it is not known.
    pub thread_percentage: Option<u8>,
    /// The memory limit in force in a running server. None if it is not known.
    pub memory_limit_mib: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unserved<'v> {
    Because(&'v str),
    ServerKeptOut,
    /// The control daemon does not serve at all. The fields `state` and `reason` of its view say why.
    DaemonServesNone,
    BeingSet,
}

impl DaemonView {
    pub fn new(gpus: impl IntoIterator<Item = GpuUuid>) -> Self {
        let gpus = gpus.into_iter().map(|gpu| (gpu, ServedGpuView::default()));
        Self { gpus: gpus.collect(), ..Self::default() }
    }

    /// Records a new order with these GPUs. `goes_on` is true if the running control daemon can serve the new order. The
    /// control daemon then serves on, except on the GPUs in `to_be_set`. The limits of these GPUs must change first.
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

    /// Records a state that lasts until the next event.
    pub fn enter(&mut self, state: ControlDaemonState, serving: bool, reason: &str) {
        self.pass_through(state, serving, reason);
        if state != ControlDaemonState::Starting {
            self.settle();
        }
    }

    /// Records an intermediate state on the way to serving the order.
    pub fn pass_through(&mut self, state: ControlDaemonState, serving: bool, reason: &str) {
        (self.state, self.serving) = (state, serving);
        self.put_off &= !matches!(state, ControlDaemonState::Starting | ControlDaemonState::Ready);
        if state != ControlDaemonState::Starting {
            self.waits = None;
        }
        // While the control daemon starts again, the reason of the last failure stays in the view until the start has
        // succeeded.
        if state != ControlDaemonState::Starting || !reason.is_empty() {
            reason.clone_into(&mut self.reason);
        }
    }

    /// Records that the control daemon does not serve. The next attempt follows after a pause or an event, possibly after days.
    pub fn enter_failing(&mut self, state: ControlDaemonState, reason: &str, waits: Option<PlannedWait>) {
        let before = self.waits;
        self.pass_through(state, false, reason);
        self.waits = match (waits, before) {
            // An earlier failure has begun the same wait, so the wait's first moment stays.
            (Some(PlannedWait::NotReady(_)), Some(PlannedWait::NotReady(_))) => before,
            _ => waits,
        };
        self.put_off();
    }

    /// Records that days may pass before the supervisor's next step.
    pub fn put_off(&mut self) {
        self.put_off = true;
        self.settle();
    }

    /// Records that the order is in force, or that the view has the reason why not. GPUs then no longer wait for their limits,
    /// unless the control daemon retires, and so gets no new limits, or does not serve.
    fn settle(&mut self) {
        self.settled = true;
        for gpu in self.gpus.values_mut() {
            gpu.being_set &= self.retiring || !self.serving;
        }
    }

    pub fn has_ended(&mut self) {
        self.servers.clear();
        self.waiting.clear();
        (self.serving, self.ends_when_idle) = (false, false);
        for gpu in self.gpus.values_mut() {
            (gpu.thread_percentage, gpu.memory_limit_mib) = (None, None);
            (gpu.server_kept_out, gpu.full) = (false, String::new());
        }
    }

    /// The reason why a client that starts now is not served as planned on this GPU. None if the client is served as planned.
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

    /// Returns true if the control daemon does not serve, but no administrator has to act. A wait longer than `PATIENCE` needs
    /// an administrator.
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
    fn no_client_is_on_a_control_daemon_that_has_ended() {
        let mut view = serving();
        let gpu = view.gpus.get_mut("A").unwrap();
        (gpu.full, gpu.server_kept_out) = ("full: all 48 places are taken".to_owned(), true);
        view.has_ended();
        assert_eq!(view.unserved("A"), Some(Unserved::DaemonServesNone));
        assert_eq!(view.gpus["A"].full, "");
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
