//! Checks of control daemons that the service has not started, and of the limits of the service's own control daemons.

use super::facts::Facts;
use super::{Check, Outcome, Severity, each, edit_unit, finding, warning};
use crate::show::env::quoted;
use common::host::proc;
use common::problem::Problem;

pub(super) const CHECKS: &[Check] =
    &[("control daemons of other programs", foreign), ("the limit of open files", open_files)];

/// The most open files that a server needs for each client. With the usual limit of 1024 open files, a server can have fewer
/// than 60 clients.
const FILES_PER_CLIENT: u64 = 20;

/// The most open files that a server needs without clients. A server with one GPU had 42 open files in a measurement.
const FILES: u64 = 64;

fn foreign(facts: &Facts) -> Outcome {
    // Without the list of the service's own control daemons, `doctor` can't recognize the control daemons of other programs.
    if facts.published().is_err() && facts.state_file.is_err() {
        return Err("doctor does not know which control daemons the service has started".into());
    }
    let configured = facts.directories().unwrap_or_default();
    each(facts.control_daemons.iter().filter(|daemon| !facts.is_ours(daemon.pid)), |daemon| {
        let directory = daemon.pipe_directory.as_deref();
        let in_ours = configured.iter().any(|(pipe, _)| Some(pipe.as_path()) == directory);
        let end = match directory {
            // The control daemon is in a container, and the path of its directory comes from a program that can't be trusted.
            // So the finding contains no command that an administrator would run on the host.
            Some(_) if daemon.elsewhere => "end the control daemon in its container".to_owned(),
            // The path comes from the environment of a process and can contain any text. Root will type this command into a
            // shell, so the path is quoted.
            Some(path) => format!(
                "echo quit | CUDA_MPS_PIPE_DIRECTORY={path} nvidia-cuda-mps-control, which waits for the \
                 clients to end",
                path = quoted(&path.display().to_string())
            ),
            None => {
                "run yunion-mpsctl doctor as root: the report then says where the control daemon listens and \
                 how to end the control daemon"
                    .to_owned()
            }
        };
        let (severity, found, remedy) = if in_ours {
            (
                Severity::Error,
                format!("{trace}, and the service has not started this control daemon", trace = daemon.trace),
                format!(
                    "the service replaces this control daemon once its clients have ended; to end it by \
                     hand: {end}"
                ),
            )
        } else {
            (
                Severity::Warning,
                format!(
                    "{trace}; the clients of this control daemon use GPUs without yunion-mps-daemon, or \
                     fail because the GPUs are in use",
                    trace = daemon.trace
                ),
                format!("{end}; then find out which program starts the control daemon"),
            )
        };
        let problem = Problem::new(found, remedy);
        [finding(severity, "foreign-control-daemon", format!("process {}", daemon.pid), problem)]
    })
}

/// A server inherits the limit of open files from its control daemon.
fn open_files(facts: &Facts) -> Outcome {
    let published = facts.published()?;
    let mut findings = Vec::new();
    for daemon in &published.control_daemons {
        let Some(pid) = daemon.pid else { continue };
        let limit = proc::open_files_limit(pid).map_err(|error| {
            let id = &daemon.id;
            format!("the limit of open files of control daemon {id} (PID {pid}) can't be read: {error}")
        })?;
        let served = published.served_by(&daemon.id);
        let slices: u64 = served.filter_map(|gpu| u64::try_from(gpu.virtual_num).ok()).sum();
        let needed = slices.saturating_mul(FILES_PER_CLIENT).saturating_add(FILES);
        if limit < needed {
            findings.push(warning(
                "open-files-too-few",
                format!("control daemon {id} (PID {pid})", id = daemon.id),
                format!(
                    "the control daemon may open {limit} files, but {slices} clients at the same time need \
                     about {needed}"
                ),
                format!(
                    "{edit}; for the control daemon that runs already, run prlimit --nofile=500000 --pid \
                     {pid}, and the same with the PID of its server",
                    edit = edit_unit("LimitNOFILE=500000")
                ),
            ));
        }
    }
    Ok(findings)
}
