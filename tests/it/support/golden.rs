//! Compares outputs of commands with the recorded files in tests/golden, byte by byte. An output without a file is an error,
//! and so is a file without an output. With `UPDATE_GOLDEN=1`, the tests write the files instead, and remove files without an
//! output.
//!
//! For two boards (models of simulated hosts) all outputs are recorded, for 80 columns and, if the text differs, for 120
//! columns. For other boards, only the outputs in `RECORDED` are recorded, for 80 columns. The tests run the other commands
//! without a comparison.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The directories of tests/golden, each with its recorded outputs. `None` stands for all outputs.
const RECORDED: [(&str, Option<&[&str]>); 19] = [
    ("help", None),
    ("h200x8", None),
    ("h200x8/screens", None),
    ("h200x8/broken", None),
    ("h200x8/broken/screens", None),
    ("mixed", None),
    ("mixed/screens", None),
    ("mixed/broken", None),
    ("mixed/broken/screens", None),
    // The outputs in the manual, and the answers from which the manual's tables are made.
    (
        "tesla-p40",
        Some(&[
            "apply.txt",
            "check.txt",
            "clients.json",
            "doctor.txt",
            "drain.txt",
            "env.txt",
            "events.txt",
            "is-ready.txt",
            "list-gpus.json",
            "list.json",
            "metrics.txt",
            "probe.txt",
            "reload.txt",
            "run.txt",
            "slurm.txt",
            "status.json",
            "terminate.txt",
            "undrain.txt",
        ]),
    ),
    ("tesla-p40/screens", Some(&["clients.txt", "list.txt", "status.txt"])),
    // The outputs in the README, and the answers from which they are made.
    ("h200", Some(&["clients.json", "list-gpus.json", "list.json", "status.json"])),
    ("h200/screens", Some(&["clients.txt", "list.txt"])),
    // The GPUs of this board have different PCI domains, and each is near the CPUs of its superchip.
    ("gh200x4", Some(&["clients.json", "env.txt", "list-gpus.json", "list.json", "status.json"])),
    ("gh200x4/screens", Some(&["list-gpus-wide.txt", "list.txt", "status.txt"])),
    // This board's GPU uses the memory of the host. NVML does not report its memory.
    (
        "gb10",
        Some(&[
            "check.txt",
            "clients.json",
            "doctor.txt",
            "env.txt",
            "list-gpus.json",
            "list.json",
            "metrics.txt",
            "status.json",
        ]),
    ),
    ("gb10/screens", Some(&["clients.txt", "list-gpus.txt", "list.txt", "status.txt"])),
    // The only GPU of the board `h200` is lost.
    (
        "h200/broken",
        Some(&[
            "check.txt",
            "clients.json",
            "doctor.txt",
            "list-gpus.json",
            "list.json",
            "probe.txt",
            "status.json",
        ]),
    ),
    ("h200/broken/screens", Some(&["list.txt", "status.txt"])),
];

pub(crate) fn is_update() -> bool {
    std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| !value.is_empty())
}

pub(crate) fn directory(below: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(below)
}

/// Returns the directories that [`RECORDED`] does not name. No comparison reads the files in these directories.
pub(crate) fn unknown_directories() -> Vec<PathBuf> {
    let is_known = |path: &Path| RECORDED.iter().any(|(below, _)| directory(below).starts_with(path));
    let (mut left, mut unknown) = (vec![directory("")], Vec::new());
    while let Some(known) = left.pop() {
        let found = fs::read_dir(known).unwrap().map(|entry| entry.unwrap().path());
        let (inner, outer) = found.filter(|path| path.is_dir()).partition(|path| is_known(path));
        left.extend::<Vec<_>>(inner);
        unknown.extend::<Vec<_>>(outer);
    }
    unknown
}

/// A comparison of outputs with the files of one directory, and the differences so far.
pub(crate) struct Golden {
    below: String,
    /// The outputs that have a recorded file in the directory `below`. None if all outputs have a recorded file.
    listed: Option<&'static [&'static str]>,
    files: BTreeSet<String>,
    complaints: String,
}

impl Golden {
    pub(crate) fn new(below: &str) -> Self {
        let known = RECORDED.iter().find(|(known, _)| *known == below);
        let listed = known.map_or(Some(&[][..]), |(_, listed)| *listed);
        Self { below: below.to_owned(), listed, files: BTreeSet::new(), complaints: String::new() }
    }

    pub(crate) fn is_whole(&self) -> bool {
        self.listed.is_none()
    }

    pub(crate) fn hold(&mut self, file: &str, command: &[&str], output: &str) {
        if self.listed.is_some_and(|listed| !listed.contains(&file)) {
            return;
        }
        assert!(self.files.insert(file.to_owned()), "two cases for {}/{file}", self.below);
        let path = directory(&self.below).join(file);
        if is_update() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, output).unwrap();
        } else if !path.exists() {
            writeln!(self.complaints, "{} is missing, the output of {}", path.display(), command.join(" "))
                .unwrap();
        } else if fs::read_to_string(&path).unwrap() != output {
            let difference = diff(&path, output);
            writeln!(self.complaints, "{} prints something else:\n{difference}", command.join(" ")).unwrap();
        }
    }

    pub(crate) fn hold_both(&mut self, name: &str, command: &[&str], narrow: &str, wide: &str) {
        self.hold(&format!("{name}.txt"), command, narrow);
        if narrow != wide {
            self.hold(&format!("{name}.120.txt"), command, wide);
        }
    }

    /// Returns a text about all differences, and about all files without an output.
    pub(crate) fn finish(mut self) -> String {
        for listed in self.listed.unwrap_or_default() {
            assert!(self.files.contains(*listed), "{}/{listed} is listed, and no case prints it", self.below);
        }
        // A directory that `RECORDED` does not name need not exist, so its files are not read here. If it exists,
        // `unknown_directories` reports it.
        let known = self.is_whole() || !self.files.is_empty();
        for entry in known.then(|| fs::read_dir(directory(&self.below)).unwrap()).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() || self.files.contains(path.file_name().unwrap().to_str().unwrap()) {
                continue;
            }
            if is_update() {
                fs::remove_file(&path).unwrap();
            } else {
                writeln!(self.complaints, "{}: no output is recorded here", path.display()).unwrap();
            }
        }
        self.complaints
    }
}

fn diff(file: &Path, output: &str) -> String {
    let new = tempfile::NamedTempFile::new().unwrap();
    fs::write(new.path(), output).unwrap();
    let label = format!("golden {}", file.file_name().unwrap().to_string_lossy());
    let output = Command::new("diff")
        .args(["-u", "--label", &label, "--label", "printed now"])
        .args([file, new.path()])
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}
