//! Starts a control daemon in two steps, so that the service can record its PID before the control daemon's program runs.
//!
//! The service starts its own program as `yunion-mps-daemon launch-control CPUS PROGRAM ARGS...`. The new process leaves the
//! session of the service, and waits for a byte on its standard input. Then it executes PROGRAM with the same PID. If the
//! service dies first, the input ends, and the new process ends without executing PROGRAM.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;

use mps_core::terms::ProcessId;
use tokio::io::AsyncWriteExt;
use tokio::process::{ChildStdin, Command};

use super::process::Process;
use common::host::cpus::Cpus;
use common::host::{oom, proc};

/// Environment variables that must not reach the control daemon. The `CUDA_MPS` variables limit clients, and a server would
/// apply them to itself. The other variables are from systemd and from the unit file, and concern only this service.
const NOT_PASSED_ON: [&str; 11] = [
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_CLIENT_PRIORITY",
    "CUDA_MPS_SM_PARTITION",
    "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
    "MALLOC_ARENA_MAX",
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "JOURNAL_STREAM",
    "RUNTIME_DIRECTORY",
];

/// A process that will become a control daemon. It has its final PID already, and waits for a byte on its standard input.
#[derive(Debug)]
pub(crate) struct PausedProcess {
    process: Process,
    word: ChildStdin,
}

impl PausedProcess {
    /// Starts the process in a new session. The process runs the service's program (see [`become_program`]) until
    /// [`PausedProcess::go`]. Then it runs `program` with `arguments`, bound to `cpus` or on all CPUs. `environment` is added
    /// to the service's own environment, of which the MPS server needs PATH and `LD_LIBRARY_PATH`. `output` is the file for
    /// standard output and standard error.
    pub(crate) fn start(
        program: &Path,
        arguments: &[&str],
        cpus: Option<Cpus>,
        environment: &[(&str, String)],
        output: File,
    ) -> io::Result<Self> {
        let mut command = Command::new(proc::OWN_PROGRAM);
        let cpus = cpus.map(|cpus| cpus.to_string()).unwrap_or_default();
        command.arg(ARGUMENT).arg(cpus).arg(program).args(arguments);
        for name in NOT_PASSED_ON {
            command.env_remove(name);
        }
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::piped()).stdout(output.try_clone()?).stderr(output);
        let mut child = command.spawn()?;
        let word = child.stdin.take().ok_or_else(|| io::Error::other("no pipe to the new process"))?;
        let pid = child.id().ok_or_else(|| io::Error::other("the new process ended at once"))?;
        Ok(Self { process: Process::hold(pid, Some(child))?, word })
    }

    /// The identity does not change with [`PausedProcess::go`].
    pub(crate) fn identity(&self) -> ProcessId {
        self.process.identity()
    }

    /// Lets the process become the control daemon. If a [`PausedProcess`] is dropped instead, its process ends.
    pub(crate) async fn go(mut self) -> io::Result<Process> {
        self.word.write_all(b"\n").await?;
        Ok(self.process)
    }
}

pub(crate) const ARGUMENT: &str = "launch-control";

/// Waits for a byte on standard input, and then executes a program. `arguments` has a list of CPUs, the program, and the
/// program's arguments. An empty list means all CPUs. Ok means that the input has ended without a byte.
pub(crate) fn become_program(mut arguments: impl Iterator<Item = OsString>) -> io::Result<()> {
    let cpus = arguments.next().and_then(|list| Cpus::parse(list.to_str()?));
    let program = arguments.next().ok_or_else(|| io::Error::other("no program named"))?;
    rustix::process::setsid()?;
    let mut word = [0];
    if io::stdin().read(&mut word)? == 0 {
        return Ok(());
    }
    // Only root may lower the OOM score. Without the lower score, the control daemon still serves.
    let _ = oom::adjust(oom::OF_CONTROL_DAEMONS);
    // The CPUs are bound last, since a move to another control group may have changed them. If this fails, the control daemon
    // uses all CPUs, and the service shows all CPUs in its status.
    let _ = cpus.map(Cpus::bind);
    let error = std::process::Command::new(&program).args(arguments).stdin(Stdio::null()).exec();
    Err(io::Error::new(error.kind(), format!("{}: {error}", program.display())))
}
