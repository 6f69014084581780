//! Processes of the control daemon: started, watched, signalled, stopped. The only module that does any of these.

use std::convert::Infallible;
use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, ChildStdin, Command};

use super::control::{Control, ControlError};
use super::frozen::{self, Thawed};
use super::hold::{Hold, is_gone};
use super::identity::Identity;
use super::launch;
use super::readable::Readable;
use crate::host::proc;

/// A live process that is held: a signal can't hit another process that got its PID.
#[derive(Debug)]
pub struct Process {
    hold: Hold<Readable>,
    /// There while it is our child, for its exit status.
    child: Option<Child>,
}

impl Process {
    fn hold(pid: u32, child: Option<Child>) -> io::Result<Self> {
        Ok(Self { hold: Hold::of(pid)?.watched()?, child })
    }

    /// Holds a process that is not our child; None if it has ended.
    ///
    /// # Errors
    /// What the kernel says, when it is out of file descriptors for one. The process may live.
    pub fn adopt(identity: Identity) -> io::Result<Option<Self>> {
        Ok(Self::of(identity.pid)?.filter(|process| process.identity() == identity))
    }

    /// Holds the process that has this PID now; None if there is none.
    ///
    /// # Errors
    /// See [`Process::adopt`].
    pub fn of(pid: u32) -> io::Result<Option<Self>> {
        match Self::hold(pid, None) {
            Ok(process) => Ok(Some(process)),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether it is held by SIGSTOP or a debugger.
    pub fn is_stopped(&self) -> bool {
        is_stopped(self.identity().pid)
    }

    /// The file that is its standard output, even if it was removed since; to be read alone where its mode forbids more.
    pub fn output_file(&self) -> io::Result<File> {
        let output = proc::open_file(self.identity().pid, 1);
        File::options().read(true).write(true).open(&output).or_else(|_| File::open(&output))
    }

    /// Which process this is.
    pub fn identity(&self) -> Identity {
        self.hold.identity()
    }

    /// Waits until it has ended, and returns how: None for a process that is not our child.
    pub async fn exited(&mut self) -> Option<ExitStatus> {
        match &mut self.child {
            // Where there is no pidfd, it is a zombie until this.
            Some(child) => child.wait().await.ok(),
            None => {
                self.hold.ended().await;
                None
            }
        }
    }

    /// Sends it a signal. A process that has ended already is no error.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        self.hold.signal(signal)
    }
}

/// How often it is tried to hold a process, where there is no file descriptor for it.
const HOLD_AGAIN: Duration = Duration::from_secs(1);

/// Waits until a process that is not our child has ended.
pub async fn ended(pid: u32) {
    loop {
        match Process::of(pid) {
            Ok(Some(mut process)) => {
                process.exited().await;
                return;
            }
            Ok(None) => return,
            Err(error) => {
                tracing::debug!("PID {pid} can't be watched: {error}");
                tokio::time::sleep(HOLD_AGAIN).await;
            }
        }
    }
}

/// How often, and how far apart, it is looked at whether a process goes on. A debugger stops one again and again that it
/// lets go on at once.
const GO_ON_LOOKS: u32 = 20;
const GO_ON_PAUSE: Duration = Duration::from_millis(5);

/// The same of one that must not stop again. Who stops it every 300 us leaves it a part of the time then.
const KEEP_PAUSE: Duration = Duration::from_millis(1);

fn is_stopped(pid: u32) -> bool {
    proc::stat(pid).is_ok_and(|stat| stat.is_stopped())
}

/// SIGSTOP stops all threads of a process, a debugger can stop one alone.
fn is_any_thread_stopped(pid: u32) -> bool {
    proc::threads(pid).iter().any(proc::Stat::is_stopped)
}

/// What to start, and around what.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The control daemon's program.
    pub program: &'a Path,
    /// Its arguments.
    pub arguments: &'a [&'a str],
    /// Set on top of our own environment: the server needs PATH and LD_LIBRARY_PATH as much as we do.
    pub environment: &'a [(&'a str, String)],
    /// Where its standard output and error go.
    pub output: File,
}

