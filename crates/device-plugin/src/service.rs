//! The service as this program sees it: the slices in the service's last answer, and the time since which the service has not
//! answered.

use std::error::Error;
use std::time::{Duration, Instant};

use common::bus::proxy::{BusError, DaemonProxy, Listed};
use common::bus::rows::Device;
use common::published::snapshot::State;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::slice::NodeSlice;

/// The pause before the next request to a service that does not answer.
const RETRY: Duration = Duration::from_secs(1);

/// The time after which the service is asked again, even if the service has reported no change.
const REFRESH: Duration = Duration::from_secs(30);

/// The longest time that the plugin waits for the service's list of slices.
const ANSWER: Duration = Duration::from_secs(10);

/// The reason why the service does not list its slices, for people.
pub(crate) type NoAnswer = Box<dyn Error + Send + Sync>;

#[derive(Debug, Clone)]
pub(crate) struct ServiceView {
    /// The slices in the service's last answer. None before the first answer.
    pub(crate) slices: Option<Vec<NodeSlice>>,
    /// None while the service answers.
    pub(crate) absent_since: Option<Instant>,
    /// The reason why the service does not answer. Empty while the service answers, and before the first request.
    why: String,
}

impl ServiceView {
    pub(crate) fn unknown() -> Self {
        Self { slices: None, absent_since: Some(Instant::now()), why: String::new() }
    }

    pub(crate) fn is_away_for(&self, time: Duration) -> bool {
        self.absent_since.is_some_and(|since| since.elapsed() >= time)
    }

    /// A sentence with the reason why the service does not answer, and the consequence for the slices. None while the service
    /// answers.
    pub(crate) fn complaint(&self) -> Option<String> {
        let consequence = match self.slices {
            Some(_) => "the device plugin still offers the slices of the service's last answer",
            None => "the device plugin knows no slice yet",
        };
        (!self.why.is_empty()).then(|| format!("{consequence}: {}", self.why))
    }
}

/// Updates the view, even when the service or the bus restarts, until the view has no reader.
pub(crate) async fn follow(view: watch::Sender<ServiceView>) {
    while !view.is_closed() {
        if let Err(error) = follow_bus(&view).await {
            gone(&view, error.to_string());
        }
        sleep(RETRY).await;
    }
}

/// Updates the view until the connection to the bus ends.
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

/// Asks the service for all slices. Fails while the service starts: before the service has examined the control daemons that it
/// finds, it reports their slices as unhealthy, although their clients still run.
pub(crate) async fn slices(service: &DaemonProxy) -> Result<Vec<NodeSlice>, NoAnswer> {
    let asked = async {
        // The state is read before the list. A list that was read first could come from a service that was still starting.
        let is_starting = service.service().await?.state == State::Starting;
        if is_starting {
            return Err("yunion-mps-daemon is starting and has not read the GPUs yet".into());
        }
        Ok::<_, NoAnswer>(service.devices().await?)
    };
    let rows: Vec<Listed<Device>> = timeout(ANSWER, asked).await.map_err(|_| BusError::Silent)??;
    Ok(rows.iter().map(|row| NodeSlice::from(&**row)).collect())
}
