//! Makes and checks the pipe directory and the log directory, which are in /tmp by default. The service follows no symbolic
//! link and uses no directory that another user has put into /tmp or another parent directory. So clients can trust these
//! directories.

pub mod immutable;

use crate::host::driver::LOG_FIFO;
use crate::host::proc;
use crate::plan::ControlDaemonPlan;
use crate::problem::Problem;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use mps_core::terms::is_of_service;
use rustix::fs::{Access, AtFlags, FileType, Mode, OFlags, Stat, StatxFlags};
use rustix::io::Errno;
use rustix::path::Arg;

#[derive(Debug, thiserror::Error)]
#[error("{path}: {problem}", path = path.display())]
pub struct BadDirectory {
    /// The directory with the problem: the wanted directory, or one of its ancestors.
    pub path: PathBuf,
    pub problem: Problem,
}

/// The mode of the pipe directory and the log directory: all users may read them, and only root may write.
const MODE: u32 = 0o755;

const PRIVATE: u32 = 0o700;

/// The socket to which clients connect, and its mode. A client needs the right to write to the socket in order to connect.
pub const SOCKET: &str = "control";
const SOCKET_MODE: u32 = 0o666;

/// Makes `path` and its missing parents, all with mode 0755, and opens `path`. Fails if `path` or a parent is no directory,
/// belongs to another user, or is a symbolic link that another user could have made. Also fails if all users can rename files
/// in a parent.
pub fn open(path: &Path) -> Result<OwnedFd, BadDirectory> {
    open_as(path, MODE)
}

/// Like [`open`], for a directory with mode 0700, which only this service and its control daemons use.
pub fn open_private(path: &Path) -> Result<OwnedFd, BadDirectory> {
    open_as(path, PRIVATE)
}

fn open_as(path: &Path, mode: u32) -> Result<OwnedFd, BadDirectory> {
    let directory = walk(path, true)?.ok_or_else(|| bad(path, "has just been removed".to_owned()))?;
    claim(&directory, mode).map_err(|problem| bad(path, problem))?;
    if rustix::fs::accessat(&directory, ".", Access::WRITE_OK, AtFlags::EACCESS) == Err(Errno::ROFS) {
        return Err(bad(path, read_only(path).prefixed("can't be written")));
    }
    Ok(directory)
}

/// Like [`open`], for a directory `path` inside a `parent` that [`open`] returned. A file, a symbolic link or another user's
/// directory at `path` is renamed, and `moved` gets a message about the renaming. Otherwise a user who can write in `parent`
/// could prevent the service from making the directory.
pub fn open_in(parent: &OwnedFd, path: &Path, moved: &mut Vec<String>) -> Result<OwnedFd, BadDirectory> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let failed = |error: Errno| bad(path, format!("can't be made or opened: {error}"));
    for _ in 0..ATTEMPTS {
        match immutable::change(parent, || rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(MODE))) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(failed(error)),
        }
        let Some(directory) = entry(parent, name).map_err(failed)? else { continue };
        let stat = stat(&directory).map_err(|problem| bad(path, problem))?;
        let why = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory if owner(&stat).is_ok() => {
                claim(&directory, MODE).map_err(|problem| bad(path, problem))?;
                return Ok(directory);
            }
            FileType::Directory => format!("belonged to user {}", stat.st_uid),
            FileType::Symlink => "was a symbolic link".to_owned(),
            _ => "was not a directory".to_owned(),
        };
        clear_place(parent, path, &why, moved)?;
    }
    Err(bad(path, "is removed or replaced again and again by another program".to_owned()))
}

/// The number of times that the service tries to make a file or directory that other programs remove or replace meanwhile.
pub const ATTEMPTS: u32 = 3;

/// Renames the file or directory at `path`, which is in `directory`. `moved` gets a message with `why`, the reason for the
/// renaming.
pub fn clear_place(
    directory: &OwnedFd,
    path: &Path,
    why: &str,
    moved: &mut Vec<String>,
) -> Result<(), BadDirectory> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    match move_away(directory, name) {
        Ok(new) => moved.push(format!("{path} {why} and was renamed to {new}", path = path.display())),
        Err(Errno::NOENT) => {}
        Err(error) => {
            let found = format!("{why}, and can't be renamed: {error}");
            return Err(bad(path, Problem::new(found, "remove it")));
        }
    }
    Ok(())
}

