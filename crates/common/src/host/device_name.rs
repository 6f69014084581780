//! The names of GPUs and of their slices: `00:06.0`, `00:06.0-1`, and the directory `00_06.0-1`. This file alone makes them
//! and takes them apart.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use mps_core::tenants::SliceName;
use serde::Serialize;

use super::pci_address::{BadPciAddress, PciAddress};

/// The directory of the directories of slices, in the configured pipe directory.
pub const DIRECTORIES: &str = "slices";

const DIGITS: usize = 3;

/// A GPU as the service publishes it. Its name is the short form of its PCI address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuId(pub(super) PciAddress);

impl GpuId {
    pub fn slice(self, ordinal: u32) -> SliceId {
        SliceId { gpu: self, ordinal }
    }

    /// Its slices, if it has so many.
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
    type Err = BadPciAddress;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.parse()?))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SliceId {
    pub gpu: GpuId,
    pub ordinal: u32,
}

impl SliceName for SliceId {
    fn shares_gpu(&self, other: &Self) -> bool {
        self.gpu == other.gpu
    }
}

/// Whether the service gives things in the configured directories this name: the directory of a control daemon of one GPU, of
/// one slice, or of the directories of slices.
pub fn is_of_service(name: &str) -> bool {
    name.starts_with("GPU-") || name == DIRECTORIES || SliceId::with_directory_name(name).is_some()
}

impl SliceId {
    /// The name of its directory: its own, without the colons at which `docker --volume` splits.
    pub fn directory_name(self) -> String {
        self.to_string().replace(':', "_")
    }

    /// The slice with a directory of this name. There may be such a slice no more.
    pub fn with_directory_name(name: &str) -> Option<Self> {
        match name.replace('_', ":").parse() {
            Ok(DeviceName::Slice(slice)) if !name.contains(':') => Some(slice),
            _ => None,
        }
    }

    /// The slice with a directory of this path below the pipe directory: `slices/00_06.0-1`.
    pub fn with_directory(path: &Path) -> Option<Self> {
        Self::with_directory_name(path.strip_prefix(DIRECTORIES).ok()?.to_str()?)
    }
}

impl fmt::Display for SliceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.gpu, self.ordinal)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(into = "String")]
pub enum DeviceName {
    Gpu(GpuId),
    Slice(SliceId),
}

impl DeviceName {
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a name like 00:06.0 or 00:06.0-1")]
pub struct BadName;

impl FromStr for DeviceName {
    type Err = BadName;

    /// Reads a name with an address in any spelling.
    fn from_str(name: &str) -> Result<Self, BadName> {
        let (address, ordinal_text) = parts(name);
        let gpu: GpuId = address.parse().map_err(|_| BadName)?;
        match ordinal_text {
            None => Ok(Self::Gpu(gpu)),
            Some(text) => Ok(Self::Slice(gpu.slice(ordinal(text).ok_or(BadName)?))),
        }
    }
}

impl From<DeviceName> for String {
    fn from(name: DeviceName) -> Self {
        name.to_string()
    }
}

/// The part of a name that names the GPU, and the ordinal behind it.
pub fn parts(name: &str) -> (&str, Option<&str>) {
    match name.split_once('-') {
        Some((gpu, ordinal)) => (gpu, Some(ordinal)),
        None => (name, None),
    }
}

/// An ordinal has one spelling only, so that a slice has no second name.
pub fn ordinal(text: &str) -> Option<u32> {
    text.parse().ok().filter(|ordinal: &u32| text.len() <= DIGITS && ordinal.to_string() == text)
}

#[cfg(test)]
mod tests {
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
            assert_eq!(other.parse::<DeviceName>(), Err(BadName), "{other}");
        }
    }

    #[test]
    fn a_directory_names_its_slice() {
        for address in ["00:06.0", "0001:1a:00.0"] {
            let slice = address.parse::<GpuId>().unwrap().slice(12);
            let directory = Path::new(DIRECTORIES).join(slice.directory_name());
            assert_eq!(SliceId::with_directory(&directory), Some(slice));
            assert_eq!(slice.to_string(), format!("{address}-12"));
        }
        for other in ["", "slices", "slices/00_06.0", "slices/00:06.0-1", "slices/00_06.0-1/x", "00_06.0-1"] {
            assert_eq!(SliceId::with_directory(Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn slices_stand_in_the_order_of_their_numbers() {
        let gpu: GpuId = "00:06.0".parse().unwrap();
        assert!(gpu.slice(9) < gpu.slice(10));
        let names: Vec<String> = gpu.slices(2).map(|slice| slice.to_string()).collect();
        assert_eq!(names, ["00:06.0-0", "00:06.0-1"]);
    }
}
