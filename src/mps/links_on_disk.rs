//! The links on disk: hard links to the socket of a control daemon, in the pipe directory and in each slice's directory. A
//! client needs only the link. The control daemon makes the socket in its private directory. A program that can't reach the
//! private directory can't set limits for other programs.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use mps_core::links::SocketId;
use mps_core::terms::{SliceId, is_of_service};
use rustix::fs::{AtFlags, Dir, Mode, OFlags, Stat};
use rustix::io::Errno;

use common::problem::Problem;

use common::directories::{self, ATTEMPTS, BadDirectory, SOCKET, clear_place, immutable};

/// The file name of the waiting socket, which `waiting.rs` explains. The name is not longer than the name of a control daemon's
/// socket, since the path of a socket has a maximum length.
pub(super) const WAITING: &str = "waiting";

/// The name under which the service makes a new link. A rename then replaces the old link by the new link.
const NEW: &str = ".control.new";

/// Files that a control daemon makes in its directory besides its socket. A directory for links that has one of these files was
/// once the directory of a control daemon.
const LEFTOVERS: [&str; 4] = ["control_privileged", "control_lock", "log", "nvidia-cuda-mps-control.pid"];

/// The most names that a search reads in the directory of slices, besides the directories of known slices. A container with
/// write access to the pipe directory can make any number of files there.
const OTHERS: usize = 512;

#[derive(Debug)]
pub(crate) struct Socket {
    directory: OwnedFd,
    name: &'static str,
    pub(crate) id: SocketId,
}

impl Socket {
    /// Finds the socket that a control daemon has made in its directory. None if there is no such socket.
    pub(crate) fn find(control_directory: &Path) -> Result<Option<Self>, BadDirectory> {
        Self::find_named(control_directory, SOCKET)
    }

    pub(super) fn find_waiting(control_directory: &Path) -> Result<Option<Self>, BadDirectory> {
        Self::find_named(control_directory, WAITING)
    }

    fn find_named(parent: &Path, name: &'static str) -> Result<Option<Self>, BadDirectory> {
        let Some(directory) = directories::ours(parent)? else { return Ok(None) };
        let id = identity_of(&directory, name).map_err(|error| bad(parent, &error))?;
        Ok(id.map(|id| Self { directory, name, id }))
    }

    /// Makes the link in the pipe directory point to this socket. Returns false if the link already pointed there. `moved` gets
    /// a message about each file that was in the way and was renamed.
    pub(crate) fn lead_from_pipe(
        &self,
        pipe_directory: &Path,
        moved: &mut Vec<String>,
    ) -> Result<bool, BadDirectory> {
        let directory = match directories::ours(pipe_directory)? {
            Some(directory) => directory,
            None => directories::open(pipe_directory)?,
        };
        let leads = identity(&directory).map_err(|error| bad(pipe_directory, &error))? == Some(self.id);
        for name in LEFTOVERS.into_iter().filter(|_| !leads) {
            match unlink(&directory, name) {
                // The log directory has the name `log` by default. `unlink` does not remove a directory, so the log directory
                // stays.
                Ok(()) | Err(Errno::NOENT | Errno::ISDIR) => {}
                Err(error) => return Err(bad(pipe_directory, &error.into())),
            }
        }
        self.link(&directory, pipe_directory, moved)
    }

    fn link(&self, directory: &OwnedFd, path: &Path, moved: &mut Vec<String>) -> Result<bool, BadDirectory> {
        for _ in 0..ATTEMPTS {
            if identity(directory).map_err(|error| bad(path, &error))? == Some(self.id) {
                return Ok(false);
            }
            // The service may have crashed after it had made an earlier `NEW` and before the rename. So an old `NEW` is
            // removed.
            match unlink(directory, NEW) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(Errno::ISDIR) => clear_place(directory, &path.join(NEW), "was a directory", moved)?,
                Err(error) => return Err(bad(path, &error.into())),
            }
            let link = || rustix::fs::linkat(&self.directory, self.name, directory, NEW, AtFlags::empty());
            match immutable::change(directory, link) {
                Ok(()) => {}
                Err(Errno::EXIST) => continue,
                Err(error) => return Err(bad(path, &error.into())),
            }
            match immutable::change(directory, || rustix::fs::renameat(directory, NEW, directory, SOCKET)) {
                Ok(()) => return Ok(true),
                Err(Errno::ISDIR) => clear_place(directory, &path.join(SOCKET), "was a directory", moved)?,
                Err(Errno::NOENT) => {}
                Err(error) => return Err(bad(path, &error.into())),
            }
        }
        Err(bad(path, &io::Error::other("other programs replace the link again and again")))
    }
}

