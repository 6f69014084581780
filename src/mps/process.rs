//! Processes of control daemons. No other module watches, signals or stops them; [`super::launch`] starts them.

use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use mps_core::Permit;
use mps_core::terms::ProcessId;
use rustix::process::Signal;
use tokio::process::Child;

use super::cgroup_freezer::{self, Thawed};
use super::control::{Control, ControlError};
use super::process_handle::{ProcessHandle, unless_gone};
use common::host::proc;
use common::host::readable::Readable;

/// A process with a handle. A signal through the handle can't reach a later process with the same PID.
#[derive(Debug)]
pub(crate) struct Process {
    handle: ProcessHandle<Readable>,
    /// Gives the exit status. None if the process is not a child of the service.
    child: Option<Child>,
}

impl Process {
    pub(super) fn hold(pid: u32, child: Option<Child>) -> io::Result<Self> {
        Ok(Self { handle: ProcessHandle::open(pid)?.watched()?, child })
    }

    /// Opens a handle of a process that is not a child of the service. None if the process has ended. After an error, the
    /// process may still run.
    pub(crate) fn adopt(identity: ProcessId) -> io::Result<Option<Self>> {
        Ok(Self::open(identity.pid)?.filter(|process| process.identity() == identity))
    }

    pub(crate) fn open(pid: u32) -> io::Result<Option<Self>> {
        unless_gone(Self::hold(pid, None))
    }

    /// Opens the file of the process's standard output, even if that file was removed. If the file's mode forbids writing, the
    /// file is opened read-only.
    pub(crate) fn output_file(&self) -> io::Result<File> {
        let output = proc::open_file(self.identity().pid, 1);
        File::options().read(true).write(true).open(&output).or_else(|_| File::open(&output))
    }

    pub(crate) fn identity(&self) -> ProcessId {
        self.handle.identity()
    }

    /// Waits until the process has ended, and returns its exit status. None if the process is not a child of the service, since
    /// only a parent gets the exit status.
    pub(crate) async fn exited(&mut self) -> Option<ExitStatus> {
        match &mut self.child {
            // Waiting for a child removes its zombie. On a kernel without pidfds, the zombie stays until the service waits for
            // the child.
            Some(child) => child.wait().await.ok(),
            None => {
                self.handle.ended().await;
                None
            }
        }
    }

    /// Waits for the end of the process like [`Process::exited`], but only for a moment. The outer None means that the process
    /// goes on.
    pub(crate) async fn exited_by_now(&mut self) -> Option<Option<ExitStatus>> {
        tokio::time::timeout(ENDING, self.exited()).await.ok()
    }

    async fn ends_within(&mut self, patience: Duration) -> bool {
        tokio::time::timeout(patience, self.exited()).await.is_ok()
    }

    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        self.handle.signal(signal)
    }
}

/// Continues a process if SIGSTOP has stopped it. Returns a message for the log if the process was stopped.
pub(crate) fn continue_if_stopped(pid: u32) -> Option<String> {
    let process = Process::open(pid).ok().flatten().filter(|_| is_stopped(pid))?;
    Some(match process.signal(Signal::CONT) {
        Ok(()) => format!(
            "the control daemon or server with PID {pid} was stopped by a signal; the service has continued \
             the process"
        ),
        Err(error) => format!(
            "the control daemon or server with PID {pid} was stopped by a signal, and can't be continued: \
             {error}"
        ),
    })
}

/// The pause before the next attempt to open a handle while the service has no free file descriptors.
const HOLD_AGAIN: Duration = Duration::from_secs(1);

pub(crate) async fn ended(pid: u32) {
    loop {
        match Process::open(pid) {
            Ok(Some(mut process)) => {
                process.exited().await;
                return;
            }
            Ok(None) => return,
            Err(error) => {
                tracing::debug!("the end of process {pid} can't be watched: {error}");
                tokio::time::sleep(HOLD_AGAIN).await;
            }
        }
    }
}

/// The most attempts to continue a process, and the pause between two attempts. A debugger can stop a continued process at
/// once, repeatedly.
const GO_ON_LOOKS: u32 = 20;
const GO_ON_PAUSE: Duration = Duration::from_millis(5);

