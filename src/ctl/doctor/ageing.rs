//! Whether systemd-tmpfiles will remove the directories, by the rules of tmpfiles.d(5).

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use glob::{MatchOptions, Pattern};

use super::facts::Facts;
use super::{Check, Outcome, warning};

pub(super) const CHECKS: &[Check] = &[("ageing by systemd-tmpfiles", ageing)];

/// A file in an earlier directory hides files of the same name in later ones.
const DIRECTORIES: [&str; 4] =
    ["/etc/tmpfiles.d", "/run/tmpfiles.d", "/usr/local/lib/tmpfiles.d", "/usr/lib/tmpfiles.d"];

fn ageing(facts: &Facts) -> Outcome {
    let rules = rules(facts);
    let of = |directory: PathBuf| {
        let Rule { file, kind, path, age } = aged_by(&directory, &rules)?;
        let (age, file) = (age.as_deref().unwrap_or_default(), file.display());
        let parent = directory.parent().unwrap_or(Path::new("/")).display();
        let directory = directory.display();
        Some(warning(
            "directory-ageing",
            &directory,
            format!(
                "systemd-tmpfiles removes what is older than {age} there ({file}: {kind} {path}), and a control daemon \
                 runs for months"
            ),
            format!(
                "put these two lines in /etc/tmpfiles.d/yunion-mps-local.conf: `X {parent}` and `x {directory}`"
            ),
        ))
    };
    Ok(facts.all_directories()?.filter_map(of).collect())
}

/// The parts of a line that matter for ageing.
#[derive(Debug, Clone)]
struct Rule {
    file: PathBuf,
    kind: char,
    path: String,
    age: Option<String>,
}

fn rules(facts: &Facts) -> Vec<Rule> {
    let mut files: BTreeMap<String, PathBuf> = BTreeMap::new();
    for directory in DIRECTORIES {
        for entry in fs::read_dir(facts.file(directory)).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.path().extension().is_some_and(|extension| extension == "conf") {
                files.entry(name).or_insert_with(|| Path::new(directory).join(entry.file_name()));
            }
        }
    }
    let read = |file: PathBuf| {
        // A link to /dev/null hides other files and contains nothing. Below another root it must not lead out.
        let text = fs::read_to_string(facts.file(&file)).unwrap_or_default();
        text.lines().filter_map(|line| rule(&file, line)).collect::<Vec<_>>()
    };
    files.into_values().flat_map(read).collect()
}

fn rule(file: &Path, line: &str) -> Option<Rule> {
    let line = line.trim();
    if line.starts_with('#') {
        return None;
    }
    let mut fields = line.split_ascii_whitespace();
    let (kind, path) = (fields.next()?, fields.next()?);
    // A line for boot only.
    if kind.contains('!') {
        return None;
    }
    let age = fields.nth(3).filter(|age| *age != "-").map(str::to_owned);
    let kind = kind.chars().next()?;
    let path = path.trim_matches(['"', '\'']);
    let path = if path.len() > 1 { path.trim_end_matches('/') } else { path };
    Some(Rule { file: file.to_owned(), kind, path: path.to_owned(), age })
}

/// The line by which the contents of a directory are removed. From the root down, each line that fits replaces the line
/// above it.
fn aged_by<'r>(directory: &Path, rules: &'r [Rule]) -> Option<&'r Rule> {
    let mut way: Vec<&Path> = directory.ancestors().collect();
    way.reverse();
    let mut ageing: Option<&Rule> = None;
    for place in way {
        for rule in rules.iter().filter(|rule| rule.fits(place)) {
            match rule.kind {
                'x' => return None,
                // Its own age, or else the age of the line above it.
                'X' => ageing = rule.age.as_ref().map(|_| rule).or(ageing),
                'd' | 'D' | 'e' | 'v' | 'q' | 'Q' | 'C' => ageing = rule.age.as_ref().map(|_| rule),
                // Other lines create or change files, and have no effect on ageing.
                _ => {}
            }
        }
    }
    ageing
}

impl Rule {
    fn fits(&self, place: &Path) -> bool {
        if !matches!(self.kind, 'x' | 'X' | 'e') {
            return Path::new(&self.path) == place;
        }
        let options = MatchOptions { require_literal_separator: true, ..MatchOptions::new() };
        Pattern::new(&self.path).is_ok_and(|pattern| pattern.matches_path_with(place, options))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn aged(directory: &str, lines: &[&str]) -> Option<String> {
        let rules: Vec<Rule> = lines.iter().filter_map(|line| rule(Path::new("a.conf"), line)).collect();
        aged_by(Path::new(directory), &rules).map(|rule| rule.path.clone())
    }

    #[test]
    fn lines_take_over_from_those_above_them() {
        const TMP: &str = "q /tmp 1777 root root 10d";
        let pipe = "/tmp/nvidia-mps/pipe";
        assert_eq!(aged(pipe, &[]), None);
        assert_eq!(aged(pipe, &[TMP]).as_deref(), Some("/tmp"));
        assert_eq!(aged("/run/pipe", &[TMP]), None);
        assert_eq!(aged(pipe, &["D /tmp 1777 root root -"]), None);
        assert_eq!(aged(pipe, &["D! /tmp 1777 root root 10d", "# q /tmp 1777 root root 10d", "q"]), None);
        // Only the directory itself is spared by X, its contents are not.
        assert_eq!(aged(pipe, &[TMP, "X /tmp/nvidia-mps"]).as_deref(), Some("/tmp"));
        assert_eq!(aged(pipe, &[TMP, "X /tmp/nvidia-mps", "x /tmp/nvidia-mps/pipe"]), None);
        assert_eq!(aged(pipe, &[TMP, "x /tmp/nvidia-mps"]), None);
        assert_eq!(aged(pipe, &[TMP, "x /tmp/nvidia-*"]), None);
        assert_eq!(aged(pipe, &[TMP, "x /tmp/nvidia-mps/pipe/*"]).as_deref(), Some("/tmp"));
        assert_eq!(aged(pipe, &[TMP, "x /tmp/*pipe"]).as_deref(), Some("/tmp"));
        assert_eq!(aged(pipe, &[TMP, "d /tmp/nvidia-mps 0755 root root -"]), None);
        assert_eq!(aged(pipe, &["e /tmp/nvidia-mps/ - - - 1h"]).as_deref(), Some("/tmp/nvidia-mps"));
    }

    /// The shipped lines together with the lines of a common distribution.
    #[test]
    fn the_shipped_lines_spare_the_defaults() {
        let mut lines: Vec<&str> =
            include_str!("../../../systemd/yunion-mps-daemon.tmpfiles.conf").lines().collect();
        lines.push("q /tmp 1777 root root 10d");
        assert_eq!(aged("/tmp/nvidia-mps/pipe", &lines), None);
        assert_eq!(aged("/tmp/nvidia-mps/log", &lines), None);
        assert_eq!(aged("/tmp/nvidia-mps-other", &lines).as_deref(), Some("/tmp"));
    }
}
