//! The simulated MPS server. The server opens its GPUs, takes clients, applies the limits of the clients, and lets a fault of
//! one client hit all clients on the same GPU.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::log::Log;
use super::wire::{self, ClientHello, ClientStatus, Device, Event, Order, Report, Request, Status};
use super::{client, command_of, memory_limit, percentage};
use crate::memory_limits;
use crate::state::{Gpu, Host, Kind, visible};

/// The memory in MiB that a server takes on each of its GPUs.
const SERVER_MIB: u64 = 66;

/// NVML's figure for a client's memory is up to this many MiB higher than the memory that counts against the client's limit.
/// Measured: 71,888 MiB for a client that filled its limit of 71,885 MiB.
const NVML_ERROR_MIB: u64 = 3;

/// The server ends a client's work in this many steps, and waits for the client in each step. A client that another process
/// stops again and again takes part in only a few steps between two stops, so the end of its work takes long.
const STEPS: u32 = 20;

/// A waiting server checks at this interval if its control daemon has ended.
const LOOK: Duration = Duration::from_millis(10);

struct Server {
    host: Host,
    gpus: Vec<Gpu>,
    channel: OwnedFd,
    log: Log,
    state: Mutex<State>,
    /// Notified when a client has taken part in a step of the client's end, or has ended.
    taken_part: Condvar,
}

struct State {
    percentage: f64,
    /// The memory limits that the server enforces, in bytes, by the ordinals of the GPUs.
    limits: Vec<(usize, u64)>,
    clients: Vec<Client>,
    last_id: u32,
    /// True for each GPU on which the server has a context, by the ordinal of the GPU.
    contexts: Vec<bool>,
    /// The next log line `Received new client request` names this client. As on a real host, the line names the previous client
    /// instead of the new client.
    last_request: String,
}

#[derive(Clone)]
struct Client {
    pid: u32,
    id: u32,
    /// The position of the client's GPU in the server's list of GPUs.
    ordinal: usize,
    connection: Arc<OwnedFd>,
    /// NVML's figure for the memory of the client's CUDA context.
    context_mib: u64,
    allocated_mib: u64,
    long_kernel: bool,
    terminated: bool,
    faulted: bool,
    /// The number of steps of the client's end in which the client has taken part.
    steps: u32,
}

/// Runs `nvidia-cuda-mps-server`, and returns the exit status. The stdin of the process is the channel to the control daemon.
pub fn run() -> u8 {
    start().map_or(1, Server::follow_orders)
}

/// Opens the GPUs of the server. Like a real server, the process ends without a message if it can't open one of the GPUs.
fn start() -> Option<&'static Server> {
    let host = Host::from_env().ok()?;
    let channel = io::stdin().as_fd().try_clone_to_owned().ok()?;
    let Some(Order::Start { percentage, limits }) = wire::receive(&channel) else { return None };
    let log = Log::to(io::stdout());
    let pid = std::process::id();
    if let Some(words) = host.fault("server-start-fails") {
        if !words.trim().is_empty() {
            log.line("Legacy Server", pid, words.trim());
            let control = rustix::process::getppid().map_or(0, |parent| parent.as_raw_nonzero().get());
            let control = u32::try_from(control).unwrap_or_default();
            log.line("Control", control, "Server encountered a fatal exception. Shutting down");
        }
        return None;
    }
    log.line("Other", pid, "Startup");
    let pipe = super::pipe_directory();
    log.line("Other", pid, &format!("Connecting to control daemon on socket: {}/control", pipe.display()));
    log.line("Other", pid, "Initializing server process");
    let delay = host.text("mps/start-ms").and_then(|text| text.parse().ok()).unwrap_or(150);
    if lost_within(&channel, Duration::from_millis(delay)) {
        return None;
    }
    let names = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let gpus: Option<Vec<Gpu>> = visible(&host.gpus(), names.as_deref()).into_iter().collect();
    let usable = |gpus: &Vec<Gpu>| {
        let taken = |gpu: &Gpu| gpu.compute_mode() == "Exclusive_Process" && gpu.computes();
        !gpus.is_empty() && !gpus.iter().any(|gpu| gpu.unusable() || taken(gpu))
    };
    let gpus = gpus.filter(usable)?;
    let server = Server {
        state: Mutex::new(State {
            percentage,
            limits,
            clients: Vec::new(),
            last_id: 0,
            contexts: vec![false; gpus.len()],
            last_request: "{PID: -1333654781, Context ID: 0}".to_owned(),
        }),
        taken_part: Condvar::new(),
        host,
        gpus,
        channel,
        log,
    };
    let server = Box::leak(Box::new(server));
    server.announce();
    Some(server)
}

