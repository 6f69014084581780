//! Random numbers for tests. A test that fails prints the seed, with which the same numbers can be made again.

use std::io::Write;
use std::time::Duration;

/// A generator of random numbers (`splitmix64`).
pub(crate) struct Random(u64);

impl Random {
    /// Starts with the seed in the variable `FAULT_SEED`, or with a new seed. If the test fails, the seed is printed.
    pub(crate) fn seeded(test: &str) -> (Self, Seed) {
        Self::seeded_by("FAULT_SEED", test)
    }

    pub(crate) fn seeded_by(variable: &'static str, test: &str) -> (Self, Seed) {
        let seed = std::env::var(variable).ok();
        let seed = seed.map(|seed| seed.parse().unwrap_or_else(|e| panic!("{variable}={seed}: {e}")));
        let seed = seed.unwrap_or_else(|| {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            u64::from(now.subsec_nanos()) << 16 | u64::from(std::process::id() & 0xffff)
        });
        (Self(seed), Seed { test: test.to_owned(), variable, seed })
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    pub(crate) fn millis(&mut self, bound: u64) -> Duration {
        Duration::from_micros(self.below(bound * 1000))
    }
}

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
