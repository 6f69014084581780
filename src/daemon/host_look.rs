//! Scans the host: finds its GPUs, and asks NVML about them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mps_core::DriverNews;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::supervisor::nvml_worker::NvmlWorker;
use crate::tenants::budgets::LoopEvent;
use common::host::gpu::Gpu;
use common::host::inventory::Inventory;
use common::host::nvml::{Driver, GpuQuestions};
use common::host::proc;
use common::problem::Problem;

/// Scans of the host are repeated for this time until NVML lists each GPU that is served. A single error of NVML must not end
/// the control daemon of a GPU.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(500);

/// A program without MPS that was started less than this time ago does not exclude its GPU from a control daemon, since the
/// program usually ends soon. Otherwise the control daemon would start without this GPU. The GPU could join only after a
/// restart of the control daemon, when its last client has ended. A control daemon that starts with the GPU serves it as soon
/// as the program ends. Meanwhile no further program starts without MPS, since it finds the control daemon.
const OF_NEWCOMERS: Duration = Duration::from_secs(10);

/// The longest wait for one scan of the host. It must be much shorter than the time of the watchdog.
pub(super) const TIMEOUT: Duration = Duration::from_secs(15);

/// The first and the longest pause after NVML has failed to report critical errors. The pause doubles.
const FIRST_XID_PAUSE: Duration = Duration::from_secs(1);
const LAST_XID_PAUSE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct HostLook {
    sysroot: PathBuf,
    in_force: Option<Arc<Driver>>,
    /// Other parts of the service get the driver in force through this worker.
    worker: NvmlWorker,
    /// Asks the driver in force about GPUs. None while a scan uses this value.
    nvml: Option<GpuQuestions>,
    /// The scan that has no answer yet, with the time of its beginning. The next caller gets the answer of this scan. The
    /// answer contains the opened driver, and opening the driver again would wake all GPUs again.
    under_way: Option<(Instant, JoinHandle<Looked>)>,
    late: Option<Looked>,
    pub(super) driver_version: Result<String, String>,
    events: mpsc::Sender<LoopEvent>,
    /// The time at which the first program without MPS stops counting as just started. None if there is no such program.
    pub(super) newcomers_until: Option<Instant>,
}

#[derive(Debug)]
struct Looked {
    news: DriverNews<Arc<Driver>>,
    nvml: Option<GpuQuestions>,
    inventory: Inventory,
}

fn look(sysroot: &Path, nvml: Option<GpuQuestions>) -> Looked {
    let open = || Driver::open(sysroot).map(|driver| GpuQuestions::new(Arc::new(driver)));
    let mut nvml = nvml.map_or_else(open, Ok);
    let inventory = Inventory::read(sysroot, nvml.as_mut().map_err(|reason| &*reason));
    let news = match &nvml {
        Ok(nvml) if inventory.driver.is_ok() => DriverNews::Listed(Arc::clone(nvml.driver())),
        Ok(nvml) if nvml.driver().is_unusable() => DriverNews::Unusable,
        Ok(_) | Err(_) => DriverNews::Failed,
    };
    Looked { news, nvml: nvml.ok(), inventory }
}

impl HostLook {
    pub(super) fn new(sysroot: PathBuf, worker: NvmlWorker, events: mpsc::Sender<LoopEvent>) -> Self {
        Self {
            sysroot,
            in_force: None,
            worker,
            nvml: None,
            under_way: None,
            late: None,
            driver_version: Err("the service has not read the driver version yet".to_owned()),
            events,
            newcomers_until: None,
        }
    }

    pub(super) fn has_driver(&self) -> bool {
        self.in_force.is_some()
    }

    /// A problem that says for how long NVML has not answered. None if no scan waits for an answer.
    pub(super) fn unanswered(&self) -> Option<Problem> {
        let seconds = self.under_way.as_ref()?.0.elapsed().as_secs();
        Some(Problem::new(
            format!("NVML has not answered for {seconds} s"),
            "wait some seconds for each GPU without persistence mode, or start nvidia-persistenced; if NVML \
             stays silent, look for NVRM lines in dmesg",
        ))
    }

    pub(super) async fn answered_late(&mut self) {
        let Some((_, answer)) = &mut self.under_way else { return std::future::pending().await };
        self.late = answer.await.ok();
        self.under_way = None;
    }

    pub(super) async fn look_for(&mut self, served: &[String]) -> Inventory {
        let deadline = Instant::now() + PATIENCE;
        let mut inventory = self.read().await;
        while let Some(uuid) = not_listed(&inventory, served).filter(|_| Instant::now() < deadline) {
            tracing::info!(
                gpu_uuid = uuid,
                step = "looked-again",
                "NVML does not list GPU {uuid}, which is served; asking NVML again"
            );
            tokio::time::sleep(PAUSE).await;
            inventory = self.read().await;
        }
        inventory
    }

