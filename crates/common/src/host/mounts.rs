//! Reads the kernel's list of the mounts that a process sees. The same directory can have different paths in two mount
//! namespaces. So the service identifies a directory by its file system's device and its path in that file system, both from
//! mountinfo. The device number from stat(2) is unusable, since btrfs and overlayfs invent device numbers.

use std::ffi::OsString;
use std::fmt::Display;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::proc;

/// A place in a file system, independent of the mount through which a process reaches the place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The device number of the file system, such as `8:1`.
    device: Vec<u8>,
    path: PathBuf,
}

impl Place {
    /// Finds the places of directories. A directory that does not exist is skipped.
    pub fn find_all<'d>(directories: impl IntoIterator<Item = &'d PathBuf>) -> Vec<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = directories.into_iter().filter_map(|directory| {
            proc::location(rustix::fs::open(directory, flags, Mode::empty()).ok()?).ok()
        });
        let locations: Vec<(u64, PathBuf)> = opened.collect();
        // Each read of mountinfo takes longer with more mounts. One read serves all directories.
        let mountinfo = proc::mountinfo(proc::OWN).unwrap_or_default();
        locations.iter().filter_map(|(mount, path)| place_in(&mountinfo, *mount, path)).collect()
    }

    /// The path of this place relative to its ancestor `other`. Empty if both are the same place. None if `other` does not
    /// contain this place.
    pub fn below(&self, other: &Self) -> Option<&Path> {
        if self.device == other.device { self.path.strip_prefix(&other.path).ok() } else { None }
    }
}

struct MountPoint {
    id: u64,
    root: Place,
    point: PathBuf,
}

/// The places that a process sees at the mount points of its mounts, in the order of the mounts.
pub fn roots(process: impl Display) -> io::Result<Vec<Place>> {
    Ok(mounts(&proc::mountinfo(process)?).map(|mount| mount.root).collect())
}

/// The place of `path`, which was opened through the mount with the id `id`. Only the id identifies the mount: a later mount
/// can hide an earlier mount at the same point or at an ancestor.
fn place_in(mountinfo: &[u8], id: u64, path: &Path) -> Option<Place> {
    let MountPoint { root, point, .. } = mounts(mountinfo).find(|mount| mount.id == id)?;
    let rest = path.strip_prefix(point).ok()?;
    let path = if rest.as_os_str().is_empty() { root.path } else { root.path.join(rest) };
    Some(Place { path, ..root })
}

fn mounts(mountinfo: &[u8]) -> impl Iterator<Item = MountPoint> {
    mountinfo.split(|byte| *byte == b'\n').filter_map(mount)
}

/// Parses a line of mountinfo, such as `36 35 98:0 /root /point rw,noatime master:1 - ext3 /dev/root rw`. None if the line ends
/// before the options, since the end of the text may have cut the line within a path.
fn mount(line: &[u8]) -> Option<MountPoint> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let (_parent, device) = (fields.next()?, fields.next()?.to_vec());
    let (root, point) = (unescaped(fields.next()?), unescaped(fields.next()?));
    let _options = fields.next()?;
    Some(MountPoint { id, root: Place { device, path: root }, point })
}

/// Decodes a path in mountinfo. The kernel writes bytes that would break a line as three octal digits, such as `\040` for a
/// space.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, others)) = rest.split_first() {
        let escape = if *first == b'\\' { others.split_at_checked(3) } else { None };
        let escaped = escape.and_then(|(digits, after)| {
            let digits = std::str::from_utf8(digits).ok()?;
            Some((u8::from_str_radix(digits, 8).ok()?, after))
        });
        let (byte, after) = escaped.unwrap_or((*first, others));
        path.push(byte);
        rest = after;
    }
    OsString::from_vec(path).into()
}

