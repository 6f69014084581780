//! The look at the host: which GPUs there are, and what NVML says of them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use common::host::blocking::Blocking;
use common::host::gpu::Gpu;
use common::host::inventory::Inventory;
use common::host::nvml::Driver;
use common::host::proc;

/// The time that NVML gets to tell of a GPU that is served, and the pause between two looks: one error is no reason to end
/// a control daemon that has this GPU.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(500);

/// The time that a program without MPS that has only just come to a GPU gets to end. After that its GPU is left out, and the
/// others are served without it. Such a program most often ends soon: it was started while no control daemon ran. If a control
/// daemon starts without this GPU, it has to start again for it, after the last client of the other GPUs has ended. If it
/// starts with this GPU, it serves the GPU as soon as the program ends. Meanwhile no other program gets in, since a program
/// that finds a control daemon connects to it.
const OF_NEWCOMERS: Duration = Duration::from_secs(10);

/// The time after which a look counts as failed. It must stay well below the watchdog's time.
const TIMEOUT: Duration = Duration::from_secs(15);

/// The first and the last pause after NVML has failed to tell of critical errors. The pause doubles.
const FIRST_XID_PAUSE: Duration = Duration::from_secs(1);
const LAST_XID_PAUSE: Duration = Duration::from_secs(60);

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
        let mut inventory = self.read().await;
        while let Some(uuid) = not_listed(&inventory, served).filter(|_| Instant::now() < deadline) {
            tracing::info!(
                gpu_uuid = uuid,
                step = "looked-again",
                "NVML does not list {uuid}, which is served; checking again"
            );
            tokio::time::sleep(PAUSE).await;
            inventory = self.read().await;
        }
        inventory
    }

    /// Looks once. Off the loop's thread: a GPU that is about to fall off the bus can hold a question.
    pub(super) async fn read(&mut self) -> Inventory {
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
        let is_new = self.driver.borrow().is_none();
        self.driver.send_replace(driver.clone());
        if let Some(driver) = driver.filter(|_| is_new) {
            self.watch_xids(driver);
        }
        self.driver_version = inventory.driver.clone().map_err(Into::into);
        self.newcomers_until = pass_over(&mut inventory).map(|left| Instant::now() + left);
        inventory
    }

    /// Has critical errors told as they happen. Waiting for them blocks, so it has a thread of its own, which ends after
    /// the driver or the service has: a wait that fails is begun again, since one bad GPU must not silence the others.
    fn watch_xids(&self, driver: Arc<Driver>) {
        let told = self.xids.clone();
        let current = self.driver.subscribe();
        std::thread::spawn(move || {
            let is_current = || {
                let now = current.borrow();
                !told.is_closed() && now.as_ref().is_some_and(|now| Arc::ptr_eq(now, &driver))
            };
            let tell =
                |uuid: &str, xid: u64| is_current() && told.blocking_send((uuid.to_owned(), xid)).is_ok();
            let mut pause = FIRST_XID_PAUSE;
            let mut last = String::new();
            while is_current() {
                let begun = Instant::now();
                let Err(reason) = driver.watch_xids(tell) else { return };
                if begun.elapsed() >= LAST_XID_PAUSE {
                    pause = FIRST_XID_PAUSE;
                }
                if reason != last {
                    tracing::warn!("NVML does not report critical errors (Xid): {reason}; retrying");
                    last = reason;
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(LAST_XID_PAUSE);
            }
        });
    }
}

/// A GPU in `served` that NVML does not tell of, while it fails to tell of some GPU.
fn not_listed(inventory: &Inventory, served: &[String]) -> Option<String> {
    let silent = |gpu: &Gpu| gpu.nvml.is_err() && gpu.pci.foreign_driver().is_none();
    if inventory.driver.is_err() || !inventory.gpus.iter().any(silent) {
        return None;
    }
    let told = |uuid: &String| inventory.gpus.iter().any(|gpu| gpu.uuid() == Some(uuid));
    served.iter().find(|uuid| !told(uuid)).cloned()
}

/// Removes newcomers from the inventory. Gives the time until the first of them has had its time.
fn pass_over(inventory: &mut Inventory) -> Option<Duration> {
    let up = proc::uptime()?;
    let mut first: Option<Duration> = None;
    for facts in inventory.gpus.iter_mut().filter_map(|gpu| gpu.nvml.as_mut().ok()) {
        facts.state.foreign_processes.retain(|(pid, _)| {
            let left =
                proc::started(*pid).and_then(|started| OF_NEWCOMERS.checked_sub(up.checked_sub(started)?));
            let left = left.filter(|left| !left.is_zero());
            first = [first, left].into_iter().flatten().min();
            left.is_none()
        });
    }
    first
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use common::published::samples::gpu;

    #[test]
    fn who_has_just_come_is_passed_over_and_who_stays_is_not() {
        let mut new = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let mut view = gpu("00:06.0", "GPU-1").plan.gpu;
        let facts = view.nvml.as_mut().unwrap();
        facts.state.foreign_processes = vec![(new.id(), "cat".to_owned()), (1, "init".to_owned())];
        let mut inventory =
            Inventory { driver: Ok(String::new()), gpus: vec![view], others: Vec::new(), cpus: None };
        let left = pass_over(&mut inventory).unwrap();
        assert!(left > Duration::ZERO && left <= OF_NEWCOMERS, "{left:?}");
        let there =
            |inventory: &Inventory| inventory.gpus[0].nvml.as_ref().unwrap().state.foreign_processes.clone();
        assert_eq!(there(&inventory), [(1, "init".to_owned())]);
        assert_eq!(pass_over(&mut inventory), None);
        assert_eq!(there(&inventory).len(), 1);
        new.kill().unwrap();
        new.wait().unwrap();
    }
}
