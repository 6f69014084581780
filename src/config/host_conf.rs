//! `host.conf` and `host_local.conf`: their two syntaxes, and every key of ours in them.
//!
//! The files belong to the platform's host agent, which keeps dozens of other keys in them: those are not ours to
//! judge.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::yaml::{self, Node, Value};
use super::{Findings, LogLevel, MultiUser, Origin, Problem, Settings, ThreadPolicy, Topology};
use super::{percentage, slices, whole};

/// What the layers read so far add up to.
pub(super) struct Draft {
    pub(super) settings: Settings,
    /// `container_device_config_file`.
    pub(super) device_file: Option<PathBuf>,
    /// `local_config_file`.
    pub(super) local_file: Option<PathBuf>,
    /// Where each key's value stands; a key that isn't here has its default.
    origins: BTreeMap<&'static str, Origin>,
}

/// Takes a value over into the draft, or says what is allowed.
type Setter = fn(&mut Draft, &Value<'_>) -> Result<(), String>;

pub(super) const DEVICE_FILE_KEY: &str = "container_device_config_file";
const PIPE_KEY: &str = "cuda_mps_pipe_directory";
const LOG_KEY: &str = "cuda_mps_log_directory";
const TOPOLOGY_KEY: &str = "cuda_mps_topology";

/// Every key of ours, as the documentation spells it.
const KEYS: [(&str, Setter); 16] = [
    ("enable_cuda_mps", |draft, value| boolean(value).map(|on| draft.settings.enabled = on)),
    (DEVICE_FILE_KEY, |draft, value| optional(value, file).map(|path| draft.device_file = path)),
    ("local_config_file", |draft, value| optional(value, file).map(|path| draft.local_file = path)),
    (PIPE_KEY, |draft, value| directory(value).map(|path| draft.settings.pipe_directory = path)),
    (LOG_KEY, |draft, value| directory(value).map(|path| draft.settings.log_directory = path)),
    ("cuda_mps_replicas", |draft, value| slices(value).map(|count| draft.settings.replicas = count)),
    ("log_level", |draft, value| log_level(value).map(|level| draft.settings.log_level = level)),
    (TOPOLOGY_KEY, |draft, value| topology(value).map(|kind| draft.settings.topology = kind)),
    ("cuda_mps_thread_percentage", |draft, value| {
        thread_policy(value).map(|policy| draft.settings.thread_policy = policy)
    }),
    ("cuda_mps_multiuser", |draft, value| multiuser(value).map(|choice| draft.settings.multiuser = choice)),
    ("cuda_mps_prewarm", |draft, value| boolean(value).map(|on| draft.settings.prewarm = on)),
    ("cuda_mps_set_compute_mode", |draft, value| {
        boolean(value).map(|on| draft.settings.set_compute_mode = on)
    }),
    ("cuda_mps_quit_timeout", |draft, value| {
        seconds(value, 1..=600).map(|time| draft.settings.quit_timeout = time)
    }),
    ("cuda_mps_fault_grace", |draft, value| {
        seconds(value, 0..=3600).map(|time| draft.settings.fault_grace = time)
    }),
    ("cuda_mps_log_max_size", |draft, value| {
        whole(value, 1..=1024, "MiB").map(|mib| draft.settings.log_max_bytes = u64::from(mib) * 1024 * 1024)
    }),
    ("cuda_mps_cdi_directory", |draft, value| {
        optional(value, directory).map(|path| draft.settings.cdi_directory = path)
    }),
];

/// What a socket's path may have, by the size of `sockaddr_un` less the final NUL.
const SOCKET_PATH_BYTES: usize = 107;

/// The length of `GPU-` and a UUID.
const GPU_UUID_BYTES: usize = 40;

impl Draft {
    /// Before any file: the defaults.
    pub(super) fn new() -> Self {
        Self {
            settings: Settings::default(),
            device_file: None,
            local_file: Some(PathBuf::from("/etc/yunion/host_local.conf")),
            origins: BTreeMap::new(),
        }
    }

    /// Where the value of a key stands, if a file sets it.
    pub(super) fn origin(&self, key: &str) -> Option<&Origin> {
        self.origins.get(key)
    }

    /// Lays one file over what is there.
    pub(super) fn overlay(&mut self, file: &Path, text: &str, findings: &mut Findings) {
        let (syntax, lines) = match read(file, text) {
            Ok(read) => read,
            Err(problem) => return findings.problems.push(problem),
        };
        for (key, setter, line) in ours(file, syntax, &lines, findings) {
            if line.value == Value::Null {
                continue;
            }
            let origin = Origin { file: file.to_owned(), line: line.number };
            match setter(self, &line.value) {
                Ok(()) => {
                    self.origins.insert(key, origin);
                }
                Err(remedy) => findings.problems.push(Problem {
                    origin,
                    key: key.to_owned(),
                    found: line.value.found(),
                    remedy,
                }),
            }
        }
    }

    /// What can only be judged when all layers are read.
    pub(super) fn check_together(&self, findings: &mut Findings) {
        let Settings { pipe_directory, log_directory, topology, .. } = &self.settings;
        if pipe_directory == log_directory
            && let Some((key, origin)) =
                self.origins.get_key_value(LOG_KEY).or(self.origins.get_key_value(PIPE_KEY))
        {
            findings.problems.push(Problem {
                origin: origin.clone(),
                key: (*key).to_owned(),
                found: format!("found {pipe_directory:?} for both {PIPE_KEY} and {LOG_KEY}"),
                remedy: "give each a directory of its own".to_owned(),
            });
        }
        let below = match topology {
            Topology::Shared => "/control".len(),
            Topology::PerGpu => "//control".len() + GPU_UUID_BYTES,
        };
        let length = pipe_directory.as_os_str().len() + below;
        if length > SOCKET_PATH_BYTES
            && let Some((key, origin)) =
                self.origins.get_key_value(PIPE_KEY).or(self.origins.get_key_value(TOPOLOGY_KEY))
        {
            let what = match topology {
                Topology::Shared => "the control daemon's socket in it",
                Topology::PerGpu => "a control daemon's socket in <pipe directory>/<GPU UUID>",
            };
            findings.problems.push(Problem {
                origin: origin.clone(),
                key: (*key).to_owned(),
                found: format!(
                    "{what} would have a path of {length} bytes, the limit is {SOCKET_PATH_BYTES}"
                ),
                remedy: format!(
                    "choose a directory whose path has at most {} bytes",
                    SOCKET_PATH_BYTES.saturating_sub(below)
                ),
            });
        }
    }
}

/// How a file is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Syntax {
    /// Of a key that stands twice, the last one counts.
    Yaml,
    /// `key = value`, an older form that the host agent still reads. Of a key that stands twice, the first one counts.
    KeyValue,
}

