//! A signal that a container runtime is about to send to a container. Clients that the signal may end lose their GPU work
//! before the signal is sent. Otherwise the end of a client at work could cause a fatal GPU error for other clients.

use alloc::string::String;

use super::termination_shell::{Reception, TerminationShell};

const SIGINT: u32 = 2;
const SIGQUIT: u32 = 3;
const SIGKILL: u32 = 9;
const SIGTERM: u32 = 15;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stop {
    /// The path of the container's control group.
    pub group: String,
    /// The PID of the container's first process.
    pub first: u32,
    pub signal: u32,
    /// True if every process of the container gets the signal. False if only the first process gets the signal.
    pub to_all: bool,
}

impl Stop {
    /// Returns whether a control group is the container's control group, or a descendant of it.
    pub fn has(&self, group: &str) -> bool {
        group.strip_prefix(self.group.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// Returns whether the signal may end a process of the container. The error says why the signal's effect can't be read.
    pub(super) async fn may_end<T: TerminationShell>(&self, shell: &mut T, pid: u32) -> Result<bool, String> {
        match self.signal {
            SIGKILL => Ok(true),
            SIGTERM | SIGINT | SIGQUIT => {
                let program = shell.reception(pid, self.signal).await?;
                let is_first = self.to_all || pid == self.first;
                let first = if is_first { program } else { shell.reception(self.first, self.signal).await? };
                // Without `to_all`, only the first process gets the signal. If the first process ignores the signal, no process
                // ends. Otherwise the first process passes the signal on, or ends, and then all other processes end too. If
                // `first` is None, the first process has ended.
                Ok(program == Some(Reception::Fatal) && first != Some(Reception::Ignored))
            }
            _ => Ok(false),
        }
    }
}
