//! Tells the service manager where the service stands: ready, reloading, stopping, the status line, a sign of life.
//!
//! A send waits while the service manager does not read its socket. So a thread of its own sends, and nobody else waits.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use crate::state::State;

/// How many messages may wait to be sent. One that finds no place is sent at a later turn of the loop.
const MESSAGES: usize = 16;

/// How long the last messages may take to be sent.
const LAST_SEND: Duration = Duration::from_secs(1);

/// One message.
#[derive(Debug)]
enum Message {
    Ready,
    Reloading,
    Status(String),
    Stopping,
    Watchdog,
}

/// The service manager, as far as it is told something. Without one, nothing comes of it.
#[derive(Debug)]
pub struct ServiceManager {
    messages: SyncSender<Message>,
    /// Resolves when everything has been sent.
    sent: oneshot::Receiver<()>,
    watchdog: Option<Watchdog>,
    ready: bool,
    status: String,
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
    pub fn new() -> Self {
        let (messages, waiting) = sync_channel(MESSAGES);
        let (done, sent) = oneshot::channel();
        std::thread::spawn(move || {
            send(&waiting);
            // At the end nobody may care any more.
            let _ = done.send(());
        });
        let period = sd_notify::watchdog_enabled().map(|time| time / 3);
        let watchdog = period.map(|period| Watchdog { period, next: Instant::now() });
        Self { messages, sent, watchdog, ready: false, status: String::new(), state: None }
    }

    /// Gives the sign of life that is due, and says when the next one is.
    pub fn watchdog(&mut self) -> Option<Instant> {
        let due = self.watchdog.as_mut()?;
        if Instant::now() >= due.next {
            due.next = Instant::now() + due.period;
            let _ = self.messages.try_send(Message::Watchdog);
        }
        self.watchdog.as_ref().map(|watchdog| watchdog.next)
    }

    /// The configuration is read again; until the next [`ServiceManager::ready`] that is not done.
    pub fn reloading(&mut self) {
        self.ready = false;
        let _ = self.messages.try_send(Message::Reloading);
    }

    /// Everything that was asked for is done.
    pub fn ready(&mut self) {
        if !self.ready {
            self.ready = self.messages.try_send(Message::Ready).is_ok();
        }
    }

    /// The service is on its way down.
    pub fn stopping(&self) {
        let _ = self.messages.try_send(Message::Stopping);
    }

    /// How the service is. The journal has it too, as urgent as the state is.
    pub fn status(&mut self, state: State, line: String) {
        if line == self.status {
            return;
        }
        match state {
            // Between two states a reason can change several times a second, while something is tried again.
            _ if self.state == Some(state) => tracing::debug!("{line}"),
            State::Failed => tracing::error!("{line}"),
            State::Degraded => tracing::warn!("{line}"),
            State::Disabled | State::Starting | State::Ready | State::Stopping => tracing::info!("{line}"),
        }
        self.state = Some(state);
        if self.messages.try_send(Message::Status(line.clone())).is_ok() {
            self.status = line;
        }
    }

    /// Waits until the last message has been sent, if that does not take long.
    pub async fn end(self) {
        let Self { messages, sent, .. } = self;
        drop(messages);
        if timeout(LAST_SEND, sent).await.is_err() {
            tracing::debug!("the service manager does not read what it is told");
        }
    }
}

fn send(messages: &Receiver<Message>) {
    for message in messages {
        let sent = match &message {
            Message::Ready => sd_notify::notify(&[NotifyState::Ready]),
            Message::Reloading => NotifyState::monotonic_usec_now()
                .and_then(|now| sd_notify::notify(&[NotifyState::Reloading, now])),
            Message::Status(line) => sd_notify::notify(&[NotifyState::Status(line)]),
            Message::Stopping => sd_notify::notify(&[NotifyState::Stopping]),
            Message::Watchdog => sd_notify::notify(&[NotifyState::Watchdog]),
        };
        if let Err(error) = sent {
            tracing::debug!("the service manager is not told {message:?}: {error}");
        }
    }
}
