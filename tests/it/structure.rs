//! Checks the rules for source files. No module uses a module on its own floor or above, and no files use each other in a
//! circle. Some names occur only in certain files. The table in each crate's `lib.rs` gives each module a floor.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;

use regex::Regex;

/// The folders of the product's crates. Cargo makes sure that a crate uses only crates that come before it in this array.
const CRATES: [&str; 5] =
    ["crates/core/src", "crates/common/src", "src", "crates/mpsctl/src", "crates/device-plugin/src"];

/// Names that only a few files may use: each name, with the first parts of the paths of these files.
const HOMES: [(&str, &[&str]); 21] = [
    ("nvml_wrapper", &["crates/common/src/host/nvml/"]),
    ("serde_yaml", &["crates/common/src/config/"]),
    ("tempfile", &["crates/common/src/whole_file.rs"]),
    (
        "zbus",
        &[
            "src/dbus/",
            "crates/common/src/bus/",
            "crates/common/src/host/systemd.rs",
            "crates/common/src/host/variant.rs",
        ],
    ),
    (
        "sd_notify",
        &[
            "src/daemon/service_manager.rs",
            "crates/common/src/host/systemd.rs",
            "crates/device-plugin/src/plugin.rs",
        ],
    ),
    ("cudarc", &["crates/mpsctl/src/probe/"]),
    ("clap_complete", &["crates/mpsctl/src/complete.rs"]),
    ("comfy_table", &["crates/mpsctl/src/show/table.rs"]),
    ("ratatui", &["crates/mpsctl/src/watch/top/"]),
    ("crossterm", &["crates/mpsctl/src/watch/top/"]),
    ("tracing_journald", &["src/daemon/logging.rs", "crates/device-plugin/src/logging.rs"]),
    (
        "tonic::",
        &[
            "crates/device-plugin/src/allocation.rs",
            "crates/device-plugin/src/codec.rs",
            "crates/device-plugin/src/kubelet.rs",
            "crates/device-plugin/src/resource.rs",
        ],
    ),
    ("prost", &["crates/device-plugin/src/"]),
    ("message_id", &["src/message.rs", "src/daemon/logging.rs"]),
    ("/proc/", &["crates/common/src/host/proc.rs"]),
    ("(7, 0)", &["crates/common/src/host/driver.rs"]),
    ("multiuser-server", &["crates/common/src/host/driver.rs"]),
    ("\"-f\"", &["crates/common/src/host/driver.rs"]),
    ("Unknown command", &["crates/common/src/host/driver.rs"]),
    ("Cannot find MPS", &["crates/common/src/host/driver.rs"]),
    ("unsafe {", &["crates/mpsctl/src/probe/"]),
];

struct Source {
    path: String,
    /// The module path in the crate, such as `["host", "gpu"]`, or empty for the root of the crate.
    module: Vec<String>,
    text: String,
}

struct Crate {
    sources: Vec<Source>,
    /// The floor of each module, from the table in `lib.rs`.
    floors: BTreeMap<String, u32>,
}

impl Source {
    fn new(folder: &str, below: &str, text: String) -> Self {
        let module = below.strip_suffix(".rs").unwrap().split('/');
        let module =
            module.filter(|part| !["lib", "main", "mod"].contains(part)).map(str::to_owned).collect();
        Self { path: format!("{folder}/{below}"), module, text }
    }

    /// Returns the lines of code with their numbers, without comments and tests.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self.text.lines().enumerate().take_while(|(_, line)| !line.starts_with("#[cfg(test)]"));
        lines.filter(|(_, line)| !line.trim_start().starts_with("//")).map(|(index, line)| (index + 1, line))
    }
}

impl Crate {
    fn new(sources: Vec<Source>) -> Self {
        let root = sources.iter().find(|source| source.path.ends_with("lib.rs")).unwrap();
        let row = Regex::new(r"(?m)^//! \| (\d+) \| (.*?) \|").unwrap();
        let name = Regex::new("`(\\w+)`").unwrap();
        let floors = row.captures_iter(&root.text).flat_map(|row| {
            let floor = row[1].parse().unwrap();
            name.captures_iter(row.get(2).unwrap().as_str()).map(move |name| (name[1].to_owned(), floor))
        });
        let floors = floors.collect();
        Self { sources, floors }
    }