pub(crate) fn close_pipe(pipe_directory: &Path, socket: SocketId) -> Result<(), BadDirectory> {
    let Some(directory) = directories::existing(pipe_directory)? else { return Ok(()) };
    close(&directory, Some(socket)).map_err(|error| still_leads(pipe_directory, &error))
}

/// The directory that contains the slices' directories. The service never removes a slice's directory, since a container would
/// still have the removed directory mounted.
#[derive(Debug)]
pub(crate) struct SliceDirectories {
    path: PathBuf,
    directory: OwnedFd,
}

impl SliceDirectories {
    /// Opens the directory, and makes it if it is missing. `moved` gets a message about each file that was in the way and was
    /// renamed.
    pub(crate) fn make(path: &Path, moved: &mut Vec<String>) -> Result<Self, BadDirectory> {
        let parent = directories::open(path.parent().unwrap_or(Path::new("/")))?;
        Ok(Self { path: path.to_owned(), directory: directories::open_in(&parent, path, moved)? })
    }

    pub(crate) fn existing(path: &Path) -> Result<Option<Self>, BadDirectory> {
        let directory = directories::existing(path)?;
        Ok(directory.map(|directory| Self { path: path.to_owned(), directory }))
    }

    /// Makes the link in the directory of a slice point to a socket. A client that connects meanwhile finds the old socket or
    /// the new socket. Returns true if the directory had no link to this socket before.
    pub(crate) fn lead(
        &self,
        name: &str,
        socket: &Socket,
        moved: &mut Vec<String>,
    ) -> Result<bool, BadDirectory> {
        let path = self.path.join(name);
        let directory = directories::open_in(&self.directory, &path, moved)?;
        socket.link(&directory, &path, moved)
    }

    /// Removes the link from the directory of a slice. If `socket` is given, a link to any other socket stays.
    pub(crate) fn close(&self, name: &str, socket: Option<SocketId>) -> Result<(), BadDirectory> {
        let closed = match self.open(name) {
            Ok(directory) => close(&directory, socket),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(()),
            Err(error) => Err(error.into()),
        };
        closed.map_err(|error| still_leads(&self.path.join(name), &error))
    }

    /// Makes the directories of these slices immutable, and the directory that contains them, so that no other user can change
    /// them.
    pub(crate) fn keep<'n>(&self, names: impl IntoIterator<Item = &'n String>) {
        for name in names {
            if let Ok(directory) = self.open(name) {
                keep(&directory, &self.path.join(name));
            }
        }
        keep(&self.directory, &self.path);
    }

    /// Removes the immutable flag from the directories of all slices, and from the directory that contains them. `names` are
    /// the known slices. A search finds the directories of other slices.
    fn release(&self, names: &BTreeSet<String>) {
        // The parent directory gets the immutable flag after the slices' directories, and loses it after them. So a search for
        // other slices is needed only while the parent has the flag. When many control daemons release their links, only the
        // first of them searches.
        let kept = immutable::is_set(&self.directory).unwrap_or_default();
        let others = kept.then(|| self.others(names).0);
        for name in names.iter().chain(others.iter().flatten()) {
            let _ = self.open(name).and_then(|directory| immutable::set(directory, false));
        }
        let _ = immutable::set(&self.directory, false);
    }

    fn open(&self, name: &str) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(&self.directory, name, flags, Mode::empty())
    }

    /// The directories with the name of a slice, except those in `names`. If some directories may be missing, the reason says
    /// why.
    pub(crate) fn others(&self, names: &BTreeSet<String>) -> (BTreeSet<String>, Option<BadDirectory>) {
        let incomplete = |what: String, remedy: &str| BadDirectory {
            path: self.path.clone(),
            problem: Problem::new(
                format!("links of slices that are not configured may be left here: {what}"),
                remedy,
            ),
        };
        let unreadable = |error: Errno| {
            incomplete(format!("the directory can't be read: {error}"), "check its file system")
        };
        let mut others = BTreeSet::new();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let entries = match rustix::fs::openat(&self.directory, ".", flags, Mode::empty()).and_then(Dir::new)
        {
            Ok(entries) => entries,
            Err(error) => return (others, Some(unreadable(error))),
        };
        let mut looked_at = 0;
        for entry in entries {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => return (others, Some(unreadable(error))),
            };
            let Ok(name) = entry.file_name().to_str() else { continue };
            if name.starts_with('.') || names.contains(name) {
                continue;
            }
            if looked_at == OTHERS {
                let many = format!("the directory has more than {OTHERS} other files");
                return (others, Some(incomplete(many, "remove the files that belong to no slice")));
            }
            looked_at += 1;
            if SliceId::with_directory_name(name).is_some() {
                others.insert(name.to_owned());
            }
        }
        (others, None)
    }
}

