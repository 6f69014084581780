//! Random histories of reloads, with clients on the GPUs. Whatever is ordered, no client is lost, nobody of ours counts as
//! a bypass, no two control daemons have the same GPU, and in the end every GPU is served.
//!
//! `HISTORY_SEED` repeats a history, and `HISTORY_STEPS` makes it longer.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use rustix::process::Signal;
use serde_json::Value;

use crate::support::client::Client;
use crate::support::host::{Host, alive, signal_pid, text};
use crate::support::random::Random;
use crate::support::wait::wait_for;

/// The GPUs that come and go: each with its render node and its name.
const GPUS: [(u32, &str); 3] = [(128, "1b:00.0"), (129, "2d:00.0"), (130, "43:00.0")];

const STEPS: u64 = 16;

/// The most clients at a time.
const CLIENTS: usize = 3;

struct History {
    // Before the host, which ends what it has started.
    clients: Vec<Served>,
    host: Host,
    random: Random,
    drained: BTreeSet<&'static str>,
    /// Everything that was done, for whoever reads of a failure.
    told: String,
}

/// A client that was served.
struct Served {
    client: Client,
    /// The control daemon that serves it.
    control: u32,
}

impl History {
    fn begin(random: Random) -> Self {
        let mut host = Host::new("h200x8");
        host.devices(&[&entry(GPUS[0].0)]);
        host.start();
        host.wait_for_state("ready");
        Self { clients: Vec::new(), host, random, drained: BTreeSet::new(), told: String::new() }
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::try_from(self.random.below(all.len() as u64)).unwrap()]
    }

    fn tell(&mut self, what: &str) {
        writeln!(self.told, "{what}").unwrap();
    }

    fn step(&mut self) {
        match self.random.below(10) {
            0..4 => self.reload(),
            4..7 if self.clients.len() < CLIENTS => self.begin_client(),
            4..8 => self.end_client(),
            8 => self.drain(),
            _ => self.kill_control_daemon(),
        }
    }

    fn reload(&mut self) {
        let topology = self.one_of(&["shared", "per_gpu"]);
        let set = self.random.below(7) + 1;
        let wanted = GPUS.iter().enumerate().filter(|(place, _)| set >> place & 1 == 1);
        let wanted: Vec<(u32, &str)> = wanted.map(|(_, gpu)| *gpu).collect();
        self.tell(&format!("reload: {topology} of {wanted:?}"));
        let entries: Vec<String> = wanted.iter().map(|(node, _)| entry(*node)).collect();
        self.host.devices(&entries.iter().map(String::as_str).collect::<Vec<_>>());
        self.host.configure(&format!("cuda_mps_topology: {topology}"));
        let answer = self.host.call("Control.Reload");
        assert!(answer.status.success(), "{}\n{}", text(&answer), self.told);
    }

    /// A client of a GPU that is served. It counts once it is served.
    fn begin_client(&mut self) {
        let status = self.host.json(&["status"]).unwrap();
        // A program that comes while an idle control daemon restarts runs without MPS.
        let stays = |gpu: &&str| {
            let Some(control) = control_of(&status, gpu) else { return false };
            let in_use = self.clients.iter().any(|served| served.control == control["pid"]);
            control["state"] == "ready" || in_use
        };
        let healthy =
            status["gpus"].as_array().unwrap().iter().filter(|gpu| gpu["healthy"] == true).map(name);
        let open = healthy.filter(|name| !self.drained.contains(name));
        let open: Vec<&str> = open.filter(stays).collect();
        if open.is_empty() {
            return;
        }
        let name = self.one_of(&open);
        let mut client = Client::start(&mut self.host.program_of(&format!("{name}-0"), &["hold", "600"]));
        let pid = client.id();
        let control = wait_for("the client's start or end", || {
            if client.try_wait().unwrap().is_some() {
                return Some(None);
            }
            serves(&self.host, pid).map(Some)
        });
        self.tell(&format!("client {pid} on {name}, served by {control:?}"));
        if let Some(control) = control {
            self.clients.push(Served { client, control });
        }
    }

    fn end_client(&mut self) {
        if self.clients.is_empty() {
            return;
        }
        let place = usize::try_from(self.random.below(self.clients.len() as u64)).unwrap();
        let gone = self.clients.swap_remove(place);
        self.tell(&format!("client {} ends", gone.client.id()));
        gone.client.end();
    }

    fn drain(&mut self) {
        let (_, name) = self.one_of(&GPUS);
        let verb = if self.drained.contains(name) { "undrain" } else { "drain" };
        let answer = self.host.mpsctl(&[verb, name]);
        self.tell(&format!("{verb} {name}: {}", answer.status));
        // A GPU that is not configured has no name.
        if answer.status.success() && !self.drained.remove(name) {
            self.drained.insert(name);
        }
    }

    fn kill_control_daemon(&mut self) {
        let status = self.host.json(&["status"]).unwrap();
        let all = status["control_daemons"].as_array().unwrap().iter();
        let pids: Vec<u32> = all.filter_map(|one| u32::try_from(one["pid"].as_u64()?).ok()).collect();
        if pids.is_empty() {
            return;
        }
        let pid = self.one_of(&pids);
        self.tell(&format!("control daemon {pid} is killed"));
        self.clients.retain(|served| served.control != pid);
        signal_pid(pid, Signal::KILL);
        wait_for("its end", || (!alive(pid)).then_some(()));
    }

    fn check(&mut self) {
        for served in &mut self.clients {
            let ended = served.client.try_wait().unwrap();
            assert_eq!(ended, None, "client {} is lost after\n{}", served.client.id(), self.told);
        }
        let log = self.host.log();
        assert!(!log.contains("is used without our MPS server"), "a bypass after\n{}", self.told);
        // Nobody can be listed while a control daemon ends.
        if let Some(listed) = listed(&self.host) {
            let bypasses: Vec<_> = listed.iter().filter(|(_, bypass)| **bypass).collect();
            assert!(bypasses.is_empty(), "bypasses {bypasses:?} after\n{}", self.told);
        }
        let status = self.host.json(&["status"]).unwrap();
        let all = status["control_daemons"].as_array().unwrap();
        for key in ["id", "pid"] {
            let values: Vec<String> = all
                .iter()
                .map(|one| &one[key])
                .filter(|value| !value.is_null())
                .map(Value::to_string)
                .collect();
            let different: BTreeSet<&String> = values.iter().collect();
            assert_eq!(different.len(), values.len(), "{key} twice in {status:#} after\n{}", self.told);
        }
        let state = fs::read(self.host.path("run/state.json")).unwrap();
        let state: Value = serde_json::from_slice(&state).unwrap();
        let mut gpus = BTreeSet::new();
        for (id, running) in state["control_daemons"].as_object().unwrap() {
            let pid = u32::try_from(running["process"]["pid"].as_u64().unwrap()).unwrap();
            for gpu in running["gpus"].as_array().unwrap().iter().filter(|_| alive(pid)) {
                assert!(gpus.insert(gpu.to_string()), "{gpu} twice, also in {id}, after\n{}", self.told);
            }
        }
    }

    /// Without clients, everything that is configured is served.
    fn end(mut self) {
        while !self.clients.is_empty() {
            self.end_client();
        }
        let undrained = self.host.mpsctl(&["undrain", "--all"]);
        assert!(undrained.status.success(), "{}", text(&undrained));
        let told = &self.told;
        let served = |status: &Value| {
            let gpus = status["gpus"].as_array().unwrap();
            status["service"]["state"] == "ready" && gpus.iter().all(|gpu| gpu["healthy"] == true)
        };
        self.host.wait_for_status(&format!("every GPU served after\n{told}"), served);
        assert_eq!(self.host.stop().code(), Some(0));
        self.host.nothing_runs();
        for gpu in 0..GPUS.len() {
            assert_eq!(self.host.compute_mode(gpu), "Default", "GPU {gpu} after\n{}", self.told);
        }
    }
}

