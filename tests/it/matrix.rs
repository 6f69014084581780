//! The daemon is killed at every step of its start, its reloads and its stop, again and again: nobody else may notice.

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

use crate::slices::leads_to;
use crate::support::client::Client;
use crate::support::host::{Host, alive, signal_pid, stat_fields};
use crate::support::wait::{DEADLINE, wait_for};

/// Where a start can be killed that finds nothing to take over, one that does, a reload, and a stop. The names are those
/// of the daemon's log.
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

/// A kill at no step: at any time at all.
const ANY_TIME: &str = "any time";

/// The number of kills that each step must have met.
const KILLS_PER_STEP: u32 = 3;

/// Random numbers that a seed gives again (splitmix64).
pub(crate) struct Random(u64);

impl Random {
    /// From the variable `FAULT_SEED`, or another one each time. It is printed if the test fails.
    pub(crate) fn seeded(test: &str) -> (Self, Seed) {
        Self::seeded_by("FAULT_SEED", test)
    }

    /// The same with a variable of the test's own.
    pub(crate) fn seeded_by(variable: &'static str, test: &str) -> (Self, Seed) {
        let seed = std::env::var(variable).ok();
        let seed = seed.map(|seed| seed.parse().unwrap_or_else(|e| panic!("{variable}={seed}: {e}")));
        let seed = seed.unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            u64::from(now.subsec_nanos()) << 16 | u64::from(std::process::id() & 0xffff)
        });
        (Self(seed), Seed { test: test.to_owned(), variable, seed })
    }

    /// Another stream of numbers that follows from the same seed.
    pub(crate) fn fork(&mut self) -> Self {
        Self(self.next())
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to one less than `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn millis(&mut self, bound: u64) -> Duration {
        Duration::from_micros(self.below(bound * 1000))
    }
}

/// Says with which seed a test failed.
pub(crate) struct Seed {
    test: String,
    variable: &'static str,
    seed: u64,
}

impl std::fmt::Display for Seed {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}={}", self.variable, self.seed)
    }
}

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = writeln!(std::io::stderr(), "{} failed with {self}", self.test);
        }
    }
}

/// When the daemon is to be killed: at a step (or else from the moment this is known), after a delay.
#[derive(Clone, Debug)]
struct Kill {
    step: &'static str,
    delay: Duration,
}

/// The news in the daemon's log.
enum Heard {
    Step(String),
    Killed,
}

/// The daemon as a process of the test's own. Its log is read as it is written: a kill at a step can't wait.
struct Service {
    child: Child,
    kill: Arc<Mutex<Option<Kill>>>,
    heard: Receiver<Heard>,
    reader: JoinHandle<()>,
}

impl Service {
    fn start(host: &Host, kill: Option<Kill>) -> Self {
        let mut child = host
            .command(env!("CARGO_BIN_EXE_yunion-mps-daemon"))
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
                // The child is not waited for before this thread has ended, so the PID is its.
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
        // Lines that were heard before belong to something else.
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

/// Keeps the log and tells of its steps until it ends.
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

/// A client that must not notice anything.
pub(crate) struct Bystander {
    child: Client,
    ends: Instant,
}

impl Bystander {
    /// Starts one that computes for so long, and waits until it is served.
    pub(crate) fn start(host: &Host, pipe: &Path, time: Duration) -> Self {
        let mut child = host.program(&["hold", &time.as_secs_f64().to_string()]);
        let mut child = Client::start(child.env("CUDA_MPS_PIPE_DIRECTORY", pipe));
        let pid = child.id().to_string();
        wait_for("the client", || {
            let served = host.front_end(pipe, "ps").lines().any(|line| line.split(' ').next() == Some(&pid));
            // On a busy machine its time may be over between two looks.
            let done = child.try_wait().unwrap().inspect(|status| assert!(status.success(), "{status}"));
            (served || done.is_some()).then_some(())
        });
        Self { child, ends: Instant::now() + time }
    }

    /// Whether its time is over. Anything else that ended it is a failure.
    pub(crate) fn done(&mut self) -> bool {
        let Some(status) = self.child.try_wait().unwrap() else { return false };
        assert!(status.success(), "client {} was lost: {status}", self.child.id());
        true
    }

    /// It must still compute.
    pub(crate) fn check(&self) {
        assert!(alive(self.child.id()), "client {} was lost", self.child.id());
    }

    pub(crate) fn wait(mut self) {
        let left = self.ends.saturating_duration_since(Instant::now()) + DEADLINE;
        let deadline = Instant::now() + left;
        while !self.done() {
            assert!(Instant::now() < deadline, "client {} does not end", self.child.id());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The PIDs of a host's control daemons that run in the foreground.
pub(crate) fn control_daemons(host: &Host) -> Vec<u32> {
    let mut found = with_arguments(host, |arguments| {
        arguments.first().is_some_and(|name| name.ends_with("/nvidia-cuda-mps-control"))
            && arguments.iter().any(|argument| argument == "-f")
    });
    // A server has its control daemon's arguments until it has become another program.
    let all = found.clone();
    found.retain(|pid| {
        let parent = stat_fields(*pid).and_then(|fields| fields[1].parse().ok());
        parent.is_some_and(|parent| !all.contains(&parent))
    });
    found
}

/// The PIDs of the processes that wait to become control daemons.
pub(crate) fn launchers(host: &Host) -> Vec<u32> {
    with_arguments(host, |arguments| arguments.get(1).is_some_and(|argument| argument == "launch-control"))
}

fn with_arguments(host: &Host, wanted: impl Fn(&[String]) -> bool) -> Vec<u32> {
    let arguments = |pid: u32| -> Vec<String> {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
    };
    host.processes().into_iter().filter(|pid| wanted(&arguments(*pid))).collect()
}

/// One host that lives through all this.
struct Row {
    host: Host,
    random: Random,
    /// The compute modes of before, by GPU.
    modes: Vec<String>,
    /// The number of control daemons when all is well.
    daemons: usize,
    /// The device file with so many slices for each GPU.
    entries: Box<dyn Fn(u64) -> Vec<String> + Send>,
    slices: u64,
    /// The numbers of devices that may be listed now.
    devices: Vec<usize>,
    service: Option<Service>,
    clients: Vec<Bystander>,
    /// The control daemons that clients hang on.
    held: Vec<u32>,
    /// The pipe directories of all control daemons.
    pipes: Vec<PathBuf>,
    kills: BTreeMap<(&'static str, &'static str), u32>,
}

impl Row {
    fn new(
        host: Host,
        random: Random,
        daemons: usize,
        entries: Box<dyn Fn(u64) -> Vec<String> + Send>,
    ) -> Self {
        host.configure("log_level: debug");
        host.plant("mps/start-ms", "40");
        let gpus = fs::read_dir(host.path("gpus")).unwrap().count();
        let mut row = Self {
            modes: (0..gpus).map(|gpu| mode(&host, gpu)).collect(),
            host,
            random,
            daemons,
            entries,
            slices: 0,
            devices: Vec::new(),
            service: None,
            clients: Vec::new(),
            held: Vec::new(),
            pipes: Vec::new(),
            kills: BTreeMap::new(),
        };
        row.configure();
        row.devices.remove(0);
        row
    }

    /// Another number of slices.
    fn configure(&mut self) {
        let before = self.slices;
        while self.slices == before {
            self.slices = 2 + self.random.below(7);
        }
        let entries = (self.entries)(self.slices);
        let count = entries.len() * usize::try_from(self.slices).unwrap();
        self.devices = vec![self.devices.last().copied().unwrap_or_default(), count];
        let entries: Vec<&str> = entries.iter().map(String::as_str).collect();
        self.host.devices(&entries);
    }

    fn run(&mut self, kills: u32) {
        while self.kills.values().sum::<u32>() < kills {
            self.cold_start();
            self.serve();
            self.stop();
        }
    }

    /// A kill in a phase: where it has met the fewest so far, or at any time.
    fn pick(&mut self, phase: &'static str, steps: &[&'static str]) -> Kill {
        let count =
            |step: &str| self.kills.iter().find(|(key, _)| **key == (phase, step)).map_or(0, |(_, n)| *n);
        let fewest = steps.iter().map(|step| count(step)).min().unwrap();
        let rare: Vec<&'static str> = steps.iter().copied().filter(|step| count(step) == fewest).collect();
        if self.random.below(4) == 0 {
            return Kill { step: ANY_TIME, delay: self.random.millis(300) };
        }
        let at = usize::try_from(self.random.below(rare.len() as u64)).unwrap();
        Kill { step: rare[at], delay: self.random.millis(6) }
    }

    fn start_with(&mut self, kill: Option<Kill>) {
        assert!(self.service.is_none());
        self.service = Some(Service::start(&self.host, kill));
    }

    /// Starts the daemon with nothing there, kills it, and again, until it serves.
    fn cold_start(&mut self) {
        for _ in 0..=self.random.below(3) {
            let kill = self.pick("start", &COLD);
            self.start_with(Some(kill.clone()));
            self.meet(&kill, "start");
        }
        self.come_up();
    }

    /// Kills it while it has clients, at its start and at reloads.
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
            // The next one has no better lot, now and then.
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

    /// Stops it, with deaths on the way, until a stop has succeeded.
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

    /// Waits until the daemon is dead. False when it was faster and has stopped as asked.
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
            // It came through without that step: there was nothing for it to do.
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
            // The process that waited for a word that never came has gone.
            wait_for("the end of launchers", || launchers(&self.host).is_empty().then_some(()));
        }
        true
    }

    /// Sees to it that there are some clients.
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

    /// The promises that hold at any moment.
    fn look(&mut self) {
        self.clients.retain_mut(|client| !client.done());
        if self.clients.is_empty() {
            // Nobody is hurt any more when one of these ends.
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

    /// Lets it come up in peace, and looks whether all is well.
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
            assert_eq!(mode(&self.host, gpu), "Exclusive_Process", "GPU {gpu}");
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

/// The daemon is killed by SIGKILL, at each named step of its start, its reloads and its stop and at any time between,
/// with clients and without, more than 500 times: no client is lost, no control daemon is orphaned or doubled, devices
/// never go missing, and in the end every compute mode is what it was.
#[test]
fn killed_at_every_step() {
    let (mut random, _seed) = Random::seeded("killed_at_every_step");
    let one = |_: &Host| {};
    let mixed = |host: &Host| {
        host.configure("cuda_mps_topology: per_gpu");
        host.plant("gpus/1/mig", "Disabled\n");
        // As an administrator has left it, and shall find it.
        host.plant("gpus/2/compute_mode", "Exclusive_Process\n");
    };
    let eight = |host: &Host| host.plant("gpus/3/compute_mode", "Exclusive_Process\n");
    type Prepare<'a> = &'a (dyn Fn(&Host) + Sync);
    let boards: [(&str, usize, &[u64], u32, Prepare<'_>); 4] = [
        ("h200", 1, &[128], 190, &one),
        ("h200", 1, &[128], 190, &one),
        ("mixed", 3, &[128, 129, 131], 80, &mixed),
        ("h200x8", 1, &[128, 129, 130, 131, 132, 133, 134, 135], 50, &eight),
    ];
    let mut kills: BTreeMap<(&str, &str), u32> = BTreeMap::new();
    std::thread::scope(|scope| {
        let rows = boards.map(|(board, daemons, nodes, kills, prepare)| {
            let random = random.fork();
            scope.spawn(move || {
                let host = Host::new(board);
                prepare(&host);
                let entries = Box::new(|slices| nodes.iter().map(|node| entry(*node, slices)).collect());
                let mut row = Row::new(host, random, daemons, entries);
                row.run(kills);
                row.kills
            })
        });
        for row in rows {
            for (place, count) in row.join().unwrap() {
                *kills.entry(place).or_default() += count;
            }
        }
    });
    let _ = writeln!(std::io::stdout(), "{kills:?}");
    assert!(kills.values().sum::<u32>() >= 500, "{kills:?}");
    for (phase, steps) in [("start", &COLD[..]), ("adoption", &WARM), ("reload", &RELOAD), ("stop", &STOP)] {
        for step in steps {
            let count = kills.get(&(phase, step)).copied().unwrap_or_default();
            assert!(count >= KILLS_PER_STEP, "only {count} kills at {step} of {phase}: {kills:?}");
        }
    }
}
