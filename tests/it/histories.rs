//! Compares the world, which is the model of a host in the core's tests, with real programs. A script of random deeds
//! (`tests/world/src/scripted.rs`) is played in the world and on a simulated host with the shipped programs, or with NVIDIA's
//! control daemons. After each deed both must show the same state.
//!
//! `HOST_HISTORIES` is the number of scripts, `HISTORY_SEED` the seed of the first script, and `HISTORY_STEPS` the number of
//! deeds in a script.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use regex::Regex;
use rustix::process::Signal;
use serde_json::Value;

use crate::support::client::Client;
use crate::support::host::{Host, alive, nvidias, signal_pid, succeeded, text};
use crate::support::slice::inode;
use crate::support::wait::wait_for;
use core_world::scripted::{ClientNumber, DEEDS, Deed, SCRIPTS, Script, Seen, SeenDaemon, gpu};

/// The number of scripts in `make test` for each of NVIDIA's control daemons.
const WITH_NVIDIAS: u64 = 3;

/// The number of hosts that run at the same time. A host spends most of its time waiting.
const HOSTS: usize = 3;

/// The longest wait until the host shows the state of the world. Only a defect makes a host need that long.
const DEADLINE: Duration = Duration::from_secs(120);

const PAUSE: Duration = Duration::from_millis(50);

/// The world's name of each GPU, with its PCI address and its render node.
const GPUS: [(&str, &str, u32); 3] = [("A", "1b:00.0", 128), ("B", "2d:00.0", 129), ("D", "43:00.0", 130)];

struct Guest {
    program: Client,
    stays: bool,
    /// The PID of the server that the client has connected to.
    server: u32,
}

struct Twin {
    // `guests` is dropped before `host`, since the drop of the host ends all processes on the host.
    guests: BTreeMap<ClientNumber, Guest>,
    host: Host,
    /// The world's name of each GPU, by UUID.
    names: BTreeMap<String, &'static str>,
    /// The world's number of each client that was ever started, by PID.
    numbers: BTreeMap<u32, ClientNumber>,
    is_up: bool,
}

impl Twin {
    /// Makes a host with the simulated control daemon or with NVIDIA's. `control_daemon` has the driver series and the
    /// directory of NVIDIA's programs.
    fn new(control_daemon: Option<(&str, &Path)>) -> Self {
        let mut host = Host::new("h200x8");
        host.configure("cuda_mps_fault_grace: 1\ncuda_mps_quit_timeout: 1");
        if let Some((series, programs)) = control_daemon {
            host.plant("driver", series);
            host.prefer(programs);
            host.configure("cuda_mps_prewarm: false");
        }
        let names = GPUS.iter().enumerate().map(|(place, (name, ..))| {
            let uuid = fs::read_to_string(host.path(&format!("gpus/{place}/uuid"))).unwrap();
            (uuid.trim().to_owned(), gpu(name))
        });
        let names = names.collect();
        let (guests, numbers) = (BTreeMap::new(), BTreeMap::new());
        Self { guests, host, names, numbers, is_up: false }
    }

    /// Plays a deed on the host. Some effects of the deed may follow later.
    fn play(&mut self, deed: &Deed, before: &Seen) {
        match deed {
            Deed::Reload { is_shared, gpus, thread_percentage } => {
                self.configure(gpus);
                let topology = if *is_shared { "shared" } else { "per_gpu" };
                self.reload(&format!(
                    "cuda_mps_topology: {topology}\ncuda_mps_thread_percentage: {thread_percentage}\n\
                     enable_cuda_mps: true"
                ));
            }
            Deed::Disable => self.reload("enable_cuda_mps: false"),
            Deed::Comes { client, gpu, stays } => self.comes(*client, gpu, *stays),
            Deed::Leaves(client) => self.guests.remove(client).unwrap().program.end(),
            Deed::Fault { client, gpu, ends_control_daemon: false } => self.fault(*client, gpu),
            Deed::Fault { client, gpu, ends_control_daemon: true } => {
                self.host.plant("mps/fault/fault-ends-control", "");
                let server = self.server_on(gpu).unwrap();
                self.fault(*client, gpu);
                self.end_with(server);
                self.host.clear("mps/fault/fault-ends-control");
            }
            Deed::Force => _ = succeeded(&self.host.mpsctl(&["apply", "--force"])),
            Deed::KillServer { id } => {
                let server = self.server_on(before.daemons[id].gpus[0]).unwrap();
                signal_pid(server, Signal::KILL);
                self.end_with(server);
            }
            Deed::KillControlDaemon { id } => {
                let servers: BTreeSet<u32> =
                    before.daemons[id].gpus.iter().filter_map(|gpu| self.server_on(gpu)).collect();
                signal_pid(self.running()[id].pid, Signal::KILL);
                servers.into_iter().for_each(|server| self.end_with(server));
            }
            Deed::Drain { slice, is_drained } => {
                let (name, ordinal) = slice.split_once('-').unwrap();
                let verb = if *is_drained { "drain" } else { "undrain" };
                succeeded(&self.host.mpsctl(&[verb, &format!("{}-{ordinal}", address(name))]));
            }
            Deed::KillService => {
                self.host.signal(Signal::KILL);
                self.host.ended();
                self.is_up = false;
            }
            Deed::StartService => {
                self.host.start();
                self.is_up = true;
            }
            Deed::StopService => {
                assert_eq!(self.host.stop().code(), Some(0), "{}", self.host.log());
                self.is_up = false;
            }
        }
    }

