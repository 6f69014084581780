//! The answers of the control daemon and their parsing.

use std::collections::{BTreeMap, BTreeSet};

use crate::host::driver::is_unknown_command;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServerStatus {
    Initializing,
    Active,
    /// The server met a fatal GPU error. It takes no client until the present clients are gone.
    Fault,
    Gone,
    /// The control daemon does not know the command.
    Unsupported,
}

/// Servers, each with the PIDs of its clients.
pub(crate) type ClientPids = BTreeMap<u32, BTreeSet<u32>>;

/// A connection of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Client {
    /// The client's PID on the host.
    pub pid: u32,
    /// The number that distinguishes the client's connections: a process that starts over gets another number. None if
    /// it is not known.
    pub id: Option<u64>,
    /// Its server's PID.
    pub server: u32,
    /// The beginning of its GPU's UUID. Empty if it is not known.
    pub gpu_prefix: String,
}

impl Client {
    /// Whether the client uses one of these GPUs.
    pub(crate) fn is_on<'a>(&self, mut uuids: impl Iterator<Item = &'a String>) -> bool {
        !self.gpu_prefix.is_empty() && uuids.any(|uuid| uuid.starts_with(&self.gpu_prefix))
    }
}

/// The result of the request to end a client's GPU work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Terminated {
    /// The client's GPU work has ended. The program gets CUDA error 810.
    Done,
    NoSuchClient,
    NoSuchServer,
}

/// A memory limit, set in MiB, in the form in which the control daemon reports it: in MiB below 1 GiB, otherwise in
/// whole GiB.
pub(super) fn memory_limit_as_read_back(mib: u64) -> String {
    if mib < 1024 { format!("{mib}M") } else { format!("{}G", mib / 1024) }
}

pub(super) fn parse_pids(answer: &str) -> Option<Vec<u32>> {
    answer.lines().map(str::trim).filter(|line| !line.is_empty()).map(|line| line.parse().ok()).collect()
}

/// The PIDs of a server's clients, and of the servers. A server that has gone has no clients.
pub(super) fn parse_client_list(answer: &str) -> Option<BTreeSet<u32>> {
    let first = answer.lines().next().unwrap_or_default().trim();
    let is_gone = first.starts_with("Server") && first.ends_with("not found");
    if is_gone { Some(BTreeSet::new()) } else { Some(parse_pids(answer)?.into_iter().collect()) }
}

/// The servers, and which of `asked` are in FAULT, in an answer with the status of each of `asked` and the list of servers.
/// A control daemon that does not know the first command says so instead.
pub(super) fn parse_servers_and_faults(answer: &str, asked: &[u32]) -> Option<(Vec<u32>, Vec<u32>)> {
    let lines = answer.lines().map(str::trim).filter(|line| !line.is_empty());
    let (pids, statuses): (Vec<&str>, Vec<&str>) = lines.partition(|line| line.parse::<u32>().is_ok());
    let statuses: Vec<ServerStatus> = statuses.into_iter().map(parse_status).collect::<Option<_>>()?;
    if statuses.len() != asked.len() {
        return None;
    }
    let faulted = asked.iter().zip(statuses).filter(|(_, status)| *status == ServerStatus::Fault);
    Some((parse_pids(&pids.join("\n"))?, faulted.map(|(pid, _)| *pid).collect()))
}

pub(super) fn parse_status(answer: &str) -> Option<ServerStatus> {
    match answer.trim() {
        "INITIALIZING" => Some(ServerStatus::Initializing),
        "ACTIVE" => Some(ServerStatus::Active),
        "FAULT" => Some(ServerStatus::Fault),
        other if other.starts_with("Server") && other.ends_with("not found") => Some(ServerStatus::Gone),
        other if is_unknown_command(other) => Some(ServerStatus::Unsupported),
        _ => None,
    }
}

/// The answer is a line `0`, or a reason and a line `1`.
pub(super) fn parse_terminated(answer: &str) -> Option<Terminated> {
    let mut lines = answer.lines().map(str::trim).filter(|line| !line.is_empty());
    let reason = lines.next()?;
    match (reason, lines.next_back()) {
        ("0", None) => Some(Terminated::Done),
        (reason, Some("1")) if reason.starts_with("Invalid process") => Some(Terminated::NoSuchClient),
        (reason, Some("1")) if reason.starts_with("Server") && reason.contains("not found") => {
            Some(Terminated::NoSuchServer)
        }
        _ => None,
    }
}

