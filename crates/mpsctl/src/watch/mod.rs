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

/// The time between two looks at the service if it reports no change.
const PERIOD: Duration = Duration::from_secs(1);

/// The time between two looks at the service while it reports one change after the other.
const SHORTEST: Duration = Duration::from_millis(250);

/// The connection to the service, for repeated looks at it. The service and the bus may end and start again between two looks.
#[derive(Debug, Default)]
struct ReconnectingProxy {
    joined: Option<(DaemonProxy, watch::Receiver<()>)>,
}

impl ReconnectingProxy {
    /// The proxy of the service. Connects to the bus if there is no connection.
    async fn daemon(&mut self) -> Result<DaemonProxy, BusError> {
        if let Some((daemon, _)) = &self.joined {
            return Ok(daemon.clone());
        }
        let daemon = DaemonProxy::connect().await?;
        let changes = daemon.changes().await?;
        self.joined = Some((daemon.clone(), changes));
        Ok(daemon)
    }

    /// Waits until the next look at the service is due: after a change, or at the end of the period.
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

/// Waits for an answer that the service can give at once. Returns an error if the answer does not come in time.
async fn in_time<T, E: From<BusError>>(answer: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    timeout(SIGN_OF_LIFE, answer).await.unwrap_or_else(|_| Err(BusError::Silent.into()))
}

/// Says why the service does not answer now. The command goes on asking, and prints the next answer of the service as soon as
/// there is one.
fn describe(error: &BusError) -> String {
    match error {
        BusError::NotRunning => "yunion-mps-daemon is not running; waiting for it".to_owned(),
        error => format!("{}; asking again", printable(&error.to_string())),
    }
}

/// True if the reader of the output has closed the pipe. Without this check, the command would notice the closed pipe only at the
/// next event.
fn reader_has_gone() -> bool {
    let stdout = rustix::stdio::stdout();
    let mut asked = [PollFd::new(&stdout, PollFlags::empty())];
    let answered = poll(&mut asked, Some(&Timespec::default())).is_ok();
    answered && asked.iter().any(|found| found.revents().intersects(PollFlags::ERR | PollFlags::HUP))
}
