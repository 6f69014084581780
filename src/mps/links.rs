//! The directories of slices: each has a hard link to its control daemon's socket and nothing else. A client needs no
//! more, and whoever has only that can't command the control daemon.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::reason::Reason;

use super::directories::{self, BadDirectory, SOCKET};

/// A link that is about to take its place.
const NEW: &str = ".control.new";

/// Gives each directory of `names` in `parent` a link to the socket in `pipe_directory`, and takes the links to that socket
/// away from all other directories there. A client that connects meanwhile finds the former socket or this one.
/// Directories are never removed, since a container keeps the directory that it has. Returns the directories that had
/// another socket or none.
///
/// # Errors
/// A directory can't be used, or the link can't be made.
pub(crate) fn lead_to(
    pipe_directory: &Path,
    parent: &Path,
    names: &BTreeSet<String>,
) -> Result<Vec<PathBuf>, BadDirectory> {
    let source = directories::open(pipe_directory)?;
    let slices = directories::open(parent)?;
    let bad = |path: &Path, error: io::Error| BadDirectory {
        path: path.to_owned(),
        reason: Reason::new(
            format!("can't lead to the control daemon: {error}"),
            "see that its file system has room and can have hard links",
        ),
    };
    let socket = identity(&source).map_err(|error| bad(pipe_directory, error))?;
    let Some(socket) = socket else { return Ok(Vec::new()) };
    let mut renewed = Vec::new();
    for name in names {
        let path = parent.join(name);
        let directory = directories::open_in(&slices, &path)?;
        if link(&source, &directory, socket).map_err(|error| bad(&path, error))? {
            renewed.push(path);
        }
    }
    for name in others(&slices, names).map_err(|error| bad(parent, error))? {
        unlink(&slices, &name, socket).map_err(|error| bad(&parent.join(&name), error))?;
    }
    Ok(renewed)
}

/// The device and the inode number of the socket in a directory, if there is one.
fn identity(directory: impl AsFd) -> io::Result<Option<(u64, u64)>> {
    match rustix::fs::statat(directory, SOCKET, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(Stat { st_dev, st_ino, .. }) => Ok(Some((st_dev, st_ino))),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Makes the link, unless it is there. Whether it was not.
fn link(source: &OwnedFd, directory: &OwnedFd, socket: (u64, u64)) -> io::Result<bool> {
    if identity(directory)? == Some(socket) {
        return Ok(false);
    }
    // A crash may have left one.
    remove(directory, NEW)?;
    rustix::fs::linkat(source, SOCKET, directory, NEW, AtFlags::empty())?;
    rustix::fs::renameat(directory, NEW, directory, SOCKET)?;
    Ok(true)
}

/// The directories that are there besides these.
fn others(slices: &OwnedFd, names: &BTreeSet<String>) -> io::Result<Vec<String>> {
    let mut others = Vec::new();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    for entry in Dir::new(rustix::fs::openat(slices, ".", flags, Mode::empty())?)? {
        let entry = entry?;
        // The service makes no other names.
        if let Ok(name) = entry.file_name().to_str()
            && !name.starts_with('.')
            && !names.contains(name)
        {
            others.push(name.to_owned());
        }
    }
    Ok(others)
}

/// Takes the link away from a directory if it leads to this socket.
fn unlink(slices: &OwnedFd, name: &str, socket: (u64, u64)) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = match rustix::fs::openat(slices, name, flags, Mode::empty()) {
        Ok(directory) => directory,
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    if identity(&directory)? == Some(socket) { remove(&directory, SOCKET) } else { Ok(()) }
}

fn remove(directory: &OwnedFd, name: &str) -> io::Result<()> {
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    struct Place {
        root: tempfile::TempDir,
        socket: UnixListener,
    }

    impl Place {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            fs::create_dir(root.path().join("pipe")).unwrap();
            let socket = UnixListener::bind(root.path().join("pipe/control")).unwrap();
            Self { root, socket }
        }

        fn lead(&self, names: &[&str]) -> Result<Vec<String>, String> {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            let pipe = self.root.path().join("pipe");
            let renewed = lead_to(&pipe, &pipe.join("slices"), &names).map_err(|bad| bad.to_string())?;
            Ok(renewed.iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect())
        }

        /// A new socket, as a new control daemon makes it.
        fn renew(&mut self) {
            let path = self.root.path().join("pipe/control");
            fs::remove_file(&path).unwrap();
            self.socket = UnixListener::bind(path).unwrap();
        }

        fn leads(&self, name: &str) -> bool {
            let inode = |path: &str| fs::metadata(self.root.path().join(path)).map(|found| found.ino()).ok();
            inode("pipe/control") == inode(&format!("pipe/slices/{name}/control"))
        }
    }

    #[test]
    fn links_follow_the_socket_and_the_slices() {
        let mut place = Place::new();
        assert_eq!(place.lead(&["a", "b"]).unwrap(), ["a", "b"]);
        assert_eq!(place.lead(&["a", "b"]).unwrap(), [""; 0]);
        let directory = place.root.path().join("pipe/slices/a");
        assert_eq!(fs::metadata(&directory).unwrap().permissions().mode() & 0o777, 0o755);
        let held = fs::metadata(&directory).unwrap().ino();
        place.renew();
        assert!(!place.leads("a"));
        assert_eq!(place.lead(&["a", "c"]).unwrap(), ["a", "c"]);
        assert!(place.leads("a") && place.leads("c"));
        assert!(!place.leads("b"), "its link leads to the former socket");
        assert_eq!(place.lead(&["c"]).unwrap(), [""; 0]);
        assert!(!place.root.path().join("pipe/slices/a/control").exists());
        assert_eq!(place.lead(&["a"]).unwrap(), ["a"]);
        assert_eq!(
            fs::metadata(&directory).unwrap().ino(),
            held,
            "a container keeps the directory that it has"
        );
        let files: Vec<_> = fs::read_dir(&directory).unwrap().map(|file| file.unwrap().file_name()).collect();
        assert_eq!(files, ["control"]);
    }

    #[test]
    fn nothing_of_others_is_followed_or_touched() {
        let place = Place::new();
        assert_eq!(place.lead(&["a"]).unwrap(), ["a"]);
        let at = |path: &str| place.root.path().join(path);
        // Another control daemon's slice, a file, and a link to somewhere else.
        fs::create_dir(at("pipe/slices/other")).unwrap();
        let _other = UnixListener::bind(at("pipe/slices/other/control")).unwrap();
        fs::write(at("pipe/slices/file"), "").unwrap();
        fs::create_dir(at("elsewhere")).unwrap();
        fs::hard_link(at("pipe/control"), at("elsewhere/control")).unwrap();
        symlink(at("elsewhere"), at("pipe/slices/link")).unwrap();
        assert_eq!(place.lead(&["a"]).unwrap(), [""; 0]);
        assert!(at("pipe/slices/other/control").exists() && at("elsewhere/control").exists());
        let refused = place.lead(&["a", "link"]).unwrap_err();
        assert!(refused.contains("slices/link: is not a directory"), "{refused}");
        fs::remove_file(at("pipe/control")).unwrap();
        assert_eq!(place.lead(&["a"]).unwrap(), [""; 0], "no control daemon listens yet");
    }
}