    fn read(folder: &str) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let mut sources = Vec::new();
        collect(folder, &root, &root, &mut sources);
        let least = if ["crates/core/src", "crates/device-plugin/src"].contains(&folder) { 5 } else { 20 };
        assert!(sources.len() > least, "{} sources in {folder}", sources.len());
        Self::new(sources)
    }

    /// Returns the module that a path in the file `from` leads to: `crate::host::gpu::Gpu` leads to `["host", "gpu"]`. Returns
    /// None for a path into another crate.
    fn target(&self, from: &Source, path: &str) -> Option<Vec<String>> {
        let mut parts = path.split("::").peekable();
        let mut place = match *parts.peek()? {
            "crate" => Vec::new(),
            "self" | "super" => from.module.clone(),
            child => {
                let mut place = from.module.clone();
                place.push(child.to_owned());
                if !self.has(&place) {
                    return None;
                }
                parts.next();
                place
            }
        };
        for part in parts {
            match part {
                "crate" | "self" => {}
                "super" => _ = place.pop(),
                part => {
                    place.push(part.to_owned());
                    if !self.has(&place) {
                        place.pop();
                        break;
                    }
                }
            }
        }
        Some(place)
    }

    fn has(&self, place: &[String]) -> bool {
        self.sources.iter().any(|source| source.module == place)
    }

    /// Returns the files that each file uses, each with the number of a line that uses it. A use of a module that contains the
    /// file itself does not count.
    fn uses(&self) -> BTreeMap<&[String], BTreeMap<Vec<String>, usize>> {
        let uses = self.sources.iter().filter(|source| !source.path.ends_with("main.rs")).map(|source| {
            let mut used = BTreeMap::new();
            for (number, path) in paths(source) {
                if let Some(target) = self.target(source, &path)
                    && !source.module.starts_with(&target)
                {
                    used.entry(target).or_insert(number);
                }
            }
            (source.module.as_slice(), used)
        });
        uses.collect()
    }
}

fn collect(folder: &str, directory: &Path, root: &Path, sources: &mut Vec<Source>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(folder, &path, root, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            sources.push(Source::new(folder, path.strip_prefix(root).unwrap().to_str().unwrap(), text));
        }
    }
}

/// Returns the paths that a source file names, with their line numbers. `use a::{b, c::{d, e}}` names `a::b`, `a::c::d` and
/// `a::c::e`.
fn paths(source: &Source) -> Vec<(usize, String)> {
    let path = Regex::new(r"[A-Za-z_]\w*(?:::\w+)+").unwrap();
    let mut found = Vec::new();
    let mut statement: Option<(usize, String)> = None;
    for (number, line) in source.code() {
        let code = line.trim_start();
        let mut begins = ["use ", "pub use ", "pub(crate) use ", "pub(super) use "].iter();
        let begin = begins.find_map(|word| code.strip_prefix(word));
        if let Some((_, text)) = &mut statement {
            text.push_str(code);
        } else if let Some(begin) = begin {
            statement = Some((number, begin.to_owned()));
        } else {
            found.extend(path.find_iter(line).map(|path| (number, path.as_str().to_owned())));
        }
        if let Some((number, text)) = statement.take_if(|(_, text)| text.ends_with(';')) {
            found.extend(unfolded(text.trim_end_matches(';')).into_iter().map(|path| (number, path)));
        }
    }
    found
}

fn unfolded(text: &str) -> Vec<String> {
    let Some((beginning, rest)) = text.split_once('{') else { return vec![text.trim().to_owned()] };
    let inner = rest.rsplit_once('}').map_or(rest, |(inner, _)| inner);
    let (mut depth, mut parts) = (0_i32, vec![String::new()]);
    for letter in inner.chars() {
        depth += i32::from(letter == '{') - i32::from(letter == '}');
        if letter == ',' && depth == 0 {
            parts.push(String::new());
        } else {
            parts.last_mut().unwrap().push(letter);
        }
    }
    let parts = parts.iter().filter(|part| !part.trim().is_empty());
    parts.flat_map(|part| unfolded(&format!("{beginning}{}", part.trim()))).collect()
}

