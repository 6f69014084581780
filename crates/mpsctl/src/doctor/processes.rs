//! Control daemons that the service has not started, and limits of the service's control daemons.

use super::facts::Facts;
use super::{Check, Outcome, Severity, each, edit_unit, finding, warning};
use crate::show::env::quoted;
use common::host::proc;
use common::problem::Problem;

pub(super) const CHECKS: &[Check] =
    &[("control daemons of others", foreign), ("the limit of open files", open_files)];

/// The most open files that a server needs for one client. With the usual limit of 1024, fewer than 60 clients are
/// possible.
const FILES_PER_CLIENT: u64 = 20;

/// The most open files of a server without clients. Measured: 42 with one GPU.
const FILES: u64 = 64;

fn foreign(facts: &Facts) -> Outcome {
    // Without a list of the service's own control daemons, foreign control daemons can't be told from them.
    if facts.published().is_err() && facts.state_file.is_err() {
        return Err("it is not known which control daemons the service has started".into());
    }
    let configured = facts.directories().unwrap_or_default();
    each(facts.control_daemons.iter().filter(|daemon| !facts.is_ours(daemon.pid)), |daemon| {
        let directory = daemon.pipe_directory.as_deref();
        let in_ours = configured.iter().any(|(pipe, _)| Some(pipe.as_path()) == directory);
        let end = match directory {
            // The directory of this control daemon is in a container, and programs in the container can't be trusted. So no
            // command for the host is shown.
            Some(_) if daemon.elsewhere => "end it in the container that it runs in".to_owned(),
            // The directory comes from the environment of a process, which can have any text in it, and root will type this
            // line. So the text is quoted.
            Some(path) => format!(
                "echo quit | CUDA_MPS_PIPE_DIRECTORY={} nvidia-cuda-mps-control, which waits for its clients",
                quoted(&path.display().to_string())
            ),
            None => "yunion-mpsctl doctor as root says where it listens and how to end it".to_owned(),
        };
        let (severity, found, remedy) = if in_ours {
            (
                Severity::Error,
                format!("{}, and this service has not started it", daemon.trace),
                format!("it is replaced by the service once it has no clients; by hand: {end}"),
            )
        } else {
            (
                Severity::Warning,
                format!("{}: its clients use GPUs past this service, or find them taken", daemon.trace),
                format!("{end}; then find out who starts it"),
            )
        };
        let problem = Problem::new(found, remedy);
        [finding(severity, "foreign-control-daemon", format!("process {}", daemon.pid), problem)]
    })
}

/// Finds control daemons with a low limit of open files. A server inherits the limit of its control daemon.
fn open_files(facts: &Facts) -> Outcome {
    let published = facts.published()?;
    let mut findings = Vec::new();
    for daemon in &published.control_daemons {
        let Some(pid) = daemon.pid else { continue };
        let limit = proc::open_files_limit(pid)
            .map_err(|error| format!("the limits of PID {pid} can't be read: {error}"))?;
        let served = published.served_by(&daemon.id);
        let slices: u64 = served.filter_map(|gpu| u64::try_from(gpu.virtual_num).ok()).sum();
        let needed = slices.saturating_mul(FILES_PER_CLIENT).saturating_add(FILES);
        if limit < needed {
            findings.push(warning(
                "open-files-too-few",
                format!("control daemon {} (PID {pid})", daemon.id),
                format!("it may open {limit} files, and {slices} clients at once need about {needed}"),
                format!(
                    "{}; for this control daemon: prlimit --nofile=500000 --pid of it and its server",
                    edit_unit("LimitNOFILE=500000")
                ),
            ));
        }
    }
    Ok(findings)
}
