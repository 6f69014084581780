//! The look at the host: which GPUs there are, and what NVML says of them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::newcomers;
use crate::host::blocking::Blocking;
use crate::host::gpu::Gpu;
use crate::host::inventory::Inventory;
use crate::host::nvml::Driver;

/// The time that NVML gets to tell of a GPU that is served, and the pause between two looks: one error is no reason to end
/// a control daemon that has this GPU.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(500);

/// The time after which a look counts as failed. It must stay well below the watchdog's time.
const TIMEOUT: Duration = Duration::from_secs(15);

/// A critical error that NVML tells of: the GPU's UUID and the Xid number.
pub(super) type Xid = (String, u64);

/// Looks at the host, and keeps the driver open as long as it works.
#[derive(Debug)]
pub(super) struct HostLook {
    sysroot: PathBuf,
    driver: watch::Sender<Option<Arc<Driver>>>,
    /// The driver's version, or why there is none.
    pub(super) driver_version: Result<String, String>,
    xids: mpsc::Sender<Xid>,
    looks: Blocking,
    /// When a program without MPS that has just come to a GPU is none that has just come any more.
    pub(super) newcomers_until: Option<Instant>,
}

impl HostLook {
    pub(super) fn new(
        sysroot: PathBuf,
        driver: watch::Sender<Option<Arc<Driver>>>,
        xids: mpsc::Sender<Xid>,
    ) -> Self {
        Self {
            sysroot,
            driver,
            driver_version: Err("not looked for yet".to_owned()),
            xids,
            looks: Blocking::new(1),
            newcomers_until: None,
        }
    }

    /// Looks until NVML tells of all GPUs in `served`, or has failed to for a while.
    pub(super) async fn look_for(&mut self, served: &[String]) -> Inventory {
        let deadline = Instant::now() + PATIENCE;
        let mut inventory = self.look().await;
        while let Some(uuid) = untold(&inventory, served).filter(|_| Instant::now() < deadline) {
            tracing::info!(
                gpu_uuid = uuid,
                step = "looked-again",
                "NVML does not tell of {uuid}, which is served; looked at again"
            );
            tokio::time::sleep(PAUSE).await;
            inventory = self.look().await;
        }
        inventory
    }

    /// Looks once. Off the loop's thread: a GPU that is about to fall off the bus can hold a question.
    pub(super) async fn look(&mut self) -> Inventory {
        let driver = self.driver.borrow().clone();
        let sysroot = self.sysroot.clone();
        let look = self.looks.ask(TIMEOUT, move || {
            let driver = match driver {
                Some(driver) => Ok(driver),
                None => Driver::open().map(Arc::new),
            };
            let inventory = Inventory::read(&sysroot, driver.as_deref());
            (driver.ok(), inventory)
        });
        let (driver, mut inventory) = look.await.unwrap_or_else(|| {
            let reason = format!("NVML did not answer within {} s", TIMEOUT.as_secs());
            (None, Inventory { driver: Err(reason.into()), gpus: Vec::new(), others: Vec::new(), cpus: None })
        });
        let driver = driver.filter(|_| inventory.driver.is_ok());
        if let Some(driver) = driver.as_ref().filter(|_| self.driver.borrow().is_none()) {
            self.watch_xids(Arc::clone(driver));
        }
        self.driver.send_replace(driver);
        self.driver_version = inventory.driver.clone().map_err(Into::into);
        self.newcomers_until = newcomers::pass_over(&mut inventory).map(|left| Instant::now() + left);
        inventory
    }

    /// Has critical errors told as they happen. Waiting for them blocks, so it has a thread of its own, which ends with
    /// the driver or with the service.
    fn watch_xids(&self, driver: Arc<Driver>) {
        let told = self.xids.clone();
        std::thread::spawn(move || {
            let tell = |uuid: &str, xid: u64| told.blocking_send((uuid.to_owned(), xid)).is_ok();
            if let Err(reason) = driver.watch_xids(tell) {
                tracing::debug!("critical errors are not told by NVML: {reason}");
            }
        });
    }
}

/// A GPU in `served` that NVML does not tell of, while it fails to tell of some GPU.
fn untold(inventory: &Inventory, served: &[String]) -> Option<String> {
    let silent = |gpu: &Gpu| gpu.nvml.is_err() && gpu.pci.foreign_driver().is_none();
    if inventory.driver.is_err() || !inventory.gpus.iter().any(silent) {
        return None;
    }
    let told = |uuid: &String| inventory.gpus.iter().any(|gpu| gpu.uuid() == Some(uuid));
    served.iter().find(|uuid| !told(uuid)).cloned()
}
