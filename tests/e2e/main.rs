//! Tests of the installed service on a booted systemd, as root. The output names each check.
//!
//! These tests do not use libtest. With libtest, tests can't share a machine and shut it down after the last test.

// `clippy.toml` allows `unwrap` and the like only in functions marked as tests. The helper functions of this program also call
// them.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    clippy::print_stdout
)]
// These lints ask for changes that would make the tests harder to read, or that the D-Bus interface does not allow.
#![allow(
    clippy::assigning_clones,
    clippy::float_cmp,
    clippy::items_after_statements,
    clippy::needless_for_each,
    clippy::struct_excessive_bools,
    clippy::unused_self
)]

mod adoption;
mod asker;
mod containers;
#[path = "../support/fetched.rs"]
mod fetched;
mod kubernetes;
mod machine;
mod package;
mod people;
mod readme;
mod scope;
mod service;
#[path = "../support/skip.rs"]
mod skip;
mod slurm;
#[path = "../support/wait.rs"]
mod wait;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use machine::{Hierarchy, Machine, Stage};

/// The number of machines that run at the same time. Several machines save time even on one CPU, since a machine mostly waits.
const MACHINES: usize = 2;

/// A check with its name. Other checks may have used the machine before.
type Check = (&'static str, fn(&mut Machine));

struct Group {
    name: &'static str,
    hierarchy: Hierarchy,
    stage: fn() -> Stage,
    prepare: fn(&Machine),
    checks: &'static [Check],
}

// The longest groups come first, so that no long group runs alone at the end.
const GROUPS: &[Group] = &[
    // Podman and Docker start containers on a host with the service from the deb.
    Group {
        name: "containers",
        hierarchy: Hierarchy::Unified,
        stage: containers::stage,
        prepare: package::installed,
        checks: containers::CHECKS,
    },
    Group {
        name: "deb",
        hierarchy: Hierarchy::Unified,
        stage: package::stage_upgrades,
        prepare: |_| (),
        checks: package::CHECKS,
    },
    Group {
        name: "scope",
        hierarchy: Hierarchy::Unified,
        stage: scope::stage,
        prepare: |_| (),
        checks: scope::CHECKS,
    },
    Group {
        name: "scope_legacy",
        hierarchy: Hierarchy::Legacy,
        stage: scope::stage,
        prepare: |_| (),
        checks: scope::CHECKS_LEGACY,
    },
    Group {
        name: "rpm",
        hierarchy: Hierarchy::Unified,
        stage: package::stage_rpm,
        prepare: |_| (),
        checks: package::RPM_CHECKS,
    },
    Group {
        name: "service",
        hierarchy: Hierarchy::Unified,
        stage: package::stage,
        prepare: package::installed,
        checks: service::CHECKS,
    },
    Group {
        name: "people",
        hierarchy: Hierarchy::Unified,
        stage: package::stage,
        prepare: package::installed,
        checks: people::CHECKS,
    },
    // The test types the commands of the README on a new system, like a user who has read nothing else.
    Group {
        name: "readme",
        hierarchy: Hierarchy::Unified,
        stage: package::stage,
        prepare: readme::on_simulated_hardware,
        checks: readme::CHECKS,
    },
    Group {
        name: "adoption",
        hierarchy: Hierarchy::Unified,
        stage: package::stage,
        prepare: package::installed,
        checks: adoption::CHECKS,
    },
    Group {
        name: "containers_legacy",
        hierarchy: Hierarchy::Legacy,
        stage: package::stage,
        prepare: containers::installed_legacy,
        checks: containers::CHECKS_LEGACY,
    },
    Group {
        name: "kubernetes",
        hierarchy: Hierarchy::Unified,
        stage: kubernetes::stage,
        prepare: package::installed,
        checks: kubernetes::CHECKS,
    },
    Group {
        name: "slurm",
        hierarchy: Hierarchy::Unified,
        stage: package::stage,
        prepare: slurm::prepared,
        checks: slurm::CHECKS,
    },
    Group {
        name: "soak",
        hierarchy: Hierarchy::Unified,
        stage: package::stage,
        prepare: slurm::prepared,
        checks: slurm::SOAK_CHECKS,
    },
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|word| word == asker::ARGUMENT) {
        return asker::run();
    }
    // This program takes arguments like libtest: a word selects the checks with this word in their names, and options are
    // ignored. The checks of `make soak` run only if a word selects them.
    let wanted = |name: &str| {
        let mut words = arguments.iter().filter(|word| !word.starts_with("--")).peekable();
        words.peek().is_none() && !name.starts_with("soak::")
            || words.any(|word| name.contains(word.as_str()))
    };
    let selected: Vec<(&Group, Vec<(String, Check)>)> = GROUPS
        .iter()
        .map(|group| {
            let named = group.checks.iter().map(|check| (format!("{}::{}", group.name, check.0), *check));
            (group, named.filter(|(name, _)| wanted(name)).collect())
        })
        .collect();
    if arguments.iter().any(|word| word == "--list") {
        for (name, _) in selected.iter().flat_map(|(_, checks)| checks) {
            println!("{name}: test");
        }
        return ExitCode::SUCCESS;
    }
    if selected.iter().all(|(_, checks)| checks.is_empty()) {
        return ExitCode::SUCCESS;
    }
    if !skip::root_or_skip("the tests on a booted systemd") {
        return ExitCode::SUCCESS;
    }
    let begun = Instant::now();
    let groups =
        Mutex::new(selected.into_iter().filter(|(group, checks)| !checks.is_empty() && can_run(group)));
    let outcome = Mutex::new((0, Vec::new()));
    let next = || groups.lock().unwrap().next();
    let run_on = || {
        while let Some((group, checks)) = next() {
            let (good, bad) = run(group, checks);
            let mut outcome = outcome.lock().unwrap();
            outcome.0 += good;
            outcome.1.extend(bad);
        }
    };
    thread::scope(|scope| {
        for _ in 0..MACHINES {
            scope.spawn(run_on);
        }
    });
    let seconds = begun.elapsed().as_secs_f64();
    let (passed, failed) = outcome.into_inner().unwrap();
    println!("\ne2e: {passed} passed; {} failed; finished in {seconds:.1} s", failed.len());
    for name in &failed {
        println!("    {name}");
    }
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Returns true if this host and its machines have all that the group needs. Otherwise reports the group as skipped.
fn can_run(group: &Group) -> bool {
    let missing = if !group.hierarchy.available() {
        Some("no legacy control group hierarchy on this host, or a systemd that knows none")
    } else if ["slurm", "soak"].contains(&group.name) && !machine::has("/usr/sbin/slurmctld") {
        Some("the machine has no Slurm")
    } else {
        None
    };
    if let Some(reason) = missing {
        skip::skip(group.name, reason);
    }
    missing.is_none()
}

fn run(group: &Group, checks: Vec<(String, Check)>) -> (usize, Vec<String>) {
    let begun = Instant::now();
    let booted = catch_unwind(|| {
        let machine = Machine::boot(&(group.stage)(), group.hierarchy);
        (group.prepare)(&machine);
        machine
    });
    let Ok(mut machine) = booted else {
        println!("test {}: the machine ... FAILED", group.name);
        return (0, vec![format!("{}: the machine", group.name)]);
    };
    println!("\n{}: a machine is up after {:.1} s", group.name, begun.elapsed().as_secs_f64());
    let (mut passed, mut failed) = (0, Vec::new());
    for (name, (_, check)) in checks {
        let begun = Instant::now();
        let held = catch_unwind(AssertUnwindSafe(|| check(&mut machine))).is_ok();
        let seconds = begun.elapsed().as_secs_f64();
        if held {
            println!("test {name} ... ok ({seconds:.1} s)");
            passed += 1;
        } else {
            println!("test {name} ... FAILED ({seconds:.1} s)");
            let journal =
                machine.run(&["journalctl", "--lines=50", "--no-hostname", "--output=short-monotonic"]);
            eprintln!("--- the end of the machine's journal\n{}---", machine::text(&journal.stdout));
            failed.push(name);
        }
    }
    (passed, failed)
}
