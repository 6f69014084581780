//! Tests that kill the service at every step of its start, its reloads and its stop. No client may fail.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::bystander::Bystander;
use crate::support::host::{Host, alive, daemon, signal_pid};
use crate::support::processes::{control_daemons, launchers};
use crate::support::random::Random;
use crate::support::slice::leads_to;
use crate::support::wait::{DEADLINE, wait_for};

/// The steps at which the test kills the service. The four lists are for a start without control daemons, a start that takes
/// control daemons over, a reload, and a stop. The service's log names each step.
const COLD: [&str; 12] = [
    "mode-written-down",
    "mode-set",
    "compute-modes",
    "spawned",
    "written-down",
    "started",
    "listens",
    "defaults",
    "linked",
    "prewarm",
    "limits",
    "ready",
];
const WARM: [&str; 5] = ["taken-over", "defaults", "linked", "limits", "ready"];
const RELOAD: [&str; 6] = ["granted", "defaults", "linked", "live", "limits", "ready"];
const STOP: [&str; 5] = ["quit", "ended", "forgotten", "mode-back", "mode-forgotten"];

/// Stands for a kill after a random time instead of a step.
const ANY_TIME: &str = "any time";

/// A test fails if it has killed the service this often and has still not killed it at each step.
const MOST_KILLS: u32 = 200;

/// The moment of a kill: `delay` after a step, or, for [`ANY_TIME`], `delay` after the kill was chosen.
#[derive(Clone, Debug)]
struct Kill {
    step: &'static str,
    delay: Duration,
}

enum Heard {
    Step(String),
    Killed,
}

/// The service as a child of the test. A thread reads the service's log, since a kill must follow at once after the log line of
/// its step.
struct Service {
    child: Child,
    kill: Arc<Mutex<Option<Kill>>>,
    heard: Receiver<Heard>,
    reader: JoinHandle<()>,
}

impl Service {
    fn start(host: &Host, kill: Option<Kill>) -> Self {
        let mut child = host
            .command(daemon())
            .arg("--sysroot")
            .arg(host.path("sysroot"))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let stderr = child.stderr.take().unwrap();
        let kill = Arc::new(Mutex::new(kill));
        let (sender, heard) = channel();
        let log = File::options().append(true).create(true).open(host.path("daemon.log")).unwrap();
        let (pid, armed) = (child.id(), Arc::clone(&kill));
        let reader = std::thread::spawn(move || {
            read_log(stderr, log, |step| {
                // The test reaps the service only after this thread has ended. So the PID can't belong to another process when
                // the thread kills the service.
                let due = armed.lock().unwrap().take_if(|kill| kill.step == step);
                if let Some(kill) = due {
                    std::thread::sleep(kill.delay);
                    signal_pid(pid, Signal::KILL);
                    let _ = sender.send(Heard::Killed);
                }
                let _ = sender.send(Heard::Step(step.to_owned()));
            });
        });
        Self { child, kill, heard, reader }
    }

    fn arm(&self, kill: Kill) {
        // Steps that were reported before this call belong to an earlier phase.
        while self.heard.try_recv().is_ok() {}
        *self.kill.lock().unwrap() = Some(kill);
    }

    fn signal(&self, signal: Signal) {
        signal_pid(self.child.id(), signal);
    }

    fn ended(mut self) -> ExitStatus {
        self.reader.join().unwrap();
        self.child.wait().unwrap()
    }
}

fn read_log(stderr: ChildStderr, mut log: File, mut step: impl FnMut(&str)) {
    let mut lines = BufReader::new(stderr);
    let mut line = String::new();
    while lines.read_line(&mut line).is_ok_and(|length| length > 0) {
        if let Some((_, rest)) = line.split_once("step=\"") {
            step(rest.split('"').next().unwrap());
        }
        let _ = log.write_all(line.as_bytes());
        line.clear();
    }
}

struct Row {
    host: Host,
    random: Random,
    /// The compute mode of each GPU before the first start of the service.
    modes: Vec<String>,
    /// The number of control daemons when all slices are served.
    daemons: usize,
    served: &'static str,
    /// The numbers of the GPUs' render nodes.
    nodes: &'static [u64],
    slices: u64,
    reloads: u64,
    /// The possible lengths of the service's list of slices. During a reload, the list may still have its former length.
    devices: Vec<usize>,
    service: Option<Service>,
    clients: Vec<Bystander>,
    /// The PIDs of the control daemons with clients. These control daemons must not end.
    held: Vec<u32>,
    pipes: Vec<PathBuf>,
    kills: BTreeMap<(&'static str, &'static str), u32>,
}

