//! `host_container_device.yml`: which GPUs are cut into how many slices.
//!
//! The file is the host agent's and lists devices of many types. Ours is `NVIDIA_MPS`; an entry of another type only
//! tells us that somebody else claims its device, and whatever is wrong with it is not our business.

use std::path::{Path, PathBuf};

use super::yaml::{self, Node, Value};
use super::{DeviceEntry, DevicePath, Findings, MpsEntry, Origin, Problem};
use super::{percentage, slices};

/// The type of our entries; the host agent compares it exactly.
const MPS_TYPE: &str = "NVIDIA_MPS";

/// The entries of the file, in its order.
pub(super) fn parse(file: &Path, text: &str, findings: &mut Findings) -> Vec<DeviceEntry> {
    let place = |line| Origin { file: file.to_owned(), line };
    let root = match yaml::parse(file, text) {
        Ok(node) => node,
        Err(problem) => {
            findings.problems.push(problem);
            return Vec::new();
        }
    };
    let pairs = match root.value {
        Value::Map(pairs) => pairs,
        Value::Null => Vec::new(),
        other => {
            findings.problems.push(Problem {
                origin: place(root.line),
                key: String::new(),
                found: format!("{} instead of the key `devices`", other.found()),
                remedy: "write `devices:` and below it one entry per device".to_owned(),
            });
            return Vec::new();
        }
    };
    let mut devices = None;
    for (key, value) in pairs {
        let origin = place(key.line);
        let name = key.value.as_text().unwrap_or_default().into_owned();
        if !matches!(name.as_str(), "devices" | "Devices") {
            findings.unknown_keys.push((origin, name));
        } else if let Some((earlier, _)) = devices.replace((origin.clone(), value)) {
            findings.warnings.push(Problem {
                origin,
                key: name,
                found: format!("already written at {earlier}; the last one counts"),
                remedy: "put all entries into one list".to_owned(),
            });
        }
    }
    let Some((origin, list)) = devices else {
        findings.warnings.push(Problem {
            origin: place(None),
            key: "devices".to_owned(),
            found: "no such list".to_owned(),
            remedy:
                "add `devices:`, or leave it out to have every NVIDIA GPU cut into cuda_mps_replicas slices"
                    .to_owned(),
        });
        return Vec::new();
    };
    match list.value {
        Value::List(items) => items
            .into_iter()
            .enumerate()
            .filter_map(|(index, item)| Item::new(&origin, index, item).read(findings))
            .collect(),
        Value::Null => Vec::new(),
        other => {
            findings.problems.push(Problem {
                origin,
                key: "devices".to_owned(),
                found: other.found(),
                remedy: "write a list: below `devices:` one `- path: ...` per device".to_owned(),
            });
            Vec::new()
        }
    }
}

/// One element of the list.
struct Item<'t> {
    /// `devices[2]`.
    name: String,
    /// Where it begins; where the list does, if YAML doesn't tell.
    origin: Origin,
    value: Value<'t>,
}

/// A key of an entry and its value.
struct Field<'t> {
    origin: Origin,
    value: Value<'t>,
}

/// An entry's keys, each in the spellings that the host agent takes.
#[derive(Default)]
struct Fields<'t> {
    path: Option<Field<'t>>,
    device_type: Option<Field<'t>>,
    virtual_number: Option<Field<'t>>,
    thread_percentage: Option<Field<'t>>,
    /// About keys that are unknown or stand twice.
    warnings: Vec<Problem>,
}

impl<'t> Item<'t> {
    fn new(list: &Origin, index: usize, node: Node<'t>) -> Self {
        let origin = Origin { line: node.line.or(list.line), ..list.clone() };
        Self { name: format!("devices[{index}]"), origin, value: node.value }
    }

    fn problem(&self, origin: &Origin, key: &str, found: String, remedy: &str) -> Problem {
        let key = if key.is_empty() { self.name.clone() } else { format!("{}.{key}", self.name) };
        Problem { origin: origin.clone(), key, found, remedy: remedy.to_owned() }
    }

