use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

/// The paths of the file pci.ids in different distributions. The first file that can be opened counts.
const PLACES: [&str; 3] = ["usr/share/hwdata/pci.ids", "usr/share/misc/pci.ids", "usr/share/pci.ids"];

/// The model names of devices, by vendor and device number: the text in square brackets in pci.ids. A device without a text in
/// brackets is missing in the result.
pub(super) fn names(sysroot: &Path, wanted: &BTreeSet<(u16, u16)>) -> BTreeMap<(u16, u16), String> {
    if wanted.is_empty() {
        return BTreeMap::new();
    }
    let file = PLACES.iter().find_map(|place| File::open(sysroot.join(place)).ok());
    file.map(|file| parse(BufReader::new(file), wanted)).unwrap_or_default()
}

/// Reads the names from an open pci.ids. After a read error, returns the names that were found so far, since names are
/// optional.
fn parse(mut list: impl BufRead, wanted: &BTreeSet<(u16, u16)>) -> BTreeMap<(u16, u16), String> {
    let mut names = BTreeMap::new();
    let mut vendor = None;
    let mut line = Vec::new();
    while list.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        if let Some(entry) = text.strip_prefix('\t') {
            // A line with two tabs names a subsystem. The text after its first tab does not begin with a number, so the line is
            // ignored.
            let device = vendor.zip(numbered(entry)).map(|(vendor, (device, name))| ((vendor, device), name));
            if let Some((id, name)) = device
                && wanted.contains(&id)
                && let Some(name) = in_brackets(name)
            {
                names.insert(id, name.to_owned());
            }
        } else if !text.is_empty() && !text.starts_with('#') {
            // A line such as `C 03 ...` begins a device class and has no vendor number. The device numbers below it belong to
            // no vendor.
            vendor = numbered(text).map(|(vendor, _)| vendor);
        }
        line.clear();
    }
    names
}

fn numbered(text: &str) -> Option<(u16, &str)> {
    let (digits, name) = text.split_at_checked(4)?;
    let plain = digits.bytes().all(|byte| byte.is_ascii_hexdigit()) && name.starts_with([' ', '\t']);
    if plain { Some((u16::from_str_radix(digits, 16).ok()?, name.trim_start())) } else { None }
}

/// The text from the last opening bracket after a blank to the last closing bracket. Cloudpods finds the model in `code name
/// [model]` by the same rule.
fn in_brackets(name: &str) -> Option<&str> {
    let (inside, _) = name.rsplit_once(']')?;
    let (code_name, model) = inside.rsplit_once(" [")?;
    if code_name.is_empty() || model.is_empty() { None } else { Some(model) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIST: &str = "\
# A comment
0010  Allied Telesis, Inc
\t2335  Not [This One]
10DE  NVIDIA Corporation
\t1b38  GP102GL [Tesla P40]
\t\t10de 11d9  Board [No Device]

\t2335  GH100 [H200 SXM 141GB]
\t1EB8  TU104GL [Tesla T4]
\t0001  No Brackets
\t0002  [Nothing Before]
\t0003  Two [Brackets] Here [The Last]
\t0004  Empty []
\t0005  Open [Only
\t12
\t\u{e9}\u{e9}\u{e9}
C 03  Display controller
\t1b38  After [The Class List]
";

    fn name(device: u16) -> Option<String> {
        parse(LIST.as_bytes(), &BTreeSet::from([(0x10de, device)])).remove(&(0x10de, device))
    }

    #[test]
    fn names_are_taken_from_the_brackets() {
        assert_eq!(name(0x1b38).as_deref(), Some("Tesla P40"));
        assert_eq!(name(0x2335).as_deref(), Some("H200 SXM 141GB"));
        assert_eq!(name(0x1eb8).as_deref(), Some("Tesla T4"));
        assert_eq!(name(0x0003).as_deref(), Some("The Last"));
        for without in [0x0001, 0x0002, 0x0004, 0x0005, 0x11d9, 0x9999] {
            assert_eq!(name(without), None, "{without:04x}");
        }
    }

    #[test]
    fn the_first_list_is_used() {
        let root = tempfile::tempdir().unwrap();
        let wanted = BTreeSet::from([(0x10de, 0x1b38)]);
        assert!(names(root.path(), &wanted).is_empty());
        for (place, model) in [("pci.ids", "Third"), ("misc/pci.ids", "Second"), ("hwdata/pci.ids", "First")]
        {
            let path = root.path().join("usr/share").join(place);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("10de  NVIDIA\n\t1b38  GP102GL [{model}]\n")).unwrap();
            assert_eq!(names(root.path(), &wanted)[&(0x10de, 0x1b38)], model);
        }
    }

    proptest! {
        #[test]
        fn no_bytes_break_the_parser(bytes: Vec<u8>, device: u16) {
            let mut list = b"10de  NVIDIA\n\t1b38  GP102GL [Tesla P40]\n".to_vec();
            list.extend(bytes);
            let names = parse(list.as_slice(), &BTreeSet::from([(0x10de, 0x1b38), (0x10de, device)]));
            prop_assert!(names.contains_key(&(0x10de, 0x1b38)));
        }
    }
}
