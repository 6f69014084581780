//! Reads the files under /proc. No other module reads files under /proc.
//!
//! A process can give itself any name, and the kernel cuts a name after 15 bytes, even within a character. So the files of a
//! process may not be valid text, and this module reads them as bytes, up to a limit. The process may end during a read, and
//! another process may get its PID. A caller to whom this matters needs a pidfd of the process (see `mps::process::Process` in
//! the service). An error means that the process has ended or that the file can't be read.

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::io::Errno;

pub const OWN: &str = "self";

pub const OWN_UID_MAP: &str = "/proc/self/uid_map";

/// The link to this process's own program, through which the process can start itself again.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

pub const MOUNTS: &str = "/proc/mounts";

/// The most bytes that are read of a process's file under /proc. The arguments and the environment of a new process are
/// smaller. But a process can name any part of its memory as its environment, and would make the service read all of it.
const MAX_BYTES: u64 = 8 << 20;

/// The most bytes that are read of a list of mounts. A container may be able to make any number of mounts. The mounts that the
/// container's runtime has made come first in the list, so the service still reads these mounts.
const MOUNTINFO_BYTES: u64 = 1 << 20;

pub const FIRST: u32 = 1;

const PROGRAM_CHARACTERS: usize = 200;

fn path(process: impl Display, file: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{process}/{file}"))
}

fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    beginning(path, MAX_BYTES)
}

fn lacks(process: impl Display, file: &str, found: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{} {found}", path(process, file).display()))
}

fn beginning(path: impl AsRef<Path>, max_bytes: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(max_bytes).read_to_end(&mut bytes)?;
    Ok(bytes)
}

pub fn memory_mib(sysroot: &Path) -> Option<u64> {
    let meminfo = read(sysroot.join("proc/meminfo")).ok()?;
    let kib: u64 = line(&meminfo, "MemTotal:")?.strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib / 1024)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn line<'a>(file: &'a [u8], name: &str) -> Option<&'a str> {
    let found = file.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name.as_bytes()))?;
    std::str::from_utf8(found).ok().map(str::trim)
}

pub fn pids() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// True if the error means that no such process exists. After any other error the process may still run.
pub fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

/// True if a process has a running child. Fails if the process has ended, since its children then have another parent. Also
/// fails if no child was found but some process can't be read, for example because the service has no free file descriptor.
pub fn has_children(pid: u32) -> io::Result<bool> {
    if stat(pid)?.has_ended() {
        return Err(io::ErrorKind::NotFound.into());
    }
    let mut others = Vec::new();
    for entry in fs::read_dir("/proc")? {
        if let Some(other) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) {
            others.push(stat(other));
        }
    }
    is_parent(pid, others)
}