fn entry(node: u32) -> String {
    format!("path: /dev/dri/renderD{node}, type: NVIDIA_MPS, virtual_number: 4")
}

fn name(gpu: &Value) -> &str {
    gpu["addr"].as_str().unwrap()
}

/// The processes on the GPUs, and whether each bypasses MPS. None if a control daemon can't list its clients just now.
fn listed(host: &Host) -> Option<BTreeMap<u32, bool>> {
    let listed = host.json(&["clients"])?;
    let one =
        |client: &Value| (u32::try_from(client["pid"].as_u64().unwrap()).unwrap(), client["bypass"] == true);
    Some(listed.as_array().unwrap().iter().map(one).collect())
}

/// The control daemon that is to serve this GPU.
fn control_of<'s>(status: &'s Value, gpu: &str) -> Option<&'s Value> {
    let gpu = status["gpus"].as_array().unwrap().iter().find(|one| name(one) == gpu)?;
    let all = status["control_daemons"].as_array().unwrap();
    all.iter().find(|one| one["id"] == gpu["control_daemon"])
}

/// The PID of the control daemon that serves this client, once one does.
fn serves(host: &Host, client: u32) -> Option<u32> {
    let status = host.json(&["status"])?;
    let client = client.to_string();
    let has = |control: &&Value| {
        let clients = host.front_end(Path::new(control["control_directory"].as_str().unwrap()), "ps");
        clients.lines().any(|line| line.split_whitespace().next() == Some(&client))
    };
    let control = status["control_daemons"].as_array().unwrap().iter().find(has)?;
    Some(u32::try_from(control["pid"].as_u64()?).unwrap())
}

#[test]
fn random_histories_lose_nobody() {
    let (random, _seed) = Random::seeded_by("HISTORY_SEED", "histories::random_histories_lose_nobody");
    let steps = std::env::var("HISTORY_STEPS").map_or(STEPS, |steps| steps.parse().unwrap());
    let mut history = History::begin(random);
    for _ in 0..steps {
        history.step();
        history.check();
    }
    history.end();
}
