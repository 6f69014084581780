//! The process of the front end and its pipes.

use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;

use super::error::{ControlError, name, unexpected};
use super::turns::Turns;
use crate::host::driver::finds_no_control_daemon;

/// The number of tries for a command that the control daemon does not accept, and the pause between two tries. The
/// control daemon sometimes fails one of two front ends that ask at once.
const SENDS: u32 = 20;
const SEND_PAUSE: Duration = Duration::from_millis(25);

/// An answer has a few lines per client. More than this is not an answer.
const ANSWER_MAX_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct FrontEnd {
    pub(super) program: PathBuf,
    pub(super) pipe_directory: PathBuf,
    pub(super) turns: Arc<Turns>,
}

impl FrontEnd {
    /// Asks until the control daemon accepts the command. Every local user may ask at the same moment, so one try may
    /// fail.
    pub(super) async fn ask(&self, command: &str) -> Result<String, ControlError> {
        for _ in 0..SENDS {
            if let Some(answer) = self.run(command).await? {
                return Ok(answer);
            }
            tokio::time::sleep(SEND_PAUSE).await;
        }
        Err(ControlError::Unanswered { command: name(command) })
    }

    /// Runs the front end with one command and returns its output without the last newline. None if the control daemon
    /// did not accept the command.
    async fn run(&self, command: &str) -> Result<Option<String>, ControlError> {
        let not_run = |source| ControlError::NotRun { program: self.program.clone(), source };
        let mut front_end = Command::new(&self.program)
            .env("CUDA_MPS_PIPE_DIRECTORY", &self.pipe_directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A front end that waits for a stopped control daemon ends when the caller gives up.
            .kill_on_drop(true)
            .spawn()
            .map_err(not_run)?;
        if let Some(mut stdin) = front_end.stdin.take() {
            // A front end that finds no control daemon may end before it reads the command. Its output then tells the
            // reason.
            let _ = stdin.write_all(format!("{command}\n").as_bytes()).await;
        }
        let (stdout, stderr) = (front_end.stdout.take(), front_end.stderr.take());
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
        if !status.success() || finds_no_control_daemon(&said) {
            let said = if said.trim().is_empty() { status.to_string() } else { said.trim().to_owned() };
            return Err(ControlError::NoDaemon { pipe_directory: self.pipe_directory.clone(), said });
        }
        Ok(Some(answer.trim_end_matches('\n').to_owned()))
    }
}

/// Reads everything that a front end prints, up to one byte more than the allowed size.
async fn read(stream: Option<impl AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        stream.take(ANSWER_MAX_BYTES as u64 + 1).read_to_end(&mut bytes).await?;
    }
    Ok(bytes)
}
