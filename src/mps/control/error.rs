//! The reasons why a command to a control daemon had no verified effect.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

const SHOWN_CHARACTERS: usize = 200;

#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("{program}: {source}")]
    NotRun { program: PathBuf, source: io::Error },
    /// The front end has failed, but the control daemon may work.
    #[error("{program} ended with {how}")]
    Exited { program: PathBuf, how: String },
    /// No control daemon listens in the pipe directory. `said` is the output of the front end.
    #[error("no control daemon answers in {pipe_directory}: {said}")]
    NoDaemon { pipe_directory: PathBuf, said: String },
    /// The control daemon has not answered in time: it hangs or is stopped.
    #[error("the control daemon did not answer `{command}` within {seconds} s", seconds = after.as_secs())]
    Silent { command: String, after: Duration },
    /// The control daemon has not answered a command that always has an answer. After a hang, a control daemon closes the
    /// waiting connections without an answer.
    #[error("the control daemon gave no answer to `{command}`")]
    Unanswered { command: String },
    #[error("`{command}` was answered with {answer:?}, expected {expected}")]
    Unexpected { command: String, answer: String, expected: String },
}

pub(super) fn name(commands: &str) -> String {
    commands.lines().next_back().unwrap_or_default().to_owned()
}

pub(super) fn unexpected(commands: &str, answer: &str, expected: &str) -> ControlError {
    let mut shown: String = answer.chars().take(SHOWN_CHARACTERS).collect();
    if shown.len() < answer.len() {
        shown.push('…');
    }
    ControlError::Unexpected { command: name(commands), answer: shown, expected: expected.to_owned() }
}
