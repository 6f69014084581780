//! `yunion-mpsctl is-ready`.

use std::io::Write;
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};

use super::ReconnectingProxy;
use crate::show::status::state_and_reason;
use crate::{FAILED, NOT_RUNNING, Result};
use common::bus::answers::SIGN_OF_LIFE;
use common::bus::proxy::{BusError, Listed};
use common::bus::rows::Service;
use common::published::snapshot::State;

pub(crate) async fn is_ready(at_most: Option<u32>, quiet: bool, out: &mut dyn Write) -> Result<u8> {
    let mut watched = ReconnectingProxy::default();
    let found = match at_most {
        None => ask(&mut watched, SIGN_OF_LIFE).await,
        Some(seconds) => wait(&mut watched, Duration::from_secs(seconds.into())).await,
    };
    match found {
        Ok(service) => {
            if !quiet {
                writeln!(out, "{}", state_and_reason(&service))?;
            }
            Ok(if is_well(&service) { 0 } else { FAILED })
        }
        Err(BusError::NotRunning) if quiet => Ok(NOT_RUNNING),
        Err(error) => Err(error.into()),
    }
}

/// Waits until the service is ready, at most for the time `at_most`. Returns the last state of the service.
async fn wait(watched: &mut ReconnectingProxy, at_most: Duration) -> Result<Listed<Service>, BusError> {
    let deadline = Instant::now() + at_most;
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).max(LAST_LOOK);
        let found = ask(watched, left.min(SIGN_OF_LIFE)).await;
        let is_over = found.as_ref().is_ok_and(|service| is_well(service));
        if is_over || timeout_at(deadline, watched.pause()).await.is_err() {
            return found;
        }
    }
}

/// The service gets at least this time for each answer, even if the deadline of the command is nearer.
const LAST_LOOK: Duration = Duration::from_secs(1);

async fn ask(watched: &mut ReconnectingProxy, at_most: Duration) -> Result<Listed<Service>, BusError> {
    let answer = async { watched.daemon().await?.service().await };
    timeout(at_most, answer).await.unwrap_or(Err(BusError::Silent))
}

fn is_well(service: &Service) -> bool {
    service.state == State::Ready
}
