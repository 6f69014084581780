//!
//! Starts a control daemon. The service starts its own program as `yunion-mps-daemon launch-control CPUS PROGRAM ARGS...`. The
//! new process leaves the service's session, waits for a byte on its standard input, and then executes PROGRAM with the same PID.
//! So the service can record the PID before PROGRAM runs. If the service dies first, the input ends, and the new process ends
//! without executing PROGRAM.

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

/// Variables that must not reach the control daemon: variables of systemd and libc that are for this service, and limits of
/// clients, which a server would apply to itself.
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

/// A process that will become a control daemon: it has its PID already, and waits for a byte on its standard input.
#[derive(Debug)]
pub(crate) struct PausedProcess {
    process: Process,
    word: ChildStdin,
}

impl PausedProcess {
    /// Starts the process in a new session. Until [`PausedProcess::go`] the process runs the service's program (see
    /// [`become_program`]), and then `program` with `arguments`, bound to `cpus` or on all CPUs. `environment` has variables that
    /// are added to the service's own environment, of which the MPS server needs PATH and `LD_LIBRARY_PATH`. `output` is the file
    /// for the standard output and the standard error.
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

    /// The identity of the process. [`PausedProcess::go`] does not change the identity of the process.
    pub(crate) fn identity(&self) -> ProcessId {
        self.process.identity()
    }

    /// Lets the process become the control daemon. If a [`PausedProcess`] is dropped, its process ends without becoming
    /// a control daemon.
    pub(crate) async fn go(mut self) -> io::Result<Process> {
        self.word.write_all(b"\n").await?;
        Ok(self.process)
    }
}

/// The first argument of the service's program, with which it becomes a control daemon.
pub(crate) const ARGUMENT: &str = "launch-control";

/// Waits for a byte on standard input, and executes the program in `arguments`, which has a list of CPUs before it. The
/// program and everything that it starts are bound to the CPUs in the list; with an empty list the program is not
/// bound. Returns an error if the program can't be executed, and Ok if the input ends without a byte.
pub(crate) fn become_program(mut arguments: impl Iterator<Item = OsString>) -> io::Result<()> {
    let cpus = arguments.next().and_then(|list| Cpus::parse(list.to_str()?));
    let program = arguments.next().ok_or_else(|| io::Error::other("no program named"))?;
    rustix::process::setsid()?;
    let mut word = [0];
    if io::stdin().read(&mut word)? == 0 {
        return Ok(());
    }
    // Lowering the control daemon's OOM score fails if the service does not run as root. The control daemon serves even
    // if its OOM score can't be lowered.
    let _ = oom::adjust(oom::OF_CONTROL_DAEMONS);
    // The CPUs are bound last, since the move to another control group may have changed the CPUs of this process. If binding
    // to the CPUs fails, the control daemon uses all CPUs, and the service shows all these CPUs in its status.
    let _ = cpus.map(Cpus::bind);
    let error = std::process::Command::new(&program).args(arguments).stdin(Stdio::null()).exec();
    Err(io::Error::new(error.kind(), format!("{}: {error}", program.display())))
}
