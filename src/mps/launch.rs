//! The last step before a process becomes the control daemon.
//!
//! The service starts itself again as `yunion-mps-daemon launch-control PROGRAM ARGS...`; that process leaves the
//! service's session, waits for a byte on its standard input and only then becomes PROGRAM, keeping its PID. So the
//! service can write down and hand over a PID before anything runs under it: if the service dies in between, the
//! input ends and nothing was started.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::host::oom;

/// The first argument that asks for this step.
pub const ARGUMENT: &str = "launch-control";

/// Waits for the word to go and becomes the program that `arguments` names. Returns only when that can't be: without
/// an error when the word never came.
pub fn become_program(mut arguments: impl Iterator<Item = OsString>) -> io::Result<()> {
    let program = arguments.next().ok_or_else(|| io::Error::other("no program named"))?;
    rustix::process::setsid()?;
    let mut word = [0];
    if io::stdin().read(&mut word)? == 0 {
        return Ok(());
    }
    // By hand and without root's rights it can't be done, and is no reason to serve nobody.
    let _ = oom::adjust(oom::OF_CONTROL_DAEMONS);
    let error = Command::new(&program).args(arguments).stdin(Stdio::null()).exec();
    Err(io::Error::new(error.kind(), format!("{}: {error}", program.display())))
}