/// One `key: value` or `key = value`.
#[derive(Debug, PartialEq)]
struct Line<'t> {
    number: Option<usize>,
    key: String,
    value: Value<'t>,
}

fn read<'t>(file: &Path, text: &'t str) -> Result<(Syntax, Vec<Line<'t>>), Problem> {
    let refused = match yaml::parse(file, text) {
        Ok(Node { value: Value::Null, .. }) => return Ok((Syntax::Yaml, Vec::new())),
        Ok(Node { value: Value::Map(pairs), .. }) => {
            let line = |(key, value): (Node<'t>, Node<'t>)| {
                let name = key.value.as_text().unwrap_or_default().into_owned();
                Line { number: key.line, key: name, value: value.value }
            };
            return Ok((Syntax::Yaml, pairs.into_iter().map(line).collect()));
        }
        Ok(Node { line, value }) => Problem {
            origin: Origin { file: file.to_owned(), line },
            key: String::new(),
            found: format!("{} instead of keys", value.found()),
            remedy: "write one `key: value` on each line".to_owned(),
        },
        Err(problem) => problem,
    };
    key_value_lines(text).map(|lines| (Syntax::KeyValue, lines)).ok_or(refused)
}

/// The `key = value` form: None where a line is neither that nor a `[section]`, or none is that.
fn key_value_lines(text: &str) -> Option<Vec<Line<'_>>> {
    let mut lines = Vec::new();
    for (at, line) in text.lines().enumerate() {
        // Even a # in quotes starts a comment there.
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() || line.starts_with('[') {
            continue;
        }
        let (key, value) = line.split_once('=')?;
        let value = match value.trim() {
            "" => Value::Null,
            text => Value::Text { text: unquoted(text).into(), quoted: true },
        };
        lines.push(Line { number: Some(at + 1), key: key.trim().to_owned(), value });
    }
    if lines.is_empty() { None } else { Some(lines) }
}

/// Takes the quotes off a value that has them, and the escapes that only count within them.
fn unquoted(value: &str) -> String {
    let within = ['"', '\''].iter().find_map(|quote| value.strip_prefix(*quote)?.strip_suffix(*quote));
    match within {
        Some(text) => text.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t"),
        None => value.to_owned(),
    }
}

