//! `yunion-mpsctl bench`: the same work by one CUDA process and by several at once, with MPS and without.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::ops::Deref;

use clap::Args;
use rustix::process::Signal;
use serde::de::DeserializeOwned;
use tokio::task::JoinSet;

use crate::complete;
use crate::measure::bench_report::{Measured, Results, document, print, slowest};
use crate::measure::cuda_client::{CudaClient, CudaRequest, Environment, Work};
use crate::measure::probe::refuse_to_queue;
use crate::screen::Passing;
use crate::show::health;
use crate::show::table::Shown;
use crate::signals::CaughtSignals;
use crate::{Error, FAILED, Result, print_json};
use common::bus::answers::{is_called, published_name};
use common::bus::proxy::{DaemonProxy, Listed};
use common::bus::rows::{Client, Device};

/// The blocks of the narrow kernel: as many multiprocessors at most, which leaves room for many beside it.
const NARROW_BLOCKS: u32 = 4;

/// The blocks of the wide kernel for each multiprocessor: as many threads as it can hold.
const WIDE_BLOCKS_PER_SM: u32 = 16;

/// The approximate time of one kernel: short, since a process can only leave between two kernels.
const KERNEL_SECONDS: f64 = 0.02;

/// The kernels that one process runs: narrow ones for a second, wide ones for half a second, since their times add up.
const NARROW_LAUNCHES: u32 = 50;
const WIDE_LAUNCHES: u32 = 25;

/// The kernel counts its rounds in an i32.
const MOST_ROUNDS: u32 = 1 << 30;

/// The kernels that warm a GPU up: its clock rises under load.
const WARM_UP_LAUNCHES: u32 = 5;

/// The measurements for each step of the calibration.
const CALIBRATION_RUNS: u32 = 3;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Largest number of processes
    #[arg(short = 'n', long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u32).range(1..=60))]
    processes: u32,
    /// Slices of one GPU, which the processes take in turn; a GPU's address or UUID stands for all of its slices. May be
    /// repeated. Default: all slices of the first healthy GPU that are not drained
    #[arg(long, value_name = "NAME", add = complete::devices())]
    device: Vec<String>,
    /// Run even if the GPU has other clients; this slows them down
    #[arg(long)]
    beside_clients: bool,
    /// Print everything as one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) async fn bench(daemon: &DaemonProxy, arguments: &Arguments, out: &mut dyn Write) -> Result<u8> {
    let devices = daemon.devices().await?;
    let slices = slices(&arguments.device, &devices)?;
    let Some(first) = slices.first() else {
        return Err(Error::Failed("there is no healthy device; see: yunion-mpsctl status".to_owned()));
    };
    if !arguments.beside_clients {
        refuse_beside(&daemon.clients().await?, first)?;
    }
    refuse_to_queue(daemon, first).await?;
    let mut environments = Vec::new();
    for slice in &slices {
        environments.push(Environment::of_slice(daemon, &slice.addr).await?);
    }
    let why_not = why_not_without_mps(first);
    let mut bench = Bench {
        environments,
        compares: why_not.is_none(),
        counts: counts(arguments.processes),
        running: Vec::new(),
        step: Passing::default(),
    };
    let mut signals = CaughtSignals::catch(&[Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT])?;
    let ended = tokio::select! {
        measured = bench.measure() => measured.map(Ok),
        signal = signals.next() => Ok(Err(signal)),
    };
    // Also after an error: if one process fails, the others must not go on.
    bench.stop().await;
    bench.progress("");
    let result = match ended? {
        Ok(result) => result,
        Err(signal) => return Ok(u8::try_from(128 + signal.as_raw()).unwrap_or(FAILED)),
    };
    if arguments.json {
        print_json(out, &document(&slices, why_not.as_deref(), &result))?;
    } else {
        print(out, &slices, why_not.as_deref(), &result)?;
    }
    Ok(0)
}