    fn configure(&self, gpus: &[&str]) {
        let wanted = GPUS.iter().filter(|(name, ..)| gpus.contains(name));
        let entry = |(_, _, node): &(&str, &str, u32)| {
            format!("path: /dev/dri/renderD{node}, type: NVIDIA_MPS, virtual_number: 2")
        };
        let entries: Vec<String> = wanted.map(entry).collect();
        self.host.devices(&entries.iter().map(String::as_str).collect::<Vec<_>>());
    }

    fn reload(&self, lines: &str) {
        self.host.configure(lines);
        if self.is_up {
            let answer = self.host.call("Control.Reload");
            assert!(answer.status.success(), "{}", text(&answer));
        }
    }

    /// Makes a command that runs `cuda-client` in the first slice of a GPU. The service may not run, so the test sets the
    /// environment of the slice itself.
    fn program(&self, gpu: &str, arguments: &[&str]) -> Command {
        let mut command = self.host.program(arguments);
        let (uuid, _) = self.names.iter().find(|(_, name)| **name == gpu).unwrap();
        let directory = self.slices().join(directory_name(&format!("{gpu}-0")));
        command.env("CUDA_MPS_PIPE_DIRECTORY", directory).env("CUDA_VISIBLE_DEVICES", uuid);
        command
    }

    fn comes(&mut self, client: ClientNumber, gpu: &'static str, stays: bool) {
        let arguments: &[&str] = if stays { &["hold", "600", "--stay"] } else { &["hold", "600"] };
        let program = Client::start(&mut self.program(gpu, arguments));
        let pid = program.id();
        let is_served = || self.processes_on(gpu).contains(&(pid, "client".to_owned())).then_some(());
        wait_for("the client", is_served);
        let server = self.server_on(gpu).unwrap();
        self.guests.insert(client, Guest { program, stays, server });
        self.numbers.insert(pid, client);
    }

    fn fault(&mut self, client: ClientNumber, gpu: &str) {
        let mut culprit = Client::start(&mut self.program(gpu, &["fault"]));
        self.numbers.insert(culprit.id(), client);
        let status = wait_for("the culprit's end", || culprit.try_wait().unwrap());
        assert_eq!(status.code(), Some(4), "the culprit was no client");
    }

    /// Waits until a server has ended, and ends its clients. While one of these clients runs, the simulated driver lets no
    /// other server open the server's GPUs.
    fn end_with(&mut self, server: u32) {
        wait_for("the server's end", || (!alive(server)).then_some(()));
        self.guests.retain(|_, guest| guest.server != server);
    }

    /// Forgets clients that have ended. Kills each client that stays after its server has ended.
    fn tidy_up(&mut self) {
        self.guests.retain(|_, guest| {
            let has_ended = guest.program.try_wait().unwrap().is_some();
            !has_ended && (!guest.stays || alive(guest.server))
        });
    }

    fn slices(&self) -> PathBuf {
        self.host.path("mps/pipe/slices")
    }

