//! The program `cuda-client`, a CUDA program for tests. If a control daemon answers, the program is an MPS client. Otherwise
//! the program uses the GPU without MPS.

use std::fs;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::wire::{self, ClientHello, Device, Event, Hello, Request};
use crate::state::{Gpu, Host, Kind, visible};

/// CUDA's error codes.
pub(super) const BUSY: u32 = 46;
pub(super) const NO_DEVICE: u32 = 100;
pub(crate) const ILLEGAL_ADDRESS: u32 = 700;
const SERVER_GONE: u32 = 806;
pub(super) const NOT_READY: u32 = 807;
pub(super) const TERMINATED: u32 = 810;

/// The GPU memory that a program without MPS takes before it allocates any.
const ALONE_MIB: u64 = 526;

const AGAIN: Duration = Duration::from_millis(50);

const STEP_MIB: u64 = 256;

const USAGE: &str = "usage: cuda-client hold SECONDS [--mib MIB] [--stay | --tell | --again] | props | alloc MIB | \
                     fault | long SECONDS | train FILE";

pub(crate) fn text(error: u32) -> &'static str {
    match error {
        2 => "out of memory",
        101 => "invalid device ordinal",
        201 => "invalid device context",
        218 => "a PTX JIT compilation failed",
        500 => "named symbol not found",
        BUSY => "CUDA-capable device(s) is/are busy or unavailable",
        NO_DEVICE => "no CUDA-capable device is detected",
        ILLEGAL_ADDRESS => "an illegal memory access was encountered",
        805 => "MPS client failed to connect to the MPS control daemon or the MPS server",
        SERVER_GONE => "the remote procedural call between the MPS server and the MPS client failed",
        NOT_READY => "MPS server is not ready to accept new MPS client requests",
        TERMINATED => "the MPS client has been terminated by the server",
        _ => "unknown error",
    }
}

/// Returns the number of streaming multiprocessors of a client with this thread percentage. GPUs give streaming multiprocessors
/// to a client in pairs.
pub(super) fn sms(all: u32, percentage: f64) -> u32 {
    let fits = |sms: &u32| f64::from(*sms) * 100.0 <= f64::from(all) * percentage;
    (1..=all / 2).map(|pairs| pairs * 2).take_while(fits).last().unwrap_or(2)
}

/// Returns the memory in MiB that a client's context with this many streaming multiprocessors takes. The values are on a
/// straight line through measurements with 12, 32, 66 and 132 multiprocessors.
pub(super) fn context_mib(sms: u32) -> u64 {
    (28_000 + 3_683 * u64::from(sms)) / 1000
}

pub(super) fn device(gpu: &Gpu, sms: u32, free_mib: u64) -> Device {
    let (pci, (major, minor)) = (gpu.pci(), gpu.compute_capability());
    Device {
        name: gpu.name(),
        pci: format!("{:02x}:{:02x}", pci.bus, pci.device),
        capability: format!("{major}.{minor}"),
        sms,
        free_mib,
        total_mib: gpu.usable_mib(),
    }
}

pub(crate) struct Context {
    server: Option<Server>,
    /// The GPU that the program uses without MPS. `None` if the program is a client of a server.
    gpu: Option<Gpu>,
    devices: Vec<Device>,
}

/// A client's connection to the MPS server. As in CUDA, a separate thread of the client answers the server, no matter what the
/// program does meanwhile.
struct Server {
    connection: Arc<OwnedFd>,
    /// The channel through which the separate thread passes the server's events on to the program.
    events: Receiver<Event>,
}

impl Server {
    fn new(connection: OwnedFd) -> Self {
        let connection = Arc::new(connection);
        let (told, events) = mpsc::channel();
        let own = Arc::clone(&connection);
        thread::spawn(move || {
            while let Some(event) = wire::receive(&*own) {
                match event {
                    Event::TakePart => _ = wire::send(&*own, &Request::TakePart),
                    event => _ = told.send(event),
                }
            }
        });
        Self { connection, events }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Some(server) = &self.server {
            wire::part(&*server.connection);
        }
        if let Some(gpu) = &self.gpu {
            gpu.leave(std::process::id());
        }
    }
}