/// The slices to use, all of one GPU.
fn slices<'a>(names: &[String], devices: &'a [Listed<Device>]) -> Result<Vec<&'a Device>> {
    let all = || devices.iter().map(Deref::deref);
    if names.is_empty() {
        let first = all().find(|device| device.healthy).and_then(|first| first.device_path.as_ref());
        let of_first = |device: &&Device| first.is_some() && device.device_path.as_ref() == first;
        // The others of a healthy GPU are drained.
        return Ok(all().filter(of_first).filter(|device| device.healthy).collect());
    }
    let mut chosen: Vec<&Device> = Vec::new();
    for name in names {
        let published = published_name(name, devices);
        let before = chosen.len();
        chosen.extend(all().filter(|device| is_called(device, &published)));
        if chosen.len() == before {
            return Err(Error::Failed(format!("there is no device {name}; see: yunion-mpsctl list")));
        }
    }
    if let Some(ill) = chosen.iter().find(|device| !device.healthy) {
        return Err(Error::Failed(format!("{} is {}", ill.addr.shown(), health::describe(ill))));
    }
    match chosen.first() {
        Some(first) if chosen.iter().any(|device| device.device_path != first.device_path) => {
            Err(Error::Failed("these devices are of several GPUs; name those of one".to_owned()))
        }
        _ => Ok(chosen),
    }
}

/// Tenants come first.
fn refuse_beside(clients: &[Listed<Client>], device: &Device) -> Result<()> {
    let here = |other: &&Listed<Client>| device.device_path.as_ref() == Some(&other.gpu);
    let named: Vec<String> = clients
        .iter()
        .filter(here)
        .map(|other| match &other.device {
            None => format!("{} ({})", other.pid, other.command.shown()),
            Some(device) => format!("{} ({}, {})", other.pid, other.command.shown(), device.shown()),
        })
        .collect();
    if named.is_empty() {
        return Ok(());
    }
    Err(Error::Failed(format!(
        "the GPU is in use by {}; that work would be slowed down, and the numbers would be wrong. Take another GPU, or \
         add --beside-clients",
        named.join(", ")
    )))
}

/// The reason why a process without MPS can't run on that GPU.
fn why_not_without_mps(device: &Device) -> Option<String> {
    let mode = device.compute_mode.shown();
    (mode != "Default").then(|| {
        format!(
            "Not measured without MPS: the compute mode is {mode}, in which only the MPS server may use the GPU. To \
             compare, serve it with cuda_mps_set_compute_mode: false in compute mode Default."
        )
    })
}

/// 1, 2, 4, ... and the last one.
fn counts(most: u32) -> Vec<u32> {
    let mut counts: Vec<u32> = std::iter::successors(Some(1u32), |count| count.checked_mul(2))
        .take_while(|count| *count < most)
        .collect();
    counts.push(most);
    counts
}

struct Bench {
    /// The environments of the slices, which the processes take in turn.
    environments: Vec<Environment>,
    /// Whether processes without MPS can run as well.
    compares: bool,
    counts: Vec<u32>,
    running: Vec<CudaClient>,
    step: Passing,
}

impl Bench {
    async fn measure(&mut self) -> Result<Results> {
        self.progress("looking at the GPU");
        self.start(1, false)?;
        let all_sms: u32 = self.ask(CudaRequest::Count).await?.into_iter().max().unwrap_or_default();
        self.stop().await;
        let wide_blocks = all_sms.max(1) * WIDE_BLOCKS_PER_SM;
        let mut kernels = BTreeMap::new();
        for (kernel, blocks, launches) in
            [("narrow", NARROW_BLOCKS, NARROW_LAUNCHES), ("wide", wide_blocks, WIDE_LAUNCHES)]
        {
            self.progress(&format!("{kernel} kernel: how many rounds it needs"));
            let work = self.calibrate(blocks, launches).await?;
            let mut rounds = Vec::new();
            for processes in self.counts.clone() {
                self.progress(&format!("{kernel} kernel, processes: {processes}, with MPS"));
                let with_mps = self.time(processes, work, true).await?;
                let without_mps = if self.compares {
                    self.progress(&format!("{kernel} kernel, processes: {processes}, without MPS"));
                    Some(self.time(processes, work, false).await?)
                } else {
                    None
                };
                rounds.push((with_mps, without_mps));
            }
            kernels.insert(kernel, Measured::new(work, &rounds));
        }
        Ok(Results { all_sms, kernels })
    }