    fn processes_on(&self, gpu: &str) -> Vec<(u32, String)> {
        let place = GPUS.iter().position(|(name, ..)| *name == gpu).unwrap();
        let entries = fs::read_dir(self.host.path(&format!("gpus/{place}/processes")));
        let process = |entry: fs::DirEntry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let kind = fs::read_to_string(entry.path()).ok()?.split_whitespace().next()?.to_owned();
            alive(pid).then_some((pid, kind))
        };
        entries.into_iter().flatten().filter_map(|entry| process(entry.unwrap())).collect()
    }

    fn server_on(&self, gpu: &str) -> Option<u32> {
        let all = self.processes_on(gpu);
        all.into_iter().find(|(_, kind)| kind == "server").map(|(pid, _)| pid)
    }

    fn running(&self) -> BTreeMap<String, Running> {
        let Ok(bytes) = fs::read(self.host.path("run/state.json")) else { return BTreeMap::new() };
        let state: Value = serde_json::from_slice(&bytes).unwrap();
        let one = |(id, entry): (&String, &Value)| {
            let pid = number_in(&entry["process"]["pid"]).unwrap();
            let gpus = entry["gpus"].as_array().unwrap().iter();
            let gpus = gpus.map(|uuid| self.names[uuid.as_str().unwrap()]).collect();
            let directory = entry["private_directory"].as_str().or(entry["pipe_directory"].as_str());
            let directory = directory.unwrap().into();
            let id = self.names.get(id).map_or_else(|| id.clone(), |name| (*name).to_owned());
            alive(pid).then_some((id, Running { pid, gpus, directory }))
        };
        let all = state["control_daemons"].as_object();
        all.into_iter().flatten().filter_map(one).collect()
    }

    fn end(mut self) {
        self.guests.clear();
        if !self.is_up {
            self.host.start();
            wait_for("an answer", || self.host.json(&["status"]));
        }
        assert_eq!(self.host.stop().code(), Some(0), "{}", self.host.log());
        self.host.nothing_runs();
    }

    /// Returns the state of the host, or the reason why this state is still changing.
    fn look(&mut self) -> Result<Seen, String> {
        self.tidy_up();
        let running = self.running();
        let mut seen = Seen::default();
        for (id, one) in &running {
            let daemon = SeenDaemon { gpus: one.gpus.clone(), published: None };
            seen.daemons.insert(id.clone(), daemon);
        }
        for (place, (name, ..)) in GPUS.into_iter().enumerate() {
            let mode = fs::read_to_string(self.host.path(&format!("gpus/{place}/compute_mode"))).unwrap();
            if mode.trim() == "Exclusive_Process" {
                seen.with_our_mode.insert(gpu(name));
            }
            let number = |pid: u32| self.numbers.get(&pid).filter(|number| self.guests.contains_key(number));
            for (pid, kind) in self.processes_on(name) {
                match (kind.as_str(), number(pid)) {
                    ("client", Some(client)) => _ = seen.clients.insert(*client, gpu(name)),
                    ("server", _) => {}
                    _ => return Err(format!("{kind} {pid} is on {name}")),
                }
            }
            for slice in [0, 1].map(|ordinal| format!("{name}-{ordinal}")) {
                let leads_to = inode(&self.slices().join(directory_name(&slice)).join("control"));
                let is_it = |one: &Running| leads_to == inode(&one.directory.join("control"));
                let there = running.iter().find(|(_, one)| leads_to.is_some() && is_it(one));
                seen.ways.extend(there.map(|(id, _)| (slice, id.clone())));
            }
        }
        if seen.clients.len() != self.guests.len() {
            return Err("not every client is on its GPU".to_owned());
        }
        seen.told = self.told();
        if self.is_up {
            self.add_published(&mut seen, &running)?;
        }
        Ok(seen)
    }

    /// Adds the published state. Fails if the service publishes a process that does not run.
    fn add_published(&self, seen: &mut Seen, running: &BTreeMap<String, Running>) -> Result<(), String> {
        let published = self.host.json(&["status"]).ok_or("the service does not answer")?;
        let name = |id: &str| self.names.get(id).map_or_else(|| id.to_owned(), |name| (*name).to_owned());
        let mut ids = BTreeSet::new();
        for one in published["control_daemons"].as_array().unwrap() {
            let (id, pid) = (name(one["id"].as_str().unwrap()), number_in(&one["pid"]));
            let runs = running.get(&id).filter(|running| Some(running.pid) == pid);
            let (Some(_), Some(daemon)) = (runs, seen.daemons.get_mut(&id)) else {
                return Err(format!("{id} is published with PID {pid:?}, which does not run"));
            };
            let servers: Vec<u32> = one["servers"].as_array().unwrap().iter().filter_map(number_in).collect();
            if let Some(server) = servers.iter().find(|server| !alive(**server)) {
                return Err(format!("server {server} is published, which does not run"));
            }
            daemon.published = Some((one["state"].as_str().unwrap().to_owned(), servers.len()));
            ids.insert(id);
        }
        if let Some(id) = seen.daemons.keys().find(|id| !ids.contains(*id)) {
            return Err(format!("{id} runs, and is not published"));
        }
        for one in published["gpus"].as_array().unwrap().iter().filter(|one| one["healthy"] == true) {
            let (name, ..) = GPUS.iter().find(|(_, address, _)| one["addr"] == *address).unwrap();
            let percentage = number_in(&one["confirmed_thread_percentage"]).ok_or("no limit is in force")?;
            seen.served.insert(gpu(name), u8::try_from(percentage).unwrap());
        }
        let clients = self.host.json(&["clients"]).ok_or("the clients can't be listed")?;
        let listed = clients.as_array().unwrap().iter();
        let listed: Option<BTreeSet<ClientNumber>> = listed
            .map(|one| self.numbers.get(&number_in(&one["pid"])?).filter(|_| one["bypass"] != true).copied())
            .collect();
        if listed != Some(seen.clients.keys().copied().collect()) {
            return Err(format!("other clients are listed: {clients}"));
        }
        Ok(())
    }

    /// Returns all clients that the service's log names as hit by a fault.
    fn told(&self) -> BTreeSet<ClientNumber> {
        let (line, pid) =
            (Regex::new("clients that were hit: .*").unwrap(), Regex::new(r"PID (\d+)").unwrap());
        let log = self.host.log();
        let hit = line.find_iter(&log).flat_map(|line| pid.captures_iter(line.as_str()).collect::<Vec<_>>());
        hit.map(|pid| self.numbers[&pid[1].parse().unwrap()]).collect()
    }

    /// Waits until two successive reads of the host show the state `expected`, since the first match may be a passing state.
    fn shows(&mut self, expected: &Seen) -> Result<(), String> {
        let begun = Instant::now();
        let mut same = 0;
        loop {
            let seen = self.look();
            same = if seen.as_ref() == Ok(expected) { same + 1 } else { 0 };
            if same == 2 {
                return Ok(());
            }
            if begun.elapsed() > DEADLINE {
                let seen = seen.map_or_else(|why| why, |seen| seen.to_string());
                return Err(format!("the world shows\n{expected}and the host shows\n{seen}"));
            }
            thread::sleep(PAUSE);
        }
    }
}

