//! Random histories of a simulated host, from seeds. Each promise in `tests/world/src/truths.rs` must hold in each history.
//!
//! The environment variable `HISTORIES` is the number of histories, and `MODEL_SEED` the first seed. With `MODEL_SECONDS`
//! instead of `HISTORIES`, the test tries histories for this many seconds. If a history fails, the test looks for a shorter
//! history that also fails, and prints the seed and this shorter history as text. With `SHORTEST=0` the test prints the whole
//! history.

// clippy.toml allows `unwrap` and the like only in functions marked as tests. The helper functions of this file are not
// marked as tests, and call `unwrap` too.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout
)]

use std::any::Any;
use std::collections::BTreeSet;
use std::num::NonZero;
use std::panic::{self, AssertUnwindSafe};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use core_world::scripted::{DEEDS, SCRIPTS, Script};
use core_world::{Mood, World, mixed};

/// The number of histories if neither `HISTORIES` nor `MODEL_SECONDS` is set, as in `make test`.
const HISTORIES: u64 = 50_000;

/// The first seed if `MODEL_SEED` is not set.
const SEED: u64 = 1;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// Returns the steps of the history with this seed: between 100 and 500 random numbers.
fn history(seed: u64) -> Vec<u64> {
    let length = 100 + mixed(seed) % 401;
    (1..=length).map(|step| mixed(seed.wrapping_mul(0x0100_0000_01b3).wrapping_add(step))).collect()
}

/// Returns the mood of the history with this seed. The mood decides which kinds of events are frequent.
fn mood(seed: u64) -> Mood {
    match seed % 16 {
        2 | 6 | 14 => Mood::Tenants,
        0 | 4 | 8 | 12 => Mood::Everything,
        1 | 5 | 9 | 13 => Mood::Orders,
        _ => Mood::Faults,
    }
}

/// Plays a history. The error has the broken promise, and the history as text if `tells` is true.
fn play(steps: &[u64], mood: Mood, tells: bool) -> Result<(), (String, String)> {
    let (mut world, mut before) = (World::new(mood, tells), String::new());
    let played = panic::catch_unwind(AssertUnwindSafe(|| {
        for step in steps {
            if tells {
                before = world.knowledge();
            }
            world.step(*step);
            world.check();
        }
        world.check_ready_comes();
        world.check_all_is_served_in_the_end();
    }));
    played.map_err(|why| (words(&*why), format!("{}before the last step: {before}", world.story())))
}

fn words(why: &(dyn Any + Send)) -> String {
    let text = why.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| why.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "a panic without words".to_owned())
}

/// Shortens a failing history: removes steps as long as the history still fails.
fn shortest(mut steps: Vec<u64>, mood: Mood) -> Vec<u64> {
    let mut width = steps.len() / 2;
    while width > 0 {
        let mut begin = 0;
        while begin < steps.len() {
            let end = (begin + width).min(steps.len());
            let fewer: Vec<u64> = steps[..begin].iter().chain(&steps[end..]).copied().collect();
            if play(&fewer, mood, false).is_err() {
                steps = fewer;
            } else {
                begin = end;
            }
        }
        width = if width == 1 { 0 } else { width.div_ceil(2) };
    }
    steps
}

fn story(seed: u64) -> String {
    let (mut steps, mood) = (history(seed), mood(seed));
    if number("SHORTEST") != Some(0) {
        steps = shortest(steps, mood);
    }
    let (why, story) = play(&steps, mood, true).unwrap_err();
    format!("{why}\n{} steps:\n{story}", steps.len())
}

/// The promises hold in the scripts that `tests/it/histories.rs` also plays on a simulated host with real programs. Each kind
/// of step occurs in these scripts.
#[test]
fn scripts_try_every_kind_of_deed() {
    let play = |seed| {
        let mut script = Script::new(seed, true);
        let kinds = (0..DEEDS).map(|_| {
            let deed = script.choose();
            script.play(&deed);
            let seen = script.seen();
            let is_served = |gpu| seen.daemons.values().any(|one| one.gpus.contains(gpu));
            assert!(seen.clients.values().all(is_served), "{seen}{}", script.story());
            format!("{deed:?}").split(|letter: char| !letter.is_alphabetic()).next().unwrap().to_owned()
        });
        kinds.collect::<BTreeSet<String>>()
    };
    let played = panic::catch_unwind(|| (1..=SCRIPTS).flat_map(play).collect::<BTreeSet<String>>());
    let kinds =
        played.map_err(|why| words(&*why)).map(|kinds| kinds.into_iter().collect::<Vec<_>>().join(" "));
    let all = "Comes Disable Drain Fault Force KillControlDaemon KillServer KillService Leaves Reload StartService StopService";
    assert_eq!(kinds.as_deref(), Ok(all));
}

#[test]
fn what_must_hold_holds_in_every_history() {
    let first = number("MODEL_SEED").unwrap_or(SEED);
    let until = number("MODEL_SECONDS").map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let most = number("HISTORIES").unwrap_or(if until.is_some() { u64::MAX } else { HISTORIES });
    let (next, failed) = (AtomicU64::new(0), OnceLock::new());
    // Histories may fail on several threads, and the default panic hook would print each failure. The test prints only one
    // failure at the end.
    panic::set_hook(Box::new(|_| {}));
    let try_on = || {
        while failed.get().is_none() && until.is_none_or(|until| Instant::now() < until) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= most {
                break;
            }
            let seed = first.wrapping_add(number);
            if play(&history(seed), mood(seed), false).is_err() {
                let _ = failed.set(seed);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(try_on);
        }
    });
    let failed = failed.get().map(|seed| (seed, story(*seed)));
    let _ = panic::take_hook();
    if let Some((seed, story)) = failed {
        panic!("MODEL_SEED={seed}: {story}");
    }
    println!("{} histories", next.load(Ordering::Relaxed).min(most));
}