impl Context {
    pub(crate) fn open(host: &Host) -> Result<Self, u32> {
        let environment = |name: &str| std::env::var(name).ok();
        let visible_devices = environment("CUDA_VISIBLE_DEVICES");
        let hello = ClientHello {
            visible_devices: visible_devices.clone(),
            percentage: environment("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
            memory_limits: environment("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"),
        };
        let Ok(control) = wire::connect(&super::pipe_directory().join("control")) else {
            return Self::alone(host, visible_devices.as_deref());
        };
        wire::send(&control, &Hello::Client(hello)).map_err(|_| SERVER_GONE)?;
        match wire::receive(&control) {
            Some(Event::Welcome(devices)) => {
                Ok(Self { server: Some(Server::new(control)), gpu: None, devices })
            }
            Some(Event::Error(error)) => Err(error),
            Some(Event::TakePart) => Err(SERVER_GONE),
            // Like a real CUDA program, the program goes on without MPS if no control daemon answers.
            None => Self::alone(host, visible_devices.as_deref()),
        }
    }

    fn alone(host: &Host, names: Option<&str>) -> Result<Self, u32> {
        let seen = visible(&host.gpus(), names).into_iter().map_while(|gpu| gpu);
        let gpus: Vec<Gpu> = seen.filter(|gpu| !gpu.lost() && gpu.mig() != Some(true)).collect();
        let gpu = gpus.first().ok_or(NO_DEVICE)?.clone();
        let mode = gpu.compute_mode();
        if mode == "Prohibited" || (mode == "Exclusive_Process" && gpu.computes()) {
            return Err(BUSY);
        }
        gpu.enter(std::process::id(), Kind::Compute, ALONE_MIB);
        let free = |gpu: &Gpu| {
            let others: u64 = gpu.processes().values().map(|(_, mib)| mib).sum();
            gpu.usable_mib().saturating_sub(others)
        };
        let devices = gpus.iter().map(|gpu| device(gpu, gpu.sms(), free(gpu))).collect();
        Ok(Self { server: None, gpu: Some(gpu), devices })
    }

    fn request(&self, request: &Request) {
        if let Some(server) = &self.server {
            // If the server has ended, the request is lost. The thread that waits for the server's events notices the end.
            _ = wire::send(&*server.connection, request);
        }
    }

    pub(crate) fn is_client(&self) -> bool {
        self.server.is_some()
    }

    /// Returns the first device's multiprocessors, and its free and total memory in MiB, at the time when the context was made.
    pub(crate) fn first_device(&self) -> Option<(u32, u64, u64)> {
        self.devices.first().map(|device| (device.sms, device.free_mib, device.total_mib))
    }

    pub(crate) fn allocated(&self, mib: u64) {
        self.request(&Request::Allocate { mib });
    }

    pub(crate) fn freed(&self, mib: u64) {
        self.request(&Request::Free { mib });
    }

    pub(crate) fn work(&self, until: Instant) -> Result<(), u32> {
        let Some(server) = &self.server else {
            thread::sleep(until.saturating_duration_since(Instant::now()));
            return Ok(());
        };
        loop {
            match server.events.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Event::Error(error)) => return Err(error),
                Ok(Event::Welcome(_) | Event::TakePart) => {}
                Err(RecvTimeoutError::Timeout) => return Ok(()),
                Err(RecvTimeoutError::Disconnected) => return Err(SERVER_GONE),
            }
        }
    }
}

pub fn run(arguments: &[String]) -> u8 {
    let start = Instant::now();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let host = match Host::from_env() {
        Ok(host) => host,
        Err(error) => return fail(&error),
    };
    let context = match Context::open(&host) {
        Ok(context) => context,
        Err(error) => {
            say(&format!("ERR cudaFree(0): {} ({error})", text(error)));
            return 3;
        }
    };
    let seconds =
        |text: &str| text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    match words.as_slice() {
        ["props"] => props(&context, start),
        ["alloc", mib] => match mib.parse() {
            Ok(mib) => alloc(&context, mib),
            Err(_) => fail(USAGE),
        },
        ["fault"] => fault(&context),
        ["hold", time, rest @ ..] => {
            let (mib, rest) = match rest {
                ["--mib", mib, rest @ ..] => (mib.parse().ok(), rest),
                rest => (Some(0), rest),
            };
            let (Some(time), Some(mib)) = (seconds(time), mib) else { return fail(USAGE) };
            if mib > 0 && rest != ["--again"] {
                context.allocated(mib);
            }
            match rest {
                [] => hold(&context, time, false),
                ["--stay"] => hold(&context, time, true),
                ["--tell"] => {
                    let way = if context.is_client() { "with" } else { "without" };
                    say(&format!("hold pid {} begins {way} MPS", std::process::id()));
                    hold(&context, time, false)
                }
                ["--again"] => again(&host, context, time, mib),
                _ => fail(USAGE),
            }
        }
        ["long", time] => match seconds(time) {
            Some(time) => long(&context, start, time),
            None => fail(USAGE),
        },
        ["train", file] => train(&context, file),
        _ => fail(USAGE),
    }
}

fn say(line: &str) {
    // If stdout is closed, the line is lost.
    _ = writeln!(io::stdout(), "{line}");
}

fn fail(line: &str) -> u8 {
    _ = writeln!(io::stderr(), "{line}");
    2
}

fn props(context: &Context, start: Instant) -> u8 {
    let init = start.elapsed().as_secs_f64();
    for (place, device) in context.devices.iter().enumerate() {
        let Device { name, pci, capability, sms, free_mib, total_mib } = device;
        say(&format!(
            "dev {place} {name} pci {pci} sms {sms} attr_sm {sms} free {free_mib} total {total_mib} \
             cc {capability} init {init:.3}"
        ));
    }
    0
}

