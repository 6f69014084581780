//! The names of GPUs (`00:06.0`), of their slices (`00:06.0-1`), of the slices' directories (`00_06.0-1`) and of control
//! daemons (`shared`). No other file makes or parses these names.

use alloc::string::{String, ToString};
use core::fmt;
use core::str::FromStr;

use super::pci_address::PciAddress;
use super::{GpuUuid, Tenure};

/// The name of the directory that contains the slices' directories. It is in the configured pipe directory.
pub const DIRECTORIES: &str = "slices";

const SHARED: &str = "shared";

const DIGITS: usize = 3;

/// Makes `{:?}` print the name, so that logs and test histories show the names that users know.
macro_rules! debug_is_the_name {
    ($($name:ty),*) => {
        $(impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{self}")
            }
        })*
    };
}

debug_is_the_name!(PciAddress, GpuId, SliceId, DeviceName, DaemonId);

/// A GPU as the service publishes it. Its name is the short form of its PCI address, such as `00:06.0`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuId(pub PciAddress);

impl GpuId {
    pub fn slice(self, ordinal: u32) -> SliceId {
        SliceId { gpu: self, ordinal }
    }

    pub fn slices(self, number: u32) -> impl Iterator<Item = SliceId> {
        (0..number).map(move |ordinal| self.slice(ordinal))
    }
}

impl fmt::Display for GpuId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.short())
    }
}

impl FromStr for GpuId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Ok(Self(text.parse()?))
    }
}

/// A slice as the service publishes it, such as `00:06.0-1`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SliceId {
    pub gpu: GpuId,
    /// The slice's number on the GPU, from 0.
    pub ordinal: u32,
}

/// Returns whether a directory with this name in a configured directory belongs to the service. The service makes directories
/// for the control daemons of single GPUs and slices, and one directory that contains the slices' directories.
pub fn is_of_service(name: &str) -> bool {
    name.starts_with("GPU-") || name == DIRECTORIES || SliceId::with_directory_name(name).is_some()
}

impl SliceId {
    /// The name of the slice's directory: the slice's name with `_` in place of each colon, since `docker --volume` splits its
    /// argument at colons.
    pub fn directory_name(self) -> String {
        self.to_string().replace(':', "_")
    }

    /// The slice with this directory name. None if the name has another form. The slice may no longer exist on the host.
    pub fn with_directory_name(name: &str) -> Option<Self> {
        match name.replace('_', ":").parse() {
            Ok(DeviceName::Slice(slice)) if !name.contains(':') => Some(slice),
            _ => None,
        }
    }

    /// Parses an ordinal. None if the text is no ordinal. Each ordinal has only one valid spelling, so that a slice has only
    /// one name.
    pub fn ordinal_in(text: &str) -> Option<u32> {
        text.parse().ok().filter(|ordinal: &u32| text.len() <= DIGITS && ordinal.to_string() == text)
    }
}

impl fmt::Display for SliceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.gpu, self.ordinal)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(into = "String"))]
pub enum DeviceName {
    Gpu(GpuId),
    Slice(SliceId),
}

impl DeviceName {
    /// Splits a name at the ordinal: `00:06.0-1` gives `00:06.0` and `1`.
    pub fn parts(name: &str) -> (&str, Option<&str>) {
        match name.split_once('-') {
            Some((gpu, ordinal)) => (gpu, Some(ordinal)),
            None => (name, None),
        }
    }

    pub fn gpu(self) -> GpuId {
        match self {
            Self::Gpu(gpu) => gpu,
            Self::Slice(slice) => slice.gpu,
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(gpu) => gpu.fmt(f),
            Self::Slice(slice) => slice.fmt(f),
        }
    }
}

impl FromStr for DeviceName {
    type Err = ();

    /// The PCI address in the name may have any spelling.
    fn from_str(name: &str) -> Result<Self, ()> {
        let (address, ordinal) = Self::parts(name);
        let gpu: GpuId = address.parse()?;
        match ordinal {
            None => Ok(Self::Gpu(gpu)),
            Some(text) => Ok(Self::Slice(gpu.slice(SliceId::ordinal_in(text).ok_or(())?))),
        }
    }
}

impl From<DeviceName> for String {
    fn from(name: DeviceName) -> Self {
        name.to_string()
    }
}

/// The id of a control daemon, which says which GPUs or which slice the control daemon serves.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(into = "String", from = "String")
)]
pub enum DaemonId {
    // `first_that_keeps_from` relies on the order of the variants.
    /// The control daemon of one slice.
    Slice(SliceId),
    /// The control daemon of all slices of a GPU.
    Gpu(GpuUuid),
    /// The control daemon of all GPUs that have no control daemon of their own.
    Shared,
}

impl DaemonId {
    pub fn tenure(&self) -> Tenure {
        match self {
            Self::Slice(_) => Tenure::InTurns,
            Self::Gpu(_) | Self::Shared => Tenure::Alone,
        }
    }

    /// The least id of a control daemon that can exclude a control daemon of this tenure from a GPU. A search through the ids
    /// in their order can begin at this id. For control daemons that take turns, the search then skips the control daemons of
    /// single slices, of which a large host has many.
    pub fn first_that_keeps_from(tenure: Tenure) -> Self {
        match tenure {
            Tenure::InTurns => Self::Gpu(GpuUuid::new()),
            Tenure::Alone => Self::Slice(GpuId(PciAddress::default()).slice(0)),
        }
    }

