//! Checks of the directories that clients, control daemons and the service need.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{StatVfs, StatVfsMountFlags};

use super::facts::Facts;
use super::{Check, Finding, Outcome, Severity, each, error, finding, info, warning};
use crate::toolkit::{self, WHERE_CUDA_LOOKS};
use common::directories::{check, immutable};
use common::host::proc;
use common::host::socket::listener;
use common::published::control_daemon::ControlDaemonState;

pub(super) const CHECKS: &[Check] = &[
    ("the pipe and log directories", refused),
    ("the directories above the pipe directory", closed),
    ("the private directories", private),
    ("the immutable flag", changeable),
    ("the file systems", file_systems),
    ("the sockets of the control daemons", sockets),
    ("the size of the logs", log_size),
    ("the runtime directory", runtime_directory),
    ("/dev/shm", shared_memory),
    ("/tmp/nvidia-mps in containers", container_toolkit),
    ("SELinux", selinux),
    ("ageing by systemd-tmpfiles", ageing),
];

/// A file system with fewer free bytes than this counts as full. The log of a control daemon grows by this much in an hour.
const ROOM: u64 = 1 << 20;

fn refused(facts: &Facts) -> Outcome {
    each(facts.all_directories()?, |directory| match check(&directory) {
        Ok(false) => remedy_without(facts, &directory).map(|remedy| {
            let found = "the directory does not exist, although the service runs: another program has \
                         removed it";
            error("directory-missing", directory.display(), found, remedy)
        }),
        Ok(true) => None,
        Err(bad) => {
            let problem = bad.problem.or_remedy("configure another directory in host.conf");
            Some(finding(Severity::Error, "directory-refused", bad.path.display(), problem))
        }
    })
}

/// The remedy for a directory of a running control daemon that does not exist. None if no running control daemon uses the
/// directory.
fn remedy_without(facts: &Facts, directory: &Path) -> Option<&'static str> {
    let mut running = facts.own_control_daemons().iter().filter(|daemon| daemon.pid.is_some());
    running.find_map(|daemon| {
        if Path::new(&daemon.control_directory) == directory {
            Some(
                "the service restarts the control daemon when its clients have ended; yunion-mpsctl apply \
                 --force ends the clients",
            )
        } else if Path::new(&daemon.pipe_directory) == directory {
            Some("the service makes the directory again at its next health check, within a minute")
        } else {
            (Path::new(&daemon.log_directory) == directory).then_some(
                "nothing is logged until the control daemon's next start; when no client is left, run \
                 systemctl stop yunion-mps-daemon, which ends the control daemon, then systemctl start \
                 yunion-mps-daemon",
            )
        }
    })
}

fn closed(facts: &Facts) -> Outcome {
    let mut findings = Vec::new();
    for (pipe, _) in facts.directories()? {
        for directory in pipe.ancestors() {
            let Ok(metadata) = fs::metadata(directory) else { continue };
            if metadata.is_dir() && metadata.mode() & 0o001 == 0 {
                findings.push(error(
                    "directory-closed",
                    directory.display(),
                    format!(
                        "{mode}, so clients of other users can't reach the directories below",
                        mode = mode(&metadata)
                    ),
                    format!("chmod o+x {}", directory.display()),
                ));
            }
        }
        if let Some(metadata) = fs::metadata(&pipe).ok().filter(|metadata| metadata.mode() & 0o022 != 0) {
            findings.push(error(
                "directory-open",
                pipe.display(),
                format!(
                    "{mode}, so other users can put their own sockets into this directory",
                    mode = mode(&metadata)
                ),
                format!(
                    "chmod 755 {pipe}, and find out which program has changed the mode",
                    pipe = pipe.display()
                ),
            ));
        }
    }
    Ok(findings)
}