/// The pause between two checks of a process that the service continues each time it is stopped. Even if another program stops
/// the process every 300 us, the process then runs part of the time.
const KEEP_PAUSE: Duration = Duration::from_millis(1);

fn is_stopped(pid: u32) -> bool {
    proc::stat(pid).is_ok_and(|stat| stat.is_stopped())
}

/// True if a thread of the process is stopped. SIGSTOP stops all threads of a process, but a debugger can stop a single thread.
fn is_any_thread_stopped(pid: u32) -> bool {
    proc::threads(pid).iter().any(proc::Stat::is_stopped)
}

/// The time that the service waits for a process that is probably about to end.
const ENDING: Duration = Duration::from_millis(20);

/// The time that a control daemon has to end after it has answered `quit`. Measured: 81 ms.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The time that a control daemon has to end if it has not answered `quit`.
const SILENT_TIMEOUT: Duration = Duration::from_secs(1);

/// The time between SIGTERM and SIGKILL. Measured: a control daemon ends within 4 ms after SIGTERM.
const TERMINATE_TIMEOUT: Duration = Duration::from_secs(5);

/// Asks a control daemon to end with its clients, so that its servers end cleanly. Returns true if the control daemon has
/// ended. `quit -t` can hang as long as a client runs, so the command has a deadline.
pub(crate) async fn stop(
    process: &mut Process,
    control: &Control,
    quit_timeout: Duration,
    may_end: Permit,
) -> bool {
    tell_cause("is asked to end with its clients", process, may_end);
    let patience = if listens(process, control) {
        patience_after(control.quit(quit_timeout).await, process)
    } else {
        SILENT_TIMEOUT
    };
    process.ends_within(patience).await
}

/// Ends a control daemon with its clients: with SIGTERM, then with SIGKILL. Returns the name of the last signal. The caller
/// must first report the clients that will lose their work.
pub(crate) async fn end_by_signal(process: &mut Process, may_end: Permit) -> io::Result<&'static str> {
    tell_cause("is sent SIGTERM", process, may_end);
    process.signal(Signal::TERM)?;
    if process.ends_within(TERMINATE_TIMEOUT).await {
        return Ok("SIGTERM");
    }
    process.signal(Signal::KILL)?;
    process.exited().await;
    Ok("SIGKILL")
}

fn tell_cause(step: &str, process: &Process, may_end: Permit) {
    let pid = process.identity().pid;
    tracing::debug!(mps_control_pid = pid, "control daemon {pid} {step}: {:?}", may_end.cause());
}

fn patience_after(quit: Result<(), ControlError>, process: &Process) -> Duration {
    match quit {
        Ok(()) => QUIT_TIMEOUT,
        Err(error) => {
            tracing::debug!(mps_control_pid = process.identity().pid, "quit: {error}");
            SILENT_TIMEOUT
        }
    }
}

/// True if this process listens in the pipe directory. Another control daemon may have taken over the directory.
fn listens(process: &Process, control: &Control) -> bool {
    control.daemon_pid() == Some(process.identity().pid)
}

/// The time that a control daemon without clients has to answer `quit`. Measured: 81 ms.
const IDLE_QUIT_TIMEOUT: Duration = Duration::from_secs(3);

/// Asks a control daemon that seems to have no client to end. Returns true if the control daemon has ended. If a client comes
/// meanwhile, the control daemon ends only after this client, so no client loses work.
pub(crate) async fn stop_idle(process: &mut Process, control: &Control, may_end: Permit) -> bool {
    tell_cause("is asked to end once it has no client", process, may_end);
    if !listens(process, control) {
        return false;
    }
    let patience = patience_after(control.quit_when_idle(IDLE_QUIT_TIMEOUT).await, process);
    process.ends_within(patience).await
}

/// A handle of a process that the service has not started. Facts from `/proc/PID` are about this process if [`Held::alive`] is
/// true after they were read.
#[derive(Debug, Clone)]
pub(crate) struct Held(Arc<ProcessHandle<OwnedFd>>);