    /// The entry; None where it is skipped or, with a problem noted, unusable.
    fn read(mut self, findings: &mut Findings) -> Option<DeviceEntry> {
        let pairs = match std::mem::replace(&mut self.value, Value::Null) {
            Value::Map(pairs) => pairs,
            Value::Null => {
                let remedy = "remove it: the host agent fails on it";
                findings.warnings.push(self.problem(
                    &self.origin,
                    "",
                    "an empty entry; it is skipped".into(),
                    remedy,
                ));
                return None;
            }
            other => {
                let remedy = "write an entry with the keys path, type and virtual_number";
                findings.problems.push(self.problem(&self.origin, "", other.found(), remedy));
                return None;
            }
        };
        let fields = self.fields(pairs);
        let device_type =
            fields.device_type.as_ref().and_then(|field| field.value.as_text()).unwrap_or_default();
        if device_type != MPS_TYPE {
            self.note_near_miss(fields.device_type.as_ref(), &device_type, findings);
            let path = fields.path.as_ref().and_then(|field| field.value.as_text());
            return Some(DeviceEntry {
                device_type: device_type.into_owned(),
                path: path.filter(|path| !path.is_empty()).map(|path| classify(&path)),
                origin: self.origin,
                mps: None,
            });
        }
        let device_type = device_type.into_owned();
        let known = findings.problems.len();
        let path = self.path(fields.path.as_ref(), findings);
        let slices = self.number(fields.virtual_number.as_ref(), "virtual_number", slices, findings);
        if slices.is_none() && fields.virtual_number.is_none() {
            let remedy = "say into how many slices the GPU is cut, 1 to 999";
            findings.problems.push(self.problem(&self.origin, "virtual_number", "missing".into(), remedy));
        }
        let set = fields.thread_percentage.filter(|field| field.value != Value::Null);
        let thread_percentage = self.number(set.as_ref(), "thread_percentage", percentage, findings);
        findings.warnings.extend(fields.warnings);
        if findings.problems.len() > known {
            return None;
        }
        Some(DeviceEntry {
            origin: self.origin,
            device_type,
            path,
            mps: slices.map(|slices| MpsEntry { slices, thread_percentage }),
        })
    }

    fn fields(&self, pairs: Vec<(Node<'t>, Node<'t>)>) -> Fields<'t> {
        let mut fields = Fields::default();
        for (key, value) in pairs {
            let name = key.value.as_text().unwrap_or_default();
            let origin = Origin { line: key.line.or(self.origin.line), ..self.origin.clone() };
            let slot = match name.as_ref() {
                "path" | "Path" => &mut fields.path,
                "type" | "Type" => &mut fields.device_type,
                "virtual_number" | "virtual-number" | "virtualNumber" | "VirtualNumber" => {
                    &mut fields.virtual_number
                }
                "thread_percentage" | "thread-percentage" | "threadPercentage" | "ThreadPercentage" => {
                    &mut fields.thread_percentage
                }
                _ => {
                    let found = "no such key; it is ignored".to_owned();
                    let remedy = "correct the spelling or remove it";
                    fields.warnings.push(self.problem(&origin, &name, found, remedy));
                    continue;
                }
            };
            if slot.replace(Field { origin: origin.clone(), value: value.value }).is_some() {
                let found = "written twice; the last one counts".to_owned();
                fields.warnings.push(self.problem(&origin, &name, found, "remove one of them"));
            }
        }
        fields
    }

    /// A type that was probably meant to be ours would silently be somebody else's.
    fn note_near_miss(&self, field: Option<&Field<'t>>, device_type: &str, findings: &mut Findings) {
        let letters: String =
            device_type.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
        let origin = field.map_or(&self.origin, |field| &field.origin);
        if device_type.is_empty() {
            let found = "missing; the entry is not served".to_owned();
            findings.warnings.push(self.problem(origin, "type", found, "write a type such as NVIDIA_MPS"));
        } else if letters == "nvidiamps" {
            let found = format!("found {}; the entry is not served", yaml::quoted(device_type));
            findings.warnings.push(self.problem(origin, "type", found, "write NVIDIA_MPS"));
        }
    }

    fn path(&self, field: Option<&Field<'t>>, findings: &mut Findings) -> Option<DevicePath> {
        let text = field.and_then(|field| field.value.as_text()).filter(|text| !text.is_empty());
        if text.is_none() {
            let origin = field.map_or(&self.origin, |field| &field.origin);
            let found = field.map_or_else(|| "missing".to_owned(), |field| field.value.found());
            let remedy = "name the GPU by its render node, such as /dev/dri/renderD128";
            findings.problems.push(self.problem(origin, "path", found, remedy));
        }
        text.map(|text| classify(&text))
    }

    fn number<T>(
        &self,
        field: Option<&Field<'t>>,
        key: &str,
        read: fn(&Value<'_>) -> Result<T, String>,
        findings: &mut Findings,
    ) -> Option<T> {
        let field = field?;
        read(&field.value)
            .map_err(|remedy| {
                findings.problems.push(self.problem(&field.origin, key, field.value.found(), &remedy));
            })
            .ok()
    }
}

/// What kind of name a path is.
fn classify(text: &str) -> DevicePath {
    // A device's number has no leading zero; `/dev/nvidia01` is no device.
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
        DevicePath::Pci(address)
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