    /// The only slice that the control daemon serves. None if the control daemon serves all slices of its GPUs.
    pub fn only_slice(&self) -> Option<SliceId> {
        match self {
            Self::Slice(slice) => Some(*slice),
            Self::Gpu(_) | Self::Shared => None,
        }
    }

    /// The name of the control daemon's own pipe directory in the configured pipe directory. None if the control daemon uses
    /// the configured pipe directory itself.
    pub fn directory_name(&self) -> Option<String> {
        match self {
            Self::Slice(slice) => Some(slice.directory_name()),
            Self::Gpu(uuid) => Some(uuid.clone()),
            Self::Shared => None,
        }
    }
}

impl fmt::Display for DaemonId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slice(slice) => f.pad(&slice.to_string()),
            Self::Gpu(uuid) => f.pad(uuid),
            Self::Shared => f.pad(SHARED),
        }
    }
}

impl From<&str> for DaemonId {
    /// Parses an id. A text of an unknown form counts as the UUID of a GPU, so that no control daemon in the state file is
    /// lost.
    fn from(text: &str) -> Self {
        match text.parse() {
            _ if text == SHARED => Self::Shared,
            Ok(DeviceName::Slice(slice)) => Self::Slice(slice),
            Ok(DeviceName::Gpu(_)) | Err(()) => Self::Gpu(text.into()),
        }
    }
}

impl From<String> for DaemonId {
    fn from(text: String) -> Self {
        text.as_str().into()
    }
}

impl From<DaemonId> for String {
    fn from(id: DaemonId) -> Self {
        id.to_string()
    }
}

#[cfg(test)]
mod tests {
    use alloc::format;
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn only_names_are_taken_for_names() {
        for (name, expected) in [
            ("00:06.0-1", "00:06.0-1"),
            ("0000:00:06.0-1", "00:06.0-1"),
            ("0001:1A:00.0-12", "0001:1a:00.0-12"),
            ("00:06.0", "00:06.0"),
        ] {
            assert_eq!(name.parse::<DeviceName>().unwrap().to_string(), expected, "{name}");
        }
        for other in [
            "",
            "mine",
            "00:06.0-",
            "00:06.0--1",
            "00:06.0-1234",
            "00:06.0-01",
            "00:06.0-+1",
            "00:06.0-1\u{1b}[2J",
            "00:06.0-1 ",
        ] {
            assert_eq!(other.parse::<DeviceName>(), Err(()), "{other}");
        }
    }

    #[test]
    fn a_directory_names_its_slice() {
        for address in ["00:06.0", "0001:1a:00.0"] {
            let slice = address.parse::<GpuId>().unwrap().slice(12);
            assert_eq!(SliceId::with_directory_name(&slice.directory_name()), Some(slice));
            assert_eq!(slice.to_string(), [address, "12"].join("-"));
        }
        for other in ["", "slices", "00_06.0", "00:06.0-1", "00_06.0-1/x"] {
            assert_eq!(SliceId::with_directory_name(other), None, "{other}");
        }
    }

    #[test]
    fn slices_stand_in_the_order_of_their_numbers() {
        let gpu: GpuId = "00:06.0".parse().unwrap();
        assert!(gpu.slice(9) < gpu.slice(10));
        let names: Vec<String> = gpu.slices(2).map(|slice| slice.to_string()).collect();
        assert_eq!(names, ["00:06.0-0", "00:06.0-1"]);
    }

    #[test]
    fn an_id_is_its_text() {
        let slice = |name: &str| match name.parse() {
            Ok(DeviceName::Slice(slice)) => DaemonId::Slice(slice),
            other => panic!("{other:?}"),
        };
        for (text, id, tenure, directory) in [
            ("shared", DaemonId::Shared, Tenure::Alone, None),
            ("GPU-0", DaemonId::Gpu("GPU-0".into()), Tenure::Alone, Some("GPU-0")),
            ("00:06.0-1", slice("00:06.0-1"), Tenure::InTurns, Some("00_06.0-1")),
        ] {
            assert_eq!(DaemonId::from(text), id, "{text}");
            assert_eq!((id.to_string().as_str(), id.tenure()), (text, tenure));
            assert_eq!(format!("{id:?}"), text);
            assert_eq!(id.directory_name().as_deref(), directory);
        }
        let all = [
            slice("00:00.0-0"),
            slice("00:06.0-1"),
            DaemonId::from(""),
            DaemonId::from("GPU-0"),
            DaemonId::Shared,
        ];
        assert!(all.is_sorted());
        for tenure in [Tenure::Alone, Tenure::InTurns] {
            let first = DaemonId::first_that_keeps_from(tenure);
            assert!(all.iter().all(|id| (*id >= first) == id.tenure().keeps_from(tenure)), "{tenure:?}");
        }
        for other in ["", "00:06.0", "Shared", "00:06.0-01"] {
            assert_eq!(DaemonId::from(other), DaemonId::Gpu(other.into()), "{other}");
        }
    }
}