/// If a directory with the name of the control daemon's FIFO is in this pipe directory, renames that directory. The service may
/// have made that directory as the log directory of an earlier configuration. While that directory has this name, the control
/// daemon can't make the FIFO. Returns a message if a directory was renamed.
pub fn free_place_of_fifo(directory: &Path) -> Result<Option<String>, BadDirectory> {
    let path = directory.join(LOG_FIFO);
    let Some(there) = walk(directory, false)? else { return Ok(None) };
    let entry = entry(&there, LOG_FIFO).map_err(|error| bad(&path, format!("can't be opened: {error}")))?;
    let Some(entry) = entry else { return Ok(None) };
    let found = stat(&entry).map_err(|problem| bad(&path, problem))?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Directory {
        return Ok(None);
    }
    let mut moved = Vec::new();
    clear_place(&there, &path, "was a directory in the place of the control daemon's FIFO", &mut moved)?;
    Ok(moved.pop())
}

/// Opens the directory `path` without making or changing anything. None if the directory does not exist.
pub fn existing(path: &Path) -> Result<Option<OwnedFd>, BadDirectory> {
    walk(path, false)
}

/// Opens the directory `path`. None if the directory does not exist. Fails if another user owns the directory. A wrong mode is
/// not corrected here, since the health check corrects and reports wrong modes.
pub fn ours(path: &Path) -> Result<Option<OwnedFd>, BadDirectory> {
    let Some(directory) = walk(path, false)? else { return Ok(None) };
    stat(&directory).and_then(|stat| owner(&stat)).map_err(|problem| bad(path, problem))?;
    Ok(Some(directory))
}

/// True if the directory exists and [`open`] would accept it. False if the directory does not exist. The call makes and changes
/// nothing, so `--check` can use it.
pub fn check(path: &Path) -> Result<bool, BadDirectory> {
    let Some(directory) = walk(path, false)? else { return Ok(false) };
    let stat = stat(&directory).map_err(|problem| bad(path, problem))?;
    // `--check` may run as another user than root. The service runs as root, so a directory of root is right in any case.
    if stat.st_uid != 0 {
        owner(&stat).map_err(|problem| bad(path, problem))?;
    }
    Ok(true)
}

fn bad(at: &Path, problem: impl Into<Problem>) -> BadDirectory {
    BadDirectory { path: at.to_owned(), problem: problem.into() }
}

/// Opens the directory `path` by opening each of its ancestors in turn. With `make`, missing directories are made. Without
/// `make`, None means that a directory is missing.
fn walk(path: &Path, make: bool) -> Result<Option<OwnedFd>, BadDirectory> {
    let mut at = PathBuf::from("/");
    let mut directory =
        rustix::fs::open("/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|error| bad(&at, format!("can't be opened: {error}")))?;
    for component in path.components() {
        let Component::Normal(name) = component else { continue };
        let parent = at.clone();
        at.push(name);
        if make {
            match rustix::fs::mkdirat(&directory, name, Mode::from_raw_mode(MODE)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(Errno::ROFS) => return Err(bad(&at, format!("can't be made: {}", read_only(path)))),
                Err(error) => return Err(bad(&at, format!("can't be made: {error}"))),
            }
        }
        let entry = entry(&directory, name).map_err(|error| bad(&at, format!("can't be opened: {error}")))?;
        let Some(entry) = entry else { return Ok(None) };
        let stat = stat(&entry).map_err(|problem| bad(&at, problem))?;
        let last = at == path;
        directory = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                // The caller checks the owner and the mode of the last directory.
                if !last {
                    others_rule(&stat).map_err(|problem| bad(&at, problem))?;
                }
                entry
            }
            // A symbolic link that only root can make, such as /var/run, is as safe as a directory.
            FileType::Symlink if !last && only_root_writes(&directory) => {
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                rustix::fs::openat(&directory, name, flags, Mode::empty()).map_err(|error| {
                    bad(&at, format!("is a symbolic link to a path that can't be opened: {error}"))
                })?
            }
            kind => {
                let found = if kind == FileType::Symlink {
                    format!(
                        "is a symbolic link in {parent}: the service follows a link only in a directory \
                         where only root can write, and never as the last part of a path",
                        parent = parent.display()
                    )
                } else {
                    "is not a directory".to_owned()
                };
                return Err(bad(
                    &at,
                    Problem::new(found, "remove what is at this path, or configure another directory"),
                ));
            }
        };
    }
    Ok(Some(directory))
}

