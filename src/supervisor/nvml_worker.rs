//! Asks NVML about GPUs on threads other than the main loop's, and sets and restores compute modes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mps_core::terms::GpuProcess;
use tokio::task::JoinSet;

use crate::supervisor::state_file::SharedStateFile;
use common::host::blocking::Blocking;
use common::host::compute_mode::ComputeMode;
use common::host::nvml::Driver;
use common::problem::Problem;
use mps_core::kernel_limits::{LimitGoal, LimitOutcome, LimitedGroup};
use mps_core::serve::ClientsOnGpus;

/// The most simultaneous questions to NVML about one GPU. A health check and a list of clients may coincide.
const QUESTIONS: usize = 4;

/// The longest wait for an answer of NVML. Measured: 0.1 ms. NVML may never answer for a GPU that has fallen off the bus.
const NVML_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
pub(crate) struct NvmlWorker {
    /// None while the host has no driver. An administrator may install the driver late, or remove it.
    driver: Arc<Mutex<Option<Arc<Driver>>>>,
    state_file: SharedStateFile,
    /// The threads for questions, by the UUID of the GPU. A GPU that does not answer must not block questions about other GPUs.
    questions: Arc<Mutex<BTreeMap<String, Blocking>>>,
    /// The threads for changes, by the UUID of the GPU. Each GPU has only one thread, since a change may still happen after its
    /// caller has stopped waiting. The next change of the GPU waits for the end of the earlier change.
    changes: Arc<Mutex<BTreeMap<String, Blocking>>>,
}

/// The compute mode of a GPU, and the processes on it. The outer error is the reason why NVML does not give the compute mode.
/// The inner error is the reason why NVML does not list the processes.
pub(crate) type GpuLook = Result<(ComputeMode, Result<Vec<GpuProcess>, Problem>), Problem>;

fn read_gpu(driver: &Driver, uuid: &str) -> GpuLook {
    Ok((driver.compute_mode(uuid)?, driver.processes(uuid)))
}

impl NvmlWorker {
    pub(crate) fn new(state_file: SharedStateFile) -> Self {
        Self { driver: Arc::default(), state_file, questions: Arc::default(), changes: Arc::default() }
    }

    /// Replaces the driver for all clones of this worker.
    pub(crate) fn use_driver(&self, driver: Option<Arc<Driver>>) {
        *self.driver.lock().unwrap_or_else(PoisonError::into_inner) = driver;
    }

