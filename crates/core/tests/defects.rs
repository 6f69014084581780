//! Defects that were, or could be, in the core: each is put back in a copy, and some history must find it. So the histories
//! are known to reach the states that they are for.

// All of this is tests; clippy's own exception for tests sees only the functions that are marked as such.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The histories within which a defect must be found.
const HISTORIES: &str = "10000";

/// A defect: its name, its file, the text of today, the text that brings the defect back, and what does not hold then; empty if
/// several things do not, and any may be found first.
type Defect = (&'static str, &'static str, &'static str, &'static str, &'static str);

const DEFECTS: [Defect; 15] = [
    (
        "a GPU is given away that a control daemon on the way out still has",
        "lifecycle.rs",
        "runs_with || (starts",
        "false && runs_with || (starts",
        "",
    ),
    (
        "a GPU is given away that a control daemon is just started with",
        "lifecycle.rs",
        "runs_with || (starts",
        "runs_with || (false && starts",
        "one-has-a-gpu",
    ),
    (
        "the GPUs of the newest order count as the GPUs that the start under way was told",
        "lifecycle.rs",
        "is_some_and(|told| told.has(gpu)))",
        "is_some_and(|_| self.order.gpus.iter().any(|one| one == gpu)))",
        "",
    ),
    (
        "one that retires is ended with its clients",
        "lifecycle.rs",
        "Goal::Serve | Goal::Retire if self.watched => DaemonAct::Serve",
        "Goal::Retire if self.watched => DaemonAct::End(Permit::new(Cause::Disabled)),\n            \
         Goal::Serve if self.watched => DaemonAct::Serve",
        "work-is-safe",
    ),
    (
        "MPS is enabled again, and the end with clients goes on",
        "core.rs",
        "if demand.enabled || one.goal() == Goal::Serve {",
        "if one.goal() == Goal::Serve {",
        "work-is-safe",
    ),
    (
        "MPS is disabled, and whoever waited for clients is ended with them",
        "core.rs",
        "if demand.enabled || one.goal() == Goal::Serve {",
        "if true {",
        "work-is-safe",
    ),
    (
        "a compute mode is put back while a start sets it",
        "lifecycle.rs",
        "if modes_change => return None",
        "if modes_change && false => return None",
        "",
    ),
    (
        "a compute mode is put back while a control daemon has the GPU",
        "core.rs",
        "self.lifecycles.values().any(|one| one.keeps_mode(gpu))",
        "self.lifecycles.values().any(|one| one.goal() != Goal::Serve && one.keeps_mode(gpu))",
        "",
    ),
    (
        "the act under way sets a compute mode for an order of before, after it was put back",
        "lifecycle.rs",
        "|| (sets && still_sets())",
        "|| (false && sets && still_sets())",
        "modes-come-back",
    ),
    (
        "the GPUs that a control daemon runs with beyond its order are forgotten",
        "lifecycle.rs",
        "running.chain(self.order",
        "running.take(0).chain(self.order",
        "",
    ),
    (
        "one that could not be ended is forgotten, though it runs",
        "core.rs",
        "self.left.insert(id.clone(), written);",
        "let _ = written;",
        "modes-stay",
    ),
    (
        "one that the state file can't forget is taken over again and again",
        "lifecycle.rs",
        "written.filter(|_| !is_gone)",
        "written.filter(|_| !is_gone || true)",
        "nothing-spins",
    ),
    (
        "a pause that is over stays due while something else is waited for",
        "lifecycle.rs",
        "                self.phase = Phase::Open;\n                match self.choose",
        "                match self.choose",
        "nothing-spins",
    ),
    (
        "one that could not be ended with MPS is left alone for ever",
        "lifecycle.rs",
        "ActOutcome::Lives) if permit.cause() == Cause::Stop",
        "ActOutcome::Lives) if permit.cause() != Cause::Unused",
        "all-is-served-in-the-end",
    ),
    (
        "an act that failed before the stop counts as one that failed after it",
        "lifecycle.rs",
        "_ if is_stale => {}",
        "_ if is_stale && false => {}",
        "a-stop-ends-all",
    ),
];

/// A copy of the crate, which is no member of a workspace.
fn copy(to: &Path) {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    for folder in ["src", "tests/world"] {
        fs::create_dir_all(to.join(folder)).unwrap();
        for file in fs::read_dir(own.join(folder)).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), to.join(folder).join(file.file_name())).unwrap();
        }
    }
    fs::copy(own.join("tests/histories.rs"), to.join("tests/histories.rs")).unwrap();
    let manifest = "[workspace]\n[package]\nname = \"yunion-mps-core\"\nedition = \"2024\"\n[lib]\nname = \"mps_core\"\n\
                    [profile.dev]\nopt-level = 1\ndebug = false\n";
    fs::write(to.join("Cargo.toml"), manifest).unwrap();
}

/// Whether all promises hold in the crate in this folder, and the output of the histories.
fn try_histories(folder: &Path) -> (bool, String) {
    let tried = Command::new(env!("CARGO"))
        .args(["test", "--offline", "--quiet", "--test", "histories"])
        .current_dir(folder)
        .env("CARGO_TARGET_DIR", folder.join("target"))
        .env("HISTORIES", HISTORIES)
        .env_remove("MODEL_SECONDS")
        .env_remove("MODEL_SEED")
        .output()
        .unwrap();
    let output =
        [tried.stdout, tried.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    (tried.status.success(), output)
}

#[test]
fn each_defect_that_is_put_back_is_found() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("defects");
    let mut missed = Vec::new();
    for (name, file, today, defect, truth) in DEFECTS {
        copy(&folder);
        let path = folder.join("src").join(file);
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.matches(today).count(), 1, "{name}: {file} has not exactly one\n{today}");
        fs::write(&path, text.replace(today, defect)).unwrap();
        let (holds, output) = try_histories(&folder);
        let is_found = !holds && output.contains("MODEL_SEED=") && output.contains(truth);
        if !is_found {
            missed.push(format!("{name}: {}", output.lines().take(12).collect::<Vec<_>>().join("\n")));
        }
    }
    assert!(missed.is_empty(), "{} defects are not found:\n{}", missed.len(), missed.join("\n"));
}