/// Finds control daemons with sockets that are not in a directory that only root can enter. A container that reaches the
/// sockets of a control daemon and runs as root of the host can command this control daemon.
fn private(facts: &Facts) -> Outcome {
    let planned = facts.plan().map(|plan| plan.control_daemons.as_slice()).unwrap_or_default();
    each(&facts.published()?.control_daemons, |daemon| {
        let own = Path::new(&daemon.control_directory);
        if daemon.control_directory == daemon.pipe_directory {
            let wanted = planned
                .iter()
                .find(|planned| planned.id == daemon.id.as_str().into())?
                .private_directory
                .as_ref()?;
            return daemon.pid.map(|_| {
                warning(
                    "sockets-not-private",
                    own.display(),
                    "the control daemon's sockets are in this directory, and not in a private directory: a \
                     container that mounts this directory and runs as the host's root can command the \
                     control daemon",
                    format!(
                        "if the directory is a mount point, set cuda_mps_pipe_directory to a directory that \
                         is no mount point; otherwise the sockets move to {wanted} when the clients of the control \
                         daemon have ended, or with yunion-mpsctl apply --force, which ends these clients",
                        wanted = wanted.display()
                    ),
                )
            });
        }
        let metadata = fs::metadata(own).ok().filter(|metadata| metadata.mode() & 0o077 != 0)?;
        Some(error(
            "private-directory-open",
            own.display(),
            format!(
                "{mode}, so users other than root can command the control daemon",
                mode = mode(&metadata)
            ),
            format!("chmod 700 {own}, and find out which program has changed the mode", own = own.display()),
        ))
    })
}

/// Finds pipe directories without the immutable flag. Without this flag, a container that mounts the directory writable can
/// replace the link to the control daemon by its own socket.
fn changeable(facts: &Facts) -> Outcome {
    let daemons = if facts.own_processes() { facts.published()?.control_daemons.as_slice() } else { &[] };
    let serving = daemons.iter().filter(|daemon| daemon.state == ControlDaemonState::Ready);
    let private = serving.filter(|daemon| daemon.control_directory != daemon.pipe_directory);
    each(private, |daemon| judge_flag(Path::new(&daemon.pipe_directory)))
}

fn judge_flag(pipe: &Path) -> Option<Finding> {
    let (found, remedy) = match immutable::is_set(fs::File::open(pipe).ok()?) {
        Ok(true) => return None,
        Ok(false) => (
            "the directory is not immutable".to_owned(),
            "if the directory is still not immutable after a minute, remove files of other programs from the \
             directory; if the service runs in a container, give this container CAP_LINUX_IMMUTABLE",
        ),
        Err(error) => (
            format!("the file system of the directory has no immutable flag ({error})"),
            "set cuda_mps_pipe_directory to a directory on ext4, XFS or Btrfs, or on a tmpfs where chattr +i \
             works",
        ),
    };
    let harm = "a container with a writable mount of the directory can remove the links to control daemons, \
                which only the next health check restores";
    let remedy = format!("mount the directory read-only into containers; otherwise, {remedy}");
    Some(info("directories-changeable", pipe.display(), format!("{found}: {harm}"), remedy))
}

fn mode(metadata: &Metadata) -> String {
    format!("the mode is {:04o}", metadata.permissions().mode() & 0o7777)
}

fn file_systems(facts: &Facts) -> Outcome {
    each(facts.all_directories()?.chain([facts.runtime_directory.clone()]), |directory| {
        let existing = directory.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
        judge_file_system(existing, &rustix::fs::statvfs(existing).ok()?)
    })
}

fn judge_file_system(directory: &Path, system: &StatVfs) -> Option<Finding> {
    let room = system.f_bavail.saturating_mul(system.f_frsize);
    let directory = directory.display();
    if system.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Some(error(
            "file-system-read-only",
            &directory,
            "the file system of this directory is mounted read-only",
            format!("see dmesg for the reason, then mount -o remount,rw $(stat -c %m {directory})"),
        ));
    }
    // A file system without a limit for the number of files, such as Btrfs, reports a total of 0.
    let found = if system.f_files > 0 && system.f_favail == 0 {
        "the file system of this directory can hold no more files".to_owned()
    } else if room < ROOM {
        format!("the file system of this directory has {room} bytes left")
    } else {
        return None;
    };
    let remedy = format!(
        "delete files that are not needed: du -xhd1 $(stat -c %m {directory}) shows the sizes of the \
         directories, du -x --inodes -d1 $(stat -c %m {directory}) their numbers of files"
    );
    Some(error("file-system-full", &directory, found, remedy))
}

