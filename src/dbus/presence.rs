//! Connects the service to the bus, publishes changes there, and connects again after a disconnection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{io, thread};

use tokio::sync::{Notify, mpsc, watch};
use tokio::time::sleep;

use super::{BusConnection, Request};
use crate::supervisor::BusSignal;
use common::published::snapshot::Snapshot;

/// The first and the longest pause before another attempt to connect to the bus. The pause doubles.
const FIRST_BUS_PAUSE: Duration = Duration::from_millis(200);
const LAST_BUS_PAUSE: Duration = Duration::from_secs(10);

/// Runs the future that serves the bus on a separate thread, so that any number of calls does not delay the supervisors.
pub(crate) fn on_a_thread_of_its_own(bus: impl Future<Output = ()> + Send + 'static) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    thread::Builder::new().name("bus".to_owned()).spawn(move || runtime.block_on(bus))?;
    Ok(())
}

/// Connects to the bus, and connects again after each disconnection. `joined` is true while the service is on the bus, and
/// `changed` is notified when it has connected.
pub(crate) async fn stay_on_the_bus(
    mut snapshot: watch::Receiver<Arc<Snapshot>>,
    requests: mpsc::Sender<Request>,
    mut signals: mpsc::Receiver<BusSignal>,
    joined: Arc<AtomicBool>,
    changed: Arc<Notify>,
) {
    let mut pause = FIRST_BUS_PAUSE;
    let mut said = String::new();
    loop {
        match BusConnection::connect(snapshot.clone(), requests.clone()).await {
            Ok(mut bus) => {
                tracing::info!("the service is connected to D-Bus as {name}", name = common::bus::NAME);
                (pause, said) = (FIRST_BUS_PAUSE, String::new());
                joined.store(true, Ordering::Relaxed);
                changed.notify_one();
                loop {
                    tokio::select! {
                        () = bus.closed() => break,
                        Some(signal) = signals.recv() => {
                            // The new state is published before the signal, so that a receiver of the signal reads the new
                            // state.
                            let new = Arc::clone(&snapshot.borrow_and_update());
                            bus.publish(new).await;
                            match signal {
                                BusSignal::ClientFault { gpu_uuid, pids, reason } => {
                                    bus.client_fault(&gpu_uuid, &pids, &reason).await;
                                }
                                BusSignal::OverUse { device, reasons, pids } => {
                                    bus.over_use(&device, &reasons, &pids).await;
                                }
                            }
                        }
                        changed = snapshot.changed() => match changed {
                            Ok(()) => {
                                let new = Arc::clone(&snapshot.borrow_and_update());
                                bus.publish(new).await;
                            }
                            Err(_) => return,
                        },
                    }
                }
                joined.store(false, Ordering::Relaxed);
                tracing::warn!(
                    "the service lost the D-Bus connection and connects again; GPUs are still served"
                );
            }
            Err(error) => {
                let text = error.to_string();
                if text != said {
                    tracing::warn!("the service can't connect to D-Bus: {text}; the service retries");
                    said = text;
                }
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(LAST_BUS_PAUSE);
    }
}
