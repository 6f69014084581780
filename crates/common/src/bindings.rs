//! The bindings of control groups to slices, as the state file has them.

use std::sync::Arc;

use mps_core::bindings::{self, Binding, BoundBy, ControlGroup};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::host::device_name::{DeviceName, SliceId};

/// All bindings of the host.
pub type SliceBindings = bindings::Bindings<SliceId>;

#[derive(Serialize, Deserialize)]
struct BindingEntry {
    control_group: String,
    inode: u64,
    slices: Vec<String>,
    /// The host agent's records have given it a slice, and not root.
    #[serde(default)]
    by_platform: bool,
    label: String,
    /// Seconds since the host was started.
    since: u64,
    #[serde(default)]
    was_used: bool,
}

/// The bytes of a binding in the state file, with the comma.
pub fn bytes_of(binding: &Binding<SliceId>) -> usize {
    // Nothing in it can fail to be written.
    serde_json::to_vec(&BindingEntry::from(binding)).map_or(0, |text| text.len().saturating_add(1))
}

impl From<&Binding<SliceId>> for BindingEntry {
    fn from(binding: &Binding<SliceId>) -> Self {
        Self {
            control_group: binding.group.path.clone(),
            inode: binding.group.inode,
            slices: binding.slices.iter().map(ToString::to_string).collect(),
            by_platform: binding.by == BoundBy::Platform,
            label: binding.label.clone(),
            since: binding.since,
            was_used: binding.was_used,
        }
    }
}

impl From<BindingEntry> for Binding<SliceId> {
    fn from(entry: BindingEntry) -> Self {
        // A name that can't be read stands for nothing on this host.
        let slice = |name: &String| match name.parse() {
            Ok(DeviceName::Slice(slice)) => Some(slice),
            _ => None,
        };
        Self {
            group: ControlGroup { path: entry.control_group, inode: entry.inode },
            slices: entry.slices.iter().filter_map(slice).collect(),
            by: if entry.by_platform { BoundBy::Platform } else { BoundBy::Root },
            label: entry.label,
            since: entry.since,
            was_used: entry.was_used,
        }
    }
}

pub(crate) fn serialize<S: Serializer>(
    bindings: &Arc<SliceBindings>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(bindings.iter().map(BindingEntry::from))
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Arc<SliceBindings>, D::Error> {
    Ok(Arc::new(Vec::<BindingEntry>::deserialize(deserializer)?.into_iter().map(Binding::from).collect()))
}
