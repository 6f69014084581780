//! The last step before a process becomes the control daemon.
//!
//! The service starts its own program as `yunion-mps-daemon launch-control CPUS PROGRAM ARGS...`. The new process leaves the
//! service's session, waits for a byte on its standard input, and then becomes PROGRAM with the same PID. So the
//! service knows the PID, and can record it and pass it on, before PROGRAM runs. If the service dies first, the input
//! ends and the new process ends without starting PROGRAM.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::host::cpus::Cpus;
use crate::host::oom;

/// The first argument, which selects this step.
pub(crate) const ARGUMENT: &str = "launch-control";

/// Waits for the byte and becomes the program that `arguments` name behind a list of CPUs. The program and all that it
/// starts are bound to these CPUs, and to none if the list is empty. It returns an error if it can't, and Ok if the
/// input ends without a byte.
pub(crate) fn become_program(mut arguments: impl Iterator<Item = OsString>) -> io::Result<()> {
    let cpus = arguments.next().and_then(|list| Cpus::parse(list.to_str()?));
    let program = arguments.next().ok_or_else(|| io::Error::other("no program named"))?;
    rustix::process::setsid()?;
    let mut word = [0];
    if io::stdin().read(&mut word)? == 0 {
        return Ok(());
    }
    // This fails if the service runs without root's rights. The control daemon serves nevertheless.
    let _ = oom::adjust(oom::OF_CONTROL_DAEMONS);
    // Not earlier: this process may be in another control group now, with other CPUs. If this fails, the control daemon
    // serves on all CPUs, and the service shows that.
    let _ = cpus.map(Cpus::bind);
    let error = Command::new(&program).args(arguments).stdin(Stdio::null()).exec();
    Err(io::Error::new(error.kind(), format!("{}: {error}", program.display())))
}