    pub(crate) fn driver(&self) -> Option<Arc<Driver>> {
        self.driver.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the compute mode of a GPU. Returns true if the GPU had another mode.
    pub(crate) async fn take(&self, uuid: &str, mode: ComputeMode) -> Result<bool, Problem> {
        let state_file = self.state_file.clone();
        self.change(uuid, move |driver, uuid| {
            let previous = driver.compute_mode(uuid)?;
            if previous == mode {
                return Ok(false);
            }
            let written = state_file.lock().remember_compute_mode(uuid, previous, mode);
            written.map_err(|error| {
                format!("the previous compute mode can't be saved in the state file: {error}")
            })?;
            tracing::debug!(
                step = "mode-written-down",
                "the previous compute mode of {uuid} is saved in the state file"
            );
            driver.set_compute_mode(uuid, mode)?;
            tracing::debug!(step = "mode-set", "the compute mode of {uuid} is set");
            tracing::info!(gpu_uuid = uuid, "compute mode of {uuid} set from {previous} to {mode}");
            Ok(true)
        })
        .await
    }

    /// Restores the compute mode that a GPU had before the service changed it. Does nothing if the service has not changed the
    /// mode, or if another program has changed the mode since.
    pub(crate) async fn put_back(&self, uuid: &str) -> Result<(), Problem> {
        if self.driver().is_none() && self.state_file.lock().previous_compute_mode(uuid).is_none() {
            return Ok(());
        }
        let state_file = self.state_file.clone();
        self.change(uuid, move |driver, uuid| {
            let Some(previous) = state_file.lock().previous_compute_mode(uuid) else { return Ok(()) };
            let ours = state_file.lock().compute_mode_set(uuid);
            let current = driver.compute_mode(uuid)?;
            if current == previous {
                tracing::debug!("compute mode of {uuid} is already {current} and need not be restored");
            } else if current == ours {
                driver.set_compute_mode(uuid, previous)?;
                tracing::debug!(
                    step = "mode-back",
                    "the compute mode of {uuid} is restored, but not yet removed from the state file"
                );
                tracing::info!(
                    gpu_uuid = uuid,
                    "compute mode of {uuid} restored from {current} to {previous}"
                );
            } else {
                tracing::info!(
                    gpu_uuid = uuid,
                    "the compute mode of {uuid} is not restored, since another program has set {current}"
                );
            }
            let forgotten = state_file.lock().forget_compute_mode(uuid);
            forgotten.map_err(|error| {
                format!("the previous compute mode of {uuid} can't be removed from the state file: {error}")
            })?;
            tracing::debug!(
                step = "mode-forgotten",
                "the previous compute mode of {uuid} is removed from the state file"
            );
            Ok(())
        })
        .await
    }

    pub(crate) async fn pursue_memory_limit(&self, place: &LimitedGroup, goal: &LimitGoal) -> LimitOutcome {
        let (group, goal) = (place.group.clone(), goal.clone());
        let asked = move |driver: &Driver, uuid: &str| Ok(driver.pursue_memory_limit(uuid, &group, &goal));
        self.change(&place.gpu, asked).await.unwrap_or_else(|problem| LimitOutcome::Refused(problem.into()))
    }

    /// Reads the compute mode and the processes of each GPU. With `together`, one thread asks about all GPUs. If this thread
    /// does not answer in time, or without `together`, each GPU has a thread of its own.
    pub(crate) async fn read_gpus(&self, gpus: Vec<String>, together: bool) -> BTreeMap<String, GpuLook> {
        if together {
            let asked = gpus.clone();
            let looks = move |driver: &Driver, _: &str| {
                Ok(asked.into_iter().map(|uuid| (uuid.clone(), read_gpu(driver, &uuid))).collect())
            };
            if let Ok(looks) = self.ask(&gpus.join(","), looks).await {
                return looks;
            }
        }
        self.ask_each(&gpus, read_gpu).await
    }

    pub(crate) async fn processes(&self, uuid: &str) -> Result<Vec<GpuProcess>, Problem> {
        self.ask(uuid, Driver::processes).await
    }

    pub(crate) async fn all_processes(
        &self,
        gpus: &[String],
    ) -> BTreeMap<String, Result<Vec<GpuProcess>, Problem>> {
        self.ask_each(gpus, Driver::processes).await
    }

    /// The PIDs of the MPS clients on each GPU. An error if the driver does not list MPS clients.
    pub(crate) async fn mps_clients(&self, gpus: &[String]) -> ClientsOnGpus {
        let there = self.ask_each(gpus, Driver::mps_clients).await.into_iter();
        there.map(|(gpu, clients)| (gpu, clients.map_err(String::from))).collect()
    }

    /// Asks NVML about all GPUs at the same time. The answers for several hung GPUs then take no longer than for one.
    async fn ask_each<T: Send + 'static>(
        &self,
        gpus: &[String],
        question: fn(&Driver, &str) -> Result<T, Problem>,
    ) -> BTreeMap<String, Result<T, Problem>> {
        let mut asked = JoinSet::new();
        for uuid in gpus.iter().cloned() {
            let own = self.clone();
            asked.spawn(async move {
                let answer = own.ask(&uuid, question).await;
                (uuid, answer)
            });
        }
        asked.join_all().await.into_iter().collect()
    }

    async fn ask<T: Send + 'static>(
        &self,
        uuid: &str,
        question: impl FnOnce(&Driver, &str) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        self.ask_on(&self.questions, QUESTIONS, uuid, question).await
    }

    async fn change<T: Send + 'static>(
        &self,
        uuid: &str,
        change: impl FnOnce(&Driver, &str) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        self.ask_on(&self.changes, 1, uuid, change).await
    }

    async fn ask_on<T: Send + 'static>(
        &self,
        threads: &Mutex<BTreeMap<String, Blocking>>,
        most: usize,
        uuid: &str,
        question: impl FnOnce(&Driver, &str) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let driver = self.driver().ok_or("the driver can't be reached")?;
        let threads = {
            let mut all = threads.lock().unwrap_or_else(PoisonError::into_inner);
            all.entry(uuid.to_owned()).or_insert_with(|| Blocking::new(most)).clone()
        };
        let uuid = uuid.to_owned();
        let answer = threads.ask(NVML_TIMEOUT, move || question(&driver, &uuid)).await;
        answer.unwrap_or_else(|| {
            Err(format!("NVML did not answer within {seconds} s", seconds = NVML_TIMEOUT.as_secs()).into())
        })
    }
}
