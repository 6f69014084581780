//! Reads `host.conf` and `host_local.conf`, which have two possible syntaxes. The files belong to the host agent of the
//! platform (Cloudpods), which has dozens of other keys in the same files. This service checks only its own keys.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use strum::VariantNames;
use tracing::Level;

use super::yaml::{self, Node, Pair, Value};
use super::{MultiUser, Settings, ThreadPolicy, Topology};
use super::{percentage, slices, whole};
use crate::problem::{LocatedProblem, Origin, Problem};

pub(super) struct Draft {
    pub(super) settings: Settings,
    pub(super) device_file: Option<PathBuf>,
    pub(super) local_file: Option<PathBuf>,
    origins: BTreeMap<&'static str, Origin>,
    /// The keys without a value that the host agent reads too. This service treats such a key as a missing key. The third
    /// element says how the host agent understands the key.
    pub(super) empty: Vec<(&'static str, Origin, &'static str)>,
    pub(super) problems: Vec<LocatedProblem>,
    pub(super) warnings: Vec<LocatedProblem>,
    pub(super) unknown_keys: Vec<(Origin, String)>,
    pub(super) overridden: Vec<(&'static str, Origin, Origin)>,
    /// An unknown key that is probably a misspelt `container_device_config_file`.
    pub(super) nearly_device_file: Option<LocatedProblem>,
}

/// The host agent's reaction to a key without a value, if the key needs a number or a boolean.
const MISTAKE: &str = "the platform's host agent does not start";

type Setter = fn(&mut Draft, &Value<'_>) -> Result<(), Problem>;

pub(super) const ENABLE_KEY: &str = "enable_cuda_mps";
pub(super) const DEVICE_FILE_KEY: &str = "container_device_config_file";
const PIPE_KEY: &str = "cuda_mps_pipe_directory";
pub(crate) const LOG_KEY: &str = "cuda_mps_log_directory";
pub(super) const REPLICAS_KEY: &str = "cuda_mps_replicas";
pub(super) const TOPOLOGY_KEY: &str = "cuda_mps_topology";

const KEYS: [(&str, Setter); 21] = [
    (ENABLE_KEY, |draft, value| boolean(value).map(|on| draft.settings.enabled = on)),
    (DEVICE_FILE_KEY, |draft, value| optional(value, file).map(|path| draft.device_file = path)),
    ("local_config_file", |draft, value| optional(value, file).map(|path| draft.local_file = path)),
    (PIPE_KEY, |draft, value| directory_for_engines(value).map(|path| draft.settings.pipe_directory = path)),
    (LOG_KEY, |draft, value| directory(value).map(|path| draft.settings.log_directory = path)),
    (REPLICAS_KEY, |draft, value| slices(value).map(|count| draft.settings.replicas = count)),
    ("log_level", |draft, value| log_level(value).map(|level| draft.settings.log_level = level)),
    (TOPOLOGY_KEY, |draft, value| word(value).map(|kind| draft.settings.topology = kind)),
    ("cuda_mps_thread_percentage", |draft, value| {
        thread_policy(value).map(|policy| draft.settings.thread_policy = policy)
    }),
    ("cuda_mps_multiuser", |draft, value| multiuser(value).map(|choice| draft.settings.multiuser = choice)),
    ("cuda_mps_prewarm", |draft, value| boolean(value).map(|on| draft.settings.prewarm = on)),
    ("cuda_mps_set_compute_mode", |draft, value| {
        boolean(value).map(|on| draft.settings.supervision.set_compute_mode = on)
    }),
    ("cuda_mps_cpu_affinity", |draft, value| word(value).map(|cpus| draft.settings.cpu_affinity = cpus)),
    ("cuda_mps_quit_timeout", |draft, value| {
        seconds(value, 1..=600).map(|time| draft.settings.supervision.quit_timeout = time)
    }),
    ("cuda_mps_fault_grace", |draft, value| {
        seconds(value, 0..=3600).map(|time| draft.settings.supervision.fault_grace = time)
    }),
    ("cuda_mps_memory_limit", |draft, value| word(value).map(|keeper| draft.settings.memory_limit = keeper)),
    ("cuda_mps_overuse", |draft, value| word(value).map(|answer| draft.settings.on_overuse = answer)),
    ("cuda_mps_may_terminate", |draft, value| word(value).map(|who| draft.settings.may_terminate = who)),
    ("cuda_mps_log_max_size", |draft, value| {
        whole(value, 1..=1024, "MiB")
            .map(|mib: u64| draft.settings.supervision.log_max_bytes = mib * 1024 * 1024)
    }),
    ("cuda_mps_cdi_directory", |draft, value| {
        optional(value, directory).map(|path| draft.settings.cdi_directory = path)
    }),
    ("servers_path", |draft, value| {
        // `servers_path` is a key of the host agent, so the host agent and not this service checks the path. With a wrong path,
        // the service finds no records of guests.
        draft.settings.supervision.servers_path = PathBuf::from(value.text().as_ref());
        Ok(())
    }),
];

/// The most bytes that a socket's path may have. `sockaddr_un` has one byte more, but control daemons of the driver series 535,
/// 550 and 555 refuse a path that uses the last byte.
const SOCKET_PATH_BYTES: usize = 106;

/// The longest name of a socket that a control daemon makes. A control daemon does not start if it can't make this socket.
const LONGEST_SOCKET: &str = "control_privileged";

const PRIVATE_SUFFIX: &str = ".private";

/// The default log directory if the usual default, /tmp/nvidia-mps/log, would be in the pipe directory. NVIDIA's own default is
/// not used, since a control daemon that somebody else has started may have its log there.
pub const LOG_BESIDE_PIPE: &str = "/var/log/yunion-mps";

impl Settings {
    pub fn private_directory(&self) -> PathBuf {
        let mut directory = self.pipe_directory.clone().into_os_string();
        directory.push(PRIVATE_SUFFIX);
        directory.into()
    }
}

pub fn has_room_for_sockets(directory: &Path) -> bool {
    directory.as_os_str().len() + "/".len() + LONGEST_SOCKET.len() <= SOCKET_PATH_BYTES
}

const GPU_UUID_BYTES: usize = 40;

/// The longest possible name of a slice, which is also the name of the slice's directory.
const LONGEST_SLICE: &str = "ffffffff_ff_1f.7-998";

impl Draft {
    pub(super) fn new() -> Self {
        Self {
            settings: Settings::default(),
            device_file: None,
            local_file: Some(PathBuf::from("/etc/yunion/host_local.conf")),
            origins: BTreeMap::new(),
            empty: Vec::new(),
            problems: Vec::new(),
            warnings: Vec::new(),
            unknown_keys: Vec::new(),
            overridden: Vec::new(),
            nearly_device_file: None,
        }
    }

    pub(super) fn checked<T>(&mut self, read: Result<T, LocatedProblem>) -> Option<T> {
        read.map_err(|problem| self.problems.push(problem)).ok()
    }

    pub(super) fn origin(&self, key: &str) -> Option<&Origin> {
        self.origins.get(key)
    }

    pub(super) fn overlay(&mut self, file: &Path, text: &str) {
        self.settings.sources.push(file.to_owned());
        let Some((syntax, pairs)) = self.checked(read(file, text)) else { return };
        for ((key, setter), Node { line, value }) in self.ours(file, syntax, pairs) {
            let origin = Origin { file: file.to_owned(), line };
            if value == Value::Null {
                self.empty.extend(read_as(key, syntax).map(|read_as| (key, origin, read_as)));
                continue;
            }
            // A key without a value in an earlier file is no trouble if this file has a value for the key: the host agent
            // accepts such files too. The trouble stays if the key without a value prevents the host agent from reading the
            // earlier file.
            self.empty.retain(|(empty, _, read_as)| *empty != key || *read_as == MISTAKE);
            match setter(self, &value) {
                Ok(()) => {
                    if let Some(earlier) = self.origins.insert(key, origin.clone()) {
                        self.overridden.push((key, earlier, origin));
                    }
                }
                Err(wrong) => self.problems.push(wrong.at(origin, key)),
            }
        }
    }

    fn ours<'t>(
        &mut self,
        file: &Path,
        syntax: Syntax,
        pairs: Vec<Pair<'t>>,
    ) -> Vec<((&'static str, Setter), Node<'t>)> {
        let mut chosen: Vec<((&'static str, Setter), Node<'t>)> = Vec::new();
        for (Node { line, value: written }, Node { value, .. }) in pairs {
            let origin = Origin { file: file.to_owned(), line };
            let written = written.text();
            let name = written.trim().replace('-', "_");
            let Some((key, setter)) = KEYS.into_iter().find(|(key, _)| *key == name) else {
                let written = yaml::printable(&written);
                if is_nearly_device_file(&name) {
                    let remedy =
                        format!("write {DEVICE_FILE_KEY}: without this key every NVIDIA GPU would be served");
                    let problem = LocatedProblem::new(origin, written, "no such key", remedy);
                    self.nearly_device_file.get_or_insert(problem);
                } else if let Some(remedy) = meant_for_us(&name) {
                    let found = "the service knows no such key and ignores it";
                    self.warnings.push(LocatedProblem::new(origin, written, found, remedy));
                } else {
                    self.unknown_keys.push((origin, written));
                }
                continue;
            };
            if let Some((_, earlier)) = chosen.iter().find(|((earlier, _), _)| *earlier == key) {
                let place =
                    earlier.line.map_or_else(|| "before".to_owned(), |line| format!("on line {line}"));
                let counts = match syntax {
                    Syntax::Yaml => "the last line counts",
                    Syntax::KeyValue => "in `key = value` files the first line counts",
                };
                let found = format!("the key is already set {place}; {counts}");
                self.warnings.push(LocatedProblem::new(origin, key, found, "remove one of the two lines"));
                match syntax {
                    Syntax::Yaml => chosen.retain(|((earlier, _), _)| *earlier != key),
                    Syntax::KeyValue => continue,
                }
            }
            chosen.push(((key, setter), Node { line, value }));
        }
        chosen
    }

    fn problem_at(&self, keys: [&str; 2], found: String, remedy: &str) -> Option<LocatedProblem> {
        let (key, origin) = keys.iter().find_map(|key| self.origins.get_key_value(key))?;
        Some(LocatedProblem::new(origin.clone(), *key, found, remedy))
    }

    /// Moves the default log directory out of the pipe directory. A control daemon without a private directory makes a FIFO
    /// `log` in the pipe directory. The control daemon writes no log if a directory has the name `log` there.
    fn place_log(&mut self) {
        let Settings { pipe_directory, log_directory, .. } = &mut self.settings;
        if !log_directory.starts_with(&*pipe_directory) {
            return;
        }
        let Some(origin) = self.origins.get(LOG_KEY) else {
            *log_directory = PathBuf::from(LOG_BESIDE_PIPE);
            return;
        };
        if log_directory == pipe_directory {
            return;
        }
        let found = format!(
            "found {:?}, which is in the pipe directory: control daemons have files of their own there, and \
             every program that has the pipe directory can read the logs",
            log_directory.display()
        );
        let remedy = format!(
            "choose a directory outside of the pipe directory, or remove the key: the default is then \
             {LOG_BESIDE_PIPE}"
        );
        self.warnings.push(LocatedProblem::new(origin.clone(), LOG_KEY, found, remedy));
        self.settings.log_in_pipe = Some(origin.clone());
    }

    pub(super) fn check_together(&mut self) {
        self.place_log();
        let Settings { pipe_directory, log_directory, topology, .. } = &self.settings;
        if pipe_directory == log_directory {
            let found = format!("found {:?} for both {PIPE_KEY} and {LOG_KEY}", pipe_directory.display());
            let remedy = "give each of the two keys a directory of its own";
            self.problems.extend(self.problem_at([LOG_KEY, PIPE_KEY], found, remedy));
        }
        let private = self.settings.private_directory();
        if log_directory.starts_with(&private) {
            let found = format!(
                "found {:?}, but {:?} is only for the sockets of control daemons",
                log_directory.display(),
                private.display()
            );
            self.problems.extend(self.problem_at(
                [LOG_KEY, PIPE_KEY],
                found,
                "choose a log directory elsewhere",
            ));
        }
        let (below, socket) = match topology {
            Topology::Shared => ("/".len(), "the control daemon's socket in this directory"),
            Topology::PerGpu => {
                ("//".len() + GPU_UUID_BYTES, "a control daemon's socket in <pipe directory>/<GPU UUID>")
            }
            Topology::PerSlice => {
                let found = "a control daemon's socket in <pipe directory>/<name of the slice>";
                ("//".len() + LONGEST_SLICE.len(), found)
            }
        };
        let below = below + LONGEST_SOCKET.len();
        let length = pipe_directory.as_os_str().len() + below;
        if length > SOCKET_PATH_BYTES {
            let found = format!(
                "{socket} would have a path of {length} bytes, at most {SOCKET_PATH_BYTES} are possible"
            );
            let longest = SOCKET_PATH_BYTES.saturating_sub(below);
            let remedy = format!("choose a directory with a path of at most {longest} bytes");
            self.problems.extend(self.problem_at([PIPE_KEY, TOPOLOGY_KEY], found, &remedy));
        } else if length + PRIVATE_SUFFIX.len() > SOCKET_PATH_BYTES
            && self.settings.multiuser != MultiUser::Off
        {
            let longest = SOCKET_PATH_BYTES.saturating_sub(below + PRIVATE_SUFFIX.len());
            let found = format!(
                "the path has {length} bytes, too many for the private directory that each control daemon \
                 has beside the pipe directory from driver 580 on: without the private directory, a \
                 program that has the pipe directory and is root of the host, in a container too, can \
                 command the control daemons",
                length = pipe_directory.as_os_str().len()
            );
            let remedy = format!("choose a directory with a path of at most {longest} bytes");
            self.warnings.extend(self.problem_at([PIPE_KEY, TOPOLOGY_KEY], found, &remedy));
        }
    }
}

/// How the host agent understands the key `key` without a value. None if the agent does not read the key, or treats a key
/// without a value as missing, as this service does.
fn read_as(key: &str, syntax: Syntax) -> Option<&'static str> {
    match (syntax, key) {
        (Syntax::Yaml, PIPE_KEY | LOG_KEY | DEVICE_FILE_KEY | "local_config_file") => Some(
            "the platform's host agent does not treat null as unset, but uses the text `null` as the value",
        ),
        (Syntax::Yaml, ENABLE_KEY | REPLICAS_KEY | "log_level") => Some(MISTAKE),
        (Syntax::KeyValue, PIPE_KEY | LOG_KEY) => Some(
            "the platform's host agent does not treat an empty value as unset, but uses the empty text as the value",
        ),
        _ => None,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Syntax {
    /// If a key appears twice, the last value counts.
    Yaml,
    /// Lines `key = value`, an older form that the host agent still reads. If a key appears twice, the first value counts.
    KeyValue,
}

fn read<'t>(file: &Path, text: &'t str) -> Result<(Syntax, Vec<Pair<'t>>), LocatedProblem> {
    let refused = match yaml::parse(file, text) {
        Ok(Node { value: Value::Null, .. }) => return Ok((Syntax::Yaml, Vec::new())),
        Ok(Node { value: Value::Map(pairs), .. }) => return Ok((Syntax::Yaml, pairs)),
        Ok(Node { line, value }) => {
            let found = format!("{} instead of keys", value.found());
            let remedy = "write one `key: value` on each line";
            LocatedProblem::new(Origin { file: file.to_owned(), line }, "", found, remedy)
        }
        Err(problem) => problem,
    };
    key_value_lines(text).map(|pairs| (Syntax::KeyValue, pairs)).ok_or(refused)
}

/// Reads the older form of a file. None if a line is neither `key = value` nor `[section]`, or if no line has a key.
fn key_value_lines(text: &str) -> Option<Vec<Pair<'_>>> {
    let mut pairs = Vec::new();
    for (at, line) in text.lines().enumerate() {
        // In the older form, a # starts a comment even inside quotes.
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() || line.starts_with('[') {
            continue;
        }
        let (key, value) = line.split_once('=')?;
        let text = |text| Value::Text { text, quoted: true };
        let value = match value.trim() {
            "" => Value::Null,
            value => text(unquoted(value).into()),
        };
        let line = Some(at + 1);
        pairs.push((Node { line, value: text(key.trim().into()) }, Node { line, value }));
    }
    if pairs.is_empty() { None } else { Some(pairs) }
}

fn unquoted(value: &str) -> String {
    let within = ['"', '\''].iter().find_map(|quote| value.strip_prefix(*quote)?.strip_suffix(*quote));
    match within {
        Some(text) => text.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t"),
        None => value.to_owned(),
    }
}

const SLIPS: usize = 3;

fn is_nearly_device_file(name: &str) -> bool {
    name.len() <= 2 * DEVICE_FILE_KEY.len()
        && strsim::osa_distance(&name.to_lowercase(), DEVICE_FILE_KEY) <= SLIPS
}

fn meant_for_us(name: &str) -> Option<String> {
    let lower = name.to_lowercase();
    if let Some((key, _)) = KEYS.iter().find(|(key, _)| *key == lower) {
        return Some(format!("keys are written in lower case: {key}"));
    }
    // A key that begins with `cuda_mps_` is taken for a misspelt key of this service, whatever follows the prefix.
    lower.starts_with("cuda_mps_").then(|| "correct the spelling or remove the key".to_owned())
}

pub(super) fn boolean(value: &Value<'_>) -> Result<bool, Problem> {
    value.as_bool().ok_or_else(|| value.wrong("write true or false, without quotes"))
}

fn seconds(value: &Value<'_>, range: RangeInclusive<u64>) -> Result<Duration, Problem> {
    whole(value, range, "seconds").map(Duration::from_secs)
}

/// Reads a value that may be empty: an empty text means the same as a missing key.
fn optional<T>(value: &Value<'_>, read: fn(&Value<'_>) -> Result<T, Problem>) -> Result<Option<T>, Problem> {
    if value.as_text().is_some_and(|text| text.is_empty()) { Ok(None) } else { read(value).map(Some) }
}

/// Reads the absolute path of a file. The path is not normalised, so that messages show the path as the file has it.
fn file(value: &Value<'_>) -> Result<PathBuf, Problem> {
    let text = value.text();
    if text.starts_with('/') && !text.contains(char::is_control) {
        Ok(PathBuf::from(text.as_ref()))
    } else {
        Err(value.wrong("write the absolute path of a file, without control characters"))
    }
}

/// Reads the absolute path of a directory, and normalises it, so that two spellings of one directory are equal.
fn directory(value: &Value<'_>) -> Result<PathBuf, Problem> {
    let text = value.text();
    let parts: Vec<&str> = text.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
    if !text.starts_with('/') || text.contains(char::is_control) {
        Err(value.wrong("write the absolute path of a directory, without control characters"))
    } else if parts.is_empty() {
        Err(value.wrong("write a directory below /: the root itself can't be used"))
    } else if parts.contains(&"..") {
        Err(value.wrong("write the path without `..`"))
    } else {
        Ok(PathBuf::from(format!("/{}", parts.join("/"))))
    }
}

/// Reads the path of a directory that users write in the options of container engines. In `--volume=HOST:CONTAINER` a colon
/// would split the path. A shell would split an unquoted path at blanks, and would expand patterns in the path.
fn directory_for_engines(value: &Value<'_>) -> Result<PathBuf, Problem> {
    let path = directory(value)?;
    if value.text().contains(|c: char| c.is_whitespace() || ":*?[\\".contains(c)) {
        let remedy = "write a path without blanks and without any of : * ? [ \\, which the options of \
                      Docker and Podman do not allow";
        return Err(value.wrong(remedy));
    }
    Ok(path)
}

fn word<T: FromStr + VariantNames>(value: &Value<'_>) -> Result<T, Problem> {
    value.text().parse().map_err(|_| match T::VARIANTS {
        [others @ .., last] => value.wrong(format!("write {} or {last}", others.join(", "))),
        [] => value.wrong(""),
    })
}

fn log_level(value: &Value<'_>) -> Result<Level, Problem> {
    match value.text().as_ref() {
        "debug" => Ok(Level::DEBUG),
        "info" => Ok(Level::INFO),
        "warn" => Ok(Level::WARN),
        "error" => Ok(Level::ERROR),
        _ => Err(value.wrong("write debug, info, warn or error")),
    }
}

fn thread_policy(value: &Value<'_>) -> Result<ThreadPolicy, Problem> {
    match value.text().as_ref() {
        "equal" => Ok(ThreadPolicy::Equal),
        "balanced" => Ok(ThreadPolicy::Balanced),
        "unlimited" => Ok(ThreadPolicy::Unlimited),
        _ => percentage(value)
            .map(ThreadPolicy::Fixed)
            .map_err(|_| value.wrong("write equal, balanced, unlimited or a whole number from 1 to 100")),
    }
}

fn multiuser(value: &Value<'_>) -> Result<MultiUser, Problem> {
    match value.as_bool() {
        Some(on) => Ok(if on { MultiUser::On } else { MultiUser::Off }),
        None if value.text() == "auto" => Ok(MultiUser::Auto),
        None => Err(value.wrong("write auto, or true or false without quotes")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::text_of;
    use super::*;
    use crate::config::{CpuAffinity, MayTerminate, MemoryLimit, OnOveruse, Supervision};

    const FILE: &str = "/etc/yunion/host.conf";

    fn overlaid(text: &str) -> Draft {
        let mut draft = Draft::new();
        draft.overlay(Path::new(FILE), text);
        assert_eq!(std::mem::take(&mut draft.settings.sources), [Path::new(FILE)]);
        draft.check_together();
        draft
    }

    fn settings(text: &str) -> Settings {
        let draft = overlaid(text);
        assert_eq!(draft.problems, [], "{text}");
        draft.settings
    }

    fn problems(text: &str) -> Vec<LocatedProblem> {
        let draft = overlaid(text);
        assert!(!draft.problems.is_empty(), "no problem in {text:?}");
        draft.problems
    }

    fn problem(text: &str) -> (Option<usize>, String, String) {
        let [problem] = <[LocatedProblem; 1]>::try_from(problems(text)).unwrap();
        assert_eq!(problem.origin.file, Path::new(FILE));
        assert!(!problem.problem.remedy.is_empty());
        (problem.origin.line, problem.key, problem.problem.found)
    }

    fn bad(line: usize, key: &str, found: &str) -> (Option<usize>, String, String) {
        (Some(line), key.to_owned(), found.to_owned())
    }

    #[test]
    fn the_platforms_ways_to_say_yes() {
        for text in [
            "enable_cuda_mps: yes",
            "enable-cuda-mps: true",
            "enable_cuda-mps: on",
            "enable_cuda_mps: \"true\"",
            "enable_cuda_mps: '1'",
            "enable_cuda_mps: 1",
            "enable_cuda_mps = true",
            "[mps]\nenable-cuda-mps = \"True\" # on",
            "---\r\nenable_cuda_mps: Y\r\n",
            "%YAML 1.1\n---\nenable_cuda_mps: y\n",
            "{enable_cuda_mps: yes}",
        ] {
            assert!(settings(text).enabled, "{text}");
        }
        for text in
            ["enable_cuda_mps: no", "enable_cuda_mps: off", "enable_cuda_mps = 0", "Enable_Cuda_Mps: true"]
        {
            assert!(!settings(text).enabled, "{text}");
        }
    }

    #[test]
    fn a_quoted_yes_is_text() {
        assert_eq!(problem("# x\nenable_cuda_mps: \"yes\"\n"), bad(2, "enable_cuda_mps", "found \"yes\""));
        assert_eq!(problem("enable-cuda-mps: 'on'"), bad(1, "enable_cuda_mps", "found \"on\""));
        // Unlike YAML, the older form knows no `yes` for `true`.
        assert_eq!(problem("enable_cuda_mps = yes"), bad(1, "enable_cuda_mps", "found \"yes\""));
    }

    #[test]
    fn an_empty_value_means_not_set() {
        let none = "enable_cuda_mps:\ncuda_mps_replicas: null\ncuda_mps_pipe_directory: ~\nlog_level:\n";
        assert_eq!(settings(none), Settings::default());
        assert_eq!(settings("cuda_mps_replicas =\nlog_level = \n"), Settings::default());
        for empty in ["", "\n", "# only a comment\n", "---\n", "[section]\n# c\nlog_level = info"] {
            assert_eq!(settings(empty), Settings::default(), "{empty:?}");
        }
        let draft =
            overlaid("container_device_config_file: \"\"\ncuda_mps_cdi_directory: ''\nlocal_config_file: ''");
        assert_eq!((draft.device_file, draft.local_file), (None, None));
        // A later empty value removes an earlier value, as it does for the host agent.
        assert_eq!(settings("cuda_mps_replicas: 3\ncuda_mps_replicas:\n").replicas.get(), 10);
    }

    #[test]
    fn the_platforms_own_keys_in_host_conf_are_skipped() {
        let text = concat!(
            "allow_switch_vms: true\n",
            "bridge_driver: openvswitch\n",
            "enable_cuda_mps: true\n",
            "enable_rbac: true\n",
            "host_type: container\n",
            "local_image_path:\n",
            "- /opt/cloud/workspace/disks\n",
            "log_level: warn\n",
            "networks:\n",
            "- eth0/br0/192.168.0.1\n",
            "rack:\n",
            "servers_path: /opt/cloud/workspace/servers\n",
            "container_device_config_file: /etc/yunion/host_container_device.yml\n",
        );
        let draft = overlaid(text);
        assert!(draft.settings.enabled);
        assert_eq!(draft.settings.log_level, Level::WARN);
        assert_eq!(draft.device_file.as_deref(), Some(Path::new("/etc/yunion/host_container_device.yml")));
        assert_eq!(draft.origin(DEVICE_FILE_KEY).unwrap().line, Some(13));
        assert_eq!((draft.problems.len(), draft.warnings.len()), (0, 0));
        let unknown: Vec<_> =
            draft.unknown_keys.iter().map(|(at, key)| (at.line.unwrap(), key.as_str())).collect();
        assert_eq!(
            unknown,
            [
                (1, "allow_switch_vms"),
                (2, "bridge_driver"),
                (4, "enable_rbac"),
                (5, "host_type"),
                (6, "local_image_path"),
                (9, "networks"),
                (11, "rack"),
            ]
        );
    }

    #[test]
    fn in_yaml_the_last_of_two_equal_keys_counts() {
        let draft = overlaid("cuda_mps_replicas: 4\nlog_level: warn\ncuda-mps-replicas: 6\n");
        assert_eq!(draft.problems, []);
        assert_eq!(draft.settings.replicas.get(), 6);
        let [warning] = draft.warnings.as_slice() else { panic!("{:?}", draft.warnings) };
        assert_eq!(
            warning.to_string(),
            format!(
                "{FILE}:3: cuda_mps_replicas: the key is already set on line 1; the last line counts; \
                 remove one of the two lines"
            )
        );
        // The later value of a key overrides the earlier value, so the earlier value is not checked.
        assert_eq!(settings("log_level: loud\nlog_level: warn\n").log_level, Level::WARN);
    }

    #[test]
    fn in_the_older_form_the_first_of_two_equal_keys_counts() {
        let draft = overlaid("cuda_mps_replicas = 4\n\ncuda-mps-replicas = 6\n");
        assert_eq!(draft.settings.replicas.get(), 4);
        assert_eq!(draft.warnings.len(), 1);
        assert_eq!(draft.warnings[0].origin.line, Some(3));
        assert!(draft.warnings[0].problem.found.contains("line 1"), "{}", draft.warnings[0]);
        assert!(draft.warnings[0].problem.found.contains("first line counts"), "{}", draft.warnings[0]);
    }

    #[test]
    fn the_older_form() {
        let text = concat!(
            "# an old file\n",
            "[host]\n",
            "  enable_cuda_mps = True\n",
            "cuda_mps_pipe_directory=\"/run/mps/pipe\" # here\n",
            "cuda-mps-log-directory = '/run/mps/log'\n",
            "networks = [eth0/br0/192.168.0.1, eth1]\n",
            "cuda_mps_thread_percentage = 50\n",
        );
        let draft = overlaid(text);
        assert_eq!(draft.problems, []);
        assert!(draft.settings.enabled);
        assert_eq!(draft.settings.pipe_directory, Path::new("/run/mps/pipe"));
        assert_eq!(draft.settings.log_directory, Path::new("/run/mps/log"));
        assert_eq!(draft.settings.thread_policy, ThreadPolicy::Fixed(50));
        assert_eq!(draft.origin(PIPE_KEY).unwrap().line, Some(4));
        assert_eq!(draft.unknown_keys.len(), 1);
        assert_eq!(unquoted("\"a\\tb\""), "a\tb");
        assert_eq!(unquoted("a\\tb"), "a\\tb");
        assert_eq!(unquoted("\""), "\"");
    }

    #[test]
    fn neither_form_is_an_error_with_its_line() {
        // The second line has no `=`, so the file is not in the older form, and the file is no YAML either.
        let found = problems("enable_cuda_mps = true\nnonsense: here\nlog_level = info\n");
        assert!(found[0].problem.found.starts_with("not valid YAML"), "{}", found[0]);
        assert!(found[0].origin.line.is_some());
        for text in ["just words\n", "- a\n- b\n", "[a, b]\n", "42\n"] {
            let found = problems(text);
            assert!(found[0].problem.found.contains("instead of keys"), "{}", found[0]);
        }
        let tabbed = problems("networks:\n\t- eth0\nenable_cuda_mps: true\n");
        assert_eq!(tabbed[0].origin.line, Some(2));
        assert!(tabbed[0].to_string().contains("tab"), "{}", tabbed[0]);
        assert!(problems("a: &a [*a]\n")[0].problem.found.contains("alias"));
    }

    /// The documentation tells users to write `options=$(yunion-mpsctl env ... --format docker) && docker run $options`. The
    /// shell splits `$options` at blanks.
    #[test]
    fn the_pipe_directory_is_one_word_of_an_option() {
        for path in ["/x y/pipe", "/a:b/pipe", "/a*b", "/a?b", "/a[b", "/a\\b", "/a\u{3000}b"] {
            let told = problems(&format!("cuda_mps_pipe_directory: '{path}'\n"));
            assert_eq!(told.len(), 1, "{path}");
            assert!(told[0].problem.remedy.contains("Docker and Podman"), "{}", told[0]);
            let of_logs = overlaid(&format!("cuda_mps_log_directory: '{path}'\n"));
            assert_eq!(of_logs.problems, [], "{path}");
        }
        let word = overlaid("cuda_mps_pipe_directory: '/a$HOME,é/pipe'\n");
        assert_eq!(word.problems, []);
    }

    #[test]
    fn every_bad_value_is_reported_with_line_key_and_finding() {
        let text = concat!(
            "enable_cuda_mps: maybe\n",
            "container_device_config_file: devices.yml\n",
            "local_config_file: [x]\n",
            "cuda_mps_pipe_directory: tmp/pipe\n",
            "cuda_mps_log_directory: /\n",
            "cuda_mps_replicas: 0\n",
            "log_level: verbose\n",
            "cuda_mps_topology: per-gpu\n",
            "cuda_mps_thread_percentage: 101\n",
            "cuda_mps_multiuser: \"yes\"\n",
            "cuda_mps_prewarm: 2\n",
            "cuda_mps_set_compute_mode: {a: b}\n",
            "cuda_mps_quit_timeout: 0\n",
            "cuda_mps_fault_grace: 3601\n",
            "cuda_mps_overuse: kill\n",
            "cuda_mps_may_terminate: user\n",
            "cuda_mps_log_max_size: 16M\n",
            "cuda_mps_cdi_directory: \"/a\\nb\"\n",
        );
        let found: Vec<_> =
            problems(text).into_iter().map(|p| (p.origin.line.unwrap(), p.key, p.problem.found)).collect();
        let expected = [
            ("enable_cuda_mps", "found \"maybe\""),
            ("container_device_config_file", "found \"devices.yml\""),
            ("local_config_file", "found a list"),
            ("cuda_mps_pipe_directory", "found \"tmp/pipe\""),
            ("cuda_mps_log_directory", "found \"/\""),
            ("cuda_mps_replicas", "found 0"),
            ("log_level", "found \"verbose\""),
            ("cuda_mps_topology", "found \"per-gpu\""),
            ("cuda_mps_thread_percentage", "found 101"),
            ("cuda_mps_multiuser", "found \"yes\""),
            ("cuda_mps_prewarm", "found 2"),
            ("cuda_mps_set_compute_mode", "found a mapping"),
            ("cuda_mps_quit_timeout", "found 0"),
            ("cuda_mps_fault_grace", "found 3601"),
            ("cuda_mps_overuse", "found \"kill\""),
            ("cuda_mps_may_terminate", "found \"user\""),
            ("cuda_mps_log_max_size", "found \"16M\""),
            ("cuda_mps_cdi_directory", "found \"/a\\nb\""),
        ];
        let expected: Vec<_> = expected
            .into_iter()
            .enumerate()
            .map(|(at, (key, found))| (at + 1, key.to_owned(), found.to_owned()))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn ranges_end_at_the_documented_values() {
        let ranges = [
            ("cuda_mps_replicas", 1, 999),
            ("cuda_mps_thread_percentage", 1, 100),
            ("cuda_mps_quit_timeout", 1, 600),
            ("cuda_mps_fault_grace", 0, 3600),
            ("cuda_mps_log_max_size", 1, 1024),
        ];
        for (key, least, most) in ranges {
            for value in [least, most] {
                settings(&format!("{key}: {value}"));
                settings(&format!("{key}: '{value}'"));
                settings(&format!("{key} = {value}"));
            }
            for value in [least - 1, most + 1] {
                let remedy = &problems(&format!("{key}: {value}"))[0].problem.remedy;
                assert!(remedy.contains(&format!("{least} to {most}")), "{key}: {remedy}");
            }
            for value in ["1.5", "one", "true", "99999999999999999999", "[1]"] {
                assert_eq!(problem(&format!("\n{key}: {value}")).0, Some(2), "{key}: {value}");
            }
        }
    }

    #[test]
    fn every_word_of_every_choice() {
        let words = concat!(
            "log_level: error\ncuda_mps_topology: per_gpu\ncuda_mps_thread_percentage: balanced\n",
            "cuda_mps_multiuser: off\ncuda_mps_prewarm: no\ncuda_mps_set_compute_mode: false\n",
            "cuda_mps_cpu_affinity: auto\n",
            "cuda_mps_quit_timeout: 20\ncuda_mps_fault_grace: 0\ncuda_mps_memory_limit: watch\ncuda_mps_overuse: terminate\n",
            "cuda_mps_may_terminate: owner\ncuda_mps_log_max_size: 2\n",
            "cuda_mps_cdi_directory: /var/run/cdi/\nservers_path: /srv/guests\n",
        );
        let expected = Settings {
            log_level: Level::ERROR,
            topology: Topology::PerGpu,
            thread_policy: ThreadPolicy::Balanced,
            multiuser: MultiUser::Off,
            prewarm: false,
            cpu_affinity: CpuAffinity::Auto,
            supervision: Supervision {
                set_compute_mode: false,
                quit_timeout: Duration::from_secs(20),
                fault_grace: Duration::ZERO,
                log_max_bytes: 2 * 1024 * 1024,
                servers_path: PathBuf::from("/srv/guests"),
            },
            memory_limit: MemoryLimit::Watch,
            on_overuse: OnOveruse::Terminate,
            may_terminate: MayTerminate::Owner,
            cdi_directory: Some(PathBuf::from("/var/run/cdi")),
            ..Settings::default()
        };
        assert_eq!(settings(words), expected);
        assert_eq!(settings("cuda_mps_thread_percentage: unlimited").thread_policy, ThreadPolicy::Unlimited);
        assert_eq!(settings("cuda_mps_thread_percentage: equal").thread_policy, ThreadPolicy::Equal);
        assert_eq!(settings("cuda_mps_memory_limit: auto").memory_limit, MemoryLimit::Auto);
        assert_eq!(settings("cuda_mps_overuse: report").on_overuse, OnOveruse::Report);
        assert_eq!(settings("cuda_mps_may_terminate: root").may_terminate, MayTerminate::Root);
        assert_eq!(settings("cuda_mps_cpu_affinity: none").cpu_affinity, CpuAffinity::None);
        assert_eq!(settings("cuda_mps_multiuser: on").multiuser, MultiUser::On);
        assert_eq!(settings("cuda_mps_multiuser: auto").multiuser, MultiUser::Auto);
    }

    #[test]
    fn directories_are_normalised_and_checked() {
        let pipe = |path: &str| settings(&format!("cuda_mps_pipe_directory: {path}")).pipe_directory;
        assert_eq!(pipe("//run///mps/./pipe//").as_os_str(), "/run/mps/pipe");
        assert_eq!(pipe("'/run/a-b/é'").as_os_str(), "/run/a-b/é");
        for path in [
            "''",
            "pipe",
            "./pipe",
            "/",
            "//",
            "/./",
            "/run/../tmp",
            "\"/run/a\\0b\"",
            "\"/run/\\e[1m\"",
            "7",
            "[]",
        ] {
            let (line, key, _) = problem(&format!("cuda_mps_pipe_directory: {path}"));
            assert_eq!((line, key.as_str()), (Some(1), PIPE_KEY), "{path}");
        }
    }

    #[test]
    fn the_two_directories_differ() {
        let (line, key, found) =
            problem("cuda_mps_pipe_directory: /run/mps\n\ncuda_mps_log_directory: /run//mps/\n");
        assert_eq!((line, key.as_str()), (Some(3), LOG_KEY));
        assert!(found.contains("\"/run/mps\""), "{found}");
    }

    #[test]
    fn no_log_directory_is_in_the_pipe_directory_by_itself() {
        for pipe in ["/tmp/nvidia-mps", "/tmp", "/tmp/nvidia-mps/log"] {
            let settings = settings(&format!("cuda_mps_pipe_directory: {pipe}"));
            assert_eq!(settings.log_directory, Path::new(LOG_BESIDE_PIPE));
            assert_eq!(settings.log_in_pipe, None);
        }
        let beside = settings("cuda_mps_pipe_directory: /tmp/nvidia-mps/log2");
        assert_eq!(beside.log_directory, Path::new("/tmp/nvidia-mps/log"));
    }

    #[test]
    fn a_log_directory_that_a_file_puts_into_the_pipe_directory_is_a_warning() {
        let draft = overlaid("cuda_mps_pipe_directory: /run/mps\ncuda_mps_log_directory: /run/mps/log\n");
        assert_eq!(draft.problems, []);
        let [warning] = <[LocatedProblem; 1]>::try_from(draft.warnings).unwrap();
        assert_eq!((warning.origin.line, warning.key.as_str()), (Some(2), LOG_KEY));
        assert_eq!(draft.settings.log_in_pipe, Some(warning.origin));
        assert_eq!(draft.settings.log_directory, Path::new("/run/mps/log"));
    }

    #[test]
    fn a_pipe_directory_leaves_room_for_the_socket() {
        let path = |bytes: usize| format!("/{}", "d".repeat(bytes - 1));
        settings(&format!("cuda_mps_pipe_directory: {}", path(87)));
        let (line, key, found) = problem(&format!("\ncuda_mps_pipe_directory: {}", path(88)));
        assert_eq!((line, key.as_str()), (Some(2), PIPE_KEY));
        assert!(found.contains("107 bytes") && found.contains("106"), "{found}");
        let per_gpu = |bytes| format!("cuda_mps_topology: per_gpu\ncuda_mps_pipe_directory: {}", path(bytes));
        settings(&per_gpu(46));
        let [problem] = <[LocatedProblem; 1]>::try_from(problems(&per_gpu(47))).unwrap();
        assert!(problem.problem.found.contains("107 bytes"), "{problem}");
        assert!(problem.problem.remedy.contains("46 bytes"), "{problem}");
        let per_slice =
            |bytes| format!("cuda_mps_topology: per_slice\ncuda_mps_pipe_directory: {}", path(bytes));
        settings(&per_slice(66));
        let [problem] = <[LocatedProblem; 1]>::try_from(problems(&per_slice(67))).unwrap();
        assert!(
            problem.problem.found.contains("name of the slice> would have a path of 107 bytes"),
            "{problem}"
        );
    }

    #[test]
    fn a_misspelt_key_is_a_warning() {
        let draft = overlaid("cuda_mps_replica: 4\nEnable_CUDA_mps: true\nreplicas: 4\n");
        let warned: Vec<_> =
            draft.warnings.iter().map(|w| (w.origin.line.unwrap(), w.key.as_str())).collect();
        assert_eq!(warned, [(1, "cuda_mps_replica"), (2, "Enable_CUDA_mps")]);
        assert!(draft.warnings[1].problem.remedy.contains("enable_cuda_mps"));
        assert_eq!(draft.unknown_keys.len(), 1);
    }

    #[test]
    fn the_example_shows_every_key() {
        let example = include_str!("../../../../config/host.conf");
        for (key, _) in KEYS {
            assert_eq!(example.matches(&format!("\n#{key}: ")).count(), 1, "{key}");
        }
    }

    #[test]
    fn the_manual_page_has_every_key_with_its_default() {
        let page = include_str!("../../../../packaging/man/yunion-mps-host.conf.5");
        let mut file = String::new();
        let mut without = Vec::new();
        for (key, _) in KEYS {
            let entries: Vec<&str> =
                page.lines().filter_map(|line| line.strip_prefix(&format!(".It Ic {key} Pq "))).collect();
            match entries[..] {
                ["no default"] => without.push(key),
                [entry] => file += &format!("{key}: {}\n", entry.strip_prefix("default: ").expect(entry)),
                _ => panic!("{key}: {entries:?}"),
            }
        }
        assert_eq!(without, [DEVICE_FILE_KEY, "cuda_mps_cdi_directory"]);
        let draft = overlaid(&file);
        assert_eq!((draft.problems, draft.warnings), (Vec::new(), Vec::new()));
        assert_eq!(draft.origins.len() + without.len(), KEYS.len(), "one value for each key");
        let default = Draft::new();
        assert_eq!(draft.settings, default.settings);
        assert_eq!((draft.device_file, draft.local_file), (default.device_file, default.local_file));
    }

    fn directory_in_one_word() -> impl Strategy<Value = PathBuf> {
        "/[a-zA-Z0-9_é][a-zA-Z0-9_.,é$'-]{0,20}[a-z]".prop_map(PathBuf::from)
    }

    /// A directory with a path that can be written in both syntaxes of `host.conf`. In the older form # begins a comment even
    /// within quotes, so the path has no #.
    fn any_directory() -> impl Strategy<Value = PathBuf> {
        "/[a-zA-Z0-9_é][a-zA-Z0-9_.:, é-]{0,20}[a-z]".prop_map(PathBuf::from)
    }

    prop_compose! {
        fn any_settings()(
            (enabled, prewarm, set_compute_mode) in any::<(bool, bool, bool)>(),
            (pipe_directory, log_directory) in (directory_in_one_word(), any_directory()).prop_filter("differ", |(a, b)| a != b),
            cdi_directory in proptest::option::of(any_directory()),
            replicas in 1u32..=999,
            log_level in prop::sample::select(vec![Level::DEBUG, Level::INFO, Level::WARN, Level::ERROR]),
            topology in prop::sample::select(vec![Topology::Shared, Topology::PerGpu, Topology::PerSlice]),
            thread_policy in prop_oneof![
                Just(ThreadPolicy::Equal),
                Just(ThreadPolicy::Balanced),
                Just(ThreadPolicy::Unlimited),
                (1u8..=100).prop_map(ThreadPolicy::Fixed),
            ],
            multiuser in prop::sample::select(vec![MultiUser::Auto, MultiUser::On, MultiUser::Off]),
            cpu_affinity in prop::sample::select(vec![CpuAffinity::None, CpuAffinity::Auto]),
            quit_timeout in 1u64..=600,
            fault_grace in 0u64..=3600,
            memory_limit in prop::sample::select(vec![MemoryLimit::Auto, MemoryLimit::Watch]),
            on_overuse in prop::sample::select(vec![OnOveruse::Report, OnOveruse::Terminate]),
            may_terminate in prop::sample::select(vec![MayTerminate::Root, MayTerminate::Owner]),
            log_max_mib in 1u64..=1024,
            servers_path in any_directory(),
        ) -> Settings {
            Settings {
                enabled,
                pipe_directory,
                log_directory,
                log_in_pipe: None,
                replicas: replicas.try_into().unwrap(),
                log_level,
                topology,
                thread_policy,
                multiuser,
                prewarm,
                cpu_affinity,
                supervision: Supervision {
                    set_compute_mode,
                    quit_timeout: Duration::from_secs(quit_timeout),
                    fault_grace: Duration::from_secs(fault_grace),
                    log_max_bytes: log_max_mib * 1024 * 1024,
                    servers_path,
                },
                memory_limit,
                on_overuse,
                may_terminate,
                cdi_directory,
                devices: Vec::new(),
                says_enabled: false,
                sources: Vec::new(),
                absent: Vec::new(),
            }
        }
    }

    fn written(settings: &Settings) -> Vec<(&'static str, String)> {
        let path = |path: &Path| format!("\"{}\"", path.display());
        let mut lines = vec![
            ("enable_cuda_mps", settings.enabled.to_string()),
            (PIPE_KEY, path(&settings.pipe_directory)),
            (LOG_KEY, path(&settings.log_directory)),
            ("cuda_mps_replicas", settings.replicas.to_string()),
            ("log_level", settings.log_level.to_string().to_lowercase()),
            (
                TOPOLOGY_KEY,
                match settings.topology {
                    Topology::Shared => "shared",
                    Topology::PerGpu => "per_gpu",
                    Topology::PerSlice => "per_slice",
                }
                .to_owned(),
            ),
            (
                "cuda_mps_thread_percentage",
                match settings.thread_policy {
                    ThreadPolicy::Fixed(percent) => percent.to_string(),
                    policy => format!("{policy:?}").to_lowercase(),
                },
            ),
            (
                "cuda_mps_multiuser",
                match settings.multiuser {
                    MultiUser::Auto => "auto",
                    MultiUser::On => "true",
                    MultiUser::Off => "false",
                }
                .to_owned(),
            ),
            ("cuda_mps_prewarm", settings.prewarm.to_string()),
            ("cuda_mps_set_compute_mode", settings.supervision.set_compute_mode.to_string()),
            ("cuda_mps_cpu_affinity", format!("{:?}", settings.cpu_affinity).to_lowercase()),
            ("cuda_mps_quit_timeout", settings.supervision.quit_timeout.as_secs().to_string()),
            ("cuda_mps_fault_grace", settings.supervision.fault_grace.as_secs().to_string()),
            ("cuda_mps_memory_limit", format!("{:?}", settings.memory_limit).to_lowercase()),
            ("cuda_mps_overuse", format!("{:?}", settings.on_overuse).to_lowercase()),
            ("cuda_mps_may_terminate", format!("{:?}", settings.may_terminate).to_lowercase()),
            ("cuda_mps_log_max_size", (settings.supervision.log_max_bytes / 1024 / 1024).to_string()),
            ("servers_path", path(&settings.supervision.servers_path)),
        ];
        lines.extend(
            settings.cdi_directory.as_deref().map(|directory| ("cuda_mps_cdi_directory", path(directory))),
        );
        lines
    }

    fn any_file() -> impl Strategy<Value = String> {
        (any_settings(), prop::sample::select(vec![": ", " = "])).prop_map(|(settings, between)| {
            written(&settings).into_iter().map(|(key, value)| format!("{key}{between}{value}\n")).collect()
        })
    }

    fn survives(bytes: &[u8]) {
        let mut draft = Draft::new();
        match text_of(Path::new(FILE), bytes) {
            Ok(text) => draft.overlay(Path::new(FILE), &text),
            Err(problem) => draft.problems.push(problem),
        }
        draft.check_together();
        for problem in draft.problems.iter().chain(&draft.warnings) {
            assert_eq!(problem.origin.file, Path::new(FILE));
            assert!(!problem.problem.found.is_empty() && !problem.problem.remedy.is_empty());
        }
        if draft.problems.is_empty() {
            let settings = draft.settings;
            assert!((1..=999).contains(&settings.replicas.get()));
            assert!(
                settings.pipe_directory.is_absolute() && settings.pipe_directory != settings.log_directory
            );
            assert!(settings.pipe_directory.as_os_str().len() <= 87);
        }
    }

    proptest! {
        #[test]
        fn both_forms_say_the_same(settings in any_settings(), reverse in any::<bool>()) {
            let mut lines = written(&settings);
            if reverse {
                lines.reverse();
            }
            for between in [": ", " = "] {
                let text: String = lines.iter().map(|(key, value)| format!("{key}{between}{value}\n")).collect();
                let draft = overlaid(&text);
                prop_assert_eq!(&draft.problems, &[], "{}", text);
                prop_assert_eq!(&draft.warnings, &[], "{}", text);
                prop_assert_eq!(&draft.settings, &settings, "{}", text);
            }
        }

        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            survives(&bytes);
        }

        #[test]
        fn anything_that_looks_like_yaml_is_survived(text in "([a-z_]{1,3}|[-:?,\\[\\]{}&*!|>'\"%@`#= \t\r\n\\\\]){0,80}") {
            survives(text.as_bytes());
        }

        #[test]
        fn a_damaged_file_is_survived(
            text in any_file(),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), 0u8..3, any::<u8>()), 1..6),
        ) {
            let mut bytes = text.into_bytes();
            for (at, kind, byte) in changes {
                let at = at.index(bytes.len().max(1));
                match kind {
                    0 if at < bytes.len() => bytes[at] = byte,
                    1 if at < bytes.len() => drop(bytes.remove(at)),
                    _ => bytes.insert(at.min(bytes.len()), byte),
                }
            }
            survives(&bytes);
        }
    }
}
