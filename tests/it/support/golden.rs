//! The files of tests/golden: recorded outputs, held byte for byte. An output without its file is an error, and so is a
//! file that is no output. With `UPDATE_GOLDEN=1` the files are written, and those that are no output removed.
//!
//! The outputs of two boards are all recorded, for 80 columns and, where that is another text, for 120. Of another board it
//! is what `RECORDED` lists, for 80 columns; its other outputs are only run.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The directories, and the files there; None for all outputs.
const RECORDED: [(&str, Option<&[&str]>); 15] = [
    ("help", None),
    ("h200x8", None),
    ("h200x8/screens", None),
    ("h200x8/broken", None),
    ("h200x8/broken/screens", None),
    ("mixed", None),
    ("mixed/screens", None),
    ("mixed/broken", None),
    ("mixed/broken/screens", None),
    // The outputs in the manual, with the answers that its tables are made of.
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
    // The outputs in the README, with the answers that they are made of.
    ("h200", Some(&["clients.json", "list-gpus.json", "list.json", "status.json"])),
    ("h200/screens", Some(&["clients.txt", "list.txt"])),
    // A host whose only GPU is lost.
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

/// The directories that no output goes to, which a test of one of the others would not see.
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

/// The outputs that belong to one directory, and what is wrong with them.
pub(crate) struct Golden {
    below: String,
    /// None for all outputs.
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

    /// Returns whether every output is recorded, at both widths.
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

    /// A text at 80 and at 120 columns.
    pub(crate) fn hold_both(&mut self, name: &str, command: &[&str], narrow: &str, wide: &str) {
        self.hold(&format!("{name}.txt"), command, narrow);
        if narrow != wide {
            self.hold(&format!("{name}.120.txt"), command, wide);
        }
    }

    /// Returns all that is wrong, with the files that are no output.
    pub(crate) fn finish(mut self) -> String {
        for listed in self.listed.unwrap_or_default() {
            assert!(self.files.contains(*listed), "{}/{listed} is listed, and no case prints it", self.below);
        }
        // The others are unknown directories.
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