/// Finds control daemons with a socket that was removed or replaced. A control daemon without its socket still runs, but new
/// clients can't find it.
fn sockets(facts: &Facts) -> Outcome {
    each(&facts.published()?.control_daemons, |daemon| {
        let serves = matches!(daemon.state.known()?, ControlDaemonState::Ready | ControlDaemonState::Waiting);
        let pid = daemon.pid.filter(|_| serves)?;
        let own = socket(Path::new(&daemon.control_directory), pid);
        // If every slice of the control daemon's GPUs is drained, the service has removed the link to the control daemon from
        // the pipe directory.
        let devices = facts.published().ok()?.devices.iter().flatten();
        let mut its = devices
            .filter(|device| device.device_path.as_ref().is_some_and(|uuid| daemon.gpus.contains(uuid)));
        let mut open = || its.any(|device| !device.drained);
        own.or_else(|| if open() { socket(Path::new(&daemon.pipe_directory), pid) } else { None })
    })
}

/// None if the control daemon with the PID `pid` listens on the socket in this directory.
fn socket(directory: &Path, pid: u32) -> Option<Finding> {
    let socket = directory.join("control");
    match listener(directory) {
        // Another check reports a missing directory.
        _ if !directory.is_dir() => None,
        Some(other) if other != pid => Some(error(
            "pipe-directory-taken",
            socket.display(),
            format!(
                "another control daemon (PID {other}) listens on this socket instead of the service's \
                 control daemon (PID {pid})"
            ),
            format!(
                "end the other control daemon and its clients: kill {other}, then run yunion-mpsctl apply"
            ),
        )),
        Some(_) => None,
        None => Some(error(
            "pipe-socket-missing",
            socket.display(),
            format!(
                "no process listens on this socket, although the control daemon (PID {pid}) runs: new \
                 clients can't connect"
            ),
            "the service restarts the control daemon when its clients have ended; yunion-mpsctl apply --force \
             ends the clients; if systemd-tmpfiles may \
             have removed the socket, doctor also reports directory-ageing",
        )),
    }
}

fn log_size(facts: &Facts) -> Outcome {
    let most = facts.enabled()?.supervision.log_max_bytes;
    each(facts.directories()?, |(_, directory)| {
        let file = directory.join("control.log");
        let size = fs::metadata(&file).ok()?.len();
        (size > most.saturating_mul(2)).then(|| {
            warning(
                "log-too-large",
                file.display(),
                format!(
                    "the log has {mib} MiB, but cuda_mps_log_max_size is {most_mib} MiB",
                    mib = size >> 20,
                    most_mib = most >> 20
                ),
                format!("truncate -s 0 {file}; a running service keeps the log short", file = file.display()),
            )
        })
    })
}

fn runtime_directory(facts: &Facts) -> Outcome {
    let directory = &facts.runtime_directory;
    let mut findings = Vec::new();
    let state_file = directory.join("state.json");
    if let Err(what) = &facts.state_file {
        if fs::File::open(&state_file).is_err_and(|error| error.kind() == ErrorKind::PermissionDenied) {
            return Err(format!("only root can read {state_file}", state_file = state_file.display()).into());
        }
        // A running service has the content of the state file in memory, and replaces the bad file. A service that starts
        // before this replacement could not read the content.
        let remedy = if facts.published().is_ok() {
            "do not restart the service during the next minute, in which the service writes the file again: \
             if the service restarts sooner, it takes its own control daemons for those of another program"
        } else {
            "when the service starts again, it ignores this file, takes running control daemons for those of \
             another program, and replaces each control daemon once no client is left; then check the \
             compute modes of the GPUs with nvidia-smi --query-gpu=pci.bus_id,compute_mode --format=csv"
        };
        findings.push(warning(
            "state-file-damaged",
            state_file.display(),
            format!("the state file {what}"),
            remedy,
        ));
    }
    if facts.published().is_ok_and(|published| published.pid.is_some()) && !directory.is_dir() {
        findings.push(error(
            "runtime-directory-missing",
            directory.display(),
            "the directory does not exist, although the service runs: after a restart the service would not \
             find its control daemons",
            format!(
                "mkdir -m 755 {directory}, then run systemctl reload yunion-mps-daemon",
                directory = directory.display()
            ),
        ));
    }
    Ok(findings)
}