/// Variables that must not reach the control daemon: systemd's talk with us, and client limits, which a server would
/// take for its own.
const NOT_PASSED_ON: [&str; 8] = [
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_CLIENT_PRIORITY",
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "JOURNAL_STREAM",
    "RUNTIME_DIRECTORY",
];

/// A process that has its PID and waits for the word to become the control daemon.
#[derive(Debug)]
pub struct Waiting {
    process: Process,
    word: ChildStdin,
}

impl Waiting {
    /// Starts it, in a session of its own, as a copy of our own program (see [`launch`]).
    pub fn start(launch: Launch<'_>) -> io::Result<Self> {
        let mut command = Command::new(proc::OWN_PROGRAM);
        command.arg(launch::ARGUMENT).arg(launch.program).args(launch.arguments);
        for name in NOT_PASSED_ON {
            command.env_remove(name);
        }
        command.envs(launch.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::piped()).stdout(launch.output.try_clone()?).stderr(launch.output);
        let mut child = command.spawn()?;
        let word = child.stdin.take().ok_or_else(|| io::Error::other("no pipe to the new process"))?;
        let pid = child.id().ok_or_else(|| io::Error::other("the new process ended at once"))?;
        Ok(Self { process: Process::hold(pid, Some(child))?, word })
    }

    /// Which process it is; the same before and after [`Waiting::go`].
    pub fn identity(&self) -> Identity {
        self.process.identity()
    }

    /// Gives the word. Dropped without it, the process ends by itself.
    pub async fn go(mut self) -> io::Result<Process> {
        self.word.write_all(b"\n").await?;
        Ok(self.process)
    }
}

/// The absolute path of a program in the directories of `PATH`, if one there may be executed.
pub fn find_program(name: &str) -> Result<PathBuf, String> {
    find_program_in(name, &std::env::var_os("PATH").unwrap_or_default())
}

/// The same with another `PATH`.
pub fn find_program_in(name: &str, path: &OsStr) -> Result<PathBuf, String> {
    let mut unusable = None;
    for directory in std::env::split_paths(path) {
        let candidate = directory.join(name);
        if !candidate.is_file() {
            continue;
        }
        if rustix::fs::access(&candidate, rustix::fs::Access::EXEC_OK).is_ok() {
            return Ok(candidate);
        }
        unusable.get_or_insert(candidate);
    }
    Err(match unusable {
        Some(file) => {
            format!("{} is not executable; chmod 755 it or reinstall the package it is from", file.display())
        }
        None => format!(
            "{name} is in no directory of PATH ({}); install the driver's MPS package (nvidia-cuda-mps, \
             nvidia-compute-utils or xorg-x11-drv-nvidia-cuda)",
            Path::new(path).display()
        ),
    })
}

/// How a control daemon ended when it was asked to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// It followed `quit`.
    Quit,
    /// It took SIGTERM.
    Terminated,
    /// It took SIGKILL.
    Killed,
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Quit => "quit",
            Self::Terminated => "SIGTERM",
            Self::Killed => "SIGKILL",
        })
    }
}

/// What a control daemon gets to end once it has answered `quit`. Measured: 81 ms.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);

/// What one gets that has not answered.
const SILENT_TIMEOUT: Duration = Duration::from_secs(1);

/// What SIGTERM gets before SIGKILL. Measured: 4 ms.
const TERMINATE_TIMEOUT: Duration = Duration::from_secs(5);

