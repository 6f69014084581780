//! Tells the service manager where the service stands: ready, reloading, stopping, the status line, a sign of life.
//!
//! A send waits while the service manager does not read its socket. So news are sent on a thread, the next news wait for
//! it, and nobody else does: until then the news replace each other.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, timeout};

use crate::message::{About, Message};
use common::published::snapshot::State;

/// The time for sending the last messages.
const LAST_SEND: Duration = Duration::from_secs(1);

/// Everything that the service manager is to know.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct News {
    /// The number of reloads that have begun.
    reloads: u64,
    /// Whether everything that was asked for is done.
    ready: bool,
    stopping: bool,
    status: String,
    /// The number of signs of life that were due.
    beats: u64,
}

impl News {
    /// The messages for somebody who knows `told`.
    fn since(&self, told: &Self) -> Vec<NotifyState<'_>> {
        let mut messages = Vec::new();
        if self.reloads != told.reloads {
            messages.push(NotifyState::Reloading);
        }
        if self.stopping && !told.stopping {
            messages.push(NotifyState::Stopping);
        }
        if self.status != told.status {
            messages.push(NotifyState::Status(&self.status));
        }
        if self.ready && (!told.ready || self.reloads != told.reloads) {
            messages.push(NotifyState::Ready);
        }
        if self.beats != told.beats {
            messages.push(NotifyState::Watchdog);
        }
        messages
    }
}

/// The service manager, as far as it is told something. Without one, nothing comes of it.
#[derive(Debug)]
pub(super) struct ServiceManager {
    news: watch::Sender<News>,
    teller: JoinHandle<()>,
    watchdog: Option<Watchdog>,
    state: Option<State>,
}

/// When the service manager wants the next sign of life.
#[derive(Debug)]
struct Watchdog {
    period: Duration,
    next: Instant,
}

impl ServiceManager {
    /// Nothing has been told yet.
    pub(super) fn new() -> Self {
        let (news, heard) = watch::channel(News::default());
        let period = sd_notify::watchdog_enabled().map(|time| time / 3);
        let watchdog = period.map(|period| Watchdog { period, next: Instant::now() });
        Self { news, teller: tokio::spawn(tell(heard)), watchdog, state: None }
    }

    /// Gives the sign of life that is due, and says when the next one is.
    pub(super) fn watchdog(&mut self) -> Option<Instant> {
        let watchdog = self.watchdog.as_mut()?;
        if Instant::now() >= watchdog.next {
            watchdog.next = Instant::now() + watchdog.period;
            self.news.send_modify(|news| news.beats += 1);
        }
        Some(watchdog.next)
    }

    /// The configuration is read again; that is done at the next [`ServiceManager::ready`].
    pub(super) fn reloading(&self) {
        self.news.send_modify(|news| {
            news.reloads += 1;
            news.ready = false;
        });
    }

    /// Everything that was asked for is done.
    pub(super) fn ready(&self) {
        self.news.send_if_modified(|news| !std::mem::replace(&mut news.ready, true));
    }

    pub(super) fn stopping(&self) {
        self.news.send_modify(|news| news.stopping = true);
    }

    /// Tells the state of the service. It goes to the journal too, as urgent as the state is, but without the farewell,
    /// which the journal has already.
    pub(super) fn status(&mut self, state: State, line: &str, farewell: &str) {
        let status = if farewell.is_empty() { line.to_owned() } else { format!("{line}; {farewell}") };
        if status == self.news.borrow().status {
            return;
        }
        match state {
            // Between two states a reason can change several times a second, while something is tried again.
            _ if self.state == Some(state) => tracing::debug!("{line}"),
            State::Failed => Message::ServiceFailed.log(About::default(), line),
            State::Degraded => Message::ServiceDegraded.log(About::default(), line),
            State::Ready => Message::ServiceReady.log(About::default(), line),
            State::Disabled | State::Starting | State::Stopping => tracing::info!("{line}"),
        }
        self.state = Some(state);
        self.news.send_modify(|news| news.status = status);
    }

    /// Waits until the last message has been sent, if that does not take long.
    pub(super) async fn end(self) {
        let Self { news, teller, .. } = self;
        drop(news);
        if timeout(LAST_SEND, teller).await.is_err() {
            tracing::debug!("the service manager does not read what it is told");
        }
    }
}

async fn tell(mut news: watch::Receiver<News>) {
    let mut told = News::default();
    while news.changed().await.is_ok() {
        let new = news.borrow_and_update().clone();
        let sent = spawn_blocking(move || {
            for message in new.since(&told) {
                if let Err(error) = send(&message) {
                    tracing::debug!("the service manager is not told {message:?}: {error}");
                }
            }
            new
        });
        // Without an answer, the runtime is about to end.
        let Ok(new) = sent.await else { return };
        told = new;
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

    fn news(reloads: u64, ready: bool, status: &str) -> News {
        News { reloads, ready, status: status.to_owned(), ..News::default() }
    }

    #[test]
    fn news_that_replaced_each_other_are_told_in_their_order() {
        let since = |new: &News, told: &News| -> Vec<String> {
            new.since(told).iter().map(ToString::to_string).collect()
        };
        let told = news(0, true, "ready");
        assert!(since(&told, &told).is_empty());
        let reloading = news(1, false, "ready");
        assert_eq!(since(&reloading, &told), ["RELOADING=1"]);
        let done = news(1, true, "degraded");
        assert_eq!(since(&done, &reloading), ["STATUS=degraded", "READY=1"]);
        // The teller was held up in between.
        assert_eq!(since(&done, &told), ["RELOADING=1", "STATUS=degraded", "READY=1"]);
        let last = News { stopping: true, beats: 3, ..news(1, true, "stopping") };
        assert_eq!(since(&last, &done), ["STOPPING=1", "STATUS=stopping", "WATCHDOG=1"]);
    }
}