impl Row {
    fn new(host: Host, random: Random, daemons: usize, nodes: &'static [u64]) -> Self {
        host.configure("log_level: debug");
        host.plant("mps/start-ms", "40");
        let gpus = fs::read_dir(host.path("gpus")).unwrap().count();
        let row = Self {
            modes: (0..gpus).map(|gpu| mode(&host, gpu)).collect(),
            host,
            random,
            daemons,
            served: "Exclusive_Process",
            nodes,
            slices: 0,
            reloads: 0,
            devices: Vec::new(),
            service: None,
            clients: Vec::new(),
            held: Vec::new(),
            pipes: Vec::new(),
            kills: BTreeMap::new(),
        };
        row.configured()
    }

    /// Changes the topology to a control daemon for each slice, with `slices` slices on each GPU.
    fn per_slice(self, slices: u64) -> Self {
        self.host.configure("cuda_mps_topology: per_slice");
        let daemons = self.nodes.len() * usize::try_from(slices).unwrap();
        Self { slices, daemons, served: "Default", ..self }.configured()
    }

    fn configured(mut self) -> Self {
        self.configure();
        self.devices.drain(..self.devices.len() - 1);
        self
    }

    /// Writes a new configuration. It has another number of slices or, with a control daemon for each slice, another thread
    /// percentage.
    fn configure(&mut self) {
        let before = self.slices;
        let mut percentage = String::new();
        if self.served == "Default" {
            self.reloads += 1;
            percentage = format!(", thread_percentage: {}", 100 - self.reloads % 90);
        } else {
            while self.slices == before {
                self.slices = 2 + self.random.below(7);
            }
        }
        let entries: Vec<String> =
            self.nodes.iter().map(|node| entry(*node, self.slices) + &percentage).collect();
        let count = entries.len() * usize::try_from(self.slices).unwrap();
        self.devices = vec![self.devices.last().copied().unwrap_or_default(), count];
        let entries: Vec<&str> = entries.iter().map(String::as_str).collect();
        self.host.devices(&entries);
    }

    fn live(&mut self) {
        self.cold_start();
        self.serve();
        self.stop();
    }

    fn not_met(&self) -> Vec<(&'static str, &'static str)> {
        let phases = [("start", &COLD[..]), ("adoption", &WARM), ("reload", &RELOAD), ("stop", &STOP)];
        let all = phases.iter().flat_map(|(phase, steps)| steps.iter().map(|step| (*phase, *step)));
        all.filter(|place| !self.kills.contains_key(place)).collect()
    }

