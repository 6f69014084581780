//! Subcommands that wait for the service, or follow its changes.

use std::future::{Future, pending};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use common::bus::answers::SIGN_OF_LIFE;
use common::bus::proxy::{BusError, DaemonProxy};
use common::text::printable;

pub(super) mod events;
pub(super) mod is_ready;
pub(super) mod status;
pub(super) mod top;

/// The time between two requests to the service if the service reports no change.
const PERIOD: Duration = Duration::from_secs(1);

/// The shortest time between two requests to the service, even if the service reports one change after the other.
const SHORTEST: Duration = Duration::from_millis(250);

/// The connection to the service, for repeated requests. If the service or the bus has restarted, the next request makes a new
/// connection.
#[derive(Debug, Default)]
struct ReconnectingProxy {
    joined: Option<(DaemonProxy, watch::Receiver<()>)>,
}

impl ReconnectingProxy {
    async fn daemon(&mut self) -> Result<DaemonProxy, BusError> {
        if let Some((daemon, _)) = &self.joined {
            return Ok(daemon.clone());
        }
        let daemon = DaemonProxy::connect().await?;
        let changes = daemon.changes().await?;
        self.joined = Some((daemon.clone(), changes));
        Ok(daemon)
    }

    /// Waits until the next request is due: after a change of the service, or at the end of [`PERIOD`].
    async fn pause(&mut self) {
        let due = Instant::now() + PERIOD;
        sleep(SHORTEST).await;
        let change = async {
            match &mut self.joined {
                Some((_, changes)) => changes.changed().await.is_ok(),
                None => pending().await,
            }
        };
        if timeout_at(due, change).await == Ok(false) {
            self.joined = None;
        }
    }
}

/// Waits for an answer that the service gives at once. If the answer does not come in time, the error is [`BusError::Silent`].
async fn in_time<T, E: From<BusError>>(answer: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    timeout(SIGN_OF_LIFE, answer).await.unwrap_or_else(|_| Err(BusError::Silent.into()))
}

/// The message for the user while the service does not answer. The command repeats its request until the service answers.
fn describe(error: &BusError) -> String {
    match error {
        BusError::NotRunning => "yunion-mps-daemon is not running; waiting for it".to_owned(),
        error => format!("{}; asking again", printable(&error.to_string())),
    }
}

/// True if the reader of the output has closed the pipe. A command that waits for events writes nothing, and would not notice
/// the closed pipe without this check.
fn reader_has_gone() -> bool {
    let stdout = rustix::stdio::stdout();
    let mut asked = [PollFd::new(&stdout, PollFlags::empty())];
    let answered = poll(&mut asked, Some(&Timespec::default())).is_ok();
    answered && asked.iter().any(|found| found.revents().intersects(PollFlags::ERR | PollFlags::HUP))
}