/// The lines that count for us, in file order, each of our keys once.
fn ours<'l, 't>(
    file: &Path,
    syntax: Syntax,
    lines: &'l [Line<'t>],
    findings: &mut Findings,
) -> Vec<(&'static str, Setter, &'l Line<'t>)> {
    let mut chosen: Vec<(&'static str, Setter, &Line<'t>)> = Vec::new();
    for line in lines {
        let origin = Origin { file: file.to_owned(), line: line.number };
        let name = line.key.trim().replace('-', "_");
        let Some((key, setter)) = KEYS.into_iter().find(|(key, _)| *key == name) else {
            if let Some(remedy) = meant_for_us(&name) {
                let found = "no such key; it is ignored".to_owned();
                findings.warnings.push(Problem { origin, key: line.key.clone(), found, remedy });
            } else {
                findings.unknown_keys.push((origin, line.key.clone()));
            }
            continue;
        };
        if let Some((_, _, earlier)) = chosen.iter().find(|(other, _, _)| *other == key) {
            let place =
                earlier.number.map_or_else(|| "before".to_owned(), |number| format!("on line {number}"));
            let counts = match syntax {
                Syntax::Yaml => "the last one counts",
                Syntax::KeyValue => "in `key = value` files the first one counts",
            };
            findings.warnings.push(Problem {
                origin,
                key: key.to_owned(),
                found: format!("already set {place}; {counts}"),
                remedy: "remove one of them".to_owned(),
            });
            match syntax {
                Syntax::Yaml => chosen.retain(|(other, _, _)| *other != key),
                Syntax::KeyValue => continue,
            }
        }
        chosen.push((key, setter, line));
    }
    chosen
}

/// What to do about a key that is unknown but looks as if it was meant for us.
fn meant_for_us(name: &str) -> Option<String> {
    let lower = name.to_lowercase();
    if let Some((key, _)) = KEYS.iter().find(|(key, _)| *key == lower) {
        return Some(format!("keys are written in lower case: {key}"));
    }
    if name == "<<" {
        return Some("merging is not supported here: write the keys out".to_owned());
    }
    // The platform's own keys with this prefix are in KEYS.
    lower.starts_with("cuda_mps_").then(|| "correct the spelling or remove it".to_owned())
}

fn boolean(value: &Value<'_>) -> Result<bool, String> {
    value.as_bool().ok_or_else(|| "write true or false, without quotes".to_owned())
}

fn seconds(value: &Value<'_>, range: RangeInclusive<u32>) -> Result<Duration, String> {
    whole(value, range, "seconds").map(|seconds| Duration::from_secs(seconds.into()))
}

/// A text that may be empty, which is the same as not set.
fn optional<T>(value: &Value<'_>, read: fn(&Value<'_>) -> Result<T, String>) -> Result<Option<T>, String> {
    if value.as_text().is_some_and(|text| text.is_empty()) { Ok(None) } else { read(value).map(Some) }
}

/// The absolute path of a file. It is shown as it is written, hence not normalised.
fn file(value: &Value<'_>) -> Result<PathBuf, String> {
    let text = value.as_text().unwrap_or_default();
    if text.starts_with('/') && !text.contains(char::is_control) {
        Ok(PathBuf::from(text.as_ref()))
    } else {
        Err("write the absolute path of a file, without control characters".to_owned())
    }
}

/// The absolute path of a directory, normalised: the host agent and clients get to see this form too.
fn directory(value: &Value<'_>) -> Result<PathBuf, String> {
    let text = value.as_text().unwrap_or_default();
    let parts: Vec<&str> = text.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    if !text.starts_with('/') || text.contains(char::is_control) {
        Err("write the absolute path of a directory, without control characters".to_owned())
    } else if parts.is_empty() {
        Err("write a directory below /: the root itself can't be used".to_owned())
    } else if parts.contains(&"..") {
        Err("write the path without `..`".to_owned())
    } else {
        Ok(PathBuf::from(format!("/{}", parts.join("/"))))
    }
}

fn log_level(value: &Value<'_>) -> Result<LogLevel, String> {
    match value.as_text().as_deref() {
        Some("debug") => Ok(LogLevel::Debug),
        Some("info") => Ok(LogLevel::Info),
        Some("warn") => Ok(LogLevel::Warn),
        Some("error") => Ok(LogLevel::Error),
        _ => Err("write debug, info, warn or error".to_owned()),
    }
}

fn topology(value: &Value<'_>) -> Result<Topology, String> {
    match value.as_text().as_deref() {
        Some("shared") => Ok(Topology::Shared),
        Some("per_gpu") => Ok(Topology::PerGpu),
        _ => Err("write shared or per_gpu".to_owned()),
    }
}

fn thread_policy(value: &Value<'_>) -> Result<ThreadPolicy, String> {
    match value.as_text().as_deref() {
        Some("equal") => Ok(ThreadPolicy::Equal),
        Some("balanced") => Ok(ThreadPolicy::Balanced),
        Some("unlimited") => Ok(ThreadPolicy::Unlimited),
        _ => percentage(value)
            .map(ThreadPolicy::Fixed)
            .map_err(|_| "write equal, balanced, unlimited or a whole number from 1 to 100".to_owned()),
    }
}

fn multiuser(value: &Value<'_>) -> Result<MultiUser, String> {
    match (value.as_text().as_deref(), value.as_bool()) {
        (Some("auto"), _) => Ok(MultiUser::Auto),
        (_, Some(true)) => Ok(MultiUser::On),
        (_, Some(false)) => Ok(MultiUser::Off),
        _ => Err("write auto, or true or false without quotes".to_owned()),
    }
}