    /// Chooses the next kill in a phase: at a step with the fewest kills so far, or at any time.
    fn pick(&mut self, phase: &'static str, steps: &[&'static str]) -> Kill {
        let count =
            |step: &str| self.kills.iter().find(|(key, _)| **key == (phase, step)).map_or(0, |(_, n)| *n);
        let fewest = steps.iter().map(|step| count(step)).min().unwrap();
        let rare: Vec<&'static str> = steps.iter().copied().filter(|step| count(step) == fewest).collect();
        if self.random.below(4) == 0 {
            return Kill { step: ANY_TIME, delay: self.random.millis(300) };
        }
        let at = usize::try_from(self.random.below(rare.len() as u64)).unwrap();
        // After the last steps of a stop, the service ends within a millisecond. So the first kill at each step has no delay.
        let delay = if fewest == 0 { Duration::ZERO } else { self.random.millis(6) };
        Kill { step: rare[at], delay }
    }

    fn start_with(&mut self, kill: Option<Kill>) {
        assert!(self.service.is_none());
        self.service = Some(Service::start(&self.host, kill));
    }

    /// Starts the service on a host without control daemons and kills it during the start, at least once. Then lets it serve.
    fn cold_start(&mut self) {
        for _ in 0..=self.random.below(3) {
            let kill = self.pick("start", &COLD);
            self.start_with(Some(kill.clone()));
            self.meet(&kill, "start");
        }
        self.come_up();
    }

    /// Kills the service several times while it has clients, during reloads and during the next starts.
    fn serve(&mut self) {
        for _ in 0..3 {
            self.meet_clients();
            if self.random.below(2) == 0 {
                let kill = self.pick("reload", &RELOAD);
                self.configure();
                let service = self.service.as_ref().unwrap();
                service.arm(kill.clone());
                service.signal(Signal::HUP);
                self.meet(&kill, "reload");
            } else {
                self.kill_now();
            }
            if self.random.below(4) == 0 {
                self.another_client();
            }
            // Sometimes the next service is also killed while it takes the control daemons over.
            while self.random.below(3) == 0 {
                let kill = self.pick("adoption", &WARM);
                self.start_with(Some(kill.clone()));
                self.meet(&kill, "adoption");
            }
            self.come_up();
        }
        for client in std::mem::take(&mut self.clients) {
            client.wait();
        }
        self.held.clear();
    }

    /// Stops the service and kills it during the stop, at least once. Then lets a stop succeed.
    fn stop(&mut self) {
        for _ in 0..=self.random.below(4) {
            let kill = self.pick("stop", &STOP);
            let service = self.service.as_ref().unwrap();
            service.arm(kill.clone());
            service.signal(Signal::TERM);
            if !self.meet(&kill, "stop") {
                break;
            }
            self.come_up();
        }
        if let Some(service) = self.service.take() {
            service.signal(Signal::TERM);
            let status = service.ended();
            assert_eq!(status.code(), Some(0), "{status}");
        }
        wait_for("nothing left", || self.host.processes().is_empty().then_some(()));
        for (gpu, before) in self.modes.iter().enumerate() {
            assert_eq!(mode(&self.host, gpu), *before, "GPU {gpu}");
        }
    }

    /// Waits until the service is killed. Returns false if the service has stopped before the kill.
    fn meet(&mut self, kill: &Kill, phase: &'static str) -> bool {
        let service = self.service.take().unwrap();
        let deadline = Instant::now() + DEADLINE;
        let mut met = kill.step;
        if kill.step == ANY_TIME {
            std::thread::sleep(kill.delay);
            service.signal(Signal::KILL);
        }
        let mut ready = 0;
        loop {
            match service.heard.recv_timeout(Duration::from_millis(20)) {
                Ok(Heard::Killed) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(Heard::Step(step)) if step == "ready" && phase != "stop" => ready += 1,
                Ok(Heard::Step(_)) => {}
                Err(RecvTimeoutError::Timeout) => self.look(),
            }
            // The service is ready and had nothing to do at the chosen step. So the test kills it now.
            if ready == self.daemons && kill.step != "ready" && kill.step != ANY_TIME {
                met = ANY_TIME;
                std::thread::sleep(kill.delay);
                service.signal(Signal::KILL);
                break;
            }
            assert!(Instant::now() < deadline, "{phase}: {} never came", kill.step);
        }
        let status = service.ended();
        self.look();
        if status.code() == Some(0) && phase == "stop" {
            return false;
        }
        assert_eq!(status.signal(), Some(9), "{phase} at {}: {status}", kill.step);
        *self.kills.entry((phase, met)).or_default() += 1;
        if self.random.below(2) == 0 {
            // A child of the killed service may not have become a control daemon yet. Such a child ends by itself, since its
            // pipe to the service is closed.
            wait_for("the end of launchers", || launchers(&self.host).is_empty().then_some(()));
        }
        true
    }

    /// Starts clients until at least three run. From now on their control daemons must not end.
    fn meet_clients(&mut self) {
        while self.clients.len() < 3 {
            self.another_client();
        }
        self.held = control_daemons(&self.host);
    }

    fn another_client(&mut self) {
        let pipe = usize::try_from(self.random.below(self.pipes.len() as u64)).unwrap();
        let time = Duration::from_millis(300) + self.random.millis(3500);
        self.clients.push(Bystander::start(&self.host, &self.pipes[pipe], time));
    }

    fn kill_now(&mut self) {
        let service = self.service.take().unwrap();
        service.signal(Signal::KILL);
        assert_eq!(service.ended().signal(), Some(9));
        *self.kills.entry(("serving", ANY_TIME)).or_default() += 1;
    }

    /// Checks that no client has failed, that no slice is missing in the list, and that no control daemon runs twice. The
    /// control daemons with clients must run.
    fn look(&mut self) {
        self.clients.retain_mut(|client| !client.done());
        if self.clients.is_empty() {
            // Without clients, control daemons may end.
            self.held.clear();
        }
        let running = control_daemons(&self.host);
        assert!(running.len() <= self.daemons, "control daemons {running:?}");
        for pid in &self.held {
            assert!(alive(*pid), "control daemon {pid} is gone, and its clients with it");
        }
        if let Some(listed) = self.host.json(&["list"]) {
            let listed = listed.as_array().unwrap().len();
            assert!(self.devices.contains(&listed), "{listed} devices listed, not one of {:?}", self.devices);
        }
    }

    fn come_up(&mut self) {
        if self.service.is_none() {
            self.start_with(None);
        }
        let deadline = Instant::now() + DEADLINE;
        let status = loop {
            self.look();
            match self.host.json(&["status"]) {
                Some(status) if status["service"]["state"] == "ready" => break status,
                last => assert!(Instant::now() < deadline, "never ready, last {last:?}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        self.devices.drain(..self.devices.len() - 1);
        self.look();
        let listed = self.host.list();
        assert!(listed.iter().all(|device| device["healthy"] == true), "{listed:?}");
        for device in &listed {
            let name = device["addr"].as_str().unwrap().replace(':', "_");
            let directory = self.host.path("mps/pipe/slices").join(name);
            assert!(leads_to(&directory, Path::new(device["pipe_directory"].as_str().unwrap())), "{device}");
        }
        let running = control_daemons(&self.host);
        assert_eq!(running.len(), self.daemons, "control daemons {running:?}");
        wait_for("the end of launchers", || launchers(&self.host).is_empty().then_some(()));
        let mut told: Vec<u64> = Vec::new();
        for daemon in status["control_daemons"].as_array().unwrap() {
            told.push(daemon["pid"].as_u64().unwrap());
        }
        told.sort_unstable();
        let mut running: Vec<u64> = running.into_iter().map(u64::from).collect();
        running.sort_unstable();
        assert_eq!(told, running);
        for gpu in 0..self.modes.len() {
            assert_eq!(mode(&self.host, gpu), self.served, "GPU {gpu}");
        }
        let pipes = status["control_daemons"].as_array().unwrap().iter();
        self.pipes = pipes.map(|daemon| PathBuf::from(daemon["pipe_directory"].as_str().unwrap())).collect();
    }
}

fn mode(host: &Host, gpu: usize) -> String {
    fs::read_to_string(host.path(&format!("gpus/{gpu}/compute_mode"))).unwrap().trim().to_owned()
}

fn entry(node: u64, slices: u64) -> String {
    format!("path: /dev/dri/renderD{node}, type: NVIDIA_MPS, virtual_number: {slices}")
}

/// Kills the service at each step at least once, and at random times, with and without clients. No client is lost, no control
/// daemon is orphaned or started twice, and no list of slices is incomplete. In the end all compute modes are restored.
///
/// The core's tests kill a simulated service hundreds of thousands of times. This test kills the real service, with real files
/// and processes.
#[test]
fn killed_at_every_step() {
    let (random, _seed) = Random::seeded("killed_at_every_step");
    let mut row = Row::new(Host::new("h200"), random, 1, &[128]);
    while !row.not_met().is_empty() {
        row.live();
        assert!(row.kills.values().sum::<u32>() < MOST_KILLS, "{:?} were not met", row.not_met());
    }
    let _ = writeln!(std::io::stdout(), "{:?}", row.kills);
}

/// Like `killed_at_every_step`, but at random steps, and with a control daemon for each GPU.
#[test]
fn killed_with_a_control_daemon_for_each_gpu() {
    let (random, _seed) = Random::seeded("killed_with_a_control_daemon_for_each_gpu");
    let host = Host::new("mixed");
    host.configure("cuda_mps_topology: per_gpu");
    host.plant("gpus/1/mig", "Disabled\n");
    // An administrator has set this compute mode, and the service must restore it in the end.
    host.plant("gpus/2/compute_mode", "Exclusive_Process\n");
    Row::new(host, random, 3, &[128, 129, 131]).live();
}

/// Like `killed_at_every_step`, but at random steps, and with a control daemon for each slice.
#[test]
fn killed_with_a_control_daemon_for_each_slice() {
    let (random, _seed) = Random::seeded("killed_with_a_control_daemon_for_each_slice");
    let host = Host::new("h200");
    host.plant("gpus/0/compute_mode", "Exclusive_Process\n");
    Row::new(host, random, 1, &[128]).per_slice(4).live();
}
