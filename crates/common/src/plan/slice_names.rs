//! The names of slices, and of their directories, where others say them.

use std::path::Path;

use crate::host::gpu::PciAddress;

/// The directory of the directories of slices, in the configured pipe directory.
pub const DIRECTORIES: &str = "slices";

/// The published name of a slice or a GPU that is meant by this one: `00:06.0-1`, `00:06.0`.
pub fn published(name: &str) -> Option<String> {
    let (address, ordinal) = match name.split_once('-') {
        Some((address, ordinal)) => (address, Some(ordinal)),
        None => (name, None),
    };
    let address = address.parse::<PciAddress>().ok()?.short();
    let Some(text) = ordinal else { return Some(address) };
    let ordinal: u32 = text.parse().ok()?;
    (text.len() <= 3 && ordinal.to_string() == text).then(|| format!("{address}-{ordinal}"))
}

/// The slice with a directory of this path below the pipe directory: `slices/00_06.0-1`. There may be such a slice no
/// more.
pub fn of_directory(path: &Path) -> Option<String> {
    of_directory_name(path.strip_prefix(DIRECTORIES).ok()?.to_str()?)
}

/// The slice with a directory of this name: `00_06.0-1`. There may be such a slice no more.
pub fn of_directory_name(name: &str) -> Option<String> {
    published(&name.replace('_', ":")).filter(|slice| slice.contains('-') && !name.contains(':'))
}

/// Whether this slice, by its published name, is of the GPU with this address; or is the name of that GPU itself, which
/// stands for a slice of it.
pub fn is_of(slice: &str, gpu: PciAddress) -> bool {
    slice.split('-').next() == Some(gpu.short().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::gpu_plan::slice_file_name;

    #[test]
    fn only_names_are_taken_for_names() {
        for (name, expected) in [
            ("00:06.0-1", "00:06.0-1"),
            ("0000:00:06.0-1", "00:06.0-1"),
            ("0001:1A:00.0-12", "0001:1a:00.0-12"),
            ("00:06.0", "00:06.0"),
        ] {
            assert_eq!(published(name).as_deref(), Some(expected), "{name}");
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
            assert_eq!(published(other), None, "{other}");
        }
    }

    #[test]
    fn a_directory_names_its_slice() {
        for address in ["00:06.0", "0001:1a:00.0"] {
            let file = slice_file_name(address.parse().unwrap(), 12);
            let slice = of_directory(&Path::new(DIRECTORIES).join(file)).unwrap();
            assert_eq!(slice, format!("{address}-12"));
            assert!(is_of(&slice, address.parse().unwrap()) && !is_of(&slice, "00:07.0".parse().unwrap()));
        }
        for other in ["", "slices", "slices/00_06.0", "slices/00:06.0-1", "slices/00_06.0-1/x", "00_06.0-1"] {
            assert_eq!(of_directory(Path::new(other)), None, "{other}");
        }
    }
}
