//! Reads `host_container_device.yml`: the GPUs to serve, and the number of slices of each GPU.
//!
//! The file belongs to Cloudpods's host agent and lists devices of many types. This service serves the type `NVIDIA_MPS`. An
//! entry of another type only says that the device is used for something else, so this service ignores mistakes in the entry.
//! But a type that looks like a misspelt `NVIDIA_MPS` is an error: a file without any `NVIDIA_MPS` entry makes the service
//! serve every GPU, and a typing error must not cause that.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use mps_core::terms::PciAddress;

use super::host_conf::{Draft, boolean};
use super::yaml::{self, Node, Pair, Value};
use super::{DeviceEntry, DevicePath, Isolation, MpsEntry, SliceKeys};
use super::{memory, most_clients, percentage, slices};
use crate::counted::counted;
use crate::problem::{LocatedProblem, Origin, Problem};

/// The type of the entries that this service serves. Like the host agent, this service compares the type exactly.
const MPS_TYPE: &str = "NVIDIA_MPS";

/// The largest number of entries of all types that the device file may have. A host has some dozens of devices. Each entry may
/// add a problem to the report, so an unlimited number of entries would make an unlimited report.
const MAX_ENTRIES: usize = 1024;

pub(super) fn parse(file: &Path, text: &str, findings: &mut Draft) -> Vec<DeviceEntry> {
    let items = items(file, text, findings);
    let Some((list, items)) = findings.checked(items) else { return Vec::new() };
    let entry = |(index, item): (usize, Node<'_>)| {
        // The YAML parser does not report the line of every entry. An entry without a line gets the line of the list.
        let origin = Origin { line: item.line.or(list.line), ..list.clone() };
        Entry { name: format!("devices[{index}]"), origin, fields: HashMap::new() }.read(item.value, findings)
    };
    items.into_iter().enumerate().filter_map(entry).collect()
}

fn items<'t>(
    file: &Path,
    text: &'t str,
    findings: &mut Draft,
) -> Result<(Origin, Vec<Node<'t>>), LocatedProblem> {
    let place = |line| Origin { file: file.to_owned(), line };
    let write_list = "write `devices:` and below it one entry per device";
    let root = yaml::parse(file, text)?;
    let pairs = match root.value {
        Value::Map(pairs) => pairs,
        Value::Null => Vec::new(),
        other => {
            let found = format!("{found} instead of the key `devices`", found = other.found());
            return Err(LocatedProblem::new(place(root.line), "", found, write_list));
        }
    };
    let (empty, before) = (pairs.is_empty(), findings.problems.len());
    let mut devices = None;
    for (key, value) in pairs {
        let (origin, name) = (place(key.line), key.value.text());
        let ours = words(&name);
        if let Some(key) = KEYS.into_iter().find(|key| *key == ours) {
            findings.problems.push(outside(origin, key));
        } else if ours != "devices" {
            findings.unknown_keys.push((origin, yaml::printable(&name)));
        } else if let Some((earlier, _)) = devices.replace((origin.clone(), value)) {
            let found =
                format!("the key is also at {earlier}; the service reads only the last `devices` list");
            findings.warnings.push(LocatedProblem::new(origin, name, found, "put all entries into one list"));
        }
    }
    let Some((origin, list)) = devices else {
        let missing = LocatedProblem::new(place(None), "devices", "no such list", write_list);
        return if empty { Ok((place(None), Vec::new())) } else { Err(missing) };
    };
    match list.value {
        // A key of an entry stands at the left edge, where it ends the YAML list. So the entries lack their keys. Problems in
        // these entries would only follow from the wrong indentation, so the entries are not read.
        _ if findings.problems.len() > before => Ok((origin, Vec::new())),
        Value::List(items) if items.len() > MAX_ENTRIES => {
            let found =
                format!("found {count} entries, at most {MAX_ENTRIES} are allowed", count = items.len());
            Err(LocatedProblem::new(origin, "devices", found, "write one entry for each device of this host"))
        }
        Value::List(items) => Ok((origin, items)),
        Value::Null => Ok((origin, Vec::new())),
        other => {
            let remedy = "write a list: below `devices:` one `- path: ...` per device";
            Err(LocatedProblem::new(origin, "devices", other.found(), remedy))
        }
    }
}

/// The problem of an entry's key that stands at the left edge of the file, and so outside of the list `devices`.
fn outside(origin: Origin, key: &str) -> LocatedProblem {
    let remedy = match key {
        "path" => "begin an entry with the path: `- path: ...` below `devices:`",
        _ => "indent this key as far as the key `path` of the entry",
    };
    LocatedProblem::new(origin, key, "the key stands outside of the list `devices`", remedy)
}

/// The keys of an entry. As in the host agent, other spellings with the same words are accepted, such as `virtual-number` and
/// `virtualNumber` for `virtual_number`.
const KEYS: [&str; 9] = [
    "path",
    "type",
    "virtual_number",
    "thread_percentage",
    "max_clients",
    "isolation",
    "memory",
    "overcommit",
    "slices",
];

const SLICE_KEYS: [&str; 3] = ["memory", "thread_percentage", "max_clients"];

struct Entry<'t> {
    /// The name of the entry in messages, such as `devices[2]`.
    name: String,
    origin: Origin,
    fields: HashMap<&'static str, Node<'t>>,
}

impl<'t> Entry<'t> {
    fn problem(&self, line: Option<usize>, key: &str, found: &str, remedy: &str) -> LocatedProblem {
        let key = if key.is_empty() { self.name.clone() } else { format!("{}.{key}", self.name) };
        LocatedProblem::new(Origin { line, ..self.origin.clone() }, key, found, remedy)
    }