/// Clients and servers exchange data through `/dev/shm`.
fn shared_memory(facts: &Facts) -> Outcome {
    let directory = facts.file("/dev/shm");
    let remedy = "mkdir -p /dev/shm && mount -t tmpfs -o mode=1777 tmpfs /dev/shm";
    let bad = |found: String, remedy: &str| Ok(vec![error("shm-unusable", "/dev/shm", found, remedy)]);
    let Ok(metadata) = fs::metadata(&directory) else {
        return bad("the directory does not exist".to_owned(), remedy);
    };
    if !metadata.is_dir() {
        return bad("this path is not a directory".to_owned(), &format!("rm /dev/shm && {remedy}"));
    }
    if metadata.mode() & 0o003 != 0o003 {
        return bad(
            format!("{mode}, so not every user can write to this directory", mode = mode(&metadata)),
            "chmod 1777 /dev/shm",
        );
    }
    if proc::is_mounted(&facts.file(proc::MOUNTS), "/dev/shm").is_ok_and(|mounted| !mounted) {
        return bad("no file system is mounted on this directory".to_owned(), remedy);
    }
    let system = rustix::fs::statvfs(&directory).map_err(|error| error.to_string())?;
    Ok(judge_file_system(Path::new("/dev/shm"), &system).into_iter().collect())
}

/// If `/tmp/nvidia-mps` exists on the host, NVIDIA's container toolkit mounts it into every container with a GPU. So containers
/// without a slice may reach a control daemon there.
fn container_toolkit(facts: &Facts) -> Outcome {
    let settings = facts.enabled()?;
    let Some(tool) = toolkit::installed(&facts.sources.sysroot) else { return Ok(Vec::new()) };
    let remedy = "write cuda_mps_pipe_directory: /run/yunion-mps/pipe and cuda_mps_log_directory: \
                  /var/log/yunion-mps in host.conf, so that this service and the host agent use the same \
                  directories";
    let pipe = &settings.pipe_directory;
    if pipe == Path::new(WHERE_CUDA_LOOKS) {
        let found = format!(
            "NVIDIA's container toolkit is installed ({tool}) and mounts this directory into every \
             container with a GPU; CUDA looks \
             in this directory by itself, so containers that were given no slice become clients too"
        );
        return Ok(vec![warning("toolkit-captures-containers", pipe.display(), found, remedy)]);
    }
    let below = [pipe, &settings.log_directory].into_iter().find(|path| path.starts_with(WHERE_CUDA_LOOKS));
    let found = format!(
        "NVIDIA's container toolkit is installed ({tool}) and mounts {WHERE_CUDA_LOOKS} into every \
         container with a GPU, so each such \
         container also has the sockets and logs of other tenants"
    );
    each(below, |path| [info("toolkit-shows-directories", path.display(), &found, remedy)])
}

fn selinux(facts: &Facts) -> Outcome {
    let enforcing = fs::read_to_string(facts.file("/sys/fs/selinux/enforce"));
    if !enforcing.is_ok_and(|text| text.trim() == "1") {
        return Ok(Vec::new());
    }
    let pipe = facts.enabled()?.pipe_directory.display();
    let found = "SELinux is enforcing, so containers may be unable to connect to the control daemon: \
                 a label on the \
                 directory is not enough, since the kernel also checks the permission connectto";
    let remedy = "if ausearch -m avc names the directory or connectto: start the container with --security-opt label=disable; \
                  docs/containers.md says more";
    Ok(vec![info("selinux-enforcing", pipe, found, remedy)])
}

/// The directories of tmpfiles.d(5). A file in an earlier directory hides a file of the same name in a later directory.
const TMPFILES: [&str; 4] =
    ["/etc/tmpfiles.d", "/run/tmpfiles.d", "/usr/local/lib/tmpfiles.d", "/usr/lib/tmpfiles.d"];

