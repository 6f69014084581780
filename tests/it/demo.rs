//! Tests that `make demo` prints at most one screen, and leaves no process and no file.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::Signal;

use crate::support::host::{binaries, programs_with, signal_pid, text};
use crate::support::processes::processes_with;

const COLUMNS: usize = 80;
/// The rows of a terminal, without the command line and the next prompt.
const ROWS: usize = 40 - 2;

fn demo(board: &str, programs: &Path) -> Command {
    let mut demo = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/demo.sh"));
    demo.arg(board).env("BINARIES", programs).env_remove("RELEASE");
    demo
}

fn shown(board: &str) -> Vec<String> {
    let output = demo(board, &binaries()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let screen = String::from_utf8(output.stdout).unwrap();
    assert!(screen.lines().count() <= ROWS, "{screen}");
    assert!(screen.lines().all(|line| line.chars().count() <= COLUMNS), "{screen}");
    screen.lines().map(str::to_owned).collect()
}

fn with<'s>(screen: &'s [String], words: &str) -> Vec<&'s str> {
    screen.iter().map(String::as_str).filter(|line| line.starts_with(words)).collect()
}

#[test]
fn an_h200_shows_every_step() {
    let screen = shown("h200");
    for step in [
        "1. host.conf says enable_cuda_mps: true, ",
        "2. Compute mode of 00:06.0: Default -> Exclusive_Process.",
        "3. A program gets the memory of its slice, 35942 MiB, and no more:",
        "alloc stopped at 35584 MiB: out of memory",
        "4. With \"isolation: slice\" in the device file, a fault stays in its slice:",
        "5. kill -9 of the service loses no client",
        "6. A drained slice takes no new program",
        "00:06.0-1 is drained",
        "yunion-mpsctl: 00:06.0-1 is drained for new clients",
        "7. The service has stopped: compute mode Default again",
        "demo: h200: every check held, in ",
    ] {
        assert_eq!(with(&screen, step).len(), 1, "{step}: {screen:#?}");
    }
    let slices = with(&screen, "00:06.0-");
    let listed: Vec<&&str> = slices.iter().filter(|line| line.ends_with("  served")).collect();
    assert_eq!(listed.len(), 4, "{screen:#?}");
}

#[test]
fn the_other_boards_fit_the_screen_too() {
    let boards = ["tesla-p40", "h200x8", "mixed", "gh200x4", "gb10"];
    let demos = boards.map(|board| std::thread::spawn(move || shown(board)));
    let [p40, ..] = demos.map(|demo| demo.join().unwrap());
    let held = "3. MPS holds programs to the memory of their slice from Volta on, but not here:";
    assert_eq!(with(&p40, held).len(), 1, "{p40:#?}");
    assert_eq!(with(&p40, "4. One fault ends all programs of a GPU before Volta.").len(), 1, "{p40:#?}");
}

#[test]
fn a_limit_that_does_not_hold_fails_the_demo() {
    let out = tempfile::tempdir().unwrap();
    let programs = programs_with(out.path(), "cuda-client", "#!/bin/sh\necho alloc ok 71884 MiB\n");
    let output = demo("h200", &programs).output().unwrap();
    let said = "demo: FAILED: yunion-mpsctl run 00:06.0-0 -- cuda-client alloc 71884: exit status 0";
    assert!(output.status.code() == Some(1) && text(&output).contains(said), "{}", text(&output));
}

/// Returns the directory of a running demo, from the variable `YUNION_MPS_DEMO` of a process that the demo has started.
fn directory(variable: &str) -> PathBuf {
    let environments =
        processes_with(variable).into_iter().map(|pid| fs::read(format!("/proc/{pid}/environ")));
    let text = environments.flatten().map(|text| String::from_utf8(text).unwrap()).collect::<String>();
    let mark = text.split('\0').find_map(|one| one.strip_prefix("YUNION_MPS_DEMO="));
    PathBuf::from(mark.unwrap_or_else(|| panic!("no mark in {text}")))
}

#[test]
fn an_interrupted_demo_leaves_nothing() {
    let own = format!("TEST_OF_DEMO={}", std::process::id());
    let (name, value) = own.split_once('=').unwrap();
    let mut demo = demo("h200", &binaries());
    let mut demo = demo.env(name, value).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(demo.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("5. ")), "no fifth step");
    let directory = directory(&own);
    assert!(directory.join("host").exists());
    signal_pid(demo.id(), Signal::TERM);
    // The test reads the rest of the output. Otherwise a closed pipe could end the demo before the signal does.
    lines.for_each(drop);
    assert_eq!(demo.wait().unwrap().code(), Some(143));
    assert_eq!(processes_with(&own), Vec::<u32>::new());
    assert!(!directory.exists(), "{} is left", directory.display());
}
