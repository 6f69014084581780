//! Subcommands that wait for the service, or follow it.

use std::future::{Future, pending};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use common::bus::answers::SIGN_OF_LIFE;
use common::bus::changes::ServiceChanges;
use common::bus::proxy::{BusError, DaemonProxy};
use common::text::printable;

pub(super) mod events;
pub(super) mod is_ready;
pub(super) mod status;
pub(super) mod top;

/// The time between two looks if the service reports no change.
const PERIOD: Duration = Duration::from_secs(1);

/// The time between two looks while the service reports one change after the other.
const SHORTEST: Duration = Duration::from_millis(250);

/// The service, for looks at it again and again. It may come and go, and so may the bus.
#[derive(Debug, Default)]
struct ReconnectingProxy {
    joined: Option<(DaemonProxy, ServiceChanges)>,
}

impl ReconnectingProxy {
    /// The service to ask. Joins the bus, if the bus is not joined now.
    async fn daemon(&mut self) -> Result<DaemonProxy, BusError> {
        if let Some((daemon, _)) = &self.joined {
            return Ok(daemon.clone());
        }
        let daemon = DaemonProxy::connect().await?;
        let changes = daemon.changes().await?;
        self.joined = Some((daemon.clone(), changes));
        Ok(daemon)
    }

    /// Waits for the time of the next look: a change, or the end of the period.
    async fn pause(&mut self) {
        let due = Instant::now() + PERIOD;
        sleep(SHORTEST).await;
        let change = async {
            match &mut self.joined {
                Some((_, changes)) => changes.next().await,
                None => pending().await,
            }
        };
        if timeout_at(due, change).await == Ok(false) {
            self.joined = None;
        }
    }
}

/// An answer that the service always knows.
async fn in_time<T, E: From<BusError>>(answer: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    timeout(SIGN_OF_LIFE, answer).await.unwrap_or_else(|_| Err(BusError::Silent.into()))
}

/// The reason why there is no answer now, for a reader who sees the next answer as soon as there is one.
fn describe(error: &BusError) -> String {
    match error {
        BusError::NotRunning => "yunion-mps-daemon is not running; waiting for it".to_owned(),
        error => format!("{}; asking again", printable(&error.to_string())),
    }
}

/// True if the other end of a pipe was closed. Otherwise only the next event would say so.
fn reader_has_gone() -> bool {
    let stdout = rustix::stdio::stdout();
    let mut asked = [PollFd::new(&stdout, PollFlags::empty())];
    let answered = poll(&mut asked, Some(&Timespec::default())).is_ok();
    answered && asked.iter().any(|found| found.revents().intersects(PollFlags::ERR | PollFlags::HUP))
}