/// Allocates `mib` MiB of GPU memory, rounded up to whole steps of [`STEP_MIB`], or as many steps as fit. Prints the result,
/// and returns the exit status.
fn alloc(context: &Context, mib: u64) -> u8 {
    let free = context.devices.first().map_or(0, |device| device.free_mib);
    let wanted = mib.div_ceil(STEP_MIB).saturating_mul(STEP_MIB);
    let got = wanted.min(free / STEP_MIB * STEP_MIB);
    context.request(&Request::Allocate { mib: got });
    if got < wanted {
        say(&format!("alloc stopped at {got} MiB: out of memory"));
        return 3;
    }
    say(&format!("alloc ok {got} MiB"));
    0
}

fn fault(context: &Context) -> u8 {
    context.request(&Request::Fault);
    let far = Instant::now() + Duration::from_secs(60);
    let error = match &context.server {
        Some(_) => context.work(far).err().unwrap_or(ILLEGAL_ADDRESS),
        None => ILLEGAL_ADDRESS,
    };
    say(&format!("fault client: {} ({error})", text(error)));
    4
}

/// Runs short CUDA kernels one after the other, about 1750 per second. If `stay` is true, the program does not end at a CUDA
/// error, but only after `time`.
fn hold(context: &Context, time: Duration, stay: bool) -> u8 {
    let start = Instant::now();
    let end = start + time;
    let worked = context.work(end);
    let pid = std::process::id();
    let iterations = start.elapsed().as_millis() * 7 / 4;
    let Err(error) = worked else {
        say(&format!("hold pid {pid} ok iters {iterations}"));
        return 0;
    };
    let after = start.elapsed().as_secs_f64();
    say(&format!("hold pid {pid} after {iterations} iters t={after:.1}: {} ({error})", text(error)));
    if stay {
        thread::sleep(end.saturating_duration_since(Instant::now()));
    }
    4
}

/// Runs short CUDA kernels, and makes a new context after each CUDA error.
fn again(host: &Host, context: Context, time: Duration, mib: u64) -> u8 {
    let end = Instant::now() + time;
    let mut context = Some(context);
    while Instant::now() < end {
        match context.take() {
            Some(context) => {
                context.allocated(mib);
                if context.work(end).is_ok() {
                    return 0;
                }
            }
            None => context = Context::open(host).ok(),
        }
        thread::sleep(AGAIN);
    }
    4
}

/// Runs one CUDA kernel of the duration `time`. A client that ends during the kernel causes a fault on its GPU, unless the
/// control daemon's command `terminate_client` has ended the client's work.
fn long(context: &Context, start: Instant, time: Duration) -> u8 {
    let init = start.elapsed().as_secs_f64();
    context.request(&Request::LongKernel(true));
    // Tests wait for this message before they expect a running CUDA kernel. So the program writes the message only after the
    // request that starts the CUDA kernel.
    let _ = writeln!(io::stderr(), "long pid {} runs", std::process::id());
    if let Err(error) = context.work(Instant::now() + time) {
        say(&format!("ERR cudaDeviceSynchronize(): {} ({error})", text(error)));
        return 3;
    }
    context.request(&Request::LongKernel(false));
    let pid = std::process::id();
    let milliseconds = time.as_secs_f64() * 1000.0;
    say(&format!("fma pid {pid} init {init:.3} kernel_ms {milliseconds:.1}"));
    0
}

const STEP: Duration = Duration::from_millis(50);

/// Simulates a training: runs one long CUDA kernel after the other, until SIGTERM asks the program to end. At the end the
/// program writes a checkpoint with data from the GPU.
fn train(context: &Context, file: &str) -> u8 {
    let is_asked_to_end = Arc::new(AtomicBool::new(false));
    if signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&is_asked_to_end)).is_err() {
        return fail("SIGTERM can't be handled");
    }
    say(&format!("train pid {} begins", std::process::id()));
    let mut steps = 0;
    while !is_asked_to_end.load(Ordering::Relaxed) {
        context.request(&Request::LongKernel(true));
        if let Err(error) = context.work(Instant::now() + STEP) {
            say(&format!("ERR cudaDeviceSynchronize(): {} ({error})", text(error)));
            return 3;
        }
        context.request(&Request::LongKernel(false));
        steps += 1;
    }
    if let Err(error) = context.work(Instant::now() + STEP) {
        say(&format!("ERR cudaMemcpy(): {} ({error})", text(error)));
        return 3;
    }
    match fs::write(file, format!("{steps} steps\n")) {
        Ok(()) => 0,
        Err(error) => fail(&format!("{file}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_give_the_multiprocessors_measured() {
        let measured = [(100.0, 132), (50.0, 66), (25.0, 32), (10.0, 12)];
        assert_eq!(measured.map(|(percentage, _)| sms(132, percentage)), measured.map(|(_, sms)| sms));
        assert_eq!(sms(132, 0.1), 2);
    }

    #[test]
    fn contexts_take_the_memory_measured() {
        let measured = [(12, 72), (32, 145), (66, 271), (132, 514)];
        assert_eq!(measured.map(|(sms, _)| context_mib(sms)), measured.map(|(_, mib)| mib));
    }
}