pub(super) fn parse_clients(answer: &str) -> Option<Vec<Client>> {
    let mut lines = answer.lines().filter(|line| !line.trim().is_empty());
    match lines.next() {
        // An empty answer or `Server not found` means that there is no server, so there is no client.
        None => return Some(Vec::new()),
        Some(first) if first.trim() == "Server not found" => return Some(Vec::new()),
        Some(header)
            if header.split_whitespace().eq(["PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND"]) => {}
        Some(_) => return None,
    }
    // A line that is no row is the rest of a program's name with a line break in it.
    Some(lines.filter_map(parse_client).collect())
}

/// A row of `ps`, up to the GPU. The tenant can choose the rest of the row.
fn parse_client(line: &str) -> Option<Client> {
    let mut fields = line.split_whitespace();
    let pid = fields.next()?.parse().ok()?;
    let id = Some(fields.next()?.parse().ok()?);
    let server = fields.next()?.parse().ok()?;
    let gpu_prefix = fields.next()?.to_owned();
    Some(Client { pid, id, server, gpu_prefix })
}

/// The differences in an answer that has one line for the percentage and one for the memory limit of each GPU.
pub(super) fn differences(answer: &str, percentage: u8, memory_mib: &BTreeMap<usize, u64>) -> Vec<String> {
    let mut lines = answer.lines().map(|line| shorten(line.trim()));
    let said = lines.next().unwrap_or_default();
    if said.starts_with("Server") || is_unknown_command(&said) {
        return Vec::new();
    }
    let mut found = Vec::new();
    if !is_percentage(&said, percentage) {
        found.push(format!("active thread percentage {said} instead of {percentage}"));
    }
    let limits: Vec<String> = lines.collect();
    if limits.len() == memory_mib.len() {
        let differing = memory_mib
            .iter()
            .zip(limits)
            .filter(|((_, mib), said)| *said != memory_limit_as_read_back(**mib));
        found.extend(differing.map(|((ordinal, mib), said)| {
            format!("device pinned memory limit {said} instead of {mib} MiB on device {ordinal}")
        }));
    } else {
        // The control daemon answers nothing for a limit that is not set.
        found.push("no device pinned memory limit on some device".to_owned());
    }
    found
}

pub(super) fn is_percentage(said: &str, percentage: u8) -> bool {
    said.trim().parse().is_ok_and(|value: f64| (value - f64::from(percentage)).abs() < 0.05)
}

