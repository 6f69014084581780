//! What a process is told apart by, as /proc/PID/stat has it.

use std::io;

use serde::{Deserialize, Serialize};

/// Which process, beyond doubt: PIDs are used again, a PID and a start time are not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The PID.
    pub pid: u32,
    /// When it started, in clock ticks since boot (field 22 of /proc/PID/stat).
    pub start_time: u64,
}

impl Identity {
    /// The identity of the process that has this PID now; an error when there is none.
    pub fn of(pid: u32) -> io::Result<Self> {
        let start_time = start_time(&stat(pid)?).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat is cut short"))
        })?;
        Ok(Self { pid, start_time })
    }
}

/// As much of a program's name as is shown.
const COMMAND_CHARACTERS: usize = 200;

/// The program of a process, by its file, or else by the name that the kernel keeps; empty when there is no such process.
/// A file may have any name: what could break a line or command a terminal is replaced.
pub fn command(pid: u32) -> String {
    let file = std::fs::read_link(format!("/proc/{pid}/exe")).map(|file| file.to_string_lossy().into_owned());
    let name = || {
        String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default()).into_owned()
    };
    let command = file.unwrap_or_else(|_| name());
    let printable = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    command.trim_end_matches('\n').chars().take(COMMAND_CHARACTERS).map(printable).collect()
}

/// /proc/PID/stat. A process gives itself any name it likes, which need not be text.
pub(super) fn stat(pid: u32) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/stat"))?).into_owned())
}

/// Field 22 of a stat line. The command in field 2 may hold spaces and brackets, so counting starts behind its last.
fn start_time(stat: &str) -> Option<u64> {
    let (_, behind_command) = stat.rsplit_once(')')?;
    behind_command.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// The state in a stat line.
pub(super) fn state_in(stat: &str) -> Option<&str> {
    stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_time_stands_behind_any_command() {
        let stat = "12 (a) (b c) S 1 12 12 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 98765 2000 1";
        assert_eq!(start_time(stat), Some(98765));
        assert_eq!(start_time("12 (cut"), None);
    }

    #[test]
    fn own_identity_is_stable() {
        let pid = std::process::id();
        assert_eq!(Identity::of(pid).unwrap(), Identity::of(pid).unwrap());
        assert!(Identity::of(pid).unwrap().start_time > 0);
    }
}
