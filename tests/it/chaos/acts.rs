//! The acts: one kills, freezes, stops or reloads something, and another undoes it later.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::Chaos;
use super::looks::{ALLOWANCE, Course, Effect};
use crate::support::host::{alive, signal_pid, text};
use crate::support::processes::control_daemons;
use crate::support::wait::wait_for;

/// The render nodes of the board's NVIDIA GPUs.
pub(super) const NODES: [u64; 3] = [128, 129, 131];

/// Everything that is done. Each pass through the list is in another order.
pub(super) const ACTS: [Act; 24] = [
    Act::KillService,
    Act::KillService,
    Act::KillControlDaemon,
    Act::KillControlDaemon,
    Act::TerminateControlDaemon,
    Act::KillServer,
    Act::KillServer,
    Act::KillBoth,
    Act::KillBoth,
    Act::KillAll,
    Act::SlipIn,
    Act::FreezeService,
    Act::FreezeControlDaemon,
    Act::FreezeServer,
    Act::Reload,
    Act::Reload,
    Act::Reload,
    Act::BreakConfiguration,
    Act::StopAndStart,
    Act::RestartBus,
    Act::RemoveLog,
    Act::Fault,
    Act::ChangeTopology,
    Act::ForceTopology,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Act {
    KillService,
    KillControlDaemon,
    TerminateControlDaemon,
    KillServer,
    /// The service and a control daemon.
    KillBoth,
    /// The service and all control daemons and servers.
    KillAll,
    /// As `KillBoth`, and a program without MPS takes the GPU before the service is back.
    SlipIn,
    FreezeService,
    FreezeControlDaemon,
    FreezeServer,
    Reload,
    BreakConfiguration,
    StopAndStart,
    RestartBus,
    RemoveLog,
    Fault,
    /// One control daemon for all GPUs or one for each, once the clients are done.
    ChangeTopology,
    /// The same at once.
    ForceTopology,
}

/// The end of something that lasts.
#[derive(Debug)]
pub(super) enum Undo {
    StartService,
    Continue(u32),
    Mend,
    RestartBus,
    /// `apply --force`.
    Force,
    /// Only the effect's end.
    Nothing,
}

/// A control daemon or a server.
#[derive(Clone)]
struct Part {
    pid: u32,
    server: bool,
    gpus: Vec<usize>,
}

impl fmt::Display for Part {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.server { "server" } else { "control daemon" };
        write!(out, "{what} {} of GPUs {:?}", self.pid, self.gpus)
    }
}

impl Chaos {
    /// Whether the service can be told something.
    pub(super) fn up(&self) -> bool {
        !self.down && !self.frozen
    }

    /// Says what is done, and that it lasts until it is said to be over.
    pub(super) fn effect(&mut self, act: &str, gpus: Vec<usize>, lets_in: bool) -> usize {
        self.say(act);
        self.effects.push(Effect {
            gpus,
            from: Instant::now(),
            lethal_until: None,
            lets_in,
            course: Course::Lasts,
            served_again: BTreeMap::new(),
        });
        self.effects.len() - 1
    }

    /// No act lasts: everything can recover.
    pub(super) fn over(&mut self, effect: usize) {
        self.effects[effect].course = Course::Recovers(ALLOWANCE);
        for gpu in self.effects[effect].gpus.clone() {
            self.gpus[gpu].waits_since = Some(Instant::now());
        }
    }

    fn undo_in(&mut self, looks: usize, undo: Undo, effect: Option<usize>) {
        self.due.push((self.looks.len() + looks, undo, effect));
    }