impl Held {
    pub(crate) fn open(pid: u32) -> io::Result<Option<Self>> {
        Ok(unless_gone(ProcessHandle::open(pid))?.map(|hold| Self(Arc::new(hold))))
    }

    /// Continues a process that SIGSTOP has stopped or that a control group freezes. An error means that the process stays
    /// stopped.
    pub(crate) async fn go_on(&self) -> io::Result<GoingOn> {
        let pid = self.0.identity().pid;
        let mut going_on = GoingOn { held: self.clone(), thawed: Vec::new(), was_held: false };
        for _ in 0..GO_ON_LOOKS {
            // If another program stops the process every 300 us, the process runs only right after SIGCONT, and a single check
            // could find no stopped thread. So the service checks twice, without a pause, that no thread is stopped.
            if !going_on.continue_once(is_any_thread_stopped(pid))?
                || !going_on.continue_once(is_any_thread_stopped(pid))?
            {
                return Ok(going_on);
            }
            tokio::time::sleep(GO_ON_PAUSE).await;
        }
        Err(io::Error::other("the process stays stopped; a debugger may have stopped it"))
    }

    pub(crate) fn identity(&self) -> ProcessId {
        self.0.identity()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.identity().pid
    }

    pub(crate) fn alive(&self) -> bool {
        self.0.is_alive()
    }
}

/// A process that [`GoingOn::keep`] continues each time that another program stops it. When this value is dropped, the control
/// groups that were thawed for the process are frozen again.
#[derive(Debug)]
pub(crate) struct GoingOn {
    held: Held,
    thawed: Vec<Thawed>,
    was_held: bool,
}

impl GoingOn {
    pub(crate) fn pid(&self) -> u32 {
        self.held.pid()
    }

    /// True if the process was stopped or frozen, so that the service had to continue it.
    pub(crate) fn was_held(&self) -> bool {
        self.was_held
    }

    /// Continues the process each time that another program stops it, and never returns. The loop uses at most a tenth of a
    /// CPU.
    pub(crate) async fn keep(&mut self) -> Infallible {
        let pid = self.pid();
        let mut refused = String::new();
        loop {
            if let Err(error) = self.continue_once(is_stopped(pid)) {
                let error = error.to_string();
                if error != refused {
                    tracing::warn!(
                        mps_client_pid = pid,
                        "client {pid} is stopped or frozen and can't be continued: {error}"
                    );
                    refused = error;
                }
            }
            tokio::time::sleep(KEEP_PAUSE).await;
        }
    }

    fn continue_once(&mut self, stopped: bool) -> io::Result<bool> {
        let frozen = cgroup_freezer::holds(self.pid());
        let held = stopped || frozen.is_some();
        self.was_held |= held;
        if stopped {
            self.held.0.signal(Signal::CONT)?;
        }
        if let Some((kind, group)) = frozen {
            cgroup_freezer::thaw(kind, group, &mut self.thawed)?;
        }
        Ok(held)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    /// The next test runs this test in a child process, which only waits.
    #[test]
    #[ignore = "waits until it is killed"]
    fn waits() {
        std::thread::sleep(Duration::from_secs(60));
    }

    #[tokio::test]
    async fn a_process_with_a_name_that_is_no_text_is_found() {
        use std::ffi::OsStr;
        use std::os::unix::ffi::OsStrExt;
        use std::os::unix::process::CommandExt;

        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join(OsStr::from_bytes(b"\xff) \xfe"));
        // The process gets the name of this link, which leads to the test program itself.
        std::os::unix::fs::symlink(std::env::current_exe().unwrap(), &program).unwrap();
        let mut child = std::process::Command::new(&program)
            .arg0("waits")
            .args(["--ignored", "--exact", "mps::process::tests::waits"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let named = || std::fs::read(format!("/proc/{}/comm", child.id())).unwrap().starts_with(b"\xff");
        while !named() {
            std::thread::yield_now();
        }
        assert!(common::host::identity::read(child.id()).unwrap().start_time > 0);
        let held = Held::open(child.id()).unwrap().unwrap();
        held.0.signal(Signal::STOP).unwrap();
        while !is_stopped(child.id()) {
            std::thread::yield_now();
        }
        assert!(held.go_on().await.unwrap().was_held());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