/// Makes a pipe directory immutable, so that no other user can change it. A directory that also has foreign files, such as
/// /run, does not become immutable, since other programs may need to change it.
pub(crate) fn keep_pipe(path: &Path, log_directory: &Path) {
    let log = log_directory.strip_prefix(path).ok().and_then(|below| below.iter().next());
    let is_ours = |name: &OsStr| {
        let text = name.to_string_lossy();
        // The pipe directory may contain the pipe directories of control daemons for one GPU or one slice.
        let ours = [SOCKET, NEW, WAITING].contains(&&*text) || is_of_service(&text);
        ours || text.contains(".refused-") || log == Some(name)
    };
    let (Ok(Some(directory)), Ok(mut entries)) = (directories::ours(path), fs::read_dir(path)) else {
        return;
    };
    if entries.all(|entry| entry.is_ok_and(|entry| is_ours(&entry.file_name()))) {
        keep(&directory, path);
    }
}

fn keep(directory: &OwnedFd, path: &Path) {
    if let Err(error) = immutable::set(directory, true) {
        tracing::debug!("{path} can't be made immutable: {error}", path = path.display());
    }
}

/// Removes the immutable flag from a pipe directory and from the directories of slices, so that other users can change them
/// again. `names` are the slices of the control daemon that used these directories.
pub(crate) fn release(pipe_directory: &Path, slice_directories: Option<&Path>, names: &BTreeSet<String>) {
    if let Some(Ok(Some(directories))) = slice_directories.map(SliceDirectories::existing) {
        directories.release(names);
    }
    if let Ok(Some(directory)) = directories::existing(pipe_directory) {
        let _ = immutable::set(&directory, false);
    }
}

fn unlink(directory: &OwnedFd, name: &str) -> rustix::io::Result<()> {
    immutable::change(directory, || rustix::fs::unlinkat(directory, name, AtFlags::empty()))
}

/// Removes the waiting socket, even from a directory that is immutable.
pub(super) fn remove_waiting(directory: &Path) {
    let removed = directories::existing(directory).map(|found| found.map(|found| unlink(&found, WAITING)));
    if let Ok(Some(Err(error))) = removed
        && error != Errno::NOENT
    {
        tracing::debug!("{}: {error}", directory.join(WAITING).display());
    }
}

