//! The simulated front end. It passes commands from stdin to the control daemon, and the answers of the control daemon to
//! stdout.

use std::io::{self, BufRead, Write};

use super::wire::{self, Hello};
use crate::state::Host;

/// Runs the front end, and returns the exit status. The exit status is 1 if no control daemon listens or the control daemon
/// handles no more commands. A command that the control daemon refuses does not change the exit status.
pub(super) fn run(host: &Host) -> u8 {
    if host.fault("front-end-hangs").is_some() {
        loop {
            std::thread::park();
        }
    }
    let directory = super::pipe_directory();
    let connected = ["control_privileged", "control"].map(|socket| directory.join(socket));
    // If the socket `control` does not exist, a real front end does not try the socket `control_privileged` either.
    let connected = if directory.join("control").exists() { &connected[..] } else { &[] };
    let connected = connected.iter().find_map(|socket| wire::connect(socket).ok());
    let hello = connected
        .ok_or(io::ErrorKind::NotFound.into())
        .and_then(|control| wire::send(&control, &Hello::FrontEnd).map(|()| control));
    let Ok(control) = hello else {
        _ = writeln!(io::stderr(), "Cannot find MPS control daemon process");
        return 1;
    };
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        if host.fault("front-end-garbage").is_some() {
            _ = io::stdout().write_all(b"\x00\xff\xfe garbage \x1b[2J\n");
            continue;
        }
        if wire::send(&control, &line).is_err() {
            break;
        }
        match wire::receive::<Option<String>>(&control) {
            Some(Some(answer)) => _ = io::stdout().write_all(answer.as_bytes()),
            Some(None) => {
                _ = writeln!(io::stderr(), "Cannot send command to MPS control daemon process");
                return 1;
            }
            None => break,
        }
    }
    wire::part(&control);
    0
}
