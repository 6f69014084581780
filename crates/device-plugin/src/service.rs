//! yunion-mps-daemon as this program sees it: the slices according to the service's last answer, and the time since which
//! the service has not answered.

use std::time::{Duration, Instant};

use common::bus::proxy::{BusError, DaemonProxy, Listed};
use common::bus::rows::Device;
use common::published::snapshot::State;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::slice::NodeSlice;

/// The pause before the next question to a service that does not answer.
const RETRY: Duration = Duration::from_secs(1);

/// The time after which the service is asked again, even if it has sent no signal.
const REFRESH: Duration = Duration::from_secs(30);

/// The longest time that the plugin waits for the service's list of slices.
const ANSWER: Duration = Duration::from_secs(10);

/// The reason why the service does not list its slices.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoAnswer {
    #[error(transparent)]
    Bus(#[from] BusError),
    #[error("yunion-mps-daemon is starting and reads the GPUs first")]
    Starting,
}

#[derive(Debug, Clone)]
pub(crate) struct ServiceView {
    /// The slices according to the service's last answer. None until the first answer of the service.
    pub(crate) slices: Option<Vec<NodeSlice>>,
    /// The absence of the service. None while the service answers.
    pub(crate) absence: Option<Absence>,
}

#[derive(Debug, Clone)]
pub(crate) struct Absence {
    pub(crate) since: Instant,
    /// The reason why the service does not answer; empty before the first question.
    why: String,
}

impl Absence {
    fn begins() -> Self {
        Self { since: Instant::now(), why: String::new() }
    }
}

impl ServiceView {
    /// The view before the service has given its first answer.
    pub(crate) fn unknown() -> Self {
        Self { slices: None, absence: Some(Absence::begins()) }
    }

    /// True if the service has not answered for this time.
    pub(crate) fn is_away_for(&self, time: Duration) -> bool {
        self.absence.as_ref().is_some_and(|absence| absence.since.elapsed() >= time)
    }

    /// The consequence of the service's absence for the slices, and the reason for the absence.
    pub(crate) fn complaint(&self) -> Option<String> {
        let why = self.absence.as_ref().map(|absence| &absence.why).filter(|why| !why.is_empty())?;
        Some(match self.slices {
            Some(_) => format!("the slices are as they were last known: {why}"),
            None => format!("no slice is known yet: {why}"),
        })
    }
}

/// Keeps the view up to date, even when the service or the bus restarts, until the view has no reader.
pub(crate) async fn follow(view: watch::Sender<ServiceView>) {
    while !view.is_closed() {
        if let Err(error) = follow_bus(&view).await {
            gone(&view, &error);
        }
        sleep(RETRY).await;
    }
}

/// Keeps the view up to date until the connection to the bus ends.
async fn follow_bus(view: &watch::Sender<ServiceView>) -> Result<(), NoAnswer> {
    let service = DaemonProxy::connect().await?;
    let mut changes = service.changes().await?;
    while !view.is_closed() {
        let pause = match slices(&service).await {
            Ok(slices) => {
                answered(view, slices);
                REFRESH
            }
            Err(error) => {
                gone(view, &error);
                RETRY
            }
        };
        if let Ok(Err(_)) = timeout(pause, changes.changed()).await {
            return Err(BusError::NotRunning.into());
        }
    }
    Ok(())
}

fn answered(view: &watch::Sender<ServiceView>, slices: Vec<NodeSlice>) {
    view.send_if_modified(|view| {
        let came = view.absence.take().is_some();
        if came {
            tracing::info!("yunion-mps-daemon answers: {} slices", slices.len());
        }
        let changed = came || view.slices.as_ref() != Some(&slices);
        view.slices = Some(slices);
        changed
    });
}

fn gone(view: &watch::Sender<ServiceView>, error: &NoAnswer) {
    let why = error.to_string();
    view.send_if_modified(|view| {
        let absence = view.absence.get_or_insert_with(Absence::begins);
        let changed = absence.why != why;
        absence.why = why;
        changed
    });
}

/// Asks the service for all slices. Returns an error while the service starts: until the service has looked at each
/// control daemon that it finds, it reports the slices as unhealthy, although nothing has happened to their clients.
pub(crate) async fn slices(service: &DaemonProxy) -> Result<Vec<NodeSlice>, NoAnswer> {
    let asked = async {
        // The state is asked before the list, so that the list is not older than the state.
        let is_starting = service.service().await?.state == State::Starting;
        if is_starting { Err(NoAnswer::Starting) } else { Ok(service.devices().await?) }
    };
    let rows: Vec<Listed<Device>> = timeout(ANSWER, asked).await.map_err(|_| BusError::Silent)??;
    Ok(rows.iter().map(|row| NodeSlice::from(&**row)).collect())
}