fn breaches_of_floors(house: &Crate) -> String {
    let mut breaches = String::new();
    if house.floors.is_empty() {
        return breaches;
    }
    for source in &house.sources {
        let Some(own) = source.module.first() else { continue };
        let Some(floor) = house.floors.get(own) else {
            writeln!(breaches, "{}: module {own} has no floor in the table of lib.rs", source.path).unwrap();
            continue;
        };
        for (number, path) in paths(source) {
            let other = house.target(source, &path).and_then(|target| target.first().cloned());
            let Some(other) = other.filter(|other| other != own) else { continue };
            if house.floors.get(&other).is_some_and(|other| other >= floor) {
                writeln!(breaches, "{}:{number}: {own} uses {other}, which is not below it", source.path)
                    .unwrap();
            }
        }
    }
    breaches
}

/// Names the files of a crate that use each other in a circle. Returns an empty text if the crate has no circle.
fn circles(house: &Crate) -> String {
    let uses = house.uses();
    let reach = |from: &[String]| {
        let (mut reached, mut open) = (BTreeSet::new(), vec![from.to_vec()]);
        while let Some(place) = open.pop() {
            let next = uses.get(place.as_slice()).into_iter().flatten();
            open.extend(next.map(|(place, _)| place.clone()).filter(|place| reached.insert(place.clone())));
        }
        reached
    };
    let reached: BTreeMap<&[String], _> = uses.keys().map(|place| (*place, reach(place))).collect();
    let mut found = String::new();
    for (from, used) in &uses {
        for (to, number) in
            used.iter().filter(|(to, _)| reached.get(to.as_slice()).is_some_and(|it| it.contains(*from)))
        {
            writeln!(found, "{}:{number}: uses {}, which leads back", from.join("::"), to.join("::"))
                .unwrap();
        }
    }
    found
}

fn breaches_of_homes(house: &Crate) -> String {
    let mut breaches = String::new();
    for source in &house.sources {
        for (number, line) in source.code() {
            for (word, homes) in HOMES.iter().filter(|(word, _)| line.contains(word)) {
                if !homes.iter().any(|home| source.path.starts_with(home)) {
                    writeln!(breaches, "{}:{number}: {word} is for {} alone", source.path, homes.join(", "))
                        .unwrap();
                }
            }
        }
    }
    breaches
}

fn all(rule: fn(&Crate) -> String) -> String {
    CRATES.iter().map(|folder| rule(&Crate::read(folder))).collect()
}

#[test]
fn no_module_uses_one_above_it() {
    let breaches = all(breaches_of_floors);
    assert!(breaches.is_empty(), "\n{breaches}");
}

#[test]
fn no_files_use_each_other_in_a_circle() {
    let breaches = all(circles);
    assert!(breaches.is_empty(), "\n{breaches}");
}

#[test]
fn what_has_a_home_is_named_nowhere_else() {
    let breaches = all(breaches_of_homes);
    assert!(breaches.is_empty(), "\n{breaches}");
}

/// Each type of the product has its own name. The exceptions are the arguments of subcommands, a D-Bus proxy named like its
/// object, and the `Result` of a module.
#[test]
fn no_two_types_have_one_name() {
    const SHARED: [&str; 4] = ["Arguments", "Control", "Manager", "Result"];
    let declared = Regex::new(r"^(?:pub(?:\([a-z:]+\))? )?(?:struct|enum|type|trait) (\w+)").unwrap();
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for house in CRATES.map(Crate::read) {
        for source in &house.sources {
            for (number, line) in source.code() {
                if let Some(name) = declared.captures(line) {
                    places.entry(name[1].to_owned()).or_default().push(format!("{}:{number}", source.path));
                }
            }
        }
    }
    assert!(places.len() > 300, "{}", places.len());
    places.retain(|name, at| at.len() > 1 && !SHARED.contains(&name.as_str()));
    assert!(places.is_empty(), "{places:#?}");
}

