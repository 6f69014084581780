//! The looks: is a GPU served, and does something forbid it?

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Output;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::Chaos;
use super::acts::Act;
use super::stream::{Client, Offer, Way};
use crate::support::host::{alive, binaries};

/// The pause of a look.
const PAUSE: Duration = Duration::from_millis(200);

/// A GPU may be without service for so many looks after the end of something that forbade it, some 3 s. NVIDIA's start of
/// a control daemon and its server takes 0.7 s; the service's pauses before it tries again begin at 0.1 s and double.
pub(super) const ALLOWANCE: u32 = 12;

/// The last victim of a lethal act is gone after so many looks. Its connection breaks with the act.
const DEATH: usize = 4;

/// The consequence of an act for some GPUs.
pub(super) struct Effect {
    pub(super) gpus: Vec<usize>,
    pub(super) from: Instant,
    /// Until when it ended clients' work, where it did.
    pub(super) lethal_until: Option<Instant>,
    /// Whether programs can come in without MPS: no control daemon answers them.
    pub(super) lets_in: bool,
    pub(super) course: Course,
    /// The first look at each GPU that found it served after the effect was closed. A busy machine may take longer than the
    /// allowance to start a control daemon; that is judged as time without service.
    pub(super) served_again: BTreeMap<usize, Instant>,
}

/// The progress of an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Course {
    /// Until what was done is undone.
    Lasts,
    /// Until the clients of the control daemons of before are done.
    WaitsForClients,
    /// For so many looks of a service that can work.
    Recovers(u32),
    /// It forbids nothing any more.
    Closed(Instant),
}

impl Effect {
    fn forbids(&self, gpu: usize) -> bool {
        !matches!(self.course, Course::Closed(_)) && self.gpus.contains(&gpu)
    }

    /// Whether a program that came then could come in without MPS.
    fn let_in(&self, client: &Client) -> bool {
        let before_its_end = match self.course {
            Course::Closed(_) => {
                self.served_again.get(&client.gpu).is_none_or(|served| client.came <= *served)
            }
            _ => true,
        };
        self.lets_in && self.gpus.contains(&client.gpu) && self.from <= client.came && before_its_end
    }
}

/// A GPU and the last look at it.
#[derive(Default)]
pub(super) struct Watched {
    pub(super) uuid: String,
    /// The pipe directory of its slices, as they were last listed.
    pub(super) pipe: PathBuf,
    pub(super) healthy: bool,
    /// The service's own words on why it is not healthy.
    pub(super) reason: String,
    /// It is not served, and that was said.
    pub(super) complained: bool,
    /// While it is not served: the moment from which it could have been.
    pub(super) waits_since: Option<Instant>,
}

#[derive(Default)]
pub(super) struct Counts {
    pub(super) acts: BTreeMap<Act, u32>,
    pub(super) states: BTreeMap<String, u32>,
    /// Looks at GPUs.
    pub(super) all: u32,
    pub(super) judged: u32,
    pub(super) served: u32,
    /// Judged looks at which the GPU was said to be healthy and let nobody in, and the other way around.
    pub(super) only_said: u32,
    pub(super) only_let_in: u32,
    pub(super) worst: Duration,
}

impl Chaos {
    pub(super) fn ask(&self, arguments: &[&str]) -> Output {
        let mut command = self.host.command("timeout");
        command.arg("10").arg(binaries().join("yunion-mpsctl")).args(arguments).output().unwrap()
    }

    /// The answer of yunion-mpsctl as JSON, if there is one.
    fn json(&self, command: &str) -> Option<Value> {
        let output = self.ask(&[command, "--json"]);
        output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
    }

    pub(super) fn look(&mut self) {
        std::thread::sleep(PAUSE);
        let before = self.looks.last().copied().unwrap_or(self.begun);
        self.undo_what_is_due();
        self.looks.push(Instant::now());
        if !self.down && !alive(self.host.pid()) {
            let status = self.host.ended();
            self.fail(format!("the service ended by itself: {status}"));
            self.host.start();
        }
        let answers = self.up() && !self.without_bus;
        let status = answers.then(|| self.json("status")).flatten();
        if answers {
            let state = status.as_ref().and_then(|status| status["service"]["state"].as_str());
            *self.counts.states.entry(state.unwrap_or("no answer").to_owned()).or_default() += 1;
        }
        let listed = answers.then(|| self.json("list")).flatten();
        self.take_in(listed.as_ref().and_then(Value::as_array).map_or(&[], Vec::as_slice));
        self.close_effects();
        self.examine_intruders();
        for gpu in self.all() {
            let open = self.is_open(gpu, before);
            if open && self.gpus[gpu].healthy {
                let closed = |effect: &&mut Effect| matches!(effect.course, Course::Closed(_));
                for effect in self.effects.iter_mut().filter(closed) {
                    effect.served_again.entry(gpu).or_insert_with(Instant::now);
                }
            }
            self.judge(gpu, open);
        }
    }

