//! The bindings of control groups to slices, as the state file has them.

use std::borrow::Cow;
use std::mem;
use std::sync::Arc;

pub use mps_core::bindings::pod_of;
use mps_core::bindings::{Binding, Bindings, BoundBy, ControlGroup};
use mps_core::terms::DeviceName;
use serde::{Deserialize, Deserializer, Serialize};

/// A binding as an entry of the state file. The entry borrows its strings, so that writing the state file copies no string.
#[derive(Serialize, Deserialize)]
struct BindingEntry<'a> {
    control_group: Cow<'a, str>,
    inode: u64,
    slices: Vec<String>,
    /// True if the service made the binding from the records of Cloudpods's host agent. False if root made the binding with
    /// `Bind`.
    #[serde(default)]
    by_platform: bool,
    label: Cow<'a, str>,
    /// The time at which the binding was made, in seconds since the host was booted.
    since: u64,
    #[serde(default)]
    was_used: bool,
}

pub fn bytes_of(binding: &Binding) -> usize {
    // Serializing can't fail, since the entry has only strings, numbers and booleans.
    serde_json::to_string(&BindingEntry::from(binding)).map_or(usize::MAX, |entry| entry.len() + ",".len())
}

impl<'a> From<&'a Binding> for BindingEntry<'a> {
    fn from(binding: &'a Binding) -> Self {
        Self {
            control_group: Cow::Borrowed(&binding.group.path),
            inode: binding.group.inode,
            slices: binding.slices.iter().map(ToString::to_string).collect(),
            by_platform: binding.by == BoundBy::Platform,
            label: Cow::Borrowed(&binding.label),
            since: binding.since,
            was_used: binding.was_used,
        }
    }
}

impl From<BindingEntry<'_>> for Binding {
    fn from(entry: BindingEntry<'_>) -> Self {
        // A string that is no name of a slice is dropped: no slice of this host can have that name.
        let slice = |name: &String| match name.parse() {
            Ok(DeviceName::Slice(slice)) => Some(slice),
            _ => None,
        };
        Self {
            group: ControlGroup { path: entry.control_group.into_owned(), inode: entry.inode },
            slices: entry.slices.iter().filter_map(slice).collect(),
            by: if entry.by_platform { BoundBy::Platform } else { BoundBy::Root },
            label: entry.label.into_owned(),
            since: entry.since,
            was_used: entry.was_used,
        }
    }
}

/// The bindings, with the JSON text that the service last wrote to the state file for them. Most changes add one binding to
/// thousands, so the service serializes only the new binding and appends it to the text.
#[derive(Debug, Default)]
pub struct WrittenBindings {
    bindings: Arc<Bindings>,
    entries: String,
}

impl WrittenBindings {
    /// The entries of `bindings` as JSON text, separated by commas, without brackets.
    pub fn entries(&mut self, bindings: &Arc<Bindings>) -> serde_json::Result<&str> {
        let before = mem::take(self);
        let (mut entries, more) = match bindings.added_to(&before.bindings) {
            Some(added) => (before.entries, added.collect::<Vec<_>>()),
            None => (String::new(), bindings.iter().collect()),
        };
        for one in more {
            if !entries.is_empty() {
                entries.push(',');
            }
            entries.push_str(&serde_json::to_string(&BindingEntry::from(one))?);
        }
        *self = Self { bindings: Arc::clone(bindings), entries };
        Ok(&self.entries)
    }
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<Bindings>, D::Error> {
    Ok(Arc::new(Vec::<BindingEntry<'_>>::deserialize(deserializer)?.into_iter().map(Binding::from).collect()))
}

#[cfg(test)]
mod tests {
    use mps_core::terms::SliceId;

    use super::*;

    /// The service computes the size of a binding with `bytes_of`, and refuses a binding that is too large. So `bytes_of` must
    /// be exact for every path of a control group and for every label, also for characters that JSON escapes.
    #[test]
    fn a_binding_has_the_bytes_that_are_written_of_it() {
        let gpu = "0001:1a:00.0".parse().unwrap();
        for name in ["", "plain", "\"quoted\" \\", "\u{1}\u{7f}\n", "\u{8bad}\u{7ec3}"] {
            let slices = [0, 17].map(|ordinal| SliceId { gpu, ordinal });
            let group = ControlGroup { path: format!("/{name}"), inode: 4711 };
            let (slices, label) = (slices.into(), name.to_owned());
            let binding = Binding { group, slices, by: BoundBy::Root, label, since: 7, was_used: true };
            let written = serde_json::to_string(&BindingEntry::from(&binding)).unwrap();
            assert_eq!(bytes_of(&binding), written.len() + 1, "{written}");
            let read: BindingEntry<'_> = serde_json::from_str(&written).unwrap();
            assert_eq!(Binding::from(read), binding, "{written}");
        }
    }
}