    /// Finds the rounds that make a kernel as long as it should be, for one client of a slice.
    async fn calibrate(&mut self, blocks: u32, launches: u32) -> Result<Work> {
        self.start(1, true)?;
        let mut work = Work { blocks, rounds: 1000, launches: 1 };
        while self.fastest(work).await? < KERNEL_SECONDS / 4.0 && work.rounds < MOST_ROUNDS / 4 {
            work.rounds *= 4;
        }
        work.launches = WARM_UP_LAUNCHES;
        // Twice: the GPU's clock has risen by then.
        for _ in 0..2 {
            work.rounds = scaled(work.rounds, KERNEL_SECONDS / self.fastest(work).await?);
        }
        self.stop().await;
        Ok(Work { launches, ..work })
    }

    /// The seconds that one kernel takes. The fastest of a few: the host may be busy with other things for a moment.
    async fn fastest(&mut self, work: Work) -> Result<f64> {
        let mut fastest = f64::INFINITY;
        for _ in 0..CALIBRATION_RUNS {
            fastest =
                fastest.min(slowest(&self.ask(CudaRequest::Run(work)).await?) / f64::from(work.launches));
        }
        Ok(fastest)
    }

    /// The seconds that each of so many processes takes for that work. The clock runs from the moment that all are
    /// ready, each with its context, its kernel and a warm GPU.
    async fn time(&mut self, processes: u32, work: Work, with_mps: bool) -> Result<Vec<f64>> {
        self.start(processes, with_mps)?;
        self.ask::<f64>(CudaRequest::Run(Work { launches: WARM_UP_LAUNCHES, ..work })).await?;
        let seconds = self.ask(CudaRequest::Run(work)).await?;
        self.stop().await;
        Ok(seconds)
    }

    /// Names the present step on a terminal. An empty text removes it.
    fn progress(&mut self, text: &str) {
        let mut err = io::stderr();
        if err.is_terminal() {
            let _ = self.step.draw(text, &mut err);
        }
    }

    fn start(&mut self, processes: u32, with_mps: bool) -> Result<()> {
        for (slice, _) in self.environments.iter().cycle().zip(0..processes) {
            let client =
                if with_mps { CudaClient::start(slice) } else { CudaClient::start(&slice.without_mps()) };
            self.running.push(client?);
        }
        Ok(())
    }

    /// Sends all of them the request, and waits for all answers.
    async fn ask<T: DeserializeOwned>(&mut self, request: CudaRequest) -> Result<Vec<T>> {
        for process in &mut self.running {
            process.send(request).await?;
        }
        let mut answers = Vec::new();
        for process in &mut self.running {
            answers.push(process.answer().await?);
        }
        Ok(answers)
    }

    /// Waits until all of them have left.
    async fn stop(&mut self) {
        let mut leaving = JoinSet::new();
        for process in self.running.drain(..) {
            leaving.spawn(process.leave());
        }
        leaving.join_all().await;
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a conversion from f64 saturates"
)]
fn scaled(rounds: u32, factor: f64) -> u32 {
    ((f64::from(rounds) * factor) as u32).clamp(1, MOST_ROUNDS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_power_of_two_and_the_last() {
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(6), [1, 2, 4, 6]);
        assert_eq!(counts(8), [1, 2, 4, 8]);
    }
}
