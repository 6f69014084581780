//! Causes in a few minutes the events that happen to a host in hours. `make soak` runs this test.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::bystander::Bystander;
use crate::support::host::{Host, control_pid};
use crate::support::processes::{control_daemons, launchers};
use crate::support::random::Random;
use crate::support::wait::wait_for;

/// The memory in KiB by which the service may grow between the middle and the end of the test.
const GROWTH_KIB: u64 = 2048;

#[derive(Debug, Clone, Copy)]
struct Holdings {
    rss_kib: u64,
    fds: usize,
    threads: u64,
}

impl Holdings {
    fn of(pid: u32) -> Self {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let value = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        };
        let fds = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
        Self { rss_kib: value("VmRSS:"), fds, threads: value("Threads:") }
    }

    /// Waits until the service is idle and has no extra threads, and returns its resources.
    fn at_rest(host: &Host) -> Self {
        let pid = host.pid();
        let mut last = Self::of(pid);
        let mut since = Instant::now();
        wait_for("a daemon at rest", || {
            let now = Self::of(pid);
            if (now.fds, now.threads) != (last.fds, last.threads) {
                (last, since) = (now, Instant::now());
            }
            // tokio ends a thread that has been idle for 10 s.
            (since.elapsed() > Duration::from_secs(11)).then_some(now)
        })
    }
}

/// A host, its clients, and the number of events that the test has caused, by kind.
struct Life {
    host: Host,
    pipe: PathBuf,
    random: Random,
    bystanders: Vec<Bystander>,
    happened: BTreeMap<&'static str, u32>,
}

impl Life {
    fn wait_until_ready(&self) {
        self.host.wait_for_state("ready");
        let running = control_daemons(&self.host);
        assert_eq!(running.len(), 1, "{running:?}");
        assert_eq!(launchers(&self.host), [0; 0]);
    }

    fn meet_clients(&mut self) {
        self.bystanders.retain_mut(|bystander| !bystander.done());
        while self.bystanders.len() < 4 {
            let time = Duration::from_millis(200) + self.random.millis(5000);
            self.bystanders.push(Bystander::start(&self.host, &self.pipe, time));
            *self.happened.entry("clients").or_default() += 1;
        }
    }

    fn reload(&mut self) {
        let slices = 1 + self.random.below(10);
        self.host
            .devices(&[&format!("path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: {slices}")]);
        self.host.signal(Signal::HUP);
        wait_for("the new slices", || {
            let listed = self.host.list();
            let healthy = listed.iter().all(|device| device["healthy"] == true);
            (healthy && listed.len() as u64 == slices).then_some(())
        });
        *self.happened.entry("reloads").or_default() += 1;
    }

    /// A fault ends every client. So the test first waits for the end of the clients that must not be lost.
    fn fault(&mut self) {
        self.bystanders.drain(..).for_each(Bystander::wait);
        self.host.fault();
        *self.happened.entry("faults").or_default() += 1;
    }

    fn kill(&mut self) {
        let before = control_pid(&self.host.wait_for_state("ready"));
        self.host.signal(Signal::KILL);
        self.host.ended();
        self.host.start();
        let after = control_pid(&self.host.wait_for_state("ready"));
        assert_eq!(before, after);
        *self.happened.entry("kills").or_default() += 1;
    }

    fn live(&mut self, until: Instant, kills: bool) {
        while Instant::now() < until {
            self.wait_until_ready();
            self.meet_clients();
            match self.random.below(if kills { 10 } else { 9 }) {
                0..5 => self.reload(),
                5 => self.fault(),
                6..9 => std::thread::sleep(self.random.millis(200)),
                _ => self.kill(),
            }
        }
    }
}

/// For the number of seconds in the variable `SOAK_SECONDS`, by default 600, clients come and go, configurations change, faults
/// happen, and the service is killed. No client may be lost. In the second half the service is not killed. At the end of this
/// half, the service has no more open files and threads than at its beginning, and hardly more memory.
#[test]
#[ignore = "takes ten minutes: make soak"]
fn soak() {
    let seconds =
        std::env::var("SOAK_SECONDS").map_or(600, |text| text.parse().expect("SOAK_SECONDS is a number"));
    let (random, _seed) = Random::seeded("soak");
    let host = Host::serving("h200");
    let pipe = host.path("mps/pipe");
    let mut life = Life { host, pipe, random, bystanders: Vec::new(), happened: BTreeMap::new() };
    let say = |what: &str, holds: Holdings, happened: &BTreeMap<&str, u32>| {
        let Holdings { rss_kib, fds, threads } = holds;
        let _ = writeln!(
            std::io::stdout(),
            "{what:>6}: RSS {rss_kib} KiB, {fds} files, {threads} threads; {happened:?}"
        );
    };
    say("start", Holdings::of(life.host.pid()), &life.happened);
    let tenth = Duration::from_secs(seconds) / 10;
    let mut settled = None;
    for part in 1..=10 {
        // In the second half, the same process runs throughout. So its resources can be compared.
        life.live(Instant::now() + tenth, part <= 4);
        if part == 5 || part == 10 {
            life.bystanders.drain(..).for_each(Bystander::wait);
            life.wait_until_ready();
            let holds = Holdings::at_rest(&life.host);
            say(&format!("{part}0 %"), holds, &life.happened);
            let Some(before) = settled.replace(holds) else { continue };
            assert!(holds.fds <= before.fds, "files: {} became {}", before.fds, holds.fds);
            assert!(holds.threads <= before.threads, "threads: {} became {}", before.threads, holds.threads);
            let limit = before.rss_kib + GROWTH_KIB;
            assert!(holds.rss_kib <= limit, "RSS: {} KiB became {} KiB", before.rss_kib, holds.rss_kib);
        } else {
            say(&format!("{part}0 %"), Holdings::of(life.host.pid()), &life.happened);
        }
    }
    assert_eq!(life.host.stop().code(), Some(0));
    life.host.nothing_runs();
    assert_eq!(life.host.compute_mode(0), "Default");
}
