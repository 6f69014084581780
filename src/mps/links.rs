//! The pipe directory and the directories of slices: each has a hard link to the socket that the control daemon makes in its
//! private directory. A client needs no more, and whoever has only that can't set limits for others.

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

/// The other files that a control daemon makes in its directory. Where only links are, they are from an earlier one.
const LEFTOVERS: [&str; 4] = ["control_privileged", "control_lock", "log", "nvidia-cuda-mps-control.pid"];

/// A control daemon's socket, to which links lead.
#[derive(Debug)]
pub(crate) struct Socket {
    directory: OwnedFd,
    /// Its device and inode number.
    identity: (u64, u64),
}

impl Socket {
    /// The socket in the directory where its control daemon has made it. None if it is not there.
    ///
    /// # Errors
    /// The directory can't be used.
    pub(crate) fn of(control_directory: &Path, private: bool) -> Result<Option<Self>, BadDirectory> {
        let open = if private { directories::open_private } else { directories::open };
        let directory = open(control_directory)?;
        let identity = identity(&directory).map_err(|error| bad(control_directory, &error))?;
        Ok(identity.map(|identity| Self { directory, identity }))
    }

    /// Makes the pipe directory lead here, or to no control daemon if `open` is false. Whether it had to be made so.
    ///
    /// # Errors
    /// The directory can't be used, or the link can't be made.
    pub(crate) fn lead_from(&self, pipe_directory: &Path, open: bool) -> Result<bool, BadDirectory> {
        let directory = directories::open(pipe_directory)?;
        let led = || {
            for name in LEFTOVERS {
                match rustix::fs::unlinkat(&directory, name, AtFlags::empty()) {
                    // The log directory may be here, and is called so by default.
                    Ok(()) | Err(Errno::NOENT | Errno::ISDIR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            if open { self.link(&directory) } else { self.unlink(&directory) }
        };
        led().map_err(|error| bad(pipe_directory, &error))
    }

    /// Makes each directory of `names` in `parent` lead here, and no other directory there. A client that connects
    /// meanwhile finds the former socket or this one. Directories are never removed, since a container keeps the directory
    /// that it has. Returns the directories of `names` that had another socket or none.
    ///
    /// # Errors
    /// A directory can't be used, or the link can't be made.
    pub(crate) fn lead_from_each(
        &self,
        parent: &Path,
        names: &BTreeSet<String>,
    ) -> Result<Vec<PathBuf>, BadDirectory> {
        let slices = directories::open(parent)?;
        let mut renewed = Vec::new();
        for name in names {
            let path = parent.join(name);
            let directory = directories::open_in(&slices, &path)?;
            if self.link(&directory).map_err(|error| bad(&path, &error))? {
                renewed.push(path);
            }
        }
        for name in others(&slices, names).map_err(|error| bad(parent, &error))? {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let unlinked = match rustix::fs::openat(&slices, &name, flags, Mode::empty()) {
                Ok(directory) => self.unlink(&directory),
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(false),
                Err(error) => Err(error.into()),
            };
            unlinked.map_err(|error| bad(&parent.join(&name), &error))?;
        }
        Ok(renewed)
    }

    /// Makes the link, unless it is there. Whether it was not.
    fn link(&self, directory: &OwnedFd) -> io::Result<bool> {
        if identity(directory)? == Some(self.identity) {
            return Ok(false);
        }
        // A crash may have left one.
        remove(directory, NEW)?;
        rustix::fs::linkat(&self.directory, SOCKET, directory, NEW, AtFlags::empty())?;
        rustix::fs::renameat(directory, NEW, directory, SOCKET)?;
        Ok(true)
    }

    /// Takes the link away from a directory if it leads here. Whether it did.
    fn unlink(&self, directory: &OwnedFd) -> io::Result<bool> {
        let leads_here = identity(directory)? == Some(self.identity);
        if leads_here {
            remove(directory, SOCKET)?;
        }
        Ok(leads_here)
    }
}

fn bad(path: &Path, error: &io::Error) -> BadDirectory {
    BadDirectory {
        path: path.to_owned(),
        reason: Reason::new(
            format!("can't lead to the control daemon: {error}"),
            "see that its file system has room and can have hard links",
        ),
    }
}

/// The device and the inode number of the socket in a directory, if there is one.
fn identity(directory: impl AsFd) -> io::Result<Option<(u64, u64)>> {
    match rustix::fs::statat(directory, SOCKET, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(Stat { st_dev, st_ino, .. }) => Ok(Some((st_dev, st_ino))),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
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
            fs::create_dir(root.path().join("private")).unwrap();
            let socket = UnixListener::bind(root.path().join("private/control")).unwrap();
            Self { root, socket }
        }

        fn lead(&self, names: &[&str]) -> Result<Vec<String>, String> {
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            let at = |path: &str| self.root.path().join(path);
            let socket = Socket::of(&at("private"), true).map_err(|bad| bad.to_string())?;
            let Some(socket) = socket else { return Ok(Vec::new()) };
            let renewed = socket.lead_from_each(&at("pipe/slices"), &names).map_err(|bad| bad.to_string())?;
            Ok(renewed.iter().map(|path| path.file_name().unwrap().to_str().unwrap().to_owned()).collect())
        }

        fn lead_from_pipe(&self, open: bool) -> bool {
            let socket = Socket::of(&self.root.path().join("private"), true).unwrap().unwrap();
            socket.lead_from(&self.root.path().join("pipe"), open).unwrap()
        }

        /// A new socket, as a new control daemon makes it.
        fn renew(&mut self) {
            let path = self.root.path().join("private/control");
            fs::remove_file(&path).unwrap();
            self.socket = UnixListener::bind(path).unwrap();
        }

        fn leads(&self, name: &str) -> bool {
            let inode = |path: &str| fs::metadata(self.root.path().join(path)).map(|found| found.ino()).ok();
            inode("private/control") == inode(&format!("pipe/{name}/control"))
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
        assert!(!place.leads("slices/a"));
        assert_eq!(place.lead(&["a", "c"]).unwrap(), ["a", "c"]);
        assert!(place.leads("slices/a") && place.leads("slices/c"));
        assert!(!place.leads("slices/b"), "its link leads to the former socket");
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
        fs::hard_link(at("private/control"), at("elsewhere/control")).unwrap();
        symlink(at("elsewhere"), at("pipe/slices/link")).unwrap();
        assert_eq!(place.lead(&["a"]).unwrap(), [""; 0]);
        assert!(at("pipe/slices/other/control").exists() && at("elsewhere/control").exists());
        let refused = place.lead(&["a", "link"]).unwrap_err();
        assert!(refused.contains("slices/link: is not a directory"), "{refused}");
        fs::remove_file(at("private/control")).unwrap();
        assert_eq!(place.lead(&["a"]).unwrap(), [""; 0], "no control daemon listens yet");
    }

    /// The pipe directory of an earlier version of this service is left with nothing but the link.
    #[test]
    fn the_pipe_directory_has_the_link_alone() {
        let mut place = Place::new();
        let at = |path: &str| place.root.path().join(path);
        fs::create_dir(at("pipe")).unwrap();
        for left in LEFTOVERS.iter().chain(&[SOCKET]) {
            fs::write(at("pipe").join(left), "").unwrap();
        }
        assert!(place.lead_from_pipe(true));
        assert!(place.leads("") && !place.lead_from_pipe(true));
        let files: Vec<_> = fs::read_dir(at("pipe")).unwrap().map(|file| file.unwrap().file_name()).collect();
        assert_eq!(files, [SOCKET]);
        assert_eq!(fs::metadata(at("private")).unwrap().permissions().mode() & 0o777, 0o700);
        fs::create_dir(at("pipe/log")).unwrap();
        assert!(!place.lead_from_pipe(true) && at("pipe/log").exists(), "the log directory stays");
        fs::remove_dir(at("pipe/log")).unwrap();
        assert!(place.lead_from_pipe(false) && !place.lead_from_pipe(false));
        assert_eq!(fs::read_dir(at("pipe")).unwrap().count(), 0);
        assert!(place.lead_from_pipe(true));
        place.renew();
        assert!(!place.lead_from_pipe(false), "another control daemon may have made that socket");
        assert!(place.lead_from_pipe(true) && place.leads(""));
    }
}
