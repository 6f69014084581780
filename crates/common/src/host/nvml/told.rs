//! Asks NVML about all GPUs of a host. Each GPU has its own call, so that a GPU that hangs does not block the others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mps_core::terms::PciAddress;

use super::Driver;
use super::facts::NvmlFacts;
use crate::host::gpu::Gpu;
use crate::host::questions::ParallelQuestions;
use crate::problem::Problem;

/// The time that the service waits for the next answer about a GPU, counted from the last answer. Without nvidia-persistenced,
/// NVML wakes one GPU after the other, which takes some seconds for each GPU.
const PATIENCE: Duration = Duration::from_secs(10);

/// The time that the service waits for a GPU that has not answered an earlier call yet.
const REMAINDER: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub struct GpuQuestions {
    driver: Arc<Driver>,
    listed: ParallelQuestions<u32, Result<Gpu, Problem>>,
    unlisted: ParallelQuestions<PciAddress, Result<NvmlFacts, Problem>>,
}

pub(crate) struct ToldByNvml {
    pub(crate) version: String,
    pub(crate) listed: Vec<Gpu>,
    /// The GPUs on the PCI bus with an address that NVML does not list. The value has the facts that NVML reports when it is
    /// asked for this address, or the reason why NVML can't reach the GPU.
    pub(crate) unlisted: BTreeMap<PciAddress, Result<NvmlFacts, Problem>>,
}

impl GpuQuestions {
    pub fn new(driver: Arc<Driver>) -> Self {
        Self { driver, listed: ParallelQuestions::default(), unlisted: ParallelQuestions::default() }
    }

    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// Asks NVML about all GPUs. `on_bus` has the addresses of the GPUs on the PCI bus that no other kernel driver uses. Fails
    /// if NVML can't count the GPUs.
    pub(crate) fn ask(&mut self, on_bus: &[PciAddress]) -> Result<ToldByNvml, Problem> {
        let count = self.driver.count()?;
        // The service can serve GPUs even if the driver's version is unknown.
        let version = self.driver.version().unwrap_or_else(|reason| {
            tracing::warn!("{reason}");
            "unknown".to_owned()
        });
        let driver = Arc::clone(&self.driver);
        let answers = self.listed.ask(0..count, PATIENCE, REMAINDER, move |index| driver.listed(*index));
        let all_answer = usize::try_from(count).is_ok_and(|count| answers.len() == count);
        let listed: Vec<Gpu> = answers.into_values().filter_map(Result::ok).collect();
        let is_listed = |address: &&PciAddress| listed.iter().any(|gpu| gpu.pci.address == **address);
        let addresses: Vec<PciAddress> =
            on_bus.iter().filter(|address| !is_listed(address)).copied().collect();
        let driver = Arc::clone(&self.driver);
        // One of these addresses may belong to a GPU that has not answered the question about its index. The service does not
        // wait for that GPU as long a second time.
        let patience = if all_answer { PATIENCE } else { REMAINDER };
        let mut answers = self
            .unlisted
            .ask(addresses.iter().copied(), patience, REMAINDER, move |address| driver.facts_at(*address));
        let silent = || {
            Err(Problem::new(
                format!("NVML did not answer within {seconds} s", seconds = PATIENCE.as_secs()),
                "look for NVRM lines in dmesg",
            ))
        };
        let answer = |address| (address, answers.remove(&address).unwrap_or_else(silent));
        let unlisted = addresses.into_iter().map(answer).collect();
        Ok(ToldByNvml { version, listed, unlisted })
    }
}