/// The problem of a read-only file system. Usually the file system is read-only only for the service, because of its systemd
/// unit.
fn read_only(path: &Path) -> Problem {
    Problem::new(
        "the file system is read-only",
        format!(
            "if the file system is read-only for this service alone, allow the directory with \
             ReadWritePaths={directory} (systemctl edit yunion-mps-daemon), or configure a directory below \
             /tmp or /var/log",
            directory = to_be_writable(path).display()
        ),
    )
}

/// The directory that the service's unit must make writable with `ReadWritePaths=`, so that the service can write in `path`.
/// Usually this directory is the parent of the configured directory, so that the pipe directory and the private directory next
/// to it are on one mount: each directory in `ReadWritePaths=` becomes its own mount, and hard links between different mounts
/// are impossible.
pub fn to_be_writable(path: &Path) -> &Path {
    let is_below = |path: &&Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        is_of_service(&name)
    };
    let configured = path.ancestors().find(|path| !is_below(path)).unwrap_or(path);
    configured.parent().filter(|parent| *parent != Path::new("/")).unwrap_or(configured)
}

/// Sets the mode of a directory, and returns the former mode if it was different. Fails if the directory does not belong to the
/// service.
fn claim(directory: &OwnedFd, mode: u32) -> Result<Option<u32>, Problem> {
    let stat = stat(directory)?;
    owner(&stat)?;
    let was = stat.st_mode & 0o777;
    if was == mode {
        return Ok(None);
    }
    immutable::change(directory, || chmod(directory, mode))
        .map_err(|error| format!("can't be given the mode {mode:04o}: {error}"))?;
    Ok(Some(was))
}

/// True if hard links are possible between two directories, since both are on one mount. A directory that does not exist counts
/// as part of the mount on which it would be made.
pub fn on_one_mount(one: &Path, other: &Path) -> bool {
    let mount = |path: &Path| {
        let there = path.ancestors().find_map(|path| {
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            rustix::fs::open(path, flags, Mode::empty()).ok()
        })?;
        let found = rustix::fs::statx(&there, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).ok()?;
        // A kernel before 5.8 does not report the mount, so only the device numbers are compared.
        let known = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::MNT_ID);
        Some((found.stx_dev_major, found.stx_dev_minor, known.then_some(found.stx_mnt_id)))
    };
    mount(one) == mount(other)
}

fn owner(stat: &Stat) -> Result<(), Problem> {
    let us = rustix::process::geteuid().as_raw();
    if stat.st_uid == us {
        return Ok(());
    }
    Err(Problem::new(
        format!("belongs to user {owner}, but this service runs as user {us}", owner = stat.st_uid),
        "remove it with its contents (rm -r), or configure another directory as docs/bounds.md shows",
    ))
}

/// Fails if other users can rename files in the directory, since they could replace the service's directory after any check.
/// /tmp is accepted, since its sticky bit lets only the owner of a file rename the file. A directory that root makes writable
/// for a group, such as /var/log, is accepted too.
fn others_rule(stat: &Stat) -> Result<(), Problem> {
    let (owner, us) = (stat.st_uid, rustix::process::geteuid().as_raw());
    if owner != 0 && owner != us {
        return Err(Problem::new(
            format!("belongs to user {owner}, who could replace its contents"),
            "configure a directory where only root can write, as docs/bounds.md shows, or remove this \
             directory with its contents (rm -r)",
        ));
    }
    if stat.st_mode & 0o1002 == 0o002 {
        return Err(Problem::new(
            "every user can replace its contents",
            "run chmod o-w on this directory, or chmod +t if other users must write in it, or configure \
             another directory",
        ));
    }
    Ok(())
}

fn only_root_writes(directory: &OwnedFd) -> bool {
    stat(directory).is_ok_and(|stat| stat.st_uid == 0 && stat.st_mode & 0o022 == 0)
}

fn stat(file: &OwnedFd) -> Result<Stat, Problem> {
    rustix::fs::fstat(file).map_err(|error| format!("owner and mode can't be read: {error}").into())
}