    /// The control daemons and servers.
    fn parts(&self, servers: bool) -> Vec<Part> {
        let control_daemons = control_daemons(&self.host);
        let is_server = |pid: u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.starts_with(b"nvidia-cuda-mps-server\0")
        };
        let pids = if servers {
            self.host.processes().into_iter().filter(|pid| is_server(*pid)).collect()
        } else {
            control_daemons
        };
        let part = |pid| Part { pid, server: servers, gpus: self.gpus_of(pid) };
        pids.into_iter().map(part).filter(|part| !part.gpus.is_empty()).collect()
    }

    /// The GPUs that a process of MPS was started for.
    fn gpus_of(&self, pid: u32) -> Vec<usize> {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let environment = String::from_utf8_lossy(&environment).into_owned();
        let visible = environment.split('\0').find_map(|one| one.strip_prefix("CUDA_VISIBLE_DEVICES="));
        let uuids: Vec<&str> = visible.unwrap_or_default().split(',').collect();
        self.all().into_iter().filter(|gpu| uuids.contains(&self.gpus[*gpu].uuid.as_str())).collect()
    }

    fn any_part(&mut self, servers: bool) -> Option<Part> {
        let parts = self.parts(servers);
        let place = usize::try_from(self.random.below(parts.len().max(1) as u64)).unwrap();
        parts.get(place).cloned()
    }

    /// Sends a lethal signal and waits until its victims are dead: the servers die with their control daemon.
    fn end(&mut self, victims: &[Part], signal: Signal, effect: usize) {
        let of_theirs =
            |server: &Part| victims.iter().any(|victim| victim.gpus == server.gpus && !victim.server);
        let mut dying: Vec<u32> = victims.iter().map(|victim| victim.pid).collect();
        dying.extend(self.parts(true).iter().filter(|server| of_theirs(server)).map(|server| server.pid));
        for victim in victims {
            signal_pid(victim.pid, signal);
        }
        for pid in &dying {
            // A frozen process would wait: with the signal that ends it, or with the end of its control daemon.
            signal_pid(*pid, Signal::CONT);
        }
        wait_for("the victims' end", || (!dying.iter().any(|pid| alive(*pid))).then_some(()));
        self.effects[effect].lethal_until = Some(Instant::now());
    }

    fn kill_service(&mut self) {
        self.host.signal(Signal::KILL);
        self.host.ended();
        (self.down, self.frozen) = (true, false);
    }

    fn start_service(&mut self) {
        // With a bad configuration it does not start.
        if std::mem::take(&mut self.broken) {
            self.configure();
        }
        self.host.start();
        self.down = false;
    }

    /// Does it, unless it makes no sense now.
    #[expect(clippy::too_many_lines, reason = "one short arm for each act")]
    pub(super) fn act(&mut self, act: Act) -> bool {
        match act {
            Act::KillService if !self.down => {
                let effect = self.effect("the service killed", self.all(), false);
                self.kill_service();
                let looks = self.few(8);
                self.undo_in(looks, Undo::StartService, Some(effect));
            }
            Act::KillControlDaemon | Act::TerminateControlDaemon => {
                let Some(victim) = self.any_part(false) else { return false };
                let (how, signal) = match act {
                    Act::KillControlDaemon => ("killed", Signal::KILL),
                    _ => ("terminated", Signal::TERM),
                };
                let effect = self.effect(&format!("{victim} {how}"), victim.gpus.clone(), true);
                self.end(&[victim], signal, effect);
                self.over(effect);
            }
            Act::KillServer => {
                let Some(victim) = self.any_part(true) else { return false };
                let effect = self.effect(&format!("{victim} killed"), victim.gpus.clone(), false);
                self.end(&[victim], Signal::KILL, effect);
                self.over(effect);
            }
            Act::KillBoth | Act::KillAll | Act::SlipIn if !self.down => return self.kill_together(act),
            Act::FreezeService if self.up() => {
                let effect = self.effect("the service frozen", self.all(), false);
                self.host.signal(Signal::STOP);
                self.frozen = true;
                let looks = 1 + self.few(8);
                self.undo_in(looks, Undo::Continue(self.host.pid()), Some(effect));
            }
            Act::FreezeControlDaemon | Act::FreezeServer => {
                let Some(victim) = self.any_part(act == Act::FreezeServer) else { return false };
                let effect = self.effect(&format!("{victim} frozen"), victim.gpus.clone(), false);
                signal_pid(victim.pid, Signal::STOP);
                let looks = 1 + self.few(8);
                self.undo_in(looks, Undo::Continue(victim.pid), Some(effect));
            }
            Act::Reload if self.up() && !self.broken => {
                self.configure();
                self.say(&format!("reload with {} slices", self.slices));
                self.host.signal(Signal::HUP);
            }
            Act::BreakConfiguration if self.up() && !self.broken => {
                self.say("reload with a broken configuration");
                let entry = match self.random.below(3) {
                    0 => None,
                    1 => Some("path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 0"),
                    _ => Some("path: [/dev/dri/renderD128, type: NVIDIA_MPS"),
                };
                match entry {
                    Some(entry) => self.host.devices(&[entry]),
                    None => self.host.configure("cuda_mps_thread_percentage: 0"),
                }
                self.broken = true;
                self.host.signal(Signal::HUP);
                let looks = 2 + self.few(10);
                self.undo_in(looks, Undo::Mend, None);
            }
            Act::StopAndStart if self.up() => {
                let effect = self.effect("the service stopped", self.all(), true);
                let status = self.host.stop();
                self.effects[effect].lethal_until = Some(Instant::now());
                if status.code() != Some(0) {
                    self.fail(format!("the stop ended with {status}"));
                }
                self.down = true;
                let looks = self.few(8);
                self.undo_in(looks, Undo::StartService, Some(effect));
            }
            Act::RestartBus if !self.without_bus => {
                let effect = self.effect("the bus stopped", self.all(), false);
                self.host.stop_bus();
                self.without_bus = true;
                let looks = self.few(6);
                self.undo_in(looks, Undo::RestartBus, Some(effect));
            }
            Act::RemoveLog => {
                let gpu = self.few(self.gpus.len() as u64);
                let uuid = if self.shared { "" } else { &self.gpus[gpu].uuid };
                let log = self.host.path("mps/log").join(uuid).join("control.log");
                let removed = fs::remove_file(log).is_ok();
                self.say(&format!("the log of GPU {gpu} removed: {removed}"));
            }
            Act::Fault if !self.due.iter().any(|(_, undo, _)| matches!(undo, Undo::Continue(_))) => {
                return self.fault();
            }
            Act::ChangeTopology | Act::ForceTopology if self.up() && !self.without_bus && !self.broken => {
                return self.change_topology(act == Act::ForceTopology);
            }
            _ => return false,
        }
        true
    }

    fn kill_together(&mut self, act: Act) -> bool {
        let mut victims = self.parts(false);
        if act == Act::KillAll {
            victims.extend(self.parts(true));
        } else {
            let Some(victim) = self.any_part(false) else { return false };
            victims = vec![victim];
        }
        if victims.is_empty() {
            return false;
        }
        let gpus = if act == Act::KillAll { self.all() } else { victims[0].gpus.clone() };
        let named: Vec<String> = victims.iter().map(ToString::to_string).collect();
        let lethal = self.effect(&format!("{} killed", named.join(", ")), gpus.clone(), true);
        let quiet = self.effect("the service killed", self.all(), false);
        self.kill_service();
        self.end(&victims, Signal::KILL, lethal);
        if act == Act::SlipIn {
            let gpu = gpus[self.few(gpus.len() as u64)];
            let time = Duration::from_secs(1) + self.random.millis(5000);
            self.say(&format!("a program without MPS for {time:.1?} on GPU {gpu}"));
            let offer = self.stream.any_offer(gpu, &mut self.random);
            let offer = offer.without_mps(&self.host.path("nowhere"));
            self.stream.one_more(gpu, offer, time, &mut self.random);
        }
        let looks = self.few(8);
        self.undo_in(looks, Undo::StartService, Some(quiet));
        self.undo_in(looks, Undo::Nothing, Some(lethal));
        true
    }

    /// A fatal GPU error, which is everybody's on that GPU and nobody's on another.
    fn fault(&mut self) -> bool {
        let gpu = self.few(self.gpus.len() as u64);
        let hit = self.effect(&format!("a fault on GPU {gpu}"), vec![gpu], false);
        // A server with a fault takes no client on its other GPUs either.
        let beside = self.effect("the same for those beside", self.together_with(gpu), false);
        let offer = self.stream.any_offer(gpu, &mut self.random);
        let mut culprit = self.host.command("timeout");
        culprit.args(["10", "cuda-client", "fault"]).envs([
            ("CUDA_MPS_PIPE_DIRECTORY", offer.pipe.as_os_str()),
            ("CUDA_VISIBLE_DEVICES", self.gpus[gpu].uuid.as_ref()),
        ]);
        let _ = culprit.stdout(Stdio::null()).status().unwrap();
        self.effects[hit].lethal_until = Some(Instant::now());
        self.over(hit);
        self.over(beside);
        true
    }

    /// The GPUs that share a control daemon with this one.
    pub(super) fn together_with(&self, gpu: usize) -> Vec<usize> {
        if self.shared { self.all() } else { vec![gpu] }
    }

    fn change_topology(&mut self, force: bool) -> bool {
        self.shared = !self.shared;
        let word = if self.shared { "shared" } else { "per_gpu" };
        let effect = self.effect(&format!("topology {word}"), self.all(), true);
        self.host.configure(&format!("cuda_mps_topology: {word}"));
        self.host.signal(Signal::HUP);
        self.effects[effect].course = Course::WaitsForClients;
        if force {
            let looks = 1 + self.few(6);
            self.undo_in(looks, Undo::Force, None);
        }
        true
    }

    /// Another number of slices, another share of threads.
    fn configure(&mut self) {
        let entry = |node: &u64, slices: u64| {
            format!("path: /dev/dri/renderD{node}, type: NVIDIA_MPS, virtual_number: {slices}")
        };
        self.slices = 1 + (self.slices + self.random.below(7)) % 8;
        let entries: Vec<String> = NODES.iter().map(|node| entry(node, self.slices)).collect();
        self.host.devices(&entries.iter().map(String::as_str).collect::<Vec<_>>());
        let percentages = ["equal", "balanced", "unlimited", "30"];
        let percentage = percentages[self.few(4)];
        self.host.configure(&format!("cuda_mps_thread_percentage: {percentage}"));
    }

    pub(super) fn undo_what_is_due(&mut self) {
        let look = self.looks.len();
        let (now, later) = std::mem::take(&mut self.due).into_iter().partition(|(due, _, _)| *due <= look);
        self.due = later;
        let now: Vec<(usize, Undo, Option<usize>)> = now;
        for (_, undo, effect) in now {
            match undo {
                Undo::StartService => {
                    self.say("the service started");
                    self.start_service();
                }
                Undo::Continue(pid) => {
                    self.say(&format!("PID {pid} continued"));
                    if self.host.processes().contains(&pid) {
                        signal_pid(pid, Signal::CONT);
                    }
                    self.frozen &= pid != self.host_pid();
                }
                Undo::Mend if self.broken && self.up() => {
                    self.say("the configuration mended");
                    self.broken = false;
                    self.configure();
                    self.host.signal(Signal::HUP);
                }
                Undo::Mend if self.broken => self.undo_in(2, Undo::Mend, None),
                Undo::RestartBus => {
                    self.say("the bus restarted");
                    self.host.restart_bus();
                    self.without_bus = false;
                }
                Undo::Force if self.up() && !self.without_bus => self.force(),
                Undo::Force | Undo::Mend | Undo::Nothing => {}
            }
            if let Some(effect) = effect {
                self.over(effect);
            }
        }
    }

    fn force(&mut self) {
        let effect = self.effect("apply --force", self.all(), true);
        let output = self.ask(&["apply", "--force"]);
        self.say(&format!("apply --force: {}", text(&output).trim()));
        self.effects[effect].lethal_until = Some(Instant::now());
        self.over(effect);
    }

    fn host_pid(&self) -> u32 {
        if self.down { 0 } else { self.host.pid() }
    }
}
