//! Everything that runs on a host is killed, stopped and reloaded at random, together too, under a stream of clients. Two
//! things count: no client is lost unless something lethal was done to it, and its GPU is served whenever nothing that
//! was done forbids it.
//!
//! All time is counted in looks. A look takes a pause and two questions to the service, so a slow moment of the machine
//! makes looks longer, and the service gets as much more time to recover.

mod acts;
mod looks;
mod stream;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::time::{Duration, Instant};

use acts::{ACTS, Act, NODES, Undo};
use looks::{Counts, Effect, Watched, offers};
use stream::{Outcome, Stream, Way};

use crate::support::host::Host;
use crate::support::random::{Random, Seed};
use crate::support::wait::wait_for;

/// The share of the looks at GPUs that nothing forbids in which the GPU must be served, in percent.
const SERVED: u32 = 90;

/// The share of all looks at GPUs that nothing may forbid, in percent: with less, little would be tested. One act can fill
/// most of a minute, so only a run of `LONG` seconds can promise it.
const JUDGED: u32 = 20;
const LONG: u64 = 180;

/// Clients at work at once on each GPU.
const WORKERS: usize = 2;

struct Chaos {
    // Before the host, which ends what it has started.
    stream: Stream,
    host: Host,
    random: Random,
    begun: Instant,
    gpus: Vec<Watched>,
    looks: Vec<Instant>,
    effects: Vec<Effect>,
    /// The look at which something is due, and the effect that is then over.
    due: Vec<(usize, Undo, Option<usize>)>,
    down: bool,
    frozen: bool,
    without_bus: bool,
    broken: bool,
    shared: bool,
    slices: u64,
    /// Programs without MPS that an act has let in, by their place among the clients, and the effect of each.
    intruders: BTreeMap<usize, usize>,
    /// Programs without MPS that no act has let in.
    slipped_in: u32,
    log: Vec<String>,
    failures: Vec<String>,
    counts: Counts,
}

impl Chaos {
    fn begin(mut random: Random) -> Self {
        let mut host = Host::new("mixed");
        host.plant("gpus/1/mig", "Disabled\n");
        host.configure("cuda_mps_topology: per_gpu\ncuda_mps_quit_timeout: 1\ncuda_mps_log_max_size: 1");
        host.start();
        host.wait_for_state("ready");
        let gpus: Vec<Watched> = (0..NODES.len())
            .map(|gpu| {
                let uuid = fs::read_to_string(host.path(&format!("gpus/{gpu}/uuid"))).unwrap();
                Watched { uuid: uuid.trim().to_owned(), ..Watched::default() }
            })
            .collect();
        let listed = host.list();
        let offers = gpus.iter().map(|gpu| offers(&listed, &gpu.uuid)).collect();
        let stream = Stream::start(&host, offers, WORKERS, &mut random);
        let knocked = |gpu| {
            let clients = stream.clients();
            clients.iter().any(|client| client.gpu == gpu && client.knocks && client.gone.is_some())
        };
        wait_for("the first clients", || (0..gpus.len()).all(knocked).then_some(()));
        Self {
            stream,
            host,
            random,
            begun: Instant::now(),
            gpus,
            looks: Vec::new(),
            effects: Vec::new(),
            due: Vec::new(),
            down: false,
            frozen: false,
            without_bus: false,
            broken: false,
            shared: false,
            slices: 0,
            intruders: BTreeMap::new(),
            slipped_in: 0,
            log: Vec::new(),
            failures: Vec::new(),
            counts: Counts::default(),
        }
    }

    fn run(&mut self, time: Duration) {
        let mut deck: Vec<Act> = Vec::new();
        let mut next = 8;
        while self.begun.elapsed() < time {
            self.look();
            if self.looks.len() < next {
                continue;
            }
            if deck.is_empty() {
                deck = ACTS.to_vec();
            }
            let card = usize::try_from(self.random.below(deck.len() as u64)).unwrap();
            if self.act(deck[card]) {
                *self.counts.acts.entry(deck[card]).or_default() += 1;
                deck.swap_remove(card);
            }
            // One in three comes on top of the one before.
            next = self.looks.len() + self.few(2);
            if self.random.below(3) > 0 {
                next += 10 + self.few(24);
            }
        }
    }

    /// Undoes everything and waits until all GPUs are served.
    fn calm(&mut self) {
        self.say("no more acts");
        for (look, _, _) in &mut self.due {
            *look = 0;
        }
        // The longest pause of the service's own is 30 s.
        for _ in 0..250 {
            self.look();
            if self.due.is_empty() && self.gpus.iter().all(|gpu| gpu.healthy) {
                return;
            }
        }
        self.fail("not all GPUs are served in the end".to_owned());
    }