/// Opens the entry with this name in a directory. None if the directory has no such entry. `O_PATH` avoids side effects: a
/// normal open of a FIFO blocks, and a normal open of a device may change its state.
fn entry(directory: impl AsFd, name: impl Arg) -> rustix::io::Result<Option<OwnedFd>> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(directory, name, flags, Mode::empty()) {
        Ok(entry) => Ok(Some(entry)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Repairs the modes of the pipe directory, and of the socket in `control_directory`, so that clients of every user can reach
/// the control daemon. Returns a description of each repair. A missing directory or socket is no error. A directory or socket
/// of another user is an error.
pub fn let_users_in(pipe_directory: &Path, control_directory: &Path) -> Result<Vec<String>, BadDirectory> {
    let Some(directory) = walk(pipe_directory, false)? else { return Ok(Vec::new()) };
    let mut repaired = Vec::from_iter(put_back(pipe_directory, &directory, MODE)?);
    let Some(directory) = walk(control_directory, false)? else { return Ok(repaired) };
    let path = control_directory.join(SOCKET);
    let bad_socket = |problem: Problem| bad(&path, problem);
    let socket = entry(&directory, SOCKET).map_err(|error| format!("can't be opened: {error}").into());
    let Some(socket) = socket.map_err(bad_socket)? else { return Ok(repaired) };
    let stat = stat(&socket).map_err(bad_socket)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(bad_socket("is not the socket of the control daemon".into()));
    }
    owner(&stat).map_err(bad_socket)?;
    if stat.st_mode & SOCKET_MODE != SOCKET_MODE {
        chmod(&socket, SOCKET_MODE).map_err(|error| {
            bad_socket(format!("can't be given the mode {SOCKET_MODE:04o}: {error}").into())
        })?;
        repaired.push(repair(&path, stat.st_mode & 0o777, SOCKET_MODE));
    }
    Ok(repaired)
}

/// Repairs the mode of a private directory, so that only root has access. Returns a description of the repair. A missing
/// directory is no error. A directory of another user is an error.
pub fn keep_others_out(private: &Path) -> Result<Option<String>, BadDirectory> {
    let Some(directory) = walk(private, false)? else { return Ok(None) };
    put_back(private, &directory, PRIVATE)
}

fn put_back(path: &Path, directory: &OwnedFd, mode: u32) -> Result<Option<String>, BadDirectory> {
    let was = claim(directory, mode).map_err(|problem| bad(path, problem))?;
    Ok(was.map(|was| repair(path, was, mode)))
}

fn repair(path: &Path, was: u32, mode: u32) -> String {
    let path = path.display();
    format!("the mode of {path} was {was:04o}; the service has set {mode:04o} again")
}

/// Opens the log with this name in a directory that [`open`] returned, and makes the log if it is missing. The log must be a
/// regular file of root without a second hard link, since other users could read or write any other file. Any other file with
/// this name is renamed, and `moved` gets the reason and the new name. Returns the log opened for appending, and the log opened
/// for reading and truncating.
pub fn open_log(directory: impl AsFd, name: &str, moved: &mut Vec<String>) -> io::Result<(File, File)> {
    loop {
        let output = match find_log(&directory, name)? {
            Some(Ok(entry)) => reopen(&entry, OFlags::APPEND | OFlags::WRONLY)?,
            None => match create(&directory, Path::new(name)) {
                Ok(output) => output,
                // Another process has made the log after `find_log`, so the loop tries again.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            },
            Some(Err(why)) => {
                let new = move_away(&directory, name)?;
                moved.push(format!("{why} and was renamed to {new}"));
                continue;
            }
        };
        let file = reopen(&output, OFlags::RDWR)?;
        return Ok((output, file));
    }
}

/// Opens the log `name` in the directory. The inner result has a reason if a file with this name can't be the log. None if
/// there is no file with this name.
fn find_log(directory: impl AsFd, name: &str) -> io::Result<Option<Result<OwnedFd, String>>> {
    let Some(entry) = entry(directory, name)? else { return Ok(None) };
    let stat = rustix::fs::fstat(&entry)?;
    let us = rustix::process::geteuid().as_raw();
    let why = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile if stat.st_uid != us => format!("belonged to user {}", stat.st_uid),
        FileType::RegularFile if stat.st_nlink != 1 => "had a second name (a hard link)".to_owned(),
        FileType::RegularFile => {
            if stat.st_mode & 0o022 != 0 {
                chmod(&entry, 0o644)?;
            }
            return Ok(Some(Ok(entry)));
        }
        FileType::Symlink => "was a symbolic link".to_owned(),
        FileType::Fifo => "was a FIFO".to_owned(),
        _ => "was not a regular file".to_owned(),
    };
    Ok(Some(Err(why)))
}

const MOVED_AWAY: u32 = 9;

/// Renames a file to the first free numbered name. If a user has taken all numbered names, the new name ends with the present
/// time in nanoseconds.
fn move_away(directory: impl AsFd, name: &str) -> rustix::io::Result<String> {
    for number in 1..=MOVED_AWAY {
        let new = format!("{name}.refused-{number}");
        match rename(&directory, name, &new) {
            Ok(()) => return Ok(new),
            Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
    }
    let unique = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let new = format!("{name}.refused-{unique}");
    rename(directory, name, &new).map(|()| new)
}

fn rename(directory: impl AsFd, name: &str, new: &str) -> rustix::io::Result<()> {
    let flags = rustix::fs::RenameFlags::NOREPLACE;
    immutable::change(&directory, || rustix::fs::renameat_with(&directory, name, &directory, new, flags))
}

/// Makes a new, empty file in a directory that [`open`] made. Removes a former file with that name.
pub fn replace(directory: &Path, name: &Path) -> Result<File, String> {
    let directory = walk(directory, false)
        .map_err(|bad| bad.to_string())?
        .ok_or("the directory does not exist any more")?;
    match rustix::fs::unlinkat(&directory, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(format!("{name} can't be removed: {error}", name = name.display())),
    }
    create(&directory, name).map_err(|error| format!("{name} can't be made: {error}", name = name.display()))
}

fn create(directory: impl AsFd, name: &Path) -> io::Result<File> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::APPEND | OFlags::WRONLY | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::openat(directory, name, flags, Mode::from_raw_mode(0o644))?))
}