/// Ends a control daemon: `quit` first, which lets idle servers end in order, then SIGTERM, then SIGKILL. `quit -t`
/// alone can hang for as long as a client runs, so it has a deadline of its own.
pub async fn stop(process: &mut Process, control: &Control, quit_timeout: Duration) -> io::Result<Stopped> {
    let patience = match listens(process, control) {
        true => patience_after(control.quit(quit_timeout).await, process),
        false => SILENT_TIMEOUT,
    };
    if tokio::time::timeout(patience, process.exited()).await.is_ok() {
        return Ok(Stopped::Quit);
    }
    process.signal(Signal::TERM)?;
    if tokio::time::timeout(TERMINATE_TIMEOUT, process.exited()).await.is_ok() {
        return Ok(Stopped::Terminated);
    }
    process.signal(Signal::KILL)?;
    process.exited().await;
    Ok(Stopped::Killed)
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

/// Whether it is this process that a front end would talk to: another may have taken the pipe directory.
fn listens(process: &Process, control: &Control) -> bool {
    control.daemon_pid() == Some(process.identity().pid)
}

/// What a control daemon without clients gets to answer `quit`. Measured: 81 ms.
const IDLE_QUIT_TIMEOUT: Duration = Duration::from_secs(3);

/// Asks a control daemon that seems to have no client to end, and says whether it has. One that does have a client
/// stays until that is done: nobody is hurt who comes in between.
pub async fn stop_idle(process: &mut Process, control: &Control) -> bool {
    if !listens(process, control) {
        return false;
    }
    let patience = patience_after(control.quit_when_idle(IDLE_QUIT_TIMEOUT).await, process);
    tokio::time::timeout(patience, process.exited()).await.is_ok()
}

/// A process of someone else's that is held. As long as it lives its PID is its own, so what /proc says under that PID is
/// about this process, if it was [`Held::alive`] afterwards.
#[derive(Debug)]
pub struct Held(Hold<OwnedFd>);

impl Held {
    /// Holds the process that has this PID now; None when there is none.
    ///
    /// # Errors
    /// What the kernel says, when it is out of file descriptors for one.
    pub fn open(pid: u32) -> io::Result<Option<Self>> {
        match Hold::of(pid) {
            Ok(hold) => Ok(Some(Self(hold))),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Lets it go on if SIGSTOP or a control group holds it still.
    ///
    /// # Errors
    /// What the kernel says against that, or that it stays as it is.
    pub async fn go_on(&self) -> io::Result<GoingOn<'_>> {
        let pid = self.0.identity().pid;
        let mut going_on = GoingOn { held: self, thawed: Vec::new(), was_held: false };
        for _ in 0..GO_ON_LOOKS {
            // One that is stopped again every 300 us is on its way right after SIGCONT, and only then.
            if !going_on.look(is_any_thread_stopped(pid))? || !going_on.look(is_any_thread_stopped(pid))? {
                return Ok(going_on);
            }
            tokio::time::sleep(GO_ON_PAUSE).await;
        }
        Err(io::Error::other("it stays stopped; a debugger may hold it"))
    }

    /// Whether it lives; a zombie doesn't.
    pub fn alive(&self) -> bool {
        self.0.is_alive()
    }
}

/// A process that goes on, whatever stops it. A control group that had to go on for that is frozen again when this is
/// dropped.
#[derive(Debug)]
pub struct GoingOn<'a> {
    held: &'a Held,
    thawed: Vec<Thawed>,
    was_held: bool,
}

impl GoingOn<'_> {
    /// Whether something had to be done for it.
    pub fn was_held(&self) -> bool {
        self.was_held
    }

    /// Lets it go on each time that something stops it again. It takes a tenth of a processor at most, and never ends.
    pub async fn keep(&mut self) -> Infallible {
        let pid = self.held.0.identity().pid;
        let mut refused = String::new();
        loop {
            if let Err(error) = self.look(is_stopped(pid)) {
                let error = error.to_string();
                if error != refused {
                    tracing::warn!(mps_client_pid = pid, "client {pid} can't be continued: {error}");
                    refused = error;
                }
            }
            tokio::time::sleep(KEEP_PAUSE).await;
        }
    }

    /// Whether it was held still; then it has been let go on.
    fn look(&mut self, stopped: bool) -> io::Result<bool> {
        let frozen = frozen::holds(self.held.0.identity().pid);
        let held = stopped || frozen.is_some();
        self.was_held |= held;
        if stopped {
            self.held.0.signal(Signal::CONT)?;
        }
        if let Some(frozen) = frozen {
            frozen.thaw(&mut self.thawed)?;
        }
        Ok(held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the program of the next test does.
    #[test]
    #[ignore = "waits until it is killed"]
    fn waits() {
        std::thread::sleep(Duration::from_secs(60));
    }

    #[tokio::test]
    async fn a_name_that_is_no_text_hides_nobody() {
        use std::os::unix::ffi::OsStrExt;
        use std::os::unix::process::CommandExt;

        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join(OsStr::from_bytes(b"\xff) \xfe"));
        // A program that is what it is under any name.
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
        assert!(Identity::of(child.id()).unwrap().start_time > 0);
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
