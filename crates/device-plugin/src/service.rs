//! yunion-mps-daemon as this program sees it: the slices according to the service's last answer, and the time since which
//! the service has not answered.

use std::error::Error;
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

/// The reason why the service does not list its slices, for people.
pub(crate) type NoAnswer = Box<dyn Error + Send + Sync>;

#[derive(Debug, Clone)]
pub(crate) struct ServiceView {
    /// The slices according to the service's last answer. None until the first answer of the service.
    pub(crate) slices: Option<Vec<NodeSlice>>,
    /// The beginning of the service's absence. None while the service answers.
    pub(crate) absent_since: Option<Instant>,
    /// The reason why the service does not answer; empty while the service answers, and before the first question.
    why: String,
}

impl ServiceView {
    /// The view before the service has given its first answer.
    pub(crate) fn unknown() -> Self {
        Self { slices: None, absent_since: Some(Instant::now()), why: String::new() }
    }

    /// True if the service has not answered for this time.
    pub(crate) fn is_away_for(&self, time: Duration) -> bool {
        self.absent_since.is_some_and(|since| since.elapsed() >= time)
    }

    /// The consequence of the service's absence for the slices, and the reason for the absence.
    pub(crate) fn complaint(&self) -> Option<String> {
        let consequence = match self.slices {
            Some(_) => "the device plugin still offers the slices of the last answer",
            None => "the device plugin knows no slice yet",
        };
        (!self.why.is_empty()).then(|| format!("{consequence}: {}", self.why))
    }
}

/// Keeps the view up to date, even when the service or the bus restarts, until the view has no reader.
pub(crate) async fn follow(view: watch::Sender<ServiceView>) {
    while !view.is_closed() {
        if let Err(error) = follow_bus(&view).await {
            gone(&view, error.to_string());
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
                gone(view, error.to_string());
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
        let came = view.absent_since.take().is_some();
        view.why.clear();
        if came {
            tracing::info!("yunion-mps-daemon answers: {} slices", slices.len());
        }
        let changed = came || view.slices.as_ref() != Some(&slices);
        view.slices = Some(slices);
        changed
    });
}

fn gone(view: &watch::Sender<ServiceView>, why: String) {
    view.send_if_modified(|view| {
        view.absent_since.get_or_insert_with(Instant::now);
        let changed = view.why != why;
        view.why = why;
        changed
    });
}

/// Asks the service for all slices. Returns an error while the service starts: until the service has looked at each
/// control daemon that it finds, it reports the slices as unhealthy, although nothing has happened to their clients.
pub(crate) async fn slices(service: &DaemonProxy) -> Result<Vec<NodeSlice>, NoAnswer> {
    let asked = async {
        // The state is asked before the list, so that the list is not older than the state.
        let is_starting = service.service().await?.state == State::Starting;
        if is_starting {
            return Err("yunion-mps-daemon is starting and reads the GPUs first".into());
        }
        Ok::<_, NoAnswer>(service.devices().await?)
    };
    let rows: Vec<Listed<Device>> = timeout(ANSWER, asked).await.map_err(|_| BusError::Silent)??;
    Ok(rows.iter().map(|row| NodeSlice::from(&**row)).collect())
}
