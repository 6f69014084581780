//! The reasons, in words, why the clients that a request means may still have GPU work.

use alloc::collections::BTreeMap;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

const NAMED: usize = 32;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WhyLeft {
    /// The service has not tried to end the client yet, or the client has just connected.
    AtWork,
    /// The client is stopped and can't be continued, for this reason.
    StaysStopped(String),
    /// The client's server handles a fatal GPU error and has several GPUs, so the client may work on a healthy GPU.
    Faulted {
        /// The PID of the server.
        server: u32,
    },
    /// The control daemon has not answered, so the client's work may or may not have ended.
    MayHaveEnded,
}

/// A client that a request means and that has work, or may have work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftClient<O> {
    pub pid: u32,
    /// The client and its owner, in words.
    pub owner: O,
    pub why: WhyLeft,
}

impl<O: fmt::Display> fmt::Display for LeftClient<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { owner, why, .. } = self;
        match why {
            WhyLeft::AtWork => write!(f, "{owner}"),
            WhyLeft::StaysStopped(why) => {
                write!(f, "{owner} (the stopped process can't be continued: {why})")
            }
            WhyLeft::Faulted { server } => write!(
                f,
                "{owner} (its server {server} handles a fatal GPU error, and the client may be at work on a healthy GPU)"
            ),
            WhyLeft::MayHaveEnded => {
                write!(
                    f,
                    "{owner} (the control daemon did not answer, so the GPU work of this client may have \
                     ended or not)"
                )
            }
        }
    }
}

/// The reason why clients that a request means may still have GPU work. The type `O` describes a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TerminationError<O> {
    /// Several containers have ids that begin with the id in the request. No work was ended.
    SeveralContainers {
        /// The beginning of a container's id, as the caller gave it.
        id: String,
        found: Vec<String>,
    },
    /// The process is no client of a control daemon on this host.
    NoSuchClient(u32),
    /// The process is no client of a control daemon on this host, or belongs to another user than the caller.
    NotTheirs {
        pid: u32,
        /// The user id of the caller.
        user: u32,
    },
    /// The service can't examine a process that the request may mean. The work of all other clients that the request means was
    /// ended.
    Unreadable {
        pid: u32,
        /// The reason why the service can't examine the process.
        why: String,
    },
    /// These clients use the GPUs of the request's slices, but their own slices are not known, so the request may mean them.
    /// The work of all other clients that the request means was ended.
    Unplaced(Vec<String>),
    /// A control daemon has not answered. The work of the clients of the other control daemons was ended.
    Silent {
        why: String,
        /// The clients that have work, or may have work.
        left: Vec<LeftClient<O>>,
    },
    /// The time of the request is over. The service has killed no process.
    OutOfTime {
        after: Duration,
        left: Vec<LeftClient<O>>,
        /// The reason why the service may have missed further clients with work. None if the service has missed no client.
        doubt: Option<String>,
    },
}

/// The first 32 texts, and the number of the other texts.
pub fn first_named(all: impl ExactSizeIterator<Item = String>) -> String {
    let more = all.len().saturating_sub(NAMED);
    let mut names: Vec<String> = all.take(NAMED).collect();
    if more > 0 {
        names.push(alloc::format!("and {more} more"));
    }
    names.join("; ")
}

fn named_clients<O: fmt::Display>(left: &[LeftClient<O>]) -> String {
    let by_pid: BTreeMap<u32, String> = left.iter().map(|one| (one.pid, one.to_string())).collect();
    first_named(by_pid.into_values())
}

impl<O: fmt::Display> fmt::Display for TerminationError<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SeveralContainers { id, found } => {
                write!(
                    f,
                    "{id} is the beginning of several container ids: {found}; give more digits",
                    found = found.join(", ")
                )
            }
            Self::NoSuchClient(pid) => {
                write!(
                    f,
                    "process {pid} is not an MPS client on this host; yunion-mpsctl clients lists the \
                     clients; a program with BYPASS in this list runs without MPS: end the program with kill"
                )
            }
            Self::NotTheirs { pid, user } => {
                write!(
                    f,
                    "no MPS client of user {user} on this host has PID {pid}; yunion-mpsctl clients lists the \
                     clients"
                )
            }
            Self::Unreadable { pid, why } => write!(f, "process {pid} can't be read in /proc: {why}"),
            Self::Unplaced(clients) => write!(
                f,
                "no process that is known to have these slices uses a GPU, but these clients may have one of \
                 the slices, and their GPU work goes on: {clients}; neither a mounted directory nor an \
                 environment variable names their slice (a variable does not count if its slice \
                 is bound to another control group); \
                 terminate these clients by PID or container before you end their processes",
                clients = first_named(clients.iter().cloned())
            ),
            Self::Silent { why, left } if left.is_empty() => f.write_str(why),
            Self::Silent { why, left } => {
                write!(
                    f,
                    "{why}; the GPU work of these clients may go on: {left}",
                    left = named_clients(left)
                )
            }
            Self::OutOfTime { after, left, doubt } if left.is_empty() => {
                let seconds = after.as_secs();
                write!(
                    f,
                    "after {seconds} s the service still has no list of the MPS clients, so their GPU work may \
                     go on"
                )?;
                doubt.as_ref().map_or(Ok(()), |doubt| write!(f, ": {doubt}"))
            }
            Self::OutOfTime { after, left, doubt } => {
                let seconds = after.as_secs();
                write!(
                    f,
                    "after {seconds} s the GPU work of these clients could not be ended: {left}; the \
                     service has sent no signal to them",
                    left = named_clients(left)
                )?;
                doubt.as_ref().map_or(Ok(()), |doubt| write!(f, "; there may be more clients: {doubt}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    const AFTER: Duration = Duration::from_secs(30);

    fn left(pid: u32, why: WhyLeft) -> LeftClient<String> {
        LeftClient { pid, owner: alloc::format!("PID {pid}"), why }
    }

    #[test]
    fn whoever_is_left_is_named() {
        let clients =
            vec![left(7, WhyLeft::AtWork), left(8, WhyLeft::MayHaveEnded), left(7, WhyLeft::AtWork)];
        let error =
            TerminationError::OutOfTime { after: AFTER, left: clients, doubt: Some("A hangs".to_string()) };
        assert_eq!(
            error.to_string(),
            "after 30 s the GPU work of these clients could not be ended: PID 7; PID 8 (the control daemon \
             did not answer, so the GPU work of this client may have ended or not); the service has sent \
             no signal to \
             them; there may be more clients: A hangs"
        );
        let error = TerminationError::<String>::OutOfTime { after: AFTER, left: Vec::new(), doubt: None };
        assert_eq!(
            error.to_string(),
            "after 30 s the service still has no list of the MPS clients, so their GPU work may go on"
        );
    }

    #[test]
    fn silence_names_whoever_may_be_at_work() {
        let silent = |left| TerminationError::Silent { why: "A hangs".to_string(), left }.to_string();
        assert_eq!(silent(Vec::new()), "A hangs");
        let words = "A hangs; the GPU work of these clients may go on: PID 7";
        assert_eq!(silent(vec![left(7, WhyLeft::AtWork)]), words);
    }

    #[test]
    fn the_words_are_bounded() {
        let many: Vec<_> = (0..40).map(|pid| left(pid, WhyLeft::AtWork)).collect();
        let words = TerminationError::OutOfTime { after: AFTER, left: many, doubt: None }.to_string();
        assert!(words.contains("PID 31; and 8 more; the service"), "{words}");
    }
}
