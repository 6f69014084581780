//! Reports the state of the service to the service manager: ready, reloading, stopping, the status line, a sign of life.
//!
//! Sending blocks while the service manager does not read its socket. So messages are sent on a separate thread, one after the
//! other, and nothing else waits: a newer state replaces a state that was not sent yet.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, timeout};

use crate::message::{Message, Subject};
use common::published::snapshot::State;

/// The longest time for which the end of the service waits until the last messages are sent to the service manager.
const LAST_SEND: Duration = Duration::from_secs(1);

/// Everything that the service reports to the service manager.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct UnitState {
    /// The number of reloads that have begun.
    reloads: u64,
    /// True if the service has carried out every request of the service manager.
    ready: bool,
    stopping: bool,
    status: String,
    /// The number of signs of life (`WATCHDOG=1`) that were due.
    beats: u64,
}

impl UnitState {
    /// The messages that report this state to a service manager that knows the state `notified` already.
    fn since(&self, notified: &Self) -> Vec<NotifyState<'_>> {
        let mut messages = Vec::new();
        if self.reloads != notified.reloads {
            messages.push(NotifyState::Reloading);
        }
        if self.stopping && !notified.stopping {
            messages.push(NotifyState::Stopping);
        }
        if self.status != notified.status {
            messages.push(NotifyState::Status(&self.status));
        }
        if self.ready && (!notified.ready || self.reloads != notified.reloads) {
            messages.push(NotifyState::Ready);
        }
        if self.beats != notified.beats {
            messages.push(NotifyState::Watchdog);
        }
        messages
    }
}

/// Notifies the service manager. If there is no service manager, nothing is sent.
#[derive(Debug)]
pub(super) struct ServiceManager {
    unit_state: watch::Sender<UnitState>,
    notifier: JoinHandle<()>,
    /// The time between two signs of life, and the moment of the next one. None if the service manager expects none.
    watchdog: Option<(Duration, Instant)>,
    state: Option<State>,
}

impl ServiceManager {
    /// The state before the service has notified the service manager.
    pub(super) fn new() -> Self {
        let (unit_state, receiver) = watch::channel(UnitState::default());
        let period = sd_notify::watchdog_enabled().map(|time| time / 3);
        let watchdog = period.map(|period| (period, Instant::now()));
        Self { unit_state, notifier: tokio::spawn(notify(receiver)), watchdog, state: None }
    }

    /// Gives a sign of life if it is due, and returns when the next one is.
    pub(super) fn watchdog(&mut self) -> Option<Instant> {
        let (period, next) = self.watchdog.as_mut()?;
        if Instant::now() >= *next {
            *next = Instant::now() + *period;
            self.unit_state.send_modify(|unit_state| unit_state.beats += 1);
        }
        Some(*next)
    }

    /// Reports that the service reads its configuration again. [`ServiceManager::ready`] reports the end of the reload.
    pub(super) fn reloading(&self) {
        self.unit_state.send_modify(|unit_state| {
            unit_state.reloads += 1;
            unit_state.ready = false;
        });
    }

    /// Reports that every request of the service manager is carried out.
    pub(super) fn ready(&self) {
        self.unit_state.send_if_modified(|unit_state| !std::mem::replace(&mut unit_state.ready, true));
    }

    pub(super) fn stopping(&self) {
        self.unit_state.send_modify(|unit_state| unit_state.stopping = true);
    }

    /// Reports the state of the service. The state goes to the journal too, with a priority that depends on the state, but
    /// without the shutdown report, which the journal has already.
    pub(super) fn status(&mut self, state: State, line: &str, shutdown_report: &str) {
        let status =
            if shutdown_report.is_empty() { line.to_owned() } else { format!("{line}; {shutdown_report}") };
        if status == self.unit_state.borrow().status {
            return;
        }
        match state {
            // While the service tries something again and again, the reason can change several times a second without a change of
            // the state. Status lines without a change of the state are logged for debugging only.
            _ if self.state == Some(state) => tracing::debug!("{line}"),
            State::Failed => Message::ServiceFailed.log(Subject::default(), line),
            State::Degraded => Message::ServiceDegraded.log(Subject::default(), line),
            State::Ready => Message::ServiceReady.log(Subject::default(), line),
            State::Disabled | State::Starting | State::Stopping => tracing::info!("{line}"),
        }
        self.state = Some(state);
        self.unit_state.send_modify(|unit_state| unit_state.status = status);
    }

    /// Waits until the last message is sent, at most for a second.
    pub(super) async fn end(self) {
        let Self { unit_state, notifier, .. } = self;
        drop(unit_state);
        if timeout(LAST_SEND, notifier).await.is_err() {
            tracing::debug!("systemd does not read the notifications of this service");
        }
    }
}

async fn notify(mut unit_state: watch::Receiver<UnitState>) {
    let mut notified = UnitState::default();
    while unit_state.changed().await.is_ok() {
        let new = unit_state.borrow_and_update().clone();
        let sent = spawn_blocking(move || {
            for message in new.since(&notified) {
                if let Err(error) = send(&message) {
                    tracing::debug!("the notification {message:?} can't be sent to systemd: {error}");
                }
            }
            new
        });
        // The blocking task fails only when the runtime shuts down.
        let Ok(new) = sent.await else { return };
        notified = new;
    }
}

fn send(message: &NotifyState<'_>) -> std::io::Result<()> {
    match message {
        NotifyState::Reloading => {
            sd_notify::notify(&[NotifyState::Reloading, NotifyState::monotonic_usec_now()?])
        }
        other => sd_notify::notify(std::slice::from_ref(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit_state(reloads: u64, ready: bool, status: &str) -> UnitState {
        UnitState { reloads, ready, status: status.to_owned(), ..UnitState::default() }
    }

    #[test]
    fn news_that_replaced_each_other_are_told_in_their_order() {
        let since = |new: &UnitState, notified: &UnitState| -> Vec<String> {
            new.since(notified).iter().map(ToString::to_string).collect()
        };
        let notified = unit_state(0, true, "ready");
        assert!(since(&notified, &notified).is_empty());
        let reloading = unit_state(1, false, "ready");
        assert_eq!(since(&reloading, &notified), ["RELOADING=1"]);
        let done = unit_state(1, true, "degraded");
        assert_eq!(since(&done, &reloading), ["STATUS=degraded", "READY=1"]);
        // If sending is blocked for a while, one message carries all changes of that time.
        assert_eq!(since(&done, &notified), ["RELOADING=1", "STATUS=degraded", "READY=1"]);
        let last = UnitState { stopping: true, beats: 3, ..unit_state(1, true, "stopping") };
        assert_eq!(since(&last, &done), ["STOPPING=1", "STATUS=stopping", "WATCHDOG=1"]);
    }
}