/// The names and the files that docs/architecture.md gives in its table of words exist in the code.
#[test]
fn the_words_of_the_architecture_page_are_in_the_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("docs/architecture.md")).unwrap();
    let crates = CRATES.map(Crate::read);
    let sources = || crates.iter().flat_map(|house| &house.sources);
    let words = page.split("## Words").nth(1).unwrap().split("\n## ").next().unwrap();
    let named = Regex::new(r"(?m)^\| ([^|]+) \|[^|]+\|.*?`(\w+)`(?: in `([\w.]+)`)? \|$").unwrap();
    let names: Vec<_> = named.captures_iter(words).collect();
    assert!(names.len() > 15, "{words}");
    for name in names {
        let declared = Regex::new(&format!(r"(?-u)\b(struct|enum|trait|type|fn) {}\b", &name[2])).unwrap();
        let file = name.get(3).map_or("", |file| file.as_str());
        let is_there = |source: &Source| {
            source.path.ends_with(file) && source.code().any(|(_, line)| declared.is_match(line))
        };
        assert!(sources().any(is_there), "{}: no {} in the code {file}", &name[1], &name[2]);
    }
    let file = Regex::new(r"`((?:[\w-]+/)*\w+\.rs)`").unwrap();
    let files: Vec<_> = file.captures_iter(&page).map(|file| file[1].to_owned()).collect();
    assert!(files.len() > 10, "{files:?}");
    for file in files {
        let is_there = sources().any(|source| source.path.ends_with(&file)) || root.join(&file).exists();
        assert!(is_there, "docs/architecture.md names {file}, which is not there");
    }
}

#[test]
fn the_promises_of_the_architecture_page_are_those_of_the_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("docs/architecture.md")).unwrap();
    let made = tempfile::NamedTempFile::new().unwrap();
    fs::write(made.path(), &page).unwrap();
    let output =
        std::process::Command::new(root.join("scripts/promises.py")).arg(made.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let now = fs::read_to_string(made.path()).unwrap();
    assert!(now == page, "docs/architecture.md is old: run scripts/promises.py");
}

/// These words hide the subject of a sentence. No line in the source files of the product's crates may contain any of them.
#[test]
fn sentences_name_their_subjects() {
    let words = Regex::new(r"(?i-u)\b(nobody|whoever|one that|is told of|none that)\b").unwrap();
    let mut found = Vec::new();
    for house in CRATES.map(Crate::read) {
        for source in &house.sources {
            let lines = source.text.lines().enumerate().filter(|(_, line)| words.is_match(line));
            found
                .extend(lines.map(|(index, line)| format!("{}:{}: {}", source.path, index + 1, line.trim())));
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn a_breach_is_named_with_file_and_line() {
    let source = |below: &str, text: &str| Source::new("src", below, text.to_owned());
    let house = Crate::new(vec![
        source(
            "lib.rs",
            "//! | 2 | `daemon` | all |\n//! | 1 | `dbus`, `ctl` | the bus |\n//! | 0 | `host` | it |\n",
        ),
        source(
            "host/systemd.rs",
            "//! crate::dbus\nuse crate::dbus::json;\n#[cfg(test)]\nuse crate::daemon;\n",
        ),
        source(
            "dbus/mod.rs",
            "use crate::{\n    ctl,\n    host::systemd::unit,\n};\nlet it = super::daemon::Exit;\n",
        ),
        source("dbus/rows.rs", "use super::super::daemon::run;\nuse super::{changes::told, Bus};\n"),
        source("dbus/changes.rs", "let rows = super::rows::clean; let path = \"/proc/1/comm\";\n"),
        source("daemon/mod.rs", ""),
        source("ctl.rs", ""),
        source("garage.rs", ""),
    ]);
    assert_eq!(
        breaches_of_floors(&house),
        "src/host/systemd.rs:2: host uses dbus, which is not below it\n\
         src/dbus/mod.rs:1: dbus uses ctl, which is not below it\n\
         src/dbus/mod.rs:5: dbus uses daemon, which is not below it\n\
         src/dbus/rows.rs:1: dbus uses daemon, which is not below it\n\
         src/garage.rs: module garage has no floor in the table of lib.rs\n"
    );
    let circles = circles(&house);
    assert!(circles.contains("dbus::rows:2: uses dbus::changes, which leads back\n"), "{circles}");
    assert!(circles.contains("dbus::changes:1: uses dbus::rows, which leads back\n"), "{circles}");
    let homes = breaches_of_homes(&house);
    assert_eq!(homes, "src/dbus/changes.rs:1: /proc/ is for crates/common/src/host/proc.rs alone\n");
}