    /// None if the entry is unusable: then `findings` has the problem.
    fn read(mut self, value: Value<'t>, findings: &mut Draft) -> Option<DeviceEntry> {
        let Value::Map(pairs) = value else {
            let keys = "the keys path, type and virtual_number";
            let (found, remedy) = match value {
                Value::Null => ("an empty entry".to_owned(), format!("remove the entry, or write {keys}")),
                other => (other.found(), format!("write an entry with {keys}")),
            };
            findings.problems.push(self.problem(self.origin.line, "", &found, &remedy));
            return None;
        };
        let warnings = self.fill(pairs, &KEYS);
        let device_type = findings.checked(self.required("type", WRITE_TYPE, device_type))?;
        if device_type != MPS_TYPE {
            let path = self.fields.get("path").and_then(|field| path(&field.value).ok());
            return Some(DeviceEntry { name: self.name, origin: self.origin, device_type, path, mps: None });
        }
        findings.warnings.extend(warnings);
        let path = findings.checked(self.required("path", WRITE_PATH, path));
        let own = self.own_sizes(findings);
        // If the list `slices` is unusable, its problem is already in `findings`. The unknown number of slices is no further
        // problem.
        let slices = own.as_deref().and_then(|own| findings.checked(self.number(own)));
        let each = self.size(findings);
        let isolation = findings.checked(self.optional("isolation", isolation));
        let overcommit = findings.checked(self.optional("overcommit", boolean));
        // The `?` operators come after all keys were read, so that the administrator sees every problem at once.
        let mps = Some(MpsEntry {
            slices: slices?,
            each: each?,
            own: own?,
            isolation: isolation?,
            overcommit: overcommit?.unwrap_or_default(),
        });
        Some(DeviceEntry { name: self.name, origin: self.origin, device_type, path: Some(path?), mps })
    }

    fn number(&self, own: &[SliceKeys]) -> Result<NonZeroU32, LocatedProblem> {
        let remedy = "write the number of slices of the GPU, 1 to 999";
        let listed = u32::try_from(own.len()).ok().and_then(NonZeroU32::new);
        let Some(listed) = listed else { return self.required("virtual_number", remedy, slices) };
        match self.optional("virtual_number", slices)? {
            Some(written) if written != listed => {
                let found = format!(
                    "found {written}, but the list `slices` has {listed}",
                    listed = counted(own.len(), "slice")
                );
                let line = self.fields.get("virtual_number").and_then(|field| field.line);
                Err(self.problem(
                    line,
                    "virtual_number",
                    &found,
                    &format!("write {listed}, or remove virtual_number"),
                ))
            }
            _ => Ok(listed),
        }
    }

    fn size(&self, findings: &mut Draft) -> Option<SliceKeys> {
        let memory_mib = findings.checked(self.optional("memory", memory));
        let thread_percentage = findings.checked(self.optional("thread_percentage", percentage));
        let max_clients = findings.checked(self.optional("max_clients", most_clients));
        Some(SliceKeys {
            memory_mib: memory_mib?,
            thread_percentage: thread_percentage?,
            max_clients: max_clients?,
        })
    }

    /// Reads the list `slices`: the keys of each slice. Empty if the entry has no such list. None if the list is unusable.
    fn own_sizes(&mut self, findings: &mut Draft) -> Option<Vec<SliceKeys>> {
        const WRITE_LIST: &str = "write a list of 1 to 999 slices, each as {memory: 20GiB}";
        let Some(Node { line, value }) = self.fields.remove("slices") else { return Some(Vec::new()) };
        let items = match value {
            Value::Null => return Some(Vec::new()),
            Value::List(items) if (1..=999).contains(&items.len()) => items,
            other => {
                let found = match other {
                    Value::List(items) => format!("{} entries", items.len()),
                    other => other.found(),
                };
                findings.problems.push(self.problem(line, "slices", &found, WRITE_LIST));
                return None;
            }
        };
        let each_has_memory = self.fields.get("memory").is_some_and(|field| field.value != Value::Null);
        let own = items.into_iter().enumerate().map(|(ordinal, item)| {
            let origin = Origin { line: item.line.or(line), ..self.origin.clone() };
            let name = format!("{}.slices[{ordinal}]", self.name);
            let mut slice = Entry { name, origin, fields: HashMap::new() };
            let Value::Map(pairs) = item.value else {
                let found = item.value.found();
                findings.problems.push(slice.problem(slice.origin.line, "", &found, WRITE_LIST));
                return None;
            };
            findings.warnings.extend(slice.fill(pairs, &SLICE_KEYS));
            let size = slice.size(findings)?;
            if size.memory_mib.is_none() && !each_has_memory {
                let remedy =
                    "write memory for this slice, such as 20GiB, or write memory in the GPU's entry: that \
                     value then holds for each slice without the key memory";
                findings.problems.push(slice.problem(slice.origin.line, "memory", "missing", remedy));
                return None;
            }
            Some(size)
        });
        // All elements are read before a bad element makes the list unusable, so that the administrator sees every problem at
        // once.
        let own: Vec<Option<SliceKeys>> = own.collect();
        own.into_iter().collect()
    }

    fn fill(&mut self, pairs: Vec<Pair<'t>>, keys: &[&'static str]) -> Vec<LocatedProblem> {
        let mut warnings = Vec::new();
        for (key, Node { value, .. }) in pairs {
            let (line, name) = (key.line.or(self.origin.line), key.value.text());
            let ours = words(&name);
            let (found, remedy) = match keys.iter().copied().find(|key| *key == ours) {
                None => {
                    ("the service knows no such key and ignores it", "correct the spelling or remove the key")
                }
                Some(key) => match self.fields.insert(key, Node { line, value }) {
                    None => continue,
                    Some(_) => {
                        ("the key is written twice; the last value counts", "remove one of the two lines")
                    }
                },
            };
            warnings.push(self.problem(line, &yaml::printable(&name), found, remedy));
        }
        warnings
    }

    fn required<T>(&self, key: &str, remedy: &str, read: Reader<T>) -> Result<T, LocatedProblem> {
        let missing = || self.problem(self.origin.line, key, "missing", remedy);
        self.valid(self.fields.get(key).ok_or_else(missing)?, key, read)
    }

    fn optional<T>(&self, key: &str, read: Reader<T>) -> Result<Option<T>, LocatedProblem> {
        let set = self.fields.get(key).filter(|field| field.value != Value::Null);
        set.map(|field| self.valid(field, key, read)).transpose()
    }

    fn valid<T>(&self, field: &Node<'_>, key: &str, read: Reader<T>) -> Result<T, LocatedProblem> {
        read(&field.value).map_err(|wrong| self.problem(field.line, key, &wrong.found, &wrong.remedy))
    }
}

