//! Looks at the host: which GPUs there are, and what NVML reports about them.

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

/// The time for which looks at the host are repeated until NVML lists a GPU that is served: one error is no reason to
/// end the control daemon of this GPU.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(500);

/// The time in which a program without MPS that has just started on a GPU should end. If the program runs longer, its GPU is left
/// out, and the other GPUs are served. A program that was started without MPS while no control daemon ran usually ends soon. A
/// control daemon that starts without the GPU of such a program has to be restarted later to serve the GPU, after the last client
/// on its other GPUs has ended. A control daemon that starts with the GPU serves the GPU as soon as the program without MPS ends.
/// While the control daemon waits for this end, no further program without MPS starts, since a program that finds a control
/// daemon connects to it.
const OF_NEWCOMERS: Duration = Duration::from_secs(10);

/// The longest time that the service waits for one look at the host. The time must be much shorter than the watchdog's time.
pub(super) const TIMEOUT: Duration = Duration::from_secs(15);

/// The first and the longest pause after NVML has failed to report critical errors. The pause doubles.
const FIRST_XID_PAUSE: Duration = Duration::from_secs(1);
const LAST_XID_PAUSE: Duration = Duration::from_secs(60);

/// Looks at the host. A look at the host uses the driver in force and returns its findings, and changes nothing else.
#[derive(Debug)]
pub(super) struct HostLook {
    sysroot: PathBuf,
    /// The driver in force. None if no driver is in force; the GPUs of the host should be read again in this case.
    in_force: Option<Arc<Driver>>,
    /// Gets the driver in force, for other parts of the service.
    worker: NvmlWorker,
    /// The questions to the driver in force. None while a look at the host uses these questions.
    nvml: Option<GpuQuestions>,
    /// The look at the host that has no answer yet, with its beginning. The look at the host goes on, and the next caller gets
    /// the answer: dropping the answer would close a driver that has just woken all GPUs.
    under_way: Option<(Instant, JoinHandle<Looked>)>,
    /// The answer of a look that came after its caller had stopped waiting.
    late: Option<Looked>,
    /// The version of the driver in force, or the reason why there is none.
    pub(super) driver_version: Result<String, String>,
    events: mpsc::Sender<LoopEvent>,
    /// The moment from which no program without MPS on the GPUs counts as just started any more.
    pub(super) newcomers_until: Option<Instant>,
}

/// The findings of one look at the host.
#[derive(Debug)]
struct Looked {
    news: DriverNews<Arc<Driver>>,
    nvml: Option<GpuQuestions>,
    inventory: Inventory,
}

/// Looks at the host with the open driver in `nvml`, or opens a driver.
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

    /// A problem that says for how long NVML has not answered, if the last look has no answer.
    pub(super) fn unanswered(&self) -> Option<Problem> {
        let seconds = self.under_way.as_ref()?.0.elapsed().as_secs();
        Some(Problem::new(
            format!("NVML has not answered for {seconds} s"),
            "wait some seconds for each GPU without persistence mode, or start nvidia-persistenced; if NVML \
             stays silent, look for NVRM lines in dmesg",
        ))
    }

    /// Returns when a look has an answer for which no caller waits any more.
    pub(super) async fn answered_late(&mut self) {
        let Some((_, answer)) = &mut self.under_way else { return std::future::pending().await };
        self.late = answer.await.ok();
        self.under_way = None;
    }

    /// Repeats looks until NVML lists all GPUs in `served`, or until [`PATIENCE`] is over.
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

    /// Looks at the host once, and a second time if the first look shows that the driver in force does not work any more.
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

    /// The answer to the running look at the host, or to a new look. None if no answer comes in time.
    async fn looked(&mut self) -> Option<Looked> {
        if let Some(late) = self.late.take() {
            return Some(late);
        }
        let (_, answer) = match &mut self.under_way {
            Some(look) => look,
            none => none.insert({
                let (sysroot, driver) = (self.sysroot.clone(), self.in_force.clone());
                let nvml = self.nvml.take().or_else(|| driver.map(GpuQuestions::new));
                // NVML is asked on a thread of its own: if a GPU is falling off the bus, a call of NVML can block for ever,
                // and the loop must go on.
                let answer = tokio::task::spawn_blocking(move || look(&sysroot, nvml));
                (Instant::now(), answer)
            }),
        };
        let answered = timeout(TIMEOUT, answer).await.ok()?;
        self.under_way = None;
        answered.ok()
    }

    /// Has critical errors reported as they happen. Waiting for critical errors blocks, so this is done on a separate thread,
    /// which ends after the driver was closed or when the service ends. A wait for critical errors that fails is begun again,
    /// since one bad GPU must not hide the errors of other GPUs.
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

/// A GPU in `served` that NVML does not list, while some GPU does not answer.
fn not_listed(inventory: &Inventory, served: &[String]) -> Option<String> {
    let silent = |gpu: &Gpu| gpu.nvml.is_err() && gpu.pci.foreign_driver().is_none();
    if inventory.driver.is_err() || !inventory.gpus.iter().any(silent) {
        return None;
    }
    let told = |uuid: &String| inventory.gpus.iter().any(|gpu| gpu.uuid() == Some(uuid));
    served.iter().find(|uuid| !told(uuid)).cloned()
}

/// Removes programs that have just started from the inventory. Returns the time until the first of these programs does not count
/// as just started any more.
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
    }
}