/// Waits for `time`, or until the control daemon ends. Returns true if the control daemon has ended.
fn lost_within(channel: &OwnedFd, time: Duration) -> bool {
    let mut hang_up = [PollFd::new(channel, PollFlags::empty())];
    let timeout = Timespec::try_from(time).ok();
    rustix::event::poll(&mut hang_up, timeout.as_ref()).is_ok_and(|events| events > 0)
}

impl Server {
    fn announce(&'static self) {
        let mut state = self.state();
        for (ordinal, gpu) in self.gpus.iter().enumerate() {
            self.open(&mut state, ordinal);
            gpu.enter(std::process::id(), Kind::Server, SERVER_MIB);
        }
        self.log(&format!("Created anonymous shared memory region mps.shm.0.{}", std::process::id()));
        self.log(&format!("CUDA MPS Server for Linux/Unix. Binary version: {}", self.host.cuda_version()));
        self.log(&format!("Display Driver version: {}", self.host.mps_version()));
        self.log(&format!("Active Threads Percentage set to {:.1}", state.percentage));
        for (ordinal, limit) in &state.limits {
            self.log_limit(*ordinal, *limit);
        }
        self.log("Server Priority set to 0");
        self.log("Server has started");
        self.report(&Report::Ready);
        if let Some(after) = self.host.fault("server-dies-after-ms").and_then(|text| text.parse().ok()) {
            thread::spawn(move || {
                thread::sleep(Duration::from_millis(after));
                std::process::exit(1);
            });
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self, text: &str) {
        self.log.line("Server", std::process::id(), text);
    }

    /// Logs a memory limit. On GPUs below compute capability 7.0 a memory limit has no effect, and recordings of real servers
    /// lack this line.
    fn log_limit(&self, ordinal: usize, bytes: u64) {
        if self.gpus.get(ordinal).is_some_and(Gpu::enforces_limits) {
            self.log(&format!("Device pinned memory limit for device {ordinal} set to {bytes:#x} bytes"));
        }
    }

    fn report(&self, report: &Report) {
        // If the control daemon has ended, the report is lost, and the server soon ends, too.
        _ = wire::send(&self.channel, report);
    }

    fn follow_orders(&'static self) -> u8 {
        while let Some((order, attached)) = wire::receive_with(&self.channel) {
            match order {
                Order::Client { pid, hello } => {
                    let Some(connection) = attached else { continue };
                    thread::spawn(move || self.serve(&Arc::new(connection), pid, &hello));
                }
                Order::SetPercentage(percentage) => self.state().percentage = percentage,
                Order::SetLimit(ordinal, limit) => {
                    let mut state = self.state();
                    state.limits.retain(|(device, _)| *device != ordinal);
                    if let Some(limit) = limit {
                        state.limits.push((ordinal, limit));
                        self.log_limit(ordinal, limit);
                    }
                }
                Order::Query => self.answer(false),
                Order::DeviceQuery => {
                    self.log(&format!(
                        "Received device query command. There are {} devices",
                        self.gpus.len()
                    ));
                    self.answer(false);
                }
                Order::Terminate(pid) => {
                    let done = self.terminate(pid);
                    self.answer(done);
                }
                Order::Shutdown if self.state().clients.is_empty() => {
                    self.log("Server has been notified to shutdown");
                    self.log("Waiting for current clients to finish");
                    self.log("Exiting");
                    self.answer(true);
                    break;
                }
                Order::Shutdown => {
                    let clients = self.state().clients.len() * 2;
                    self.log(&format!("Server was unable to shutdown due to {clients} active clients"));
                    self.answer(false);
                }
                Order::ForceShutdown => break,
                Order::Start { .. } => {}
            }
        }
        let clients = self.state().clients.clone();
        for gpu in &self.gpus {
            gpu.leave(std::process::id());
            for client in &clients {
                gpu.leave(client.pid);
            }
        }
        0
    }

    fn answer(&self, done: bool) {
        let state = self.state();
        let clients = state.clients.iter().filter_map(|client| {
            let gpu = self.gpus.get(client.ordinal)?;
            Some(ClientStatus {
                pid: client.pid,
                id: client.id,
                ordinal: client.ordinal,
                uuid: gpu.uuid(),
                name: gpu.name(),
                namespace: namespace(client.pid),
                command: command_of(client.pid).unwrap_or_default(),
            })
        });
        self.report(&Report::Status(Status {
            fault: state.clients.iter().any(|client| client.faulted),
            percentage: state.percentage,
            limits: state.limits.clone(),
            clients: clients.collect(),
            done,
        }));
    }

    fn serve(&self, connection: &Arc<OwnedFd>, pid: u32, hello: &ClientHello) {
        match self.welcome(connection, pid, hello) {
            Ok(id) => {
                while let Some(request) = wire::receive(&**connection) {
                    self.carry_out(id, &request);
                }
                self.part_with(id);
            }
            Err(code) => _ = wire::send(&**connection, &Event::Error(code)),
        }
        self.report(&Report::Gone);
    }

    /// Accepts a client. Returns the client's number on this server, or the CUDA error with which the server refuses the
    /// client.
    fn welcome(&self, connection: &Arc<OwnedFd>, pid: u32, hello: &ClientHello) -> Result<u32, u32> {
        let mut state = self.state();
        if state.clients.iter().any(|client| client.faulted) {
            return Err(client::NOT_READY);
        }
        let seen = self.seen(hello);
        let ordinal = *seen.first().ok_or(client::NO_DEVICE)?;
        let gpu = self.gpus.get(ordinal).ok_or(client::NO_DEVICE)?;
        let most = if gpu.enforces_limits() { 48 } else { 16 };
        if state.clients.iter().filter(|client| client.ordinal == ordinal).count() >= most {
            self.log(&format!("Failed to accept new client. Maximum number of clients ({most}) reached."));
            return Err(client::BUSY);
        }
        for context in 0..2 {
            let now = format!("{{PID: {pid}, Context ID: {context}}}");
            self.log(&format!("Received new client request for {}", state.last_request));
            if context == 0 {
                self.open(&mut state, ordinal);
            }
            self.log(&format!("Client {now} connected"));
            self.log(&format!("Creating worker thread for client {now}"));
            state.last_request = now;
        }
        self.log(&format!("Device {} (uuid {}) is associated", gpu.name(), gpu.uuid()));
        self.log(&format!("Status of client {} is ACTIVE", state.last_request));
        let devices = seen.iter().enumerate();
        let devices = devices.filter_map(|(place, ordinal)| self.device(&state, hello, place, *ordinal, pid));
        let devices: Vec<Device> = devices.collect();
        let sms = devices.first().map_or(gpu.sms(), |device| device.sms);
        let context_mib = client::context_mib(sms) + NVML_ERROR_MIB;
        wire::send(&**connection, &Event::Welcome(devices)).map_err(|_| client::NOT_READY)?;
        state.last_id += 1;
        let id = state.last_id;
        state.clients.push(Client {
            pid,
            id,
            ordinal,
            connection: Arc::clone(connection),
            context_mib,
            allocated_mib: 0,
            long_kernel: false,
            terminated: false,
            faulted: false,
            steps: 0,
        });
        gpu.enter(pid, Kind::Client, context_mib);
        Ok(id)
    }

    /// Returns the ordinals of the GPUs that a client sees, in the client's order. `CUDA_VISIBLE_DEVICES` of the client decides
    /// the order. Without this variable the order is by PCI address, no matter in which order the control daemon has the GPUs.
    fn seen(&self, hello: &ClientHello) -> Vec<usize> {
        let mut in_order = self.gpus.clone();
        in_order.sort_unstable_by_key(|gpu| gpu.index);
        let seen = visible(&in_order, hello.visible_devices.as_deref()).into_iter().map_while(|gpu| gpu);
        seen.filter_map(|gpu| self.gpus.iter().position(|own| *own == gpu)).collect()
    }

    /// Returns the properties of a GPU as a client sees them. Measurements on real GPUs show that a memory limit belongs to the
    /// ordinal of the GPU in the client (`place`), not to the ordinal in the server.
    fn device(
        &self,
        state: &State,
        hello: &ClientHello,
        place: usize,
        ordinal: usize,
        pid: u32,
    ) -> Option<Device> {
        let gpu = self.gpus.get(ordinal)?;
        let asked = hello.percentage.as_deref().and_then(percentage).unwrap_or(100.0);
        let planted = self.host.fault("clients-get");
        let planted = planted.as_deref().and_then(|given| given.trim().split_once(' '));
        let server = planted.and_then(|(percent, _)| percent.parse().ok()).unwrap_or(state.percentage);
        let planted = planted.and_then(|(_, mib)| mib.parse().ok()).map(|mib: u64| mib << 20);
        let set = state.limits.iter().find(|(device, _)| *device == place).map(|(_, limit)| *limit);
        let limit = planted.or(set);
        let limit = limit.into_iter().chain(own_limit(hello, place, &gpu.uuid())).min();
        let (sms, limit) = if gpu.enforces_limits() {
            (client::sms(gpu.sms(), server.min(asked)), limit)
        } else {
            (gpu.sms(), None)
        };
        let taken: u64 = gpu.processes().values().map(|(_, mib)| mib).sum();
        let left = gpu.usable_mib().saturating_sub(taken + 10);
        let room = memory_limits::room_mib(gpu, pid);
        let most = [Some(left), limit.map(|limit| limit >> 20), room].into_iter().flatten().min()?;
        Some(client::device(gpu, sms, most.saturating_sub(client::context_mib(sms))))
    }

    fn open(&self, state: &mut State, ordinal: usize) {
        if let (Some(open), Some(gpu)) = (state.contexts.get_mut(ordinal), self.gpus.get(ordinal))
            && !std::mem::replace(open, true)
        {
            self.log(&format!("Creating server context on device {ordinal} ({})", gpu.name()));
        }
    }

    fn carry_out(&self, id: u32, request: &Request) {
        let mut state = self.state();
        let Some(client) = state.clients.iter_mut().find(|client| client.id == id) else { return };
        match request {
            Request::Allocate { .. } | Request::Free { .. } => {
                client.allocated_mib = match request {
                    Request::Free { mib } => client.allocated_mib.saturating_sub(*mib),
                    Request::Allocate { mib } => client.allocated_mib + mib,
                    _ => client.allocated_mib,
                };
                if let Some(gpu) = self.gpus.get(client.ordinal) {
                    gpu.enter(client.pid, Kind::Client, client.context_mib + client.allocated_mib);
                }
            }
            Request::LongKernel(runs) => client.long_kernel = *runs,
            Request::TakePart => {
                client.steps += 1;
                self.taken_part.notify_all();
            }
            Request::Fault => {
                let ordinal = client.ordinal;
                self.fault(&mut state, ordinal);
            }
        }
    }

    /// Ends a client's work with the client's help. If the client's process is stopped, frozen or halted in a debugger, the
    /// server waits for the client, and the control daemon waits for the server.
    fn terminate(&self, pid: u32) -> bool {
        let mut state = self.state();
        for _ in 0..STEPS {
            let steps = |state: &State| Some(state.clients.iter().find(|client| client.pid == pid)?.steps);
            let before = steps(&state);
            let Some(client) = state.clients.iter().find(|client| client.pid == pid) else { return false };
            _ = wire::send(&*client.connection, &Event::TakePart);
            while before == steps(&state) && !lost_within(&self.channel, Duration::ZERO) {
                let waited = self.taken_part.wait_timeout(state, LOOK);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        let Some(client) = state.clients.iter_mut().find(|client| client.pid == pid) else { return false };
        client.terminated = true;
        _ = wire::send(&*client.connection, &Event::Error(client::TERMINATED));
        true
    }

    fn fault(&self, state: &mut State, ordinal: usize) {
        let hit: Vec<&mut Client> =
            state.clients.iter_mut().filter(|client| client.ordinal == ordinal).collect();
        let Some(first) = hit.first().map(|client| client.pid) else { return };
        // The log names the oldest client first, even if another client caused the fault.
        self.log(&format!("Client {{PID: {first}, Context: 1}} encountered a fatal GPU error."));
        self.log("Server is handling a fatal GPU error.");
        for client in &hit {
            let torn =
                format!("Client {{PID: {}, Context ID: 1}} on device {ordinal} to be torn down", client.pid);
            self.log(&torn);
        }
        for client in &hit {
            let pid = client.pid;
            self.log(&format!("All clients belonging to error trigging process {pid} will be torn down"));
            let of = format!("Client {{PID: {pid}, Context ID: 1}} on the error-trigging process {pid}");
            self.log(&format!("{of} to be torn down"));
        }
        self.log("The following devices will be reset:");
        self.log(&ordinal.to_string());
        self.log("The following client process have a sticky error set:");
        for client in hit {
            self.log(&client.pid.to_string());
            client.faulted = true;
            _ = wire::send(&*client.connection, &Event::Error(client::ILLEGAL_ADDRESS));
        }
        if self.host.fault("fault-ends-control").is_some()
            && let Some(control) = rustix::process::getppid()
        {
            _ = rustix::process::kill_process(control, rustix::process::Signal::KILL);
        }
    }

    /// Removes a client that has ended. The end of a client during a long CUDA kernel is a fault. A fault is over when the last
    /// client that the fault has hit is removed.
    fn part_with(&self, id: u32) {
        let mut state = self.state();
        let Some(place) = state.clients.iter().position(|client| client.id == id) else { return };
        let gone = state.clients.remove(place);
        self.taken_part.notify_all();
        let (pid, ordinal) = (gone.pid, gone.ordinal);
        let lost = |context: u32| {
            let failed = "Server failed to recevie command with status 806, assuming client";
            self.log(&format!("{failed} {{PID: {pid}, Context ID: {context}}} exit"));
        };
        lost(1);
        let left = state.clients.len();
        let exiting = format!("Client {{PID: {pid}, Context ID: 1}} exiting.");
        self.log(&format!("{exiting} Number of active client contexts is {left}."));
        let here = |client: &&Client| client.ordinal == ordinal;
        if gone.faulted
            && !state.clients.iter().filter(here).any(|client| client.faulted)
            && let (Some(open), Some(gpu)) = (state.contexts.get_mut(ordinal), self.gpus.get(ordinal))
        {
            *open = false;
            self.log(&format!("Destroy server context on device {ordinal} ({})", gpu.name()));
        }
        lost(0);
        self.log(&format!("Client process {pid} disconnected"));
        if let Some(gpu) = self.gpus.get(ordinal) {
            gpu.leave(pid);
        }
        if gone.long_kernel && !gone.terminated && !gone.faulted {
            self.fault(&mut state, ordinal);
        }
    }
}

/// Returns the memory limit in bytes that a client sets for one of its devices in its own environment, such as `0=2G,1=3G` or
/// `GPU-...=4G`.
fn own_limit(hello: &ClientHello, place: usize, uuid: &str) -> Option<u64> {
    let limits = hello.memory_limits.as_deref()?.split(',').filter_map(|limit| limit.trim().split_once('='));
    let mut own = limits.filter(|(device, _)| *device == uuid || device.parse() == Ok(place));
    memory_limit(own.next()?.1)
}

fn namespace(pid: u32) -> String {
    let link = std::fs::read_link(format!("/proc/{pid}/ns/pid")).unwrap_or_default();
    link.to_string_lossy().trim_start_matches("pid:[").trim_end_matches(']').to_owned()
}