fn close(directory: &OwnedFd, socket: Option<SocketId>) -> io::Result<()> {
    let there = identity(directory)?;
    if there.is_none() || socket.is_some_and(|socket| there != Some(socket)) {
        return Ok(());
    }
    match unlink(directory, SOCKET) {
        // If a directory has this name, there is no link to remove.
        Ok(()) | Err(Errno::NOENT | Errno::ISDIR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn bad(path: &Path, error: &io::Error) -> BadDirectory {
    BadDirectory {
        path: path.to_owned(),
        problem: Problem::new(
            format!("a link to the control daemon's socket can't be made here: {error}"),
            "check that the directory is not a mount point, and that its file system has free space and \
             supports hard links",
        ),
    }
}

fn still_leads(path: &Path, error: &io::Error) -> BadDirectory {
    let remedy = format!("remove {}", path.join(SOCKET).display());
    BadDirectory {
        path: path.to_owned(),
        problem: Problem::new(
            format!("the link to a control daemon's socket can't be removed here: {error}"),
            remedy,
        ),
    }
}

fn identity(directory: impl AsFd) -> io::Result<Option<SocketId>> {
    identity_of(directory, SOCKET)
}

fn identity_of(directory: impl AsFd, name: &str) -> io::Result<Option<SocketId>> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(Stat { st_dev, st_ino, .. }) => Ok(Some((st_dev, st_ino))),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::skip::skip;

    struct TestDirectory {
        root: tempfile::TempDir,
        socket: UnixListener,
    }

    impl TestDirectory {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            fs::create_dir(root.path().join("private")).unwrap();
            let socket = UnixListener::bind(root.path().join("private/control")).unwrap();
            Self { root, socket }
        }

        fn socket(&self) -> Option<Socket> {
            Socket::find(&self.root.path().join("private")).unwrap()
        }

        /// Makes the links of these slices point to the socket and removes all other links, as the supervisor does. Returns the
        /// slices that had no such link before, and messages about renamed files.
        fn lead_all(&self, names: &[&str]) -> (Vec<String>, Vec<String>) {
            let (mut made, mut moved) = (Vec::new(), Vec::new());
            let Some(socket) = self.socket() else { return (made, moved) };
            let slices = SliceDirectories::make(&self.root.path().join("pipe/slices"), &mut moved).unwrap();
            for name in names {
                if slices.lead(name, &socket, &mut moved).unwrap() {
                    made.push((*name).to_owned());
                }
            }
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            for name in slices.others(&names).0 {
                slices.close(&name, Some(socket.id)).unwrap();
            }
            (made, moved)
        }

        fn lead(&self, names: &[&str]) -> Vec<String> {
            let (made, moved) = self.lead_all(names);
            assert_eq!(moved, [""; 0]);
            made
        }

        fn lead_from_pipe(&self) -> bool {
            self.socket().unwrap().lead_from_pipe(&self.root.path().join("pipe"), &mut Vec::new()).unwrap()
        }

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

    const A: &str = "00_06.0-0";
    const B: &str = "00_06.0-1";
    const C: &str = "0001_1a_00.0-12";

    #[test]
    fn links_follow_the_socket_and_the_slices() {
        let mut place = TestDirectory::new();
        assert_eq!(place.lead(&[A, B]), [A, B]);
        assert_eq!(place.lead(&[A, B]), [""; 0]);
        let directory = place.root.path().join("pipe/slices").join(A);
        assert_eq!(fs::metadata(&directory).unwrap().permissions().mode() & 0o777, 0o755);
        let held = fs::metadata(&directory).unwrap().ino();
        place.renew();
        let leads = |place: &TestDirectory, name: &str| place.leads(&format!("slices/{name}"));
        assert!(!leads(&place, A));
        assert_eq!(place.lead(&[A, C]), [A, C]);
        assert!(leads(&place, A) && leads(&place, C));
        assert!(!leads(&place, B), "its link leads to the former socket");
        assert_eq!(place.lead(&[C]), [""; 0]);
        assert!(!directory.join("control").exists());
        assert_eq!(place.lead(&[A]), [A]);
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
        let place = TestDirectory::new();
        assert_eq!(place.lead(&[A]), [A]);
        let at = |path: &str| place.root.path().join(path);
        // The directory of slices also contains a slice of another control daemon, a file, a directory with a name that no
        // slice has, and a symbolic link.
        fs::create_dir(at("pipe/slices").join(B)).unwrap();
        let _other = UnixListener::bind(at("pipe/slices").join(B).join("control")).unwrap();
        fs::write(at("pipe/slices/00_07.0-0"), "").unwrap();
        for elsewhere in ["elsewhere", "pipe/slices/other"] {
            fs::create_dir(at(elsewhere)).unwrap();
            fs::hard_link(at("private/control"), at(elsewhere).join("control")).unwrap();
        }
        symlink(at("elsewhere"), at("pipe/slices").join(C)).unwrap();
        assert_eq!(place.lead(&[A]), [""; 0]);
        assert!(at("pipe/slices").join(B).join("control").exists());
        assert!(at("elsewhere/control").exists() && at("pipe/slices/other/control").exists());
        fs::remove_file(at("private/control")).unwrap();
        assert_eq!(place.lead(&[A]), [""; 0], "no control daemon listens yet");
    }

    /// A foreign file or directory in the place of a link, or of a slice's directory, is renamed and not changed.
    #[test]
    fn a_thing_in_the_way_is_renamed() {
        let place = TestDirectory::new();
        let slices = place.root.path().join("pipe/slices");
        let slice = slices.join(A);
        fs::create_dir(place.root.path().join("pipe")).unwrap();
        symlink("/", &slices).unwrap();
        let (made, moved) = place.lead_all(&[A]);
        assert_eq!(made, [A]);
        let told = |path: &Path, why: &str| format!("{0} {why} and was renamed to", path.display());
        assert!(moved[0].starts_with(&told(&slices, "was a symbolic link")), "{moved:?}");
        for _ in 0..12 {
            fs::remove_dir_all(&slice).unwrap();
            fs::write(&slice, "kept").unwrap();
            let (made, moved) = place.lead_all(&[A]);
            assert_eq!((made.len(), moved.len()), (1, 1));
            assert!(moved[0].starts_with(&told(&slice, "was not a directory")), "{moved:?}");
            fs::remove_file(slice.join("control")).unwrap();
            fs::create_dir_all(slice.join(".control.new/below")).unwrap();
            fs::create_dir_all(slice.join("control/below")).unwrap();
            let (made, moved) = place.lead_all(&[A]);
            assert_eq!((made.len(), moved.len()), (1, 2), "{moved:?}");
            assert!(place.leads(&format!("slices/{A}")));
        }
        let refused = fs::read_dir(&slices).unwrap().map(|file| file.unwrap().file_name());
        let refused: Vec<_> = refused.filter(|name| name.to_str().unwrap().contains(".refused-")).collect();
        assert_eq!(refused.len(), 12);
        assert!(refused.iter().all(|name| fs::read_to_string(slices.join(name)).unwrap() == "kept"));
    }

    /// A tenant can make any number of files in the directory of slices, so a search reads only some hundreds of them.
    #[test]
    fn only_some_hundreds_of_other_things_are_looked_at() {
        let place = TestDirectory::new();
        place.lead(&[A]);
        let slices = place.root.path().join("pipe/slices");
        for number in 0..2 * OTHERS {
            fs::write(slices.join(format!("{:04x}_01_00.0-0", number + 1)), "").unwrap();
        }
        let directories = SliceDirectories::existing(&slices).unwrap().unwrap();
        let (others, incomplete) = directories.others(&BTreeSet::new());
        assert_eq!(others.len(), OTHERS);
        let said = incomplete.unwrap().to_string();
        assert!(said.contains("more than 512 other files"), "{said}");
    }

    /// A release removes the immutable flag from all slices' directories. It checks the directories of other slices only if the
    /// parent directory has the flag.
    #[test]
    fn what_was_kept_is_given_back() {
        let place = TestDirectory::new();
        place.lead(&[A, B]);
        let path = place.root.path().join("pipe/slices");
        let directories = SliceDirectories::existing(&path).unwrap().unwrap();
        let flag = |name: &str| immutable::is_set(directories.open(name).unwrap()).unwrap_or_default();
        let kept = |names: &[&String]| directories.keep(names.iter().copied());
        let own: BTreeSet<String> = (0..2 * OTHERS).map(|number| format!("00_06.0-{}", number + 2)).collect();
        for name in &own {
            fs::create_dir(path.join(name)).unwrap();
        }
        let (a, b) = (A.to_owned(), B.to_owned());
        kept(&own.iter().chain([&a, &b]).collect::<Vec<_>>());
        if !flag(A) {
            return skip("what_was_kept_is_given_back", "the immutable flag can't be set in /tmp");
        }
        release(&place.root.path().join("pipe"), Some(&path), &own);
        assert!(!own.iter().chain([&a, &b]).any(|name| flag(name)) && !flag("."));
        immutable::set(directories.open(A).unwrap(), true).unwrap();
        let only_b = BTreeSet::from([b]);
        release(&place.root.path().join("pipe"), Some(&path), &only_b);
        assert!(flag(A), "it is looked at for each control daemon");
        immutable::set(directories.open(A).unwrap(), false).unwrap();
    }

    /// The service removes the files of a control daemon that once had the pipe directory as its own, so that only the link
    /// remains.
    #[test]
    fn the_pipe_directory_has_the_link_alone() {
        let mut place = TestDirectory::new();
        let at = |path: &str| place.root.path().join(path);
        fs::create_dir(at("pipe")).unwrap();
        for left in LEFTOVERS.iter().chain(&[SOCKET]) {
            fs::write(at("pipe").join(left), "").unwrap();
        }
        assert!(place.lead_from_pipe());
        assert!(place.leads("") && !place.lead_from_pipe());
        let files: Vec<_> = fs::read_dir(at("pipe")).unwrap().map(|file| file.unwrap().file_name()).collect();
        assert_eq!(files, [SOCKET]);
        fs::create_dir(at("pipe/log")).unwrap();
        assert!(!place.lead_from_pipe() && at("pipe/log").exists(), "the log directory stays");
        fs::remove_dir(at("pipe/log")).unwrap();
        let close = |place: &TestDirectory| close_pipe(&at("pipe"), place.socket().unwrap().id).unwrap();
        close(&place);
        assert_eq!(fs::read_dir(at("pipe")).unwrap().count(), 0);
        close(&place);
        assert!(place.lead_from_pipe());
        let at = |path: &str| place.root.path().join(path);
        let pipe = at("pipe");
        place.renew();
        close_pipe(&pipe, place.socket().unwrap().id).unwrap();
        assert!(pipe.join("control").exists(), "another control daemon may have made that socket");
        assert!(place.lead_from_pipe() && place.leads(""));
    }
}