    /// Scans the host once, and a second time if the driver in force turns out to be unusable.
    pub(super) async fn read(&mut self) -> Inventory {
        loop {
            let Some(Looked { news, nvml, mut inventory }) = self.looked().await else {
                let reason = self
                    .unanswered()
                    .unwrap_or_else(|| "the service could not read the GPUs of this host".into());
                return Inventory::of_gpus(Err(reason), Vec::new());
            };
            let is_another = news.take_effect(&mut self.in_force);
            let driver = self.in_force.clone();
            self.nvml =
                nvml.filter(|nvml| driver.as_ref().is_some_and(|driver| Arc::ptr_eq(driver, nvml.driver())));
            if is_another {
                self.worker.use_driver(driver.clone());
            }
            match driver {
                Some(driver) if is_another => self.watch_xids(driver),
                None if is_another => continue,
                _ => {}
            }
            if inventory.driver.is_ok() || !self.has_driver() {
                self.driver_version = inventory.driver.clone().map_err(Into::into);
                self.newcomers_until = pass_over(&mut inventory).map(|left| Instant::now() + left);
            }
            return inventory;
        }
    }

    /// The answer of the running scan, or of a new one. None if no answer comes in time.
    async fn looked(&mut self) -> Option<Looked> {
        if let Some(late) = self.late.take() {
            return Some(late);
        }
        let (_, answer) = match &mut self.under_way {
            Some(look) => look,
            none => none.insert({
                let (sysroot, driver) = (self.sysroot.clone(), self.in_force.clone());
                let nvml = self.nvml.take().or_else(|| driver.map(GpuQuestions::new));
                // A separate thread asks NVML. If a GPU is falling off the bus, a call of NVML can block for ever, and the main
                // loop must go on.
                let answer = tokio::task::spawn_blocking(move || look(&sysroot, nvml));
                (Instant::now(), answer)
            }),
        };
        let answered = timeout(TIMEOUT, answer).await.ok()?;
        self.under_way = None;
        answered.ok()
    }

    /// Starts a thread that reports critical errors (Xid) as they happen, since a wait for them blocks. The thread ends after
    /// the driver was closed, or with the service. If a wait fails, the thread waits again, since one bad GPU must not hide the
    /// errors of other GPUs.
    fn watch_xids(&self, driver: Arc<Driver>) {
        let told = self.events.clone();
        let worker = self.worker.clone();
        std::thread::spawn(move || {
            let is_current =
                || !told.is_closed() && worker.driver().is_some_and(|now| Arc::ptr_eq(&now, &driver));
            let tell = |uuid: &str, error| {
                let event = LoopEvent::CriticalError(uuid.to_owned(), error);
                is_current() && told.blocking_send(event).is_ok()
            };
            let mut pause = FIRST_XID_PAUSE;
            let mut last = Problem::from("");
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

/// The first GPU in `served` that NVML does not list. None without a driver, or if NVML answers for each GPU of the host.
fn not_listed(inventory: &Inventory, served: &[String]) -> Option<String> {
    let silent = |gpu: &Gpu| gpu.nvml.is_err() && gpu.pci.foreign_driver().is_none();
    if inventory.driver.is_err() || !inventory.gpus.iter().any(silent) {
        return None;
    }
    let told = |uuid: &String| inventory.gpus.iter().any(|gpu| gpu.uuid() == Some(uuid));
    served.iter().find(|uuid| !told(uuid)).cloned()
}

/// Removes from the inventory the programs without MPS that have ended or have just started. Returns the time until the first of these
/// programs does not count as just started any more.
fn pass_over(inventory: &mut Inventory) -> Option<Duration> {
    let up = proc::uptime()?;
    let mut first: Option<Duration> = None;
    for facts in inventory.gpus.iter_mut().filter_map(|gpu| gpu.nvml.as_mut().ok()) {
        facts.state.foreign_processes.retain(|(pid, _)| {
            // The program may have ended while NVML was asked about the other GPUs.
            if proc::stat(*pid).is_err_and(|error| proc::is_gone(&error)) {
                return false;
            }
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
        let mut inventory = Inventory::of_gpus(Ok(String::new()), vec![view]);
        let left = pass_over(&mut inventory).unwrap();
        assert!(left > Duration::ZERO && left <= OF_NEWCOMERS, "{left:?}");
        let there =
            |inventory: &Inventory| inventory.gpus[0].nvml.as_ref().unwrap().state.foreign_processes.clone();
        assert_eq!(there(&inventory), [(1, "init".to_owned())]);
        assert_eq!(pass_over(&mut inventory), None);
        assert_eq!(there(&inventory).len(), 1);
        new.kill().unwrap();
        new.wait().unwrap();
        let facts = inventory.gpus[0].nvml.as_mut().unwrap();
        facts.state.foreign_processes.push((new.id(), "cat".to_owned()));
        pass_over(&mut inventory);
        assert_eq!(there(&inventory), [(1, "init".to_owned())], "cat has ended");
    }
}