/// Opens the same file again, even if another file has the file's path now.
fn reopen(file: impl AsFd, flags: OFlags) -> io::Result<File> {
    let link = own_link(file.as_fd());
    Ok(File::from(rustix::fs::open(link, flags | OFlags::CLOEXEC, Mode::empty())?))
}

fn own_link(file: BorrowedFd<'_>) -> PathBuf {
    proc::open_file(proc::OWN, file.as_raw_fd())
}

/// fchmod(2) refuses an `O_PATH` descriptor, so the mode is set through the descriptor's link in /proc.
fn chmod(file: impl AsFd, mode: u32) -> rustix::io::Result<()> {
    rustix::fs::chmod(own_link(file.as_fd()), Mode::from_raw_mode(mode))
}

/// Removes the private directory from the plan of a control daemon if hard links between the private directory and the pipe
/// directory are impossible. Returns the removed directory.
pub fn give_up_private_directory(plan: &mut ControlDaemonPlan) -> Option<PathBuf> {
    let beside = |private: &PathBuf| on_one_mount(private, &plan.pipe_directory);
    if plan.private_directory.as_ref().is_none_or(beside) { None } else { plan.private_directory.take() }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;
    use crate::skip::root_or_skip;

    fn message(path: &Path) -> String {
        open(path).unwrap_err().to_string()
    }

    #[test]
    fn missing_directories_are_made_with_0755() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("nvidia-mps/pipe");
        open(&path).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o755);
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).unwrap();
        open(&path).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o755);
    }

    #[test]
    fn refuses_links_files_and_other_owners() {
        let base = tempfile::tempdir().unwrap();
        let target = base.path().join("target");
        std::fs::create_dir(&target).unwrap();
        let link = base.path().join("link");
        symlink(&target, &link).unwrap();
        assert!(message(&link).contains("symbolic link"), "{}", message(&link));

        // A symbolic link in the middle of a path is refused if other users could have made the link.
        let open_to_all = base.path().join("open");
        std::fs::create_dir(&open_to_all).unwrap();
        std::fs::set_permissions(&open_to_all, PermissionsExt::from_mode(0o1777)).unwrap();
        symlink(&target, open_to_all.join("link")).unwrap();
        let through = open_to_all.join("link/pipe");
        assert!(message(&through).contains("symbolic link"), "{}", message(&through));

        let file = base.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(message(&file).contains("not a directory"), "{}", message(&file));

        // A user who can write to a parent could replace the directory below that parent.
        let for_all = base.path().join("for all");
        std::fs::create_dir(&for_all).unwrap();
        std::fs::set_permissions(&for_all, PermissionsExt::from_mode(0o777)).unwrap();
        assert!(message(&for_all.join("pipe")).contains("every user can replace"));
        assert!(!for_all.join("pipe").exists());
        assert!(check(&for_all.join("pipe")).is_err());

        if root_or_skip("a directory of another user") {
            std::os::unix::fs::chown(&target, Some(65534), None).unwrap();
            assert!(message(&target).contains("belongs to user 65534"), "{}", message(&target));
            let below = message(&target.join("pipe"));
            assert!(below.contains("target: belongs to user 65534, who could replace"), "{below}");
            assert!(!target.join("pipe").exists());
        }
    }

    #[test]
    fn only_a_regular_file_of_the_service_is_used_as_a_log() {
        let base = tempfile::tempdir().unwrap();
        let (log, elsewhere) = (base.path().join("log"), base.path().join("elsewhere"));
        let directory = open(&log).unwrap();
        let opened = |name: &str| {
            let mut moved = Vec::new();
            let (output, file) = open_log(&directory, name, &mut moved).unwrap();
            (output, file, moved)
        };
        assert!(opened("control.log").2.is_empty());
        std::fs::write(log.join("control.log"), "kept\n").unwrap();
        let (mut output, file, moved) = opened("control.log");
        assert!(moved.is_empty());
        output.write_all(b"appended\n").unwrap();
        assert_eq!(std::fs::read_to_string(log.join("control.log")).unwrap(), "kept\nappended\n");
        file.set_len(0).unwrap();

        std::fs::write(&elsewhere, "not ours\n").unwrap();
        symlink(&elsewhere, log.join("link")).unwrap();
        std::fs::hard_link(&elsewhere, log.join("hard link")).unwrap();
        rustix::fs::mknodat(&directory, "fifo", FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap();
        std::fs::create_dir(log.join("directory")).unwrap();
        let mut refused = vec![
            ("link", "was a symbolic link"),
            ("hard link", "had a second name (a hard link)"),
            ("fifo", "was a FIFO"),
            ("directory", "was not a regular file"),
        ];
        if root_or_skip("a log of another user") {
            std::fs::write(log.join("theirs"), "").unwrap();
            std::os::unix::fs::chown(log.join("theirs"), Some(65534), None).unwrap();
            refused.push(("theirs", "belonged to user 65534"));
        }
        for (name, why) in refused {
            let (mut output, _, moved) = opened(name);
            assert_eq!(moved, [format!("{why} and was renamed to {name}.refused-1")]);
            output.write_all(b"ours\n").unwrap();
            assert_eq!(std::fs::read_to_string(log.join(name)).unwrap(), "ours\n");
            assert!(std::fs::symlink_metadata(log.join(format!("{name}.refused-1"))).is_ok());
        }
        assert_eq!(std::fs::read_to_string(&elsewhere).unwrap(), "not ours\n");
        for number in 1..=MOVED_AWAY {
            symlink(&elsewhere, log.join(format!("full.refused-{number}"))).unwrap();
        }
        symlink(&elsewhere, log.join("full")).unwrap();
        let (_, _, moved) = opened("full");
        assert!(moved[0].starts_with("was a symbolic link and was renamed to full.refused-"), "{moved:?}");
        // With this mode any user could have written to the log, so the mode is corrected.
        std::fs::set_permissions(log.join("control.log"), PermissionsExt::from_mode(0o666)).unwrap();
        opened("control.log");
        assert_eq!(log.join("control.log").metadata().unwrap().mode() & 0o777, 0o644);
    }

    #[test]
    fn the_kept_log_replaces_a_link_and_does_not_follow_it() {
        let base = tempfile::tempdir().unwrap();
        let elsewhere = base.path().join("elsewhere");
        std::fs::write(&elsewhere, "not ours\n").unwrap();
        symlink(&elsewhere, base.path().join("control.log.1")).unwrap();
        replace(base.path(), Path::new("control.log.1")).unwrap().write_all(b"kept\n").unwrap();
        assert_eq!(std::fs::read_to_string(base.path().join("control.log.1")).unwrap(), "kept\n");
        assert_eq!(std::fs::read_to_string(&elsewhere).unwrap(), "not ours\n");
        assert!(replace(&base.path().join("gone"), Path::new("control.log.1")).is_err());
    }
}