fn ageing(facts: &Facts) -> Outcome {
    let mut files = BTreeMap::new();
    for directory in TMPFILES {
        for entry in fs::read_dir(facts.file(directory)).into_iter().flatten().flatten() {
            files.entry(entry.file_name()).or_insert(Path::new(directory).join(entry.file_name()));
        }
    }
    let files = files.into_values().filter(|file| file.extension().is_some_and(|name| name == "conf"));
    let texts: Vec<_> =
        files.map(|file| (fs::read_to_string(facts.file(&file)).unwrap_or_default(), file)).collect();
    each(facts.all_directories()?, |directory| {
        let lines = texts.iter().flat_map(|(text, file)| text.lines().map(move |line| (line, file)));
        let (line, file) = aged_by(&directory, lines)?;
        let (file, parent) = (file.display(), directory.parent().unwrap_or(Path::new("/")).display());
        let directory = directory.display();
        Some(warning(
            "directory-ageing",
            &directory,
            format!(
                "systemd-tmpfiles removes old files in this directory ({file}: {line}), but a control \
                 daemon needs its files here for months"
            ),
            format!(
                "put these two lines in /etc/tmpfiles.d/yunion-mps-local.conf: `X {parent}` and `x {directory}`"
            ),
        ))
    })
}

/// Finds the tmpfiles.d line because of which systemd-tmpfiles removes old files in `directory`. The nearest line for the
/// directory or for one of its ancestors decides. None if the nearest line has no age, or if a line of type x excludes the
/// directory. Lines with patterns are ignored. So the check also reports a directory that only a pattern excludes. After an
/// administrator has added the lines of the remedy, which have no pattern, the check no longer reports this directory.
fn aged_by<'l, F>(directory: &Path, lines: impl Iterator<Item = (&'l str, F)>) -> Option<(&'l str, F)> {
    let mut nearest: Option<(usize, bool, &str, F)> = None;
    for (line, file) in lines {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (Some(kind), Some(path)) = (fields.first(), fields.get(1)) else { continue };
        // A line with `!` applies only at boot. The letters are the line types that remove old files or prevent their removal.
        let counts = kind.starts_with(['x', 'd', 'D', 'e', 'v', 'q', 'Q', 'C']) && !kind.contains('!');
        if !counts || !directory.starts_with(path) {
            continue;
        }
        if kind.starts_with('x') {
            return None;
        }
        let is_aged = fields.get(5).is_some_and(|age| *age != "-");
        let depth = Path::new(path).components().count();
        if nearest.as_ref().is_none_or(|(known, ..)| depth >= *known) {
            nearest = Some((depth, is_aged, line, file));
        }
    }
    nearest.and_then(|(_, is_aged, line, file)| is_aged.then_some((line, file)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_line_counts_and_x_spares() {
        const TMP: &str = "q /tmp 1777 root root 10d";
        let aged = |directory: &str, lines: &[&'static str]| {
            aged_by(Path::new(directory), lines.iter().map(|line| (*line, ()))).map(|(line, ())| line)
        };
        let pipe = "/tmp/nvidia-mps/pipe";
        assert_eq!(aged(pipe, &[]), None);
        assert_eq!(aged(pipe, &[TMP]), Some(TMP));
        assert_eq!(aged("/run/pipe", &[TMP]), None);
        assert_eq!(aged(pipe, &["D /tmp 1777 root root -"]), None);
        assert_eq!(aged(pipe, &["D! /tmp 1777 root root 10d", "# q /tmp 1777 root root 10d", "q"]), None);
        // A line of type X excludes only the directory itself from the clean-up, and not its content.
        assert_eq!(aged(pipe, &[TMP, "X /tmp/nvidia-mps"]), Some(TMP));
        assert_eq!(aged(pipe, &["x /tmp/nvidia-mps/pipe", TMP]), None);
        assert_eq!(aged(pipe, &["d /tmp/nvidia-mps 0755 root root -", TMP]), None);
        // The lines that the package installs exclude the directories of MPS even if a distribution cleans up `/tmp`.
        let shipped = include_str!("../../../../systemd/yunion-mps-daemon.tmpfiles.conf");
        let lines: Vec<&str> = shipped.lines().chain([TMP]).collect();
        for (directory, expected) in
            [(pipe, None), ("/tmp/nvidia-mps/log", None), ("/tmp/nvidia-mps-other", Some(TMP))]
        {
            assert_eq!(aged(directory, &lines), expected, "{directory}");
        }
    }

    #[test]
    fn a_directory_without_the_flag_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let finding = judge_flag(directory.path()).unwrap();
        assert_eq!(finding.name, "directories-changeable");
        assert!(finding.problem.found.contains("immutable"), "{finding:?}");
        assert!(judge_flag(Path::new("/proc")).unwrap().problem.found.contains("no immutable flag"));
        assert_eq!(judge_flag(&directory.path().join("gone")), None);
    }
}
