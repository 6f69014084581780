//! Reports the state of the service to the service manager: ready, reloading, stopping, the status line, a sign of life.
//!
//! Sending blocks while the service manager does not read its socket. So a separate thread sends the messages, and a newer
//! state replaces a state that was not sent yet.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, timeout};

use crate::message::{Message, Subject};
use common::published::snapshot::State;

/// The longest time that the end of the service waits for the last messages.
const LAST_SEND: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct UnitState {
    reloads: u64,
    /// True if the start or the last reload of the service is complete.
    ready: bool,
    stopping: bool,
    status: String,
    /// The number of signs of life (`WATCHDOG=1`) that were due.
    beats: u64,
}

impl UnitState {
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

/// Notifies the service manager. Without a service manager, nothing is sent.
#[derive(Debug)]
pub(super) struct ServiceManager {
    unit_state: watch::Sender<UnitState>,
    notifier: JoinHandle<()>,
    /// The time between two signs of life, and the time of the next sign. None if the service manager expects no sign of life.
    watchdog: Option<(Duration, Instant)>,
    state: Option<State>,
}

impl ServiceManager {
    pub(super) fn new() -> Self {
        let (unit_state, receiver) = watch::channel(UnitState::default());
        let period = sd_notify::watchdog_enabled().map(|time| time / 3);
        let watchdog = period.map(|period| (period, Instant::now()));
        Self { unit_state, notifier: tokio::spawn(notify(receiver)), watchdog, state: None }
    }

    pub(super) fn watchdog(&mut self) -> Option<Instant> {
        let (period, next) = self.watchdog.as_mut()?;
        if Instant::now() >= *next {
            *next = Instant::now() + *period;
            self.unit_state.send_modify(|unit_state| unit_state.beats += 1);
        }
        Some(*next)
    }

    pub(super) fn reloading(&self) {
        self.unit_state.send_modify(|unit_state| {
            unit_state.reloads += 1;
            unit_state.ready = false;
        });
    }

    pub(super) fn ready(&self) {
        self.unit_state.send_if_modified(|unit_state| !std::mem::replace(&mut unit_state.ready, true));
    }

    pub(super) fn stopping(&self) {
        self.unit_state.send_modify(|unit_state| unit_state.stopping = true);
    }

    /// Reports the state to the service manager and to the journal. The journal gets no shutdown report, since it has the
    /// report already.
    pub(super) fn status(&mut self, state: State, line: &str, shutdown_report: &str) {
        let status =
            if shutdown_report.is_empty() { line.to_owned() } else { format!("{line}; {shutdown_report}") };
        if status == self.unit_state.borrow().status {
            return;
        }
        match state {
            // While the service retries something, the reason can change several times a second. So a new reason in the same
            // state is logged only at the debug level.
            _ if self.state == Some(state) => tracing::debug!("{line}"),
            State::Failed => Message::ServiceFailed.log(Subject::default(), line),
            State::Degraded => Message::ServiceDegraded.log(Subject::default(), line),
            State::Ready => Message::ServiceReady.log(Subject::default(), line),
            State::Disabled | State::Starting | State::Stopping => tracing::info!("{line}"),
        }
        self.state = Some(state);
        self.unit_state.send_modify(|unit_state| unit_state.status = status);
    }

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
        // If sending is blocked for a while, the next messages contain all changes of that time.
        assert_eq!(since(&done, &notified), ["RELOADING=1", "STATUS=degraded", "READY=1"]);
        let last = UnitState { stopping: true, beats: 3, ..unit_state(1, true, "stopping") };
        assert_eq!(since(&last, &done), ["STOPPING=1", "STATUS=stopping", "WATCHDOG=1"]);
    }
}