    fn take_in(&mut self, listed: &[Value]) {
        for (number, gpu) in self.gpus.iter_mut().enumerate() {
            let devices: Vec<&Value> =
                listed.iter().filter(|device| device["device_path"] == gpu.uuid.as_str()).collect();
            gpu.healthy = !devices.is_empty() && devices.iter().all(|device| device["healthy"] == true);
            let reason = devices.first().and_then(|device| device["reason"].as_str());
            gpu.reason = reason.unwrap_or("not listed").to_owned();
            let offers = offers(listed, &gpu.uuid);
            if let Some(first) = offers.first() {
                gpu.pipe.clone_from(&first.pipe);
                self.stream.offer(number, offers);
            }
        }
    }

    /// Whether a client that comes now is let in: the last one was, and none has waited since before the last look.
    fn is_open(&self, gpu: usize, before: Instant) -> bool {
        let clients = self.stream.clients();
        let mut knocks = clients.iter().rev().filter(|client| client.knocks && client.gpu == gpu);
        let decided = |client: &&Client| client.began.is_some() || client.gone.is_some();
        match knocks.next() {
            Some(last) if decided(&last) => last.began == Some(Way::WithMps),
            Some(last) if last.came < before => false,
            _ => knocks.next().is_some_and(|last| last.began == Some(Way::WithMps)),
        }
    }

    fn close_effects(&mut self) {
        let (up, now, pipes) = (self.up(), Instant::now(), self.pipes());
        // A change of the topology waits for the clients of the control daemons of before, and for nobody to become one.
        let held = self.gpus.iter().any(|gpu| !pipes.contains(&gpu.pipe))
            || self.stream.clients().iter().any(|client| {
                client.gone.is_none() && client.began == Some(Way::WithMps) && !pipes.contains(&client.pipe)
            });
        for effect in &mut self.effects {
            effect.course = match effect.course {
                Course::WaitsForClients if !held => Course::Recovers(ALLOWANCE),
                Course::Recovers(0) => Course::Closed(now),
                Course::Recovers(left) if up => Course::Recovers(left - 1),
                same => same,
            };
        }
    }

    /// The pipe directories of the topology that was asked for.
    fn pipes(&self) -> Vec<PathBuf> {
        let pipe = self.host.path("mps/pipe");
        if self.shared { vec![pipe] } else { self.gpus.iter().map(|gpu| pipe.join(&gpu.uuid)).collect() }
    }

    /// Programs that came in without MPS: an act must have let them in, and while they run their GPU can't be served.
    fn examine_intruders(&mut self) {
        let mut new = Vec::new();
        for (place, client) in self.stream.clients().iter_mut().enumerate() {
            if client.began == Some(Way::WithoutMps) && !std::mem::replace(&mut client.examined, true) {
                new.push((place, client.clone()));
            }
        }
        for (place, client) in new {
            if !self.effects.iter().any(|effect| effect.let_in(&client)) {
                self.slipped_in += 1;
                if self.slipped_in <= 20 {
                    self.fail(format!("PID {} came in on GPU {} without MPS", client.pid, client.gpu));
                }
            } else if client.gone.is_none() {
                let what = format!("PID {} is on GPU {} without MPS", client.pid, client.gpu);
                let effect = self.effect(&what, self.together_with(client.gpu), false);
                self.intruders.insert(place, effect);
            }
        }
        let gone: Vec<usize> = {
            let clients = self.stream.clients();
            self.intruders.keys().copied().filter(|place| clients[*place].gone.is_some()).collect()
        };
        for effect in gone.iter().filter_map(|place| self.intruders.remove(place)).collect::<Vec<_>>() {
            self.over(effect);
        }
    }

    fn judge(&mut self, gpu: usize, open: bool) {
        let forbidden = self.effects.iter().any(|effect| effect.forbids(gpu));
        let healthy = self.gpus[gpu].healthy;
        let served = healthy && open;
        let now = Instant::now();
        match (served, self.gpus[gpu].waits_since) {
            (true, Some(since)) => {
                self.gpus[gpu].waits_since = None;
                if std::mem::take(&mut self.gpus[gpu].complained) {
                    self.say(&format!("GPU {gpu} is served again"));
                }
                self.counts.worst = self.counts.worst.max(now - since);
            }
            (false, None) => self.gpus[gpu].waits_since = Some(now),
            _ => {}
        }
        self.counts.all += 1;
        if forbidden {
            return;
        }
        self.counts.judged += 1;
        self.counts.served += u32::from(served);
        self.counts.only_said += u32::from(healthy && !open);
        self.counts.only_let_in += u32::from(open && !healthy);
        if !served && !std::mem::replace(&mut self.gpus[gpu].complained, true) {
            let reason = self.gpus[gpu].reason.clone();
            self.say(&format!("GPU {gpu} is not served: healthy {healthy}, open {open}, {reason}"));
        }
    }

    /// Whether a lethal act was on a client's way.
    pub(super) fn was_killed(&self, client: &Client, gone: Instant) -> bool {
        self.effects.iter().any(|effect| {
            let Some(until) = effect.lethal_until else { return false };
            let dead_by = self.looks.iter().filter(|look| **look > until).nth(DEATH);
            effect.gpus.contains(&client.gpu)
                && client.came <= until
                && effect.from <= gone
                && dead_by.is_none_or(|dead_by| gone <= *dead_by)
        })
    }
}

/// The slices of a GPU.
pub(super) fn offers(listed: &[Value], uuid: &str) -> Vec<Offer> {
    listed.iter().filter(|device| device["device_path"] == uuid).map(Offer::of).collect()
}
