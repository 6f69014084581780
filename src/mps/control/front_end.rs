//! Runs NVIDIA's front end `nvidia-cuda-mps-control` as a process that sends one command to a control daemon.

use std::io::{self, PipeReader};
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe::Receiver;
use tokio::process::Command;
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::Control;
use super::error::{ControlError, name, unexpected};
use common::host::driver::{PROTOCOL, finds_no_control_daemon};

/// The number of attempts for a command that the control daemon does not accept, and the pause between them. If two front ends
/// ask at once, the control daemon sometimes rejects the command of one front end.
const SENDS: u32 = 20;
const SEND_PAUSE: Duration = Duration::from_millis(25);

/// The time that the service waits for the end of a front end before it reads the answer. Measured: 2 ms.
const ANSWER_TIME: Duration = Duration::from_millis(20);

/// The most bytes of an answer. An answer has a few lines per client.
const ANSWER_MAX_BYTES: usize = 1 << 20;

/// The queue of front ends for one pipe directory. A front end runs while its caller has the lock. Other callers wait in the
/// order in which they came.
pub(super) type Queue = Mutex<()>;

impl Control {
    /// Repeats a command until the control daemon accepts it. Every local user may run a front end at the same time, and a
    /// single attempt may then fail.
    pub(super) async fn send(&self, command: &str) -> Result<String, ControlError> {
        for _ in 0..SENDS {
            if let Some(answer) = self.run(command).await? {
                return Ok(answer);
            }
            tokio::time::sleep(SEND_PAUSE).await;
        }
        Err(ControlError::Unanswered { command: name(command) })
    }

    /// Runs the front end with one command and returns its output without the last newline. None if the control daemon did not
    /// accept the command.
    async fn run(&self, command: &str) -> Result<Option<String>, ControlError> {
        let not_run = |source| ControlError::NotRun { program: self.program.clone(), source };
        let (stdout, its_stdout) = io::pipe().map_err(not_run)?;
        let (stderr, its_stderr) = io::pipe().map_err(not_run)?;
        let mut front_end = Command::new(&self.program)
            .env("CUDA_MPS_PIPE_DIRECTORY", &self.pipe_directory)
            .env(PROTOCOL.0, PROTOCOL.1)
            .stdin(Stdio::piped())
            .stdout(its_stdout)
            .stderr(its_stderr)
            // If a signal has stopped the control daemon, its front end waits for ever. The front end is killed when the caller
            // gives up.
            .kill_on_drop(true)
            .spawn()
            .map_err(not_run)?;
        if let Some(mut stdin) = front_end.stdin.take() {
            // A front end that finds no control daemon may end before it reads the command. So an error of the write is
            // ignored, and the output has the reason.
            let _ = stdin.write_all(format!("{command}\n").as_bytes()).await;
        }
        // The front end writes each line separately, and a read of each line would wake the service once a line. So the pipes
        // are read after the front end has ended. They are also read after `ANSWER_TIME`, since an answer that is larger than a
        // pipe prevents the front end from ending.
        let _ = timeout(ANSWER_TIME, front_end.wait()).await;
        let (stdout, stderr) = tokio::try_join!(read(stdout), read(stderr)).map_err(not_run)?;
        let answer = String::from_utf8_lossy(&stdout);
        if stdout.len() > ANSWER_MAX_BYTES {
            return Err(unexpected(command, &answer, "at most 1 MiB"));
        }
        let status = front_end.wait().await.map_err(not_run)?;
        let said = String::from_utf8_lossy(&stderr);
        if said.contains("Cannot send command") {
            return Ok(None);
        }
        if finds_no_control_daemon(&said) {
            let said = said.trim().to_owned();
            return Err(ControlError::NoDaemon { pipe_directory: self.pipe_directory.clone(), said });
        }
        if !status.success() {
            let said = if said.trim().is_empty() { String::new() } else { format!(": {}", said.trim()) };
            return Err(ControlError::Exited {
                program: self.program.clone(),
                how: format!("{status}{said}"),
            });
        }
        Ok(Some(answer.trim_end_matches('\n').to_owned()))
    }
}

/// Reads one byte more than the longest allowed answer, so that the caller notices a longer answer.
async fn read(pipe: PipeReader) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let pipe = Receiver::from_owned_fd(pipe.into())?;
    pipe.take(ANSWER_MAX_BYTES as u64 + 1).read_to_end(&mut bytes).await?;
    Ok(bytes)
}