    fn few(&mut self, bound: u64) -> usize {
        usize::try_from(self.random.below(bound)).unwrap()
    }

    fn all(&self) -> Vec<usize> {
        (0..self.gpus.len()).collect()
    }

    fn say(&mut self, what: &str) {
        let time = self.begun.elapsed().as_secs_f64();
        self.log.push(format!("{time:6.1} s, look {:4}: {what}", self.looks.len()));
    }

    fn fail(&mut self, what: String) {
        self.say(&format!("FAILURE: {what}"));
        self.failures.push(what);
    }

    /// Stops it all, and tells the result.
    fn finish(&mut self, seed: &Seed) -> Verdict {
        self.calm();
        let clients = self.stream.end();
        let status = self.host.stop();
        if status.code() != Some(0) {
            self.fail(format!("the last stop ended with {status}"));
        }
        self.host.nothing_runs();
        for gpu in self.all() {
            let mode = self.host.compute_mode(gpu);
            if mode != "Default" {
                self.fail(format!("the compute mode of GPU {gpu} is {mode} in the end"));
            }
        }
        let (mut done, mut turned_away, mut alone, mut excused) = (0, 0, 0, 0);
        for client in &clients {
            alone += u32::from(client.began == Some(Way::WithoutMps));
            let (gone, outcome) = client.gone.as_ref().unwrap();
            match outcome {
                Outcome::Done => done += 1,
                Outcome::TurnedAway(_) => turned_away += 1,
                Outcome::Lost(_) if self.was_killed(client, *gone) => excused += 1,
                Outcome::Lost(how) => {
                    let at = |moment: Instant| moment.duration_since(self.begun).as_secs_f64();
                    let (came, gone) = (at(client.came), at(*gone));
                    self.failures.push(format!(
                        "client {} on GPU {} was lost: {how}; it came at {came:.1} s and was gone at {gone:.1} s",
                        client.pid, client.gpu
                    ));
                }
            }
        }
        let counts = &self.counts;
        let share = counts.served * 100 / counts.judged.max(1);
        let mut table = format!("chaos with {seed}, {:.0} s:\n", self.begun.elapsed().as_secs_f64());
        let acts: Vec<String> = counts.acts.iter().map(|(act, count)| format!("{act:?} {count}")).collect();
        let mut row = |name: &str, value: String| _ = writeln!(table, "  {name:22} {value}");
        row("acts", format!("{}: {}", counts.acts.values().sum::<u32>(), acts.join(", ")));
        row(
            "clients",
            format!(
                "{}: {done} done, {turned_away} turned away, {excused} lost with a lethal act on their way; {alone} of \
                 them without MPS",
                clients.len()
            ),
        );
        row(
            "looks at GPUs",
            format!(
                "{}: {} that nothing forbade, of them served {} ({share} %)",
                counts.all, counts.judged, counts.served
            ),
        );
        row(
            "not served",
            format!(
                "{} said to be healthy, {} that let clients in, {} neither",
                counts.only_said,
                counts.only_let_in,
                counts.judged - counts.served - counts.only_said - counts.only_let_in
            ),
        );
        row("served again after", format!("{:.1} s at worst", counts.worst.as_secs_f64()));
        row("looks by state", format!("{:?}", counts.states));
        row("failures", self.failures.len().to_string());
        let _ = write!(std::io::stdout(), "{table}");
        Verdict { share, judged: counts.judged * 100 / counts.all.max(1) }
    }
}

/// The result, in percent.
struct Verdict {
    /// Served, of the looks that nothing forbade.
    share: u32,
    /// Those, of all.
    judged: u32,
}

/// A minute (or `CHAOS_SECONDS`) of chaos. `CHAOS_SEED` brings the same acts in the same order again, though not at
/// the same moments.
#[test]
fn chaos() {
    let seconds =
        std::env::var("CHAOS_SECONDS").map_or(60, |text| text.parse().expect("CHAOS_SECONDS is a number"));
    let (random, seed) = Random::seeded_by("CHAOS_SEED", "chaos");
    let mut chaos = Chaos::begin(random);
    chaos.run(Duration::from_secs(seconds));
    let verdict = chaos.finish(&seed);
    let told = || format!("{}\n{}", chaos.log.join("\n"), chaos.failures.join("\n"));
    assert!(chaos.failures.is_empty(), "{}", told());
    assert!(verdict.share >= SERVED, "only {} % served\n{}", verdict.share, told());
    let least = if seconds >= LONG { JUDGED } else { 1 };
    assert!(verdict.judged >= least, "only {} % judged", verdict.judged);
}