type Reader<T> = fn(&Value<'_>) -> Result<T, Problem>;

const WRITE_PATH: &str = "name the GPU by its render node, such as /dev/dri/renderD128";
const WRITE_TYPE: &str = "write a type such as NVIDIA_MPS";

fn isolation(value: &Value<'_>) -> Result<Isolation, Problem> {
    value.text().parse().map_err(|_| {
        value.wrong(
            "write slice (a control daemon for each slice) or gpu (one control daemon for all slices of the \
             GPU)",
        )
    })
}

fn path(value: &Value<'_>) -> Result<DevicePath, Problem> {
    match value.text().as_ref() {
        "" => Err(value.wrong(WRITE_PATH)),
        text => Ok(classify(text)),
    }
}

fn device_type(value: &Value<'_>) -> Result<String, Problem> {
    match value.text().as_ref() {
        "" => Err(value.wrong(WRITE_TYPE)),
        text if text != MPS_TYPE && is_near_miss(text) => {
            Err(value.wrong("write NVIDIA_MPS, or correct the spelling if another type is meant"))
        }
        text => Ok(text.to_owned()),
    }
}

/// Splits a key into words as the host agent does, and joins the words in lower case with `_`. So `virtual-number`,
/// `virtualNumber` and `VIRTUAL_NUMBER` are one key. A word begins at a capital letter, and after any character that is neither
/// letter nor digit. Several capitals in a row form one word. But if small letters follow, the last capital begins the next
/// word, as in `VIRTUALNumber`.
fn words(key: &str) -> String {
    let bytes = key.as_bytes();
    let mut words = String::new();
    let mut capitals = 0_usize;
    let mut apart = false;
    for (at, byte) in bytes.iter().enumerate() {
        if !byte.is_ascii_alphanumeric() {
            apart = true;
            continue;
        }
        if byte.is_ascii_uppercase() {
            capitals += 1;
            let next = bytes.get(at + 1);
            let ends_a_row = next.is_some_and(|next| next.is_ascii_lowercase() || next.is_ascii_digit());
            apart |= capitals == 1 || (capitals > 2 && ends_a_row);
        } else {
            capitals = 0;
        }
        if std::mem::take(&mut apart) && !words.is_empty() {
            words.push('_');
        }
        words.push(byte.to_ascii_lowercase().into());
    }
    words
}

/// The length in bytes up to which a text can count as a misspelt `NVIDIA_MPS`. The limit bounds the work of the comparison.
const LONGEST_SLIP: usize = 64;

/// True if the type is `MPS`, or differs from `NVIDIA_MPS` only in capitals, in the characters between the words, and in at
/// most one letter. This letter may be added, missing, wrong or swapped with its neighbour. With two wrong letters,
/// `NVIDIA_GPU` would count as misspelt too.
fn is_near_miss(device_type: &str) -> bool {
    let letters = |text: &str| text.to_ascii_lowercase().replace(|c: char| !c.is_ascii_alphanumeric(), "");
    let (found, ours) = (letters(device_type), letters(MPS_TYPE));
    device_type.len() <= LONGEST_SLIP && (found == "mps" || strsim::osa_distance(&found, &ours) <= 1)
}

fn classify(text: &str) -> DevicePath {
    // The number in a device's name has no leading zero, so `/dev/nvidia01` is no device.
    let number = |prefix| {
        let digits =
            text.strip_prefix(prefix).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
        digits.parse::<u32>().ok().filter(|number| number.to_string() == digits)
    };
    if number("/dev/dri/renderD").is_some() {
        DevicePath::RenderNode(PathBuf::from(text))
    } else if let Some(minor) = number("/dev/nvidia") {
        DevicePath::NvidiaMinor(minor)
    } else if let Ok(address) = text.parse() {
        if PciAddress::is_short(text) { DevicePath::ShortPci(address) } else { DevicePath::Pci(address) }
    } else if let Some(uuid) = text.strip_prefix("GPU-").filter(|uuid| is_uuid(uuid)) {
        DevicePath::Uuid(format!("GPU-{}", uuid.to_ascii_lowercase()))
    } else {
        DevicePath::Other(text.to_owned())
    }
}

fn is_uuid(text: &str) -> bool {
    let dash = |at: usize| matches!(at, 8 | 13 | 18 | 23);
    text.len() == 36
        && text.bytes().enumerate().all(|(at, b)| if dash(at) { b == b'-' } else { b.is_ascii_hexdigit() })
}

#[cfg(test)]
mod tests {
    use std::num::{NonZeroU32, NonZeroU64};

    use proptest::prelude::*;

    use super::super::text_of;
    use super::*;

    const FILE: &str = "/etc/yunion/host_container_device.yml";
    const OUTSIDE: &str = "the key stands outside of the list `devices`";

    fn read(text: &str) -> (Vec<DeviceEntry>, Draft) {
        let mut findings = Draft::new();
        let entries = parse(Path::new(FILE), text, &mut findings);
        (entries, findings)
    }

    fn entries(text: &str) -> Vec<DeviceEntry> {
        let (entries, findings) = read(text);
        assert_eq!(findings.problems, [], "{text}");
        entries
    }

    fn told(problems: &[LocatedProblem]) -> Vec<(usize, &str, &str)> {
        let line = |problem: &LocatedProblem| problem.origin.line.unwrap_or_default();
        problems.iter().map(|p| (line(p), p.key.as_str(), p.problem.found.as_str())).collect()
    }

    /// A device file with one `NVIDIA_MPS` entry, in which `line` is the fourth line of the file.
    fn mps(line: &str) -> String {
        format!("devices:\n- path: /dev/dri/renderD128\n  type: NVIDIA_MPS\n  {line}\n")
    }

    #[test]
    fn the_documented_file() {
        let text = concat!(
            "devices:\n",
            "- path: \"/dev/dri/renderD128\"\n",
            "  type: \"NVIDIA_MPS\"\n",
            "  virtual_number: 4\n",
        );
        let entry = DeviceEntry {
            name: "devices[0]".to_owned(),
            origin: Origin { file: PathBuf::from(FILE), line: Some(2) },
            device_type: "NVIDIA_MPS".to_owned(),
            path: Some(DevicePath::RenderNode(PathBuf::from("/dev/dri/renderD128"))),
            mps: Some(MpsEntry::with_slices(4.try_into().unwrap())),
        };
        assert_eq!(entries(text), [entry]);
    }

    /// The first case is the example in Cloudpods's documentation. Its keys have the wrong indentation.
    #[test]
    fn a_key_of_an_entry_at_the_left_edge_is_named_with_its_line() {
        for (text, expected) in [
            (
                "devices:\n- path: /dev/dri/renderD128\ntype: NVIDIA_MPS\nvirtualNumber: 4\n",
                vec![(3, "type", OUTSIDE), (4, "virtual_number", OUTSIDE)],
            ),
            ("type: NVIDIA_MPS\ndevices:\n- path: []\n", vec![(1, "type", OUTSIDE)]),
            ("devices:\n- type: NVIDIA_MPS\npath: x\n", vec![(3, "path", OUTSIDE)]),
            ("devices:\npath: x\n", vec![(2, "path", OUTSIDE)]),
            ("path: x\n", vec![(1, "path", OUTSIDE), (0, "devices", "no such list")]),
            (&format!("{}memory: 20GiB\n", mps("virtual_number: 4")), vec![(5, "memory", OUTSIDE)]),
        ] {
            let (entries, findings) = read(text);
            assert_eq!((entries, told(&findings.problems)), (Vec::new(), expected), "{text}");
            for problem in &findings.problems {
                let remedy = if problem.key == "type" { "as far as the key `path`" } else { "path" };
                assert!(problem.key == "devices" || problem.problem.remedy.contains(remedy), "{problem}");
            }
        }
    }

    #[test]
    fn entries_of_other_types_are_never_an_error() {
        let text = concat!(
            "devices:\n",
            "- path: /dev/dri/renderD129\n",
            "  type: NVIDIA_GPU_SHARE\n",
            "  virtual_number: 2\n",
            "- type: CPH_AOSP_BINDER\n",
            "  virtual_number: 140\n",
            "- {path: /dev/dri/renderD130, type: VASTAITECH_GPU, virtual_number: 0}\n",
            "- {path: [a, b], type: CPH_AMD_GPU, virtual_number: -1, thread_percentage: 900}\n",
            "- type: SOMETHING_NEW\n",
            "  virtual_number: {a: b}\n",
            "  unheard: of\n",
            "- type: NETINT_CA_ASIC\n",
            "  path:\n",
            "  virtual_number: 99999999999999999999999999\n",
            "- type: 7\n",
            "  path: ''\n",
            "- path: /dev/dri/renderD131\n",
            "  type: NVIDIA_MPS\n",
            "  virtual_number: 1\n",
        );
        let (entries, findings) = read(text);
        assert_eq!((findings.problems, findings.warnings), (Vec::new(), Vec::new()));
        let read: Vec<_> = entries
            .iter()
            .map(|e| (e.origin.line.unwrap(), e.device_type.as_str(), e.path.clone()))
            .collect();
        let node = |path| Some(DevicePath::RenderNode(PathBuf::from(path)));
        assert_eq!(
            read,
            [
                (2, "NVIDIA_GPU_SHARE", node("/dev/dri/renderD129")),
                (5, "CPH_AOSP_BINDER", None),
                (7, "VASTAITECH_GPU", node("/dev/dri/renderD130")),
                (8, "CPH_AMD_GPU", None),
                (9, "SOMETHING_NEW", None),
                (12, "NETINT_CA_ASIC", None),
                (15, "7", None),
                (17, "NVIDIA_MPS", node("/dev/dri/renderD131")),
            ]
        );
        assert_eq!(entries.iter().filter(|entry| entry.mps.is_some()).count(), 1);
    }

    #[test]
    fn virtual_number_is_a_whole_number_that_fits() {
        for (value, slices) in [("1", 1), ("999", 999), ("\"4\"", 4), ("'4'", 4), ("4.0", 4), ("0x10", 16)] {
            let found = entries(&mps(&format!("virtual_number: {value}")));
            assert_eq!(found[0].mps.as_ref().unwrap().slices.get(), slices, "{value}");
        }
        for (value, found) in [
            ("0", "found 0"),
            ("-1", "found -1"),
            ("4.7", "found 4.7"),
            ("1000", "found 1000"),
            ("true", "found true"),
            ("null", "found nothing"),
            ("", "found nothing"),
            ("four", "found \"four\""),
            ("\"4.7\"", "found \"4.7\""),
            ("\"1,000\"", "found \"1,000\""),
            ("010", "found \"010\""),
            ("[4]", "found a list"),
            ("18446744073709551616", "found 18446744073709551616"),
            ("99999999999999999999999999999999999999999999", "found 1e44"),
        ] {
            let (entries, findings) = read(&mps(&format!("virtual_number: {value}")));
            assert_eq!(told(&findings.problems), [(4, "devices[0].virtual_number", found)], "{value}");
            assert!(findings.problems[0].problem.remedy.contains("1 to 999"), "{}", findings.problems[0]);
            assert_eq!(entries, []);
        }
        let (_, findings) = read(&mps("# none"));
        assert_eq!(told(&findings.problems), [(2, "devices[0].virtual_number", "missing")]);
    }

    #[test]
    fn thread_percentage_is_optional() {
        let entry = |line: &str| mps(&format!("virtual_number: 4\n  {line}"));
        let percentage = |line: &str| entries(&entry(line))[0].mps.as_ref().unwrap().each.thread_percentage;
        assert_eq!(percentage(""), None);
        assert_eq!(percentage("thread_percentage:"), None);
        assert_eq!(percentage("thread_percentage: 100"), Some(100));
        assert_eq!(percentage("thread_percentage: \"1\""), Some(1));
        for value in ["0", "101", "equal", "12.5", "yes"] {
            let (_, findings) = read(&entry(&format!("thread_percentage: {value}")));
            let [(5, "devices[0].thread_percentage", _)] = told(&findings.problems)[..] else {
                panic!("{value}: {:?}", findings.problems)
            };
        }
    }

    #[test]
    fn memory_is_an_amount_with_or_without_a_unit() {
        let entry = |line: &str| mps(&format!("virtual_number: 4\n  {line}"));
        for (value, mib) in [
            ("", None),
            ("20480", Some(20480)),
            ("\"20480\"", Some(20480)),
            ("20GiB", Some(20480)),
            ("20 GiB", Some(20480)),
            ("1MiB", Some(1)),
            ("16384GiB", Some(16 << 20)),
        ] {
            let keys = entries(&entry(&format!("memory: {value}")))[0].mps.clone().unwrap();
            assert_eq!(keys.each.memory_mib.map(NonZeroU64::get), mib, "{value}");
        }
        for value in [
            "0",
            "-1",
            "0GiB",
            "1.5GiB",
            "20G",
            "20GB",
            "20gib",
            "GiB",
            "16385GiB",
            "1e3",
            "true",
            "[1]",
            "18446744073709551616",
            "18014398509481985GiB",
            "020",
        ] {
            let (_, findings) = read(&entry(&format!("memory: {value}")));
            let [(5, "devices[0].memory", _)] = told(&findings.problems)[..] else {
                panic!("{value}: {:?}", findings.problems)
            };
            assert!(findings.problems[0].problem.remedy.contains("20GiB"), "{value}");
        }
        assert!(entries(&entry("overcommit: true"))[0].mps.as_ref().unwrap().overcommit);
        for value in ["2", "\"yes\"", "maybe", "[]"] {
            let (_, findings) = read(&entry(&format!("overcommit: {value}")));
            assert_eq!(told(&findings.problems)[0].1, "devices[0].overcommit", "{value}");
        }
    }

    #[test]
    fn slices_have_sizes_of_their_own() {
        let entry = |lines: &str| {
            read(&format!("devices:\n- path: /dev/dri/renderD128\n  type: NVIDIA_MPS\n{lines}"))
        };
        let sizes = |lines: &str| {
            let (entries, findings) = entry(lines);
            assert_eq!((findings.problems, findings.warnings), (Vec::new(), Vec::new()), "{lines}");
            let keys = entries[0].mps.clone().unwrap();
            let size =
                |one: SliceKeys| (one.memory_mib.unwrap().get(), one.thread_percentage, one.max_clients);
            keys.sizes().map(size).collect::<Vec<_>>()
        };
        let (two, all) = (NonZeroU32::new(2), NonZeroU32::new(5));
        assert_eq!(
            sizes(
                "  slices:\n  - {memory: 20GiB, max_clients: 2}\n  - memory: 4096\n    threadPercentage: 70\n"
            ),
            [(20480, None, two), (4096, Some(70), None)]
        );
        assert_eq!(
            sizes(
                "  virtual_number: 2\n  memory: 1GiB\n  max_clients: 5\n  slices: [{}, {memory: 7, max_clients: 2}]\n"
            ),
            [(1024, None, all), (7, None, two)]
        );
        assert_eq!(sizes("  virtual_number: 1\n  memory: 7\n  slices:\n"), [(7, None, None)]);
        let many = format!("[{}]", "{memory: 1},".repeat(1000));
        for (lines, key, found) in [
            ("  slices: 4\n", "devices[0].slices", "found 4"),
            ("  slices: {memory: 4}\n", "devices[0].slices", "found a mapping"),
            ("  slices: []\n", "devices[0].slices", "0 entries"),
            (&format!("  slices: {many}\n"), "devices[0].slices", "1000 entries"),
            ("  slices: [{memory: 1}, 7]\n", "devices[0].slices[1]", "found 7"),
            ("  slices: [{memory: 1}, {max_clients: 7}]\n", "devices[0].slices[1].memory", "missing"),
            ("  slices: [{memory: 0}]\n", "devices[0].slices[0].memory", "found 0"),
            (
                "  slices: [{memory: 1, thread_percentage: 101}]\n",
                "devices[0].slices[0].thread_percentage",
                "found 101",
            ),
            (
                "  slices: [{memory: 1, max_clients: none}]\n",
                "devices[0].slices[0].max_clients",
                "found \"none\"",
            ),
            (
                "  virtual_number: 3\n  slices: [{memory: 1}]\n",
                "devices[0].virtual_number",
                "found 3, but the list `slices` has 1 slice",
            ),
        ] {
            let (entries, findings) = entry(lines);
            let told = told(&findings.problems);
            assert_eq!(told.iter().map(|(_, key, found)| (*key, *found)).collect::<Vec<_>>(), [(key, found)]);
            assert!(told[0].0 >= 4 && entries.is_empty(), "{lines} {told:?}");
        }
        let (_, findings) = entry("  slices: [{memory: 1, isolation: slice}]\n");
        assert_eq!(told(&findings.warnings)[0].1, "devices[0].slices[0].isolation");
    }

    #[test]
    fn max_clients_is_optional() {
        let entry = |line: &str| mps(&format!("virtual_number: 4\n  {line}"));
        let most =
            |line: &str| entries(&entry(line))[0].mps.as_ref().unwrap().each.max_clients.map(NonZeroU32::get);
        for (line, expected) in [
            ("", None),
            ("max_clients:", None),
            ("max_clients: 1", Some(1)),
            ("maxClients: \"48\"", Some(48)),
            ("max-clients: 999", Some(999)),
        ] {
            assert_eq!(most(line), expected, "{line}");
        }
        for value in ["0", "1000", "-1", "all", "1.5"] {
            let (_, findings) = read(&entry(&format!("max_clients: {value}")));
            let [(5, "devices[0].max_clients", _)] = told(&findings.problems)[..] else {
                panic!("{value}: {:?}", findings.problems)
            };
            assert!(
                findings.problems[0].problem.remedy.contains("clients from 1 to 999"),
                "{:?}",
                findings.problems
            );
        }
    }

    #[test]
    fn keys_may_have_every_spelling_that_the_host_agent_accepts() {
        for number in ["virtual_number", "virtualNumber", "VirtualNumber", "virtual-number"] {
            let text = format!("Devices:\n- Path: /dev/dri/renderD128\n  Type: NVIDIA_MPS\n  {number}: 3\n");
            assert_eq!(entries(&text)[0].mps.as_ref().unwrap().slices.get(), 3, "{number}");
        }
        let (entries, findings) =
            read(&mps("virtual_number: 4\n  virtual_num: 5\n  virtualNumber: 6\n  note:"));
        assert_eq!(entries[0].mps.as_ref().unwrap().slices.get(), 6);
        let warned: Vec<_> = told(&findings.warnings).into_iter().map(|(line, key, _)| (line, key)).collect();
        assert_eq!(
            warned,
            [(5, "devices[0].virtual_num"), (6, "devices[0].virtualNumber"), (7, "devices[0].note")]
        );
    }

    #[test]
    fn an_empty_entry_is_an_error() {
        let text = "devices:\n- null\n-\n- {path: /dev/nvidia0, type: NVIDIA_MPS, virtual_number: 2}\n";
        let (entries, findings) = read(text);
        assert_eq!(entries.len(), 1);
        let found: Vec<_> = findings.problems.iter().map(|w| w.key.as_str()).collect();
        assert_eq!(found, ["devices[0]", "devices[1]"]);
    }

    #[test]
    fn keys_are_compared_by_their_words_as_the_host_agent_does() {
        for key in [
            "virtual_number",
            "virtual-number",
            "virtual number",
            "virtualNumber",
            "VirtualNumber",
            "VIRTUAL_NUMBER",
            "VIRTUALNumber",
            "Virtual_Number",
            "_virtual__number_",
        ] {
            assert_eq!(words(key), "virtual_number", "{key}");
        }
        for (key, expected) in [
            ("TYPE", "type"),
            ("TYpe", "type"),
            ("TYPe", "ty_pe"),
            ("tYPE", "t_ype"),
            ("Path", "path"),
            ("VIRTUALNUMBER", "virtualnumber"),
            ("", ""),
            ("-", ""),
            ("a1B2", "a1_b2"),
        ] {
            assert_eq!(words(key), expected, "{key}");
        }
    }

    #[test]
    fn merged_keys_belong_to_the_entry() {
        let text = concat!(
            "common: &common\n  type: NVIDIA_MPS\n  virtual_number: 4\n",
            "devices:\n- <<: *common\n  path: /dev/nvidia0\n",
            "- path: /dev/nvidia1\n  <<: *common\n",
            "- <<: *common\n  path: /dev/nvidia2\n  virtual_number: 2\n",
            "- virtual_number: 2\n  path: /dev/nvidia3\n  <<: *common\n",
        );
        let (entries, findings) = read(text);
        assert_eq!(findings.problems, []);
        let slices: Vec<_> = entries
            .iter()
            .map(|entry| (entry.origin.line.unwrap(), entry.mps.as_ref().unwrap().slices.get()))
            .collect();
        assert_eq!(slices, [(5, 4), (7, 4), (9, 2), (12, 4)]);
        assert_eq!(
            told(&findings.warnings),
            [(3, "devices[3].virtual_number", "the key is written twice; the last value counts")]
        );
    }

    #[test]
    fn a_file_without_devices_has_no_entries() {
        for text in ["", "# nothing\n", "---\n", "devices:\n", "devices: []\n", "devices: ~\n", "{}"] {
            assert_eq!(entries(text), [], "{text:?}");
        }
        let (_, findings) = read("device:\n- path: x\n");
        assert_eq!(told(&findings.problems), [(0, "devices", "no such list")]);
        assert_eq!(findings.unknown_keys.len(), 1);
    }

    #[test]
    fn a_file_of_another_shape_is_an_error() {
        for (text, line, key) in [
            ("- path: /dev/dri/renderD128\n", 1, ""),
            ("\njust words\n", 2, ""),
            ("devices: none\n", 1, "devices"),
            ("a: b\ndevices:\n  path: /dev/dri/renderD128\n", 2, "devices"),
            ("devices:\n- a\n", 2, "devices[0]"),
            ("devices:\n- path: x\n  type: y\n- [a]\n", 4, "devices[1]"),
            ("devices:\n\t- path: x\n", 2, ""),
            ("devices:\n- path: x\n\ttype: y\n", 3, ""),
        ] {
            let (_, findings) = read(text);
            let found: Vec<_> =
                told(&findings.problems).into_iter().map(|(line, key, _)| (line, key)).collect();
            assert_eq!(found, [(line, key)], "{text:?}");
        }
        for text in
            ["a: &a\n- *a\n", "devices: &a [{path: *a}]\n", "devices: [\n", "devices: {path: \"\n", "%\n"]
        {
            let (entries, findings) = read(text);
            assert_eq!((entries.len(), findings.problems.len()), (0, 1), "{text:?}");
        }
    }

    #[test]
    fn a_misspelt_type_is_an_error() {
        let typed = |device_type: &str| {
            read(&format!(
                "devices:\n- path: /dev/dri/renderD128\n  type: {device_type}\n  virtual_number: 0\n"
            ))
        };
        for near in [
            "nvidia_mps",
            "NVIDIA-MPS",
            "'NVIDIA_MPS '",
            "NvidiaMps",
            "NVIDIA MPS",
            "NVIDIA_MSP",
            "NVIDA_MPS",
            "NVIDIA_MPSS",
            "NVIDIA_MP",
            "mps",
        ] {
            let (entries, findings) = typed(near);
            assert_eq!(entries, [], "{near}");
            let [(3, "devices[0].type", found)] = told(&findings.problems)[..] else {
                panic!("{near}: {:?}", findings.problems)
            };
            assert!(found.contains(near.trim_matches('\'')), "{found}");
            assert!(findings.problems[0].problem.remedy.contains("NVIDIA_MPS"));
        }
        let long = "NVIDIA_MPS_".repeat(1_000);
        for other in
            ["NVIDIA_GPU", "NVIDIA_GPU_SHARE", "NVIDIA_HAMI", "NVIDIA_MIG", "CPH_AMD_GPU", "7", long.as_str()]
        {
            let (entries, findings) = typed(other);
            assert_eq!((entries.len(), findings.problems), (1, Vec::new()), "{other:.40}");
        }
        for (without, line, found) in [
            ("", 2, "missing"),
            ("  type:\n", 3, "found nothing"),
            ("  type: ''\n", 3, "found \"\""),
            ("  type: [NVIDIA_MPS]\n", 3, "found a list"),
        ] {
            let (entries, findings) = read(&format!("devices:\n- path: /dev/dri/renderD128\n{without}"));
            assert_eq!(entries, []);
            assert_eq!(told(&findings.problems), [(line, "devices[0].type", found)]);
        }
    }

    #[test]
    fn every_problem_is_reported_at_once() {
        let text = concat!(
            "devices:\n",
            "- type: NVIDIA_MPS\n",
            "  virtual_number: 0\n",
            "- path: /dev/dri/renderD128\n",
            "  type: NVIDIA_MPS\n",
            "  virtual_number: 2\n",
            "- path: []\n",
            "  type: NVIDIA_MPS\n",
            "  virtual_number: 4.7\n",
            "  thread_percentage: 0\n",
            "  max_clients: 0\n",
            "- nonsense\n",
        );
        let (entries, findings) = read(text);
        assert_eq!(
            told(&findings.problems),
            [
                (2, "devices[0].path", "missing"),
                (3, "devices[0].virtual_number", "found 0"),
                (7, "devices[2].path", "found a list"),
                (9, "devices[2].virtual_number", "found 4.7"),
                (10, "devices[2].thread_percentage", "found 0"),
                (11, "devices[2].max_clients", "found 0"),
                (12, "devices[3]", "found \"nonsense\""),
            ]
        );
        assert_eq!(entries.len(), 1);
        assert!(
            findings.problems[0].to_string().starts_with(&format!("{FILE}:2: devices[0].path: missing; "))
        );
    }

    #[test]
    fn paths_are_classified() {
        let pci = |text: &str| DevicePath::Pci(text.parse().unwrap());
        let uuid = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400";
        for (text, path) in [
            ("/dev/dri/renderD128", DevicePath::RenderNode(PathBuf::from("/dev/dri/renderD128"))),
            ("/dev/nvidia0", DevicePath::NvidiaMinor(0)),
            ("/dev/nvidia12", DevicePath::NvidiaMinor(12)),
            ("00:06.0", DevicePath::ShortPci("0000:00:06.0".parse().unwrap())),
            ("00000000:1A:00.0", pci("0000:1a:00.0")),
            ("0001:1a:00.0", pci("0001:1a:00.0")),
            (uuid, DevicePath::Uuid(uuid.to_owned())),
            ("GPU-76AEF7FF-372D-2432-B4B4-BECA4D8D3400", DevicePath::Uuid(uuid.to_owned())),
        ] {
            assert_eq!(classify(text), path, "{text}");
            let written = format!("devices:\n- path: {text}\n  type: NVIDIA_MPS\n  virtual_number: 4\n");
            assert_eq!(entries(&written)[0].path, Some(path), "{text}");
        }
        for text in [
            "/dev/dri/card0",
            "/dev/dri/by-path/pci-0000:00:06.0-render",
            "/dev/dri/renderD",
            "/dev/dri/renderD128/",
            "/dev/dri/renderD0128",
            "/dev/dri/renderD99999999999",
            "/dev/nvidia",
            "/dev/nvidiactl",
            "/dev/nvidia00",
            "/dev/nvidia+1",
            "GPU-76aef7ff-372d-2432-b4b4-beca4d8d340",
            "GPU-76aef7ff-372d-2432-b4b4+beca4d8d3400",
            "MIG-76aef7ff-372d-2432-b4b4-beca4d8d3400",
            "00:06.8",
            "0",
        ] {
            assert_eq!(classify(text), DevicePath::Other(text.to_owned()));
        }
    }

    /// Asserts that `parse` does not panic with any bytes, and that each `NVIDIA_MPS` entry from `parse` is complete.
    fn survives(bytes: &[u8]) {
        let mut findings = Draft::new();
        let entries = match text_of(Path::new(FILE), bytes) {
            Ok(text) => parse(Path::new(FILE), &text, &mut findings),
            Err(problem) => {
                findings.problems.push(problem);
                Vec::new()
            }
        };
        for problem in findings.problems.iter().chain(&findings.warnings) {
            assert_eq!(problem.origin.file, Path::new(FILE));
            assert!(!problem.problem.found.is_empty() && !problem.problem.remedy.is_empty());
        }
        for entry in entries {
            assert_eq!(entry.mps.is_some(), entry.device_type == MPS_TYPE);
            let Some(keys) = entry.mps else { continue };
            assert!(entry.path.is_some() && (1..=999).contains(&keys.slices.get()));
            assert!(keys.own.is_empty() || keys.own.len() == keys.slices.get() as usize);
            for SliceKeys { memory_mib, thread_percentage, max_clients } in keys.sizes() {
                assert!(thread_percentage.is_none_or(|percentage| (1..=100).contains(&percentage)));
                assert!(max_clients.is_none_or(|most| most.get() <= 999));
                assert!(memory_mib.is_none_or(|memory| memory.get() <= 16 << 20));
            }
        }
    }

    /// A generated entry: the path, true for the type `NVIDIA_MPS`, and the keys.
    type AnyEntry = (String, bool, MpsEntry);

    prop_compose! {
        fn any_size()(
            memory in proptest::option::of(1u64..=16 << 20),
            thread_percentage in proptest::option::of(1u8..=100),
            max_clients in proptest::option::of(1u32..=999),
        ) -> SliceKeys {
            let (memory_mib, max_clients) = (memory.and_then(NonZeroU64::new), max_clients.and_then(NonZeroU32::new));
            SliceKeys { memory_mib, thread_percentage, max_clients }
        }
    }

    prop_compose! {
        fn any_entry()(
            path in prop::sample::select(vec![
                "/dev/dri/renderD128", "/dev/dri/card0", "00:06.0", "/dev/nvidia1", "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400",
            ]),
            ours in any::<bool>(),
            slices in 1u32..=999,
            each in any_size(),
            mut own in proptest::collection::vec(any_size(), 0..4),
            isolation in proptest::option::of(prop::sample::select(vec![Isolation::Gpu, Isolation::Slice])),
            overcommit in any::<bool>(),
        ) -> AnyEntry {
            for slice in own.iter_mut().filter(|slice| slice.memory_mib.or(each.memory_mib).is_none()) {
                slice.memory_mib = NonZeroU64::new(7);
            }
            let slices = u32::try_from(own.len()).ok().and_then(NonZeroU32::new).or(NonZeroU32::new(slices));
            (path.to_owned(), ours, MpsEntry { slices: slices.unwrap(), each, own, isolation, overcommit })
        }
    }

    fn size_written(keys: &SliceKeys) -> Vec<String> {
        let memory = keys.memory_mib.map(|mib| match mib.get() {
            mib if mib % 1024 == 0 => format!("memory: {}GiB", mib / 1024),
            mib => format!("memory: {mib}"),
        });
        let threads = keys.thread_percentage.map(|percentage| format!("thread_percentage: {percentage}"));
        let clients = keys.max_clients.map(|most| format!("max_clients: {most}"));
        [memory, threads, clients].into_iter().flatten().collect()
    }

    fn written(entries: &[AnyEntry]) -> String {
        let mut text = "devices:\n".to_owned();
        for (path, ours, MpsEntry { slices, each, own, isolation, overcommit }) in entries {
            let device_type = if *ours { MPS_TYPE } else { "NVIDIA_GPU_SHARE" };
            text.push_str(&format!("- path: \"{path}\"\n  type: \"{device_type}\"\n"));
            if own.is_empty() || *overcommit {
                text.push_str(&format!("  virtual_number: {slices}\n"));
            }
            for line in size_written(each) {
                text.push_str(&format!("  {line}\n"));
            }
            let own: Vec<String> =
                own.iter().map(|keys| format!("{{{}}}", size_written(keys).join(", "))).collect();
            if !own.is_empty() {
                text.push_str(&format!("  slices: [{}]\n", own.join(", ")));
            }
            if let Some(isolation) = isolation {
                let word = if *isolation == Isolation::Gpu { "gpu" } else { "slice" };
                text.push_str(&format!("  isolation: {word}\n"));
            }
            if *overcommit {
                text.push_str("  overcommit: true\n");
            }
        }
        text
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(list in proptest::collection::vec(any_entry(), 0..8)) {
            let (entries, findings) = read(&written(&list));
            prop_assert_eq!(findings.problems, []);
            let read: Vec<_> = entries.into_iter().map(|entry| (entry.path, entry.mps)).collect();
            let expected: Vec<_> = list
                .iter()
                .map(|(path, ours, keys)| (Some(classify(path)), ours.then(|| keys.clone())))
                .collect();
            prop_assert_eq!(read, expected);
        }

        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            survives(&bytes);
        }

        #[test]
        fn anything_that_looks_like_an_entry_is_survived(
            text in "devices:\n(- |  )(path|type|NVIDIA_MPS|virtual_number|[0-9:,\\[\\]{}&*!|>'\"%@`#= \t\r\n.-]){0,60}"
        ) {
            survives(text.as_bytes());
        }

        #[test]
        fn a_damaged_file_is_survived(
            list in proptest::collection::vec(any_entry(), 1..4),
            changes in proptest::collection::vec((any::<prop::sample::Index>(), 0u8..3, any::<u8>()), 1..6),
        ) {
            let mut bytes = written(&list).into_bytes();
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