struct Running {
    pid: u32,
    gpus: Vec<&'static str>,
    directory: PathBuf,
}

fn address(name: &str) -> &'static str {
    GPUS.iter().find(|(gpu, ..)| *gpu == name).unwrap().1
}

fn directory_name(slice: &str) -> String {
    let (name, ordinal) = slice.split_once('-').unwrap();
    format!("{}-{ordinal}", address(name).replace(':', "_"))
}

fn number_in(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// Plays the same script in the world and on a host. The error names the first difference.
fn play(seed: u64, control_daemon: Option<(&str, &Path)>) -> Result<(), String> {
    let mut script = Script::new(seed, control_daemon.is_none());
    let mut twin = Twin::new(control_daemon);
    let mut told = String::new();
    for _ in 0..number("HISTORY_STEPS").unwrap_or(DEEDS) {
        let deed = script.choose();
        told += &format!("{deed:?}\n");
        let before = script.seen();
        script.play(&deed);
        twin.play(&deed, &before);
        let shows = twin.shows(&script.seen());
        shows.map_err(|why| {
            format!(
                "after\n{told}{why}the world's story:\n{}\nthe service's log:\n{}",
                script.story(),
                twin.host.log()
            )
        })?;
    }
    twin.end();
    Ok(())
}

fn try_all(test: &str, histories: u64, control_daemon: Option<(&str, &Path)>) {
    let first = number("HISTORY_SEED").unwrap_or(1);
    let most = number("HOST_HISTORIES").unwrap_or(histories);
    let (next, has_failed) = (AtomicU64::new(0), AtomicBool::new(false));
    let try_on = || {
        while !has_failed.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= most {
                return;
            }
            let seed = first.wrapping_add(number);
            let played = play(seed, control_daemon);
            has_failed.fetch_or(played.is_err(), Ordering::Relaxed);
            if let Err(why) = played {
                panic!("{test} with HISTORY_SEED={seed} HOST_HISTORIES=1: {why}");
            }
        }
    };
    thread::scope(|scope| (0..HOSTS).for_each(|_| _ = scope.spawn(try_on)));
}

#[test]
fn the_host_shows_what_the_world_shows() {
    try_all("the_host_shows_what_the_world_shows", SCRIPTS, None);
}

#[test]
fn nvidias_control_daemons_show_what_the_world_shows() {
    for series in ["535", "550", "555"] {
        let programs = nvidias(series);
        try_all("nvidias_control_daemons_show_what_the_world_shows", WITH_NVIDIAS, Some((series, &programs)));
    }
}