/// The beginning of a line of an answer, for a message.
fn shorten(line: &str) -> String {
    line.chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::error::unexpected;
    use super::*;

    // Control daemons of drivers 535, 550, 555 and 580 gave the answers below.

    #[test]
    fn server_lists() {
        assert_eq!(parse_pids(""), Some(vec![]));
        assert_eq!(parse_pids("939\n944"), Some(vec![939, 944]));
        assert_eq!(parse_pids("Unknown command \"get_server_list\""), None);
    }

    #[test]
    fn server_statuses() {
        assert_eq!(parse_status("ACTIVE"), Some(ServerStatus::Active));
        assert_eq!(parse_status("INITIALIZING"), Some(ServerStatus::Initializing));
        assert_eq!(parse_status("FAULT"), Some(ServerStatus::Fault));
        assert_eq!(parse_status("Server 1 not found"), Some(ServerStatus::Gone));
        assert_eq!(parse_status("Unknown command \"get_server_status\""), Some(ServerStatus::Unsupported));
        assert_eq!(parse_status("garbage"), None);
    }

    #[test]
    fn servers_with_their_statuses() {
        let parsed = |answer, asked: &[u32]| parse_servers_and_faults(answer, asked);
        assert_eq!(parsed("ACTIVE\n939", &[939]), Some((vec![939], vec![])));
        assert_eq!(parsed("ACTIVE\nFAULT\n939\n944", &[939, 944]), Some((vec![939, 944], vec![944])));
        assert_eq!(parsed("Server 7 not found\n939", &[7]), Some((vec![939], vec![])));
        let unknown = "Unknown command \"get_server_status\"\n939";
        assert_eq!(parsed(unknown, &[939]), Some((vec![939], vec![])));
        // The conversation was cut off, or somebody else answers.
        assert_eq!(parsed("939", &[939]), None);
        assert_eq!(parsed("ACTIVE\ngarbage", &[939]), None);
    }

    #[test]
    fn client_tables() {
        assert_eq!(parse_clients("Server not found"), Some(vec![]));
        assert_eq!(parse_clients(""), Some(vec![]));
        let table = "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        \n\
                     1153      33        939            GPU-168acfc9-c926-5401    4026531836     /tmp/work      ";
        let client =
            Client { pid: 1153, id: Some(33), server: 939, gpu_prefix: "GPU-168acfc9-c926-5401".to_owned() };
        assert_eq!(parse_clients(table), Some(vec![client]));
        let blank = "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        \n\
            3523      1         3526           GPU-76aef7ff-372d-2432                   cuda-client    ";
        let pids = |table: &str| parse_clients(table).map(|all| all.iter().map(|one| one.pid).collect());
        assert_eq!(pids(blank), Some(vec![3523]));
        let broken = format!("{blank}\nb/c\n3524 2 3526 GPU-76aef7ff-372d-2432 4026531836 other");
        assert_eq!(pids(&broken), Some(vec![3523, 3524]));
        assert_eq!(pids("PID ID SERVER DEVICE NAMESPACE COMMAND\nx 1 2 G 3 c"), Some(vec![]));
        assert_eq!(pids("garbage"), None);
    }

    #[test]
    fn client_lists() {
        assert_eq!(parse_client_list(""), Some(BTreeSet::new()));
        assert_eq!(parse_client_list("1153\n1154\n1153"), Some(BTreeSet::from([1153, 1154])));
        assert_eq!(parse_client_list("Server 1 not found"), Some(BTreeSet::new()));
        assert_eq!(parse_client_list("Unknown command \"get_client_list\""), None);
    }

    #[test]
    fn a_client_without_a_gpu_is_on_none() {
        let on = |gpu_prefix: &str| {
            Client { pid: 1, id: None, server: 2, gpu_prefix: gpu_prefix.to_owned() }
                .is_on([&"GPU-76aef7ff-372d".to_owned()].into_iter())
        };
        assert!(on("GPU-76aef7ff") && !on("GPU-86") && !on(""));
    }

    #[test]
    fn terminated_clients() {
        assert_eq!(parse_terminated("0"), Some(Terminated::Done));
        assert_eq!(parse_terminated("Invalid process 99999!\n1"), Some(Terminated::NoSuchClient));
        assert_eq!(parse_terminated("Server 1 not found!\n1"), Some(Terminated::NoSuchServer));
        for other in ["", "1", "00", "0\n1", "Unknown command \"terminate_client\"", "Invalid process 1!\n0"]
        {
            assert_eq!(parse_terminated(other), None, "{other:?}");
        }
    }

    #[test]
    fn limits_read_back_floored_to_gib() {
        for (mib, expected) in [(512, "512M"), (1023, "1023M"), (1024, "1G"), (5760, "5G"), (35942, "35G")] {
            assert_eq!(memory_limit_as_read_back(mib), expected);
        }
    }

    #[test]
    fn limits_that_differ_are_described() {
        let memory = BTreeMap::from([(0, 35942), (1, 512)]);
        let found = |answer: &str| differences(answer, 25, &memory);
        assert_eq!(found("25.0\n35G\n512M"), Vec::<String>::new());
        assert_eq!(
            found("7.0\n1G\n512M"),
            [
                "active thread percentage 7.0 instead of 25",
                "device pinned memory limit 1G instead of 35942 MiB on device 0"
            ]
        );
        assert_eq!(found("25.0\n35G"), ["no device pinned memory limit on some device"]);
        assert_eq!(found("Server 1 not found\nServer 1 not found\nServer 1 not found"), Vec::<String>::new());
        assert_eq!(found("Unknown command \"get_active_thread_percentage\""), Vec::<String>::new());
        assert_eq!(found(&"x".repeat(9999))[0].len(), "active thread percentage  instead of 25".len() + 40);
    }

    proptest! {
        #[test]
        fn no_answer_makes_the_parsers_panic(answer in "\\PC{0,300}(\n\\PC{0,80}){0,5}") {
            let _ = (parse_pids(&answer), parse_status(&answer), parse_clients(&answer));
            let _ = (parse_terminated(&answer), parse_client_list(&answer));
            let _ = unexpected("ps", &answer, "").to_string();
        }
    }
}