/// True if a test can find the [`Place`] of a path on this machine. Usually false in a chroot, such as in the build of a
/// package, since the root directory of a chroot is often no mount.
#[cfg(test)]
pub fn root_is_a_mount() -> bool {
    !Place::find_all([&PathBuf::from("/")]).is_empty()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fmt::Write;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    fn place(device: &str, path: &str) -> Place {
        Place { device: device.into(), path: path.into() }
    }

    fn at(mountinfo: &str, id: u64, path: &str) -> Option<Place> {
        place_in(mountinfo.as_bytes(), id, Path::new(path))
    }

    fn roots_in(mountinfo: &[u8]) -> Vec<Place> {
        mounts(mountinfo).map(|mount| mount.root).collect()
    }

    #[test]
    fn a_place_is_the_same_from_every_namespace() {
        let host = "28 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
                    30 28 0:26 / /tmp rw - tmpfs tmpfs rw\n";
        let pipe = at(host, 30, "/tmp/nvidia-mps/pipe").unwrap();
        assert_eq!(pipe, place("0:26", "/nvidia-mps/pipe"));
        assert_eq!(at(host, 28, "/tmp/nvidia-mps/pipe").unwrap(), place("8:1", "/tmp/nvidia-mps/pipe"));
        let container = "900 800 0:50 / / rw - overlay overlay rw\n\
                         910 900 0:26 /nvidia-mps/pipe/slices/00_06.0-1 /run/yunion-mps ro - tmpfs tmpfs rw\n";
        let roots = roots_in(container.as_bytes());
        assert_eq!(roots[1].below(&pipe), Some(Path::new("slices/00_06.0-1")));
        assert_eq!((roots[0].below(&pipe), pipe.below(&roots[0])), (None, None));
        assert_eq!(pipe.below(&pipe), Some(Path::new("")));
        assert_eq!(place("0:26", "/nvidia-mps/pipe2").below(&pipe), None);
    }

    #[test]
    fn subvolumes_are_part_of_the_place() {
        let host = "28 1 0:30 /@root / rw - btrfs /dev/sda2 rw,subvol=/@root\n\
                    29 28 0:30 /@tmp /tmp rw - btrfs /dev/sda2 rw,subvol=/@tmp\n";
        assert_eq!(at(host, 29, "/tmp/pipe").unwrap(), place("0:30", "/@tmp/pipe"));
        assert_eq!(at(host, 28, "/").unwrap(), place("0:30", "/@root"));
    }

    #[test]
    fn a_hidden_mount_holds_nothing_that_is_open() {
        let host = "28 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
                    30 28 0:26 / /tmp rw - tmpfs tmpfs rw\n\
                    31 30 0:27 /other /tmp rw - tmpfs tmpfs rw\n";
        assert_eq!(at(host, 31, "/tmp/pipe").unwrap(), place("0:27", "/other/pipe"));
        assert_eq!(at(host, 32, "/tmp/pipe"), None);
        assert_eq!(at(host, 31, "/var"), None);
    }

    #[test]
    fn escapes_are_bytes() {
        for (field, path) in [
            ("/a\\040b\\011c\\012d\\134e", &b"/a b\tc\nd\\e"[..]),
            ("/\\134040", b"/\\040"),
            ("/\\377", b"/\xff"),
            ("/end\\04", b"/end\\04"),
            ("/\\778\\\\", b"/\\778\\\\"),
            ("/\\999", b"/\\999"),
        ] {
            assert_eq!(unescaped(field.as_bytes()), Path::new(OsStr::from_bytes(path)), "{field}");
        }
    }

    #[test]
    fn lines_that_are_cut_or_no_mounts_are_left_out() {
        let good = "1 0 8:1 / / rw - ext4 x rw";
        for bad in ["", "x 0 8:1 / / rw", "1 0 8:1 /a /b", "1 0 8:1", "\u{fffd}", "-1 0 8:1 / / rw"] {
            let roots = roots_in(format!("{bad}\n{good}\n{bad}").as_bytes());
            assert_eq!(roots, [place("8:1", "/")], "{bad}");
        }
        assert_eq!(roots_in(b"7 1 8:1 /a\xff /b rw")[0].path, Path::new(OsStr::from_bytes(b"/a\xff")));
    }

    #[test]
    fn a_list_that_is_cut_has_no_other_places() {
        let mut list = String::new();
        for number in 8..13 {
            writeln!(list, "{number} 1 8:1 /slices/00_06.0-{number} /mnt/{number} rw - ext4 x rw").unwrap();
        }
        let all = roots_in(list.as_bytes());
        assert_eq!(all.len(), 5);
        for cut in 0..list.len() {
            let roots = roots_in(&list.as_bytes()[..cut]);
            assert_eq!(roots, all[..roots.len()], "{cut}");
        }
        let huge = list.repeat(20_000);
        assert_eq!(roots_in(huge.as_bytes()).len(), 100_000);
    }

    #[test]
    fn the_place_of_a_directory_is_found_on_this_machine() {
        if !root_is_a_mount() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let inside = directory.path().join("a b");
        std::fs::create_dir(&inside).unwrap();
        let [link, none] = ["link", "none"].map(|name| directory.path().join(name));
        std::os::unix::fs::symlink(&inside, &link).unwrap();
        let found = Place::find_all([&directory.path().to_owned(), &none, &link]);
        let [above, place] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!(place.below(above), Some(Path::new("a b")));
        assert!(roots(proc::OWN).unwrap().iter().any(|root| above.below(root).is_some()));
    }
}