/// True if one of `others` is a running child of the process. Fails if no child was found but some process can't be read, since
/// that process may be a child.
fn is_parent(pid: u32, others: Vec<io::Result<Stat>>) -> io::Result<bool> {
    for other in others {
        match other {
            Ok(other) if other.parent == pid && !other.has_ended() => return Ok(true),
            Ok(_) => {}
            Err(error) if is_gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    state: char,
    /// The PID of the parent. 0 if the parent is in another PID namespace.
    pub parent: u32,
    /// None while the kernel removes the process.
    pub session: Option<u32>,
    threads: u32,
    /// In clock ticks since boot (field 22).
    pub start_time: u64,
}

impl Stat {
    /// Parses the text of /proc/PID/stat. The name in field 2 may have spaces, brackets and bytes that are no text, so the
    /// fields are counted from the last bracket.
    fn parse(stat: &[u8]) -> Option<Self> {
        let name_ends = stat.iter().rposition(|byte| *byte == b')')?;
        let fields = std::str::from_utf8(stat.get(name_ends + 1..)?).ok()?;
        let mut fields = fields.split_ascii_whitespace();
        Some(Self {
            state: fields.next()?.chars().next()?,
            parent: fields.next()?.parse().ok()?,
            session: fields.nth(1)?.parse().ok(),
            threads: fields.nth(13)?.parse().ok()?,
            start_time: fields.nth(1)?.parse().ok()?,
        })
    }

    pub fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    /// True if the process has ended and its parent has not collected the exit status yet. The kernel also shows a process as a
    /// zombie if only its first thread has ended. Then the process still has other threads.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X') && self.threads <= 1
    }
}

pub fn stat(pid: u32) -> io::Result<Stat> {
    Stat::parse(&read(path(pid, "stat"))?).ok_or_else(|| lacks(pid, "stat", "is cut short"))
}

/// Threads that have ended are skipped.
pub fn threads(pid: u32) -> Vec<Stat> {
    let threads = fs::read_dir(path(pid, "task")).into_iter().flatten().flatten();
    threads.filter_map(|thread| Stat::parse(&read(thread.path().join("stat")).ok()?)).collect()
}

#[derive(Debug)]
pub struct ProcessStatus(Vec<u8>);

impl ProcessStatus {
    /// Real, effective, saved and file system user id.
    pub fn uids(&self) -> Vec<u32> {
        let ids = line(&self.0, "Uid:").unwrap_or_default();
        ids.split_ascii_whitespace().filter_map(|id| id.parse().ok()).collect()
    }

    pub fn real_uid(&self) -> Option<u32> {
        self.uids().first().copied()
    }

    pub fn effective_uid(&self) -> Option<u32> {
        self.uids().get(1).copied()
    }

    pub fn ignores(&self, signal: i32) -> bool {
        self.has(signal, "SigIgn:")
    }

    pub fn catches(&self, signal: i32) -> bool {
        self.has(signal, "SigCgt:")
    }

    fn blocks(&self, signal: i32) -> bool {
        self.has(signal, "SigBlk:")
    }

    /// True if the process is the first process of a PID namespace other than the host's, as in a container.
    pub fn is_first_of_its_namespace(&self) -> bool {
        let pids = line(&self.0, "NSpid:").unwrap_or_default();
        let mut pids = pids.split_ascii_whitespace().rev();
        pids.next() == Some("1") && pids.next().is_some()
    }

    fn has(&self, signal: i32, set: &str) -> bool {
        let mask = line(&self.0, set).and_then(|mask| u64::from_str_radix(mask, 16).ok());
        mask.unwrap_or(0) >> (signal - 1) & 1 == 1
    }
}

pub fn status(process: impl Display) -> io::Result<ProcessStatus> {
    read(path(process, "status")).map(ProcessStatus)
}

/// True if every thread of the process blocks the signal. A thread may still take the signal with sigwait(3). Fails if the
/// process has ended.
pub fn blocks(pid: u32, signal: i32) -> io::Result<bool> {
    // In most processes the first thread does not block the signal, so the other threads need not be read.
    if !status(pid)?.blocks(signal) {
        return Ok(false);
    }
    let threads = fs::read_dir(path(pid, "task"))?.flatten();
    let statuses = threads.filter_map(|thread| read(thread.path().join("status")).ok());
    Ok(statuses.map(ProcessStatus).all(|thread| thread.blocks(signal)))
}

/// The name of a process as the kernel stores it, at most 15 bytes. None if the process has ended.
pub fn name(pid: u32) -> Option<String> {
    Some(text(&read(path(pid, "comm")).ok()?).trim_end().to_owned())
}

/// The path of a process's program, or else the name that the kernel stores. Empty if there is no such process. A file may have
/// any name, so characters that could break a line or control a terminal are replaced.
pub fn program(pid: u32) -> String {
    let file = fs::read_link(path(pid, "exe")).map(|file| file.to_string_lossy().into_owned());
    let program = file.unwrap_or_else(|_| name(pid).unwrap_or_default());
    let printable = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    program.trim_end_matches('\n').chars().take(PROGRAM_CHARACTERS).map(printable).collect()
}

/// The arguments of a process, with the program's name first and without empty arguments. The kernel reads them from the memory
/// of the process, so this call hangs if the process hangs in the driver.
pub fn arguments(pid: u32) -> Vec<OsString> {
    let all = read(path(pid, "cmdline")).unwrap_or_default();
    let arguments = all.split(|byte| *byte == 0).filter(|argument| !argument.is_empty());
    arguments.map(|argument| OsStr::from_bytes(argument).to_owned()).collect()
}

/// The path through which a process's file descriptor can be opened again, even if the file was renamed.
pub fn open_file(process: impl Display, descriptor: i32) -> PathBuf {
    path(process, &format!("fd/{descriptor}"))
}

/// Sets the `oom_score_adj` of this process and its future children. Without `CAP_SYS_RESOURCE`, fails if the value is below
/// the last value that was set with `CAP_SYS_RESOURCE`.
pub fn set_oom_score_adj(score: i16) -> io::Result<()> {
    fs::write(path(OWN, "oom_score_adj"), score.to_string())
}

/// The environment with which a process was started, or the memory that the process has named as its environment since. The
/// call may hang like [`arguments`].
pub fn environment(pid: u32) -> io::Result<Vec<u8>> {
    read(path(pid, "environ"))
}

pub fn variable<'a>(environment: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let mut variables = environment.split(|byte| *byte == 0);
    variables.find_map(|variable| variable.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
}

/// The control groups of a process, with a line for each hierarchy, such as `0::/system.slice/a.service`. A user who may make
/// control groups can give them any name.
pub fn cgroups(process: impl Display) -> io::Result<Vec<u8>> {
    read(path(process, "cgroup"))
}

pub fn cgroups_text(process: impl Display) -> io::Result<String> {
    cgroups(process).map(|cgroups| text(&cgroups))
}

/// The name of the mount namespace of a process. All processes in one mount namespace give the same name.
pub fn mount_namespace(process: impl Display) -> io::Result<PathBuf> {
    fs::read_link(path(process, "ns/mnt"))
}

/// True if a process has another mount namespace than this process and the host, as in a container. Fails if the process has
/// ended, or if only root may read its namespace.
pub fn is_elsewhere(pid: u32) -> io::Result<bool> {
    let its = mount_namespace(pid)?;
    let host = [mount_namespace(OWN), mount_namespace(FIRST)];
    Ok(!host.into_iter().flatten().any(|known| known == its))
}

pub fn user_namespace(process: impl Display) -> io::Result<PathBuf> {
    fs::read_link(path(process, "ns/user"))
}

pub fn root(process: impl Display) -> io::Result<PathBuf> {
    fs::read_link(path(process, "root"))
}

pub fn mountinfo(process: impl Display) -> io::Result<Vec<u8>> {
    beginning(path(process, "mountinfo"), MOUNTINFO_BYTES)
}

/// The mount through which this process has opened a file, as an id in [`mountinfo`], and the path of the file.
pub fn location(file: impl AsFd) -> io::Result<(u64, PathBuf)> {
    let descriptor = file.as_fd().as_raw_fd();
    let information = format!("fdinfo/{descriptor}");
    let mount = line(&read(path(OWN, &information))?, "mnt_id:").and_then(|id| id.parse().ok());
    let mount = mount.ok_or_else(|| lacks(OWN, &information, "does not name the mount"))?;
    Ok((mount, fs::read_link(open_file(OWN, descriptor))?))
}

/// The number of files that a process may have open. `u64::MAX` if there is no limit.
pub fn open_files_limit(pid: u32) -> io::Result<u64> {
    let limit = soft_limit(&read(path(pid, "limits"))?, "Max open files");
    limit.ok_or_else(|| lacks(pid, "limits", "has no value for \"Max open files\""))
}

fn soft_limit(limits: &[u8], name: &str) -> Option<u64> {
    let soft = line(limits, name)?.split_ascii_whitespace().next()?;
    if soft == "unlimited" { Some(u64::MAX) } else { soft.parse().ok() }
}

/// True if a file system is mounted at `place`. `mounts` is the path of a file in the form of /proc/mounts.
pub fn is_mounted(mounts: &Path, place: &str) -> io::Result<bool> {
    let mounts = read(mounts)?;
    let mut lines = mounts.split(|byte| *byte == b'\n');
    Ok(lines.any(|line| line.split(|byte| *byte == b' ').nth(1) == Some(place.as_bytes())))
}

pub fn uptime() -> Option<Duration> {
    let uptime = text(&read("/proc/uptime").ok()?);
    Duration::try_from_secs_f64(uptime.split_ascii_whitespace().next()?.parse().ok()?).ok()
}

pub fn booted() -> Option<SystemTime> {
    let seconds = line(&read("/proc/stat").ok()?, "btime ")?.parse().ok()?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

pub fn started(pid: u32) -> Option<Duration> {
    let ticks = stat(pid).ok()?.start_time;
    let per_second = rustix::param::clock_ticks_per_second();
    Some(Duration::from_millis(ticks.checked_mul(1000)?.checked_div(per_second)?))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use rustix::process::{Pid, Signal, kill_process};

    use super::*;

    #[test]
    fn fields_are_counted_after_any_name() {
        let numbers = "1 12 13 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 98765 2000 1\n";
        for name in [&b"work"[..], b"a) (b c", b") S 7 8", b"x\xe8\xae\xad\xe7\xbb\x83\xe4", b"\xff\n"] {
            let stat = [b"12 (", name, b") S ", numbers.as_bytes()].concat();
            let expected = Stat { state: 'S', parent: 1, session: Some(13), threads: 1, start_time: 98765 };
            assert_eq!(Stat::parse(&stat), Some(expected), "{}", text(name));
        }
        let leaving = format!("12 (work) Z {}", numbers.replace("1 12 13", "0 -1 -1"));
        let leaving = Stat::parse(leaving.as_bytes()).unwrap();
        assert!(leaving.session.is_none() && leaving.has_ended() && !leaving.is_stopped());
        let first_thread_ended = Stat { threads: 2, ..leaving };
        assert!(!first_thread_ended.has_ended());
        for cut in ["", "12 (cut", "12 (work)", "12 (work) S 1 12 13 0"] {
            assert_eq!(Stat::parse(cut.as_bytes()), None, "{cut}");
        }
    }

    #[test]
    fn children_are_known_while_they_and_their_parent_run() {
        let mut parent =
            Command::new("sh").args(["-c", "sleep 600 & read line"]).stdin(Stdio::piped()).spawn().unwrap();
        let pid = parent.id();
        while !has_children(pid).unwrap() {
            std::thread::yield_now();
        }
        let child =
            pids().into_iter().find(|other| stat(*other).is_ok_and(|stat| stat.parent == pid)).unwrap();
        kill_process(Pid::from_raw(child.cast_signed()).unwrap(), Signal::KILL).unwrap();
        while has_children(pid).unwrap() {
            std::thread::yield_now();
        }
        parent.kill().unwrap();
        while stat(pid).is_ok_and(|stat| !stat.has_ended()) {
            std::thread::yield_now();
        }
        assert!(has_children(pid).is_err());
        parent.wait().unwrap();
        assert!(has_children(pid).is_err());
    }

    #[test]
    fn a_process_that_can_not_be_looked_at_may_be_a_child() {
        let child = Stat { state: 'S', parent: 7, session: None, threads: 1, start_time: 1 };
        let error = |errno: Errno| Err(io::Error::from_raw_os_error(errno.raw_os_error()));
        assert!(!is_parent(8, vec![Ok(child), error(Errno::NOENT), error(Errno::SRCH)]).unwrap());
        assert!(is_parent(8, vec![Ok(child), error(Errno::MFILE)]).is_err());
        assert!(is_parent(7, vec![error(Errno::SRCH), Ok(child)]).unwrap());
        assert!(!is_parent(7, vec![Ok(Stat { state: 'Z', ..child })]).unwrap());
    }

    #[test]
    fn a_status_may_hold_bytes_that_are_no_text() {
        let status = ProcessStatus(
            b"Name:\tx\xe8\xae\nUid:\t1000\t0\t1\t2\nSigIgn:\t0000000000000001\nSigCgt:\t0000000000000200\n"
                .to_vec(),
        );
        assert_eq!((status.real_uid(), status.effective_uid()), (Some(1000), Some(0)));
        assert_eq!(status.uids(), [1000, 0, 1, 2]);
        assert!(status.ignores(1) && !status.catches(1));
        assert!(status.catches(10) && !status.ignores(10));
        assert_eq!(ProcessStatus(b"Name:\twork\n".to_vec()).real_uid(), None);
    }

    #[test]
    fn only_the_beginning_of_an_endless_file_is_read() {
        assert_eq!(beginning("/dev/zero", 7).unwrap(), [0; 7]);
    }

    #[test]
    fn variables_have_whole_names() {
        let environment = b"A=1\0XNAME=2\0NAME\0NAME=\xff\0NAME=3\0EMPTY=";
        assert_eq!(variable(environment, "NAME"), Some(&b"\xff"[..]));
        assert_eq!(variable(environment, "EMPTY"), Some(&b""[..]));
        assert_eq!(variable(environment, "NONE"), None);
    }

    #[test]
    fn the_soft_limit_is_read() {
        let limits = b"Limit  Soft Limit  Hard Limit  Units\nMax open files            1024                 524288               files\n";
        let of = |limits: &[u8]| soft_limit(limits, "Max open files");
        assert_eq!(of(limits), Some(1024));
        assert_eq!(of(b"Max open files   unlimited   unlimited   files\n"), Some(u64::MAX));
        assert_eq!(of(b""), None);
        assert!(open_files_limit(std::process::id()).unwrap() > 0);
    }

    #[test]
    fn a_mount_is_found_by_its_place() {
        let directory = tempfile::tempdir().unwrap();
        let mounts = directory.path().join("mounts");
        fs::write(&mounts, b"none / ext4 rw 0 0\nx\xff /dev/shm tmpfs rw 0 0\n").unwrap();
        assert!(is_mounted(&mounts, "/dev/shm").unwrap() && !is_mounted(&mounts, "tmpfs").unwrap());
        assert!(is_mounted(&directory.path().join("none"), "/").is_err());
    }

    #[test]
    fn the_facts_about_this_process_are_right() {
        let own = std::process::id();
        let stat = stat(own).unwrap();
        assert_eq!(stat.parent, std::os::unix::process::parent_id());
        assert!(!stat.is_stopped() && !stat.has_ended());
        let threads = threads(own);
        assert!(!threads.is_empty() && threads.iter().all(|thread| thread.parent == stat.parent));
        assert!(pids().contains(&own));
        let own_name = name(own).unwrap();
        assert!(!own_name.is_empty() && own_name.len() <= 15, "{own_name:?}");
        assert_eq!(name(u32::MAX), None);
        assert_eq!(status(OWN).unwrap().real_uid(), Some(rustix::process::getuid().as_raw()));
        assert_eq!(program(own), std::env::current_exe().unwrap().to_string_lossy());
        assert_eq!(arguments(own).first().cloned(), std::env::args_os().next());
        assert_eq!(mount_namespace(own).unwrap(), mount_namespace(OWN).unwrap());
        assert_ne!(mount_namespace(own).unwrap(), user_namespace(own).unwrap());
        assert!(root(own).unwrap().is_absolute() && mount_namespace(u32::MAX).is_err());
        assert!(!is_elsewhere(own).unwrap() && is_elsewhere(u32::MAX).is_err());
        let started = booted().unwrap() + started(own).unwrap();
        assert!(started <= SystemTime::now() + Duration::from_secs(2));
        assert!(started > SystemTime::now() - Duration::from_secs(86400));
        assert!(self::started(own).unwrap() <= uptime().unwrap());
    }
}
